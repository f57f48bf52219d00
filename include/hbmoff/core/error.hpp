// The errors hbmoff throws. Expected outcomes (an arena full on a `try_` call, an unfinished copy) are
// values; these are for what a caller cannot go on from without a decision.
#pragma once

#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// Base of every error hbmoff throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The call breaks the API's contract; nothing was changed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Somebody wrote behind the end of a buffer of an arena with guard bands. Told once for each buffer, which then can be
/// freed. The message names the buffer and the place.
class Overrun : public Error {
 public:
  Overrun(std::string buffer, Bytes size, std::uint64_t behind)
      : Error{"'" + buffer + "' of " + std::to_string(size.count()) + " bytes was overrun: byte " +
              std::to_string(behind) + " behind its end was written to"},
        buffer_{std::move(buffer)}, behind_{behind} {}
  [[nodiscard]] const std::string& buffer() const noexcept { return buffer_; }
  /// Of the bytes behind the buffer's last one, the first that was written to; 0 for the next.
  [[nodiscard]] std::uint64_t behind() const noexcept { return behind_; }

 private:
  std::string buffer_;
  std::uint64_t behind_;
};

/// A tier has no room. Nothing was changed. The message names the tier, the bytes and the largest owners.
class OutOfMemory : public Error {
 public:
  struct Owner {
    std::string name;
    Role role = Role::other;
    Bytes bytes;
  };
  struct Details {
    Tier tier = Tier::hbm;
    std::string what_for;  ///< name given by the caller that asked
    Bytes requested;
    Bytes capacity;
    Bytes free;  ///< sum of free bytes
    Bytes largest_free;  ///< largest single block that could be had
    Bytes by_role[role_count] = {};  ///< bytes taken, by role
    std::vector<Owner> largest;  ///< largest owners, largest first, a handful
    std::string remedy;  ///< what the user can change; may be empty
  };

  explicit OutOfMemory(Details details) : Error{message(details)}, details_{std::move(details)} {}
  [[nodiscard]] const Details& details() const noexcept { return details_; }

 private:
  static std::string message(const Details& d) {
    std::string text = std::string{to_string(d.tier)} + " is full: " + d.what_for + " needs " + to_string(d.requested) +
                       " (" + std::to_string(d.requested.count()) + " bytes), free are " + to_string(d.free) + " of " +
                       to_string(d.capacity) + ", largest free block " + to_string(d.largest_free);
    bool first = true;
    for (std::uint32_t role = 0; role < role_count; ++role) {
      if (d.by_role[role] == Bytes{}) continue;
      text += first ? "; held by " : ", ";
      first = false;
      text += std::string{to_string(static_cast<Role>(role))} + " " + to_string(d.by_role[role]);
    }
    first = true;
    for (const Owner& owner : d.largest) {
      text += first ? "; largest: " : ", ";
      first = false;
      text += owner.name + " " + to_string(owner.bytes);
    }
    if (!d.remedy.empty()) text += "; " + d.remedy;
    return text;
  }

  Details details_;
};

/// A device call failed, or work queued earlier did. Base of the devices' own errors.
class DeviceError : public Error {
 public:
  enum class Kind : std::uint8_t {
    call_failed,  ///< this call failed, had no effect, and the device is usable
    context_lost,  ///< queued work failed; everything queued was dropped; permanent
  };

  DeviceError(Kind kind, std::string_view api, std::string_view reason, std::source_location at)
      : Error{std::string{api} + " (" + at.file_name() + ":" + std::to_string(at.line()) +
              "): " + (kind == Kind::context_lost ? "the device context is lost: " : "") + std::string{reason}},
        kind_{kind}, api_{api}, where_{at} {}

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  [[nodiscard]] bool context_lost() const noexcept { return kind_ == Kind::context_lost; }
  [[nodiscard]] const std::string& api() const noexcept { return api_; }
  [[nodiscard]] const std::source_location& where() const noexcept { return where_; }

 private:
  Kind kind_;
  std::string api_;
  std::source_location where_;
};

/// Every slot that could serve a lease is leased. Nothing was changed; the message names the holders.
class SlotsExhausted : public Error {
 public:
  using Error::Error;
};

/// Reading or writing a file failed.
class IoError : public Error {
 public:
  using Error::Error;
};

}  // namespace hbmoff
