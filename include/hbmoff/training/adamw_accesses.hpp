// What each kernel of PagedAdamW reads and writes, for devices that check.
#pragma once

#include <cstdint>
#include <vector>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/training/adamw_kernels.hpp"
#include "hbmoff/training/adamw_layout.hpp"
#include "hbmoff/training/norm.hpp"

namespace hbmoff::adamw_kernels {

struct Accesses {
  std::vector<AccessRange> reads;
  std::vector<AccessRange> writes;

  template <class T>
  void read(const T* data, std::uint64_t count) {
    reads.push_back({data, Bytes{count * sizeof(T)}});
  }
  template <class T>
  void write(const T* data, std::uint64_t count) {
    writes.push_back({data, Bytes{count * sizeof(T)}});
  }
  /// Reads and then writes.
  template <class T>
  void update(const T* data, std::uint64_t count) {
    read(data, count);
    write(data, count);
  }
};

/// Gathers what a launch touches from the host's copies of the tables. What the device decides (to skip the step) makes
/// it touch less.
class AccessesOf {
 public:
  AccessesOf(const std::vector<Tensor>& tensors, const AdamWLayout& layout) : tensors_{tensors}, layout_{layout} {}

  template <class T, std::uint32_t N>
  Accesses operator()(const SetEntries<T, N>& kernel) const {
    Accesses a;
    for (std::uint32_t i = 0; i < kernel.count; ++i) a.write(kernel.table + kernel.index[i], 1);
    return a;
  }

  Accesses operator()(const InitialisePage& kernel) const {
    Accesses a;
    if (!kernel.keep_moments) a.write(kernel.page.data, kernel.page.bytes);
    if (!kernel.page.master) return a;
    read_slices(kernel.tables, kernel.page, a);
    for_each_slice(kernel.page, [&](const AdamWSlice& slice, const Tensor& tensor) {
      a.reads.push_back(part(tensor.weight, tensor.weight_dtype, slice));
      a.write(kernel.page.array(2) + slice.page_first, slice.count);
    });
    return a;
  }

  Accesses operator()(const LeafSums& kernel) const {
    Accesses a;
    a.read(kernel.tables.tensors, kernel.tables.tensor_count);
    for (const Tensor& tensor : tensors_) {
      if (!tensor.active()) continue;
      a.reads.push_back({tensor.gradient, size_of(tensor.gradient_dtype) * tensor.count});
      a.write(kernel.tables.leaves + tensor.first_leaf, leaf_count(tensor.count));
    }
    return a;
  }

  Accesses operator()(const JoinLeaves& kernel) const {
    Accesses a;
    a.read(kernel.tables.tensors, kernel.tables.tensor_count);
    for (const Tensor& tensor : tensors_) {
      if (tensor.active()) a.read(kernel.tables.leaves + tensor.first_leaf, leaf_count(tensor.count));
    }
    a.write(kernel.tables.tensor_sums, kernel.tables.tensor_count);
    a.write(&kernel.tables.shared->norm, 1);
    return a;
  }

  Accesses operator()(const DecideStep& kernel) const {
    Accesses a;
    a.read(kernel.norm, 1);
    a.write(&kernel.tables.shared->scale, 1);
    a.read(&kernel.tables.shared->report.skipped_total, 1);
    a.write(&kernel.tables.shared->report, 1);
    return a;
  }

  Accesses operator()(const Coefficients& kernel) const {
    Accesses a;
    a.read(&kernel.tables.shared->scale, 1);
    a.read(&kernel.tables.shared->report.applied, 1);
    a.read(kernel.tables.tensors, kernel.tables.tensor_count);
    for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
      const std::uint32_t group = tensors_[t].group;
      if (group < kernel.first_group || group >= kernel.first_group + kernel.group_count) continue;
      a.write(kernel.tables.coefficients + t, 1);
      if (tensors_[t].active()) a.update(kernel.tables.applied + t, 1);
    }
    return a;
  }

  Accesses operator()(const UpdatePage& kernel) const {
    Accesses a;
    read_slices(kernel.tables, kernel.page, a);
    for_each_slice(kernel.page, [&](const AdamWSlice& slice, const Tensor& tensor) {
      a.read(kernel.tables.coefficients + slice.tensor, 1);
      if (!tensor.active()) return;
      for (std::uint32_t i = 0; i < (kernel.page.master ? 3u : 2u); ++i) {
        a.update(kernel.page.array(i) + slice.page_first, slice.count);
      }
      const AccessRange weight = part(tensor.weight, tensor.weight_dtype, slice);
      if (!kernel.page.master) a.reads.push_back(weight);
      a.writes.push_back(weight);
      a.reads.push_back(part(tensor.gradient, tensor.gradient_dtype, slice));
    });
    return a;
  }

 private:
  template <class F>
  void for_each_slice(const PageMemory& page, F&& f) const {
    for (std::uint32_t s = 0; s < page.slice_count; ++s) {
      const AdamWSlice& slice = layout_.slices[page.first_slice + s];
      f(slice, tensors_[slice.tensor]);
    }
  }
  void read_slices(const Tables& tables, const PageMemory& page, Accesses& a) const {
    a.read(tables.slices + page.first_slice, page.slice_count);
    for_each_slice(page, [&](const AdamWSlice& slice, const Tensor&) { a.read(tables.tensors + slice.tensor, 1); });
  }
  static AccessRange part(const void* data, DType dtype, const AdamWSlice& slice) {
    const std::uint64_t size = size_of(dtype).count();
    return {static_cast<const std::byte*>(data) + slice.tensor_first * size, Bytes{slice.count * size}};
  }

  const std::vector<Tensor>& tensors_;
  const AdamWLayout& layout_;
};

}  // namespace hbmoff::adamw_kernels
