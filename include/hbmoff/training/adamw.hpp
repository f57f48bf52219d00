// The AdamW update of one element as a pure function: the same bits on every host and device.
#pragma once

#include <cstdint>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/exact_math.hpp"
#include "hbmoff/core/host_device.hpp"

#ifdef __clang__
#pragma float_control(precise, on, push)  // undoes the flags that clang does not tell of, see exact_math.hpp
#endif

namespace hbmoff {

/// What AdamW keeps of one element. Start with m = v = +0.
struct AdamWState {
  float m;  ///< first moment: running mean of the gradient
  float v;  ///< second moment: running mean of its square
  float w;  ///< the fp32 weight, or the fp32 master of a 16-bit weight
};

/// What one step does to one tensor, from `adamw_coefficients`. Plain data of 40 bytes.
struct AdamWCoefficients {
  float gradient_scale;  ///< multiplies every gradient element first (loss scale, clipping)
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;           ///< lr / (1 - beta1^t)
  float inverse_sqrt_bias2;  ///< 1 / sqrt(1 - beta2^t)
  float epsilon;
  float decay;          ///< -(lr * weight_decay); +0 when there is none
  std::uint32_t apply;  ///< 0: the step is skipped, loops leave every byte alone
};

/// base^n by repeated squaring: a fixed sequence of IEEE multiplications, at most 128, so no `pow` whose bits depend on
/// the C library, and no product that drifts over steps. Relative error at most about n * 2^-53. n = 0 gives 1.
[[nodiscard]] HBMOFF_HOST_DEVICE inline double integer_power(double base, std::uint64_t n) {
  // Products feed only products here, so contraction has nothing to change.
  double result = 1.0;
  for (; n != 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

/// 1 - beta^t for t >= 1, the last multiplication and the subtraction rounded once together: exact for t = 1, and a
/// caller cannot contract it differently.
[[nodiscard]] HBMOFF_HOST_DEVICE inline double bias_correction(double beta, std::uint64_t t) {
  return math::fma(-integer_power(beta, t - 1), beta, 1.0);
}

/// The factor that brings a gradient of norm `norm` down to `max_norm`: 1 where the norm is not above it, or `max_norm`
/// is not above 0 (no clipping). A norm that is NaN gives NaN, and an infinite one 0 (which makes the infinite elements
/// NaN): a step that is not to be skipped shows what went in.
[[nodiscard]] HBMOFF_HOST_DEVICE inline double clip_scale(double norm, double max_norm) {
  if (!(max_norm > 0.0) || norm <= max_norm) return 1.0;
  return math::div(max_norm, norm);
}

/// The coefficients of step `applied_step` (1 for a tensor's first applied step; 0 is not allowed). Hyper-parameters
/// are floats, and what is meant is their exact value: a beta of 0.9f is 0.89999998 in the running means, in 1 - beta
/// and in the bias correction alike, so these always agree. All is computed in double and rounded once;
/// `gradient_scale` is given in double because it usually is a product with `clip_scale`. Betas are in [0, 1), epsilon
/// is above 0: nothing is checked here, this runs on devices. `apply` is 1.
[[nodiscard]] HBMOFF_HOST_DEVICE inline AdamWCoefficients adamw_coefficients(float learning_rate, float weight_decay,
                                                                             float beta1, float beta2, float epsilon,
                                                                             double gradient_scale,
                                                                             std::uint64_t applied_step) {
  const double rate = math::to_double(learning_rate);
  const double decay = rate * math::to_double(weight_decay);
  AdamWCoefficients c{};
  c.gradient_scale = math::to_float(gradient_scale);
  c.beta1 = beta1;
  c.one_minus_beta1 = math::to_float(1.0 - math::to_double(beta1));
  c.beta2 = beta2;
  c.one_minus_beta2 = math::to_float(1.0 - math::to_double(beta2));
  c.step_size = math::to_float(math::div(rate, bias_correction(math::to_double(beta1), applied_step)));
  c.inverse_sqrt_bias2 =
      math::to_float(math::div(1.0, math::sqrt(bias_correction(math::to_double(beta2), applied_step))));
  c.epsilon = epsilon;
  c.decay = decay == 0.0 ? 0.0f : math::to_float(-decay);
  c.apply = 1;
  return c;
}

// The update in three pieces, so that a host loop can run the root between them on whole vectors. `adamw_update` is the
// three in a row, and the only statement of the formula.
namespace adamw_detail {

struct Moments {
  float m;
  float v;
};

[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline Moments moments(float m, float v, float gradient,
                                                                 const AdamWCoefficients& c) {
  const float g = math::mul(c.gradient_scale, gradient);
  // (1 - beta2) g first, then times g: g * g alone would overflow at 2^64 and lose what is below 2^-75.
  return {canonical(math::fma(c.beta1, m, math::mul(c.one_minus_beta1, g))),
          canonical(math::fma(math::mul(c.one_minus_beta2, g), g, math::mul(c.beta2, v)))};
}

[[gnu::always_inline]] HBMOFF_HOST_DEVICE inline float weight(float w, float m, float root_v,
                                                              const AdamWCoefficients& c) {
  const float denominator = math::fma(root_v, c.inverse_sqrt_bias2, c.epsilon);
  // Without decay w passes through: fma(0, w, w) would make an infinite weight a NaN.
  const float decayed = (bit_cast<std::uint32_t>(c.decay) & 0x7fffffffu) == 0 ? w : math::fma(c.decay, w, w);
  return canonical(math::fma(math::negate(c.step_size), math::div(m, denominator), decayed));
}

}  // namespace adamw_detail

/// One AdamW update of one element (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2), with
/// g = gradient_scale * gradient:
///
///     m' = beta1 m + (1 - beta1) g
///     v' = beta2 v + (1 - beta2) g^2
///     w' = w - lr weight_decay w - step_size m' / (sqrt(v') inverse_sqrt_bias2 + epsilon)
///
/// Every multiply-add is an explicit fma, root and division are IEEE's, and every NaN of the result is the canonical
/// one: the bits do not depend on compiler, processor or device (denormals kept, rounding to nearest).
///
/// Error of w' against the exact formula, given the stored m' and v': at most 1 ulp of max(|w|, |w'|) for the two
/// additions, 4.5 ulp of the step (3 for root, denominator and quotient, 1.5 for the rounded `step_size` and
/// `inverse_sqrt_bias2`; below 4 in all samples tested), and half an ulp of lr weight_decay w. That holds as long as the
/// quotient is no denormal.
///
/// With m = v = +0, gradient 0 and no decay the bits of w stay, those of -0, denormals and infinities included. `apply` is
/// not looked at: that is the loops' part.
[[nodiscard]] [[gnu::always_inline]] HBMOFF_HOST_DEVICE inline AdamWState adamw_update(AdamWState state, float gradient,
                                                                                       const AdamWCoefficients& c) {
  const auto [m, v] = adamw_detail::moments(state.m, state.v, gradient, c);
  return {m, v, adamw_detail::weight(state.w, m, math::sqrt(v), c)};
}

}  // namespace hbmoff

#ifdef __clang__
#pragma float_control(pop)
#endif
