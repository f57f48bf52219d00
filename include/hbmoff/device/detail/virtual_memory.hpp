// Whole mappings of address space from the operating system.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>

#include "hbmoff/core/units.hpp"

namespace hbmoff::detail {

[[nodiscard]] inline Bytes memory_page_size() noexcept {
  return Bytes{static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
}

/// Physical memory of the machine, and what of it is free; 0 where the system does not say.
[[nodiscard]] inline Bytes machine_memory() noexcept {
#if defined(_SC_PHYS_PAGES)
  return memory_page_size() * static_cast<std::uint64_t>((std::max)(0L, ::sysconf(_SC_PHYS_PAGES)));
#else
  return Bytes{};
#endif
}
[[nodiscard]] inline Bytes free_machine_memory() noexcept {
#if defined(_SC_AVPHYS_PAGES)
  return memory_page_size() * static_cast<std::uint64_t>((std::max)(0L, ::sysconf(_SC_AVPHYS_PAGES)));
#else
  return Bytes{};
#endif
}

enum class MemoryUse : std::uint8_t {
  read_write,  ///< zeroed memory, taken when first touched
  reserve,     ///< addresses only: no access, no memory, no accounting
};

/// What threads may do with memory; another access faults.
enum class MemoryAccess : std::uint8_t { none, read, read_write };

/// Sets it for all threads, on the memory pages that hold `bytes` bytes from the page-aligned `address` on. False when
/// the system refuses. Async-signal-safe.
[[nodiscard]] inline bool protect_memory(std::byte* address, Bytes bytes, MemoryAccess access) noexcept {
  const int protection = access == MemoryAccess::none   ? PROT_NONE
                         : access == MemoryAccess::read ? PROT_READ
                                                        : PROT_READ | PROT_WRITE;
  return ::mprotect(address, round_up(bytes, memory_page_size()).count(), protection) == 0;
}

/// Maps `bytes` (> 0) rounded up to whole memory pages, page-aligned. nullptr when the system refuses; errno says why.
[[nodiscard]] inline std::byte* map_memory(Bytes bytes, MemoryUse use) noexcept {
  if (bytes > Bytes{~std::uint64_t{0}} - memory_page_size()) {
    errno = ENOMEM;
    return nullptr;
  }
  const int protection = use == MemoryUse::reserve ? PROT_NONE : PROT_READ | PROT_WRITE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (use == MemoryUse::reserve ? MAP_NORESERVE : 0);
  const std::uint64_t size = round_up(bytes, memory_page_size()).count();
  void* address = ::mmap(nullptr, size, protection, flags, -1, 0);
  if (address == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  // Fewer faults and TLB misses where the system has huge pages to give; only a hint.
  if (use == MemoryUse::read_write) ::madvise(address, size, MADV_HUGEPAGE);
#endif
  return static_cast<std::byte*>(address);
}

/// Gives back what `map_memory(bytes, ...)` gave.
inline void unmap_memory(std::byte* address, Bytes bytes) noexcept {
  ::munmap(address, round_up(bytes, memory_page_size()).count());
}

/// As `map_memory`, with a memory page on each side to which nothing else is mapped, and no access to these. With
/// `MemoryAccess::none` none to the memory either.
[[nodiscard]] inline std::byte* map_guarded_memory(Bytes bytes, MemoryUse use, MemoryAccess access) noexcept {
  const Bytes page = memory_page_size();
  if (bytes > Bytes{~std::uint64_t{0}} - 4 * page) {
    errno = ENOMEM;
    return nullptr;
  }
  const Bytes size = round_up(bytes, page) + 2 * page;
  std::byte* address = map_memory(size, use);
  if (address == nullptr || use == MemoryUse::reserve) return address == nullptr ? nullptr : address + page.count();
  const bool guarded = access == MemoryAccess::none
                           ? protect_memory(address, size, MemoryAccess::none)
                           : protect_memory(address, page, MemoryAccess::none) &&
                                 protect_memory(address + (size - page).count(), page, MemoryAccess::none);
  if (!guarded) {
    const int reason = errno;
    unmap_memory(address, size);
    errno = reason;
    return nullptr;
  }
  return address + page.count();
}

/// Gives back what `map_guarded_memory(bytes)` gave.
inline void unmap_guarded_memory(std::byte* address, Bytes bytes) noexcept {
  const Bytes page = memory_page_size();
  unmap_memory(address - page.count(), round_up(bytes, page) + 2 * page);
}

}  // namespace hbmoff::detail
