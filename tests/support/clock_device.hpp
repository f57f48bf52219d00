// A device that keeps nothing but the order of work, to prove that memory is handed on in order.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <source_location>
#include <string_view>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"

/// Each stream has a vector clock, an event captures one, a wait joins one. The device knows of every byte range which
/// stream freed it and when: an allocation that is not ordered behind the free of the same bytes counts as `unordered`,
/// whatever the timing would have been. No memory stands behind the addresses. A device call can be made to fail.
class ClockDevice {
 public:
  static constexpr std::size_t max_streams = 48;
  using Clock = std::array<std::uint64_t, max_streams>;

  class StreamRef {
   public:
    explicit StreamRef(std::size_t index) : index_{index} {}
    friend bool operator==(StreamRef, StreamRef) = default;
    std::size_t index() const { return index_; }

   private:
    std::size_t index_;
  };
  class EventRef {
   public:
    explicit EventRef(std::size_t index) : index_{index} {}
    friend bool operator==(EventRef, EventRef) = default;
    std::size_t index() const { return index_; }

   private:
    std::size_t index_;
  };
  template <class Ref>
  class Owner {
   public:
    explicit Owner(std::size_t index) : ref_{index} {}
    Owner(Owner&&) = default;
    Owner& operator=(Owner&&) = default;
    operator Ref() const { return ref_; }  // NOLINT: an owner converts to its view

   private:
    Ref ref_;
  };
  using Stream = Owner<StreamRef>;
  using Event = Owner<EventRef>;
  using At = std::source_location;

  explicit ClockDevice(std::uint64_t base = std::uint64_t{1} << 40) : base_{base} {}
  ClockDevice(const ClockDevice&) = delete;
  ClockDevice& operator=(const ClockDevice&) = delete;

  Stream create_stream(std::string_view = "", At = At::current()) {
    if (streams_ == max_streams) std::abort();
    return Stream{streams_++};
  }
  Event create_event(hbmoff::EventTiming = hbmoff::EventTiming::none, At = At::current()) {
    call("create_event");
    events_.push_back({});
    return Event{events_.size() - 1};
  }
  hbmoff::device_span<std::byte> allocate_device(hbmoff::Bytes bytes, At = At::current()) {
    call("allocate_device");
    ++reservations;
    return {reinterpret_cast<std::byte*>(base_), bytes.count()};
  }
  hbmoff::pinned_span<std::byte> allocate_pinned(hbmoff::Bytes bytes, At = At::current()) {
    call("allocate_pinned");
    ++reservations;
    return {reinterpret_cast<std::byte*>(base_), bytes.count()};
  }
  void free_device(hbmoff::device_span<std::byte>) noexcept { --reservations; }
  void free_pinned(hbmoff::pinned_span<std::byte>) noexcept { --reservations; }
  void copy_async(hbmoff::device_span<std::byte>, hbmoff::pinned_span<const std::byte>, StreamRef, At = At::current()) {
  }
  void copy_async(hbmoff::pinned_span<std::byte>, hbmoff::device_span<const std::byte>, StreamRef, At = At::current()) {
  }
  void copy_async(hbmoff::device_span<std::byte>, hbmoff::device_span<const std::byte>, StreamRef, At = At::current()) {
  }
  void fill_async(hbmoff::device_span<std::byte> span, std::byte, StreamRef stream, At = At::current()) {
    call("fill_async");
    work(stream);
    filled += span.count();
  }
  void record(EventRef event, StreamRef stream, At = At::current()) {
    call("record");
    events_[event.index()] = work(stream);
  }
  void wait(StreamRef stream, EventRef event, At = At::current()) {
    call("wait");
    ++waits;
    if (ignore_waits) return;
    Clock& clock = clocks_[stream.index()];
    for (std::size_t i = 0; i < max_streams; ++i) clock[i] = std::max(clock[i], events_[event.index()][i]);
  }
  bool query(EventRef, At = At::current()) {
    ++queries;
    return true;
  }
  void synchronize(EventRef, At = At::current()) { ++synchronizations; }
  void synchronize(StreamRef, At = At::current()) { ++synchronizations; }
  std::chrono::duration<double> elapsed(EventRef, EventRef, At = At::current()) { return {}; }
  template <class F>
  void host_func(StreamRef stream, F, At = At::current()) {
    call("host_func");
    work(stream);
  }
  hbmoff::MemoryInfo memory_info() const { return {}; }
  bool lost() const noexcept { return is_lost; }
  bool no_touch() const noexcept { return true; }
  template <class Space>
  void note_block(hbmoff::BlockNote note, hbmoff::memory_span<const std::byte, Space> span, std::string_view,
                  StreamRef stream, At = At::current()) {
    call("note_block");
    const std::uint64_t first = reinterpret_cast<std::uint64_t>(span.data()), past = first + span.count();
    if (note == hbmoff::BlockNote::allocated) {
      // Ranges freed earlier that overlap must have been freed before the stream's present.
      for (const Freed& freed : freed_) {
        if (freed.first < past && first < freed.past && clocks_[stream.index()][freed.stream] < freed.time) {
          ++unordered;
        }
      }
      std::erase_if(freed_, [&](const Freed& freed) { return freed.first >= first && freed.past <= past; });
      work(stream);
    } else if (note == hbmoff::BlockNote::freed) {
      freed_.push_back({first, past, stream.index(), clocks_[stream.index()][stream.index()]});
    }
  }
  void note_access(StreamRef, std::string_view, hbmoff::AccessList, hbmoff::AccessList, At = At::current()) {}
  void note_host_access(std::string_view, hbmoff::AccessList, hbmoff::AccessList, At = At::current()) {}
  void note_discarded(hbmoff::device_span<const std::byte>, std::string_view) noexcept {}
  template <class Space>
  void note_divided(hbmoff::memory_span<const std::byte, Space>, bool) noexcept {}
  void note_threads_joined() noexcept {}

  /// The n-th call from now throws, and the `count` - 1 after it; 0 switches off.
  void fail_call(std::uint64_t n, std::uint64_t count = 1) {
    fail_at_ = n == 0 ? 0 : calls + n;
    fail_until_ = fail_at_ + count;
  }
  /// Puts work on a stream, so that its present is later than what others know of it.
  Clock work(StreamRef stream) {
    ++clocks_[stream.index()][stream.index()];
    return clocks_[stream.index()];
  }

  /// Orders `later` behind all of `earlier` so far.
  void order(StreamRef later, StreamRef earlier) {
    for (std::size_t i = 0; i < max_streams; ++i) {
      clocks_[later.index()][i] = std::max(clocks_[later.index()][i], clocks_[earlier.index()][i]);
    }
  }

  std::uint64_t calls = 0, waits = 0, queries = 0, synchronizations = 0, filled = 0, unordered = 0;
  std::int64_t reservations = 0;
  bool is_lost = false;
  bool ignore_waits = false;  ///< for a test of this checker

 private:
  struct Freed {
    std::uint64_t first, past;
    std::size_t stream;
    std::uint64_t time;
  };
  void call(const char* api) {
    if (++calls >= fail_at_ && calls < fail_until_) {
      throw hbmoff::DeviceError{hbmoff::DeviceError::Kind::call_failed, api, "injected",
                                std::source_location::current()};
    }
  }

  std::uint64_t base_;
  std::uint64_t fail_at_ = 0, fail_until_ = 0;
  std::size_t streams_ = 0;
  std::array<Clock, max_streams> clocks_{};
  std::vector<Clock> events_;
  std::vector<Freed> freed_;
};
