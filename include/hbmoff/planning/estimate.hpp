// How many bytes training will take, by tier and role, before anything is allocated: the same layout functions that
// the library allocates with, so the figures are equal to the byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/memory/arena.hpp"
#include "hbmoff/paging/offload_policy.hpp"
#include "hbmoff/training/activation_store.hpp"
#include "hbmoff/training/adamw_layout.hpp"
#include "hbmoff/training/bundle.hpp"
#include "hbmoff/training/paged_adamw.hpp"

namespace hbmoff {

/// Bytes that arenas will hand out, padding and colour included, and bytes over the link. Add estimates with `+=`.
struct MemoryEstimate {
  Bytes bytes[tier_count][role_count] = {};

  [[nodiscard]] Bytes of(Tier tier, Role role) const {
    return bytes[static_cast<std::uint32_t>(tier)][static_cast<std::uint32_t>(role)];
  }
  /// What an arena of that tier must hold: its capacity, if it is to serve just this.
  [[nodiscard]] Bytes total(Tier tier) const {
    Bytes sum;
    for (const Bytes& role : bytes[static_cast<std::uint32_t>(tier)]) sum += role;
    return sum;
  }
  void add(Tier tier, Role role, Bytes block) {
    bytes[static_cast<std::uint32_t>(tier)][static_cast<std::uint32_t>(role)] += arena_footprint(block);
  }
  MemoryEstimate& operator+=(const MemoryEstimate& other) {
    for (std::uint32_t tier = 0; tier < tier_count; ++tier) {
      for (std::uint32_t role = 0; role < role_count; ++role) bytes[tier][role] += other.bytes[tier][role];
    }
    return *this;
  }
  friend MemoryEstimate operator+(MemoryEstimate a, const MemoryEstimate& b) { return a += b; }
  friend bool operator==(const MemoryEstimate&, const MemoryEstimate&) = default;
};

/// One buffer of `bytes` from an arena of `tier`.
[[nodiscard]] inline MemoryEstimate estimate_buffer(Tier tier, Role role, Bytes bytes) {
  MemoryEstimate estimate;
  estimate.add(tier, role, bytes);
  return estimate;
}

/// Whether a user of slots has its own or takes those of a `SlotPool`, which is then estimated by `estimate_slot_pool`.
enum class Slots : std::uint8_t { own, shared };

/// What a `SlotPool` takes.
[[nodiscard]] inline MemoryEstimate estimate_slot_pool(Bytes slot_bytes, std::uint32_t count, Role role) {
  MemoryEstimate estimate;
  for (std::uint32_t i = 0; i < count; ++i) estimate.add(Tier::hbm, role, slot_bytes);
  return estimate;
}

/// Slots that options with this `depth` stand for. A template argument other than `default_depth` has to be given there
/// as well.
[[nodiscard]] constexpr std::uint32_t slots_of(std::uint32_t depth) { return depth == 0 ? default_depth : depth; }

/// Bytes of a slot that a `PagedAdamW` needs; 0 when it pages nothing.
template <OffloadPolicy Policy>
[[nodiscard]] Bytes adamw_slot_bytes(std::span<const TensorInfo> weights, const Policy& policy,
                                     const PagedAdamWOptions& options) {
  return adamw_layout(weights, policy, options.page).slot_bytes;
}

/// Bytes of a slot that an `ActivationStore` needs; 0 when it pages nothing.
template <OffloadPolicy Policy>
[[nodiscard]] Bytes activation_slot_bytes(const Policy& policy, std::span<const BundleLayout> layouts) {
  Bytes slot;
  for (std::size_t l = 0; l < layouts.size(); ++l) {
    const BundlePlacement placement{layouts[l], policy, static_cast<std::int32_t>(l),
                                    static_cast<std::int32_t>(layouts.size())};
    slot = (std::max)(slot, placement.slot(placement.rows()));
  }
  return slot;
}

/// What a `PagedAdamW` takes for `weights` (in the order in which they are added, tied ones once), with the policy, the
/// options and the depth (`options.depth`) it is constructed with.
template <OffloadPolicy Policy>
[[nodiscard]] MemoryEstimate estimate_adamw(std::span<const TensorInfo> weights, const Policy& policy,
                                            const PagedAdamWOptions& options, Slots slots = Slots::own) {
  const AdamWLayout layout = adamw_layout(weights, policy, options.page);
  std::uint64_t leaves = 0;
  for (const TensorInfo& weight : weights) leaves += leaf_count(weight.count);
  MemoryEstimate estimate;
  estimate.add(Tier::hbm, Role::bookkeeping, adamw_table_bytes(weights.size(), layout.slices.size(), leaves));
  estimate.add(Tier::pinned_host, Role::bookkeeping, adamw_report_bytes);
  for (const AdamWPage& page : layout.pages) estimate.add(page.home, Role::optimizer_state, page.bytes());
  if (slots == Slots::own && layout.slot_bytes != Bytes{}) {
    estimate += estimate_slot_pool(layout.slot_bytes, slots_of(options.depth), Role::optimizer_state);
  }
  return estimate;
}

/// What an `ActivationStore` takes for layers that save `layouts`, with the policy, the options and the depth
/// (`options.depth`) it is constructed with.
template <OffloadPolicy Policy>
[[nodiscard]] MemoryEstimate estimate_activations(const Policy& policy, std::span<const BundleLayout> layouts,
                                                  const ActivationStoreOptions& options, Slots slots = Slots::own) {
  MemoryEstimate estimate;
  for (std::size_t l = 0; l < layouts.size(); ++l) {
    const BundlePlacement placement{layouts[l], policy, static_cast<std::int32_t>(l),
                                    static_cast<std::int32_t>(layouts.size())};
    const std::uint64_t rows = placement.rows();
    estimate.add(Tier::hbm, Role::activation, placement.kept(rows));
    estimate.add(Tier::pinned_host, Role::activation, placement.offloaded(rows));
  }
  const Bytes slot = activation_slot_bytes(policy, layouts);
  if (slots == Slots::own && slot != Bytes{})
    estimate += estimate_slot_pool(slot, slots_of(options.depth), Role::activation);
  return estimate;
}

/// The same for `layers` layers that all save `layout`.
template <OffloadPolicy Policy>
[[nodiscard]] MemoryEstimate estimate_activations(const Policy& policy, std::uint32_t layers,
                                                  const BundleLayout& layout, const ActivationStoreOptions& options,
                                                  Slots slots = Slots::own) {
  return estimate_activations(policy, std::vector<BundleLayout>(layers, layout), options, slots);
}

}  // namespace hbmoff
