// How the library puts a kernel of its own on a stream, whatever the device.
#pragma once

#include <source_location>
#include <type_traits>

#include "hbmoff/device/device.hpp"

namespace hbmoff {

/// Puts `kernel` on `stream`: a trivially copyable callable whose static member `name` serves errors. Does not block.
/// Throws what a launch on `D` throws.
///
/// This one serves devices that run host code in stream order. A device with kernels of another kind has an overload in
/// its namespace; it is found through its arguments.
template <Device D, class Kernel>
  requires requires(D& device, typename D::StreamRef stream, const Kernel& kernel) { device.enqueue(stream, kernel); }
void launch_kernel(D& device, const Kernel& kernel, typename D::StreamRef stream,
                   std::source_location at = std::source_location::current()) {
  static_assert(std::is_trivially_copyable_v<Kernel>);
  device.enqueue(stream, kernel, {.name = Kernel::name}, at);
}

}  // namespace hbmoff
