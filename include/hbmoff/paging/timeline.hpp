// A stream of the library's own whose progress can be named: "after copy number t of this stream".
#pragma once

#include <cstdint>
#include <source_location>
#include <string_view>
#include <vector>

#include "hbmoff/device/detail/try_twice.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff {

/// An in-order stream with numbered points (tickets 1, 2, ...). A ticket is remembered as one integer for as long as
/// one likes, while only `ring_size` events exist: a ticket whose event was recorded again is waited for through the
/// oldest event still in the ring, a later point of the same in-order stream, so the wait is never too short.
///
/// `advance` names the point behind the work put on the stream so far; `record` then records it. The two are apart so
/// that a failed record loses nothing: whoever waits for a ticket not yet recorded records it first.
template <Device D>
class Timeline {
 public:
  using StreamRef = typename D::StreamRef;

  Timeline(D& device, std::string_view name) : device_{&device}, stream_{device.create_stream(name)} {
    points_.reserve(ring_size);
    for (std::uint32_t i = 0; i < ring_size; ++i) points_.push_back({device.create_event(EventTiming::none)});
  }
  // Marks point at it.
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  [[nodiscard]] StreamRef stream() const { return stream_; }

  /// The ticket of the point behind everything put on the stream so far. Calls nothing on the device.
  std::uint64_t advance() { return ++issued_; }

  /// Records the newest ticket if it was not recorded yet.
  void record(std::source_location at = std::source_location::current()) {
    if (newest().ticket == issued_) return;
    Point& point = points_[(newest_ + 1) % ring_size];
    device_->record(point.event, stream_, at);
    point.ticket = issued_;
    newest_ = (newest_ + 1) % ring_size;
  }

  /// Makes later work on `waiter` wait for `ticket`. Does not block.
  void order_before(StreamRef waiter, std::uint64_t ticket, std::source_location at = std::source_location::current()) {
    device_->wait(waiter, event_of(ticket, at), at);
  }

  /// Blocks the calling thread until `ticket` is done.
  void synchronize(std::uint64_t ticket, std::source_location at = std::source_location::current()) {
    device_->synchronize(event_of(ticket, at), at);
  }

  /// Blocks the calling thread until everything on the stream is done. For destructors: silent when the device is lost.
  void drain() noexcept {
    detail::try_twice(*device_, [&] { device_->synchronize(stream()); });
  }

  static constexpr std::uint32_t ring_size = 16;

 private:
  struct Point {
    typename D::Event event;
    std::uint64_t ticket = 0;  // 0: never recorded
  };

  Point& newest() { return points_[newest_]; }

  // The event of the earliest point still in the ring that is not before `ticket`.
  typename D::EventRef event_of(std::uint64_t ticket, std::source_location at) {
    if (ticket > newest().ticket) record(at);
    std::uint32_t found = newest_;
    for (std::uint32_t back = 1; back < ring_size; ++back) {
      const std::uint32_t i = (newest_ + ring_size - back) % ring_size;
      if (points_[i].ticket < ticket) break;  // tickets fall as we go back; never-recorded ones are 0
      found = i;
    }
    return points_[found].event;
  }

  D* device_;
  typename D::Stream stream_;
  std::vector<Point> points_;
  std::uint32_t newest_ = 0;
  std::uint64_t issued_ = 0;
};

}  // namespace hbmoff
