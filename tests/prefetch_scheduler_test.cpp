// PrefetchScheduler: bytes and copies of plans, order, and what misuse gets.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/observe/stats.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "support/logging_device.hpp"
#include "support/paging_bench.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;

namespace {

using Device_ = LoggingDevice;
using Scheduler = PrefetchScheduler<Device_, OffloadAll, dynamic_depth>;
using TestHome = Home<Device_>;

constexpr std::uint64_t words_of_a_page = 1031;  // prime: no page is a multiple of anything
constexpr Bytes page_bytes{words_of_a_page * 4};

/// Pages that cut one home into equal pieces.
struct Pages {
  TestHome home;
  std::vector<PageId> ids;

  Pages(PagingBench& bench, Scheduler& scheduler, std::uint32_t count, Access access, bool transient = false)
      : home{bench.host, page_bytes * count, "home", Role::optimizer_state, bench.compute} {
    bench.device.synchronize(HostDevice::StreamRef{bench.compute});
    write_home(home, 1);
    for (std::uint32_t i = 0; i < count; ++i) {
      ids.push_back(scheduler.add_page({.label = "page " + std::to_string(i),
                                        .parts = {{&home, page_bytes.count() * i, 0, page_bytes, access}},
                                        .transient = transient}));
    }
  }
  [[nodiscard]] std::vector<PlanStep> sweep(Access access) const {
    std::vector<PlanStep> steps;
    for (const PageId id : ids) steps.push_back({id, access});
    return steps;
  }
};

SchedulerOptions options(std::uint32_t depth) { return {.depth = depth, .fill_evicted = true}; }

/// Leases and commits every step of a plan, with a kernel of the step's kind.
void run(PagingBench& bench, Scheduler& scheduler, PlanId plan, const std::vector<PlanStep>& steps,
         std::uint32_t seed = 7) {
  scheduler.begin(plan);
  for (const PlanStep& step : steps) {
    auto lease = scheduler.lease(step.page, bench.compute);
    const auto words = lease.as<std::uint32_t>(0, words_of_a_page);
    if (step.access == Access::write) enqueue_write(bench.device, bench.compute, words, seed);
    if (step.access == Access::read_write) enqueue_update(bench.device, bench.compute, words, seed);
    lease.commit();
  }
  scheduler.finish(bench.compute);
}

}  // namespace

// -------------------------------------------------------------------------------------------------- bytes and copies

TEST_CASE("a sweep copies every page once in each direction that its access needs") {
  const Watchdog watchdog{"sweep"};
  for (std::uint32_t depth = 1; depth <= 4; ++depth) {
    for (const Access access : {Access::read, Access::write, Access::read_write}) {
      for (const std::uint32_t n : {0u, 1u, 2u, 11u}) {
        PagingBench bench;
        Scheduler scheduler{bench.hbm, page_bytes, Role::optimizer_state, options(depth)};
        Pages pages{bench, scheduler, n, access};
        const auto steps = pages.sweep(access);
        const PlanId plan = scheduler.add_plan(steps);
        const auto before = bench.device.counts();
        for (int sweep = 0; sweep < 2; ++sweep) run(bench, scheduler, plan, steps);
        bench.device.synchronize(HostDevice::StreamRef{bench.compute});

        const std::uint64_t in = reads(access) ? 2 * n : 0, out = writes(access) ? 2 * n : 0;
        const TransferStats expected{.h2d_bytes = in * page_bytes.count(),
                                     .d2h_bytes = out * page_bytes.count(),
                                     .fills = in,
                                     .write_backs = out};
        CHECK(scheduler.stats() == expected);
        const auto made = bench.device.counts() - before;
        CHECK(made.h2d_copies == in);
        CHECK(made.d2h_copies == out);
        CHECK(made.h2d_bytes == expected.h2d_bytes);
        CHECK(made.d2h_bytes == expected.d2h_bytes);
        CHECK(made.streams == 0);
        CHECK(scheduler.depth() == depth);
        CHECK(bench.hbm.usage().used == bench.hbm.footprint(page_bytes) * depth);
      }
    }
  }
}

TEST_CASE("forward then reverse: the last min(n, depth) pages make no copy") {
  const Watchdog watchdog{"forward then reverse"};
  for (std::uint32_t depth = 1; depth <= 4; ++depth) {
    for (const bool transient : {false, true}) {
      for (const std::uint32_t n : {1u, 2u, 3u, 9u}) {
        PagingBench bench;
        Scheduler scheduler{bench.hbm, page_bytes, Role::activation, options(depth)};
        Pages pages{bench, scheduler, n, Access::read_write, transient};
        std::vector<PlanStep> steps = pages.sweep(Access::write);
        for (std::uint32_t i = n; i-- > 0;) steps.push_back({pages.ids[i], Access::read});
        run(bench, scheduler, scheduler.add_plan(steps), steps);

        const std::uint64_t kept = std::min(n, depth);
        // Kept pages are dirty; when the read was their last access a transient one is dropped.
        const std::uint64_t written = transient ? n - kept : n;
        CHECK(scheduler.stats() == TransferStats{.h2d_bytes = (n - kept) * page_bytes.count(),
                                                 .d2h_bytes = written * page_bytes.count(),
                                                 .fills = n - kept,
                                                 .write_backs = written,
                                                 .hits = kept});
      }
    }
  }
}

TEST_CASE("a plan with repeats: small ones by hand") {
  const Watchdog watchdog{"repeats"};
  for (std::uint32_t depth = 1; depth <= 3; ++depth) {
    PagingBench bench;
    Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(depth)};
    Pages pages{bench, scheduler, 2, Access::read_write};
    const PageId a = pages.ids[0], b = pages.ids[1];
    const std::vector<PlanStep> steps = {
        {a, Access::read_write}, {a, Access::read_write}, {b, Access::read_write}, {a, Access::read_write}};
    run(bench, scheduler, scheduler.add_plan(steps), steps);
    // At depth 1 page a makes room for b; from depth 2 on it stays.
    const std::uint64_t copies = depth == 1 ? 3 : 2, hits = depth == 1 ? 1 : 2;
    CHECK(scheduler.stats() == TransferStats{.h2d_bytes = copies * page_bytes.count(),
                                             .d2h_bytes = copies * page_bytes.count(),
                                             .fills = copies,
                                             .write_backs = copies,
                                             .hits = hits});
  }
}

TEST_CASE("random plans: fills, write-backs and hits as a plain model of the rule says") {
  const Watchdog watchdog{"random plans"};
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random{seed};
    const auto depth = static_cast<std::uint32_t>(1 + random() % 4);
    const auto n = static_cast<std::uint32_t>(1 + random() % 7);
    const bool transient = random() % 2 == 0;
    PagingBench bench;
    Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(depth)};
    Pages pages{bench, scheduler, n, Access::read_write, transient};
    std::vector<PlanStep> steps;
    for (int i = 0; i < 60; ++i) {
      const std::uint64_t near =
          steps.empty() || random() % 2 == 0
              ? random() % n
              : static_cast<std::uint64_t>(
                    steps[steps.size() - 1 - random() % std::min<std::size_t>(steps.size(), 3)].page);
      steps.push_back({pages.ids[near], static_cast<Access>(1 + random() % 3)});
    }
    run(bench, scheduler, scheduler.add_plan(steps), steps);

    TransferStats expected;
    std::vector<bool> held(n, false), dirty(n, false);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto page = static_cast<std::uint32_t>(steps[i].page);
      if (held[page]) {
        ++expected.hits;
      } else if (reads(steps[i].access)) {
        ++expected.fills;
      }
      if (writes(steps[i].access)) dirty[page] = true;
      std::vector<PageId> others;
      std::size_t next = i + 1;
      for (; next < steps.size() && steps[next].page != steps[i].page; ++next) {
        if (std::find(others.begin(), others.end(), steps[next].page) == others.end())
          others.push_back(steps[next].page);
      }
      const bool last = next == steps.size();
      held[page] = !last && others.size() < depth;
      if (!held[page]) {
        if (dirty[page] && !(last && transient)) ++expected.write_backs;
        dirty[page] = false;
      }
    }
    expected.h2d_bytes = expected.fills * page_bytes.count();
    expected.d2h_bytes = expected.write_backs * page_bytes.count();
    CHECK(scheduler.stats() == expected);
  }
}

TEST_CASE("neighbouring parts travel as one copy, each direction on its own") {
  const Watchdog watchdog{"parts"};
  PagingBench bench;
  Scheduler scheduler{bench.hbm, 4_KiB, Role::other, options(2)};
  TestHome first{bench.host, 2_KiB, "first", Role::weight, bench.compute};
  TestHome second{bench.host, 2_KiB, "second", Role::weight, bench.compute};
  bench.device.synchronize(HostDevice::StreamRef{bench.compute});
  write_home(first, 1);
  write_home(second, 2);
  const std::vector<std::byte> first_before(first.memory().begin(), first.memory().end());

  const PageId joined = scheduler.add_page({.label = "joined",
                                            .parts = {{&first, 0, 0, 100_B, Access::read},
                                                      {&first, 100, 100, 0_B, Access::write},
                                                      {&first, 100, 100, 300_B, Access::read_write},
                                                      {&second, 64, 400, 200_B, Access::write},
                                                      {&second, 264, 600, 8_B, Access::read_write}}});
  // Neighbours in the home but not in the slot, and the other way round.
  const PageId apart = scheduler.add_page({.label = "apart",
                                           .parts = {{&first, 512, 0, 64_B, Access::read_write},
                                                     {&first, 576, 128, 64_B, Access::read_write},
                                                     {&first, 704, 192, 64_B, Access::read_write}}});
  const PageId scratch = scheduler.add_page({.label = "scratch", .slot_bytes = 4_KiB});
  const PlanId plan = scheduler.add_plan({{joined, Access::read_write},
                                          {apart, Access::read_write},
                                          {scratch, Access::read_write},
                                          {joined, Access::read}});

  scheduler.begin(plan);
  const auto before = bench.device.counts();
  {
    auto lease = scheduler.lease(joined, bench.compute);
    CHECK(lease.bytes().count() == 4096);
    bench.device.enqueue(bench.compute, [memory = lease.bytes()] { std::memset(memory.data(), 0x11, 608); });
    lease.commit();
    auto made = bench.device.counts() - before;
    CHECK(made.h2d_copies == 2 + 3);  // 0..400 of `first`, 264..272 of `second`; and ahead: `apart`
    CHECK(made.h2d_bytes == 400 + 8 + 3 * 64);
    CHECK(made.d2h_copies == 2);
    CHECK(made.d2h_bytes == 300 + 208);
  }
  scheduler.lease(apart, bench.compute).commit();
  auto made = bench.device.counts() - before;
  CHECK(made.d2h_copies == 5);
  scheduler.lease(scratch, bench.compute).commit();
  const auto again = scheduler.lease(joined, bench.compute);
  CHECK_FALSE(again.hit());
  made = bench.device.counts() - before;
  CHECK(made.h2d_copies == 7);
  CHECK(made.d2h_copies == 5);
  bench.device.synchronize(HostDevice::StreamRef{bench.compute});

  // The part for reading only was not written back, and its neighbours were.
  CHECK(std::memcmp(first.memory().data(), first_before.data(), 100) == 0);
  for (std::uint64_t i = 100; i < 400; ++i) REQUIRE(first.memory()[i] == std::byte{0x11});
  CHECK(std::memcmp(first.memory().data() + 400, first_before.data() + 400, 2048 - 400) == 0);
  for (std::uint64_t i = 64; i < 272; ++i) REQUIRE(second.memory()[i] == std::byte{0x11});
}
