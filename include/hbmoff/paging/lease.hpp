// A lease: the only way to touch a page.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <source_location>
#include <utility>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/paging/page.hpp"
#include "hbmoff/paging/slot_pool.hpp"

namespace hbmoff {

/// Move-only access to a page in HBM, ordered behind its fill on the stream it was taken for. How it ends:
///
/// - `commit()`: what was written is good. The page is released behind the work put so far on the lease's streams, and
///   written back if it was written. On a failure it throws, and `PrefetchScheduler::settle` makes up for it.
/// - destruction of a lease for reading: released in the same way. If that fails, the slot is not used again until
///   `settle`.
/// - destruction of a lease for writing, without `commit()`: discarded, the home stays as it was (and what an earlier
///   lease of the plan committed stays in the slot). But after `launched()` the slot holds the only true copy: it is not
///   used again before the next call, or `settle`, has put its write-back on the way.
///
/// Nothing here blocks the calling thread. A moved-from lease is empty: `empty()` says so, using it throws.
template <class Scheduler>
class Lease {
 public:
  using D = typename Scheduler::device_type;
  using StreamRef = typename D::StreamRef;

  Lease() = default;
  Lease(Lease&& other) noexcept
      : scheduler_{std::exchange(other.scheduler_, nullptr)}, slot_{other.slot_}, memory_{other.memory_},
        access_{other.access_}, hit_{other.hit_}, stream_count_{other.stream_count_}, streams_{other.streams_} {}
  Lease& operator=(Lease&& other) noexcept {
    if (this != &other) {
      end();
      scheduler_ = std::exchange(other.scheduler_, nullptr);
      slot_ = other.slot_;
      memory_ = other.memory_;
      access_ = other.access_;
      hit_ = other.hit_;
      stream_count_ = other.stream_count_;
      streams_ = other.streams_;
    }
    return *this;
  }
  ~Lease() { end(); }

  [[nodiscard]] bool empty() const { return scheduler_ == nullptr; }
  [[nodiscard]] Access access() const { return access_; }
  /// The page's content was still in HBM: no copy was made for this lease.
  [[nodiscard]] bool hit() const { return hit_; }

  /// The page's memory in HBM, for work on the lease's streams.
  [[nodiscard]] device_span<std::byte> bytes() const {
    require();
    return memory_;
  }
  /// `count` elements of `T` from byte `offset` of the page on.
  template <class T>
  [[nodiscard]] device_span<T> as(std::uint64_t offset, std::uint64_t count) const {
    return bytes().subspan(offset, count * sizeof(T)).template as<T>();
  }

  /// Makes the page usable on one more stream: it waits for the fill too, and the release waits for it. Order between
  /// the lease's streams is the caller's. At most 4 streams; throws InvalidArgument.
  void used_on(StreamRef stream, std::source_location at = std::source_location::current()) {
    require();
    if constexpr (Scheduler::pages) {
      for (std::uint32_t i = 0; i < stream_count_; ++i) {
        if (*streams_[i] == stream) return;
      }
      if (stream_count_ == max_streams_per_lease) throw InvalidArgument{"a lease can be used on 4 streams"};
      scheduler_->order_before(*slot_, stream, at);
      streams_[stream_count_++] = stream;
    }
  }

  /// Say this right after a kernel that writes the page was launched: from here on the slot, not the home, is the
  /// truth.
  void launched() {
    require();
    if (!writes(access_)) throw InvalidArgument{"a page leased for reading was written"};
    if constexpr (Scheduler::pages) slot_->launched = true;
  }

  /// Ends the lease; see above.
  void commit(std::source_location at = std::source_location::current()) {
    require();
    Scheduler* scheduler = std::exchange(scheduler_, nullptr);
    if constexpr (Scheduler::pages) scheduler->release(*slot_, {streams_.data(), stream_count_}, writes(access_), at);
  }

  /// Ends a lease for reading by handing its memory to the caller, with no copy: `replacement` (at least as large, free
  /// of unordered work but that on the lease's streams) becomes the slot's memory. The buffer's destructor frees it in
  /// the order of the stream that the lease was taken for. Throws InvalidArgument when the replacement is too small, and
  /// when what the page holds is not home but somebody will look for it there; nothing was changed then, nor after
  /// a failed call.
  [[nodiscard]] typename HbmArena<D>::Buffer donate(typename HbmArena<D>::Buffer&& replacement,
                                                    std::source_location at = std::source_location::current()) {
    static_assert(Scheduler::pages, "resident memory has no slot to swap");
    require();
    if (access_ != Access::read) throw InvalidArgument{"only a page leased for reading can be donated"};
    auto donated = scheduler_->donate(*slot_, {streams_.data(), stream_count_}, std::move(replacement), at);
    scheduler_ = nullptr;
    return donated;
  }

 private:
  friend Scheduler;
  Lease(Scheduler& scheduler, Slot<D>* slot, device_span<std::byte> memory, Access access, bool hit, StreamRef stream)
      : scheduler_{&scheduler}, slot_{slot}, memory_{memory}, access_{access}, hit_{hit}, stream_count_{1} {
    streams_[0] = stream;
  }

  void require() const {
    if (scheduler_ == nullptr) throw InvalidArgument{"the lease is empty: it was moved from or has ended"};
  }

  void end() noexcept {
    if (scheduler_ == nullptr) return;
    Scheduler* scheduler = std::exchange(scheduler_, nullptr);
    if constexpr (Scheduler::pages) scheduler->abandon(*slot_, {streams_.data(), stream_count_}, writes(access_));
  }

  Scheduler* scheduler_ = nullptr;
  Slot<D>* slot_ = nullptr;
  device_span<std::byte> memory_;
  Access access_ = Access::read;
  bool hit_ = false;
  std::uint32_t stream_count_ = 0;
  std::array<std::optional<StreamRef>, max_streams_per_lease> streams_;
};

}  // namespace hbmoff
