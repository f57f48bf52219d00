// Is my trainer's ordering right? A hand-written double buffer, as trainers have them, run on a device that checks: once
// with a wait that was forgotten, once whole. The bits may well be right both times; the order is not.
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "hbmoff/hbmoff.hpp"

namespace {

using namespace hbmoff;
using Trainer = CheckedDevice<HostDevice>;  // was: HostDevice

constexpr std::uint64_t count = 1 << 16;
constexpr int layers = 6;

// Brings the weights of one layer after the other into one of two buffers, while the layer before computes.
void forward(Trainer& device, HbmArena<Trainer>& hbm, PinnedHostArena<Trainer>& host, bool forget_a_wait) {
  const Trainer::Stream compute = device.create_stream("compute"), copies = device.create_stream("copy-in");
  const auto activations = hbm.allocate(Bytes{count * 4}, "activations", Role::activation, compute);
  const auto home = host.allocate(Bytes{count * 4}, "weights on the host", Role::weight, copies);
  device.note_host_access("load weights", {}, {home.bytes()});
  for (float& w : home.as<float>()) w = 0.5f;
  device.fill_async(activations.bytes(), std::byte{}, compute);

  std::vector<HbmArena<Trainer>::Buffer> weights;
  std::vector<Trainer::Event> filled, used;
  for (int i = 0; i < 2; ++i) {
    weights.push_back(hbm.allocate(Bytes{count * 4}, i == 0 ? "weights A" : "weights B", Role::weight, copies));
    filled.push_back(device.create_event());
    used.push_back(device.create_event());
  }
  for (int layer = 0; layer < layers; ++layer) {
    const auto i = static_cast<std::size_t>(layer % 2);
    // The buffer is free again once the layer before last has used it.
    if (layer >= 2 && !forget_a_wait) device.wait(copies, used[i]);
    device.copy_async(weights[i].bytes(), pinned_span<const std::byte>{home.bytes()}, copies);
    device.record(filled[i], copies);
    device.wait(compute, filled[i]);
    const device_span<float> w = weights[i].as<float>(), x = activations.as<float>();
    device.note_access(compute, "layer forward", {w, x}, {x});  // reads, writes
    device.enqueue(compute,
                   [w = w.data(), x = x.data()] {
                     for (std::uint64_t k = 0; k < count; ++k) x[k] += w[k];
                   },
                   {.name = "layer forward"});
    device.record(used[i], compute);
  }
  device.synchronize(Trainer::StreamRef{compute});
}

// The first report, or an empty string.
std::string check(bool forget_a_wait) {
  std::vector<CheckReport> reports;  // else they go to standard error as well
  Trainer device{{.hbm_capacity = 4_MiB}, {.reports = &reports}};
  HbmArena hbm{device, 2_MiB};
  PinnedHostArena host{device, 2_MiB};
  try {
    forward(device, hbm, host, forget_a_wait);
  } catch (const CheckError& error) {
    return error.what();
  }
  return {};
}

}  // namespace

int main() {
  const std::string report = check(true), none = check(false);
  std::printf("With a wait forgotten:\n%s\n\nWhole: %s\n", report.c_str(), none.empty() ? "no report" : none.c_str());
  return !report.empty() && none.empty() ? 0 : 1;
}
