// Timeline and Home: order that does not hang on luck. Streams are held by a gate, and nothing overtakes.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gate.hpp"
#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "hbmoff/paging/timeline.hpp"
#include "support/paging_bench.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;

namespace {

using Stream = HostDevice::StreamRef;
using Scheduler = PrefetchScheduler<LoggingDevice, OffloadAll, dynamic_depth>;
using TestHome = Home<LoggingDevice>;

constexpr std::uint64_t page_words = 509;
constexpr Bytes page_bytes{page_words * 4};

SchedulerOptions options(std::uint32_t depth, const char* name = "pages") {
  return {.depth = depth, .fill_evicted = true, .name = name};
}

/// Puts a step on `stream` that notes it was reached.
void note(LoggingDevice& device, Stream stream, std::atomic<bool>& reached) {
  device.host_func(stream, [&reached] { reached.store(true); });
}

/// Whether the work put on `stream` so far is still pending after a while. It is where the stream is held, whatever the
/// timing; where a wait is missing it is very likely not.
bool stays_pending(LoggingDevice& device, Stream stream) {
  const auto event = device.create_event();
  device.record(event, stream);
  for (int i = 0; i < 20; ++i) {
    if (device.query(event)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
  return true;
}

void expect_words(const std::vector<std::uint32_t>& words, std::uint32_t seed, std::uint64_t first = 0) {
  for (std::uint64_t i = 0; i < words.size(); ++i) REQUIRE(words[i] == written_word(seed, first + i));
}

}  // namespace

TEST_CASE("a ticket is waited for however old it is, and never too short") {
  const Watchdog watchdog{"tickets"};
  LoggingDevice device;
  Timeline<LoggingDevice> timeline{device, "numbers"};
  const auto waiter_owner = device.create_stream("waiter");
  const Stream waiter = waiter_owner;
  constexpr std::uint64_t count = 3 * Timeline<LoggingDevice>::ring_size + 5;
  std::vector<std::unique_ptr<Gate>> gates;
  std::vector<std::uint64_t> tickets;
  std::atomic<std::uint64_t> done{0};
  for (std::uint64_t i = 0; i < count; ++i) {
    gates.push_back(std::make_unique<Gate>());
    device.host_func(timeline.stream(), gates.back()->pass());
    device.host_func(timeline.stream(), [&done, i] { done.store(i + 1); });
    tickets.push_back(timeline.advance());
    if (i % 3 != 1) timeline.record();  // some are recorded only when someone asks for them
  }
  // Tickets were 1, 2, ...; each waiter sees its work done, whether its event was recorded again or not.
  std::vector<std::uint64_t> seen(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    CHECK(tickets[i] == i + 1);
    timeline.order_before(waiter, tickets[i]);
    device.host_func(waiter, [&done, out = &seen[i]] { *out = done.load(); });
  }
  for (auto& gate : gates) gate->open();
  device.synchronize(waiter);
  for (std::uint64_t i = 0; i < count; ++i) CHECK(seen[i] >= i + 1);
  // The newest ones, which are in the ring, are waited for exactly; checked one by one with the gates closed.
  for (std::uint64_t i = 0; i < 4; ++i) {
    Gate before, behind;
    device.host_func(timeline.stream(), before.pass());
    const std::uint64_t ticket = timeline.advance();
    timeline.record();
    device.host_func(timeline.stream(), behind.pass());
    timeline.advance();
    timeline.record();
    std::atomic<bool> reached{false};
    timeline.order_before(waiter, ticket);
    note(device, waiter, reached);
    CHECK_FALSE(reached.load());
    before.open();
    device.synchronize(waiter);  // does not wait for `behind`
    CHECK(reached.load());
  }
  timeline.synchronize(tickets.front());
  timeline.drain();
}

TEST_CASE("a ticket whose record failed is recorded by who waits for it") {
  const Watchdog watchdog{"failed record"};
  LoggingDevice device;
  Timeline<LoggingDevice> timeline{device, "numbers"};
  const auto waiter_owner = device.create_stream("waiter");
  const Stream waiter = waiter_owner;
  for (int round = 0; round < 20; ++round) {
    Gate gate;
    std::atomic<bool> reached{false};
    timeline.advance();
    timeline.record();
    device.host_func(timeline.stream(), gate.pass());
    const std::uint64_t ticket = timeline.advance();
    device.fail_call(1);
    CHECK(thrown_by<DeviceError>([&] { timeline.record(); }));
    if (round % 2 == 0) {
      device.fail_call(1);  // fails for the waiter as well; it asks again
      CHECK(thrown_by<DeviceError>([&] { timeline.order_before(waiter, ticket); }));
    }
    timeline.order_before(waiter, ticket);
    note(device, waiter, reached);
    CHECK(stays_pending(device, waiter));
    CHECK_FALSE(reached.load());
    gate.open();
    timeline.synchronize(ticket);
    device.synchronize(waiter);
    CHECK(reached.load());
  }
}

namespace {

/// A bench with a second stream and a home of four pages, whose page p holds `written_word(1, p * page_words + i)`.
struct HomeBench : PagingBench {
  HostDevice::Stream side_owner = device.create_stream("side");
  TestHome home{host, page_bytes * 4, "home", Role::other, compute};
  Stream side = side_owner;
  Stream main = compute;

  explicit HomeBench(Bytes capacity = Bytes{8 << 20}) : PagingBench{capacity} {
    home.synchronize(0, home.memory().count());
    write_home(home, 1);
  }
  /// The pages of the home in `scheduler`, each of `pages` of them in a row.
  std::vector<PageId> cut(Scheduler& scheduler, std::uint64_t pages = 1) {
    std::vector<PageId> ids;
    for (std::uint64_t i = 0; i < 4; i += pages) {
      ids.push_back(scheduler.add_page(
          {.label = "page " + std::to_string(i), .parts = {{&home, i * page_bytes.count(), 0, page_bytes * pages}}}));
    }
    return ids;
  }
  [[nodiscard]] std::vector<std::uint32_t> home_words(std::uint64_t page) {
    const auto words = home.memory().as<std::uint32_t>().subspan(page * page_words, page_words);
    return {words.begin(), words.end()};
  }
};

Words words_of(const Scheduler::LeaseType& lease, std::uint64_t pages = 1) {
  return lease.as<std::uint32_t>(0, page_words * pages);
}

}  // namespace

TEST_CASE("a fill waits for an earlier write-back of another scheduler that cuts the home differently") {
  const Watchdog watchdog{"fill behind write-back"};
  HomeBench bench;
  Scheduler writer{bench.hbm, page_bytes, Role::other, options(2, "writer")};
  Scheduler reader{bench.hbm, page_bytes * 2, Role::other, options(2, "reader")};
  const auto pages = bench.cut(writer);
  const auto pairs = bench.cut(reader, 2);
  writer.begin(writer.add_plan({{pages[1], Access::write}}));
  reader.begin(reader.add_plan({{pairs[0], Access::read}}));
  Gate gate;
  {
    auto lease = writer.lease(pages[1], bench.main);
    bench.device.enqueue(bench.main, gate.pass());
    enqueue_write(bench.device, bench.main, words_of(lease), 5);
    lease.commit();
  }
  std::vector<std::uint32_t> seen(2 * page_words);
  auto lease = reader.lease(pairs[0], bench.side);
  enqueue_read(bench.device, bench.side, words_of(lease, 2), seen.data());
  lease.commit();
  CHECK(stays_pending(bench.device, bench.side));
  gate.open();
  bench.device.synchronize(bench.side);
  for (std::uint64_t i = 0; i < page_words; ++i) {
    REQUIRE(seen[i] == written_word(1, i));
    REQUIRE(seen[page_words + i] == written_word(5, i));
  }
}

TEST_CASE("a write-back waits for an earlier fill of another scheduler, and `finish` for the write-back") {
  const Watchdog watchdog{"write-back behind fill"};
  HomeBench bench;
  Scheduler reader{bench.hbm, page_bytes, Role::other, options(1, "reader")};
  Scheduler writer{bench.hbm, page_bytes * 2, Role::other, options(2, "writer")};
  const auto pages = bench.cut(reader);
  const auto pairs = bench.cut(writer, 2);
  reader.begin(reader.add_plan({{pages[0], Access::read}, {pages[1], Access::read}}));
  writer.begin(writer.add_plan({{pairs[0], Access::write}}));
  Gate gate;
  {
    auto lease = reader.lease(pages[0], bench.main);
    bench.device.enqueue(bench.main, gate.pass());
    lease.commit();
  }
  std::vector<std::uint32_t> seen(page_words);
  {
    auto lease = reader.lease(pages[1], bench.main);  // its fill waits for the slot, which the gate holds
    enqueue_read(bench.device, bench.main, words_of(lease), seen.data());
    lease.commit();
  }
  {
    auto lease = writer.lease(pairs[0], bench.side);
    enqueue_write(bench.device, bench.side, words_of(lease, 2), 6);
    lease.commit();
  }
  bench.device.synchronize(bench.side);  // the kernel is not held by anything
  writer.finish(bench.side);
  CHECK(stays_pending(bench.device, bench.side));
  gate.open();
  bench.device.synchronize(bench.side);
  expect_words(bench.home_words(0), 6);
  bench.device.synchronize(bench.main);
  expect_words(seen, 1, page_words);
}

TEST_CASE("a slot is not filled again before the last kernel that used it, on any stream of the lease") {
  const Watchdog watchdog{"slot reuse"};
  for (const bool on_side : {false, true}) {
    HomeBench bench;
    const auto third_owner = bench.device.create_stream("third");
    const Stream third = third_owner;
    Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(1)};
    const auto pages = bench.cut(scheduler);
    scheduler.begin(scheduler.add_plan({{pages[0], Access::read}, {pages[1], Access::read}}));
    Gate gate;
    std::vector<std::uint32_t> first(page_words), second(page_words);
    {
      auto lease = scheduler.lease(pages[0], bench.main);
      lease.used_on(bench.side);
      lease.used_on(bench.side);  // once is enough
      const Stream stream = on_side ? bench.side : bench.main;
      bench.device.enqueue(stream, gate.pass());
      enqueue_read(bench.device, stream, words_of(lease), first.data());
    }
    {
      auto lease = scheduler.lease(pages[1], third);
      enqueue_read(bench.device, third, words_of(lease), second.data());
      lease.commit();
    }
    CHECK(stays_pending(bench.device, third));
    gate.open();
    bench.device.synchronize(third);
    bench.device.synchronize(bench.main);
    bench.device.synchronize(bench.side);
    expect_words(first, 1);
    expect_words(second, 1, page_words);
  }
}

TEST_CASE("a kept page leased on another stream waits for who wrote it; `used_on` waits for the fill") {
  const Watchdog watchdog{"kept page"};
  HomeBench bench;
  const auto third_owner = bench.device.create_stream("third");
  const Stream third = third_owner;
  Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(2)};
  const auto pages = bench.cut(scheduler);
  scheduler.begin(scheduler.add_plan({{pages[0], Access::write}, {pages[0], Access::read}}));
  Gate gate;
  {
    auto lease = scheduler.lease(pages[0], bench.main);
    bench.device.enqueue(bench.main, gate.pass());
    enqueue_write(bench.device, bench.main, words_of(lease), 8);
    lease.commit();
  }
  std::vector<std::uint32_t> on_side(page_words), on_third(page_words);
  auto lease = scheduler.lease(pages[0], bench.side);
  CHECK(lease.hit());
  lease.used_on(third);
  enqueue_read(bench.device, bench.side, words_of(lease), on_side.data());
  enqueue_read(bench.device, third, words_of(lease), on_third.data());
  lease.commit();
  CHECK(stays_pending(bench.device, bench.side));
  CHECK(stays_pending(bench.device, third));
  gate.open();
  bench.device.synchronize(bench.side);
  bench.device.synchronize(third);
  expect_words(on_side, 8);
  expect_words(on_third, 8);
}

TEST_CASE("`synchronize` of a home blocks until its range is written, and brings home what is kept") {
  const Watchdog watchdog{"synchronize"};
  HomeBench bench;
  Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(2)};
  const auto pages = bench.cut(scheduler);
  scheduler.begin(scheduler.add_plan({{pages[0], Access::write}, {pages[1], Access::write}, {pages[0], Access::read}}));
  Gate gate;
  {
    auto lease = scheduler.lease(pages[0], bench.main);
    bench.device.enqueue(bench.main, gate.pass());
    enqueue_write(bench.device, bench.main, words_of(lease), 9);
    lease.commit();  // kept
  }
  CHECK(scheduler.dirty(pages[0]));
  bench.home.synchronize(page_bytes.count(), 3 * page_bytes.count());  // another range: nothing to wait for
  CHECK(scheduler.dirty(pages[0]));
  std::atomic<bool> returned{false};
  std::thread other{[&] {
    bench.home.synchronize(0, page_bytes.count());
    returned.store(true);
  }};
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  CHECK_FALSE(returned.load());
  gate.open();
  other.join();
  expect_words(bench.home_words(0), 9);
  CHECK_FALSE(scheduler.dirty(pages[0]));
  scheduler.lease(pages[1], bench.main).commit();
  CHECK(scheduler.lease(pages[0], bench.main).hit());  // it stayed in its slot
  CHECK(scheduler.stats().write_backs == 2);
}

TEST_CASE("memory that a home gets from an arena is not touched before who had it is done") {
  const Watchdog watchdog{"memory of a home"};
  HomeBench bench;
  Gate gate;
  auto before = bench.host.allocate(page_bytes, "before", Role::other, bench.side);
  const std::byte* where = before.bytes().data();
  bench.device.host_func(bench.side, gate.pass());
  before.free(bench.side);  // behind the gate it is filled with 0xFF
  TestHome home{bench.host, page_bytes, "after", Role::other, bench.side};
  REQUIRE(home.memory().data() == where);
  Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(2)};
  scheduler.reserve();  // before the home is known, so that only the copies can wait for its memory
  const PageId page = scheduler.add_page({.label = "page", .parts = {{&home, 0, 0, page_bytes}}});
  scheduler.begin(scheduler.add_plan({{page, Access::write}}));
  {
    auto lease = scheduler.lease(page, bench.main);
    enqueue_write(bench.device, bench.main, words_of(lease), 3);
    lease.commit();
  }
  scheduler.finish(bench.main);
  CHECK(stays_pending(bench.device, bench.main));
  gate.open();
  home.synchronize(0, page_bytes.count());
  const auto words = home.memory().as<std::uint32_t>();
  expect_words({words.begin(), words.end()}, 3);
}

TEST_CASE("what was committed and kept is seen by the next page that overlaps it, and older copies are made anew") {
  const Watchdog watchdog{"coherence"};
  HomeBench bench;
  Scheduler writer{bench.hbm, page_bytes, Role::other, options(3, "writer")};
  Scheduler reader{bench.hbm, page_bytes * 2, Role::other, options(2, "reader")};
  const auto pages = bench.cut(writer);
  const auto pairs = bench.cut(reader, 2);
  writer.begin(writer.add_plan({{pages[2], Access::read_write},
                                {pages[0], Access::read_write},
                                {pages[0], Access::read},
                                {pages[0], Access::read_write},
                                {pages[2], Access::read}}));
  reader.begin(reader.add_plan({{pairs[0], Access::read}, {pairs[1], Access::read}, {pairs[0], Access::read}}));
  std::vector<std::uint32_t> seen(2 * page_words);

  const auto update = [&](PageId page, std::uint32_t seed) {
    auto lease = writer.lease(page, bench.main);
    enqueue_update(bench.device, bench.main, words_of(lease), seed);
    lease.commit();
  };
  {
    auto lease = reader.lease(pairs[0], bench.side);  // fills the second pair ahead
    enqueue_read(bench.device, bench.side, words_of(lease, 2), seen.data());
  }
  CHECK(reader.stats().fills == 2);
  bench.device.synchronize(bench.side);
  REQUIRE(seen[0] == written_word(1, 0));
  update(pages[2], 4);  // kept dirty; the second pair is out of date
  CHECK(writer.dirty(pages[2]));
  {
    auto lease = reader.lease(pairs[1], bench.side);
    CHECK_FALSE(lease.hit());
    CHECK(reader.stats().fills == 3);
    CHECK_FALSE(writer.dirty(pages[2]));
    CHECK(writer.stats().write_backs == 1);
    enqueue_read(bench.device, bench.side, words_of(lease, 2), seen.data());
  }
  bench.device.synchronize(bench.side);
  for (std::uint64_t i = 0; i < page_words; ++i) {
    REQUIRE(seen[i] == updated_word(written_word(1, 2 * page_words + i), 4, i));
    REQUIRE(seen[page_words + i] == written_word(1, 3 * page_words + i));
  }

  // A dirty page that is leased for reading goes home under the lease; one leased for writing again refuses.
  update(pages[0], 5);
  {
    auto held = writer.lease(pages[0], bench.main);
    CHECK(writer.dirty(pages[0]));
    bench.home.synchronize(0, page_bytes.count());
    CHECK_FALSE(writer.dirty(pages[0]));
    CHECK(bench.home_words(0)[7] == updated_word(written_word(1, 7), 5, 7));
    held.commit();
  }
  {
    auto held = writer.lease(pages[0], bench.main);
    enqueue_update(bench.device, bench.main, words_of(held), 6);
    held.commit();
  }
  writer.finish(bench.main);
  const PlanId again = writer.add_plan({{pages[1], Access::write}, {pages[1], Access::read_write}});
  writer.begin(again);
  update(pages[1], 7);
  auto held = writer.lease(pages[1], bench.main);
  const TransferStats stats = reader.stats();
  CHECK(thrown_by<InvalidArgument>([&] { auto lease = reader.lease(pairs[0], bench.side); }));
  CHECK(thrown_by<InvalidArgument>([&] { bench.home.synchronize(0, 4 * page_bytes.count()); }));
  CHECK(reader.stats() == stats);
  held.commit();
  auto lease = reader.lease(pairs[0], bench.side);
  enqueue_read(bench.device, bench.side, words_of(lease, 2), seen.data());
  lease.commit();
  bench.device.synchronize(bench.side);
  CHECK(seen[page_words] != written_word(1, page_words));
  CHECK(seen[7] == updated_word(updated_word(written_word(1, 7), 5, 7), 6, 7));
}

// Found by fuzzing: the newest content of one part hid that the other had become out of date.
TEST_CASE("a kept page that was written reads anew what others wrote, during its lease, beside what it wrote") {
  const Watchdog watchdog{"a part of a page"};
  for (const bool kept_by_other : {false, true}) {
    for (const bool brought_home_before : {false, true}) {
      CAPTURE(kept_by_other);
      CAPTURE(brought_home_before);
      HomeBench bench;
      Scheduler other{bench.hbm, page_bytes, Role::other, options(3, "other")};
      Scheduler scheduler{bench.hbm, page_bytes * 2, Role::other, options(2, "scheduler")};
      const PageId single = bench.cut(other)[0];
      const PageId pair = scheduler.add_page(
          {.label = "pair",
           .parts = {{&bench.home, 0, 0, page_bytes, Access::read},
                     {&bench.home, page_bytes.count(), page_bytes.count(), page_bytes, Access::read_write}}});
      std::vector<PlanStep> singles{{single, Access::read_write}};
      if (kept_by_other) singles.push_back({single, Access::read});
      other.begin(other.add_plan(singles));
      scheduler.begin(scheduler.add_plan({{pair, Access::read_write}, {pair, Access::read}}));
      {
        auto lease = scheduler.lease(pair, bench.side);
        auto lease_of_other = other.lease(single, bench.main);
        enqueue_update(bench.device, bench.main, words_of(lease_of_other), 4);
        lease_of_other.commit();
        enqueue_update(bench.device, bench.side, lease.as<std::uint32_t>(page_bytes.count(), page_words), 5);
        lease.commit();
      }
      CHECK(other.dirty(single) == kept_by_other);
      CHECK(scheduler.dirty(pair));
      if (brought_home_before) bench.home.synchronize(page_bytes.count(), page_bytes.count());
      CHECK(scheduler.dirty(pair) == !brought_home_before);
      std::vector<std::uint32_t> seen(2 * page_words);
      {
        auto lease = scheduler.lease(pair, bench.side);
        CHECK_FALSE(lease.hit());
        enqueue_read(bench.device, bench.side, words_of(lease, 2), seen.data());
      }
      CHECK(scheduler.stats().write_backs == 1);
      CHECK(scheduler.stats().fills == 2);
      bench.device.synchronize(bench.side);
      for (std::uint64_t i = 0; i < page_words; ++i) {
        REQUIRE(seen[i] == updated_word(written_word(1, i), 4, i));
        REQUIRE(seen[page_words + i] == updated_word(written_word(1, page_words + i), 5, i));
      }
    }
  }
}

TEST_CASE("loading a home makes every copy of it worthless: dropped unwritten, also after a failed write-back") {
  const Watchdog watchdog{"invalidate"};
  HomeBench bench;
  Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(3)};
  const auto pages = bench.cut(scheduler);
  const PlanId plan = scheduler.add_plan({{pages[0], Access::read_write},
                                          {pages[1], Access::read},
                                          {pages[0], Access::read},
                                          {pages[2], Access::read_write},
                                          {pages[3], Access::write}});
  const auto load = [&](std::uint32_t seed) {
    bench.home.invalidate();
    bench.home.synchronize(0, bench.home.memory().count());  // fills ahead may still read it
    write_home(bench.home, seed);
  };
  const std::uint64_t generation = bench.home.generation();
  scheduler.begin(plan);
  {
    auto lease = scheduler.lease(pages[0], bench.main);
    enqueue_update(bench.device, bench.main, words_of(lease), 2);
    lease.commit();
  }
  scheduler.lease(pages[1], bench.main).commit();
  CHECK(scheduler.dirty(pages[0]));
  bench.device.synchronize(bench.main);
  load(20);
  CHECK(bench.home.generation() == generation + 1);
  CHECK_FALSE(scheduler.dirty(pages[0]));
  std::vector<std::uint32_t> seen(page_words);
  {
    auto lease = scheduler.lease(pages[0], bench.main);
    CHECK_FALSE(lease.hit());  // kept, but worthless
    enqueue_read(bench.device, bench.main, words_of(lease), seen.data());
  }
  bench.device.synchronize(bench.main);
  expect_words(seen, 20);
  CHECK(scheduler.stats().write_backs == 0);

  // Leased before the load, committed behind it: refused, and not written.
  {
    auto lease = scheduler.lease(pages[2], bench.main);
    enqueue_update(bench.device, bench.main, words_of(lease), 3);
    bench.device.synchronize(bench.main);
    load(21);
    CHECK(thrown_by<InvalidArgument>([&] { lease.commit(); }));
    CHECK(lease.empty());
  }
  // Committed, but the write-back failed before the load.
  {
    auto lease = scheduler.lease(pages[3], bench.main);
    enqueue_write(bench.device, bench.main, words_of(lease), 4);
    bench.device.fail_call(2);  // the release is recorded; the first call of the write-back fails
    CHECK(thrown_by<DeviceError>([&] { lease.commit(); }));
    CHECK(scheduler.dirty(pages[3]));
    load(22);
    CHECK_FALSE(scheduler.dirty(pages[3]));
    scheduler.settle();
  }
  scheduler.finish(bench.main);
  bench.device.synchronize(bench.main);
  CHECK(scheduler.stats().write_backs == 0);
  for (std::uint64_t page = 0; page < 4; ++page) expect_words(bench.home_words(page), 22, page * page_words);
}

TEST_CASE("a kept page that was written and then leased for reading across a load is not written back") {
  const Watchdog watchdog{"stale under a read lease"};
  HomeBench bench;
  Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(2)};
  const auto pages = bench.cut(scheduler);
  scheduler.begin(scheduler.add_plan({{pages[0], Access::write}, {pages[0], Access::read}}));
  {
    auto lease = scheduler.lease(pages[0], bench.main);
    enqueue_write(bench.device, bench.main, words_of(lease), 2);
    lease.commit();
  }
  {
    auto lease = scheduler.lease(pages[0], bench.main);
    bench.home.invalidate();
    bench.home.synchronize(0, bench.home.memory().count());
    write_home(bench.home, 30);
    lease.commit();
  }
  scheduler.finish(bench.main);
  bench.device.synchronize(bench.main);
  expect_words(bench.home_words(0), 30);
}

TEST_CASE("a home outlives its schedulers, memory of the user's own serves as one, and 16 schedulers share it") {
  const Watchdog watchdog{"many schedulers"};
  HomeBench bench{Bytes{32 << 20}};
  const auto memory = bench.device.allocate_pinned(page_bytes);
  {
    TestHome own{memory};
    write_home(own, 3);
    std::vector<std::uint32_t> seen(page_words);
    for (int round = 0; round < 3; ++round) {
      Scheduler scheduler{bench.hbm, page_bytes, Role::other, {.depth = 1, .one_copy_stream = true}};
      const PageId page = scheduler.add_page({.label = "page", .parts = {{&own, 0, 0, page_bytes}}});
      scheduler.begin(scheduler.add_plan({{page, Access::read_write}}));
      auto lease = scheduler.lease(page, bench.main);
      enqueue_update(bench.device, bench.main, words_of(lease), 1);
      lease.commit();  // the destructor waits for the write-back
    }
    std::vector<std::uint32_t> expected(page_words);
    for (std::uint64_t i = 0; i < page_words; ++i) {
      std::uint32_t word = written_word(3, i);
      for (int round = 0; round < 3; ++round) word = updated_word(word, 1, i);
      REQUIRE(own.memory().as<std::uint32_t>()[i] == word);
    }
    own.synchronize(0, page_bytes.count());
  }
  bench.device.free_pinned(memory);

  // Refused when the 17th is added, not in the middle of training.
  std::vector<std::unique_ptr<Scheduler>> readers;
  std::vector<PageId> pages;
  for (std::size_t i = 0; i < 17; ++i) {
    readers.push_back(std::make_unique<Scheduler>(bench.hbm, page_bytes, Role::other,
                                                  SchedulerOptions{.depth = 1, .one_copy_stream = true}));
    const auto add = [&] {
      pages.push_back(readers[i]->add_page({.label = "page", .parts = {{&bench.home, 0, 0, page_bytes}}}));
    };
    if (i == 16) {
      CHECK(thrown_by<InvalidArgument>(add));
      break;
    }
    add();
    readers[i]->begin(readers[i]->add_plan({{pages[i], i == 0 ? Access::write : Access::read}}));
  }
  for (std::size_t i = 1; i < 16; ++i) readers[i]->lease(pages[i], bench.main).commit();
  readers[0]->lease(pages[0], bench.main).commit();  // waits for 15 readers
  readers[0]->finish(bench.main);
  bench.device.synchronize(bench.main);
  readers.erase(readers.begin() + 3);  // room for another
  Scheduler late{bench.hbm, page_bytes, Role::other, options(1)};
  late.add_page({.label = "page", .parts = {{&bench.home, 0, 0, page_bytes}}});
}

TEST_CASE("a wait set keeps the latest point of each timeline, skips the waiting stream, and says when it is full") {
  const Watchdog watchdog{"wait set"};
  LoggingDevice device;
  const auto waiter = device.create_stream("waiter");
  std::vector<std::unique_ptr<Timeline<LoggingDevice>>> timelines;
  for (int i = 0; i < 33; ++i) timelines.push_back(std::make_unique<Timeline<LoggingDevice>>(device, "timeline"));
  WaitSet<LoggingDevice> waits;
  waits.add({});  // no point: nothing to wait for
  for (int i = 0; i < 32; ++i) {
    Timeline<LoggingDevice>& timeline = *timelines[static_cast<std::size_t>(i)];
    for (int j = 0; j < 3; ++j) {
      waits.add({&timeline, timeline.advance()});
      timeline.record();
    }
  }
  CHECK(thrown_by<InvalidArgument>([&] { waits.add({timelines[32].get(), timelines[32]->advance()}); }));
  const auto before = device.counts();
  waits.order_before(waiter);
  CHECK((device.counts() - before).waits == 32);
  waits.order_before(timelines[5]->stream());
  CHECK((device.counts() - before).waits == 63);
  waits.synchronize();
}

TEST_CASE("a timeline that drains while the context is lost returns") {
  const Watchdog watchdog{"drain"};
  LoggingDevice device;
  Timeline<LoggingDevice> timeline{device, "numbers"};
  Gate gate;
  device.enqueue(timeline.stream(), gate.pass());
  device.enqueue(timeline.stream(), [] { throw 1; });
  std::thread opener{[&] { gate.open(); }};
  timeline.drain();
  opener.join();
  CHECK(device.lost());
  timeline.drain();
}

TEST_CASE("a slot that was written back under a lease for reading is not filled again before that") {
  const Watchdog watchdog{"written back under a lease"};
  HomeBench bench;
  const auto third_owner = bench.device.create_stream("third");
  const Stream third = third_owner;
  // Without the fill of evicted slots, which would wait as well.
  Scheduler writer{bench.hbm, page_bytes, Role::other, {.depth = 1, .name = "writer"}};
  Scheduler early{bench.hbm, page_bytes, Role::other, {.depth = 1, .name = "early"}};
  Scheduler late{bench.hbm, page_bytes, Role::other, {.depth = 1, .name = "late"}};
  const auto pages = bench.cut(writer), early_pages = bench.cut(early), late_pages = bench.cut(late);
  std::vector<std::uint32_t> early_saw(page_words), late_saw(page_words), next_saw(page_words);

  // A fill that reads page 0 is held by a gate, and with it whatever writes page 0 home.
  early.begin(early.add_plan({{early_pages[3], Access::read}, {early_pages[0], Access::read}}));
  Gate gate;
  {
    auto lease = early.lease(early_pages[3], third);
    bench.device.enqueue(third, gate.pass());
    lease.commit();
  }
  {
    auto lease = early.lease(early_pages[0], third);
    enqueue_read(bench.device, third, words_of(lease), early_saw.data());
    lease.commit();
  }
  writer.begin(writer.add_plan({{pages[0], Access::write}, {pages[0], Access::read}, {pages[1], Access::read}}));
  {
    auto lease = writer.lease(pages[0], bench.main);
    enqueue_write(bench.device, bench.main, words_of(lease), 5);
    lease.commit();
  }
  late.begin(late.add_plan({{late_pages[0], Access::read}}));
  {
    auto held = writer.lease(pages[0], bench.main);
    auto lease = late.lease(late_pages[0], bench.side);  // has the kept page written back
    CHECK(writer.stats().write_backs == 1);
    enqueue_read(bench.device, bench.side, words_of(lease), late_saw.data());
    lease.commit();
    held.commit();
  }
  bench.device.synchronize(bench.main);  // the kernels of the slot are done; its write-back is not
  {
    auto lease = writer.lease(pages[1], bench.main);
    enqueue_read(bench.device, bench.main, words_of(lease), next_saw.data());
    lease.commit();
  }
  CHECK(stays_pending(bench.device, bench.main));
  gate.open();
  for (const Stream stream : {bench.main, bench.side, third}) bench.device.synchronize(stream);
  expect_words(early_saw, 1);
  expect_words(late_saw, 5);
  expect_words(next_saw, 1, page_words);
  expect_words(bench.home_words(0), 5);
}
