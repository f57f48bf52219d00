// The sum of squares: one fixed tree, whatever the cut.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <sys/mman.h>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/isa.hpp"
#include "hbmoff/training/norm.hpp"
#include "support/random.hpp"

using namespace hbmoff;
using random_numbers::Random;

namespace {

/// Either sign, magnitudes over so many powers of two that sums round at every addition; finite in the element type.
template <class G = float>
float wide(Random& random) {
  return random.spread(-20, std::is_same_v<G, fp16> ? 15 : 20);
}

std::uint64_t bits(double x) { return std::bit_cast<std::uint64_t>(x); }

template <class G>
std::vector<G> gradient(std::uint64_t count, std::uint64_t seed) {
  Random random{seed};
  std::vector<G> g;
  g.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) g.push_back(from_float<G>(wide<G>(random)));
  return g;
}

/// The documented order, restated without vectors, stacks or tails: lanes of a leaf, then halves.
template <class G>
double leaf_model(const G* data, std::uint64_t count) {
  double lanes[32] = {};
  for (std::uint64_t i = 0; i < count; ++i) {
    const double x = to_float(data[i]);
    volatile double square = x * x;
    lanes[i % 32] += square;
  }
  for (std::uint64_t half : {16u, 8u, 4u, 2u, 1u}) {
    for (std::uint64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

/// The tree above the leaves, level by level.
double levels_model(std::vector<double> level) {
  if (level.empty()) return 0.0;
  while (level.size() > 1) {
    std::vector<double> above;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      above.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    }
    level = above;
  }
  return level[0];
}

template <class G>
std::vector<double> leaves_of(const std::vector<G>& g) {
  std::vector<double> leaves;
  for (std::uint64_t first = 0; first < g.size(); first += norm_leaf) {
    leaves.push_back(leaf_model(g.data() + first, std::min<std::uint64_t>(norm_leaf, g.size() - first)));
  }
  return leaves;
}

constexpr std::uint64_t sizes[] = {0,    1,    2,    7,    31,   32,    33,    63,    4095,
                                   4096, 4097, 8191, 8192, 8209, 12289, 20479, 40961, 65537};

}  // namespace

TEST_CASE("leaf_count") {
  CHECK(leaf_count(0) == 0);
  CHECK(leaf_count(1) == 1);
  CHECK(leaf_count(norm_leaf) == 1);
  CHECK(leaf_count(norm_leaf + 1) == 2);
  CHECK(leaf_count((std::uint64_t{1} << 31) + 1) == (std::uint64_t{1} << 19) + 1);
  CHECK(leaf_count(~std::uint64_t{0}) == std::uint64_t{1} << 52);
}

TEST_CASE_TEMPLATE("the sum is the documented tree, on every path", G, float, bf16, fp16) {
  for (const std::uint64_t count : sizes) {
    const std::vector<G> g = gradient<G>(count, count);
    const std::vector<double> leaves = leaves_of(g);
    REQUIRE(leaves.size() == leaf_count(count));
    for (std::uint64_t k = 0; k < leaves.size(); ++k) {
      const G* data = g.data() + k * norm_leaf;
      const std::uint64_t n = std::min<std::uint64_t>(norm_leaf, count - k * norm_leaf);
      REQUIRE(bits(leaf_sum_of_squares(data, n)) == bits(leaves[k]));
      REQUIRE(bits(leaf_sum_of_squares(ScalarIsa{}, data, n)) == bits(leaves[k]));
#if HBMOFF_HAS_AVX2_CODE
      if (runs_here(Avx2Isa{})) REQUIRE(bits(leaf_sum_of_squares(Avx2Isa{}, data, n)) == bits(leaves[k]));
#endif
    }
    REQUIRE(std::isfinite(levels_model(leaves)));  // an infinity would hide every order
    REQUIRE(bits(tree_sum(leaves.data(), leaves.size())) == bits(levels_model(leaves)));
    REQUIRE(bits(sum_of_squares(g.data(), count)) == bits(levels_model(leaves)));
  }
}

TEST_CASE("tree_sum pairs neighbours level by level, for every number of leaves") {
  Random random{7};
  std::vector<double> leaves;
  for (std::uint64_t n = 0; n < 600; ++n) {
    REQUIRE(bits(tree_sum(leaves.data(), n)) == bits(levels_model(leaves)));
    leaves.push_back(std::abs(static_cast<double>(wide(random))));
  }
  // The order is what is tested: a running sum gives other bits.
  double running = 0;
  for (double x : leaves) running += x;
  CHECK(bits(running) != bits(tree_sum(leaves.data(), leaves.size())));
}

TEST_CASE("any split into whole leaves gives the same bits") {
  const std::uint64_t count = 40961;
  const std::vector<float> g = gradient<float>(count, 5);
  const double whole = sum_of_squares(g.data(), count);
  Random random{8};
  for (int round = 0; round < 50; ++round) {
    // Pieces of whole leaves are summed leaf by leaf, in any order, each from a copy at another address.
    std::vector<double> leaves(leaf_count(count));
    std::vector<std::uint64_t> starts;
    for (std::uint64_t leaf = 0; leaf < leaves.size(); leaf += 1 + random.next() % 4) starts.push_back(leaf);
    for (std::size_t i = starts.size(); i-- > 0;) {
      const std::uint64_t last = i + 1 < starts.size() ? starts[i + 1] : leaves.size();
      const std::uint64_t first_element = starts[i] * norm_leaf;
      const std::uint64_t end_element = std::min(count, last * norm_leaf);
      std::vector<float> page(3 + end_element - first_element);
      std::copy(g.data() + first_element, g.data() + end_element, page.data() + 3);
      for (std::uint64_t leaf = starts[i]; leaf < last; ++leaf) {
        const std::uint64_t at = (leaf - starts[i]) * norm_leaf;
        leaves[leaf] = leaf_sum_of_squares(page.data() + 3 + at, std::min(norm_leaf, count - leaf * norm_leaf));
      }
    }
    REQUIRE(bits(tree_sum(leaves.data(), leaves.size())) == bits(whole));
  }
}

TEST_CASE("the sum is close to the exact one") {
  for (const std::uint64_t count : sizes) {
    const std::vector<float> g = gradient<float>(count, count + 1);
    long double exact = 0;
    for (float x : g) exact += static_cast<long double>(x) * static_cast<long double>(x);
    // At most 128 additions in a lane, 5 among lanes and one per level of the tree.
    const long double bound = exact * 0x1p-53L * 150;
    CHECK(std::abs(static_cast<long double>(sum_of_squares(g.data(), count)) - exact) <= bound);
  }
  // Where the sum is exact, it is exact: denormals, the largest floats, small integers.
  const std::vector<float> denormals(4097, std::numeric_limits<float>::denorm_min());
  CHECK(sum_of_squares(denormals.data(), 4097) == 4097 * 0x1p-298);
  const std::vector<float> largest(8192, std::numeric_limits<float>::max());
  constexpr double max = std::numeric_limits<float>::max();
  CHECK(sum_of_squares(largest.data(), 8192) == doctest::Approx(8192 * max * max));
  CHECK(std::isfinite(sum_of_squares(largest.data(), 8192)));
  std::vector<bf16> ones(5003, from_float<bf16>(-1.0f));
  CHECK(sum_of_squares(ones.data(), 5003) == 5003);
}

TEST_CASE("zeros, and nothing, sum to +0") {
  CHECK(bits(sum_of_squares<float>(nullptr, 0)) == 0);
  CHECK(bits(leaf_sum_of_squares<float>(nullptr, 0)) == 0);
  CHECK(bits(tree_sum(nullptr, 0)) == 0);
  CHECK(bits(TreeSum{}.total()) == 0);
  const std::vector<float> zeros(4097, -0.0f);
  CHECK(bits(sum_of_squares(zeros.data(), 4097)) == 0);
}

TEST_CASE("finite exactly when every element is") {
  const std::uint64_t count = 3 * norm_leaf + 37;
  std::vector<float> g = gradient<float>(count, 9);
  for (float& x : g) x = x > 0 ? std::numeric_limits<float>::max() : std::numeric_limits<float>::lowest();
  REQUIRE(std::isfinite(sum_of_squares(g.data(), count)));
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (std::uint64_t at : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{31}, std::uint64_t{32}, norm_leaf - 1,
                           norm_leaf, 2 * norm_leaf + 17, 3 * norm_leaf, count - 33, count - 1}) {
    const float kept = g[at];
    for (const float bad : {inf, -inf}) {
      g[at] = bad;
      REQUIRE(sum_of_squares(g.data(), count) == std::numeric_limits<double>::infinity());
    }
    for (const std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu}) {
      g[at] = std::bit_cast<float>(nan);
      REQUIRE(bits(sum_of_squares(g.data(), count)) == 0x7fffffffffffffffu);
      const std::uint64_t leaf = at / norm_leaf * norm_leaf;
      REQUIRE(bits(leaf_sum_of_squares(g.data() + leaf, at - leaf + 1)) == 0x7fffffffffffffffu);
      // Beside an infinity as well.
      const std::uint64_t other = (at + 1) % count;
      const float also_kept = g[other];
      g[other] = inf;
      REQUIRE(bits(sum_of_squares(g.data(), count)) == 0x7fffffffffffffffu);
      g[other] = also_kept;
    }
    g[at] = kept;
  }
  REQUIRE(std::isfinite(sum_of_squares(g.data(), count)));
  // Leaf sums that a caller made up are taken the same way.
  const double leaves[] = {1.0, -std::numeric_limits<double>::quiet_NaN(), 2.0};
  CHECK(bits(tree_sum(leaves, 3)) == 0x7fffffffffffffffu);
}

TEST_CASE("the largest fp16 and bf16 values") {
  const std::vector<fp16> half(33, fp16{0x7bff});
  CHECK(sum_of_squares(half.data(), 33) == 33 * 65504.0 * 65504.0);
  const std::vector<fp16> infinite(1, fp16{0xfc00});
  CHECK(sum_of_squares(infinite.data(), 1) == std::numeric_limits<double>::infinity());
  const std::vector<bf16> nan(1, bf16{0xff81});
  CHECK(bits(sum_of_squares(nan.data(), 1)) == 0x7fffffffffffffffu);
}

TEST_SUITE("nightly") {
  TEST_CASE("indices past 2^31") {
    // Pages that are only read all share one page of zeros: this takes no memory to speak of.
    const std::uint64_t count = (std::uint64_t{1} << 31) + 4099;
    void* memory =
        mmap(nullptr, count * sizeof(bf16), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    bf16* g = static_cast<bf16*>(memory);
    g[3] = from_float<bf16>(2.0f);
    g[std::uint64_t{1} << 31] = from_float<bf16>(3.0f);
    g[count - 1] = from_float<bf16>(-4.0f);
    CHECK(sum_of_squares(g, count) == 4 + 9 + 16);
    CHECK(munmap(memory, count * sizeof(bf16)) == 0);
  }
}
