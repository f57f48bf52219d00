// The library in a small trainer: a deep stack of elementwise layers y = tanh(w x + b) learns alternating signs.
// Runs twice, with everything resident and with everything paged, and compares the bits of the weights.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "hbmoff/hbmoff.hpp"

namespace {

using namespace hbmoff;
using Stream = HostDevice::StreamRef;

constexpr std::uint32_t layers = 16;
constexpr std::uint64_t width = 4096;
constexpr int steps = 20;

// One tensor with its gradient, both in HBM.
struct Parameter {
  TensorInfo info;
  HbmArena<HostDevice>::Buffer weight, gradient;
};

// The kernels. On a HostDevice a kernel is a callable put on a stream, as <<<>>> puts one on a CUDA stream.
// `flow` carries what goes from layer to layer: values on the way up, their gradients on the way down.
void start(HostDevice& device, device_span<float> flow, Stream stream) {
  device.enqueue(stream, [flow] {
    for (std::uint64_t i = 0; i < width; ++i) flow.data()[i] = std::sin(static_cast<float>(i));
  });
}

// The gradient of the squared error, in place of the output.
void error(HostDevice& device, device_span<float> flow, Stream stream) {
  device.enqueue(stream, [flow] {
    for (std::uint64_t i = 0; i < width; ++i) flow.data()[i] -= i % 2 == 0 ? 0.5f : -0.5f;
  });
}

void forward(HostDevice& device, const Parameter& w, const Parameter& b, device_span<float> flow, device_span<float> x,
             device_span<float> y, Stream stream) {
  device.enqueue(stream, [flow, x, y, w = w.weight.as<float>(), b = b.weight.as<float>()] {
    for (std::uint64_t i = 0; i < width; ++i) {
      x.data()[i] = flow.data()[i];  // saved for the backward
      y.data()[i] = flow.data()[i] = std::tanh(w.data()[i] * x.data()[i] + b.data()[i]);
    }
  });
}

void backward(HostDevice& device, const Parameter& w, const Parameter& b, device_span<float> flow,
              device_span<const float> x, device_span<const float> y, Stream stream) {
  device.enqueue(stream,
                 [flow, x, y, weight = w.weight.as<float>(), dw = w.gradient.as<float>(), db = b.gradient.as<float>()] {
                   for (std::uint64_t i = 0; i < width; ++i) {
                     const float g = flow.data()[i] * (1.0f - y.data()[i] * y.data()[i]);
                     dw.data()[i] = g * x.data()[i];
                     db.data()[i] = g;
                     flow.data()[i] = g * weight.data()[i];
                   }
                 });
}

// Trains and returns a hash of the weights; `Policy` says where state lives.
template <class Policy>
std::uint64_t train(const char* label, Policy policy) {
  HostDevice device{{.hbm_capacity = 8_MiB}};
  HbmArena hbm{device, 4_MiB};
  PinnedHostArena host{device, 16_MiB};
  const HostDevice::Stream owner = device.create_stream("compute");
  const Stream stream = owner;

  std::vector<Parameter> parameters;
  for (std::uint32_t l = 0; l < layers; ++l) {
    for (const char* kind : {"w", "b"}) {
      const std::string name = "layer." + std::to_string(l) + "." + kind;
      Parameter& p = parameters.emplace_back();
      p.info = {.name = name, .layer = static_cast<std::int32_t>(l), .count = width};
      p.weight = hbm.allocate(Bytes{width * 4}, name, Role::weight, stream);
      p.gradient = hbm.allocate(Bytes{width * 4}, name + ".gradient", Role::gradient, stream);
      device.enqueue(stream, [w = p.weight.as<float>(), start = kind[0] == 'w' ? 1.0f : 0.0f] {
        for (std::uint64_t i = 0; i < width; ++i) w.data()[i] = start;
      });
    }
  }
  const auto flow_memory = hbm.allocate(Bytes{width * 4}, "flow", Role::workspace, stream);
  const device_span<float> flow = flow_memory.as<float>();
  const auto weights = [&](std::uint32_t l) -> const Parameter& { return parameters[2 * l]; };
  const auto biases = [&](std::uint32_t l) -> const Parameter& { return parameters[2 * l + 1]; };

  const BundleLayout layout{.tensors = {{{.name = "x", .count = width}}, {{.name = "y", .count = width}}}};

  PagedAdamW optimizer{hbm, host, policy, {.page = 64_KiB}};
  for (auto& p : parameters) optimizer.add(p.info, p.weight.as<float>(), p.gradient.as<float>());
  ActivationStore activations{hbm, host, policy, layers, layout};

  for (int step = 0; step < steps; ++step) {
    start(device, flow, stream);
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = activations.save(l, stream);  // HBM that layer l writes its activations into
      forward(device, weights(l), biases(l), flow, saved[0], saved[1], stream);
      saved.commit();  // leaves for the host behind the compute
    }
    error(device, flow, stream);
    for (std::uint32_t l = layers; l-- > 0;) {
      auto saved = activations.restore(l, stream);  // on its way since layer l + 1
      backward(device, weights(l), biases(l), flow, saved[0], saved[1], stream);
    }
    optimizer.step(stream, {.max_norm = 1.0f});
  }

  const double norm = optimizer.report(optimizer.steps()).norm;  // blocks until the last step has decided
  device.synchronize(stream);
  const ArenaUsage usage = hbm.usage();
  const TransferStats moved = optimizer.stats() + activations.stats();
  std::uint64_t hash = 14695981039346656037u;
  device.enqueue(stream, [&] {
    for (const Parameter& p : parameters) {
      for (std::uint64_t i = 0; i < width; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, p.weight.as<float>().data() + i, sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
      }
    }
  });
  device.synchronize(stream);
  std::printf("%-9s HBM %s, moved %s, last gradient norm %.6f, weights %016llx\n", label,
              to_string(usage.high_water).c_str(), to_string(Bytes{moved.h2d_bytes + moved.d2h_bytes}).c_str(), norm,
              static_cast<unsigned long long>(hash));
  return hash;
}

}  // namespace

int main() {
  const std::uint64_t resident = train("resident:", KeepResident{});
  const std::uint64_t paged = train("paged:", OffloadAll{});
  std::puts(resident == paged ? "the same bits" : "DIFFERENT BITS");
  return resident == paged ? 0 : 1;
}
