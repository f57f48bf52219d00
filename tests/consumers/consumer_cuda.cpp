// One step of the optimizer, its state in pinned memory, on a GPU.
#include <cstdio>

#include <cuda_runtime_api.h>

#include "hbmoff/cuda.hpp"  // hbmoff.hpp and CudaDevice; needs cuda_runtime_api.h

using namespace hbmoff;

int main() {
  cudaStream_t mine = nullptr;
  if (cudaStreamCreate(&mine) != cudaSuccess) return 1;
  {
    CudaDevice device{0};
    HbmArena hbm{device, 1_MiB};
    PinnedHostArena host{device, 1_MiB};
    const CudaDevice::StreamRef stream = cuda_stream(mine);  // a cudaStream_t of yours, adopted
    auto weight = hbm.allocate(4000_B, "weight", Role::weight, stream);
    auto gradient = hbm.allocate(4000_B, "gradient", Role::gradient, stream);
    device.fill_async(weight.bytes(), std::byte{0x3f}, stream);
    device.fill_async(gradient.bytes(), std::byte{0x3d}, stream);
    PagedAdamW optimizer{hbm, host, OffloadOptimizerState{}, {.page = 1_KiB}};
    optimizer.add({.name = "w", .count = 1000}, weight.as<float>(), device_span<const float>{gradient.as<float>()});
    const StepReport report = optimizer.report(optimizer.step(stream));
    std::printf("norm of the gradient: %g\n", report.norm);
    if (!report.applied || !(report.norm > 1.4 && report.norm < 1.5)) return 1;
    device.synchronize(stream);
  }
  return cudaStreamDestroy(mine) == cudaSuccess ? 0 : 1;
}
