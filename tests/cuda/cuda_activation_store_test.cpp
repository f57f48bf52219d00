// ActivationStore on CudaDevice: what was saved comes back, bit for bit, whatever is offloaded.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/cuda_device.hpp"
#include "hbmoff/cuda.hpp"
#include "support/random.hpp"

using namespace hbmoff;

namespace {

std::vector<std::byte> content(std::uint64_t count, std::uint64_t seed) {
  std::vector<std::byte> bytes(count);
  for (std::uint64_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(random_numbers::hash(seed + i) & 0xffu);
  return bytes;
}

template <std::uint32_t Depth, class Policy>
void forward_and_backward(Policy policy, std::uint32_t layers, TransferStats expected_per_step) {
  CudaDevice device;
  HbmArena hbm{device, 4_MiB, {.fill_freed = true}};
  PinnedHostArena host{device, 4_MiB, {.fill_freed = true}};
  const CudaDevice::Stream stream = device.create_stream();
  const BundleLayout layout{{{.info = {.name = "x", .count = 1021}, .checkpoint = true},
                             {.info = {.name = "y", .dtype = DType::bf16, .count = 77}}}};
  ActivationStore<CudaDevice, Policy, Depth> store{hbm, host, policy, layers, layout};
  for (std::uint64_t step = 0; step < 3; ++step) {
    const TransferStats before = store.stats();
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = store.save(l, stream);
      for (std::uint32_t t = 0; t < 2; ++t) {
        const auto bytes = t == 0 ? saved.template tensor<float>(0).bytes() : saved.template tensor<bf16>(1).bytes();
        upload(device, stream, bytes, content(bytes.count(), step * 1000 + l * 10 + t));
      }
      saved.commit();
    }
    for (std::uint32_t l = layers; l-- > 0;) {
      auto saved = store.restore(l, stream);
      for (std::uint32_t t = 0; t < 2; ++t) {
        const auto bytes = t == 0 ? saved.template tensor<float>(0).bytes() : saved.template tensor<bf16>(1).bytes();
        REQUIRE(download(device, stream, bytes) == content(bytes.count(), step * 1000 + l * 10 + t));
      }
    }
    const TransferStats moved = store.stats() - before;
    CHECK(moved.fills == expected_per_step.fills);
    CHECK(moved.write_backs == expected_per_step.write_backs);
  }
  device.synchronize(CudaDevice::StreamRef{stream});
}

}  // namespace

TEST_CASE("the last layers stay, the others go to host memory and come back") {
  forward_and_backward<2>(OffloadAll{}, 7, {.fills = 5, .write_backs = 5});
  forward_and_backward<3>(OffloadAll{}, 7, {.fills = 4, .write_backs = 4});
  forward_and_backward<3>(OffloadAll{}, 2, {});
  forward_and_backward<3>(KeepResident{}, 7, {});
}
