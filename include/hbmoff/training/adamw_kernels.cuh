// PagedAdamW's kernels on a GPU: the same bits as the callables of adamw_kernels.hpp, for nvcc.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <source_location>

#include "hbmoff/core/exact_math.hpp"
#include "hbmoff/device/cuda_device.hpp"
#include "hbmoff/training/adamw.hpp"
#include "hbmoff/training/adamw_kernels.hpp"
#include "hbmoff/training/norm.hpp"

namespace hbmoff {
namespace adamw_kernels::cuda {

inline constexpr unsigned block_threads = 256;
inline constexpr unsigned warp_threads = 32;
inline constexpr unsigned max_blocks = 1u << 14;  ///< kernels stride over what is more
/// Neighbouring elements of a page that one warp takes at once: it looks for their slice once.
inline constexpr std::uint64_t warp_elements = 1024;

static_assert(norm_lanes == warp_threads, "a warp sums a leaf");

[[nodiscard]] __device__ inline std::uint64_t warp_index() {
  return (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / warp_threads;
}
[[nodiscard]] __device__ inline std::uint64_t warp_count() {
  return std::uint64_t{gridDim.x} * blockDim.x / warp_threads;
}
[[nodiscard]] __device__ inline unsigned lane_index() { return threadIdx.x % warp_threads; }

/// Calls `f.operator()<W>(pointer)` with the tensor's weight, typed; and so for its gradient.
template <class F>
__device__ void with_weight(const Tensor& tensor, std::uint64_t first, const F& f) {
  switch (tensor.weight_dtype) {
    case DType::fp32:
      return f(static_cast<float*>(tensor.weight) + first);
    case DType::bf16:
      return f(static_cast<bf16*>(tensor.weight) + first);
    case DType::fp16:
      return f(static_cast<fp16*>(tensor.weight) + first);
  }
}
template <class F>
__device__ void with_gradient(const Tensor& tensor, std::uint64_t first, const F& f) {
  switch (tensor.gradient_dtype) {
    case DType::fp32:
      return f(static_cast<const float*>(tensor.gradient) + first);
    case DType::bf16:
      return f(static_cast<const bf16*>(tensor.gradient) + first);
    case DType::fp16:
      return f(static_cast<const fp16*>(tensor.gradient) + first);
  }
}

/// Elements [first, first + count) of a slice. What a thread does with a part of a page, see `for_page`.
struct Part {
  const AdamWSlice& slice;
  std::uint64_t first;
  std::uint64_t count;
};

/// Calls `f(part)` for the parts of slices that this warp takes of a page of `elements` elements; every lane makes the same
/// calls. Slices lie in order.
template <class F>
__device__ void for_page(const Tables& tables, const PageMemory& page, std::uint64_t elements, const F& f) {
  const AdamWSlice* slices = tables.slices + page.first_slice;
  for (std::uint64_t begin = warp_index() * warp_elements; begin < elements; begin += warp_count() * warp_elements) {
    const std::uint64_t end = begin + warp_elements < elements ? begin + warp_elements : elements;
    std::uint32_t s = 0;  // the first slice that ends behind `begin`
    for (std::uint32_t above = page.slice_count; s < above;) {
      const std::uint32_t middle = s + (above - s) / 2;
      if (slices[middle].page_first + slices[middle].count > begin) {
        above = middle;
      } else {
        s = middle + 1;
      }
    }
    for (; s < page.slice_count && slices[s].page_first < end; ++s) {
      const AdamWSlice& slice = slices[s];
      const std::uint64_t from = slice.page_first > begin ? slice.page_first : begin;
      const std::uint64_t slice_end = slice.page_first + slice.count;
      const std::uint64_t to = slice_end < end ? slice_end : end;
      if (from < to) f(Part{slice, from - slice.page_first, to - from});
    }
  }
}

[[nodiscard]] inline std::uint64_t elements_of(const PageMemory& page) {
  return (page.bytes - page.stride * (page.master ? 2 : 1)) / sizeof(float);
}

/// A callable of one thread.
template <class Kernel>
__global__ void __launch_bounds__(1) single(const Kernel kernel) {
  kernel();
}

struct CopyToMaster {
  float* master;
  std::uint64_t count;

  template <class W>
  __device__ void operator()(const W* weight) const {
    for (std::uint64_t i = lane_index(); i < count; i += warp_threads) master[i] = canonical(to_float(weight[i]));
  }
};

__global__ void __launch_bounds__(block_threads)
    take_masters(const Tables tables, const PageMemory page, const std::uint64_t elements) {
  for_page(tables, page, elements, [&](const Part& part) {
    float* master = page.array(2) + part.slice.page_first + part.first;
    with_weight(tables.tensors[part.slice.tensor], part.slice.tensor_first + part.first,
                CopyToMaster{master, part.count});
  });
}

struct LeafSum {
  std::uint64_t count;
  double* sum;

  template <class G>
  __device__ void operator()(const G* leaf) const {
    double lane_sum = 0.0;
    for (std::uint64_t i = lane_index(); i < count; i += warp_threads) {
      const double x = math::to_double(to_float(leaf[i]));
      lane_sum = math::fma(x, x, lane_sum);
    }
    for (unsigned half = warp_threads / 2; half > 0; half /= 2)
      lane_sum = __dadd_rn(lane_sum, __shfl_down_sync(0xffffffffu, lane_sum, half));
    if (lane_index() == 0) *sum = canonical(lane_sum);
  }
};

__global__ void __launch_bounds__(block_threads) leaf_sums(const Tables tables) {
  for (std::uint32_t t = 0; t < tables.tensor_count; ++t) {
    const Tensor& tensor = tables.tensors[t];
    if (!tensor.active()) continue;
    const std::uint64_t leaves = leaf_count(tensor.count);
    // Warp w takes the leaves whose number, counted over all tensors, is w modulo the warps: small tensors are spread.
    const std::uint64_t before = tensor.first_leaf % warp_count();
    for (std::uint64_t leaf = (warp_index() + warp_count() - before) % warp_count(); leaf < leaves;
         leaf += warp_count()) {
      const std::uint64_t first = leaf * norm_leaf, left = tensor.count - first;
      with_gradient(tensor, first,
                    LeafSum{left < norm_leaf ? left : norm_leaf, tables.leaves + tensor.first_leaf + leaf});
    }
  }
}

/// `tree_sum` by a whole block; the result is thread 0's. Each thread sums a subtree of 2^k neighbours, then the block
/// joins the subtrees' sums in pairs.
__device__ inline double block_tree_sum(const double* values, std::uint64_t n) {
  __shared__ double sums[block_threads];
  std::uint64_t each = 1;
  while (each * block_threads < n) each *= 2;
  const std::uint64_t first = threadIdx.x * each, subtrees = (n + each - 1) / each;
  __syncthreads();  // an earlier call's sums have been read
  if (first < n) sums[threadIdx.x] = tree_sum(values + first, n - first < each ? n - first : each);
  for (unsigned apart = 1; apart < block_threads; apart *= 2) {
    __syncthreads();
    const unsigned right = threadIdx.x + apart;
    if (threadIdx.x % (2 * apart) == 0 && right < subtrees)
      sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[right]);
  }
  return n == 0 ? 0.0 : canonical(sums[0]);
}

__global__ void __launch_bounds__(block_threads) join_tensors(const Tables tables) {
  for (std::uint32_t t = blockIdx.x; t < tables.tensor_count; t += gridDim.x) {
    const Tensor& tensor = tables.tensors[t];
    const double sum =
        tensor.active() ? block_tree_sum(tables.leaves + tensor.first_leaf, leaf_count(tensor.count)) : 0.0;
    if (threadIdx.x == 0) tables.tensor_sums[t] = sum;
  }
}

__global__ void __launch_bounds__(block_threads) join_all(const Tables tables) {
  const double sum = block_tree_sum(tables.tensor_sums, tables.tensor_count);
  if (threadIdx.x != 0) return;
  const bool finite = (bit_cast<std::uint64_t>(sum) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
  tables.shared->norm = {sum, finite ? 1u : 0u, 0};
}

__global__ void __launch_bounds__(block_threads) coefficients(const Coefficients kernel) {
  for (std::uint64_t t = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < kernel.tables.tensor_count;
       t += std::uint64_t{gridDim.x} * blockDim.x)
    kernel.of_tensor(static_cast<std::uint32_t>(t));
}

template <class W>
struct UpdatePart {
  float* m;
  float* v;
  W* weight;
  float* master;  ///< null: the weight is its own
  std::uint64_t count;
  AdamWCoefficients c;

  template <class G>
  __device__ void operator()(const G* gradient) const {
    for (std::uint64_t i = lane_index(); i < count; i += warp_threads) {
      const float w = master != nullptr ? master[i] : to_float(weight[i]);
      const AdamWState next = adamw_update({m[i], v[i], w}, to_float(gradient[i]), c);
      m[i] = next.m;
      v[i] = next.v;
      if (master != nullptr) master[i] = next.w;
      weight[i] = from_float<W>(next.w);
    }
  }
};

__global__ void __launch_bounds__(block_threads)
    update_page(const Tables tables, const PageMemory page, const std::uint64_t elements) {
  for_page(tables, page, elements, [&](const Part& part) {
    const AdamWCoefficients c = tables.coefficients[part.slice.tensor];
    if (c.apply == 0) return;
    const Tensor& tensor = tables.tensors[part.slice.tensor];
    const std::uint64_t in_page = part.slice.page_first + part.first, in_tensor = part.slice.tensor_first + part.first;
    float* master = page.master ? page.array(2) + in_page : nullptr;
    with_weight(tensor, in_tensor, [&](auto* weight) {
      with_gradient(tensor, in_tensor,
                    UpdatePart<std::remove_pointer_t<decltype(weight)>>{
                        page.array(0) + in_page, page.array(1) + in_page, weight, master, part.count, c});
    });
  });
}

/// Launches with this device current; the status is the launch's own, whatever the caller's last error is.
class Launcher {
 public:
  Launcher(CudaDevice& device, CudaDevice::StreamRef stream, const char* name, std::source_location at)
      : device_{device}, stream_{stream}, name_{name}, at_{at}, current_{device, at} {}

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), std::uint64_t blocks, unsigned threads,
                  const Arguments&... arguments) {
    if (blocks == 0) return;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks < max_blocks ? blocks : max_blocks));
    config.blockDim = dim3(threads);
    config.stream = stream_.get();
    device_.check(cudaLaunchKernelEx(&config, kernel, arguments...), name_, at_);
  }

 private:
  CudaDevice& device_;
  CudaDevice::StreamRef stream_;
  const char* name_;
  std::source_location at_;
  CudaDevice::Current current_;
};

[[nodiscard]] constexpr std::uint64_t blocks_for(std::uint64_t items, std::uint64_t items_per_block) {
  return items / items_per_block + (items % items_per_block != 0 ? 1 : 0);
}
inline constexpr std::uint64_t most_leaf_blocks =
    1024;  // several for each multiprocessor; each block takes the rest in turn
inline constexpr std::uint64_t page_elements_per_block = warp_elements * (block_threads / warp_threads);

template <class Kernel>
void put(Launcher& launch, CudaDevice&, const Kernel& kernel, CudaDevice::StreamRef, std::source_location) {
  launch(&single<Kernel>, 1, 1, kernel);
}
inline void put(Launcher& launch, CudaDevice& device, const InitialisePage& kernel, CudaDevice::StreamRef stream,
                std::source_location at) {
  if (!kernel.keep_moments) device.fill_async({kernel.page.data, kernel.page.bytes}, std::byte{0}, stream, at);
  if (!kernel.page.master) return;
  const std::uint64_t elements = elements_of(kernel.page);
  launch(&take_masters, blocks_for(elements, page_elements_per_block), block_threads, kernel.tables, kernel.page,
         elements);
}
inline void put(Launcher& launch, CudaDevice&, const LeafSums& kernel, CudaDevice::StreamRef, std::source_location) {
  const std::uint64_t blocks = blocks_for(kernel.tables.leaf_total, block_threads / warp_threads);
  launch(&leaf_sums, blocks < most_leaf_blocks ? blocks : most_leaf_blocks, block_threads, kernel.tables);
}
inline void put(Launcher& launch, CudaDevice&, const JoinLeaves& kernel, CudaDevice::StreamRef, std::source_location) {
  launch(&join_tensors, kernel.tables.tensor_count, block_threads, kernel.tables);
  launch(&join_all, 1, block_threads, kernel.tables);
}
inline void put(Launcher& launch, CudaDevice&, const Coefficients& kernel, CudaDevice::StreamRef,
                std::source_location) {
  launch(&coefficients, blocks_for(kernel.tables.tensor_count, block_threads), block_threads, kernel);
}
inline void put(Launcher& launch, CudaDevice&, const UpdatePage& kernel, CudaDevice::StreamRef, std::source_location) {
  const std::uint64_t elements = elements_of(kernel.page);
  launch(&update_page, blocks_for(elements, page_elements_per_block), block_threads, kernel.tables, kernel.page,
         elements);
}

}  // namespace adamw_kernels::cuda

template <class Kernel>
void launch_kernel(CudaDevice& device, const Kernel& kernel, CudaDevice::StreamRef stream, std::source_location at) {
  adamw_kernels::cuda::Launcher launch{device, stream, Kernel::name, at};
  adamw_kernels::cuda::put(launch, device, kernel, stream, at);
}

}  // namespace hbmoff
