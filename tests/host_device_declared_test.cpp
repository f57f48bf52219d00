// Debug protection with declared ranges: what work touches besides, and faults that are none of the device's business.
#include <doctest/doctest.h>

#include <csetjmp>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"

using namespace hbmoff;

using Stream = HostDevice::Stream;
using Ranges = std::vector<AccessRange>;
using Violation = DeclaredAccess::Violation;

namespace {

const std::uint64_t page = detail::memory_page_size().count();

/// Two blocks of eight memory pages.
struct Bench {
  HostDevice device{{.hbm_capacity = 1_MiB, .debug_protection = true}};
  Stream stream = device.create_stream();
  device_span<std::byte> a = device.allocate_device(Bytes{8 * page}), b = device.allocate_device(Bytes{8 * page});

  Bench() = default;
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    device.free_device(a);
    device.free_device(b);
  }

  /// What comes of a callable that declares `reads` and `writes`.
  template <class F>
  std::optional<Violation> run(const Ranges& reads, const Ranges& writes, F callable) {
    DeclaredAccess declared{.reads = reads, .writes = writes};
    bool ended = false;
    device.enqueue(stream, [&] { callable(), ended = true; }, {.declared = &declared});
    device.synchronize(stream);
    CHECK(declared.checked);
    CHECK(ended);  // a violation ends nothing
    return declared.violation;
  }

  std::byte value(const std::byte* address) {
    std::byte value{};
    device.enqueue(stream, [&] { value = *address; });
    device.synchronize(stream);
    return value;
  }
};

std::byte read(const std::byte* address) { return *static_cast<const volatile std::byte*>(address); }
void write(std::byte* address, std::byte value = std::byte{1}) { *static_cast<volatile std::byte*>(address) = value; }

void check_violation(const std::optional<Violation>& violation, const std::byte* address, bool write) {
  REQUIRE(violation);
  CHECK(violation->address == address);
  if (violation->kind_known) CHECK(violation->write == write);
#if defined(__linux__) && defined(__x86_64__)
  CHECK(violation->kind_known);
#endif
}

}  // namespace

TEST_CASE("work that keeps to what it declared violates nothing") {
  Bench bench;
  const auto a = bench.a, b = bench.b;
  // Beginning and ending within memory pages; reads and writes that share one; both blocks; whole blocks.
  const auto source = a.subspan(page / 2, 2 * page), target = a.subspan(5 * page / 2, 2 * page);
  CHECK_FALSE(bench.run({source}, {target}, [=] { std::memcpy(target.data(), source.data(), source.count()); }));
  CHECK_FALSE(bench.run({a}, {b}, [=] { std::memcpy(b.data(), a.data(), a.count()); }));
  CHECK_FALSE(bench.run({a}, {a}, [=] { std::memset(a.data(), 7, a.count()); }));
  CHECK_FALSE(bench.run({a.subspan(1, 2), b.subspan(3 * page, page)}, {a.subspan(3, 1), b.subspan(5, 1)}, [=] {
    write(a.data() + 3, read(b.data() + 4 * page - 1));
    write(b.data() + 5, read(a.data() + 2));
  }));
  // Neighbours in one memory page, in any order, and overlapping.
  CHECK_FALSE(bench.run({}, {a.subspan(20, 10), a.subspan(10, 10), a.subspan(12, 4)},
                        [=] { std::memset(a.data() + 10, 9, 20); }));
  CHECK(bench.value(a.data() + 29) == std::byte{9});
  // What may be written may be read, and pinned memory is not watched.
  const auto host = bench.device.allocate_pinned(Bytes{page});
  CHECK_FALSE(bench.run({}, {a.subspan(0, page)}, [=] { host[1] = read(a.data()); }));
  CHECK_FALSE(bench.run({host}, {host, a.subspan(0, 1)}, [=] { host[0] = std::byte{1}; }));
  bench.device.free_pinned(host);
}

TEST_CASE("a touch in memory pages that hold nothing declared is a violation, and the work goes on") {
  Bench bench;
  const auto a = bench.a, b = bench.b;
  bench.device.fill_async(b, std::byte{5}, bench.stream);
  const auto first = a.subspan(0, page);
  check_violation(bench.run({first}, {}, [=] { read(a.data() + page + 7); }), a.data() + page + 7, false);
  check_violation(bench.run({}, {first}, [=] { write(a.data() + page + 7); }), a.data() + page + 7, true);
  CHECK(bench.value(a.data() + page + 7) == std::byte{1});
  std::byte seen{};
  check_violation(bench.run({first}, {first}, [=, &seen] { seen = read(b.data() + 3); }), b.data() + 3, false);
  CHECK(seen == std::byte{5});
  // Past the block's memory pages, on both sides.
  for (int again = 0; again < 2; ++again) {
    check_violation(bench.run({a}, {a}, [=] { read(a.data() + a.count()); }), a.data() + a.count(), false);
  }
  check_violation(bench.run({a}, {a}, [=] { write(a.data() - 1); }), a.data() - 1, true);
  // Nothing declared.
  check_violation(bench.run({}, {}, [=] { read(b.data()); }), b.data(), false);
  CHECK_FALSE(bench.run({}, {}, [] {}));
  // The first touch counts, and the next run starts anew.
  const auto many = [=] {
    read(b.data() + 5 * page);
    write(b.data() + 5 * page + 1);
    write(b.data());
    write(a.data());
  };
  check_violation(bench.run({}, {}, many), b.data() + 5 * page, false);
  CHECK_FALSE(bench.run({}, {a, b}, many));
  // Another thread that works for the callable.
  check_violation(bench.run({}, {first}, [=] { std::thread{[=] { write(b.data() + 9); }}.join(); }), b.data() + 9,
                  true);
}

TEST_CASE("a write to what was declared as read is a violation") {
  Bench bench;
  const auto a = bench.a;
  check_violation(bench.run({a}, {}, [=] { write(a.data() + 3 * page + 1); }), a.data() + 3 * page + 1, true);
  CHECK(bench.value(a.data() + 3 * page + 1) == std::byte{1});
  // In a memory page that may be written for another range.
  check_violation(bench.run({a.subspan(0, 100)}, {a.subspan(100, 100)}, [=] { write(a.data() + 99); }), a.data() + 99,
                  true);
}

TEST_CASE("one byte beside a declared write is a violation, in the same memory page too") {
  Bench bench;
  const auto a = bench.a;
  const auto middle = a.subspan(page + 100, 2 * page);
  const auto fill = [=](std::uint64_t before, std::uint64_t after) {
    return [=] { std::memset(middle.data() - before, 3, middle.count() + before + after); };
  };
  const auto reset = [&] { bench.device.fill_async(a, std::byte{0}, bench.stream); };
  reset();
  CHECK_FALSE(bench.run({}, {middle}, fill(0, 0)));
  check_violation(bench.run({}, {middle}, fill(0, 1)), middle.data() + middle.count(), true);
  reset();
  check_violation(bench.run({}, {middle}, fill(1, 0)), middle.data() - 1, true);
  reset();
  check_violation(bench.run({}, {middle}, fill(2, 1)), middle.data() - 2, true);  // the lowest address
  reset();
  // Between two ranges, and where another range covers it.
  const Ranges two{a.subspan(0, 10), a.subspan(11, 10)};
  check_violation(bench.run({}, two, [=] { std::memset(a.data(), 4, 21); }), a.data() + 10, true);
  reset();
  CHECK_FALSE(bench.run({}, {a.subspan(0, 11), a.subspan(11, 10)}, [=] { std::memset(a.data(), 4, 21); }));
  // The memory page that the block does not fill.
  const auto odd = bench.device.allocate_device(Bytes{page + 5});
  CHECK_FALSE(bench.run({}, {odd}, [=] { std::memset(odd.data(), 1, odd.count()); }));
  check_violation(bench.run({}, {odd}, [=] { write(odd.data() + odd.count()); }), odd.data() + odd.count(), true);
  bench.device.free_device(odd);
}

TEST_CASE("ranges may be empty, reach beyond the block, or be anything") {
  Bench bench;
  const auto a = bench.a, b = bench.b;
  const auto all = AccessRange{nullptr, Bytes{~std::uint64_t{0}}};
  CHECK_FALSE(bench.run({all}, {all}, [=] { write(a.data(), read(b.data())); }));
  check_violation(bench.run({all}, {}, [=] { read(a.data() - 1); }), a.data() - 1, false);  // no block's memory
  const AccessRange beyond{a.data() + a.count() - 1, Bytes{~std::uint64_t{0}}};
  CHECK_FALSE(bench.run({}, {beyond}, [=] { write(a.data() + a.count() - 1); }));
  check_violation(bench.run({AccessRange{}, a.subspan(8, 0)}, {b.subspan(8, 0)}, [=] { read(b.data() + 8); }),
                  b.data() + 8, false);
}

TEST_CASE("work that throws is checked, HBM is closed again, and work that did not run is not checked") {
  Bench bench;
  const auto a = bench.a;
  CHECK_FALSE(bench.run({a}, {a}, [=] { write(a.data()); }));
  DeclaredAccess throws, dropped;
  Gate gate;
  bench.device.enqueue(bench.stream, gate.pass());
  bench.device.enqueue(bench.stream, [=] { write(a.data() + 1), throw std::runtime_error{"bad"}; },
                       {.declared = &throws});
  bench.device.enqueue(bench.stream, [=] { write(a.data() + 1); }, {.declared = &dropped});
  gate.open();
  CHECK_THROWS_AS(bench.device.synchronize(bench.stream), DeviceError);
  CHECK(throws.checked);
  check_violation(throws.violation, a.data() + 1, true);
  CHECK_FALSE(dropped.checked);
}

TEST_CASE("without debug protection declarations are left alone") {
  for (const bool no_touch : {false, true}) {
    HostDevice device{{.hbm_capacity = 1_MiB, .debug_protection = no_touch, .no_touch = no_touch}};
    const Stream stream = device.create_stream();
    const auto hbm = device.allocate_device(4_KiB);
    DeclaredAccess declared;
    device.enqueue(stream, [=] { write(hbm.data()); }, {.declared = &declared});
    device.synchronize(stream);
    CHECK_FALSE(declared.checked);
    CHECK_FALSE(declared.violation);
  }
}

TEST_CASE("callables of the full size can be declared") {
  struct Large {
    std::byte* target;
    std::byte rest[HostDevice::max_callable_bytes - sizeof(std::byte*)];
    void operator()() const { write(target, rest[0]); }
  };
  static_assert(sizeof(Large) == HostDevice::max_callable_bytes && HostDevice::max_callable_bytes == 352);
  Bench bench;
  CHECK_FALSE(bench.run({}, {bench.a}, [=, a = bench.a] { write(a.data()); }));
  DeclaredAccess declared;
  bench.device.enqueue(bench.stream, Large{bench.a.data(), {std::byte{6}}}, {.declared = &declared});
  bench.device.synchronize(bench.stream);
  check_violation(declared.violation, bench.a.data(), true);
  CHECK(bench.value(bench.a.data()) == std::byte{6});
}

namespace {

sigjmp_buf back;
volatile std::sig_atomic_t caught = 0;
void* volatile fault_address = nullptr;

void jump_back(int, siginfo_t* info, void*) {
  caught = caught + 1;
  fault_address = info->si_addr;
  siglongjmp(back, 1);
}
void jump_back_plain(int) {
  caught = caught + 1;
  siglongjmp(back, 1);
}

/// Restores the process's handler of faults.
class Handler {
 public:
  explicit Handler(struct sigaction action) { ::sigaction(SIGSEGV, &action, &before_); }
  ~Handler() { ::sigaction(SIGSEGV, &before_, nullptr); }
  Handler(const Handler&) = delete;
  Handler& operator=(const Handler&) = delete;

 private:
  struct sigaction before_{};
};

int faults_caught_at(const std::byte* address) {
  const int before = caught;
  if (sigsetjmp(back, 1) == 0) static_cast<void>(read(address));
  return caught - before;
}

}  // namespace

TEST_CASE("a fault that is not the device's reaches the handler before, which is back when the last device is gone") {
  struct Mapping {
    std::byte* address = detail::map_memory(Bytes{page}, detail::MemoryUse::reserve);
    ~Mapping() { detail::unmap_memory(address, Bytes{page}); }
  } closed;
  for (const bool with_info : {true, false}) {
    struct sigaction action{};
    if (with_info) {
      action.sa_sigaction = &jump_back;
      action.sa_flags = SA_SIGINFO;
    } else {
      action.sa_handler = &jump_back_plain;
    }
    const Handler handler{action};
    {
      auto first = std::make_unique<Bench>();
      auto second = std::make_unique<Bench>();
      CHECK(faults_caught_at(closed.address) == 1);
      if (with_info) CHECK(fault_address == closed.address);
      CHECK(faults_caught_at(closed.address) == 1);
      CHECK(faults_caught_at(first->a.data()) == 1);  // the host touches HBM: nobody's work
      first.reset();
      CHECK(faults_caught_at(second->b.data()) == 1);
      check_violation(second->run({}, {}, [&] { read(second->a.data()); }), second->a.data(), false);
      CHECK(faults_caught_at(second->a.data()) == 1);  // closed again, what the violation had opened
    }
    struct sigaction now{};
    ::sigaction(SIGSEGV, nullptr, &now);
    if (with_info) {
      CHECK((now.sa_sigaction == &jump_back));
    } else {
      CHECK((now.sa_handler == &jump_back_plain));
    }
    CHECK(faults_caught_at(closed.address) == 1);
  }
}

TEST_CASE("a handler installed over the device's stays, and the device's below it serves on") {
  struct sigaction action{};
  action.sa_handler = &jump_back_plain;
  const Handler below{action};
  struct sigaction now{};
  {
    auto bench = std::make_unique<Bench>();
    const Handler above{action};
    bench.reset();
    ::sigaction(SIGSEGV, nullptr, &now);
    CHECK((now.sa_handler == &jump_back_plain));
  }
  // Left behind, it is found by the next device, and leaves with it.
  Bench{}.run({}, {}, [] {});
  {
    Bench bench;
    check_violation(bench.run({}, {}, [&] { read(bench.a.data()); }), bench.a.data(), false);
    CHECK(faults_caught_at(bench.a.data()) == 1);
  }
  ::sigaction(SIGSEGV, nullptr, &now);
  CHECK((now.sa_handler == &jump_back_plain));
}

TEST_CASE("signals that others send, and faults that nobody handles, do what they do without the device") {
  // How a process with a debug device ends that calls `body`: the signal, or 0.
  const auto ends_by = [](void (*disposition)(int), auto body) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      const rlimit no_core{0, 0};
      ::setrlimit(RLIMIT_CORE, &no_core);
      std::signal(SIGSEGV, disposition);
      Bench bench;
      body(bench);
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  };
  const auto sends = [](Bench&) { ::kill(::getpid(), SIGSEGV); };
  const auto touches = [](Bench& bench) { read(bench.a.data()); };
  CHECK(ends_by(SIG_DFL, sends) == SIGSEGV);
  CHECK(ends_by(SIG_IGN, sends) == 0);
  CHECK(ends_by(SIG_DFL, touches) == SIGSEGV);
  CHECK(ends_by(SIG_IGN, touches) == SIGSEGV);
}
