// What a checking device reports: two accesses and the edge that is missing between them.
#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// What is wrong.
enum class CheckFault : std::uint8_t {
  read_before_write,     ///< a read is not ordered after the write before it
  write_before_access,   ///< a write is not ordered after the read or the write before it
  host_access,  ///< the host touches pinned memory that stream work, or another thread, may still use; or the reverse
  unordered_reuse,  ///< memory was allocated on a stream that is not ordered after the stream that freed it
  use_after_free,  ///< memory was touched after it was freed in stream order
  free_under_work,  ///< memory was freed before work that uses it is known to be done
  uninitialised_read,  ///< bytes were read that nothing wrote since they were allocated or given up
  out_of_range,  ///< an access leaves its block, or touches an arena's memory where no block is
  unfinished_time,  ///< the time of an event was asked for before the host knows that the event is done
  undeclared_access,  ///< a kernel touched bytes that its note does not name (debug mode)
  leak,  ///< something was not given back
  wait_never_recorded,  ///< a warning: a wait for an event that was never recorded has no effect
  undeclared_kernel,  ///< a warning: a kernel or host function was launched without a note of what it touches
};

[[nodiscard]] constexpr std::string_view to_string(CheckFault fault) {
  switch (fault) {
    case CheckFault::read_before_write:
      return "a read is not ordered after its write";
    case CheckFault::write_before_access:
      return "a write is not ordered after the access before it";
    case CheckFault::host_access:
      return "an access of the host is not ordered with another access";
    case CheckFault::unordered_reuse:
      return "memory is reused on a stream that is not ordered after its free";
    case CheckFault::use_after_free:
      return "memory is used after it was freed";
    case CheckFault::free_under_work:
      return "memory is freed while work may still use it";
    case CheckFault::uninitialised_read:
      return "bytes are read that nothing has written";
    case CheckFault::out_of_range:
      return "an access lies outside of its block";
    case CheckFault::unfinished_time:
      return "the time of an event is read before the event is known to be done";
    case CheckFault::undeclared_access:
      return "a kernel touched bytes that it did not declare";
    case CheckFault::leak:
      return "not given back";
    case CheckFault::wait_never_recorded:
      return "a wait for an event that was never recorded";
    case CheckFault::undeclared_kernel:
      return "a launch without a note of what it touches";
  }
  return "";
}

/// Whether the fault only hints at one.
[[nodiscard]] constexpr bool is_warning(CheckFault fault) { return fault >= CheckFault::wait_never_recorded; }

/// One of the two sides of a report.
struct CheckedAccess {
  std::string what = {};  ///< "'gelu' reads" (a kernel's, host function's or host access's label), "a copy writes", ...
  std::string actor = {};  ///< "stream 'compute'", "the host" (the first thread to call), "host thread 2", ...
  std::string tensor = {};  ///< name of the block; "part' in 'block" where a part of it has a name
  std::string memory = {};  ///< "HBM", "pinned memory", or "memory of the caller"
  std::uint64_t first_byte = 0;  ///< counted from the beginning of the part or block; the address in other memory
  Bytes bytes = {};  ///< of the access, the first stretch that the report is true of
  std::source_location at = {};  ///< of the call; of line 0 when not known

  [[nodiscard]] std::string message() const {
    std::string text = actor + ": " + what;
    if (bytes != Bytes{}) {
      text += " bytes " + std::to_string(first_byte) + " to " + std::to_string(first_byte + bytes.count() - 1) +
              " of '" + tensor + "' (" + memory + ")";
    }
    if (at.line() != 0) text += ", at " + std::string{at.file_name()} + ":" + std::to_string(at.line());
    return text;
  }
};

/// What is wrong, between which accesses, and what would mend it.
struct CheckReport {
  CheckFault fault = {};
  CheckedAccess later = {};  ///< the call that was checked
  std::optional<CheckedAccess> earlier = {};  ///< what it conflicts with
  std::string remedy = {};  ///< the missing edge, in words

  /// Several lines: the fault, both accesses, the remedy.
  [[nodiscard]] std::string message() const {
    std::string text{to_string(fault)};
    text += "\n  " + later.message();
    if (earlier) text += "\n  before it, " + earlier->message();
    if (!remedy.empty()) text += "\n  " + remedy;
    return text;
  }
};

/// A program's order, bounds or life times are wrong, found by `CheckedDevice`. The call had no effect (but a kernel
/// has run when it touched bytes that its note does not name: `undeclared_access`).
class CheckError : public Error {
 public:
  explicit CheckError(CheckReport report) : Error{report.message()}, report_{std::move(report)} {}
  [[nodiscard]] const CheckReport& report() const noexcept { return report_; }
  [[nodiscard]] CheckFault fault() const noexcept { return report_.fault; }

 private:
  CheckReport report_;
};

}  // namespace hbmoff
