// What work says it reads and writes, held against what it does.
#pragma once

#include <optional>
#include <span>

#include "hbmoff/device/device.hpp"

namespace hbmoff {

/// The HBM that a callable on a stream reads and writes, as it declares, and what it touched besides. Given to
/// `EnqueueOptions::declared`, it is looked at by a `HostDevice` with `debug_protection`; others leave it alone.
///
///     const AccessRange reads[] = {x}, writes[] = {y};
///     DeclaredAccess declared{.reads = reads, .writes = writes};
///     device.enqueue(stream, [=] { gelu(x.data(), y.data(), count); }, {.name = "gelu", .declared = &declared});
///     device.synchronize(stream);
///     if (declared.violation) ...
///
/// While the callable runs, the memory pages of HBM that hold declared ranges are accessible: for reading, and for
/// writing as well where one of the ranges is a declared write. All other HBM is not, nor is a memory page on each side
/// of a block. A touch outside, by any thread of the process, ends nothing: it is the violation, its memory page is
/// opened, and the callable goes on. After the run, bytes outside the declared writes in the memory pages that these
/// share with others are compared with what they were; if no touch was noted, the first that differs is the violation.
///
/// Found is therefore every write outside the declared writes, but one that stores what was there in a memory page that
/// holds a declared write; and reads in memory pages that hold nothing declared. What may be written may be read, too.
/// System calls that are handed memory that is not accessible fail instead (EFAULT). Ranges, or their parts, that are
/// no HBM of the device say nothing.
///
/// This and the arrays must live until the callable has run, or the context was lost and its stream synchronized; the
/// caller synchronizes before it looks at the result. One callable at a time; one that does not run leaves the result as
/// it is.
struct DeclaredAccess {
  /// A touch outside.
  struct Violation {
    const void* address = nullptr;  ///< the first byte touched; with several touches, of the first
    bool write = false;
    bool kind_known = true;  ///< false: the processor did not say whether it was a write
  };

  std::span<const AccessRange> reads = {};
  std::span<const AccessRange> writes = {};
  std::optional<Violation> violation = {};  ///< set by the device
  bool checked = false;  ///< set by the device: the callable ran, and `violation` is what came of it
};

}  // namespace hbmoff
