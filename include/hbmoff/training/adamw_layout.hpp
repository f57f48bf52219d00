// Which slice of which tensor's AdamW state lies where in which page: a pure function of the tensors, the policy and
// the page size, so that a planner can predict every byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/paging/offload_policy.hpp"

namespace hbmoff {

/// `count` elements of a tensor, from element `tensor_first` on, which lie in a page from element `page_first` of each
/// of its arrays on.
struct AdamWSlice {
  std::uint32_t tensor = 0;
  std::uint64_t tensor_first = 0;
  std::uint64_t page_first = 0;
  std::uint64_t count = 0;
};

/// One page: the arrays m, v and (for 16-bit weights) master of the same elements, fp32, `stride` bytes apart.
struct AdamWPage {
  bool master = false;
  Tier home = Tier::hbm;
  std::uint64_t elements = 0;  ///< of each array, the last slice's end
  std::uint32_t first_slice = 0;
  std::uint32_t slice_count = 0;

  /// Bytes that no two arrays may lie (almost) a multiple of apart, because they are walked in lockstep: 128 MiB, and
  /// half of it where a third array lies twice a stride from the first. See `arena_footprint` for the figures.
  [[nodiscard]] static constexpr std::uint64_t period(bool master) { return std::uint64_t{master ? 64u : 128u} << 20; }
  static constexpr std::uint64_t stagger = 4096 + 256;  ///< bytes; nearer than that is almost

  /// Bytes from the start of one array to the start of the next, a multiple of 256.
  [[nodiscard]] std::uint64_t stride() const {
    const std::uint64_t packed = round_up(elements * 4, 256);
    const std::uint64_t phase = packed % period(master);
    if (packed >= period(master) && phase < stagger) return packed + stagger;
    return phase > period(master) - stagger ? packed + 2 * stagger : packed;
  }
  /// Bytes of the page, which travel as one copy. The last array is not padded.
  [[nodiscard]] Bytes bytes() const { return Bytes{stride() * (master ? 2 : 1) + elements * 4}; }
};

struct AdamWLayout {
  std::vector<AdamWPage> pages;  ///< pages with a home below HBM first, in the order of the sweep
  std::vector<AdamWSlice> slices;  ///< page by page
  Bytes slot_bytes;  ///< of the largest page with a home below HBM; 0 when there is none
};

/// What the policy is asked about a weight's AdamW state.
[[nodiscard]] inline TensorInfo adamw_state_info(const TensorInfo& weight) {
  return {.name = weight.name,
          .role = Role::optimizer_state,
          .layer = weight.layer,
          .layers = weight.layers,
          .count = weight.count};
}

/// Lays out the states of `weights` in pages of at most `page` bytes. A tensor's slice starts at a multiple of 16
/// elements in its page; small tensors share pages, large ones are cut. Where a tensor lies depends on the tensors
/// before it in the same family (with or without master weights, same home) and on nothing that changes in training.
/// Throws InvalidArgument when `page` holds fewer than 64 elements.
template <OffloadPolicy Policy>
[[nodiscard]] AdamWLayout adamw_layout(std::span<const TensorInfo> weights, const Policy& policy, Bytes page) {
  struct Family {
    bool master;
    Tier home;
  };
  constexpr std::uint64_t tensor_alignment = 16;  // elements: a cache line
  AdamWLayout layout;
  for (const Family family : {Family{false, Tier::pinned_host}, Family{true, Tier::pinned_host},
                              Family{false, Tier::hbm}, Family{true, Tier::hbm}}) {
    const std::uint64_t arrays = family.master ? 3 : 2;
    // A multiple of 64, so that a full page has no padding between its arrays.
    std::uint64_t capacity = page.count() / (4 * arrays) / 64 * 64;
    // Nor does a full page need what `stride` adds, which would make it larger than `page`.
    const std::uint64_t period = AdamWPage::period(family.master) / 4, stagger = AdamWPage::stagger / 4;
    if (capacity + stagger > period && (capacity + stagger) % period < 3 * stagger)
      capacity = (capacity + stagger) / period * period - stagger;
    if (capacity == 0) {
      throw InvalidArgument{"a page of " + to_string(page) + " is too small: 64 elements of the state need " +
                            std::to_string(256 * arrays) + " bytes"};
    }
    AdamWPage current{family.master, family.home, 0, static_cast<std::uint32_t>(layout.slices.size()), 0};
    const auto close = [&] {
      if (current.slice_count == 0) return;
      if (family.home != Tier::hbm) layout.slot_bytes = (std::max)(layout.slot_bytes, current.bytes());
      layout.pages.push_back(current);
      current = {family.master, family.home, 0, static_cast<std::uint32_t>(layout.slices.size()), 0};
    };
    for (std::uint32_t t = 0; t < weights.size(); ++t) {
      const TensorInfo& weight = weights[t];
      if ((weight.dtype != DType::fp32) != family.master) continue;
      if (OffloadPolicyTraits<Policy>::home(policy, adamw_state_info(weight)) != family.home) continue;
      for (std::uint64_t done = 0; done < weight.count;) {
        const std::uint64_t first = round_up(current.elements, tensor_alignment);
        if (first >= capacity) {
          close();
          continue;
        }
        const std::uint64_t count = (std::min)(weight.count - done, capacity - first);
        layout.slices.push_back({t, done, first, count});
        ++current.slice_count;
        current.elements = first + count;
        done += count;
      }
    }
    close();
  }
  return layout;
}

}  // namespace hbmoff
