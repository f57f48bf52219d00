// AdamW over a range in host memory: one pass, chosen at run time among instruction sets, the same bits on each.
#pragma once

#include <cstdint>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/isa.hpp"
#include "hbmoff/training/adamw.hpp"

#if HBMOFF_HAS_AVX2_CODE
#include <immintrin.h>
#endif

#ifdef __clang__
#pragma float_control(precise, on, push)  // undoes the flags that clang does not tell of, see exact_math.hpp
#endif

namespace hbmoff {
namespace adamw_detail {

// Elements per block: whole vectors of every instruction set. A loop of a known number of rounds over pointers that do
// not overlap is vectorised at -O2 by g++ 12 too. Only the root stands apart, as an intrinsic, since errno keeps a
// compiler from vectorising it.
inline constexpr std::uint64_t block = 32;

/// The root of a block, in the registers of the instruction set.
[[gnu::always_inline]] inline void block_root(ScalarIsa, float* __restrict root, const float* __restrict v) {
  for (std::uint64_t i = 0; i < block; ++i) root[i] = math::sqrt(v[i]);
}

#if HBMOFF_HAS_AVX2_CODE
[[gnu::target("avx2,fma")]] inline void block_root(Avx2Isa, float* __restrict root, const float* __restrict v) {
  for (std::uint64_t i = 0; i < block; i += 8) _mm256_store_ps(root + i, _mm256_sqrt_ps(_mm256_loadu_ps(v + i)));
}
#endif

template <bool HasMaster, class Isa, class W, class G>
[[gnu::always_inline]] inline void update_block(Isa isa, float* __restrict m, float* __restrict v, W* __restrict weight,
                                                float* __restrict master, const G* __restrict gradient,
                                                const AdamWCoefficients& c) {
  alignas(64) float root[block];
  for (std::uint64_t i = 0; i < block; ++i) {
    const Moments next = moments(m[i], v[i], to_float(gradient[i]), c);
    m[i] = next.m;
    v[i] = next.v;
  }
  block_root(isa, root, v);
  for (std::uint64_t i = 0; i < block; ++i) {
    const float w = adamw_detail::weight(HasMaster ? master[i] : to_float(weight[i]), m[i], root[i], c);
    if constexpr (HasMaster) master[i] = w;
    weight[i] = from_float<W>(w);
  }
}

template <bool HasMaster, class Isa, class W, class G>
[[gnu::always_inline]] inline void update_blocks(Isa isa, float* m, float* v, W* weight, float* master,
                                                 const G* gradient, std::uint64_t count,
                                                 const AdamWCoefficients& coefficients) {
  const AdamWCoefficients c = coefficients;  // a local copy cannot be what a store into the range changes
  std::uint64_t i = 0;
  for (; count - i >= block; i += block) {
    update_block<HasMaster>(isa, m + i, v + i, weight + i, HasMaster ? master + i : nullptr, gradient + i, c);
  }
  const std::uint64_t rest = count - i;
  if (rest == 0) return;
  // The tail runs as a block as well, through copies, so that it takes the same instructions.
  float tail_m[block] = {}, tail_v[block] = {}, tail_master[block] = {};
  W tail_weight[block] = {};
  G tail_gradient[block] = {};
  for (std::uint64_t j = 0; j < rest; ++j) {
    tail_m[j] = m[i + j];
    tail_v[j] = v[i + j];
    tail_weight[j] = weight[i + j];
    if constexpr (HasMaster) tail_master[j] = master[i + j];
    tail_gradient[j] = gradient[i + j];
  }
  update_block<HasMaster>(isa, tail_m, tail_v, tail_weight, tail_master, tail_gradient, c);
  for (std::uint64_t j = 0; j < rest; ++j) {
    m[i + j] = tail_m[j];
    v[i + j] = tail_v[j];
    weight[i + j] = tail_weight[j];
    if constexpr (HasMaster) master[i + j] = tail_master[j];
  }
}

template <class Isa, class W, class G>
[[gnu::always_inline]] inline void update_range(Isa isa, float* m, float* v, W* weight, float* master,
                                                const G* gradient, std::uint64_t count, const AdamWCoefficients& c) {
  if (c.apply == 0) return;
  if (master != nullptr) {
    update_blocks<true>(isa, m, v, weight, master, gradient, count, c);
  } else {
    update_blocks<false>(isa, m, v, weight, master, gradient, count, c);
  }
}

}  // namespace adamw_detail

/// As `adamw_update_range` below, for the instruction set the translation unit is compiled for.
template <class W, class G>
void adamw_update_range(ScalarIsa isa, float* m, float* v, W* weight, float* master, const G* gradient,
                        std::uint64_t count, const AdamWCoefficients& c) {
  adamw_detail::update_range(isa, m, v, weight, master, gradient, count, c);
}

#if HBMOFF_HAS_AVX2_CODE
/// As `adamw_update_range` below, with AVX2 and FMA; call it only where `runs_here(Avx2Isa{})`.
template <class W, class G>
[[gnu::target("avx2,fma")]] void adamw_update_range(Avx2Isa isa, float* m, float* v, W* weight, float* master,
                                                    const G* gradient, std::uint64_t count,
                                                    const AdamWCoefficients& c) {
  adamw_detail::update_range(isa, m, v, weight, master, gradient, count, c);
}
#endif

/// `adamw_update` for elements [0, count) of arrays in host memory, in one pass: the gradient is read, m, v and the
/// weight are updated in place. W and G are float, bf16 or fp16.
///
/// `master`: the fp32 weights that belong to a 16-bit `weight`; they are what is updated, and `weight` becomes their
/// rounded copy (its old value is not read). Null: `weight` itself is the state, which is meant for W = float.
/// Arrays need the alignment of their elements and do not overlap. With `c.apply` 0 nothing is read or written.
///
/// Runs on the calling thread, allocates nothing, throws nothing. Which instruction set runs is asked of the processor
/// at each call; every one gives the bits of `adamw_update`, for any cut of the range into calls.
template <class W, class G>
void adamw_update_range(float* m, float* v, W* weight, float* master, const G* gradient, std::uint64_t count,
                        const AdamWCoefficients& c) {
#if HBMOFF_HAS_AVX2_CODE
  if (runs_here(Avx2Isa{})) return adamw_update_range(Avx2Isa{}, m, v, weight, master, gradient, count, c);
#endif
  adamw_update_range(ScalarIsa{}, m, v, weight, master, gradient, count, c);
}

}  // namespace hbmoff
