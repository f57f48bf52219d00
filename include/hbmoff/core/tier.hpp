// The memory tiers state can live in, and the roles state can have.
#pragma once

#include <cstdint>
#include <string_view>

namespace hbmoff {

/// Where bytes live, fastest first.
enum class Tier : std::uint8_t { hbm, pinned_host };
inline constexpr std::uint32_t tier_count = 2;

[[nodiscard]] constexpr std::string_view to_string(Tier tier) {
  return tier == Tier::hbm ? "HBM" : "pinned host memory";
}

/// What bytes are for; memory is accounted by role. `workspace` is scratch of kernels and libraries,
/// `bookkeeping` is what the library itself keeps on the device (tables, coefficients, counts).
enum class Role : std::uint8_t { weight, gradient, optimizer_state, activation, workspace, bookkeeping, other };
inline constexpr std::uint32_t role_count = 7;

[[nodiscard]] constexpr std::string_view to_string(Role role) {
  constexpr std::string_view names[role_count] = {
      "weights", "gradients", "optimizer state", "activations", "workspace", "bookkeeping", "other"};
  return names[static_cast<std::uint32_t>(role)];
}

}  // namespace hbmoff
