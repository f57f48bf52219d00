// Objects that outlive main: their destructors run while the CUDA runtime shuts down, and meet its errors. Ends by itself,
// with exit status 0 and "end of main" printed.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>
#include <optional>

#include "hbmoff/cuda.hpp"

using namespace hbmoff;

namespace {

// In the order of their construction; destroyed the other way.
std::optional<CudaDevice> device;
std::optional<CudaDevice::Stream> stream;
std::optional<CudaDevice::Event> event;
std::unique_ptr<HbmArena<CudaDevice>> hbm;
std::unique_ptr<PinnedHostArena<CudaDevice>> host;
HbmArena<CudaDevice>::Buffer weight, gradient;
std::unique_ptr<PagedAdamW<CudaDevice, OffloadOptimizerState, 2>> optimizer;

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  device.emplace();
  stream.emplace(device->create_stream());
  event.emplace(device->create_event());
  hbm = std::make_unique<HbmArena<CudaDevice>>(*device, 1_MiB);
  host = std::make_unique<PinnedHostArena<CudaDevice>>(*device, 1_MiB);
  weight = hbm->allocate(4000_B, "weight", Role::weight, *stream);
  gradient = hbm->allocate(4000_B, "gradient", Role::gradient, *stream);
  optimizer = std::make_unique<PagedAdamW<CudaDevice, OffloadOptimizerState, 2>>(*hbm, *host, OffloadOptimizerState{},
                                                                                 PagedAdamWOptions{.page = 1_KiB});
  device->fill_async(weight.bytes(), std::byte{0x3f}, *stream);
  device->fill_async(gradient.bytes(), std::byte{0x3d}, *stream);
  optimizer->add({.name = "w", .count = 1000}, weight.as<float>(), device_span<const float>{gradient.as<float>()});
  optimizer->step(*stream);
  device->record(*event, *stream);
  std::puts("end of main");
  return 0;  // with work in flight
}
