// Failures on request: which call meets a fault, what it throws or loses, and that it has no other effect.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "gate.hpp"
#include "hbmoff/device/fault_injection.hpp"
#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

using Stream = HostDevice::Stream;
using Event = HostDevice::Event;

namespace {

/// A device, and every call on it by kind.
struct Program {
  struct Call {
    CallKind kind;
    std::string api;
    std::function<void(std::source_location)> make;
  };

  HostDevice device{{.hbm_capacity = 1_MiB}};
  Stream stream = device.create_stream("compute"), other = device.create_stream("other");
  Event event = device.create_event(), done = device.create_event(EventTiming::timed);
  device_span<std::byte> hbm = device.allocate_device(4_KiB);
  pinned_span<std::byte> host = device.allocate_pinned(4_KiB);
  std::vector<Call> calls;

  Program() {
    using At = std::source_location;
    device.record(event, stream);
    device.record(done, stream);
    device.synchronize(stream);
    const auto add = [&](CallKind kind, const char* api, auto make) { calls.push_back({kind, api, make}); };
    add(CallKind::allocation, "allocate_device",
        [this](At at) { device.free_device(device.allocate_device(4_KiB, at)); });
    add(CallKind::pinning, "allocate_pinned", [this](At at) { device.free_pinned(device.allocate_pinned(4_KiB, at)); });
    add(CallKind::copy, "copy_async", [this](At at) { device.copy_async(hbm, host, stream, at); });
    add(CallKind::copy, "copy_async", [this](At at) { device.copy_async(host, hbm, stream, at); });
    add(CallKind::copy, "copy_async", [this](At at) { device.copy_async(hbm, hbm, stream, at); });
    add(CallKind::copy, "fill_async", [this](At at) { device.fill_async(hbm, std::byte{1}, stream, at); });
    add(CallKind::kernel, "enqueue", [this](At at) { device.enqueue(stream, [] {}, {}, at); });
    add(CallKind::host_function, "host_func", [this](At at) { device.host_func(stream, [] {}, at); });
    add(CallKind::event, "create_event",
        [this](At at) { const Event created = device.create_event(EventTiming::none, at); });
    add(CallKind::stream, "create_stream", [this](At at) { const Stream created = device.create_stream("new", at); });
    add(CallKind::ordering, "record", [this](At at) { device.record(event, stream, at); });
    add(CallKind::ordering, "wait", [this](At at) { device.wait(other, event, at); });
    add(CallKind::waiting, "query", [this](At at) { static_cast<void>(device.query(event, at)); });
    add(CallKind::waiting, "synchronize", [this](At at) { device.synchronize(event, at); });
    add(CallKind::waiting, "synchronize", [this](At at) { device.synchronize(stream, at); });
    add(CallKind::waiting, "elapsed", [this](At at) { static_cast<void>(device.elapsed(done, done, at)); });
  }
  ~Program() {
    device.clear_fault();
    device.free_device(hbm);
    device.free_pinned(host);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
};

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace

TEST_CASE("sets of call kinds") {
  constexpr CallKinds none, two{CallKind::copy, CallKind::waiting};
  static_assert(none.empty());
  static_assert(!two.empty());
  static_assert(two.contains(CallKind::copy) && two.contains(CallKind::waiting) && !two.contains(CallKind::kernel));
  static_assert(two.is_within(CallKinds::any()) && !CallKinds::any().is_within(two));
  static_assert(none.is_within(two) && !two.is_within(CallKind::copy));
  static_assert(CallKinds{CallKind::copy} == CallKinds{CallKind::copy, CallKind::copy});
  static_assert(CallKinds{CallKind::allocation}.bits() == 1);
  static_assert(CallKinds::any().contains(CallKind::waiting) && CallKinds::any().bits() == 0x1ff);
}

TEST_CASE("every call counts for its kind, and only the next of the kind meets the fault") {
  Program program;
  HostDevice& device = program.device;
  for (std::uint32_t k = 0; k < call_kind_count; ++k) {
    const auto kind = static_cast<CallKind>(k);
    CAPTURE(k);
    const std::uint64_t all_before = device.calls_made(), before = device.calls_made(kind);
    device.inject({.kinds = kind, .reason = "as the test asks"});
    std::uint64_t made = 0, failures = 0;
    for (const Program::Call& call : program.calls) {
      const auto at = std::source_location::current();
      const auto error = thrown_by<DeviceError>([&] { call.make(at); });
      if (call.kind == kind) ++made;
      REQUIRE_MESSAGE(error.has_value() == (call.kind == kind && made == 1), call.api);
      if (!error) continue;
      ++failures;
      CHECK(error->kind() == DeviceError::Kind::call_failed);
      CHECK_FALSE(error->context_lost());
      CHECK(error->api() == call.api);
      CHECK(error->where().line() == at.line());
      CHECK(std::string_view{error->where().file_name()} == at.file_name());
      CHECK(std::string{error->what()} ==
            call.api + " (" + at.file_name() + ":" + std::to_string(at.line()) + "): as the test asks");
      CHECK_FALSE(device.clear_fault());  // it has happened
    }
    CHECK(failures == 1);
    CHECK(made > 0);
    CHECK(device.calls_made(kind) - before == made);
    CHECK(device.calls_made() - all_before == program.calls.size());
  }
  CHECK(device.calls_made(CallKinds{}) == 0);
  CHECK(device.calls_made({CallKind::event, CallKind::stream}) ==
        device.calls_made(CallKind::event) + device.calls_made(CallKind::stream));
  CHECK_FALSE(device.lost());
}

TEST_CASE("the n-th call of the kinds fails, counted from the injection on") {
  Program program;
  HostDevice& device = program.device;
  const Stream& stream = program.stream;
  const auto fails = [](auto&& call) { return thrown_by<DeviceError>(call).has_value(); };
  device.inject({.kinds = {CallKind::kernel, CallKind::host_function}, .nth = 3});
  CHECK_FALSE(fails([&] { device.enqueue(stream, [] {}); }));
  CHECK_FALSE(fails([&] { device.synchronize(stream); }));
  CHECK_FALSE(fails([&] { device.host_func(stream, [] {}); }));
  CHECK_FALSE(fails([&] { device.fill_async(program.hbm, std::byte{1}, stream); }));
  CHECK(fails([&] { device.enqueue(stream, [] {}); }));
  CHECK_FALSE(fails([&] { device.enqueue(stream, [] {}); }));

  // A later injection takes the place of the one before; none is left by 0 or clear_fault().
  device.inject({.kinds = CallKind::waiting});
  device.inject({.kinds = CallKind::waiting, .nth = 2});
  CHECK_FALSE(fails([&] { device.synchronize(stream); }));
  CHECK(fails([&] { device.synchronize(stream); }));
  device.inject({.kinds = CallKind::waiting});
  device.inject({.nth = 0});
  CHECK_FALSE(device.clear_fault());
  CHECK_FALSE(fails([&] { device.synchronize(stream); }));
  device.inject({.kinds = CallKind::waiting, .nth = std::numeric_limits<std::uint64_t>::max()});
  CHECK_FALSE(fails([&] { device.synchronize(stream); }));
  CHECK(device.clear_fault());
  CHECK_FALSE(device.clear_fault());

  // fail_call is the fault with everything left to its default.
  for (const bool by_injection : {true, false}) {
    if (by_injection) {
      device.inject({});
    } else {
      device.fail_call(1);
    }
    const auto error = thrown_by<DeviceError>([&] { device.synchronize(stream); });
    REQUIRE(error);
    CHECK(contains(error->what(), "): failed on request"));
  }
}

TEST_CASE("a fault that its calls cannot meet is refused, and what is armed stays") {
  Program program;
  HostDevice& device = program.device;
  device.inject({.kinds = CallKind::event});
  CHECK_THROWS_AS(device.inject({.kinds = {}}), InvalidArgument);
  for (std::uint32_t k = 0; k < call_kind_count; ++k) {
    const auto kind = static_cast<CallKind>(k);
    CAPTURE(k);
    const bool allocates = kind == CallKind::allocation || kind == CallKind::pinning;
    const bool works = kind == CallKind::copy || kind == CallKind::kernel || kind == CallKind::host_function;
    if (!allocates) {
      CHECK_THROWS_AS(device.inject({.kinds = kind, .outcome = FaultOutcome::out_of_memory}), InvalidArgument);
      CHECK_THROWS_AS(device.inject({.kinds = {kind, CallKind::allocation}, .outcome = FaultOutcome::out_of_memory}),
                      InvalidArgument);
    }
    if (!works) {
      CHECK_THROWS_AS(device.inject({.kinds = kind, .outcome = FaultOutcome::work_failed}), InvalidArgument);
    }
  }
  CHECK_THROWS_AS(device.inject({.outcome = FaultOutcome::out_of_memory}), InvalidArgument);
  CHECK_THROWS_AS(device.inject({.outcome = FaultOutcome::work_failed}), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(device.create_event()), DeviceError);
}

TEST_CASE("a call that fails has no effect, and the device goes on") {
  Program program;
  HostDevice& device = program.device;
  const Stream &stream = program.stream, &other = program.other;
  const Event event = device.create_event();
  const auto hbm = program.hbm;
  const auto host = program.host;
  const auto fails = [&](CallKind kind, auto&& call) {
    device.inject({.kinds = kind});
    CHECK_THROWS_AS(call(), DeviceError);
  };
  const Bytes free = device.memory_info().free;
  fails(CallKind::allocation, [&] { static_cast<void>(device.allocate_device(free)); });
  CHECK(device.memory_info().free == free);
  fails(CallKind::pinning, [&] { static_cast<void>(device.allocate_pinned(4_KiB)); });

  bool ran = false;
  device.fill_async(hbm, std::byte{1}, stream);
  host[0] = std::byte{2};
  fails(CallKind::copy, [&] { device.copy_async(hbm, host, stream); });
  fails(CallKind::copy, [&] { device.fill_async(hbm, std::byte{3}, stream); });
  fails(CallKind::kernel, [&] { device.enqueue(stream, [&] { ran = true; }); });
  fails(CallKind::host_function, [&] { device.host_func(stream, [&] { ran = true; }); });
  device.copy_async(host, hbm, stream);
  device.synchronize(stream);
  CHECK(host[0] == std::byte{1});
  CHECK_FALSE(ran);

  Gate gate;
  device.enqueue(stream, gate.pass());
  fails(CallKind::ordering, [&] { device.record(event, stream); });
  CHECK(device.query(event));  // still never recorded
  device.record(event, stream);
  fails(CallKind::ordering, [&] { device.wait(other, event); });
  device.synchronize(other);  // which waits for nothing
  fails(CallKind::waiting, [&] { device.synchronize(stream); });  // and does not wait
  CHECK_FALSE(device.query(event));
  gate.open();
  device.synchronize(event);
}

TEST_CASE("memory runs out on request: the tier, the bytes and the call, and nothing is taken") {
  Program program;
  HostDevice& device = program.device;
  const Bytes free = device.memory_info().free;
  device.inject({.kinds = {CallKind::allocation, CallKind::pinning}, .outcome = FaultOutcome::out_of_memory});
  device.synchronize(program.stream);
  const auto error = thrown_by<OutOfMemory>([&] { static_cast<void>(device.allocate_device(5_KiB)); });
  REQUIRE(error);
  CHECK(error->details().tier == Tier::hbm);
  CHECK(error->details().what_for == "allocate_device");
  CHECK(error->details().requested == 5_KiB);
  CHECK(error->details().capacity == 1_MiB);
  CHECK(error->details().free == Bytes{});
  CHECK(error->details().largest_free == Bytes{});
  CHECK(error->details().remedy == "failed on request");
  CHECK(device.memory_info().free == free);
  device.free_device(device.allocate_device(free));  // once only

  device.inject({.kinds = CallKind::pinning,
                 .nth = 2,
                 .outcome = FaultOutcome::out_of_memory,
                 .reason = "locked memory is at its limit"});
  device.free_device(device.allocate_device(1_KiB));
  device.free_pinned(device.allocate_pinned(1_KiB));
  const auto pinning = thrown_by<OutOfMemory>([&] { static_cast<void>(device.allocate_pinned(6_KiB)); });
  REQUIRE(pinning);
  CHECK(pinning->details().tier == Tier::pinned_host);
  CHECK(pinning->details().what_for == "allocate_pinned");
  CHECK(pinning->details().requested == 6_KiB);
  CHECK(pinning->details().capacity == detail::machine_memory());
  CHECK(pinning->details().remedy == "locked memory is at its limit");
  CHECK(contains(pinning->what(), "locked memory is at its limit"));
  device.free_pinned(device.allocate_pinned(6_KiB));
  CHECK_FALSE(device.lost());
}

TEST_CASE("work fails on request: the call returns, the context is lost when the work's turn comes, and stays lost") {
  using At = std::source_location;
  struct Work {
    const char* name;
    CallKind kind;
    std::function<void(Program&, At)> queue;
  };
  static bool ran = false;
  const Work works[] = {
      {"copy_async", CallKind::copy, [](Program& p, At at) { p.device.copy_async(p.hbm, p.host, p.stream, at); }},
      {"copy_async", CallKind::copy, [](Program& p, At at) { p.device.copy_async(p.host, p.hbm, p.stream, at); }},
      {"copy_async", CallKind::copy,
       [](Program& p, At at) { p.device.copy_async(p.hbm.subspan(0, 0), p.host.subspan(0, 0), p.stream, at); }},
      {"fill_async", CallKind::copy, [](Program& p, At at) { p.device.fill_async(p.hbm, std::byte{1}, p.stream, at); }},
      {"fill_async", CallKind::copy, [](Program& p, At at) { p.device.fill_async({}, std::byte{1}, p.stream, at); }},
      {"gelu", CallKind::kernel,
       [](Program& p, At at) { p.device.enqueue(p.stream, [] { ran = true; }, {.name = "gelu"}, at); }},
      {"host_func", CallKind::host_function,
       [](Program& p, At at) { p.device.host_func(p.stream, [] { ran = true; }, at); }},
  };
  for (const Work& work : works) {
    CAPTURE(work.name);
    Program program;
    HostDevice& device = program.device;
    ran = false;
    Gate gate;
    bool before = false;
    device.enqueue(program.stream, [&before, pass = gate.pass()] { before = (pass(), true); });
    device.inject({.kinds = work.kind, .outcome = FaultOutcome::work_failed, .reason = "an uncorrectable error"});
    const auto at = At::current();
    work.queue(program, at);
    CHECK_FALSE(device.lost());  // it waits for its turn
    CHECK_FALSE(device.clear_fault());
    gate.open();
    while (!device.lost()) std::this_thread::yield();
    for (int again = 0; again < 2; ++again) {
      for (const Program::Call& call : program.calls) {
        const auto error = thrown_by<DeviceError>([&] { call.make(At::current()); });
        REQUIRE_MESSAGE(error, call.api);
        CHECK(error->context_lost());
        CHECK(error->api() == call.api);
        for (const std::string& part :
             {"'" + std::string{work.name} + "' put on stream 'compute'", std::string{": an uncorrectable error"},
              std::string{at.file_name()} + ":" + std::to_string(at.line())}) {
          CHECK_MESSAGE(contains(error->what(), part), part << " in " << error->what());
        }
      }
    }
    CHECK(before);
    CHECK_FALSE(ran);
  }
}

TEST_CASE("work that is to fail fails where memory is addresses only, and not once the context is lost") {
  HostDevice device{{.hbm_capacity = 1_MiB, .no_touch = true}};
  const Stream stream = device.create_stream("compute"), other = device.create_stream("other");
  Gate gate;
  device.host_func(stream, gate.pass());
  device.host_func(other, gate.pass());
  device.inject({.kinds = CallKind::kernel, .outcome = FaultOutcome::work_failed, .reason = "first"});
  device.enqueue(stream, [] {}, {.name = "gelu"});
  device.inject({.kinds = CallKind::kernel, .outcome = FaultOutcome::work_failed, .reason = "second"});
  device.enqueue(stream, [] {}, {.name = "norm"});
  gate.open();
  const auto error = thrown_by<DeviceError>([&] { device.synchronize(stream); });
  REQUIRE(error);
  CHECK(contains(error->what(), "'gelu'"));
  CHECK(contains(error->what(), ": first"));
}

TEST_CASE("of calls from many threads exactly one meets the fault, and all are counted") {
  HostDevice device;
  const Stream stream = device.create_stream();
  constexpr std::uint64_t threads = 4, calls = 200;
  for (const std::uint64_t nth : {std::uint64_t{1}, threads * calls / 2, threads * calls, threads * calls + 1}) {
    CAPTURE(nth);
    const std::uint64_t before = device.calls_made(CallKind::waiting);
    device.inject({.kinds = CallKind::waiting, .nth = nth});
    std::atomic<std::uint64_t> failures{0};
    std::vector<std::thread> callers;
    for (std::uint64_t t = 0; t < threads; ++t) {
      callers.emplace_back([&] {
        for (std::uint64_t i = 0; i < calls; ++i) {
          if (thrown_by<DeviceError>([&] { device.synchronize(stream); })) ++failures;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(failures == (nth <= threads * calls ? 1 : 0));
    CHECK(device.calls_made(CallKind::waiting) - before == threads * calls);
    CHECK(device.clear_fault() == (nth > threads * calls));
  }
}
