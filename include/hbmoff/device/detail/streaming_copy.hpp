// memcpy that writes large blocks past the caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__SSE2__) && defined(__ELF__)
// Present exactly where these sanitizers are linked in. A test at run time, because an inline body must be the same in
// translation units with and without the sanitizer.
extern "C" {
[[gnu::weak]] void __tsan_init();  // NOLINT(bugprone-reserved-identifier): the runtimes' own names
[[gnu::weak]] void __asan_init();  // NOLINT(bugprone-reserved-identifier)
}
#endif

namespace hbmoff::detail {

/// From this size on the destination is written with streaming stores: it would not stay in a cache, and reading it
/// first (as ordinary stores do) costs a third of the bandwidth.
inline constexpr std::uint64_t streaming_copy_threshold = 1u << 20;

#if defined(__SSE2__) && defined(__ELF__)

/// Sanitizers see calls of memcpy; they do not see streaming stores.
[[nodiscard]] inline bool sanitizer_watches() noexcept {
  void (*volatile tsan)() = &__tsan_init;
  void (*volatile asan)() = &__asan_init;
  return tsan != nullptr || asan != nullptr;
}

/// Copies `bytes` bytes between blocks that do not overlap. All stores are visible to whoever the caller then
/// releases to.
inline void streaming_copy(std::byte* to, const std::byte* from, std::uint64_t bytes) noexcept {
  if (bytes < streaming_copy_threshold || sanitizer_watches()) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  const std::uint64_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // a release store does not order streaming stores
  std::memcpy(to, from, bytes);
}

#else

inline void streaming_copy(std::byte* to, const std::byte* from, std::uint64_t bytes) noexcept {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace hbmoff::detail
