// Counts every allocation of the program, on all threads: it replaces malloc and its kin, so one file per program
// includes it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

// Sanitizers bring their own malloc, and a way to be told of every call; elsewhere glibc's is called by its other name.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define HBMOFF_TEST_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HBMOFF_TEST_SANITIZED
#endif

/// Calls of malloc, calloc, realloc, aligned_alloc, posix_memalign, memalign, mmap and mremap, and of operator new, which
/// calls malloc. In sanitizer builds those that bring memory from the heap.
inline std::atomic<std::uint64_t> allocations{0};

#if defined(HBMOFF_TEST_SANITIZED)
// From sanitizer/allocator_interface.h, which g++ does not install.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void*, std::size_t),
                                                         void (*)(const volatile void*));
/// Not 0: allocations are counted.
inline const int counts_allocations = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, std::size_t) { ++allocations; }, [](const volatile void*) {});
#else
#include <cerrno>
#include <cstdarg>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

inline constexpr int counts_allocations = 1;

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void* malloc(std::size_t size) { return ++allocations, __libc_malloc(size); }
void* calloc(std::size_t count, std::size_t size) { return ++allocations, __libc_calloc(count, size); }
void* realloc(void* old, std::size_t size) { return ++allocations, __libc_realloc(old, size); }
void* aligned_alloc(std::size_t alignment, std::size_t size) { return ++allocations, __libc_memalign(alignment, size); }
void* memalign(std::size_t alignment, std::size_t size) { return ++allocations, __libc_memalign(alignment, size); }
int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  ++allocations;
  *memory = __libc_memalign(alignment, size);
  return *memory != nullptr ? 0 : ENOMEM;
}
void* mmap(void* address, std::size_t size, int protection, int flags, int file, off_t offset) {
  ++allocations;
  return reinterpret_cast<void*>(::syscall(SYS_mmap, address, size, protection, flags, file, offset));
}
void* mremap(void* old, std::size_t old_size, std::size_t size, int flags, ...) {
  ++allocations;
  va_list arguments;
  va_start(arguments, flags);
  void* fixed = (flags & MREMAP_FIXED) != 0 ? va_arg(arguments, void*) : nullptr;
  va_end(arguments);
  return reinterpret_cast<void*>(::syscall(SYS_mremap, old, old_size, size, flags, fixed));
}
}
#endif
