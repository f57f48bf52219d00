// Divides a range of offsets into blocks; touches no memory but its own tables.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// Hands out blocks of a range [0, capacity) of offsets. It knows no addresses, so it serves any memory, and ranges
/// larger than the machine.
///
/// - Every offset and every block's size is a multiple of `alignment`.
/// - `allocate` succeeds exactly when a free run of the (rounded) size exists and fewer than `max_blocks` blocks are
///   live. Of the runs that fit it takes one within 1/128 of the smallest.
/// - Freeing joins a block with its free neighbours at once: when all is freed, one run of the whole capacity is left.
/// - All memory is taken by the constructor. `allocate` and `free` cost a fixed number of steps, apart from a walk over
///   the free runs whose sizes share the request's bin (1/256 wide), made only where no larger run is left.
/// - Where a block lands depends on the sequence of calls alone.
///
/// Not safe for use by several threads at once. Movable, not copyable; a moved-from allocator may only be destroyed or
/// assigned to.
///
/// How: a two-level segregated fit. Free runs hang in bins by size, `steps` bins per power of two; three
/// levels of bitmaps find the next filled bin in at most three words.
class BlockAllocator {
 public:
  /// Names a live block.
  using BlockId = std::uint32_t;
  /// What `allocate` returns when it cannot serve.
  static constexpr BlockId no_block = 0;
  /// Bytes; every offset and size is a multiple.
  static constexpr Bytes alignment{256};

  /// A range of `capacity` bytes (rounded down to `alignment`) of which at most `max_blocks` blocks are live at once.
  /// Takes 64 bytes of table per block. Throws `InvalidArgument` when `max_blocks` is 0 or above 2^30.
  BlockAllocator(Bytes capacity, std::uint32_t max_blocks)
      : capacity_{capacity.count() / granule}, free_{capacity_}, max_blocks_{max_blocks} {
    if (max_blocks == 0 || max_blocks > (std::uint32_t{1} << 30)) {
      throw InvalidArgument{"BlockAllocator: max_blocks must be 1 to 2^30, not " + std::to_string(max_blocks)};
    }
    const std::uint32_t bins = bin_of(capacity_) + 1;
    heads_.assign(bins, no_block);
    filled_.assign(bins / 64 + 2, 0);          // one word more than there are, so that a search may step past the end
    filled_words_.assign(bins / 4096 + 2, 0);
    // Free runs never touch, so n live blocks leave at most n + 1 of them. Left uninitialised: untouched nodes cost
    // no memory.
    nodes_ = std::make_unique_for_overwrite<Node[]>(std::size_t{max_blocks} * 2 + 2);
    nodes_[end] = Node{.offset = 0, .size = 0, .before = end, .after = end, .bin_before = live, .bin_after = 0};
    if (capacity_ == 0) return;
    const BlockId all = take_node();
    nodes_[all] = Node{.offset = 0, .size = capacity_, .before = end, .after = end, .bin_before = 0, .bin_after = 0};
    link(all);
  }

  /// A block of `size` bytes, rounded up to `alignment` (0 bytes take one unit of it). `no_block` when no free run is
  /// large enough or `max_blocks` blocks are live; nothing changes then.
  [[nodiscard]] BlockId allocate(Bytes size) noexcept {
    // Not round_up: a size near 2^64 must not wrap.
    const std::uint64_t units = size.count() == 0 ? 1 : (size.count() - 1) / granule + 1;
    if (units > free_ || live_ == max_blocks_) [[unlikely]] return no_block;
    const BlockId run = find(units);
    if (run == no_block) [[unlikely]] return no_block;
    ++live_;
    free_ -= units;
    Node& whole = nodes_[run];
    if (whole.size == units) {
      unlink(run);
      whole.bin_before = live;
      return run;
    }
    // The block takes the front; the rest keeps its node, and often its bin.
    const BlockId block = take_node();
    Node& taken = nodes_[block];
    taken = Node{.offset = whole.offset, .size = units, .before = whole.before, .after = run, .bin_before = live,
                 .bin_after = 0};
    nodes_[whole.before].after = block;
    whole.before = block;
    resize(run, whole.offset + units, whole.size - units);
    return block;
  }

  /// Gives a live block back. Throws `InvalidArgument` when `block` is not live; nothing changes then.
  void free(BlockId block) {
    if (!is_live(block)) [[unlikely]] {
      throw InvalidArgument{"BlockAllocator: block " + std::to_string(block) + " is not live"};
    }
    Node& node = nodes_[block];
    --live_;
    free_ += node.size;
    const BlockId before = node.before, after = node.after;
    const bool join_before = nodes_[before].bin_before != live, join_after = nodes_[after].bin_before != live;
    if (join_before) {
      Node& left = nodes_[before];
      std::uint64_t size = left.size + node.size;
      BlockId next = after;
      if (join_after) {
        size += nodes_[after].size;
        next = nodes_[after].after;
        unlink(after);
        give_node(after);
      }
      left.after = next;
      nodes_[next].before = before;
      give_node(block);
      resize(before, left.offset, size);
    } else if (join_after) {
      Node& right = nodes_[after];
      right.before = before;
      nodes_[before].after = after;
      const std::uint64_t offset = node.offset, size = node.size;
      give_node(block);
      resize(after, offset, right.size + size);
    } else {
      link(block);
    }
  }

  /// Whether `block` names a live block.
  [[nodiscard]] bool is_live(BlockId block) const noexcept {
    return block != end && block < first_untouched_ && nodes_[block].bin_before == live;
  }
  /// Where a live block starts, in bytes from the start of the range.
  [[nodiscard]] Bytes offset(BlockId block) const noexcept { return Bytes{nodes_[block].offset * granule}; }
  /// The bytes that a live block takes, rounding included.
  [[nodiscard]] Bytes size(BlockId block) const noexcept { return Bytes{nodes_[block].size * granule}; }

  [[nodiscard]] Bytes capacity() const noexcept { return Bytes{capacity_ * granule}; }
  /// Sum of all free runs.
  [[nodiscard]] Bytes free_bytes() const noexcept { return Bytes{free_ * granule}; }
  /// Largest free run: what `allocate` can serve next. Walks the free runs of one bin.
  [[nodiscard]] Bytes largest_free() const noexcept {
    std::uint64_t largest = 0;
    for (std::size_t word = filled_.size(); word-- > 0;) {
      if (filled_[word] == 0) continue;
      const std::uint32_t bin = static_cast<std::uint32_t>(word) * 64 + 63 -
                                static_cast<std::uint32_t>(std::countl_zero(filled_[word]));
      for (BlockId run = heads_[bin]; run != no_block; run = nodes_[run].bin_after) {
        if (nodes_[run].size > largest) largest = nodes_[run].size;
      }
      break;
    }
    return Bytes{largest * granule};
  }
  /// Number of live blocks.
  [[nodiscard]] std::uint32_t live_blocks() const noexcept { return live_; }
  [[nodiscard]] std::uint32_t max_blocks() const noexcept { return max_blocks_; }

 private:
  static constexpr std::uint64_t granule = alignment.count();
  static constexpr std::uint32_t steps_log2 = 8;
  static constexpr std::uint32_t steps = std::uint32_t{1} << steps_log2;
  static constexpr BlockId end = 0;  // before the first block and after the last; counts as live, so nobody joins it
  static constexpr std::uint32_t live = (std::numeric_limits<std::uint32_t>::max)();

  // A live block or a free run; offset and size in units of `alignment`. 32 bytes: two to a cache line.
  struct Node {
    std::uint64_t offset;
    std::uint64_t size;
    BlockId before, after;             // neighbours by offset
    BlockId bin_before, bin_after;     // neighbours in the bin; bin_before == live: a live block
  };

  // Sizes below 2 * steps have a bin of their own; above, a bin's width is 1/steps of its power of two.
  static constexpr std::uint32_t shift_of(std::uint64_t units) {
    const std::uint32_t width = static_cast<std::uint32_t>(std::bit_width(units | steps));
    return width - 1 - steps_log2;
  }
  static constexpr std::uint32_t bin_of(std::uint64_t units) {
    const std::uint32_t shift = shift_of(units);
    return (shift << steps_log2) + static_cast<std::uint32_t>(units >> shift);
  }

  // A run of at least `units`, still linked.
  BlockId find(std::uint64_t units) const noexcept {
    // The first bin all of whose runs fit.
    const std::uint32_t bin = bin_of(units + (std::uint64_t{1} << shift_of(units)) - 1);
    std::uint32_t word = bin >> 6;
    if (word < filled_.size()) {
      std::uint64_t bits = filled_[word] >> (bin & 63) << (bin & 63);
      if (bits == 0) {
        ++word;
        std::uint32_t group = word >> 6;
        if (group < filled_words_.size()) {
          std::uint64_t words = filled_words_[group] >> (word & 63) << (word & 63);
          while (words == 0 && ++group < filled_words_.size()) words = filled_words_[group];
          if (words != 0) {
            word = group * 64 + static_cast<std::uint32_t>(std::countr_zero(words));
            bits = filled_[word];
          }
        }
      }
      if (bits != 0) return heads_[word * 64 + static_cast<std::uint32_t>(std::countr_zero(bits))];
    }
    // Runs of the request's own bin may fit.
    for (BlockId run = heads_[bin_of(units)]; run != no_block; run = nodes_[run].bin_after) {
      if (nodes_[run].size >= units) return run;
    }
    return no_block;
  }

  void link(BlockId run) noexcept {
    Node& node = nodes_[run];
    const std::uint32_t bin = bin_of(node.size);
    const BlockId head = heads_[bin];
    node.bin_before = no_block;
    node.bin_after = head;
    heads_[bin] = run;
    if (head != no_block) {
      nodes_[head].bin_before = run;
    } else {
      filled_[bin >> 6] |= std::uint64_t{1} << (bin & 63);
      filled_words_[bin >> 12] |= std::uint64_t{1} << (bin >> 6 & 63);
    }
  }

  void unlink(BlockId run) noexcept {
    const Node& node = nodes_[run];
    if (node.bin_after != no_block) nodes_[node.bin_after].bin_before = node.bin_before;
    if (node.bin_before != no_block) {
      nodes_[node.bin_before].bin_after = node.bin_after;
      return;
    }
    const std::uint32_t bin = bin_of(node.size);
    heads_[bin] = node.bin_after;
    if (node.bin_after != no_block) return;
    filled_[bin >> 6] &= ~(std::uint64_t{1} << (bin & 63));
    if (filled_[bin >> 6] == 0) filled_words_[bin >> 12] &= ~(std::uint64_t{1} << (bin >> 6 & 63));
  }

  // Gives a free run a new place and size; it stays where it is when its bin does.
  void resize(BlockId run, std::uint64_t offset, std::uint64_t size) noexcept {
    Node& node = nodes_[run];
    node.offset = offset;
    if (bin_of(node.size) == bin_of(size)) {
      node.size = size;
      return;
    }
    unlink(run);
    node.size = size;
    link(run);
  }

  BlockId take_node() noexcept {
    if (spare_ == no_block) return first_untouched_++;
    const BlockId node = spare_;
    spare_ = nodes_[node].after;
    return node;
  }
  void give_node(BlockId node) noexcept {
    nodes_[node].bin_before = no_block;  // not live
    nodes_[node].after = spare_;
    spare_ = node;
  }

  std::uint64_t capacity_;  // in units of `alignment`, as free_
  std::uint64_t free_;
  std::uint32_t max_blocks_;
  std::uint32_t live_ = 0;
  BlockId spare_ = no_block;      // stack of nodes given back, through `after`
  BlockId first_untouched_ = 1;   // nodes from here on were never used
  std::unique_ptr<Node[]> nodes_;
  std::vector<BlockId> heads_;               // per bin, its first run
  std::vector<std::uint64_t> filled_;        // one bit per bin
  std::vector<std::uint64_t> filled_words_;  // one bit per word of filled_
};

}  // namespace hbmoff
