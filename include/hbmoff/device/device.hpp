// What a device is: streams, events, two kinds of memory, and copies between them.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <source_location>
#include <span>
#include <string_view>
#include <type_traits>

#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// Tag of memory on the device. Host code must not dereference it.
struct DeviceSpace {};
/// Tag of pinned host memory. Host code may dereference it when no unfinished copy writes it.
struct PinnedSpace {};

/// A view of `count` elements of `T` in one kind of memory. Two kinds never convert into each other, so the
/// direction of a copy stands in the types of its arguments. Holds no ownership; copying it copies nothing.
template <class T, class Space>
class memory_span {
 public:
  using element_type = T;
  using space = Space;

  constexpr memory_span() = default;
  constexpr memory_span(T* data, std::uint64_t count) : data_{data}, count_{count} {}
  /// From a span of the same memory that may be written.
  template <class U>
    requires(!std::same_as<T, U> && std::same_as<T, const U>)
  constexpr memory_span(memory_span<U, Space> other) : data_{other.data()}, count_{other.count()} {}

  /// The address, as this memory's side sees it.
  [[nodiscard]] constexpr T* data() const { return data_; }
  [[nodiscard]] constexpr std::uint64_t count() const { return count_; }
  [[nodiscard]] constexpr Bytes size_bytes() const { return Bytes{count_ * sizeof(T)}; }
  [[nodiscard]] constexpr bool empty() const { return count_ == 0; }

  /// Elements [first, first + count). The caller keeps the range inside; nothing is checked.
  [[nodiscard]] constexpr memory_span subspan(std::uint64_t first, std::uint64_t count) const {
    return {data_ + first, count};
  }

  /// The same memory as bytes.
  [[nodiscard]] auto bytes() const {
    using B = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return memory_span<B, Space>{reinterpret_cast<B*>(data_), count_ * sizeof(T)};
  }

  /// The same memory as whole elements of `U`; the address must be aligned for it.
  template <class U>
  [[nodiscard]] memory_span<U, Space> as() const {
    static_assert(std::is_const_v<U> || !std::is_const_v<T>, "as<U>() cannot drop const");
    return {reinterpret_cast<U*>(data_), count_ * sizeof(T) / sizeof(U)};
  }

  // Pinned memory is ordinary host memory to the host.
  [[nodiscard]] constexpr T& operator[](std::uint64_t i) const
    requires std::same_as<Space, PinnedSpace>
  {
    return data_[i];
  }
  [[nodiscard]] constexpr T* begin() const
    requires std::same_as<Space, PinnedSpace>
  {
    return data_;
  }
  [[nodiscard]] constexpr T* end() const
    requires std::same_as<Space, PinnedSpace>
  {
    return data_ + count_;
  }

  friend constexpr bool operator==(memory_span, memory_span) = default;

 private:
  T* data_ = nullptr;
  std::uint64_t count_ = 0;
};

template <class T>
using device_span = memory_span<T, DeviceSpace>;
template <class T>
using pinned_span = memory_span<T, PinnedSpace>;

/// Whether an event carries a timestamp. On CUDA a timed event costs more to record.
enum class EventTiming : std::uint8_t { none, timed };

struct MemoryInfo {
  Bytes free;
  Bytes total;
};

/// What happened to a block, for devices that check. `named` gives a name to (part of) a live block.
enum class BlockNote : std::uint8_t { allocated, freed, named };

/// A byte range that work reads or writes. A span converts to it.
struct AccessRange {
  const void* data = nullptr;
  Bytes bytes = {};

  constexpr AccessRange() = default;
  constexpr AccessRange(const void* first, Bytes size) : data{first}, bytes{size} {}
  template <class T, class Space>
  constexpr AccessRange(memory_span<T, Space> span) : data{span.data()}, bytes{span.size_bytes()} {}
};

/// Ranges for the time of a call: `{x, y}`, or a span or vector of ranges.
class AccessList {
 public:
  constexpr AccessList() = default;
  constexpr AccessList(std::initializer_list<AccessRange> ranges) : ranges_{ranges.begin(), ranges.size()} {}
  template <std::convertible_to<std::span<const AccessRange>> Ranges>
  constexpr AccessList(const Ranges& ranges) : ranges_{ranges} {}
  [[nodiscard]] constexpr auto begin() const { return ranges_.begin(); }
  [[nodiscard]] constexpr auto end() const { return ranges_.end(); }

 private:
  std::span<const AccessRange> ranges_;
};

/// Whether `D` looks at notes. Where it does not, notes compile to nothing; only what takes work to gather for them
/// needs to ask first.
template <class D>
inline constexpr bool takes_notes = requires { requires D::takes_notes; };

namespace detail {
// Stands for a callable in the concept: nvcc takes no lambda there.
struct Nothing {
  void operator()() const {}
};
}  // namespace detail

/// A device runs one program in streams. The semantics are CUDA's on every device:
///
/// - Work on one stream runs in the order of the calls. Streams run beside each other.
/// - `record(event, stream)` captures the work put on `stream` so far; a later record replaces it.
/// - `wait(stream, event)` makes later work on `stream` wait for the event's latest record at the time of the call.
///   Waiting on an event never recorded is a no-op.
/// - No call but `synchronize`, `create_*`, `allocate_*` and `free_*` blocks the calling thread (a full submission
///   queue may, as CUDA's does).
/// - A call that throws with `DeviceError::Kind::call_failed` or `OutOfMemory` had no effect and leaves the device
///   usable. When work already queued fails, everything queued is dropped and every later call throws `DeviceError`
///   with `context_lost`; `lost()` then says so without throwing. Destructors and `free_*` never throw.
/// - Streams, events and memory are given back before their device is destroyed.
///
/// `Stream` and `Event` are move-only owners; `StreamRef` and `EventRef` are views, copyable and comparable, never
/// null. An owner converts to its view. Every call takes the call site last, defaulted.
///
/// Launching kernels is not part of the concept: each device has its own way (`HostDevice::enqueue`, `<<<>>>`).
template <class D>
concept Device =
    requires(D& device, const D& constant, typename D::StreamRef stream, typename D::EventRef event,
             device_span<std::byte> hbm, device_span<const std::byte> hbm_source, pinned_span<std::byte> pinned,
             pinned_span<const std::byte> pinned_source, Bytes bytes, std::source_location at) {
      requires std::movable<typename D::Stream> && !std::copyable<typename D::Stream>;
      requires std::movable<typename D::Event> && !std::copyable<typename D::Event>;
      requires std::equality_comparable<typename D::StreamRef> && std::copyable<typename D::StreamRef>;
      requires std::convertible_to<const typename D::Stream&, typename D::StreamRef>;
      requires std::convertible_to<const typename D::Event&, typename D::EventRef>;

      { device.create_stream(std::string_view{}, at) } -> std::same_as<typename D::Stream>;
      { device.create_event(EventTiming::none, at) } -> std::same_as<typename D::Event>;

  // Whole reservations, as arenas make them; aligned to at least 256 bytes. `OutOfMemory` when there is no room.
      { device.allocate_device(bytes, at) } -> std::same_as<device_span<std::byte>>;
      { device.allocate_pinned(bytes, at) } -> std::same_as<pinned_span<std::byte>>;
      { device.free_device(hbm) } noexcept;
      { device.free_pinned(pinned) } noexcept;

  // Destination first, as memcpy. Both sides have the same size; a size of 0 is allowed and does nothing.
      device.copy_async(hbm, pinned_source, stream, at);
      device.copy_async(pinned, hbm_source, stream, at);
      device.copy_async(hbm, hbm_source, stream, at);
      device.fill_async(hbm, std::byte{}, stream, at);

      device.record(event, stream, at);
      device.wait(stream, event, at);
      { device.query(event, at) } -> std::same_as<bool>;  // true when the latest record is done, or there is none
      device.synchronize(event, at);
      device.synchronize(stream, at);
  // Time between the latest records of two timed events; both must be done.
      { device.elapsed(event, event, at) } -> std::convertible_to<std::chrono::duration<double>>;
  // Runs `callable` on the host in stream order. It must not call the device.
      device.host_func(stream, detail::Nothing{}, at);

      { constant.memory_info() } -> std::same_as<MemoryInfo>;
      { constant.lost() } noexcept -> std::same_as<bool>;

  // Notes for devices that check; they cost nothing elsewhere (see `CheckedDevice`).
      device.note_block(BlockNote::named, hbm_source, std::string_view{}, stream, at);
      device.note_block(BlockNote::named, pinned_source, std::string_view{}, stream, at);
  // What the next launch on `stream` reads and writes: kernels and host functions. (Copies and fills are known.)
      device.note_access(stream, std::string_view{}, AccessList{}, AccessList{}, at);
  // What the calling thread is about to read and write by itself, of pinned memory.
      device.note_host_access(std::string_view{}, AccessList{}, AccessList{}, at);
      // The range's content is worthless from here on, and the range has a new name: reading it before it was written
      // again is a fault.
      { device.note_discarded(hbm_source, std::string_view{}) } noexcept;
      // The range is (or is no longer) an arena's: of it, only blocks that are allocated may be touched.
      { device.note_divided(hbm_source, true) } noexcept;
      { device.note_divided(pinned_source, true) } noexcept;
      // The calling thread comes after what all other threads did with the device: it has joined them, or locked a mutex.
      device.note_threads_joined();
    };

}  // namespace hbmoff
