// A program that is wrong on purpose: ThreadSanitizer has to say so, else its silence elsewhere proves nothing.
#include <doctest/doctest.h>

#include "hbmoff/cuda.hpp"

using namespace hbmoff;

TEST_SUITE("race") {
  TEST_CASE("a stream reads what another writes, and does not wait") {
    CudaDevice device;
    const auto a = device.create_stream(), b = device.create_stream();
    const auto x = device.allocate_device(1_MiB), y = device.allocate_device(1_MiB);
    device.fill_async(x, std::byte{1}, a);
    device.copy_async(y, device_span<const std::byte>{x}, b);
    device.synchronize(CudaDevice::StreamRef{a});
    device.synchronize(CudaDevice::StreamRef{b});
    CHECK(!device.lost());
    device.free_device(x);
    device.free_device(y);
  }
}
