// PagedAdamW on CudaDevice, against the plain model, bit for bit.
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "hbmoff/cuda.hpp"
#include "hbmoff/device/checked_device.hpp"
#include "support/adamw_model.hpp"

using namespace hbmoff;
using namespace adamw_test;

namespace {

template <std::uint32_t Depth, class D = CudaDevice, class Policy>
void train(const std::vector<TensorSpec>& specs, Policy policy, Bytes page, std::uint32_t groups, std::uint64_t steps,
           AdamWStep step_options = {}) {
  Rig<D> rig{specs};
  AdamWModel model = rig.initial;
  PagedAdamW<D, Policy, Depth> optimizer{rig.hbm, rig.host, policy, {.page = page}};
  for (std::uint32_t g = 1; g < groups; ++g) optimizer.add_group({});
  rig.add_all(optimizer);
  optimizer.prepare(rig.stream);
  for (std::uint64_t s = 1; s <= steps; ++s) {
    GradientSource source{.seed = 3, .step = s};
    if (s == 3) source.bad_tensor = 0;  // a NaN
    const std::vector<AdamWGroup> values = groups_at(groups, s);
    for (std::uint32_t g = 0; g < groups; ++g) optimizer.group(static_cast<GroupId>(g)) = values[g];
    rig.write_gradients(source);
    step_options.skip_nonfinite = s % 2 == 1;
    optimizer.step(rig.stream, step_options);
    const StepReport expected = model.step(source, values, step_options);
    const StepReport report = optimizer.report(s);
    CHECK(report.applied == expected.applied);
    CHECK(bit_cast<std::uint64_t>(report.norm) == bit_cast<std::uint64_t>(expected.norm));
    rig.check_equal(optimizer, model);
  }
}

}  // namespace

TEST_CASE("every policy, depth and page size gives the model's bits") {
  const std::vector<TensorSpec> specs = mixed_tensors(2);
  SUBCASE("small pages") { train<2>(specs, OffloadOptimizerState{}, 1_KiB, 2, 4); }
  SUBCASE("depth 3 and clipping") { train<3>(specs, OffloadAll{}, 4_KiB, 2, 4, {.max_norm = 0.5f}); }
  SUBCASE("one page") { train<3>(specs, OffloadAll{}, 1_MiB, 2, 4, {.gradient_scale = 0.125f}); }
  SUBCASE("resident") { train<3>(specs, KeepResident{}, 4_KiB, 2, 4, {.max_norm = 2.0f}); }
  SUBCASE("checked") { train<2, CheckedDevice<CudaDevice>>(specs, OffloadAll{}, 4_KiB, 2, 2, {.max_norm = 0.5f}); }
}
