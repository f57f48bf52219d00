// What the paging tests share: a device with its arenas and a compute stream, and kernels on 32-bit words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../gate.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "hbmoff/paging/prefetch_scheduler.hpp"
#include "logging_device.hpp"

/// A device with arenas whose freed memory is filled with 0xFF, and a compute stream.
template <hbmoff::Device D>
struct PagingBenchOf {
  D device;
  hbmoff::HbmArena<D> hbm;
  hbmoff::PinnedHostArena<D> host;
  typename D::Stream compute;

  explicit PagingBenchOf(hbmoff::Bytes capacity = hbmoff::Bytes{8 << 20})
      : device{hbmoff::HostDeviceOptions{.hbm_capacity = capacity}},
        hbm{device, capacity, {.max_blocks = 1024, .max_streams = 16, .fill_freed = true}},
        host{device, capacity, {.max_blocks = 1024, .max_streams = 16, .fill_freed = true}},
        compute{device.create_stream("compute")} {}
};
using PagingBench = PagingBenchOf<LoggingDevice>;

using Words = hbmoff::device_span<std::uint32_t>;

/// A full-avalanche hash of 64 bits, for contents and for checksums.
[[nodiscard]] inline std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 31;
  x *= 0x7fb5d329728ea185u;
  x ^= x >> 27;
  x *= 0x81dadef4bc2dd44du;
  return static_cast<std::uint32_t>(x >> 32);
}

/// What a kernel does to word `i` of a page: `write` ignores the old value, `update` depends on it.
[[nodiscard]] inline std::uint32_t written_word(std::uint32_t seed, std::uint64_t i) {
  return mix((std::uint64_t{seed} << 32) + i);
}
[[nodiscard]] inline std::uint32_t updated_word(std::uint32_t old, std::uint32_t seed, std::uint64_t i) {
  return old * 1664525u + written_word(seed, i);
}

template <hbmoff::Device D>
void enqueue_write(D& device, typename D::StreamRef stream, Words words, std::uint32_t seed) {
  device.enqueue(stream, [words, seed] {
    for (std::uint64_t i = 0; i < words.count(); ++i) words.data()[i] = written_word(seed, i);
  });
}
template <hbmoff::Device D>
void enqueue_update(D& device, typename D::StreamRef stream, Words words, std::uint32_t seed) {
  device.enqueue(stream, [words, seed] {
    for (std::uint64_t i = 0; i < words.count(); ++i) words.data()[i] = updated_word(words.data()[i], seed, i);
  });
}
/// Copies `words` to `out`, which must stay until the stream was synchronized.
template <hbmoff::Device D>
void enqueue_read(D& device, typename D::StreamRef stream, Words words, std::uint32_t* out) {
  device.enqueue(stream, [words, out] { std::memcpy(out, words.data(), words.size_bytes().count()); });
}

/// A home in memory of its own, word i of which is `written_word(seed, i)`.
template <hbmoff::Device D>
void write_home(hbmoff::Home<D>& home, std::uint32_t seed) {
  const auto words = home.memory().template as<std::uint32_t>();
  for (std::uint64_t i = 0; i < words.count(); ++i) words[i] = written_word(seed, i);
}
