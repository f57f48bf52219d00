// The two memories of a HostDevice: capped HBM and pinned host memory, as mappings of host address space.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/detail/virtual_memory.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff::detail {

/// Whether the memory can be touched at all.
enum class MemoryMode : std::uint8_t {
  open,       ///< by anyone
  guarded,    ///< HBM only within an `OpenHbm`
  addresses,  ///< never; it is addresses only
};

/// Thread-safe. Destruction unmaps what was not released.
class HostMemory {
 public:
  HostMemory(Bytes hbm_capacity, MemoryMode mode) : capacity_{hbm_capacity}, mode_{mode} {}
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() {
    for (const Block& block : blocks_) unmap_memory(block.address, block.bytes);
  }

  /// Zeroed, page-aligned; nullptr for 0 bytes. `OutOfMemory` over the capacity or when the system refuses.
  [[nodiscard]] std::byte* allocate(Bytes bytes, Tier tier) {
    if (bytes == Bytes{}) return nullptr;
    const std::scoped_lock lock{mutex_};
    if (tier == Tier::hbm && bytes > capacity_ - used_) {
      throw_out_of_memory(bytes, tier, capacity_, capacity_ - used_, "raise HostDeviceOptions::hbm_capacity");
    }
    blocks_.reserve(blocks_.size() + 1);
    std::byte* address = map_memory(bytes, mode_ == MemoryMode::addresses ? MemoryUse::reserve : MemoryUse::read_write);
    if (address == nullptr) {
      const std::string reason = std::generic_category().message(errno);
      throw_out_of_memory(bytes, tier, machine_memory(), free_machine_memory(),
                          "the operating system refused to map it: " + reason);
    }
    if (tier == Tier::hbm) {
      used_ += bytes;
      if (mode_ == MemoryMode::guarded) protect(address, bytes, false);
    }
    blocks_.push_back({address, bytes, tier});
    return address;
  }

  /// Gives back what `allocate` gave; nothing for any other address.
  void release(std::byte* address) noexcept {
    const std::scoped_lock lock{mutex_};
    const auto block =
        std::find_if(blocks_.begin(), blocks_.end(), [=](const Block& b) { return b.address == address; });
    if (block == blocks_.end()) return;
    if (block->tier == Tier::hbm) used_ -= block->bytes;
    unmap_memory(block->address, block->bytes);
    *block = blocks_.back();
    blocks_.pop_back();
  }

  [[nodiscard]] MemoryInfo info() const {
    const std::scoped_lock lock{mutex_};
    return {capacity_ - used_, capacity_};
  }

  [[nodiscard]] MemoryMode mode() const noexcept { return mode_; }

  /// Guarded memory: while it lives no other one does, and HBM is accessible if `opens`. Else nothing.
  class OpenHbm {
   public:
    OpenHbm(HostMemory& memory, bool opens) : memory_{memory}, opens_{opens} {
      if (memory_.mode_ != MemoryMode::guarded) return;
      lock_ = std::unique_lock{memory_.mutex_};
      if (opens_) memory_.protect_hbm(true);
    }
    ~OpenHbm() {
      if (lock_.owns_lock() && opens_) memory_.protect_hbm(false);
    }
    OpenHbm(const OpenHbm&) = delete;
    OpenHbm& operator=(const OpenHbm&) = delete;

   private:
    HostMemory& memory_;
    bool opens_;
    std::unique_lock<std::mutex> lock_;
  };

 private:
  struct Block {
    std::byte* address;
    Bytes bytes;
    Tier tier;
  };

  [[noreturn]] static void throw_out_of_memory(Bytes bytes, Tier tier, Bytes capacity, Bytes free, std::string remedy) {
    OutOfMemory::Details details;
    details.tier = tier;
    details.what_for = tier == Tier::hbm ? "allocate_device" : "allocate_pinned";
    details.requested = bytes;
    details.capacity = capacity;
    details.free = free;
    details.largest_free = free;
    details.remedy = std::move(remedy);
    throw OutOfMemory{std::move(details)};
  }

  void protect_hbm(bool accessible) noexcept {
    for (const Block& block : blocks_) {
      if (block.tier == Tier::hbm) protect(block.address, block.bytes, accessible);
    }
  }

  static void protect(std::byte* address, Bytes bytes, bool accessible) noexcept {
    if (protect_memory(address, bytes, accessible)) return;
    std::fputs("hbmoff::HostDevice: the system refused to change the protection of HBM\n", stderr);
    std::abort();  // going on would fault, or hide the faults that guarded memory promises
  }

  Bytes capacity_;
  MemoryMode mode_;
  mutable std::mutex mutex_;  // where memory is not guarded, never taken by stream work
  std::vector<Block> blocks_;
  Bytes used_;
};

}  // namespace hbmoff::detail
