// Arenas: places and accounting, frees in stream order, failures. Order is proved on ClockDevice, bytes on HostDevice.
#include "hbmoff/memory/arena.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "gate.hpp"
#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/memory/pinned_host_arena.hpp"
#include "support/allocation_counter.hpp"
#include "support/clock_device.hpp"

namespace {

using namespace hbmoff;

static_assert(Device<ClockDevice>);
using ClockArena = HbmArena<ClockDevice>;
using ClockBuffer = ClockArena::Buffer;
static_assert(!std::is_copy_constructible_v<ClockBuffer> && std::is_nothrow_move_constructible_v<ClockBuffer> &&
              std::is_nothrow_move_assignable_v<ClockBuffer> && std::is_nothrow_destructible_v<ClockBuffer>);
static_assert(!std::is_move_constructible_v<ClockArena>);
static_assert(std::is_same_v<HbmArena<HostDevice>::Buffer, Arena<HostDevice, DeviceSpace>::Buffer>);

// One vocabulary for both kinds of arena.
template <class A>
std::uint64_t address(const A& buffer) {
  return reinterpret_cast<std::uint64_t>(buffer.bytes().data());
}

template <class A>
void check_sums(const A& arena) {
  const ArenaUsage usage = arena.usage();
  Bytes sum;
  for (Bytes bytes : usage.by_role) sum += bytes;
  REQUIRE(sum == usage.used);
  REQUIRE(usage.used + usage.free == usage.capacity);
  REQUIRE(usage.high_water >= usage.used);
  REQUIRE(usage.largest_free <= usage.free);
}

// A size whose footprint is the whole of an arena of 16 MiB.
constexpr Bytes whole_size = 16_MiB;
constexpr Bytes whole = arena_footprint(whole_size);

// Every byte of an arena of capacity `whole` can be had again.
template <class A, class S>
void check_all_there(A& arena, const S& stream) {
  std::optional<typename A::Buffer> all = arena.try_allocate(whole_size, "all", Role::other, stream);
  REQUIRE(all);
  CHECK(arena.usage().free == Bytes{});
}

// ---- sizes and places

TEST_CASE("a footprint depends on the size alone and keeps neighbours off multiples of 1 MiB") {
  CHECK(arena_footprint(Bytes{}) == Bytes{});
  CHECK(arena_footprint(Bytes{1}) == Bytes{256});
  CHECK(arena_footprint(Bytes{256}) == Bytes{256});
  CHECK(arena_footprint(Bytes{257}) == Bytes{512});
  CHECK(arena_footprint(1_MiB - Bytes{1}) == 1_MiB);
  CHECK(arena_footprint(1_MiB) == 1_MiB + Bytes{4352});
  CHECK(arena_footprint(256_MiB) == 256_MiB + Bytes{4352});
  CHECK(arena_footprint(5_GiB + Bytes{1}) == 5_GiB + Bytes{256 + 4352});
  CHECK(arena_footprint(128_MiB - Bytes{4352}) == 128_MiB + Bytes{2 * 4352});  // not 128 MiB
  static_assert(ClockArena::footprint(8_MiB) == arena_footprint(8_MiB));

  const auto check = [](std::uint64_t size) {
    const std::uint64_t footprint = arena_footprint(Bytes{size}).count(), phase = footprint % (1_MiB).count();
    REQUIRE(footprint % 256 == 0);
    REQUIRE(footprint >= size + 4352);
    REQUIRE(footprint <= size + 255 + 3 * 4352);
    REQUIRE(phase >= 4352);
    REQUIRE(phase <= (1_MiB).count() - 4352);
  };
  for (std::uint64_t size = (7_MiB).count(); size <= (8_MiB).count() + 256; size += 128) check(size);
  std::mt19937_64 random{1};
  for (int i = 0; i < 10'000; ++i) check((1_MiB).count() + random() % (std::uint64_t{1} << (20 + random() % 40)));
}

TEST_CASE("arrays walked in lockstep do not start a multiple of 128 MiB apart") {
  ClockDevice device;
  const auto stream = device.create_stream();
  for (const Bytes size : {256_MiB, 128_MiB, 64_MiB, 32_MiB, 128_MiB - Bytes{4352}}) {
    CAPTURE(size.count());
    ClockArena hbm{device, 4_GiB};
    std::vector<ClockBuffer> arrays;
    for (const char* name : {"weight", "gradient", "m", "v"}) {
      arrays.push_back(hbm.allocate(size, name, Role::other, stream));
    }
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        const std::uint64_t phase = (address(arrays[i]) - address(arrays[j])) % (128_MiB).count();
        CHECK(phase > 4096);
        CHECK(phase < (128_MiB).count() - 4096);
      }
    }
  }
}

TEST_CASE("buffers: aligned, exact, apart, named; empty ones say so") {
  ClockDevice device;
  const auto stream = device.create_stream();
  ClockArena hbm{device, whole + Bytes{255}};
  CHECK(hbm.capacity() == whole);  // rounded down
  CHECK(&hbm.device() == &device);
  CHECK(hbm.options().max_streams == 16);

  ClockBuffer none;
  CHECK(!none);
  CHECK(none.bytes().empty());
  CHECK(none.size() == Bytes{});
  CHECK(none.name().empty());
  none.free(stream);
  none.rename("nobody");

  ClockBuffer zero = hbm.allocate(Bytes{}, "zero", Role::weight, stream);
  CHECK(zero);
  CHECK(zero.bytes().empty());
  CHECK(hbm.usage().used == Bytes{});
  zero.free(stream);
  CHECK(!zero);

  ClockBuffer one = hbm.allocate(Bytes{1}, "one", Role::gradient, stream);
  ClockBuffer odd = hbm.allocate(Bytes{1027}, std::string(60, 'x'), Role::weight, stream);
  CHECK(address(one) % 256 == 0);
  CHECK(address(odd) == address(one) + 256);
  CHECK(odd.size() == Bytes{1027});
  CHECK(odd.bytes().count() == 1027);
  CHECK(odd.as<float>().count() == 256);
  CHECK(odd.name() == std::string(47, 'x'));
  odd.rename("odd");
  CHECK(odd.name() == "odd");

  ClockBuffer moved = std::move(odd);
  CHECK(!odd);  // NOLINT(bugprone-use-after-move): empty by contract
  CHECK(odd.bytes().empty());
  CHECK(odd.name().empty());
  CHECK(moved.name() == "odd");
  ClockBuffer& self = moved;
  moved = std::move(self);
  CHECK(moved.size() == Bytes{1027});

  ArenaUsage usage = hbm.usage();
  CHECK(usage.by_role[static_cast<std::size_t>(Role::weight)] == Bytes{1280});
  CHECK(usage.by_role[static_cast<std::size_t>(Role::gradient)] == Bytes{256});
  CHECK(usage.used == Bytes{1536});
  CHECK(usage.high_water == Bytes{1536});
  CHECK(usage.largest_free == whole - Bytes{1536});
  one = std::move(moved);  // frees what `one` held
  usage = hbm.usage();
  CHECK(usage.used == Bytes{1536});  // kept for its stream
  CHECK(one.size() == Bytes{1027});
  ClockBuffer again = hbm.allocate(Bytes{200}, "again", Role::activation, stream);
  CHECK(hbm.usage().by_role[static_cast<std::size_t>(Role::gradient)] == Bytes{});
  CHECK(hbm.usage().by_role[static_cast<std::size_t>(Role::activation)] == Bytes{256});
  CHECK(hbm.usage().high_water == Bytes{1536});
  check_sums(hbm);
}

TEST_CASE("an arena adopts memory of the caller's, and gives back only what it reserved") {
  ClockDevice device;
  const auto stream = device.create_stream();
  {
    ClockArena hbm{device, 1_MiB};
    PinnedHostArena host{device, 1_MiB};
    CHECK(device.reservations == 2);
    const device_span<std::byte> memory{reinterpret_cast<std::byte*>(std::uint64_t{3} << 30), 4096};
    ClockArena adopted{device, memory};
    CHECK(adopted.capacity() == 4_KiB);
    CHECK(adopted.allocate(4_KiB, "all", Role::weight, stream).bytes().data() == memory.data());
    CHECK_THROWS_AS((ClockArena{device, memory.subspan(1, 1024)}), InvalidArgument);
    const pinned_span<std::byte> pinned{memory.data(), 4096};
    CHECK(PinnedHostArena<ClockDevice>{device, pinned}.allocate(Bytes{1}, "a", Role::weight, stream).bytes().data() ==
          pinned.data());
    CHECK(device.reservations == 2);
  }
  CHECK(device.reservations == 0);
  CHECK_THROWS_AS((ClockArena{device, 1_MiB, {.max_blocks = 0}}), InvalidArgument);
  CHECK_THROWS_AS((ClockArena{device, 1_MiB, {.max_streams = 0}}), InvalidArgument);
  CHECK_THROWS_AS((ClockArena{device, 1_MiB, {.max_streams = 1025}}), InvalidArgument);
  for (std::uint64_t n = 1; n <= 3; ++n) {  // the reservation, the first event, the second
    device.fail_call(n);
    CHECK_THROWS_AS((ClockArena{device, 1_MiB, {.max_streams = 2}}), DeviceError);
  }
  CHECK(device.reservations == 0);
}

// ---- out of memory

TEST_CASE("OutOfMemory says who holds what, and changes nothing") {
  ClockDevice device;
  const auto stream = device.create_stream();
  ClockArena hbm{device, 16_MiB, {.max_blocks = 16}};
  std::vector<ClockBuffer> held;
  for (std::uint64_t i = 1; i <= 7; ++i) {
    held.push_back(hbm.allocate(Bytes{i * 1000}, "tensor " + std::to_string(i), Role::weight, stream));
  }
  held.push_back(hbm.allocate(9_MiB, "m", Role::optimizer_state, stream));
  const ArenaUsage before = hbm.usage();
  const auto error = thrown_by<OutOfMemory>([&] { (void)hbm.allocate(8_MiB, "v", Role::optimizer_state, stream); });
  REQUIRE(error);
  const OutOfMemory::Details& details = error->details();
  CHECK(details.tier == Tier::hbm);
  CHECK(details.what_for == "v");
  CHECK(details.requested == 8_MiB);
  CHECK(details.capacity == 16_MiB);
  CHECK(details.free == before.free);
  CHECK(details.largest_free == before.free);
  CHECK(details.by_role[static_cast<std::size_t>(Role::optimizer_state)] == ClockArena::footprint(9_MiB));
  CHECK(details.by_role[static_cast<std::size_t>(Role::weight)] == before.used - ClockArena::footprint(9_MiB));
  REQUIRE(details.largest.size() == 5);
  CHECK(details.largest[0].name == "m");
  CHECK(details.largest[0].role == Role::optimizer_state);
  CHECK(details.largest[0].bytes == ClockArena::footprint(9_MiB));
  CHECK(details.largest[1].name == "tensor 7");
  CHECK(details.largest[4].name == "tensor 4");
  CHECK(details.remedy.find("more memory") != std::string::npos);
  CHECK(std::string{error->what()}.find("HBM is full: v needs 8.00 MiB") == 0);
  CHECK(hbm.usage().used == before.used);
  CHECK(!hbm.try_allocate(8_MiB, "v", Role::optimizer_state, stream));
  CHECK(!hbm.try_allocate(Bytes{~std::uint64_t{0}}, "huge", Role::other, stream));

  // Enough in sum, not in one piece.
  for (std::size_t i : {0u, 2u, 4u, 6u}) held[i].free(stream);
  held.push_back(hbm.allocate(hbm.usage().largest_free - Bytes{4352}, "rest", Role::workspace, stream));
  const auto scattered = thrown_by<OutOfMemory>([&] { (void)hbm.allocate(Bytes{9000}, "x", Role::other, stream); });
  REQUIRE(scattered);
  CHECK(scattered->details().free >= Bytes{9000});
  CHECK(scattered->details().remedy.find("scattered") != std::string::npos);

  // A pinned arena names its own tier.
  PinnedHostArena host{device, 1_MiB};
  const auto pinned = thrown_by<OutOfMemory>([&] { (void)host.allocate(2_MiB, "x", Role::other, stream); });
  REQUIRE(pinned);
  CHECK(pinned->details().tier == Tier::pinned_host);
}

TEST_CASE("more buffers than max_blocks: OutOfMemory that says what to raise; freed ones count until they joined") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream();
  ClockArena hbm{device, 1_MiB, {.max_blocks = 4}};
  std::vector<ClockBuffer> held;
  for (int i = 0; i < 4; ++i) held.push_back(hbm.allocate(Bytes{256}, "x", Role::other, a));
  const auto error = thrown_by<OutOfMemory>([&] { (void)hbm.allocate(Bytes{256}, "y", Role::other, b); });
  REQUIRE(error);
  CHECK(error->details().remedy.find("max_blocks") != std::string::npos);
  held[0].free(a);  // kept for a: still one of the four
  const ClockBuffer other = hbm.allocate(Bytes{512}, "y", Role::other, b);
  CHECK(other);
  CHECK(device.waits == 1);
  CHECK(device.unordered == 0);
}

// ---- stream order

TEST_CASE("a freed block: at once for its stream, behind a wait for another") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream();
  ClockArena hbm{device, whole};
  ClockBuffer buffer = hbm.allocate(whole_size, "x", Role::other, a);
  const std::uint64_t place = address(buffer);
  buffer.free(a);
  CHECK(!buffer);
  CHECK(hbm.usage().used == whole);
  buffer = hbm.allocate(whole_size - Bytes{100}, "same footprint", Role::other, a);
  CHECK(address(buffer) == place);
  CHECK(device.waits == 0);
  buffer.free(a);
  buffer = hbm.allocate(whole_size, "other stream", Role::other, b);
  CHECK(address(buffer) == place);
  CHECK(device.waits == 1);
  CHECK(device.unordered == 0);
  CHECK(device.queries == 0);
  CHECK(device.synchronizations == 0);
}

TEST_CASE("attempts come in the order: same footprint, pool, own blocks, other streams one by one") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream(), c = device.create_stream();
  ClockArena hbm{device, Bytes{8 * 1024}};
  std::vector<ClockBuffer> kib;
  for (const auto& on : {&a, &a, &a, &b, &b, &c, &c}) kib.push_back(hbm.allocate(1_KiB, "x", Role::other, *on));
  const std::uint64_t base = address(kib[0]);
  const auto take = [&](Bytes size, const ClockDevice::Stream& on) {
    kib.push_back(hbm.allocate(size, "y", Role::other, on));
    return address(kib.back()) - base;
  };
  kib[0].free(a);
  kib[1].free(a);
  kib[3].free(b);
  kib[4].free(b);
  kib[5].free(c);
  CHECK(take(1_KiB, a) == 1024);  // the block that a freed last; the pool would have had 7168
  CHECK(take(1_KiB, c) == 5 * 1024);
  CHECK(take(1_KiB, c) == 7 * 1024);  // the pool, before anybody's freed blocks
  CHECK(device.waits == 0);
  CHECK(take(512_B, a) == 0);  // a's own kept block, in no other's way
  CHECK(device.waits == 0);
  CHECK(take(512_B, c) == 512);  // that came from a, through the pool
  CHECK(device.waits == 1);
  CHECK(take(2_KiB, c) == 3 * 1024);  // b's two blocks, joined
  CHECK(device.waits == 2);
  CHECK(device.unordered == 0);
}

TEST_CASE("a stream waits once for what joined the pool, and again only for what joined since") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream();
  ClockArena hbm{device, Bytes{64 * 1024}};
  std::vector<ClockBuffer> held;
  for (int i = 0; i < 64; ++i) held.push_back(hbm.allocate(1_KiB, "x", Role::other, a));
  for (int i = 0; i < 32; ++i) held[static_cast<std::size_t>(i)].free(a);
  std::vector<ClockBuffer> more;
  for (int i = 0; i < 32; ++i) more.push_back(hbm.allocate(1_KiB, "y", Role::other, b));
  CHECK(device.waits == 1);
  held[40].free(a);
  held[41].free(a);
  more.push_back(hbm.allocate(1_KiB, "y", Role::other, b));
  more.push_back(hbm.allocate(1_KiB, "y", Role::other, b));
  CHECK(device.waits == 2);
  CHECK(device.unordered == 0);
}

TEST_CASE("a buffer freed on another stream than it was allocated on belongs to the stream that freed it") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream();
  ClockArena hbm{device, whole};
  ClockBuffer buffer = hbm.allocate(whole_size, "x", Role::other, a);
  device.order(b, a);
  buffer.free(b);
  buffer = hbm.allocate(whole_size, "x", Role::other, b);
  CHECK(device.waits == 0);
  device.order(b, a);
  buffer.free(b);
  buffer = hbm.allocate(whole_size, "x", Role::other, a);
  CHECK(device.waits == 1);
  buffer.move_to(b);
  device.order(b, a);
  buffer = {};
  buffer = hbm.allocate(whole_size, "x", Role::other, b);
  CHECK(device.waits == 1);
  CHECK(device.unordered == 0);
}

TEST_CASE("the checker of order itself sees a missing wait") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream();
  ClockArena hbm{device, whole};
  hbm.allocate(whole_size, "x", Role::other, a).free(a);
  device.ignore_waits = true;
  const ClockBuffer buffer = hbm.allocate(whole_size, "x", Role::other, b);
  CHECK(device.unordered == 1);
}

// Random programs on more streams than the arena tracks, calls failing now and then. Whatever happens, no bytes go to
// a stream that is not ordered behind their last free, and none are lost.
template <class A>
void random_program(std::uint64_t seed, int operations, bool failures, ArenaOptions options) {
  constexpr std::size_t stream_count = 7;
  ClockDevice device;
  std::vector<ClockDevice::Stream> streams;
  for (std::size_t i = 0; i < stream_count; ++i) streams.push_back(device.create_stream());
  A arena{device, whole, options};
  struct Held {
    typename A::Buffer buffer;
    std::size_t stream;
  };
  std::mt19937_64 random{seed};
  std::uint64_t thrown = 0, full = 0, taken = 0;
  {
    std::vector<Held> held;
    for (int i = 0; i < operations; ++i) {
      if (failures && random() % 8 == 0) device.fail_call(1 + random() % 4, 2);
      const std::size_t s = random() % stream_count;
      try {
        if (random() % 9 < 5) {
          const Bytes size{random() % (std::uint64_t{1} << (8 + random() % 16))};
          std::optional<typename A::Buffer> buffer = arena.try_allocate(size, "x", Role{}, streams[s]);
          if (buffer) {
            ++taken;
            held.push_back({std::move(*buffer), s});
          } else if (++full % 4 == 0) {
            held.clear();
          }
        } else if (!held.empty()) {
          std::swap(held[random() % held.size()], held.back());
          if (random() % 2 == 0) {
            device.order(streams[s], streams[held.back().stream]);
            held.back().buffer.free(streams[s]);
          }
          held.pop_back();
        }
      } catch (const DeviceError&) {
        ++thrown;
      }
      check_sums(arena);
    }
    device.fail_call(0);
  }
  check_all_there(arena, streams[0]);
  INFO("seed " << seed << " failures " << failures << " streams " << options.max_streams);
  CHECK(device.unordered == 0);
  CHECK(device.queries == 0);
  CHECK(taken > static_cast<std::uint64_t>(operations) / 4);
  CHECK(full > 10);
  CHECK((thrown > 0) == failures);
  CHECK((arena.failed_frees() > 0) == failures);
}

TEST_CASE("random programs on many streams: ordered, nothing lost") {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    random_program<ClockArena>(seed, 6000, false, {.max_blocks = 64, .max_streams = 16});
    random_program<ClockArena>(seed, 6000, false, {.max_blocks = 64, .max_streams = 3});
    random_program<ClockArena>(seed, 6000, true, {.max_blocks = 64, .max_streams = 16});
    random_program<ClockArena>(seed, 6000, true, {.max_blocks = 64, .max_streams = 3, .fill_freed = true});
    random_program<ClockArena>(seed, 6000, true, {.max_blocks = 64, .max_streams = 1});
    random_program<PinnedHostArena<ClockDevice>>(seed, 6000, true, {.max_blocks = 64, .max_streams = 2});
  }
}

// ---- failing calls

TEST_CASE("each device call inside allocate fails in turn: it throws, nothing is lost, the next try succeeds") {
  for (std::uint32_t max_streams : {2u, 16u}) {
    std::uint64_t failures = 0;
    for (std::uint64_t n = 1;; ++n) {
      CAPTURE(n);
      ClockDevice device;
      const auto a = device.create_stream(), b = device.create_stream(), c = device.create_stream();
      ClockArena hbm{device, whole, {.max_streams = max_streams}};
      ClockBuffer x = hbm.allocate(4_MiB, "x", Role::weight, a), y = hbm.allocate(4_MiB, "y", Role::gradient, b);
      ClockBuffer z = hbm.allocate(4_MiB, "z", Role::activation, a);
      x.free(a);
      y.free(b);
      device.fail_call(1, 2);
      {
        const ClockBuffer dropped = std::move(z);
      }  // its free fails: it waits for a record that succeeds
      CHECK(hbm.failed_frees() == 1);
      device.fail_call(n);
      bool threw = false;
      ClockBuffer all;
      try {
        all = hbm.allocate(whole_size, "all", Role::other, c);
      } catch (const DeviceError&) {
        threw = true;
      }
      check_sums(hbm);
      device.fail_call(0);
      if (threw) {
        ++failures;
        all = hbm.allocate(whole_size, "all", Role::other, c);
      }
      CHECK(hbm.usage().used == whole);
      CHECK(device.unordered == 0);
      if (!threw) break;
    }
    CHECK(failures >= 4);  // a record, a note, two waits, the note of the allocation
  }
}

TEST_CASE("each device call inside free fails in turn: it throws and the buffer still owns its block") {
  for (bool fill : {false, true}) {
    for (std::uint64_t n = 1;; ++n) {
      CAPTURE(n);
      ClockDevice device;
      const auto a = device.create_stream(), b = device.create_stream();
      ClockArena hbm{device, whole, {.max_streams = 1, .fill_freed = fill}};
      ClockBuffer x = hbm.allocate(1_MiB, "x", Role::weight, a), y = hbm.allocate(2_MiB, "y", Role::weight, a);
      x.free(a);
      const std::uint64_t place = address(y);
      device.order(b, a);
      device.fail_call(n);
      const bool threw = thrown_by<DeviceError>([&] { y.free(b); }).has_value();
      device.fail_call(0);
      if (threw) {
        REQUIRE(y);
        CHECK(address(y) == place);
        CHECK(y.name() == "y");
        y.free(b);
      }
      CHECK(!y);
      check_sums(hbm);
      check_all_there(hbm, a);
      CHECK(device.unordered == 0);
      if (!threw) {
        CHECK(n == (fill ? 5u : 4u));  // after the wait that takes the list over, (the fill,) the record, the note
        break;
      }
    }
  }
}

TEST_CASE("a free that fails when its stream is not tracked any more: the block comes back all the same") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream();
  ClockArena hbm{device, whole, {.max_streams = 1}};
  {
    const ClockBuffer on_a = hbm.allocate(4_MiB, "on a", Role::weight, a);
    hbm.allocate(1_MiB, "on b", Role::weight, b).free(b);  // takes a's place
    device.fail_call(1, 2);
  }
  CHECK(hbm.failed_frees() == 1);
  CHECK(hbm.usage().used == ClockArena::footprint(4_MiB));
  CHECK(hbm.allocate(5_MiB, "other", Role::weight, b));  // others go on meanwhile
  check_all_there(hbm, b);
  CHECK(device.unordered == 0);
}

TEST_CASE("a quarantined block serves its own stream at once") {
  ClockDevice device;
  const auto a = device.create_stream();
  ClockArena hbm{device, whole};
  {
    const ClockBuffer buffer = hbm.allocate(whole_size, "x", Role::weight, a);
    device.fail_call(1, 2);
  }
  const ClockBuffer again = hbm.allocate(whole_size, "y", Role::weight, a);
  CHECK(again);
  CHECK(device.unordered == 0);
}

TEST_CASE("on a lost device destructors make no device call") {
  ClockDevice device;
  const auto a = device.create_stream();
  {
    ClockArena hbm{device, whole};
    hbm.allocate(1_MiB, "x", Role::weight, a).free(a);
    ClockBuffer buffer = hbm.allocate(2_MiB, "y", Role::weight, a);
    device.is_lost = true;
    const std::uint64_t calls = device.calls;
    buffer = {};
    CHECK(device.calls == calls);
    CHECK(hbm.failed_frees() == 1);
  }
  CHECK(device.synchronizations == 0);
  CHECK(device.reservations == 0);
}

TEST_CASE("an arena waits at its end for the frees it recorded") {
  ClockDevice device;
  const auto a = device.create_stream(), b = device.create_stream(), c = device.create_stream();
  {
    ClockArena hbm{device, whole};
    hbm.allocate(1_MiB, "x", Role::weight, a).free(a);
    hbm.allocate(1_MiB, "x", Role::weight, b).free(b);
    hbm.allocate(Bytes{}, "x", Role::weight, c).free(c);
  }
  CHECK(device.synchronizations == 2);
}

// ---- on HostDevice, with real bytes

TEST_CASE("work of another stream on reused bytes runs behind the work that was there before the free") {
  HostDevice device{{.hbm_capacity = 64_MiB}};
  HostDevice::Stream a = device.create_stream("a"), b = device.create_stream("b");
  Gate gate;
  HbmArena hbm{device, whole};
  int seen = 0;
  {
    auto first = hbm.allocate(whole_size, "first", Role::other, a);
    int* value = first.as<int>().data();
    device.enqueue(a, [value] { *value = 42; });
    device.enqueue(a, gate.pass());
    device.enqueue(a, [value, &seen] { seen = *value; });
    first.free(a);
    auto second = hbm.allocate(whole_size, "second", Role::other, b);
    REQUIRE(second.as<int>().data() == value);
    device.enqueue(b, [value] { *value = 7; });
    gate.open();
  }
  device.synchronize(b);
  CHECK(seen == 42);
}

TEST_CASE("freed memory is filled with 0xFF, where the options ask for it") {
  HostDevice device;
  HostDevice::Stream stream = device.create_stream("s");
  HbmArena hbm{device, 1_MiB, {.fill_freed = true}};
  PinnedHostArena host{device, 1_MiB, {.fill_freed = true}};
  PinnedHostArena plain{device, 1_MiB};
  auto out = plain.allocate(1000_B, "out", Role::other, stream);
  const auto freed_bytes = [&](auto& arena) {
    auto first = arena.allocate(1000_B, "first", Role::other, stream);
    std::byte* data = first.bytes().data();
    device.enqueue(stream, [data] { std::fill_n(data, 1000, std::byte{0x11}); });
    first.free(stream);
    auto second = arena.allocate(1000_B, "second", Role::other, stream);
    REQUIRE(second.bytes().data() == data);
    std::byte* to = out.bytes().data();
    device.enqueue(stream, [data, to] { std::copy_n(data, 1000, to); });
    device.synchronize(stream);
    return std::all_of(to, to + 1000, [](std::byte b) { return b == std::byte{0xff}; });
  };
  CHECK(freed_bytes(hbm));
  CHECK(freed_bytes(host));
  CHECK(!freed_bytes(plain));
}

TEST_CASE("after construction nothing is taken from the heap, no stream or event created") {
  HostDevice device;
  std::vector<HostDevice::Stream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(device.create_stream("s"));
  HbmArena hbm{device, whole, {.max_blocks = 256, .max_streams = 3}};
  PinnedHostArena host{device, whole, {.max_blocks = 256, .fill_freed = true}};
  std::array<HbmArena<HostDevice>::Buffer, 32> on_device;
  std::array<PinnedHostArena<HostDevice>::Buffer, 32> on_host;
  std::mt19937_64 random{5};
  REQUIRE(counts_allocations != 0);
  for (const HostDevice::Stream& stream : streams) {  // a thread's own start may allocate
    device.host_func(stream, [] {});
    device.synchronize(HostDevice::StreamRef{stream});
  }
  const std::uint64_t before = allocations;
  for (int i = 0; i < 2000; ++i) {
    const std::size_t slot = random() % on_device.size();
    const HostDevice::Stream& stream = streams[random() % streams.size()];
    const Bytes size{random() % (std::uint64_t{1} << (8 + random() % 15))};
    if (auto buffer = hbm.try_allocate(size, "a name of some length, beyond any small buffer", Role::other, stream)) {
      on_device[slot] = std::move(*buffer);
    }
    if (auto buffer = host.try_allocate(size, "x", Role::other, stream)) on_host[slot] = std::move(*buffer);
  }
  CHECK(allocations.load() == before);
  on_device = {};
  on_host = {};
  CHECK(hbm.failed_frees() == 0);
  check_all_there(hbm, streams[0]);
}

TEST_CASE("when work on a stream fails, frees throw and destructors do not") {
  HostDevice device;
  HostDevice::Stream stream = device.create_stream("s");
  HbmArena hbm{device, 1_MiB, {.fill_freed = true}};
  PinnedHostArena host{device, 1_MiB, {.fill_freed = true}};
  auto x = hbm.allocate(1_KiB, "x", Role::other, stream);
  auto y = host.allocate(1_KiB, "y", Role::other, stream);
  host.allocate(2_KiB, "z", Role::other, stream).free(stream);
  device.enqueue(stream, [] { throw 1; });
  CHECK_THROWS_AS(device.synchronize(stream), DeviceError);
  REQUIRE(device.lost());
  CHECK_THROWS_AS(x.free(stream), DeviceError);
  CHECK(x);
}

TEST_CASE("arenas larger than the device or the machine are refused, with the reason") {
  HostDevice device{{.hbm_capacity = 1_MiB}};
  const auto hbm = thrown_by<OutOfMemory>([&] { HbmArena{device, 2_MiB}; });
  REQUIRE(hbm);
  CHECK(hbm->details().tier == Tier::hbm);
  const auto host = thrown_by<OutOfMemory>([&] { PinnedHostArena{device, 1_TiB * 1024}; });
  REQUIRE(host);
  CHECK(host->details().tier == Tier::pinned_host);
  CHECK(host->details().requested == 1_TiB * 1024);
  CHECK(host->details().free < 1_TiB * 1024);
  CHECK(host->details().remedy.find("raise it") != std::string::npos);

  // Addresses alone cost nothing, so nothing is checked, and nothing is filled.
  const Bytes most = detail::sanitizer_watches() ? 64_GiB : 1_TiB, size = most - 1_GiB;
  HostDevice virtual_device{{.hbm_capacity = most, .no_touch = true}};
  HostDevice::Stream stream = virtual_device.create_stream("s");
  PinnedHostArena large{virtual_device, most, {.fill_freed = true}};
  auto buffer = large.allocate(size, "large", Role::other, stream);
  buffer.free(stream);
  virtual_device.synchronize(stream);
  CHECK(large.usage().high_water == arena_footprint(size));
}

// ---- what the machine can give

class FakeRoot {
 public:
  FakeRoot() : path_{std::filesystem::temp_directory_path() / ("hbmoff_arena_test_" + std::to_string(counter()))} {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream{file} << text;
  }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  static std::uint64_t counter() { return std::random_device{}(); }
  std::filesystem::path path_;
};

TEST_CASE("the host's limit is the tightest of free RAM and the cgroups above the process") {
  const FakeRoot root;
  const auto limit = [&] { return host_memory_limit(root.path()); };
  CHECK(limit().available == Bytes{~std::uint64_t{0}});  // nothing known
  CHECK(limit().set_by.empty());
  root.write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\n");
  CHECK(limit().available == 800_KiB);
  CHECK(limit().set_by.find("MemAvailable") != std::string::npos);

  root.write("proc/self/cgroup", "0::/jobs/one\n");
  CHECK(limit().available == 800_KiB);  // no files: no limit
  root.write("sys/fs/cgroup/jobs/one/memory.max", "max\n");
  root.write("sys/fs/cgroup/jobs/one/memory.current", "4096\n");
  CHECK(limit().available == 800_KiB);
  root.write("sys/fs/cgroup/jobs/memory.max", "500000\n");
  root.write("sys/fs/cgroup/jobs/memory.current", "300000\n");
  CHECK(limit().available == Bytes{200'000});
  CHECK(limit().set_by.find("/jobs/memory.max") != std::string::npos);
  root.write("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 50000\nactive_file 30000\n");
  CHECK(limit().available == Bytes{280'000});
  root.write("sys/fs/cgroup/jobs/one/memory.max", "1000\n");
  CHECK(limit().available == Bytes{});  // over its limit already
}

TEST_CASE("the host's limit: version 1, and a group whose path is not visible") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "garbage\n9:cpu,cpuacct:/x\n4:memory:/outer/inner\n0::/\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "700000\n");
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n");
  root.write("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 20000\n");
  CHECK(host_memory_limit(root.path()).available == Bytes{620'000});
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", "90000\n");
  CHECK(host_memory_limit(root.path()).available == Bytes{90'000});
}

TEST_CASE("this machine's limit is known on Linux") {
  if (!std::filesystem::exists("/proc/meminfo")) return;
  const HostMemoryLimit limit = host_memory_limit();
  CHECK(limit.available > Bytes{});
  CHECK(limit.available < 1_TiB * 1024);
  CHECK(!limit.set_by.empty());
}

TEST_SUITE("nightly") {
  TEST_CASE("long random programs on many streams: ordered, nothing lost") {
    for (std::uint64_t seed = 100; seed < 120; ++seed) {
      for (std::uint32_t max_streams : {1u, 2u, 3u, 5u, 16u}) {
        const ArenaOptions options{.max_blocks = 64, .max_streams = max_streams, .fill_freed = seed % 2 == 0};
        random_program<ClockArena>(seed, 20'000, false, options);
        random_program<ClockArena>(seed, 20'000, true, options);
        random_program<PinnedHostArena<ClockDevice>>(seed, 20'000, true, options);
      }
    }
  }
}

}  // namespace
