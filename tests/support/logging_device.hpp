// A HostDevice that counts what is called on it, and delays streams at random if asked to.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <source_location>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/host_device.hpp"

/// Counts only calls that had their effect. One thread at a time calls it.
class LoggingDevice : public hbmoff::HostDevice {
 public:
  struct Counts {
    std::uint64_t streams = 0, events = 0, h2d_copies = 0, d2h_copies = 0, h2d_bytes = 0, d2h_bytes = 0, fills = 0,
                  records = 0, waits = 0, synchronizations = 0;
    friend bool operator==(const Counts&, const Counts&) = default;
    friend Counts operator-(Counts a, const Counts& b) {
      return {a.streams - b.streams,       a.events - b.events,
              a.h2d_copies - b.h2d_copies, a.d2h_copies - b.d2h_copies,
              a.h2d_bytes - b.h2d_bytes,   a.d2h_bytes - b.d2h_bytes,
              a.fills - b.fills,           a.records - b.records,
              a.waits - b.waits,           a.synchronizations - b.synchronizations};
    }
  };

  using HostDevice::HostDevice;
  using At = std::source_location;

  [[nodiscard]] const Counts& counts() const { return counts_; }

  /// From now on about every third copy, fill, record and wait comes behind a sleep of up to `most` on its stream.
  void delay_at_random(std::uint64_t seed, std::chrono::microseconds most) {
    random_.seed(seed);
    most_ = most;
  }

  /// Makes the next `count` records fail without effect; 0 makes none. (`fail_call` fails one call only.)
  void fail_records(std::uint64_t count) { failing_records_ = count; }

  [[nodiscard]] Stream create_stream(std::string_view name = "stream", At at = At::current()) {
    Stream stream = HostDevice::create_stream(name, at);
    ++counts_.streams;
    return stream;
  }
  [[nodiscard]] Event create_event(hbmoff::EventTiming timing = hbmoff::EventTiming::none, At at = At::current()) {
    Event event = HostDevice::create_event(timing, at);
    ++counts_.events;
    return event;
  }
  void copy_async(hbmoff::device_span<std::byte> to, hbmoff::pinned_span<const std::byte> from, StreamRef stream,
                  At at = At::current()) {
    delay(stream);
    HostDevice::copy_async(to, from, stream, at);
    ++counts_.h2d_copies;
    counts_.h2d_bytes += to.count();
  }
  void copy_async(hbmoff::pinned_span<std::byte> to, hbmoff::device_span<const std::byte> from, StreamRef stream,
                  At at = At::current()) {
    delay(stream);
    HostDevice::copy_async(to, from, stream, at);
    ++counts_.d2h_copies;
    counts_.d2h_bytes += to.count();
  }
  void copy_async(hbmoff::device_span<std::byte> to, hbmoff::device_span<const std::byte> from, StreamRef stream,
                  At at = At::current()) {
    delay(stream);
    HostDevice::copy_async(to, from, stream, at);
  }
  void fill_async(hbmoff::device_span<std::byte> memory, std::byte value, StreamRef stream, At at = At::current()) {
    delay(stream);
    HostDevice::fill_async(memory, value, stream, at);
    ++counts_.fills;
  }
  void record(EventRef event, StreamRef stream, At at = At::current()) {
    if (failing_records_ != 0) {
      --failing_records_;
      throw hbmoff::DeviceError{hbmoff::DeviceError::Kind::call_failed, "record", "failed on request", at};
    }
    delay(stream);
    HostDevice::record(event, stream, at);
    ++counts_.records;
  }
  void wait(StreamRef stream, EventRef event, At at = At::current()) {
    delay(stream);
    HostDevice::wait(stream, event, at);
    ++counts_.waits;
  }
  void synchronize(StreamRef stream, At at = At::current()) {
    HostDevice::synchronize(stream, at);
    ++counts_.synchronizations;
  }
  void synchronize(EventRef event, At at = At::current()) {
    HostDevice::synchronize(event, at);
    ++counts_.synchronizations;
  }

 private:
  void delay(StreamRef stream) {
    if (most_.count() == 0 || random_() % 3 != 0) return;
    const auto time = std::chrono::microseconds{random_() % static_cast<std::uint64_t>(most_.count() + 1)};
    host_func(stream, [time] { std::this_thread::sleep_for(time); });
  }

  Counts counts_;
  std::uint64_t failing_records_ = 0;
  std::chrono::microseconds most_{0};
  std::mt19937_64 random_;
};

static_assert(hbmoff::Device<LoggingDevice>);
