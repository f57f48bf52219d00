// Faults that other systems shipped, as small programs: each is reported, and the corrected program is silent.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
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
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"

using namespace hbmoff;

namespace {

using Checked = CheckedDevice<HostDevice>;
using Scheduler = PrefetchScheduler<Checked, OffloadAll, 2>;
using TestHome = Home<Checked>;

constexpr std::uint64_t n = 4096;  // bytes of a page

/// A device with arenas, and the streams of a trainer.
struct Trainer {
  std::vector<CheckReport> reports;
  Checked device{{.hbm_capacity = 1_MiB}, {.reports = &reports}};
  HbmArena<Checked> hbm{device, 512_KiB};
  PinnedHostArena<Checked> host{device, 512_KiB};
  Checked::Stream compute = device.create_stream("compute");
  Checked::Stream side = device.create_stream("side");
  Checked::Stream in = device.create_stream("in");
  Checked::Stream out = device.create_stream("out");

  Trainer() = default;
  Trainer(const Trainer&) = delete;
  ~Trainer() {
    for (Checked::StreamRef stream :
         {Checked::StreamRef{compute}, Checked::StreamRef{side}, Checked::StreamRef{in}, Checked::StreamRef{out}}) {
      device.synchronize(stream);
    }
  }

  auto buffer(const char* name) { return hbm.allocate(Bytes{n}, name, Role::other, compute); }
  auto pinned(const char* name) { return host.allocate(Bytes{n}, name, Role::other, compute); }
  void kernel(Checked::StreamRef s, const char* label, AccessList reads, AccessList writes) {
    device.note_access(s, label, reads, writes);
    device.enqueue(s, [] {}, {.name = label});
  }
  void after(Checked::StreamRef later, Checked::StreamRef earlier) {
    auto event = device.create_event();
    device.record(event, earlier);
    device.wait(later, event);
  }
};

/// `fault` between "actor: what tensor" of both sides.
void check(const CheckReport& report, CheckFault fault, const std::string& later, const std::string& earlier) {
  INFO(report.message());
  CHECK(report.fault == fault);
  CHECK(report.later.actor + ": " + report.later.what + " " + report.later.tensor == later);
  REQUIRE(report.earlier.has_value());
  CHECK(report.earlier->actor + ": " + report.earlier->what + " " + report.earlier->tensor == earlier);
  CHECK_FALSE(report.remedy.empty());
}

/// Calls; when it is at fault the report must be so, and `mend` makes the same call right.
template <class Call, class Mend>
void check_and_mend(Trainer& t, Call&& call, CheckFault fault, const std::string& later, const std::string& earlier,
                    Mend&& mend) {
  const auto error = thrown_by<CheckError>(call);
  REQUIRE(error.has_value());
  check(error->report(), fault, later, earlier);
  mend();
  call();
  CHECK(t.device.errors() == 1);
}

/// A plan that updates all pages, one after the other.
void sweep(Trainer& t, Scheduler& scheduler, PlanId plan, const std::vector<PageId>& pages) {
  scheduler.begin(plan);
  for (const PageId page : pages) {
    auto lease = scheduler.lease(page, t.compute);
    t.kernel(t.compute, "update", {lease.bytes()}, {lease.bytes()});
    lease.launched();
    lease.commit();
  }
  scheduler.finish(t.compute);
}
PlanId plan_of(Scheduler& scheduler, const std::vector<PageId>& pages) {
  std::vector<PlanStep> steps;
  for (const PageId page : pages) steps.push_back({page, Access::read_write});
  return scheduler.add_plan(std::move(steps));
}
std::vector<PageId> add_pages(Scheduler& scheduler, TestHome& home, std::uint64_t count) {
  std::vector<PageId> pages;
  for (std::uint64_t i = 0; i < count; ++i) {
    pages.push_back(scheduler.add_page({.label = "page " + std::to_string(i), .parts = {{&home, i * n, 0, Bytes{n}}}}));
  }
  return pages;
}
/// Gives the home content.
void load(Trainer& t, TestHome& home) {
  home.synchronize(0, home.memory().count());
  t.device.note_host_access("load", {}, {home.memory()});
}

}  // namespace

TEST_CASE("a reload that is not ordered after its own write-back") {
  Trainer t;
  auto slot = t.buffer("slot 0"), other = t.buffer("slot 1");
  auto home = t.pinned("moments");
  t.kernel(t.compute, "update", {}, {slot.bytes()});
  t.after(t.out, t.compute);
  t.device.copy_async(home.bytes(), slot.bytes(), t.out);
  t.after(t.in, t.compute);
  check_and_mend(
      t, [&] { t.device.copy_async(other.bytes(), home.bytes(), t.in); }, CheckFault::read_before_write,
      "stream 'in': a copy reads moments", "stream 'out': a copy writes moments", [&] { t.after(t.in, t.out); });
  t.after(t.compute, t.in);
  t.after(t.compute, t.out);
}

TEST_CASE("the scheduler orders reloads after its write-backs") {
  Trainer t;
  {
    TestHome home{t.host, Bytes{5 * n}, "moments", Role::optimizer_state, t.compute};
    load(t, home);
    Scheduler scheduler{t.hbm, Bytes{n}, Role::optimizer_state};
    const auto pages = add_pages(scheduler, home, 5);
    const PlanId plan = plan_of(scheduler, pages);
    for (int step = 0; step < 3; ++step) sweep(t, scheduler, plan, pages);
    t.device.synchronize(t.compute);
  }
  CHECK(t.reports.empty());
}

TEST_CASE("a buffer that is freed while a side stream reads it") {
  Trainer t;
  auto weights = t.buffer("weights");
  t.kernel(t.compute, "update", {}, {weights.bytes()});
  t.after(t.side, t.compute);
  t.kernel(t.side, "all-reduce", {weights.bytes()}, {});
  check_and_mend(
      t, [&] { weights.free(t.compute); }, CheckFault::free_under_work, "stream 'compute': the free of weights",
      "stream 'side': 'all-reduce' reads weights", [&] { t.after(t.compute, t.side); });
}

TEST_CASE("a home that is read past its order before the first scheduler wrote it back") {
  Trainer t;
  {
    auto snapshot = t.buffer("snapshot");
    t.after(t.in, t.compute);
    TestHome home{t.host, Bytes{n}, "moments", Role::optimizer_state, t.compute};
    load(t, home);
    Scheduler scheduler{t.hbm, Bytes{n}, Role::optimizer_state};
    const auto pages = add_pages(scheduler, home, 1);
    sweep(t, scheduler, plan_of(scheduler, pages), pages);
    const auto raw = [&] { t.device.copy_async(snapshot.bytes(), home.memory(), t.in); };
    const auto error = thrown_by<CheckError>(raw);
    REQUIRE(error.has_value());
    CHECK(error->fault() == CheckFault::read_before_write);
    CHECK(error->report().later.tensor == "moments");
    CHECK(error->report().earlier->what == "a copy writes");  // the write-back
    SUBCASE("by the home's own synchronisation") { home.synchronize(0, n); }
    SUBCASE("by a wait for the stream that the plan ended on") { t.after(t.in, t.compute); }
    raw();
    t.device.synchronize(t.in);
  }
  CHECK(t.device.errors() == 1);
}

TEST_CASE("two schedulers that share a home are in order") {
  Trainer t;
  {
    TestHome home{t.host, Bytes{3 * n}, "moments", Role::optimizer_state, t.compute};
    load(t, home);
    Scheduler first{t.hbm, Bytes{n}, Role::optimizer_state}, second{t.hbm, Bytes{3 * n}, Role::optimizer_state};
    const auto pages = add_pages(first, home, 3);
    const std::vector<PageId> whole = {second.add_page({.label = "whole", .parts = {{&home, 0, 0, Bytes{3 * n}}}})};
    const PlanId plan = plan_of(first, pages), whole_plan = plan_of(second, whole);
    for (int step = 0; step < 2; ++step) {
      sweep(t, first, plan, pages);
      sweep(t, second, whole_plan, whole);
    }
    t.device.synchronize(t.compute);
  }
  CHECK(t.reports.empty());
}

TEST_CASE("a wait on the wrong stream") {
  Trainer t;
  auto gradient = t.buffer("gradient");
  t.kernel(t.compute, "backward", {}, {gradient.bytes()});
  t.after(t.in, t.compute);  // "side" was meant
  check_and_mend(
      t, [&] { t.kernel(t.side, "norm", {gradient.bytes()}, {}); }, CheckFault::read_before_write,
      "stream 'side': 'norm' reads gradient", "stream 'compute': 'backward' writes gradient",
      [&] { t.after(t.side, t.compute); });
  t.after(t.compute, t.side);
}

TEST_CASE("an event that is recorded before the work it is to stand for") {
  Trainer t;
  auto gradient = t.buffer("gradient");
  auto done = t.device.create_event();
  t.device.record(done, t.compute);
  t.kernel(t.compute, "backward", {}, {gradient.bytes()});
  t.device.wait(t.side, done);
  check_and_mend(
      t, [&] { t.kernel(t.side, "norm", {gradient.bytes()}, {}); }, CheckFault::read_before_write,
      "stream 'side': 'norm' reads gradient", "stream 'compute': 'backward' writes gradient",
      [&] {
        t.device.record(done, t.compute);
        t.device.wait(t.side, done);
      });
  t.after(t.compute, t.side);
}

TEST_CASE("a scalar that the host reads before its copy has ended") {
  Trainer t;
  auto loss = t.buffer("loss");
  auto scalar = t.pinned("scalar");
  t.kernel(t.compute, "loss", {}, {loss.bytes()});
  t.device.copy_async(scalar.bytes(), loss.bytes(), t.compute);
  check_and_mend(
      t, [&] { t.device.note_host_access("log", {scalar.bytes().subspan(0, 4)}, {}); }, CheckFault::host_access,
      "the host: 'log' reads scalar", "stream 'compute': a copy writes scalar",
      [&] { t.device.synchronize(t.compute); });
}

TEST_CASE("a slot that is refilled before the optimizer's last read") {
  Trainer t;
  auto slot = t.buffer("slot");
  auto home = t.pinned("moments");
  t.device.note_host_access("load", {}, {home.bytes()});
  t.after(t.in, t.compute);
  t.device.copy_async(slot.bytes(), home.bytes(), t.in);
  t.after(t.compute, t.in);
  t.kernel(t.compute, "adamw", {slot.bytes()}, {});
  check_and_mend(
      t, [&] { t.device.copy_async(slot.bytes(), home.bytes(), t.in); }, CheckFault::write_before_access,
      "stream 'in': a copy writes slot", "stream 'compute': 'adamw' reads slot", [&] { t.after(t.in, t.compute); });
  t.after(t.compute, t.in);
}

TEST_CASE("two views of one buffer that are paged independently of each other") {
  for (const bool shared : {false, true}) {
    Trainer t;
    {
      auto buffer = t.host.allocate(Bytes{2 * n}, "tied weights", Role::weight, t.compute);
      t.device.note_host_access("load", {}, {buffer.bytes()});
      TestHome home{buffer.bytes()}, view{buffer.bytes()};
      Scheduler first{t.hbm, Bytes{n}, Role::weight}, second{t.hbm, Bytes{n}, Role::weight};
      TestHome& other = shared ? home : view;  // a view is a home of its own, which knows nothing of the first
      const std::vector<PageId> one = {first.add_page({.label = "one", .parts = {{&home, 0, 0, Bytes{n}}}})};
      const std::vector<PageId> two = {second.add_page({.label = "two", .parts = {{&other, n / 2, 0, Bytes{n}}}})};
      const PlanId plan_one = plan_of(first, one), plan_two = plan_of(second, two);
      sweep(t, first, plan_one, one);
      const auto error = thrown_by<CheckError>([&] { sweep(t, second, plan_two, two); });
      REQUIRE(error.has_value() == !shared);
      if (error) {
        const CheckReport& report = error->report();
        CHECK(report.fault == CheckFault::read_before_write);
        CHECK(report.later.what == "a copy reads");
        CHECK(report.later.tensor == "tied weights");
        CHECK(report.later.first_byte == n / 2);
        CHECK(report.later.bytes == Bytes{n / 2});
        CHECK(report.earlier->what == "a copy writes");
      }
      t.device.synchronize(t.compute);
    }
    CHECK(t.device.errors() == (shared ? 0 : 1));
  }
}

TEST_CASE("a stream that was taken down when it was still the caller's") {
  Trainer t;
  {
    TestHome home{t.host, Bytes{n}, "moments", Role::optimizer_state, t.compute};
    load(t, home);
    Scheduler scheduler{t.hbm, Bytes{n}, Role::optimizer_state};
    const auto pages = add_pages(scheduler, home, 1);
    scheduler.begin(plan_of(scheduler, pages));
    auto lease = scheduler.lease(pages[0], t.compute);
    // The caller goes on with another stream.
    check_and_mend(
        t, [&] { t.kernel(t.side, "update", {lease.bytes()}, {lease.bytes()}); }, CheckFault::read_before_write,
        "stream 'side': 'update' reads page 0", "stream 'pages in': a copy writes page 0",
        [&] { lease.used_on(t.side); });
    lease.launched();
    lease.commit();
    scheduler.finish(t.side);
    t.device.synchronize(t.side);
  }
  CHECK(t.device.errors() == 1);
}

TEST_CASE("a temporary that is freed at the end of its scope while its copy is in flight") {
  Trainer t;
  auto home = t.pinned("snapshot");
  {
    auto temporary = t.buffer("temporary");
    t.kernel(t.compute, "cast", {}, {temporary.bytes()});
    t.after(t.out, t.compute);
    t.device.copy_async(home.bytes(), temporary.bytes(), t.out);
  }  // freed in the order of "compute"
  REQUIRE(!t.reports.empty());  // a destructor throws nothing; it may try again
  const std::size_t reports = t.reports.size();
  for (const CheckReport& report : t.reports)
    check(report, CheckFault::free_under_work, "stream 'compute': the free of temporary",
          "stream 'out': a copy reads temporary");
  CHECK(t.hbm.failed_frees() == 1);  // nobody gets the memory before the order is known
  t.after(t.compute, t.out);
  {
    auto temporary = t.buffer("temporary");
    t.kernel(t.compute, "cast", {}, {temporary.bytes()});
    t.after(t.out, t.compute);
    t.device.copy_async(home.bytes(), temporary.bytes(), t.out);
    temporary.move_to(t.out);
  }
  CHECK(t.reports.size() == reports);
  t.after(t.compute, t.out);
}

TEST_CASE("a reload that is put on its way while a thread still writes the home") {
  Trainer t;
  {
    TestHome home{t.host, Bytes{2 * n}, "moments", Role::optimizer_state, t.compute};
    load(t, home);
    Scheduler scheduler{t.hbm, Bytes{n}, Role::optimizer_state};
    const auto pages = add_pages(scheduler, home, 2);
    const PlanId plan = plan_of(scheduler, pages);
    home.invalidate();
    std::thread reader{[&] {
      t.device.note_threads_joined();
      t.device.note_host_access("read checkpoint", {}, {home.memory().subspan(n, n)});
    }};
    reader.join();
    // Page 1 is fetched ahead with page 0.
    scheduler.begin(plan);
    std::optional<Scheduler::LeaseType> lease;
    check_and_mend(
        t, [&] { lease = scheduler.lease(pages[0], t.compute); }, CheckFault::host_access,
        "stream 'pages in': a copy reads moments", "host thread 2: 'read checkpoint' writes moments",
        [&] { t.device.note_threads_joined(); });
    lease->commit();
    lease = scheduler.lease(pages[1], t.compute);
    lease->commit();
    scheduler.finish(t.compute);
    t.device.synchronize(t.compute);
  }
  CHECK(t.device.errors() == 1);
}

TEST_CASE("a reload that is put on its way while a host function still writes the home") {
  Trainer t;
  {
    TestHome home{t.host, Bytes{n}, "moments", Role::optimizer_state, t.compute};
    load(t, home);
    Scheduler scheduler{t.hbm, Bytes{n}, Role::optimizer_state};
    const auto pages = add_pages(scheduler, home, 1);
    const PlanId plan = plan_of(scheduler, pages);
    home.invalidate();
    t.device.note_access(t.side, "adamw on the host", {home.memory()}, {home.memory()});
    t.device.host_func(t.side, [] {});
    scheduler.begin(plan);
    std::optional<Scheduler::LeaseType> lease;
    check_and_mend(
        t, [&] { lease = scheduler.lease(pages[0], t.compute); }, CheckFault::read_before_write,
        "stream 'pages in': a copy reads moments", "stream 'side': 'adamw on the host' writes moments",
        [&] { t.device.synchronize(t.side); });
    lease->commit();
    scheduler.finish(t.compute);
    t.device.synchronize(t.compute);
  }
  CHECK(t.device.errors() == 1);
}
