// What the fuzz targets share: bytes decoded into decisions, the device under test, and how a finding ends the program.
//
// A target is a function LLVMFuzzerTestOneInput. Every input is a valid program: it is read as a list of decisions, and
// when it ends all further decisions are 0. Built with libFuzzer (preset `fuzz`) inputs are searched for; built with
// replay.cpp a fixed set of them is run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../support/immediate_device.hpp"
#include "../support/random.hpp"
#include "hbmoff/hbmoff.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fuzz {

using namespace hbmoff;

/// All work runs at once, in the order of the calls; every access is held against the order that waits give.
using Checked = CheckedDevice<ImmediateDevice>;
using StreamRef = Checked::StreamRef;
using HbmBuffer = HbmArena<Checked>::Buffer;

/// Ends the program: the library did what it must not.
[[noreturn]] inline void finding(const std::string& what) {
  std::fprintf(stderr, "FINDING: %s\n", what.c_str());
  std::abort();
}
inline void require(bool condition, const std::string& otherwise) {
  if (!condition) finding(otherwise);
}

/// Pinned memory for an arena, which would else ask the system first how much there is: that takes longer than a program.
struct Pinned {
  Pinned(Checked& of, Bytes bytes) : device{of}, memory{of.allocate_pinned(bytes)} {}
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() { device.free_pinned(memory); }
  Checked& device;
  pinned_span<std::byte> memory;
};

/// Decisions, one byte each. Two of them never stand in one list of arguments or one sum: compilers differ in which comes
/// first, and an input must mean the same to all.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : bytes_{data, size} {}

  [[nodiscard]] bool empty() const { return next_ == bytes_.size(); }
  std::uint8_t byte() { return empty() ? std::uint8_t{0} : bytes_[next_++]; }
  /// In [0, n), n at most 256.
  std::uint32_t below(std::size_t n) { return n < 2 ? 0 : static_cast<std::uint32_t>(byte() % n); }
  /// In [low, high].
  std::uint32_t between(std::uint32_t low, std::uint32_t high) { return low + below(high - low + 1); }
  bool flip() { return (byte() & 1) != 0; }
  /// True for one in `n` bytes; false at the end of the input.
  bool one_in(std::uint32_t n) { return byte() % n == n - 1; }
  template <class T, std::size_t N>
  const T& pick(const T (&from)[N]) {
    return from[below(N)];
  }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t next_ = 0;
};

/// Makes a call that may fail on request again until it succeeds.
template <class F>
void again(F&& f) {
  while (true) {
    try {
      f();
      return;
    } catch (const DeviceError& error) {
      if (error.context_lost()) throw;
    }
  }
}

/// A call that must be refused as a misuse, whatever fails before it is.
template <class F>
void expect_refused(const char* what, F&& f) {
  try {
    again(f);
  } catch (const InvalidArgument&) {
    return;
  }
  finding(std::string{what} + " was not refused");
}

/// Makes later work on `later` wait for the work on `earlier`.
inline void order(Checked& device, StreamRef later, StreamRef earlier) {
  if (later == earlier) return;
  std::optional<Checked::Event> event;
  again([&] { event = device.create_event(); });
  again([&] { device.record(*event, earlier); });
  again([&] { device.wait(later, *event); });
}

/// Byte `i` of the content that `serial` stands for.
inline std::byte content_byte(std::uint64_t serial, std::uint64_t i) {
  return static_cast<std::byte>((serial * 0x9e3779b97f4a7c15u >> 32) + i * 37 + (i >> 8));
}

/// Runs a program on a device of its own. It is a finding when the device reports anything, its end included, and when
/// an error leaves the program.
template <class F>
void with_device(F&& program) {
  std::vector<CheckReport> reports;
  try {
    Checked device{{}, {.reports = &reports}};
    program(device);
  } catch (const std::exception& error) {
    finding(std::string{"an error that nobody expected: "} + error.what());
  }
  for (const CheckReport& report : reports) finding(report.message());
}

}  // namespace fuzz
