// Host memory made ready for pinning: mapped, in huge pages where allowed, and touched by several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#endif

namespace hbmoff::detail {

/// Why memory could not be pinned, and what people can change.
[[nodiscard]] inline OutOfMemory::Details pinning_failed(std::string_view api, Bytes bytes) {
  OutOfMemory::Details details;
  details.tier = Tier::pinned_host;
  details.what_for = std::string{api};
  details.requested = bytes;
  details.remedy = "the system refused to pin it: free RAM, or raise";
#if defined(__linux__)
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    details.remedy += " RLIMIT_MEMLOCK (ulimit -l), now " + to_string(Bytes{limit.rlim_cur}) + ", or";
  }
#endif
  details.remedy += " the cgroup's memory limit; WSL pins only part of its memory (.wslconfig)";
  return details;
}

/// A private anonymous mapping, all of it present, zeroed. Throws `OutOfMemory` when the system has no room.
class PinnedMapping {
 public:
  explicit PinnedMapping(Bytes bytes) : bytes_{bytes} {
    data_ = map(bytes);
    if (data_ == nullptr) throw OutOfMemory{pinning_failed("mapping host memory", bytes)};
    touch();
  }
  PinnedMapping(const PinnedMapping&) = delete;
  PinnedMapping& operator=(const PinnedMapping&) = delete;
  ~PinnedMapping() {
    if (data_ != nullptr) unmap(data_, bytes_);
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// The memory is the caller's from here on; `unmap` gives it back.
  [[nodiscard]] std::byte* release() noexcept { return std::exchange(data_, nullptr); }

  static void unmap(std::byte* data, Bytes bytes) noexcept {
#if defined(__linux__)
    munmap(data, bytes.count());
#else
    static_cast<void>(bytes);
    ::operator delete(data, std::align_val_t{alignment});
#endif
  }

 private:
  static constexpr std::size_t alignment = 4096;

  static std::byte* map(Bytes bytes) noexcept {
#if defined(__linux__)
    void* data = mmap(nullptr, bytes.count(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
    madvise(data, bytes.count(), MADV_HUGEPAGE);  // where it is refused, small pages do
    return static_cast<std::byte*>(data);
#else
    return static_cast<std::byte*>(::operator new(bytes.count(), std::align_val_t{alignment}, std::nothrow));
#endif
  }

  // The first touch makes the system find and zero a page; one thread does some 2 GB/s of it.
  void touch() noexcept {
    constexpr std::uint64_t least_per_thread = 32u << 20;
    const std::uint64_t cores = std::thread::hardware_concurrency();  // 0 where it is not known
    const std::uint64_t threads =
        std::clamp<std::uint64_t>(bytes_.count() / least_per_thread, 1, cores == 0 ? 1 : cores);
    const std::uint64_t share = round_up(bytes_.count() / threads + 1, alignment);
    const auto touch_share = [this, share](std::uint64_t i) {
      const std::uint64_t end = (std::min)(bytes_.count(), (i + 1) * share);
      for (std::uint64_t at = i * share; at < end; at += alignment) const_cast<volatile std::byte&>(data_[at]) = {};
    };
    std::vector<std::thread> others;
    std::uint64_t started = 1;
    try {
      others.reserve(threads - 1);
      for (; started < threads; ++started) others.emplace_back(touch_share, started);
    } catch (const std::exception&) {
      // No more threads, or no memory for them: this one does the rest, from `started` on.
    }
    touch_share(0);
    for (std::uint64_t i = started; i < threads; ++i) touch_share(i);
    for (std::thread& other : others) other.join();
  }

  Bytes bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace hbmoff::detail
