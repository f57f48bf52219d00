// HostDevice: CUDA's streams, events and two kinds of memory on the CPU. Everything runs with no GPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>
#endif

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/declared_access.hpp"
#include "hbmoff/device/detail/float_environment.hpp"
#include "hbmoff/device/detail/host_memory.hpp"
#include "hbmoff/device/detail/link_engine.hpp"
#include "hbmoff/device/detail/stream_queue.hpp"
#include "hbmoff/device/detail/streaming_copy.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/device/fault_injection.hpp"

namespace hbmoff {

/// What a `HostDevice` is asked to be.
struct HostDeviceOptions {
  Bytes hbm_capacity{std::uint64_t{16} << 30};  ///< bound on `allocate_device`; memory is taken when first touched
  std::uint64_t ring_capacity = 1024;  ///< operations that one stream holds before a call on it blocks; at least 1
  LinkModel host_to_device = {};       ///< pinned host memory to HBM
  LinkModel device_to_host = {};       ///< HBM to pinned host memory
  /// One operation runs at a time, and HBM is inaccessible (an access faults) whenever no stream work runs: not to
  /// the calling threads between calls, and not to host functions. Slow: every operation changes the protection of
  /// all of HBM. Work that declares what it touches (`EnqueueOptions::declared`) is held to it. While the device lives,
  /// the process's SIGSEGV handler is one of hbmoff's, which passes on what it does not know.
  bool debug_protection = false;
  /// All memory is addresses only: copies, fills and `enqueue`d callables do not run (their modelled time passes), host
  /// functions do. For sizes beyond the machine's.
  bool no_touch = false;
};

/// How a callable on a stream is named and how long it is to take.
struct EnqueueOptions {
  std::string_view name = "kernel";  ///< for errors; the first 47 characters are copied
  std::chrono::nanoseconds modelled_time{0};  ///< the stream is busy for at least as long, the callable's run included
  /// With `debug_protection`: what the callable touches, and what came of it. Must outlive the callable's run.
  DeclaredAccess* declared = nullptr;
};

/// Counters of a `HostDevice` since its construction.
struct HostDeviceStats {
  std::uint64_t ring_full_waits = 0;  ///< calls that waited for room on their stream
  std::chrono::nanoseconds worker_time{0};  ///< CPU time of all workers (Linux; else 0); modelled time takes none
};

/// A device whose streams are worker threads and whose HBM is host memory with a cap.
///
///     HostDevice device{{.hbm_capacity = 2_GiB, .host_to_device = {.gigabytes_per_second = 25, .latency = 10us}}};
///     auto copies = device.create_stream("copies"), compute = device.create_stream("compute");
///     auto filled = device.create_event();
///     device.copy_async(hbm, pinned, copies);
///     device.record(filled, copies);
///     device.wait(compute, filled);
///     device.enqueue(compute, [=] { gelu(hbm.data(), count); }, {.name = "gelu", .modelled_time = 50us});
///     device.synchronize(compute);
///
/// Semantics are those of `Device`; in addition, for every call that may throw:
///
/// - `DeviceError` (context_lost) from every call once queued work has thrown; the message names that work, its call
///   site and stream, and what it threw. `DeviceError::where()` is the call that reports it.
/// - `DeviceError` (call_failed) or `OutOfMemory` when `fail_call` or `inject` asked for it; the call had no effect.
/// - `InvalidArgument` when the call breaks its contract; nothing was changed.
///
/// Calls may come from any thread, but not from work that runs on a stream. Only `create_*` and `allocate_*` allocate
/// memory. Work runs with denormals kept and round to nearest.
///
/// Streams, and the calling thread, are ordered by waits, `query` and `synchronize` alone, and only after the work that
/// these name: ThreadSanitizer reports a missing or misplaced wait whatever the timing was. (A call that finds room in
/// the ring is ordered after the work that left it, `ring_capacity` calls ago.)
///
/// Times are `std::chrono::steady_clock`'s. Work with a modelled time starts, in that time, when the work before it
/// has ended, and never ends early; how late the system wakes a sleeping thread is no part of it. Work without one
/// takes what it takes.
class HostDevice {
  struct StreamState;
  struct EventState;

 public:
  using Options = HostDeviceOptions;
  using LaunchOptions = EnqueueOptions;

  /// No other memory of the process lies so near to what `allocate_device` and `allocate_pinned` gave.
  static constexpr std::uint64_t bytes_between_allocations = 4096;
  /// Bytes that a callable handed to `enqueue` or `host_func` may capture.
  static constexpr std::size_t max_callable_bytes = 352;

  /// A view of a stream. Never null; two are equal when they are of the same stream.
  class StreamRef {
   public:
    StreamRef() = delete;
    StreamRef(int) = delete;
    StreamRef(std::nullptr_t) = delete;
    /// The name the stream was created with; lives as long as the stream.
    [[nodiscard]] std::string_view name() const noexcept { return state_->name; }
    friend bool operator==(StreamRef, StreamRef) = default;

   private:
    friend HostDevice;
    explicit StreamRef(StreamState* state) noexcept : state_{state} {}
    StreamState* state_;
  };

  /// A view of an event. Never null.
  class EventRef {
   public:
    EventRef() = delete;
    EventRef(int) = delete;
    EventRef(std::nullptr_t) = delete;
    friend bool operator==(EventRef, EventRef) = default;

   private:
    friend HostDevice;
    explicit EventRef(EventState* state) noexcept : state_{state} {}
    EventState* state_;
  };

  /// Owns a stream. Move-only; a moved-from stream is empty. Destruction waits for the work on it.
  class Stream {
   public:
    Stream(Stream&& other) noexcept : state_{std::exchange(other.state_, nullptr)} {}
    Stream& operator=(Stream&& other) noexcept {
      Stream old{std::move(*this)};
      state_ = std::exchange(other.state_, nullptr);
      return *this;
    }
    ~Stream() {
      if (state_ != nullptr) state_->device->destroy(*state_);
    }
    [[nodiscard]] bool empty() const noexcept { return state_ == nullptr; }
    /// Throws `InvalidArgument` when empty.
    operator StreamRef() const {  // NOLINT(google-explicit-constructor): an owner converts to its view
      if (state_ == nullptr) throw InvalidArgument{"a moved-from stream was used"};
      return StreamRef{state_};
    }

   private:
    friend HostDevice;
    explicit Stream(StreamState* state) noexcept : state_{state} {}
    StreamState* state_;
  };

  /// Owns an event. Move-only; a moved-from event is empty. May be destroyed while a record or a wait is pending.
  class Event {
   public:
    Event(Event&& other) noexcept : state_{std::exchange(other.state_, nullptr)} {}
    Event& operator=(Event&& other) noexcept {
      Event old{std::move(*this)};
      state_ = std::exchange(other.state_, nullptr);
      return *this;
    }
    ~Event() {
      if (state_ != nullptr) state_->device->destroy(*state_);
    }
    [[nodiscard]] bool empty() const noexcept { return state_ == nullptr; }
    /// Throws `InvalidArgument` when empty.
    operator EventRef() const {  // NOLINT(google-explicit-constructor): an owner converts to its view
      if (state_ == nullptr) throw InvalidArgument{"a moved-from event was used"};
      return EventRef{state_};
    }

   private:
    friend HostDevice;
    explicit Event(EventState* state) noexcept : state_{state} {}
    EventState* state_;
  };

  /// Throws `InvalidArgument` for a ring capacity of 0.
  explicit HostDevice(HostDeviceOptions options = {})
      : options_{options}, to_device_{options.host_to_device}, to_host_{options.device_to_host},
        memory_{options.hbm_capacity, options.no_touch           ? detail::MemoryMode::addresses
                                      : options.debug_protection ? detail::MemoryMode::guarded
                                                                 : detail::MemoryMode::open} {
    if (options.ring_capacity == 0) throw InvalidArgument{"HostDevice: ring_capacity must be at least 1"};
  }
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;

  /// Streams and events must have been given back (else the program ends: their owners would use a dead device);
  /// memory that was not is unmapped.
  ~HostDevice() {
    if (live_owners_ != 0) {
      std::fputs("hbmoff::HostDevice destroyed before its streams and events\n", stderr);
      std::abort();
    }
    for (const std::unique_ptr<StreamState>& stream : streams_) stream->queue.close();
    for (const std::unique_ptr<StreamState>& stream : streams_) stream->worker.join();
  }

  [[nodiscard]] const HostDeviceOptions& options() const noexcept { return options_; }
  /// Whether memory is addresses only: whoever would read or write it on the host must not.
  [[nodiscard]] bool no_touch() const noexcept { return options_.no_touch; }

  /// A stream with its own worker thread and ring. `name` is copied. DeviceError (call_failed) when the system has no
  /// thread or memory to give.
  [[nodiscard]] Stream create_stream(std::string_view name = "stream",
                                     std::source_location at = std::source_location::current()) {
    enter(CallKind::stream, "create_stream", at);
    const std::scoped_lock lock{registry_};
    try {
      std::string owned_name{name};
      if (idle_streams_ == nullptr) {
        streams_.reserve(streams_.size() + 1);
        auto state = std::make_unique<StreamState>(this, options_.ring_capacity);
        state->worker = std::thread{[queue = &state->queue] { run_worker(*queue); }};
        // A thread may take memory when it starts: that belongs to this call, not to a step of the training.
        state->queue.wait_done(state->queue.push<Started>([] {}));
        idle_streams_ = state.get();
        streams_.push_back(std::move(state));
      }
      StreamState* state = std::exchange(idle_streams_, idle_streams_->next_idle);
      state->name.swap(owned_name);
      ++live_owners_;
      return Stream{state};
    } catch (const std::bad_alloc& error) {
      throw DeviceError{DeviceError::Kind::call_failed, "create_stream", error.what(), at};
    } catch (const std::system_error& error) {
      throw DeviceError{DeviceError::Kind::call_failed, "create_stream", error.what(), at};
    }
  }

  /// An event, never recorded. Only a timed one can be given to `elapsed`.
  [[nodiscard]] Event create_event(EventTiming timing = EventTiming::none,
                                   std::source_location at = std::source_location::current()) {
    enter(CallKind::event, "create_event", at);
    const std::scoped_lock lock{registry_};
    try {
      if (idle_events_ == nullptr) {
        events_.push_back(std::make_unique<EventState>(this));
        idle_events_ = events_.back().get();
      }
    } catch (const std::bad_alloc& error) {
      throw DeviceError{DeviceError::Kind::call_failed, "create_event", error.what(), at};
    }
    EventState* state = std::exchange(idle_events_, idle_events_->next_idle);
    state->timing = timing;
    ++live_owners_;
    return Event{state};
  }

  /// `bytes` bytes of HBM, zeroed, aligned to memory pages; empty for 0. `OutOfMemory` over the capacity, or when the
  /// system refuses. Host code must not touch them (with `debug_protection` it faults).
  [[nodiscard]] device_span<std::byte> allocate_device(Bytes bytes,
                                                       std::source_location at = std::source_location::current()) {
    enter_allocation(CallKind::allocation, "allocate_device", Tier::hbm, bytes, at);
    return {memory_.allocate(bytes, Tier::hbm), bytes.count()};
  }

  /// `bytes` bytes of host memory, as `allocate_device`; bounded by the machine only.
  [[nodiscard]] pinned_span<std::byte> allocate_pinned(Bytes bytes,
                                                       std::source_location at = std::source_location::current()) {
    enter_allocation(CallKind::pinning, "allocate_pinned", Tier::pinned_host, bytes, at);
    return {memory_.allocate(bytes, Tier::pinned_host), bytes.count()};
  }

  /// Gives back what `allocate_device` gave, whole. Waits for all work queued so far, as cudaFree does.
  void free_device(device_span<std::byte> memory) noexcept { release(memory.data()); }
  /// Gives back what `allocate_pinned` gave, whole. Waits for all work queued so far.
  void free_pinned(pinned_span<std::byte> memory) noexcept { release(memory.data()); }

  /// Copies run on `stream` behind the work before them and take the time of the link model (HBM to HBM: none). The
  /// calling thread does not wait. `InvalidArgument` when the sizes differ. Ranges must not overlap; they are not
  /// checked.
  void copy_async(device_span<std::byte> to, pinned_span<const std::byte> from, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    copy({to.data(), from.data(), to.count(), from.count(), &to_device_}, stream, at);
  }
  void copy_async(pinned_span<std::byte> to, device_span<const std::byte> from, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    copy({to.data(), from.data(), to.count(), from.count(), &to_host_}, stream, at);
  }
  void copy_async(device_span<std::byte> to, device_span<const std::byte> from, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    copy({to.data(), from.data(), to.count(), from.count(), nullptr}, stream, at);
  }

  /// Sets every byte of `memory` to `value`, in stream order.
  void fill_async(device_span<std::byte> memory, std::byte value, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    if (const auto fault = enter(CallKind::copy, "fill_async", at)) {
      push_failure(*stream.state_, "fill_async", Label{"fill_async", at}, *fault);
      return;
    }
    if (memory.empty()) return;
    auto fill = [to = memory.data(), count = memory.count(), value] {
      std::memset(to, std::to_integer<int>(value), count);
    };
    push<Work<decltype(fill), Runs::on_device>>(*stream.state_, "fill_async", at, *stream.state_,
                                                Label{"fill_async", at}, fill, std::chrono::nanoseconds{0}, nullptr);
  }

  /// Runs `callable` (nullary, at most `max_callable_bytes`; what it returns is ignored) on `stream` as `<<<>>>` runs
  /// a kernel. It may touch HBM and pinned memory and must not call the device. It is moved into the stream's ring
  /// and destroyed there. What it throws loses the context.
  template <class F>
    requires std::invocable<std::decay_t<F>&>
  void enqueue(StreamRef stream, F&& callable, EnqueueOptions options = {},
               std::source_location at = std::source_location::current()) {
    static_assert(sizeof(std::decay_t<F>) <= max_callable_bytes, "the callable captures too much: capture pointers");
    if (const auto fault = enter(CallKind::kernel, "enqueue", at)) {
      push_failure(*stream.state_, "enqueue", Label{options.name, at}, *fault);
      return;
    }
    push<Work<std::decay_t<F>, Runs::on_device>>(*stream.state_, "enqueue", at, *stream.state_, Label{options.name, at},
                                                 std::forward<F>(callable), options.modelled_time, options.declared);
  }

  /// Runs `callable` on the host in stream order, also where `no_touch`. It must not call the device, nor touch HBM.
  /// Otherwise as `enqueue`.
  template <class F>
    requires std::invocable<std::decay_t<F>&>
  void host_func(StreamRef stream, F&& callable, std::source_location at = std::source_location::current()) {
    static_assert(sizeof(std::decay_t<F>) <= max_callable_bytes, "the callable captures too much: capture pointers");
    if (const auto fault = enter(CallKind::host_function, "host_func", at)) {
      push_failure(*stream.state_, "host_func", Label{"host_func", at}, *fault);
      return;
    }
    push<Work<std::decay_t<F>, Runs::on_host>>(*stream.state_, "host_func", at, *stream.state_, Label{"host_func", at},
                                               std::forward<F>(callable), std::chrono::nanoseconds{0}, nullptr);
  }

  /// The event stands for the work put on `stream` so far. Replaces an earlier record, pending or not.
  void record(EventRef event, StreamRef stream, std::source_location at = std::source_location::current()) {
    enter(CallKind::ordering, "record", at);
    EventState& state = *event.state_;
    StreamState& on = *stream.state_;
    const std::scoped_lock lock{state.mutex};
    if (state.timing == EventTiming::none) {
      state.latest = {&on.queue, on.queue.last()};
      return;
    }
    Timestamp& stamp = timestamp_for(state, on.queue);
    stamp.record.ticket = push<Stamp>(on, "record", at, stamp.time);
    stamp.record.queue = &on.queue;
    state.latest = stamp.record;
    state.latest_stamp = &stamp;
  }

  /// Later work on `stream` runs after the event's latest record as of this call. The calling thread does not wait.
  void wait(StreamRef stream, EventRef event, std::source_location at = std::source_location::current()) {
    enter(CallKind::ordering, "wait", at);
    const Position position = latest(*event.state_);
    // A stream is in order with itself.
    if (position.ticket == 0 || position.queue == &stream.state_->queue) return;
    push<Await>(*stream.state_, "wait", at, *this, position);
  }

  /// True when the event's latest record is done, or there is none. Does not wait.
  [[nodiscard]] bool query(EventRef event, std::source_location at = std::source_location::current()) {
    enter(CallKind::waiting, "query", at);
    const Position position = latest(*event.state_);
    const bool done = position.done();
    if (done) throw_if_lost("query", at);
    return done;
  }

  /// Blocks until the event's latest record is done.
  void synchronize(EventRef event, std::source_location at = std::source_location::current()) {
    enter(CallKind::waiting, "synchronize", at);
    const Position position = latest(*event.state_);
    if (position.queue != nullptr) position.queue->wait_done(position.ticket);
    throw_if_lost("synchronize", at);
  }

  /// Blocks until the work put on `stream` so far is done.
  void synchronize(StreamRef stream, std::source_location at = std::source_location::current()) {
    enter(CallKind::waiting, "synchronize", at);
    stream.state_->queue.wait_done(stream.state_->queue.last());
    throw_if_lost("synchronize", at);
  }

  /// Time from the latest record of `begin` to that of `end`; negative when they ran in the other order.
  /// `InvalidArgument` when an event is untimed, was never recorded, or is not done.
  [[nodiscard]] std::chrono::nanoseconds elapsed(EventRef begin, EventRef end,
                                                 std::source_location at = std::source_location::current()) {
    enter(CallKind::waiting, "elapsed", at);
    const TimePoint from = time_of(*begin.state_), to = time_of(*end.state_);
    return to - from;
  }

  /// HBM that `allocate_device` can still give, and its capacity.
  [[nodiscard]] MemoryInfo memory_info() const { return memory_.info(); }

  /// Whether queued work has failed. Permanent.
  [[nodiscard]] bool lost() const noexcept { return failure_.published.load(std::memory_order_acquire); }

  /// Makes a call, or the work that it queues, fail; for tests of what a program does then. A fault that was asked for
  /// before and has not happened is taken back. All calls that may throw count, `memory_info` excepted; one that breaks
  /// its contract, or finds the context lost, may use the fault up. `InvalidArgument`, and nothing is changed, when
  /// calls of `fault.kinds` cannot fail in this way (see `FaultOutcome`), or there are no kinds.
  void inject(Fault fault) {
    CallGate::validate(fault);
    gate_.arm(std::move(fault));
  }
  /// Takes back what `inject` and `fail_call` asked for. Whether it was still to happen.
  bool clear_fault() noexcept { return gate_.disarm(); }
  /// Makes the `n`-th call from now (1: the next) throw DeviceError (call_failed) and have no effect; 0 makes none.
  /// `inject({.nth = n})`.
  void fail_call(std::uint64_t n) noexcept { gate_.arm({.nth = n}); }
  /// Calls of these kinds so far, failed ones included.
  [[nodiscard]] std::uint64_t calls_made(CallKinds kinds = CallKinds::any()) const noexcept {
    return gate_.made(kinds);
  }

  /// Counters so far; those of workers that are busy right now may lag.
  [[nodiscard]] HostDeviceStats stats() const {
    HostDeviceStats stats;
    stats.ring_full_waits = ring_full_waits_.load(std::memory_order_relaxed);
    const std::scoped_lock lock{registry_};
    for (const std::unique_ptr<StreamState>& stream : streams_) stats.worker_time += cpu_time(stream->worker);
    return stats;
  }

  /// Notes for devices that check; nothing here.
  template <class T, class Space>
  void note_block(BlockNote, memory_span<T, Space>, std::string_view, StreamRef,
                  std::source_location = std::source_location::current()) noexcept {}
  template <class Space>
  void note_divided(memory_span<const std::byte, Space>, bool) noexcept {}
  void note_access(StreamRef, std::string_view, AccessList, AccessList,
                   std::source_location = std::source_location::current()) noexcept {}
  void note_host_access(std::string_view, AccessList, AccessList,
                        std::source_location = std::source_location::current()) noexcept {}
  void note_discarded(device_span<const std::byte>, std::string_view) noexcept {}
  void note_threads_joined() noexcept {}

 private:
  using Clock = detail::StreamQueue::Clock;
  using TimePoint = detail::StreamQueue::TimePoint;

  // Stream and event states live as long as the device and are used again, so that pending work may point to them.
  // Tickets of a queue never start anew: an old position stays true.
  struct StreamState {
    StreamState(HostDevice* owner, std::uint64_t capacity) : device{owner}, queue{capacity} {}
    HostDevice* device;
    detail::StreamQueue queue;
    std::string name;
    std::thread worker;
    StreamState* next_idle = nullptr;
  };

  /// A place in a stream's order.
  struct Position {
    const detail::StreamQueue* queue = nullptr;
    std::uint64_t ticket = 0;
    [[nodiscard]] bool done() const noexcept { return queue == nullptr || queue->done(ticket); }
  };

  /// Where a timed record writes its time, and which record last did or will.
  struct Timestamp {
    Position record;
    TimePoint time{};
  };

  struct EventState {
    explicit EventState(HostDevice* owner) : device{owner} {}
    HostDevice* device;
    std::mutex mutex;  // never taken by workers
    EventTiming timing = EventTiming::none;
    Position latest;
    Timestamp* latest_stamp = nullptr;
    Timestamp stamps[4];
    EventState* next_idle = nullptr;
  };

  /// What an operation is called in an error. The name is copied: the caller's may be gone when the operation runs.
  struct Label {
    Label(std::string_view text, std::source_location where) : at{where} {
      const std::size_t count = (std::min)(text.size(), sizeof(name) - 1);
      std::memcpy(name, text.data(), count);
      name[count] = '\0';
    }
    char name[48];
    std::source_location at;
  };

  enum class Runs : std::uint8_t { on_device, on_host };

  /// Fill, kernel or host function in a ring.
  template <class F, Runs where>
  struct Work {
    StreamState& stream;
    Label label;
    F callable;
    std::chrono::nanoseconds modelled_time;
    DeclaredAccess* declared;

    TimePoint operator()(TimePoint start) noexcept {
      HostDevice& device = *stream.device;
      if (device.lost()) return start;
      std::chrono::nanoseconds taken{0};
      if (where == Runs::on_host || !device.no_touch()) {
        try {
          const detail::HostMemory::OpenHbm access{device.memory_, where == Runs::on_device, declared};
          const detail::FloatEnvironment environment;
          const TimePoint begin = Clock::now();
          static_cast<void>(callable());
          taken = Clock::now() - begin;
        } catch (const std::exception& error) {
          device.lose(stream, label, error.what());
        } catch (...) {
          device.lose(stream, label, "an exception that is no std::exception");
        }
      }
      return device.finish(start, start + modelled_time, taken);
    }
  };

  struct CopyRequest {
    std::byte* to;
    const std::byte* from;
    std::uint64_t to_bytes;
    std::uint64_t from_bytes;
    detail::LinkEngine* engine;  // nullptr: within HBM
  };

  struct Copy {
    HostDevice& device;
    CopyRequest request;
    TimePoint operator()(TimePoint start) const noexcept {
      if (device.lost()) return start;
      const TimePoint end = request.engine == nullptr ? start : request.engine->reserve(start, request.to_bytes);
      std::chrono::nanoseconds taken{0};
      if (!device.no_touch()) {
        const detail::HostMemory::OpenHbm access{device.memory_, true};
        const TimePoint begin = Clock::now();
        detail::streaming_copy(request.to, request.from, request.to_bytes);
        taken = Clock::now() - begin;
      }
      return device.finish(start, end, taken);
    }
  };

  /// Stands for work that is to fail.
  struct Fail {
    StreamState& stream;
    Label label;
    std::string reason;
    TimePoint operator()(TimePoint start) const noexcept {
      stream.device->lose(stream, label, reason.c_str());
      return start;
    }
  };

  struct Await {
    HostDevice& device;
    Position position;
    TimePoint operator()(TimePoint start) const noexcept {
      if (device.lost()) return start;
      position.queue->wait_done(position.ticket);
      return (std::max)(start, position.queue->ended(position.ticket));
    }
  };

  struct Started {
    TimePoint operator()(TimePoint start) const noexcept { return start; }
  };

  struct Stamp {
    TimePoint& time;
    TimePoint operator()(TimePoint start) const noexcept { return time = start; }
  };

  /// Why the context was lost. Written once, by the first that fails.
  struct Failure {
    std::atomic<bool> claimed{false};
    std::atomic<bool> published{false};
    char message[768] = {};
  };

  /// Ends an operation whose work took `taken` and that the model lets end at `end`: then, if its work fits into the
  /// model's time (a worker that woke late catches up), else now.
  [[nodiscard]] TimePoint finish(TimePoint start, TimePoint end, std::chrono::nanoseconds taken) const noexcept {
    if (end == start || taken > end - start) return Clock::now();
    if (!lost()) std::this_thread::sleep_until(end);
    return end;
  }

  static void run_worker(detail::StreamQueue& queue) noexcept {
#if defined(__linux__)
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // modelled times end when they should, not 50 us later
#endif
    queue.work();
  }

  static std::chrono::nanoseconds cpu_time([[maybe_unused]] const std::thread& worker) {
#if defined(__linux__)
    clockid_t clock{};
    timespec time{};
    if (::pthread_getcpuclockid(const_cast<std::thread&>(worker).native_handle(), &clock) != 0) return {};
    if (::clock_gettime(clock, &time) != 0) return {};
    return std::chrono::seconds{time.tv_sec} + std::chrono::nanoseconds{time.tv_nsec};
#else
    return {};
#endif
  }

  /// What every public call that may throw begins with, allocations excepted. The fault that its work is to meet, for
  /// calls that queue work.
  std::optional<Fault> enter(CallKind kind, const char* api, const std::source_location& at) {
    std::optional<Fault> fault = gate_.pass(kind);
    throw_if_lost(api, at);
    if (fault && fault->outcome == FaultOutcome::call_failed) throw_call_failed(*fault, api, at);
    return fault;
  }
  void enter_allocation(CallKind kind, const char* api, Tier tier, Bytes bytes, const std::source_location& at) {
    const std::optional<Fault> fault = enter(kind, api, at);
    if (!fault) return;
    throw_out_of_memory(*fault, api, tier, bytes, tier == Tier::hbm ? options_.hbm_capacity : detail::machine_memory());
  }
  void throw_if_lost(const char* api, const std::source_location& at) const {
    if (lost()) throw_lost(api, at);
  }
  [[noreturn]] void throw_lost(const char* api, const std::source_location& at) const {
    throw DeviceError{DeviceError::Kind::context_lost, api, failure_.message, at};
  }

  /// On the worker whose operation threw.
  void lose(const StreamState& stream, const Label& label, const char* what) noexcept {
    if (failure_.claimed.exchange(true, std::memory_order_relaxed)) return;
    std::snprintf(failure_.message, sizeof(failure_.message), "'%s' put on stream '%s' at %s:%u failed: %s", label.name,
                  stream.name.c_str(), label.at.file_name(), static_cast<unsigned>(label.at.line()), what);
    failure_.published.store(true, std::memory_order_release);
  }

  template <class Op, class... Args>
  std::uint64_t push(StreamState& stream, const char* api, const std::source_location& at, Args&&... args) {
    const auto waited = [&] {
      ring_full_waits_.fetch_add(1, std::memory_order_relaxed);
      throw_if_lost(api, at);
    };
    return stream.queue.push<Op>(waited, std::forward<Args>(args)...);
  }

  void push_failure(StreamState& stream, const char* api, const Label& label, const Fault& fault) {
    push<Fail>(stream, api, label.at, stream, label, reason_of(fault));
  }

  void copy(const CopyRequest& request, StreamRef stream, const std::source_location& at) {
    const auto fault = enter(CallKind::copy, "copy_async", at);
    if (request.to_bytes != request.from_bytes) {
      throw InvalidArgument{"copy_async: " + std::to_string(request.from_bytes) + " bytes cannot be copied to " +
                            std::to_string(request.to_bytes)};
    }
    if (fault) {
      push_failure(*stream.state_, "copy_async", Label{"copy_async", at}, *fault);
      return;
    }
    if (request.to_bytes != 0) push<Copy>(*stream.state_, "copy_async", at, *this, request);
  }

  static Position latest(EventState& event) {
    const std::scoped_lock lock{event.mutex};
    return event.latest;
  }

  static TimePoint time_of(EventState& event) {
    const std::scoped_lock lock{event.mutex};
    if (event.timing == EventTiming::none) throw InvalidArgument{"elapsed: the event is not timed"};
    if (event.latest_stamp == nullptr) throw InvalidArgument{"elapsed: the event was never recorded"};
    if (!event.latest.done()) throw InvalidArgument{"elapsed: the event is not done"};
    return event.latest_stamp->time;
  }

  /// A timestamp that no other stream's pending record will write. Only an event with unfinished records on as many
  /// other streams as it has timestamps waits here, for work that was queued before.
  Timestamp& timestamp_for(EventState& event, const detail::StreamQueue& queue) {
    for (Timestamp& stamp : event.stamps) {
      if (stamp.record.queue == &queue || stamp.record.done()) return stamp;
    }
    ring_full_waits_.fetch_add(1, std::memory_order_relaxed);
    event.stamps[0].record.queue->wait_done(event.stamps[0].record.ticket);
    return event.stamps[0];
  }

  void release(std::byte* address) noexcept {
    if (address == nullptr) return;
    drain();
    memory_.release(address);
  }

  /// Waits for all work queued so far, on every stream.
  void drain() noexcept {
    const std::scoped_lock lock{registry_};
    for (const std::unique_ptr<StreamState>& stream : streams_) stream->queue.wait_done(stream->queue.last());
  }

  void destroy(StreamState& stream) noexcept {
    stream.queue.wait_done(stream.queue.last());
    const std::scoped_lock lock{registry_};
    stream.next_idle = std::exchange(idle_streams_, &stream);
    --live_owners_;
  }

  void destroy(EventState& event) noexcept {
    const std::scoped_lock lock{registry_, event.mutex};
    event.latest = {};
    event.latest_stamp = nullptr;
    event.next_idle = std::exchange(idle_events_, &event);
    --live_owners_;
  }

  HostDeviceOptions options_;
  detail::LinkEngine to_device_;
  detail::LinkEngine to_host_;
  CallGate gate_;
  std::atomic<std::uint64_t> ring_full_waits_{0};
  Failure failure_;

  detail::HostMemory memory_;

  mutable std::mutex registry_;  // never taken by workers
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<std::unique_ptr<EventState>> events_;
  StreamState* idle_streams_ = nullptr;
  EventState* idle_events_ = nullptr;
  std::uint64_t live_owners_ = 0;
};

}  // namespace hbmoff
