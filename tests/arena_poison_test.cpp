// What an arena holds and nobody has taken is closed to AddressSanitizer, where a program has it: free memory, gaps
// between blocks, and what lies behind a block's last byte.
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/device/checked_device.hpp"
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "support/random.hpp"

extern "C" __attribute__((weak)) int __asan_address_is_poisoned(const volatile void* address);

using namespace hbmoff;

namespace {

const bool has_sanitizer = &__asan_address_is_poisoned != nullptr;
bool closed(const std::byte* address) { return __asan_address_is_poisoned(address) != 0; }

template <class D>
void check_blocks() {
  D device{HostDeviceOptions{.hbm_capacity = 1_MiB}};
  const auto stream = device.create_stream("compute"), other = device.create_stream("other");
  const std::byte* memory = nullptr;
  {
    HbmArena<D> arena{device, 64_KiB};
    auto block = arena.allocate(1001_B, "block", Role::other, stream);
    memory = block.bytes().data();
    CHECK_FALSE(closed(memory));
    CHECK_FALSE(closed(memory + 1000));
    CHECK(closed(memory + 1001));
    CHECK(closed(memory + 1023));
    CHECK(closed(memory + 40000));
    {
      HbmArena<D> inner{device, arena.allocate(8_KiB, "inner", Role::other, stream).bytes()};
      auto part = inner.allocate(100_B, "part", Role::other, stream);
      const std::byte* const at = part.bytes().data();
      CHECK_FALSE(closed(at));
      CHECK(closed(at + 104));
      part.free(stream);
      device.synchronize(typename D::StreamRef{stream});
      CHECK(closed(at));
    }
    block.free(stream);
    device.synchronize(typename D::StreamRef{stream});
    CHECK(closed(memory));
    // Taken by another stream while the first one has not come to its end: open, whatever comes when.
    for (int round = 0; round < 50; ++round) {
      auto first = arena.allocate(60_KiB, "first", Role::other, stream);
      device.fill_async(first.bytes(), std::byte{1}, stream);
      first.free(stream);
      auto second = arena.allocate(60_KiB, "second", Role::other, other);
      device.fill_async(second.bytes(), std::byte{2}, other);
      device.synchronize(typename D::StreamRef{stream});
      CHECK_FALSE(closed(second.bytes().data()));
      CHECK_FALSE(closed(second.bytes().data() + 60 * 1024 - 1));
      second.free(other);
    }
  }
  device.synchronize(typename D::StreamRef{stream});
  device.synchronize(typename D::StreamRef{other});
  // The arena's end opens everything, also for what frees that ran late.
  PinnedHostArena<D> arena{device, 64_KiB};
  auto block = arena.allocate(3_B, "pinned", Role::other, stream);
  CHECK_FALSE(closed(block.bytes().data() + 2));
  CHECK(closed(block.bytes().data() + 3));
  device.note_host_access("write", {}, {block.bytes()});
  block.bytes()[2] = std::byte{1};
}

}  // namespace

TEST_CASE("free memory and gaps are closed, blocks are open" * doctest::skip(!has_sanitizer)) {
  check_blocks<HostDevice>();
  check_blocks<CheckedDevice<HostDevice>>();
}

TEST_CASE("a kernel that writes one byte behind its block ends the program" * doctest::skip(!has_sanitizer)) {
  for (const bool wrong : {false, true}) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      static_cast<void>(std::freopen("/dev/null", "w", stderr));
      HostDevice device;
      const auto stream = device.create_stream();
      HbmArena<HostDevice> arena{device, 64_KiB};
      auto block = arena.allocate(1000_B, "block", Role::other, stream);
      auto neighbour = arena.allocate(1000_B, "neighbour", Role::other, stream);
      device.enqueue(stream, [to = block.bytes().data(), i = wrong ? 1000 : 999] { to[i] = std::byte{1}; });
      device.synchronize(HostDevice::StreamRef{stream});
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0) == !wrong);
  }
}

TEST_CASE("memory of the caller's is open again when its arena has ended" * doctest::skip(!has_sanitizer)) {
  std::vector<std::byte> memory(8192);
  const std::uint64_t first = (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256) % 256;
  HostDevice device;
  {
    HbmArena<HostDevice> arena{device, device_span<std::byte>{memory.data() + first, 4096}};
    CHECK(closed(memory.data() + first));
  }
  for (std::byte& byte : memory) byte = std::byte{1};
  CHECK_FALSE(closed(memory.data() + first + 4095));
}

TEST_CASE("without AddressSanitizer nothing is asked of it" * doctest::skip(has_sanitizer)) {
  CHECK_FALSE(detail::PoisonedRanges::available());
}
