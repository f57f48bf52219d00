// A model of one direction of the link between host and device.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>

namespace hbmoff {

/// How long copies in one direction take. The default takes no time beyond the copy itself.
struct LinkModel {
  double gigabytes_per_second = 0;      ///< 10^9 bytes per second; 0: unlimited
  std::chrono::nanoseconds latency{0};  ///< of each copy, besides its bytes
};

namespace detail {

/// Hands out intervals of one engine that serves one copy at a time. Thread-safe; orders nothing between its callers,
/// so that two copies that lack a wait stay unordered to ThreadSanitizer.
class LinkEngine {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit LinkEngine(LinkModel model) : model_{model} {}

  /// When a copy of `bytes` bytes that starts at `now` at the earliest ends: it takes the engine for its bytes, behind
  /// the copies that came first, and ends `latency` later.
  [[nodiscard]] TimePoint reserve(TimePoint now, std::uint64_t bytes) noexcept {
    if (!(model_.gigabytes_per_second > 0)) return now + model_.latency;
    // 10^9 bytes per second are one byte per nanosecond.
    const auto transfer =
        static_cast<std::int64_t>(std::ceil(static_cast<double>(bytes) / model_.gigabytes_per_second));
    const std::int64_t earliest = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
    std::int64_t free_at = next_free_.load(std::memory_order_relaxed);
    std::int64_t end = 0;
    do {
      end = (std::max)(earliest, free_at) + transfer;
    } while (!next_free_.compare_exchange_weak(free_at, end, std::memory_order_relaxed));
    return TimePoint{std::chrono::duration_cast<TimePoint::duration>(std::chrono::nanoseconds{end} + model_.latency)};
  }

 private:
  LinkModel model_;
  std::atomic<std::int64_t> next_free_{0};  // nanoseconds on the steady clock
};

}  // namespace detail
}  // namespace hbmoff
