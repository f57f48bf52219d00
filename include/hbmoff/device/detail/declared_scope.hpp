// HBM that is accessible where work declared that it touches it, and nowhere else.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/declared_access.hpp"
#include "hbmoff/device/detail/fault_handler.hpp"
#include "hbmoff/device/detail/virtual_memory.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff::detail {

/// A block of a HostDevice's memory.
struct HostBlock {
  std::byte* address;
  Bytes bytes;
  Tier tier;
};

/// `protect_memory` for HBM that is guarded; ends the program when the system refuses.
inline void protect_guarded(std::byte* address, Bytes bytes, MemoryAccess access) noexcept {
  if (protect_memory(address, bytes, access)) return;
  std::fputs("hbmoff::HostDevice: the system refused to change the protection of HBM\n", stderr);
  std::abort();  // going on would fault, or hide the faults that guarded memory promises
}

/// The time in which work with declared accesses runs (see `DeclaredAccess`). Of the blocks, those in HBM are
/// inaccessible before and after, with guard pages around them, and stay where they are. There is a `FaultHandler`.
class DeclaredScope final : private FaultWatcher {
 public:
  /// std::bad_alloc when there is no memory to remember bytes in; nothing was changed.
  DeclaredScope(std::span<const HostBlock> blocks, DeclaredAccess& declared)
      : blocks_{blocks}, declared_{declared}, page_size_{memory_page_size().count()}, edges_{edge_pages()},
        before_(edges_.size() * page_size_) {
    // Writes second: a page that both share is writable.
    open(declared_.reads, MemoryAccess::read);
    open(declared_.writes, MemoryAccess::read_write);
    for (std::size_t i = 0; i < edges_.size(); ++i) std::memcpy(before_of(i), edges_[i], page_size_);
    FaultHandler::watch(*this);
  }

  ~DeclaredScope() {
    FaultHandler::unwatch(*this);
    if (!violation_) violation_ = changed_edge();
    for (const HostBlock& block : blocks_) {
      if (block.tier != Tier::hbm) continue;
      const Extent pages = with_guards(block);
      protect_guarded(pages.begin, Bytes{pages.size()}, MemoryAccess::none);
    }
    declared_.violation = violation_;
    declared_.checked = true;
  }

 private:
  struct Extent {
    std::byte* begin;
    std::byte* end;
    [[nodiscard]] bool empty() const { return begin >= end; }
    [[nodiscard]] std::uint64_t size() const { return static_cast<std::uint64_t>(end - begin); }
    [[nodiscard]] bool contains(const std::byte* address) const { return begin <= address && address < end; }
  };

  bool take(const MemoryFault& fault) noexcept override {
    const auto hit = [&](const HostBlock& b) { return b.tier == Tier::hbm && with_guards(b).contains(fault.address); };
    if (std::none_of(blocks_.begin(), blocks_.end(), hit)) return false;
    std::byte* page = page_of(fault.address);
    if (!violation_) {
      violation_ = {fault.address, fault.write, fault.kind_known};
      if (is_declared_read(page)) violation_->write = violation_->kind_known = true;  // reading it does not fault
    }
    return protect_memory(page, Bytes{page_size_}, MemoryAccess::read_write);
  }

  /// The part of a range that lies in a block. Ranges may be anything.
  [[nodiscard]] static Extent within(const AccessRange& range, const HostBlock& block) {
    const auto block_begin = reinterpret_cast<std::uintptr_t>(block.address);
    const auto begin = reinterpret_cast<std::uintptr_t>(range.data);
    const std::uintptr_t end = begin + (std::min)(range.bytes.count(), ~std::uintptr_t{0} - begin);
    const auto clamp = [&](std::uintptr_t address) {
      return block.address + (std::clamp)(address, block_begin, block_begin + block.bytes.count()) - block_begin;
    };
    return {clamp(begin), clamp(end)};
  }

  /// Calls `f(part)` for every part of HBM that the ranges name.
  template <class F>
  void for_each_part(std::span<const AccessRange> ranges, F&& f) const {
    for (const AccessRange& range : ranges) {
      for (const HostBlock& block : blocks_) {
        if (block.tier != Tier::hbm) continue;
        if (const Extent part = within(range, block); !part.empty()) f(part);
      }
    }
  }

  [[nodiscard]] std::byte* page_of(std::byte* address) const {
    return address - reinterpret_cast<std::uintptr_t>(address) % page_size_;
  }
  [[nodiscard]] Extent pages_of(const Extent& part) const {
    return {page_of(part.begin), page_of(part.end - 1) + page_size_};
  }
  [[nodiscard]] Extent with_guards(const HostBlock& block) const {
    return {block.address - page_size_, block.address + round_up(block.bytes.count(), page_size_) + page_size_};
  }
  [[nodiscard]] bool is_declared_read(const std::byte* page) const {
    bool found = false;
    for_each_part(declared_.reads, [&](const Extent& part) { found = found || pages_of(part).contains(page); });
    return found;
  }

  void open(std::span<const AccessRange> ranges, MemoryAccess access) const noexcept {
    for_each_part(ranges, [&](const Extent& part) {
      const Extent pages = pages_of(part);
      protect_guarded(pages.begin, Bytes{pages.size()}, access);
    });
  }

  /// The memory pages, in order, that declared writes may share with bytes that are not declared as written.
  [[nodiscard]] std::vector<std::byte*> edge_pages() const {
    std::vector<std::byte*> edges;
    for_each_part(declared_.writes, [&](const Extent& part) {
      const Extent pages = pages_of(part);
      if (pages.begin != part.begin) edges.push_back(pages.begin);
      if (pages.end != part.end) edges.push_back(pages.end - page_size_);
    });
    std::sort(edges.begin(), edges.end());
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    return edges;
  }
  [[nodiscard]] std::byte* before_of(std::size_t edge) { return before_.data() + edge * page_size_; }

  /// The first byte on an edge that is not as it was, and was not declared as written.
  [[nodiscard]] std::optional<DeclaredAccess::Violation> changed_edge() noexcept {
    for (std::size_t i = 0; i < edges_.size(); ++i) {
      const std::byte* page = edges_[i];
      for (std::uint64_t at = 0; at < page_size_;) {
        const std::byte* before = before_of(i);
        at = static_cast<std::uint64_t>(std::mismatch(page + at, page + page_size_, before + at).first - page);
        if (at == page_size_) break;
        const std::byte* written_end = nullptr;
        for_each_part(declared_.writes, [&](const Extent& part) {
          if (part.contains(page + at)) written_end = part.end;
        });
        if (written_end == nullptr) return DeclaredAccess::Violation{.address = page + at, .write = true};
        at = (std::min)(page_size_, static_cast<std::uint64_t>(written_end - page));
      }
    }
    return std::nullopt;
  }

  std::span<const HostBlock> blocks_;
  DeclaredAccess& declared_;
  std::uint64_t page_size_;
  std::vector<std::byte*> edges_;
  std::vector<std::byte> before_;  // the edges' bytes when the work began
  // Between `watch` and `unwatch`, `take`'s alone.
  std::optional<DeclaredAccess::Violation> violation_;
};

}  // namespace hbmoff::detail
