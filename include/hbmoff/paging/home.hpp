// A home: host memory that pages live in, and the order of the copies that touch it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <source_location>
#include <string_view>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "hbmoff/paging/timeline.hpp"

namespace hbmoff {

/// A point on a timeline, or none.
template <Device D>
struct Mark {
  Timeline<D>* timeline = nullptr;
  std::uint64_t ticket = 0;
  [[nodiscard]] bool valid() const { return timeline != nullptr; }
};

/// The points that the next piece of work on one stream has to wait for. The latest point of each timeline is enough,
/// because timelines are in order; so there is at most one wait per timeline.
template <Device D>
class WaitSet {
 public:
  void add(Mark<D> mark) {
    if (!mark.valid()) return;
    for (std::uint32_t i = 0; i < size_; ++i) {
      if (marks_[i].timeline == mark.timeline) {
        marks_[i].ticket = (std::max)(marks_[i].ticket, mark.ticket);
        return;
      }
    }
    if (size_ == capacity) throw InvalidArgument{"a page's homes are copied to and from by more than 32 streams"};
    marks_[size_++] = mark;
  }

  /// Makes later work on `stream` wait for every point that lies on another stream. Does not block.
  void order_before(typename D::StreamRef stream, std::source_location at = std::source_location::current()) {
    for (std::uint32_t i = 0; i < size_; ++i) {
      if (marks_[i].timeline->stream() != stream) marks_[i].timeline->order_before(stream, marks_[i].ticket, at);
    }
  }

  /// Blocks the calling thread until every point is done.
  void synchronize(std::source_location at = std::source_location::current()) {
    for (std::uint32_t i = 0; i < size_; ++i) marks_[i].timeline->synchronize(marks_[i].ticket, at);
  }

 private:
  static constexpr std::uint32_t capacity = 32;
  Mark<D> marks_[capacity];
  std::uint32_t size_ = 0;
};

/// Host memory with, for each range that pages cut it into, its last writer and the readers since. Order hangs here
/// and not on a scheduler: whoever reads a range waits for its last writer, whoever writes it waits for the readers
/// and the writer before, whichever scheduler they came through and however each cuts the home.
///
/// Copies in slots stay true to it: content that was committed but is not home yet is written back before a page that
/// overlaps it is leased, and a copy made before someone else's write-back is made anew when it is leased. Pages that
/// overlap must not be leased for writing at the same time: of what both write, one would be lost.
///
/// Cuts are made when pages are added (`cut`, may allocate); ordering allocates nothing. A home outlives the schedulers
/// with pages in it. One thread at a time uses a home.
template <Device D>
class Home {
 public:
  /// `bytes` of pinned memory taken from `arena`, and given back on destruction, in the order of `stream`, which
  /// outlives the home. Does not block: schedulers, and `synchronize`, wait for who had the memory before.
  Home(PinnedHostArena<D>& arena, Bytes bytes, std::string_view name, Role role, typename D::StreamRef stream)
      : buffer_{arena.allocate(bytes, name, role, stream)}, memory_{buffer_.bytes()}, device_{&arena.device()},
        taken_{arena.device().create_event(EventTiming::none)} {
    segments_.push_back({.begin = 0, .end = memory_.count()});
    device_->record(*taken_, stream);
  }
  /// Pinned memory of the user's own, which outlives the home.
  explicit Home(pinned_span<std::byte> memory) : memory_{memory} {
    segments_.push_back({.begin = 0, .end = memory.count()});
  }
  Home(const Home&) = delete;  // pages point at it
  Home& operator=(const Home&) = delete;

  /// The memory. The host may touch a range of it after `synchronize` of that range and before the next lease of any
  /// page in the home. Whoever is going to write it calls `invalidate` before: then nothing is written back that would be
  /// overwritten.
  [[nodiscard]] pinned_span<std::byte> memory() const { return memory_; }

  /// Counts the loads of new content. A copy of the home made under an older generation is worthless.
  [[nodiscard]] std::uint64_t generation() const { return generation_; }
  /// Says that the content was, or is about to be, replaced from outside: slots that hold a copy drop it, unwritten. A
  /// page with parts in several homes is dropped whole.
  void invalidate() { ++generation_; }

  static constexpr std::uint32_t max_sharers = 16;

  /// A scheduler with pages in the home.
  struct Sharer {
    void* scheduler = nullptr;
    /// Writes back what the scheduler's slots, but slot `except`, hold of [first, first + count) that was committed and
    /// is not home yet. `to_write`: the range is about to be written, so whatever was read from it goes home as well,
    /// to be read anew. False when it cannot, because such content is leased for writing again.
    bool (*publish)(void* scheduler, const Home& home, std::uint64_t first, std::uint64_t count, bool to_write,
                    const void* except, std::source_location at) = nullptr;
  };
  /// Makes every sharer do so.
  bool publish(std::uint64_t first, std::uint64_t count, bool to_write, const void* except,
               std::source_location at) const {
    for (const Sharer& sharer : sharers_) {
      if (!sharer.publish(sharer.scheduler, *this, first, count, to_write, except, at)) return false;
    }
    return true;
  }

  /// Counts the writes of a range. A clean copy of it made under a lower count is out of date.
  [[nodiscard]] std::uint64_t version(std::uint64_t first, std::uint64_t count) const {
    std::uint64_t sum = 0;
    for_each(first, count, [&](const Segment& segment) { sum += segment.writes; });
    return sum;
  }

  /// Makes [first, first + count) a whole number of segments, and makes room for `timeline` in their lists.
  void cut(std::uint64_t first, std::uint64_t count) {
    split(first);
    split(first + count);
  }
  /// Makes room for one more scheduler, with one reading stream, in every segment. Throws InvalidArgument for the 17th.
  void attach(const Sharer& sharer) {
    if (sharers_.size() == max_sharers) throw InvalidArgument{"more than 16 schedulers share a home"};
    sharers_.reserve(sharers_.size() + 1);
    for (Segment& segment : segments_) segment.readers.reserve(sharers_.size() + 1);
    sharers_.push_back(sharer);
  }
  /// Forgets a scheduler that is about to end.
  void detach(const void* scheduler) noexcept {
    std::erase_if(sharers_, [&](const Sharer& sharer) { return sharer.scheduler == scheduler; });
  }
  /// Forgets all points of a timeline that was drained and is about to end.
  void detach(const Timeline<D>& timeline) noexcept {
    for (Segment& segment : segments_) {
      if (segment.writer.timeline == &timeline) segment.writer = {};
      std::erase_if(segment.readers, [&](const Mark<D>& mark) { return mark.timeline == &timeline; });
    }
  }

  /// Makes later work on `stream` wait for the point from which on the memory is the home's. Does not block.
  void order_taken_before(typename D::StreamRef stream, std::source_location at = std::source_location::current()) {
    if (taken_) device_->wait(stream, *taken_, at);
  }

  /// Adds to `waits` what a read of [first, first + count) must come after.
  void before_read(std::uint64_t first, std::uint64_t count, WaitSet<D>& waits) const {
    for_each(first, count, [&](const Segment& segment) { waits.add(segment.writer); });
  }
  /// Notes that the work up to `mark` reads the range.
  void note_read(std::uint64_t first, std::uint64_t count, Mark<D> mark) {
    for_each(first, count, [&](Segment& segment) {
      for (Mark<D>& reader : segment.readers) {
        if (reader.timeline == mark.timeline) {
          reader.ticket = mark.ticket;  // in order: the later read covers the earlier
          return;
        }
      }
      segment.readers.push_back(mark);
    });
  }
  /// Adds to `waits` what a write of the range must come after.
  void before_write(std::uint64_t first, std::uint64_t count, WaitSet<D>& waits) const {
    for_each(first, count, [&](const Segment& segment) {
      waits.add(segment.writer);
      for (const Mark<D>& reader : segment.readers) waits.add(reader);
    });
  }
  /// Notes that the work up to `mark` writes the range (and came after `before_write`).
  void note_write(std::uint64_t first, std::uint64_t count, Mark<D> mark) {
    for_each(first, count, [&](Segment& segment) {
      segment.writer = mark;
      segment.readers.clear();  // keeps its room
      ++segment.writes;
    });
  }

  /// Writes back what was committed in the range, and blocks the calling thread until no copy reads or writes it.
  /// Throws InvalidArgument when such content is leased for writing again.
  void synchronize(std::uint64_t first, std::uint64_t count,
                   std::source_location at = std::source_location::current()) {
    if (!publish(first, count, true, nullptr, at)) {
      throw InvalidArgument{"a home was to be read while a page with newer content is leased for writing"};
    }
    WaitSet<D> waits;
    before_write(first, count, waits);
    if (taken_) device_->synchronize(*taken_, at);
    waits.synchronize(at);
  }

 private:
  struct Segment {
    std::uint64_t begin;
    std::uint64_t end;
    Mark<D> writer = {};
    std::vector<Mark<D>> readers = {};
    std::uint64_t writes = 0;
  };

  void split(std::uint64_t at) {
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      if (segments_[i].begin < at && at < segments_[i].end) {
        Segment upper = segments_[i];
        upper.begin = at;
        upper.writes = 0;  // sums over both parts stay what they were
        upper.readers.reserve(sharers_.size());
        segments_[i].end = at;
        segments_.insert(segments_.begin() + static_cast<std::ptrdiff_t>(i) + 1, std::move(upper));
        return;
      }
    }
  }

  template <class Self, class F>
  static void for_each_in(Self& segments, std::uint64_t first, std::uint64_t count, F&& f) {
    auto it = std::upper_bound(segments.begin(), segments.end(), first,
                               [](std::uint64_t value, const Segment& segment) { return value < segment.end; });
    for (; it != segments.end() && it->begin < first + count; ++it) f(*it);
  }
  template <class F>
  void for_each(std::uint64_t first, std::uint64_t count, F&& f) {
    for_each_in(segments_, first, count, f);
  }
  template <class F>
  void for_each(std::uint64_t first, std::uint64_t count, F&& f) const {
    for_each_in(segments_, first, count, f);
  }

  typename PinnedHostArena<D>::Buffer buffer_;
  pinned_span<std::byte> memory_;
  D* device_ = nullptr;
  std::optional<typename D::Event> taken_;  ///< recorded when the memory was taken; none for memory of the user's own
  std::vector<Segment> segments_;
  std::vector<Sharer> sharers_;
  std::uint64_t generation_ = 0;
};

}  // namespace hbmoff
