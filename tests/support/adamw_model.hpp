// What the optimizer's tests share: a plain model of AdamW over all tensors, and a rig that trains model and optimizer
// side by side and compares every bit.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "../gate.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "hbmoff/training/norm.hpp"
#include "hbmoff/training/paged_adamw.hpp"
#include "logging_device.hpp"
#include "random.hpp"

namespace adamw_test {

using namespace hbmoff;
using random_numbers::hash;

/// A tensor as a test describes it.
struct TensorSpec {
  std::string name;
  std::uint64_t count = 0;
  DType weight = DType::fp32;
  DType gradient = DType::fp32;
  std::uint32_t group = 0;
};

/// An ordinary number: either sign, magnitudes over eight powers of two, now and then a zero of either sign.
[[nodiscard]] inline float number(std::uint64_t seed, std::uint64_t a, std::uint64_t b, std::uint64_t i) {
  const std::uint64_t h = hash(hash(hash(seed + a) + b) + i);
  if (h % 64 == 0) return h & 64 ? -0.0f : 0.0f;
  const auto fraction = static_cast<float>(1 + (h >> 41));
  const float x = std::ldexp(fraction, -23 - static_cast<int>(h >> 8 & 7));
  return h & 128 ? x : -x;
}

/// Calls `f` with a value of the element type.
template <class F>
auto with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16:
      return f(bf16{});
    case DType::fp16:
      return f(fp16{});
    case DType::fp32:
      break;
  }
  return f(float{});
}

/// Element `i` of memory of a type known at run time.
[[nodiscard]] inline float load(const void* data, DType dtype, std::uint64_t i) {
  return with_type(dtype, [&]<class T>(T) {
    T value;
    std::memcpy(&value, static_cast<const std::byte*>(data) + i * sizeof(T), sizeof(T));
    return to_float(value);
  });
}
inline void store(void* data, DType dtype, std::uint64_t i, float x) {
  with_type(dtype, [&]<class T>(T) {
    const T value = from_float<T>(x);
    std::memcpy(static_cast<std::byte*>(data) + i * sizeof(T), &value, sizeof(T));
  });
}

/// Bits of two arrays.
template <class A, class B>
[[nodiscard]] bool same_bits(const A& a, const B& b) {
  return std::size(a) == std::size(b) &&
         (std::size(a) == 0 || std::memcmp(std::data(a), std::data(b), std::size(a) * sizeof(*std::data(a))) == 0);
}

/// The gradient of one step, as written by a kernel on the device and read by the model.
struct GradientSource {
  std::uint64_t seed = 1;
  std::uint64_t step = 1;
  /// This tensor's element `bad_index` is `bad_value`.
  std::uint32_t bad_tensor = ~0u;
  std::uint64_t bad_index = 0;
  float bad_value = std::numeric_limits<float>::quiet_NaN();
  bool zero = false;

  [[nodiscard]] float at(std::uint32_t tensor, std::uint64_t i) const {
    if (tensor == bad_tensor && i == bad_index) return bad_value;
    return zero ? 0.0f : number(seed, tensor, step, i);
  }
};

/// All tensors and their states in plain vectors, updated element after element by the pure function.
class AdamWModel {
 public:
  struct Tensor {
    TensorSpec spec;
    std::vector<std::byte> weight;
    std::vector<float> m, v, master;
    std::uint64_t applied = 0;
    bool frozen = false;
    bool has_gradient = true;
  };

  AdamWModel(const std::vector<TensorSpec>& specs, std::uint64_t seed) {
    for (std::uint32_t t = 0; t < specs.size(); ++t) {
      const TensorSpec& spec = specs[t];
      Tensor tensor{spec, std::vector<std::byte>((size_of(spec.weight) * spec.count).count()), {}, {}, {}};
      for (std::uint64_t i = 0; i < spec.count; ++i)
        store(tensor.weight.data(), spec.weight, i, number(seed, 1000 + t, 0, i));
      tensors.push_back(std::move(tensor));
    }
    refresh(Moments::reset);
  }

  /// Masters are taken from the weights, moments and counts zeroed or kept.
  void refresh(Moments moments) {
    for (Tensor& t : tensors) {
      t.master.clear();
      if (t.spec.weight != DType::fp32) {
        for (std::uint64_t i = 0; i < t.spec.count; ++i)
          t.master.push_back(canonical(load(t.weight.data(), t.spec.weight, i)));
      }
      if (moments == Moments::keep) continue;
      t.m.assign(t.spec.count, 0.0f);
      t.v.assign(t.spec.count, 0.0f);
      t.applied = 0;
    }
  }

  StepReport step(const GradientSource& source, const std::vector<AdamWGroup>& groups, AdamWStep options = {},
                  const GradientNorm* own_norm = nullptr) {
    double squared = 0;
    bool finite = true;
    if (own_norm != nullptr) {
      squared = own_norm->squared_norm;
      finite = own_norm->finite != 0;
    } else {
      std::vector<double> sums;
      for (std::uint32_t t = 0; t < tensors.size(); ++t) {
        sums.push_back(0.0);
        if (!active(tensors[t])) continue;
        std::vector<float> gradient;
        for (std::uint64_t i = 0; i < tensors[t].spec.count; ++i) gradient.push_back(gradient_at(source, t, i));
        for (const float g : gradient) finite = finite && std::isfinite(g);
        sums.back() = sum_of_squares(gradient.data(), gradient.size());
      }
      squared = tree_sum(sums.data(), sums.size());
    }
    const double norm = std::sqrt(squared) * std::fabs(static_cast<double>(options.gradient_scale));
    const double scale =
        static_cast<double>(options.gradient_scale) * clip_scale(norm, static_cast<double>(options.max_norm));
    ++steps;
    if (!finite && options.skip_nonfinite) return {steps, norm, false, ++skipped};
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      Tensor& tensor = tensors[t];
      if (!active(tensor)) continue;
      const AdamWGroup& g = groups[tensor.spec.group];
      const AdamWCoefficients c =
          adamw_coefficients(g.learning_rate, g.weight_decay, g.beta1, g.beta2, g.epsilon, scale, ++tensor.applied);
      for (std::uint64_t i = 0; i < tensor.spec.count; ++i) {
        const bool low = !tensor.master.empty();
        const float w = low ? tensor.master[i] : load(tensor.weight.data(), tensor.spec.weight, i);
        const AdamWState next = adamw_update({tensor.m[i], tensor.v[i], w}, gradient_at(source, t, i), c);
        tensor.m[i] = next.m;
        tensor.v[i] = next.v;
        if (low) tensor.master[i] = next.w;
        store(tensor.weight.data(), tensor.spec.weight, i, next.w);
      }
    }
    return {steps, norm, true, skipped};
  }

  std::vector<Tensor> tensors;
  std::uint64_t steps = 0;
  std::uint64_t skipped = 0;

 private:
  static bool active(const Tensor& t) { return !t.frozen && t.has_gradient && t.spec.count != 0; }
  [[nodiscard]] float gradient_at(const GradientSource& source, std::uint32_t t, std::uint64_t i) const {
    const float x = source.at(t, i);
    return with_type(tensors[t].spec.gradient, [&]<class G>(G) { return to_float(from_float<G>(x)); });
  }
};

struct RigOptions {
  Bytes capacity{std::uint64_t{16} << 20};
  std::uint64_t ring_capacity = 1 << 14;
  std::uint64_t seed = 7;
  bool debug_protection = false;
};

template <class D>
concept RunsHostCode = requires(D& device, typename D::StreamRef stream) { device.enqueue(stream, [] {}); };

template <class D>
[[nodiscard]] D make_device(const RigOptions& options) {
  if constexpr (RunsHostCode<D>) {
    return D{HostDeviceOptions{.hbm_capacity = options.capacity,
                               .ring_capacity = options.ring_capacity,
                               .debug_protection = options.debug_protection}};
  } else {
    return D{};
  }
}
/// Puts work on the stream that writes `content`. Where the device runs no host code, waits for it.
template <class D>
void upload(D& device, typename D::StreamRef stream, device_span<std::byte> to, std::vector<std::byte> content,
            std::string_view label) {
  if (content.empty()) return;
  if constexpr (RunsHostCode<D>) {
    device.note_access(stream, label, {}, {to});
    device.enqueue(stream,
                   [to = to.data(), content = std::move(content)] { std::memcpy(to, content.data(), content.size()); });
  } else {
    const auto staging = device.allocate_pinned(Bytes{content.size()});
    device.note_host_access(label, {}, {staging});
    std::memcpy(staging.data(), content.data(), content.size());
    device.copy_async(to, pinned_span<const std::byte>{staging}, stream);
    device.synchronize(stream);
    device.free_pinned(staging);
  }
}
/// Waits for the stream, and gives what is there.
template <class D>
[[nodiscard]] std::vector<std::byte> download(D& device, typename D::StreamRef stream, device_span<std::byte> from) {
  std::vector<std::byte> out(from.count());
  if (out.empty()) return out;
  if constexpr (RunsHostCode<D>) {
    device.note_access(stream, "look", {from}, {});
    device.enqueue(stream, [from = from.data(), &out] { std::memcpy(out.data(), from, out.size()); });
    device.synchronize(stream);
  } else {
    const auto staging = device.allocate_pinned(from.size_bytes());
    device.copy_async(staging, device_span<const std::byte>{from}, stream);
    device.synchronize(stream);
    device.note_host_access("look", {staging}, {});
    std::memcpy(out.data(), staging.data(), out.size());
    device.free_pinned(staging);
  }
  return out;
}

/// A device, arenas whose freed memory is filled with 0xFF, and the tensors of a model in device memory.
template <Device D = LoggingDevice>
class Rig {
 public:
  explicit Rig(std::vector<TensorSpec> tensor_specs, RigOptions options = {})
      : device{make_device<D>(options)},
        hbm{device, options.capacity, {.max_blocks = 16384, .max_streams = 16, .fill_freed = true}},
        host{device, options.capacity, {.max_blocks = 16384, .max_streams = 16, .fill_freed = true}},
        stream{device.create_stream("compute")}, specs{std::move(tensor_specs)}, initial{specs, options.seed},
        seed{options.seed} {
    for (const TensorSpec& spec : specs) {
      weights.push_back(hbm.allocate(size_of(spec.weight) * spec.count, spec.name, Role::weight, stream));
      gradients.push_back(hbm.allocate(size_of(spec.gradient) * spec.count, spec.name, Role::gradient, stream));
    }
    load_weights(initial);
  }

  /// Writes the model's weights to the device.
  void load_weights(const AdamWModel& model) {
    for (std::uint32_t t = 0; t < specs.size(); ++t) {
      if (specs[t].count == 0) continue;
      upload(device, stream, weights[t].bytes(), model.tensors[t].weight, "load weights");
    }
    device.synchronize(stream);
  }

  /// Puts kernels on the stream that write the gradients of a step.
  void write_gradients(const GradientSource& source) { write_gradients(source, stream); }
  void write_gradients(const GradientSource& source, typename D::StreamRef on) {
    for (std::uint32_t t = 0; t < specs.size(); ++t) {
      const auto write = [source, t, count = specs[t].count, dtype = specs[t].gradient](std::byte* to) {
        for (std::uint64_t i = 0; i < count; ++i) store(to, dtype, i, source.at(t, i));
      };
      if constexpr (RunsHostCode<D>) {  // on the stream, which takes no memory
        device.note_access(on, "write gradients", {}, {gradients[t].bytes()});
        device.enqueue(on, [write, to = gradients[t].bytes().data()] { write(to); });
      } else {
        std::vector<std::byte> content(gradients[t].size().count());
        write(content.data());
        upload(device, on, gradients[t].bytes(), std::move(content), "write gradients");
      }
    }
  }

  /// Adds tensor `t`, under its name, to an optimizer.
  template <class Optimizer>
  TensorId add(Optimizer& optimizer, std::uint32_t t, bool with_gradient = true) {
    const TensorSpec& spec = specs[t];
    const TensorInfo info{.name = spec.name, .role = Role::weight, .dtype = spec.weight, .count = spec.count};
    return with_type(spec.weight, [&]<class W>(W) {
      return with_type(spec.gradient, [&]<class G>(G) {
        const auto gradient = with_gradient ? gradients[t].template as<G>() : device_span<G>{};
        return optimizer.add(info, weights[t].template as<W>(), device_span<const G>{gradient},
                             static_cast<GroupId>(spec.group));
      });
    });
  }
  template <class Optimizer>
  void add_all(Optimizer& optimizer) {
    for (std::uint32_t t = 0; t < specs.size(); ++t) add(optimizer, t);
  }

  [[nodiscard]] std::vector<std::byte> weight_bits(std::uint32_t t) {
    return download(device, stream, weights[t].bytes());
  }

  /// Compares every bit of weights, moments, masters and counts.
  template <class Optimizer>
  void check_equal(Optimizer& optimizer, const AdamWModel& model) {
    for (std::uint32_t t = 0; t < specs.size(); ++t) {
      const AdamWModel::Tensor& expected = model.tensors[t];
      INFO("tensor ", specs[t].name);
      CHECK(same_bits(weight_bits(t), expected.weight));
      CHECK(same_bits(state(optimizer, t, OptimizerState::first_moment), expected.m));
      CHECK(same_bits(state(optimizer, t, OptimizerState::second_moment), expected.v));
      if (specs[t].weight != DType::fp32)
        CHECK(same_bits(state(optimizer, t, OptimizerState::master_weight), expected.master));
      CHECK(optimizer.applied_steps(specs[t].name) == expected.applied);
    }
  }
  template <class Optimizer>
  [[nodiscard]] std::vector<float> state(Optimizer& optimizer, std::uint32_t t, OptimizerState which) {
    std::vector<float> out(specs[t].count, -1234.5f);
    optimizer.read(specs[t].name, which, out);
    return out;
  }

  D device;
  HbmArena<D> hbm;
  PinnedHostArena<D> host;
  typename D::Stream stream;
  std::vector<TensorSpec> specs;
  AdamWModel initial;
  std::vector<typename HbmArena<D>::Buffer> weights, gradients;
  std::uint64_t seed;
};

/// Tensors of every pair of types, of sizes around the boundaries of pages, vectors and leaves, in `groups` groups.
[[nodiscard]] inline std::vector<TensorSpec> mixed_tensors(std::uint32_t groups = 1) {
  constexpr DType types[] = {DType::fp32, DType::bf16, DType::fp16};
  constexpr std::uint64_t counts[] = {997, 0, 1, 64, 65, 2, 191, 4097, 31, 128, 7, 1, 613, 96, 17, 3, 16, 2053};
  std::vector<TensorSpec> specs;
  for (std::uint32_t t = 0; t < std::size(counts); ++t) {
    specs.push_back({"tensor." + std::to_string(t), counts[t], types[t % 3], types[t / 3 % 3], t % groups});
  }
  return specs;
}

/// The values of `groups` groups at a step: different for each, and every step anew.
[[nodiscard]] inline std::vector<AdamWGroup> groups_at(std::uint32_t groups, std::uint64_t step) {
  std::vector<AdamWGroup> values;
  for (std::uint32_t g = 0; g < groups; ++g) {
    const auto x = static_cast<float>(g + 1), s = static_cast<float>(step);
    values.push_back({.learning_rate = 1e-3f * x / s,
                      .weight_decay = g % 2 == 0 ? 0.01f * x : 0.0f,
                      .beta1 = 0.9f - 0.01f * x,
                      .beta2 = 0.999f - 0.002f * x,
                      .epsilon = 1e-8f * x});
  }
  return values;
}

/// Makes the groups of `optimizer` what `values` says; adds those that are missing.
template <class Optimizer>
void set_groups(Optimizer& optimizer, const std::vector<AdamWGroup>& values, bool add = false) {
  for (std::uint32_t g = 0; g < values.size(); ++g) {
    if (add && g > 0) {
      CHECK(optimizer.add_group(values[g]) == static_cast<GroupId>(g));
    } else {
      optimizer.group(static_cast<GroupId>(g)) = values[g];
    }
  }
}

inline void check_report(const StepReport& report, const StepReport& expected) {
  CHECK(report.step == expected.step);
  CHECK(same_bits(std::vector<double>{report.norm}, std::vector<double>{expected.norm}));
  CHECK(report.applied == expected.applied);
  CHECK(report.skipped_total == expected.skipped_total);
}

}  // namespace adamw_test
