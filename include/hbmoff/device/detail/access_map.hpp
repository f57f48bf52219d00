// Who touched which bytes last, and whether that is ordered before what comes now.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
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
    grow(actor + 1);
    return ++times_[actor];
  }
  void join(const VectorClock& other) {
    grow(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) times_[i] = (std::max)(times_[i], other.times_[i]);
  }

 private:
  void grow(std::size_t size) {
    if (times_.size() < size) times_.resize(size, 0);
  }
  std::vector<std::uint64_t> times_;
};

/// What kind of thing touched memory.
enum class AccessBy : std::uint8_t { nobody, kernel, copy, fill, host, release };

/// One access, small enough to be kept for every range.
struct AccessStamp {
  Actor actor = 0;
  AccessBy by = AccessBy::nobody;
  std::uint32_t label = 0;
  std::uint64_t time = 0;  ///< the actor's; 0 is before everything
  std::source_location at = {};

  [[nodiscard]] bool before(const VectorClock& clock) const { return time == 0 || clock.at(actor) >= time; }
};

/// Whether a byte may be touched.
enum class Extent : std::uint8_t {
  open,     ///< yes
  divided,  ///< it belongs to an arena, and to no block of it
  freed,    ///< its block was freed
};

/// Ranges of addresses [begin, end) of a few properties each: a map from where a range begins. Ranges are split where
/// accesses cut them and joined again by writes.
class AccessMap {
 public:
  using Address = std::uintptr_t;

  struct Cell {
    Address end = 0;
    std::uint64_t block = 0;    ///< which block it lies in; accesses must not cross blocks
    Extent extent = Extent::open;
    bool device = false;        ///< HBM; else pinned memory
    bool defined = false;       ///< something was written
    AccessStamp write = {};     ///< the last write, or the free of the block that was here before
    std::vector<AccessStamp> reads = {};  ///< since then, the latest of each actor
  };
  using Cells = std::map<Address, Cell>;
  using iterator = Cells::iterator;

  /// Cells that cover [begin, end) exactly where they exist, cut at both ends: call `f(begin, cell)` on each and
  /// `gap(begin, end)` on each stretch where nothing is.
  template <class F, class Gap>
  void visit(Address begin, Address end, F&& f, Gap&& gap) {
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
  Cell& put(Address begin, Address end, Cell cell) {
    erase(begin, end);
    cell.end = end;
    return cells_.insert_or_assign(begin, std::move(cell)).first->second;
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
  [[nodiscard]] bool touches(Address begin, Address end) const {
    auto it = cells_.upper_bound(begin);
    if (it != cells_.begin() && std::prev(it)->second.end > begin) return true;
    return it != cells_.end() && it->first < end;
  }
  /// The cell that `address` lies in, or null.
  [[nodiscard]] const Cell* find(Address address) const {
    auto it = cells_.upper_bound(address);
    if (it == cells_.begin()) return nullptr;
    --it;
    return it->second.end > address ? &it->second : nullptr;
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
    return a.block == b.block && a.extent == b.extent && a.defined == b.defined && a.write.actor == b.write.actor &&
           a.write.time == b.write.time && a.reads.empty() && b.reads.empty();
  }

  Cells cells_;
};

/// Names of ranges. A name of a range hides those of ranges that begin in it.
class RangeNames {
 public:
  using Address = std::uintptr_t;
  struct Name {
    Address end;
    std::string text;
  };

  void put(Address begin, Address end, std::string_view text) {
    names_.erase(names_.lower_bound(begin), names_.lower_bound(end));
    names_.insert_or_assign(begin, Name{end, std::string{text}});
  }
  void erase(Address begin, Address end) { names_.erase(names_.lower_bound(begin), names_.lower_bound(end)); }
  /// The range that `address` lies in, or null; `begin` is set.
  [[nodiscard]] const Name* find(Address address, Address& begin) const {
    auto it = names_.upper_bound(address);
    if (it == names_.begin()) return nullptr;
    --it;
    if (it->second.end <= address) return nullptr;
    begin = it->first;
    return &it->second;
  }

 private:
  std::map<Address, Name> names_;
};

}  // namespace hbmoff::detail
