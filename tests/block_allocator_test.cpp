// BlockAllocator against a plain model, and at its edges.
#include "hbmoff/memory/block_allocator.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "support/allocation_counter.hpp"

namespace {

using namespace hbmoff;

constexpr BlockAllocator::BlockId none = BlockAllocator::no_block;

static_assert(!std::is_copy_constructible_v<BlockAllocator> && std::is_nothrow_move_constructible_v<BlockAllocator>);
static_assert(BlockAllocator::alignment == Bytes{256});

// Free runs by offset, neighbours joined: all that an allocator has to keep to.
class Model {
 public:
  explicit Model(std::uint64_t capacity) : free_{{0, capacity}} {}

  // Takes [offset, offset + size); false when that is not wholly free.
  bool take(std::uint64_t offset, std::uint64_t size) {
    auto run = free_.upper_bound(offset);
    if (run == free_.begin()) return false;
    --run;
    const auto [start, length] = *run;
    if (offset + size > start + length) return false;
    free_.erase(run);
    if (offset > start) free_[start] = offset - start;
    if (offset + size < start + length) free_[offset + size] = start + length - offset - size;
    return true;
  }

  void give(std::uint64_t offset, std::uint64_t size) {
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && after->first == offset + size) {
      size += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    free_[offset] = size;
  }

  [[nodiscard]] std::uint64_t largest() const {
    std::uint64_t largest = 0;
    for (const auto& [offset, size] : free_) largest = std::max(largest, size);
    return largest;
  }
  [[nodiscard]] std::uint64_t sum() const {
    std::uint64_t sum = 0;
    for (const auto& [offset, size] : free_) sum += size;
    return sum;
  }

 private:
  std::map<std::uint64_t, std::uint64_t> free_;
};

struct Live {
  BlockAllocator::BlockId block;
  std::uint64_t offset, size;
};

enum class Sizes { log_uniform, alike, few };

// Random operations, each checked against the model. Returns how many allocations found no room.
std::uint64_t run_random(std::uint64_t capacity, std::uint32_t max_blocks, Sizes sizes, std::uint64_t seed,
                         int operations) {
  BlockAllocator allocator{Bytes{capacity}, max_blocks};
  Model model{capacity};
  std::vector<Live> live;
  std::mt19937_64 random{seed};
  std::uniform_real_distribution<double> exponent{0.0, std::log2(static_cast<double>(capacity)) - 1};
  std::uint64_t failures = 0;
  for (int i = 0; i < operations; ++i) {
    // Waves: mostly allocating, then mostly freeing, so that it fills up and empties again and again.
    const bool filling = i / 2000 % 2 == 0;
    if (live.empty() || random() % 8 < (filling ? 6u : 3u)) {
      std::uint64_t asked = 0;
      if (sizes == Sizes::log_uniform) asked = static_cast<std::uint64_t>(std::exp2(exponent(random)));
      if (sizes == Sizes::alike) asked = capacity / 100 + 256 * (random() % 16);  // many in one bin
      if (sizes == Sizes::few) asked = std::uint64_t{256} << (random() % 8);
      const std::uint64_t size = std::max<std::uint64_t>(round_up(asked, 256), 256);
      const BlockAllocator::BlockId block = allocator.allocate(Bytes{asked});
      const bool possible = live.size() < max_blocks && model.largest() >= size;
      REQUIRE((block != none) == possible);
      if (block == none) {
        ++failures;
        continue;
      }
      const Live taken{block, allocator.offset(block).count(), allocator.size(block).count()};
      REQUIRE(taken.size == size);
      REQUIRE(taken.offset % 256 == 0);
      REQUIRE(model.take(taken.offset, taken.size));  // inside the range, over no live block
      live.push_back(taken);
    } else {
      std::swap(live[random() % live.size()], live.back());
      REQUIRE(allocator.is_live(live.back().block));
      allocator.free(live.back().block);
      REQUIRE(!allocator.is_live(live.back().block));
      model.give(live.back().offset, live.back().size);
      live.pop_back();
    }
    REQUIRE(allocator.live_blocks() == live.size());
    if (i % 16 == 0) {
      REQUIRE(allocator.largest_free() == Bytes{model.largest()});  // equal only if neighbours were joined
      REQUIRE(allocator.free_bytes() == Bytes{model.sum()});
    }
  }
  // What was live kept its place all along; then everything comes back in one piece.
  for (const Live& block : live) {
    REQUIRE(allocator.offset(block.block) == Bytes{block.offset});
    REQUIRE(allocator.size(block.block) == Bytes{block.size});
    allocator.free(block.block);
  }
  REQUIRE(allocator.live_blocks() == 0);
  REQUIRE(allocator.free_bytes() == Bytes{capacity});
  REQUIRE(allocator.largest_free() == Bytes{capacity});
  const BlockAllocator::BlockId all = allocator.allocate(Bytes{capacity});
  REQUIRE(all != none);
  REQUIRE(allocator.offset(all) == Bytes{});
  REQUIRE(allocator.allocate(Bytes{1}) == none);
  return failures;
}

TEST_CASE("random operations agree with a plain model") {
  std::uint64_t failures = 0;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    failures += run_random(std::uint64_t{1} << 40, 1u << 16, Sizes::log_uniform, seed, 30'000);
    failures += run_random(std::uint64_t{1} << 40, 1u << 16, Sizes::alike, seed, 20'000);
    failures += run_random(std::uint64_t{1} << 20, 1u << 16, Sizes::few, seed, 20'000);
    failures += run_random((std::uint64_t{1} << 63) + 256, 200, Sizes::log_uniform, seed, 20'000);
  }
  CHECK(failures > 1000);  // a full arena was among what was tried
}

TEST_CASE("sizes 0, 1, one around a boundary") {
  BlockAllocator allocator{1_MiB, 16};
  const auto size_of = [&](std::uint64_t bytes) { return allocator.size(allocator.allocate(Bytes{bytes})).count(); };
  CHECK(size_of(0) == 256);
  CHECK(size_of(1) == 256);
  CHECK(size_of(255) == 256);
  CHECK(size_of(256) == 256);
  CHECK(size_of(257) == 512);
  CHECK(allocator.free_bytes() == 1_MiB - Bytes{256 * 6});
}

TEST_CASE("sizes beyond 32 bits, and near 2^64") {
  constexpr std::uint64_t most = ~std::uint64_t{0};
  BlockAllocator allocator{Bytes{most}, 16};
  CHECK(allocator.capacity() == Bytes{most - 255});
  const auto a = allocator.allocate(Bytes{(std::uint64_t{1} << 32) + 1});
  const auto b = allocator.allocate(Bytes{std::uint64_t{1} << 62});
  const auto c = allocator.allocate(Bytes{std::uint64_t{1} << 62});
  REQUIRE((a != none && b != none && c != none));
  CHECK(allocator.size(a) == Bytes{(std::uint64_t{1} << 32) + 256});
  CHECK(allocator.offset(b) == allocator.size(a));
  CHECK(allocator.offset(c) == allocator.offset(b) + allocator.size(b));
  CHECK(allocator.allocate(Bytes{most}) == none);
  CHECK(allocator.allocate(Bytes{most - 254}) == none);
  allocator.free(b);
  allocator.free(c);
  allocator.free(a);
  CHECK(allocator.allocate(Bytes{most}) == none);  // rounds up past 2^64
  CHECK(allocator.allocate(Bytes{most - 255}) != none);
}

TEST_CASE("capacities that hold nothing, or one block") {
  BlockAllocator empty{Bytes{255}, 4};
  CHECK(empty.capacity() == Bytes{});
  CHECK(empty.largest_free() == Bytes{});
  CHECK(empty.allocate(Bytes{}) == none);
  CHECK(empty.allocate(Bytes{1}) == none);
  BlockAllocator one{Bytes{256}, 4};
  const auto block = one.allocate(Bytes{1});
  REQUIRE(block != none);
  CHECK(one.allocate(Bytes{1}) == none);
  one.free(block);
  CHECK(one.allocate(Bytes{256}) != none);
}

TEST_CASE("the one run left that fits is found, wherever it is among runs that nearly do") {
  // Runs of 1000, 1001, ... units share a bin; live blocks of one unit keep them apart. The last holes are freed in all
  // orders of position, so that the one that fits is first, in the middle, and last of its bin.
  constexpr std::uint64_t holes = 8, base = 1000;
  for (std::uint64_t fitting = 0; fitting < holes; ++fitting) {
    std::vector<BlockAllocator::BlockId> blocks;
    std::uint64_t total = 0;
    for (std::uint64_t i = 0; i < holes; ++i) total += base + (i == fitting ? 1 : 0) + 1;
    BlockAllocator allocator{Bytes{total * 256}, 64};
    for (std::uint64_t i = 0; i < holes; ++i) {
      blocks.push_back(allocator.allocate(Bytes{(base + (i == fitting ? 1 : 0)) * 256}));
      REQUIRE(allocator.allocate(Bytes{1}) != none);
    }
    CHECK(allocator.free_bytes() == Bytes{});
    const Bytes wanted_offset = allocator.offset(blocks[fitting]);
    for (BlockAllocator::BlockId block : blocks) allocator.free(block);
    CHECK(allocator.largest_free() == Bytes{(base + 1) * 256});
    const auto block = allocator.allocate(Bytes{(base + 1) * 256});
    REQUIRE(block != none);
    CHECK(allocator.offset(block) == wanted_offset);
    CHECK(allocator.allocate(Bytes{(base + 1) * 256}) == none);
  }
}

TEST_CASE("more blocks than were announced: refused, nothing broken") {
  constexpr std::uint32_t most = 100;
  BlockAllocator allocator{Bytes{256 * 1000}, most};
  std::vector<BlockAllocator::BlockId> blocks;
  for (std::uint32_t i = 0; i < most; ++i) {
    blocks.push_back(allocator.allocate(Bytes{512}));
    REQUIRE(blocks.back() != none);
  }
  CHECK(allocator.allocate(Bytes{1}) == none);
  CHECK(allocator.live_blocks() == most);
  // As scattered as it can be: every second block free, so that runs and blocks take every node there is.
  for (std::uint32_t i = 0; i < most; i += 2) allocator.free(blocks[i]);
  for (std::uint32_t i = 0; i < most; i += 2) {
    blocks[i] = allocator.allocate(Bytes{1});
    REQUIRE(blocks[i] != none);
  }
  CHECK(allocator.allocate(Bytes{1}) == none);
  for (BlockAllocator::BlockId block : blocks) allocator.free(block);
  CHECK(allocator.largest_free() == allocator.capacity());
}

TEST_CASE("misuse is refused and changes nothing") {
  CHECK_THROWS_AS((BlockAllocator{1_MiB, 0}), InvalidArgument);
  CHECK_THROWS_AS((BlockAllocator{1_MiB, (1u << 30) + 1}), InvalidArgument);
  BlockAllocator allocator{1_MiB, 16};
  const auto kept = allocator.allocate(1_KiB), freed = allocator.allocate(1_KiB), last = allocator.allocate(1_KiB);
  allocator.free(freed);
  for (BlockAllocator::BlockId wrong :
       {none, freed, BlockAllocator::BlockId{1}, last + 1, ~BlockAllocator::BlockId{0}}) {
    CAPTURE(wrong);
    CHECK(!allocator.is_live(wrong));
    CHECK_THROWS_AS(allocator.free(wrong), InvalidArgument);
  }
  CHECK(allocator.live_blocks() == 2);
  CHECK(allocator.free_bytes() == 1_MiB - 2_KiB);
  allocator.free(kept);
  allocator.free(last);
  CHECK(allocator.largest_free() == 1_MiB);
}

TEST_CASE("after construction nothing is taken from the heap") {
  BlockAllocator allocator{1_TiB, 4096};
  std::vector<BlockAllocator::BlockId> live;
  live.reserve(4096);
  std::mt19937_64 random{7};
  REQUIRE(counts_allocations != 0);
  const std::uint64_t before = allocations;
  for (int i = 0; i < 50'000; ++i) {
    if (live.empty() || random() % 2 == 0) {
      const auto block = allocator.allocate(Bytes{random() % (std::uint64_t{1} << (8 + random() % 30))});
      if (block != none) live.push_back(block);
    } else {
      std::swap(live[random() % live.size()], live.back());
      allocator.free(live.back());
      live.pop_back();
    }
  }
  CHECK(allocations.load() == before);
}

TEST_CASE("the same calls give the same places; moving keeps them") {
  const auto offsets = [](bool move) {
    BlockAllocator first{1_GiB, 1024}, second{1_MiB, 1};
    BlockAllocator* allocator = &first;
    std::vector<BlockAllocator::BlockId> live;
    std::vector<std::uint64_t> places;
    std::mt19937_64 random{11};
    for (int i = 0; i < 4000; ++i) {
      if (move && i == 2000) {
        second = std::move(first);
        allocator = &second;
      }
      if (live.size() < 100 || random() % 2 == 0) {
        const auto block = allocator->allocate(Bytes{random() % 10'000'000});
        if (block == none) continue;
        live.push_back(block);
        places.push_back(allocator->offset(block).count());
      } else {
        std::swap(live[random() % live.size()], live.back());
        allocator->free(live.back());
        live.pop_back();
      }
    }
    return places;
  };
  const std::vector<std::uint64_t> once = offsets(false);
  CHECK(once.size() > 1000);
  CHECK(once == offsets(false));
  CHECK(once == offsets(true));
}

TEST_CASE("a ramp fills at least 98.5 % before its first failure") {
  BlockAllocator allocator{64_GiB, 1u << 16};
  std::mt19937_64 random{3};
  std::uniform_real_distribution<double> exponent{9.0, 26.0};  // 512 bytes to 64 MiB
  std::vector<Live> live;
  std::uint64_t used = 0;
  for (int i = 1;; ++i) {
    const std::uint64_t size = static_cast<std::uint64_t>(std::exp2(exponent(random)));
    const auto block = allocator.allocate(Bytes{size});
    if (block == none) break;
    live.push_back({block, 0, size});
    used += size;
    if (i % 2 != 0) continue;
    std::swap(live[random() % live.size()], live.back());
    allocator.free(live.back().block);
    used -= live.back().size;
    live.pop_back();
  }
  CHECK(static_cast<double>(used) >= 0.985 * static_cast<double>((64_GiB).count()));
}

TEST_SUITE("nightly") {
  TEST_CASE("long random programs agree with a plain model") {
    for (std::uint64_t seed = 100; seed < 140; ++seed) {
      run_random(std::uint64_t{1} << 40, 1u << 16, Sizes::log_uniform, seed, 100'000);
      run_random(std::uint64_t{1} << 44, 1u << 16, Sizes::alike, seed, 100'000);
      run_random(std::uint64_t{1} << 20, 1u << 16, Sizes::few, seed, 100'000);
      run_random((std::uint64_t{1} << 63) + 256, 200, Sizes::log_uniform, seed, 100'000);
    }
  }
}

}  // namespace
