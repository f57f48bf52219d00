// Brings pages into HBM slots in a known order, ahead of their use, and writes back what was written.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/detail/try_twice.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/observe/stats.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/lease.hpp"
#include "hbmoff/paging/offload_policy.hpp"
#include "hbmoff/paging/page.hpp"
#include "hbmoff/paging/slot_pool.hpp"
#include "hbmoff/paging/timeline.hpp"

namespace hbmoff {

/// Template argument for a depth that is chosen at run time, by the options' `depth`.
inline constexpr std::uint32_t dynamic_depth = 0;
/// See `PrefetchScheduler` for why.
inline constexpr std::uint32_t default_depth = 3;

struct SchedulerOptions {
  /// Slots the scheduler uses at most. 0 stands for the template's Depth or, where that is `dynamic_depth`, for
  /// `default_depth`. Beside another fixed Depth it must be the same.
  std::uint32_t depth = 0;
  /// Of a shared pool: how many slots are this scheduler's own, at most `depth`. 0 means one.
  std::uint32_t guaranteed_slots = 0;
  /// Both directions on one stream. For hardware with one copy engine; it cannot overlap the two directions.
  bool one_copy_stream = false;
  /// Fills a slot with 0xFF when its page leaves it, so that a stale read shows up as a NaN. Costs time, for tests.
  bool fill_evicted = false;
  /// Names the streams.
  std::string name = "pages";
};

/// The scheduler. Pages and plans are added first; `begin` starts a plan; `lease` then takes its pages one by one, in
/// the plan's order; `finish` ends it. At each lease, fills are put on the copy-in stream up to `Depth - 1` accesses
/// ahead; at each release the write-back is put on the copy-out stream. Nothing is decided by timing and no call waits
/// for the device: order is made of events between streams.
///
/// A page that is written in place holds its slot for fill f, compute c and write-back w, so a sweep's period is max(f,
/// c, w, (f + c + w) / Depth): with f = c = w two slots cost 1.5 times the best and three reach it, hence the default.
/// A page keeps its slot, with no copy, when fewer than Depth other pages are accessed before its next access in the
/// plan.
///
/// HBM held is Depth slots of `slot_bytes` (or a share of a pool), whatever the number of pages, plus resident pages.
///
/// Failures: a call that throws leaves every page whole and the scheduler usable: the same call may be made again, and
/// `settle` makes up for releases and write-backs that were cut short. After the loss of the context nothing can be
/// settled. After a failed call the streams that leases were used on must exist until the next call that does not throw,
/// or the scheduler's end.
///
/// One thread at a time uses a scheduler; a call from inside another throws InvalidArgument. It uses streams of its own
/// and creates neither streams nor events nor heap memory after `add_*`. The destructor writes back what was committed,
/// as `finish` does, and waits for its copies; failures there have no one to be told.
///
/// `Policy` decides at compile time whether there is paging at all: with KeepResident only resident pages exist, a
/// lease is a pointer, and no stream, event or slot is made.
template <Device D, class Policy = OffloadAll, std::uint32_t Depth = default_depth, class Observer = NullObserver>
class PrefetchScheduler {
 public:
  using device_type = D;
  using StreamRef = typename D::StreamRef;
  using LeaseType = Lease<PrefetchScheduler>;

  /// False when the policy keeps everything resident, known at compile time.
  static constexpr bool pages =
      !(OffloadPolicyTraits<Policy>::state_always_resident && OffloadPolicyTraits<Policy>::activations_always_kept);

  /// Owns `depth` slots of `slot_bytes` each, taken from `arena` for `role` by the first `lease` of a page that needs
  /// one, or by `reserve`.
  PrefetchScheduler(HbmArena<D>& arena, Bytes slot_bytes, Role role, SchedulerOptions options = {},
                    Observer observer = {})
      : arena_{&arena}, options_{std::move(options)}, observer_{observer}, slot_bytes_{slot_bytes}, role_{role} {
    check_options();
    if constexpr (pages) open_timelines();
  }
  /// Shares the slots of `pool`, of which `options.guaranteed_slots` are its own.
  PrefetchScheduler(SlotPool<D>& pool, HbmArena<D>& arena, SchedulerOptions options = {}, Observer observer = {})
    requires pages
      : arena_{&arena}, options_{std::move(options)}, observer_{observer}, slot_bytes_{pool.slot_bytes()} {
    check_options();
    open_timelines();
    join(pool);
  }
  PrefetchScheduler(const PrefetchScheduler&) = delete;  // leases and homes point at it
  PrefetchScheduler& operator=(const PrefetchScheduler&) = delete;
  ~PrefetchScheduler() {
    if constexpr (pages) {
      write_back_at_the_end();
      copy_in_->drain();
      if (copy_out_ != copy_in_) copy_out_->drain();
      for (Page& page : pages_) {
        if (page.resident != nullptr) page.resident->settle_for_free(device(), copy_in_->stream());
      }
      for (Home<D>* home : homes_) {
        home->detach(this);
        home->detach(*copy_in_);
        home->detach(*copy_out_);
      }
      if (pool_ != nullptr) {
        while (!client_.slots.empty()) pool_->give_back(client_, *client_.slots.back());
        pool_->forget(*copy_in_);
        pool_->forget(*copy_out_);
        pool_->leave(client_);
      }
    }
  }

  [[nodiscard]] std::uint32_t depth() const {
    if constexpr (Depth == dynamic_depth) {
      return options_.depth == 0 ? default_depth : options_.depth;
    } else {
      return Depth;
    }
  }
  [[nodiscard]] const TransferStats& stats() const { return stats_; }
  [[nodiscard]] D& device() const { return arena_->device(); }

  // ---------------------------------------------------------------------------------------------- pages and plans

  /// Adds a page that lives in its parts' homes. Throws InvalidArgument when it does not fit a slot or a home, and when
  /// two parts overlap in the slot.
  PageId add_page(PageSpec<D> spec)
    requires pages
  {
    const Guard guard{*this};
    Page page{.label = std::move(spec.label), .transient = spec.transient};
    std::uint64_t end = 0;
    for (const PagePart<D>& part : spec.parts) {
      if (part.home == nullptr || part.home_offset > part.home->memory().count() ||
          part.bytes.count() > part.home->memory().count() - part.home_offset) {
        throw InvalidArgument{"page " + page.label + ": a part lies outside its home"};
      }
      end = (std::max)(end, part.slot_offset + part.bytes.count());
    }
    if ((std::max)(end, spec.slot_bytes.count()) > slot_bytes_.count()) {
      throw InvalidArgument{"page " + page.label + " needs " +
                            std::to_string((std::max)(end, spec.slot_bytes.count())) + " bytes, a slot has " +
                            std::to_string(slot_bytes_.count())};
    }
    std::vector<PagePart<D>> by_slot = spec.parts;
    std::sort(by_slot.begin(), by_slot.end(),
              [](const auto& a, const auto& b) { return a.slot_offset < b.slot_offset; });
    for (std::size_t i = 1; i < by_slot.size(); ++i) {
      if (by_slot[i].slot_offset < by_slot[i - 1].slot_offset + by_slot[i - 1].bytes.count()) {
        throw InvalidArgument{"page " + page.label + ": two parts overlap in the slot"};
      }
    }
    for (const PagePart<D>& part : spec.parts) {
      attach(*part.home);
      part.home->cut(part.home_offset, part.bytes.count());
      const Range range{part.home, part.home_offset, part.slot_offset, part.bytes.count()};
      if (part.access == Access::read && range.count != 0) page.partly_read_only = true;
      if (reads(part.access)) append(page.in, range);
      if (writes(part.access)) append(page.out, range);
    }
    pages_.push_back(std::move(page));
    return static_cast<PageId>(pages_.size() - 1);
  }

  /// Adds a page that lives in HBM for good: `bytes` from the arena. Leases of it are ordered after each other across
  /// streams. Where the policy allows no paging at all that order is the caller's, and so is the stream in whose order
  /// the memory is taken and given back.
  PageId add_resident_page(std::string label, Bytes bytes, Role role, StreamRef stream) {
    const Guard guard{*this};
    Page page{.label = std::move(label), .transient = false};
    if constexpr (pages) {
      page.resident =
          std::make_unique<Slot<D>>(SlotPool<D>::make_slot(*arena_, bytes, role, copy_in_->stream(), page.label));
      page.resident->permanent = true;
      page.slot = page.resident.get();
    } else {
      page.memory = arena_->allocate(bytes, page.label, role, stream);
    }
    pages_.push_back(std::move(page));
    return static_cast<PageId>(pages_.size() - 1);
  }

  /// The memory of a resident page. Whoever touches it other than through a lease sees to the order himself.
  [[nodiscard]] device_span<std::byte> resident_memory(PageId page) const {
    const Page& p = page_at(page);
    if constexpr (pages) {
      return p.resident != nullptr ? p.resident->memory() : device_span<std::byte>{};
    } else {
      return p.memory.bytes();
    }
  }

  /// Adds an order of accesses. Throws InvalidArgument for a page that is not this scheduler's, for a resident page
  /// (these can be leased at any time), and for an access that the page's parts do not serve: reading where no part is
  /// read, writing where none is written, and writing alone where a part is only read.
  PlanId add_plan(std::vector<PlanStep> steps)
    requires pages
  {
    const Guard guard{*this};
    for (const PlanStep& step : steps) {
      const Page& page = page_at(step.page);
      if (page.resident != nullptr) {
        throw InvalidArgument{"page " + page.label + " is resident: it cannot be part of a plan"};
      }
      if (page.in.empty() && page.out.empty()) continue;  // scratch
      if ((reads(step.access) && page.in.empty()) || (writes(step.access) && page.out.empty()) ||
          (step.access == Access::write && page.partly_read_only)) {
        throw InvalidArgument{"page " + page.label + ": its parts do not serve a " +
                              std::string{to_string(step.access)} + " access"};
      }
    }
    Plan plan{std::move(steps), {}, {}};
    plan.next_use.assign(plan.steps.size(), never);
    std::vector<std::uint32_t> last(pages_.size(), never);
    for (std::size_t i = plan.steps.size(); i-- > 0;) {
      const std::uint32_t page = index(plan.steps[i].page);
      plan.next_use[i] = last[page];
      last[page] = static_cast<std::uint32_t>(i);
    }
    plan.keep.assign(plan.steps.size(), false);
    std::vector<std::uint32_t> seen_at(pages_.size(), never);
    for (std::uint32_t i = 0; i < plan.steps.size(); ++i) {
      if (plan.next_use[i] == never) continue;
      // Stops at Depth distinct pages, so the whole plan costs O(steps x Depth) unless one page is repeated in between.
      std::uint32_t others = 0;
      std::uint32_t j = i + 1;
      for (; j < plan.next_use[i] && others < depth(); ++j) {
        const std::uint32_t page = index(plan.steps[j].page);
        if (seen_at[page] != i) {
          seen_at[page] = i;
          ++others;
        }
      }
      plan.keep[i] = others < depth();
    }
    plans_.push_back(std::move(plan));
    return static_cast<PlanId>(plans_.size() - 1);
  }

  /// Takes the slots now, where the scheduler owns them. In the order of the copy-in stream. Throws OutOfMemory.
  void reserve()
    requires pages
  {
    if (pool_ != nullptr) return;
    own_pool_ = std::make_unique<SlotPool<D>>(*arena_, slot_bytes_, depth(), role_, copy_in_->stream(),
                                              options_.name + " slot");
    join(*own_pool_);
  }

  // ---------------------------------------------------------------------------------------------- running a plan

  /// Starts `plan` at its first access. Pages kept from a plan that did not end are given up: written back when they
  /// are dirty, dropped when they are transient.
  void begin(PlanId plan, std::source_location at = std::source_location::current())
    requires pages
  {
    const Guard guard{*this};
    if (static_cast<std::uint32_t>(plan) >= plans_.size()) throw InvalidArgument{"there is no such plan"};
    make_up(at);
    reserve();
    give_up_kept(at);
    for (Page& page : pages_) page.discarded = false;
    plan_ = &plans_[static_cast<std::uint32_t>(plan)];
    cursor_ = 0;
  }

  /// Goes to access `position` of the plan begun, after a failure.
  void seek(std::uint32_t position)
    requires pages
  {
    cursor_ = position;
  }
  /// Whether the plan's next access is this one.
  [[nodiscard]] bool expects(PageId page, Access access) const
    requires pages
  {
    return plan_ != nullptr && cursor_ < plan_->steps.size() && plan_->steps[cursor_].page == page &&
           plan_->steps[cursor_].access == access;
  }

  /// Leases `page`, the next of the plan, for work on `stream`, which waits for its fill; or a resident page for
  /// reading and writing. Does not block.
  /// Throws InvalidArgument when the plan says another page, and SlotsExhausted when every slot is leased.
  [[nodiscard]] LeaseType lease(PageId page, StreamRef stream,
                                std::source_location at = std::source_location::current()) {
    const Guard guard{*this};
    Page& p = page_at(page);
    if constexpr (!pages) {
      return LeaseType{*this, nullptr, p.memory.bytes(), Access::read_write, true, stream};
    } else {
      make_up(at);
      if (p.resident != nullptr) return lease_resident(p, stream, at);
      if (plan_ == nullptr || cursor_ >= plan_->steps.size() || plan_->steps[cursor_].page != page) {
        throw InvalidArgument{"page " + p.label + " is not the next of the plan" +
                              (plan_ == nullptr ? ": no plan was begun"
                               : cursor_ >= plan_->steps.size()
                                   ? ": the plan has ended"
                                   : ", " + pages_[index(plan_->steps[cursor_].page)].label + " is")};
      }
      const Access access = plan_->steps[cursor_].access;
      if (p.slot != nullptr && p.slot->leased) throw InvalidArgument{"page " + p.label + " is leased already"};
      if (!publish_others(p, access, at)) {
        throw InvalidArgument{"page " + p.label + " overlaps a page whose newest content is leased for writing"};
      }
      if (p.slot == nullptr) assign(p, take_slot(p, at), page);
      drop_if_stale(p, access, at);
      const bool hit = p.slot->valid && !p.filled;
      if (reads(access) && !p.slot->valid) fill(p, *p.slot, at);
      fill_ahead(at);
      observer_.begin(Activity::stall, stream);
      p.slot->order_before(device(), stream, at);
      observer_.end(Activity::stall, stream);

      Slot<D>& slot = *p.slot;
      slot.leased = true;
      slot.leased_for_writing = writes(access);
      p.discarded = false;
      slot.generation = generation(p);
      slot.next_use = plan_->next_use[cursor_];
      slot.fate = plan_->keep[cursor_]                     ? SlotFate::retain
                  : slot.next_use != never || !p.transient ? SlotFate::write_back
                                                           : SlotFate::release;
      p.filled = false;
      ++cursor_;
      if (hit) ++stats_.hits;
      return LeaseType{*this, &slot, slot.memory().subspan(0, slot_bytes_.count()), access, hit, stream};
    }
  }

  /// Of a page leased or about to be leased for writing: only its first `bytes` hold content from now on, and only they
  /// are copied. Stays until it is set again; more than before are read from the home.
  void limit(PageId page, Bytes bytes) { page_at(page).limit = bytes.count(); }

  /// Ends the plan: kept pages are written back (or dropped, when transient) and `stream` waits for every write-back.
  /// Throws InvalidArgument, and changes nothing, while a page is leased: its write-back would be missed.
  void finish(StreamRef stream, std::source_location at = std::source_location::current())
    requires pages
  {
    const Guard guard{*this};
    for (const Slot<D>* slot : client_.slots) {
      if (slot->leased) throw InvalidArgument{"page " + page_in(*slot).label + " is leased at the end of the plan"};
    }
    make_up(at);
    give_up_kept(at);
    if (last_write_back_ != 0) copy_out_->order_before(stream, last_write_back_, at);
    plan_ = nullptr;
  }

  /// After a failed call: records the releases and issues the write-backs that were cut short. The streams that leases
  /// were used on must still exist. Throws as any call does; call it again then.
  void settle(std::source_location at = std::source_location::current())
    requires pages
  {
    const Guard guard{*this};
    make_up(at);
  }

  /// Whether the page's newest content lies in a slot and not (yet) in its home.
  [[nodiscard]] bool dirty(PageId page) const {
    const Page& p = page_at(page);
    return p.slot != nullptr && (p.slot->dirty || p.slot->launched) && p.slot->generation == generation(p);
  }

 private:
  friend LeaseType;
  static constexpr std::uint32_t never = ~std::uint32_t{0};

  struct Range {
    Home<D>* home;
    std::uint64_t home_offset;
    std::uint64_t slot_offset;
    std::uint64_t count;
  };

  struct Page {
    std::string label;
    bool transient;
    bool partly_read_only = false;  ///< has a part that is read and not written
    bool filled = false;  ///< a fill was issued since its last lease
    bool discarded = false;  ///< what it was leased to be written with was given up, so nobody will read it
    Slot<D>* slot = nullptr;  ///< the slot it is in or on its way to
    std::uint64_t limit = ~std::uint64_t{0};
    std::vector<Range> in = {};  ///< copies of a fill
    std::vector<Range> out = {};  ///< copies of a write-back
    std::unique_ptr<Slot<D>> resident = {};
    typename HbmArena<D>::Buffer memory = {};  ///< of a resident page where there is no paging
  };

  struct Plan {
    std::vector<PlanStep> steps;
    std::vector<std::uint32_t> next_use;  ///< position of the same page's next access
    std::vector<bool> keep;  ///< whether it keeps its slot until then
  };

  // One thread at a time, and not from inside itself: found without a lock, so a misuse is an error and not a hang.
  class Guard {
   public:
    explicit Guard(PrefetchScheduler& scheduler) : busy_{scheduler.busy_} {
      if (busy_.exchange(true, std::memory_order_acquire)) {
        throw InvalidArgument{"a scheduler was called from inside one of its own calls, or by two threads at once"};
      }
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard() { busy_.store(false, std::memory_order_release); }

   private:
    std::atomic<bool>& busy_;
  };

  static std::uint32_t index(PageId page) { return static_cast<std::uint32_t>(page); }

  const Page& page_at(PageId page) const {
    if (index(page) >= pages_.size()) throw InvalidArgument{"there is no such page"};
    return pages_[index(page)];
  }
  Page& page_at(PageId page) { return const_cast<Page&>(std::as_const(*this).page_at(page)); }

  void check_options() {
    if (options_.depth != 0 && options_.depth != depth()) {
      throw InvalidArgument{"the options ask for a depth of " + std::to_string(options_.depth) +
                            ", the template argument is " + std::to_string(depth())};
    }
    if (options_.guaranteed_slots > depth()) throw InvalidArgument{"guaranteed_slots exceeds the depth"};
  }

  void open_timelines() {
    own_in_ = std::make_unique<Timeline<D>>(device(), options_.name + " in");
    copy_in_ = copy_out_ = own_in_.get();
    if (!options_.one_copy_stream) {
      own_out_ = std::make_unique<Timeline<D>>(device(), options_.name + " out");
      copy_out_ = own_out_.get();
    }
  }

  void join(SlotPool<D>& pool) {
    client_.guaranteed = options_.guaranteed_slots != 0 ? options_.guaranteed_slots : 1;
    client_.scheduler = this;
    client_.evict_one = [](void* self, std::source_location at) {
      return static_cast<PrefetchScheduler*>(self)->evict_one(at);
    };
    pool.join(client_);
    pool_ = &pool;
  }

  void attach(Home<D>& home) {
    for (const Home<D>* known : homes_) {
      if (known == &home) return;
    }
    home.order_taken_before(copy_out_->stream());  // what is read from it is ordered behind whoever wrote that
    homes_.reserve(homes_.size() + 1);
    home.attach({this, [](void* self, const Home<D>& of, std::uint64_t first, std::uint64_t count, bool to_write,
                          const void* except, std::source_location at) {
                   return static_cast<PrefetchScheduler*>(self)->publish(of, first, count, to_write, except, at);
                 }});
    homes_.push_back(&home);
  }

  // Neighbours in home and slot become one copy.
  static void append(std::vector<Range>& ranges, Range range) {
    if (range.count == 0) return;
    if (!ranges.empty()) {
      Range& last = ranges.back();
      if (last.home == range.home && last.home_offset + last.count == range.home_offset &&
          last.slot_offset + last.count == range.slot_offset) {
        last.count += range.count;
        return;
      }
    }
    ranges.push_back(range);
  }

  // What of a range lies below `limit`.
  static std::uint64_t clipped(const Range& range, std::uint64_t limit) {
    return range.slot_offset >= limit ? 0 : (std::min)(range.count, limit - range.slot_offset);
  }

  // Grows whenever one of the page's homes was replaced from outside.
  static std::uint64_t generation(const Page& page) {
    std::uint64_t sum = 0;
    for (const Range& range : page.in) sum += range.home->generation();
    for (const Range& range : page.out) sum += range.home->generation();
    return sum;
  }

  // Grows whenever a range of the page is written in its home.
  static std::uint64_t version(const Page& page) {
    std::uint64_t sum = 0;
    for (const Range& range : page.in) sum += range.home->version(range.home_offset, range.count);
    for (const Range& range : page.out) sum += range.home->version(range.home_offset, range.count);
    return sum;
  }

  // A copy made under an older generation is worthless, whatever it holds.
  static void drop_if_replaced(Page& page) {
    Slot<D>& slot = *page.slot;
    if (slot.generation != generation(page)) slot.valid = slot.dirty = slot.launched = false;
  }
  // Before a slot is used again for `access`: what it holds is read anew when its home was written since, or when more of
  // it is wanted than it holds. What it holds that is not home yet goes there first: nobody else wrote that, but
  // something beside it.
  void drop_if_stale(Page& page, Access access, std::source_location at) {
    drop_if_replaced(page);
    Slot<D>& slot = *page.slot;
    if (slot.version == version(page) && slot.limit >= page.limit) return;
    if (slot.dirty) {
      if (!reads(access)) return;
      write_back(page, slot, at);
    }
    slot.valid = false;
    slot.version = version(page);
  }

  // Before a page is leased or filled: see `Home::Sharer::publish`.
  bool publish_others(const Page& page, Access access, std::source_location at) {
    const auto publish_all = [&](const std::vector<Range>& ranges, bool to_write) {
      return std::all_of(ranges.begin(), ranges.end(), [&](const Range& range) {
        return range.home->publish(range.home_offset, range.count, to_write, page.slot, at);
      });
    };
    return (!reads(access) || publish_all(page.in, false)) && (!writes(access) || publish_all(page.out, true));
  }
  bool publish(const Home<D>& home, std::uint64_t first, std::uint64_t count, bool to_write, const void* except,
               std::source_location at) {
    make_up(at);
    for (Slot<D>* slot : client_.slots) {
      if (!slot->dirty || slot == except) continue;
      Page& page = page_in(*slot);
      const auto overlaps = [&](const Range& range) {
        return range.home == &home && range.home_offset < first + count && first < range.home_offset + range.count;
      };
      if (std::none_of(page.out.begin(), page.out.end(), overlaps) &&
          !(to_write && std::any_of(page.in.begin(), page.in.end(), overlaps))) {
        continue;
      }
      drop_if_replaced(page);
      if (!slot->dirty) continue;
      if (slot->leased_for_writing) return false;
      write_back(page, *slot, at);
    }
    return true;
  }

  void assign(Page& page, Slot<D>& slot, PageId id) {
    device().note_discarded(slot.memory(), page.label);
    slot.page = id;
    slot.valid = slot.dirty = slot.launched = false;
    slot.generation = generation(page);
    slot.version = version(page);
    slot.fate = SlotFate::retain;
    page.slot = &slot;
    page.filled = false;
  }

  Slot<D>* try_take() { return client_.held() < depth() ? pool_->try_take(client_) : nullptr; }

  Slot<D>& take_slot(const Page& page, std::source_location at) {
    if (Slot<D>* slot = try_take()) return *slot;
    if (client_.held() < depth()) {
      if (Slot<D>* slot = pool_->take_from_others(client_, at)) return *slot;
    }
    if (evict_one(at)) {
      if (Slot<D>* slot = try_take()) return *slot;
    }
    std::string holders;
    for (const Slot<D>* slot : client_.slots) holders += (holders.empty() ? "" : ", ") + page_in(*slot).label;
    throw SlotsExhausted{"no slot for page " + page.label + ": all " + std::to_string(client_.held()) + " that " +
                         options_.name + " may hold are leased, by " + (holders.empty() ? "others" : holders)};
  }

  // Gives up the kept page whose next use is farthest away.
  bool evict_one(std::source_location at) {
    Slot<D>* victim = nullptr;
    for (Slot<D>* slot : client_.slots) {
      if (slot->leased || slot->unrecorded) continue;
      if (victim == nullptr || slot->next_use > victim->next_use) victim = slot;
    }
    if (victim == nullptr) return false;
    give_up(page_in(*victim), at);
    ++stats_.evictions;
    return true;
  }

  void make_up(std::source_location at) {
    if (!unsettled_) return;
    for (Page& page : pages_) {
      if (page.slot != nullptr && !page.slot->leased) end_lease(page, at);
    }
    unsettled_ = false;
  }

  void end_lease(Page& page, std::source_location at) {
    if (page.slot->unrecorded) record_releases(*page.slot, at);
    if (!page.slot->permanent) end_use(page, at);
  }
  // As above, for the lease that ends now: a failure leaves something to make up for.
  void end_lease_now(Slot<D>& slot, std::source_location at) {
    const bool unsettled_before = std::exchange(unsettled_, true);
    if (slot.permanent) {
      record_releases(slot, at);
    } else {
      end_lease(page_in(slot), at);
    }
    unsettled_ = unsettled_before;
  }

  void give_up(Page& page, std::source_location at) {
    page.slot->fate = SlotFate::write_back;
    end_use(page, at);
  }

  void give_up_kept(std::source_location at) {
    for (std::size_t i = 0; i < client_.slots.size();) {
      Slot<D>& slot = *client_.slots[i];
      if (slot.leased || slot.unrecorded) {
        ++i;
        continue;
      }
      Page& page = page_in(slot);
      if (page.transient) slot.dirty = false;  // nobody will read it
      give_up(page, at);  // takes it out of the list
    }
  }

  void write_back_at_the_end() noexcept {
    detail::try_twice(device(), [&] {  // what cannot be written back stays as it was at home
      make_up(std::source_location::current());
      give_up_kept(std::source_location::current());
    });
  }

  LeaseType lease_resident(Page& page, StreamRef stream, std::source_location at) {
    if (page.slot->leased) throw InvalidArgument{"page " + page.label + " is leased already"};
    page.slot->order_before(device(), stream, at);
    page.slot->leased = true;
    return LeaseType{*this, page.slot, page.slot->memory(), Access::read_write, true, stream};
  }

  // The caller has published what others hold of the page.
  void fill(Page& page, Slot<D>& slot, std::source_location at) {
    page.filled = true;  // before anything can fail: a second attempt at the lease must not take it for a hit
    slot.limit = page.limit;
    if (nothing_in(page.in, slot.limit)) {
      slot.valid = true;
      slot.generation = generation(page);
      slot.version = version(page);
      return;
    }
    slot.order_releases_before(device(), copy_in_->stream(), at);
    WaitSet<D> waits;
    waits.add(slot.last_copy);
    for (const Range& range : page.in) range.home->before_read(range.home_offset, clipped(range, slot.limit), waits);
    waits.order_before(copy_in_->stream(), at);
    observer_.begin(Activity::fill, copy_in_->stream());
    for (const Range& range : page.in) {
      const std::uint64_t count = clipped(range, slot.limit);
      if (count == 0) continue;
      device().copy_async(slot.memory().subspan(range.slot_offset, count),
                          pinned_span<const std::byte>{range.home->memory().subspan(range.home_offset, count)},
                          copy_in_->stream(), at);
      stats_.h2d_bytes += count;
      // Noted copy by copy: should the next one fail, this one is in flight all the same.
      slot.note_copy({copy_in_, copy_in_->advance()});
      range.home->note_read(range.home_offset, count, slot.last_copy);
    }
    slot.valid = true;
    slot.generation = generation(page);
    slot.version = version(page);
    observer_.end(Activity::fill, copy_in_->stream());
    ++stats_.fills;
    copy_in_->record(at);
  }

  // Fills the pages that the next Depth - 1 accesses read, as far as slots are free. A slot that an earlier access will
  // take for writing is left free for it.
  void fill_ahead(std::source_location at) {
    std::uint32_t spoken_for = 0;
    const std::uint64_t end = std::min<std::uint64_t>(plan_->steps.size(), std::uint64_t{cursor_} + depth());
    for (std::uint32_t i = cursor_ + 1; i < end; ++i) {
      const PlanStep& step = plan_->steps[i];
      Page& page = pages_[index(step.page)];
      bool earlier = false;  // what an access in between writes is not in the home yet
      for (std::uint32_t j = cursor_; j < i && !earlier; ++j) earlier = plan_->steps[j].page == step.page;
      if (earlier) continue;
      if (page.slot != nullptr) {
        if (page.slot->leased) continue;
        drop_if_stale(page, step.access, at);
        if (page.slot->valid || !reads(step.access) || !publish_others(page, step.access, at)) continue;
        fill(page, *page.slot, at);  // out of date, or assigned by a call that failed before its fill
        continue;
      }
      if (page.transient && page.discarded) continue;
      if (!reads(step.access) || page.in.empty()) {
        ++spoken_for;
        continue;
      }
      if (client_.held() + spoken_for >= depth() || pool_->available(client_) <= spoken_for) return;
      if (!publish_others(page, step.access, at)) return;
      assign(page, *try_take(), step.page);
      page.slot->next_use = i;
      fill(page, *page.slot, at);
    }
  }

  // Scratch: no call on the copy streams, on which nobody would wait for it.
  static bool nothing_in(const std::vector<Range>& ranges, std::uint64_t limit) {
    return std::all_of(ranges.begin(), ranges.end(), [&](const Range& range) { return clipped(range, limit) == 0; });
  }

  void write_back(Page& page, Slot<D>& slot, std::source_location at) {
    const std::uint64_t limit = (std::min)(page.limit, slot.limit);
    if (nothing_in(page.out, limit)) {
      slot.dirty = slot.launched = false;
      return;
    }
    slot.order_releases_before(device(), copy_out_->stream(), at);
    WaitSet<D> waits;
    waits.add(slot.last_copy);
    for (const Range& range : page.out) range.home->before_write(range.home_offset, clipped(range, limit), waits);
    waits.order_before(copy_out_->stream(), at);
    observer_.begin(Activity::write_back, copy_out_->stream());
    Mark<D> mark;
    for (const Range& range : page.out) {
      const std::uint64_t count = clipped(range, limit);
      if (count == 0) continue;
      device().copy_async(range.home->memory().subspan(range.home_offset, count),
                          device_span<const std::byte>{slot.memory().subspan(range.slot_offset, count)},
                          copy_out_->stream(), at);
      stats_.d2h_bytes += count;
      mark = {copy_out_, copy_out_->advance()};
      slot.note_copy(mark);
      last_write_back_ = mark.ticket;
      const std::uint64_t before = version(page);
      range.home->note_write(range.home_offset, count, mark);
      slot.version += version(page) - before;  // its own write makes it no older
    }
    slot.dirty = slot.launched = false;
    observer_.end(Activity::write_back, copy_out_->stream());
    ++stats_.write_backs;
    copy_out_->record(at);
  }

  // What follows the last use of a slot: its fate, decided when it was leased.
  void end_use(Page& page, std::source_location at) {
    Slot<D>& slot = *page.slot;
    if (slot.fate == SlotFate::retain) return;
    drop_if_replaced(page);
    if (slot.dirty && slot.fate == SlotFate::write_back) write_back(page, slot, at);
    if (options_.fill_evicted) poison(slot, at);
    page.slot = nullptr;
    page.filled = false;
    pool_->give_back(client_, slot);
  }

  void poison(Slot<D>& slot, std::source_location at) {
    slot.order_before(device(), copy_out_->stream(), at);
    device().fill_async(slot.memory(), std::byte{0xff}, copy_out_->stream(), at);
    slot.note_copy({copy_out_, copy_out_->advance()});
    copy_out_->record(at);
  }

  void record_releases(Slot<D>& slot, std::source_location at) {
    for (std::uint32_t i = 0; i < slot.release_count; ++i)
      device().record(slot.releases[i].event, *slot.releases[i].stream, at);
    slot.unrecorded = false;
  }

  // The lease's streams become what later work on the slot waits for. They waited for the last copy themselves.
  void note_streams(Slot<D>& slot, std::span<const std::optional<StreamRef>> streams) {
    slot.leased = slot.leased_for_writing = false;
    if (!std::exchange(slot.copied_under_lease, false)) slot.last_copy = {};
    slot.release_count = static_cast<std::uint32_t>(streams.size());
    for (std::uint32_t i = 0; i < slot.release_count; ++i) slot.releases[i].stream = streams[i];
    slot.unrecorded = true;
  }

  // --- called by leases

  void order_before(Slot<D>& slot, StreamRef stream, std::source_location at) {
    const Guard guard{*this};
    slot.order_before(device(), stream, at);
  }

  void release(Slot<D>& slot, std::span<const std::optional<StreamRef>> streams, bool written,
               std::source_location at) {
    const Guard guard{*this};
    note_streams(slot, streams);
    bool stale = false;
    if (!slot.permanent && written) {
      stale = slot.generation != generation(page_in(slot));
      slot.valid = slot.dirty = !stale;
      slot.limit = page_in(slot).limit;
      if (stale) slot.fate = SlotFate::release;
    }
    slot.launched = false;  // from here on `dirty` says it
    end_lease_now(slot, at);
    if (stale) {
      throw InvalidArgument{"a page was leased before its home was loaded anew; what was written to it is dropped"};
    }
  }

  void abandon(Slot<D>& slot, std::span<const std::optional<StreamRef>> streams, bool for_writing) noexcept {
    note_streams(slot, streams);
    if (slot.permanent) {
      slot.launched = false;
    } else if (slot.launched) {
      slot.valid = slot.dirty = true;
      slot.limit = page_in(slot).limit;
      slot.fate = SlotFate::write_back;
      unsettled_ = true;
      return;
    } else if (for_writing && !slot.dirty) {
      page_in(slot).discarded = true;
      slot.valid = slot.dirty = false;
      slot.fate = SlotFate::release;
    }
    try {
      end_lease_now(slot, std::source_location::current());
    } catch (const Error&) {
      // A destructor cannot throw. The slot stays assigned and is not used again; the next call makes up for it, or
      // reports.
    }
  }

  typename HbmArena<D>::Buffer donate(Slot<D>& slot, std::span<const std::optional<StreamRef>> streams,
                                      typename HbmArena<D>::Buffer&& replacement, std::source_location at) {
    const Guard guard{*this};
    if (replacement.size() < slot_bytes_) {
      throw InvalidArgument{"a donated page needs a replacement that is no smaller than its slot"};
    }
    if (slot.dirty && slot.fate != SlotFate::release) {
      throw InvalidArgument{"page " + page_in(slot).label + " cannot be donated: its content is not home yet"};
    }
    // While it is leased still, so that a failure changes nothing.
    for (std::uint32_t i = 0; i < streams.size(); ++i) device().record(slot.releases[i].event, *streams[i], at);
    note_streams(slot, streams);
    slot.unrecorded = false;
    slot.valid = slot.dirty = false;
    slot.fate = SlotFate::release;
    typename HbmArena<D>::Buffer donated = std::exchange(slot.buffer, std::move(replacement));
    slot.buffer.move_to(pool_->stream());
    donated.move_to(*streams[0]);
    try {
      end_lease_now(slot, at);
    } catch (const Error&) {
      // The donation is done: what is left to do for the slot, the next call makes up for, or reports.
    }
    return donated;
  }

  Page& page_in(const Slot<D>& slot) { return pages_[index(*slot.page)]; }
  const Page& page_in(const Slot<D>& slot) const { return pages_[index(*slot.page)]; }

  HbmArena<D>* arena_;
  SchedulerOptions options_;
  [[no_unique_address]] Observer observer_;
  Bytes slot_bytes_;
  Role role_ = Role::other;
  std::unique_ptr<Timeline<D>> own_in_;
  std::unique_ptr<Timeline<D>> own_out_;
  Timeline<D>* copy_in_ = nullptr;
  Timeline<D>* copy_out_ = nullptr;
  std::unique_ptr<SlotPool<D>> own_pool_;
  SlotPool<D>* pool_ = nullptr;
  typename SlotPool<D>::Client client_;
  std::vector<Page> pages_;
  std::deque<Plan> plans_;  // a plan that runs stays where it is
  std::vector<Home<D>*> homes_;
  const Plan* plan_ = nullptr;
  std::uint32_t cursor_ = 0;
  std::uint64_t last_write_back_ = 0;
  TransferStats stats_;
  bool unsettled_ = false;  ///< a release or a write-back is owed
  std::atomic<bool> busy_ = false;
};

}  // namespace hbmoff
