// Errors of HostDevice: a lost context surfaces at every call and stays; a failed call has no effect.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

using Stream = HostDevice::Stream;
using Event = HostDevice::Event;

TEST_CASE("what work throws surfaces at every later call, names the work, and stays") {
  HostDevice device{{.hbm_capacity = 1_MiB}};
  std::optional<Stream> a = device.create_stream("compute"), b = device.create_stream("other");
  std::optional<Event> event = device.create_event(EventTiming::timed);
  const auto hbm = device.allocate_device(4_KiB);
  const auto host = device.allocate_pinned(4_KiB);
  const auto witness = std::make_shared<int>(0);
  Gate gate;
  device.record(*event, *a);
  device.enqueue(*a, gate.pass());
  const auto work_site = std::source_location::current();
  device.enqueue(*a, [] { throw std::runtime_error{"index 17 of 5"}; }, {.name = "gather"}, work_site);
  device.enqueue(*a, [witness] { ++*witness; });
  device.copy_async(host, hbm, *a);
  device.record(*event, *a);
  device.wait(*b, *event);  // work on other streams is dropped as well, and nobody hangs
  device.enqueue(*b, [witness] { ++*witness; }, {.modelled_time = 1h});
  device.host_func(*b, [witness] { ++*witness; });
  device.fill_async(hbm, std::byte{1}, *b);
  CHECK_FALSE(device.lost());
  gate.open();

  const auto call_site = std::source_location::current();
  const auto first = thrown_by<DeviceError>([&] { device.synchronize(*b, call_site); });
  REQUIRE(first);
  CHECK(first->context_lost());
  CHECK(first->kind() == DeviceError::Kind::context_lost);
  CHECK(first->api() == "synchronize");
  CHECK(std::string_view{first->where().file_name()} == call_site.file_name());
  CHECK(first->where().line() == call_site.line());
  const std::string message = first->what();
  const std::string work_at = work_site.file_name() + (":" + std::to_string(work_site.line()));
  for (const std::string& part : {std::string{"context is lost"}, std::string{"'gather'"}, std::string{"'compute'"},
                                  std::string{"index 17 of 5"}, work_at}) {
    CHECK_MESSAGE(message.find(part) != std::string::npos, part << " in " << message);
  }
  CHECK(device.lost());

  const auto surfaces = [&](const char* api, auto&& call) {
    for (int again = 0; again < 2; ++again) {
      const auto error = thrown_by<DeviceError>(call);
      REQUIRE_MESSAGE(error, api);
      CHECK(error->context_lost());
      CHECK(error->api() == api);
    }
  };
  surfaces("create_stream", [&] { const Stream stream = device.create_stream(); });
  surfaces("create_event", [&] { const Event e = device.create_event(); });
  surfaces("allocate_device", [&] { static_cast<void>(device.allocate_device(1_KiB)); });
  surfaces("allocate_pinned", [&] { static_cast<void>(device.allocate_pinned(1_KiB)); });
  surfaces("copy_async", [&] { device.copy_async(hbm, host, *a); });
  surfaces("copy_async", [&] { device.copy_async(host, hbm, *a); });
  surfaces("copy_async", [&] { device.copy_async(hbm, hbm, *a); });
  surfaces("fill_async", [&] { device.fill_async(hbm, std::byte{}, *a); });
  surfaces("record", [&] { device.record(*event, *a); });
  surfaces("wait", [&] { device.wait(*a, *event); });
  surfaces("query", [&] { static_cast<void>(device.query(*event)); });
  surfaces("synchronize", [&] { device.synchronize(*event); });
  surfaces("synchronize", [&] { device.synchronize(*a); });
  surfaces("elapsed", [&] { static_cast<void>(device.elapsed(*event, *event)); });
  surfaces("host_func", [&] { device.host_func(*a, [] {}); });
  surfaces("enqueue", [&] { device.enqueue(*a, [] {}); });

  // Giving back stays silent, and so does what was dropped.
  device.free_device(hbm);
  device.free_pinned(host);
  CHECK(device.memory_info().free == 1_MiB);
  a.reset(), b.reset(), event.reset();
  CHECK(*witness == 0);
  CHECK(witness.use_count() == 1);
}

TEST_CASE("a host function and an unnamed exception lose the context as well") {
  HostDevice device;
  const Event event = device.create_event();
  const Stream stream = device.create_stream();
  Gate gate;
  device.enqueue(stream, gate.pass());
  device.host_func(stream, [] { throw 7; });
  device.record(event, stream);
  gate.open();
  const auto error = thrown_by<DeviceError>([&] { device.synchronize(event); });
  REQUIRE(error);
  const std::string message = error->what();
  CHECK(message.find("'host_func'") != std::string::npos);
  CHECK(message.find("no std::exception") != std::string::npos);
}

TEST_CASE("of several failures the first is the reason; long names and reasons are cut") {
  HostDevice device;
  const Stream a = device.create_stream(std::string(500, 's')), b = device.create_stream();
  Gate gate;
  for (const Stream* stream : {&a, &b}) {
    device.enqueue(*stream, gate.pass());
    device.enqueue(*stream, [] { throw std::runtime_error{std::string(5000, 'x')}; }, {.name = std::string(500, 'n')});
  }
  gate.open();
  const auto at = std::source_location::current();
  const auto first = thrown_by<DeviceError>([&] {
    device.synchronize(a, at);
    device.synchronize(b, at);
  });
  const auto later = thrown_by<DeviceError>([&] { device.synchronize(b, at); });
  REQUIRE(first);
  REQUIRE(later);
  CHECK(std::string{first->what()}.find("'" + std::string(47, 'n') + "'") != std::string::npos);
  CHECK(std::string{first->what()} == later->what());
}

TEST_CASE("query reports the loss of the work it asks about, not that it is done") {
  HostDevice device;
  const Stream stream = device.create_stream();
  const Event event = device.create_event();
  device.enqueue(stream, [] { throw std::runtime_error{"bad"}; });
  const auto error = thrown_by<DeviceError>([&] {
    device.record(event, stream);
    while (!device.query(event)) std::this_thread::yield();
  });
  REQUIRE(error);
  CHECK(error->context_lost());
}

TEST_CASE("a call blocked by a full ring reports the loss that frees it") {
  HostDevice device{{.ring_capacity = 1}};
  const Stream stream = device.create_stream();
  Gate gate;
  device.enqueue(stream, [pass = gate.pass()] {
    pass();
    throw std::runtime_error{"bad"};
  });
  std::optional<DeviceError> error;
  std::thread caller{[&] { error = thrown_by<DeviceError>([&] { device.enqueue(stream, [] {}); }); }};
  while (device.calls_made() < 3) std::this_thread::yield();
  std::this_thread::sleep_for(2ms);
  gate.open();
  caller.join();
  REQUIRE(error);
  CHECK(error->context_lost());
  CHECK(error->api() == "enqueue");
}

TEST_CASE("a callable that throws while it is copied into the ring has no effect") {
  struct Throws {
    Throws() = default;
    Throws(const Throws&) { throw std::runtime_error{"no copy"}; }
    void operator()() const {}
  };
  HostDevice device{{.ring_capacity = 2}};
  const Stream stream = device.create_stream();
  const Throws callable;
  for (int i = 0; i < 5; ++i) CHECK_THROWS_AS(device.enqueue(stream, callable), std::runtime_error);
  bool ran = false;
  device.enqueue(stream, [&ran] { ran = true; });
  device.synchronize(stream);
  CHECK(ran);
  CHECK_FALSE(device.lost());
}

TEST_CASE("a failed call has no effect and leaves the device usable, whichever call it is") {
  HostDevice device{{.hbm_capacity = 1_MiB}};
  const Stream a = device.create_stream(), b = device.create_stream();
  const Event event = device.create_event(EventTiming::timed), done = device.create_event(EventTiming::timed);
  const auto hbm = device.allocate_device(4_KiB);
  const auto host = device.allocate_pinned(4_KiB);
  host[0] = std::byte{1};
  device.copy_async(hbm, host, a);
  device.record(done, a);
  device.synchronize(a);
  Gate gate;
  int ran = 0;

  const auto fails = [&](const char* api, auto&& call) {
    const std::uint64_t calls = device.calls_made();
    device.fail_call(1);
    const auto error = thrown_by<DeviceError>(call);
    REQUIRE_MESSAGE(error, api);
    CHECK(error->kind() == DeviceError::Kind::call_failed);
    CHECK_FALSE(error->context_lost());
    CHECK(error->api() == api);
    CHECK(device.calls_made() == calls + 1);
    CHECK_FALSE(device.lost());
  };
  fails("create_stream", [&] { const Stream stream = device.create_stream(); });
  fails("create_event", [&] { const Event e = device.create_event(); });
  fails("allocate_device", [&] { static_cast<void>(device.allocate_device(1_MiB - 4_KiB)); });
  fails("allocate_pinned", [&] { static_cast<void>(device.allocate_pinned(1_KiB)); });
  CHECK(device.memory_info().free == 1_MiB - 4_KiB);
  host[0] = std::byte{2};
  fails("copy_async", [&] { device.copy_async(hbm, host, a); });
  fails("fill_async", [&] { device.fill_async(hbm, std::byte{3}, a); });
  fails("copy_async", [&] { device.copy_async(hbm, hbm, a); });
  fails("enqueue", [&] { device.enqueue(a, [&] { ++ran; }); });
  fails("host_func", [&] { device.host_func(a, [&] { ++ran; }); });
  fails("synchronize", [&] { device.synchronize(a); });
  fails("synchronize", [&] { device.synchronize(event); });
  fails("query", [&] { static_cast<void>(device.query(event)); });
  fails("elapsed", [&] { static_cast<void>(device.elapsed(done, done)); });
  CHECK(device.elapsed(done, done) == 0ns);
  device.enqueue(a, gate.pass());
  fails("record", [&] { device.record(event, a); });
  CHECK(device.query(event));  // still never recorded
  device.record(event, a);
  fails("wait", [&] { device.wait(b, event); });
  device.synchronize(b);  // b waits for nothing
  gate.open();
  device.synchronize(a);
  host[0] = std::byte{0};
  fails("copy_async", [&] { device.copy_async(host, hbm, a); });
  device.synchronize(a);
  CHECK(host[0] == std::byte{0});
  device.copy_async(host, hbm, a);
  device.synchronize(a);
  CHECK(host[0] == std::byte{1});
  CHECK(ran == 0);
  device.free_device(hbm);
  device.free_pinned(host);
}

TEST_CASE("a stream that the system cannot give is a failed call, and the device stays usable") {
  HostDevice device{{.hbm_capacity = 1_MiB, .ring_capacity = std::uint64_t{1} << 60}};
  for (int i = 0; i < 2; ++i) {
    const auto error = thrown_by<DeviceError>([&] { const Stream stream = device.create_stream(); });
    REQUIRE(error);
    CHECK(error->kind() == DeviceError::Kind::call_failed);
    CHECK(error->api() == "create_stream");
  }
  const Event event = device.create_event();
  CHECK(device.query(event));
}

TEST_CASE("fail_call counts calls from now on and can be called off") {
  HostDevice device;
  const Stream stream = device.create_stream();
  device.fail_call(3);
  device.synchronize(stream);
  device.synchronize(stream);
  CHECK_THROWS_AS(device.synchronize(stream), DeviceError);
  device.synchronize(stream);
  device.fail_call(1);
  device.fail_call(0);
  device.synchronize(stream);
  CHECK(device.calls_made() == 6);
}
