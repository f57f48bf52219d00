// SlotPool: slots shared by schedulers, each with a guaranteed minimum, reclaimed from who keeps more; donated slots.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gate.hpp"
#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "hbmoff/paging/slot_pool.hpp"
#include "support/paging_bench.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;

namespace {

using Stream = HostDevice::StreamRef;
using Scheduler = PrefetchScheduler<LoggingDevice, OffloadAll, dynamic_depth>;
using Pool = SlotPool<LoggingDevice>;
using TestHome = Home<LoggingDevice>;

constexpr std::uint64_t page_words = 311;
constexpr Bytes page_bytes{page_words * 4};

/// A home of `pages` pages in a scheduler that shares a pool.
struct Sharer {
  TestHome home;
  Scheduler scheduler;
  std::vector<PageId> pages;

  Sharer(PagingBench& bench, Pool& pool, SchedulerOptions options, std::uint32_t count, std::uint32_t seed)
      : home{bench.host, page_bytes * count, "home", Role::other, bench.compute},
        scheduler{pool, bench.hbm, std::move(options)} {
    home.synchronize(0, home.memory().count());
    write_home(home, seed);
    for (std::uint32_t i = 0; i < count; ++i) {
      pages.push_back(scheduler.add_page(
          {.label = "page " + std::to_string(i), .parts = {{&home, page_bytes.count() * i, 0, page_bytes}}}));
    }
  }
  PlanId plan(std::vector<std::uint32_t> order, Access access) {
    std::vector<PlanStep> steps;
    for (const std::uint32_t page : order) steps.push_back({pages[page], access});
    return scheduler.add_plan(std::move(steps));
  }
};

SchedulerOptions share(std::uint32_t depth, std::uint32_t guaranteed, const char* name) {
  return {.depth = depth, .guaranteed_slots = guaranteed, .fill_evicted = true, .name = name};
}

Words words_of(const Scheduler::LeaseType& lease) { return lease.as<std::uint32_t>(0, page_words); }

}  // namespace

TEST_CASE("the guarantees of a pool must fit it, a depth must hold its guarantee, and neither may be nothing") {
  const Watchdog watchdog{"guarantees"};
  PagingBench bench;
  CHECK(thrown_by<InvalidArgument>([&] { Pool{bench.hbm, page_bytes, 0, Role::other, bench.compute}; }));
  CHECK(thrown_by<OutOfMemory>([&] { Pool{bench.hbm, Bytes{3 << 20}, 3, Role::other, bench.compute}; }));
  const Bytes used = bench.hbm.usage().used;
  Pool pool{bench.hbm, page_bytes, 4, Role::other, bench.compute};
  CHECK(bench.hbm.usage().used - used == bench.hbm.footprint(page_bytes) * 4);
  CHECK(pool.count() == 4);
  CHECK(pool.free_count() == 4);
  CHECK(pool.slot_bytes() == page_bytes);
  CHECK(pool.stream() == Stream{bench.compute});
  CHECK(thrown_by<InvalidArgument>([&] { Scheduler{pool, bench.hbm, share(2, 3, "greedy")}; }));
  CHECK(thrown_by<InvalidArgument>([&] { Scheduler{pool, bench.hbm, share(0, default_depth + 1, "greedy")}; }));
  Scheduler first{pool, bench.hbm, share(3, 2, "first")};
  Scheduler second{pool, bench.hbm, share(2, 0, "second")};  // 0 means one
  CHECK(thrown_by<InvalidArgument>([&] { Scheduler{pool, bench.hbm, share(2, 2, "too much")}; }));
  Scheduler third{pool, bench.hbm, share(2, 1, "third")};
  CHECK(thrown_by<InvalidArgument>([&] { Scheduler{pool, bench.hbm, share(1, 1, "one more")}; }));
  CHECK(bench.hbm.usage().used - used == bench.hbm.footprint(page_bytes) * 4);
}

TEST_CASE("a scheduler ahead of its plan leaves the others what they are guaranteed") {
  const Watchdog watchdog{"guaranteed minimum"};
  PagingBench bench;
  Pool pool{bench.hbm, page_bytes, 4, Role::other, bench.compute};
  Sharer eager{bench, pool, share(4, 1, "eager"), 6, 1};
  Sharer other{bench, pool, share(2, 2, "other"), 3, 2};
  eager.scheduler.begin(eager.plan({0, 1, 2, 3, 4, 5}, Access::read));
  other.scheduler.begin(other.plan({0, 1, 2}, Access::read));
  auto held = eager.scheduler.lease(eager.pages[0], bench.compute);
  CHECK(pool.free_count() == 2);  // one leased, one filled ahead: the other two are promised
  auto next = eager.scheduler.lease(eager.pages[1], bench.compute);
  const auto error =
      thrown_by<SlotsExhausted>([&] { auto lease = eager.scheduler.lease(eager.pages[2], bench.compute); });
  REQUIRE(error);
  const std::string message = error->what();
  for (const char* part : {"page 2", "page 0", "page 1", "eager"}) CHECK(message.find(part) != std::string::npos);
  // Nothing was changed: the same lease is possible once a slot is free.
  auto first = other.scheduler.lease(other.pages[0], bench.compute);
  auto second = other.scheduler.lease(other.pages[1], bench.compute);
  CHECK(pool.free_count() == 0);
  CHECK(thrown_by<SlotsExhausted>([&] { auto lease = other.scheduler.lease(other.pages[2], bench.compute); }));
  held.commit();
  CHECK(pool.free_count() == 1);
  auto third = eager.scheduler.lease(eager.pages[2], bench.compute);
  CHECK_FALSE(third.hit());
  third.commit();
  next.commit();
  first.commit();
  second.commit();
  eager.scheduler.finish(bench.compute);
  other.scheduler.finish(bench.compute);
  CHECK(pool.free_count() == 4);
}

TEST_CASE("who needs a slot takes one that another keeps beyond its guarantee; a dirty page goes home first") {
  const Watchdog watchdog{"reclaim"};
  PagingBench bench;
  Pool pool{bench.hbm, page_bytes, 3, Role::other, bench.compute};
  Sharer keeper{bench, pool, share(3, 1, "keeper"), 3, 1};
  Sharer taker{bench, pool, share(3, 1, "taker"), 4, 2};
  const auto side_owner = bench.device.create_stream("side");
  const Stream side = side_owner;
  // Writes two pages and keeps them for the way back.
  keeper.scheduler.begin(keeper.scheduler.add_plan({{keeper.pages[0], Access::write},
                                                    {keeper.pages[1], Access::write},
                                                    {keeper.pages[1], Access::read},
                                                    {keeper.pages[0], Access::read}}));
  Gate gate;
  bench.device.enqueue(bench.compute, gate.pass());
  for (std::uint32_t i = 0; i < 2; ++i) {
    auto lease = keeper.scheduler.lease(keeper.pages[i], bench.compute);
    enqueue_write(bench.device, bench.compute, words_of(lease), 40 + i);
    lease.commit();
  }
  CHECK(pool.free_count() == 1);
  CHECK(keeper.scheduler.dirty(keeper.pages[0]));
  taker.scheduler.begin(taker.plan({0, 1, 2, 3}, Access::read));
  std::vector<std::uint32_t> seen(2 * page_words);
  auto first = taker.scheduler.lease(taker.pages[0], side);
  CHECK(pool.free_count() == 0);
  CHECK(keeper.scheduler.stats().evictions == 0);  // filling ahead takes nothing from anyone
  auto second = taker.scheduler.lease(taker.pages[1], side);
  // The page needed last went home, behind its kernel, which the gate holds.
  CHECK(keeper.scheduler.stats().evictions == 1);
  CHECK(keeper.scheduler.stats().write_backs == 1);
  CHECK_FALSE(keeper.scheduler.dirty(keeper.pages[0]));
  CHECK(keeper.scheduler.dirty(keeper.pages[1]));
  enqueue_read(bench.device, side, words_of(first), seen.data());
  enqueue_read(bench.device, side, words_of(second), seen.data() + page_words);
  // The one slot that is left is guaranteed to the keeper.
  CHECK(thrown_by<SlotsExhausted>([&] { auto lease = taker.scheduler.lease(taker.pages[2], side); }));
  CHECK(keeper.scheduler.stats().evictions == 1);
  gate.open();
  first.commit();
  second.commit();
  std::vector<std::uint32_t> back(2 * page_words);
  for (std::uint32_t i = 2; i-- > 0;) {
    auto lease = keeper.scheduler.lease(keeper.pages[i], bench.compute);
    CHECK(lease.hit() == (i == 1));
    enqueue_read(bench.device, bench.compute, words_of(lease), back.data() + i * page_words);
    lease.commit();
  }
  keeper.scheduler.finish(bench.compute);
  taker.scheduler.finish(side);
  bench.device.synchronize(Stream{bench.compute});
  bench.device.synchronize(side);
  for (std::uint64_t i = 0; i < page_words; ++i) {
    REQUIRE(back[i] == written_word(40, i));
    REQUIRE(back[page_words + i] == written_word(41, i));
    REQUIRE(seen[i] == written_word(2, i));
    REQUIRE(seen[page_words + i] == written_word(2, page_words + i));
    REQUIRE(keeper.home.memory().as<std::uint32_t>()[i] == written_word(40, i));
  }
  CHECK(pool.free_count() == 3);
}

TEST_CASE("an optimizer and activations in turn on one pool: contents hold, and so does the bound") {
  const Watchdog watchdog{"in turn"};
  PagingBench bench;
  Pool pool{bench.hbm, page_bytes, 4, Role::other, bench.compute};
  const Bytes bound = bench.hbm.usage().used;
  Sharer states{bench, pool, share(4, 2, "states"), 7, 1};
  Sharer layers{bench, pool, share(4, 2, "layers"), 5, 2};
  const PlanId sweep = states.plan({0, 1, 2, 3, 4, 5, 6}, Access::read_write);
  std::vector<PlanStep> steps;
  for (std::uint32_t i = 0; i < 5; ++i) steps.push_back({layers.pages[i], Access::write});
  for (std::uint32_t i = 5; i-- > 0;) steps.push_back({layers.pages[i], Access::read});
  const PlanId there_and_back = layers.scheduler.add_plan(steps);
  std::vector<std::uint32_t> model(7 * page_words);
  for (std::uint64_t i = 0; i < model.size(); ++i) model[i] = written_word(1, i);
  std::vector<std::vector<std::uint32_t>> seen;
  for (std::uint32_t step = 0; step < 4; ++step) {
    layers.scheduler.begin(there_and_back);
    for (std::uint32_t i = 0; i < 10; ++i) {
      const std::uint32_t layer = i < 5 ? i : 9 - i;
      auto lease = layers.scheduler.lease(layers.pages[layer], bench.compute);
      if (i < 5) {
        enqueue_write(bench.device, bench.compute, words_of(lease), step * 10 + layer);
      } else {
        seen.emplace_back(page_words);
        enqueue_read(bench.device, bench.compute, words_of(lease), seen.back().data());
      }
      lease.commit();
    }
    // Not finished: what the layers keep has to give way to the optimizer.
    states.scheduler.begin(sweep);
    for (std::uint32_t page = 0; page < 7; ++page) {
      auto lease = states.scheduler.lease(states.pages[page], bench.compute);
      enqueue_update(bench.device, bench.compute, words_of(lease), step);
      lease.commit();
      for (std::uint64_t i = 0; i < page_words; ++i) {
        std::uint32_t& word = model[page * page_words + i];
        word = updated_word(word, step, i);
      }
      CHECK(bench.hbm.usage().used == bound);
    }
    states.scheduler.finish(bench.compute);
  }
  states.home.synchronize(0, states.home.memory().count());
  CHECK(std::memcmp(states.home.memory().data(), model.data(), model.size() * 4) == 0);
  bench.device.synchronize(Stream{bench.compute});
  for (std::uint32_t step = 0; step < 4; ++step) {
    for (std::uint32_t i = 0; i < 5; ++i) {
      const auto& words = seen[step * 5 + i];
      for (std::uint64_t w = 0; w < page_words; ++w) REQUIRE(words[w] == written_word(step * 10 + 4 - i, w));
    }
  }
}

TEST_CASE("a scheduler that ends hands its slots on, with the order they need") {
  const Watchdog watchdog{"handing on"};
  PagingBench bench;
  Pool pool{bench.hbm, page_bytes, 2, Role::other, bench.compute};
  Sharer next{bench, pool, share(1, 1, "next"), 1, 3};
  const auto side_owner = bench.device.create_stream("side");
  const Stream side = side_owner;
  Gate gate;
  std::vector<std::uint32_t> old(page_words), seen(page_words);
  {
    Sharer first{bench, pool, share(1, 1, "first"), 1, 2};
    first.scheduler.begin(first.plan({0}, Access::read));
    auto lease = first.scheduler.lease(first.pages[0], bench.compute);
    bench.device.enqueue(bench.compute, gate.pass());
    enqueue_read(bench.device, bench.compute, words_of(lease), old.data());
    // Released by its destructor; with the fill of evicted slots the copy streams wait for the gate.
    std::thread opener{[&] { gate.open(); }};
    lease.commit();
    opener.join();
  }
  CHECK(pool.free_count() == 2);
  for (int i = 0; i < 4; ++i) {  // both slots
    next.scheduler.begin(next.plan({0}, Access::read));
    auto lease = next.scheduler.lease(next.pages[0], side);
    enqueue_read(bench.device, side, words_of(lease), seen.data());
    lease.commit();
    next.scheduler.finish(side);
  }
  bench.device.synchronize(side);
  for (std::uint64_t i = 0; i < page_words; ++i) {
    REQUIRE(old[i] == written_word(2, i));
    REQUIRE(seen[i] == written_word(3, i));
  }
}

TEST_CASE("a slot whose release cannot be recorded before its scheduler ends is not handed on") {
  const Watchdog watchdog{"unrecorded for good"};
  PagingBench bench;
  Pool pool{bench.hbm, page_bytes, 2, Role::other, bench.compute};
  {
    Sharer sharer{bench, pool, share(1, 1, "sharer"), 1, 2};
    sharer.scheduler.begin(sharer.plan({0}, Access::read_write));
    auto lease = sharer.scheduler.lease(sharer.pages[0], bench.compute);
    lease.launched();
    {
      const auto ended = std::move(lease);
    }
    bench.device.fail_records(2);  // both attempts of the destructor
  }
  bench.device.fail_records(0);
  CHECK(pool.free_count() == 1);
}

TEST_CASE("a donated page arrives without a copy, its slot goes on with the replacement") {
  const Watchdog watchdog{"donate"};
  PagingBench bench;
  Pool pool{bench.hbm, page_bytes, 1, Role::activation, bench.compute};
  const auto side_owner = bench.device.create_stream("side");
  const Stream side = side_owner;
  HbmArena<LoggingDevice>::Buffer kept;
  std::vector<std::uint32_t> seen(page_words), after(page_words);
  {
    Sharer sharer{bench, pool, share(1, 1, "sharer"), 2, 2};
    sharer.scheduler.begin(sharer.plan({0, 1, 0}, Access::read));
    const auto buffer = [&](Bytes bytes) { return bench.hbm.allocate(bytes, "mine", Role::other, side); };
    Gate gate;
    {
      auto lease = sharer.scheduler.lease(sharer.pages[0], side);
      const std::byte* memory = lease.bytes().data();
      auto small = buffer(page_bytes - Bytes{1});
      CHECK(thrown_by<InvalidArgument>([&] { kept = lease.donate(std::move(small)); }));
      CHECK(small);  // nothing was changed
      CHECK_FALSE(lease.empty());
      auto replacement = buffer(page_bytes);
      const std::byte* mine = replacement.bytes().data();
      bench.device.fail_call(1);
      CHECK(thrown_by<DeviceError>([&] { kept = lease.donate(std::move(replacement)); }));
      CHECK(replacement);
      bench.device.enqueue(side, gate.pass());
      const auto before = bench.device.counts();
      kept = lease.donate(std::move(replacement));
      CHECK(lease.empty());
      CHECK(kept.bytes().data() == memory);
      CHECK(kept.size() == page_bytes);
      CHECK((bench.device.counts() - before).h2d_copies + (bench.device.counts() - before).d2h_copies == 0);
      CHECK(pool.free_count() == 1);
      auto next = sharer.scheduler.lease(sharer.pages[1], bench.compute);
      CHECK(next.bytes().data() == mine);
      enqueue_read(bench.device, bench.compute, words_of(next), after.data());
      next.commit();
    }
    enqueue_read(bench.device, side, kept.as<std::uint32_t>(), seen.data());
    gate.open();
    // The home keeps its content.
    auto lease = sharer.scheduler.lease(sharer.pages[0], bench.compute);
    CHECK_FALSE(lease.hit());
    lease.commit();
    bench.device.synchronize(side);
    bench.device.synchronize(Stream{bench.compute});
    sharer.scheduler.finish(bench.compute);
  }
  for (std::uint64_t i = 0; i < page_words; ++i) {
    REQUIRE(seen[i] == written_word(2, i));
    REQUIRE(after[i] == written_word(2, page_words + i));
  }
  // The buffer outlives the scheduler whose slot it was, and is freed in the order of its new owner's stream.
  Gate gate;
  bench.device.enqueue(side, gate.pass());
  enqueue_read(bench.device, side, kept.as<std::uint32_t>(), seen.data());
  kept = {};
  gate.open();
  bench.device.synchronize(side);
  for (std::uint64_t i = 0; i < page_words; ++i) REQUIRE(seen[i] == written_word(2, i));
}

TEST_CASE("a page is not donated while somebody would look for its content at home") {
  const Watchdog watchdog{"donate dirty"};
  for (const bool transient : {false, true}) {
    PagingBench bench;
    TestHome home{bench.host, page_bytes, "home", Role::other, bench.compute};
    Scheduler scheduler{bench.hbm, page_bytes, Role::other, {.depth = 1, .fill_evicted = true}};
    const PageId page =
        scheduler.add_page({.label = "layer", .parts = {{&home, 0, 0, page_bytes}}, .transient = transient});
    scheduler.begin(scheduler.add_plan({{page, Access::write}, {page, Access::read}, {page, Access::read}}));
    {
      auto lease = scheduler.lease(page, bench.compute);
      CHECK(thrown_by<InvalidArgument>(
          [&] { static_cast<void>(lease.donate(bench.hbm.allocate(page_bytes, "b", Role::other, bench.compute))); }));
      enqueue_write(bench.device, bench.compute, words_of(lease), 5);
      lease.commit();
    }
    std::vector<std::uint32_t> seen(page_words);
    for (const bool last : {false, true}) {
      auto lease = scheduler.lease(page, bench.compute);
      CHECK(lease.hit());
      auto replacement = bench.hbm.allocate(page_bytes, "mine", Role::other, bench.compute);
      if (last && transient) {
        const auto donated = lease.donate(std::move(replacement));
        enqueue_read(bench.device, bench.compute, donated.as<std::uint32_t>(), seen.data());
        bench.device.synchronize(Stream{bench.compute});
        for (std::uint64_t i = 0; i < page_words; ++i) REQUIRE(seen[i] == written_word(5, i));
      } else {
        CHECK(thrown_by<InvalidArgument>([&] { static_cast<void>(lease.donate(std::move(replacement))); }));
        CHECK_FALSE(lease.empty());
        lease.commit();
      }
    }
    scheduler.finish(bench.compute);
    CHECK(scheduler.stats().write_backs == (transient ? 0 : 1));
    CHECK(scheduler.stats().fills == 0);
  }
}

TEST_CASE("a donation whose slot cannot be tidied up at once is made all the same") {
  const Watchdog watchdog{"donate, failing"};
  for (std::uint64_t n = 1; n <= 4; ++n) {
    CAPTURE(n);
    PagingBench bench;
    Pool pool{bench.hbm, page_bytes, 1, Role::other, bench.compute};
    Sharer sharer{bench, pool, share(1, 1, "sharer"), 2, 2};
    sharer.scheduler.begin(sharer.plan({0, 1}, Access::read));
    std::vector<std::uint32_t> seen(2 * page_words);
    auto lease = sharer.scheduler.lease(sharer.pages[0], bench.compute);
    auto replacement = bench.hbm.allocate(page_bytes, "mine", Role::other, bench.compute);
    bench.device.fail_call(n);
    HbmArena<LoggingDevice>::Buffer donated;
    try {
      donated = lease.donate(std::move(replacement));
    } catch (const DeviceError&) {
      CHECK(n == 1);  // only the record of the release can refuse
      donated = lease.donate(std::move(replacement));
    }
    bench.device.fail_call(0);
    enqueue_read(bench.device, bench.compute, donated.as<std::uint32_t>(), seen.data());
    auto next = sharer.scheduler.lease(sharer.pages[1], bench.compute);
    enqueue_read(bench.device, bench.compute, words_of(next), seen.data() + page_words);
    next.commit();
    sharer.scheduler.finish(bench.compute);
    bench.device.synchronize(Stream{bench.compute});
    for (std::uint64_t i = 0; i < seen.size(); ++i) REQUIRE(seen[i] == written_word(2, i));
    CHECK(pool.free_count() == 1);
  }
}
