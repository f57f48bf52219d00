// The arena of pinned host memory, where offloaded state lives.
#pragma once

#include <cstdint>
#include <fstream>
#include <limits>
#include <source_location>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/arena.hpp"

namespace hbmoff {

/// What this process can still take of the machine's memory.
struct HostMemoryLimit {
  Bytes available{(std::numeric_limits<std::uint64_t>::max)()};  ///< the largest count when nothing is known
  std::string set_by;                                          ///< what sets it, for people; may be empty
};

namespace detail {

// The number after `key` at the start of a line of `path`, times `unit`; `missing` where there is none.
inline std::uint64_t read_number(const std::string& path, std::string_view key, std::uint64_t unit,
                                 std::uint64_t missing) {
  std::ifstream file{path};
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size(), key) != 0) continue;
    std::istringstream rest{line.substr(key.size())};
    std::uint64_t value = 0;
    if (!(rest >> value)) return missing;  // "max" is no number
    constexpr std::uint64_t most = ~std::uint64_t{0};
    return value > most / unit ? most : value * unit;
  }
  return missing;
}

}  // namespace detail

/// The tightest of what /proc/meminfo calls available and what the memory cgroups (version 1 or 2) of this process and
/// of their parents leave, page cache that the kernel can drop counted as free. Reads files below `root`; what
/// cannot be read sets no limit.
[[nodiscard]] inline HostMemoryLimit host_memory_limit(const std::string& root = "") {
  constexpr std::uint64_t none = (std::numeric_limits<std::uint64_t>::max)();
  HostMemoryLimit limit;
  const auto tighten = [&limit](std::uint64_t available, std::string set_by) {
    if (available >= limit.available.count()) return;
    limit = {Bytes{available}, std::move(set_by)};
  };
  tighten(detail::read_number(root + "/proc/meminfo", "MemAvailable:", 1024, none), "free RAM (MemAvailable)");

  struct Layout {
    const char *mount, *limit, *usage, *active, *inactive;
  };
  constexpr Layout version_1{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                             "total_active_file ", "total_inactive_file "};
  constexpr Layout version_2{"/sys/fs/cgroup", "/memory.max", "/memory.current", "active_file ", "inactive_file "};
  std::ifstream groups{root + "/proc/self/cgroup"};
  std::string line;  // "id:controllers:path", controllers empty in version 2
  while (std::getline(groups, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers != ",," && controllers.find(",memory,") == std::string::npos) continue;
    const Layout& layout = controllers == ",," ? version_2 : version_1;
    // Limits of all groups up to the root apply. Inside a container the path may not exist; its parents do.
    std::string path = line.substr(second + 1);
    while (true) {
      if (!path.empty() && path.back() == '/') path.pop_back();
      const std::string group = root + layout.mount + path;
      const std::uint64_t most = detail::read_number(group + layout.limit, "", 1, none);
      if (most != none) {
        const std::uint64_t used = detail::read_number(group + layout.usage, "", 1, 0);
        const std::uint64_t cache = detail::read_number(group + "/memory.stat", layout.active, 1, 0) +
                                    detail::read_number(group + "/memory.stat", layout.inactive, 1, 0);
        const std::uint64_t held = used > cache ? used - cache : 0;
        tighten(most > held ? most - held : 0, "the memory limit of this process's cgroup, " + group + layout.limit);
      }
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return limit;
}

/// An `Arena` of pinned host memory, reserved whole by its constructor or adopted from the caller. Sizes are exact,
/// never rounded up to powers of two. The host may read and write a buffer when no unfinished stream work does.
template <Device D>
class PinnedHostArena : public Arena<D, PinnedSpace> {
 public:
  /// Reserves `capacity` bytes. Checks first that the machine's free RAM and the process's cgroup allow it: pinned
  /// memory cannot be swapped, and a machine that runs out kills processes. (Not on a device that touches no memory.)
  /// Throws `OutOfMemory`, which names the limit and what to raise.
  explicit PinnedHostArena(D& device, Bytes capacity, ArenaOptions options = {},
                           std::source_location at = std::source_location::current())
      : Arena<D, PinnedSpace>{device, affordable(device, capacity), options, at} {}

  /// Hands out `memory`, which stays the caller's and outlives the arena. Throws `InvalidArgument` unless it is
  /// aligned to 256 bytes.
  explicit PinnedHostArena(D& device, pinned_span<std::byte> memory, ArenaOptions options = {},
                           std::source_location at = std::source_location::current())
      : Arena<D, PinnedSpace>{device, memory, options, at} {}

 private:
  static Bytes affordable(D& device, Bytes capacity) {
    if constexpr (requires { device.no_touch(); }) {
      if (device.no_touch()) return capacity;
    }
    const HostMemoryLimit limit = host_memory_limit();
    if (capacity <= limit.available) return capacity;
    OutOfMemory::Details details;
    details.tier = Tier::pinned_host;
    details.what_for = "PinnedHostArena";
    details.requested = capacity;
    details.capacity = details.free = details.largest_free = limit.available;
    details.remedy = "the bound is " + limit.set_by + ": raise it, end other programs, or ask for a smaller arena";
    throw OutOfMemory{std::move(details)};
  }
};

}  // namespace hbmoff
