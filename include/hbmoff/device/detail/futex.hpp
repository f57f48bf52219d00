// Sleeping until a 64-bit atomic changes, with no ordering beyond that of the atomic itself.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>
#endif

namespace hbmoff::detail {

// std::atomic::wait keeps waiter counts of its own, whose ordering would reach ThreadSanitizer and hide that two
// streams lack a wait between them. The system call is invisible to it: all edges are those of the loads and stores
// below.
#if defined(__linux__)

/// The half of `word` that changes first; the kernel compares 32 bits.
[[nodiscard]] inline void* low_half(const std::atomic<std::uint64_t>& word) noexcept {
  static_assert(sizeof(word) == sizeof(std::uint64_t) && std::atomic<std::uint64_t>::is_always_lock_free);
  const auto address = reinterpret_cast<std::uintptr_t>(&word);
  return reinterpret_cast<void*>(address + (std::endian::native == std::endian::little ? 0 : 4));
}

/// Blocks while `word` holds `seen`; may return early. The caller looks at `word` again.
inline void sleep_while_equal(const std::atomic<std::uint64_t>& word, std::uint64_t seen) noexcept {
  ::syscall(SYS_futex, low_half(word), FUTEX_WAIT_PRIVATE, static_cast<std::uint32_t>(seen), nullptr, nullptr, 0);
}

/// Wakes every thread that sleeps on `word`.
inline void wake_all(const std::atomic<std::uint64_t>& word) noexcept {
  ::syscall(SYS_futex, low_half(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

inline void sleep_while_equal(const std::atomic<std::uint64_t>& word, std::uint64_t seen) noexcept {
  word.wait(seen, std::memory_order_relaxed);
}

inline void wake_all(std::atomic<std::uint64_t>& word) noexcept { word.notify_all(); }

#endif

}  // namespace hbmoff::detail
