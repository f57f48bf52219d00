// The CUDA device: streams, events and memory of an NVIDIA GPU, through the runtime API.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/detail/pinned_mapping.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff {

/// What a call of the CUDA runtime returned. `DeviceError::kind()` tells what is left: `call_failed` for errors of this
/// call alone (launch errors included; told once, the runtime's last error is cleared), `context_lost` for errors of
/// work queued earlier, which the runtime returns from every call from then on.
class CudaError : public DeviceError {
 public:
  CudaError(Kind kind, cudaError_t code, std::string_view api, std::string_view more, std::source_location at)
      : DeviceError{kind, api,
                    std::string{cudaGetErrorName(code)} + ": " + cudaGetErrorString(code) + std::string{more}, at},
        code_{code} {}
  [[nodiscard]] cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

struct CudaDeviceOptions {
  int ordinal = 0;  ///< as cudaSetDevice counts
  /// Pinned memory bypasses the CPU's caches. Copies to the device may be faster over some links; the host reads such
  /// memory many times slower than other memory, and must write it in order. Only for what the host writes and the
  /// device reads; never for optimizer state that the host updates.
  bool write_combined = false;
  /// Null: device memory comes from cudaMalloc. Else from this pool of the device's, which outlives it, so that other
  /// parts of the program that use the pool get back what an arena gave back.
  cudaMemPool_t memory_pool = nullptr;
};

/// One GPU. Holds nothing but its ordinal: streams, events and memory are the runtime's, work of other code in the same
/// process is not touched.
///
///     CudaDevice device{0};
///     auto copies = device.create_stream("copies");
///     device.copy_async(hbm, pinned, copies);
///     device.wait(hbmoff::cuda_stream(my_stream), event);   // a stream of yours, adopted
///
/// Semantics are those of `Device`; in addition, for every call that may throw:
///
/// - `CudaError` with the runtime's code; `context_lost` from every call once queued work has failed.
/// - `OutOfMemory` when the driver has no device memory, or cannot pin host memory.
/// - `InvalidArgument` when the call breaks its contract; nothing was changed.
///
/// Calls may come from any thread, but not from a host function. The calling thread's current device is the same after
/// a call as before. Kernels are launched by the caller, with this device current, on `StreamRef::get()`.
///
/// Under stream capture: calls that put work on a captured stream become nodes of the graph; those that block or query
/// throw `CudaError` (call_failed, cudaErrorStreamCaptureUnsupported), which invalidates the capture, as does waiting
/// for an event that was recorded outside of it.
class CudaDevice {
 public:
  using Options = CudaDeviceOptions;

  /// A view of a stream, never null: the caller's own, or one that this device created. Two are equal when they are of
  /// the same stream; a stream that got the handle of one destroyed is another.
  class StreamRef {
   public:
    StreamRef() = delete;
    StreamRef(std::nullptr_t) = delete;
    /// Adopts a stream. Its owner keeps it alive. Null is refused with `InvalidArgument`, because what it stands for
    /// depends on how code was compiled: see `cuda_stream`. Throws `CudaError` for a handle that is no stream.
    explicit StreamRef(cudaStream_t stream, std::source_location at = std::source_location::current())
        : stream_{stream} {
      if (stream == nullptr) throw InvalidArgument{"a null cudaStream_t was adopted: use hbmoff::cuda_stream"};
      if (const cudaError_t code = cudaStreamGetId(stream, &id_); code != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        throw CudaError{DeviceError::Kind::call_failed, code, "cudaStreamGetId", "", at};
      }
    }
    /// The handle, to launch kernels on.
    [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }
    friend bool operator==(StreamRef, StreamRef) = default;

   private:
    cudaStream_t stream_;
    unsigned long long id_ = 0;
  };

  /// A view of an event. Never null.
  class EventRef {
   public:
    EventRef() = delete;
    EventRef(std::nullptr_t) = delete;
    [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }
    friend bool operator==(EventRef, EventRef) = default;

   private:
    friend CudaDevice;
    explicit EventRef(cudaEvent_t event) noexcept : event_{event} {}
    cudaEvent_t event_;
  };

  /// Owns a stream that does not synchronise with the legacy default stream. Move-only; a moved-from stream is empty.
  /// Destruction does not wait: the runtime gives the stream back once its work is done.
  class Stream {
   public:
    Stream(Stream&& other) noexcept : owned_{std::exchange(other.owned_, nullptr)}, ref_{other.ref_} {}
    Stream& operator=(Stream&& other) noexcept {
      Stream old{std::move(*this)};
      owned_ = std::exchange(other.owned_, nullptr);
      ref_ = other.ref_;
      return *this;
    }
    ~Stream() {
      if (owned_ != nullptr) forget(cudaStreamDestroy(owned_));
    }
    [[nodiscard]] bool empty() const noexcept { return owned_ == nullptr; }
    /// Throws `InvalidArgument` when empty.
    operator StreamRef() const {  // NOLINT(google-explicit-constructor): an owner converts to its view
      if (owned_ == nullptr) throw InvalidArgument{"a moved-from stream was used"};
      return ref_;
    }

   private:
    friend CudaDevice;
    Stream(cudaStream_t owned, StreamRef ref) noexcept : owned_{owned}, ref_{ref} {}
    cudaStream_t owned_;
    StreamRef ref_;
  };

  /// Owns an event. Move-only; a moved-from event is empty. May be destroyed while a record or a wait is pending.
  class Event {
   public:
    Event(Event&& other) noexcept : owned_{std::exchange(other.owned_, nullptr)} {}
    Event& operator=(Event&& other) noexcept {
      Event old{std::move(*this)};
      owned_ = std::exchange(other.owned_, nullptr);
      return *this;
    }
    ~Event() {
      if (owned_ != nullptr) forget(cudaEventDestroy(owned_));
    }
    [[nodiscard]] bool empty() const noexcept { return owned_ == nullptr; }
    /// Throws `InvalidArgument` when empty.
    operator EventRef() const {  // NOLINT(google-explicit-constructor): an owner converts to its view
      if (owned_ == nullptr) throw InvalidArgument{"a moved-from event was used"};
      return EventRef{owned_};
    }

   private:
    friend CudaDevice;
    explicit Event(cudaEvent_t owned) noexcept : owned_{owned} {}
    cudaEvent_t owned_;
  };

  /// Owns the registration of host memory with the driver, not the memory. Move-only; destruction ends the
  /// registration: work that uses the memory must have ended.
  class PinnedRegistration {
   public:
    PinnedRegistration(PinnedRegistration&& other) noexcept : memory_{std::exchange(other.memory_, {})} {}
    PinnedRegistration& operator=(PinnedRegistration&& other) noexcept {
      PinnedRegistration old{std::move(*this)};
      memory_ = std::exchange(other.memory_, {});
      return *this;
    }
    ~PinnedRegistration() {
      if (!memory_.empty()) forget(cudaHostUnregister(memory_.data()));
    }
    /// The memory, for `PinnedHostArena{device, memory}` or for copies; empty when moved from.
    [[nodiscard]] pinned_span<std::byte> memory() const noexcept { return memory_; }

   private:
    friend CudaDevice;
    explicit PinnedRegistration(pinned_span<std::byte> memory) noexcept : memory_{memory} {}
    pinned_span<std::byte> memory_;
  };

  /// Device `ordinal` with the other options as they are. Creates its primary context. `CudaError` where there is none.
  explicit CudaDevice(int ordinal = 0, std::source_location at = std::source_location::current())
      : CudaDevice{CudaDeviceOptions{.ordinal = ordinal}, at} {}
  explicit CudaDevice(CudaDeviceOptions options, std::source_location at = std::source_location::current())
      : ordinal_{options.ordinal}, options_{options} {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount", at);
    if (ordinal_ < 0 || ordinal_ >= count) {
      throw CudaError{DeviceError::Kind::call_failed, cudaErrorInvalidDevice, "CudaDevice",
                      ": " + std::to_string(ordinal_) + " of " + std::to_string(count), at};
    }
    const Current current{*this, at};
    check(cudaFree(nullptr), "cudaFree", at);
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() = default;

  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] const CudaDeviceOptions& options() const noexcept { return options_; }

  /// A stream of its own (cudaStreamNonBlocking). The runtime keeps no names.
  [[nodiscard]] Stream create_stream(std::string_view = "stream",
                                     std::source_location at = std::source_location::current()) {
    const Current current{*this, at};
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", at);
    try {
      return Stream{stream, StreamRef{stream, at}};
    } catch (...) {
      forget(cudaStreamDestroy(stream));
      throw;
    }
  }

  /// An event, never recorded. Only a timed one can be given to `elapsed`.
  [[nodiscard]] Event create_event(EventTiming timing = EventTiming::none,
                                   std::source_location at = std::source_location::current()) {
    const Current current{*this, at};
    cudaEvent_t event = nullptr;
    const unsigned flags = timing == EventTiming::timed ? cudaEventDefault : cudaEventDisableTiming;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags", at);
    return Event{event};
  }

  /// `bytes` bytes by one cudaMalloc (or from the pool of the options, which waits), aligned to 256 bytes at least,
  /// content unspecified; empty for 0.
  [[nodiscard]] device_span<std::byte> allocate_device(Bytes bytes,
                                                       std::source_location at = std::source_location::current()) {
    if (bytes == Bytes{}) return {};
    const Current current{*this, at};
    void* memory = nullptr;
    const bool pooled = options_.memory_pool != nullptr;
    const std::string_view api = pooled ? "cudaMallocFromPoolAsync" : "cudaMalloc";
    const cudaError_t code =
        pooled ? cudaMallocFromPoolAsync(&memory, bytes.count(), options_.memory_pool, cudaStreamPerThread)
               : cudaMalloc(&memory, bytes.count());
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      const MemoryInfo info = memory_info();
      OutOfMemory::Details details;
      details.tier = Tier::hbm;
      details.what_for = api;
      details.requested = bytes;
      details.capacity = info.total;
      details.free = details.largest_free = info.free;
      details.remedy = "other programs, or this one's other allocations, hold the rest of device " +
                       std::to_string(ordinal_) + "'s memory";
      throw OutOfMemory{std::move(details)};
    }
    check(code, api, at);
    if (pooled) {  // usable on every stream, at once
      if (const cudaError_t done = cudaStreamSynchronize(cudaStreamPerThread); done != cudaSuccess) {
        forget(cudaFree(memory));
        check(done, "cudaStreamSynchronize", at);
      }
    }
    return {static_cast<std::byte*>(memory), bytes.count()};
  }

  /// `bytes` bytes of host memory, zeroed, that copies of every device of the process reach directly; empty for 0.
  /// Mapped once, in huge pages where the system allows, touched by several threads, then registered as one piece, so
  /// that no copy straddles two registrations. (With `write_combined`: cudaHostAlloc.)
  [[nodiscard]] pinned_span<std::byte> allocate_pinned(Bytes bytes,
                                                       std::source_location at = std::source_location::current()) {
    if (bytes == Bytes{}) return {};
    const Current current{*this, at};
    if (options_.write_combined) {
      void* memory = nullptr;
      pinned(cudaHostAlloc(&memory, bytes.count(), cudaHostAllocPortable | cudaHostAllocWriteCombined), "cudaHostAlloc",
             bytes, at);
      return {static_cast<std::byte*>(memory), bytes.count()};
    }
    detail::PinnedMapping mapping{bytes};
    pinned(cudaHostRegister(mapping.data(), bytes.count(), cudaHostRegisterPortable), "cudaHostRegister", bytes, at);
    return {mapping.release(), bytes.count()};
  }

  /// Pins host memory of the caller's for as long as the result lives, `bytes` bytes from `memory` on, in one piece;
  /// copies of every device of the process reach it then. Blocks while the system pins. `OutOfMemory` when it cannot be
  /// pinned, `CudaError` when some of it is registered already: then it may be given to `PinnedHostArena` as it is.
  [[nodiscard]] PinnedRegistration register_pinned(void* memory, Bytes bytes,
                                                   std::source_location at = std::source_location::current()) const {
    if (bytes == Bytes{}) return PinnedRegistration{{}};
    const Current current{*this, at};
    const cudaError_t code = cudaHostRegister(memory, bytes.count(), cudaHostRegisterPortable);
    if (code == cudaErrorHostMemoryAlreadyRegistered) check(code, "cudaHostRegister", at);
    pinned(code, "cudaHostRegister", bytes, at);
    return PinnedRegistration{{static_cast<std::byte*>(memory), bytes.count()}};
  }

  /// Gives back what `allocate_device` gave, whole. Waits for the device, as cudaFree does, unless it is lost.
  void free_device(device_span<std::byte> memory) noexcept {
    if (memory.empty()) return;
    if (options_.memory_pool != nullptr && !lost()) {  // cudaFree does not wait for memory of a pool
      int before = 0;
      const bool known = cudaGetDevice(&before) == cudaSuccess;
      forget(cudaSetDevice(ordinal_));
      forget(cudaDeviceSynchronize());
      if (known) forget(cudaSetDevice(before));
    }
    forget(cudaFree(memory.data()));
  }
  /// Gives back what `allocate_pinned` gave, whole. Work that uses it must have ended.
  void free_pinned(pinned_span<std::byte> memory) noexcept {
    if (memory.empty()) return;
    if (options_.write_combined) return forget(cudaFreeHost(memory.data()));
    forget(cudaHostUnregister(memory.data()));
    detail::PinnedMapping::unmap(memory.data(), memory.size_bytes());
  }

  /// Copies run on `stream` behind the work before them. The calling thread does not wait, given memory that is pinned.
  /// `InvalidArgument` when the sizes differ. Ranges must not overlap; they are not checked.
  void copy_async(device_span<std::byte> to, pinned_span<const std::byte> from, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    copy(to.data(), to.count(), from.data(), from.count(), cudaMemcpyHostToDevice, stream, at);
  }
  void copy_async(pinned_span<std::byte> to, device_span<const std::byte> from, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    copy(to.data(), to.count(), from.data(), from.count(), cudaMemcpyDeviceToHost, stream, at);
  }
  void copy_async(device_span<std::byte> to, device_span<const std::byte> from, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    copy(to.data(), to.count(), from.data(), from.count(), cudaMemcpyDeviceToDevice, stream, at);
  }

  /// Sets every byte of `memory` to `value`, in stream order.
  void fill_async(device_span<std::byte> memory, std::byte value, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    if (memory.empty()) return throw_if_lost("fill_async", at);
    check(cudaMemsetAsync(memory.data(), std::to_integer<int>(value), memory.count(), stream.get()), "cudaMemsetAsync",
          at);
  }

  /// Runs `callable` (nullary; what it returns is ignored) on a thread of the driver, in stream order. It must not call
  /// the runtime, nor wait for work on the device. What it throws loses the context, for this object. Takes heap
  /// memory.
  template <class F>
    requires std::invocable<std::decay_t<F>&>
  void host_func(StreamRef stream, F&& callable, std::source_location at = std::source_location::current()) {
    throw_if_lost("host_func", at);
    auto work = std::make_unique<HostWork<std::decay_t<F>>>(*this, std::forward<F>(callable));
    check(cudaLaunchHostFunc(stream.get(), &HostWork<std::decay_t<F>>::run, work.get()), "cudaLaunchHostFunc", at);
    work.release();  // NOLINT(bugprone-unused-return-value): `run` deletes it
  }

  /// The event stands for the work put on `stream` so far. Replaces an earlier record, pending or not.
  void record(EventRef event, StreamRef stream, std::source_location at = std::source_location::current()) {
    check(cudaEventRecord(event.get(), stream.get()), "cudaEventRecord", at);
  }
  /// Later work on `stream` runs after the event's latest record as of this call. The calling thread does not wait.
  void wait(StreamRef stream, EventRef event, std::source_location at = std::source_location::current()) {
    check(cudaStreamWaitEvent(stream.get(), event.get(), 0), "cudaStreamWaitEvent", at);
  }
  /// True when the event's latest record is done, or there is none. Does not wait.
  [[nodiscard]] bool query(EventRef event, std::source_location at = std::source_location::current()) {
    const cudaError_t code = cudaEventQuery(event.get());
    if (code != cudaErrorNotReady) {
      check(code, "cudaEventQuery", at);
      return true;
    }
    if (cudaPeekAtLastError() == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
    throw_if_lost("query", at);
    return false;
  }
  /// Blocks until the event's latest record is done.
  void synchronize(EventRef event, std::source_location at = std::source_location::current()) {
    check(cudaEventSynchronize(event.get()), "cudaEventSynchronize", at);
  }
  /// Blocks until the work put on `stream` so far is done.
  void synchronize(StreamRef stream, std::source_location at = std::source_location::current()) {
    check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize", at);
  }
  /// Time from the latest record of `begin` to that of `end`; negative when they ran in the other order. The runtime
  /// resolves about half a microsecond. `InvalidArgument` when an event is untimed, was never recorded, or is not done.
  [[nodiscard]] std::chrono::nanoseconds elapsed(EventRef begin, EventRef end,
                                                 std::source_location at = std::source_location::current()) {
    float milliseconds = 0;
    const cudaError_t code = cudaEventElapsedTime(&milliseconds, begin.get(), end.get());
    if (code == cudaErrorNotReady || code == cudaErrorInvalidResourceHandle) {
      static_cast<void>(cudaGetLastError());
      throw InvalidArgument{code == cudaErrorNotReady ? "elapsed: an event is not done"
                                                      : "elapsed: an event is untimed or was never recorded"};
    }
    check(code, "cudaEventElapsedTime", at);
    return std::chrono::nanoseconds{static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6)};
  }

  /// Free and total memory of the device, as the driver tells (cudaMemGetInfo); other programs' included.
  [[nodiscard]] MemoryInfo memory_info() const {
    const auto at = std::source_location::current();
    const Current current{*this, at};
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo", at);
    return {Bytes{free}, Bytes{total}};
  }

  /// Whether queued work has failed, as far as some call on this object was told. Permanent.
  [[nodiscard]] bool lost() const noexcept { return lost_.load(std::memory_order_acquire) != cudaSuccess; }

  /// Throws for the status of a runtime call as calls of this object do: `CudaError`, told once (the runtime's last error
  /// is cleared), or the loss of the context. For launches of the caller's own: what cudaLaunchKernelEx returned, or
  /// cudaGetLastError after `<<<>>>`. `api` serves the message.
  void check(cudaError_t code, std::string_view api, std::source_location at = std::source_location::current()) const {
    if (code != cudaSuccess) [[unlikely]]
      failed(code, api, at);
    throw_if_lost(api, at);
  }

  /// Makes a device current for the calling thread, and the one before again at the end: around launches.
  class Current {
   public:
    explicit Current(const CudaDevice& device, std::source_location at = std::source_location::current()) {
      device.throw_if_lost("cudaSetDevice", at);
      device.check(cudaGetDevice(&before_), "cudaGetDevice", at);
      if (before_ == device.ordinal_) return;
      device.check(cudaSetDevice(device.ordinal_), "cudaSetDevice", at);
      changed_ = true;
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      if (changed_) forget(cudaSetDevice(before_));
    }

   private:
    int before_ = 0;
    bool changed_ = false;
  };

  /// Notes for devices that check; nothing here.
  template <class T, class Space>
  void note_block(BlockNote, memory_span<T, Space>, std::string_view, StreamRef,
                  std::source_location = std::source_location::current()) noexcept {}
  void note_access(StreamRef, std::string_view, AccessList, AccessList,
                   std::source_location = std::source_location::current()) noexcept {}
  void note_host_access(std::string_view, AccessList, AccessList,
                        std::source_location = std::source_location::current()) noexcept {}
  void note_discarded(device_span<const std::byte>, std::string_view) noexcept {}
  template <class Space>
  void note_divided(memory_span<const std::byte, Space>, bool) noexcept {}
  void note_threads_joined() noexcept {}

 private:
  // Deletes itself when it has run. What a lost context never runs is not given back.
  template <class F>
  struct HostWork {
    CudaDevice& device;
    F callable;

    static void CUDART_CB run(void* data) {
      const std::unique_ptr<HostWork> work{static_cast<HostWork*>(data)};
      try {
        static_cast<void>(work->callable());
      } catch (...) {
        work->device.lose(cudaErrorUnknown);
      }
    }
  };

  // The end of an owner: nobody can be told, and after the loss of the context or the end of the driver nothing is left
  // to give back.
  static void forget(cudaError_t code) noexcept {
    if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
  }

  // Errors of work queued earlier; "returned until the process ends", says the runtime's documentation of each.
  static bool loses_context(cudaError_t code) noexcept {
    switch (code) {
      case cudaErrorCudartUnloading:
      case cudaErrorECCUncorrectable:
      case cudaErrorNvlinkUncorrectable:
      case cudaErrorIllegalAddress:
      case cudaErrorLaunchTimeout:
      case cudaErrorContextIsDestroyed:
      case cudaErrorAssert:
      case cudaErrorHardwareStackError:
      case cudaErrorIllegalInstruction:
      case cudaErrorMisalignedAddress:
      case cudaErrorInvalidAddressSpace:
      case cudaErrorInvalidPc:
      case cudaErrorLaunchFailure:
      case cudaErrorMpsClientTerminated:
      case cudaErrorExternalDevice:
      case cudaErrorTensorMemoryLeak:
      case cudaErrorContained:
        return true;
      default:
        return false;
    }
  }

  void lose(cudaError_t code) const noexcept {
    cudaError_t none = cudaSuccess;
    lost_.compare_exchange_strong(none, code, std::memory_order_acq_rel);
  }
  void throw_if_lost(std::string_view api, std::source_location at) const {
    const cudaError_t code = lost_.load(std::memory_order_acquire);
    if (code != cudaSuccess) [[unlikely]]
      throw CudaError{DeviceError::Kind::context_lost, code, api, "", at};
  }
  [[noreturn]] void failed(cudaError_t code, std::string_view api, std::source_location at) const {
    static_cast<void>(cudaGetLastError());  // told here, once
    if (loses_context(code)) lose(code);
    throw_if_lost(api, at);
    throw CudaError{DeviceError::Kind::call_failed, code, api, "", at};
  }
  void pinned(cudaError_t code, std::string_view api, Bytes bytes, std::source_location at) const {
    if (code != cudaErrorMemoryAllocation) return check(code, api, at);
    static_cast<void>(cudaGetLastError());
    throw OutOfMemory{detail::pinning_failed(api, bytes)};
  }

  void copy(void* to, std::uint64_t to_bytes, const void* from, std::uint64_t from_bytes, cudaMemcpyKind kind,
            StreamRef stream, std::source_location at) {
    if (to_bytes != from_bytes) {
      throw InvalidArgument{"copy_async: " + std::to_string(from_bytes) + " bytes into " + std::to_string(to_bytes)};
    }
    if (to_bytes == 0) return throw_if_lost("copy_async", at);
    check(cudaMemcpyAsync(to, from, to_bytes, kind, stream.get()), "cudaMemcpyAsync", at);
  }

  int ordinal_;
  CudaDeviceOptions options_;
  mutable std::atomic<cudaError_t> lost_ = cudaSuccess;
};

static_assert(Device<CudaDevice>);

/// The library's kernels on a GPU. Declared here for every compiler; defined in `.cuh` headers and instantiated in
/// `hbmoff/cuda_kernels.cu`, which belongs into the program once (CMake: `hbmoff_add_cuda_kernels(target)`). Without it the
/// linker misses `hbmoff::launch_kernel<hbmoff::adamw_kernels::...>`.
template <class Kernel>
void launch_kernel(CudaDevice& device, const Kernel& kernel, CudaDevice::StreamRef stream,
                   std::source_location at = std::source_location::current());

/// Adopts a stream of the caller's. Null is the default stream as this translation unit was compiled: the legacy one,
/// or with CUDA_API_PER_THREAD_DEFAULT_STREAM the calling thread's. Internal linkage, so that both kinds of unit may
/// stand in one program.
[[nodiscard]] static inline CudaDevice::StreamRef cuda_stream(
    cudaStream_t stream, std::source_location at = std::source_location::current()) {
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
  constexpr bool per_thread = true;
#else
  constexpr bool per_thread = false;
#endif
  if (stream == nullptr) stream = per_thread ? cudaStreamPerThread : cudaStreamLegacy;
  return CudaDevice::StreamRef{stream, at};
}

}  // namespace hbmoff
