// HostDevice keeps CUDA's stream and event semantics, loses nothing and hides no error.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

namespace {

static_assert(Device<HostDevice>);
using Stream = HostDevice::Stream;
using StreamRef = HostDevice::StreamRef;
using Event = HostDevice::Event;
using EventRef = HostDevice::EventRef;

template <class Ref>
constexpr bool never_null = !std::default_initializable<Ref> && !std::constructible_from<Ref, int> &&
                            !std::constructible_from<Ref, std::nullptr_t>;
static_assert(never_null<StreamRef> && never_null<EventRef>);
static_assert(!std::is_copy_constructible_v<HostDevice> && !std::is_move_constructible_v<HostDevice>);

void write_order(HostDevice& device, StreamRef stream, std::vector<int>& order, int value) {
  device.enqueue(stream, [&order, value] { order.push_back(value); });
}

}  // namespace

TEST_CASE("work on one stream runs in the order of the calls, whatever the ring holds") {
  for (const std::uint64_t capacity : {1u, 2u, 3u, 7u, 1024u}) {
    HostDevice device{{.ring_capacity = capacity}};
    const Stream stream = device.create_stream();
    std::vector<int> order;
    for (int i = 0; i < 200; ++i) write_order(device, stream, order, i);
    device.synchronize(stream);
    REQUIRE(order.size() == 200);
    for (int i = 0; i < 200; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
  }
  CHECK_THROWS_AS(HostDevice{HostDeviceOptions{.ring_capacity = 0}}, InvalidArgument);
}

TEST_CASE("a stream carries its name, and views compare by stream") {
  HostDevice device;
  std::string name = "copy-in";
  const Stream a = device.create_stream(name);
  name = "overwritten";
  const Stream b = device.create_stream();
  const StreamRef view = a;
  CHECK(view.name() == "copy-in");
  CHECK(view == StreamRef{a});
  CHECK(view != StreamRef{b});
  CHECK(device.options().ring_capacity == 1024);
}

TEST_CASE("owners move and are empty afterwards, and say so") {
  HostDevice device;
  Stream a = device.create_stream("a");
  Stream b = std::move(a);
  CHECK(a.empty());  // NOLINT(bugprone-use-after-move): the state after a move is what is tested
  CHECK_FALSE(b.empty());
  CHECK_THROWS_AS(device.synchronize(StreamRef{a}), InvalidArgument);
  a = std::move(b);
  CHECK(StreamRef{a}.name() == "a");
  a = device.create_stream("c");
  CHECK(StreamRef{a}.name() == "c");

  Event e = device.create_event();
  Event f = std::move(e);
  CHECK(e.empty());  // NOLINT(bugprone-use-after-move)
  CHECK_THROWS_AS(static_cast<void>(device.query(e)), InvalidArgument);
  e = std::move(f);
  CHECK_FALSE(e.empty());
  CHECK(device.query(e));
}

TEST_CASE("an event that was never recorded holds nobody") {
  HostDevice device;
  const Stream a = device.create_stream(), b = device.create_stream();
  const Event event = device.create_event();
  Gate gate;
  device.enqueue(a, gate.pass());
  device.wait(b, event);  // before the record: a no-op
  device.record(event, a);
  bool ran = false;
  device.enqueue(b, [&ran] { ran = true; });
  device.synchronize(b);
  CHECK(ran);
  CHECK_FALSE(device.query(event));
  gate.open();
  device.synchronize(event);
  CHECK(device.query(event));
}

TEST_CASE("query and synchronize of a fresh event, and of one recorded on an unused stream, are done at once") {
  HostDevice device;
  const Stream stream = device.create_stream();
  const Event event = device.create_event();
  CHECK(device.query(event));
  device.synchronize(event);
  device.record(event, stream);
  CHECK(device.query(event));
  device.synchronize(event);
  device.wait(stream, event);
  device.synchronize(stream);
}

TEST_CASE("a wait takes the latest record as of its own call") {
  for (const EventTiming timing : {EventTiming::none, EventTiming::timed}) {
    HostDevice device;
    const Stream a = device.create_stream(), b = device.create_stream();
    const Event event = device.create_event(timing);
    Gate first, second;
    std::atomic<int> step{0};
    device.enqueue(a, first.pass());
    device.enqueue(a, [&] { step = 1; });
    device.record(event, a);
    device.wait(b, event);
    int seen = -1;
    device.enqueue(b, [&] { seen = step; });
    device.enqueue(a, second.pass());
    device.enqueue(a, [&] { step = 2; });
    device.record(event, a);  // replaces the first record for later waits only
    first.open();
    device.synchronize(b);
    CHECK(seen == 1);
    CHECK_FALSE(device.query(event));
    device.wait(b, event);
    device.enqueue(b, [&] { seen = step; });
    second.open();
    device.synchronize(b);
    CHECK(seen == 2);
  }
}

TEST_CASE("an event re-recorded on another stream forgets the old record, though that is still pending") {
  for (const EventTiming timing : {EventTiming::none, EventTiming::timed}) {
    HostDevice device;
    const Stream a = device.create_stream(), b = device.create_stream(), c = device.create_stream();
    const Event origin = device.create_event(EventTiming::timed), event = device.create_event(timing);
    device.record(origin, c);
    Gate gate;
    device.enqueue(a, gate.pass());
    device.record(event, a);
    device.record(event, c);
    device.wait(b, event);
    device.synchronize(b);  // c's record is what counts: a is still held
    device.synchronize(event);
    CHECK(device.query(event));
    if (timing == EventTiming::timed) {
      const auto before = device.elapsed(origin, event);
      gate.open();
      device.synchronize(a);  // the old record takes its time now
      CHECK(device.elapsed(origin, event) == before);
    }
  }
}

TEST_CASE("a timed event re-recorded on many streams while every old record is pending keeps the latest time") {
  HostDevice device;
  std::vector<Stream> streams;
  for (int i = 0; i < 7; ++i) streams.push_back(device.create_stream());
  const Event origin = device.create_event(EventTiming::timed), event = device.create_event(EventTiming::timed);
  device.record(origin, streams[0]);
  Gate gate;
  for (const Stream& stream : streams) device.enqueue(stream, gate.pass());
  // More pending records than the event has room for: the calling thread waits, as for a full queue, and is counted.
  std::thread opener{[&] {
    while (device.stats().ring_full_waits == 0) std::this_thread::yield();
    gate.open();
  }};
  for (const Stream& stream : streams) {
    device.record(event, stream);
    device.record(event, stream);
  }
  opener.join();
  device.enqueue(streams.back(), [] {}, {.name = "busy", .modelled_time = 2ms});
  device.record(event, streams.back());
  for (const Stream& stream : streams) device.synchronize(stream);
  CHECK(device.elapsed(origin, event) >= 2ms);
}

TEST_CASE("chains across three streams carry every value on") {
  HostDevice device{{.hbm_capacity = 1_MiB, .ring_capacity = 8}};
  const Stream streams[] = {device.create_stream("a"), device.create_stream("b"), device.create_stream("c")};
  const Event events[] = {device.create_event(), device.create_event(), device.create_event()};
  std::uint64_t value = 1, expected = 1;  // not atomic: the chain alone orders its readers and writers
  for (std::uint64_t i = 0; i < 900; ++i) {
    const std::size_t now = i % 3, before = (i + 2) % 3;
    device.wait(streams[now], events[before]);
    device.enqueue(streams[now], [&value, i] { value = value * 6364136223846793005u + i; });
    device.record(events[now], streams[now]);
    expected = expected * 6364136223846793005u + i;
  }
  device.synchronize(events[899 % 3]);
  CHECK(value == expected);
}

TEST_CASE("random programs over four streams give the bits of the same program run in order") {
  constexpr std::size_t buffers = 6, count = 257, stream_count = 4;
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    std::mt19937 random{seed};
    HostDevice device{{.hbm_capacity = 1_MiB, .ring_capacity = 5}};
    std::vector<Stream> streams;
    for (std::size_t i = 0; i < stream_count; ++i) streams.push_back(device.create_stream());
    const auto hbm = device.allocate_device(Bytes{buffers * count * 8});
    const auto host = device.allocate_pinned(Bytes{buffers * count * 8});
    const auto of = [](auto memory, std::size_t buffer) { return memory.subspan(buffer * count * 8, count * 8); };
    std::vector<std::vector<std::uint64_t>> model(2 * buffers, std::vector<std::uint64_t>(count));  // HBM, then pinned
    struct Last {
      Event wrote;
      std::vector<Event> read;  // by stream
    };
    std::vector<Last> last;
    for (std::size_t i = 0; i < 2 * buffers; ++i) {
      last.push_back({device.create_event(), {}});
      for (std::size_t s = 0; s < stream_count; ++s) last.back().read.push_back(device.create_event());
    }
    const auto before = [&](std::size_t stream, std::optional<std::size_t> reads, std::size_t writes) {
      if (reads) device.wait(streams[stream], last[*reads].wrote);
      device.wait(streams[stream], last[writes].wrote);
      for (const Event& event : last[writes].read) device.wait(streams[stream], event);
    };
    const auto after = [&](std::size_t stream, std::optional<std::size_t> reads, std::size_t writes) {
      if (reads) device.record(last[*reads].read[stream], streams[stream]);
      device.record(last[writes].wrote, streams[stream]);
    };
    for (int step = 0; step < 300; ++step) {
      const std::size_t stream = random() % stream_count, x = random() % buffers, y = random() % buffers;
      switch (random() % 5) {
        case 0:
          before(stream, buffers + y, x);
          device.copy_async(of(hbm, x), of(host, y), streams[stream]);
          after(stream, buffers + y, x);
          model[x] = model[buffers + y];
          break;
        case 1:
          before(stream, x, buffers + y);
          device.copy_async(of(host, y), of(hbm, x), streams[stream]);
          after(stream, x, buffers + y);
          model[buffers + y] = model[x];
          break;
        case 2:
          if (x == y) break;
          before(stream, x, y);
          device.copy_async(of(hbm, y), of(hbm, x), streams[stream]);
          after(stream, x, y);
          model[y] = model[x];
          break;
        case 3:
          before(stream, {}, x);
          device.fill_async(of(hbm, x), std::byte{0xff}, streams[stream]);
          after(stream, {}, x);
          model[x].assign(count, ~std::uint64_t{0});
          break;
        default: {
          const std::uint64_t factor = random() | 1u;
          const auto kernel = [factor](std::uint64_t* to, const std::uint64_t* from) {
            for (std::size_t i = 0; i < count; ++i) to[i] = to[i] * factor + from[i] + i;
          };
          before(stream, x, y);
          const auto to = of(hbm, y).template as<std::uint64_t>(), from = of(hbm, x).template as<std::uint64_t>();
          device.enqueue(streams[stream], [=] { kernel(to.data(), from.data()); });
          after(stream, x, y);
          kernel(model[y].data(), model[x].data());
        }
      }
    }
    for (std::size_t x = 0; x < buffers; ++x) {
      before(0, x, buffers + x);
      const std::vector<std::uint64_t> expected_host = model[buffers + x];
      device.synchronize(last[buffers + x].wrote);
      for (const Event& event : last[buffers + x].read) device.synchronize(event);
      const auto kept = of(host, x).template as<std::uint64_t>();
      CHECK(std::vector<std::uint64_t>(kept.begin(), kept.end()) == expected_host);
      device.copy_async(of(host, x), of(hbm, x), streams[0]);
      device.synchronize(streams[0]);
      CHECK(std::vector<std::uint64_t>(kept.begin(), kept.end()) == model[x]);
    }
    device.free_device(hbm);
    device.free_pinned(host);
  }
}

TEST_CASE("a full ring blocks the caller, is counted, and loses nothing") {
  HostDevice device{{.ring_capacity = 4}};
  const Stream stream = device.create_stream();
  Gate gate;
  std::vector<int> order;
  device.enqueue(stream, gate.pass());
  for (int i = 0; i < 3; ++i) write_order(device, stream, order, i);
  CHECK(device.stats().ring_full_waits == 0);
  std::atomic<int> accepted{0};
  std::thread producer{[&] {
    for (int i = 3; i < 100; ++i) {
      write_order(device, stream, order, i);
      ++accepted;
    }
  }};
  while (device.calls_made() < 6) std::this_thread::yield();  // the producer is inside its first call
  std::this_thread::sleep_for(2ms);
  CHECK(accepted == 0);
  gate.open();
  producer.join();
  device.synchronize(stream);
  CHECK(device.stats().ring_full_waits >= 1);
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) REQUIRE(order[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("several host threads put work on one stream; each one's order is kept") {
  HostDevice device{{.ring_capacity = 3}};
  const Stream stream = device.create_stream();
  std::vector<std::pair<int, int>> seen;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) device.enqueue(stream, [&seen, t, i] { seen.emplace_back(t, i); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  device.synchronize(stream);
  REQUIRE(seen.size() == 600);
  int next[3] = {};
  for (const auto& [t, i] : seen) REQUIRE(next[t]++ == i);
}

TEST_CASE("destroying a stream waits for its work; its callables are destroyed with it") {
  HostDevice device;
  const auto witness = std::make_shared<int>(0);
  {
    const Stream stream = device.create_stream();
    for (int i = 0; i < 50; ++i) {
      device.enqueue(stream, [witness] { ++*witness; }, {.name = "add", .modelled_time = 100us});
    }
  }
  CHECK(*witness == 50);
  CHECK(witness.use_count() == 1);
  const Stream again = device.create_stream("again");  // the same worker, taken up again
  CHECK(StreamRef{again}.name() == "again");
  device.enqueue(again, [witness] { ++*witness; });
  device.synchronize(again);
  CHECK(*witness == 51);
}

TEST_CASE("freeing memory waits for the work queued before") {
  HostDevice device{{.hbm_capacity = 1_MiB}};
  const Stream stream = device.create_stream();
  const auto hbm = device.allocate_device(64_KiB);
  const auto host = device.allocate_pinned(64_KiB);
  int ran = 0;
  device.enqueue(stream, [] {}, {.modelled_time = 2ms});
  device.enqueue(stream, [&ran, hbm, host] { ran += hbm.data()[7] == host[9] ? 1 : 100; });
  device.free_device(hbm);
  CHECK(ran == 1);
  device.enqueue(stream, [] {}, {.modelled_time = 2ms});
  device.enqueue(stream, [&ran, host] { ran += host[9] == std::byte{0} ? 1 : 100; });
  device.free_pinned(host);
  CHECK(ran == 2);
}

TEST_CASE("events may be destroyed while records and waits are pending, and their successors are not disturbed") {
  HostDevice device;
  const Stream a = device.create_stream(), b = device.create_stream(), c = device.create_stream();
  const Event origin = device.create_event(EventTiming::timed);
  device.record(origin, b);
  Gate gate;
  bool passed = false, ran = false;
  device.enqueue(a, gate.pass());
  device.enqueue(a, [&passed] { passed = true; });
  {
    const Event old = device.create_event(EventTiming::timed);
    device.record(old, a);
    device.wait(c, old);
    device.enqueue(c, [&] { ran = passed; });
  }
  const Event successor = device.create_event(EventTiming::timed);
  CHECK(device.query(successor));  // starts as never recorded
  CHECK_THROWS_AS(static_cast<void>(device.elapsed(origin, successor)), InvalidArgument);
  device.record(successor, b);
  device.synchronize(successor);
  const auto before = device.elapsed(origin, successor);
  gate.open();
  device.synchronize(c);
  CHECK(ran);
  CHECK(device.elapsed(origin, successor) == before);
}

TEST_CASE("callables may be move-only and as large as promised") {
  HostDevice device;
  const Stream stream = device.create_stream();
  std::uint64_t sum = 0;
  struct Large {
    std::uint64_t* sum;
    std::uint64_t values[HostDevice::max_callable_bytes / 8 - 1];
    void operator()() const {
      for (const std::uint64_t value : values) *sum += value;
    }
  };
  static_assert(sizeof(Large) == HostDevice::max_callable_bytes);
  Large large{&sum, {}};
  for (std::uint64_t& value : large.values) value = 3;
  device.enqueue(stream, large);
  device.host_func(stream, [&sum, owned = std::make_unique<std::uint64_t>(1000)] { sum += *owned; });
  struct alignas(64) Aligned {
    std::uint64_t* sum;
    void operator()() const { *sum += reinterpret_cast<std::uintptr_t>(this) % 64; }
  };
  device.enqueue(stream, Aligned{&sum});
  device.synchronize(stream);
  CHECK(sum == 1000 + 3 * (HostDevice::max_callable_bytes / 8 - 1));
}

TEST_CASE("HBM has a capacity, and OutOfMemory says what is there") {
  HostDevice device{{.hbm_capacity = 1_MiB}};
  const auto free = [&] { return device.memory_info().free; };
  CHECK(device.memory_info().total == 1_MiB);
  CHECK(free() == 1_MiB);
  const auto a = device.allocate_device(Bytes{1000});
  CHECK(free() == 1_MiB - Bytes{1000});
  CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 4096 == 0);
  CHECK(a.count() == 1000);
  const auto error = thrown_by<OutOfMemory>([&] { static_cast<void>(device.allocate_device(1_MiB)); });
  REQUIRE(error);
  CHECK(error->details().tier == Tier::hbm);
  CHECK(error->details().requested == 1_MiB);
  CHECK(error->details().capacity == 1_MiB);
  CHECK(error->details().free == 1_MiB - Bytes{1000});
  CHECK(error->details().largest_free == 1_MiB - Bytes{1000});
  CHECK_FALSE(error->details().remedy.empty());
  const auto b = device.allocate_device(1_MiB - Bytes{1000});
  CHECK(free() == Bytes{});
  CHECK_THROWS_AS(static_cast<void>(device.allocate_device(Bytes{1})), OutOfMemory);
  const auto nothing = device.allocate_device(Bytes{});
  CHECK(nothing.empty());
  const auto pinned = device.allocate_pinned(2_MiB);  // no part of HBM
  CHECK(std::all_of(pinned.begin(), pinned.end(), [](std::byte x) { return x == std::byte{0}; }));
  device.free_pinned(pinned);
  device.free_device(nothing);
  device.free_device(a);
  device.free_device(b.subspan(8, 8));  // not what was given: nothing happens
  CHECK(free() == Bytes{1000});
  device.free_device(b);
  CHECK(free() == 1_MiB);
}

TEST_CASE("what the system refuses is OutOfMemory too") {
  HostDevice device{{.hbm_capacity = Bytes{~std::uint64_t{0}}}};
  for (const Bytes bytes : {Bytes{std::uint64_t{1} << 62}, Bytes{~std::uint64_t{0}}}) {
    const auto pinned = thrown_by<OutOfMemory>([&] { static_cast<void>(device.allocate_pinned(bytes)); });
    REQUIRE(pinned);
    CHECK(pinned->details().tier == Tier::pinned_host);
    CHECK(pinned->details().requested == bytes);
    CHECK(pinned->details().remedy.find("refused") != std::string::npos);
    CHECK_THROWS_AS(static_cast<void>(device.allocate_device(bytes)), OutOfMemory);
  }
  CHECK(device.memory_info().free == Bytes{~std::uint64_t{0}});
}

TEST_CASE("copies move every byte and no other, at every size and alignment") {
  constexpr std::uint64_t mib = std::uint64_t{1} << 20, all = 3 * mib + 512;
  HostDevice device{{.hbm_capacity = 16_MiB}};
  const Stream stream = device.create_stream();
  const auto hbm = device.allocate_device(Bytes{all}), second = device.allocate_device(Bytes{all});
  const auto source = device.allocate_pinned(Bytes{all}), target = device.allocate_pinned(Bytes{all});
  std::uint32_t noise = 1;
  for (std::byte& x : source) x = static_cast<std::byte>((noise = noise * 1664525u + 1013904223u) >> 24);
  const std::uint64_t counts[] = {0, 1, 127, mib - 1, mib, mib + 1, 2 * mib + 61, 3 * mib};
  for (const std::uint64_t count : counts) {
    for (const std::uint64_t offset : {0u, 1u, 63u, 65u}) {
      device.fill_async(hbm, std::byte{0xee}, stream);
      device.copy_async(hbm.subspan(offset, count), source.subspan(3, count), stream);
      device.copy_async(second, hbm, stream);
      device.copy_async(target, second, stream);
      device.synchronize(stream);
      const auto is_filler = [](std::byte x) { return x == std::byte{0xee}; };
      REQUIRE(std::equal(source.begin() + 3, source.begin() + 3 + count, target.begin() + offset));
      REQUIRE(std::all_of(target.begin(), target.begin() + offset, is_filler));
      REQUIRE(std::all_of(target.begin() + offset + count, target.end(), is_filler));
    }
  }
  device.fill_async(hbm.subspan(0, 0), std::byte{1}, stream);
  CHECK_THROWS_AS(device.copy_async(hbm.subspan(0, 2), source.subspan(0, 3), stream), InvalidArgument);
  for (const auto memory : {hbm, second}) device.free_device(memory);
  for (const auto memory : {source, target}) device.free_pinned(memory);
}

TEST_CASE("notes cost nothing and are accepted") {
  HostDevice device;
  const Stream stream = device.create_stream();
  const std::uint64_t calls = device.calls_made();
  device.note_block(BlockNote::named, device_span<const std::byte>{}, "x", stream);
  device.note_access(stream, "kernel", {{nullptr, Bytes{}}}, {});
  CHECK(device.calls_made() == calls);
}

TEST_CASE("memory that was not given back goes with the device") {
  HostDevice device{{.hbm_capacity = 1_MiB}};
  static_cast<void>(device.allocate_device(64_KiB));
  static_cast<void>(device.allocate_pinned(64_KiB));
}
