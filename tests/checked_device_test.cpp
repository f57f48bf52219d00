// CheckedDevice: for every fault the smallest program that has it, and the nearest one that has not.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "gate.hpp"
#include "hbmoff/device/checked_device.hpp"
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "support/immediate_device.hpp"
#include "support/random.hpp"

using namespace hbmoff;
using At = std::source_location;

namespace {

constexpr std::byte any{0x5a};

/// A device that launches kernels past its interface, as CUDA's `<<<>>>` does.
class LaunchlessDevice : public ImmediateDevice {
 public:
  using ImmediateDevice::ImmediateDevice;

 private:
  using ImmediateDevice::LaunchOptions;
};
static_assert(Device<CheckedDevice<LaunchlessDevice>>);

/// One side of an expected report.
struct Side {
  std::string what;
  std::string actor;
  std::string tensor;
  std::uint64_t first_byte;
  std::uint64_t bytes;
  At at;
  std::string memory = "HBM";
};

void check_side(const CheckedAccess& seen, const Side& expected) {
  INFO(seen.message());
  CHECK(seen.what == expected.what);
  CHECK(seen.actor == expected.actor);
  CHECK(seen.tensor == expected.tensor);
  CHECK(seen.memory == expected.memory);
  CHECK(seen.first_byte == expected.first_byte);
  CHECK(seen.bytes == Bytes{expected.bytes});
  CHECK(seen.at.line() == expected.at.line());
  CHECK(std::string{seen.at.file_name()} == expected.at.file_name());
}

void check_report(const CheckReport& seen, CheckFault fault, const Side& later, const std::optional<Side>& earlier,
                  const std::string& remedy) {
  INFO(seen.message());
  CHECK(seen.fault == fault);
  check_side(seen.later, later);
  REQUIRE(seen.earlier.has_value() == earlier.has_value());
  if (earlier) check_side(*seen.earlier, *earlier);
  CHECK(seen.remedy == remedy);
}

std::string where(At at) { return std::string{at.file_name()} + ":" + std::to_string(at.line()); }

/// Runs what it is given on a thread of its own, one after the other.
class Worker {
 public:
  void run(const std::function<void()>& work) {
    work_ = &work;
    ++turn_;
    turn_.notify_all();
    for (std::uint64_t t = turn_; t % 2 == 1; t = turn_) turn_.wait(t);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  ~Worker() {
    work_ = nullptr;
    ++turn_;
    turn_.notify_all();
    thread_.join();
  }

 private:
  void loop() {
    while (true) {
      for (std::uint64_t t = turn_; t % 2 == 0; t = turn_) turn_.wait(t);
      if (work_ == nullptr) return;
      try {
        (*work_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      ++turn_;
      turn_.notify_all();
    }
  }
  const std::function<void()>* work_ = nullptr;
  std::exception_ptr error_;
  std::atomic<std::uint64_t> turn_ = 0;  // odd: the worker's
  std::thread thread_{[this] { loop(); }};
};

/// A device with two streams, and HBM and pinned memory named 'x', 'y' and 'h', 1024 bytes each, x and y side by side.
template <class D = HostDevice>
struct Bench {
  using Checked = CheckedDevice<D>;
  using StreamRef = typename Checked::StreamRef;

  explicit Bench(bool throws = true) : device{{}, {.reports = &reports, .throws = throws}} {
    memory = device.allocate_device(Bytes{2048});
    h = device.allocate_pinned(Bytes{1024});
    x = memory.subspan(0, 1024);
    y = memory.subspan(1024, 1024);
    block(BlockNote::allocated, x, "x");
    block(BlockNote::allocated, y, "y");
    device.note_block(BlockNote::named, pinned_span<const std::byte>{h}, "h", a);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    device.synchronize(a);
    device.synchronize(b);
    device.synchronize(c);
    device.free_device(memory);
    device.free_pinned(h);
  }

  void block(BlockNote what, device_span<std::byte> span, std::string_view name, At at = At::current()) {
    device.note_block(what, device_span<const std::byte>{span}, name, a, at);
  }
  void kernel(StreamRef s, std::string_view label, AccessList reads, AccessList writes, At at = At::current()) {
    device.note_access(s, label, reads, writes, at);
    device.enqueue(s, [] {}, {.name = label}, at);
  }
  void after(StreamRef later, StreamRef earlier) {
    auto event = device.create_event();
    device.record(event, earlier);
    device.wait(later, event);
  }
  std::uint64_t errors() const { return device.errors(); }

  std::vector<CheckReport> reports;
  Checked device;
  typename Checked::Stream a = device.create_stream("a");
  typename Checked::Stream b = device.create_stream("b");
  typename Checked::Stream c = device.create_stream("c");
  device_span<std::byte> memory, x, y;
  pinned_span<std::byte> h;
};

template <class Call>
CheckReport caught(Call&& call) {
  const auto error = thrown_by<CheckError>(std::forward<Call>(call));
  REQUIRE(error.has_value());
  CHECK(std::string{error->what()} == error->report().message());
  CHECK(error->fault() == error->report().fault);
  return error->report();
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- order

TEST_CASE("a read is ordered after its write by a wait, and by nothing less") {
  Bench t;
  const At write = At::current();
  t.device.fill_async(t.x.subspan(100, 100), any, t.a, write);
  auto event = t.device.create_event();
  const At record = At::current();
  t.device.record(event, t.a, record);

  t.kernel(t.b, "next to it", {}, {t.x.subspan(0, 100), t.x.subspan(200, 100)});  // one byte apart on both sides
  const At read = At::current();
  const auto copy = [&] { t.device.copy_async(t.h.subspan(0, 300), t.x.subspan(0, 300), t.b, read); };
  const std::uint64_t calls = t.device.inner().calls_made();
  check_report(caught(copy), CheckFault::read_before_write, {"a copy reads", "stream 'b'", "x", 100, 100, read},
               Side{"a fill writes", "stream 'a'", "x", 100, 100, write},
               "stream 'b' must wait for the event recorded at " + where(record) + " on stream 'a'");
  CHECK(t.device.inner().calls_made() == calls);  // it had no effect
  CHECK(t.reports.size() == 1);

  t.device.wait(t.b, event);
  copy();
  CHECK(t.errors() == 1);
}

TEST_CASE("a write is ordered after the readers, and after the writer") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.after(t.b, t.a);
  const At read = At::current();
  t.kernel(t.b, "reader", {t.x.subspan(8, 8)}, {}, read);
  const At write = At::current();
  const auto fill = [&] { t.device.fill_async(t.x, any, t.a, write); };
  check_report(caught(fill), CheckFault::write_before_access, {"a fill writes", "stream 'a'", "x", 8, 8, write},
               Side{"'reader' reads", "stream 'b'", "x", 8, 8, read},
               "stream 'a' must wait for an event recorded on stream 'b' behind that; none was recorded");
  t.after(t.a, t.b);
  fill();

  const auto kernel = [&] { t.kernel(t.b, "writer", {}, {t.x.subspan(0, 1)}); };
  const CheckReport report = caught(kernel);
  CHECK(report.fault == CheckFault::write_before_access);
  CHECK(report.later.what == "'writer' writes");
  REQUIRE(report.earlier.has_value());
  CHECK(report.earlier->what == "a fill writes");
  CHECK(report.earlier->bytes == Bytes{1});
  t.after(t.b, t.a);
  kernel();
}

TEST_CASE("two readers need no order; a writer needs all of theirs") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.after(t.b, t.a);
  t.after(t.c, t.a);
  t.kernel(t.b, "first", {t.x}, {});
  t.kernel(t.c, "second", {t.x}, {});
  t.kernel(t.a, "third", {t.x}, {});
  t.after(t.a, t.b);
  const auto write = [&] { t.device.fill_async(t.x, any, t.a); };
  CHECK(caught(write).earlier->what == "'second' reads");
  t.after(t.a, t.c);
  write();
}

TEST_CASE("order is transitive over three streams, and through host synchronisation") {
  Bench t;
  SUBCASE("streams") {
    t.device.fill_async(t.x, any, t.a);
    t.after(t.b, t.a);
    t.after(t.c, t.b);
    t.kernel(t.c, "reader", {t.x}, {});
  }
  SUBCASE("the event before the link") {
    t.device.fill_async(t.x, any, t.a);
    auto event = t.device.create_event();
    t.device.record(event, t.b);
    t.after(t.b, t.a);
    t.device.wait(t.c, event);
    CHECK(caught([&] { t.kernel(t.c, "reader", {t.x}, {}); }).fault == CheckFault::read_before_write);
  }
  SUBCASE("synchronize with a stream") {
    t.device.fill_async(t.x, any, t.a);
    CHECK(caught([&] { t.kernel(t.b, "reader", {t.x}, {}); }).fault == CheckFault::read_before_write);
    t.device.synchronize(t.a);
    t.kernel(t.b, "reader", {t.x}, {});
  }
  SUBCASE("synchronize with an event") {
    t.device.fill_async(t.x, any, t.a);
    auto event = t.device.create_event();
    t.device.record(event, t.a);
    t.device.fill_async(t.y, any, t.a);
    t.device.synchronize(event);
    t.kernel(t.b, "reader", {t.x}, {});
    CHECK(caught([&] { t.kernel(t.b, "reader", {t.y}, {}); }).fault == CheckFault::read_before_write);
  }
  SUBCASE("query") {
    Gate gate;
    t.device.note_access(t.a, "gate", {}, {});
    t.device.host_func(t.a, gate.pass());
    t.device.fill_async(t.x, any, t.a);
    auto event = t.device.create_event();
    t.device.record(event, t.a);
    CHECK_FALSE(t.device.query(event));
    CHECK(caught([&] { t.kernel(t.b, "reader", {t.x}, {}); }).fault == CheckFault::read_before_write);
    gate.open();
    while (!t.device.query(event)) std::this_thread::yield();
    t.kernel(t.b, "reader", {t.x}, {});
  }
}

TEST_CASE("a wait takes the record at the time of the call; an event recorded too early does not help") {
  Bench t;
  auto event = t.device.create_event();
  const At early = At::current();
  t.device.fill_async(t.x, any, t.a);
  t.device.record(event, t.a, early);
  const At write = At::current();
  t.device.fill_async(t.y, any, t.a, write);
  t.device.wait(t.b, event);
  const At late = At::current();
  t.device.record(event, t.a, late);  // after the wait
  const At read = At::current();
  const auto kernel = [&] { t.kernel(t.b, "reader", {t.x, t.y}, {}, read); };
  check_report(caught(kernel), CheckFault::read_before_write, {"'reader' reads", "stream 'b'", "y", 0, 1024, read},
               Side{"a fill writes", "stream 'a'", "y", 0, 1024, write},
               "stream 'b' must wait for the event recorded at " + where(late) +
                   " on stream 'a'; the one recorded at " + where(early) + " comes before it");
  t.device.wait(t.b, event);
  kernel();
}

TEST_CASE("a wait for an event that was never recorded is a warning") {
  Bench t;
  auto event = t.device.create_event();
  const At at = At::current();
  t.device.wait(t.b, event, at);
  REQUIRE(t.reports.size() == 1);
  const CheckReport& report = t.reports[0];
  CHECK(report.fault == CheckFault::wait_never_recorded);
  CHECK(is_warning(report.fault));
  CHECK(report.later.what == "waits for an event that was never recorded");
  CHECK(report.later.actor == "stream 'b'");
  CHECK(report.later.bytes == Bytes{});
  CHECK(report.later.at.line() == at.line());
  CHECK_FALSE(report.earlier.has_value());
  CHECK(report.remedy == "record the event first: the wait orders nothing");
  CHECK(t.errors() == 0);
  t.device.record(event, t.a);
  t.device.wait(t.b, event);
  CHECK(t.reports.size() == 1);
}

TEST_CASE("what the time of an event says is known only when the event is known to be done") {
  Bench t;
  auto begin = t.device.create_event(EventTiming::timed), end = t.device.create_event(EventTiming::timed);
  const auto elapsed = [&] { static_cast<void>(t.device.elapsed(begin, end)); };
  CHECK(caught(elapsed).remedy == "record the event first");
  t.device.record(begin, t.a);
  t.device.fill_async(t.x, any, t.a);
  t.device.record(end, t.a);
  const CheckReport report = caught(elapsed);
  CHECK(report.fault == CheckFault::unfinished_time);
  CHECK(report.later.actor == "the host");
  CHECK(report.remedy == "synchronize with the event, or with its stream, first");
  t.device.synchronize(end);
  elapsed();
}

TEST_CASE("call sites are those of the caller") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  const unsigned write = At::current().line() - 1;
  auto event = t.device.create_event();
  t.device.record(event, t.a);
  const unsigned record = At::current().line() - 1;
  const CheckReport report = caught([&] { t.device.copy_async(t.y, t.x, t.b); });
  CHECK(report.later.at.line() == At::current().line() - 1);
  CHECK(report.earlier->at.line() == write);
  CHECK(report.remedy.find(":" + std::to_string(record) + " on") != std::string::npos);
}

TEST_CASE("streams of one name are told apart") {
  Bench t;
  auto twin = t.device.create_stream("a");
  t.device.fill_async(t.x, any, t.a);
  const CheckReport report = caught([&] { t.device.fill_async(t.x, any, twin); });
  CHECK(report.later.actor == "stream 'a' (number 2 of that name)");
  CHECK(report.earlier->actor == "stream 'a'");
}

// ---------------------------------------------------------------------------------------------------- the host

TEST_CASE("the host reads pinned memory when the copy into it is known to be done") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  const At copy = At::current();
  t.device.copy_async(t.h, t.x, t.a, copy);
  const At read = At::current();
  const auto look = [&] { t.device.note_host_access("loss", {t.h.subspan(4, 4)}, {}, read); };
  check_report(caught(look), CheckFault::host_access, {"'loss' reads", "the host", "h", 4, 4, read, "pinned memory"},
               Side{"a copy writes", "stream 'a'", "h", 4, 4, copy, "pinned memory"},
               "the host must synchronize with an event recorded on stream 'a' behind that; none was recorded");
  auto event = t.device.create_event();
  const At record = At::current();
  t.device.record(event, t.a, record);
  CHECK(caught(look).remedy ==
        "the host must synchronize with the event recorded at " + where(record) + " on stream 'a'");
  t.device.synchronize(event);
  look();
}

TEST_CASE("the host writes pinned memory when the copy out of it is known to be done; what it wrote is there") {
  Bench t;
  t.device.note_host_access("load", {}, {t.h});
  t.device.copy_async(t.x.subspan(0, 512), t.h.subspan(0, 512), t.a);
  t.device.note_host_access("load", {t.h}, {t.h.subspan(512, 512)});  // one byte behind; reading beside a reader
  const auto refill = [&] { t.device.note_host_access("load", {}, {t.h.subspan(511, 2)}); };
  const CheckReport report = caught(refill);
  CHECK(report.fault == CheckFault::host_access);
  CHECK(report.later.first_byte == 511);
  CHECK(report.later.bytes == Bytes{1});
  CHECK(report.earlier->what == "a copy reads");
  t.device.synchronize(t.a);
  refill();
  t.kernel(t.a, "reader", {t.x.subspan(0, 512)}, {});
}

TEST_CASE("a host function is work of its stream") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.device.copy_async(t.h, t.x, t.a);
  t.device.note_access(t.a, "sum", {t.h}, {t.h.subspan(0, 8)});
  t.device.host_func(t.a, [] {});
  t.device.copy_async(t.x, t.h, t.a);
  CHECK(caught([&] { t.device.copy_async(t.y.subspan(0, 8), t.h.subspan(0, 8), t.b); }).earlier->what ==
        "'sum' writes");
  const auto other = [&] {
    t.device.note_access(t.b, "other", {t.h}, {});
    t.device.host_func(t.b, [] {});
  };
  CHECK(caught(other).fault == CheckFault::read_before_write);
  t.after(t.b, t.a);
  other();
  CHECK(caught([&] { t.device.note_host_access("late", {}, {t.h}); }).fault == CheckFault::host_access);
}

TEST_CASE("host threads are in order when they say so") {
  Bench t;
  Worker worker;
  const At write = At::current();
  worker.run([&] { t.device.note_host_access("fill", {}, {t.h}, write); });
  const At read = At::current();
  const auto look = [&] { t.device.note_host_access("look", {t.h}, {}, read); };
  check_report(caught(look), CheckFault::host_access, {"'look' reads", "the host", "h", 0, 1024, read, "pinned memory"},
               Side{"'fill' writes", "host thread 2", "h", 0, 1024, write, "pinned memory"},
               "the host must come after host thread 2, and say so (note_threads_joined)");
  const CheckReport copy = caught([&] { t.device.copy_async(t.x, t.h, t.a); });
  CHECK(copy.fault == CheckFault::host_access);
  CHECK(copy.remedy ==
        "the thread that puts the work on stream 'a' must come after host thread 2, and say so (note_threads_joined)");
  t.device.note_threads_joined();
  look();
  t.device.copy_async(t.x, t.h, t.a);
  // The other way round it has not been said.
  CHECK(thrown_by<CheckError>([&] { worker.run([&] { t.device.note_host_access("fill", {}, {t.h}); }); }).has_value());
  worker.run([&] {
    t.device.note_threads_joined();
    t.device.synchronize(t.a);
    t.device.note_host_access("fill", {}, {t.h});
  });
}

TEST_CASE("a thread that follows another under the same id is another thread") {
  Bench t;
  for (int i = 0; i < 3; ++i) {
    std::thread{[&] {
      CHECK(thrown_by<CheckError>([&] { t.device.note_host_access("fill", {}, {t.h}); }).has_value() == (i != 0));
    }}.join();
  }
}

TEST_CASE("work of two threads on one stream is in its order; a refused call hands nothing on") {
  Bench t;
  Worker worker;
  worker.run([&] { t.device.note_host_access("fill", {}, {t.h}); });
  t.device.fill_async(t.x, any, t.b);
  // Refused: were it not, the stream would know of the worker's write from here on.
  worker.run([&] {
    CHECK(thrown_by<CheckError>([&] { t.device.fill_async(t.x, any, t.a); }).has_value());
    t.device.fail_call(1);
    CHECK(thrown_by<DeviceError>([&] { t.device.fill_async(t.y, any, t.a); }).has_value());
    t.device.note_access(t.a, "not launched", {t.h}, {t.x});
    CHECK(thrown_by<CheckError>([&] { t.device.enqueue(t.a, [] {}); }).has_value());
  });
  CHECK(caught([&] { t.device.copy_async(t.y, t.h, t.a); }).fault == CheckFault::host_access);
  worker.run([&] { t.device.fill_async(t.y, any, t.a); });
  t.device.copy_async(t.y, t.h, t.a);
}

// ---------------------------------------------------------------------------------------------------- content

TEST_CASE("reading bytes that nobody wrote is a fault of kernels and of the host; copies hand it on") {
  Bench t;
  t.device.fill_async(t.x.subspan(0, 100), any, t.a);
  t.device.fill_async(t.x.subspan(200, 824), any, t.a);
  const At read = At::current();
  const auto kernel = [&] { t.kernel(t.a, "reader", {t.x}, {}, read); };
  const std::string remedy = "nothing wrote them since they were allocated or given up, nor what was copied there";
  check_report(caught(kernel), CheckFault::uninitialised_read, {"'reader' reads", "stream 'a'", "x", 100, 100, read},
               std::nullopt, remedy);
  CHECK(caught(kernel).fault == CheckFault::uninitialised_read);  // it is no better for having been said
  t.kernel(t.a, "reader", {t.x.subspan(0, 100), t.x.subspan(200, 824)}, {});

  const At copy = At::current();
  t.device.copy_async(t.y, t.x, t.a, copy);
  t.device.copy_async(t.h, t.y, t.a, copy);
  t.device.synchronize(t.a);
  check_report(caught([&] { t.device.note_host_access("look", {t.h.subspan(50, 100)}, {}, read); }),
               CheckFault::uninitialised_read, {"'look' reads", "the host", "h", 100, 50, read, "pinned memory"},
               Side{"a copy writes", "stream 'a'", "h", 100, 50, copy, "pinned memory"}, remedy);
  t.device.note_host_access("look", {t.h.subspan(0, 100)}, {t.h.subspan(100, 100)});
  t.device.note_host_access("look", {t.h}, {});
  t.device.copy_async(t.x, t.h, t.a);
  kernel();

  t.device.note_discarded(t.x.subspan(10, 10), "page 3");
  const CheckReport given_up = caught(kernel);
  CHECK(given_up.fault == CheckFault::uninitialised_read);
  CHECK(given_up.later.tensor == "page 3' in 'x");
  CHECK(given_up.later.first_byte == 0);
  CHECK(given_up.later.bytes == Bytes{10});
  t.kernel(t.a, "writer", {}, {t.x.subspan(10, 10)});
  kernel();
}

TEST_CASE("a kernel that updates reads as well") {
  Bench t;
  CHECK(caught([&] { t.kernel(t.a, "add", {t.x}, {t.x}); }).later.what == "'add' reads");
  t.kernel(t.a, "zero", {}, {t.x});
  t.kernel(t.a, "add", {t.x}, {t.x});
  t.kernel(t.a, "add", {t.x}, {t.x});
}

// ---------------------------------------------------------------------------------------------------- bounds

TEST_CASE("an access stays within its block") {
  Bench t;
  const At at = At::current();
  t.device.fill_async(t.x, any, t.a);
  t.device.fill_async(t.y, any, t.a);
  check_report(caught([&] { t.device.fill_async(t.memory.subspan(1000, 26), any, t.a, at); }), CheckFault::out_of_range,
               {"a fill writes", "stream 'a'", "x", 1024, 2, at}, std::nullopt, "'x' has 1024 bytes");
  check_report(caught([&] { t.kernel(t.a, "reader", {t.memory.subspan(1000, 25)}, {}, at); }), CheckFault::out_of_range,
               {"'reader' reads", "stream 'a'", "x", 1024, 1, at}, std::nullopt, "'x' has 1024 bytes");
  // Past the end of the reservation.
  check_report(caught([&] { t.device.fill_async({t.y.data(), 1025}, any, t.a, at); }), CheckFault::out_of_range,
               {"a fill writes", "stream 'a'", "y", 1024, 1, at}, std::nullopt, "'y' has 1024 bytes");
  t.device.fill_async(t.memory.subspan(1000, 24), any, t.a);
}

TEST_CASE("of an arena's memory only its blocks may be touched") {
  using Checked = CheckedDevice<HostDevice>;
  std::vector<CheckReport> reports;
  Checked device{{}, {.reports = &reports}};
  auto stream = device.create_stream("s");
  {
    const At reserved = At::current();
    HbmArena<Checked> arena{device, 64_KiB, {}, reserved};
    auto p = arena.allocate(Bytes{1000}, "p", Role::other, stream);
    auto q = arena.allocate(Bytes{1000}, "q", Role::other, stream);
    const At at = At::current();
    device.fill_async(p.bytes(), any, stream);
    // The padding behind p, then q, then what was never allocated.
    check_report(caught([&] { device.fill_async({p.bytes().data(), 1001}, any, stream, at); }),
                 CheckFault::out_of_range, {"a fill writes", "stream 's'", "p", 1000, 1, at}, std::nullopt,
                 "'p' has 1000 bytes");
    check_report(caught([&] { device.fill_async({p.bytes().data() + 1000, 4}, any, stream, at); }),
                 CheckFault::out_of_range,
                 {"a fill writes", "stream 's'", "memory allocated at " + where(reserved), 1000, 4, at}, std::nullopt,
                 "no block is there");
    CHECK(caught([&] { device.fill_async({p.bytes().data() + 4096, 4}, any, stream); }).later.first_byte == 4096);
    p.rename("weights");
    CHECK(caught([&] { device.fill_async({p.bytes().data(), 1001}, any, stream); }).later.tensor == "weights");

    // An arena on a buffer: its blocks while it lives, the buffer before and after.
    auto buffer = arena.allocate(4_KiB, "buffer", Role::other, stream);
    device.fill_async(buffer.bytes(), any, stream);
    {
      HbmArena<Checked> nested{device, buffer.bytes()};
      CHECK(caught([&] { device.fill_async(buffer.bytes(), any, stream); }).later.tensor == "buffer");
      auto inner = nested.allocate(Bytes{256}, "inner", Role::other, stream);
      device.fill_async(inner.bytes(), any, stream);
      const CheckReport crossing = caught([&] { device.fill_async({inner.bytes().data(), 512}, any, stream); });
      CHECK(crossing.later.tensor == "inner");
      CHECK(crossing.later.first_byte == 256);
      CHECK(crossing.later.bytes == Bytes{256});
    }
    device.fill_async(buffer.bytes(), any, stream);
    CHECK(caught([&] { device.fill_async({buffer.bytes().data(), 4_KiB .count() + 1}, any, stream); }).later.tensor ==
          "buffer");
  }
  device.synchronize(stream);
  for (const CheckReport& report : reports) CHECK(report.fault == CheckFault::out_of_range);
}

TEST_CASE("memory is what it was when its arena has ended") {
  using Checked = CheckedDevice<HostDevice>;
  Checked device;
  auto stream = device.create_stream("s");
  auto memory = device.allocate_device(8_KiB);
  device.fill_async(memory, any, stream);
  for (int i = 0; i < 2; ++i) {
    HbmArena<Checked> arena{device, memory.subspan(0, 4096)};
    auto kept = arena.allocate(Bytes{256}, "kept", Role::other, stream);
    auto freed = arena.allocate(Bytes{256}, "freed", Role::other, stream);
    freed.free(stream);
    CHECK(caught([&] { device.fill_async(memory, any, stream); }).fault == CheckFault::out_of_range);
  }
  device.fill_async(memory, any, stream);  // across the arena's end: one allocation
  auto whole = device.allocate_pinned(4_KiB);
  {
    PinnedHostArena<Checked> arena{device, whole};
    auto all = arena.allocate(4_KiB, "all", Role::other, stream);
  }
  device.copy_async(whole, memory.subspan(0, 4096), stream);
  device.synchronize(stream);
  device.free_device(memory);
  device.free_pinned(whole);
  CHECK(device.reports().size() == 2);
}

TEST_CASE("memory of the caller's own takes part from its first use on, and has no bounds") {
  Bench<ImmediateDevice> t;
  std::vector<std::byte> own(1024);
  const pinned_span<std::byte> o{own.data(), own.size()};
  t.device.fill_async(t.x, any, t.a);
  t.device.copy_async(t.x.subspan(0, 100), o.subspan(100, 100), t.a);
  t.device.copy_async(t.x, o, t.a);  // around what is known
  t.kernel(t.a, "reader", {o, t.x}, {});  // it has content
  const At at = At::current();
  const CheckReport report = caught([&] { t.device.note_host_access("writer", {}, {o.subspan(1000, 24)}, at); });
  check_report(
      report, CheckFault::host_access,
      {"'writer' writes", "the host", "memory that the device did not allocate",
       reinterpret_cast<std::uintptr_t>(own.data() + 1000), 24, at, "memory of the caller"},
      Side{"'reader' reads", "stream 'a'", "memory that the device did not allocate",
           reinterpret_cast<std::uintptr_t>(own.data() + 1000), 24, report.earlier->at, "memory of the caller"},
      "the host must synchronize with an event recorded on stream 'a' behind that; none was recorded");
  {
    PinnedHostArena<CheckedDevice<ImmediateDevice>> arena{
        t.device,
        pinned_span<std::byte>{
            reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(own.data()) + 255) / 256 * 256), 512}};
    CHECK(caught([&] { t.device.copy_async(t.x, o, t.a); }).fault == CheckFault::out_of_range);
  }
  t.device.copy_async(t.x, o, t.a);
}

TEST_CASE("ranges of no bytes touch nothing, whatever they point at") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.device.copy_async(t.y.subspan(512, 0), t.x.subspan(512, 0), t.b);
  t.device.fill_async(t.x.subspan(1024, 0), any, t.b);
  t.device.fill_async({}, any, t.b);
  t.kernel(t.b, "nothing", {t.x.subspan(7, 0), AccessRange{}}, {t.x.subspan(7, 0)});
  t.device.note_host_access("nothing", {AccessRange{}}, {t.h.subspan(3, 0)});
  t.device.note_block(BlockNote::allocated, device_span<const std::byte>{}, "nothing", t.b);
  t.device.note_block(BlockNote::freed, device_span<const std::byte>{}, "nothing", t.b);
  t.device.note_discarded({}, "nothing");
  t.device.note_divided(device_span<const std::byte>{}, true);
  t.device.free_device({});
  t.device.free_pinned({});
  CHECK(t.device.allocate_device(Bytes{0}).empty());
  CHECK(t.reports.empty());
}

// ---------------------------------------------------------------------------------------------------- life times

TEST_CASE("a block is reused on its own stream, and on another one that waits") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  const At freed = At::current();
  auto event = t.device.create_event();
  const At record = At::current();
  t.device.record(event, t.a, record);
  t.device.note_block(BlockNote::freed, device_span<const std::byte>{t.x}, "x", t.a, freed);

  const At use = At::current();
  check_report(caught([&] { t.device.fill_async(t.x.subspan(5, 5), any, t.a, use); }), CheckFault::use_after_free,
               {"a fill writes", "stream 'a'", "x", 5, 5, use}, Side{"the free of", "stream 'a'", "x", 5, 5, freed},
               "the free must come behind it");
  CHECK(caught([&] { t.kernel(t.b, "late", {t.x}, {}); }).fault == CheckFault::use_after_free);

  const device_span<const std::byte> half = t.x.subspan(0, 512);
  const At allocated = At::current();
  const auto allocate = [&](auto& stream) { t.device.note_block(BlockNote::allocated, half, "z", stream, allocated); };
  SUBCASE("own") {
    allocate(t.a);
    CHECK(caught([&] { t.kernel(t.a, "reader", {half}, {}); }).fault == CheckFault::uninitialised_read);
    t.device.fill_async(t.x.subspan(0, 512), any, t.a);
    CHECK(caught([&] { t.device.fill_async(t.x.subspan(512, 1), any, t.a); }).later.tensor == "x");
    // Another stream that was not ordered behind the free, nor behind the new block's work.
    CHECK(caught([&] { t.kernel(t.b, "reader", {half}, {}); }).fault == CheckFault::read_before_write);
  }
  SUBCASE("another") {
    check_report(caught([&] { allocate(t.b); }), CheckFault::unordered_reuse,
                 {"the allocation of", "stream 'b'", "z", 0, 512, allocated},
                 Side{"the free of", "stream 'a'", "x", 0, 512, freed},
                 "stream 'b' must wait for the event recorded at " + where(record) + " on stream 'a'");
    CHECK(caught([&] { t.device.fill_async(t.x, any, t.b); }).fault == CheckFault::use_after_free);  // no effect
    t.device.wait(t.b, event);
    allocate(t.b);
    t.device.fill_async(t.x.subspan(0, 512), any, t.b);
  }
  SUBCASE("a third one uses it without a wait") {
    t.device.wait(t.b, event);
    allocate(t.b);
    const CheckReport report = caught([&] { t.kernel(t.c, "writer", {}, {half}); });
    CHECK(report.fault == CheckFault::unordered_reuse);
    CHECK(report.later.tensor == "z");
    t.device.wait(t.c, event);
    t.kernel(t.c, "writer", {}, {half});
  }
  SUBCASE("through the host") {
    CHECK(caught([&] { allocate(t.b); }).fault == CheckFault::unordered_reuse);
    t.device.synchronize(t.a);
    allocate(t.b);
  }
}

TEST_CASE("an event stands for a free behind it only if nothing came between") {
  Bench t;
  auto event = t.device.create_event();
  t.device.record(event, t.a);
  SUBCASE("a wait for work that was not known") {
    t.device.fill_async(t.x, any, t.b);
    t.after(t.a, t.b);
  }
  SUBCASE("work of its own") { t.device.fill_async(t.x, any, t.a); }
  SUBCASE("what the host came to know") {
    t.device.fill_async(t.x, any, t.b);
    t.device.synchronize(t.b);
  }
  t.block(BlockNote::freed, t.x, "x");
  t.device.wait(t.c, event);
  const auto allocate = [&] { t.device.note_block(BlockNote::allocated, device_span<const std::byte>{t.x}, "z", t.c); };
  CHECK(caught(allocate).fault == CheckFault::unordered_reuse);
  t.after(t.c, t.a);
  allocate();
}

TEST_CASE("a block is freed behind all work on it") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.after(t.b, t.a);
  const At read = At::current();
  t.kernel(t.b, "reader", {t.x}, {}, read);
  const At freed = At::current();
  const auto free = [&] { t.block(BlockNote::freed, t.x, "x", freed); };
  check_report(caught(free), CheckFault::free_under_work, {"the free of", "stream 'a'", "x", 0, 1024, freed},
               Side{"'reader' reads", "stream 'b'", "x", 0, 1024, read},
               "stream 'a' must wait for an event recorded on stream 'b' behind that; none was recorded");
  t.kernel(t.b, "reader", {t.x}, {});  // it lives
  t.after(t.a, t.b);
  free();
  const At again = At::current();
  check_report(caught([&] { t.block(BlockNote::freed, t.x, "x", again); }), CheckFault::use_after_free,
               {"the free of", "stream 'a'", "x", 0, 1024, again},
               Side{"the free of", "stream 'a'", "x", 0, 1024, freed}, "the free must come behind it");
  CHECK(caught([&] { t.block(BlockNote::freed, t.y.subspan(0, 512), "y"); }).fault == CheckFault::out_of_range);
  t.block(BlockNote::freed, t.y, "y");
}

TEST_CASE("a buffer may be freed while an arena divides it, and is freed then") {
  using Checked = CheckedDevice<HostDevice>;
  Checked device;
  auto stream = device.create_stream("s");
  HbmArena<Checked> arena{device, 64_KiB};
  auto buffer = arena.allocate(4_KiB, "buffer", Role::other, stream);
  const auto bytes = buffer.bytes();
  {
    HbmArena<Checked> nested{device, bytes};
    auto inner = nested.allocate(Bytes{256}, "inner", Role::other, stream);
    buffer.free(stream);
    CHECK(caught([&] { device.fill_async(inner.bytes(), any, stream); }).fault == CheckFault::use_after_free);
    CHECK(caught([&] { inner.free(stream); }).fault == CheckFault::out_of_range);
  }
  CHECK(caught([&] { device.fill_async(bytes, any, stream); }).fault == CheckFault::use_after_free);
  static_cast<void>(device.reports());
}

TEST_CASE("memory goes back to the system when the host knows that its work is done") {
  std::vector<CheckReport> reports;
  CheckedDevice<HostDevice> device{{}, {.reports = &reports}};
  auto stream = device.create_stream("s");
  const At allocated = At::current();
  auto hbm = device.allocate_device(Bytes{4096}, allocated);
  auto pinned = device.allocate_pinned(Bytes{4096}, allocated);
  const At fill = At::current();
  device.fill_async(hbm, any, stream, fill);
  device.copy_async(pinned, hbm, stream);
  const std::string name = "memory allocated at " + where(allocated);
  SUBCASE("in order") {
    device.synchronize(stream);
    const At freed = At::current();
    device.free_device(hbm, freed);
    device.free_pinned(pinned);
    CHECK(reports.empty());
    const At use = At::current();
    check_report(caught([&] { device.fill_async(hbm, any, stream, use); }), CheckFault::use_after_free,
                 {"a fill writes", "stream 's'", name, 0, 4096, use},
                 Side{"the free of", "the host", name, 0, 4096, freed}, "the free must come behind it");
    const std::uint64_t calls = device.inner().calls_made();
    device.free_device(hbm);
    device.free_pinned(pinned);
    REQUIRE(reports.size() == 3);
    CHECK(reports[1].fault == CheckFault::use_after_free);
    CHECK(reports[1].later.what == "the free of");
    CHECK(reports[2].fault == CheckFault::use_after_free);
    CHECK(reports[2].later.what == "the free of");
    CHECK(device.inner().calls_made() == calls);
  }
  SUBCASE("too early") {
    const At freed = At::current();
    device.free_device(hbm, freed);
    device.free_pinned(pinned, freed);
    REQUIRE(reports.size() == 2);
    check_report(reports[0], CheckFault::free_under_work, {"the free of", "the host", name, 0, 4096, freed},
                 Side{"a fill writes", "stream 's'", name, 0, 4096, fill},
                 "the host must synchronize with an event recorded on stream 's' behind that; none was recorded");
    CHECK(reports[1].fault == CheckFault::free_under_work);
    CHECK(reports[1].later.memory == "pinned memory");
  }
  SUBCASE("not whole") {
    device.synchronize(stream);
    device.free_device(hbm.subspan(0, 2048));
    device.free_device(hbm.subspan(2048, 2048));
    REQUIRE(reports.size() == 2);
    for (const CheckReport& report : reports) CHECK(report.fault == CheckFault::out_of_range);
    device.free_device(hbm);
    device.free_pinned(pinned);
    CHECK(reports.size() == 2);
  }
  CHECK(device.memory_info().free == device.memory_info().total);
}

TEST_CASE("what is not given back is a leak, told to a sink that outlives the device") {
  std::vector<CheckReport> reports;
  const At at = At::current();
  {
    CheckedDevice<HostDevice> device{{}, {.reports = &reports}};
    static_cast<void>(device.allocate_device(Bytes{4096}, at));
    const auto pinned = device.allocate_pinned(Bytes{512});
    device.free_pinned(pinned);
  }
  REQUIRE(reports.size() == 1);
  check_report(reports[0], CheckFault::leak,
               {"nobody freed", "the end of the device", "memory allocated at " + where(at), 0, 4096, at}, std::nullopt,
               "free it before the device ends");
}

// ---------------------------------------------------------------------------------------------------- names

TEST_CASE("reports name parts; a new name of a part ends those that it overlaps") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  const auto name = [&](std::uint64_t first, std::uint64_t count, const char* text) {
    t.block(BlockNote::named, t.x.subspan(first, count), text);
  };
  const auto seen = [&](std::uint64_t first) {
    const CheckReport report = caught([&] { t.device.fill_async(t.x.subspan(first, 1), any, t.b); });
    return report.later.tensor + "+" + std::to_string(report.later.first_byte);
  };
  CHECK(seen(10) == "x+10");
  name(8, 8, "m");
  name(16, 8, "v");
  CHECK(seen(7) == "x+7");
  CHECK(seen(8) == "m' in 'x+0");
  CHECK(seen(17) == "v' in 'x+1");
  CHECK(seen(24) == "x+24");
  name(12, 1, "w");
  CHECK(seen(11) == "x+11");
  CHECK(seen(12) == "w' in 'x+0");
  CHECK(seen(16) == "v' in 'x+0");
  name(0, 1024, "layer 1");
  CHECK(seen(12) == "layer 1+12");
  CHECK(seen(1023) == "layer 1+1023");
}

TEST_CASE("the message is several lines of both accesses and the remedy") {
  CheckReport report{.fault = CheckFault::read_before_write};
  report.later = {.what = "'gelu' reads",
                  .actor = "stream 'compute'",
                  .tensor = "x",
                  .memory = "HBM",
                  .first_byte = 8,
                  .bytes = Bytes{4},
                  .at = {}};
  report.earlier = {{.what = "waits", .actor = "stream 'copy-in'"}};
  report.remedy = "do it";
  CHECK(report.message() ==
        "a read is not ordered after its write\n  stream 'compute': 'gelu' reads bytes 8 to 11 of 'x' (HBM)\n"
        "  before it, stream 'copy-in': waits\n  do it");
  for (int i = 0; i <= static_cast<int>(CheckFault::undeclared_kernel); ++i) {
    CHECK_FALSE(to_string(static_cast<CheckFault>(i)).empty());
    CHECK(is_warning(static_cast<CheckFault>(i)) == (i >= static_cast<int>(CheckFault::wait_never_recorded)));
  }
}

// ---------------------------------------------------------------------------------------------------- launches

TEST_CASE("a launch without a note is a warning, once for each name") {
  Bench t;
  const At at = At::current();
  t.device.enqueue(t.a, [] {}, {.name = "secret"}, at);
  t.device.enqueue(t.b, [] {}, {.name = "secret"});
  t.device.host_func(t.a, [] {});
  t.kernel(t.a, "open", {}, {t.x});
  t.device.enqueue(t.a, [] {}, {.name = "open"});  // the note was used up
  REQUIRE(t.reports.size() == 3);
  CHECK(t.reports[0].fault == CheckFault::undeclared_kernel);
  CHECK(t.reports[0].later.what == "launches 'secret'");
  CHECK(t.reports[0].later.actor == "stream 'a'");
  CHECK(t.reports[0].later.at.line() == at.line());
  CHECK(t.reports[0].remedy == "call note_access before it: what it touches is not checked");
  CHECK(t.reports[1].later.what == "launches 'host function'");
  CHECK(t.reports[2].later.what == "launches 'open'");
  CHECK(t.errors() == 0);
}

TEST_CASE("a note counts at its launch, and for what is known then") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.device.note_access(t.b, "reader", {t.x}, {});
  CHECK(caught([&] { t.device.enqueue(t.b, [] {}); }).fault == CheckFault::read_before_write);
  t.after(t.b, t.a);  // between note and launch
  t.device.enqueue(t.b, [] {});
  t.device.note_access(t.b, "writer", {}, {t.y});
  t.device.fill_async(t.y, any, t.a);
  CHECK(caught([&] { t.device.enqueue(t.b, [] {}); }).later.what == "'writer' writes");
  t.device.note_access(t.b, "replaced", {}, {});
  t.device.enqueue(t.b, [] {});
  CHECK(t.reports.size() == 2);
}

TEST_CASE("where kernels are launched past the device a note counts by itself") {
  CheckedDevice<LaunchlessDevice> device;
  auto a = device.create_stream("a"), b = device.create_stream("b");
  auto x = device.allocate_device(Bytes{64});
  device.note_access(a, "writer", {}, {x});
  CHECK(caught([&] { device.note_access(b, "reader", {x}, {}); }).later.what == "'reader' reads");
  auto event = device.create_event();
  device.record(event, a);
  device.wait(b, event);
  device.note_access(b, "reader", {x}, {});
  CHECK(device.reports().size() == 1);
  device.host_func(b, [] {});  // noted
  CHECK(device.reports().size() == 1);
  device.host_func(b, [] {});
  CHECK(device.reports().size() == 2);
  device.synchronize(b);
  device.free_device(x);
}

TEST_CASE("under memory protection a kernel that touches more than it said is named, at every launch") {
  std::vector<CheckReport> reports;
  CheckedDevice<HostDevice> device{{.hbm_capacity = 1_MiB, .debug_protection = true}, {.reports = &reports}};
  {
    auto s = device.create_stream("s");
    auto x = device.allocate_device(Bytes{4096});
    auto y = device.allocate_device(Bytes{4096});
    device.note_block(BlockNote::named, device_span<const std::byte>{y}, "y", s);
    const At at = At::current();
    int value = 0;  // another one each time: what stores what was there is not seen
    const auto touch_both = [&value, p = x.data(), q = y.data()] { p[0] = q[100] = std::byte(++value); };
    const auto launch = [&](AccessList writes) {
      device.note_access(s, "both", {}, writes, at);
      device.enqueue(s, touch_both, {.name = "both"}, at);
    };
    launch({x, y});
    check_report(caught([&] { launch({x}); }), CheckFault::undeclared_access,
                 {"'both' writes", "stream 's'", "y", 100, 1, at}, std::nullopt,
                 "name the range in note_access, or do not touch it");
    CHECK(caught([&] { launch({x, y.subspan(0, 100)}); }).fault == CheckFault::undeclared_access);
    launch({x, y.subspan(100, 1)});
    CHECK(reports.size() == 2);
    // Its failed end does not undo the launch.
    device.note_access(s, "both", {}, {x, y}, at);
    device.fail_call(2);
    device.enqueue(s, touch_both, {.name = "both"}, at);
    device.fail_call(0);
    device.note_access(s, "both", {}, {x, y}, at);
    device.fail_call(1);
    CHECK(thrown_by<DeviceError>([&] { device.enqueue(s, touch_both, {.name = "both"}, at); }).has_value());
    device.enqueue(s, touch_both, {.name = "both"}, at);
    device.synchronize(s);
    device.free_device(x);
    device.free_device(y);
  }
  CHECK(reports.size() == 2);
}

// ---------------------------------------------------------------------------------------------------- modes

TEST_CASE("accesses just outside of an allocation, and sizes that went below zero") {
  std::vector<CheckReport> reports;
  CheckedDevice<HostDevice> device{{.hbm_capacity = 1_MiB}, {.reports = &reports}};
  auto s = device.create_stream("s"), other = device.create_stream("other");
  auto x = device.allocate_device(100_B);
  auto y = device.allocate_pinned(4096_B);
  const auto launch = [&](AccessList reads, AccessList writes) {
    device.note_access(s, "k", reads, writes);
    device.enqueue(s, [] {}, {.name = "k"});
  };
  const auto fault_of = [](auto&& f) { return caught(f).fault; };
  CHECK(fault_of([&] { launch({}, {x.subspan(100, 1)}); }) == CheckFault::out_of_range);
  CHECK(fault_of([&] { launch({}, {x.subspan(4000, 50)}); }) == CheckFault::out_of_range);
  CHECK(fault_of([&] { launch({AccessRange{x.data() - 1, 1_B}}, {}); }) == CheckFault::out_of_range);
  CHECK(fault_of([&] { device.note_host_access("h", {}, {y.subspan(4096, 8)}); }) == CheckFault::out_of_range);
  const std::uint64_t none = 0;
  device.fill_async(x, any, s);
  const CheckReport wrapped = caught([&] { launch({x.subspan(8, none - 1)}, {}); });
  CHECK(wrapped.fault == CheckFault::out_of_range);
  CHECK(wrapped.later.memory == caught([&] { launch({}, {x.subspan(100, 1)}); }).later.memory);
  CHECK(fault_of([&] { launch({}, {x.subspan(8, none - 4)}); }) == CheckFault::out_of_range);
  launch({x}, {x});  // what went before had no effect
  device.synchronize(s);

  // Pinned memory after its end, until somebody else introduces himself there.
  device.free_pinned(y);
  CHECK(fault_of([&] { device.note_host_access("h", {}, {y.subspan(0, 8)}); }) == CheckFault::use_after_free);
  CHECK(fault_of([&] { device.copy_async(x.subspan(0, 8), y.subspan(0, 8), s); }) == CheckFault::use_after_free);
  device.note_block(BlockNote::allocated, pinned_span<const std::byte>{y}, "again", s);
  device.note_host_access("h", {}, {y.subspan(0, 8)});
  device.note_divided(pinned_span<const std::byte>{y}, true);
  device.note_block(BlockNote::allocated, pinned_span<const std::byte>{y}.subspan(0, 256), "block", s);
  device.note_host_access("h", {}, {y.subspan(0, 8)});
  device.free_device(x);
}

TEST_CASE("a buffer that outlives its arena is a leak; one that was freed is none, even where its free failed") {
  std::vector<CheckReport> reports;
  CheckedDevice<ImmediateDevice> device{{}, {.reports = &reports}};
  auto s = device.create_stream("s");
  using Buffer = HbmArena<CheckedDevice<ImmediateDevice>>::Buffer;
  alignas(Buffer) std::byte forgotten[sizeof(Buffer)];  // its end never comes
  {
    HbmArena arena{device, 64_KiB};
    new (forgotten) Buffer{arena.allocate(5_KiB, "forgotten", Role::other, s)};
    Buffer ended = arena.allocate(5_KiB, "ended", Role::other, s);
    ended.free(s);
    Buffer dropped = arena.allocate(5_KiB, "dropped", Role::other, s);
    device.inner().fail_call(1, 4);
    {
      const Buffer ends_here = std::move(dropped);
    }
    device.inner().fail_call(0);
    CHECK(arena.failed_frees() == 1);
  }
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].fault == CheckFault::leak);
  CHECK(reports[0].later.tensor == "forgotten");
  CHECK(reports[0].later.bytes == 5_KiB);
}

TEST_CASE("streams and events of another device are refused") {
  CheckedDevice<HostDevice> device, another;
  auto s = device.create_stream("s"), stranger = another.create_stream("s");
  auto e = device.create_event(), strange = another.create_event();
  another.record(strange, stranger);
  CHECK_THROWS_AS(device.wait(s, strange), InvalidArgument);
  CHECK_THROWS_AS(device.wait(stranger, e), InvalidArgument);
  CHECK_THROWS_AS(device.record(e, stranger), InvalidArgument);
  CHECK_THROWS_AS(device.record(strange, s), InvalidArgument);
  CHECK_THROWS_AS(device.synchronize(strange), InvalidArgument);
  CHECK_THROWS_AS(device.synchronize(stranger), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(device.query(strange)), InvalidArgument);
  CHECK_THROWS_AS(device.enqueue(stranger, [] {}), InvalidArgument);
  CHECK_THROWS_AS(device.note_access(stranger, "k", {}, {}), InvalidArgument);
}

TEST_CASE("faults of the device underneath are asked for through it") {
  CheckedDevice<HostDevice> device{{.hbm_capacity = 1_MiB}};
  auto stream = device.create_stream("s");
  auto x = device.allocate_device(64_B);
  const std::uint64_t copies = device.calls_made(CallKind::copy);
  device.inject(Fault{.kinds = CallKind::copy, .nth = 2});
  device.fill_async(x, any, stream);
  CHECK(device.calls_made(CallKind::copy) == copies + 1);
  CHECK(device.clear_fault());
  CHECK_FALSE(device.clear_fault());
  device.fill_async(x, any, stream);
  device.inject(Fault{.kinds = CallKind::copy});
  CHECK(thrown_by<DeviceError>([&] { device.fill_async(x, any, stream); }).has_value());
  CHECK(device.calls_made() == device.inner().calls_made());
  device.synchronize(stream);
  device.free_device(x);
}

TEST_CASE("collecting notes faults and lets them through") {
  Bench<ImmediateDevice> t{false};  // on one that runs beside itself these would be races
  t.device.fill_async(t.x, std::byte{1}, t.a);
  t.device.fill_async(t.x, std::byte{2}, t.b);  // unordered
  t.device.fill_async(t.x, std::byte{2}, t.b);  // in order: with what went through
  t.kernel(t.c, "both", {t.x}, {t.x});          // one report
  t.device.fill_async(t.y.subspan(8, 8), any, t.c);
  t.kernel(t.b, "three ranges", {t.x, t.y.subspan(0, 8)}, {t.y.subspan(8, 8)});  // and three
  REQUIRE(t.reports.size() == 5);
  CHECK(t.reports[0].fault == CheckFault::write_before_access);
  CHECK(t.reports[1].fault == CheckFault::read_before_write);
  CHECK(t.reports[2].fault == CheckFault::read_before_write);
  CHECK(t.reports[3].fault == CheckFault::uninitialised_read);
  CHECK(t.reports[4].fault == CheckFault::write_before_access);
  t.reports.clear();
  t.after(t.c, t.b);
  t.device.fill_async(t.memory, any, t.c);
  t.block(BlockNote::freed, t.x, "x");
  t.device.fill_async(t.x, any, t.a);
  REQUIRE(t.reports.size() == 3);
  CHECK(t.reports[0].fault == CheckFault::out_of_range);
  CHECK(t.reports[1].fault == CheckFault::free_under_work);
  CHECK(t.reports[2].fault == CheckFault::use_after_free);
  CHECK(t.errors() == 8);
  CHECK(t.device.reports().size() == 8);
}

TEST_CASE("calls that the device refuses change nothing here") {
  Bench t;
  auto event = t.device.create_event();
  const auto refused = [&](auto&& call) {
    t.device.fail_call(1);
    const auto error = thrown_by<DeviceError>(call);
    CHECK(error.has_value());
    t.device.fail_call(0);
  };
  t.device.fill_async(t.x, any, t.a);
  refused([&] { t.device.record(event, t.a); });
  t.device.wait(t.b, event);  // never recorded
  CHECK(t.reports.size() == 1);
  t.device.record(event, t.a);
  refused([&] { t.device.wait(t.b, event); });
  const auto read = [&] { t.kernel(t.b, "reader", {t.x}, {}); };
  CHECK(caught(read).fault == CheckFault::read_before_write);
  refused([&] { t.device.synchronize(event); });
  refused([&] { t.device.synchronize(t.a); });
  refused([&] { static_cast<void>(t.device.query(event)); });
  CHECK(caught(read).fault == CheckFault::read_before_write);
  t.device.wait(t.b, event);
  read();

  refused([&] { t.device.fill_async(t.y, any, t.a); });
  CHECK(caught([&] { t.kernel(t.c, "reader", {t.y}, {}); }).fault == CheckFault::uninitialised_read);
  refused([&] { t.device.copy_async(t.h, t.x, t.a); });
  t.device.note_host_access("host", {}, {t.h});
  t.device.note_access(t.c, "writer", {}, {t.y});
  refused([&] { t.device.enqueue(t.c, [] {}); });
  t.device.fill_async(t.y, any, t.a);
  t.after(t.c, t.a);
  t.device.enqueue(t.c, [] {});  // the note is still there
  CHECK(t.reports.size() == 4);
  t.after(t.c, t.b);
  CHECK_THROWS_AS(t.device.copy_async(t.x, t.h.subspan(0, 5), t.c), InvalidArgument);
  t.after(t.a, t.b);
  t.device.fill_async(t.x, any, t.a);  // not behind what c did not do
  refused([&] { static_cast<void>(t.device.allocate_device(Bytes{64})); });
  refused([&] { static_cast<void>(t.device.allocate_pinned(Bytes{64})); });
  refused([&] { static_cast<void>(t.device.create_stream("d")); });
  refused([&] { static_cast<void>(t.device.create_event()); });
}

TEST_CASE("a lost context is told, and not checked") {
  std::vector<CheckReport> reports;
  {
    CheckedDevice<HostDevice> device{{}, {.reports = &reports}};
    auto a = device.create_stream("a"), b = device.create_stream("b");
    HbmArena<CheckedDevice<HostDevice>> arena{device, 64_KiB};
    auto x = arena.allocate(Bytes{256}, "x", Role::other, a);
    device.note_access(a, "broken", {}, {x.bytes()});
    device.enqueue(a, [] { throw std::runtime_error{"broken"}; });
    CHECK_THROWS_AS(device.synchronize(a), DeviceError);
    CHECK(device.lost());
    const auto error = thrown_by<DeviceError>([&] { device.fill_async(x.bytes(), any, b); });
    REQUIRE(error.has_value());
    CHECK(error->context_lost());
  }
  CHECK(reports.empty());
}

// ---------------------------------------------------------------------------------------------------- sizes

TEST_CASE("ranges past 2^32 bytes") {
  CheckedDevice<HostDevice> device{{.hbm_capacity = 2_TiB, .no_touch = true}};
  auto a = device.create_stream("a"), b = device.create_stream("b");
  const std::uint64_t size = (detail::sanitizer_watches() ? 64_GiB : 1_TiB).count() + 4096;
  auto x = device.allocate_device(Bytes{size});
  device.fill_async(x, any, a);
  device.fill_async(x.subspan(size - 1, 1), any, a);
  const CheckReport report = caught([&] { device.fill_async(x.subspan(5, size - 5), any, b); });
  CHECK(report.later.first_byte == 5);
  CHECK(report.later.bytes == Bytes{size - 6});  // up to where another write begins
  device.synchronize(a);
  device.fill_async(x.subspan(size - 1, 1), any, b);
  device.fill_async(x.subspan(0, size - 1), any, a);
  CHECK(caught([&] { device.fill_async(x, any, a); }).later.first_byte == size - 1);
  device.synchronize(b);
  device.free_device(x);
  CHECK(device.reports().size() == 3);
}

TEST_CASE("thousands of streams, events and blocks") {
  Bench<ImmediateDevice> t;
  using Checked = CheckedDevice<ImmediateDevice>;
  std::vector<Checked::Event> events;
  for (int i = 0; i < 3000; ++i) {
    auto stream = t.device.create_stream("s" + std::to_string(i));
    if (i != 0) t.device.wait(stream, events.back());
    t.kernel(stream, "update", {}, {t.x.subspan(static_cast<std::uint64_t>(i) % 1024, 1)});
    events.push_back(t.device.create_event());
    t.device.record(events.back(), stream);
  }
  CHECK(caught([&] { t.device.fill_async(t.x, any, t.a); }).earlier->actor == "stream 's2048'");
  t.device.wait(t.a, events[2047]);
  CHECK(caught([&] { t.device.fill_async(t.x, any, t.a); }).earlier->actor == "stream 's2048'");
  t.device.wait(t.a, events[2999]);
  t.device.fill_async(t.x, any, t.a);
  // Records beyond those that are remembered: any later one will do.
  auto event = t.device.create_event();
  const At record = At::current();
  for (int i = 0; i < 5000; ++i) t.device.record(event, t.a, record);
  CHECK(caught([&] { t.device.fill_async(t.x, any, t.b); }).remedy ==
        "stream 'b' must wait for the event recorded at " + where(record) + " on stream 'a'");
}

TEST_CASE("threads use the device side by side") {
  Bench t;
  t.device.fill_async(t.x, any, t.a);
  t.device.synchronize(t.a);
  std::vector<std::thread> threads;
  for (std::uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&t, i] {
      t.device.note_threads_joined();
      auto stream = t.device.create_stream("own");
      auto event = t.device.create_event();
      const auto part = t.x.subspan(i * 256, 256);
      const auto out = t.h.subspan(i * 256, 256);
      for (int k = 0; k < 50; ++k) {
        t.kernel(stream, "update", {part}, {part});
        t.device.copy_async(out, part, stream);
        t.device.record(event, stream);
        t.device.wait(t.b, event);
        t.device.synchronize(event);
        t.device.note_host_access("look", {out}, {out});
        static_cast<void>(t.device.query(event));
        static_cast<void>(t.device.errors());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  t.kernel(t.b, "sum", {t.x}, {});
  CHECK(caught([&] { t.device.note_host_access("look", {t.h}, {}); }).fault == CheckFault::host_access);
  t.device.note_threads_joined();
  t.device.note_host_access("look", {t.h}, {});
  CHECK(t.errors() == 1);
}

// ---------------------------------------------------------------------------------------------------- the oracle

namespace {

/// What is true of a program, from all of its accesses and from what each stream, event and thread comes after, kept
/// as plain sets of pieces of work. No clocks, no ranges.
class Oracle {
 public:
  using Work = std::set<std::uint32_t>;
  static constexpr std::uint32_t bytes = 24;

  struct Byte {
    std::vector<std::uint32_t> writes, reads;  // all there ever were
    std::optional<std::uint32_t> freed_at;     // the work that a stream had reached
    bool freed = false;
    bool defined = false;
  };
  std::array<Byte, bytes> memory;
  std::array<Work, 3> streams;
  std::array<std::uint32_t, 3> reached = {};  // the last piece of work on the stream; 0: none
  std::array<Work, 2> threads;
  std::array<std::optional<Work>, 3> events;

  // Streams reach a new point when they come to know of work that they did not know of.
  void learn(std::uint32_t stream, const Work& known) {
    const std::size_t before = streams[stream].size();
    streams[stream].insert(known.begin(), known.end());
    if (streams[stream].size() != before) work_on(stream);
  }
  std::uint32_t work_on(std::uint32_t stream) {
    streams[stream].insert(++last_);
    return reached[stream] = last_;
  }
  std::uint32_t work_of(std::uint32_t thread) {
    threads[thread].insert(++last_);
    return last_;
  }
  [[nodiscard]] Work known(std::uint32_t stream, std::uint32_t thread) const {
    Work all = streams[stream];
    all.insert(threads[thread].begin(), threads[thread].end());
    return all;
  }
  /// The fault of the first byte that has one, and which byte.
  [[nodiscard]] std::optional<std::pair<CheckFault, std::uint32_t>> fault(const Work& known, std::uint32_t first,
                                                                          std::uint32_t count, bool writes,
                                                                          bool content, bool host) const {
    for (std::uint32_t i = first; i < first + count; ++i) {
      const Byte& byte = memory[i];
      if (byte.freed) return {{CheckFault::use_after_free, i}};
      if (byte.freed_at && *byte.freed_at != 0 && !known.contains(*byte.freed_at)) {
        return {{CheckFault::unordered_reuse, i}};
      }
      std::uint32_t of_host = 0, of_streams = 0;
      for (const std::vector<std::uint32_t>* all : {&byte.writes, &byte.reads}) {
        if (all == &byte.reads && !writes) break;
        for (std::uint32_t work : *all) {
          if (!known.contains(work)) ++(host_work.contains(work) ? of_host : of_streams);
        }
      }
      either = of_host != 0 && of_streams != 0 && !host;
      if (of_host + of_streams != 0) {
        if (host || of_streams == 0) return {{CheckFault::host_access, i}};
        return {{writes ? CheckFault::write_before_access : CheckFault::read_before_write, i}};
      }
      if (content && !byte.defined) return {{CheckFault::uninitialised_read, i}};
    }
    return std::nullopt;
  }
  Work host_work;
  mutable bool either = false;  ///< the last fault may be called host_access as well: there is more than one

 private:
  std::uint32_t last_ = 0;
};

}  // namespace

TEST_CASE("random programs: a report exactly when a pair is unordered") {
  using Checked = CheckedDevice<ImmediateDevice>;
  std::uint64_t faults[16] = {}, calls = 0;
  Worker worker;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    random_numbers::Random random{seed * 977};
    const auto below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random.next() % n); };
    std::vector<CheckReport> sink;
    Checked device{{}, {.reports = &sink}};
    // Blocks of 8 bytes of pinned memory, so that the host takes part; two of HBM behind them.
    auto pinned = device.allocate_pinned(Bytes{8});
    auto hbm = device.allocate_device(Bytes{16});
    const auto address = [&](std::uint32_t i) { return i < 8 ? pinned.data() + i : hbm.data() + (i - 8); };
    const auto range = [&](std::uint32_t i, std::uint32_t n) { return AccessRange{address(i), Bytes{n}}; };
    {
      std::vector<Checked::Stream> streams;
      std::vector<Checked::Event> events;
      for (int i = 0; i < 3; ++i) {
        streams.push_back(device.create_stream("s" + std::to_string(i)));
        events.push_back(device.create_event());
      }
      device.note_block(BlockNote::allocated, device_span<const std::byte>{hbm.subspan(0, 8)}, "p", streams[0]);
      device.note_block(BlockNote::allocated, device_span<const std::byte>{hbm.subspan(8, 8)}, "q", streams[0]);
      Oracle oracle;
      for (int step = 0; step < 60; ++step) {
        const std::uint32_t thread = below(8) == 0 ? 1 : 0, s = below(3), e = below(3);
        const std::uint32_t block = below(3), at = block * 8 + below(8), n = 1 + below(block * 8 + 8 - at);
        auto& stream = streams[s];
        std::optional<CheckError> error;
        const auto call = [&](const std::function<void()>& f) {
          ++calls;
          const std::function<void()> guarded = [&] { error = thrown_by<CheckError>(f); };
          thread == 0 ? guarded() : worker.run(guarded);
        };
        INFO("program ", seed, ", call ", step);
        const auto agree = [&](const std::optional<std::pair<CheckFault, std::uint32_t>>& expected) {
          REQUIRE(error.has_value() == expected.has_value());
          if (!expected) return true;
          INFO(error->what());
          if (!(oracle.either && error->fault() == CheckFault::host_access)) REQUIRE(error->fault() == expected->first);
          const std::uint64_t first = error->report().later.first_byte;
          REQUIRE(first == expected->second % 8);
          ++faults[static_cast<int>(expected->first)];
          return false;
        };
        const Oracle::Work known = oracle.known(s, thread);
        const auto write = [&](std::uint32_t work, std::uint32_t first, std::uint32_t count) {
          for (std::uint32_t i = first; i < first + count; ++i) {
            oracle.memory[i].writes.push_back(work);
            oracle.memory[i].defined = true;
            oracle.memory[i].freed_at.reset();  // the write is behind it, and stands for it
          }
        };
        const auto read = [&](std::uint32_t work, std::uint32_t first, std::uint32_t count) {
          for (std::uint32_t i = first; i < first + count; ++i) oracle.memory[i].reads.push_back(work);
        };
        switch (below(12)) {
          case 0:
          case 1: {  // a kernel that updates one range, or reads it
            const bool writes = below(2) == 0;
            call([&] {
              device.note_access(stream, "kernel", {range(at, n)}, {writes ? range(at, n) : AccessRange{}});
              device.enqueue(stream, [] {});
            });
            auto expected = oracle.fault(known, at, n, false, true, false);
            if (!expected && writes) expected = oracle.fault(known, at, n, true, false, false);
            if (!agree(expected)) break;
            oracle.learn(s, oracle.threads[thread]);
            const std::uint32_t work = oracle.work_on(s);
            read(work, at, n);
            if (writes) write(work, at, n);
            break;
          }
          case 2: {  // a kernel that writes
            call([&] {
              device.note_access(stream, "kernel", {}, {range(at, n)});
              device.enqueue(stream, [] {});
            });
            if (!agree(oracle.fault(known, at, n, true, false, false))) break;
            oracle.learn(s, oracle.threads[thread]);
            write(oracle.work_on(s), at, n);
            break;
          }
          case 3:
          case 4: {  // a copy between pinned memory and HBM
            const std::uint32_t count = 1 + below(4), from = below(9 - count), to = 8 + below(2) * 8 + below(9 - count);
            const bool in = below(2) == 0;
            const std::uint32_t source = in ? from : to, target = in ? to : from;
            call([&] {
              const auto here = pinned.subspan(from, count);
              const device_span<std::byte> there{address(to), count};
              in ? device.copy_async(there, here, stream) : device.copy_async(here, there, stream);
            });
            auto expected = oracle.fault(known, source, count, false, false, false);
            if (!expected) expected = oracle.fault(known, target, count, true, false, false);
            if (!agree(expected)) break;
            oracle.learn(s, oracle.threads[thread]);
            const std::uint32_t work = oracle.work_on(s);
            read(work, source, count);
            write(work, target, count);
            for (std::uint32_t i = 0; i < count; ++i) {
              oracle.memory[target + i].defined = oracle.memory[source + i].defined;
            }
            break;
          }
          case 5: {  // the host
            const bool writes = below(2) == 0;
            const std::uint32_t first = at % 8;
            call([&] {
              device.note_host_access("host", {writes ? AccessRange{} : range(first, n)},
                                      {writes ? range(first, n) : AccessRange{}});
            });
            if (!agree(oracle.fault(oracle.threads[thread], first, n, writes, !writes, true))) break;
            const std::uint32_t work = oracle.work_of(thread);
            oracle.host_work.insert(work);
            writes ? write(work, first, n) : read(work, first, n);
            break;
          }
          case 6:
          case 7: {
            call([&] { device.record(events[e], stream); });
            agree(std::nullopt);
            oracle.learn(s, oracle.threads[thread]);
            oracle.events[e] = oracle.streams[s];
            break;
          }
          case 8: {
            const std::size_t reports = sink.size();
            call([&] { device.wait(stream, events[e]); });
            agree(std::nullopt);
            REQUIRE(sink.size() == reports + (oracle.events[e] ? 0 : 1));
            oracle.learn(s, oracle.threads[thread]);
            if (oracle.events[e]) oracle.learn(s, *oracle.events[e]);
            break;
          }
          case 9: {
            const bool whole_stream = below(4) == 0;
            call([&] {
              if (whole_stream) {
                device.synchronize(stream);
              } else if (below(2) == 0) {
                device.synchronize(events[e]);
              } else {
                static_cast<void>(device.query(events[e]));
              }
            });
            agree(std::nullopt);
            if (!whole_stream && !oracle.events[e]) break;
            const Oracle::Work& reached = whole_stream ? oracle.streams[s] : *oracle.events[e];
            oracle.threads[thread].insert(reached.begin(), reached.end());
            break;
          }
          case 10: {  // HBM comes and goes
            const std::uint32_t first = 8 + below(2) * 8;
            const device_span<const std::byte> span{address(first), 8};
            const bool frees = !oracle.memory[first].freed;
            call([&] { device.note_block(frees ? BlockNote::freed : BlockNote::allocated, span, "r", stream); });
            std::optional<std::pair<CheckFault, std::uint32_t>> expected;
            for (std::uint32_t i = first; i < first + 8 && !expected; ++i) {
              Oracle::Byte live = oracle.memory[i];
              live.freed = false;
              Oracle one;
              one.memory[i] = live;
              one.host_work = oracle.host_work;
              if (!frees) one.memory[i].writes = one.memory[i].reads = {};
              const auto fault = one.fault(known, i, 1, true, false, false);
              if (fault) expected = {{frees ? CheckFault::free_under_work : CheckFault::unordered_reuse, i}};
            }
            if (!agree(expected)) break;
            oracle.learn(s, oracle.threads[thread]);
            for (std::uint32_t i = first; i < first + 8; ++i) {
              Oracle::Byte& byte = oracle.memory[i];
              if (frees) byte.freed_at = oracle.reached[s];
              byte.freed = frees;
              byte.defined = false;
              if (frees) byte.writes = byte.reads = {};  // the free is behind them all
            }
            break;
          }
          case 11: {
            if (below(4) != 0) break;
            call([&] { device.note_threads_joined(); });
            agree(std::nullopt);
            for (const Oracle::Work& other : oracle.threads) oracle.threads[thread].insert(other.begin(), other.end());
            break;
          }
        }
      }
      for (auto& stream : streams) device.synchronize(stream);
      device.note_threads_joined();
    }
    const std::uint64_t errors = device.errors();
    device.free_device(hbm);
    device.free_pinned(pinned);
    REQUIRE(device.errors() == errors);
  }
  // The programs were worth their while.
  for (CheckFault fault : {CheckFault::read_before_write, CheckFault::write_before_access, CheckFault::host_access,
                           CheckFault::unordered_reuse, CheckFault::use_after_free, CheckFault::free_under_work,
                           CheckFault::uninitialised_read}) {
    INFO(to_string(fault));
    CHECK(faults[static_cast<int>(fault)] > 100);
  }
  MESSAGE(calls, " calls");
}
