// Offload policies: what each answers, what is known at compile time, wildcards, nesting, and a policy of a user's own.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/paging/offload_policy.hpp"

using namespace hbmoff;

namespace {

template <class Policy>
Tier home(const Policy& policy, const TensorInfo& info) {
  return OffloadPolicyTraits<Policy>::home(policy, info);
}
template <class Policy>
SaveMode save(const Policy& policy, const TensorInfo& info) {
  return OffloadPolicyTraits<Policy>::save(policy, info);
}

TensorInfo state(std::string name, std::uint64_t count = 1000) {
  return {.name = std::move(name), .role = Role::optimizer_state, .dtype = DType::fp32, .count = count};
}
TensorInfo activation(std::int32_t layer, std::int32_t layers, std::string name = "gelu", bool checkpoint = false) {
  return {.name = std::move(name),
          .role = Role::activation,
          .layer = layer,
          .layers = layers,
          .checkpoint = checkpoint,
          .dtype = DType::bf16,
          .count = 64};
}

// Policies as a user writes them.
struct EmbeddingsOnly {
  Tier home(const TensorInfo& info) const { return info.name == "wte" ? Tier::pinned_host : Tier::hbm; }
};
struct EvenLayers {
  SaveMode save(const TensorInfo& info) const { return info.layer % 2 == 0 ? SaveMode::offload : SaveMode::keep; }
};
struct ConstantHome {
  static constexpr Tier home_tier = Tier::pinned_host;
};
struct Nothing {};
struct WrongType {
  int home(const TensorInfo&) const { return 0; }
};
struct NotCopyable {
  Tier home(const TensorInfo&) const { return Tier::hbm; }
  NotCopyable(const NotCopyable&) = delete;
};

template <class Policy>
constexpr bool resident = OffloadPolicyTraits<Policy>::state_always_resident;
template <class Policy>
constexpr bool kept = OffloadPolicyTraits<Policy>::activations_always_kept;

static_assert(OffloadPolicy<KeepResident> && resident<KeepResident> && kept<KeepResident>);
static_assert(OffloadPolicy<OffloadAll> && !resident<OffloadAll> && !kept<OffloadAll>);
static_assert(OffloadPolicy<OffloadOptimizerState> && !resident<OffloadOptimizerState> && kept<OffloadOptimizerState>);
static_assert(OffloadPolicy<OffloadActivations> && resident<OffloadActivations> && !kept<OffloadActivations>);
static_assert(OffloadPolicy<OffloadLargerThan> && !resident<OffloadLargerThan> && !kept<OffloadLargerThan>);
static_assert(OffloadPolicy<OffloadMatching> && !resident<OffloadMatching> && !kept<OffloadMatching>);
static_assert(OffloadPolicy<KeepLastLayers<>> && !kept<KeepLastLayers<>>);
static_assert(OffloadPolicy<RecomputeFirstLayers<>> && !kept<RecomputeFirstLayers<>>);
static_assert(OffloadPolicy<RecomputeMatching<>> && !kept<RecomputeMatching<>>);
static_assert(OffloadPolicy<EmbeddingsOnly> && !resident<EmbeddingsOnly> && !kept<EmbeddingsOnly>);
static_assert(OffloadPolicy<EvenLayers> && resident<EvenLayers> && !kept<EvenLayers>);
static_assert(OffloadPolicy<ConstantHome> && !resident<ConstantHome> && !kept<ConstantHome>);
static_assert(!OffloadPolicy<Nothing> && !OffloadPolicy<WrongType> && !OffloadPolicy<NotCopyable> &&
              !OffloadPolicy<int>);

}  // namespace

TEST_CASE("the shipped policies") {
  const TensorInfo moments = state("h.0.attn.w"), saved = activation(1, 4);
  CHECK(home(KeepResident{}, moments) == Tier::hbm);
  CHECK(save(KeepResident{}, saved) == SaveMode::keep);
  CHECK(home(OffloadAll{}, moments) == Tier::pinned_host);
  CHECK(save(OffloadAll{}, saved) == SaveMode::offload);
  CHECK(home(OffloadOptimizerState{}, moments) == Tier::pinned_host);
  CHECK(home(OffloadOptimizerState{}, {.name = "w", .role = Role::weight}) == Tier::hbm);
  CHECK(save(OffloadOptimizerState{}, saved) == SaveMode::keep);
  CHECK(home(OffloadActivations{}, moments) == Tier::hbm);
  CHECK(save(OffloadActivations{}, saved) == SaveMode::offload);

  const OffloadLargerThan larger{.threshold = 4000_B};
  CHECK(home(larger, state("at the threshold", 1000)) == Tier::hbm);
  CHECK(home(larger, state("above", 1001)) == Tier::pinned_host);
  CHECK(home(larger, state("nothing", 0)) == Tier::hbm);
  CHECK(home(larger, state("past 2^32 bytes", std::uint64_t{1} << 40)) == Tier::pinned_host);
  CHECK(save(larger, saved) == SaveMode::keep);  // follows the home where nothing else is said
  TensorInfo large = saved;
  large.count = 2001;
  CHECK(save(larger, large) == SaveMode::offload);
}

TEST_CASE("patterns") {
  const auto yes = [](std::string_view pattern, std::string_view name) {
    CHECK_MESSAGE(matches(pattern, name), pattern << " / " << name);
  };
  const auto no = [](std::string_view pattern, std::string_view name) {
    CHECK_MESSAGE(!matches(pattern, name), pattern << " / " << name);
  };
  yes("", "");
  no("", "a");
  no("a", "");
  yes("*", "");
  yes("**", "");
  yes("*", "anything at all");
  no("?", "");
  yes("?", "x");
  no("?", "xy");
  yes("wte", "wte");
  no("wte", "wte2");
  no("wte2", "wte");
  yes("h.*.w", "h.0.attn.w");
  no("h.*.w", "h.0.attn.b");
  yes("*attn*", "h.3.attn.w");
  yes("*.w", "a.w.w");  // the star has to take more than the first try
  yes("a*b*c", "aXbYbZc");
  no("a*b*c", "aXbYbZ");
  yes("h.?.*", "h.7.mlp");
  no("h.?.*", "h.17.mlp");
  yes("*?*", "x");
  no("*?*", "");
  yes("a**b", "ab");
  yes("a*", "a");
  no("A", "a");
  // Many stars over a long name: no blow-up.
  yes("*a*a*a*a*a*a*a*a*a*b", std::string(5000, 'a') + "b");
  no("*a*a*a*a*a*a*a*a*a*b", std::string(5000, 'a'));
  static_assert(matches("h.*", "h.1") && !matches("h.*", "g.1"));

  const OffloadMatching some{{"wte", "h.?.mlp.*"}};
  CHECK(home(some, state("wte")) == Tier::pinned_host);
  CHECK(home(some, state("h.3.mlp.w")) == Tier::pinned_host);
  CHECK(home(some, state("h.3.attn.w")) == Tier::hbm);
  CHECK(home(OffloadMatching{}, state("wte")) == Tier::hbm);
}

TEST_CASE("layers: kept at the end, recomputed at the start, nested either way; a checkpoint is never recomputed") {
  const KeepLastLayers last{2};
  for (std::int32_t layer = 0; layer < 6; ++layer) {
    CHECK(save(last, activation(layer, 6)) == (layer >= 4 ? SaveMode::keep : SaveMode::offload));
  }
  CHECK(save(last, activation(-1, 6)) == SaveMode::offload);  // of no layer
  CHECK(save(KeepLastLayers{0}, activation(5, 6)) == SaveMode::offload);
  CHECK(save(KeepLastLayers{9}, activation(0, 6)) == SaveMode::keep);
  CHECK(home(last, state("m")) == Tier::pinned_host);
  CHECK(home(KeepLastLayers{2, KeepResident{}}, state("m")) == Tier::hbm);

  const RecomputeFirstLayers first{3};
  for (std::int32_t layer = 0; layer < 6; ++layer) {
    CHECK(save(first, activation(layer, 6)) == (layer < 3 ? SaveMode::recompute : SaveMode::keep));
    CHECK(save(first, activation(layer, 6, "input", true)) == SaveMode::keep);
  }
  CHECK(save(first, activation(-1, 6)) == SaveMode::keep);
  CHECK(home(first, state("m")) == Tier::hbm);

  const RecomputeFirstLayers over_offload{3, OffloadAll{}};
  CHECK(save(over_offload, activation(1, 6)) == SaveMode::recompute);
  CHECK(save(over_offload, activation(1, 6, "input", true)) == SaveMode::offload);
  CHECK(save(over_offload, activation(3, 6)) == SaveMode::offload);
  CHECK(home(over_offload, state("m")) == Tier::pinned_host);

  // The outer one has the first word: layers 4 and 5 are kept, 0 to 2 recomputed, 3 offloaded.
  const KeepLastLayers nested{2, RecomputeFirstLayers{3, OffloadAll{}}};
  const RecomputeFirstLayers swapped{5, KeepLastLayers{2}};
  for (std::int32_t layer = 0; layer < 6; ++layer) {
    CHECK(save(nested, activation(layer, 6)) == (layer >= 4  ? SaveMode::keep
                                                 : layer < 3 ? SaveMode::recompute
                                                             : SaveMode::offload));
    CHECK(save(nested, activation(layer, 6, "input", true)) == (layer >= 4 ? SaveMode::keep : SaveMode::offload));
    CHECK(save(swapped, activation(layer, 6)) == (layer < 5 ? SaveMode::recompute : SaveMode::keep));
    CHECK(save(swapped, activation(layer, 6, "input", true)) == (layer >= 4 ? SaveMode::keep : SaveMode::offload));
  }

  const RecomputeMatching by_name{{"gelu", "*norm*"}, KeepLastLayers{1}};
  CHECK(save(by_name, activation(5, 6, "gelu")) == SaveMode::recompute);
  CHECK(save(by_name, activation(0, 6, "ln1.normed")) == SaveMode::recompute);
  CHECK(save(by_name, activation(0, 6, "ln1.normed", true)) == SaveMode::offload);
  CHECK(save(by_name, activation(0, 6, "qkv")) == SaveMode::offload);
  CHECK(save(by_name, activation(5, 6, "qkv")) == SaveMode::keep);
  CHECK(home(by_name, state("m")) == Tier::pinned_host);
  CHECK(save(RecomputeMatching{{"x"}}, activation(0, 6)) == SaveMode::keep);
}

TEST_CASE("a policy of three lines") {
  CHECK(home(EmbeddingsOnly{}, state("wte")) == Tier::pinned_host);
  CHECK(home(EmbeddingsOnly{}, state("wpe")) == Tier::hbm);
  CHECK(save(EmbeddingsOnly{}, activation(0, 2)) == SaveMode::keep);
  CHECK(save(EmbeddingsOnly{}, activation(0, 2, "wte")) == SaveMode::offload);
  CHECK(home(EvenLayers{}, state("wte")) == Tier::hbm);
  CHECK(save(EvenLayers{}, activation(2, 4)) == SaveMode::offload);
  CHECK(save(EvenLayers{}, activation(3, 4)) == SaveMode::keep);
  CHECK(save(KeepLastLayers{1, EvenLayers{}}, activation(2, 3)) == SaveMode::keep);
  CHECK(save(ConstantHome{}, activation(0, 2)) == SaveMode::offload);
}
