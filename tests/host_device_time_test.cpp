// Modelled time on HostDevice. Where nothing is touched, work takes no time but the modelled one, so the times of
// events follow from the calls alone and are compared exactly. No assertion depends on how fast this machine is.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

using Stream = HostDevice::Stream;
using Event = HostDevice::Event;

TEST_CASE("modelled kernels take at least their time, real work included") {
  HostDevice device;
  const Stream a = device.create_stream(), b = device.create_stream();
  const Event begin = device.create_event(EventTiming::timed), middle = device.create_event(EventTiming::timed),
              end = device.create_event(EventTiming::timed);
  const auto called = std::chrono::steady_clock::now();
  device.record(begin, a);
  device.enqueue(a, [] {}, {.name = "first", .modelled_time = 3ms});
  device.record(middle, a);
  device.wait(b, middle);
  device.enqueue(b, [] { std::this_thread::sleep_for(2ms); }, {.name = "longer than modelled", .modelled_time = 1ns});
  device.record(end, b);
  device.synchronize(end);
  CHECK(std::chrono::steady_clock::now() - called >= 5ms);
  CHECK(device.elapsed(begin, middle) >= 3ms);
  CHECK(device.elapsed(middle, end) >= 2ms);
  CHECK(device.elapsed(begin, end) == device.elapsed(begin, middle) + device.elapsed(middle, end));
  CHECK(device.elapsed(end, begin) == -device.elapsed(begin, end));
}

TEST_CASE("work without a model takes what it takes") {
  HostDevice device;
  const Stream stream = device.create_stream();
  const Event begin = device.create_event(EventTiming::timed), end = device.create_event(EventTiming::timed);
  device.record(begin, stream);
  device.host_func(stream, [] { std::this_thread::sleep_for(3ms); });
  device.enqueue(stream, [] { std::this_thread::sleep_for(3ms); });
  device.record(end, stream);
  device.synchronize(end);
  CHECK(device.elapsed(begin, end) >= 6ms);
  CHECK(device.stats().worker_time > 0ns);
}

TEST_CASE("the time of a chain over two streams is the sum of its parts, late wake-ups or not") {
  HostDevice device{{.no_touch = true}};
  const Stream a = device.create_stream(), b = device.create_stream();
  const Event begin = device.create_event(EventTiming::timed), end = device.create_event(EventTiming::timed),
              event = device.create_event();
  Gate gate;
  device.host_func(a, gate.pass());  // everything below is queued before any of it runs
  device.record(begin, a);
  for (int i = 0; i < 10; ++i) {
    device.enqueue(a, [] {}, {.modelled_time = 300us});
    device.record(event, a);
    device.wait(b, event);
    device.enqueue(b, [] {}, {.modelled_time = 200us});
    device.record(event, b);
    device.wait(a, event);
  }
  device.record(end, a);
  gate.open();
  device.synchronize(end);
  CHECK(device.elapsed(begin, end) == 5ms);
}

TEST_CASE("both directions of the link run at once; copies in one direction take turns") {
  // 10^6 bytes: 1 ms in, 2 ms out.
  HostDevice device{{.hbm_capacity = 8_MiB,
                     .host_to_device = {.gigabytes_per_second = 1, .latency = 100us},
                     .device_to_host = {.gigabytes_per_second = 0.5},
                     .no_touch = true}};
  const Stream a = device.create_stream(), b = device.create_stream(), c = device.create_stream();
  const Event start = device.create_event(EventTiming::timed), in_first = device.create_event(EventTiming::timed),
              in_second = device.create_event(EventTiming::timed), out = device.create_event(EventTiming::timed),
              within = device.create_event(EventTiming::timed);
  const auto hbm = device.allocate_device(Bytes{4'000'000});
  const auto host = device.allocate_pinned(Bytes{4'000'000});
  const auto part = [](auto memory, std::uint64_t i) { return memory.subspan(i * 1'000'000, 1'000'000); };
  Gate gate;
  device.host_func(a, gate.pass());
  device.record(start, a);
  device.wait(b, start);
  device.wait(c, start);
  device.copy_async(part(hbm, 0), part(host, 0), a);
  device.record(in_first, a);
  device.copy_async(part(hbm, 1), part(host, 1), b);
  device.record(in_second, b);
  device.copy_async(part(host, 2), part(hbm, 2), c);
  device.record(out, c);
  gate.open();
  for (const Stream* stream : {&a, &b, &c}) device.synchronize(*stream);
  const auto first = (std::min)(device.elapsed(start, in_first), device.elapsed(start, in_second));
  const auto second = (std::max)(device.elapsed(start, in_first), device.elapsed(start, in_second));
  CHECK(first == 1100us);
  CHECK(second == 2100us);
  CHECK(device.elapsed(start, out) == 2ms);

  // Within HBM there is no link.
  Gate again;
  device.host_func(a, again.pass());
  device.enqueue(a, [] {}, {.modelled_time = 1ms});
  device.record(start, a);
  device.copy_async(part(hbm, 0), part(hbm, 1), a);
  device.enqueue(a, [] {}, {.modelled_time = 1ms});
  device.record(within, a);
  again.open();
  device.synchronize(a);
  CHECK(device.elapsed(start, within) >= 1ms);
  device.free_device(hbm);
  device.free_pinned(host);
}

TEST_CASE("a copy with real bytes takes at least its time on the link") {
  HostDevice device{{.hbm_capacity = 8_MiB,
                     .host_to_device = {.gigabytes_per_second = 1, .latency = 100us},
                     .device_to_host = {.gigabytes_per_second = 0.5}}};
  const Stream stream = device.create_stream();
  const Event begin = device.create_event(EventTiming::timed), middle = device.create_event(EventTiming::timed),
              end = device.create_event(EventTiming::timed);
  const auto hbm = device.allocate_device(Bytes{1'000'000});
  const auto host = device.allocate_pinned(Bytes{1'000'000});
  device.record(begin, stream);
  device.copy_async(hbm, host, stream);
  device.record(middle, stream);
  device.copy_async(host, hbm, stream);
  device.record(end, stream);
  device.synchronize(end);
  CHECK(device.elapsed(begin, middle) >= 1100us);
  CHECK(device.elapsed(middle, end) >= 2ms);
  device.free_device(hbm);
  device.free_pinned(host);
}

TEST_CASE("the link model: one copy at a time, in order of arrival, idle time lost") {
  using Time = detail::LinkEngine::TimePoint;
  detail::LinkEngine link{{.gigabytes_per_second = 2, .latency = 10ns}};
  const Time t{1s};
  CHECK(link.reserve(t, 2000) == t + 1010ns);
  CHECK(link.reserve(t, 1000) == t + 1510ns);  // behind the first; latencies overlap
  CHECK(link.reserve(t + 5000ns, 1) == t + 5011ns);  // half a nanosecond rounds up
  CHECK(link.reserve(t + 4000ns, 0) == t + 5011ns);
  CHECK(link.reserve(t + 6000ns, std::uint64_t{1} << 40) ==
        t + 6010ns + std::chrono::nanoseconds{std::int64_t{1} << 39});
  detail::LinkEngine latency_only{{.latency = 7ns}};
  CHECK(latency_only.reserve(t, 1 << 30) == t + 7ns);
  CHECK(latency_only.reserve(t, 1 << 30) == t + 7ns);
}

TEST_CASE("elapsed refuses what has no time") {
  HostDevice device;
  const Stream stream = device.create_stream();
  const Event timed = device.create_event(EventTiming::timed), untimed = device.create_event();
  const auto elapsed = [&](const Event& a, const Event& b) { static_cast<void>(device.elapsed(a, b)); };
  CHECK_THROWS_AS(elapsed(timed, timed), InvalidArgument);  // never recorded
  device.record(timed, stream);
  device.record(untimed, stream);
  device.synchronize(stream);
  CHECK(device.elapsed(timed, timed) == 0ns);
  CHECK_THROWS_AS(elapsed(timed, untimed), InvalidArgument);
  CHECK_THROWS_AS(elapsed(untimed, timed), InvalidArgument);
  Gate gate;
  device.enqueue(stream, gate.pass());
  device.record(timed, stream);
  CHECK_THROWS_AS(elapsed(timed, timed), InvalidArgument);  // not done
}
