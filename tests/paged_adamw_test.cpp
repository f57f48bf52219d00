// PagedAdamW against a plain loop over all tensors: the same bits for every policy, page size, depth and type.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/training/paged_adamw.hpp"
#include "support/adamw_model.hpp"
#include "support/watchdog.hpp"

using namespace adamw_test;

namespace {

constexpr std::uint32_t groups_used = 6;
constexpr AdamWStep clipped{.gradient_scale = 0.25f, .max_norm = 1.5f};

// Three clipped steps of the mixed tensors with six groups, once by the plain loop.
const AdamWModel& three_steps() {
  static const AdamWModel model = [] {
    AdamWModel m{mixed_tensors(groups_used), 7};
    for (std::uint64_t s = 1; s <= 3; ++s) m.step({.seed = 7, .step = s}, groups_at(groups_used, s), clipped);
    return m;
  }();
  return model;
}

template <std::uint32_t Depth, class Policy>
void check_three_steps(Policy policy, PagedAdamWOptions options) {
  INFO("page ", options.page.count(), " depth ", Depth, " run-time depth ", options.depth);
  Rig rig{mixed_tensors(groups_used)};
  {
    PagedAdamW<LoggingDevice, Policy, Depth> optimizer{rig.hbm, rig.host, policy, options};
    set_groups(optimizer, groups_at(groups_used, 1), true);
    rig.add_all(optimizer);
    for (std::uint64_t s = 1; s <= 3; ++s) {
      set_groups(optimizer, groups_at(groups_used, s));
      rig.write_gradients({.seed = 7, .step = s});
      CHECK(optimizer.step(rig.stream, clipped) == s);
    }
    rig.check_equal(optimizer, three_steps());
  }
  for (auto& buffer : rig.weights) buffer = {};
  for (auto& buffer : rig.gradients) buffer = {};
}

PagedAdamWOptions with_page(Bytes page) { return {.page = page, .fill_evicted = true}; }

std::vector<TensorSpec> float_tensors(std::initializer_list<std::uint64_t> counts) {
  std::vector<TensorSpec> specs;
  for (const std::uint64_t count : counts) specs.push_back({"t" + std::to_string(specs.size()), count});
  return specs;
}

}  // namespace

TEST_CASE("the clipping of the runs below does clip") {
  AdamWModel model{mixed_tensors(), 7};
  CHECK(model.step({.seed = 7}, groups_at(1, 1), clipped).norm > 3.0);
}

TEST_CASE("the bits are those of a plain loop for every page size and depth") {
  const Watchdog watchdog{"page sizes and depths", std::chrono::seconds{240}};
  for (const Bytes page : {Bytes{768}, 7_KiB, 64_KiB, 1_MiB}) {
    check_three_steps<1>(OffloadOptimizerState{}, with_page(page));
    check_three_steps<2>(OffloadOptimizerState{}, with_page(page));
    check_three_steps<3>(OffloadOptimizerState{}, with_page(page));
    check_three_steps<4>(OffloadOptimizerState{}, with_page(page));
    check_three_steps<dynamic_depth>(OffloadOptimizerState{},
                                     {.page = page, .depth = page == 7_KiB ? 1u : 5u, .fill_evicted = true});
  }
}

TEST_CASE("the bits are those of a plain loop for every policy") {
  const Watchdog watchdog{"policies", std::chrono::seconds{240}};
  for (const Bytes page : {Bytes{768}, 7_KiB, 1_MiB}) {
    check_three_steps<3>(KeepResident{}, with_page(page));
    check_three_steps<3>(OffloadAll{}, with_page(page));
    check_three_steps<3>(OffloadActivations{}, with_page(page));
    check_three_steps<3>(OffloadLargerThan{500_B}, with_page(page));
    check_three_steps<3>(OffloadMatching{{"tensor.?", "*13"}}, with_page(page));
    check_three_steps<3>(KeepLastLayers{2}, with_page(page));
  }
}

TEST_CASE("a policy of the user's own sees name, role, layer and count of the state, not of the weight") {
  struct Curious {
    std::vector<TensorInfo>* seen;
    Tier home(const TensorInfo& info) const {
      seen->push_back(info);
      return info.layer == 1 ? Tier::pinned_host : Tier::hbm;
    }
  };
  Rig rig{float_tensors({100, 200, 300})};
  std::vector<TensorInfo> seen;
  PagedAdamW<LoggingDevice, Curious> optimizer{rig.hbm, rig.host, Curious{&seen}, with_page(1_KiB)};
  for (std::uint32_t t = 0; t < 3; ++t) {
    optimizer.add(TensorInfo{.name = rig.specs[t].name,
                             .role = Role::other,
                             .layer = static_cast<std::int32_t>(t),
                             .layers = 3,
                             .count = rig.specs[t].count},
                  rig.weights[t].as<float>(), rig.gradients[t].as<float>());
  }
  optimizer.prepare(rig.stream);
  REQUIRE(!seen.empty());
  for (const TensorInfo& info : seen) {
    CHECK(info.role == Role::optimizer_state);
    CHECK(info.layers == 3);
    CHECK(info.dtype == DType::fp32);
    CHECK(info.count == static_cast<std::uint64_t>(info.layer + 1) * 100);
    CHECK(info.name == rig.specs[static_cast<std::size_t>(info.layer)].name);
  }
  CHECK(optimizer.offloaded_pages() == 2);  // 200 elements, 128 to a page
  CHECK(optimizer.pages() == 2 + 4);
  rig.device.synchronize(rig.stream);
}

TEST_CASE("sizes 0, 1, primes, a whole page, one past it, and many pages") {
  const auto specs = float_tensors({0, 1, 0, 128, 129, 1, 127, 131, 8191, 128 * 40, 0});
  Rig rig{specs};
  AdamWModel model{specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadAll{}, with_page(1_KiB)};  // 128 elements
  rig.add_all(optimizer);
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 3, .step = s});
    optimizer.step(rig.stream);
    model.step({.seed = 3, .step = s}, {AdamWGroup{}});
  }
  CHECK(optimizer.offloaded_pages() == optimizer.pages());
  CHECK(optimizer.pages() >= 106);
  rig.check_equal(optimizer, model);
}

TEST_CASE("an optimizer without tensors, and one of empty tensors, steps") {
  for (const auto& specs : {float_tensors({}), float_tensors({0, 0})}) {
    Rig rig{specs};
    PagedAdamW optimizer{rig.hbm, rig.host, OffloadAll{}, with_page(1_KiB)};
    rig.add_all(optimizer);
    CHECK(optimizer.step(rig.stream) == 1);
    CHECK(optimizer.step(rig.stream, {.max_norm = 1.0f, .skip_nonfinite = true}) == 2);
    check_report(optimizer.report(2), {2, 0.0, true, 0});
    CHECK(optimizer.pages() == 0);
    CHECK(optimizer.stats() == TransferStats{});
    for (const TensorSpec& spec : specs) {
      optimizer.read(spec.name, OptimizerState::first_moment, {});
      CHECK(optimizer.applied_steps(spec.name) == 0);  // nothing was applied to nothing
    }
  }
}

TEST_CASE("thousands of small tensors share pages") {
  const Watchdog watchdog{"small tensors", std::chrono::seconds{120}};
  std::vector<TensorSpec> specs;
  for (std::uint32_t t = 0; t < 3000; ++t) {
    specs.push_back({"small." + std::to_string(t), hash(t) % 6, t % 2 == 0 ? DType::fp32 : DType::bf16,
                     t % 3 == 0 ? DType::fp16 : DType::fp32, 0});
  }
  Rig rig{specs};
  AdamWModel model{specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadLargerThan{8_B}, with_page(7_KiB)};
  rig.add_all(optimizer);
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 5, .step = s});
    optimizer.step(rig.stream, {.max_norm = 2.0f});
    model.step({.seed = 5, .step = s}, {AdamWGroup{}}, {.max_norm = 2.0f});
  }
  CHECK(optimizer.pages() < 120);
  std::uint32_t unequal = 0;
  for (std::uint32_t t = 0; t < specs.size(); t += 7) {
    if (!same_bits(rig.weight_bits(t), model.tensors[t].weight)) ++unequal;
    if (!same_bits(rig.state(optimizer, t, OptimizerState::second_moment), model.tensors[t].v)) ++unequal;
  }
  CHECK(unequal == 0);
}

TEST_CASE("the calling thread waits for nothing: many steps in flight behind a held stream") {
  const Watchdog watchdog{"held stream"};
  const std::uint64_t steps = 12;
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
  rig.add_all(optimizer);
  optimizer.prepare(rig.stream);
  Gate gate;
  rig.device.enqueue(rig.stream, gate.pass());
  const AdamWStep options{.max_norm = 1.0f, .skip_nonfinite = true};
  std::vector<StepReport> expected;
  for (std::uint64_t s = 1; s <= steps; ++s) {
    GradientSource source{.seed = 2, .step = s};
    if (s % 5 == 0) source.bad_tensor = 7;
    rig.write_gradients(source);
    optimizer.group(GroupId{}).learning_rate = 1e-3f * static_cast<float>(s);
    CHECK(optimizer.step(rig.stream, options) == s);
    expected.push_back(model.step(source, {AdamWGroup{.learning_rate = 1e-3f * static_cast<float>(s)}}, options));
    CHECK(!optimizer.try_report(s));  // decided on the device, which has not come that far
  }
  CHECK(rig.device.stats().ring_full_waits == 0);
  gate.open();
  for (std::uint64_t s = steps; s > steps - 8; --s) check_report(optimizer.report(s), expected[s - 1]);
  rig.check_equal(optimizer, model);
}

TEST_CASE("a stream that runs late at random changes nothing") {
  const Watchdog watchdog{"late streams"};
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    Rig rig{float_tensors({700, 1300, 5})};
    AdamWModel model{rig.specs, 7};
    PagedAdamW optimizer{rig.hbm, rig.host, OffloadAll{}, with_page(1_KiB)};
    rig.add_all(optimizer);
    rig.device.delay_at_random(seed, std::chrono::microseconds{300});
    for (std::uint64_t s = 1; s <= 3; ++s) {
      rig.write_gradients({.seed = seed, .step = s});
      optimizer.step(rig.stream);
      model.step({.seed = seed, .step = s}, {AdamWGroup{}});
    }
    rig.device.delay_at_random(seed, std::chrono::microseconds{0});
    rig.check_equal(optimizer, model);
  }
}

TEST_CASE("steps back to back on different streams are ordered") {
  const Watchdog watchdog{"two streams"};
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  const LoggingDevice::Stream other = rig.device.create_stream("other");
  const LoggingDevice::Event written = rig.device.create_event();
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadLargerThan{1_KiB}, with_page(7_KiB)};
  rig.add_all(optimizer);
  // One gradient for all steps, so that only the optimizer's own state orders them.
  rig.write_gradients({.seed = 4});
  rig.device.record(written, rig.stream);
  rig.device.wait(other, written);
  for (std::uint64_t s = 1; s <= 6; ++s) {
    optimizer.step(s % 2 == 0 ? LoggingDevice::StreamRef{other} : LoggingDevice::StreamRef{rig.stream});
    model.step({.seed = 4}, {AdamWGroup{}});
  }
  rig.device.synchronize(other);
  rig.check_equal(optimizer, model);
}

TEST_CASE("the caller's own norm and finite flag decide, without a look at the gradients") {
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
  rig.add_all(optimizer);
  auto own = rig.hbm.allocate(Bytes{sizeof(GradientNorm)}, "own norm", Role::other, rig.stream);
  auto* norm = reinterpret_cast<GradientNorm*>(own.bytes().data());
  const GradientNorm values[] = {{1234.5, 1, 0}, {4.0, 0, 0}, {0.0, 1, 0}};
  for (std::uint64_t s = 1; s <= 3; ++s) {
    const GradientNorm value = values[s - 1];
    rig.write_gradients({.seed = 7, .step = s});
    rig.device.enqueue(rig.stream, [norm, value] { *norm = value; });
    const AdamWStep options{.gradient_scale = 0.5f, .max_norm = 0.75f, .skip_nonfinite = true, .norm = norm};
    optimizer.step(rig.stream, options);
    const StepReport expected = model.step({.seed = 7, .step = s}, {AdamWGroup{}}, options, &value);
    CHECK(expected.applied == (s != 2));
    check_report(optimizer.report(s), expected);
  }
  rig.check_equal(optimizer, model);
}

TEST_CASE("non-finite gradients skip steps 1, 3 and 4, with all steps in flight; the correction counts applied ones") {
  const Watchdog watchdog{"skips"};
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {nan, infinity, -infinity}) {
    Rig rig{mixed_tensors()};
    AdamWModel model{mixed_tensors(), 7};
    PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
    rig.add_all(optimizer);
    optimizer.prepare(rig.stream);
    Gate gate;
    rig.device.enqueue(rig.stream, gate.pass());
    std::vector<StepReport> expected;
    for (std::uint64_t s = 1; s <= 7; ++s) {
      GradientSource source{.seed = 8, .step = s};
      if (s == 1 || s == 3 || s == 4) {
        source.bad_tensor = s == 3 ? 15 : 7;
        source.bad_index = s == 4 ? 4096 : 2;
        source.bad_value = bad;
      }
      rig.write_gradients(source);
      const AdamWStep options{.max_norm = 0.5f, .skip_nonfinite = true};
      optimizer.step(rig.stream, options);
      expected.push_back(model.step(source, {AdamWGroup{}}, options));
    }
    gate.open();
    for (std::uint64_t s = 1; s <= 7; ++s) {
      const StepReport report = optimizer.report(s);
      CHECK(report.applied == (s != 1 && s != 3 && s != 4));
      CHECK(report.skipped_total == (s < 3 ? 1 : s == 3 ? 2 : 3));
      if (report.applied) check_report(report, expected[s - 1]);
    }
    CHECK(optimizer.applied_steps("tensor.7") == 4);
    rig.check_equal(optimizer, model);
  }
}

TEST_CASE("the count of skipped steps starts at zero in memory that was used before") {
  Rig rig{float_tensors({100})};
  {  // all that is free: filled with 0xFF when it is freed
    std::vector<HbmArena<LoggingDevice>::Buffer> all;
    for (std::uint64_t bytes = std::uint64_t{1} << 24; bytes >= 256; bytes /= 2) {
      while (auto buffer = rig.hbm.try_allocate(Bytes{bytes}, "before", Role::other, rig.stream)) {
        all.push_back(std::move(*buffer));
      }
    }
    REQUIRE(rig.hbm.usage().free == Bytes{});
  }
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  rig.add_all(optimizer);
  rig.write_gradients({.bad_tensor = 0});
  const StepReport report = optimizer.report(optimizer.step(rig.stream, {.skip_nonfinite = true}));
  CHECK(!report.applied);
  CHECK(report.skipped_total == 1);
}

TEST_CASE("a tensor unfrozen late starts its bias correction at 1") {
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(Bytes{768})};
  rig.add_all(optimizer);
  const TensorId late = optimizer.id("tensor.7"), later = optimizer.id("tensor.12");
  for (std::uint64_t s = 1; s <= 6; ++s) {
    optimizer.set_frozen(late, s <= 3);
    model.tensors[7].frozen = s <= 3;
    optimizer.set_frozen(later, s == 2 || s == 5);
    model.tensors[12].frozen = s == 2 || s == 5;
    // A frozen tensor does not count in the norm: here it would even skip the step.
    const GradientSource source{
        .seed = 9, .step = s, .bad_tensor = s == 2 ? 7 : ~0u, .bad_value = std::numeric_limits<float>::infinity()};
    rig.write_gradients(source);
    const AdamWStep options{.max_norm = 1.0f, .skip_nonfinite = true};
    optimizer.step(rig.stream, options);
    check_report(optimizer.report(s), model.step(source, {AdamWGroup{}}, options));
  }
  CHECK(optimizer.applied_steps("tensor.7") == 3);
  CHECK(optimizer.applied_steps("tensor.12") == 4);
  rig.check_equal(optimizer, model);
}

TEST_CASE("without skipping, a NaN goes through as the canonical NaN") {
  Rig rig{{{"f", 100}, {"b", 100, DType::bf16, DType::fp16}, {"h", 100, DType::fp16, DType::bf16}}};
  AdamWModel model{rig.specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  rig.add_all(optimizer);
  const float strange = std::bit_cast<float>(0xffc12345u);  // a NaN with a sign and a payload
  for (std::uint32_t t = 0; t < 3; ++t) {
    const GradientSource source{.seed = 1, .step = t + 1, .bad_tensor = t, .bad_index = 50, .bad_value = strange};
    rig.write_gradients(source);
    if (t == 0) {
      rig.device.enqueue(rig.stream, [g = rig.gradients[0].as<float>().data(), strange] { g[50] = strange; });
    }
    optimizer.step(rig.stream);
    model.step(source, {AdamWGroup{}});
    CHECK(std::isnan(optimizer.report(t + 1).norm));
    CHECK(optimizer.report(t + 1).applied);
  }
  rig.check_equal(optimizer, model);
  for (std::uint32_t t = 0; t < 3; ++t) {
    CHECK(std::bit_cast<std::uint32_t>(rig.state(optimizer, t, OptimizerState::first_moment)[50]) == 0x7fffffffu);
    CHECK(std::bit_cast<std::uint32_t>(rig.state(optimizer, t, OptimizerState::second_moment)[50]) == 0x7fffffffu);
  }
  std::uint16_t half = 0;
  std::memcpy(&half, rig.weight_bits(1).data() + 100, 2);
  CHECK(half == 0x7fff);
}

TEST_CASE("an infinite norm with clipping makes the infinite elements NaN and zeroes the others' share") {
  Rig rig{float_tensors({100})};
  AdamWModel model{rig.specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  rig.add_all(optimizer);
  const GradientSource source{
      .seed = 1, .bad_tensor = 0, .bad_index = 3, .bad_value = std::numeric_limits<float>::infinity()};
  rig.write_gradients(source);
  optimizer.step(rig.stream, {.max_norm = 1.0f});
  model.step(source, {AdamWGroup{}}, {.max_norm = 1.0f});
  rig.check_equal(optimizer, model);
  const std::vector<float> m = rig.state(optimizer, 0, OptimizerState::first_moment);
  CHECK(std::isnan(m[3]));
  CHECK(m[4] == 0.0f);
}

TEST_CASE("tied tensors are one tensor with two names") {
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
  rig.add_all(optimizer);
  const auto weight = rig.weights[0].as<float>();
  const auto gradient = rig.gradients[0].as<float>();
  const TensorInfo info{.name = "head", .count = weight.count()};
  CHECK(optimizer.add(info, weight, device_span<const float>{gradient}) == optimizer.id("tensor.0"));
  TensorInfo other = info;
  other.name = "head without gradient";
  CHECK(optimizer.add(other, weight, device_span<const float>{}) == optimizer.id("tensor.0"));
  CHECK(optimizer.id("head") == optimizer.id("tensor.0"));
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 7, .step = s});
    optimizer.step(rig.stream, {.max_norm = 1.0f});
    model.step({.seed = 7, .step = s}, {AdamWGroup{}}, {.max_norm = 1.0f});  // once
  }
  rig.check_equal(optimizer, model);
  std::vector<float> m(weight.count());
  optimizer.read("head", OptimizerState::first_moment, m);
  CHECK(same_bits(m, model.tensors[0].m));
  CHECK(optimizer.applied_steps("head without gradient") == 2);
}

TEST_CASE("what cannot be meant is refused and changes nothing") {
  Rig rig{{{"a", 100}, {"b", 100, DType::bf16}, {"c", 50}}};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  const auto a = rig.weights[0].as<float>(), c = rig.weights[2].as<float>();
  const auto grad_a = rig.gradients[0].as<float>(), grad_b = rig.gradients[1].as<float>();
  rig.add(optimizer, 0);
  const auto info = [](const char* name, std::uint64_t count, DType dtype = DType::fp32) {
    return TensorInfo{.name = name, .dtype = dtype, .count = count};
  };
  CHECK_THROWS_AS(optimizer.add(info("a", 50), c, grad_a.subspan(0, 50)), InvalidArgument);           // name twice
  CHECK_THROWS_AS(optimizer.add(info("x", 51), c, grad_a.subspan(0, 50)), InvalidArgument);           // count
  CHECK_THROWS_AS(optimizer.add(info("x", 50, DType::bf16), c, grad_a.subspan(0, 50)), InvalidArgument);  // type
  CHECK_THROWS_AS(optimizer.add(info("x", 50), c, grad_a), InvalidArgument);  // gradient's count
  CHECK_THROWS_AS(optimizer.add(info("x", 50), c, grad_a.subspan(0, 50), GroupId{1}), InvalidArgument);
  CHECK_THROWS_AS(optimizer.add(info("x", 99), a.subspan(1, 99), grad_a.subspan(1, 99)), InvalidArgument);  // overlaps
  CHECK_THROWS_AS(optimizer.add(info("x", 50), a.subspan(0, 50), grad_a.subspan(0, 50)), InvalidArgument);
  CHECK_THROWS_AS(optimizer.add(info("x", 200, DType::bf16), a.as<bf16>(), device_span<const float>{}),
                  InvalidArgument);  // the same memory as another type
  CHECK_THROWS_AS(optimizer.add(info("x", 100), a, grad_b), InvalidArgument);  // tied, another gradient
  CHECK_THROWS_AS(static_cast<void>(optimizer.id("x")), InvalidArgument);
  CHECK_THROWS_AS(optimizer.set_gradient(optimizer.id("a"), grad_a.subspan(0, 50)), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(optimizer.applied_steps("a")), InvalidArgument);  // no state yet
  std::vector<float> out(100);
  CHECK_THROWS_AS(optimizer.read("a", OptimizerState::first_moment, out), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(optimizer.report(0)), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(optimizer.report(1)), InvalidArgument);
  CHECK_THROWS_AS(static_cast<void>(optimizer.group(GroupId{1})), InvalidArgument);
  CHECK_THROWS_AS(optimizer.set_frozen(TensorId{1}, true), InvalidArgument);
  CHECK_THROWS_AS(optimizer.set_gradient(TensorId{1}, device_span<const float>{}), InvalidArgument);

  rig.add(optimizer, 1);
  rig.write_gradients({});
  optimizer.step(rig.stream);
  CHECK_THROWS_AS(rig.add(optimizer, 2), InvalidArgument);  // too late
  CHECK_THROWS_AS(optimizer.read("x", OptimizerState::first_moment, out), InvalidArgument);
  CHECK_THROWS_AS(optimizer.read("a", OptimizerState::first_moment, std::span{out}.first(99)), InvalidArgument);
  CHECK_THROWS_AS(optimizer.read("a", OptimizerState::master_weight, out), InvalidArgument);  // fp32 has none
  CHECK_THROWS_AS(optimizer.write("a", OptimizerState::master_weight, out), InvalidArgument);
  AdamWModel model{{rig.specs[0], rig.specs[1]}, 7};
  model.step({}, {AdamWGroup{}});
  CHECK(same_bits(rig.weight_bits(0), model.tensors[0].weight));
  CHECK(same_bits(rig.weight_bits(1), model.tensors[1].weight));

  PagedAdamW too_small{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(Bytes{767})};
  rig.add(too_small, 0);
  CHECK_THROWS_AS(too_small.prepare(rig.stream), InvalidArgument);
  CHECK(!too_small.unfinished());
}

TEST_CASE("an empty tensor may lie anywhere, inside another one too") {
  Rig rig{float_tensors({100})};
  const auto a = rig.weights[0].as<float>();
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  optimizer.add(TensorInfo{.name = "empty before", .count = 0}, a.subspan(50, 0), device_span<const float>{});
  rig.add(optimizer, 0);
  optimizer.add(TensorInfo{.name = "empty behind", .count = 0}, a.subspan(50, 0), device_span<const float>{});
  optimizer.step(rig.stream);
  rig.device.synchronize(rig.stream);
}

TEST_CASE("gradients come and go and move; an absent one moves nobody else") {
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(Bytes{768})};
  for (std::uint32_t t = 0; t < rig.specs.size(); ++t) rig.add(optimizer, t, t % 4 != 3);
  for (std::uint32_t t = 3; t < rig.specs.size(); t += 4) model.tensors[t].has_gradient = false;
  auto second = rig.hbm.allocate(rig.gradients[0].size(), "second gradient", Role::gradient, rig.stream);
  const auto first = rig.gradients[0].as<float>();
  for (std::uint64_t s = 1; s <= 7; ++s) {
    rig.write_gradients({.seed = 11, .step = s});
    // Tensor 0's gradient changes its place every step.
    const bool moved = s % 2 == 0;
    rig.device.enqueue(rig.stream, [first, to = second.as<float>()] {
      std::memcpy(to.data(), first.data(), to.size_bytes().count());
    });
    if (moved) {
      rig.device.enqueue(rig.stream, [first] { std::memset(first.data(), 0xff, first.size_bytes().count()); });
      optimizer.set_gradient(optimizer.id("tensor.0"), second.as<float>());
    } else {
      optimizer.set_gradient(optimizer.id("tensor.0"), device_span<const float>{first});
    }
    for (std::uint32_t t = 1; t < rig.specs.size(); ++t) {  // many change at once, several times over
      const bool present = (s + t) % 3 != 0;
      with_type(rig.specs[t].gradient, [&]<class G>(G) {
        const auto gradient = rig.gradients[t].template as<G>();
        optimizer.set_gradient(optimizer.id(rig.specs[t].name), device_span<G>{});
        optimizer.set_gradient(optimizer.id(rig.specs[t].name), present ? gradient : device_span<G>{});
      });
      model.tensors[t].has_gradient = present;
    }
    optimizer.step(rig.stream, {.max_norm = 1.0f});
    model.step({.seed = 11, .step = s}, {AdamWGroup{}}, {.max_norm = 1.0f});
  }
  rig.check_equal(optimizer, model);
}

TEST_CASE("a gradient may change its type between steps") {
  Rig rig{float_tensors({777})};
  AdamWModel model{rig.specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  rig.add_all(optimizer);
  for (std::uint64_t s = 1; s <= 3; ++s) {
    const DType type = s == 1 ? DType::bf16 : s == 2 ? DType::fp16 : DType::fp32;
    rig.specs[0].gradient = model.tensors[0].spec.gradient = type;
    rig.write_gradients({.seed = 2, .step = s});
    with_type(type, [&]<class G>(G) {
      optimizer.set_gradient(optimizer.id("t0"), rig.gradients[0].as<G>().subspan(0, 777));
    });
    optimizer.step(rig.stream);
    model.step({.seed = 2, .step = s}, {AdamWGroup{}});
  }
  rig.check_equal(optimizer, model);
}

namespace {

// Any bits but NaNs: both zeros, denormals and infinities among them.
void fill_with_any_bits(AdamWModel& model, std::uint64_t seed) {
  for (std::uint32_t t = 0; t < model.tensors.size(); ++t) {
    AdamWModel::Tensor& tensor = model.tensors[t];
    const std::uint64_t size = size_of(tensor.spec.weight).count();
    for (std::uint64_t i = 0; i < tensor.spec.count; ++i) {
      std::uint64_t h = hash(hash(seed + t) + i);
      if (i % 5 == 0) {  // upper halves of special fp32 values, which are bf16's; fp16's beside them
        constexpr std::uint32_t special[] = {0, 0x80000000u, 1, 0x80000001u, 0x7f800000u, 0xff800000u, 0x007fffffu};
        constexpr std::uint32_t special_16[] = {0, 0x8000u, 1, 0x8001u, 0x7c00u, 0xfc00u, 0x3ffu};
        h = tensor.spec.weight == DType::fp32   ? special[i / 5 % 7]
            : tensor.spec.weight == DType::fp16 ? special_16[i / 5 % 7]
                                                : special[i / 5 % 7] >> 16;
      }
      std::memcpy(tensor.weight.data() + i * size, &h, size);
      if (std::isnan(load(tensor.weight.data(), tensor.spec.weight, i))) {
        store(tensor.weight.data(), tensor.spec.weight, i, 1.5f);
      }
    }
  }
}

template <class Policy>
void check_refresh(Policy policy) {
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, policy, with_page(7_KiB)};
  rig.add_all(optimizer);
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 7, .step = s});
    optimizer.step(rig.stream);
    model.step({.seed = 7, .step = s}, {AdamWGroup{}});
  }

  // Loaded bits stay, with fresh moments, zero gradients and no decay.
  fill_with_any_bits(model, 77);
  const std::vector<AdamWModel::Tensor> loaded = model.tensors;
  rig.load_weights(model);
  optimizer.refresh(rig.stream);
  for (std::uint64_t s = 3; s <= 4; ++s) {
    rig.write_gradients({.zero = true});
    optimizer.step(rig.stream);
  }
  for (std::uint32_t t = 0; t < rig.specs.size(); ++t) {
    INFO("tensor ", t);
    CHECK(same_bits(rig.weight_bits(t), loaded[t].weight));
    for (const float m : rig.state(optimizer, t, OptimizerState::first_moment)) CHECK(m == 0.0f);
    CHECK(optimizer.applied_steps(rig.specs[t].name) == (rig.specs[t].count == 0 ? 0 : 2));
  }

  // Training goes on from there as from fresh weights, and once more from kept moments.
  AdamWModel fresh{mixed_tensors(), 19};
  rig.load_weights(fresh);
  optimizer.refresh(rig.stream, Moments::reset);
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 19, .step = s});
    optimizer.step(rig.stream);
    fresh.step({.seed = 19, .step = s}, {AdamWGroup{}});
  }
  rig.check_equal(optimizer, fresh);
  const AdamWModel others{mixed_tensors(), 23};
  for (std::uint32_t t = 0; t < rig.specs.size(); ++t) fresh.tensors[t].weight = others.tensors[t].weight;
  fresh.refresh(Moments::keep);
  rig.load_weights(fresh);
  optimizer.refresh(rig.stream, Moments::keep);
  rig.check_equal(optimizer, fresh);
  rig.write_gradients({.seed = 19, .step = 3});
  optimizer.step(rig.stream);
  fresh.step({.seed = 19, .step = 3}, {AdamWGroup{}});
  rig.check_equal(optimizer, fresh);
}

}  // namespace

TEST_CASE("refresh takes loaded weights, to the bit, paged, resident and mixed") {
  check_refresh(OffloadOptimizerState{});
  check_refresh(KeepResident{});
  check_refresh(OffloadLargerThan{1_KiB});
}

TEST_CASE("refresh before the first step prepares") {
  Rig rig{mixed_tensors()};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
  rig.add_all(optimizer);
  optimizer.refresh(rig.stream, Moments::keep);
  rig.check_equal(optimizer, rig.initial);
  optimizer.prepare(rig.stream);  // once only
  CHECK(optimizer.steps() == 0);
}

TEST_CASE("moments left by an earlier refresh do not come back when weights are loaded with steps in flight") {
  const Watchdog watchdog{"refresh in flight"};
  Rig rig{mixed_tensors()};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
  rig.add_all(optimizer);
  optimizer.prepare(rig.stream);
  AdamWModel model{mixed_tensors(), 31};
  Gate gate;
  rig.device.enqueue(rig.stream, gate.pass());
  rig.write_gradients({.seed = 1});
  optimizer.step(rig.stream);
  for (std::uint32_t t = 0; t < rig.specs.size(); ++t) {  // load, in stream order
    if (rig.specs[t].count == 0) continue;
    rig.device.enqueue(rig.stream, [to = rig.weights[t].bytes().data(), from = model.tensors[t].weight.data(),
                                    n = model.tensors[t].weight.size()] { std::memcpy(to, from, n); });
  }
  optimizer.refresh(rig.stream);
  rig.write_gradients({.seed = 1, .step = 2});
  optimizer.step(rig.stream);
  gate.open();
  rig.device.synchronize(rig.stream);  // the copies read the model's weights
  model.step({.seed = 1, .step = 2}, {AdamWGroup{}});
  rig.check_equal(optimizer, model);
}

namespace {

// Carries all states of one optimizer over to another, as a checkpoint does.
template <class From, class To>
void carry_over(Rig<>& from_rig, From& from, To& to) {
  for (std::uint32_t t = 0; t < from_rig.specs.size(); ++t) {
    const std::string& name = from_rig.specs[t].name;
    for (const OptimizerState which :
         {OptimizerState::first_moment, OptimizerState::second_moment, OptimizerState::master_weight}) {
      if (which == OptimizerState::master_weight && from_rig.specs[t].weight == DType::fp32) continue;
      to.write(name, which, from_rig.state(from, t, which));
    }
    to.set_applied_steps(name, from.applied_steps(name));
  }
}

template <std::uint32_t Depth, class Policy>
void check_goes_on(Policy policy, PagedAdamWOptions options) {
  Rig first{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{first.hbm, first.host, OffloadLargerThan{900_B}, with_page(Bytes{768})};
  first.add_all(optimizer);
  optimizer.set_frozen(optimizer.id("tensor.7"), true);
  model.tensors[7].frozen = true;
  for (std::uint64_t s = 1; s <= 3; ++s) {
    first.write_gradients({.seed = 7, .step = s});
    optimizer.step(first.stream);
    model.step({.seed = 7, .step = s}, {AdamWGroup{}});
  }

  Rig second{mixed_tensors(), {.seed = 99}};
  PagedAdamW<LoggingDevice, Policy, Depth> restored{second.hbm, second.host, policy, options};
  second.add_all(restored);
  second.load_weights(model);
  restored.refresh(second.stream);
  carry_over(first, optimizer, restored);
  second.check_equal(restored, model);
  model.tensors[7].frozen = false;
  for (std::uint64_t s = 4; s <= 6; ++s) {
    second.write_gradients({.seed = 7, .step = s});
    restored.step(second.stream);
    model.step({.seed = 7, .step = s}, {AdamWGroup{}});
  }
  second.check_equal(restored, model);
}

}  // namespace

TEST_CASE("states read by name and written into another optimizer go on with the same bits") {
  check_goes_on<3>(OffloadOptimizerState{}, with_page(7_KiB));
  check_goes_on<3>(KeepResident{}, with_page(Bytes{768}));
  check_goes_on<1>(OffloadMatching{{"*7"}}, with_page(1_KiB));
  check_goes_on<dynamic_depth>(OffloadAll{}, {.page = 64_KiB, .depth = 4, .fill_evicted = true});
}

TEST_CASE("a resident state larger than a staging piece is read and written whole") {
  Rig rig{float_tensors({50000, 3})};  // 200000 bytes, pieces of 65536
  PagedAdamW optimizer{rig.hbm, rig.host, KeepResident{}, with_page(1_MiB)};
  rig.add_all(optimizer);
  optimizer.prepare(rig.stream);
  std::vector<float> values(50000);
  for (std::uint64_t i = 0; i < values.size(); ++i) values[i] = number(1, 2, 3, i);
  const Bytes host_before = rig.host.usage().used;
  optimizer.write("t0", OptimizerState::second_moment, values);
  CHECK(same_bits(rig.state(optimizer, 0, OptimizerState::second_moment), values));
  for (const float m : rig.state(optimizer, 0, OptimizerState::first_moment)) REQUIRE(m == 0.0f);
  CHECK(rig.state(optimizer, 1, OptimizerState::second_moment) == std::vector<float>{0, 0, 0});
  CHECK(rig.host.usage().by_role[static_cast<std::uint32_t>(Role::optimizer_state)] == Bytes{});
  // Staging stays kept for its stream, as freed memory does: one piece, not the whole state.
  CHECK(rig.host.usage().used - host_before < Bytes{2 << 16});
}

TEST_CASE("reports of the last 8 steps are kept, older ones refused") {
  Rig rig{float_tensors({100})};
  AdamWModel model{rig.specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  rig.add_all(optimizer);
  std::vector<StepReport> expected;
  for (std::uint64_t s = 1; s <= 20; ++s) {
    rig.write_gradients({.seed = 7, .step = s});
    optimizer.step(rig.stream, {.gradient_scale = 0.5f});
    expected.push_back(model.step({.seed = 7, .step = s}, {AdamWGroup{}}, {.gradient_scale = 0.5f}));
    CHECK(optimizer.steps() == s);
    const std::uint64_t oldest = s > 8 ? s - 7 : 1;
    if (oldest > 1) {
      CHECK_THROWS_AS(static_cast<void>(optimizer.report(oldest - 1)), InvalidArgument);
      CHECK_THROWS_AS(static_cast<void>(optimizer.try_report(oldest - 1)), InvalidArgument);
    }
    CHECK_THROWS_AS(static_cast<void>(optimizer.report(s + 1)), InvalidArgument);
    for (std::uint64_t r = oldest; r <= s; ++r) check_report(optimizer.report(r), expected[r - 1]);
    const std::optional<StepReport> tried = optimizer.try_report(s);
    REQUIRE(tried.has_value());
    check_report(*tried, expected[s - 1]);
  }
}

TEST_CASE("micro-batches accumulate in the caller's gradient, scaled once") {
  Rig rig{float_tensors({500, 129})};
  AdamWModel model{rig.specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB)};
  rig.add_all(optimizer);
  // Four micro-batches of the same gradient: their sum is exact, and so is a quarter of it.
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 7, .step = s});
    for (int doubling = 0; doubling < 2; ++doubling) {
      for (std::uint32_t t = 0; t < 2; ++t) {
        rig.device.enqueue(rig.stream, [g = rig.gradients[t].as<float>()] {
          for (std::uint64_t i = 0; i < g.count(); ++i) g.data()[i] += g.data()[i];
        });
      }
    }
    optimizer.step(rig.stream, {.gradient_scale = 0.25f, .max_norm = 1.0f});
    const StepReport expected = model.step({.seed = 7, .step = s}, {AdamWGroup{}}, {.max_norm = 1.0f});
    CHECK(optimizer.report(s).norm == expected.norm);
  }
  rig.check_equal(optimizer, model);
}

TEST_CASE("no host code of the optimizer touches device memory") {
  const Watchdog watchdog{"protected memory"};
  const auto specs = float_tensors({300, 1, 129});
  Rig rig{specs, {.capacity = 1_MiB, .debug_protection = true}};
  AdamWModel model{specs, 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadMatching{{"t0", "t1"}}, with_page(1_KiB)};
  rig.add_all(optimizer);
  for (std::uint64_t s = 1; s <= 2; ++s) {
    rig.write_gradients({.seed = 7, .step = s});
    optimizer.step(rig.stream, {.max_norm = 1.0f});
    check_report(optimizer.report(s), model.step({.seed = 7, .step = s}, {AdamWGroup{}}, {.max_norm = 1.0f}));
  }
  optimizer.write("t2", OptimizerState::first_moment, rig.state(optimizer, 2, OptimizerState::first_moment));
  optimizer.set_applied_steps("t2", optimizer.applied_steps("t2"));
  rig.check_equal(optimizer, model);
}

TEST_CASE("an observer sees every fill and every write-back") {
  Rig rig{mixed_tensors()};
  Recorder<LoggingDevice> recorder{rig.device, 4096, rig.stream};
  PagedAdamW<LoggingDevice, OffloadOptimizerState, 3, Recorder<LoggingDevice>::Observer> optimizer{
      rig.hbm, rig.host, OffloadOptimizerState{}, with_page(1_KiB), recorder.observer()};
  rig.add_all(optimizer);
  for (std::uint64_t s = 1; s <= 2; ++s) optimizer.step(rig.stream);
  rig.device.synchronize(rig.stream);
  std::uint64_t fills = 0, write_backs = 0, stalls = 0;
  recorder.collect([&](const Recorder<LoggingDevice>::Interval& interval) {
    CHECK(interval.end >= interval.begin);
    ++(interval.activity == Activity::fill ? fills : interval.activity == Activity::write_back ? write_backs : stalls);
  });
  CHECK(recorder.dropped() == 0);
  CHECK(fills == optimizer.stats().fills);
  CHECK(write_backs == optimizer.stats().write_backs);
  CHECK(stalls == 3 * optimizer.offloaded_pages());  // one a lease: the first states and two steps
}

TEST_CASE("gradients are zeroed in stream order") {
  Rig rig{mixed_tensors()};
  AdamWModel model{mixed_tensors(), 7};
  PagedAdamW optimizer{rig.hbm, rig.host, OffloadOptimizerState{}, with_page(7_KiB)};
  rig.add_all(optimizer);
  rig.write_gradients({.seed = 7, .step = 1});
  optimizer.step(rig.stream);
  model.step({.seed = 7, .step = 1}, {AdamWGroup{}});
  for (std::uint32_t t = 0; t < rig.specs.size(); ++t) {
    rig.device.fill_async(rig.gradients[t].bytes(), std::byte{0}, rig.stream);
  }
  optimizer.step(rig.stream);
  model.step({.zero = true}, {AdamWGroup{}});
  rig.check_equal(optimizer, model);
}

TEST_CASE("values out of their ranges are refused, and nothing happens") {
  HostDevice device;
  HbmArena hbm{device, 1_MiB};
  PinnedHostArena host{device, 1_MiB};
  const HostDevice::Stream stream = device.create_stream();
  auto weight = hbm.allocate(64_B, "w", Role::weight, stream);
  auto gradient = hbm.allocate(64_B, "g", Role::gradient, stream);
  device.fill_async(weight.bytes(), std::byte{0}, stream);
  device.fill_async(gradient.bytes(), std::byte{0x3f}, stream);
  PagedAdamW optimizer{hbm, host, OffloadAll{}, {.page = 1_KiB}};
  optimizer.add(TensorInfo{.name = "w", .count = 16}, weight.as<float>(), gradient.as<float>());
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const AdamWGroup good;
  const auto refused = [&](auto&& change) {
    change(optimizer.group({}));
    CHECK_THROWS_AS(optimizer.step(stream), InvalidArgument);
    optimizer.group({}) = good;
  };
  for (const float bad : {-1.0f, nan, infinity}) {
    refused([&](AdamWGroup& g) { g.learning_rate = bad; });
    refused([&](AdamWGroup& g) { g.weight_decay = bad; });
    refused([&](AdamWGroup& g) { g.beta1 = bad; });
    refused([&](AdamWGroup& g) { g.beta2 = bad; });
    refused([&](AdamWGroup& g) { g.epsilon = bad; });
    CHECK_THROWS_AS(optimizer.step(stream, {.max_norm = bad}), InvalidArgument);
  }
  refused([](AdamWGroup& g) { g.beta1 = 1.0f; });
  refused([](AdamWGroup& g) { g.beta2 = 1.0f; });
  refused([](AdamWGroup& g) { g.epsilon = 0.0f; });
  CHECK_THROWS_AS(optimizer.step(stream, {.gradient_scale = nan}), InvalidArgument);
  CHECK(optimizer.steps() == 0);
  // A negative scale turns the gradient round; its norm is no less for it.
  const double norm = optimizer.report(optimizer.step(stream, {.gradient_scale = -2.0f})).norm;
  CHECK(norm > 0);
  CHECK(norm == 2 * optimizer.report(optimizer.step(stream)).norm);
  device.synchronize(HostDevice::StreamRef{stream});
}
