// What tests of CudaDevice share: how the optimizer's rig reaches its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "hbmoff/device/cuda_device.hpp"

namespace hbmoff {

// From and to memory that is not pinned: the runtime has read it when the call returns, and has written it when the
// stream is done.
inline void upload(CudaDevice& device, CudaDevice::StreamRef stream, device_span<std::byte> to,
                   const std::vector<std::byte>& content, std::string_view = {}) {
  device.check(cudaMemcpyAsync(to.data(), content.data(), content.size(), cudaMemcpyHostToDevice, stream.get()),
               "upload");
}
[[nodiscard]] inline std::vector<std::byte> download(CudaDevice& device, CudaDevice::StreamRef stream,
                                                     device_span<std::byte> from) {
  std::vector<std::byte> out(from.count());
  device.check(cudaMemcpyAsync(out.data(), from.data(), out.size(), cudaMemcpyDeviceToHost, stream.get()), "download");
  device.synchronize(stream);
  return out;
}

}  // namespace hbmoff
