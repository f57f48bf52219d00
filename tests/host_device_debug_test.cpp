// HostDevice's modes: debug protection, memory that is only addresses, the floating-point environment of its work.
#include <doctest/doctest.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

using Stream = HostDevice::Stream;
using Event = HostDevice::Event;

namespace {

enum class Outcome : std::uint8_t { returned, faulted, other };

/// What becomes of a process that calls `body`. The body makes its own devices: threads do not survive a fork.
template <class Body>
Outcome in_child(Body&& body) {
  std::fflush(nullptr);  // else the child would write it again
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    std::signal(SIGSEGV, SIG_DFL);  // doctest and sanitizers have handlers
    body();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(child > 0);
  REQUIRE(::waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) return Outcome::faulted;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? Outcome::returned : Outcome::other;
}

enum class Touch : std::uint8_t { read, write };

void touch(const device_span<std::byte>& hbm, Touch how) {
  volatile std::byte* address = hbm.data() + hbm.count() - 1;
  if (how == Touch::write) *address = std::byte{1};
  static_cast<void>(*address);
}

}  // namespace

TEST_CASE("with debug protection host code that touches HBM faults, before and after stream work") {
  for (const Touch how : {Touch::read, Touch::write}) {
    const auto on_host = [how](bool protection, bool after_work) {
      HostDevice device{{.hbm_capacity = 1_MiB, .debug_protection = protection}};
      const auto hbm = device.allocate_device(Bytes{100'001});
      const Stream stream = device.create_stream();
      if (after_work) {
        device.fill_async(hbm, std::byte{1}, stream);
        device.enqueue(stream, [hbm] { touch(hbm, Touch::write); });
        device.synchronize(stream);
      }
      touch(hbm, how);
    };
    CHECK(in_child([&] { on_host(true, false); }) == Outcome::faulted);
    CHECK(in_child([&] { on_host(true, true); }) == Outcome::faulted);
    CHECK(in_child([&] { on_host(false, true); }) == Outcome::returned);  // the fault is the protection's doing

    const auto in_host_func = [how](bool protection) {
      HostDevice device{{.hbm_capacity = 1_MiB, .debug_protection = protection}};
      const auto hbm = device.allocate_device(Bytes{100'001});
      const Stream stream = device.create_stream();
      device.host_func(stream, [=] { touch(hbm, how); });
      device.synchronize(stream);
    };
    CHECK(in_child([&] { in_host_func(true); }) == Outcome::faulted);
    CHECK(in_child([&] { in_host_func(false); }) == Outcome::returned);
  }
}

TEST_CASE("with debug protection stream work does what it does without, one operation at a time") {
  HostDevice device{{.hbm_capacity = 1_MiB, .debug_protection = true}};
  const Stream a = device.create_stream(), b = device.create_stream();
  const Event event = device.create_event();
  const auto hbm = device.allocate_device(4_KiB), other = device.allocate_device(4_KiB);
  const auto host = device.allocate_pinned(4_KiB);
  for (std::uint64_t i = 0; i < host.count(); ++i) host[i] = static_cast<std::byte>(i % 251);
  device.copy_async(hbm, host, a);
  device.copy_async(other, hbm, a);
  device.fill_async(hbm, std::byte{9}, a);
  device.record(event, a);
  device.wait(b, event);
  device.enqueue(b, [=] { other.data()[1] = hbm.data()[0]; });
  device.copy_async(host, other, b);
  device.synchronize(b);
  CHECK(host[1] == std::byte{9});
  CHECK(host[4095] == static_cast<std::byte>(4095 % 251));

  std::atomic<int> inside{0}, most{0};
  const auto count = [&] {
    const int now = ++inside;
    if (now > most) most = now;
    std::this_thread::sleep_for(50us);
    --inside;
  };
  for (int i = 0; i < 50; ++i) {
    device.enqueue(a, count);
    device.host_func(b, count);
  }
  device.synchronize(a);
  device.synchronize(b);
  CHECK(most == 1);

  // A stream that waits for another, or for modelled time, keeps nobody out.
  device.enqueue(a, [] {}, {.modelled_time = 5ms});
  device.record(event, a);
  device.wait(b, event);
  device.enqueue(b, count);
  device.synchronize(b);
  device.free_device(hbm);
  device.free_device(other);
  device.free_pinned(host);
}

TEST_CASE("without touching, memory is addresses only, 2^40 bytes and more") {
  // ThreadSanitizer leaves a program 1.5 TiB of addresses, less what randomisation skips.
  const Bytes most = detail::sanitizer_watches() ? 64_GiB : 1_TiB, size = most + 1_MiB;
  constexpr Bytes capacity = 3_TiB;
  HostDevice device{{.hbm_capacity = capacity, .host_to_device = {.gigabytes_per_second = 1e6}, .no_touch = true}};
  CHECK(device.no_touch());
  const Stream stream = device.create_stream();
  const Event event = device.create_event(), begin = device.create_event(EventTiming::timed),
              end = device.create_event(EventTiming::timed);
  const auto hbm = device.allocate_device(size);
  const auto host = device.allocate_pinned(16_GiB);
  CHECK(hbm.size_bytes() == size);
  CHECK(device.memory_info().free == capacity - size);
  const auto error = thrown_by<OutOfMemory>([&] { static_cast<void>(device.allocate_device(3_TiB)); });
  REQUIRE(error);
  CHECK(error->details().largest_free == capacity - size);
  bool kernel_ran = false, host_func_ran = false;
  const auto tail = hbm.as<float>().subspan(most.count() / 4 + 5, 1000);
  CHECK(static_cast<std::uint64_t>(reinterpret_cast<std::byte*>(tail.data()) - hbm.data()) == most.count() + 20);
  Gate gate;
  device.host_func(stream, gate.pass());
  device.record(begin, stream);
  device.copy_async(hbm.subspan(0, host.count()), host, stream);
  device.enqueue(stream, [&] { kernel_ran = true; }, {.modelled_time = 1ms});
  device.record(end, stream);
  device.copy_async(host, hbm.subspan(0, host.count()), stream);
  device.copy_async(hbm.subspan(0, 8), hbm.subspan(8, 8), stream);
  device.fill_async(hbm, std::byte{1}, stream);
  device.fill_async(tail.bytes(), std::byte{1}, stream);
  device.host_func(stream, [&] { host_func_ran = true; });
  device.record(event, stream);
  gate.open();
  device.synchronize(event);
  CHECK_FALSE(kernel_ran);
  CHECK(host_func_ran);
  CHECK(device.elapsed(begin, end) == 17180ns + 1ms);  // 2^34 bytes at 10^15 bytes per second, rounded up
  device.free_device(hbm);
  device.free_pinned(host);
  CHECK(device.memory_info().free == capacity);
}

TEST_CASE("memory that is addresses only faults when touched, pinned memory included") {
  const auto touches = [](bool pinned, bool no_touch) {
    HostDevice device{{.hbm_capacity = 1_MiB, .no_touch = no_touch}};
    const auto hbm = device.allocate_device(4_KiB);
    const auto host = device.allocate_pinned(4_KiB);
    touch(pinned ? device_span<std::byte>{host.data(), host.count()} : hbm, Touch::read);
  };
  for (const bool pinned : {false, true}) {
    CHECK(in_child([&] { touches(pinned, true); }) == Outcome::faulted);
    CHECK(in_child([&] { touches(pinned, false); }) == Outcome::returned);
  }
}

#if defined(__SSE2__)
TEST_CASE("stream work keeps denormals and rounds to nearest, whatever the process has set") {
  const std::uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u | 0x4000u);  // flush results and operands to zero, round up
  std::fesetround(FE_UPWARD);
  struct Seen {
    float product = 0, operand = 0, rounded = 0;
  } seen[3];
  const auto compute = [](Seen* out) {
    volatile float smallest = (std::numeric_limits<float>::min)(), half = 0.5f, one = 1, tiny = 1e-10f;
    volatile float denormal = std::numeric_limits<float>::denorm_min();
    volatile float product = smallest * half, operand = denormal * 16777216.0f, rounded = one + tiny;
    *out = {product, operand, rounded};
  };
  Seen here, inside, outside;
  bool restored = false;
  compute(&here);  // the modes are on in this thread, and the workers inherit them
  {
    HostDevice device;
    const Stream stream = device.create_stream();
    device.enqueue(stream, [&] { compute(&seen[0]); });
    device.host_func(stream, [&] { compute(&seen[1]); });
    device.enqueue(stream, [] { _mm_setcsr(_mm_getcsr() | 0xe040u); });  // work that leaves a mess
    device.enqueue(stream, [&] { compute(&seen[2]); });
    device.synchronize(stream);
    {
      const detail::FloatEnvironment environment;
      compute(&inside);
    }
    compute(&outside);  // restored
    restored = std::fegetround() == FE_UPWARD;
  }
  std::fesetround(FE_TONEAREST);
  _mm_setcsr(before);
  CHECK(inside.product == (std::numeric_limits<float>::min)() / 2);
  CHECK(outside.product == 0);
  CHECK(outside.rounded > 1);
  CHECK(restored);
  CHECK(here.product == 0);
  CHECK(here.operand == 0);
  CHECK(here.rounded > 1);
  for (const Seen& s : seen) {
    CHECK(s.product == (std::numeric_limits<float>::min)() / 2);
    CHECK(s.operand == std::numeric_limits<float>::denorm_min() * 16777216.0f);
    CHECK(s.rounded == 1);
  }
}
#endif

TEST_CASE("no thread to be had is a failed call") {
  if (detail::sanitizer_watches()) return;  // their runtimes end the program where they get no memory themselves
  const Outcome outcome = in_child([] {
    HostDevice device{{.ring_capacity = 1}};
    std::vector<Stream> streams;
    streams.reserve(100);
    {
      const std::vector<std::byte> heap(100'000);
    }  // free again, for what the calls below take
    const rlimit no_more_memory{1, 1};  // so no stacks for threads, once those of threads that ended are in use
    ::setrlimit(RLIMIT_AS, &no_more_memory);
    try {
      for (int i = 0; i < 100; ++i) streams.push_back(device.create_stream());
    } catch (const DeviceError& error) {
      device.synchronize(streams.front());
      if (error.kind() == DeviceError::Kind::call_failed && error.api() == "create_stream") return;
    }
    ::_exit(9);
  });
  CHECK(outcome == Outcome::returned);
}

TEST_CASE("a device that goes before its streams ends the program, rather than leave them dangling") {
  const Outcome outcome = in_child([] {
    std::signal(SIGABRT, [](int) { ::_exit(7); });
    static_cast<void>(::close(STDERR_FILENO));
    auto device = std::make_unique<HostDevice>();
    const Stream stream = device->create_stream();
    device.reset();
  });
  CHECK(outcome == Outcome::other);
}
