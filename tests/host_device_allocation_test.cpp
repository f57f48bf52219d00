// No call of HostDevice but create_* and allocate_* takes memory, on any thread.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"
#include "support/allocation_counter.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

using Stream = HostDevice::Stream;
using StreamRef = HostDevice::StreamRef;
using Event = HostDevice::Event;

TEST_CASE("the counter counts") {
  REQUIRE(counts_allocations != 0);
  const std::uint64_t before = allocations;
  std::byte* volatile object = new std::byte{1};  // volatile: a pair of new and delete may be left out
  delete object;
  const std::uint64_t after_new = allocations;
  CHECK(after_new > before);
  void* volatile raw = std::malloc(10);
  std::free(raw);
  const std::uint64_t after_malloc = allocations;
  CHECK(after_malloc > after_new);
  HostDevice device;
  const auto pinned = device.allocate_pinned(64_KiB);
  CHECK(allocations > after_malloc);
  device.free_pinned(pinned);
}

TEST_CASE("no call but create_* and allocate_* takes memory, on any thread") {
  for (const bool protection : {false, true}) {
    HostDevice device{{.hbm_capacity = 4_MiB,
                       .ring_capacity = 8,
                       .host_to_device = {.gigabytes_per_second = 100},
                       .debug_protection = protection}};
    const Stream a = device.create_stream(), b = device.create_stream();
    std::optional<Stream> gone = device.create_stream();
    const Event timed = device.create_event(EventTiming::timed), event = device.create_event();
    std::optional<Event> gone_too = device.create_event();
    const auto hbm = device.allocate_device(3_MiB);
    const auto host = device.allocate_pinned(3_MiB), given_back = device.allocate_pinned(4_KiB);
    std::uint64_t ran = 0, queried = 0;

    // Threads have started: a sanitizer takes memory there.
    for (const StreamRef stream : {StreamRef{a}, StreamRef{b}, StreamRef{*gone}}) {
      device.host_func(stream, [] {});
      device.synchronize(stream);
    }

    const std::uint64_t before = allocations;
    for (int i = 0; i < 20; ++i) {
      device.copy_async(hbm, host, a);
      device.record(event, a);
      device.wait(b, event);
      for (int k = 0; k < 20; ++k) device.enqueue(b, [&ran] { ++ran; }, {.name = "kernel", .modelled_time = 1us});
      device.record(timed, b);
      device.record(timed, a);  // on another stream while the first is pending
      device.wait(a, timed);
      device.fill_async(hbm.subspan(0, 100), std::byte{1}, b);
      device.host_func(b, [&ran] { ++ran; });
      device.record(timed, b);
      device.wait(a, timed);
      device.copy_async(hbm.subspan(0, 100), hbm.subspan(100, 100), a);
      device.copy_async(host, hbm, a);
      queried += device.query(event) ? 1 : 0;
      device.synchronize(timed);
      queried += device.elapsed(timed, timed) == 0ns ? 0 : 1;
      device.synchronize(a);
      queried += device.stats().ring_full_waits + device.calls_made() + device.memory_info().free.count();
    }
    device.wait(*gone, event);
    device.enqueue(*gone, [&ran] { ++ran; });
    gone.reset();
    gone_too.reset();
    device.free_pinned(given_back);
    const std::uint64_t after = allocations;

    CHECK(after - before == 0);
    CHECK(ran == 20 * 21 + 1);
    CHECK(queried > 0);
    device.free_device(hbm);
    device.free_pinned(host);
  }
}
