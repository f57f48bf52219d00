// How close paging comes to perfect overlap, on a HostDevice with a modelled link and modelled kernels.
//
// A sweep of N pages that are read, updated and written takes at best N x max(f, c, w, (f + c + w) / depth) plus the first
// fill and the last write-back, f, c and w being the times of a fill, a kernel and a write-back. Prints one JSON
// object. `within` says whether a run took at most 1.05 times the best; the last two runs of "sweep" are controls that must not: depth 1,
// and both directions on one stream, each held against the bound of depth 3. With --check the exit status is 1 where
// one of these expectations is not met (the machine must be otherwise idle).
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "hbmoff/hbmoff.hpp"

namespace {

using namespace hbmoff;
using Seconds = std::chrono::duration<double>;
using Json = nlohmann::ordered_json;

constexpr std::uint32_t page_count = 64;
constexpr Bytes page_bytes = 256_KiB;
constexpr double unit = 4e-3;  // seconds; real work on a page is some 1 % of it

// Times of one page in units.
struct Times {
  double fill, compute, write_back;
};

double gigabytes_per_second(double seconds) { return static_cast<double>(page_bytes.count()) / seconds / 1e9; }

HostDeviceOptions options_for(Times t) {
  return {.hbm_capacity = 64_MiB,
          .ring_capacity = 4096,
          .host_to_device = {.gigabytes_per_second = gigabytes_per_second(t.fill * unit)},
          .device_to_host = {.gigabytes_per_second = gigabytes_per_second(t.write_back * unit)}};
}

// Seconds during which an interval of `a` and one of `b` are both open. Intervals of one direction do not overlap each
// other.
double both_busy(const std::vector<Recorder<HostDevice>::Interval>& intervals) {
  double sum = 0;
  for (const auto& a : intervals) {
    if (a.activity != Activity::fill) continue;
    for (const auto& b : intervals) {
      if (b.activity != Activity::write_back) continue;
      sum += std::max(0.0, std::min(a.end, b.end).count() - std::max(a.begin, b.begin).count());
    }
  }
  return sum;
}

double busy(const std::vector<Recorder<HostDevice>::Interval>& intervals, Activity activity) {
  double sum = 0;
  for (const auto& i : intervals) {
    if (i.activity == activity) sum += (i.end - i.begin).count();
  }
  return sum;
}

struct Measured {
  double seconds;
  double cpu_seconds;
  std::vector<Recorder<HostDevice>::Interval> intervals;
};

Json report(const Measured& m, double bound, double modelled) {
  return {{"seconds", m.seconds},
          {"bound_seconds", bound},
          {"ratio", m.seconds / bound},
          {"within", m.seconds <= bound},
          {"fills_busy_seconds", busy(m.intervals, Activity::fill)},
          {"write_backs_busy_seconds", busy(m.intervals, Activity::write_back)},
          {"both_directions_busy_seconds", both_busy(m.intervals)},
          {"stall_seconds", busy(m.intervals, Activity::stall)},
          {"cpu_seconds", m.cpu_seconds},
          {"cpu_share_of_modelled_time", m.cpu_seconds / modelled}};
}

// Runs `work` between two points in time at which everything is done.
template <class Work>
Measured timed(HostDevice& device, HostDevice::StreamRef stream, Recorder<HostDevice>& recorder, Work&& work) {
  device.synchronize(stream);
  recorder.collect([](const auto&) {});
  const auto cpu = device.stats().worker_time;
  const auto begin = std::chrono::steady_clock::now();
  work();
  device.synchronize(stream);
  Measured m{};
  m.seconds = Seconds{std::chrono::steady_clock::now() - begin}.count();
  m.cpu_seconds = Seconds{device.stats().worker_time - cpu}.count();
  recorder.collect([&](const auto& interval) { m.intervals.push_back(interval); });
  return m;
}

Measured run_sweep(Times t, std::uint32_t depth, bool one_copy_stream) {
  HostDevice device{options_for(t)};
  HbmArena hbm{device, 32_MiB};
  PinnedHostArena host{device, 64_MiB};
  const HostDevice::Stream stream = device.create_stream("compute");
  Recorder<HostDevice> recorder{device, 8 * page_count, stream};
  std::vector<std::unique_ptr<Home<HostDevice>>> homes;
  PrefetchScheduler<HostDevice, OffloadAll, dynamic_depth, Recorder<HostDevice>::Observer> scheduler{
      hbm,
      page_bytes,
      Role::optimizer_state,
      {.depth = depth, .one_copy_stream = one_copy_stream},
      recorder.observer()};
  std::vector<PageId> pages;
  std::vector<PlanStep> sweep;
  for (std::uint32_t i = 0; i < page_count; ++i) {
    homes.push_back(std::make_unique<Home<HostDevice>>(host, page_bytes, "home", Role::optimizer_state, stream));
    pages.push_back(scheduler.add_page({.label = "page", .parts = {{homes.back().get(), 0, 0, page_bytes}}}));
    sweep.push_back({pages.back(), Access::read_write});
  }
  device.synchronize(HostDevice::StreamRef{stream});
  const PlanId plan = scheduler.add_plan(sweep);
  const auto step = [&] {
    scheduler.begin(plan);
    for (const PageId page : pages) {
      auto lease = scheduler.lease(page, stream);
      const auto data = lease.as<float>(0, 16);
      device.enqueue(stream, [data] { data.data()[0] += 1.0f; },
                     {.modelled_time = std::chrono::nanoseconds{static_cast<std::int64_t>(t.compute * unit * 1e9)}});
      lease.commit();
    }
    scheduler.finish(stream);
  };
  step();  // touches all memory once
  return timed(device, stream, recorder, step);
}

double sweep_period(Times t, std::uint32_t depth) {
  return std::max({t.fill, t.compute, t.write_back, (t.fill + t.compute + t.write_back) / depth});
}

double sweep_bound(Times t, std::uint32_t depth) {
  return unit * (1.05 * page_count * sweep_period(t, depth) + t.fill + t.write_back);
}

Measured run_activations(Times t, std::uint32_t depth) {
  HostDevice device{options_for(t)};
  HbmArena hbm{device, 32_MiB};
  PinnedHostArena host{device, 64_MiB};
  const HostDevice::Stream stream = device.create_stream("compute");
  Recorder<HostDevice> recorder{device, 8 * page_count, stream};
  const BundleLayout layout{.tensors = {{.info = {.name = "x", .count = page_bytes.count() / 4}}}};
  ActivationStore<HostDevice, OffloadAll, dynamic_depth, Recorder<HostDevice>::Observer> store{
      hbm, host, OffloadAll{}, page_count, layout, {.depth = depth}, recorder.observer()};
  const auto kernel = [&](device_span<float> x) {
    device.enqueue(stream, [x] { x.data()[0] += 1.0f; },
                   {.modelled_time = std::chrono::nanoseconds{static_cast<std::int64_t>(t.compute * unit * 1e9)}});
  };
  const auto step = [&] {
    for (std::uint32_t layer = 0; layer < page_count; ++layer) {
      auto saved = store.save(layer, stream);
      kernel(saved.template tensor<float>(0));
      saved.commit();
    }
    for (std::uint32_t layer = page_count; layer-- > 0;) {
      auto saved = store.restore(layer, stream);
      kernel(saved.template tensor<float>(0));
    }
  };
  step();
  return timed(device, stream, recorder, step);
}

// One-way pages: written and sent off in the forward, brought back and read in the backward. Both runs end with compute, so
// there is no fill or drain to add: the turnaround is served from the slots.
double activations_bound(Times t, std::uint32_t depth) {
  const double forward = std::max({t.compute, t.write_back, (t.compute + t.write_back) / depth});
  const double backward = std::max({t.compute, t.fill, (t.compute + t.fill) / depth});
  return unit * (1.05 * page_count * (forward + backward) + t.fill + t.write_back);
}

double modelled_seconds(Times t, std::uint32_t kernels) {
  return unit * (page_count * (t.fill + t.write_back) + kernels * t.compute);
}

}  // namespace

int main(int argc, char** argv) {
  const bool check = argc > 1 && std::strcmp(argv[1], "--check") == 0;
  bool met = true;
  Json sweeps = Json::array();
  Json activations = Json::array();
  const Times equal{1, 1, 1};
  for (const Times t : {equal, Times{2, 1, 1}, Times{1, 2, 1}, Times{1, 1, 2}, Times{1, 3, 1}}) {
    for (const std::uint32_t depth : {2u, 3u, 4u}) {
      const Json where{{"fill", t.fill}, {"compute", t.compute}, {"write_back", t.write_back}, {"depth", depth}};
      Json run = where;
      run.update(report(run_sweep(t, depth, false), sweep_bound(t, depth), modelled_seconds(t, page_count)));
      met = met && run["within"] && run["cpu_share_of_modelled_time"] < 0.25;
      // Where one direction after the other would not fit into the period, the two must be seen at work at once.
      const bool must_overlap = t.fill + t.write_back > sweep_period(t, depth);
      met = met && (!must_overlap || run["both_directions_busy_seconds"] > 0.0);
      sweeps.push_back(run);
      run = where;
      run.update(report(run_activations(t, depth), activations_bound(t, depth), modelled_seconds(t, 2 * page_count)));
      met = met && run["within"] && run["cpu_share_of_modelled_time"] < 0.25;
      activations.push_back(run);
    }
  }
  Json controls = Json::array();
  for (const bool one_stream : {false, true}) {
    Json run{{"control", one_stream ? "both directions on one stream, depth 3" : "depth 1"}};
    run.update(report(run_sweep(equal, one_stream ? 3 : 1, one_stream), sweep_bound(equal, 3),
                      modelled_seconds(equal, page_count)));
    met = met && !run["within"];
    controls.push_back(run);
  }
  const Json out{{"benchmark", "overlap"}, {"pages", page_count}, {"page_bytes", page_bytes.count()},
                 {"unit_seconds", unit},   {"sweep", sweeps},     {"activations", activations},
                 {"controls", controls},   {"as_expected", met}};
  std::puts(out.dump(2).c_str());
  return check && !met ? 1 : 0;
}
