// Memory that arenas hold and nobody has taken, closed to AddressSanitizer where a program has it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#if defined(__GNUC__) && defined(__ELF__)
// Weak: null in a program without AddressSanitizer, so that this header is the same with and without. Some parts of one
// program may even be compiled without it.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, std::size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, std::size_t bytes);
}
#define HBMOFF_CAN_POISON 1
#else
#define HBMOFF_CAN_POISON 0
#endif

namespace hbmoff::detail {

/// The ranges that arenas divide (`note_divided`), and which of their bytes may be touched. Thread-safe. Does nothing in a
/// program without AddressSanitizer.
class PoisonedRanges {
 public:
  [[nodiscard]] static bool available() noexcept {
#if HBMOFF_CAN_POISON
    return &__asan_poison_memory_region != nullptr;
#else
    return false;
#endif
  }

  /// From now on an arena's, closed.
  void divide(const std::byte* data, std::uint64_t bytes) {
    const std::scoped_lock lock{mutex_};
    arenas_.push_back({.data = data, .bytes = bytes, .number = ++last_number_});
    poison(data, bytes);
  }
  /// No arena's any more, open.
  void undivide(const std::byte* data, std::uint64_t bytes) noexcept {
    const std::scoped_lock lock{mutex_};
    std::erase_if(arenas_, [=](const Arena& arena) { return arena.data == data && arena.bytes == bytes; });
    unpoison(data, bytes);
  }

  /// A block is taken: open at once, as the host may use memory that no stream used before.
  void take(const std::byte* data, std::uint64_t bytes) {
    const std::scoped_lock lock{mutex_};
    if (Arena* arena = holder_of(data)) {
      arena->blocks.insert({data, {data + bytes, ++last_number_, true}});
      arena->longest = (std::max)(arena->longest, bytes);
    }
    unpoison(data, bytes);
  }

  /// A block that was given back. No arena's where `arena` is 0.
  struct GivenBack {
    std::uint64_t arena = 0, block = 0;
    const std::byte* data = nullptr;
  };
  /// The block at `data` is nobody's any more. It stays open, for work that is still queued, until `close`.
  [[nodiscard]] GivenBack give_back(const std::byte* data) noexcept {
    const std::scoped_lock lock{mutex_};
    Arena* arena = holder_of(data);
    if (arena == nullptr) return {};
    for (auto block = arena->blocks.lower_bound(data); block != arena->blocks.end() && block->first == data; ++block) {
      if (!block->second.taken) continue;
      block->second.taken = false;
      return {arena->number, block->second.number, data};
    }
    return {};
  }
  /// Closes what was given back, but for what has been taken since and is still open. Nothing when the arena has ended.
  void close(const GivenBack& given) noexcept {
    const std::scoped_lock lock{mutex_};
    const auto arena =
        std::find_if(arenas_.begin(), arenas_.end(), [&](const Arena& each) { return each.number == given.arena; });
    if (arena == arenas_.end()) return;
    auto& blocks = arena->blocks;
    const auto block = std::find_if(blocks.lower_bound(given.data), blocks.end(),
                                    [&](const auto& each) { return each.second.number == given.block; });
    const std::byte* data = given.data;
    const std::byte* const end = block->second.end;
    blocks.erase(block);
    const std::uint64_t before = (std::min)(arena->longest, static_cast<std::uint64_t>(data - arena->data));
    for (auto other = blocks.lower_bound(data - before); other != blocks.end() && other->first < end; ++other) {
      if (other->first > data) poison(data, static_cast<std::uint64_t>(other->first - data));
      data = (std::max)(data, other->second.end);
    }
    if (data < end) poison(data, static_cast<std::uint64_t>(end - data));
  }

 private:
  struct Block {
    const std::byte* end;
    std::uint64_t number;
    bool taken;  ///< or given back, and not closed yet
  };
  struct Arena {
    const std::byte* data;
    std::uint64_t bytes;
    std::uint64_t number;
    std::multimap<const std::byte*, Block> blocks = {};  ///< by where they begin; those given back may overlap others
    std::uint64_t longest = 0;  ///< block so far, in bytes
  };

  // The innermost: an arena may lie in a block of another.
  Arena* holder_of(const std::byte* data) noexcept {
    const auto holds = [=](const Arena& arena) { return arena.data <= data && data < arena.data + arena.bytes; };
    const auto innermost = std::find_if(arenas_.rbegin(), arenas_.rend(), holds);
    return innermost == arenas_.rend() ? nullptr : &*innermost;
  }

  static void poison([[maybe_unused]] const std::byte* data, [[maybe_unused]] std::uint64_t bytes) noexcept {
#if HBMOFF_CAN_POISON
    __asan_poison_memory_region(data, bytes);
#endif
  }
  static void unpoison([[maybe_unused]] const std::byte* data, [[maybe_unused]] std::uint64_t bytes) noexcept {
#if HBMOFF_CAN_POISON
    __asan_unpoison_memory_region(data, bytes);
#endif
  }

  mutable std::mutex mutex_;
  std::vector<Arena> arenas_;  // the innermost last
  std::uint64_t last_number_ = 0;
};

}  // namespace hbmoff::detail
