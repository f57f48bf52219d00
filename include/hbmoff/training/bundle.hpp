// What a layer saves for its backward, and where each part of it goes: pure functions of layout and policy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/paging/offload_policy.hpp"

namespace hbmoff {

/// A tensor that every layer saves. `info.count` is for all rows of the layout.
struct BundleTensor {
  TensorInfo info;
  bool checkpoint = false;  ///< the layer can be recomputed from it, so it is never recomputed (or `info.checkpoint`)
  std::uint64_t buffer = 0;  ///< tensors with the same non-zero value are views of one buffer and are stored once
};

/// What one layer saves. `rows` is the number of rows (samples, or tokens) that the counts are for; a short batch
/// saves fewer. Every count is a multiple of it.
struct BundleLayout {
  std::vector<BundleTensor> tensors;
  std::uint64_t rows = 1;
};

/// Where the tensors of one layer's bundle lie. Offloaded tensors come first in the slot, side by side, so that they
/// travel as one copy; recomputed ones follow, as scratch; kept ones lie in memory of the layer's own. Every tensor
/// starts at a multiple of 256 bytes.
class BundlePlacement {
 public:
  /// Asks `policy` about each tensor of layer `layer` of `layers`. A checkpoint for which it says recompute goes
  /// where `home` says. Throws InvalidArgument for a layout whose counts are no multiples of its rows.
  template <OffloadPolicy Policy>
  BundlePlacement(const BundleLayout& layout, const Policy& policy, std::int32_t layer, std::int32_t layers)
      : rows_{layout.rows} {
    if (layout.rows == 0) throw InvalidArgument{"a bundle of 0 rows"};
    for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
      const BundleTensor& tensor = layout.tensors[i];
      if (tensor.info.count % layout.rows != 0) {
        throw InvalidArgument{"tensor " + tensor.info.name + ": " + std::to_string(tensor.info.count) +
                              " elements are no multiple of " + std::to_string(layout.rows) + " rows"};
      }
      const std::uint64_t row_bytes = size_of(tensor.info.dtype).count() * (tensor.info.count / layout.rows);
      std::uint32_t place = static_cast<std::uint32_t>(places_.size());
      for (std::size_t j = 0; j < i && tensor.buffer != 0; ++j) {
        if (layout.tensors[j].buffer == tensor.buffer) place = place_of_[j];
      }
      if (place == places_.size()) {
        TensorInfo info = tensor.info;
        info.role = Role::activation;
        info.layer = layer;
        info.layers = layers;
        info.checkpoint = is_checkpoint(layout, i);
        SaveMode mode = OffloadPolicyTraits<Policy>::save(policy, info);
        if (mode == SaveMode::recompute && info.checkpoint) {
          mode = OffloadPolicyTraits<Policy>::home(policy, info) == Tier::hbm ? SaveMode::keep : SaveMode::offload;
        }
        places_.push_back({mode, 0});
      }
      places_[place].row_bytes = (std::max)(places_[place].row_bytes, row_bytes);
      place_of_.push_back(place);
      dtypes_.push_back(tensor.info.dtype);
      row_counts_.push_back(tensor.info.count / layout.rows);
    }
  }

  [[nodiscard]] std::uint32_t tensors() const { return static_cast<std::uint32_t>(place_of_.size()); }
  [[nodiscard]] std::uint64_t rows() const { return rows_; }
  [[nodiscard]] SaveMode mode(std::uint32_t tensor) const { return places_[place_of_.at(tensor)].mode; }
  [[nodiscard]] DType dtype(std::uint32_t tensor) const { return dtypes_.at(tensor); }
  [[nodiscard]] std::uint64_t count(std::uint32_t tensor, std::uint64_t rows) const {
    return row_counts_.at(tensor) * rows;
  }

  /// Where the tensor starts: in the layer's own memory for a kept one, in the slot otherwise.
  [[nodiscard]] std::uint64_t offset(std::uint32_t tensor, std::uint64_t rows) const {
    const std::uint32_t place = place_of_.at(tensor);
    const SaveMode mode = places_[place].mode;
    std::uint64_t offset = mode == SaveMode::recompute ? round_up(end(SaveMode::offload, rows), 256) : 0;
    for (std::uint32_t i = 0; i < place; ++i) {
      if (places_[i].mode == mode) offset += round_up(places_[i].row_bytes * rows, 256);
    }
    return offset;
  }
  /// Bytes that travel, each way.
  [[nodiscard]] Bytes offloaded(std::uint64_t rows) const { return Bytes{end(SaveMode::offload, rows)}; }
  /// Bytes that the layer holds in HBM for good.
  [[nodiscard]] Bytes kept(std::uint64_t rows) const { return Bytes{end(SaveMode::keep, rows)}; }
  /// Bytes of a slot.
  [[nodiscard]] Bytes slot(std::uint64_t rows) const {
    const std::uint64_t recomputed = end(SaveMode::recompute, rows);
    const std::uint64_t offloaded = end(SaveMode::offload, rows);
    return Bytes{recomputed == 0 ? offloaded : round_up(offloaded, 256) + recomputed};
  }

 private:
  struct Place {
    SaveMode mode;
    std::uint64_t row_bytes;
  };

  // A buffer with a view that is a checkpoint is one.
  static bool is_checkpoint(const BundleLayout& layout, std::size_t i) {
    const BundleTensor& tensor = layout.tensors[i];
    const auto marked = [](const BundleTensor& t) { return t.checkpoint || t.info.checkpoint; };
    if (tensor.buffer == 0) return marked(tensor);
    return std::any_of(layout.tensors.begin(), layout.tensors.end(),
                       [&](const BundleTensor& other) { return other.buffer == tensor.buffer && marked(other); });
  }

  // End of the last tensor of a mode, counted from the first one's start.
  [[nodiscard]] std::uint64_t end(SaveMode mode, std::uint64_t rows) const {
    std::uint64_t offset = 0, end = 0;
    for (const Place& place : places_) {
      if (place.mode != mode) continue;
      end = offset + place.row_bytes * rows;
      offset = round_up(end, 256);
    }
    return end;
  }

  std::uint64_t rows_;
  std::vector<Place> places_;  // one per buffer
  std::vector<std::uint32_t> place_of_;
  std::vector<DType> dtypes_;
  std::vector<std::uint64_t> row_counts_;
};

}  // namespace hbmoff
