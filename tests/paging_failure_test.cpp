// Paging when calls fail: every device call of a small program fails once, is made again or given up, and no bit, slot
// or byte is lost; and when the context is lost, every call says so and destructors return.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gate.hpp"
#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "support/paging_bench.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;

namespace {

using Scheduler = PrefetchScheduler<HostDevice, OffloadAll, dynamic_depth>;
using TestHome = Home<HostDevice>;

constexpr std::uint64_t page_words = 257;
constexpr Bytes page_bytes{page_words * 4};
constexpr std::uint32_t page_count = 6;
constexpr Bytes home_bytes = page_bytes * page_count;

/// What the program does when a device call has failed.
enum class Then {
  retry,    ///< makes the same call again; after a failed commit, `settle`
  discard,  ///< as above, but gives up a lease whose kernel was not launched and leases the page anew; never settles
  stop,     ///< lets the error through, and everything is destroyed
};

/// Three plans in three schedulers: updates of a home; forward and reverse over another; updates of the first home in
/// other pieces. The last two share slots, and there are a resident page and a second stream.
struct Program {
  PagingBenchOf<HostDevice>& bench;  // used for many programs: its streams' threads are
  HostDevice::Stream side;
  TestHome states, activations;
  std::vector<std::uint32_t> states_model, activations_model, resident_model;
  std::optional<SlotPool<HostDevice>> pool;
  std::optional<Scheduler> sweeper, layers, pieces;
  std::vector<PageId> sweeper_pages, layer_pages, piece_pages;
  PageId resident{};
  std::optional<PlanId> sweep, there_and_back, cut;
  // What kernels saw: theirs too, because nobody waits for the kernels of a device that is lost.
  std::shared_ptr<std::deque<std::vector<std::uint32_t>>> seen_by_kernels =
      std::make_shared<std::deque<std::vector<std::uint32_t>>>();
  std::deque<std::vector<std::uint32_t>>& seen = *seen_by_kernels;
  std::deque<std::vector<std::uint32_t>> expected;
  Then then = Then::retry;
  std::uint64_t failures = 0;
  /// The kernel that throws, counted from 1; 0 is none.
  std::uint64_t throwing_kernel = 0;
  std::uint64_t kernels = 0;

  explicit Program(PagingBenchOf<HostDevice>& on)
      : bench{on}, side{bench.device.create_stream("side")},
        states{bench.host, home_bytes, "states", Role::optimizer_state, bench.compute},
        activations{bench.host, home_bytes, "activations", Role::activation, bench.compute} {
    for (TestHome* home : {&states, &activations}) {
      home->synchronize(0, home_bytes.count());
      write_home(*home, home == &states ? 1 : 2);
      auto& model = home == &states ? states_model : activations_model;
      const auto words = home->memory().as<std::uint32_t>();
      model.assign(words.begin(), words.end());
    }
    resident_model.assign(page_words, 0);
  }

  void set_up() {
    pool.emplace(bench.hbm, page_bytes * 2, 3, Role::other, bench.compute);
    sweeper.emplace(bench.hbm, page_bytes, Role::optimizer_state,
                    SchedulerOptions{.depth = 2, .fill_evicted = true, .name = "sweeper"});
    layers.emplace(*pool, bench.hbm, SchedulerOptions{.depth = 3, .fill_evicted = true, .name = "layers"});
    pieces.emplace(*pool, bench.hbm, SchedulerOptions{.depth = 2, .fill_evicted = true, .name = "pieces"});
    std::vector<PlanStep> steps;
    for (std::uint32_t i = 0; i < page_count; ++i) {
      const std::uint64_t at = page_bytes.count() * i;
      const std::string label = std::to_string(i);
      // Two copies each way: a page can be half filled and half written.
      sweeper_pages.push_back(
          sweeper->add_page({.label = label,
                             .parts = {{&states, at, 516, page_bytes - Bytes{516}, Access::read_write},
                                       {&states, at + page_bytes.count() - 516, 0, Bytes{516}, Access::read_write}}}));
      layer_pages.push_back(layers->add_page({.label = label, .parts = {{&activations, at, 0, page_bytes}}}));
      steps.push_back({sweeper_pages.back(), Access::read_write});
      if (i == 2) steps.push_back({sweeper_pages[1], Access::read_write});
    }
    sweep = sweeper->add_plan(steps);
    steps.clear();
    for (const PageId page : layer_pages) steps.push_back({page, Access::write});
    for (std::uint32_t i = page_count; i-- > 0;) steps.push_back({layer_pages[i], Access::read});
    there_and_back = layers->add_plan(steps);
    steps.clear();
    for (std::uint32_t i = 0; i < page_count; i += 2) {
      piece_pages.push_back(
          pieces->add_page({.label = "piece", .parts = {{&states, page_bytes.count() * i, 0, page_bytes * 2}}}));
      steps.push_back({piece_pages.back(), i == 2 ? Access::write : Access::read_write});
    }
    cut = pieces->add_plan(steps);
    resident = layers->add_resident_page("resident", page_bytes, Role::other, bench.compute);
    attempt([&] {
      auto lease = layers->lease(resident, bench.compute);
      bench.device.fill_async(lease.bytes(), std::byte{0}, bench.compute);
      lease.commit();
    });
    attempt([&] { bench.device.synchronize(HostDevice::StreamRef{bench.compute}); });
    sweeper->reserve();
  }

  template <class Call>
  void attempt(Call&& call) {
    while (true) {
      try {
        return call();
      } catch (const DeviceError& error) {
        if (then == Then::stop || error.context_lost()) throw;
        ++failures;
      }
    }
  }

  void kernel(HostDevice::StreamRef stream, Words words, Access access, std::uint32_t seed, std::uint32_t* out) {
    if (++kernels == throwing_kernel) {
      bench.device.enqueue(stream, [] { throw std::runtime_error{"the kernel failed"}; });
      return;
    }
    bench.device.enqueue(stream, [=, keep = seen_by_kernels] {
      for (std::uint64_t i = 0; i < words.count(); ++i) {
        const std::uint32_t old = words.data()[i];
        if (reads(access)) out[i] = old;
        if (access == Access::write) words.data()[i] = written_word(seed, i);
        if (access == Access::read_write) words.data()[i] = updated_word(old, seed, i);
      }
    });
  }

  /// Step `position` of the scheduler's plan. `model`: the words that are in the page, in the order of its slot.
  void step(Scheduler& scheduler, std::uint32_t position, PageId page, Access access, std::uint32_t seed,
            const std::vector<std::uint32_t*>& model, bool in_plan = true) {
    while (true) {
      Scheduler::LeaseType lease;
      attempt([&] { lease = scheduler.lease(page, bench.compute); });
      const auto words = lease.as<std::uint32_t>(0, model.size());
      auto& in = expected.emplace_back();
      auto& out = seen.emplace_back();
      if (reads(access)) {
        for (const std::uint32_t* word : model) in.push_back(*word);
      }
      out.resize(in.size());
      HostDevice::StreamRef on = bench.compute;
      if (position % 2 == 1) {
        attempt([&] { lease.used_on(side); });
        on = side;
      }
      try {
        kernel(on, words, access, seed, out.data());
      } catch (const DeviceError& error) {
        if (then == Then::stop || error.context_lost()) throw;
        ++failures;
        if (then == Then::discard) {
          lease = {};
          in.clear();
          out.clear();
          if (in_plan) scheduler.seek(position);
          continue;
        }
        kernel(on, words, access, seed, out.data());
      }
      if (writes(access)) {
        lease.launched();
        for (std::uint64_t i = 0; i < model.size(); ++i) {
          *model[i] = access == Access::write ? written_word(seed, i) : updated_word(*model[i], seed, i);
        }
      }
      try {
        lease.commit();
      } catch (const DeviceError& error) {
        if (then == Then::stop || error.context_lost()) throw;
        ++failures;
        if (then == Then::retry) attempt([&] { scheduler.settle(); });
      }
      return;
    }
  }

  static std::vector<std::uint32_t*> words_of(std::vector<std::uint32_t>& model, std::uint64_t first, std::uint64_t n) {
    std::vector<std::uint32_t*> words;
    for (std::uint64_t i = 0; i < n; ++i) words.push_back(&model[first + i]);
    return words;
  }
  /// The page of `sweeper` lies in its slot with the last 516 bytes of its home first.
  std::vector<std::uint32_t*> sweeper_words(std::uint32_t page) {
    const std::uint64_t first = page_words * page, tail = 516 / 4;
    auto words = words_of(states_model, first + page_words - tail, tail);
    for (std::uint32_t* word : words_of(states_model, first, page_words - tail)) words.push_back(word);
    return words;
  }

  void run() {
    std::uint32_t seed = 1000;
    for (int repeat = 0; repeat < 2; ++repeat) {
      attempt([&] { sweeper->begin(*sweep); });
      std::uint32_t position = 0;
      for (std::uint32_t i = 0; i < page_count; ++i) {
        step(*sweeper, position++, sweeper_pages[i], Access::read_write, ++seed, sweeper_words(i));
        if (i == 2) step(*sweeper, position++, sweeper_pages[1], Access::read_write, ++seed, sweeper_words(1));
      }
      if (repeat == 1) attempt([&] { sweeper->finish(bench.compute); });

      attempt([&] { layers->begin(*there_and_back); });
      for (std::uint32_t i = 0; i < 2 * page_count; ++i) {
        const std::uint32_t page = i < page_count ? i : 2 * page_count - 1 - i;
        step(*layers, i, layer_pages[page], i < page_count ? Access::write : Access::read, ++seed,
             words_of(activations_model, page_words * page, page_words));
        if (i == page_count) {
          step(*layers, 1, resident, Access::read_write, ++seed, words_of(resident_model, 0, page_words), false);
        }
      }

      attempt([&] { pieces->begin(*cut); });
      for (std::uint32_t i = 0; i < piece_pages.size(); ++i) {
        step(*pieces, i, piece_pages[i], i == 1 ? Access::write : Access::read_write, ++seed,
             words_of(states_model, 2 * page_words * i, 2 * page_words));
      }
      attempt([&] { pieces->finish(bench.compute); });
      attempt([&] { layers->finish(bench.compute); });
    }
    attempt([&] { bench.device.synchronize(HostDevice::StreamRef{bench.compute}); });
    attempt([&] { bench.device.synchronize(HostDevice::StreamRef{side}); });
  }

  void check_homes() const {
    CHECK(std::memcmp(states.memory().data(), states_model.data(), home_bytes.count()) == 0);
    CHECK(std::memcmp(activations.memory().data(), activations_model.data(), home_bytes.count()) == 0);
  }
  void check_all() {
    check_homes();
    CHECK(seen == expected);
    CHECK(pool->free_count() == pool->count());
    bench.device.synchronize(HostDevice::StreamRef{bench.compute});
  }
  /// The whole arena can be had again. Freed blocks are kept for the streams that had them, and join then.
  void check_all_free() {
    const Bytes capacity = bench.hbm.capacity();
    CHECK(bench.hbm.try_allocate(capacity - Bytes{1 << 15}, "all", Role::other, bench.compute));
  }
  /// In the order in which a user's objects end.
  void destroy_paging() {
    pieces.reset();
    layers.reset();
    sweeper.reset();
    pool.reset();
  }
};

std::uint64_t calls_of_set_up(PagingBenchOf<HostDevice>& bench) {
  Program program{bench};
  const std::uint64_t before = program.bench.device.calls_made();
  program.set_up();
  return program.bench.device.calls_made() - before;
}

std::uint64_t calls_of_run(PagingBenchOf<HostDevice>& bench) {
  Program program{bench};
  program.set_up();
  const std::uint64_t before = program.bench.device.calls_made();
  program.run();
  const std::uint64_t calls = program.bench.device.calls_made() - before;
  program.check_all();
  CHECK(program.failures == 0);
  return calls;
}

}  // namespace

TEST_CASE("each device call of a program fails once: made again, the bits are those of the undisturbed run") {
  const Watchdog watchdog{"failing calls, made again", std::chrono::seconds{120}};
  PagingBenchOf<HostDevice> bench;
  const std::uint64_t calls = calls_of_run(bench);
  CHECK(calls > 300);
  for (const Then then : {Then::retry, Then::discard}) {
    for (std::uint64_t n = 1; n <= calls; ++n) {
      CAPTURE(n);
      Program program{bench};
      program.set_up();
      program.then = then;
      program.bench.device.fail_call(n);
      program.run();
      program.check_all();
      CHECK(program.failures == 1);
      if (program.sweeper->dirty(program.sweeper_pages[0])) FAIL("dirty after finish");
      program.destroy_paging();
      program.check_all_free();
    }
  }
}

TEST_CASE("each device call fails once and everything is destroyed: what was committed is home, whole") {
  const Watchdog watchdog{"failing calls, given up", std::chrono::seconds{120}};
  PagingBenchOf<HostDevice> bench;
  const std::uint64_t calls = calls_of_run(bench);
  for (std::uint64_t n = 1; n <= calls; ++n) {
    CAPTURE(n);
    Program program{bench};
    program.set_up();
    program.then = Then::stop;
    program.bench.device.fail_call(n);
    const auto error = thrown_by<DeviceError>([&] { program.run(); });
    REQUIRE(error);
    CHECK(error->kind() == DeviceError::Kind::call_failed);
    program.destroy_paging();
    program.check_homes();
    CHECK(program.bench.hbm.failed_frees() == 0);
  }
}

TEST_CASE("each device call of a destructor fails once") {
  const Watchdog watchdog{"failing calls of destructors", std::chrono::seconds{60}};
  PagingBenchOf<HostDevice> bench;
  for (std::uint64_t n = 1; n <= 60; ++n) {
    CAPTURE(n);
    Program program{bench};
    program.set_up();
    program.sweeper->begin(*program.sweep);
    for (std::uint32_t i = 0; i < 3; ++i) {
      program.step(*program.sweeper, i, program.sweeper_pages[i], Access::read_write, i, program.sweeper_words(i));
    }
    REQUIRE(program.sweeper->dirty(program.sweeper_pages[1]));
    program.bench.device.fail_call(n);
    program.destroy_paging();
    program.bench.device.fail_call(0);
    program.check_homes();
  }
}

TEST_CASE("each device call of the construction fails once: it throws, and nothing stays behind") {
  const Watchdog watchdog{"failing calls of constructors", std::chrono::seconds{60}};
  PagingBenchOf<HostDevice> bench;
  const std::uint64_t calls = calls_of_set_up(bench);
  for (std::uint64_t n = 1; n <= calls; ++n) {
    CAPTURE(n);
    Program program{bench};
    program.then = Then::stop;
    program.bench.device.fail_call(n);
    CHECK(thrown_by<DeviceError>([&] { program.set_up(); }));
    program.destroy_paging();
    program.check_all_free();
  }
}

TEST_CASE("the context is lost at any kernel: calls say so, destructors return") {
  const Watchdog watchdog{"lost context", std::chrono::seconds{60}};
  std::uint64_t kernels = 0;
  {
    PagingBenchOf<HostDevice> bench;
    Program program{bench};
    program.set_up();
    program.run();
    kernels = program.kernels;
  }
  for (std::uint64_t n = 1; n <= kernels; n += 3) {
    CAPTURE(n);
    PagingBenchOf<HostDevice> bench;
    Program program{bench};
    program.set_up();
    program.throwing_kernel = n;
    const auto error = thrown_by<DeviceError>([&] { program.run(); });
    REQUIRE(error);
    CHECK(error->context_lost());
    CHECK(thrown_by<DeviceError>([&] {
      program.layers->begin(*program.there_and_back);
      auto lease = program.layers->lease(program.layer_pages[0], program.bench.compute);
      lease.commit();
    }));
    CHECK(thrown_by<DeviceError>([&] {  // taking it may need no call of the device, ending it does
      auto lease = program.layers->lease(program.resident, program.bench.compute);
      lease.commit();
    }));
    CHECK(thrown_by<DeviceError>([&] { program.states.synchronize(0, 16); }));
    program.destroy_paging();
  }
}

TEST_CASE(
    "a slot whose release could not be recorded is not handed on, and a page launched but not committed is kept") {
  const Watchdog watchdog{"unrecorded release"};
  PagingBenchOf<HostDevice> bench;
  Program program{bench};
  program.set_up();
  auto& device = program.bench.device;
  program.sweeper->begin(*program.sweep);
  const PageId page = program.sweeper_pages[0];
  {
    auto lease = program.sweeper->lease(page, program.bench.compute);
    enqueue_update(device, program.bench.compute, lease.as<std::uint32_t>(0, page_words), 5);
    lease.launched();
    const auto words = program.sweeper_words(0);
    for (std::uint64_t i = 0; i < page_words; ++i) *words[i] = updated_word(*words[i], 5, i);
  }  // no commit: an exception went by
  CHECK(program.sweeper->dirty(page));
  device.fail_call(1);
  CHECK(thrown_by<DeviceError>([&] { program.sweeper->settle(); }));
  CHECK(program.sweeper->dirty(page));
  program.sweeper->settle();
  CHECK_FALSE(program.sweeper->dirty(page));
  program.sweeper->settle();  // nothing is owed

  // A lease for reading whose destructor fails to record: the next call makes up for it.
  program.layers->begin(*program.there_and_back);
  const std::uint32_t free_before = program.pool->free_count();
  {
    auto lease = program.layers->lease(program.layer_pages[0], program.bench.compute);
    enqueue_write(device, program.bench.compute, lease.as<std::uint32_t>(0, page_words), 9);
    device.fail_call(1);
  }
  CHECK(program.pool->free_count() == free_before - 1);
  program.layers->settle();
  CHECK(program.pool->free_count() == free_before);
  program.layers->finish(program.bench.compute);
  program.destroy_paging();
  program.check_homes();
}
