// What paging did: counters that are always kept, and observers that also take times.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <source_location>
#include <string_view>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff {

/// Counters of one scheduler since its construction. Bytes are payload over the link, each copy counted when it
/// is put on its stream.
struct TransferStats {
  std::uint64_t h2d_bytes = 0;    ///< host to device
  std::uint64_t d2h_bytes = 0;    ///< device to host
  std::uint64_t fills = 0;        ///< pages brought in
  std::uint64_t write_backs = 0;  ///< pages written home
  std::uint64_t hits = 0;         ///< leases served from a slot that had kept its page: no copy
  std::uint64_t evictions = 0;    ///< kept or prefetched pages that lost their slot before their next use

  TransferStats& operator+=(const TransferStats& other) {
    h2d_bytes += other.h2d_bytes;
    d2h_bytes += other.d2h_bytes;
    fills += other.fills;
    write_backs += other.write_backs;
    hits += other.hits;
    evictions += other.evictions;
    return *this;
  }
  friend TransferStats operator+(TransferStats a, const TransferStats& b) { return a += b; }
  friend TransferStats operator-(TransferStats a, const TransferStats& b) {
    a.h2d_bytes -= b.h2d_bytes;
    a.d2h_bytes -= b.d2h_bytes;
    a.fills -= b.fills;
    a.write_backs -= b.write_backs;
    a.hits -= b.hits;
    a.evictions -= b.evictions;
    return a;
  }
  friend bool operator==(const TransferStats&, const TransferStats&) = default;
};

/// What an observer is told about. `stall`: a compute stream waits for a fill (or for the slot it will write).
enum class Activity : std::uint8_t { fill, write_back, stall };

[[nodiscard]] constexpr std::string_view to_string(Activity activity) {
  return activity == Activity::fill ? "fill" : activity == Activity::write_back ? "write-back" : "stall";
}

/// The default observer: compiles to nothing. An observer has these two members; both are called with the stream
/// on which the activity runs, around the calls that put it there: the copies of a fill or a write-back (what they
/// wait for comes before), or the wait that is a stall.
struct NullObserver {
  template <class StreamRef>
  void begin(Activity, StreamRef) const noexcept {}
  template <class StreamRef>
  void end(Activity, StreamRef) const noexcept {}
};

/// Takes device times of every activity with pairs of timed events, all created in the constructor. Hand
/// `recorder.observer()` to a scheduler; after the streams were synchronized, `collect` gives the intervals.
/// When more than `capacity` activities come between two collects, the device refuses a record, or the activity fails
/// half-way, it is not timed and `dropped()` counts it: observing never fails a step.
template <Device D>
class Recorder {
 public:
  struct Interval {
    Activity activity;
    std::chrono::duration<double> begin;  ///< since the recorder's construction, on the device's clock
    std::chrono::duration<double> end;
  };

  class Observer {
   public:
    Observer() = default;
    explicit Observer(Recorder& recorder) : recorder_{&recorder} {}
    void begin(Activity activity, typename D::StreamRef stream) const noexcept {
      if (recorder_ != nullptr) recorder_->open(activity, stream);
    }
    void end(Activity activity, typename D::StreamRef) const noexcept {
      if (recorder_ != nullptr) recorder_->close(activity);
    }

   private:
    Recorder* recorder_ = nullptr;
  };

  /// Blocks until `stream` has done the record that starts the clock.
  Recorder(D& device, std::uint32_t capacity, typename D::StreamRef stream)
      : device_{&device}, origin_{device.create_event(EventTiming::timed)} {
    spans_.reserve(capacity);
    for (std::uint32_t i = 0; i < capacity; ++i) {
      spans_.push_back({Activity::fill, device.create_event(EventTiming::timed),
                        device.create_event(EventTiming::timed), std::nullopt, false});
    }
    device.record(origin_, stream);
    device.synchronize(origin_);
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  [[nodiscard]] Observer observer() { return Observer{*this}; }

  /// Calls `sink(Interval)` for every activity since the last collect, in the order of their begins, and forgets
  /// them. Every stream that was observed must have been synchronized: unfinished times throw InvalidArgument.
  template <class Sink>
  void collect(Sink&& sink) {
    for (std::uint32_t i = 0; i < used_; ++i) {
      Span& span = spans_[i];
      if (!span.whole) continue;
      sink(Interval{span.activity, device_->elapsed(origin_, span.begin), device_->elapsed(origin_, span.end)});
    }
    used_ = 0;
  }

  /// As `collect`, giving only the total time of one activity.
  [[nodiscard]] std::chrono::duration<double> collect_total(Activity activity) {
    std::chrono::duration<double> total{};
    collect([&](const Interval& interval) {
      if (interval.activity == activity) total += interval.end - interval.begin;
    });
    return total;
  }

  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  struct Span {
    Activity activity;
    typename D::Event begin;
    typename D::Event end;
    std::optional<typename D::StreamRef> stream;
    bool whole;
  };

  void open(Activity activity, typename D::StreamRef stream) noexcept {
    if (std::exchange(open_, false)) ++dropped_;  // the activity before failed half-way and did not end
    if (used_ == spans_.size()) {
      ++dropped_;
      return;
    }
    Span& span = spans_[used_];
    span.activity = activity;
    span.stream = stream;
    span.whole = false;
    try {
      device_->record(span.begin, stream);
      ++used_;
      open_ = true;
    } catch (const Error&) {
      ++dropped_;
    }
  }

  void close(Activity) noexcept {
    if (!std::exchange(open_, false)) return;
    Span& span = spans_[used_ - 1];
    try {
      device_->record(span.end, *span.stream);
      span.whole = true;
    } catch (const Error&) {
      ++dropped_;
    }
  }

  D* device_;
  typename D::Event origin_;
  std::vector<Span> spans_;
  std::uint32_t used_ = 0;
  bool open_ = false;
  std::uint64_t dropped_ = 0;
};

}  // namespace hbmoff
