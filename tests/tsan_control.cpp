// Planted races between streams of a HostDevice. ThreadSanitizer must report each of them, however lucky the timing:
// the first stream has long finished when the second touches its buffer. If it reports none, its silence elsewhere says
// nothing. `tsan_control missing` has no wait, `early` records the event before the work, `unread` reads on the host
// without synchronizing, `ordered` is right and must stay silent. Without an argument: `missing`.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <thread>

#include "hbmoff/device/host_device.hpp"

int main(int argc, char** argv) {
  using namespace hbmoff;
  using namespace std::chrono_literals;
  const std::string_view mode = argc > 1 ? argv[1] : "missing";
  HostDevice device{{.hbm_capacity = 1_MiB}};
  const HostDevice::Stream writer = device.create_stream("writer"), reader = device.create_stream("reader");
  const HostDevice::Event written = device.create_event();
  const auto hbm = device.allocate_device(4_KiB);
  const auto source = device.allocate_pinned(4_KiB), target = device.allocate_pinned(4_KiB);

  // Enough operations behind the write that a wait for the wrong one of them would cover it.
  if (mode == "early") device.record(written, writer);
  device.copy_async(hbm, source, writer);
  if (mode != "early") device.record(written, writer);
  for (int i = 0; i < 10; ++i) device.enqueue(writer, [] {});
  std::this_thread::sleep_for(100ms);
  if (mode != "missing") device.wait(reader, written);
  device.copy_async(target, hbm, reader);
  if (mode == "unread") {
    std::this_thread::sleep_for(100ms);
  } else {
    device.synchronize(reader);
  }
  std::printf("%u\n", std::to_integer<unsigned>(target[17]));
  device.free_device(hbm);
  device.free_pinned(source);
  device.free_pinned(target);
}
