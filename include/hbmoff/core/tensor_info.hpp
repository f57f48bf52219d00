// What hbmoff knows about a tensor: enough to place it, account for it and name it in an error.
#pragma once

#include <cstdint>
#include <string>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// Describes a tensor; owns its name, holds no memory.
struct TensorInfo {
  std::string name = {};
  Role role = Role::other;
  std::int32_t layer = -1;   ///< index of its layer, -1 for none (embeddings, final norm)
  std::int32_t layers = 0;   ///< how many layers the model has, 0 where unknown
  bool checkpoint = false;   ///< an activation that a layer is recomputed from (its input): never itself recomputed
  DType dtype = DType::fp32;
  std::uint64_t count = 0;   ///< elements

  [[nodiscard]] Bytes bytes() const { return size_of(dtype) * count; }
};

}  // namespace hbmoff
