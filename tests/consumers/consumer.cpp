// A user's program, built against an installed hbmoff and against hbmoff as a subproject: two small tensors are
// trained with the optimizer's state paged through HBM and with all of it resident, and end up with the same bits.
#include <bit>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "hbmoff/hbmoff.hpp"

bool formats();  // consumer_fmt.cpp

namespace {

using namespace hbmoff;

struct Result {
  std::vector<std::uint32_t> weight_bits;
  std::uint64_t bytes_moved = 0;
};

template <OffloadPolicy Policy>
Result train(Policy policy) {
  constexpr std::uint64_t count = 10'007;
  HostDevice device{{.hbm_capacity = 4_MiB}};
  HbmArena hbm{device, 4_MiB};
  PinnedHostArena host{device, 4_MiB};
  auto stream = device.create_stream("compute");
  auto weights = hbm.allocate(Bytes{2 * count * sizeof(float)}, "weights", Role::weight, stream);
  auto gradients = hbm.allocate(Bytes{2 * count * sizeof(float)}, "gradients", Role::gradient, stream);
  const auto w = weights.template as<float>();
  const auto g = gradients.template as<float>();

  Result result;
  {
    PagedAdamW optimizer{hbm, host, policy, {.page = 16_KiB}};
    const char* names[] = {"first", "second"};
    for (std::uint64_t i = 0; i < 2; ++i) {
      optimizer.add({.name = names[i], .role = Role::weight, .count = count}, w.subspan(i * count, count),
                    g.subspan(i * count, count));
    }
    device.enqueue(stream, [to = w.data()] {
      for (std::uint64_t i = 0; i < 2 * count; ++i) to[i] = static_cast<float>(i % 97) * 0.01f;
    });
    for (int step = 0; step < 3; ++step) {
      device.enqueue(stream, [to = g.data(), from = w.data()] {
        for (std::uint64_t i = 0; i < 2 * count; ++i) to[i] = from[i] - 0.5f;
      });
      optimizer.step(stream);
    }
    device.synchronize(stream);
    const TransferStats stats = optimizer.stats();
    result.bytes_moved = stats.h2d_bytes + stats.d2h_bytes;
  }

  auto copy = host.allocate(weights.size(), "copy", Role::other, stream);
  device.copy_async(copy.bytes(), weights.bytes(), stream);
  device.synchronize(stream);
  for (float x : copy.template as<float>()) result.weight_bits.push_back(std::bit_cast<std::uint32_t>(x));
  return result;
}

}  // namespace

int main() {
  const Result resident = train(KeepResident{});
  const Result paged = train(OffloadOptimizerState{});
  std::printf("moved: %llu bytes resident, %llu paged\n", static_cast<unsigned long long>(resident.bytes_moved),
              static_cast<unsigned long long>(paged.bytes_moved));
  if (!formats()) return 3;
  if (resident.bytes_moved != 0 || paged.bytes_moved == 0) return 1;
  return resident.weight_bits == paged.weight_bits ? 0 : 2;
}
