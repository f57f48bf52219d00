// Formatters for the fmt library, 9 or later: hbmoff's units, names, tensors and device addresses in a format string.
#pragma once

#include <iterator>
#include <string>

#include <fmt/format.h>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/tensor_info.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"

// All take what a string takes: fill, alignment, width and precision ("{:>12}").

/// "1.50 MiB", as `hbmoff::to_string`.
template <>
struct fmt::formatter<hbmoff::Bytes> : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(hbmoff::Bytes bytes, Context& context) const {
    const std::string text = hbmoff::to_string(bytes);
    return fmt::formatter<fmt::string_view>::format({text.data(), text.size()}, context);
  }
};

namespace hbmoff::fmt_detail {

/// What has a name and nothing else is formatted as its name.
template <class Enum>
struct NameFormatter : ::fmt::formatter<::fmt::string_view> {
  template <class Context>
  auto format(Enum value, Context& context) const {
    const auto name = to_string(value);
    return ::fmt::formatter<::fmt::string_view>::format({name.data(), name.size()}, context);
  }
};

}  // namespace hbmoff::fmt_detail

/// "HBM", "pinned host memory".
template <>
struct fmt::formatter<hbmoff::Tier> : hbmoff::fmt_detail::NameFormatter<hbmoff::Tier> {};
/// "weights", "optimizer state", ...
template <>
struct fmt::formatter<hbmoff::Role> : hbmoff::fmt_detail::NameFormatter<hbmoff::Role> {};
/// "fp32", "bf16", "fp16".
template <>
struct fmt::formatter<hbmoff::DType> : hbmoff::fmt_detail::NameFormatter<hbmoff::DType> {};

/// "wte (weights, layer 3 of 12, 38597376 x fp32, 147.23 MiB)"; the layer is left out where there is none.
template <>
struct fmt::formatter<hbmoff::TensorInfo> : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(const hbmoff::TensorInfo& info, Context& context) const {
    fmt::memory_buffer text;
    const auto out = std::back_inserter(text);
    fmt::format_to(out, "{} ({}", info.name, info.role);
    if (info.layer >= 0) fmt::format_to(out, ", layer {}", info.layer);
    if (info.layer >= 0 && info.layers > 0) fmt::format_to(out, " of {}", info.layers);
    fmt::format_to(out, ", {} x {}, {})", info.count, info.dtype, info.bytes());
    return fmt::formatter<fmt::string_view>::format({text.data(), text.size()}, context);
  }
};

/// "HBM 0x7f0000001000 + 1.50 MiB": where it is, never what is in it. A pinned span is a range of host memory; fmt/ranges.h
/// prints its elements.
template <class T>
struct fmt::formatter<hbmoff::device_span<T>> : fmt::formatter<fmt::string_view> {
  template <class Context>
  auto format(hbmoff::device_span<T> span, Context& context) const {
    fmt::memory_buffer text;
    fmt::format_to(std::back_inserter(text), "{} {} + {}", hbmoff::Tier::hbm, static_cast<const void*>(span.data()),
                   span.size_bytes());
    return fmt::formatter<fmt::string_view>::format({text.data(), text.size()}, context);
  }
};
