// The bytes behind an arena's buffers that nobody may touch: written when a buffer is taken, looked at when it is freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <source_location>
#include <type_traits>
#include <utility>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff::detail {

template <Device D, class Space>
class GuardBands {
 public:
  using Span = memory_span<std::byte, Space>;
  using StreamRef = typename D::StreamRef;

  /// Bands of `bytes` bytes; none for 0. For device memory it takes as much pinned memory. Throws what the device throws.
  GuardBands(D& device, Bytes bytes, std::source_location at) : device_{&device}, bytes_{bytes} {
    if (bytes == Bytes{}) return;
    if (bytes > Bytes{1u << 20}) throw InvalidArgument{"guard_band: at most 1 MiB"};
    if constexpr (on_device) seen_ = device.allocate_pinned(bytes, at);
  }
  GuardBands(const GuardBands&) = delete;
  GuardBands& operator=(const GuardBands&) = delete;
  ~GuardBands() {
    if (!seen_.empty()) device_->free_pinned(seen_);
  }
  [[nodiscard]] Bytes bytes() const noexcept { return bytes_; }

  /// In stream order.
  void write(Span band, StreamRef stream, std::source_location at) const {
    if (band.empty()) return;
    if constexpr (on_device) {
      device_->fill_async(band, pattern, stream, at);
    } else {
      device_->note_access(stream, "guard band", {}, {band}, at);
      device_->host_func(stream, [=] { std::memset(band.data(), std::to_integer<int>(pattern), band.count()); }, at);
    }
  }
  /// Which byte of the band somebody wrote to, the first of them. Waits for the work on `stream`.
  [[nodiscard]] std::optional<std::uint64_t> first_wrong(Span band, StreamRef stream, std::source_location at) const {
    if (band.empty()) return std::nullopt;
    const std::byte* look = band.data();
    if constexpr (on_device) {
      device_->copy_async(seen_.subspan(0, band.count()), memory_span<const std::byte, Space>{band}, stream, at);
      look = seen_.data();
    }
    device_->synchronize(stream, at);
    if constexpr (on_device) {
      device_->note_host_access("guard band", {seen_.subspan(0, band.count())}, {}, at);
    } else {
      device_->note_host_access("guard band", {band}, {}, at);
    }
    for (std::uint64_t i = 0; i < band.count(); ++i) {
      if (look[i] != pattern) return i;
    }
    return std::nullopt;
  }

 private:
  static constexpr bool on_device = std::is_same_v<Space, DeviceSpace>;
  static constexpr std::byte pattern{0xa5};

  D* device_;
  Bytes bytes_;
  pinned_span<std::byte> seen_;
};

}  // namespace hbmoff::detail
