// CudaDevice: what the runtime is asked to do, and what becomes of what it answers.
#include <doctest/doctest.h>

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include "gate.hpp"
#include "hbmoff/cuda.hpp"

using namespace hbmoff;
using namespace std::chrono_literals;

namespace {

using Stream = CudaDevice::Stream;
using Event = CudaDevice::Event;

template <class E, class F>
std::optional<E> error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error;
  }
  return std::nullopt;
}

/// Keeps a stream from going on until it is opened; at its end at the latest.
class Held {
 public:
  Held(CudaDevice& device, CudaDevice::StreamRef stream) {
    device.host_func(stream, [open = &open_] {
      while (!open->load()) std::this_thread::sleep_for(100us);
    });
  }
  ~Held() { open(); }
  void open() { open_.store(true); }

 private:
  std::atomic<bool> open_ = false;
};

struct Bench {
  CudaDevice device;
  Stream a = device.create_stream("a"), b = device.create_stream("b");
  device_span<std::byte> hbm = device.allocate_device(4_KiB);
  pinned_span<std::byte> host = device.allocate_pinned(4_KiB);
  ~Bench() {
    device.free_device(hbm);
    device.free_pinned(host);
  }
};

}  // namespace

TEST_CASE("bytes go there and back; sizes 0, 1 and those that differ") {
  Bench t;
  for (std::uint64_t i = 0; i < 4096; ++i) t.host[i] = static_cast<std::byte>(i * 7);
  t.device.copy_async(t.hbm, t.host, t.a);
  t.device.fill_async(t.hbm.subspan(1, 1), std::byte{0xee}, t.a);
  t.device.copy_async(t.hbm.subspan(8, 8), t.hbm.subspan(0, 8), t.a);
  t.device.copy_async(t.hbm.subspan(100, 0), t.host.subspan(0, 0), t.a);
  t.device.fill_async(t.hbm.subspan(100, 0), std::byte{1}, t.a);
  t.device.copy_async(t.host, t.hbm, t.a);
  t.device.synchronize(CudaDevice::StreamRef{t.a});
  CHECK(t.host[1] == std::byte{0xee});
  CHECK(t.host[9] == std::byte{0xee});
  CHECK(t.host[10] == std::byte{14});
  CHECK(t.host[100] == static_cast<std::byte>(700 % 256));
  CHECK_THROWS_AS(t.device.copy_async(t.hbm, t.host.subspan(0, 5), t.a), InvalidArgument);
  CHECK(t.device.allocate_device(0_B).empty());
  CHECK(t.device.allocate_pinned(0_B).empty());
  t.device.free_device({});
  t.device.free_pinned({});
}

TEST_CASE("order is made of events: none before its record, the latest at the time of the call, chains") {
  Bench t;
  const Event e = t.device.create_event(), done = t.device.create_event();
  CHECK(t.device.query(e));  // never recorded
  t.device.wait(t.b, e);
  t.device.synchronize(CudaDevice::EventRef{e});
  Held held{t.device, t.a};
  t.device.fill_async(t.hbm, std::byte{1}, t.a);
  t.device.record(e, t.a);
  CHECK_FALSE(t.device.query(e));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  t.device.wait(t.b, e);
  t.device.copy_async(t.host, t.hbm, t.b);
  t.device.record(done, t.b);
  CHECK_FALSE(t.device.query(done));
  held.open();
  t.device.synchronize(CudaDevice::EventRef{done});
  CHECK(t.device.query(e));
  CHECK(t.host[4095] == std::byte{1});
}

TEST_CASE("time between events") {
  Bench t;
  const Event begin = t.device.create_event(EventTiming::timed), end = t.device.create_event(EventTiming::timed);
  const Event untimed = t.device.create_event();
  CHECK_THROWS_AS(static_cast<void>(t.device.elapsed(begin, end)), InvalidArgument);
  t.device.record(begin, t.a);
  t.device.host_func(t.a, [] { std::this_thread::sleep_for(2ms); });
  t.device.record(end, t.a);
  t.device.record(untimed, t.a);
  t.device.synchronize(CudaDevice::StreamRef{t.a});
  CHECK(t.device.elapsed(begin, end) >= 2ms);
  CHECK(t.device.elapsed(end, begin) <= -2ms);
  CHECK_THROWS_AS(static_cast<void>(t.device.elapsed(begin, untimed)), InvalidArgument);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("the caller's streams are adopted, the default streams included, and not destroyed") {
  Bench t;
  cudaStream_t mine = nullptr;
  REQUIRE(cudaStreamCreate(&mine) == cudaSuccess);
  const CudaDevice::StreamRef adopted = cuda_stream(mine);
  CHECK(adopted == CudaDevice::StreamRef{mine});
  CHECK(adopted.get() == mine);
  CHECK_FALSE(adopted == CudaDevice::StreamRef{t.a});
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
  CHECK(cuda_stream(nullptr) == cuda_stream(cudaStreamPerThread));
#else
  CHECK(cuda_stream(nullptr) == cuda_stream(cudaStreamLegacy));
#endif
  CHECK_FALSE(cuda_stream(cudaStreamPerThread) == cuda_stream(cudaStreamLegacy));
  CHECK_THROWS_AS(CudaDevice::StreamRef{static_cast<cudaStream_t>(nullptr)}, InvalidArgument);
  for (const CudaDevice::StreamRef stream : {adopted, cuda_stream(nullptr), cuda_stream(cudaStreamPerThread)}) {
    const Event e = t.device.create_event();
    Held held{t.device, stream};
    t.device.fill_async(t.hbm, std::byte{5}, stream);
    t.device.record(e, stream);
    t.device.wait(t.b, e);
    t.device.copy_async(t.host, t.hbm, t.b);
    CHECK_FALSE(t.device.query(e));
    held.open();
    t.device.synchronize(CudaDevice::StreamRef{t.b});
    CHECK(t.host[17] == std::byte{5});
    t.device.fill_async(t.hbm, std::byte{6}, t.b);
    t.device.synchronize(CudaDevice::StreamRef{t.b});
  }
  REQUIRE(cudaStreamDestroy(mine) == cudaSuccess);
}

TEST_CASE("owners move, end early, and say so when they are empty") {
  Bench t;
  Stream stream = t.device.create_stream();
  Event event = t.device.create_event();
  const CudaDevice::StreamRef view = stream;
  Stream moved = std::move(stream);
  CHECK(CudaDevice::StreamRef{moved} == view);
  CHECK(stream.empty());
  CHECK_THROWS_AS(static_cast<void>(CudaDevice::StreamRef{stream}), InvalidArgument);
  Event moved_event = std::move(event);
  CHECK_THROWS_AS(t.device.record(event, moved), InvalidArgument);
  std::optional<Held> held{std::in_place, t.device, moved};
  t.device.record(moved_event, moved);
  t.device.wait(t.a, moved_event);
  moved_event = t.device.create_event();  // the one before ends with its record pending
  held->open();
  t.device.synchronize(CudaDevice::StreamRef{t.a});
  moved = t.device.create_stream();
  t.device.synchronize(CudaDevice::StreamRef{moved});
}

TEST_CASE("a stream that got the handle of another is another") {
  Bench t;
  std::vector<CudaDevice::StreamRef> ended;
  for (int i = 0; i < 50; ++i) {
    const Stream stream = t.device.create_stream();
    for (const CudaDevice::StreamRef& before : ended) REQUIRE_FALSE(before == CudaDevice::StreamRef{stream});
    ended.push_back(stream);
  }
}

TEST_CASE("a status of the caller's own: told once, then forgotten") {
  Bench t;
  const auto error = error_of<CudaError>([&] { t.device.check(cudaEventRecord(nullptr, nullptr), "my launch"); });
  REQUIRE(error);
  CHECK(error->kind() == DeviceError::Kind::call_failed);
  CHECK(error->api() == "my launch");
  CHECK(error->code() != cudaSuccess);
  CHECK(std::string{error->what()}.find("cuda_device_test.cpp") != std::string::npos);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK_FALSE(t.device.lost());
  t.device.fill_async(t.hbm, std::byte{1}, t.a);
  t.device.synchronize(CudaDevice::StreamRef{t.a});
}

TEST_CASE("what a host function throws is the loss of the context") {
  Bench t;
  t.device.host_func(t.a, [] { throw 1; });
  CHECK(cudaStreamSynchronize(CudaDevice::StreamRef{t.a}.get()) == cudaSuccess);
  CHECK(t.device.lost());
  const auto error = error_of<CudaError>([&] { t.device.fill_async(t.hbm, std::byte{1}, t.a); });
  REQUIRE(error);
  CHECK(error->context_lost());
}

TEST_CASE("under capture: work becomes a graph, what blocks is refused") {
  Bench t;
  const CudaDevice::StreamRef a = t.a, b = t.b;
  const Event fork = t.device.create_event(), join = t.device.create_event();
  REQUIRE(cudaStreamBeginCapture(a.get(), cudaStreamCaptureModeRelaxed) == cudaSuccess);
  t.device.fill_async(t.hbm, std::byte{3}, a);
  t.device.record(fork, a);
  t.device.wait(b, fork);
  t.device.copy_async(t.host, t.hbm, b);
  t.device.record(join, b);
  t.device.wait(a, join);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(a.get(), &graph) == cudaSuccess);
  cudaGraphExec_t run = nullptr;
  REQUIRE(cudaGraphInstantiate(&run, graph, 0) == cudaSuccess);
  CHECK(t.host[0] == std::byte{0});
  REQUIRE(cudaGraphLaunch(run, a.get()) == cudaSuccess);
  t.device.synchronize(a);
  CHECK(t.host[0] == std::byte{3});
  CHECK(cudaGraphExecDestroy(run) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);

  REQUIRE(cudaStreamBeginCapture(a.get(), cudaStreamCaptureModeRelaxed) == cudaSuccess);
  const auto error = error_of<CudaError>([&] { t.device.synchronize(a); });
  REQUIRE(error);
  CHECK(error->code() == cudaErrorStreamCaptureUnsupported);
  CHECK_FALSE(error->context_lost());
  static_cast<void>(cudaStreamEndCapture(a.get(), &graph));
  static_cast<void>(cudaGetLastError());
  t.device.synchronize(a);
}

TEST_CASE("a device that there is not") {
  const auto error = error_of<CudaError>([] { CudaDevice{99}; });
  REQUIRE(error);
  CHECK(error->code() == cudaErrorInvalidDevice);
  CHECK_THROWS_AS(CudaDevice{-1}, CudaError);
}

TEST_CASE("pinned memory is zeroed and whole, whatever its size") {
  CudaDevice device;
  for (const Bytes size : {1_B, 4095_B, 4097_B, 3_MiB + 1_B, 97_MiB}) {
    const auto memory = device.allocate_pinned(size);
    REQUIRE(memory.size_bytes() == size);
    CHECK(memory[0] == std::byte{0});
    CHECK(memory[size.count() - 1] == std::byte{0});
    cudaPointerAttributes attributes{};
    REQUIRE(cudaPointerGetAttributes(&attributes, memory.data() + size.count() - 1) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeHost);
    device.free_pinned(memory);
  }
  CudaDevice combining{CudaDeviceOptions{.write_combined = true}};
  const auto memory = combining.allocate_pinned(1_MiB);
  memory[5] = std::byte{1};
  combining.free_pinned(memory);
}

TEST_CASE("host memory of the caller's is pinned for a time, and an arena hands it out") {
  CudaDevice device;
  const Stream stream = device.create_stream();
  const auto hbm = device.allocate_device(64_KiB);
  std::vector<std::byte> memory(200 * 1024);
  const auto first = (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256) % 256;
  {
    auto pinned = device.register_pinned(memory.data() + first, 64_KiB);
    CHECK(pinned.memory().data() == memory.data() + first);
    const auto again =
        error_of<CudaError>([&] { static_cast<void>(device.register_pinned(memory.data() + first, 64_KiB)); });
    REQUIRE(again);
    CHECK(again->code() == cudaErrorHostMemoryAlreadyRegistered);
    CHECK_FALSE(device.lost());
    CudaDevice::PinnedRegistration moved = std::move(pinned);
    CHECK(pinned.memory().empty());  // NOLINT(bugprone-use-after-move)
    PinnedHostArena<CudaDevice> arena{device, moved.memory()};
    auto buffer = arena.allocate(1000_B, "of the caller's", Role::other, stream);
    CHECK(buffer.bytes().data() >= memory.data());
    device.fill_async(hbm, std::byte{7}, stream);
    device.copy_async(buffer.bytes(), hbm.subspan(0, 1000), stream);
    device.synchronize(CudaDevice::StreamRef{stream});
    CHECK(buffer.bytes()[999] == std::byte{7});
  }
  static_cast<void>(device.register_pinned(memory.data() + first, 64_KiB));  // it was given back
  CHECK(device.register_pinned(nullptr, Bytes{}).memory().empty());
  device.free_device(hbm);
}

TEST_CASE("device memory from a pool of the caller's") {
  int supported = 0;
  REQUIRE(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0) == cudaSuccess);
  if (supported == 0) return;
  cudaMemPool_t pool = nullptr;
  REQUIRE(cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess);
  CudaDevice device{CudaDeviceOptions{.memory_pool = pool}};
  const Stream stream = device.create_stream();
  {
    HbmArena<CudaDevice> arena{device, 1_MiB};
    auto buffer = arena.allocate(10_KiB, "of a pool", Role::other, stream);
    device.fill_async(buffer.bytes(), std::byte{3}, stream);
  }
  const auto memory = device.allocate_device(1_KiB);
  CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % 256 == 0);
  device.free_device(memory);
  CHECK(device.allocate_device(Bytes{}).empty());
}

TEST_SUITE("standin") {
  TEST_CASE("two devices: each call is for its own, and the current one stays") {
    int count = 0;
    REQUIRE(cudaGetDeviceCount(&count) == cudaSuccess);
    REQUIRE(count == 2);
    CudaDevice first{0}, second{1};
    for (const int current : {0, 1}) {
      REQUIRE(cudaSetDevice(current) == cudaSuccess);
      const auto unchanged = [&] {
        int now = -1;
        return cudaGetDevice(&now) == cudaSuccess && now == current;
      };
      for (CudaDevice* device : {&first, &second}) {
        const Stream stream = device->create_stream();
        CHECK(unchanged());
        const Event event = device->create_event();
        CHECK(unchanged());
        const auto memory = device->allocate_device(1_KiB);
        CHECK(unchanged());
        cudaPointerAttributes attributes{};
        REQUIRE(cudaPointerGetAttributes(&attributes, memory.data()) == cudaSuccess);
        CHECK(attributes.device == device->ordinal());
        const auto host = device->allocate_pinned(1_KiB);
        CHECK(unchanged());
        device->fill_async(memory, std::byte{9}, stream);
        device->copy_async(host, memory, stream);
        device->record(event, stream);
        device->synchronize(CudaDevice::EventRef{event});
        CHECK(host[1023] == std::byte{9});
        static_cast<void>(device->memory_info());
        device->free_pinned(host);
        device->free_device(memory);
        CHECK(unchanged());
      }
    }
  }

  TEST_CASE("memory that is not there is OutOfMemory, and nothing is lost") {
    CudaDevice device;
    const MemoryInfo before = device.memory_info();
    const auto hbm = error_of<OutOfMemory>([&] { static_cast<void>(device.allocate_device(1_GiB)); });
    REQUIRE(hbm);
    CHECK(hbm->details().tier == Tier::hbm);
    CHECK(hbm->details().requested == 1_GiB);
    CHECK(hbm->details().free == before.free);
    CHECK(hbm->details().capacity == before.total);
    const auto host = error_of<OutOfMemory>([&] { static_cast<void>(device.allocate_pinned(100_MiB)); });
    REQUIRE(host);
    CHECK(host->details().tier == Tier::pinned_host);
    CHECK(host->details().remedy.find("cgroup") != std::string::npos);
    CHECK(device.memory_info().free == before.free);
    CHECK(cudaGetLastError() == cudaSuccess);
    device.free_device(device.allocate_device(1_MiB));
    device.free_pinned(device.allocate_pinned(1_MiB));
  }

  TEST_CASE("a call that fails tells once, and the next one goes on") {
    Bench t;
    const Event e = t.device.create_event();
    t.device.record(e, t.a);
    const auto error = error_of<CudaError>([&] { t.device.record(e, t.a); });
    REQUIRE(error);
    CHECK(error->kind() == DeviceError::Kind::call_failed);
    CHECK(error->api() == "cudaEventRecord");
    CHECK(error->code() == cudaErrorInvalidValue);
    CHECK_FALSE(t.device.lost());
    CHECK(cudaGetLastError() == cudaSuccess);
    t.device.record(e, t.a);
    t.device.synchronize(CudaDevice::EventRef{e});
  }

  TEST_CASE("work that fails loses the context: every call says so, and everything can still end") {
    Bench t;
    const Event e = t.device.create_event();
    t.device.copy_async(t.hbm, t.host, t.a);
    CHECK_THROWS_AS(t.device.copy_async(t.hbm, t.host, t.a), CudaError);
    CHECK(t.device.lost());
    for (int i = 0; i < 2; ++i) {
      const auto error = error_of<CudaError>([&] { t.device.synchronize(CudaDevice::StreamRef{t.a}); });
      REQUIRE(error);
      CHECK(error->context_lost());
      CHECK(error->code() == cudaErrorIllegalAddress);
    }
    CHECK_THROWS_AS(static_cast<void>(t.device.query(e)), CudaError);
    CHECK_THROWS_AS(static_cast<void>(t.device.create_stream()), CudaError);
    CHECK_THROWS_AS(static_cast<void>(t.device.allocate_device(1_KiB)), CudaError);
    CHECK_THROWS_AS(t.device.host_func(t.a, [] {}), CudaError);
  }
}
