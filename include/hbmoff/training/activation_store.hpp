// Activations between forward and backward: one bundle per layer, kept, offloaded or recomputed as the policy says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/detail/try_twice.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "hbmoff/observe/stats.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "hbmoff/training/bundle.hpp"

namespace hbmoff {

struct ActivationStoreOptions {
  std::uint32_t depth = 0;    ///< slots; see SchedulerOptions
  bool fill_evicted = false;  ///< see SchedulerOptions
};

/// Holds what the layers of a model save in the forward until the backward wants it.
///
/// In the forward `save(layer, stream)` gives HBM that the layer writes its activations into; `commit()` sends it on
/// its way behind the work on the stream. In the backward, in reverse order, `restore(layer, stream)` gives it back, on
/// its way since the layer before. The last `Depth` paged layers of a forward stay in their slots: they are the first
/// that the backward asks for. Both calls are asynchronous: they order streams and never wait on the calling thread.
///
/// - HBM: Depth slots of the largest bundle (or a share of a pool) plus kept tensors. Host: the offloaded part of each layer.
///   `planning/estimate.hpp` predicts both to the byte. All memory is taken by the constructor.
/// - Layers are saved in ascending order, from the first on, and restored in descending order, from the last on, with every
///   policy; a forward without a backward is followed by the next forward at once. One thread at a time.
/// - Arenas, slots and streams outlive the store, and the store outlives its bundles.
/// - A save that is not committed is discarded and makes no traffic: so evaluate with the same code.
/// - With a policy that is known to keep everything there are no events: order between streams is the caller's, and at
///   the end memory waits for the stream of the last `save` or `restore` only.
/// - A call that throws can be made again.
template <Device D, OffloadPolicy Policy, std::uint32_t Depth = default_depth, class Observer = NullObserver>
class ActivationStore {
  using PagingPolicy =
      std::conditional_t<OffloadPolicyTraits<Policy>::activations_always_kept, KeepResident, OffloadAll>;
  using Scheduler = PrefetchScheduler<D, PagingPolicy, Depth, Observer>;

 public:
  using StreamRef = typename D::StreamRef;

  /// A layer's bundle in HBM, from `save` (to write) or `restore` (to read). Move-only; a moved-from one is empty.
  class SavedBundle {
   public:
    SavedBundle(SavedBundle&& other) noexcept
        : placement_{other.placement_}, saved_rows_{std::exchange(other.saved_rows_, nullptr)}, rows_{other.rows_},
          saving_{other.saving_}, kept_{std::move(other.kept_)}, paged_{std::move(other.paged_)} {}
    SavedBundle& operator=(SavedBundle&& other) noexcept {
      placement_ = other.placement_;
      saved_rows_ = this == &other ? saved_rows_ : std::exchange(other.saved_rows_, nullptr);
      rows_ = other.rows_;
      saving_ = other.saving_;
      kept_ = std::move(other.kept_);
      paged_ = std::move(other.paged_);
      return *this;
    }

    /// Tensor `i` of the layout, for as many rows as were saved. T must be its element type. Throws InvalidArgument.
    template <class T>
    [[nodiscard]] device_span<T> tensor(std::uint32_t i) const {
      if (i >= placement_->tensors()) throw InvalidArgument{"the bundle has no tensor " + std::to_string(i)};
      if (dtype_of<std::remove_const_t<T>> != placement_->dtype(i)) {
        throw InvalidArgument{"tensor " + std::to_string(i) + " of the bundle is " +
                              std::string{to_string(placement_->dtype(i))}};
      }
      const Lease<Scheduler>& lease = placement_->mode(i) == SaveMode::keep ? kept_ : paged_;
      const std::uint64_t count = placement_->count(i, rows_);
      return count == 0 ? device_span<T>{} : lease.template as<T>(placement_->offset(i, rows_), count);
    }
    /// The same, its element type taken from what it is assigned or passed to: `device_span<float> x = saved[0];` (in an
    /// `auto` it is no span, and must not outlive the bundle).
    class Tensor {
     public:
      template <class T>
      operator device_span<T>() const {  // NOLINT(google-explicit-constructor): that is what it is for
        return bundle_->tensor<T>(index_);
      }

     private:
      friend class SavedBundle;
      Tensor(const SavedBundle& bundle, std::uint32_t index) : bundle_{&bundle}, index_{index} {}
      const SavedBundle* bundle_;
      std::uint32_t index_;
    };
    [[nodiscard]] Tensor operator[](std::uint32_t i) const { return {*this, i}; }

    /// After `restore`: the tensor's memory is there but its content is not; run the layer's forward again into it. A
    /// layer that is still in its slot from the forward misses nothing.
    [[nodiscard]] bool missing(std::uint32_t i) const {
      return !saving_ && placement_->mode(i) == SaveMode::recompute && !paged_.hit();
    }
    [[nodiscard]] std::uint64_t rows() const { return rows_; }

    /// See `Lease::used_on`.
    void used_on(StreamRef stream, std::source_location at = std::source_location::current()) {
      if (!paged_.empty()) paged_.used_on(stream, at);
      if (!kept_.empty()) kept_.used_on(stream, at);
    }

    /// After `save`: what was written is good; it leaves for its home behind the work on the stream. After `restore`:
    /// done with it (as the destructor says as well). Does not block. Throws InvalidArgument when it has ended; a commit
    /// that a failed device call cut short is made again.
    void commit(std::source_location at = std::source_location::current()) {
      if (saved_rows_ == nullptr) throw InvalidArgument{"the bundle is empty: it was moved from or has ended"};
      if (!kept_.empty()) kept_.commit(at);
      if (!paged_.empty()) paged_.commit(at);
      std::uint64_t* saved_rows = std::exchange(saved_rows_, nullptr);
      if (saving_) *saved_rows = rows_;
    }

   private:
    friend class ActivationStore;
    SavedBundle(const BundlePlacement& placement, std::uint64_t& saved_rows, std::uint64_t rows, bool saving)
        : placement_{&placement}, saved_rows_{&saved_rows}, rows_{rows}, saving_{saving} {}
    const BundlePlacement* placement_;
    std::uint64_t* saved_rows_;  // null: it has ended
    std::uint64_t rows_;
    bool saving_;
    Lease<Scheduler> kept_;
    Lease<Scheduler> paged_;
  };

  /// `layers` layers that all save `layout`. Takes all memory; with a policy that is known to
  /// keep everything it blocks until the memory is usable. Throws OutOfMemory and InvalidArgument.
  ActivationStore(HbmArena<D>& hbm, PinnedHostArena<D>& host, Policy policy, std::uint32_t layers,
                  const BundleLayout& layout, ActivationStoreOptions options = {}, Observer observer = {})
      : ActivationStore{hbm, host, policy, std::vector<BundleLayout>(layers, layout), options, observer} {}

  /// One layout for each layer.
  ActivationStore(HbmArena<D>& hbm, PinnedHostArena<D>& host, Policy policy, const std::vector<BundleLayout>& layouts,
                  ActivationStoreOptions options = {}, Observer observer = {})
      : ActivationStore{nullptr, hbm, host, policy, layouts, options, observer} {}

  /// Layers pass through the slots of `slots`, which others may share, instead of slots of its own: at most Depth of
  /// them, one of which is its own. They must be large enough (`activation_slot_bytes`), and the pool outlives the store.
  ActivationStore(HbmArena<D>& hbm, PinnedHostArena<D>& host, SlotPool<D>& slots, Policy policy,
                  const std::vector<BundleLayout>& layouts, ActivationStoreOptions options = {}, Observer observer = {})
    requires Scheduler::pages
      : ActivationStore{&slots, hbm, host, policy, layouts, options, observer} {}

  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;
  ~ActivationStore() {
    if constexpr (!Scheduler::pages) {
      // Without paging there are no events that say when the memory is free.
      if (!last_stream_) return;
      detail::try_twice(*device_, [&] {
        const typename D::Event done = device_->create_event(EventTiming::none);
        device_->record(done, *last_stream_);
        device_->wait(control_, done);
      });
    }
  }

  [[nodiscard]] std::uint32_t layers() const { return static_cast<std::uint32_t>(layers_.size()); }

  /// HBM for layer `layer`'s activations of `rows` rows (all of the layout's by default), to be written by work on
  /// `stream`. Throws InvalidArgument for a layer out of order, for no rows, and for more than the layout has.
  [[nodiscard]] SavedBundle save(std::uint32_t layer, StreamRef stream, std::uint64_t rows = all_rows,
                                 std::source_location at = std::source_location::current()) {
    Layer& l = layer_at(layer);
    if (rows == all_rows) rows = l.placement.rows();
    if (rows == 0 || rows > l.placement.rows()) {
      throw InvalidArgument{"layer " + std::to_string(layer) + ": " + std::to_string(rows) +
                            " rows do not fit a layout of " + std::to_string(l.placement.rows())};
    }
    if (layer != 0 && layer != next_save_) throw_out_of_order(layer, "saved");
    SavedBundle bundle{l.placement, l.saved_rows, rows, true};
    // First what can be taken again: the other lease moves the plan on, so no call may fail behind it.
    if (l.kept) bundle.kept_ = scheduler_->lease(*l.kept, stream, at);
    if constexpr (Scheduler::pages) {
      if (l.paged) {
        if (layer == *first_paged_) scheduler_->begin(*plan_, at);
        scheduler_->limit(*l.paged, l.placement.offloaded(rows));
        bundle.paged_ = scheduler_->lease(*l.paged, stream, at);
      }
    }
    // A forward that starts again leaves nothing of the one before to restore.
    for (std::size_t k = layer; k < layers_.size(); ++k) layers_[k].saved_rows = 0;
    next_save_ = layer + 1;
    next_restore_ = next_save_ == layers_.size() ? next_save_ : 0;
    last_stream_ = stream;
    return bundle;
  }

  /// What layer `layer` saved, for work on `stream`. It can be restored once. Throws InvalidArgument when nothing was
  /// saved and committed, and for a layer out of order.
  [[nodiscard]] SavedBundle restore(std::uint32_t layer, StreamRef stream,
                                    std::source_location at = std::source_location::current()) {
    Layer& l = layer_at(layer);
    if (l.saved_rows == 0)
      throw InvalidArgument{"layer " + std::to_string(layer) + " has no saved activations to restore"};
    if (layer + 1 != next_restore_) throw_out_of_order(layer, "restored");
    SavedBundle bundle{l.placement, l.saved_rows, l.saved_rows, false};
    if (l.kept) bundle.kept_ = scheduler_->lease(*l.kept, stream, at);
    if constexpr (Scheduler::pages) {
      if (l.paged) {
        bundle.paged_ = scheduler_->lease(*l.paged, stream, at);
      }
    }
    l.saved_rows = 0;
    next_restore_ = layer;
    last_stream_ = stream;
    return bundle;
  }

  [[nodiscard]] TransferStats stats() const { return scheduler_->stats(); }

  static constexpr std::uint64_t all_rows = ~std::uint64_t{0};

 private:
  // `slots` null: slots of its own.
  ActivationStore(SlotPool<D>* slots, HbmArena<D>& hbm, PinnedHostArena<D>& host, Policy policy,
                  const std::vector<BundleLayout>& layouts, ActivationStoreOptions options, Observer observer)
      : device_{&hbm.device()}, control_{hbm.device().create_stream("activations control")} {
    Bytes slot;
    layers_.reserve(layouts.size());
    for (std::size_t l = 0; l < layouts.size(); ++l) {
      layers_.push_back({BundlePlacement{layouts[l], policy, static_cast<std::int32_t>(l),
                                         static_cast<std::int32_t>(layouts.size())}});
      slot = (std::max)(slot, layers_.back().placement.slot(layouts[l].rows));
    }
    const SchedulerOptions scheduling{
        .depth = options.depth, .fill_evicted = options.fill_evicted, .name = "activations"};
    if constexpr (Scheduler::pages) {
      if (slots != nullptr && slot != Bytes{}) scheduler_.emplace(*slots, hbm, scheduling, observer);
    }
    if (!scheduler_) scheduler_.emplace(hbm, slot, Role::activation, scheduling, observer);
    std::vector<PlanStep> plan;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      Layer& layer = layers_[l];
      const BundlePlacement& placement = layer.placement;
      const std::uint64_t rows = placement.rows();
      const std::string label = "activations of layer " + std::to_string(l);
      if (placement.kept(rows) != Bytes{}) {
        layer.kept = scheduler_->add_resident_page(label + " (kept)", placement.kept(rows), Role::activation, control_);
      }
      if constexpr (Scheduler::pages) {
        if (placement.slot(rows) == Bytes{}) continue;
        PageSpec<D> spec{.label = label, .slot_bytes = placement.slot(rows), .transient = true};
        if (placement.offloaded(rows) != Bytes{}) {
          homes_.push_back(
              std::make_unique<Home<D>>(host, placement.offloaded(rows), label, Role::activation, control_));
          spec.parts.push_back({homes_.back().get(), 0, 0, placement.offloaded(rows), Access::read_write});
        }
        layer.paged = scheduler_->add_page(std::move(spec));
        if (!first_paged_) first_paged_ = static_cast<std::uint32_t>(l);
        plan.push_back({*layer.paged, Access::write});
      }
    }
    if constexpr (Scheduler::pages) {
      for (std::size_t i = plan.size(); i-- > 0;) plan.push_back({plan[i].page, Access::read});
      plan_ = scheduler_->add_plan(std::move(plan));
      if (first_paged_) scheduler_->reserve();
    }
    // Paged memory has events that say from where on it is usable.
    if constexpr (!Scheduler::pages) device_->synchronize(StreamRef{control_});
  }

  struct Layer {
    BundlePlacement placement;
    std::optional<PageId> kept = {};
    std::optional<PageId> paged = {};
    std::uint64_t saved_rows = 0;  ///< 0: nothing to restore
  };

  Layer& layer_at(std::uint32_t layer) {
    if (layer >= layers_.size()) throw InvalidArgument{"there is no layer " + std::to_string(layer)};
    return layers_[layer];
  }

  [[noreturn]] static void throw_out_of_order(std::uint32_t layer, const char* what) {
    throw InvalidArgument{"layer " + std::to_string(layer) + " " + what +
                          " out of order: save all layers upwards, then restore them downwards"};
  }

  D* device_;
  typename D::Stream control_;  // memory is taken and given back in its order
  std::vector<Layer> layers_;
  std::vector<std::unique_ptr<Home<D>>> homes_;
  std::optional<Scheduler> scheduler_;
  std::optional<PlanId> plan_;
  std::optional<std::uint32_t> first_paged_;
  std::optional<StreamRef> last_stream_;
  std::uint32_t next_save_ = 0;
  std::uint32_t next_restore_ = 0;  ///< one more than the layer; 0: none
};

}  // namespace hbmoff
