// Observers and counters: intervals on the device's clock, what is dropped, and that observing never fails a step.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "gate.hpp"
#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/observe/stats.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "support/paging_bench.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;

namespace {

using Stream = HostDevice::StreamRef;
using TestRecorder = Recorder<LoggingDevice>;
using Observed = PrefetchScheduler<LoggingDevice, OffloadAll, 2, TestRecorder::Observer>;

constexpr Bytes page_bytes{4096};
constexpr std::uint32_t page_count = 5;

struct ObservedBench : PagingBench {
  Home<LoggingDevice> home{host, page_bytes* page_count, "home", Role::other, compute};
  TestRecorder recorder;
  Observed scheduler;
  std::vector<PlanStep> steps;
  PlanId plan{};

  explicit ObservedBench(std::uint32_t capacity)
      : recorder{device, capacity, compute}, scheduler{hbm, page_bytes, Role::other, {}, recorder.observer()} {
    for (std::uint32_t i = 0; i < page_count; ++i) {
      steps.push_back({scheduler.add_page({.label = "page", .parts = {{&home, page_bytes.count() * i, 0, page_bytes}}}),
                       Access::read_write});
    }
    plan = scheduler.add_plan(steps);
  }
  void sweep() {
    scheduler.begin(plan);
    for (const PlanStep& step : steps) scheduler.lease(step.page, compute).commit();
    scheduler.finish(compute);
  }
  void synchronize() { device.synchronize(Stream{compute}); }
  std::vector<TestRecorder::Interval> collect() {
    std::vector<TestRecorder::Interval> intervals;
    recorder.collect([&](const TestRecorder::Interval& interval) { intervals.push_back(interval); });
    return intervals;
  }
};

}  // namespace

TEST_CASE("counters add, subtract and compare member by member; activities have names") {
  const TransferStats a{.h2d_bytes = 1, .d2h_bytes = 2, .fills = 3, .write_backs = 4, .hits = 5, .evictions = 6};
  const TransferStats b{.h2d_bytes = 10, .d2h_bytes = 20, .fills = 30, .write_backs = 40, .hits = 50, .evictions = 60};
  const TransferStats sum{
      .h2d_bytes = 11, .d2h_bytes = 22, .fills = 33, .write_backs = 44, .hits = 55, .evictions = 66};
  CHECK(a + b == sum);
  CHECK(sum - b == a);
  TransferStats changing = a;
  changing += b;
  CHECK(changing == sum);
  CHECK_FALSE(a == b);
  CHECK(to_string(Activity::fill) == "fill");
  CHECK(to_string(Activity::write_back) == "write-back");
  CHECK(to_string(Activity::stall) == "stall");
}

TEST_CASE("the default observer takes no room, makes no call and throws nothing") {
  static_assert(std::is_empty_v<NullObserver>);
  static_assert(noexcept(NullObserver{}.begin(Activity::fill, 0)) && noexcept(NullObserver{}.end(Activity::fill, 0)));
  const TestRecorder::Observer none;  // of no recorder
  LoggingDevice device;
  const auto stream = device.create_stream("stream");
  const std::uint64_t calls = device.calls_made();
  none.begin(Activity::fill, stream);
  none.end(Activity::fill, stream);
  NullObserver{}.begin(Activity::fill, Stream{stream});
  NullObserver{}.end(Activity::fill, Stream{stream});
  CHECK(device.calls_made() == calls);
}

TEST_CASE("every fill, write-back and stall is an interval, in order, on the device's clock") {
  const Watchdog watchdog{"intervals"};
  ObservedBench bench{64};
  const auto events = bench.device.counts().events;
  for (int round = 0; round < 3; ++round) {
    bench.sweep();
    bench.synchronize();
    const auto intervals = bench.collect();
    std::uint64_t fills = 0, write_backs = 0, stalls = 0;
    std::chrono::duration<double> last_fill{0}, last_write_back{0}, last_stall{0};
    for (const auto& interval : intervals) {
      CHECK(interval.begin.count() >= 0);
      CHECK(interval.begin <= interval.end);
      // One stream does one thing after the other.
      auto& last = interval.activity == Activity::fill         ? (++fills, last_fill)
                   : interval.activity == Activity::write_back ? (++write_backs, last_write_back)
                                                               : (++stalls, last_stall);
      CHECK(last <= interval.begin);
      last = interval.end;
    }
    CHECK(fills == page_count);
    CHECK(write_backs == page_count);
    CHECK(stalls == page_count);
    CHECK(bench.collect().empty());  // they were forgotten
  }
  CHECK(bench.recorder.dropped() == 0);
  CHECK(bench.device.counts().events - events <= 32 + 2 * 4);  // those of timelines and slots, by the first begin
  CHECK(bench.scheduler.stats().fills == 3 * page_count);
}

TEST_CASE("the total of one activity; the others are forgotten with it") {
  const Watchdog watchdog{"total"};
  ObservedBench bench{64};
  bench.sweep();
  bench.synchronize();
  CHECK(bench.recorder.collect_total(Activity::fill).count() > 0);
  CHECK(bench.recorder.collect_total(Activity::write_back).count() == 0);
}

TEST_CASE("what finds no room is counted; unfinished times are refused and can be collected later") {
  const Watchdog watchdog{"dropped"};
  ObservedBench bench{4};
  bench.sweep();
  bench.synchronize();
  CHECK(bench.collect().size() == 4);
  CHECK(bench.recorder.dropped() == 3 * page_count - 4);

  const auto side = bench.device.create_stream("side");
  TestRecorder recorder{bench.device, 2, side};
  const auto observer = recorder.observer();
  Gate gate;
  observer.begin(Activity::stall, side);
  bench.device.enqueue(side, gate.pass());
  observer.end(Activity::stall, side);
  const auto ignore = [](const TestRecorder::Interval&) {};
  CHECK(thrown_by<InvalidArgument>([&] { recorder.collect(ignore); }));
  gate.open();
  bench.device.synchronize(Stream{side});
  int collected = 0;
  recorder.collect([&](const TestRecorder::Interval&) { ++collected; });
  CHECK(collected == 1);

  TestRecorder no_room{bench.device, 0, side};
  no_room.observer().begin(Activity::fill, side);
  no_room.observer().end(Activity::fill, side);
  CHECK(no_room.dropped() == 1);
  no_room.collect([&](const TestRecorder::Interval&) { ++collected; });
  CHECK(collected == 1);
}

TEST_CASE("a record that fails is counted and the step goes on") {
  const Watchdog watchdog{"failing records"};
  LoggingDevice device;
  const auto stream = device.create_stream("stream");
  TestRecorder recorder{device, 3, stream};
  const auto observer = recorder.observer();
  const auto activity = [&](Activity what) {
    observer.begin(what, stream);
    observer.end(what, stream);
  };
  device.fail_records(1);
  activity(Activity::fill);  // no begin
  CHECK(recorder.dropped() == 1);
  observer.begin(Activity::write_back, stream);
  device.fail_records(1);
  observer.end(Activity::write_back, stream);  // no end
  CHECK(recorder.dropped() == 2);
  observer.begin(Activity::stall, stream);  // the activity fails: nobody says that it ended
  activity(Activity::fill);
  CHECK(recorder.dropped() == 3);
  activity(Activity::fill);  // no room is left
  CHECK(recorder.dropped() == 4);
  device.synchronize(Stream{stream});
  std::vector<Activity> seen;
  recorder.collect([&](const TestRecorder::Interval& interval) { seen.push_back(interval.activity); });
  CHECK(seen == std::vector{Activity::fill});

  // An activity that failed when the last place was taken leaves nothing half open.
  activity(Activity::fill);
  activity(Activity::fill);
  observer.begin(Activity::stall, stream);
  activity(Activity::write_back);
  device.synchronize(Stream{stream});
  seen.clear();
  recorder.collect([&](const TestRecorder::Interval& interval) { seen.push_back(interval.activity); });
  CHECK(seen == std::vector{Activity::fill, Activity::fill});
  CHECK(recorder.dropped() == 6);
}

TEST_CASE("observed or not, a step whose calls fail ends with the same bits and counters") {
  const Watchdog watchdog{"observed failures"};
  for (std::uint64_t n = 1; n <= 60; ++n) {
    CAPTURE(n);
    ObservedBench bench{64};
    bench.home.synchronize(0, bench.home.memory().count());
    write_home(bench.home, 1);
    bench.device.fail_call(n);
    const auto again = [](auto&& call) {
      try {
        call();
      } catch (const DeviceError&) {
        call();
      }
    };
    again([&] { bench.scheduler.begin(bench.plan); });
    for (std::uint32_t i = 0; i < page_count; ++i) {
      Observed::LeaseType lease;
      again([&] { lease = bench.scheduler.lease(bench.steps[i].page, bench.compute); });
      again([&] { enqueue_update(bench.device, bench.compute, lease.as<std::uint32_t>(0, 1024), i); });
      lease.launched();
      try {
        lease.commit();
      } catch (const DeviceError&) {
        bench.scheduler.settle();
      }
    }
    again([&] { bench.scheduler.finish(bench.compute); });
    bench.device.fail_call(0);
    bench.synchronize();
    const auto words = bench.home.memory().as<std::uint32_t>();
    for (std::uint32_t page = 0; page < page_count; ++page) {
      for (std::uint64_t i = 0; i < 1024; ++i) {
        REQUIRE(words[page * 1024 + i] == updated_word(written_word(1, page * 1024 + i), page, i));
      }
    }
    CHECK(bench.collect().size() + bench.recorder.dropped() >= 3 * page_count);
  }
}
