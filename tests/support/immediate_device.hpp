// A device that runs every piece of work before the call that queues it returns: nothing can come from timing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"

// Outside of the device: a default argument of a member may not use initialisers of a nested class (CWG 1397).
struct ImmediateLaunchOptions {
  std::string_view name = "kernel";
};

/// No threads, no streams that run beside each other. Calls are counted and can be made to fail, as HostDevice's can.
class ImmediateDevice {
 public:
  template <class Tag>
  class Ref {
   public:
    explicit Ref(std::uint64_t id) : id_{id} {}
    friend bool operator==(Ref, Ref) = default;

   private:
    std::uint64_t id_;
  };
  template <class Tag>
  class Owner {
   public:
    explicit Owner(std::uint64_t id) : ref_{id} {}
    Owner(Owner&&) = default;
    Owner& operator=(Owner&&) = default;
    operator Ref<Tag>() const { return ref_; }  // NOLINT: an owner converts to its view

   private:
    Ref<Tag> ref_;
  };
  struct StreamTag {};
  struct EventTag {};
  using StreamRef = Ref<StreamTag>;
  using EventRef = Ref<EventTag>;
  using Stream = Owner<StreamTag>;
  using Event = Owner<EventTag>;
  using At = std::source_location;
  struct Options {};
  using LaunchOptions = ImmediateLaunchOptions;

  explicit ImmediateDevice(Options = {}) {}
  ImmediateDevice(const ImmediateDevice&) = delete;
  ImmediateDevice& operator=(const ImmediateDevice&) = delete;

  Stream create_stream(std::string_view = "", At at = At::current()) {
    return call("create_stream", at), Stream{++ids_};
  }
  Event create_event(hbmoff::EventTiming = hbmoff::EventTiming::none, At at = At::current()) {
    return call("create_event", at), Event{++ids_};
  }
  hbmoff::device_span<std::byte> allocate_device(hbmoff::Bytes bytes, At at = At::current()) {
    return call("allocate_device", at), hbmoff::device_span<std::byte>{memory(bytes), bytes.count()};
  }
  hbmoff::pinned_span<std::byte> allocate_pinned(hbmoff::Bytes bytes, At at = At::current()) {
    return call("allocate_pinned", at), hbmoff::pinned_span<std::byte>{memory(bytes), bytes.count()};
  }
  void free_device(hbmoff::device_span<std::byte> span) noexcept { ::operator delete(span.data(), alignment); }
  void free_pinned(hbmoff::pinned_span<std::byte> span) noexcept { ::operator delete(span.data(), alignment); }

  template <class To, class From>
  void copy_async(To to, From from, StreamRef, At at = At::current()) {
    call("copy_async", at);
    if (!to.empty()) std::memcpy(to.data(), from.data(), to.count());
  }
  void fill_async(hbmoff::device_span<std::byte> span, std::byte value, StreamRef, At at = At::current()) {
    call("fill_async", at);
    if (!span.empty()) std::memset(span.data(), std::to_integer<int>(value), span.count());
  }
  template <class F>
  void enqueue(StreamRef, F&& f, LaunchOptions = {}, At at = At::current()) {
    call("enqueue", at);
    run(f);
  }
  template <class F>
  void host_func(StreamRef, F&& f, At at = At::current()) {
    call("host_func", at);
    run(f);
  }
  void record(EventRef, StreamRef, At at = At::current()) { call("record", at); }
  void wait(StreamRef, EventRef, At at = At::current()) { call("wait", at); }
  bool query(EventRef, At at = At::current()) { return call("query", at), true; }
  void synchronize(EventRef, At at = At::current()) { call("synchronize", at); }
  void synchronize(StreamRef, At at = At::current()) { call("synchronize", at); }
  std::chrono::duration<double> elapsed(EventRef, EventRef, At at = At::current()) {
    return call("elapsed", at), std::chrono::duration<double>{};
  }

  hbmoff::MemoryInfo memory_info() const { return {}; }
  bool lost() const noexcept { return lost_; }

  template <class Space>
  void note_block(hbmoff::BlockNote, hbmoff::memory_span<const std::byte, Space>, std::string_view, StreamRef,
                  At = At::current()) {}
  void note_access(StreamRef, std::string_view, hbmoff::AccessList, hbmoff::AccessList, At = At::current()) {}
  void note_host_access(std::string_view, hbmoff::AccessList, hbmoff::AccessList, At = At::current()) {}
  void note_discarded(hbmoff::device_span<const std::byte>, std::string_view) noexcept {}
  template <class Space>
  void note_divided(hbmoff::memory_span<const std::byte, Space>, bool) noexcept {}
  void note_threads_joined() noexcept {}

  /// The n-th call from now throws and has no effect, and so do the `times - 1` after it; 0: none does.
  void fail_call(std::uint64_t n, std::uint64_t times = 1) noexcept {
    fail_at_ = n == 0 ? 0 : calls_ + n;
    fail_times_ = times;
  }
  [[nodiscard]] std::uint64_t calls_made() const { return calls_; }
  /// Whether the call that was to fail has been made.
  [[nodiscard]] bool failed() const { return fail_at_ != 0 && calls_ >= fail_at_; }

 private:
  static constexpr std::align_val_t alignment{4096};
  static std::byte* memory(hbmoff::Bytes bytes) {
    return bytes == hbmoff::Bytes{} ? nullptr : static_cast<std::byte*>(::operator new(bytes.count(), alignment));
  }
  void call(const char* api, At at) {
    using hbmoff::DeviceError;
    ++calls_;
    if (lost_) throw DeviceError{DeviceError::Kind::context_lost, api, "work failed", at};
    if (fail_at_ != 0 && calls_ >= fail_at_ && calls_ - fail_at_ < fail_times_)
      throw DeviceError{DeviceError::Kind::call_failed, api, "failed on request", at};
  }
  template <class F>
  void run(F& f) noexcept {
    try {
      f();
    } catch (...) {
      lost_ = true;
    }
  }

  std::uint64_t ids_ = 0;
  std::uint64_t calls_ = 0;
  std::uint64_t fail_at_ = 0;
  std::uint64_t fail_times_ = 1;
  bool lost_ = false;
};

static_assert(hbmoff::Device<ImmediateDevice>);
