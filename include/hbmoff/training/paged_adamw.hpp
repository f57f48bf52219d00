// AdamW whose moments and master weights live where the policy says, updated page by page on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/device/detail/try_twice.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/device/launch.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "hbmoff/observe/stats.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "hbmoff/training/adamw_accesses.hpp"
#include "hbmoff/training/adamw_kernels.hpp"
#include "hbmoff/training/adamw_layout.hpp"

namespace hbmoff {

/// Hyper-parameters of a group of tensors. Betas in [0, 1), epsilon above 0, the others not negative; all finite.
struct AdamWGroup {
  float learning_rate = 1e-3f;
  float weight_decay = 0.0f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float epsilon = 1e-8f;
};

enum class GroupId : std::uint32_t {};
enum class TensorId : std::uint32_t {};

struct PagedAdamWOptions {
  Bytes page = 8_MiB;        ///< most bytes of state in a page, which is the size of a slot; at least 768
  std::uint32_t depth = 0;   ///< slots; see SchedulerOptions
  bool fill_evicted = false; ///< see SchedulerOptions
};

/// What one step is told.
struct AdamWStep {
  float gradient_scale = 1.0f;    ///< every gradient is multiplied by it: 1 / (loss scale x micro-batches x ranks)
  float max_norm = 0.0f;          ///< clip the scaled gradients to this global norm; 0: do not clip
  bool skip_nonfinite = false;    ///< a gradient with an infinity or NaN skips the whole step, decided on the device
  /// The caller's own norm of the unscaled gradients, in device memory and ready on the step's stream, so that several
  /// ranks clip and skip alike; null: computed here over all active gradients.
  const GradientNorm* norm = nullptr;
};

/// What a step did, as the host learns it later.
struct StepReport {
  std::uint64_t step = 0;  ///< counts calls of `step`, skipped ones included
  double norm = 0;  ///< of the scaled gradients, before clipping
  bool applied = false;  ///< false: skipped
  std::uint64_t skipped_total = 0;  ///< steps skipped so far
};

/// Where a page of the state is, as far as the host knows.
struct OptimizerPageState {
  std::string label;  ///< names its first tensor
  std::uint64_t step = 0;  ///< the step that it was last written in; 0: by `prepare`
  bool whole =
      false;  ///< its home holds that step's state whole. Else a copy to it may have been cut short, or it has none
};

/// Elements [first, first + count) of a tensor's state, as the given step left them.
struct SalvagedRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
  std::uint64_t step = 0;  ///< as `OptimizerPageState::step`
  friend bool operator==(const SalvagedRange&, const SalvagedRange&) = default;
};

/// The states of AdamW, for `read`, `write` and `salvage`.
enum class OptimizerState : std::uint8_t { first_moment, second_moment, master_weight };

/// What `refresh` does to the moments.
enum class Moments : std::uint8_t { reset, keep };

/// AdamW with paged state.
///
/// Tensors are added by name, then `step(stream)` updates them all, in order behind the work on `stream`: it sweeps the
/// pages of m, v and masters through `Depth` slots of HBM, copying in and out on two streams of its own while `stream`
/// updates. Weights and gradients stay where they are, in device memory. Where the state lives changes no bit of the
/// result.
///
/// - HBM: Depth slots of at most `page` bytes (or a share of a pool), the resident part of the state, and tables (80 bytes per tensor, 32 per
///   slice, 8 per 4096 gradient elements). Host: the paged state and 1 KiB. `planning/estimate.hpp` predicts both to
///   the byte.
/// - `step` allocates nothing, creates nothing and waits for nothing on the calling thread. The norm, clipping and the
///   decision to skip are made on the device; `report` tells the host. Up to 8 steps' reports are kept.
/// - The bias correction counts the steps applied to each tensor: one unfrozen late starts at 1.
/// - A call that throws leaves the optimizer unfinished but whole: `resume` ends the operation with the bits of an
///   undisturbed one; until then every other call but `group` throws InvalidArgument. After the loss of the context
///   (`failed()`) nothing goes on: HBM is gone.
///
/// One thread at a time. Arenas, slots and streams outlive it (a stream that was synchronized need not).
template <Device D, OffloadPolicy Policy, std::uint32_t Depth = default_depth, class Observer = NullObserver>
class PagedAdamW {
  // With a constant policy the scheduler is compiled without paging.
  using PagingPolicy = std::conditional_t<OffloadPolicyTraits<Policy>::state_always_resident, KeepResident, OffloadAll>;
  using Scheduler = PrefetchScheduler<D, PagingPolicy, Depth, Observer>;

 public:
  using StreamRef = typename D::StreamRef;

  PagedAdamW(HbmArena<D>& hbm, PinnedHostArena<D>& host, Policy policy, PagedAdamWOptions options = {},
             Observer observer = {})
      : hbm_{&hbm}, host_{&host}, policy_{std::move(policy)}, options_{options}, observer_{observer}, groups_(1),
        control_{hbm.device().create_stream("adamw control")}, settled_{hbm.device().create_event(EventTiming::none)} {}
  /// Pages pass through the slots of `slots`, which others may share, instead of slots of its own: at most Depth of them,
  /// one of which is its own. They must be large enough (`adamw_slot_bytes`), and the pool outlives the optimizer.
  PagedAdamW(HbmArena<D>& hbm, PinnedHostArena<D>& host, SlotPool<D>& slots, Policy policy,
             PagedAdamWOptions options = {}, Observer observer = {})
    requires Scheduler::pages
      : PagedAdamW{hbm, host, std::move(policy), options, observer} {
    shared_slots_ = &slots;
  }
  PagedAdamW(const PagedAdamW&) = delete;
  PagedAdamW& operator=(const PagedAdamW&) = delete;
  ~PagedAdamW() {
    // Memory goes back in the order of the control stream, which first waits for whoever used it.
    if (!ever_used_) return;
    detail::try_twice(device(), [&] { device().wait(control_, settled_); });
    if (!unfinished()) return;
    detail::try_twice(device(), [&] {
      device().record(settled_, *last_stream_);
      device().wait(control_, settled_);
    });
  }

  // -------------------------------------------------------------------------------------------- tensors and groups

  /// Adds a group; group 0 exists from the start.
  GroupId add_group(AdamWGroup group) {
    groups_.push_back(group);
    return static_cast<GroupId>(groups_.size() - 1);
  }
  /// A group's values; what they are when `step` is called counts for that step. Throws InvalidArgument.
  [[nodiscard]] AdamWGroup& group(GroupId id) {
    if (static_cast<std::uint32_t>(id) >= groups_.size()) throw InvalidArgument{"no such group"};
    return groups_[static_cast<std::uint32_t>(id)];
  }

  /// Adds a tensor: `info.name` is its name in `read`, `write` and errors; `info.count` elements of W at `weight` and
  /// of G at `gradient` (an empty span: no gradient for now), both float, bf16 or fp16, both in device memory for as
  /// long as the optimizer is used. For 16-bit W an fp32 master is kept. A tensor whose weight was added already is
  /// tied to it: the new name is an alias, the weight is updated once; its gradient must then be the same or empty.
  /// Throws InvalidArgument for a name used twice, counts or types that do not match, weights that overlap, or once
  /// `prepare` or `step` was called.
  template <class W, class G>
  TensorId add(TensorInfo info, device_span<W> weight, device_span<G> gradient, GroupId group = {}) {
    using Gradient = std::remove_const_t<G>;
    static_assert(!std::is_const_v<W>, "the weight is written");
    require_idle();
    if (prepared_) throw InvalidArgument{"tensor " + info.name + " is added after the first step"};
    if (static_cast<std::uint32_t>(group) >= groups_.size())
      throw InvalidArgument{"tensor " + info.name + ": no such group"};
    if (info.dtype != dtype_of<W> || info.count != weight.count()) {
      throw InvalidArgument{"tensor " + info.name + ": its description and its weight differ in type or count"};
    }
    if (!gradient.empty() && gradient.count() != info.count) {
      throw InvalidArgument{"tensor " + info.name + ": weight and gradient differ in count"};
    }
    if (info.name.empty()) throw InvalidArgument{"a tensor needs a name"};
    if (by_name_.contains(info.name)) throw InvalidArgument{"tensor " + info.name + " is added twice"};

    for (std::uint32_t t = 0; t < tensors_.size() && info.count != 0; ++t) {
      if (infos_[t].count == 0) continue;  // overlaps nothing, wherever it lies
      const auto* theirs = static_cast<const std::byte*>(tensors_[t].weight);
      const auto* ours = reinterpret_cast<const std::byte*>(weight.data());
      if (ours >= theirs + infos_[t].bytes().count() || theirs >= ours + info.bytes().count()) continue;
      const bool same = ours == theirs && infos_[t].count == info.count && infos_[t].dtype == info.dtype;
      const bool same_gradient = gradient.empty() || gradient.data() == tensors_[t].gradient;
      if (!same) throw InvalidArgument{"tensor " + info.name + " overlaps " + infos_[t].name};
      if (!same_gradient)
        throw InvalidArgument{"tensor " + info.name + " is tied to " + infos_[t].name + " but has another gradient"};
      by_name_.emplace(std::move(info.name), t);
      return static_cast<TensorId>(t);
    }

    const auto t = static_cast<std::uint32_t>(tensors_.size());
    tensors_.push_back({weight.data(), gradient.data(), info.count, leaves_, static_cast<std::uint32_t>(group),
                        dtype_of<W>, dtype_of<Gradient>, false});
    leaves_ += leaf_count(info.count);
    by_name_.emplace(info.name, t);
    info.role = Role::weight;
    infos_.push_back(std::move(info));
    return static_cast<TensorId>(t);
  }

  [[nodiscard]] TensorId id(std::string_view name) const {
    const auto found = by_name_.find(std::string{name});
    if (found == by_name_.end()) throw InvalidArgument{"no tensor " + std::string{name}};
    return static_cast<TensorId>(found->second);
  }

  /// A frozen tensor is not updated, does not count in the norm, and its bias correction stands still. From the next
  /// step on.
  void set_frozen(TensorId tensor, bool frozen) {
    change(tensor, [&](adamw_kernels::Tensor& t) { t.frozen = frozen; });
  }
  /// Another gradient buffer, or an empty span: the tensor has no gradient and is left alone. From the next step on.
  template <class G>
  void set_gradient(TensorId tensor, device_span<G> gradient) {
    require_known(tensor);
    if (!gradient.empty() && gradient.count() != infos_[index(tensor)].count) {
      throw InvalidArgument{"tensor " + infos_[index(tensor)].name + ": weight and gradient differ in count"};
    }
    change(tensor, [&](adamw_kernels::Tensor& t) {
      t.gradient = gradient.data();
      t.gradient_dtype = dtype_of<std::remove_const_t<G>>;
    });
  }

  // -------------------------------------------------------------------------------------------- the step

  /// Takes all memory and writes the first states: zero moments, masters from the weights, in order behind the work on
  /// `stream` (which must have written the weights). The first `step` does it where the caller did not. Throws
  /// OutOfMemory, and nothing was changed then.
  void prepare(StreamRef stream, std::source_location at = std::source_location::current()) {
    require_idle();
    if (prepared_) return;
    take_memory();
    prepared_ = true;
    start_initialise(Moments::reset);
    run(stream, at);
  }

  /// One step for all tensors that are neither frozen nor without gradient. Asynchronous: `stream` is behind all of it
  /// afterwards, write-backs included. Returns the step's number: 1, 2, ... Throws InvalidArgument, and does nothing, for
  /// values of a group or of `options` out of their ranges.
  std::uint64_t step(StreamRef stream, AdamWStep options = {},
                     std::source_location at = std::source_location::current()) {
    require_idle();
    check_values(options);
    step_groups_ = groups_;  // allocates only after a group was added
    if (prepared_) {
      start_step(options);
    } else {
      take_memory();
      prepared_ = true;
      start_initialise(Moments::reset);
      pending_.then_step = true;
      pending_.options = options;
    }
    run(stream, at);
    return steps_;
  }

  /// Call it after the weights in device memory were written from outside (a checkpoint was loaded): masters are taken
  /// from them anew, moments and applied steps are zeroed or kept. Every copy of the old state is invalid from here on.
  /// In order behind the work on `stream`.
  void refresh(StreamRef stream, Moments moments = Moments::reset,
               std::source_location at = std::source_location::current()) {
    require_idle();
    if (!prepared_) return prepare(stream, at);
    for (auto& home : homes_) home->invalidate();
    start_initialise(moments);
    run(stream, at);
  }

  /// After a call threw and `unfinished()`: ends the operation that it began, a step with the options and the groups of
  /// its time, also one whose preparation failed. Does nothing when none is unfinished: then the call had no effect and
  /// is to be made again. `stream` must be the stream of the failed call or be ordered behind it.
  void resume(StreamRef stream, std::source_location at = std::source_location::current()) {
    if (pending_.operation != Operation::none) run(stream, at);
  }
  /// An operation was cut short by an error and `resume` has to end it.
  [[nodiscard]] bool unfinished() const { return pending_.operation != Operation::none; }
  /// The context is lost: nothing goes on.
  [[nodiscard]] bool failed() const { return hbm_->device().lost(); }

  /// Of every page, whether its home is whole and at which step: after the loss of the context, what can be saved. A write
  /// counts as done once the host has learned so: by `report` of a later step, or by `read`. Calls nothing on the device.
  [[nodiscard]] std::vector<OptimizerPageState> page_states() const {
    std::vector<OptimizerPageState> states;
    for (std::uint32_t p = 0; p < writes_.size(); ++p) {
      const auto [write, whole] = home_content(p);
      states.push_back({label_of(p), write.step, whole});
    }
    return states;
  }

  /// Copies what whole pages (see `page_states`) hold of a tensor's state into `out` (as many elements as the tensor
  /// has), and says which elements these are, in ascending order; the others of `out` stay as they are. For after the
  /// loss of the context, when `read` cannot. Calls nothing on the device. Throws InvalidArgument where `read` does for
  /// its arguments.
  [[nodiscard]] std::vector<SalvagedRange> salvage(std::string_view name, OptimizerState state,
                                                   std::span<float> out) const {
    std::vector<SalvagedRange> ranges;
    const std::uint32_t t = checked_index(name, state, out.size());
    require_memory();
    for_each_slice_of(t, state, [&](const AdamWPage&, std::uint32_t p, std::uint64_t offset, const AdamWSlice& slice) {
      const auto [write, whole] = home_content(p);
      if (!whole) return;
      copy_from_home(p, offset, out.subspan(slice.tensor_first, slice.count), "PagedAdamW::salvage");
      ranges.push_back({slice.tensor_first, slice.count, write.step});
    });
    return ranges;
  }

  /// Blocks the calling thread until `step` has decided, and tells. Throws InvalidArgument for a step not made or more
  /// than 8 steps back, or cut short before it had decided.
  [[nodiscard]] StepReport report(std::uint64_t step) {
    Outbox& box = outbox(step);
    device().synchronize(box.sent);
    return read_report(box);
  }
  /// As `report`, or nothing when the device has not come that far.
  [[nodiscard]] std::optional<StepReport> try_report(std::uint64_t step) {
    Outbox& box = outbox(step);
    if (!device().query(box.sent)) return std::nullopt;
    return read_report(box);
  }
  [[nodiscard]] std::uint64_t steps() const { return steps_; }

  // -------------------------------------------------------------------------------------------- state by name

  /// Copies a tensor's state into `out` (as many elements as the tensor has). Blocks the calling thread until the steps
  /// before are done. `master_weight` exists for 16-bit weights only. Where the state is resident the call takes up to
  /// 64 KiB of pinned memory for its time, and throws OutOfMemory when there is none.
  void read(std::string_view name, OptimizerState state, std::span<float> out) {
    for_each_slice(
        name, state, out.size(),
        [&](const AdamWPage& page, std::uint32_t p, std::uint64_t offset, const AdamWSlice& slice) {
          std::span<float> part = out.subspan(slice.tensor_first, slice.count);
          if (page.home != Tier::hbm) {
            copy_from_home(p, offset, part, "PagedAdamW::read");
          } else {
            through_staging(
                offset, part.size_bytes(), [&](pinned_span<std::byte> staging, std::uint64_t at, std::uint64_t bytes) {
                  device().copy_async(staging, device_span<const std::byte>{resident_[p].subspan(at, bytes)}, control_);
                  device().synchronize(StreamRef{control_});
                  device().note_host_access("PagedAdamW::read", {staging}, {});
                  std::memcpy(reinterpret_cast<std::byte*>(part.data()) + (at - offset), staging.data(), bytes);
                });
          }
        });
  }
  /// The reverse of `read`; counts for the next step. After weights were loaded call `refresh` first, then write the
  /// states.
  void write(std::string_view name, OptimizerState state, std::span<const float> in) {
    for_each_slice(
        name, state, in.size(),
        [&](const AdamWPage& page, std::uint32_t p, std::uint64_t offset, const AdamWSlice& slice) {
          std::span<const float> part = in.subspan(slice.tensor_first, slice.count);
          if (page.home != Tier::hbm) {
            const auto at_home = homes_[p]->memory().subspan(offset, part.size_bytes());
            device().note_host_access("PagedAdamW::write", {}, {at_home});
            std::memcpy(at_home.data(), part.data(), part.size_bytes());
          } else {
            through_staging(
                offset, part.size_bytes(), [&](pinned_span<std::byte> staging, std::uint64_t at, std::uint64_t bytes) {
                  // The host is on no stream: what is still done to that memory, in stream order, comes first.
                  device().synchronize(StreamRef{control_});
                  device().note_host_access("PagedAdamW::write", {}, {staging});
                  std::memcpy(staging.data(), reinterpret_cast<const std::byte*>(part.data()) + (at - offset), bytes);
                  device().copy_async(resident_[p].subspan(at, bytes), pinned_span<const std::byte>{staging}, control_);
                  device().synchronize(StreamRef{control_});
                });
          }
        });
  }

  /// Steps applied to a tensor so far. Blocks.
  [[nodiscard]] std::uint64_t applied_steps(std::string_view name) {
    const std::uint32_t t = static_cast<std::uint32_t>(id(name));
    settle_for_host();
    device().copy_async(scratch(), device_span<const std::uint64_t>{tables_.applied + t, 1}.bytes(), control_);
    device().synchronize(StreamRef{control_});
    device().note_host_access("PagedAdamW::applied_steps", {scratch()}, {});
    return scratch().template as<std::uint64_t>()[0];
  }
  /// Sets it, from a checkpoint; counts for the next step. Blocks.
  void set_applied_steps(std::string_view name, std::uint64_t steps) {
    const std::uint32_t t = static_cast<std::uint32_t>(id(name));
    settle_for_host();
    device().note_host_access("PagedAdamW::set_applied_steps", {}, {scratch()});
    scratch().template as<std::uint64_t>()[0] = steps;
    device().copy_async(device_span<std::uint64_t>{tables_.applied + t, 1}.bytes(),
                        pinned_span<const std::byte>{scratch()}, control_);
    device().synchronize(StreamRef{control_});
  }

  /// Traffic of the pages since construction (the 32 bytes of a report are not counted).
  [[nodiscard]] TransferStats stats() const { return scheduler_ ? scheduler_->stats() : TransferStats{}; }
  /// Pages with a home below HBM, and pages in all; known after `prepare`.
  [[nodiscard]] std::uint32_t offloaded_pages() const { return offloaded_; }
  [[nodiscard]] std::uint32_t pages() const { return static_cast<std::uint32_t>(layout_.pages.size()); }

 private:
  enum class Operation : std::uint8_t { none, initialise, step };
  enum class Phase : std::uint8_t {
    start,
    zero_tables,
    tensors,
    slices,
    leaf_sums,
    join_leaves,
    decide,
    coefficients,
    send_report,
    note_report,
    begin,
    pages,
    finish,
    note_end
  };
  // Where an operation stands. Every device call is one item: it is counted once it was made, so that `resume` goes on
  // behind it.
  struct Pending {
    Operation operation = Operation::none;
    Phase phase = Phase::start;
    std::uint64_t item = 0;
    AdamWStep options = {};
    Moments moments = Moments::reset;
    bool then_step = false;  ///< the initialisation is the start of a first step
  };
  /// A write of a page's home: in which operation, and of which step.
  struct PageWrite {
    std::uint64_t operation = 0;  ///< 0: never
    std::uint64_t step = 0;
  };
  struct PageWrites {
    PageWrite last, before;
  };
  struct Outbox {
    typename D::Event sent;
    std::uint64_t step = 0;  ///< whose report `sent` is behind
    std::uint64_t operation = 0;
  };

  [[nodiscard]] D& device() const { return hbm_->device(); }
  [[nodiscard]] std::string label_of(std::uint32_t p) const { return label_of(p, layout_); }
  [[nodiscard]] std::string label_of(std::uint32_t p, const AdamWLayout& layout) const {
    return "adamw page " + std::to_string(p) + " (" + infos_[layout.slices[layout.pages[p].first_slice].tensor].name +
           ")";
  }
  static std::uint32_t index(TensorId id) { return static_cast<std::uint32_t>(id); }

  void require_idle() const {
    if (pending_.operation != Operation::none) {
      throw InvalidArgument{"an operation of the optimizer was cut short by an error: call resume(stream) first"};
    }
  }

  void require_known(TensorId tensor) const {
    if (index(tensor) >= tensors_.size()) throw InvalidArgument{"no such tensor"};
  }

  template <class F>
  void change(TensorId tensor, F&& f) {
    require_idle();
    require_known(tensor);
    f(tensors_[index(tensor)]);
    if (prepared_ && std::find(changed_.begin(), changed_.end(), index(tensor)) == changed_.end())
      changed_.push_back(index(tensor));
  }

  // ------------------------------------------------------------------------------------------ memory

  void take_memory() {
    AdamWLayout layout = adamw_layout(std::span<const TensorInfo>{infos_}, policy_, options_.page);
    const StreamRef control = control_;
    auto tables = hbm_->allocate(adamw_table_bytes(tensors_.size(), layout.slices.size(), leaves_), "adamw tables",
                                 Role::bookkeeping, control);
    auto reports = host_->allocate(adamw_report_bytes, "adamw reports", Role::bookkeeping, control);
    std::vector<std::unique_ptr<Home<D>>> homes;  // before the scheduler, which lets go of them when it ends
    const SchedulerOptions scheduling{.depth = options_.depth, .fill_evicted = options_.fill_evicted, .name = "adamw"};
    std::unique_ptr<Scheduler> scheduler;
    if constexpr (Scheduler::pages) {
      if (shared_slots_ != nullptr && layout.slot_bytes != Bytes{}) {
        scheduler = std::make_unique<Scheduler>(*shared_slots_, *hbm_, scheduling, observer_);
      }
    }
    if (scheduler == nullptr) {
      scheduler = std::make_unique<Scheduler>(*hbm_, layout.slot_bytes, Role::optimizer_state, scheduling, observer_);
    }
    std::vector<device_span<std::byte>> resident;
    std::vector<PlanStep> reset, keep, sweep;
    std::uint32_t offloaded = 0;
    for (std::uint32_t p = 0; p < layout.pages.size(); ++p) {
      const AdamWPage& page = layout.pages[p];
      const std::string label = label_of(p, layout);
      PageId id{};
      if constexpr (Scheduler::pages) {
        if (page.home != Tier::hbm) {
          homes.push_back(std::make_unique<Home<D>>(*host_, page.bytes(), label, Role::optimizer_state, control));
          id = scheduler->add_page({.label = label,
                                    .parts = {{homes.back().get(), 0, 0, page.bytes(), Access::read_write}},
                                    .slot_bytes = page.bytes()});
          reset.push_back({id, Access::write});
          if (page.master) keep.push_back({id, Access::read_write});
          sweep.push_back({id, Access::read_write});
          resident.push_back({});
          ++offloaded;
          continue;
        }
      }
      id = scheduler->add_resident_page(label, page.bytes(), Role::optimizer_state, control);
      resident.push_back(scheduler->resident_memory(id));
    }
    std::vector<Outbox> outboxes;
    for (std::uint64_t i = 0; i < adamw_report_ring; ++i)
      outboxes.push_back({.sent = device().create_event(EventTiming::none)});
    if constexpr (Scheduler::pages) {
      if (offloaded != 0) scheduler->reserve();
      plans_ = {scheduler->add_plan(reset), scheduler->add_plan(keep), scheduler->add_plan(sweep)};
    }
    device().record(settled_, control);  // the memory taken is usable behind this point

    // Nothing below throws.
    layout_ = std::move(layout);
    table_memory_ = std::move(tables);
    report_memory_ = std::move(reports);
    homes_ = std::move(homes);
    resident_ = std::move(resident);
    scheduler_ = std::move(scheduler);
    outboxes_ = std::move(outboxes);
    offloaded_ = offloaded;
    writes_.resize(layout_.pages.size());
    changed_.reserve(tensors_.size());
    place_tables();
    ever_used_ = true;
  }

  void place_tables() {
    using namespace adamw_kernels;
    std::byte* next = table_memory_.bytes().data();
    const auto take = [&]<class T>(T*& pointer, std::uint64_t count) {
      pointer = reinterpret_cast<T*>(next);
      next += round_up(count * sizeof(T), 256);
    };
    take(tables_.shared, 1);
    take(tables_.tensors, tensors_.size());
    take(tables_.slices, layout_.slices.size());
    take(tables_.coefficients, tensors_.size());
    take(tables_.applied, tensors_.size());
    take(tables_.tensor_sums, tensors_.size());
    take(tables_.leaves, leaves_);
    tables_.leaf_total = leaves_;
    tables_.tensor_count = static_cast<std::uint32_t>(tensors_.size());
  }

  // ------------------------------------------------------------------------------------------ operations

  void start_initialise(Moments moments) {
    pending_ = {.operation = Operation::initialise, .moments = moments};
    changed_.clear();
    for (std::uint32_t t = 0; t < tensors_.size(); ++t) changed_.push_back(t);
  }

  void check_values(const AdamWStep& options) const {
    // Written so that a NaN fails.
    const auto not_negative = [](float x) { return x >= 0.0f && x <= (std::numeric_limits<float>::max)(); };
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const AdamWGroup& group = groups_[g];
      if (not_negative(group.learning_rate) && not_negative(group.weight_decay) && not_negative(group.beta1) &&
          group.beta1 < 1.0f && not_negative(group.beta2) && group.beta2 < 1.0f && not_negative(group.epsilon) &&
          group.epsilon > 0.0f) {
        continue;
      }
      throw InvalidArgument{"group " + std::to_string(g) + ": learning rate " + std::to_string(group.learning_rate) +
                            ", weight decay " + std::to_string(group.weight_decay) + ", betas " +
                            std::to_string(group.beta1) + " and " + std::to_string(group.beta2) + ", epsilon " +
                            std::to_string(group.epsilon) +
                            ": betas must lie in [0, 1), epsilon above 0, learning rate and decay not below 0"};
    }
    if (!not_negative(options.max_norm)) {
      throw InvalidArgument{"max_norm is " + std::to_string(options.max_norm) + ": it must be finite and not negative"};
    }
    if (!not_negative(std::fabs(options.gradient_scale))) {
      throw InvalidArgument{"gradient_scale is " + std::to_string(options.gradient_scale) + ": it must be finite"};
    }
  }

  void start_step(AdamWStep options) {
    ++steps_;
    pending_ = {.operation = Operation::step, .options = options};
  }

  void run(StreamRef stream, std::source_location at) {
    last_stream_ = stream;
    while (pending_.operation != Operation::none) {
      if (advance(stream, at)) {
        ++pending_.item;
      } else {
        pending_.item = 0;
        if (pending_.phase == Phase::note_end) {
          if (pending_.then_step) {
            start_step(pending_.options);
          } else {
            pending_.operation = Operation::none;
          }
        } else {
          pending_.phase = static_cast<Phase>(static_cast<std::uint8_t>(pending_.phase) + 1);
        }
      }
    }
  }

  // Makes the next device call of the phase, or says that the phase has none left.
  bool advance(StreamRef stream, std::source_location at) {
    using namespace adamw_kernels;
    const bool initialise = pending_.operation == Operation::initialise;
    const std::uint64_t item = pending_.item;
    switch (pending_.phase) {
      case Phase::start:
        if (item != 0) return false;
        device().wait(stream, settled_, at);
        ++operations_;
        return true;
      case Phase::zero_tables:
        if (!initialise || item > 1) return false;
        if (item == 0 && pending_.moments == Moments::reset) {
          device().fill_async(device_span<std::uint64_t>{tables_.applied, tensors_.size()}.bytes(), std::byte{0},
                              stream, at);
        }
        if (item == 1 && steps_ == 0) {  // the count of skipped steps goes on from here
          device().fill_async(device_span<Shared>{tables_.shared, 1}.bytes(), std::byte{0}, stream, at);
        }
        return true;
      case Phase::tensors:
        return set_entries<SetTensors>(
                   tables_.tensors, changed_.size(), [&](std::uint64_t i) { return changed_[i]; },
                   [&](std::uint32_t i) { return tensors_[i]; }, stream, at) ||
               (changed_.clear(), false);
      case Phase::slices:
        if (!initialise) return false;
        return set_entries<SetSlices>(
            tables_.slices, layout_.slices.size(), [](std::uint64_t i) { return static_cast<std::uint32_t>(i); },
            [&](std::uint32_t i) { return layout_.slices[i]; }, stream, at);
      case Phase::leaf_sums:
        if (initialise || item != 0 || pending_.options.norm != nullptr) return false;
        put(LeafSums{tables_}, stream, at);
        return true;
      case Phase::join_leaves:
        if (initialise || item != 0 || pending_.options.norm != nullptr) return false;
        put(JoinLeaves{tables_}, stream, at);
        return true;
      case Phase::decide: {
        if (initialise || item != 0) return false;
        const AdamWStep& o = pending_.options;
        put(DecideStep{tables_, o.norm != nullptr ? o.norm : &tables_.shared->norm, steps_, o.gradient_scale,
                       o.max_norm, o.skip_nonfinite},
            stream, at);
        return true;
      }
      case Phase::coefficients: {
        const std::uint64_t first = item * Coefficients::max_groups;
        if (initialise || first >= step_groups_.size()) return false;
        Coefficients kernel{
            tables_,
            static_cast<std::uint32_t>(first),
            static_cast<std::uint32_t>(std::min<std::uint64_t>(Coefficients::max_groups, step_groups_.size() - first)),
            {}};
        for (std::uint32_t g = 0; g < kernel.group_count; ++g) {
          const AdamWGroup& group = step_groups_[first + g];
          kernel.groups[g] = {group.learning_rate, group.weight_decay, group.beta1, group.beta2, group.epsilon};
        }
        put(kernel, stream, at);
        return true;
      }
      case Phase::send_report:
        if (initialise || item != 0) return false;
        device().copy_async(report_slot(steps_), device_span<const Report>{&tables_.shared->report, 1}.bytes(), stream,
                            at);
        return true;
      case Phase::note_report:
        if (initialise || item != 0) return false;
        device().record(outboxes_[steps_ % adamw_report_ring].sent, stream, at);
        outboxes_[steps_ % adamw_report_ring].step = steps_;
        outboxes_[steps_ % adamw_report_ring].operation = operations_;
        return true;
      case Phase::begin:
        if constexpr (Scheduler::pages) {
          if (item != 0 || offloaded_ == 0) return false;
          scheduler_->begin(plan(), at);
          return true;
        }
        return false;
      case Phase::pages:
        return advance_pages(stream, at);
      case Phase::finish:
        if constexpr (Scheduler::pages) {
          if (item != 0 || offloaded_ == 0) return false;
          scheduler_->finish(stream, at);
          return true;
        }
        return false;
      case Phase::note_end:
        if (item != 0) return false;
        device().record(settled_, stream, at);
        return true;
    }
    return false;
  }

  // Pages of the plan come first.
  bool advance_pages(StreamRef stream, std::source_location at) {
    using namespace adamw_kernels;
    const std::uint64_t item = pending_.item;
    if (item >= layout_.pages.size()) return false;
    const AdamWPage& page = layout_.pages[item];
    const bool initialise = pending_.operation == Operation::initialise;
    const bool keep = initialise && pending_.moments == Moments::keep;
    if (keep && !page.master) return true;  // moments stay: nothing to do
    if constexpr (Scheduler::pages) {
      if (item < offloaded_) scheduler_->seek(static_cast<std::uint32_t>(keep ? item - first_master_page() : item));
    }
    auto lease = scheduler_->lease(static_cast<PageId>(item), stream, at);
    const PageMemory memory{lease.bytes().data(), page.stride(),    page.bytes().count(),
                            page.first_slice,     page.slice_count, page.master};
    if (initialise) {
      put(InitialisePage{tables_, memory, keep}, stream, at);
    } else {
      put(UpdatePage{tables_, memory}, stream, at);
    }
    lease.launched();
    writes_[item].before = std::exchange(writes_[item].last, {operations_, initialise ? 0 : steps_});
    ++pending_.item;  // from here on the page is done, whatever happens to its release
    lease.commit(at);
    --pending_.item;
    return true;
  }

  // Pages with masters come behind those without in the offloaded part.
  [[nodiscard]] std::uint64_t first_master_page() const {
    std::uint64_t p = 0;
    while (p < offloaded_ && !layout_.pages[p].master) ++p;
    return p;
  }

  template <class Kernel, class T, class Index, class Value>
  bool set_entries(T* table, std::uint64_t n, Index&& index_of, Value&& value_of, StreamRef stream,
                   std::source_location at) {
    constexpr std::uint64_t batch = sizeof(Kernel::index) / sizeof(std::uint32_t);
    const std::uint64_t first = pending_.item * batch;
    if (first >= n) return false;
    Kernel kernel{};
    kernel.table = table;
    kernel.count = static_cast<std::uint32_t>((std::min)(batch, n - first));
    for (std::uint32_t i = 0; i < kernel.count; ++i) {
      kernel.index[i] = index_of(first + i);
      kernel.values[i] = value_of(kernel.index[i]);
    }
    put(kernel, stream, at);
    return true;
  }

  template <class Kernel>
  void put(const Kernel& kernel, StreamRef stream, std::source_location at) {
    if constexpr (takes_notes<D>) {
      const adamw_kernels::Accesses touched = adamw_kernels::AccessesOf{tensors_, layout_}(kernel);
      device().note_access(stream, Kernel::name, touched.reads, touched.writes, at);
    }
    launch_kernel(device(), kernel, stream, at);
  }

  [[nodiscard]] PlanId plan() const {
    if (pending_.operation == Operation::step) return plans_[2];
    return pending_.moments == Moments::reset ? plans_[0] : plans_[1];
  }

  // ------------------------------------------------------------------------------------------ host access

  [[nodiscard]] pinned_span<std::byte> report_slot(std::uint64_t step) const {
    return report_memory_.bytes().subspan(step % adamw_report_ring * 64, sizeof(adamw_kernels::Report));
  }
  [[nodiscard]] pinned_span<std::byte> scratch() const {
    return report_memory_.bytes().subspan(adamw_report_ring * 64, 8);
  }

  Outbox& outbox(std::uint64_t step) {
    if (step == 0 || step > steps_ || step + adamw_report_ring <= steps_) {
      throw InvalidArgument{"no report of step " + std::to_string(step) + " is kept: the last step is " +
                            std::to_string(steps_)};
    }
    Outbox& box = outboxes_[step % adamw_report_ring];
    if (box.step != step) throw InvalidArgument{"step " + std::to_string(step) + " was cut short: call resume(stream)"};
    return box;
  }
  // What lies in memory that is addresses only cannot be read.
  void require_memory() const {
    if constexpr (requires { hbm_->device().no_touch(); }) {
      if (device().no_touch()) throw InvalidArgument{"the device touches no memory: there is nothing to read or write"};
    }
  }
  // The step waited for all of the operation before it.
  [[nodiscard]] StepReport read_report(const Outbox& box) {
    const std::uint64_t step = box.step;
    known_done_ = (std::max)(known_done_, box.operation - 1);
    require_memory();
    device().note_host_access("PagedAdamW::report", {report_slot(step)}, {});
    adamw_kernels::Report report;
    std::memcpy(&report, report_slot(step).data(), sizeof report);
    return {report.step, report.norm, report.applied != 0, report.skipped_total};
  }

  // After it the host may read and write the state, by itself or through the control stream.
  void settle_for_host() {
    require_idle();
    if (!prepared_) throw InvalidArgument{"the optimizer has no state yet: call prepare(stream) or step(stream) first"};
    require_memory();
    device().wait(control_, settled_);
    device().synchronize(StreamRef{control_});
    known_done_ = operations_;
  }

  // The tensor's, for a state of it with `count` elements.
  [[nodiscard]] std::uint32_t checked_index(std::string_view name, OptimizerState state, std::uint64_t count) const {
    const std::uint32_t t = index(id(name));
    if (count != infos_[t].count) {
      throw InvalidArgument{"tensor " + std::string{name} + " has " + std::to_string(infos_[t].count) +
                            " elements, not " + std::to_string(count)};
    }
    if (state == OptimizerState::master_weight && infos_[t].dtype == DType::fp32) {
      throw InvalidArgument{"tensor " + std::string{name} + " has fp32 weights and so no master weights"};
    }
    return t;
  }

  template <class F>
  void for_each_slice(std::string_view name, OptimizerState state, std::uint64_t count, F&& f) {
    const std::uint32_t t = checked_index(name, state, count);
    settle_for_host();
    for_each_slice_of(t, state, f);
  }
  template <class F>
  void for_each_slice_of(std::uint32_t t, OptimizerState state, F&& f) const {
    for (std::uint32_t p = 0; p < layout_.pages.size(); ++p) {
      const AdamWPage& page = layout_.pages[p];
      for (std::uint32_t s = page.first_slice; s < page.first_slice + page.slice_count; ++s) {
        const AdamWSlice& slice = layout_.slices[s];
        if (slice.tensor == t)
          f(page, p, static_cast<std::uint64_t>(state) * page.stride() + slice.page_first * 4, slice);
      }
    }
  }

  struct HomeContent {
    PageWrite write;
    bool whole;
  };
  // What a page's home holds, as far as the host knows.
  [[nodiscard]] HomeContent home_content(std::uint32_t p) const {
    // What is in its slot only has left the home as it was before.
    const bool in_slot = p < offloaded_ && scheduler_->dirty(static_cast<PageId>(p));
    const PageWrite& write = in_slot ? writes_[p].before : writes_[p].last;
    return {write, p < offloaded_ && write.operation != 0 && write.operation <= known_done_};
  }

  void copy_from_home(std::uint32_t p, std::uint64_t offset, std::span<float> to, const char* what) const {
    const auto at_home = homes_[p]->memory().subspan(offset, to.size_bytes());
    device().note_host_access(what, {at_home}, {});
    std::memcpy(to.data(), at_home.data(), to.size_bytes());
  }

  // Device memory is reached through a piece of pinned memory that is taken for the time of the call.
  template <class F>
  void through_staging(std::uint64_t offset, std::uint64_t bytes, F&& f) {
    const std::uint64_t piece = std::min<std::uint64_t>(bytes, std::uint64_t{1} << 16);
    auto staging = host_->allocate(Bytes{piece}, "adamw staging", Role::workspace, control_);
    for (std::uint64_t done = 0; done < bytes; done += piece) {
      const std::uint64_t n = (std::min)(piece, bytes - done);
      f(staging.bytes().subspan(0, n), offset + done, n);
    }
  }

  HbmArena<D>* hbm_;
  PinnedHostArena<D>* host_;
  SlotPool<D>* shared_slots_ = nullptr;  // null: slots of its own
  Policy policy_;
  PagedAdamWOptions options_;
  [[no_unique_address]] Observer observer_;
  std::vector<AdamWGroup> groups_;
  std::vector<AdamWGroup> step_groups_;  // what they were when the step was called
  std::vector<adamw_kernels::Tensor> tensors_;
  std::vector<TensorInfo> infos_;
  std::unordered_map<std::string, std::uint32_t> by_name_;  // aliases included
  std::uint64_t leaves_ = 0;

  typename D::Stream control_;  // memory is taken and given back in its order; host access goes through it
  typename D::Event settled_;  // behind the last operation
  AdamWLayout layout_;
  typename HbmArena<D>::Buffer table_memory_;
  typename PinnedHostArena<D>::Buffer report_memory_;
  adamw_kernels::Tables tables_{};
  std::vector<std::unique_ptr<Home<D>>> homes_;  // of pages [0, offloaded_)
  std::vector<device_span<std::byte>> resident_;  // by page
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<PlanId> plans_;
  std::vector<Outbox> outboxes_;
  std::vector<std::uint32_t> changed_;  // entries of the device's table that are out of date
  std::vector<PageWrites> writes_;  // by page
  std::uint64_t operations_ = 0;  // begun so far
  std::uint64_t known_done_ = 0;  // the last one that the host knows to be done
  std::uint32_t offloaded_ = 0;
  bool prepared_ = false;
  bool ever_used_ = false;
  Pending pending_;
  std::optional<StreamRef> last_stream_;
  std::uint64_t steps_ = 0;
};

}  // namespace hbmoff
