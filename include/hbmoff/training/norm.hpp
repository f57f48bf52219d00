// The sum of squares of a gradient, by a fixed tree over the tensor's own index.
#pragma once

#include <cstdint>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/exact_math.hpp"
#include "hbmoff/core/host_device.hpp"
#include "hbmoff/core/isa.hpp"

#ifdef __clang__
#pragma float_control(precise, on, push)  // undoes the flags that clang does not tell of, see exact_math.hpp
#endif

namespace hbmoff {

// The tree, the same wherever the gradient lives and whoever sums it:
//
// - Leaf k holds elements [4096 k, 4096 (k + 1)) of the tensor, the last leaf what is left. Element i of a leaf goes to
// lane
//   i mod 32; a lane adds its squares in order of index, from +0. Then lane j gets lane j + 16 added, for j < 16, then
//   j + 8, j + 4, j + 2 and j + 1, and lane 0 is the leaf's sum: what a warp's shuffles do, and whole vectors on a CPU.
// - Above the leaves neighbours are added in pairs, level by level; one without a neighbour goes up as it is. The left
// side of
//   every addition is the lower index.
// - The sum over several tensors is the same tree over their sums, in an order that the caller fixes.
//
// All of it in double. The square of a 24-bit significand has 48 bits and lies in [2^-298, 2^256], so every product is
// exact, and whether it is contracted with its addition changes nothing.
//
// The sum is finite exactly when every element is: finite squares are below 2^256, and fewer than 2^64 of them,
// roundings included, below 2^321, far from overflow at 2^1024; an infinite or NaN element makes its square infinite or
// NaN, and as no term is negative no later addition takes that back. So one number serves clipping and the finite
// check.

/// Elements of a leaf.
inline constexpr std::uint64_t norm_leaf = 4096;
/// Lanes of a leaf.
inline constexpr std::uint64_t norm_lanes = 32;

/// How many leaves a tensor of `elements` elements has; 0 for none.
[[nodiscard]] HBMOFF_HOST_DEVICE constexpr std::uint64_t leaf_count(std::uint64_t elements) {
  return elements / norm_leaf + (elements % norm_leaf != 0 ? 1 : 0);
}

/// The tree above the leaves, fed leaf by leaf in order: for sums whose leaves are not kept. Holds 64 partial sums.
class TreeSum {
 public:
  /// Adds the next leaf's sum.
  HBMOFF_HOST_DEVICE void push(double sum) {
    // A partial sum of 2^b leaves waits at depth b of the counter; as many are complete as `count_` has trailing ones.
    for (std::uint64_t carry = count_; carry & 1; carry >>= 1) sum = waiting_[--depth_] + sum;
    waiting_[depth_++] = sum;
    ++count_;
  }

  /// The sum of what was pushed; +0 for nothing. A NaN is the canonical one.
  [[nodiscard]] HBMOFF_HOST_DEVICE double total() const {
    if (depth_ == 0) return 0.0;
    double sum = waiting_[depth_ - 1];
    for (std::uint32_t d = depth_ - 1; d-- > 0;) sum = waiting_[d] + sum;
    return canonical(sum);
  }

 private:
  double waiting_[64] = {};
  std::uint32_t depth_ = 0;
  std::uint64_t count_ = 0;
};

/// The sum of `n` leaf sums of host memory (or of a device's, called there), by the tree above. No allocation, no
/// recursion. `n` = 0 gives +0; a NaN is the canonical one.
[[nodiscard]] HBMOFF_HOST_DEVICE inline double tree_sum(const double* leaves, std::uint64_t n) {
  TreeSum tree;
  for (std::uint64_t i = 0; i < n; ++i) tree.push(leaves[i]);
  return tree.total();
}

namespace norm_detail {

template <class G>
[[gnu::always_inline]] inline double leaf_sum(const G* data, std::uint64_t count) {
  double lanes[norm_lanes] = {};
  std::uint64_t i = 0;
  for (; count - i >= norm_lanes; i += norm_lanes) {
    for (std::uint64_t j = 0; j < norm_lanes; ++j) {
      const double x = to_float(data[i + j]);
      lanes[j] += x * x;
    }
  }
  for (std::uint64_t j = 0; i + j < count; ++j) {
    const double x = to_float(data[i + j]);
    lanes[j] += x * x;
  }
  for (std::uint64_t half = norm_lanes / 2; half > 0; half /= 2) {
    for (std::uint64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return canonical(lanes[0]);
}

}  // namespace norm_detail

/// As `leaf_sum_of_squares` below, for the instruction set the translation unit is compiled for.
template <class G>
[[nodiscard]] double leaf_sum_of_squares(ScalarIsa, const G* data, std::uint64_t count) {
  return norm_detail::leaf_sum(data, count);
}

#if HBMOFF_HAS_AVX2_CODE
/// As `leaf_sum_of_squares` below, with AVX2 and FMA; call it only where `runs_here(Avx2Isa{})`.
template <class G>
[[nodiscard]] [[gnu::target("avx2,fma")]] double leaf_sum_of_squares(Avx2Isa, const G* data, std::uint64_t count) {
  return norm_detail::leaf_sum(data, count);
}
#endif

/// The sum of the squares of one leaf: `count` elements (at most `norm_leaf`) of host memory from the leaf's start, G
/// being float, bf16 or fp16. Runs on the calling thread; +0 for an empty leaf; a NaN is the canonical one.
template <class G>
[[nodiscard]] double leaf_sum_of_squares(const G* data, std::uint64_t count) {
#if HBMOFF_HAS_AVX2_CODE
  if (runs_here(Avx2Isa{})) return leaf_sum_of_squares(Avx2Isa{}, data, count);
#endif
  return leaf_sum_of_squares(ScalarIsa{}, data, count);
}

/// The sum of the squares of a whole tensor of `count` elements in host memory: the tree over its leaves. Whoever sums
/// the same leaves elsewhere, in any cut, and joins them with `tree_sum` gets these bits.
template <class G>
[[nodiscard]] double sum_of_squares(const G* data, std::uint64_t count) {
  TreeSum tree;
  for (std::uint64_t first = 0; first < count; first += norm_leaf) {
    const std::uint64_t left = count - first;
    tree.push(leaf_sum_of_squares(data + first, left < norm_leaf ? left : norm_leaf));
  }
  return tree.total();
}

}  // namespace hbmoff

#ifdef __clang__
#pragma float_control(pop)
#endif
