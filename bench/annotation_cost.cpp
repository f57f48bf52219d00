// Launches with and (ANNOTATED) without notes of what they touch, for annotation_cost.py to count instructions.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;

namespace {

#ifdef ANNOTATED
constexpr bool annotated = true;
#else
constexpr bool annotated = false;
#endif

/// What a trainer's loop over its layers looks like. The device is a template argument, as in a trainer.
template <Device D>
__attribute__((noinline)) void launches(D& device, typename D::StreamRef stream,
                                        const std::vector<device_span<float>>& x,
                                        const std::vector<device_span<float>>& y, pinned_span<float> loss) {
  for (std::uint64_t i = 0; i < x.size(); ++i) {
    const auto from = x[i], to = y[i];
    if constexpr (annotated) device.note_access(stream, "layer", {from, to}, {to});
    device.enqueue(stream, [in = from.data(), out = to.data()] { out[0] += in[0]; }, {.name = "layer"});
    if constexpr (annotated) device.note_host_access("loss", {loss}, {loss.subspan(0, 1)});
    *loss.data() = static_cast<float>(i);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  HostDevice device{{.hbm_capacity = 1_MiB, .ring_capacity = 4096}};
  const auto memory = device.allocate_device(64_KiB).as<float>();
  const auto pinned = device.allocate_pinned(4_KiB).as<float>();
  {
    const auto stream = device.create_stream("compute");
    std::vector<device_span<float>> x, y;
    for (std::uint64_t i = 0; i < count; ++i) {
      x.push_back(memory.subspan(8 * (i % 1024), 4));
      y.push_back(memory.subspan(8 * (i % 1024) + 4, 4));
    }
    launches<HostDevice>(device, stream, x, y, pinned);
    device.synchronize(HostDevice::StreamRef{stream});
    std::printf("%g\n", static_cast<double>(pinned[0]));
  }
  device.free_pinned(pinned.bytes());
  device.free_device(memory.bytes());
}
