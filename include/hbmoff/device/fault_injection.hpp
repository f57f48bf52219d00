// Failures on request: what a device's calls ask before they do anything, so that tests can make any one of them fail.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// What a call on a device does.
enum class CallKind : std::uint8_t {
  allocation,     ///< allocate_device
  pinning,        ///< allocate_pinned
  copy,           ///< copy_async, fill_async
  kernel,         ///< a launch
  host_function,  ///< host_func
  event,          ///< create_event
  stream,         ///< create_stream
  ordering,       ///< record, wait
  waiting,        ///< query, synchronize, elapsed
};
inline constexpr std::uint32_t call_kind_count = 9;

/// A set of call kinds: `CallKind::copy`, `{CallKind::copy, CallKind::kernel}`, `CallKinds::any()`.
class CallKinds {
 public:
  constexpr CallKinds() = default;
  constexpr CallKinds(CallKind kind) : bits_{bit(kind)} {}  // NOLINT(google-explicit-constructor): a set of one
  constexpr CallKinds(std::initializer_list<CallKind> kinds) {
    for (const CallKind kind : kinds) bits_ |= bit(kind);
  }
  [[nodiscard]] static constexpr CallKinds any() {
    CallKinds all;
    all.bits_ = (1u << call_kind_count) - 1;
    return all;
  }

  [[nodiscard]] constexpr bool empty() const { return bits_ == 0; }
  [[nodiscard]] constexpr bool contains(CallKind kind) const { return (bits_ & bit(kind)) != 0; }
  [[nodiscard]] constexpr bool is_within(CallKinds other) const { return (bits_ & ~other.bits_) == 0; }
  /// One bit per kind, bit 0 for the first.
  [[nodiscard]] constexpr std::uint32_t bits() const { return bits_; }
  friend constexpr bool operator==(CallKinds, CallKinds) = default;

 private:
  static constexpr std::uint32_t bit(CallKind kind) { return 1u << static_cast<std::uint32_t>(kind); }

  std::uint32_t bits_ = 0;
};

/// What happens to the call that a `Fault` meets.
enum class FaultOutcome : std::uint8_t {
  call_failed,    ///< it throws DeviceError (call_failed) and has no effect
  out_of_memory,  ///< it throws OutOfMemory and has no effect; allocations and pinnings only
  /// It returns, and the work that it queued does nothing but fail when its turn comes, which loses the context; copies
  /// (those of no bytes too), kernels and host functions only.
  work_failed,
};

/// A failure on request. It happens once.
///
///     device.inject({.kinds = CallKind::pinning, .nth = 2, .outcome = FaultOutcome::out_of_memory});
struct Fault {
  CallKinds kinds = CallKinds::any();  ///< the calls that count
  std::uint64_t nth = 1;  ///< which of them, from now on, meets the fault (1: the next); 0: none
  FaultOutcome outcome = FaultOutcome::call_failed;
  /// The reason that the error gives: the end of its message, and `OutOfMemory::Details::remedy`. Empty: "failed on
  /// request".
  std::string reason = {};
};

/// The gate that a device's calls pass. Thread-safe. With no fault armed for its kind a call costs an increment and a
/// load, both relaxed: threads are not ordered by it, so that ThreadSanitizer still sees what the program leaves
/// unordered.
class CallGate {
 public:
  /// Counts a call. The fault it is to meet, if there is one.
  [[nodiscard]] std::optional<Fault> pass(CallKind kind) noexcept {
    made_[static_cast<std::size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
    if (!is_armed_for(armed_.load(std::memory_order_relaxed), kind)) return std::nullopt;
    return count_down(kind);
  }

  /// Calls of these kinds that have passed.
  [[nodiscard]] std::uint64_t made(CallKinds kinds) const noexcept {
    std::uint64_t sum = 0;
    for (std::uint32_t kind = 0; kind < call_kind_count; ++kind) {
      if (kinds.contains(static_cast<CallKind>(kind))) sum += made_[kind].load(std::memory_order_relaxed);
    }
    return sum;
  }

  /// Throws `InvalidArgument` when calls of these kinds cannot fail in this way, or there are none.
  static void validate(const Fault& fault) {
    constexpr CallKinds allocate{CallKind::allocation, CallKind::pinning};
    constexpr CallKinds work{CallKind::copy, CallKind::kernel, CallKind::host_function};
    if (fault.kinds.empty()) throw InvalidArgument{"inject: the fault names no kind of call"};
    if (fault.outcome == FaultOutcome::out_of_memory && !fault.kinds.is_within(allocate)) {
      throw InvalidArgument{"inject: only allocations and pinnings run out of memory"};
    }
    if (fault.outcome == FaultOutcome::work_failed && !fault.kinds.is_within(work)) {
      throw InvalidArgument{"inject: only copies, kernels and host functions queue work that can fail"};
    }
  }

  /// Arms a valid fault in place of the one that is armed; with `nth` 0 none. A call that runs beside this one counts
  /// for either.
  void arm(Fault fault) noexcept {
    const std::scoped_lock lock{mutex_};
    // A count too large for the word is one that no program gets to.
    const std::uint64_t left = (std::min)(fault.nth, ~std::uint64_t{0} / one_call);
    armed_.store(left == 0 ? 0 : left * one_call + fault.kinds.bits(), std::memory_order_relaxed);
    fault_ = std::move(fault);
  }

  /// Takes the armed fault back. Whether there was one, still to happen.
  bool disarm() noexcept {
    const std::scoped_lock lock{mutex_};
    return armed_.exchange(0, std::memory_order_relaxed) != 0;
  }

 private:
  // What is armed, in one word: above, how many calls there still are up to the one that meets the fault; below, the
  // kinds that count.
  static constexpr std::uint64_t one_call = std::uint64_t{1} << 16;
  static_assert(call_kind_count <= 16);

  static constexpr bool is_armed_for(std::uint64_t armed, CallKind kind) noexcept {
    return (armed & CallKinds{kind}.bits()) != 0;
  }

  std::optional<Fault> count_down(CallKind kind) noexcept {
    std::uint64_t armed = armed_.load(std::memory_order_relaxed);
    while (is_armed_for(armed, kind)) {
      if (armed >= 2 * one_call) {
        if (armed_.compare_exchange_weak(armed, armed - one_call, std::memory_order_relaxed)) return std::nullopt;
        continue;
      }
      const std::scoped_lock lock{mutex_};  // `arm` changes word and fault together
      if (armed_.compare_exchange_strong(armed, 0, std::memory_order_relaxed)) return std::move(fault_);
    }
    return std::nullopt;
  }

  std::atomic<std::uint64_t> made_[call_kind_count] = {};
  std::atomic<std::uint64_t> armed_{0};
  std::mutex mutex_;
  Fault fault_;
};

/// The reason of the error that a fault becomes.
[[nodiscard]] inline const char* reason_of(const Fault& fault) noexcept {
  return fault.reason.empty() ? "failed on request" : fault.reason.c_str();
}

/// What a call throws that meets a fault with `call_failed`.
[[noreturn]] inline void throw_call_failed(const Fault& fault, std::string_view api, const std::source_location& at) {
  throw DeviceError{DeviceError::Kind::call_failed, api, reason_of(fault), at};
}

/// What `api` throws that asked for `requested` bytes of `tier` and meets a fault with `out_of_memory`: nothing of
/// `capacity` is free.
[[noreturn]] inline void throw_out_of_memory(const Fault& fault, std::string_view api, Tier tier, Bytes requested,
                                             Bytes capacity) {
  OutOfMemory::Details details;
  details.tier = tier;
  details.what_for = api;
  details.requested = requested;
  details.capacity = capacity;
  details.remedy = reason_of(fault);
  throw OutOfMemory{std::move(details)};
}

}  // namespace hbmoff
