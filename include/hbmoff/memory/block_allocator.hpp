// Divides a range of offsets into blocks; touches no memory but its own tables.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"

namespace hbmoff {

/// Hands out blocks of a range [0, capacity) of offsets. It knows no addresses, so it serves any memory, and ranges
/// larger than the machine.
///
/// - Every offset and every block's size is a multiple of `alignment`.
/// - `allocate` succeeds exactly when a free run of the (rounded) size exists and fewer than `max_blocks` blocks are
///   live. Of the runs that fit it takes a close one, preferring low offsets: close to best fit in what it can fill.
/// - Freeing joins a block with its free neighbours at once: when all is freed, one run of the whole capacity is left.
/// - All memory is taken by the constructor. `allocate` and `free` take a fixed number of steps; only an `allocate`
///   that would fail otherwise walks the free runs whose size is nearly (1/64) its own.
/// - Where a block lands depends on the sequence of calls alone.
///
/// Not safe for use by several threads at once. Movable, not copyable; a moved-from allocator may only be destroyed or
/// assigned to.
class BlockAllocator {
 public:
  /// Names a live block.
  using BlockId = std::uint32_t;
  /// What `allocate` returns when it cannot serve.
  static constexpr BlockId no_block = 0;
  /// Bytes; every offset and size is a multiple.
  static constexpr Bytes alignment{256};

  /// A range of `capacity` bytes (rounded down to `alignment`) of which at most `max_blocks` blocks are live at once.
  /// Takes 64 bytes of table per block, which cost no memory before they are used. Throws `InvalidArgument` when
  /// `max_blocks` is 0 or above 2^30.
  BlockAllocator(Bytes capacity, std::uint32_t max_blocks)
      : capacity_{capacity.count() / granule}, free_{capacity_}, max_blocks_{max_blocks},
        heads_{std::make_unique<BlockId[]>(bin_count)} {
    if (max_blocks == 0 || max_blocks > (std::uint32_t{1} << 30)) {
      throw InvalidArgument{"BlockAllocator: max_blocks must be 1 to 2^30, not " + std::to_string(max_blocks)};
    }
    // Free runs never touch, so n live blocks leave at most n beside the tail; two nodes are no blocks.
    nodes_ = std::make_unique_for_overwrite<Node[]>(std::size_t{max_blocks} * 2 + 2);
    nodes_[no_block] = Node{.offset = ~std::uint64_t{0},
                            .size = 0,
                            .before = no_block,
                            .after = no_block,
                            .bin_before = no_block,
                            .bin_after = no_block};
    nodes_[edge] =
        Node{.offset = 0, .size = 0, .before = edge, .after = edge, .bin_before = live, .bin_after = no_block};
  }

  /// A block of `size` bytes, rounded up to `alignment` (0 bytes take one unit of it). `no_block` when no free run is
  /// large enough or `max_blocks` blocks are live; nothing changes then.
  [[nodiscard]] BlockId allocate(Bytes size) noexcept {
    // Not round_up: a size near 2^64 must not wrap.
    const std::uint64_t units = size.count() == 0 ? 1 : (size.count() - 1) / granule + 1;
    if (units > free_ || live_ == max_blocks_) [[unlikely]]
      return no_block;
    const std::uint32_t bin = bin_of(units);
    // The first run of the request's own bin, as exact fits sit there.
    BlockId run = heads_[bin];
    if (run != no_block && nodes_[run].size >= units) return carve(run, units);
    // Else the first run of the next bin that has any: all runs of larger bins fit.
    run = first_above(bin);
    if (run != no_block) return carve(run, units);
    if (capacity_ - tail_ >= units) return extend(units);
    return search(bin, units);
  }

  /// Gives a live block back. Throws `InvalidArgument` when `block` is not live; nothing changes then.
  void free(BlockId block) {
    if (!is_live(block)) [[unlikely]]
      refuse(block);
    Node& node = nodes_[block];
    --live_;
    free_ += node.size;
    const BlockId before = node.before, after = node.after;
    const bool join_before = nodes_[before].bin_before != live;
    if (after == edge) {  // the block ends at the tail: the tail takes it, and a free run before it
      if (join_before) {
        unlink(before);
        cut_tail(nodes_[before].before, nodes_[before].offset);
        give_node(before);
      } else {
        cut_tail(before, node.offset);
      }
      give_node(block);
      return;
    }
    const bool join_after = nodes_[after].bin_before != live;
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
      const std::uint64_t offset = node.offset, size = node.size + right.size;
      give_node(block);
      resize(after, offset, size);
    } else {
      link(block);
    }
  }

  /// Whether `block` names a live block.
  [[nodiscard]] bool is_live(BlockId block) const noexcept {
    // The difference wraps around for the two nodes that are no blocks.
    return block - first_block < used_nodes_ && nodes_[block].bin_before == live;
  }
  /// Where a live block starts, in bytes from the start of the range.
  [[nodiscard]] Bytes offset(BlockId block) const noexcept { return Bytes{nodes_[block].offset * granule}; }
  /// The bytes that a live block takes, rounding included.
  [[nodiscard]] Bytes size(BlockId block) const noexcept { return Bytes{nodes_[block].size * granule}; }

  [[nodiscard]] Bytes capacity() const noexcept { return Bytes{capacity_ * granule}; }
  /// Sum of all free runs.
  [[nodiscard]] Bytes free_bytes() const noexcept { return Bytes{free_ * granule}; }
  /// Largest free run: the largest block that `allocate` can serve next. Walks the free runs of one bin.
  [[nodiscard]] Bytes largest_free() const noexcept {
    std::uint64_t largest = capacity_ - tail_;
    if (filled_words_ != 0) {
      const std::uint32_t word = 63 - static_cast<std::uint32_t>(std::countl_zero(filled_words_));
      const std::uint32_t bit = 63 - static_cast<std::uint32_t>(std::countl_zero(filled_[word]));
      for (BlockId run = heads_[word * 64 + bit]; run != no_block; run = nodes_[run].bin_after) {
        if (nodes_[run].size > largest) largest = nodes_[run].size;
      }
    }
    return Bytes{largest * granule};
  }
  /// Number of live blocks.
  [[nodiscard]] std::uint32_t live_blocks() const noexcept { return live_; }
  [[nodiscard]] std::uint32_t max_blocks() const noexcept { return max_blocks_; }

 private:
  // How it works: a two-level segregated fit. Free runs hang in bins by size, `steps` bins per power of two. One bit
  // per bin and one bit per word of those find the next filled bin in two words. A bin's list is not sorted, but what
  // is put in goes behind the first run when that has the lower offset: so mostly a low run is taken, which keeps the
  // high ones together and fills a long-running arena further than best fit does.
  // The free run at the end of the range, the tail, is in no bin and is carved last: a range that fills from
  // empty never touches a bin.

  static constexpr std::uint64_t granule = alignment.count();
  static constexpr std::uint32_t steps_log2 = 6;
  static constexpr std::uint32_t steps = std::uint32_t{1} << steps_log2;
  static constexpr std::uint32_t bin_count = (56 - steps_log2) * steps + 2 * steps;  // sizes below 2^56 units
  static_assert(bin_count <= 64 * 64, "one word must hold a bit for each word of bits");

  // Two nodes stand for no block. `edge` is before the first block and after the last; it counts as live, so nobody
  // joins it. `no_block` ends the lists: its `bin_before` may be written, which saves a branch, and its offset is above
  // all others.
  static constexpr BlockId edge = 1;
  static constexpr BlockId first_block = 2;
  static constexpr std::uint32_t live = ~std::uint32_t{0};

  // A live block or a free run; offset and size in units of `alignment`. Aligned, so that none lies in two cache lines.
  struct alignas(32) Node {
    std::uint64_t offset;
    std::uint64_t size;
    BlockId before, after;  // neighbours by offset
    BlockId bin_before, bin_after;  // neighbours in the bin; bin_before == live: a live block
  };

  // Sizes below 2 * steps have a bin of their own; above, a bin's width is 1/steps of its power of two.
  static constexpr std::uint32_t bin_of(std::uint64_t units) {
    const std::uint32_t shift = static_cast<std::uint32_t>(std::bit_width(units | steps)) - 1 - steps_log2;
    return (shift << steps_log2) + static_cast<std::uint32_t>(units >> shift);
  }

  BlockId first_above(std::uint32_t bin) const noexcept {
    std::uint32_t word = bin >> 6;
    std::uint64_t bits = filled_[word] & (~std::uint64_t{1} << (bin & 63));
    if (bits == 0) {
      const std::uint64_t words = filled_words_ & (~std::uint64_t{1} << word);
      if (words == 0) return no_block;
      word = static_cast<std::uint32_t>(std::countr_zero(words));
      bits = filled_[word];
    }
    return heads_[word * 64 + static_cast<std::uint32_t>(std::countr_zero(bits))];
  }

  // Takes the front of a free run; the rest keeps its node, and often its bin.
  BlockId carve(BlockId run, std::uint64_t units) noexcept {
    ++live_;
    free_ -= units;
    Node& whole = nodes_[run];
    if (whole.size == units) {
      unlink(run);
      whole.bin_before = live;
      return run;
    }
    const BlockId block = take_node();
    const BlockId before = whole.before;
    nodes_[block] = Node{.offset = whole.offset,
                         .size = units,
                         .before = before,
                         .after = run,
                         .bin_before = live,
                         .bin_after = no_block};
    nodes_[before].after = block;
    whole.before = block;
    resize(run, whole.offset + units, whole.size - units);
    return block;
  }

  // Takes the front of the tail.
  BlockId extend(std::uint64_t units) noexcept {
    ++live_;
    free_ -= units;
    const BlockId block = take_node();
    const BlockId before = nodes_[edge].before;
    nodes_[block] = Node{
        .offset = tail_, .size = units, .before = before, .after = edge, .bin_before = live, .bin_after = no_block};
    nodes_[before].after = block;
    nodes_[edge].before = block;
    tail_ += units;
    return block;
  }
  void cut_tail(BlockId last, std::uint64_t offset) noexcept {
    nodes_[last].after = edge;
    nodes_[edge].before = last;
    tail_ = offset;
  }

  // The last resort: a run of the request's own bin that is not the first.
  [[gnu::noinline]] BlockId search(std::uint32_t bin, std::uint64_t units) noexcept {
    for (BlockId run = heads_[bin]; run != no_block; run = nodes_[run].bin_after) {
      if (nodes_[run].size >= units) return carve(run, units);
    }
    return no_block;
  }

  [[noreturn]] [[gnu::noinline]] static void refuse(BlockId block) {
    throw InvalidArgument{"BlockAllocator: block " + std::to_string(block) + " is not live"};
  }

  void link(BlockId run) noexcept {
    Node& node = nodes_[run];
    const std::uint32_t bin = bin_of(node.size);
    const BlockId head = heads_[bin];
    Node& first = nodes_[head];
    const bool behind = first.offset < node.offset;  // as good as random: selects instead of branches
    BlockId& place = behind ? first.bin_after : heads_[bin];
    const BlockId next = place;
    node.bin_before = behind ? head : no_block;
    node.bin_after = next;
    place = run;
    nodes_[next].bin_before = run;
    filled_[bin >> 6] |= std::uint64_t{1} << (bin & 63);
    filled_words_ |= std::uint64_t{1} << (bin >> 6);
  }

  void unlink(BlockId run) noexcept {
    const Node& node = nodes_[run];
    const BlockId before = node.bin_before, after = node.bin_after;
    nodes_[after].bin_before = before;
    if (before != no_block) {
      nodes_[before].bin_after = after;
      return;
    }
    const std::uint32_t bin = bin_of(node.size);
    heads_[bin] = after;
    if (after != no_block) return;
    const std::uint64_t bits = filled_[bin >> 6] & ~(std::uint64_t{1} << (bin & 63));
    filled_[bin >> 6] = bits;
    if (bits == 0) filled_words_ &= ~(std::uint64_t{1} << (bin >> 6));
  }

  // Gives a free run a new place and size; it stays where it hangs when its bin stays the same.
  void resize(BlockId run, std::uint64_t offset, std::uint64_t size) noexcept {
    Node& node = nodes_[run];
    if (bin_of(node.size) == bin_of(size)) {
      node.offset = offset;
      node.size = size;
      return;
    }
    unlink(run);
    node.offset = offset;
    node.size = size;
    link(run);
  }

  BlockId take_node() noexcept {
    const BlockId node = spare_;
    if (node == no_block) return first_block + used_nodes_++;
    spare_ = nodes_[node].after;
    return node;
  }
  void give_node(BlockId node) noexcept {
    nodes_[node].bin_before = no_block;  // not live
    nodes_[node].after = spare_;
    spare_ = node;
  }

  std::uint64_t capacity_;  // in units of `alignment`, as the next two
  std::uint64_t free_;
  std::uint64_t tail_ = 0;  // where the tail starts
  std::uint32_t max_blocks_;
  std::uint32_t live_ = 0;
  BlockId spare_ = no_block;  // stack of nodes given back, through `after`
  std::uint32_t used_nodes_ = 0;  // so many nodes from first_block on were in use at some time
  std::unique_ptr<Node[]> nodes_;
  std::unique_ptr<BlockId[]> heads_;  // per bin, its first run
  std::uint64_t filled_words_ = 0;  // one bit per word of filled_
  std::array<std::uint64_t, 64> filled_{};  // one bit per bin
};

}  // namespace hbmoff
