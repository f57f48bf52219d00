// The bits of AdamW on CudaDevice against those of HostDevice: a million states of any bits, and long trainings.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "hbmoff/cuda.hpp"
#include "hbmoff/device/host_device.hpp"
#include "support/adamw_model.hpp"
#include "support/random.hpp"

using namespace hbmoff;
using adamw_test::download;
using adamw_test::make_device;
using adamw_test::upload;
using random_numbers::Random;

namespace {

struct States {
  std::vector<std::byte> weight, gradient;
  std::vector<float> m, v, master;
};
bool same(const std::vector<float>& a, const std::vector<float>& b) { return adamw_test::same_bits(a, b); }

/// After some steps from `states`, all on one device.
template <class D, class W, class G>
States step_on(const States& states, std::uint64_t count, const std::vector<std::uint64_t>& applied,
               const AdamWStep& options, std::vector<double>* norms = nullptr) {
  D device = make_device<D>({.capacity = 256_MiB});
  const auto stream = device.create_stream();
  HbmArena<D> hbm{device, 64_MiB};
  PinnedHostArena<D> host{device, 64_MiB};
  auto weight = hbm.allocate(Bytes{count * sizeof(W)}, "weight", Role::weight, stream);
  auto gradient = hbm.allocate(Bytes{count * sizeof(G)}, "gradient", Role::gradient, stream);
  upload(device, stream, weight.bytes(), states.weight, "weight");
  upload(device, stream, gradient.bytes(), states.gradient, "gradient");
  States out = states;
  {
    PagedAdamW<D, OffloadOptimizerState, 2> optimizer{hbm, host, OffloadOptimizerState{}, {.page = 4_MiB}};
    optimizer.add({.name = "t", .dtype = dtype_of<W>, .count = count}, weight.template as<W>(),
                  device_span<const G>{gradient.template as<G>()});
    optimizer.group(GroupId{0}) = {.learning_rate = 0.01f, .weight_decay = 0.1f};
    optimizer.prepare(stream);
    optimizer.write("t", OptimizerState::first_moment, states.m);
    optimizer.write("t", OptimizerState::second_moment, states.v);
    if (sizeof(W) != 4) optimizer.write("t", OptimizerState::master_weight, states.master);
    for (const std::uint64_t n : applied) {
      optimizer.set_applied_steps("t", n);
      const std::uint64_t number = optimizer.step(stream, options);
      if (norms != nullptr) norms->push_back(optimizer.report(number).norm);
    }
    optimizer.read("t", OptimizerState::first_moment, out.m);
    optimizer.read("t", OptimizerState::second_moment, out.v);
    if (sizeof(W) != 4) optimizer.read("t", OptimizerState::master_weight, out.master);
    out.weight = download(device, stream, weight.bytes());
  }
  device.synchronize(typename D::StreamRef{stream});
  return out;
}

template <class T>
void put(std::vector<std::byte>& to, std::uint64_t i, float value) {
  const T stored = from_float<T>(value);
  std::memcpy(to.data() + i * sizeof(T), &stored, sizeof stored);
}

template <class W, class G, class Number>
States make_states(std::uint64_t count, Number&& number) {
  States states;
  states.weight.resize(count * sizeof(W));
  states.gradient.resize(count * sizeof(G));
  for (std::uint64_t i = 0; i < count; ++i) {
    put<W>(states.weight, i, number());
    put<G>(states.gradient, i, number());
    states.m.push_back(number());
    states.v.push_back(number());
    states.master.push_back(number());
  }
  return states;
}

void check_same(const States& cuda, const States& host) {
  CHECK(cuda.weight == host.weight);
  CHECK(same(cuda.m, host.m));
  CHECK(same(cuda.v, host.v));
  CHECK(same(cuda.master, host.master));
}

// Of every NaN among `values`, computed ones only: which bits.
std::uint64_t other_nans(const std::vector<float>& values) {
  std::uint64_t others = 0;
  for (const float value : values) {
    const auto bits = bit_cast<std::uint32_t>(value);
    others += (bits & 0x7fffffffu) > 0x7f800000u && bits != 0x7fffffffu ? 1 : 0;
  }
  return others;
}

template <class W, class G>
void check_any_bits() {
  constexpr std::uint64_t count = 1'000'003;
  Random random{2};
  const States states = make_states<W, G>(count, [&] { return random.any(); });
  const States cuda = step_on<CudaDevice, W, G>(states, count, {0}, {});
  check_same(cuda, step_on<HostDevice, W, G>(states, count, {0}, {}));
  CHECK(cuda.weight != states.weight);
  CHECK(other_nans(cuda.m) == 0);
  CHECK(other_nans(cuda.v) == 0);
  if (sizeof(W) != 4) CHECK(other_nans(cuda.master) == 0);
  std::uint64_t nans = 0, others = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(W) == 2) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, cuda.weight.data() + 2 * i, 2);
      nans += (bits & 0x7fffu) > 0x7f80u ? 1 : 0;
      others += (bits & 0x7fffu) > 0x7f80u && bits != 0x7fffu ? 1 : 0;
    } else {
      std::uint32_t bits = 0;
      std::memcpy(&bits, cuda.weight.data() + 4 * i, 4);
      nans += (bits & 0x7fffffffu) > 0x7f800000u ? 1 : 0;
      others += (bits & 0x7fffffffu) > 0x7f800000u && bits != 0x7fffffffu ? 1 : 0;
    }
  }
  CHECK(nans > 1000);
  CHECK(others == 0);
}

}  // namespace

TEST_CASE("a million states of any bits: denormals, infinities, NaNs") {
  SUBCASE("fp32") { check_any_bits<float, float>(); }
  SUBCASE("bf16 weights, fp32 gradients") { check_any_bits<bf16, float>(); }
  SUBCASE("bf16") { check_any_bits<bf16, bf16>(); }
}

TEST_CASE("norms and coefficients, to step 10^6") {
  constexpr std::uint64_t count = 70'001;  // more than a leaf
  Random random{3};
  const States states = make_states<float, float>(count, [&] { return random.spread(-20, 10); });
  std::vector<std::uint64_t> applied;
  for (std::uint64_t n = 0; n < 12; ++n) applied.push_back(n);
  for (int i = 0; i < 12; ++i) applied.push_back(random.next() % 1'000'000);
  applied.push_back(999'999);
  std::vector<double> cuda_norms, host_norms;
  const AdamWStep options{.gradient_scale = 0.37f, .max_norm = 0.9f};
  const States cuda = step_on<CudaDevice, float, float>(states, count, applied, options, &cuda_norms);
  check_same(cuda, step_on<HostDevice, float, float>(states, count, applied, options, &host_norms));
  REQUIRE(cuda_norms.size() == applied.size());
  CHECK(cuda_norms == host_norms);
  CHECK(cuda_norms[0] > 0.9);
}

TEST_CASE("coefficients of every step to 1000, and of random ones to 10^6") {
  Random random{4};
  const States states = make_states<float, float>(1, [&] { return random.spread(-3, 3); });
  std::vector<std::uint64_t> applied;
  for (std::uint64_t n = 0; n < 1000; ++n) applied.push_back(n);
  for (int i = 0; i < 1000; ++i) applied.push_back(random.next() % 1'000'000);
  check_same(step_on<CudaDevice, float, float>(states, 1, applied, {}),
             step_on<HostDevice, float, float>(states, 1, applied, {}));
}
