// For destructors: a call that may fail without effect, made again.
#pragma once

#include <exception>

namespace hbmoff::detail {

/// Calls `f()`, and once more when it throws: a device's call may fail without effect, a destructor has nobody to tell, and
/// must not give memory back that work still uses. False when both failed, or the device is lost: then nothing runs any
/// more, and nothing is left to try.
template <class D, class F>
bool try_twice(const D& device, F&& f) noexcept {
  for (int attempt = 0; attempt < 2 && !device.lost(); ++attempt) {
    try {
      f();
      return true;
    } catch (const std::exception&) {
      // See above.
    }
  }
  return false;
}

}  // namespace hbmoff::detail
