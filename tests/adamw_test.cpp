// The AdamW update: its formula, its error, and the same bits on every path.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/training/adamw.hpp"
#include "hbmoff/training/adamw_host.hpp"
#include "support/random.hpp"

using namespace hbmoff;
using random_numbers::Random;

namespace {

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Distance between a float and its neighbour away from zero.
double ulp(double x) {
  const float f = std::abs(static_cast<float>(x));
  return static_cast<double>(std::nextafter(f, std::numeric_limits<float>::infinity())) - static_cast<double>(f);
}

bool equal(const AdamWState& a, const AdamWState& b) {
  return bits(a.m) == bits(b.m) && bits(a.v) == bits(b.v) && bits(a.w) == bits(b.w);
}

/// All the arrays of a range, with a guard element at either end that no loop may touch.
template <class W, class G>
struct Arrays {
  std::vector<float> m, v, master;
  std::vector<W> weight;
  std::vector<G> gradient;

  Arrays(std::uint64_t count, std::uint64_t seed) {
    Random random{seed};
    for (std::uint64_t i = 0; i < count + 2; ++i) {
      // Every other seed is plain training data, the others any bits.
      const bool wild = seed % 2 == 0;
      m.push_back(wild ? random.any() : random.spread(-20, 1));
      v.push_back(wild ? random.any() : std::abs(random.spread(-40, 1)));
      master.push_back(wild ? random.any() : random.spread(-10, 2));
      weight.push_back(from_float<W>(master.back()));
      gradient.push_back(from_float<G>(wild ? random.any() : random.spread(-20, 3)));
    }
  }

  /// Updates elements [first, first + count) by calling `update` as the host loops are called.
  template <class Update>
  void run(Update update, std::uint64_t first, std::uint64_t count, bool with_master, const AdamWCoefficients& c) {
    update(m.data() + 1 + first, v.data() + 1 + first, weight.data() + 1 + first,
           with_master ? master.data() + 1 + first : nullptr, gradient.data() + 1 + first, count, c);
  }

  bool operator==(const Arrays& other) const {
    return same_bits(m, other.m) && same_bits(v, other.v) && same_bits(master, other.master) &&
           same_bits(weight, other.weight) && same_bits(gradient, other.gradient);
  }
};

/// The plain model: the pure function, one element after the other.
constexpr auto element_by_element = []<class W, class G>(float* m, float* v, W* weight, float* master,
                                                         const G* gradient, std::uint64_t count,
                                                         const AdamWCoefficients& c) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float w = master != nullptr ? master[i] : to_float(weight[i]);
    const AdamWState next = adamw_update({m[i], v[i], w}, to_float(gradient[i]), c);
    m[i] = next.m;
    v[i] = next.v;
    if (master != nullptr) master[i] = next.w;
    weight[i] = from_float<W>(next.w);
  }
};

constexpr auto chosen = [](auto... args) { adamw_update_range(args...); };
constexpr auto scalar = [](auto... args) { adamw_update_range(ScalarIsa{}, args...); };
#if HBMOFF_HAS_AVX2_CODE
constexpr auto avx2 = [](auto... args) { adamw_update_range(Avx2Isa{}, args...); };
#endif

constexpr std::uint64_t sizes[] = {0, 1, 2, 7, 8, 31, 32, 33, 63, 64, 65, 127, 257, 1009};

}  // namespace

TEST_CASE("integer_power is repeated squaring") {
  CHECK(integer_power(0.9, 0) == 1.0);
  CHECK(integer_power(0.0, 0) == 1.0);
  CHECK(integer_power(0.9, 1) == 0.9);
  CHECK(integer_power(0.0, 5) == 0.0);
  CHECK(integer_power(0.5, 1000) == 0x1p-1000);
  CHECK(integer_power(1.0, ~std::uint64_t{0}) == 1.0);
  CHECK(integer_power(0.999, std::uint64_t{1} << 63) == 0.0);
  const double square = 0.9 * 0.9;
  const double fourth = square * square;
  CHECK(integer_power(0.9, 7) == 0.9 * square * fourth);

  for (const double base : {0.9, 0.95, 0.999, 0.9999, static_cast<double>(0.999f)}) {
    long double product = 1;
    for (std::uint64_t n = 1; n <= 4000; ++n) {
      product *= base;
      const auto error = std::abs(static_cast<long double>(integer_power(base, n)) - product) / product;
      REQUIRE(static_cast<double>(error) <= static_cast<double>(n) * 0x1.1p-53);
    }
  }
}

TEST_CASE("coefficients are rounded once from double") {
  for (const std::uint64_t t : {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}, std::uint64_t{1000},
                                std::uint64_t{1'000'000}, std::uint64_t{1} << 31, std::uint64_t{1} << 40}) {
    const float beta1 = 0.9f, beta2 = 0.999f;
    const AdamWCoefficients c = adamw_coefficients(3e-4f, 0.1f, beta1, beta2, 1e-8f, 0.25, t);
    const long double bias1 = 1 - std::pow(static_cast<long double>(beta1), static_cast<long double>(t));
    const long double bias2 = 1 - std::pow(static_cast<long double>(beta2), static_cast<long double>(t));
    // Half an ulp for the rounding, and a trace for the double arithmetic before it.
    const double step = static_cast<double>(3e-4f / bias1);
    const double root = static_cast<double>(1 / std::sqrt(bias2));
    CHECK(std::abs(c.step_size - step) <= 0.5001 * ulp(step));
    CHECK(std::abs(c.inverse_sqrt_bias2 - root) <= 0.5001 * ulp(root));
    CHECK(c.beta1 == beta1);
    CHECK(c.beta2 == beta2);
    CHECK(static_cast<double>(c.one_minus_beta1) == 1 - static_cast<double>(beta1));  // exact above one half
    CHECK(static_cast<double>(c.one_minus_beta2) == 1 - static_cast<double>(beta2));
    CHECK(c.epsilon == 1e-8f);
    CHECK(c.gradient_scale == 0.25f);
    CHECK(c.decay == static_cast<float>(-(static_cast<double>(3e-4f) * static_cast<double>(0.1f))));
    CHECK(c.apply == 1);
  }
  // Far along, the corrections are gone, with no drift left.
  const AdamWCoefficients late = adamw_coefficients(3e-4f, 0.1f, 0.9f, 0.999f, 1e-8f, 1, std::uint64_t{1} << 62);
  CHECK(late.step_size == 3e-4f);
  CHECK(late.inverse_sqrt_bias2 == 1.0f);
  // The first step's corrections cancel: 1 - beta exactly.
  CHECK(bias_correction(0.999, 1) == 1 - 0.999);
  // beta 0 is RMSprop, or plain sign steps.
  const AdamWCoefficients plain = adamw_coefficients(0.5f, 0, 0, 0, 1e-8f, 1, 7);
  CHECK(plain.step_size == 0.5f);
  CHECK(plain.inverse_sqrt_bias2 == 1.0f);

  CHECK(bits(adamw_coefficients(1e-3f, 0.0f, 0.9f, 0.9f, 1e-8f, 1, 1).decay) == 0);
  CHECK(bits(adamw_coefficients(0.0f, 0.1f, 0.9f, 0.9f, 1e-8f, 1, 1).decay) == 0);
}

TEST_CASE("clip_scale") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  CHECK(clip_scale(0.5, 1.0) == 1.0);
  CHECK(clip_scale(1.0, 1.0) == 1.0);
  CHECK(clip_scale(0.0, 1.0) == 1.0);
  CHECK(clip_scale(4.0, 1.0) == 0.25);
  CHECK(clip_scale(std::nextafter(1.0, 2.0), 1.0) < 1.0);
  CHECK(clip_scale(1e30, 0.0) == 1.0);  // no clipping
  CHECK(clip_scale(inf, 0.0) == 1.0);
  CHECK(clip_scale(inf, 1.0) == 0.0);
  CHECK(std::isnan(clip_scale(std::nan(""), 1.0)));
  CHECK(clip_scale(std::nan(""), 0.0) == 1.0);
}

TEST_CASE("the update is the formula, restated") {
  Random random{1};
  for (int i = 0; i < 20000; ++i) {
    const AdamWCoefficients c =
        adamw_coefficients(1e-3f, i % 2 ? 0.1f : 0.0f, 0.9f, 0.95f, 1e-8f, i % 3 ? 1.0 : 0.37, 1 + random.next() % 50);
    const AdamWState s{random.spread(-20, 1), std::abs(random.spread(-40, 1)), random.spread(-10, 2)};
    const float gradient = random.spread(-20, 3);
    // A volatile rounds each product, whatever the compiler would like to contract.
    volatile float g = c.gradient_scale * gradient;
    volatile float a = c.one_minus_beta1 * g;
    volatile float b = c.one_minus_beta2 * g;
    volatile float d = c.beta2 * s.v;
    const float m = std::fma(c.beta1, s.m, a);
    const float v = std::fma(b, g, d);
    const float root = std::sqrt(v);
    const float denominator = std::fma(root, c.inverse_sqrt_bias2, c.epsilon);
    const float quotient = m / denominator;
    const float decayed = i % 2 ? std::fma(c.decay, s.w, s.w) : s.w;
    REQUIRE(equal(adamw_update(s, gradient, c), {m, v, std::fma(-c.step_size, quotient, decayed)}));
  }
}

TEST_CASE("error of one update against a wider reference") {
  Random random{2};
  double worst_in_step_ulps = 0;
  for (int i = 0; i < 200000; ++i) {
    const float rate = std::abs(random.spread(-16, 0));
    const float weight_decay = i % 3 == 0 ? 0.0f : static_cast<float>(random.uniform());
    const float beta1 = static_cast<float>(random.uniform() * 0.999),
                beta2 = static_cast<float>(random.uniform() * 0.9999);
    const float epsilon = i % 2 ? 1e-8f : std::abs(random.spread(-20, 0));
    const std::uint64_t t = 1 + random.next() % (i % 5 ? 10 : 100000);
    const AdamWCoefficients c = adamw_coefficients(rate, weight_decay, beta1, beta2, epsilon, 1, t);
    const AdamWState s{random.spread(-12, 3), std::abs(random.spread(-24, 6)), random.spread(-8, 4)};
    const float gradient = random.spread(-12, 3);
    const AdamWState next = adamw_update(s, gradient, c);

    // The moments themselves: three roundings each, of terms that add up without cancelling in v.
    const long double exact_m =
        static_cast<long double>(beta1) * s.m + (1 - static_cast<long double>(beta1)) * gradient;
    const long double exact_v =
        static_cast<long double>(beta2) * s.v + (1 - static_cast<long double>(beta2)) * gradient * gradient;
    const double scale_m = std::max(std::abs(s.m), std::abs(gradient));
    REQUIRE(std::abs(static_cast<double>(exact_m - next.m)) <= 2 * ulp(scale_m));
    REQUIRE(std::abs(static_cast<double>(exact_v - next.v)) <= 2.5 * ulp(next.v));

    // The weight, given the moments as stored, from the hyper-parameters.
    const long double bias1 = 1 - std::pow(static_cast<long double>(beta1), static_cast<long double>(t));
    const long double bias2 = 1 - std::pow(static_cast<long double>(beta2), static_cast<long double>(t));
    const long double step = rate / bias1 * next.m / (std::sqrt(next.v / bias2) + static_cast<long double>(epsilon));
    const long double exact_w = s.w - static_cast<long double>(rate) * weight_decay * s.w - step;
    const double error = std::abs(static_cast<double>(exact_w - next.w));
    const double of_weight = ulp(std::max(std::abs(static_cast<double>(s.w)), std::abs(static_cast<double>(exact_w))));
    const double of_step = ulp(static_cast<double>(step));
    const double of_decay = 0.5 * ulp(static_cast<double>(static_cast<long double>(rate) * weight_decay * s.w));
    REQUIRE(error <= of_weight + of_decay + 4 * of_step);
    worst_in_step_ulps = std::max(worst_in_step_ulps, (error - of_weight - of_decay) / of_step);
  }
  CHECK(worst_in_step_ulps > 0);  // the weight's own ulp does not hide the step's error in all samples
}

TEST_CASE("fresh moments, no gradient and no decay keep the bits of a weight") {
  const AdamWCoefficients c = adamw_coefficients(0.1f, 0.0f, 0.9f, 0.999f, 1e-8f, 0.5, 1);
  for (const std::uint32_t w : {0u, 0x80000000u, 1u, 0x80000001u, 0x007fffffu, 0x807fffffu, 0x00800000u, 0x3f800000u,
                                0xbf800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f800000u, 0xff800000u}) {
    for (const float gradient : {0.0f, -0.0f}) {
      AdamWState s{0, 0, std::bit_cast<float>(w)};
      for (int step = 0; step < 3; ++step) {
        s = adamw_update(s, gradient, c);
        REQUIRE(bits(s.w) == w);
        REQUIRE(bits(s.m) == 0);
        REQUIRE(bits(s.v) == 0);
      }
    }
  }
  // A learning rate of zero, as at the start of a warm-up, moves nothing either, decay or not.
  const AdamWCoefficients still = adamw_coefficients(0.0f, 0.1f, 0.9f, 0.999f, 1e-8f, 1, 1);
  CHECK(adamw_update({0, 0, 1.5f}, 3.0f, still).w == 1.5f);
  // With decay alone the weight shrinks by exactly that.
  const AdamWCoefficients decay = adamw_coefficients(0.5f, 0.5f, 0.9f, 0.999f, 1e-8f, 1, 1);
  CHECK(adamw_update({0, 0, 2.0f}, 0.0f, decay).w == 1.5f);
}

TEST_CASE("every NaN that is written is the canonical one") {
  const AdamWCoefficients c = adamw_coefficients(0.1f, 0.0f, 0.9f, 0.999f, 1e-8f, 1, 1);
  for (const std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff812345u, 0x7fffffffu, 0xffffffffu}) {
    const AdamWState all = adamw_update({1, 1, 1}, std::bit_cast<float>(nan), c);
    CHECK(bits(all.m) == canonical_nan_bits);
    CHECK(bits(all.v) == canonical_nan_bits);
    CHECK(bits(all.w) == canonical_nan_bits);
    CHECK(bits(adamw_update({1, 1, std::bit_cast<float>(nan)}, 1, c).w) == canonical_nan_bits);
    CHECK(bits(adamw_update({std::bit_cast<float>(nan), 1, 1}, 1, c).w) == canonical_nan_bits);
    CHECK(bits(adamw_update({1, std::bit_cast<float>(nan), 1}, 1, c).w) == canonical_nan_bits);
  }
  constexpr float inf = std::numeric_limits<float>::infinity();
  const AdamWState infinite = adamw_update({0, 0, 1}, inf, c);  // inf / inf
  CHECK(infinite.m == inf);
  CHECK(infinite.v == inf);
  CHECK(bits(infinite.w) == canonical_nan_bits);
  CHECK(bits(adamw_update({0, -1, 1}, 0, c).w) == canonical_nan_bits);  // a root below zero

  // A gradient whose square is beyond fp32 keeps a finite second moment as long as that fits.
  CHECK(std::isfinite(adamw_update({0, 0, 1}, 0x1p66f, c).v));
}

TEST_CASE_TEMPLATE("a range gives the bits of the pure function on every path", Pair, std::pair<float, float>,
                   std::pair<float, bf16>, std::pair<float, fp16>, std::pair<bf16, float>, std::pair<bf16, bf16>,
                   std::pair<bf16, fp16>, std::pair<fp16, float>, std::pair<fp16, bf16>, std::pair<fp16, fp16>) {
  using W = typename Pair::first_type;
  using G = typename Pair::second_type;
  std::uint64_t seed = 0;
  for (const std::uint64_t count : sizes) {
    for (const bool with_master : {false, true}) {
      for (int wild = 0; wild < 2; ++wild) {
        const AdamWCoefficients c =
            adamw_coefficients(1e-2f, seed % 3 ? 0.1f : 0.0f, 0.9f, 0.95f, 1e-8f, seed % 5 ? 1.0 : 0.3, 1 + seed % 7);
        const Arrays<W, G> start{count, seed++};
        Arrays<W, G> expected = start;
        expected.run(element_by_element, 0, count, with_master, c);
        Arrays<W, G> by_choice = start;
        by_choice.run(chosen, 0, count, with_master, c);
        REQUIRE(by_choice == expected);
        Arrays<W, G> by_scalar = start;
        by_scalar.run(scalar, 0, count, with_master, c);
        REQUIRE(by_scalar == expected);
#if HBMOFF_HAS_AVX2_CODE
        if (runs_here(Avx2Isa{})) {
          Arrays<W, G> by_avx2 = start;
          by_avx2.run(avx2, 0, count, with_master, c);
          REQUIRE(by_avx2 == expected);
        }
#endif
        // Skipped: not one byte.
        AdamWCoefficients skip = c;
        skip.apply = 0;
        Arrays<W, G> skipped = start;
        skipped.run(chosen, 0, count, with_master, skip);
        skipped.run(scalar, 0, count, with_master, skip);
        REQUIRE(skipped == start);
      }
    }
  }
}

TEST_CASE("any cut of a range into calls gives the same bits, at any alignment") {
  Random random{3};
  for (int round = 0; round < 60; ++round) {
    const std::uint64_t count = 1 + random.next() % 700;
    const AdamWCoefficients c = adamw_coefficients(1e-2f, 0.1f, 0.9f, 0.95f, 1e-8f, 1, 3);
    const Arrays<bf16, float> start{count, static_cast<std::uint64_t>(round)};
    Arrays<bf16, float> whole = start;
    whole.run(chosen, 0, count, true, c);
    Arrays<bf16, float> cut = start;
    for (std::uint64_t first = 0; first < count;) {
      const std::uint64_t n = std::min(count - first, random.next() % 100);
      if (random.next() & 1) {
        cut.run(chosen, first, n, true, c);
      } else {
        cut.run(scalar, first, n, true, c);
      }
      first += n;
    }
    REQUIRE(cut == whole);
  }
}

TEST_CASE("16-bit weights follow their masters") {
  std::vector<float> m(40), v(40), master(40, 1.0f);
  std::vector<bf16> weight(40, bf16{0});  // the old copy is not read
  const std::vector<float> gradient(40, 1.0f);
  for (std::uint64_t t = 1; t <= 200; ++t) {
    adamw_update_range(m.data(), v.data(), weight.data(), master.data(), gradient.data(), 40,
                       adamw_coefficients(1e-5f, 0.0f, 0.9f, 0.95f, 1e-8f, 1, t));
  }
  // Each step is far below bf16's resolution at 1; only the masters can add them up.
  CHECK(master[39] == doctest::Approx(1 - 200 * 1e-5).epsilon(0.001));
  CHECK(weight[39] == from_float<bf16>(master[39]));
  CHECK(to_float(weight[39]) < 1.0f);
}

TEST_CASE("a thousand steps stay with a double-precision AdamW") {
  constexpr std::uint64_t count = 64;
  std::vector<float> m(count), v(count), w(count), g(count);
  std::vector<double> rm(count), rv(count), rw(count);
  Random random{4};
  for (std::uint64_t i = 0; i < count; ++i) {
    w[i] = random.spread(-3, 1);
    rw[i] = w[i];
  }
  const double beta1 = 0.9f, beta2 = 0.999f, rate = 1e-3f, weight_decay = 0.1f, epsilon = 1e-8f;
  for (std::uint64_t t = 1; t <= 1000; ++t) {
    for (std::uint64_t i = 0; i < count; ++i) {
      g[i] = static_cast<float>(random.uniform() - 0.4);
      rm[i] = beta1 * rm[i] + (1 - beta1) * g[i];
      rv[i] = beta2 * rv[i] + (1 - beta2) * g[i] * g[i];
      const double mhat = rm[i] / (1 - std::pow(beta1, static_cast<double>(t)));
      const double vhat = rv[i] / (1 - std::pow(beta2, static_cast<double>(t)));
      rw[i] -= rate * (mhat / (std::sqrt(vhat) + epsilon) + weight_decay * rw[i]);
    }
    adamw_update_range(m.data(), v.data(), w.data(), static_cast<float*>(nullptr), g.data(), count,
                       adamw_coefficients(1e-3f, 0.1f, 0.9f, 0.999f, 1e-8f, 1, t));
  }
  for (std::uint64_t i = 0; i < count; ++i) CHECK(std::abs(w[i] - rw[i]) < 2e-5);
}

TEST_CASE("the bits are these, with every compiler and processor") {
  const AdamWCoefficients fixed = adamw_coefficients(6e-4f, 0.1f, 0.9f, 0.95f, 1e-8f, 0.125, 3);
  Arrays<bf16, float> arrays{5000, 11};
  for (int step = 0; step < 4; ++step) arrays.run(chosen, 0, 5000, true, fixed);
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](std::uint64_t x) { hash = (hash ^ x) * 0x100000001b3u; };
  for (std::uint64_t i = 0; i < 5002; ++i) {
    add(bits(arrays.m[i]));
    add(bits(arrays.v[i]));
    add(bits(arrays.master[i]));
    add(arrays.weight[i].bits);
  }
  for (std::uint64_t t = 1; t < 100; ++t) {
    const AdamWCoefficients c = adamw_coefficients(6e-4f, 0.1f, 0.9f, 0.95f, 1e-8f, 0.125, t * t * t);
    add(bits(c.step_size));
    add(bits(c.inverse_sqrt_bias2));
  }
  CHECK(hash == 14534272382395348894u);
}
