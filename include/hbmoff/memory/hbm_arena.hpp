// The arena of device memory: everything a trainer keeps in HBM comes from one of these.
#pragma once

#include <source_location>

#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/arena.hpp"

namespace hbmoff {

/// An `Arena` of device memory, reserved whole by its constructor or adopted from the caller. Its capacity bounds
/// everything taken from it, padding included.
template <Device D>
class HbmArena : public Arena<D, DeviceSpace> {
 public:
  /// Reserves `capacity` bytes of `device`. Throws `OutOfMemory` when the device does not have them.
  explicit HbmArena(D& device, Bytes capacity, ArenaOptions options = {},
                    std::source_location at = std::source_location::current())
      : Arena<D, DeviceSpace>{device, capacity, options, at} {}

  /// Hands out `memory`, which stays the caller's and outlives the arena. Throws `InvalidArgument` unless it is
  /// aligned to 256 bytes.
  explicit HbmArena(D& device, device_span<std::byte> memory, ArenaOptions options = {},
                    std::source_location at = std::source_location::current())
      : Arena<D, DeviceSpace>{device, memory, options, at} {}
};

}  // namespace hbmoff
