// The library under CheckedDevice: no report, and the same bits.
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/device/checked_device.hpp"
#include "hbmoff/device/host_device.hpp"
#include "support/activation_model.hpp"
#include "support/adamw_model.hpp"
#include "support/watchdog.hpp"

using namespace adamw_test;
using Checked = CheckedDevice<HostDevice>;
static_assert(Device<Checked>);

namespace {

constexpr AdamWStep clipped{.gradient_scale = 0.25f, .max_norm = 1.5f, .skip_nonfinite = true};

template <std::uint32_t Depth, class Policy>
void check_training(Policy policy, PagedAdamWOptions options, bool debug_protection = false) {
  INFO("page ", options.page.count(), " depth ", Depth);
  constexpr std::uint32_t groups = 6;
  options.fill_evicted = true;
  Rig<Checked> rig{mixed_tensors(groups), {.debug_protection = debug_protection}};
  AdamWModel model{rig.specs, rig.seed};
  {
    PagedAdamW<Checked, Policy, Depth> optimizer{rig.hbm, rig.host, policy, options};
    set_groups(optimizer, groups_at(groups, 1), true);
    rig.add_all(optimizer);
    for (std::uint64_t s = 1; s <= 3; ++s) {
      set_groups(optimizer, groups_at(groups, s));
      const GradientSource source{.seed = 7, .step = s};
      rig.write_gradients(source);
      const std::uint64_t number = optimizer.step(rig.stream, clipped);
      const StepReport expected = model.step(source, groups_at(groups, s), clipped);
      CHECK(optimizer.report(number).norm == expected.norm);
    }
    rig.check_equal(optimizer, model);
    // By name, and loaded anew.
    std::vector<float> values(rig.specs[7].count, 0.5f);
    optimizer.write(rig.specs[7].name, OptimizerState::first_moment, values);
    optimizer.set_applied_steps(rig.specs[7].name, 9);
    CHECK(optimizer.applied_steps(rig.specs[7].name) == 9);
    rig.load_weights(rig.initial);
    optimizer.refresh(rig.stream);
    optimizer.refresh(rig.stream, Moments::keep);
    optimizer.step(rig.stream, clipped);
    rig.device.synchronize(rig.stream);
  }
  for (auto& buffer : rig.weights) buffer = {};
  for (auto& buffer : rig.gradients) buffer = {};
  CHECK(rig.device.errors() == 0);
  for (const CheckReport& report : rig.device.reports()) {
    INFO(report.message());
    CHECK(false);
  }
}

}  // namespace

TEST_CASE("the optimizer is in order at every depth, page size and policy") {
  const Watchdog watchdog{"checked optimizer", std::chrono::seconds{240}};
  for (const Bytes page : {Bytes{768}, 7_KiB, 1_MiB}) {
    check_training<1>(OffloadOptimizerState{}, {.page = page});
    check_training<2>(OffloadOptimizerState{}, {.page = page});
    check_training<3>(OffloadOptimizerState{}, {.page = page});
    check_training<4>(OffloadOptimizerState{}, {.page = page});
    check_training<3>(KeepResident{}, {.page = page});
    check_training<3>(OffloadLargerThan{Bytes{512}}, {.page = page});
  }
}

TEST_CASE("the optimizer's kernels touch what they declare, and nothing else") {
  const Watchdog watchdog{"declared optimizer", std::chrono::seconds{240}};
  check_training<3>(OffloadOptimizerState{}, {.page = 7_KiB}, true);
  check_training<2>(KeepResident{}, {.page = 7_KiB}, true);
}

TEST_CASE("a kernel that touches more than it declares is reported with its name") {
  const Watchdog watchdog{"undeclared"};
  std::vector<CheckReport> reports;
  {
    CheckedDevice<HostDevice> device{{.hbm_capacity = 1_MiB, .debug_protection = true},
                                     {.reports = &reports, .throws = false}};
    const auto stream = device.create_stream("compute");
    HbmArena hbm{device, 64_KiB};
    const auto x = hbm.allocate(8_KiB, "x", Role::other, stream), y = hbm.allocate(8_KiB, "y", Role::other, stream);
    const auto launch = [&](const char* name, AccessList reads, AccessList writes, auto&& kernel) {
      device.note_access(stream, name, reads, writes);
      device.enqueue(stream, kernel, {.name = name});
    };
    const auto in = x.as<float>(), out = y.as<float>();
    launch("honest fill", {}, {in}, [in] { std::memset(in.data(), 0, in.size_bytes().count()); });
    launch("honest copy", {in}, {out}, [=] { std::memcpy(out.data(), in.data(), in.size_bytes().count()); });
    CHECK(reports.empty());
    launch("reader", {in.subspan(0, 1024)}, {out}, [=] { out.data()[0] = in.data()[1024]; });
    launch("writer of what it reads", {in, out}, {}, [=] { out.data()[0] = in.data()[0]; });
    launch("one past", {}, {out.subspan(0, 4)}, [=] { out.data()[4] = 1.0f; });
    launch("nothing declared", {}, {}, [=] { out.data()[0] = 2.0f; });
    device.enqueue(stream, [=] { out.data()[0] = 3.0f; }, {.name = "no note at all"});
    launch("honest again", {in}, {out}, [=] { out.data()[0] = in.data()[0]; });
  }
  std::vector<std::string> faults;
  for (const CheckReport& report : reports) {
    if (report.fault == CheckFault::undeclared_access) faults.push_back(report.later.message());
  }
  REQUIRE(faults.size() == 5);
  CHECK(faults[0].find("'reader' reads bytes 4096 to 4096 of 'x'") != std::string::npos);
  CHECK(faults[1].find("'writer of what it reads' writes bytes 0 to 0 of 'y'") != std::string::npos);
  CHECK(faults[2].find("'one past' writes bytes 1") != std::string::npos);  // the first of its bytes that changed
  CHECK(faults[3].find("'nothing declared' writes bytes 0 to 0 of 'y'") != std::string::npos);
  CHECK(faults[4].find("'no note at all' writes bytes 0 to 0 of 'y'") != std::string::npos);
}

TEST_CASE("activations are in order at every depth and policy") {
  using namespace activation_test;
  const Watchdog watchdog{"checked activations", std::chrono::seconds{240}};
  const BundleLayout layout = layer_layout();
  const auto run = [&]<class Policy, std::uint32_t Depth>(Policy policy, std::integral_constant<std::uint32_t, Depth>) {
    Bench<Checked> bench;
    {
      ActivationStore<Checked, Policy, Depth> store{bench.hbm, bench.host, policy, 9, layout, {.fill_evicted = true}};
      for (std::uint64_t pass = 1; pass <= 3; ++pass) {
        const std::uint64_t rows = pass == 2 ? 4 : 6;
        run_forward(bench.device, bench.stream, store, layout, pass + 10, rows, false);
        run_forward(bench.device, bench.stream, store, layout, pass, rows);
        std::uint64_t wrong = 0;
        for (std::uint32_t l = store.layers(); l-- > 0;) {
          auto saved = store.restore(l, bench.stream);
          for (std::uint32_t i = 0; i < layout.tensors.size(); ++i) {
            if (saved.missing(i)) enqueue_compute(bench.device, bench.stream, saved, layout, pass, l, i);
          }
          for (std::uint32_t i = 0; i < layout.tensors.size(); ++i) {
            enqueue_verify(bench.device, bench.stream, saved, layout, pass, l, i, &wrong);
          }
        }
        bench.device.synchronize(bench.stream);
        CHECK(wrong == 0);
      }
    }
    for (const CheckReport& report : bench.device.reports()) {
      INFO(report.message());
      CHECK(false);
    }
  };
  const auto all_depths = [&](auto policy) {
    run(policy, std::integral_constant<std::uint32_t, 1>{});
    run(policy, std::integral_constant<std::uint32_t, 2>{});
    run(policy, std::integral_constant<std::uint32_t, 3>{});
    run(policy, std::integral_constant<std::uint32_t, 4>{});
  };
  all_depths(OffloadAll{});
  all_depths(KeepLastLayers{2});
  all_depths(KeepResident{});
}
