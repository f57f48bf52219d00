// What the tests of activations share: a layout with every kind of tensor, and a run through forward and backward that
// checks every element that comes back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "adamw_model.hpp"
#include "hbmoff/training/activation_store.hpp"

namespace activation_test {

using namespace hbmoff;
using adamw_test::load;
using adamw_test::number;
using adamw_test::store;
using adamw_test::with_type;

/// Tensors by their index in `layer_layout`.
enum : std::uint32_t { input, hidden, hidden_view, mask, empty, statistics, tensor_count };

/// What a layer saves: an input to recompute from, a large tensor with a view of it, 16-bit ones, one that is empty.
[[nodiscard]] inline BundleLayout layer_layout(std::uint64_t rows = 6) {
  const auto tensor = [](const char* name, DType dtype, std::uint64_t count) {
    return TensorInfo{.name = name, .dtype = dtype, .count = count};
  };
  return {{{.info = tensor("input", DType::fp32, rows * 10), .checkpoint = true},
           {.info = tensor("hidden", DType::fp32, rows * 65), .buffer = 5},
           {.info = tensor("hidden.view", DType::fp32, rows * 33), .buffer = 5},
           {.info = tensor("mask", DType::bf16, rows * 7)},
           {.info = tensor("empty", DType::fp32, 0)},
           {.info = tensor("statistics", DType::fp16, rows)}},
          rows};
}
/// Bytes of the layout's tensors with `rows` rows, views once, each but the last padded to 256: written out by hand.
[[nodiscard]] inline std::uint64_t padded_bytes(const std::vector<std::uint32_t>& tensors, std::uint64_t rows) {
  std::uint64_t end = 0;
  for (const std::uint32_t i : tensors) {
    const std::uint64_t bytes = i == input        ? 40 * rows
                                : i == hidden     ? 260 * rows
                                : i == mask       ? 14 * rows
                                : i == statistics ? 2 * rows
                                                  : 0;
    if (bytes != 0) end = (end + 255) / 256 * 256 + bytes;
  }
  return end;
}

/// A device, arenas whose freed memory is filled with 0xFF, and a stream.
template <Device D = LoggingDevice>
struct Bench {
  D device;
  HbmArena<D> hbm;
  PinnedHostArena<D> host;
  typename D::Stream stream;

  explicit Bench(Bytes capacity = 4_MiB, HostDeviceOptions options = {})
      : device{(options.hbm_capacity = capacity, options)},
        hbm{device, capacity, {.max_blocks = 4096, .max_streams = 16, .fill_freed = true}},
        host{device, capacity, {.max_blocks = 4096, .max_streams = 16, .fill_freed = true}},
        stream{device.create_stream("compute")} {}
};

/// The number that layer `layer` of pass `pass` saves as element `i` of a tensor.
[[nodiscard]] inline float saved_number(std::uint64_t pass, std::uint32_t layer, std::uint32_t tensor,
                                        std::uint64_t i) {
  if (tensor == hidden_view) tensor = hidden;
  return number(pass, layer, tensor, i);
}

/// Puts a kernel on `stream` that computes a tensor.
template <Device D, class Bundle>
void enqueue_compute(D& device, typename D::StreamRef stream, const Bundle& bundle, const BundleLayout& layout,
                     std::uint64_t pass, std::uint32_t layer, std::uint32_t tensor) {
  with_type(layout.tensors[tensor].info.dtype, [&]<class T>(T) {
    const device_span<T> to = bundle.template tensor<T>(tensor);
    device.note_access(stream, "compute", {}, {to});
    device.enqueue(stream, [=] {
      for (std::uint64_t i = 0; i < to.count(); ++i) to.data()[i] = from_float<T>(saved_number(pass, layer, tensor, i));
    });
  });
}
/// Puts a kernel on `stream` that counts the elements of a tensor that are not what was saved. Checks that the tensor has
/// as many as its rows ask for.
template <Device D, class Bundle>
void enqueue_verify(D& device, typename D::StreamRef stream, const Bundle& bundle, const BundleLayout& layout,
                    std::uint64_t pass, std::uint32_t layer, std::uint32_t tensor, std::uint64_t* wrong) {
  with_type(layout.tensors[tensor].info.dtype, [&]<class T>(T) {
    const device_span<const T> from = bundle.template tensor<T>(tensor);
    CHECK(from.count() == layout.tensors[tensor].info.count / layout.rows * bundle.rows());
    device.note_access(stream, "verify", {from}, {});
    device.enqueue(stream, [=] {
      for (std::uint64_t i = 0; i < from.count(); ++i) {
        const T expected = from_float<T>(saved_number(pass, layer, tensor, i));
        if (std::memcmp(&expected, from.data() + i, sizeof(T)) != 0) ++*wrong;
      }
    });
  });
}

/// Saves layers upwards. Uncommitted: an evaluation.
template <Device D, class Store>
void run_forward(D& device, typename D::StreamRef stream, Store& store, const BundleLayout& layout, std::uint64_t pass,
                 std::uint64_t rows, bool commit = true) {
  for (std::uint32_t l = 0; l < store.layers(); ++l) {
    auto saved = store.save(l, stream, rows);
    CHECK(saved.rows() == rows);
    for (std::uint32_t i = 0; i < layout.tensors.size(); ++i) {
      CHECK(!saved.missing(i));
      if (i != hidden_view) enqueue_compute(device, stream, saved, layout, pass, l, i);
    }
    if (commit) saved.commit();
  }
}

/// Restores layers downwards, recomputes what is missing, and checks all elements. `missing(layer, tensor)` says what
/// has to be.
template <Device D, class Store, class Missing>
void run_backward(D& device, typename D::StreamRef stream, Store& store, const BundleLayout& layout, std::uint64_t pass,
                  std::uint64_t rows, Missing&& missing) {
  std::uint64_t wrong = 0;
  for (std::uint32_t l = store.layers(); l-- > 0;) {
    auto saved = store.restore(l, stream);
    CHECK(saved.rows() == rows);
    for (std::uint32_t i = 0; i < layout.tensors.size(); ++i) {
      INFO("layer ", l, " tensor ", i);
      CHECK(saved.missing(i) == missing(l, i));
      if (saved.missing(i)) enqueue_compute(device, stream, saved, layout, pass, l, i);
    }
    for (std::uint32_t i = 0; i < layout.tensors.size(); ++i)
      enqueue_verify(device, stream, saved, layout, pass, l, i, &wrong);
    if (l % 2 == 0) saved.commit();  // the destructor does as well
  }
  device.synchronize(stream);
  CHECK(wrong == 0);
}

}  // namespace activation_test
