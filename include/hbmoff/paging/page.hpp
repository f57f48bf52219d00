// A page: parts with a home and an access, side by side in one slot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/paging/home.hpp"

namespace hbmoff {

/// What a lease does to a part. `read` needs a fill, `write` needs a write-back and no fill, `read_write` both.
enum class Access : std::uint8_t { read = 1, write = 2, read_write = 3 };

[[nodiscard]] constexpr bool reads(Access access) { return (static_cast<unsigned>(access) & 1u) != 0; }
[[nodiscard]] constexpr bool writes(Access access) { return (static_cast<unsigned>(access) & 2u) != 0; }

[[nodiscard]] constexpr std::string_view to_string(Access access) {
  return access == Access::read ? "read" : access == Access::write ? "write" : "read-write";
}

/// `bytes` of a home at `home_offset`, which lie at `slot_offset` in the page's slot. Parts that are neighbours in both
/// travel as one copy.
template <Device D>
struct PagePart {
  Home<D>* home = nullptr;
  std::uint64_t home_offset = 0;
  std::uint64_t slot_offset = 0;
  Bytes bytes;
  Access access = Access::read_write;
};

/// A page as its owner describes it.
template <Device D>
struct PageSpec {
  std::string label = {};  ///< names the page in errors
  std::vector<PagePart<D>> parts = {};  ///< may be empty: the slot is scratch then, no copy is made
  Bytes slot_bytes = {};  ///< room in the slot; at least the end of the last part
  bool transient =
      false;  ///< nobody needs the content after its last access in a plan: it is dropped, not written back
};

/// Identifies a page within its scheduler.
enum class PageId : std::uint32_t {};

/// One access in a plan.
struct PlanStep {
  PageId page;
  Access access;
};

/// Identifies a plan within its scheduler.
enum class PlanId : std::uint32_t {};

}  // namespace hbmoff
