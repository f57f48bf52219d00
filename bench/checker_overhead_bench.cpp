// What CheckedDevice costs: optimizer steps on a HostDevice and on the same device checked, alternately in one run.
//
// Prints one JSON object. `ratio` is the median over the pairs of seconds checked / seconds unchecked. Small tensors in
// small pages are the worst case, as in tests: nearly all of the time goes into calls. Pages of usual size are the other.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "hbmoff/hbmoff.hpp"

namespace {

using namespace hbmoff;
using Json = nlohmann::ordered_json;

struct Shape {
  const char* name;
  std::uint32_t tensors;
  std::uint64_t elements;  // of each tensor
  Bytes page;
  std::uint32_t steps;
};

template <Device D>
double seconds_per_step(D& device, const Shape& shape) {
  const Bytes tensor = Bytes{4} * shape.elements;
  HbmArena<D> hbm{device, 2_MiB + 4 * shape.page + 2 * shape.tensors * (tensor + 8_KiB), {.max_blocks = 1024}};
  PinnedHostArena<D> host{device, 2_MiB + 3 * shape.tensors * (tensor + 8_KiB), {.max_blocks = 4096}};
  const typename D::Stream stream = device.create_stream("compute");
  std::vector<typename HbmArena<D>::Buffer> buffers;
  PagedAdamW<D, OffloadAll> optimizer{hbm, host, OffloadAll{}, {.page = shape.page}};
  for (std::uint32_t t = 0; t < shape.tensors; ++t) {
    const std::string name = "tensor " + std::to_string(t);
    for (const Role role : {Role::weight, Role::gradient}) {
      buffers.push_back(hbm.allocate(tensor, name, role, stream));
      device.fill_async(buffers.back().bytes(), std::byte{0}, stream);
    }
    optimizer.add({.name = name, .count = shape.elements}, buffers[2 * t].template as<float>(),
                  buffers[2 * t + 1].template as<float>());
  }
  optimizer.prepare(stream);
  optimizer.step(stream);  // touches all memory once
  device.synchronize(stream);
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint32_t s = 0; s < shape.steps; ++s) optimizer.step(stream, {.max_norm = 1.0f});
  device.synchronize(stream);
  return std::chrono::duration<double>{std::chrono::steady_clock::now() - begin}.count() / shape.steps;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Json run(const Shape& shape) {
  constexpr int pairs = 15;
  std::vector<double> plain, checked, ratios;
  for (int i = 0; i < pairs; ++i) {
    {
      HostDevice device;
      plain.push_back(seconds_per_step(device, shape));
    }
    {
      CheckedDevice<HostDevice> device;
      checked.push_back(seconds_per_step(device, shape));
    }
    ratios.push_back(checked.back() / plain.back());
  }
  return {{"name", shape.name},
          {"tensors", shape.tensors},
          {"elements", shape.elements},
          {"page_bytes", shape.page.count()},
          {"pairs", pairs},
          {"seconds_per_step", median(plain)},
          {"seconds_per_step_checked", median(checked)},
          {"ratio", median(ratios)},
          {"lowest_ratio", *std::min_element(ratios.begin(), ratios.end())},
          {"highest_ratio", *std::max_element(ratios.begin(), ratios.end())}};
}

}  // namespace

int main() {
  Json results = Json::array();
  for (const Shape& shape : {Shape{"small pages", 48, 1000, 4_KiB, 50}, Shape{"pages of 4 MiB", 6, 1 << 20, 4_MiB, 5}})
    results.push_back(run(shape));
  std::printf("%s\n", Json{{"benchmark", "checker_overhead"}, {"runs", results}}.dump(1).c_str());
  return 0;
}
