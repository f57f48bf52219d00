// Speed and utilisation of BlockAllocator beside a plain std::map + std::set best fit, as JSON on standard output.
//
// a: random allocate and free, sizes log-uniform from 512 bytes to 64 MiB, 64 GiB at 70 % full.
// b: the allocations of a 48-layer transformer's forward and backward.
// c: ramp: two allocations for each random free until the first failure; soak: 40,000 random operations at each level,
//    levels 0.5 % apart, until an allocation fails.
//
// Times are those of whole loops: choosing the operation and keeping the list of live blocks is in them, the same code
// for both. Each is the shortest of several runs, made in turn, as other programs on the machine only ever add time.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "hbmoff/core/units.hpp"
#include "hbmoff/memory/block_allocator.hpp"

namespace {

using namespace hbmoff;

constexpr std::uint64_t capacity = std::uint64_t{64} << 30;
constexpr std::uint64_t smallest = 512, largest = std::uint64_t{64} << 20;

// Best fit as one writes it with the standard library: free runs by offset and by (size, offset).
class MapBestFit {
 public:
  struct Handle {
    std::uint64_t offset, size;
  };

  explicit MapBestFit(std::uint64_t size) {
    by_offset_.emplace(0, size);
    by_size_.emplace(size, 0);
  }

  bool allocate(std::uint64_t bytes, Handle& handle) {
    const std::uint64_t size = round_up(bytes, 256);
    const auto fit = by_size_.lower_bound({size, 0});
    if (fit == by_size_.end()) return false;
    const auto [run, offset] = *fit;
    by_size_.erase(fit);
    by_offset_.erase(offset);
    if (run > size) insert(offset + size, run - size);
    handle = {offset, size};
    return true;
  }

  void free(Handle handle) {
    std::uint64_t offset = handle.offset, size = handle.size;
    auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.end() && after->first == offset + size) {
      size += after->second;
      by_size_.erase({after->second, after->first});
      after = by_offset_.erase(after);
    }
    if (after != by_offset_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        offset = before->first;
        size += before->second;
        by_size_.erase({before->second, before->first});
        by_offset_.erase(before);
      }
    }
    insert(offset, size);
  }

 private:
  void insert(std::uint64_t offset, std::uint64_t size) {
    by_offset_.emplace(offset, size);
    by_size_.emplace(size, offset);
  }

  std::map<std::uint64_t, std::uint64_t> by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;
};

class Ours {
 public:
  using Handle = BlockAllocator::BlockId;

  explicit Ours(std::uint64_t size) : blocks_{Bytes{size}, 1u << 16} {}
  bool allocate(std::uint64_t bytes, Handle& handle) {
    handle = blocks_.allocate(Bytes{bytes});
    return handle != BlockAllocator::no_block;
  }
  void free(Handle handle) { blocks_.free(handle); }

 private:
  BlockAllocator blocks_;
};

// xorshift64*: a generator that costs less than what is measured.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_{seed * 0x9e3779b97f4a7c15u | 1} {}
  std::uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>((next() >> 32) * n >> 32); }

 private:
  std::uint64_t state_;
};

std::vector<std::uint32_t> log_uniform_sizes(std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::uniform_real_distribution<double> exponent{std::log2(smallest), std::log2(largest)};
  std::vector<std::uint32_t> sizes(1 << 15);
  for (std::uint32_t& size : sizes) size = static_cast<std::uint32_t>(std::exp2(exponent(random)));
  return sizes;
}

// Live blocks in random order, sizes drawn from one long sequence.
template <class Allocator>
class Churn {
 public:
  explicit Churn(std::uint64_t seed) : allocator_{capacity}, sizes_{log_uniform_sizes(seed)}, random_{seed} {
    live_.reserve(1 << 16);
  }

  // Allocates the next size; false when there is no room.
  bool allocate() {
    const std::uint32_t size = next_size();
    Live block;
    if (!allocator_.allocate(size, block.handle)) return false;
    block.size = size;
    used_ += size;
    live_.push_back(block);
    ++drawn_;
    return true;
  }
  void free_one() {
    Live& chosen = live_[random_.below(static_cast<std::uint32_t>(live_.size()))];
    allocator_.free(chosen.handle);
    used_ -= chosen.size;
    chosen = live_.back();
    live_.pop_back();
  }
  // `operations` at a level: allocates while the next block stays below it, else frees. False at a failure.
  bool run(std::uint64_t level, std::uint64_t operations) {
    for (std::uint64_t i = 0; i < operations; ++i) {
      if (used_ + next_size() <= level) {
        if (!allocate()) return false;
      } else {
        free_one();
      }
    }
    return true;
  }
  [[nodiscard]] double utilisation() const { return static_cast<double>(used_) / static_cast<double>(capacity); }
  [[nodiscard]] std::size_t live() const { return live_.size(); }

 private:
  struct Live {
    typename Allocator::Handle handle;
    std::uint32_t size;
  };
  [[nodiscard]] std::uint32_t next_size() const { return sizes_[drawn_ & (sizes_.size() - 1)]; }

  Allocator allocator_;
  std::vector<std::uint32_t> sizes_;
  Random random_;
  std::vector<Live> live_;
  std::uint64_t used_ = 0;
  std::uint64_t drawn_ = 0;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>{std::chrono::steady_clock::now() - start}.count();
}

// Nanoseconds per operation, and the number of live blocks at the end.
template <class Allocator>
std::pair<double, std::size_t> random_churn(std::uint64_t seed, std::uint64_t operations) {
  Churn<Allocator> churn{seed};
  const std::uint64_t level = capacity / 10 * 7;
  bool fine = churn.run(level, 100'000);
  const auto start = std::chrono::steady_clock::now();
  fine = fine && churn.run(level, operations);
  const double seconds = seconds_since(start);
  if (!fine) std::fprintf(stderr, "an allocation failed at 70 %%\n"), std::exit(1);
  return {seconds * 1e9 / static_cast<double>(operations), churn.live()};
}

struct TraceStep {
  std::uint32_t tensor;
  std::uint64_t bytes;  // 0: free
};

// Forward keeps what backward needs and drops temporaries; backward goes through the layers in reverse, each tensor's
// gradient living until its last use. GPT-2 XL's shapes (48 layers, 1600 channels, context 1024), batch 1, bf16.
std::vector<TraceStep> training_trace() {
  constexpr std::uint64_t tokens = 1024, channels = 1600, heads = 25, element = 2;
  constexpr std::uint64_t row = tokens * channels * element;
  // normed, mean, rstd, qkv, softmax statistics, attention out, projected, residual, normed, mean, rstd, up, gelu, down
  const std::uint64_t saved[] = {row,        tokens * 4, tokens * 4, 3 * row, heads * tokens * 4,
                                 row,        row,        row,        row,     tokens * 4,
                                 tokens * 4, 4 * row,    4 * row,    row};
  const std::uint64_t forward_scratch[] = {3 * row, heads * tokens * tokens * element, 4 * row};
  std::vector<TraceStep> trace;
  std::uint32_t tensor = 0;
  std::vector<std::vector<std::uint32_t>> kept(48);
  for (std::vector<std::uint32_t>& layer : kept) {
    std::size_t scratch = 0;
    for (std::uint64_t bytes : saved) {
      layer.push_back(tensor);
      trace.push_back({tensor++, bytes});
      if (scratch < std::size(forward_scratch) && layer.size() % 4 == 0) {
        trace.push_back({tensor, forward_scratch[scratch++]});
        trace.push_back({tensor++, 0});
      }
    }
  }
  for (std::size_t l = kept.size(); l-- > 0;) {
    std::optional<std::uint32_t> gradient;
    for (std::size_t i = kept[l].size(); i-- > 0;) {
      trace.push_back({tensor, saved[i]});  // the gradient of what is saved, from the one behind it
      if (gradient) trace.push_back({*gradient, 0});
      gradient = tensor++;
      trace.push_back({kept[l][i], 0});
    }
    trace.push_back({*gradient, 0});
  }
  return trace;
}

template <class Allocator>
double replay_trace(std::uint64_t repeats) {
  const std::vector<TraceStep> trace = training_trace();
  std::vector<typename Allocator::Handle> handles(trace.size());
  Allocator allocator{capacity};
  bool fine = true;
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t i = 0; i < repeats; ++i) {
    for (const TraceStep& step : trace) {
      if (step.bytes != 0) {
        fine = allocator.allocate(step.bytes, handles[step.tensor]) && fine;
      } else {
        allocator.free(handles[step.tensor]);
      }
    }
  }
  const double seconds = seconds_since(start);
  if (!fine) std::fprintf(stderr, "an allocation of the trace failed\n"), std::exit(1);
  return seconds * 1e9 / static_cast<double>(repeats * trace.size());
}

template <class Allocator>
double ramp(std::uint64_t seed) {
  Churn<Allocator> churn{seed};
  while (churn.allocate() && churn.allocate()) churn.free_one();
  return churn.utilisation();
}

// The highest level survived.
template <class Allocator>
double soak(std::uint64_t seed) {
  Churn<Allocator> churn{seed};
  double survived = 0;
  for (int half_percents = 140; half_percents < 200; ++half_percents) {
    if (!churn.run(capacity / 200 * static_cast<std::uint64_t>(half_percents), 40'000)) break;
    survived = half_percents / 200.0;
  }
  return survived;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

struct Pair {
  double hbmoff, map_set;
};

template <class F, class G>
Pair shortest_of(int repeats, F ours, G theirs) {
  Pair shortest{1e300, 1e300};
  for (int i = 0; i < repeats; ++i) {
    shortest = {std::min(shortest.hbmoff, ours()), std::min(shortest.map_set, theirs())};
  }
  return shortest;
}

template <class F, class G>
Pair median_of(int seeds, F ours, G theirs) {
  std::vector<double> a, b;
  for (int i = 1; i <= seeds; ++i) {
    a.push_back(ours(static_cast<std::uint64_t>(i)));
    b.push_back(theirs(static_cast<std::uint64_t>(i)));
  }
  return {median(a), median(b)};
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string_view{argv[1]} == "--quick";
  const bool check = argc > 1 && std::string_view{argv[1]} == "--check";
  if (argc > 2 || (argc == 2 && !quick && !check)) {
    std::fprintf(stderr, "usage: %s [--quick | --check]\n  --check: exit with 1 when a figure misses its target\n",
                 argv[0]);
    return 2;
  }
  const int repeats = quick ? 1 : 25;
  constexpr std::uint64_t operations = 200'000;
  constexpr std::uint64_t trace_repeats = 100;
  const int seeds = quick ? 1 : 8;

  const std::size_t live = random_churn<Ours>(1, operations).second;
  const Pair random = shortest_of(
      repeats, [] { return random_churn<Ours>(1, operations).first; },
      [] { return random_churn<MapBestFit>(1, operations).first; });
  const Pair trace = shortest_of(
      repeats, [] { return replay_trace<Ours>(trace_repeats); },
      [] { return replay_trace<MapBestFit>(trace_repeats); });
  const Pair ramps = median_of(seeds, ramp<Ours>, ramp<MapBestFit>);
  const Pair soaks = median_of(seeds, soak<Ours>, soak<MapBestFit>);

  const double random_ratio = random.map_set / random.hbmoff, trace_ratio = trace.map_set / trace.hbmoff;
  const bool met = random_ratio >= 12 && trace_ratio >= 7 && ramps.hbmoff >= 0.985 && soaks.hbmoff >= 0.90;
  const nlohmann::json report = {
      {"benchmark", "block_allocator"},
      {"random_live_blocks", live},
      {"trace_operations", training_trace().size()},
      {"repeats", repeats},
      {"seeds", seeds},
      {"hbmoff",
       {{"random_ns", random.hbmoff}, {"trace_ns", trace.hbmoff}, {"ramp", ramps.hbmoff}, {"soak", soaks.hbmoff}}},
      {"map_set_best_fit",
       {{"random_ns", random.map_set}, {"trace_ns", trace.map_set}, {"ramp", ramps.map_set}, {"soak", soaks.map_set}}},
      {"times_faster", {{"random", random_ratio}, {"trace", trace_ratio}}},
      {"targets", {{"random", 12}, {"trace", 7}, {"ramp", 0.985}, {"soak", 0.90}}},
      {"targets_met", met},
  };
  std::printf("%s\n", report.dump(2).c_str());
  return check && !met ? 1 : 0;
}
