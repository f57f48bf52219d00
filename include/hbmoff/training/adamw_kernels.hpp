// The kernels of PagedAdamW: what runs on the device, as plain callables over tables in device memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/exact_math.hpp"
#include "hbmoff/core/host_device.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/training/adamw.hpp"
#include "hbmoff/training/adamw_host.hpp"
#include "hbmoff/training/adamw_layout.hpp"
#include "hbmoff/training/norm.hpp"

namespace hbmoff {

/// The squared norm of a set of gradients (unscaled) and whether all their elements are finite, in device memory.
struct GradientNorm {
  double squared_norm;
  std::uint32_t finite;
  std::uint32_t reserved;
};

/// Kernels take everything by value but what lies on the device; each fits a launch's argument block (and the place
/// that a HostDevice keeps for a callable), so that no launch needs memory of its own that would have to outlive it.
namespace adamw_kernels {

/// A tensor as the device sees it. Gradient null: absent.
struct Tensor {
  void* weight;
  const void* gradient;
  std::uint64_t count;
  std::uint64_t first_leaf;
  std::uint32_t group;
  DType weight_dtype;
  DType gradient_dtype;
  bool frozen;

  [[nodiscard]] HBMOFF_HOST_DEVICE bool active() const { return gradient != nullptr && !frozen && count != 0; }
};

/// What a step leaves for the host to read.
struct Report {
  double norm;
  std::uint64_t step;
  std::uint64_t skipped_total;
  std::uint32_t applied;
  std::uint32_t reserved;
};

/// Numbers that the whole step shares.
struct Shared {
  GradientNorm norm;
  double scale;  ///< gradient scale with clipping
  Report report;
};

/// The tables, all in one block of device memory.
struct Tables {
  Shared* shared;
  Tensor* tensors;
  AdamWSlice* slices;
  AdamWCoefficients* coefficients;
  std::uint64_t* applied;  ///< steps applied, per tensor
  double* tensor_sums;
  double* leaves;
  std::uint64_t leaf_total;  ///< of all tensors
  std::uint32_t tensor_count;
};

/// Writes a few entries of a table.
template <class T, std::uint32_t N>
struct SetEntries {
  static constexpr const char* name = "adamw set table";
  T* table;
  std::uint32_t count;
  std::uint32_t index[N];
  T values[N];

  HBMOFF_HOST_DEVICE void operator()() const {
    for (std::uint32_t i = 0; i < count; ++i) table[index[i]] = values[i];
  }
};
using SetTensors = SetEntries<Tensor, 4>;
using SetSlices = SetEntries<AdamWSlice, 5>;

/// Calls `f` with the tensor's weight and gradient pointers, typed.
template <class F>
void with_weight(const Tensor& tensor, F&& f) {
  switch (tensor.weight_dtype) {
    case DType::fp32:
      return f(static_cast<float*>(tensor.weight));
    case DType::bf16:
      return f(static_cast<bf16*>(tensor.weight));
    case DType::fp16:
      return f(static_cast<fp16*>(tensor.weight));
  }
}
template <class F>
void with_gradient(const Tensor& tensor, F&& f) {
  switch (tensor.gradient_dtype) {
    case DType::fp32:
      return f(static_cast<const float*>(tensor.gradient));
    case DType::bf16:
      return f(static_cast<const bf16*>(tensor.gradient));
    case DType::fp16:
      return f(static_cast<const fp16*>(tensor.gradient));
  }
}

/// A page in device memory.
struct PageMemory {
  std::byte* data;
  std::uint64_t stride;
  std::uint64_t bytes;
  std::uint32_t first_slice;
  std::uint32_t slice_count;
  bool master;

  [[nodiscard]] HBMOFF_HOST_DEVICE float* array(std::uint32_t i) const {
    return reinterpret_cast<float*>(data + i * stride);
  }
};

/// Zeroes a page (moments, and the padding between tensors), and takes the masters from the weights.
struct InitialisePage {
  static constexpr const char* name = "adamw initialise page";
  Tables tables;
  PageMemory page;
  bool keep_moments;

  void operator()() const {
    if (!keep_moments) std::memset(page.data, 0, page.bytes);
    if (!page.master) return;
    for (std::uint32_t s = 0; s < page.slice_count; ++s) {
      const AdamWSlice& slice = tables.slices[page.first_slice + s];
      with_weight(tables.tensors[slice.tensor], [&](const auto* weight) {
        float* master = page.array(2) + slice.page_first;
        for (std::uint64_t i = 0; i < slice.count; ++i) master[i] = canonical(to_float(weight[slice.tensor_first + i]));
      });
    }
  }
};

/// The sum of squares of every leaf of every active gradient.
struct LeafSums {
  static constexpr const char* name = "adamw leaf sums";
  Tables tables;

  void operator()() const {
    for (std::uint32_t t = 0; t < tables.tensor_count; ++t) {
      const Tensor& tensor = tables.tensors[t];
      if (!tensor.active()) continue;
      with_gradient(tensor, [&](const auto* gradient) {
        const std::uint64_t n = leaf_count(tensor.count);
        for (std::uint64_t leaf = 0; leaf < n; ++leaf) {
          const std::uint64_t first = leaf * norm_leaf;
          tables.leaves[tensor.first_leaf + leaf] =
              leaf_sum_of_squares(gradient + first, (std::min)(norm_leaf, tensor.count - first));
        }
      });
    }
  }
};

/// Joins the leaves, tensor by tensor and then all tensors in the order they were added (inactive ones count 0).
struct JoinLeaves {
  static constexpr const char* name = "adamw join leaves";
  Tables tables;

  void operator()() const {
    for (std::uint32_t t = 0; t < tables.tensor_count; ++t) {
      const Tensor& tensor = tables.tensors[t];
      tables.tensor_sums[t] =
          tensor.active() ? tree_sum(tables.leaves + tensor.first_leaf, leaf_count(tensor.count)) : 0.0;
    }
    const double sum = tree_sum(tables.tensor_sums, tables.tensor_count);
    // The sum is finite exactly when every element is: squares of fp32 cannot overflow a double.
    tables.shared->norm = {sum, std::isfinite(sum) ? 1u : 0u, 0};
  }
};

/// Decides the step: clipping, and whether it is applied.
struct DecideStep {
  static constexpr const char* name = "adamw decide step";
  Tables tables;
  const GradientNorm* norm;  ///< the caller's own, or the tables'
  std::uint64_t step;
  float gradient_scale;
  float max_norm;
  bool skip_nonfinite;

  HBMOFF_HOST_DEVICE void operator()() const {
    Shared& shared = *tables.shared;
    const double scale = math::to_double(gradient_scale);
    const double scaled = math::sqrt(norm->squared_norm) * (scale < 0.0 ? -scale : scale);
    shared.scale = scale * clip_scale(scaled, math::to_double(max_norm));
    const bool apply = norm->finite != 0 || !skip_nonfinite;
    shared.report.norm = scaled;
    shared.report.step = step;
    shared.report.applied = apply ? 1 : 0;
    if (!apply) ++shared.report.skipped_total;
  }
};

/// Hyper-parameters of one group, for one step.
struct GroupValues {
  float learning_rate;
  float weight_decay;
  float beta1;
  float beta2;
  float epsilon;
};

/// Counts the step for the active tensors of a few groups and computes their coefficients.
struct Coefficients {
  static constexpr const char* name = "adamw coefficients";
  static constexpr std::uint32_t max_groups = 4;
  Tables tables;
  std::uint32_t first_group;
  std::uint32_t group_count;
  GroupValues groups[max_groups];

  void operator()() const {
    for (std::uint32_t t = 0; t < tables.tensor_count; ++t) of_tensor(t);
  }
  HBMOFF_HOST_DEVICE void of_tensor(std::uint32_t t) const {
    const Shared& shared = *tables.shared;
    const Tensor& tensor = tables.tensors[t];
    if (tensor.group < first_group || tensor.group >= first_group + group_count) return;
    AdamWCoefficients& c = tables.coefficients[t];
    c.apply = 0;
    if (!tensor.active() || shared.report.applied == 0) return;
    const GroupValues& g = groups[tensor.group - first_group];
    c = adamw_coefficients(g.learning_rate, g.weight_decay, g.beta1, g.beta2, g.epsilon, shared.scale,
                           ++tables.applied[t]);
  }
};

/// Updates the tensors' slices of one page.
struct UpdatePage {
  static constexpr const char* name = "adamw update page";
  Tables tables;
  PageMemory page;

  void operator()() const {
    for (std::uint32_t s = 0; s < page.slice_count; ++s) {
      const AdamWSlice& slice = tables.slices[page.first_slice + s];
      const AdamWCoefficients& c = tables.coefficients[slice.tensor];
      if (c.apply == 0) continue;
      const Tensor& tensor = tables.tensors[slice.tensor];
      float* master = page.master ? page.array(2) + slice.page_first : nullptr;
      with_weight(tensor, [&](auto* weight) {
        with_gradient(tensor, [&](const auto* gradient) {
          adamw_update_range(page.array(0) + slice.page_first, page.array(1) + slice.page_first,
                             weight + slice.tensor_first, master, gradient + slice.tensor_first, slice.count, c);
        });
      });
    }
  }
};

}  // namespace adamw_kernels

/// Steps whose reports are kept.
inline constexpr std::uint64_t adamw_report_ring = 8;
/// Bytes of pinned memory for reports: a cache line for each, and one for single values.
inline constexpr Bytes adamw_report_bytes{(adamw_report_ring + 1) * 64};

/// Bytes of the tables in device memory.
[[nodiscard]] constexpr Bytes adamw_table_bytes(std::uint64_t tensors, std::uint64_t slices, std::uint64_t leaves) {
  using namespace adamw_kernels;
  const auto array = [](std::uint64_t count, std::uint64_t size) { return round_up(count * size, 256); };
  return Bytes{array(1, sizeof(Shared)) + array(tensors, sizeof(Tensor)) + array(slices, sizeof(AdamWSlice)) +
               array(tensors, sizeof(AdamWCoefficients)) + 2 * array(tensors, 8) + array(leaves, 8)};
}

}  // namespace hbmoff
