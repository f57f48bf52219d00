// The two memories of a HostDevice: capped HBM and pinned host memory, as mappings of host address space.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/declared_access.hpp"
#include "hbmoff/device/detail/declared_scope.hpp"
#include "hbmoff/device/detail/fault_handler.hpp"
#include "hbmoff/device/detail/virtual_memory.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff::detail {

/// Whether the memory can be touched at all.
enum class MemoryMode : std::uint8_t {
  open,       ///< by anyone
  guarded,    ///< HBM only within an `OpenHbm`
  addresses,  ///< never; it is addresses only
};

/// Thread-safe. Destruction unmaps what was not released. The memory page on each side of a block is nobody's, and can
/// never be touched.
class HostMemory {
 public:
  HostMemory(Bytes hbm_capacity, MemoryMode mode) : capacity_{hbm_capacity}, mode_{mode} {
    if (mode_ == MemoryMode::guarded) fault_handler_.emplace();
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() {
    for (const HostBlock& block : blocks_) unmap(block);
  }

  /// Zeroed, page-aligned; nullptr for 0 bytes. `OutOfMemory` over the capacity or when the system refuses.
  [[nodiscard]] std::byte* allocate(Bytes bytes, Tier tier) {
    if (bytes == Bytes{}) return nullptr;
    const std::scoped_lock lock{mutex_};
    if (tier == Tier::hbm && bytes > capacity_ - used_) {
      throw_out_of_memory(bytes, tier, capacity_, capacity_ - used_, "raise HostDeviceOptions::hbm_capacity");
    }
    blocks_.reserve(blocks_.size() + 1);
    std::byte* address =
        map_guarded_memory(bytes, mode_ == MemoryMode::addresses ? MemoryUse::reserve : MemoryUse::read_write,
                           is_guarded(tier) ? MemoryAccess::none : MemoryAccess::read_write);
    if (address == nullptr) {
      const std::string reason = std::generic_category().message(errno);
      throw_out_of_memory(bytes, tier, machine_memory(), free_machine_memory(),
                          "the operating system refused to map it: " + reason);
    }
    if (tier == Tier::hbm) used_ += bytes;
    blocks_.push_back({address, bytes, tier});
    return address;
  }

  /// Gives back what `allocate` gave; nothing for any other address.
  void release(std::byte* address) noexcept {
    const std::scoped_lock lock{mutex_};
    const auto block =
        std::find_if(blocks_.begin(), blocks_.end(), [=](const HostBlock& b) { return b.address == address; });
    if (block == blocks_.end()) return;
    if (block->tier == Tier::hbm) used_ -= block->bytes;
    unmap(*block);
    *block = blocks_.back();
    blocks_.pop_back();
  }

  [[nodiscard]] MemoryInfo info() const {
    const std::scoped_lock lock{mutex_};
    return {capacity_ - used_, capacity_};
  }

  [[nodiscard]] MemoryMode mode() const noexcept { return mode_; }

  /// Guarded memory: while it lives no other one does, and HBM is accessible if `opens`: of it, where `declared` is
  /// given, what that declares (see `DeclaredScope`). Else nothing.
  class OpenHbm {
   public:
    /// std::bad_alloc only where `declared` is given; nothing was changed.
    OpenHbm(HostMemory& memory, bool opens, DeclaredAccess* declared = nullptr) : memory_{memory}, opens_{opens} {
      if (memory_.mode_ != MemoryMode::guarded) return;
      lock_ = std::unique_lock{memory_.mutex_};
      if (opens_) memory_.open_hbm(declared);
    }
    ~OpenHbm() {
      if (lock_.owns_lock() && opens_) memory_.close_hbm();
    }
    OpenHbm(const OpenHbm&) = delete;
    OpenHbm& operator=(const OpenHbm&) = delete;

   private:
    HostMemory& memory_;
    bool opens_;
    std::unique_lock<std::mutex> lock_;
  };

 private:
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

  [[nodiscard]] bool is_guarded(Tier tier) const noexcept { return tier == Tier::hbm && mode_ == MemoryMode::guarded; }

  static void unmap(const HostBlock& block) noexcept { unmap_guarded_memory(block.address, block.bytes); }

  void open_hbm(DeclaredAccess* declared) {
    if (declared != nullptr) {
      scope_.emplace(blocks_, *declared);
    } else {
      protect_hbm(MemoryAccess::read_write);
    }
  }
  void close_hbm() noexcept {
    if (scope_) {
      scope_.reset();
    } else {
      protect_hbm(MemoryAccess::none);
    }
  }
  void protect_hbm(MemoryAccess access) noexcept {
    for (const HostBlock& block : blocks_) {
      if (block.tier == Tier::hbm) protect_guarded(block.address, block.bytes, access);
    }
  }

  Bytes capacity_;
  MemoryMode mode_;
  mutable std::mutex mutex_;  // where memory is not guarded, never taken by stream work
  std::vector<HostBlock> blocks_;
  Bytes used_;
  std::optional<FaultHandler> fault_handler_;  // where memory is guarded
  std::optional<DeclaredScope> scope_;         // of the `OpenHbm` that lives, if its work declared what it touches
};

}  // namespace hbmoff::detail
