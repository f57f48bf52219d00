// The estimate of what training takes equals, to the byte, what the arenas then hand out.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/device/host_device.hpp"
#include "hbmoff/planning/estimate.hpp"
#include "support/adamw_model.hpp"

using namespace hbmoff;

namespace {

struct Random {
  std::uint64_t state;
  std::uint64_t below(std::uint64_t n) { return (state = adamw_test::hash(state)) % n; }
  /// Spread over the powers of two up to 2^bits; 0 now and then.
  std::uint64_t spread(std::uint64_t bits) {
    const std::uint64_t most = std::uint64_t{1} << below(bits + 1);
    return below(most + 1);
  }
};

/// Decides by name, layer and seed: any mixture of places may come out.
struct AnyPolicy {
  std::uint64_t seed;
  [[nodiscard]] std::uint64_t draw(const TensorInfo& info) const {
    std::uint64_t h = seed + static_cast<std::uint64_t>(info.layer + 1);
    for (const char c : info.name) h = adamw_test::hash(h + static_cast<unsigned char>(c));
    return h;
  }
  [[nodiscard]] Tier home(const TensorInfo& info) const { return draw(info) & 1 ? Tier::pinned_host : Tier::hbm; }
  [[nodiscard]] SaveMode save(const TensorInfo& info) const { return static_cast<SaveMode>(draw(info) % 3); }
};

/// One training's memory: what is added to an optimizer, and what each layer saves.
struct Configuration {
  std::vector<TensorInfo> weights;
  PagedAdamWOptions adamw;
  std::vector<BundleLayout> layouts;
  ActivationStoreOptions activations;
};

Configuration draw_configuration(Random& random) {
  Configuration c;
  const std::uint64_t tensors = random.below(40);
  std::uint64_t elements = 0;
  for (std::uint64_t t = 0; t < tensors; ++t) {
    c.weights.push_back({.name = "w" + std::to_string(t),
                         .role = Role::weight,
                         .dtype = static_cast<DType>(random.below(3)),
                         .count = random.spread(random.below(3) == 0 ? 24 : 12)});
    elements += c.weights.back().count;
  }
  // Not more than a few hundred pages.
  c.adamw.page = Bytes{768 + random.spread(18) + elements * 12 / 300};
  c.adamw.depth = 1 + static_cast<std::uint32_t>(random.below(5));
  const std::uint64_t layers = random.below(12);
  const std::uint64_t kinds = 1 + random.below(7);
  BundleLayout layout;
  for (std::uint64_t l = 0; l < layers; ++l) {
    if (l == 0 || random.below(3) == 0) {
      layout.tensors.clear();
      layout.rows = 1 + random.below(16);
      for (std::uint64_t i = 0; i < kinds; ++i) {
        const std::uint64_t count = layout.rows * random.spread(16);
        layout.tensors.push_back(
            {.info = {.name = "a" + std::to_string(i), .dtype = static_cast<DType>(random.below(3)), .count = count},
             .checkpoint = random.below(4) == 0,
             .buffer = random.below(3)});
      }
    }
    c.layouts.push_back(layout);
  }
  c.activations.depth = 1 + static_cast<std::uint32_t>(random.below(5));
  return c;
}

template <class Policy>
MemoryEstimate estimate(const Configuration& c, const Policy& policy) {
  MemoryEstimate sum = estimate_adamw(std::span<const TensorInfo>{c.weights}, policy, c.adamw);
  sum += estimate_activations(policy, std::span<const BundleLayout>{c.layouts}, c.activations);
  for (const TensorInfo& weight : c.weights) {
    sum += estimate_buffer(Tier::hbm, Role::weight, weight.bytes());
    sum += estimate_buffer(Tier::hbm, Role::gradient, Bytes{4 * weight.count});
  }
  return sum;
}

/// Arenas of just these capacities, on a device that touches no memory, and the training in them.
template <class Policy>
void train(const Configuration& c, const Policy& policy, Bytes hbm_capacity, Bytes host_capacity,
           const MemoryEstimate* expected) {
  HostDevice device{{.hbm_capacity = 1_TiB, .no_touch = true}};
  HbmArena hbm{device, hbm_capacity, {.max_blocks = 2048}};
  PinnedHostArena host{device, host_capacity, {.max_blocks = 2048}};
  const HostDevice::Stream stream = device.create_stream("compute");
  std::vector<HbmArena<HostDevice>::Buffer> weights, gradients;
  for (const TensorInfo& weight : c.weights) {
    weights.push_back(hbm.allocate(weight.bytes(), weight.name, Role::weight, stream));
    gradients.push_back(hbm.allocate(Bytes{4 * weight.count}, weight.name, Role::gradient, stream));
  }
  PagedAdamW<HostDevice, Policy, dynamic_depth> optimizer{hbm, host, policy, c.adamw};
  for (std::size_t t = 0; t < c.weights.size(); ++t) {
    adamw_test::with_type(c.weights[t].dtype, [&]<class W>(W) {
      optimizer.add(c.weights[t], weights[t].as<W>(), gradients[t].as<float>());
      if (t % 4 == 0) {  // a tied tensor takes nothing
        TensorInfo alias = c.weights[t];
        alias.name += " again";
        if (alias.count != 0) optimizer.add(alias, weights[t].as<W>(), gradients[t].as<float>());
      }
    });
  }
  ActivationStore<HostDevice, Policy, dynamic_depth> store{hbm, host, policy, c.layouts, c.activations};
  optimizer.prepare(stream);
  const auto check = [&] {
    for (const Tier tier : {Tier::hbm, Tier::pinned_host}) {
      const ArenaUsage usage = tier == Tier::hbm ? hbm.usage() : host.usage();
      CHECK(usage.used == expected->total(tier));
      CHECK(usage.high_water == expected->total(tier));
      for (std::uint32_t role = 0; role < role_count; ++role)
        CHECK(usage.by_role[role] == expected->of(tier, static_cast<Role>(role)));
    }
  };
  if (expected != nullptr) check();
  for (int s = 0; s < 2; ++s) {
    for (std::uint32_t l = 0; l < store.layers(); ++l) store.save(l, stream).commit();
    for (std::uint32_t l = store.layers(); l-- > 0;) static_cast<void>(store.restore(l, stream));
    optimizer.step(stream);
  }
  optimizer.refresh(stream);
  if (expected != nullptr) check();
  device.synchronize(stream);
}

template <class Policy>
void check_estimate(const Configuration& c, const Policy& policy) {
  const MemoryEstimate expected = estimate(c, policy);
  const Bytes hbm = expected.total(Tier::hbm), host = expected.total(Tier::pinned_host);
  // It fits, to the byte, and it does not fit with one unit of the arenas less.
  train(c, policy, hbm, host, &expected);
  CHECK_THROWS_AS(train(c, policy, hbm - Bytes{256}, host, nullptr), OutOfMemory);
  CHECK_THROWS_AS(train(c, policy, hbm, host - Bytes{256}, nullptr), OutOfMemory);
}

}  // namespace

TEST_CASE("random trainings take what was estimated, to the byte, in both tiers and by role") {
  Random random{2026};
  for (std::uint64_t i = 0; i < 25; ++i) {
    const Configuration c = draw_configuration(random);
    INFO("configuration ", i);
    check_estimate(c, AnyPolicy{random.below(1000)});
    check_estimate(c, OffloadAll{});
    check_estimate(c, KeepResident{});
  }
}

TEST_CASE("large trainings, whose blocks and arrays are staggered, as well") {
  Configuration c;
  c.adamw = {.page = 256_MiB, .depth = 2};
  for (const std::uint64_t count : {std::uint64_t{1} << 25, (std::uint64_t{1} << 26) + 1, std::uint64_t{5}}) {
    c.weights.push_back({.name = "w" + std::to_string(count), .count = count});
    c.weights.push_back({.name = "b" + std::to_string(count), .dtype = DType::bf16, .count = count});
  }
  c.layouts.assign(6, BundleLayout{{{.info = {.name = "x", .count = 1 << 22}},
                                    {.info = {.name = "y", .dtype = DType::bf16, .count = 3 << 20}}},
                                   16});
  check_estimate(c, AnyPolicy{3});
  check_estimate(c, OffloadAll{});
  check_estimate(c, KeepResident{});
}

TEST_CASE("no page is larger than asked for; no two of its arrays start almost a multiple of 128 MiB apart") {
  constexpr std::uint64_t mebi_128 = 128 << 20;
  std::uint64_t cases = 0, larger = 0, close = 0, lost = 0;
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const std::uint64_t arrays = dtype == DType::fp32 ? 2 : 3;
    // Pages and tensors around multiples of 64 MiB per array, where all the care is needed.
    for (const std::uint64_t half : {1u, 2u, 3u, 4u}) {
      for (std::uint64_t d = 0; d < 120; d += 1 + half % 2) {
        const Bytes page{half * mebi_128 / 2 * arrays + (d - 40) * 256};  // from below the multiple to above it
        for (std::uint64_t e = 0; e < 80; ++e) {
          const std::uint64_t count = half * mebi_128 / 8 + (e - 40) * 64 - (e & 1) * 3;
          const std::vector<TensorInfo> weights{{.name = "w", .dtype = dtype, .count = count}};
          const AdamWLayout layout = adamw_layout(std::span<const TensorInfo>{weights}, OffloadAll{}, page);
          ++cases;
          larger += layout.slot_bytes > page ? 1 : 0;
          std::uint64_t elements = 0;
          for (const AdamWPage& p : layout.pages) {
            elements += p.elements;
            larger += p.bytes() > layout.slot_bytes ? 1 : 0;
            for (std::uint64_t apart = p.stride(); apart < arrays * p.stride(); apart += p.stride()) {
              const std::uint64_t phase = apart % mebi_128;
              if (apart > mebi_128 / 2 && (phase < 4160 || phase > mebi_128 - 4160)) ++close;
            }
          }
          lost += elements != count ? 1 : 0;
        }
      }
    }
  }
  CHECK(cases > 10000);
  CHECK(larger == 0);
  CHECK(close == 0);
  CHECK(lost == 0);
}

TEST_CASE("estimates add up") {
  MemoryEstimate a = estimate_buffer(Tier::hbm, Role::weight, 1000_B);
  CHECK(a.of(Tier::hbm, Role::weight) == 1024_B);
  CHECK(a.total(Tier::hbm) == 1024_B);
  CHECK(a.total(Tier::pinned_host) == Bytes{});
  a.add(Tier::hbm, Role::weight, 1_B);
  a += estimate_buffer(Tier::pinned_host, Role::other, 2_MiB);
  CHECK(a.of(Tier::hbm, Role::weight) == 1280_B);
  CHECK(a.of(Tier::pinned_host, Role::other) == arena_footprint(2_MiB));
  const MemoryEstimate b = a + a;
  CHECK(b.total(Tier::hbm) == 2560_B);
  CHECK(b != a);
  CHECK(estimate_buffer(Tier::hbm, Role::weight, Bytes{}) == MemoryEstimate{});
  // One layout for all layers is the same as one for each.
  const BundleLayout layout{{{.info = {.name = "x", .count = 300}}}, 3};
  CHECK(estimate_activations(OffloadAll{}, 4, layout, {}) ==
        estimate_activations(OffloadAll{}, std::vector<BundleLayout>(4, layout), {}));
  CHECK(estimate_activations(OffloadAll{}, 4, layout, {}).total(Tier::hbm) == Bytes{3 * 1280});
  CHECK(estimate_activations(OffloadAll{}, 4, layout, {}).total(Tier::pinned_host) == Bytes{4 * 1280});
}
