// Random programs over schedulers, homes, leases and pools, held against a model in which every commit is seen by all at
// once: plain bytes for each home, and for each lease what it must find in its memory.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "fuzz.hpp"

namespace {

using namespace fuzz;

using Scheduler = PrefetchScheduler<Checked, OffloadAll, dynamic_depth>;
using LeaseType = Scheduler::LeaseType;

/// Granularity of all offsets and sizes.
constexpr std::uint64_t unit = 16;
constexpr Bytes host_bytes{16 << 10};
constexpr std::uint64_t unlimited = ~std::uint64_t{0};

/// A byte that the model knows, or one whose content nobody promises.
struct ModelByte {
  std::byte value{};
  bool known = false;
};

struct HomeModel {
  std::unique_ptr<Home<Checked>> home;
  std::vector<ModelByte> truth;  ///< with all that was committed
};

struct PageModel {
  PageId id;
  std::vector<PagePart<Checked>> parts = {};
  std::vector<std::uint32_t> home_of = {};  ///< of each part
  bool transient = false;
  bool partly_read_only = false, reads_any = false, writes_any = false;
  std::uint64_t limit = unlimited;
  std::uint64_t content = unlimited;  ///< where what the page holds in its slot may end
};

struct ResidentModel {
  PageId id;
  std::vector<ModelByte> content = {};
};

struct SchedulerModel {
  std::optional<Scheduler> scheduler;
  bool shared = false;
  SchedulerOptions options = {};
  std::vector<PageModel> pages = {};
  std::vector<ResidentModel> residents = {};
  std::vector<std::vector<PlanStep>> plans = {};
  std::vector<PlanId> plan_ids = {};
  std::optional<std::uint32_t> plan = {};  ///< the one that runs
  std::uint32_t cursor = 0;
};

struct Held {
  SchedulerModel* of;
  std::uint32_t page;  ///< or resident page
  bool resident;
  LeaseType lease;
  std::vector<StreamRef> streams;
  StreamRef last;  ///< what is put on it comes after all of the lease's work so far
  Access access;
  bool last_use;  ///< in its plan
  bool was_dirty;
  bool wrote = false, launched = false;
  std::vector<ModelByte> memory;  ///< of the slot, as far as it is known
  std::vector<std::uint64_t> generations = {};  ///< of the homes of its parts, when it was leased
};

class Program {
 public:
  Program(Checked& device, Input& input)
      : device_{device}, in_{input}, a_{device.create_stream("a")}, b_{device.create_stream("b")},
        c_{device.create_stream("c")}, d_{device.create_stream("d")}, e_{device.create_stream("e")},
        pinned_{device, host_bytes}, hbm_{device, Bytes{64 << 10}, {.max_blocks = 256, .fill_freed = input.flip()}},
        host_{device, pinned_.memory, {.max_blocks = 64, .fill_freed = input.flip()}} {}

  void run() {
    setup();
    for (int steps = 0; steps < 300 && !in_.empty(); ++steps) {
      const std::uint32_t failing = in_.one_in(5) ? in_.between(1, 8) : 0, times = in_.between(1, 2);
      device_.inner().fail_call(failing, times);
      step();
      device_.inner().fail_call(0);
    }
    end();
  }

 private:
  // ---------------------------------------------------------------------------------------------- what there is

  void setup() {
    if (in_.flip()) {  // memory that somebody used before, on streams that nothing of the library knows
      auto used = hbm_.allocate(hbm_.usage().largest_free, "before", Role::other, e_);
      device_.fill_async(used.bytes(), std::byte{1}, e_);
      auto pinned = host_.allocate(host_.usage().largest_free, "before", Role::other, e_);
      device_.copy_async(pinned.bytes(), device_span<const std::byte>{used.bytes().subspan(0, pinned.size().count())},
                         e_);
    }
    slot_bytes_ = unit * in_.between(1, 24);
    const std::uint32_t homes = in_.between(1, 2);
    for (std::uint32_t h = 0; h < homes; ++h) {
      const std::uint64_t bytes = unit * in_.between(1, 64);
      HomeModel model{std::make_unique<Home<Checked>>(host_, Bytes{bytes}, "home " + std::to_string(h),
                                                      Role::optimizer_state, in_.flip() ? a_ : d_),
                      {}};
      model.home->synchronize(0, bytes);
      model.truth.resize(bytes);
      host_writes(model, 0, bytes);
      homes_.push_back(std::move(model));
    }
    const std::uint32_t schedulers = in_.between(1, 3);
    const bool shared = in_.flip();
    std::vector<SchedulerOptions> options;
    std::uint32_t guaranteed = 0;
    for (std::uint32_t s = 0; s < schedulers; ++s) {
      SchedulerOptions o{.depth = in_.between(1, 5),
                         .one_copy_stream = in_.flip(),
                         .fill_evicted = in_.flip(),
                         .name = "scheduler " + std::to_string(s)};
      if (shared) o.guaranteed_slots = in_.below(o.depth + 1);
      guaranteed += std::max(1u, o.guaranteed_slots);
      options.push_back(o);
    }
    if (shared) {
      const std::uint32_t count = guaranteed + in_.below(4);
      pool_.emplace(hbm_, Bytes{slot_bytes_}, count, Role::workspace, e_);
    }
    for (const SchedulerOptions& o : options) {
      schedulers_.push_back(std::make_unique<SchedulerModel>());
      schedulers_.back()->shared = shared && !in_.one_in(8);
      schedulers_.back()->options = o;
      if (!schedulers_.back()->shared) schedulers_.back()->options.guaranteed_slots = 0;
      open(*schedulers_.back());
    }
  }

  void open(SchedulerModel& s) {
    again([&] {
      if (s.shared) {
        s.scheduler.emplace(*pool_, hbm_, s.options);
      } else {
        s.scheduler.emplace(hbm_, Bytes{slot_bytes_}, Role::workspace, s.options);
      }
    });
    const std::uint32_t pages = in_.between(1, 6), plans = in_.between(1, 3);
    for (std::uint32_t p = 0; p < pages; ++p) add_page(s);
    for (std::uint32_t p = 0; p < plans; ++p) add_plan(s);
  }

  void add_page(SchedulerModel& s) {
    PageModel page{.id = {}, .transient = in_.one_in(5)};
    PageSpec<Checked> spec{.label = "page " + std::to_string(s.pages.size()), .transient = page.transient};
    const std::uint32_t parts = in_.below(4);
    std::uint64_t slot_at = 0;
    for (std::uint32_t i = 0; i < parts; ++i) {
      const std::uint32_t h = in_.below(homes_.size());
      const std::uint64_t home_units = homes_[h].truth.size() / unit;
      slot_at += unit * (in_.one_in(4) ? 1 : 0);
      if (slot_at >= slot_bytes_) break;
      const std::uint64_t first = in_.below(home_units);
      const std::uint64_t most = std::min(home_units - first, (slot_bytes_ - slot_at) / unit);
      PagePart<Checked> part{homes_[h].home.get(), first * unit, slot_at, Bytes{in_.below(most + 1) * unit},
                             static_cast<Access>(in_.between(1, 3))};
      // Parts of one page lie apart, or what they write would overlap.
      bool apart = true;
      for (std::size_t j = 0; j < page.parts.size(); ++j) {
        apart = apart && (page.home_of[j] != h || !overlap(part, page.parts[j]));
      }
      if (!apart) continue;
      slot_at += part.bytes.count();
      page.parts.push_back(part);
      page.home_of.push_back(h);
      if (part.bytes == Bytes{}) continue;
      page.reads_any = page.reads_any || reads(part.access);
      page.writes_any = page.writes_any || writes(part.access);
      page.partly_read_only = page.partly_read_only || part.access == Access::read;
    }
    spec.parts = page.parts;
    spec.slot_bytes = Bytes{std::min(slot_at, slot_bytes_)};
    if (in_.one_in(8)) {  // what does not fit
      PageSpec<Checked> wrong = spec;
      wrong.slot_bytes = Bytes{slot_bytes_ + 1};
      expect_refused("a page larger than a slot", [&] { static_cast<void>(s.scheduler->add_page(wrong)); });
      wrong = spec;
      wrong.parts.push_back({homes_[0].home.get(), homes_[0].truth.size(), 0, Bytes{1}, Access::read});
      expect_refused("a part outside its home", [&] { static_cast<void>(s.scheduler->add_page(wrong)); });
    }
    again([&] { page.id = s.scheduler->add_page(spec); });
    s.pages.push_back(std::move(page));
  }
  static bool overlap(const PagePart<Checked>& a, const PagePart<Checked>& b) {
    return a.home == b.home && a.home_offset < b.home_offset + b.bytes.count() &&
           b.home_offset < a.home_offset + a.bytes.count();
  }

  static bool serves(const PageModel& page, Access access) {
    if (!page.reads_any && !page.writes_any) return true;
    return !(reads(access) && !page.reads_any) && !(writes(access) && !page.writes_any) &&
           !(access == Access::write && page.partly_read_only);
  }
  void add_plan(SchedulerModel& s) {
    std::vector<PlanStep> steps;
    const std::uint32_t count = in_.below(12);
    for (std::uint32_t i = 0; i < count; ++i) {
      const PageModel& page = s.pages[in_.below(s.pages.size())];
      const auto access = static_cast<Access>(in_.between(1, 3));
      if (!serves(page, access)) {
        expect_refused("an access that the parts do not serve",
                       [&] { static_cast<void>(s.scheduler->add_plan({{page.id, access}})); });
        continue;
      }
      steps.push_back({page.id, access});
    }
    s.plan_ids.push_back(s.scheduler->add_plan(steps));
    s.plans.push_back(std::move(steps));
  }

  // ---------------------------------------------------------------------------------------------- what is done

  void step() {
    SchedulerModel& s = *schedulers_[in_.below(schedulers_.size())];
    switch (in_.below(16)) {
      case 0:
        return begin(s);
      case 1:
      case 2:
      case 3:
      case 4:
        return lease(s);
      case 5:
        return with_held([&](Held& held) { use(held); });
      case 6:
      case 7:
        return with_held([&](Held& held) { commit(held); });
      case 8:
        return with_held([&](Held& held) { drop(held); });
      case 9:
        return with_held([&](Held& held) { donate(held); });
      case 10:
        return with_held([&](Held& held) { use_on_one_more(held); });
      case 11:
        return finish(s);
      case 12:
        return host_access(homes_[in_.below(homes_.size())]);
      case 13:
        return resident(s);
      case 14:
        return sweep(s);
      default:
        return rare(s);
    }
  }

  void rare(SchedulerModel& s) {
    switch (in_.below(6)) {
      case 0:
        return again([&] { s.scheduler->settle(); });
      case 1:
        if (s.pages.size() < 10) add_page(s);
        return;
      case 2:
        if (s.plans.size() < 6) add_plan(s);
        return;
      case 3:
        expect_refused("a plan that there is not", [&] { s.scheduler->begin(PlanId{999}); });
        expect_refused("a page that there is not", [&] { static_cast<void>(s.scheduler->lease(PageId{999}, a_)); });
        return;
      case 4:
        return wrong_page(s);
      default:
        return restart(s);
    }
  }

  void begin(SchedulerModel& s) {
    if (s.plans.empty()) return;
    const std::uint32_t plan = in_.below(s.plans.size());
    again([&] { s.scheduler->begin(s.plan_ids[plan]); });
    forget_transient(s);
    s.plan = plan;
    s.cursor = 0;
  }

  // What kept pages that nobody needs had not sent home is lost.
  void forget_transient(SchedulerModel& s) {
    for (PageModel& page : s.pages) {
      if (page.transient) forget_written(page);
    }
  }
  void forget_written(const PageModel& page) {
    for (std::size_t i = 0; i < page.parts.size(); ++i) {
      if (!writes(page.parts[i].access)) continue;
      for (std::uint64_t b = 0; b < page.parts[i].bytes.count(); ++b)
        homes_[page.home_of[i]].truth[page.parts[i].home_offset + b].known = false;
    }
  }

  [[nodiscard]] bool leased(const SchedulerModel& s, std::uint32_t page) const {
    return std::any_of(held_.begin(), held_.end(),
                       [&](const Held& h) { return h.of == &s && !h.resident && h.page == page; });
  }
  [[nodiscard]] static bool both_write(const PageModel& a, const PageModel& b) {
    for (const auto& x : a.parts) {
      for (const auto& y : b.parts) {
        if (overlap(x, y) && writes(x.access) && writes(y.access)) return true;
      }
    }
    return false;
  }

  void lease(SchedulerModel& s) {
    if (!s.plan || s.cursor >= s.plans[*s.plan].size()) {
      const PageId any = s.pages[0].id;
      if (!in_.flip()) return begin(s);
      expect_refused("a lease outside of a plan", [&] { static_cast<void>(s.scheduler->lease(any, a_)); });
      return;
    }
    const PlanStep& step = s.plans[*s.plan][s.cursor];
    const std::uint32_t p = page_of(s, step.page);
    PageModel& page = s.pages[p];
    require(s.scheduler->expects(step.page, step.access), "the scheduler expects another page");
    const StreamRef stream = any_stream();
    if (leased(s, p)) {
      expect_refused("a page leased twice", [&] { static_cast<void>(s.scheduler->lease(step.page, stream)); });
      return;
    }
    bool may_be_refused = false;  // what was committed and is leased for writing again cannot go home
    for (const Held& h : held_) {
      if (h.resident || !writes(h.access)) continue;
      if (writes(step.access) && both_write(h.of->pages[h.page], page)) return;  // of what both write one would be lost
      may_be_refused = may_be_refused || h.was_dirty;
    }
    if (writes(step.access) && in_.one_in(4)) {
      page.limit = in_.flip() ? unlimited : unit * in_.below(slot_bytes_ / unit + 1);
      s.scheduler->limit(page.id, Bytes{page.limit});
      cut(page);
    }
    Held held{.of = &s,
              .page = p,
              .resident = false,
              .lease = {},
              .streams = {stream},
              .last = stream,
              .access = step.access,
              .last_use = true,
              .was_dirty = false,
              .memory = {}};
    try {
      again([&] { held.lease = s.scheduler->lease(step.page, stream); });
    } catch (const InvalidArgument& error) {
      require(may_be_refused, std::string{"a lease was refused: "} + error.what());
      return;
    } catch (const SlotsExhausted& error) {
      require(holds_leases(s), std::string{"no slot, though it leases none: "} + error.what());
      return;
    }
    for (std::size_t i = s.cursor + 1; i < s.plans[*s.plan].size(); ++i)
      held.last_use = held.last_use && s.plans[*s.plan][i].page != step.page;
    ++s.cursor;
    require(held.lease.bytes().count() == slot_bytes_, "a lease has another size than a slot");
    require(held.lease.access() == step.access, "a lease is for another access");
    held.was_dirty = writes(step.access) && s.scheduler->dirty(page.id);
    held.memory.resize(slot_bytes_);
    const std::uint64_t end = std::min(page.limit, page.content);
    for (std::size_t i = 0; i < page.parts.size() && reads(step.access); ++i) {
      const auto& part = page.parts[i];
      for (std::uint64_t b = 0; reads(part.access) && b < part.bytes.count() && part.slot_offset + b < end; ++b)
        held.memory[part.slot_offset + b] = homes_[page.home_of[i]].truth[part.home_offset + b];
    }
    for (const auto& part : page.parts) held.generations.push_back(part.home->generation());
    held_.push_back(std::move(held));
    if (in_.flip()) use(held_.back());
  }

  // From here on the page holds nothing beyond its limit.
  void cut(PageModel& page) {
    page.content = std::min(page.content, page.limit);
    for (std::size_t i = 0; i < page.parts.size(); ++i) {
      const auto& part = page.parts[i];
      if (!writes(part.access)) continue;
      for (std::uint64_t b = 0; b < part.bytes.count(); ++b) {
        if (part.slot_offset + b >= page.limit) homes_[page.home_of[i]].truth[part.home_offset + b].known = false;
      }
    }
  }

  [[nodiscard]] bool holds_leases(const SchedulerModel& s) const {
    return std::any_of(held_.begin(), held_.end(), [&](const Held& h) { return h.of == &s && !h.resident; });
  }
  static std::uint32_t page_of(const SchedulerModel& s, PageId id) {
    std::uint32_t p = 0;
    while (s.pages[p].id != id) ++p;
    return p;
  }

  // ---------------------------------------------------------------------------------------------- using a lease

  // Checks what is there, and writes when the lease is for writing.
  void use(Held& held) {
    check(held);
    if (writes(held.access) && !in_.one_in(4)) write(held);
  }
  void check(Held& held) { check(held.lease.bytes(), held.memory, next_stream(held)); }
  void check(device_span<std::byte> memory, const std::vector<ModelByte>& expected, StreamRef stream) {
    const std::vector<AccessRange> known = known_ranges(memory.data(), expected);
    device_.note_access(stream, "check", known, {});
    again([&] { device_.enqueue(stream, [&] { compare(memory.data(), expected, "a page"); }, {.name = "check"}); });
  }
  void write(Held& held) {
    const StreamRef stream = next_stream(held);
    const std::uint64_t serial = ++serials_;
    std::vector<AccessRange> ranges;
    const auto memory = held.lease.bytes();
    const auto put = [&](std::uint64_t first, std::uint64_t count) {
      ranges.push_back(memory.subspan(first, count));
      for (std::uint64_t i = first; i < first + count; ++i) held.memory[i] = {content_byte(serial, i), true};
    };
    if (held.resident) {
      put(0, held.memory.size());
    } else {
      const PageModel& page = held.of->pages[held.page];
      for (const auto& part : page.parts) {
        if (!writes(part.access) || part.slot_offset >= page.limit) continue;
        const std::uint64_t count = std::min(part.bytes.count(), page.limit - part.slot_offset);
        put(part.slot_offset, in_.one_in(6) ? count / 2 : count);
      }
    }
    device_.note_access(stream, "write", {}, ranges);
    again([&] {
      device_.enqueue(stream,
                      [&] {
                        for (const AccessRange& range : ranges) {
                          const auto first =
                              static_cast<std::uint64_t>(static_cast<const std::byte*>(range.data) - memory.data());
                          for (std::uint64_t i = first; i < first + range.bytes.count(); ++i)
                            memory.data()[i] = content_byte(serial, i);
                        }
                      },
                      {.name = "write"});
    });
    held.wrote = true;
    // A slot that holds what an earlier lease committed cannot lose what was written over it.
    if (held.was_dirty || in_.flip()) {
      held.lease.launched();
      held.launched = true;
    }
  }

  // ---------------------------------------------------------------------------------------------- ends of a lease

  void commit(Held& held) {
    if (writes(held.access) && !held.wrote && !in_.one_in(8)) write(held);
    const bool stale = is_stale(held);
    try {
      held.lease.commit();
      require(!stale || !writes(held.access) || held.resident, "what was written to a stale page was accepted");
    } catch (const DeviceError&) {
      if (in_.flip()) again([&] { held.of->scheduler->settle(); });
    } catch (const InvalidArgument& error) {
      require(stale && writes(held.access), std::string{"a commit was refused: "} + error.what());
    }
    require(held.lease.empty(), "a lease goes on after its commit");
    ended(held, writes(held.access) && !stale);
  }
  void drop(Held& held) {
    const bool counts = held.launched && !is_stale(held);
    held.lease = LeaseType{};
    ended(held, counts);
  }
  void donate(Held& held) {
    if (held.resident) return;
    const StreamRef first = held.streams[0];
    HbmBuffer small, replacement, donated;
    again([&] { small = hbm_.allocate(Bytes{slot_bytes_ - 1}, "too small", Role::workspace, first); });
    expect_refused("a replacement too small, or a page that is written, ",
                   [&] { donated = held.lease.donate(std::move(small)); });
    require(static_cast<bool>(small), "a donation that was refused took the replacement");
    if (writes(held.access)) return;
    const bool dirty = held.of->scheduler->dirty(held.of->pages[held.page].id);
    again([&] { replacement = hbm_.allocate(Bytes{slot_bytes_}, "replacement", Role::workspace, held.last); });
    try {
      again([&] { donated = held.lease.donate(std::move(replacement)); });
    } catch (const InvalidArgument& error) {
      require(dirty && !held.lease.empty() && replacement, std::string{"a donation was refused: "} + error.what());
      return check(held);
    }
    require(donated.bytes().count() >= slot_bytes_ && held.lease.empty(), "a donation gave something else");
    order(device_, first, held.last);
    donated_.push_back({std::move(donated), held.memory, first});
    check(donated_.back());
    ended(held, false);
    if (donated_.size() > 3) {
      check(donated_.front());
      donated_.erase(donated_.begin());
    }
  }

  // Some home of the page was loaded anew since.
  [[nodiscard]] bool is_stale(const Held& held) const {
    if (held.resident) return false;
    const PageModel& page = held.of->pages[held.page];
    for (std::size_t i = 0; i < page.parts.size(); ++i) {
      if (page.parts[i].bytes != Bytes{} && page.parts[i].home->generation() != held.generations[i]) return true;
    }
    return false;
  }
  // `counts`: what was written is the truth from here on.
  void ended(Held& held, bool counts) {
    if (held.resident) {
      held.of->residents[held.page].content = held.memory;
    } else {
      PageModel& page = held.of->pages[held.page];
      for (std::size_t i = 0; i < page.parts.size() && counts; ++i) {
        const auto& part = page.parts[i];
        if (!writes(part.access)) continue;
        for (std::uint64_t b = 0; b < part.bytes.count() && part.slot_offset + b < page.limit; ++b)
          homes_[page.home_of[i]].truth[part.home_offset + b] = held.memory[part.slot_offset + b];
      }
      // Beyond the limit of before, the slot has nothing of what is only read.
      if (counts && !page.partly_read_only) page.content = page.limit;
      if (page.transient && held.last_use) forget_written(page);
    }
    held_.erase(held_.begin() + (&held - held_.data()));
  }

  void use_on_one_more(Held& held) {
    const StreamRef stream = any_stream();
    const bool known = std::find(held.streams.begin(), held.streams.end(), stream) != held.streams.end();
    if (!known && held.streams.size() == max_streams_per_lease) {
      return expect_refused("a fifth stream of a lease", [&] { held.lease.used_on(stream); });
    }
    again([&] { held.lease.used_on(stream); });
    if (!known) held.streams.push_back(stream);
    use(held);
  }

  // ---------------------------------------------------------------------------------------------- the rest

  void finish(SchedulerModel& s) {
    const StreamRef stream = any_stream();
    if (holds_leases(s)) return expect_refused("the end of a plan under a lease", [&] { s.scheduler->finish(stream); });
    again([&] { s.scheduler->finish(stream); });
    forget_transient(s);
    s.plan.reset();
    if (schedulers_.size() != 1) return;
    again([&] { device_.synchronize(stream); });  // behind it everything is home
    for (HomeModel& home : homes_) host_checks(home);
  }

  void sweep(SchedulerModel& s) {
    if (holds_leases(s)) return;
    begin(s);
    while (s.plan && s.cursor < s.plans[*s.plan].size()) {
      const std::size_t before = held_.size();
      lease(s);
      if (held_.size() == before) return;
      if (in_.one_in(8)) {
        drop(held_.back());
      } else {
        commit(held_.back());
      }
    }
    if (!in_.one_in(4)) finish(s);
  }

  void resident(SchedulerModel& s) {
    if (s.residents.size() < 3 && in_.one_in(3)) {
      const std::uint64_t bytes = in_.below(5) * 100;
      const StreamRef stream = any_stream();
      PageId id{};
      again([&] { id = s.scheduler->add_resident_page("resident", Bytes{bytes}, Role::workspace, stream); });
      expect_refused("a resident page in a plan",
                     [&] { static_cast<void>(s.scheduler->add_plan({{id, Access::read}})); });
      s.residents.push_back({id, std::vector<ModelByte>(bytes)});
      return;
    }
    if (s.residents.empty()) return;
    const std::uint32_t r = in_.below(s.residents.size());
    const StreamRef stream = any_stream();
    const auto take = [&] {
      LeaseType lease;
      again([&] { lease = s.scheduler->lease(s.residents[r].id, stream); });
      return lease;
    };
    if (std::any_of(held_.begin(), held_.end(),
                    [&](const Held& h) { return h.of == &s && h.resident && h.page == r; })) {
      return expect_refused("a resident page leased twice", [&] { static_cast<void>(take()); });
    }
    held_.push_back({.of = &s,
                     .page = r,
                     .resident = true,
                     .lease = take(),
                     .streams = {stream},
                     .last = stream,
                     .access = Access::read_write,
                     .last_use = false,
                     .was_dirty = false,
                     .memory = s.residents[r].content});
    use(held_.back());
  }

  void wrong_page(SchedulerModel& s) {
    const bool running = s.plan && s.cursor < s.plans[*s.plan].size();
    for (const PageModel& page : s.pages) {
      if (running && s.plans[*s.plan][s.cursor].page == page.id) continue;
      expect_refused("a page that is not the plan's next", [&] { static_cast<void>(s.scheduler->lease(page.id, a_)); });
      return;
    }
  }

  void end_leases(const SchedulerModel* of) {
    for (std::size_t i = held_.size(); i-- > 0;) {
      if (of != nullptr && held_[i].of != of) continue;
      if (in_.flip()) {
        drop(held_[i]);
      } else {
        commit(held_[i]);
      }
    }
  }
  void close(SchedulerModel& s) {
    end_leases(&s);
    device_.inner().fail_call(in_.one_in(3) ? in_.between(1, 12) : 0);  // a destructor survives one failure
    s.scheduler.reset();
    device_.inner().fail_call(0);
    forget_transient(s);
    s.pages.clear();
    s.residents.clear();
    s.plans.clear();
    s.plan_ids.clear();
    s.plan.reset();
  }
  void restart(SchedulerModel& s) {
    close(s);
    if (schedulers_.size() == 1) {
      for (HomeModel& home : homes_) host_checks(home);
    }
    open(s);
  }

  void host_access(HomeModel& home) {
    const bool may_be_refused =
        std::any_of(held_.begin(), held_.end(), [](const Held& h) { return !h.resident && h.was_dirty; });
    const std::uint64_t size = home.truth.size();
    try {
      again([&] { home.home->synchronize(0, size); });
    } catch (const InvalidArgument& error) {
      return require(may_be_refused, std::string{"the host was refused: "} + error.what());
    }
    host_checks(home);
    if (!in_.flip()) return;
    home.home->invalidate();
    const std::uint64_t first = unit * in_.below(size / unit);
    host_writes(home, first, in_.flip() ? size - first : unit);
  }
  void host_checks(HomeModel& home) {
    std::byte* memory = home.home->memory().data();
    const std::vector<AccessRange> known = known_ranges(memory, home.truth);
    device_.note_host_access("look", known, {});
    compare(memory, home.truth, "a home");
  }
  void host_writes(HomeModel& home, std::uint64_t first, std::uint64_t count) {
    const auto memory = home.home->memory().subspan(first, count);
    device_.note_host_access("load", {}, {memory});
    const std::uint64_t serial = ++serials_;
    for (std::uint64_t i = 0; i < count; ++i) {
      memory.data()[i] = content_byte(serial, i);
      home.truth[first + i] = {memory.data()[i], true};
    }
  }

  void end() {
    if (in_.flip()) {
      for (auto& s : schedulers_) sweep(*s);
    }
    end_leases(nullptr);
    if (in_.flip()) std::reverse(schedulers_.begin(), schedulers_.end());
    for (auto& s : schedulers_) close(*s);
    for (HomeModel& home : homes_) {
      home.home->synchronize(0, home.truth.size());
      host_checks(home);
    }
    for (Donated& donated : donated_) check(donated);
    donated_.clear();
    if (pool_) require(pool_->free_count() == pool_->count(), "a slot did not come back to its pool");
  }

  // ---------------------------------------------------------------------------------------------- small things

  static std::vector<AccessRange> known_ranges(const std::byte* memory, const std::vector<ModelByte>& content) {
    std::vector<AccessRange> ranges;
    for (std::uint64_t i = 0; i < content.size();) {
      std::uint64_t end = i;
      while (end < content.size() && content[end].known) ++end;
      if (end != i) ranges.emplace_back(memory + i, Bytes{end - i});
      i = std::max(end, i + 1);
    }
    return ranges;
  }
  static void compare(const std::byte* memory, const std::vector<ModelByte>& expected, const char* what) {
    for (std::uint64_t i = 0; i < expected.size(); ++i) {
      if (expected[i].known && expected[i].value != memory[i])
        finding("byte " + std::to_string(i) + " of " + what + " is not what was written last");
    }
  }

  StreamRef any_stream() {
    const StreamRef streams[] = {a_, b_, c_, d_, e_};
    return in_.pick(streams);
  }
  StreamRef next_stream(Held& held) {
    const StreamRef next = held.streams[in_.below(held.streams.size())];
    order(device_, next, held.last);
    return held.last = next;
  }
  template <class F>
  void with_held(F&& f) {
    if (!held_.empty()) f(held_[in_.below(held_.size())]);
  }

  struct Donated {
    HbmBuffer buffer;
    std::vector<ModelByte> memory;
    StreamRef stream;
  };
  void check(Donated& donated) {
    check(donated.buffer.bytes().subspan(0, slot_bytes_), donated.memory, donated.stream);
  }

  Checked& device_;
  Input& in_;
  Checked::Stream a_, b_, c_, d_, e_;
  Pinned pinned_;
  HbmArena<Checked> hbm_;
  PinnedHostArena<Checked> host_;
  std::uint64_t slot_bytes_ = 0;
  std::uint64_t serials_ = 0;
  std::vector<HomeModel> homes_;
  std::optional<SlotPool<Checked>> pool_;
  std::vector<Donated> donated_;
  std::vector<std::unique_ptr<SchedulerModel>> schedulers_;
  std::vector<Held> held_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input{data, size};
  with_device([&](Checked& device) { Program{device, input}.run(); });
  return 0;
}
