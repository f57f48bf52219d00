// The ranges, clocks and names behind CheckedDevice.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/device/detail/access_map.hpp"
#include "support/random.hpp"

using namespace hbmoff::detail;

namespace {

using Address = AccessMap::Address;

AccessStamp stamp(Actor actor, std::uint64_t time, AccessBy by = AccessBy::copy) {
  return {.actor = actor, .by = by, .time = time};
}

/// "begin-end:time" of each cell, and "begin-end:?" of each gap.
std::string text_of(AccessMap& map, Address begin, Address end) {
  std::string text;
  map.visit(
      begin, end,
      [&](Address first, const AccessMap::Cell& cell) {
        text += std::to_string(first) + "-" + std::to_string(cell.end) + ":" + std::to_string(cell.write.time) + " ";
      },
      [&](Address first, Address last) { text += std::to_string(first) + "-" + std::to_string(last) + ":? "; });
  return text;
}

}  // namespace

TEST_CASE("clocks") {
  VectorClock a, b;
  CHECK(a.at(7) == 0);
  CHECK(a.knows(b));
  CHECK(a.tick(2) == 1);
  CHECK(a.tick(2) == 2);
  CHECK(b.tick(0) == 1);
  CHECK_FALSE(b.knows(a));
  CHECK_FALSE(a.knows(b));
  CHECK(b.join(a));
  CHECK_FALSE(b.join(a));
  CHECK(b.knows(a));
  CHECK(b.at(2) == 2);
  CHECK(b.at(0) == 1);
  CHECK_FALSE(a.knows(b));

  VectorClock stream, caller;
  for (int i = 0; i < 5; ++i) stream.tick(1);
  for (int i = 0; i < 3; ++i) caller.tick(1);
  caller.tick(4);
  const JoinedClock both{stream, caller};
  CHECK(both.at(1) == 5);
  CHECK(both.at(4) == 1);
  CHECK(both.at(9) == 0);
  CHECK(stamp(1, 5).before(both));
  CHECK_FALSE(stamp(1, 6).before(both));
  CHECK(stamp(9, 0).before(both));
  CHECK_FALSE(stamp(1, 4).before(JoinedClock{caller}));
}

TEST_CASE("cells are cut, joined, and have gaps between them") {
  AccessMap map;
  CHECK(text_of(map, 10, 20) == "10-20:? ");
  map.put(10, 20, {.write = stamp(0, 1)});
  map.put(30, 40, {.write = stamp(0, 2)});
  CHECK(text_of(map, 5, 45) == "5-10:? 10-20:1 20-30:? 30-40:2 40-45:? ");
  CHECK(text_of(map, 12, 13) == "12-13:1 ");
  CHECK(map.size() == 4);  // cut at 12 and 13
  map.join(10, 20);
  CHECK(map.size() == 2);
  map.put(15, 35, {.write = stamp(0, 3)});
  CHECK(text_of(map, 0, 50) == "0-10:? 10-15:1 15-35:3 35-40:2 40-50:? ");
  map.erase(12, 16);
  CHECK(text_of(map, 0, 50) == "0-10:? 10-12:1 12-16:? 16-35:3 35-40:2 40-50:? ");
  map.fill_gaps(8, 14);
  CHECK(text_of(map, 0, 50) == "0-8:? 8-10:0 10-12:1 12-14:0 14-16:? 16-35:3 35-40:2 40-50:? ");
  CHECK(map.find(13)->defined);
  CHECK(map.find(13)->block == nullptr);
  CHECK(map.find(14) == nullptr);
  CHECK(map.find(7) == nullptr);
  CHECK(map.find(39)->write.time == 2);
  CHECK(map.find(40) == nullptr);

  const std::size_t size = map.size();
  map.put(20, 20, {});
  map.fill_gaps(15, 15);
  map.erase(41, 41);
  map.join(41, 41);
  CHECK(text_of(map, 20, 20).empty());
  CHECK(map.size() == size);
}

TEST_CASE("only neighbours that say the same are joined") {
  const auto block = std::make_shared<MemoryBlock>();
  const AccessMap::Cell same{.block = block, .defined = true, .write = stamp(1, 2), .reads = {stamp(3, 4)}};
  const auto joined = [&](const AccessMap::Cell& other, Address from = 10) {
    AccessMap map;
    map.put(0, 10, same);
    map.put(from, 20, other);
    map.join(0, 20);
    return map.size() == 1;
  };
  CHECK(joined(same));
  CHECK_FALSE(joined(same, 11));
  AccessMap::Cell other = same;
  other.block = std::make_shared<MemoryBlock>();
  CHECK_FALSE(joined(other));
  other = same;
  other.extent = Extent::freed;
  CHECK_FALSE(joined(other));
  other = same;
  other.defined = false;
  CHECK_FALSE(joined(other));
  other = same;
  other.write = stamp(1, 3);
  CHECK_FALSE(joined(other));
  other.write = stamp(2, 2);
  CHECK_FALSE(joined(other));
  other.write = stamp(1, 2, AccessBy::release);
  CHECK_FALSE(joined(other));
  other = same;
  other.reads = {};
  CHECK_FALSE(joined(other));
  // Not past the range.
  AccessMap map;
  map.put(0, 10, same);
  map.put(10, 20, same);
  map.put(20, 30, same);
  map.join(0, 20);
  CHECK(map.size() == 2);
}

TEST_CASE("random operations against an array") {
  random_numbers::Random random{3};
  for (int program = 0; program < 200; ++program) {
    constexpr Address size = 40;
    AccessMap map;
    std::vector<std::uint64_t> times(size, 0);  // 0: a gap
    for (std::uint64_t step = 1; step <= 60; ++step) {
      const Address begin = random.next() % size, end = begin + random.next() % (size - begin + 1);
      switch (random.next() % 4) {
        case 0:
          map.put(begin, end, {.write = stamp(0, step)});
          for (Address i = begin; i < end; ++i) times[i] = step;
          break;
        case 1:
          map.erase(begin, end);
          for (Address i = begin; i < end; ++i) times[i] = 0;
          break;
        case 2:
          map.visit(
              begin, end, [&](Address, AccessMap::Cell& cell) { cell.write.time = step; }, [](Address, Address) {});
          for (Address i = begin; i < end; ++i) times[i] = times[i] == 0 ? 0 : step;
          break;
        default:
          map.join(begin, end);
      }
      std::size_t runs = 0;
      for (Address i = 0; i < size; ++i) {
        const AccessMap::Cell* cell = map.find(i);
        REQUIRE((cell == nullptr ? 0 : cell->write.time) == times[i]);
        if (times[i] != 0 && (i == 0 || times[i] != times[i - 1])) ++runs;
      }
      AccessMap copy = map;
      copy.join(0, size);
      REQUIRE(copy.size() == runs);
    }
  }
}

TEST_CASE("names") {
  RangeNames names;
  const auto at = [&](Address address) {
    const RangeNames::Name* name = names.find(address);
    return name == nullptr ? "" : name->text + "+" + std::to_string(address - name->begin);
  };
  CHECK(at(0).empty());
  names.put(10, 20, "a");
  names.put(20, 30, "b");
  names.put(40, 50, "c");
  CHECK(at(9).empty());
  CHECK(at(10) == "a+0");
  CHECK(at(19) == "a+9");
  CHECK(at(20) == "b+0");
  CHECK(at(30).empty());
  names.put(20, 20, "nothing");
  CHECK(at(20) == "b+0");
  names.put(25, 41, "d");  // of b and c the last and the first byte
  CHECK(at(24).empty());
  CHECK(at(25) == "d+0");
  CHECK(at(40) == "d+15");
  CHECK(at(41).empty());
  CHECK(at(19) == "a+9");
  names.put(0, 100, "e");
  CHECK(at(10) == "e+10");
  names.clear();
  CHECK(at(10).empty());
}
