// Where state lives, decided per tensor by a policy: the concept, its defaults, and the policies that ship.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// What becomes of an activation between forward and backward.
enum class SaveMode : std::uint8_t {
  keep,       ///< stays in HBM
  offload,    ///< goes to its home tier and comes back
  recompute,  ///< is not saved; the trainer computes it again in the backward
};

/// The answers of a policy, with defaults for what it leaves out. A policy defines any of
///
///     Tier home(const TensorInfo&) const;        or   static constexpr Tier home_tier = ...;
///     SaveMode save(const TensorInfo&) const;    or   static constexpr SaveMode save_mode = ...;
///
/// `home` is asked for every state that is not an activation; left out, the state stays in HBM. `save` is asked for
/// each tensor of a layer's bundle; left out, an activation is offloaded where `home` names a tier below HBM and
/// kept otherwise. An answer given as a constant is known at compile time: where it is HBM or `keep`, no paging code is
/// instantiated.
template <class Policy>
struct OffloadPolicyTraits {
  static constexpr bool has_home_constant = requires {
    { Policy::home_tier } -> std::convertible_to<Tier>;
  };
  static constexpr bool has_home = requires(const Policy& p, const TensorInfo& t) {
    { p.home(t) } -> std::same_as<Tier>;
  };
  static constexpr bool has_save_constant = requires {
    { Policy::save_mode } -> std::convertible_to<SaveMode>;
  };
  static constexpr bool has_save = requires(const Policy& p, const TensorInfo& t) {
    { p.save(t) } -> std::same_as<SaveMode>;
  };

  /// Every state but activations stays in HBM, known at compile time.
  static constexpr bool state_always_resident = [] {
    if constexpr (has_home_constant) return Policy::home_tier == Tier::hbm;
    return !has_home;
  }();
  /// Every activation stays in HBM, known at compile time.
  static constexpr bool activations_always_kept = [] {
    if constexpr (has_save_constant) return Policy::save_mode == SaveMode::keep;
    return !has_save && state_always_resident;
  }();

  [[nodiscard]] static constexpr Tier home(const Policy& policy, const TensorInfo& info) {
    if constexpr (has_home_constant) {
      return Policy::home_tier;
    } else if constexpr (has_home) {
      return policy.home(info);
    } else {
      return Tier::hbm;
    }
  }

  [[nodiscard]] static constexpr SaveMode save(const Policy& policy, const TensorInfo& info) {
    if constexpr (has_save_constant) {
      return Policy::save_mode;
    } else if constexpr (has_save) {
      return policy.save(info);
    } else {
      return home(policy, info) == Tier::hbm ? SaveMode::keep : SaveMode::offload;
    }
  }
};

/// A copyable type that answers at least one of the two questions.
template <class Policy>
concept OffloadPolicy =
    std::copyable<Policy> && (OffloadPolicyTraits<Policy>::has_home_constant || OffloadPolicyTraits<Policy>::has_home ||
                              OffloadPolicyTraits<Policy>::has_save_constant || OffloadPolicyTraits<Policy>::has_save);

/// Nothing is paged. Costs nothing: the answer is a constant.
struct KeepResident {
  static constexpr Tier home_tier = Tier::hbm;
  static constexpr SaveMode save_mode = SaveMode::keep;
};

/// Everything is paged.
struct OffloadAll {
  static constexpr Tier home_tier = Tier::pinned_host;
  static constexpr SaveMode save_mode = SaveMode::offload;
};

/// Moments and master weights live in pinned host memory, everything else in HBM.
struct OffloadOptimizerState {
  static constexpr SaveMode save_mode = SaveMode::keep;
  [[nodiscard]] constexpr Tier home(const TensorInfo& info) const {
    return info.role == Role::optimizer_state ? Tier::pinned_host : Tier::hbm;
  }
};

/// Activations are paged, everything else lives in HBM.
struct OffloadActivations {
  static constexpr Tier home_tier = Tier::hbm;
  static constexpr SaveMode save_mode = SaveMode::offload;
};

/// Pages what is larger than `threshold` bytes; smaller state is not worth a slot.
struct OffloadLargerThan {
  Bytes threshold;
  [[nodiscard]] Tier home(const TensorInfo& info) const {
    return info.bytes() > threshold ? Tier::pinned_host : Tier::hbm;
  }
};

/// Whether `name` matches `pattern`, in which `*` stands for any run of characters and `?` for one.
[[nodiscard]] constexpr bool matches(std::string_view pattern, std::string_view name) {
  std::size_t p = 0, n = 0, star = std::string_view::npos, resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

/// Pages the tensors whose name matches one of `patterns` (`*` and `?` as in a shell), and only these.
struct OffloadMatching {
  std::vector<std::string> patterns;
  [[nodiscard]] Tier home(const TensorInfo& info) const {
    for (const std::string& pattern : patterns) {
      if (matches(pattern, info.name)) return Tier::pinned_host;
    }
    return Tier::hbm;
  }
};

/// Keeps the activations of the last `count` layers in HBM: they are the first that the backward needs.
/// Everything else is decided by `inner`.
template <class Inner = OffloadAll>
struct KeepLastLayers {
  std::int32_t count = 0;
  [[no_unique_address]] Inner inner = {};

  [[nodiscard]] Tier home(const TensorInfo& info) const { return OffloadPolicyTraits<Inner>::home(inner, info); }
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    if (info.layer >= 0 && info.layer >= info.layers - count) return SaveMode::keep;
    return OffloadPolicyTraits<Inner>::save(inner, info);
  }
};
template <class Inner>
KeepLastLayers(std::int32_t, Inner) -> KeepLastLayers<Inner>;
KeepLastLayers(std::int32_t) -> KeepLastLayers<>;

/// Recomputes the activations of the first `count` layers from the layer's input (its checkpoint, which is kept or
/// offloaded as `inner` says). Everything else is decided by `inner`.
template <class Inner = KeepResident>
struct RecomputeFirstLayers {
  std::int32_t count = 0;
  [[no_unique_address]] Inner inner = {};

  [[nodiscard]] Tier home(const TensorInfo& info) const { return OffloadPolicyTraits<Inner>::home(inner, info); }
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    if (!info.checkpoint && info.layer >= 0 && info.layer < count) return SaveMode::recompute;
    return OffloadPolicyTraits<Inner>::save(inner, info);
  }
};
template <class Inner>
RecomputeFirstLayers(std::int32_t, Inner) -> RecomputeFirstLayers<Inner>;
RecomputeFirstLayers(std::int32_t) -> RecomputeFirstLayers<>;

/// Recomputes the activations whose name matches one of `patterns`; everything else is decided by `inner`.
template <class Inner = KeepResident>
struct RecomputeMatching {
  std::vector<std::string> patterns;
  [[no_unique_address]] Inner inner = {};

  [[nodiscard]] Tier home(const TensorInfo& info) const { return OffloadPolicyTraits<Inner>::home(inner, info); }
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    for (const std::string& pattern : patterns) {
      if (!info.checkpoint && matches(pattern, info.name)) return SaveMode::recompute;
    }
    return OffloadPolicyTraits<Inner>::save(inner, info);
  }
};
template <class Inner>
RecomputeMatching(std::vector<std::string>, Inner) -> RecomputeMatching<Inner>;
RecomputeMatching(std::vector<std::string>) -> RecomputeMatching<>;

}  // namespace hbmoff
