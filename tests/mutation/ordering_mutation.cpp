// Leaves out every call of the library that orders work, one at a time, and expects CheckedDevice to report it.
//
// Built against a copy of the headers in which every such call can be left out (ordering_sites.py). All work runs at once
// and in the order of the calls (ImmediateDevice), so no report can come from timing, and no run from luck.
#include <cstddef>

namespace ordering {
inline int left_out = -1;
inline bool (*applies)() = nullptr;  ///< whether it is left out now; null: always
inline int early = -1;  ///< a record that is made too early
inline std::size_t early_by = 1;  ///< so many pieces of work or waits before the record
inline bool swap = false;  ///< the write-back comes before the release that it must wait for
inline int reached[256] = {};  ///< while it applies
inline int site = -1;  ///< the last one
inline bool applies_now() { return applies == nullptr || applies(); }
inline bool kept(int number) {
  site = number;
  if (!applies_now()) return true;
  ++reached[number];
  return number != left_out;
}
inline bool swapped() { return swap && applies_now(); }
}  // namespace ordering

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/hbmoff.hpp"
#include "ordering_sites.hpp"
#include "support/immediate_device.hpp"

using namespace hbmoff;

namespace {

using Base = CheckedDevice<ImmediateDevice>;
/// Notes what it finds and goes on. A record at `ordering::early` captures what was on the stream before the last
/// `early_by` pieces of work and waits: such an event stands in for the real one from then on.
class Checked : public Base {
 public:
  explicit Checked(std::vector<CheckReport>& reports) : Base{{}, {.reports = &reports, .throws = false}} {}

  template <class To, class From>
  void copy_async(To to, From from, StreamRef stream, At at = At::current()) {
    before_work(stream);
    Base::copy_async(to, from, stream, at);
  }
  void fill_async(device_span<std::byte> memory, std::byte value, StreamRef stream, At at = At::current()) {
    before_work(stream);
    Base::fill_async(memory, value, stream, at);
  }
  template <class F>
  void enqueue(StreamRef stream, F&& f, LaunchOptions options = {}, At at = At::current()) {
    before_work(stream);
    Base::enqueue(stream, std::forward<F>(f), options, at);
  }
  template <class F>
  void host_func(StreamRef stream, F&& f, At at = At::current()) {
    before_work(stream);
    Base::host_func(stream, std::forward<F>(f), at);
  }
  void record(EventRef event, StreamRef stream, At at = At::current()) {
    const auto stands_in = find(event);
    if (stands_in != early_.end()) early_.erase(stands_in);
    if (ordering::early == ordering::site && ordering::applies_now()) {
      for (auto& [of, shadows] : shadows_) {
        if (of != stream) continue;
        if (shadows.empty()) shadows.push_back(create_event());  // no work since the last record
        early_.emplace_back(event, std::move(shadows.front()));
        shadows.erase(shadows.begin());
      }
    }
    Base::record(event, stream, at);
  }
  void wait(StreamRef stream, EventRef event, At at = At::current()) {
    before_work(stream);
    Base::wait(stream, really(event), at);
  }
  [[nodiscard]] bool query(EventRef event, At at = At::current()) { return Base::query(really(event), at); }
  void synchronize(EventRef event, At at = At::current()) { Base::synchronize(really(event), at); }
  void synchronize(StreamRef stream, At at = At::current()) { Base::synchronize(stream, at); }

  void forget_early() {
    early_.clear();
    shadows_.clear();
  }

 private:
  using Early = std::vector<std::pair<EventRef, Event>>;
  Early::iterator find(EventRef event) {
    return std::find_if(early_.begin(), early_.end(), [&](const auto& entry) { return entry.first == event; });
  }
  EventRef really(EventRef event) {
    const auto stands_in = find(event);
    return stands_in == early_.end() ? event : EventRef{stands_in->second};
  }
  void before_work(StreamRef stream) {
    if (ordering::early < 0) return;
    auto of = std::find_if(shadows_.begin(), shadows_.end(), [&](const auto& entry) { return entry.first == stream; });
    if (of == shadows_.end()) of = shadows_.emplace(of, stream, std::vector<Event>{});
    auto& shadows = of->second;
    if (shadows.size() >= ordering::early_by) shadows.erase(shadows.begin());
    shadows.push_back(create_event());
    Base::record(shadows.back(), stream);
  }

  std::vector<std::pair<StreamRef, std::vector<Event>>> shadows_;  ///< the newest last
  Early early_;
};
using Stream = Checked::StreamRef;

constexpr Bytes capacity = 512_KiB;

/// A device with arenas and streams.
struct Bench {
  std::vector<CheckReport>& reports;
  Checked device{reports};
  Checked::Stream before{device.create_stream("before")}, before_pinned{device.create_stream("before, pinned")},
      a{device.create_stream("a")}, b{device.create_stream("b")}, c{device.create_stream("c")};
  HbmArena<Checked> hbm{device, capacity, {.max_blocks = 4096, .fill_freed = true}};
  PinnedHostArena<Checked> host{device, capacity, {.max_blocks = 4096, .fill_freed = true}};
  bool fill_evicted = true;
  device_span<std::byte> blank{device.allocate_device(capacity)};  ///< ordered before everything

  explicit Bench(std::vector<CheckReport>& sink) : reports{sink} {
    device.fill_async(blank, std::byte{}, a);
    device.synchronize(Stream{a});
  }
  ~Bench() {
    device.forget_early();
    for (const Stream stream : {Stream{before_pinned}, Stream{a}, Stream{b}, Stream{c}}) device.synchronize(stream);
    device.free_device(blank);
  }

  /// Takes all memory that is free, HBM for work on one stream and pinned memory on another, and gives it back in their
  /// order. What comes behind that is not ordered after it; what came before and was not ordered is found.
  void use_all(Stream stream, Stream pinned) {
    std::vector<HbmArena<Checked>::Buffer> of_hbm;
    std::vector<PinnedHostArena<Checked>::Buffer> of_host;
    for (int i = 0; i < 6; ++i) {
      of_hbm.push_back(hbm.allocate(hbm.usage().largest_free / 2, "HBM taken before", Role::other, stream));
      of_host.push_back(host.allocate(host.usage().largest_free / 2, "memory taken before", Role::other, pinned));
    }
    of_hbm.push_back(hbm.allocate(hbm.usage().largest_free, "HBM taken before", Role::other, stream));
    of_host.push_back(host.allocate(host.usage().largest_free, "memory taken before", Role::other, pinned));
    // In one launch each, so that nobody can come behind a part of it.
    const auto write_all = [&](const auto& buffers, Stream on) {
      std::vector<AccessRange> ranges;
      for (const auto& buffer : buffers) {
        if (buffer.size() != Bytes{}) ranges.emplace_back(buffer.bytes());
      }
      device.note_access(on, "use all", {}, ranges);
      device.enqueue(on, [ranges] {
        for (const AccessRange& range : ranges) {
          std::memset(const_cast<void*>(static_cast<const void*>(range.data)), 1, range.bytes.count());
        }
      });
    };
    write_all(of_hbm, stream);
    write_all(of_host, pinned);
    while (!of_hbm.empty()) of_hbm.pop_back();  // the largest at last: what is taken next comes from it
    while (!of_host.empty()) of_host.pop_back();
  }

  void write(Stream stream, device_span<std::byte> memory, const char* label = "write") {
    device.note_access(stream, label, {}, {memory});
    device.enqueue(stream, [=] { std::memset(memory.data(), 1, memory.count()); }, {.name = label});
  }
  void read(Stream stream, device_span<std::byte> memory, const char* label = "read") {
    device.note_access(stream, label, {memory}, {});
    device.enqueue(stream, [] {}, {.name = label});
  }
  void update(Stream stream, device_span<std::byte> memory, const char* label = "update") {
    device.note_access(stream, label, {memory}, {memory});
    device.enqueue(stream, [] {}, {.name = label});
  }
  void order(Stream later, Stream earlier) {
    const auto event = device.create_event();
    device.record(event, earlier);
    device.wait(later, event);
  }
};

enum class Pool { own, shared };

// Does what a user does after an error: ends what was begun.
template <class Optimizer>
void finish(Optimizer& optimizer, Stream stream) {
  for (int i = 0; i < 3 && optimizer.unfinished(); ++i) {
    try {
      optimizer.resume(stream);
    } catch (const DeviceError&) {
    }
  }
}
// Makes a call again that failed and had no effect.
template <class F>
void again(F&& f) {
  try {
    f();
  } catch (const DeviceError&) {
    f();
  }
}

enum class AfterFailure { resume, give_up };

template <std::uint32_t Depth, class Policy>
void optimizer_run(Bench& bench, Policy policy, Pool pool_kind, AfterFailure after_failure = AfterFailure::resume) {
  auto& [reports, device, before, before_pinned, a, b, c, hbm, host, fill_evicted, blank] = bench;
  std::optional<SlotPool<Checked>> pool;
  const Stream streams[] = {a, b, a, c};
  std::vector<HbmArena<Checked>::Buffer> weights, gradients[4];
  constexpr std::uint64_t count = 300;
  constexpr std::uint32_t tensors = 6;
  again([&] {
    weights.clear();
    for (auto& g : gradients) g.clear();
    for (std::uint32_t t = 0; t < tensors; ++t) {
      weights.push_back(hbm.allocate(Bytes{count * (t % 2 == 0 ? 4 : 2)}, "weight", Role::weight, a));
      bench.write(a, weights.back().bytes(), "write weights");
      for (std::uint32_t s = 0; s < 4; ++s) {
        gradients[s].push_back(hbm.allocate(Bytes{count * 4}, "gradient", Role::gradient, streams[s]));
        bench.write(streams[s], gradients[s].back().bytes(), "write gradient");
      }
    }
  });
  bench.use_all(before, before_pinned);
  {
    using Optimizer = PagedAdamW<Checked, Policy, Depth>;
    const PagedAdamWOptions options{.page = 768_B, .fill_evicted = fill_evicted};
    std::optional<Optimizer> optimizer;
    again([&] {
      optimizer.reset();
      pool.reset();
      if constexpr (!OffloadPolicyTraits<Policy>::state_always_resident) {
        if (pool_kind == Pool::shared) pool.emplace(hbm, 768_B, Depth + 1, Role::other, before);
      }
      if constexpr (!OffloadPolicyTraits<Policy>::state_always_resident) {
        if (pool) optimizer.emplace(hbm, host, *pool, policy, options);
      }
      if (!optimizer) optimizer.emplace(hbm, host, policy, options);
    });
    for (std::uint32_t t = 0; t < tensors; ++t) {
      const std::string name = "t" + std::to_string(t);
      const auto gradient = gradients[0][t].template as<float>();
      if (t % 2 == 0) {
        optimizer->add({.name = name, .dtype = DType::fp32, .count = count}, weights[t].template as<float>(), gradient);
      } else {
        optimizer->add({.name = name, .dtype = DType::bf16, .count = count}, weights[t].template as<bf16>(), gradient);
      }
    }
    for (std::uint32_t s = 0; s < 4; ++s) {
      for (std::uint32_t t = 0; t < tensors && s != 0; ++t) {
        optimizer->set_gradient(static_cast<TensorId>(t),
                                device_span<const float>{gradients[s][t].template as<float>()});
      }
      std::uint64_t number = s + 1;
      try {
        number = optimizer->step(streams[s], {.max_norm = 1.0f, .skip_nonfinite = true});
      } catch (const DeviceError&) {
        if (after_failure == AfterFailure::give_up) {
          // The optimizer's own memory is put in order by its destructor alone; weights and gradients are the user's.
          optimizer.reset();
          for (const Stream stream : {Stream{a}, Stream{b}, Stream{c}}) device.synchronize(stream);
          return;
        }
        if (!optimizer->unfinished()) again([&] { number = optimizer->step(streams[s], {.max_norm = 1.0f}); });
        finish(*optimizer, streams[s]);
      }
      if (s == 1) again([&] { static_cast<void>(optimizer->report(number)); });
      if (s == 1) {
        std::vector<float> values(count);
        again([&] { optimizer->read("t0", OptimizerState::first_moment, values); });
        again([&] { static_cast<void>(optimizer->applied_steps("t0")); });
        again([&] { optimizer->write("t1", OptimizerState::master_weight, values); });
        again([&] { optimizer->write("t0", OptimizerState::second_moment, values); });
      }
      if (s == 0) again([&] { optimizer->set_applied_steps("t1", 7); });
      if (s == 2) {
        try {
          optimizer->refresh(streams[s], Moments::keep);
        } catch (const DeviceError&) {
          if (!optimizer->unfinished()) optimizer->refresh(streams[s], Moments::keep);
          finish(*optimizer, streams[s]);
        }
      }
    }
  }
  pool.reset();
  again([&] { bench.order(a, c); });  // the weights' own order: the last step ran on c
  again([&] { bench.order(b, c); });
  for (auto& buffer : weights)
    again([&] {
      if (buffer) buffer.free(a);
    });
  for (std::uint32_t s = 0; s < 4; ++s) {
    for (auto& buffer : gradients[s])
      again([&] {
        if (buffer) buffer.free(streams[s]);
      });
  }
}

BundleLayout small_layout() {
  return {{{.info = {.name = "input", .count = 60}, .checkpoint = true}, {.info = {.name = "hidden", .count = 252}}},
          6};
}

template <std::uint32_t Depth, class Policy>
void activations_run(Bench& bench, Policy policy, Pool pool_kind) {
  auto& [reports, device, before, before_pinned, a, b, c, hbm, host, fill_evicted, blank] = bench;
  const std::vector<BundleLayout> layouts(7, small_layout());
  bench.use_all(before, before_pinned);
  using Store = ActivationStore<Checked, Policy, Depth>;
  const ActivationStoreOptions options{.fill_evicted = fill_evicted};
  constexpr bool pages = !OffloadPolicyTraits<Policy>::activations_always_kept;
  std::optional<SlotPool<Checked>> pool;
  {
    std::optional<Store> store;
    again([&] {
      store.reset();
      pool.reset();
      if constexpr (pages) {
        if (pool_kind == Pool::shared) {
          pool.emplace(hbm, activation_slot_bytes(policy, layouts), Depth + 1, Role::other, before);
          store.emplace(hbm, host, *pool, policy, layouts, options);
        }
      }
      if (!store) store.emplace(hbm, host, policy, layouts, options);
    });
    for (int pass = 0; pass < 3; ++pass) {
      const Stream forward = pass == 1 ? b : a, backward = pass == 2 || !pages ? forward : c;
      if (!pages && pass == 1) again([&] { bench.order(b, a); });
      if (!pages && pass == 2) again([&] { bench.order(a, b); });
      for (int attempt = 0; attempt < 3; ++attempt) {  // a forward, or a backward, that failed half-way starts again
        try {
          for (std::uint32_t l = 0; l < store->layers(); ++l) {
            auto saved = store->save(l, forward, pass == 1 ? 4 : 6);
            for (std::uint32_t i = 0; i < 2; ++i) bench.write(forward, saved.template tensor<float>(i).bytes(), "save");
            saved.commit();
          }
          for (std::uint32_t l = store->layers(); l-- > 0;) {
            auto saved = store->restore(l, backward);
            const Stream side = b;
            if (pages) saved.used_on(side);
            for (std::uint32_t i = 0; i < 2; ++i) {
              const auto memory = saved.template tensor<float>(i).bytes();
              if (saved.missing(i)) {
                bench.write(backward, memory, "recompute");
                bench.order(side, backward);  // order between a lease's streams is the caller's
              }
              bench.read(backward, memory, "backward");
              if (pages) bench.read(side, memory, "backward aside");
            }
          }
          break;
        } catch (const DeviceError&) {
        } catch (const InvalidArgument&) {  // the layer's restore failed after it moved on: start again
        }
      }
    }
  }
}

template <std::uint32_t Depth>
void schedulers_run(Bench& bench, Pool pool_kind) {
  auto& [reports, device, before, before_pinned, a, b, c, hbm, host, fill_evicted, blank] = bench;
  constexpr Bytes slot = 1024_B;
  using Scheduler = PrefetchScheduler<Checked, OffloadAll, Depth>;
  auto replacement = hbm.allocate(slot, "replacement", Role::other, b);
  bench.use_all(before, before_pinned);
  std::optional<Home<Checked>> home;
  again([&] { home.emplace(host, 8_KiB, "home", Role::other, c); });
  {
    Home<Checked> loaded{host, 1_KiB, "home that is loaded first", Role::other, c};
    again([&] { loaded.synchronize(0, 512); });
    device.note_host_access("first load", {}, {loaded.memory().subspan(0, 512)});
  }
  std::optional<SlotPool<Checked>> pool;
  HbmArena<Checked>::Buffer donated;
  {
    std::optional<Scheduler> one, two;
    const auto make = [&](std::optional<Scheduler>& scheduler, const char* name, bool one_stream) {
      SchedulerOptions options{.one_copy_stream = one_stream, .fill_evicted = fill_evicted, .name = name};
      if (pool_kind == Pool::shared) {
        scheduler.emplace(*pool, hbm, options);
      } else {
        scheduler.emplace(hbm, slot, Role::other, options);
      }
    };
    again([&] {
      if (pool_kind == Pool::shared) pool.emplace(hbm, slot, Depth + 1, Role::other, before);
      one.reset();
      two.reset();
      make(one, "one", false);
      make(two, "two", true);
    });
    const auto page = [&](Scheduler& scheduler, std::uint64_t offset, std::uint64_t bytes, Access access) {
      return scheduler.add_page({.label = "page at " + std::to_string(offset),
                                 .parts = {{&*home, offset, 0, Bytes{bytes}, access}},
                                 .slot_bytes = slot});
    };
    std::vector<PageId> ones, twos;
    for (std::uint64_t i = 0; i < 8; ++i) ones.push_back(page(*one, i * 1024, 1024, Access::read_write));
    for (std::uint64_t i = 0; i < 9; ++i)
      twos.push_back(page(*two, i == 0 ? 0 : i * 1024 - 512, i % 8 == 0 ? 512 : 1024, Access::read_write));
    std::vector<PlanStep> writes, updates, reads, twice;
    for (const PageId p : ones) writes.push_back({p, Access::write});
    for (const PageId p : ones) twice.push_back({p, Access::read_write});
    for (std::size_t i = ones.size(); i-- > 0;) twice.push_back({ones[i], Access::read_write});
    for (const PageId p : twos) updates.push_back({p, Access::read_write});
    for (const PageId p : ones) reads.push_back({p, Access::read});
    const PlanId write_plan = one->add_plan(writes), twice_plan = one->add_plan(twice),
                 read_plan = one->add_plan(reads);
    const PlanId update_plan = two->add_plan(updates);
    const auto sweep = [&](Scheduler& scheduler, PlanId plan, const std::vector<PlanStep>& steps, Stream stream,
                           bool finishes = true) {
      again([&] { scheduler.begin(plan); });
      for (std::size_t i = 0; i < steps.size(); ++i) {
        scheduler.seek(static_cast<std::uint32_t>(i));
        typename Scheduler::LeaseType lease;
        again([&] { lease = scheduler.lease(steps[i].page, stream); });
        const bool half = &scheduler == &*two && i % 8 == 0;
        const auto memory = lease.bytes().subspan(0, half ? 512 : 1024);
        if (steps[i].access == Access::write) again([&] { bench.write(stream, memory); });
        if (steps[i].access == Access::read) again([&] { bench.read(stream, memory); });
        if (steps[i].access == Access::read_write) again([&] { bench.update(stream, memory); });
        if (hbmoff::writes(steps[i].access)) lease.launched();
        if (i == 3 && steps[i].access == Access::read) {
          again([&] { lease.used_on(b); });
          again([&] { bench.read(b, memory, "read aside"); });
          if (replacement) {
            again([&] { bench.order(stream, b); });
            again([&] { bench.write(stream, replacement.bytes(), "last use of the replacement"); });
            again([&] { donated = lease.donate(std::move(replacement)); });
            continue;
          }
        }
        if (i % 3 == 0 && steps[i].access == Access::read) continue;  // the destructor ends it
        again([&] {
          if (!lease.empty()) lease.commit();
        });
        again([&] { scheduler.settle(); });
      }
      if (finishes) again([&] { scheduler.finish(stream); });
    };
    sweep(*one, write_plan, writes, a);
    sweep(*two, update_plan, updates, b, false);
    again([&] { two->finish(b); });
    sweep(*one, twice_plan, twice, c);
    // The host looks at the home and writes it.
    again([&] { home->synchronize(0, 8192); });
    home->invalidate();
    device.note_host_access("load", {home->memory()}, {home->memory()});
    sweep(*two, update_plan, updates, a);
    sweep(*one, read_plan, reads, a, false);
    sweep(*two, update_plan, updates, c);
    // What finish promises: behind it on the stream everything is home, and the host may look after it.
    again([&] { device.synchronize(Stream{c}); });
    device.note_host_access("look", {home->memory()}, {});
    // A resident page is ordered between streams by its leases.
    std::optional<PageId> resident;
    again([&] { resident = one->add_resident_page("resident", 512_B, Role::other, a); });
    for (const Stream stream : {Stream{a}, Stream{b}, Stream{a}}) {
      typename Scheduler::LeaseType lease;
      again([&] { lease = one->lease(*resident, stream); });
      const auto memory = lease.bytes();
      again([&] { bench.write(stream, memory, "resident"); });
      again([&] {
        if (!lease.empty()) lease.commit();
      });
      again([&] { one->settle(); });
    }
  }
  if (donated) again([&] { bench.write(a, donated.bytes(), "donated"); });
}

void arena_run(Bench& bench) {
  // A list of blocks whose stream has lost it to another: what the first freed must not be forgotten.
  {
    auto& arena_of = bench.hbm;
    auto memory = arena_of.allocate(96_KiB, "of an arena with two lists", Role::other, bench.a);
    HbmArena<Checked> arena{bench.device, memory.bytes(), {.max_blocks = 64, .max_streams = 2, .fill_freed = true}};
    std::optional<HbmArena<Checked>::Buffer> kept;
    {
      std::optional<HbmArena<Checked>::Buffer> first;
      again([&] { first.emplace(arena.allocate(60_KiB, "first", Role::other, bench.a)); });
      again([&] { bench.write(bench.a, first->bytes(), "use first"); });
    }
    again([&] { bench.order(bench.b, bench.a); });
    again([&] { kept.emplace(arena.allocate(10_KiB, "kept", Role::other, bench.b)); });
    std::optional<HbmArena<Checked>::Buffer> third;
    again([&] { third.emplace(arena.allocate(50_KiB, "third", Role::other, bench.c)); });
    again([&] { bench.write(bench.c, third->bytes(), "use third"); });
    third.reset();
    kept.reset();
  }

  auto& [reports, device, before, before_pinned, a, b, c, hbm, host, fill_evicted, blank] = bench;
  auto memory = hbm.allocate(64_KiB, "of a small arena", Role::other, a);
  {
    // Two streams are tracked, four used.
    HbmArena<Checked> arena{device, memory.bytes(), {.max_blocks = 64, .max_streams = 2, .fill_freed = true}};
    for (int round = 0; round < 4; ++round) {
      for (const Stream stream : {Stream{a}, Stream{b}, Stream{c}, Stream{before}}) {
        if (round == 0 && stream != Stream{a}) again([&] { bench.order(stream, a); });
        for (const Bytes size : {20_KiB, 50_KiB, 30_KiB}) {
          std::optional<HbmArena<Checked>::Buffer> buffer;
          again([&] { buffer.emplace(arena.allocate(size, "block", Role::other, stream)); });
          again([&] { bench.write(stream, buffer->bytes(), "use block"); });
        }
      }
    }
  }
  // A buffer's guard band is looked at behind the work on its stream.
  again([&] {
    HbmArena<Checked> arena{device, 64_KiB, {.max_blocks = 8, .guard_band = 64_B}};
    std::optional<HbmArena<Checked>::Buffer> buffer;
    again([&] { buffer.emplace(arena.allocate(10_KiB, "guarded", Role::other, a)); });
    again([&] { bench.write(a, buffer->bytes(), "use guarded"); });
    again([&] { buffer->free(a); });
  });
  // The arena waited for its streams: the host may have the memory back. That is all that orders them here.
  again([&] { memory.free(a); });
}

void recorder_run(Bench& bench) {
  auto& [reports, device, before, before_pinned, a, b, c, hbm, host, fill_evicted, blank] = bench;
  std::optional<Recorder<Checked>> recorder;
  again([&] { device.fill_async(blank, std::byte{}, a); });  // so that the recorder's origin is behind something
  again([&] { recorder.emplace(device, 64, a); });
  const auto observer = recorder->observer();
  observer.begin(Activity::fill, b);
  again([&] { device.fill_async(hbm.allocate(256_B, "x", Role::other, b).bytes(), std::byte{}, b); });
  observer.end(Activity::fill, b);
  again([&] { device.synchronize(Stream{b}); });
  std::uint64_t seen = 0;
  again([&] { recorder->collect([&](const auto&) { ++seen; }); });
  if (seen + recorder->dropped() == 0) throw InvalidArgument{"an activity was neither recorded nor counted as dropped"};
}

/// What is run: each has a bench of its own.
struct Scenario {
  std::string name;
  std::function<void(Bench&)> run;
  bool fill_evicted = true;
};

template <std::uint32_t Depth>
void add_scenarios(std::vector<Scenario>& all, Pool pool) {
  const std::string suffix = " at depth " + std::to_string(Depth) + (pool == Pool::own ? "" : ", shared pool");
  all.push_back({"optimizer" + suffix, [=](Bench& b) { optimizer_run<Depth>(b, OffloadOptimizerState{}, pool); }});
  all.push_back(
      {"mixed optimizer" + suffix, [=](Bench& b) { optimizer_run<Depth>(b, OffloadMatching{{"t1"}}, pool); }});
  all.push_back({"activations" + suffix, [=](Bench& b) { activations_run<Depth>(b, OffloadAll{}, pool); }});
  all.push_back({"kept activations" + suffix, [=](Bench& b) { activations_run<Depth>(b, KeepLastLayers{3}, pool); }});
  all.push_back({"schedulers" + suffix, [=](Bench& b) { schedulers_run<Depth>(b, pool); }});
  // Without the fill that an evicted slot gets, the next copy into it has to wait by itself.
  const std::size_t count = all.size();
  for (std::size_t i = count - 5; i < count; ++i) {
    all.push_back(all[i]);
    all.back().name += ", no fill";
    all.back().fill_evicted = false;
  }
}

std::vector<Scenario> general() {
  return {{"resident optimizer", [](Bench& b) { optimizer_run<3>(b, KeepResident{}, Pool::own); }},
          {"resident activations", [](Bench& b) { activations_run<3>(b, KeepResident{}, Pool::own); }},
          {"arena", arena_run},
          {"recorder", recorder_run}};
}

/// Scenarios of one depth and one kind of pool, or of none.
struct Group {
  std::string name;
  std::vector<Scenario> scenarios;
};

template <std::uint32_t Depth>
void add_groups(std::vector<Group>& all) {
  for (const Pool pool : {Pool::own, Pool::shared}) {
    all.push_back({"depth " + std::to_string(Depth) + (pool == Pool::own ? "" : ", shared pool"), {}});
    add_scenarios<Depth>(all.back().scenarios, pool);
  }
}

std::vector<Group> groups() {
  std::vector<Group> all{{"whatever the depth", general()}};
  add_groups<2>(all);
  add_groups<3>(all);
  add_groups<4>(all);
  return all;
}

// With those in which an object is destroyed after a failure.
std::vector<Group> groups_with_failures() {
  std::vector<Group> all = groups();
  constexpr auto give_up = AfterFailure::give_up;
  all[0].scenarios.push_back(
      {"resident optimizer given up", [](Bench& b) { optimizer_run<3>(b, KeepResident{}, Pool::own, give_up); }});
  const auto add = [&]<std::uint32_t Depth>(Group& group, Pool pool) {
    group.scenarios.push_back({"optimizer given up, " + group.name,
                               [=](Bench& b) { optimizer_run<Depth>(b, OffloadOptimizerState{}, pool, give_up); }});
  };
  for (const int shared : {0, 1}) {
    const Pool pool = shared == 1 ? Pool::shared : Pool::own;
    add.template operator()<2>(all[1 + shared], pool);
    add.template operator()<3>(all[3 + shared], pool);
    add.template operator()<4>(all[5 + shared], pool);
  }
  return all;
}

struct Outcome {
  std::uint64_t reports = 0;  ///< of the checker, warnings not counted
  std::uint64_t errors = 0;  ///< these, and what else should not happen
  std::uint64_t calls = 0;
  std::string first;  ///< the first report, or what ended the run
  bool failed_call = false;  ///< the run ended by the failure that was asked for
};

const ImmediateDevice* current = nullptr;

enum class When { always, after_the_failure };

/// What is done wrong.
struct Mutation {
  int left_out = -1;
  int early = -1;
  std::size_t early_by = 1;
  bool swap = false;
};
constexpr Mutation nothing{};

void apply(const Mutation& mutation) {
  ordering::left_out = mutation.left_out;
  ordering::early = mutation.early;
  ordering::early_by = mutation.early_by;
  ordering::swap = mutation.swap;
}

// Runs a scenario. Call `failing_call` of it fails (0: none).
Outcome run(const Scenario& scenario, const Mutation& mutation, std::uint64_t failing_call = 0,
            When when = When::always) {
  Outcome outcome;
  std::vector<CheckReport> reports;
  {
    Bench bench{reports};
    bench.fill_evicted = scenario.fill_evicted;
    current = &bench.device.inner();
    ordering::applies = when == When::always ? nullptr : +[] { return current->failed(); };
    apply(mutation);
    const std::uint64_t calls = bench.device.inner().calls_made();
    if (failing_call != 0) bench.device.fail_call(failing_call);
    try {
      scenario.run(bench);
      outcome.calls = bench.device.inner().calls_made() - calls;
      bench.use_all(bench.b, bench.c);
    } catch (const DeviceError& error) {
      outcome.failed_call = true;
      if (error.context_lost()) ++outcome.errors;
      outcome.first = error.what();
    } catch (const std::exception& error) {
      ++outcome.errors;
      outcome.first = error.what();
    }
  }
  ordering::applies = nullptr;
  apply(nothing);
  for (const CheckReport& report : reports) {
    if (is_warning(report.fault)) continue;
    if (outcome.reports++ == 0) outcome.first = report.message();
  }
  outcome.errors += outcome.reports;
  return outcome;
}

std::string name_of(int site) {
  const ordering::Site& s = ordering::sites[site];
  return std::string{s.file} + ":" + std::to_string(s.line) + " " + s.call;
}

}  // namespace

TEST_CASE("nothing is reported where nothing is left out") {
  for (const Group& group : groups_with_failures()) {
    for (const Scenario& scenario : group.scenarios) {
      const Outcome outcome = run(scenario, nothing);
      INFO(scenario.name, ": ", outcome.first);
      CHECK(outcome.errors == 0);
      CHECK(!outcome.failed_call);
    }
  }
}

namespace {

bool is(int site, std::string_view kind) {
  return std::string_view{ordering::sites[site].call}.find(kind) != std::string_view::npos;
}
// A record that only makes later waits shorter: who waits for a point that was not recorded records it first. See the
// test of what is not ordered.
bool shortens_waits(int site) { return is(site, "copy_in_->record(") || is(site, "copy_out_->record("); }
// Records that stand for work, not for times of an observer.
bool is_record(int site) {
  return is(site, "record(") && is(site, "device") &&
         std::string_view{ordering::sites[site].file} != "hbmoff/observe/stats.hpp";
}

bool left_out_is_reported(const Scenario& scenario, int site, std::uint64_t failing_call = 0,
                          When when = When::always) {
  return run(scenario, {.left_out = site}, failing_call, when).reports != 0;
}
// The last piece of work before a record need not be what the record stands for: the two before that may be.
bool early_is_reported(const Scenario& scenario, int site, std::uint64_t failing_call = 0, When when = When::always) {
  for (const std::size_t early_by : {1u, 2u, 3u}) {
    if (run(scenario, {.early = site, .early_by = early_by}, failing_call, when).reports != 0) return true;
  }
  return false;
}
bool swap_is_reported(const Scenario& scenario, std::uint64_t failing_call = 0, When when = When::always) {
  return run(scenario, {.swap = true}, failing_call, when).reports != 0;
}

// Which sites a group of scenarios reaches, and which of them it reports when they are done wrong.
struct Coverage {
  bool reached[ordering::site_count] = {};
  bool reported[ordering::site_count] = {};
};
template <class IsReported>
Coverage cover(const std::vector<Scenario>& scenarios, IsReported&& is_reported) {
  Coverage coverage;
  for (const Scenario& scenario : scenarios) {
    std::fill(std::begin(ordering::reached), std::end(ordering::reached), 0);
    run(scenario, nothing);
    std::vector<int> sites;
    for (int site = 0; site < ordering::site_count; ++site) {
      if (ordering::reached[site] == 0) continue;
      coverage.reached[site] = true;
      if (!coverage.reported[site]) sites.push_back(site);
    }
    for (const int site : sites) coverage.reported[site] = is_reported(scenario, site);
  }
  return coverage;
}

}  // namespace

TEST_CASE(
    "every call that orders work is missed when it is left out, at depths 2 to 4, with slots of one's own and shared") {
  const std::vector<Group> all = groups();
  for (const Group& group : all) {
    const Coverage left_out = cover(group.scenarios, [](const Scenario& scenario, int site) {
      return !shortens_waits(site) && left_out_is_reported(scenario, site);
    });
    const Coverage early = cover(group.scenarios, [](const Scenario& scenario, int site) {
      return is_record(site) && early_is_reported(scenario, site);
    });
    for (int site = 0; site < ordering::site_count; ++site) {
      INFO(group.name, ": ", name_of(site));
      if (left_out.reached[site] && !shortens_waits(site)) CHECK(left_out.reported[site]);
      if (early.reached[site] && is_record(site)) CHECK(early.reported[site]);
    }
    if (&group == &all.front()) continue;  // nothing pages there
    INFO(group.name, ": release and write-back swapped");
    CHECK(std::any_of(group.scenarios.begin(), group.scenarios.end(),
                      [](const Scenario& scenario) { return swap_is_reported(scenario); }));
  }
}

TEST_CASE("no wait is longer than it must be: each copy of a page has a point of its own") {
  // What a stream wrongly came to wait for would not be reported: here it must be.
  const auto conflicts = [](const char* record, bool fill_evicted, bool writes, std::uint64_t aside, bool left_out) {
    int site = -1;
    for (int i = 0; i < ordering::site_count; ++i) {
      // Of several records of one timeline, the fill's or the write-back's comes first, the one after `fill_evicted` last.
      if (is(i, record) && (site == -1 || fill_evicted)) site = i;
    }
    REQUIRE(site != -1);
    std::vector<CheckReport> reports;
    {
      Bench bench{reports};
      Home<Checked> home{bench.host, 4_KiB, "home", Role::other, bench.c};
      home.synchronize(0, 4096);
      bench.device.note_host_access("load", {}, {home.memory()});
      {
        PrefetchScheduler<Checked> scheduler{bench.hbm, 1_KiB, Role::other, {.fill_evicted = fill_evicted}};
        std::vector<PlanStep> steps;
        for (std::uint64_t i = 0; i < 4; ++i) {
          const Access access = writes ? Access::write : Access::read;
          steps.push_back(
              {scheduler.add_page({.label = "page", .parts = {{&home, i * 1024, 0, 1_KiB, access}}}), access});
        }
        scheduler.begin(scheduler.add_plan(steps));
        apply({.left_out = left_out ? site : -1});
        for (std::size_t i = 0; i < (writes ? 4u : 1u); ++i) {
          auto lease = scheduler.lease(steps[i].page, bench.a);
          if (writes) bench.write(bench.a, lease.bytes());
          if (i + 1 == (writes ? 4u : 1u)) {
            bench.device.note_access(bench.a, "aside", {}, {home.memory().subspan(aside * 1024, 1024)});
            bench.device.enqueue(bench.a, [] {}, {.name = "aside"});
          }
          lease.commit();
        }
        apply(nothing);
      }
    }
    return std::count_if(reports.begin(), reports.end(),
                         [](const CheckReport& report) { return report.later.what == "'aside' writes"; });
  };
  CHECK(conflicts("copy_in_->record(", false, false, 2, false) != 0);
  CHECK(conflicts("copy_in_->record(", false, false, 2, true) == 0);
  CHECK(conflicts("copy_out_->record(", false, true, 2, false) != 0);
  CHECK(conflicts("copy_out_->record(", false, true, 2, true) == 0);
  CHECK(conflicts("copy_out_->record(", true, true, 1, false) != 0);
  CHECK(conflicts("copy_out_->record(", true, true, 1, true) == 0);
}

TEST_CASE("no call's failure makes the order wrong") {
  for (const Group& group : groups_with_failures())
    for (const Scenario& scenario : group.scenarios) {
      const std::uint64_t calls = run(scenario, nothing).calls;
      for (std::uint64_t n = 1; n <= calls; n += 7) {
        const Outcome outcome = run(scenario, nothing, n);
        INFO(scenario.name, ", failure of call ", n, ": ", outcome.first);
        CHECK(outcome.errors == 0);
      }
    }
}

// Every site is reached here, those of the paths after a failure included.
TEST_CASE("what is left out, recorded early or swapped behind a failure is missed as well") {
  constexpr When after = When::after_the_failure;
  bool ever_left_out[ordering::site_count] = {};
  const std::vector<Group> all = groups_with_failures();
  for (const Group& group : all) {
    bool reached[ordering::site_count] = {}, left_out[ordering::site_count] = {}, early[ordering::site_count] = {};
    bool swapped = false;
    const bool swaps = &group != &all.front();  // nothing pages in the first
    const auto wants_left_out = [&](int site) { return !left_out[site] && !shortens_waits(site); };
    const auto wants_early = [&](int site) { return !early[site] && is_record(site); };
    // Few failures are enough for most sites; the rest is looked for in more of them.
    for (const std::uint64_t stride : {97u, 31u, 11u, 3u, 1u}) {
      for (const Scenario& scenario : group.scenarios) {
        const std::uint64_t calls = run(scenario, nothing).calls;
        for (std::uint64_t n = 1; n <= calls; n += stride) {
          std::fill(std::begin(ordering::reached), std::end(ordering::reached), 0);
          run(scenario, nothing, n, after);
          std::vector<int> sites;
          for (int site = 0; site < ordering::site_count; ++site) {
            if (ordering::reached[site] != 0) sites.push_back(site);
          }
          for (const int site : sites) {
            reached[site] = true;
            if (wants_left_out(site)) left_out[site] = left_out_is_reported(scenario, site, n, after);
            if (wants_early(site)) early[site] = early_is_reported(scenario, site, n, after);
          }
          if (swaps && !swapped) swapped = swap_is_reported(scenario, n, after);
        }
      }
      bool complete = swapped || !swaps;
      for (int site = 0; site < ordering::site_count; ++site) {
        complete = complete && !(reached[site] && (wants_left_out(site) || wants_early(site)));
      }
      if (complete) break;
    }
    for (int site = 0; site < ordering::site_count; ++site) {
      INFO(group.name, ": ", name_of(site));
      ever_left_out[site] |= left_out[site];
      if (!reached[site]) continue;
      CHECK(!wants_left_out(site));
      CHECK(!wants_early(site));
    }
    INFO(group.name, ": release and write-back swapped");
    CHECK(swapped == swaps);
  }
  for (int site = 0; site < ordering::site_count; ++site) {
    INFO(name_of(site));
    CHECK((ever_left_out[site] || shortens_waits(site)));
  }
}
