// Who touched which bytes last, and whether that is ordered before what comes now.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hbmoff::detail {

/// A stream or a host thread, numbered from 0 by its owner.
using Actor = std::uint32_t;

/// A vector clock: for every actor, the latest of its times that is known to be over.
class VectorClock {
 public:
  [[nodiscard]] std::uint64_t at(Actor actor) const { return actor < times_.size() ? times_[actor] : 0; }
  std::uint64_t tick(Actor actor) {
    grow(actor + std::size_t{1});
    return ++times_[actor];
  }
  /// Knows what `other` knows as well. False when it did already.
  bool join(const VectorClock& other) {
    bool learned = false;
    grow(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) {
      if (other.times_[i] <= times_[i]) continue;
      times_[i] = other.times_[i];
      learned = true;
    }
    return learned;
  }
  [[nodiscard]] bool knows(const VectorClock& other) const {
    for (std::size_t i = 0; i < other.times_.size(); ++i) {
      if (other.times_[i] > at(static_cast<Actor>(i))) return false;
    }
    return true;
  }

 private:
  void grow(std::size_t size) {
    if (times_.size() < size) times_.resize(size, 0);
  }
  std::vector<std::uint64_t> times_;
};

/// What work would know if it were put on a stream now: what the stream does, and the thread that calls. (Joined only
/// when the call has succeeded.)
class JoinedClock {
 public:
  JoinedClock(const VectorClock& stream, const VectorClock& caller) : stream_{stream}, caller_{caller} {}
  explicit JoinedClock(const VectorClock& caller) : JoinedClock{caller, caller} {}
  [[nodiscard]] std::uint64_t at(Actor actor) const { return (std::max)(stream_.at(actor), caller_.at(actor)); }

 private:
  const VectorClock& stream_;
  const VectorClock& caller_;
};

/// What kind of thing touched memory.
enum class AccessBy : std::uint8_t { nobody, kernel, copy, fill, host, release };

/// One access, small enough to be kept for every range.
struct AccessStamp {
  Actor actor = 0;
  AccessBy by = AccessBy::nobody;
  std::uint32_t label = 0;
  std::uint64_t time = 0;  ///< the actor's; 0 is before everything. A free has that of the work before it.
  std::source_location at = {};

  [[nodiscard]] bool before(const JoinedClock& clock) const { return time == 0 || clock.at(actor) >= time; }
  friend bool operator==(const AccessStamp& a, const AccessStamp& b) {
    return a.actor == b.actor && a.by == b.by && a.time == b.time;
  }
};

/// Names of ranges. A new name ends the names of all ranges that it overlaps.
class RangeNames {
 public:
  using Address = std::uintptr_t;
  struct Name {
    Address begin;
    Address end;
    std::string text;
  };

  void put(Address begin, Address end, std::string_view text) {
    if (begin == end) return;
    auto it = names_.upper_bound(begin);
    if (it != names_.begin() && std::prev(it)->second.end > begin) --it;
    while (it != names_.end() && it->first < end) it = names_.erase(it);
    names_.emplace_hint(it, begin, Name{begin, end, std::string{text}});
  }
  /// The name of what `address` lies in, or null.
  [[nodiscard]] const Name* find(Address address) const {
    const auto it = names_.upper_bound(address);
    if (it == names_.begin() || std::prev(it)->second.end <= address) return nullptr;
    return &std::prev(it)->second;
  }
  void clear() { names_.clear(); }

 private:
  std::map<Address, Name> names_;
};

/// Bytes that belong together: an allocation, a block, or all that an arena divides. Lives as long as a range of memory
/// says that it lies, or lay, in it.
struct MemoryBlock {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool device = false;  ///< HBM; else pinned memory
  bool division = false;  ///< all that an arena divides
  std::string name = {};
  std::shared_ptr<MemoryBlock> outer = {};  ///< what it was cut out of
  RangeNames parts = {};
};

/// Whether a byte may be touched.
enum class Extent : std::uint8_t {
  open,  ///< yes
  divided,  ///< it belongs to an arena, and to no block of it
  freed,  ///< its block was freed
};

/// What is known of memory, byte for byte, kept as ranges ("cells") that are split where accesses cut them and joined
/// again where neighbours say the same. Empty ranges may be given everywhere, and change nothing.
class AccessMap {
 public:
  using Address = std::uintptr_t;

  struct Cell {
    Address end = 0;
    std::shared_ptr<MemoryBlock> block = {};  ///< accesses must not leave it; null: memory of the caller's own
    Extent extent = Extent::open;
    bool defined = false;  ///< something was written since it was allocated or given up
    AccessStamp write = {};  ///< the last write, or the free of the block that was here before
    std::vector<AccessStamp> reads = {};  ///< since then, the latest of each actor
  };
  using Cells = std::map<Address, Cell>;
  using iterator = Cells::iterator;

  /// Cuts cells at both ends of [begin, end), and calls `f(begin, cell)` on each cell in it and `gap(begin, end)` on
  /// each stretch where none is, in order.
  template <class F, class Gap>
  void visit(Address begin, Address end, F&& f, Gap&& gap) {
    if (begin == end) return;
    cut(begin);
    cut(end);
    Address next = begin;
    for (iterator it = cells_.lower_bound(begin); it != cells_.end() && it->first < end; ++it) {
      if (it->first > next) gap(next, it->first);
      f(it->first, it->second);
      next = it->second.end;
    }
    if (next < end) gap(next, end);
  }
  template <class F>
  void visit(Address begin, Address end, F&& f) {
    visit(begin, end, std::forward<F>(f), [](Address, Address) {});
  }

  /// Makes [begin, end) one cell.
  void put(Address begin, Address end, Cell cell) {
    if (begin == end) return;
    erase(begin, end);
    cell.end = end;
    cells_.emplace(begin, std::move(cell));
  }
  void erase(Address begin, Address end) {
    cut(begin);
    cut(end);
    cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
  }
  /// Joins neighbours in [begin, end) that say the same of themselves.
  void join(Address begin, Address end) {
    iterator it = cells_.lower_bound(begin);
    while (it != cells_.end() && it->first < end) {
      const iterator next = std::next(it);
      if (next == cells_.end() || next->first >= end || next->first != it->second.end ||
          !same(it->second, next->second)) {
        it = next;
        continue;
      }
      it->second.end = next->second.end;
      cells_.erase(next);
    }
  }
  /// Makes cells of all of [begin, end): where there is none yet, of the caller's own memory, which has content.
  void fill_gaps(Address begin, Address end) {
    std::vector<std::pair<Address, Address>> gaps;
    visit(begin, end, [](Address, Cell&) {}, [&](Address first, Address last) { gaps.emplace_back(first, last); });
    for (const auto& [first, last] : gaps) cells_.emplace(first, Cell{.end = last, .defined = true});
  }
  /// The cell that `address` lies in, or null.
  [[nodiscard]] const Cell* find(Address address) const {
    const auto it = cells_.upper_bound(address);
    if (it == cells_.begin() || std::prev(it)->second.end <= address) return nullptr;
    return &std::prev(it)->second;
  }
  [[nodiscard]] std::size_t size() const { return cells_.size(); }

 private:
  void cut(Address at) {
    iterator it = cells_.upper_bound(at);
    if (it == cells_.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Cell upper = it->second;
    it->second.end = at;
    cells_.emplace_hint(std::next(it), at, std::move(upper));
  }
  static bool same(const Cell& a, const Cell& b) {
    return a.block == b.block && a.extent == b.extent && a.defined == b.defined && a.write == b.write &&
           a.reads == b.reads;
  }

  Cells cells_;
};

}  // namespace hbmoff::detail
