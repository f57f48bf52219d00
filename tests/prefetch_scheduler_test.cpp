// PrefetchScheduler: bytes and copies of plans, order, and what misuse gets.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/observe/stats.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "support/logging_device.hpp"
#include "support/paging_bench.hpp"
#include "support/watchdog.hpp"

// Behind the declarations of what it replaces.
#include "support/allocation_counter.hpp"

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

  // Homes outlive the schedulers with pages in them.
  Pages(PagingBench& bench, std::uint32_t count)
      : home{bench.host, page_bytes * count, "home", Role::optimizer_state, bench.compute} {
    home.synchronize(0, home.memory().count());
    write_home(home, 1);
  }
  void add_to(Scheduler& scheduler, std::uint32_t count, Access access, bool transient = false) {
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
        Pages pages{bench, n};
        Scheduler scheduler{bench.hbm, page_bytes, Role::optimizer_state, options(depth)};
        pages.add_to(scheduler, n, access);
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
        Pages pages{bench, n};
        Scheduler scheduler{bench.hbm, page_bytes, Role::activation, options(depth)};
        pages.add_to(scheduler, n, Access::read_write, transient);
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
    Pages pages{bench, 2};
    Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(depth)};
    pages.add_to(scheduler, 2, Access::read_write);
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
    Pages pages{bench, n};
    Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(depth)};
    pages.add_to(scheduler, n, Access::read_write, transient);
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
  TestHome first{bench.host, 2_KiB, "first", Role::weight, bench.compute};
  TestHome second{bench.host, 2_KiB, "second", Role::weight, bench.compute};
  Scheduler scheduler{bench.hbm, 4_KiB, Role::other, options(2)};
  first.synchronize(0, 2048);
  second.synchronize(0, 2048);
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

// ----------------------------------------------------------------------------------------------------------- content

namespace {

/// Schedulers that cut the same homes differently, run at random on delayed streams, against plain memory.
class RandomProgram {
 public:
  RandomProgram(std::uint64_t seed, Bytes unit) : random_{seed}, unit_words_{unit.count() / 4} {
    bench_.emplace(Bytes{96 * unit.count()});
    bench_->device.delay_at_random(seed, std::chrono::microseconds{200});
    other_.emplace(bench_->device.create_stream("other"));
    for (std::uint32_t h = 0; h < home_count; ++h) {
      homes_.push_back(std::make_unique<TestHome>(bench_->host, unit * 6, "home", Role::other, bench_->compute));
      homes_.back()->synchronize(0, 6 * unit.count());
      write_home(*homes_.back(), 100 + h);
      const auto words = homes_.back()->memory().as<std::uint32_t>();
      model_.emplace_back(words.begin(), words.end());
    }
    pool_.emplace(bench_->hbm, Bytes{unit.count() * 2}, 3, Role::other, bench_->compute);
    add_scheduler(1, false);
    add_scheduler(2, false);
    add_scheduler(1, true);
    add_scheduler(2, true);
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      Player& player = *players_[random_() % players_.size()];
      const std::uint64_t what = random_() % 100;
      if (what < 2) {
        load(random_() % home_count);
      } else if (what < 6) {
        end_lease(player);
        if (player.next != 0) player.scheduler->finish(any_stream());
        player.plan = nullptr;
        player.next = 0;
      } else if (what < 50) {
        end_lease(player);
      } else {
        advance(player);
      }
      if (i % 64 == 0) check();
    }
    for (auto& player : players_) {
      end_lease(*player);
      player->scheduler->finish(any_stream());
    }
    for (std::uint32_t h = 0; h < home_count; ++h) check_home(h);
    check();
  }
  /// What kernels read of pages, all of it compared.
  [[nodiscard]] std::uint64_t words_compared() const { return words_compared_; }

 private:
  static constexpr std::uint32_t home_count = 3;

  struct Part {
    std::uint32_t home;
    std::uint64_t home_word, slot_word, count;
    Access access;
  };
  struct Page_ {
    PageId id{};
    std::vector<Part> parts;
  };
  struct Plan_ {
    PlanId id{};
    std::vector<PlanStep> steps;
  };
  struct Job {
    std::vector<std::uint32_t> seen, expected;
  };
  struct Player {
    std::unique_ptr<Scheduler> scheduler;
    std::vector<Page_> pages;
    std::vector<Plan_> plans;
    const Plan_* plan = nullptr;
    std::size_t next = 0;
    std::optional<Scheduler::LeaseType> lease;
    const Page_* leased = nullptr;
    Access access = Access::read;
    std::uint32_t seed = 0;
    bool kernel_put = false;
  };

  HostDevice::StreamRef any_stream() {
    return random_() % 2 == 0 ? HostDevice::StreamRef{bench_->compute} : HostDevice::StreamRef{*other_};
  }

  void add_scheduler(std::uint64_t scale, bool shared) {
    auto player = std::make_unique<Player>();
    const auto depth = static_cast<std::uint32_t>(1 + random_() % 4);
    SchedulerOptions how{.depth = depth,
                         .guaranteed_slots = 1,
                         .one_copy_stream = random_() % 4 == 0,
                         .fill_evicted = true,
                         .name = "s" + std::to_string(players_.size())};
    if (shared) {
      player->scheduler = std::make_unique<Scheduler>(*pool_, bench_->hbm, how);
    } else {
      player->scheduler = std::make_unique<Scheduler>(bench_->hbm, Bytes{unit_words_ * 8}, Role::other, how);
    }
    // Scale 1 cuts homes at multiples of 1 unit, scale 2 at multiples of 1.5; a page has one or two parts.
    const std::uint64_t words = unit_words_ * (scale + 1) / 2;
    for (std::uint32_t h = 0; h < home_count; ++h) {
      for (std::uint64_t first = 0; first < model_[h].size(); first += words) {
        Page_ page;
        const std::uint64_t count = std::min(words, model_[h].size() - first);
        const bool mixed = random_() % 3 == 0;
        page.parts.push_back({h, first, 0, count / 2, mixed ? Access::read : Access::read_write});
        page.parts.push_back({h, first + count / 2, count / 2, count - count / 2, Access::read_write});
        if (mixed) {
          // Something of the next home, which another page of the scheduler covers as well.
          page.parts.push_back({(h + 1) % home_count, first / 2, count, count / 4, Access::write});
        }
        PageSpec<Device_> spec{.label = "page"};
        for (const Part& part : page.parts) {
          spec.parts.push_back(
              {homes_[part.home].get(), part.home_word * 4, part.slot_word * 4, Bytes{part.count * 4}, part.access});
        }
        page.id = player->scheduler->add_page(std::move(spec));
        player->pages.push_back(std::move(page));
      }
    }
    for (int p = 0; p < 3; ++p) {
      Plan_ plan;
      for (int i = 0; i < 12; ++i) {
        const std::size_t pick =
            !plan.steps.empty() && random_() % 2 == 0
                ? static_cast<std::size_t>(
                      plan.steps[plan.steps.size() - 1 - random_() % std::min<std::size_t>(3, plan.steps.size())].page)
                : random_() % player->pages.size();
        const Page_& page = player->pages[pick];
        const Access access = page.parts[0].access == Access::read
                                  ? (random_() % 2 == 0 ? Access::read : Access::read_write)
                                  : static_cast<Access>(1 + random_() % 3);
        plan.steps.push_back({page.id, access});
      }
      plan.id = player->scheduler->add_plan(plan.steps);
      player->plans.push_back(std::move(plan));
    }
    players_.push_back(std::move(player));
  }

  static bool overlap(const Page_& a, const Page_& b) {
    for (const Part& x : a.parts) {
      for (const Part& y : b.parts) {
        if (x.home == y.home && x.home_word < y.home_word + y.count && y.home_word < x.home_word + x.count) return true;
      }
    }
    return false;
  }

  void advance(Player& player) {
    end_lease(player);
    if (player.plan == nullptr || player.next == player.plan->steps.size()) {
      player.plan = &player.plans[random_() % player.plans.size()];
      player.next = 0;
      player.scheduler->begin(player.plan->id);
    }
    const PlanStep step = player.plan->steps[player.next++];
    const Page_& page = player.pages[static_cast<std::size_t>(step.page)];
    for (auto& other : players_) {  // that order is the user's
      if (other->lease && overlap(*other->leased, page)) end_lease(*other);
    }
    const auto stream = any_stream();
    const bool dirty = player.scheduler->dirty(page.id);
    player.lease.emplace(player.scheduler->lease(page.id, stream));
    player.leased = &page;
    player.access = step.access;
    player.seed = static_cast<std::uint32_t>(random_());
    auto runs_on = stream;
    if (random_() % 3 == 0) {
      runs_on = any_stream();
      player.lease->used_on(runs_on);
    }
    player.kernel_put = !dirty || random_() % 4 != 0;
    if (!player.kernel_put) return;  // will be discarded: what was committed before must stay

    Job& job = jobs_.emplace_back();
    const bool reading = reads(step.access);
    for (const Part& part : page.parts) {
      if (!reading || !reads(part.access)) continue;
      const auto first = model_[part.home].begin() + static_cast<std::ptrdiff_t>(part.home_word);
      job.expected.insert(job.expected.end(), first, first + static_cast<std::ptrdiff_t>(part.count));
    }
    job.seen.resize(job.expected.size());
    bench_->device.enqueue(runs_on, [&job, &page, reading, writing = writes(step.access), seed = player.seed,
                                     slot = player.lease->as<std::uint32_t>(0, unit_words_ * 2).data()] {
      std::uint64_t out = 0;
      for (const Part& part : page.parts) {
        std::uint32_t* words = slot + part.slot_word;
        const bool read = reading && reads(part.access);
        for (std::uint64_t i = 0; i < part.count; ++i) {
          const std::uint32_t old = read ? words[i] : 0;
          if (read) job.seen[out++] = old;
          if (writing && writes(part.access)) words[i] = next_word(read, old, seed, part, i);
        }
      }
    });
  }

  static std::uint32_t next_word(bool read, std::uint32_t old, std::uint32_t seed, const Part& part, std::uint64_t i) {
    return read ? updated_word(old, seed, part.slot_word + i) : written_word(seed, part.slot_word + i);
  }

  void end_lease(Player& player) {
    if (!player.lease) return;
    const bool writing = writes(player.access);
    const std::uint64_t how = random_() % 10;
    if (!player.kernel_put || (writing && how == 0 && !player.scheduler->dirty(player.leased->id))) {
      player.lease.reset();  // discarded
      return;
    }
    if (writing && how < 3) player.lease->launched();
    if (!(writing && how == 1) && (writing || how % 2 == 0)) player.lease->commit();
    player.lease.reset();
    if (!writing) return;
    for (const Part& part : player.leased->parts) {
      if (!writes(part.access)) continue;
      const bool read = reads(player.access) && reads(part.access);
      for (std::uint64_t i = 0; i < part.count; ++i) {
        std::uint32_t& word = model_[part.home][part.home_word + i];
        word = next_word(read, word, player.seed, part, i);
      }
    }
  }

  void load(std::uint64_t h) {
    for (auto& player : players_) end_lease(*player);
    check_home(h);
    const auto seed = static_cast<std::uint32_t>(random_());
    homes_[h]->invalidate();
    write_home(*homes_[h], seed);
    for (std::uint64_t i = 0; i < model_[h].size(); ++i) model_[h][i] = written_word(seed, i);
  }

  void check_home(std::uint64_t h) {
    homes_[h]->synchronize(0, homes_[h]->memory().count());
    REQUIRE(std::memcmp(homes_[h]->memory().data(), model_[h].data(), model_[h].size() * 4) == 0);
  }

  void check() {
    bench_->device.synchronize(HostDevice::StreamRef{bench_->compute});
    bench_->device.synchronize(HostDevice::StreamRef{*other_});
    for (const Job& job : jobs_) {
      REQUIRE(job.seen == job.expected);
      words_compared_ += job.seen.size();
    }
    // Kernels of leases that go on have run as well.
    jobs_.clear();
  }

  std::mt19937_64 random_;
  std::uint64_t unit_words_;
  std::optional<PagingBench> bench_;
  std::optional<HostDevice::Stream> other_;
  std::vector<std::vector<std::uint32_t>> model_;
  std::vector<std::unique_ptr<TestHome>> homes_;
  std::optional<SlotPool<Device_>> pool_;
  std::vector<std::unique_ptr<Player>> players_;
  std::deque<Job> jobs_;
  std::uint64_t words_compared_ = 0;
};

}  // namespace

TEST_CASE("random programs of four schedulers on three homes, with delayed streams, against plain memory") {
  const Watchdog watchdog{"random programs", std::chrono::seconds{240}};
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    CAPTURE(seed);
    RandomProgram program{seed, 1_KiB};
    program.run(400);
    CHECK(program.words_compared() > 10'000);
  }
  RandomProgram program{100, 256_KiB};  // pages of 256 and 384 KiB: streaming copies
  program.run(60);
  CHECK(program.words_compared() > 1'000'000);
}

// ------------------------------------------------------------------------------------------------- leases and misuse

namespace {

struct Small : PagingBench {
  Pages pages{*this, 4};
  Scheduler scheduler;
  HostDevice::StreamRef main = compute;

  explicit Small(std::uint32_t depth) : scheduler{hbm, page_bytes, Role::other, options(depth)} {
    pages.add_to(scheduler, 4, Access::read_write);
  }
  [[nodiscard]] PageId page(std::size_t i) const { return pages.ids[i]; }
};

/// Calls `inside` while the scheduler calls the device.
struct CallingObserver {
  std::function<void()>* inside = nullptr;
  template <class StreamRef>
  void begin(Activity, StreamRef) const {
    if (inside != nullptr && *inside) (*inside)();
  }
  template <class StreamRef>
  void end(Activity, StreamRef) const {}
};

}  // namespace

TEST_CASE("leases out of order, twice, too many and after the end are refused, and nothing is changed") {
  const Watchdog watchdog{"refused leases"};
  Small bench{2};
  Scheduler& scheduler = bench.scheduler;
  const auto refused = [&](std::size_t page, const char* why) {
    const auto error = thrown_by<InvalidArgument>([&] { auto lease = scheduler.lease(bench.page(page), bench.main); });
    REQUIRE(error);
    CHECK_MESSAGE(std::string{error->what()}.find(why) != std::string::npos, error->what());
  };
  refused(0, "no plan was begun");
  const PlanId plan = scheduler.add_plan({{bench.page(0), Access::read},
                                          {bench.page(0), Access::read},
                                          {bench.page(1), Access::read},
                                          {bench.page(2), Access::read}});
  CHECK(thrown_by<InvalidArgument>([&] { scheduler.begin(static_cast<PlanId>(7)); }));
  scheduler.begin(plan);
  CHECK(scheduler.expects(bench.page(0), Access::read));
  CHECK_FALSE(scheduler.expects(bench.page(0), Access::write));
  CHECK_FALSE(scheduler.expects(bench.page(1), Access::read));
  refused(1, "page 0 is");
  auto first = scheduler.lease(bench.page(0), bench.main);
  refused(0, "leased already");
  first.commit();
  first = scheduler.lease(bench.page(0), bench.main);
  auto second = scheduler.lease(bench.page(1), bench.main);
  const TransferStats before = scheduler.stats();
  const auto full = thrown_by<SlotsExhausted>([&] { auto lease = scheduler.lease(bench.page(2), bench.main); });
  REQUIRE(full);
  for (const char* name : {"page 2", "page 0", "page 1"}) {
    CHECK(std::string{full->what()}.find(name) != std::string::npos);
  }
  CHECK(scheduler.stats() == before);
  CHECK(thrown_by<InvalidArgument>([&] { scheduler.finish(bench.main); }));  // leases are out
  second = {};  // ends it
  first = scheduler.lease(bench.page(2), bench.main);  // the old one ends behind the new one's start
  first.commit();
  refused(3, "the plan has ended");
  scheduler.finish(bench.main);
  refused(3, "no plan was begun");
  CHECK_FALSE(scheduler.expects(bench.page(0), Access::read));
  const auto unknown = static_cast<PageId>(99);
  CHECK(thrown_by<InvalidArgument>([&] { auto lease = scheduler.lease(unknown, bench.main); }));
  CHECK(thrown_by<InvalidArgument>([&] { scheduler.limit(unknown, 1_B); }));
  CHECK(thrown_by<InvalidArgument>([&] { static_cast<void>(scheduler.dirty(unknown)); }));
  CHECK(thrown_by<InvalidArgument>([&] { static_cast<void>(scheduler.resident_memory(unknown)); }));
  CHECK(scheduler.resident_memory(bench.page(0)).empty());
}

TEST_CASE("a lease that was moved from or has ended is empty, and says so") {
  const Watchdog watchdog{"empty leases"};
  Small bench{2};
  bench.scheduler.begin(bench.scheduler.add_plan({{bench.page(0), Access::read}, {bench.page(1), Access::read_write}}));
  Scheduler::LeaseType none;
  CHECK(none.empty());
  auto lease = bench.scheduler.lease(bench.page(0), bench.main);
  auto moved = std::move(lease);
  const auto all_refused = [&](Scheduler::LeaseType& empty) {
    CHECK(empty.empty());
    CHECK(thrown_by<InvalidArgument>([&] { static_cast<void>(empty.bytes()); }));
    CHECK(thrown_by<InvalidArgument>([&] { empty.commit(); }));
    CHECK(thrown_by<InvalidArgument>([&] { empty.launched(); }));
    CHECK(thrown_by<InvalidArgument>([&] { empty.used_on(bench.main); }));
    CHECK(thrown_by<InvalidArgument>([&] { static_cast<void>(empty.donate(HbmArena<Device_>::Buffer{})); }));
  };
  all_refused(none);
  all_refused(lease);
  CHECK_FALSE(moved.empty());
  CHECK(moved.access() == Access::read);
  CHECK(thrown_by<InvalidArgument>([&] { moved.launched(); }));  // it is for reading
  auto& self = moved;
  moved = std::move(self);
  CHECK_FALSE(moved.empty());
  std::vector<HostDevice::Stream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(bench.device.create_stream("more"));
  for (int i = 0; i < 3; ++i) moved.used_on(streams[static_cast<std::size_t>(i)]);
  moved.used_on(streams[1]);  // known
  CHECK(thrown_by<InvalidArgument>([&] { moved.used_on(streams[3]); }));
  moved.commit();
  all_refused(moved);
  auto written = bench.scheduler.lease(bench.page(1), bench.main);
  CHECK(written.access() == Access::read_write);
  written.launched();
  written.commit();
  bench.scheduler.finish(bench.main);
  CHECK(bench.scheduler.stats().write_backs == 1);
}

TEST_CASE("pages and plans that make no sense are refused") {
  const Watchdog watchdog{"refused pages"};
  PagingBench bench;
  // A depth that is not the template's.
  using Deep = PrefetchScheduler<Device_, OffloadAll, 4>;
  CHECK(thrown_by<InvalidArgument>([&] { Deep{bench.hbm, page_bytes, Role::other, options(3)}; }));
  CHECK(Deep{bench.hbm, page_bytes, Role::other, options(4)}.depth() == 4);
  CHECK(Deep{bench.hbm, page_bytes, Role::other, options(0)}.depth() == 4);
  CHECK(Scheduler{bench.hbm, page_bytes, Role::other, options(0)}.depth() == default_depth);
  TestHome home{bench.host, 1_KiB, "home", Role::other, bench.compute};
  Scheduler scheduler{bench.hbm, 512_B, Role::other, options(2)};
  const auto refused = [&](PageSpec<Device_> spec) {
    spec.label = "odd";
    return thrown_by<InvalidArgument>([&] { scheduler.add_page(spec); }).has_value();
  };
  CHECK(refused({.parts = {{nullptr, 0, 0, 4_B}}}));
  CHECK(refused({.parts = {{&home, 1020, 0, 8_B}}}));
  CHECK(refused({.parts = {{&home, 1028, 0, 0_B}}}));
  CHECK(refused({.parts = {{&home, ~std::uint64_t{0} - 3, 0, 8_B}}}));
  CHECK(refused({.parts = {{&home, 0, 508, 8_B}}}));
  CHECK(refused({.slot_bytes = 513_B}));
  CHECK(refused({.parts = {{&home, 0, 0, 8_B}, {&home, 8, 4, 8_B}}}));
  CHECK_FALSE(refused({.parts = {{&home, 1024, 0, 0_B}}}));

  const PageId readable = scheduler.add_page({.label = "r", .parts = {{&home, 0, 0, 8_B, Access::read}}});
  const PageId writable = scheduler.add_page({.label = "w", .parts = {{&home, 0, 0, 8_B, Access::write}}});
  const PageId both = scheduler.add_page(
      {.label = "b", .parts = {{&home, 0, 0, 8_B, Access::read}, {&home, 8, 8, 8_B, Access::write}}});
  const PageId resident = scheduler.add_resident_page("resident", 512_B, Role::other, bench.compute);
  const auto plan = [&](PageId page, Access access) {
    return !thrown_by<InvalidArgument>([&] { scheduler.add_plan({{page, access}}); }).has_value();
  };
  CHECK(plan(readable, Access::read));
  CHECK_FALSE(plan(readable, Access::read_write));
  CHECK_FALSE(plan(readable, Access::write));
  CHECK(plan(writable, Access::write));
  CHECK_FALSE(plan(writable, Access::read));
  CHECK(plan(both, Access::read));
  CHECK(plan(both, Access::read_write));
  CHECK_FALSE(plan(both, Access::write));
  CHECK_FALSE(plan(resident, Access::read));
  CHECK_FALSE(plan(static_cast<PageId>(50), Access::read));
  CHECK(to_string(Access::read) == "read");
  CHECK(to_string(Access::write) == "write");
  CHECK(to_string(Access::read_write) == "read-write");
}

TEST_CASE("a call from inside a call, or from a second thread during one, is refused") {
  const Watchdog watchdog{"re-entry"};
  for (const bool second_thread : {false, true}) {
    PagingBench bench;
    std::function<void()> inside;
    TestHome home{bench.host, page_bytes, "home", Role::other, bench.compute};
    PrefetchScheduler<Device_, OffloadAll, 2, CallingObserver> scheduler{
        bench.hbm, page_bytes, Role::other, {}, CallingObserver{&inside}};
    const PageId page = scheduler.add_page({.label = "page", .parts = {{&home, 0, 0, page_bytes}}});
    const PlanId plan = scheduler.add_plan({{page, Access::read_write}});
    int refusals = 0;
    const auto call_all = [&] {
      for (const auto& call : std::initializer_list<std::function<void()>>{
               [&] { scheduler.begin(plan); }, [&] { scheduler.finish(bench.compute); }, [&] { scheduler.settle(); },
               [&] { auto lease = scheduler.lease(page, bench.compute); }, [&] { scheduler.add_plan({}); }}) {
        if (thrown_by<InvalidArgument>(call)) ++refusals;
      }
    };
    inside = [&] {
      if (second_thread) {
        std::thread{call_all}.join();
      } else {
        call_all();
      }
    };
    scheduler.begin(plan);
    scheduler.lease(page, bench.compute).commit();
    inside = nullptr;
    scheduler.finish(bench.compute);
    CHECK(refusals == 3 * 5);  // in a fill, a stall and a write-back
  }
}

TEST_CASE("a limit cuts a page's copies until it is set again") {
  const Watchdog watchdog{"limits"};
  Small bench{1};
  Scheduler& scheduler = bench.scheduler;
  const PlanId plan = scheduler.add_plan({{bench.page(0), Access::write},
                                          {bench.page(1), Access::write},
                                          {bench.page(0), Access::read},
                                          {bench.page(1), Access::read}});
  const std::uint64_t limits[] = {0, 4, 1024, page_bytes.count() - 1, page_bytes.count(), page_bytes.count() + 1};
  for (const std::uint64_t limit : limits) {
    write_home(bench.pages.home, 1);
    const std::uint64_t moved = std::min(limit, page_bytes.count());
    const TransferStats before = scheduler.stats();
    scheduler.begin(plan);
    scheduler.limit(bench.page(0), Bytes{limit});
    std::vector<std::uint32_t> seen(words_of_a_page);
    for (const std::size_t page : {0u, 1u, 0u, 1u}) {
      auto lease = scheduler.lease(bench.page(page), bench.main);
      const auto words = lease.as<std::uint32_t>(0, words_of_a_page);
      if (lease.access() == Access::write) {
        enqueue_write(bench.device, bench.main, words, 7);
      } else if (page == 0) {
        enqueue_read(bench.device, bench.main, words, seen.data());
      }
      lease.commit();
    }
    scheduler.finish(bench.main);
    bench.device.synchronize(bench.main);
    const TransferStats made = scheduler.stats() - before;
    CHECK(made.d2h_bytes == moved + page_bytes.count());
    CHECK(made.h2d_bytes == moved + page_bytes.count());
    const auto* home = reinterpret_cast<const std::uint32_t*>(bench.pages.home.memory().data());
    for (std::uint64_t i = 0; i < words_of_a_page; ++i) {
      if (4 * i + 4 <= moved) {
        REQUIRE(seen[i] == written_word(7, i));
        REQUIRE(home[i] == written_word(7, i));
      } else if (4 * i >= moved) {
        REQUIRE(home[i] == written_word(1, i));  // untouched
        REQUIRE(seen[i] == 0xffffffffu);         // and not brought in
      }
    }
  }
}

// Found by fuzzing: the write-back followed the new limit, and brought home what nothing had written.
TEST_CASE("a limit that grows: what a kept page does not hold is read from its home, and never written there") {
  const Watchdog watchdog{"a growing limit"};
  Small bench{1};
  Scheduler& scheduler = bench.scheduler;
  const PageId page = bench.page(0);
  const PlanId plan = scheduler.add_plan({{page, Access::write}, {page, Access::read_write}, {page, Access::read}});
  for (const std::uint64_t limit : {std::uint64_t{0}, std::uint64_t{16}, page_bytes.count() - 4}) {
    for (const bool read_after : {false, true}) {
      write_home(bench.pages.home, 1);
      scheduler.begin(plan);
      scheduler.limit(page, Bytes{limit});
      {
        auto lease = scheduler.lease(page, bench.main);
        enqueue_write(bench.device, bench.main, lease.as<std::uint32_t>(0, limit / 4), 7);
        lease.commit();
      }
      scheduler.limit(page, page_bytes);
      {
        auto discarded = scheduler.lease(page, bench.main);
      }
      std::vector<std::uint32_t> seen(words_of_a_page);
      if (read_after) {
        auto lease = scheduler.lease(page, bench.main);
        enqueue_read(bench.device, bench.main, lease.as<std::uint32_t>(0, words_of_a_page), seen.data());
      }
      scheduler.finish(bench.main);
      bench.device.synchronize(bench.main);
      const auto* home = reinterpret_cast<const std::uint32_t*>(bench.pages.home.memory().data());
      for (std::uint64_t i = 0; i < words_of_a_page; ++i) {
        const std::uint32_t expected = written_word(4 * i < limit ? 7 : 1, i);
        REQUIRE(home[i] == expected);
        if (read_after) REQUIRE(seen[i] == expected);
      }
    }
  }
}

TEST_CASE("discarded writes leave the home as it was, and what an earlier lease committed") {
  const Watchdog watchdog{"discard"};
  Small bench{2};
  Scheduler& scheduler = bench.scheduler;
  scheduler.begin(scheduler.add_plan({{bench.page(0), Access::read_write},
                                      {bench.page(0), Access::read_write},
                                      {bench.page(0), Access::read},
                                      {bench.page(1), Access::write},
                                      {bench.page(2), Access::read_write}}));
  const auto words = [](const auto& lease) { return lease.template as<std::uint32_t>(0, words_of_a_page); };
  {
    auto lease = scheduler.lease(bench.page(0), bench.main);
    enqueue_update(bench.device, bench.main, words(lease), 3);
    lease.commit();
  }
  {
    const auto nothing_launched = scheduler.lease(bench.page(0), bench.main);
  }
  CHECK(scheduler.dirty(bench.page(0)));
  {
    auto lease = scheduler.lease(bench.page(0), bench.main);
    CHECK(lease.hit());
  }  // its last access: goes home
  CHECK(scheduler.stats().write_backs == 1);
  {
    auto lease = scheduler.lease(bench.page(1), bench.main);
    enqueue_write(bench.device, bench.main, words(lease), 4);
  }
  {
    auto lease = scheduler.lease(bench.page(2), bench.main);
    enqueue_update(bench.device, bench.main, words(lease), 5);
    lease.launched();
  }  // launched: it is the truth, though nobody said that it is good
  CHECK(scheduler.dirty(bench.page(2)));
  scheduler.finish(bench.main);
  CHECK_FALSE(scheduler.dirty(bench.page(2)));
  bench.device.synchronize(bench.main);
  CHECK(scheduler.stats().write_backs == 2);
  const auto* home = reinterpret_cast<const std::uint32_t*>(bench.pages.home.memory().data());
  for (std::uint64_t i = 0; i < words_of_a_page; ++i) {
    REQUIRE(home[i] == updated_word(written_word(1, i), 3, i));
    REQUIRE(home[words_of_a_page + i] == written_word(1, words_of_a_page + i));
    REQUIRE(home[2 * words_of_a_page + i] == updated_word(written_word(1, 2 * words_of_a_page + i), 5, i));
  }
}

TEST_CASE("a discarded transient page is not brought back; one committed and kept is dropped by the next begin") {
  const Watchdog watchdog{"transient"};
  PagingBench bench;
  Pages pages{bench, 3};
  Scheduler scheduler{bench.hbm, page_bytes, Role::activation, options(2)};
  pages.add_to(scheduler, 3, Access::read_write, true);
  std::vector<PlanStep> steps = pages.sweep(Access::write);
  for (std::size_t i = 3; i-- > 0;) steps.push_back({pages.ids[i], Access::read});
  const PlanId plan = scheduler.add_plan(steps);
  for (int forward = 0; forward < 2; ++forward) {
    scheduler.begin(plan);
    for (const PageId page : pages.ids) {
      const auto discarded = scheduler.lease(page, bench.compute);
    }
  }
  CHECK(scheduler.stats() == TransferStats{});
  scheduler.begin(plan);
  for (const PageId page : pages.ids) scheduler.lease(page, bench.compute).commit();
  CHECK(scheduler.stats().write_backs == 1);  // the first; the last two stay
  scheduler.begin(plan);
  scheduler.finish(bench.compute);
  CHECK(scheduler.stats().write_backs == 1);
  CHECK(scheduler.stats().fills == 0);
}

TEST_CASE("a second attempt at a lease that failed is not taken for a hit") {
  const Watchdog watchdog{"failed lease"};
  std::uint64_t failures = 0;
  for (bool met = true; met;) {
    const std::uint64_t n = failures + 1;  // the call of the first lease that fails; in the last round it makes fewer
    CAPTURE(n);
    Small bench{3};
    Scheduler& scheduler = bench.scheduler;
    scheduler.begin(scheduler.add_plan(bench.pages.sweep(Access::read)));
    bench.device.fail_call(n);
    std::optional<Scheduler::LeaseType> first;  // so that its end is not among the calls that fail
    const auto error = thrown_by<DeviceError>([&] { first.emplace(scheduler.lease(bench.page(0), bench.main)); });
    met = !bench.device.clear_fault();
    REQUIRE(error.has_value() == met);
    failures += met ? 1 : 0;
    if (!first) first.emplace(scheduler.lease(bench.page(0), bench.main));
    CHECK_FALSE(first->hit());
    first->commit();
    for (const std::size_t page : {1u, 2u}) {
      auto lease = scheduler.lease(bench.page(page), bench.main);
      CHECK_FALSE(lease.hit());
      lease.commit();
    }
    CHECK(scheduler.stats().hits == 0);
  }
  CHECK(failures >= 7);  // a copy and a record of each of three fills, and the stall
}

// ------------------------------------------------------------------------------------------- resident pages, no cost

TEST_CASE("a resident page is leased at any time, in order across streams, once at a time, and makes no copy") {
  const Watchdog watchdog{"resident page"};
  PagingBench bench;
  const auto side_owner = bench.device.create_stream("side");
  const HostDevice::StreamRef side = side_owner;
  Scheduler scheduler{bench.hbm, page_bytes, Role::other, options(2)};
  const PageId page = scheduler.add_resident_page("resident", page_bytes, Role::weight, bench.compute);
  CHECK(bench.hbm.usage().by_role[static_cast<std::uint32_t>(Role::weight)] == bench.hbm.footprint(page_bytes));
  Gate gate;
  {
    auto lease = scheduler.lease(page, bench.compute);
    CHECK(lease.hit());
    CHECK(lease.access() == Access::read_write);
    CHECK(lease.bytes().data() == scheduler.resident_memory(page).data());
    CHECK(thrown_by<InvalidArgument>([&] { auto again = scheduler.lease(page, side); }));
    CHECK(thrown_by<InvalidArgument>([&] { static_cast<void>(lease.donate(HbmArena<Device_>::Buffer{})); }));
    bench.device.enqueue(bench.compute, gate.pass());
    enqueue_write(bench.device, bench.compute, lease.as<std::uint32_t>(0, words_of_a_page), 3);
    lease.launched();
    CHECK(scheduler.dirty(page));
    lease.commit();
    CHECK_FALSE(scheduler.dirty(page));
  }
  std::vector<std::uint32_t> seen(words_of_a_page);
  {
    auto lease = scheduler.lease(page, side);
    enqueue_read(bench.device, side, lease.as<std::uint32_t>(0, words_of_a_page), seen.data());
    lease.launched();
  }  // not committed: there is nothing to discard
  CHECK_FALSE(scheduler.dirty(page));
  gate.open();
  bench.device.synchronize(side);
  for (std::uint64_t i = 0; i < words_of_a_page; ++i) REQUIRE(seen[i] == written_word(3, i));
  CHECK(scheduler.stats() == TransferStats{});
}

TEST_CASE("KeepResident: no stream, no event, no slot, and a lease calls nothing on the device") {
  const Watchdog watchdog{"KeepResident"};
  PagingBench bench;
  using Resident = PrefetchScheduler<Device_, KeepResident>;
  static_assert(!Resident::pages);
  static_assert(Scheduler::pages);
  const auto before = bench.device.counts();
  const auto calls = bench.device.calls_made();
  {
    Resident scheduler{bench.hbm, page_bytes, Role::optimizer_state};
    CHECK(bench.device.calls_made() == calls);
    const PageId page = scheduler.add_resident_page("m and v", page_bytes, Role::optimizer_state, bench.compute);
    CHECK((bench.device.counts() - before).streams == 0);
    CHECK((bench.device.counts() - before).events == 0);
    CHECK(bench.hbm.usage().used == bench.hbm.footprint(page_bytes));
    CHECK(scheduler.resident_memory(page).count() == page_bytes.count());
    const auto after_setup = bench.device.calls_made();
    auto lease = scheduler.lease(page, bench.compute);
    CHECK(lease.hit());
    lease.used_on(bench.compute);
    lease.launched();
    CHECK(lease.bytes().data() == scheduler.resident_memory(page).data());
    lease.commit();
    {
      const auto dropped = scheduler.lease(page, bench.compute);
    }
    CHECK_FALSE(scheduler.dirty(page));
    CHECK(scheduler.stats() == TransferStats{});
    CHECK(bench.device.calls_made() == after_setup);
    CHECK(thrown_by<InvalidArgument>([&] { auto none = scheduler.lease(static_cast<PageId>(3), bench.compute); }));
  }
}

TEST_CASE("after the first plan nothing allocates, and no stream or event is made") {
  const Watchdog watchdog{"allocations"};
  REQUIRE(counts_allocations != 0);
  PagingBenchOf<Device_> bench;
  Pages pages{bench, 8};
  SlotPool<Device_> pool{bench.hbm, page_bytes, 4, Role::other, bench.compute};
  Scheduler own{bench.hbm, page_bytes, Role::other, options(3)};
  Scheduler shared{pool, bench.hbm, options(3)};
  std::vector<PageId> others;
  pages.add_to(own, 8, Access::read_write);
  for (std::uint32_t i = 0; i < 8; i += 2) {
    others.push_back(
        shared.add_page({.label = "pair", .parts = {{&pages.home, page_bytes.count() * i, 0, page_bytes}}}));
  }
  std::vector<PlanStep> steps = pages.sweep(Access::read_write), back;
  for (std::size_t i = 8; i-- > 0;) steps.push_back({pages.ids[i], Access::read});
  for (const PageId page : others) back.push_back({page, Access::read_write});
  const PlanId plan = own.add_plan(steps), other_plan = shared.add_plan(back);
  const auto once = [&] {
    own.begin(plan);
    for (const PlanStep& step : steps) own.lease(step.page, bench.compute).commit();
    shared.begin(other_plan);
    for (const PlanStep& step : back) {
      auto lease = shared.lease(step.page, bench.compute);
      enqueue_update(bench.device, bench.compute, lease.as<std::uint32_t>(0, words_of_a_page), 1);
      lease.commit();
    }
    shared.finish(bench.compute);
    own.finish(bench.compute);
    bench.device.synchronize(HostDevice::StreamRef{bench.compute});
  };
  once();
  const auto counts = bench.device.counts();
  const std::uint64_t before = allocations.load();
  for (int i = 0; i < 3; ++i) once();
  CHECK(allocations.load() == before);
  CHECK(bench.device.counts().streams == counts.streams);
  CHECK(bench.device.counts().events == counts.events);
  CHECK(bench.device.counts().h2d_copies > counts.h2d_copies);
}

TEST_CASE("a lease that is out when another plan begins ends as its own plan said, and `finish` brings it home") {
  const Watchdog watchdog{"begin under a lease"};
  Small bench{3};
  const PlanId first = bench.scheduler.add_plan(
      {{bench.page(0), Access::read_write}, {bench.page(1), Access::read}, {bench.page(0), Access::read}});
  const PlanId second = bench.scheduler.add_plan({{bench.page(1), Access::read}});
  bench.scheduler.begin(first);
  auto lease = bench.scheduler.lease(bench.page(0), bench.main);
  enqueue_update(bench.device, bench.main, lease.as<std::uint32_t>(0, words_of_a_page), 2);
  bench.scheduler.begin(second);
  bench.scheduler.lease(bench.page(1), bench.main).commit();
  lease.commit();
  CHECK(bench.scheduler.dirty(bench.page(0)));  // kept, as the first plan wanted
  bench.scheduler.finish(bench.main);
  bench.device.synchronize(bench.main);
  const auto* home = reinterpret_cast<const std::uint32_t*>(bench.pages.home.memory().data());
  for (std::uint64_t i = 0; i < words_of_a_page; ++i) REQUIRE(home[i] == updated_word(written_word(1, i), 2, i));
}
