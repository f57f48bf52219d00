// What a tool is told of arenas through NVTX's memory extension: a tool linked into this program writes it down.
#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <string>

#include "hbmoff/cuda.hpp"
#include "hbmoff/interop/nvtx_memory.hpp"

using namespace hbmoff;

namespace {

struct Region {
  std::uint64_t bytes;
  std::string name;
  std::intptr_t heap;
};
std::map<std::intptr_t, std::string> heaps;  // by handle
std::map<const void*, Region> regions;
std::intptr_t last_heap = 0;
int wrong = 0;

nvtxMemHeapHandle_t NVTX_API register_heap(nvtxDomainHandle_t, const nvtxMemHeapDesc_t* heap) {
  heaps[++last_heap] = heap->message.ascii;
  return reinterpret_cast<nvtxMemHeapHandle_t>(last_heap);
}
void NVTX_API unregister_heap(nvtxDomainHandle_t, nvtxMemHeapHandle_t heap) {
  const auto handle = reinterpret_cast<std::intptr_t>(heap);
  wrong += heaps.erase(handle) == 1 ? 0 : 1;
  std::erase_if(regions, [=](const auto& region) { return region.second.heap == handle; });
}
void NVTX_API register_regions(nvtxDomainHandle_t, const nvtxMemRegionsRegisterBatch_t* batch) {
  const auto* range = static_cast<const nvtxMemVirtualRangeDesc_t*>(batch->regionDescElements);
  const auto heap = reinterpret_cast<std::intptr_t>(batch->heap);
  wrong += batch->regionCount == 1 && heaps.contains(heap) && !regions.contains(range->ptr) ? 0 : 1;
  regions[range->ptr] = {range->size, "", heap};
}
void NVTX_API name_regions(nvtxDomainHandle_t, const nvtxMemRegionsNameBatch_t* batch) {
  const auto found = regions.find(batch->regionElements->region.pointer);
  if (found == regions.end()) {
    ++wrong;
  } else {
    found->second.name = batch->regionElements->name.ascii;
  }
}
void NVTX_API unregister_regions(nvtxDomainHandle_t, const nvtxMemRegionsUnregisterBatch_t* batch) {
  wrong += regions.erase(batch->refElements->pointer) == 1 ? 0 : 1;
}

}  // namespace

// nvtx_injection.cpp makes NVTX call this.
extern "C" int attach_nvtx_tool(nvtxExtModuleInfo_t* module) {
  if (module->moduleId != NVTX_EXT_MODULEID_MEM || module->segmentsCount == 0) return 0;
  const auto set = [&](std::size_t id, auto function) {
    module->segments[0].functionSlots[id] = reinterpret_cast<std::intptr_t>(function);
  };
  set(NVTX3EXT_CBID_nvtxMemHeapRegister, &register_heap);
  set(NVTX3EXT_CBID_nvtxMemHeapUnregister, &unregister_heap);
  set(NVTX3EXT_CBID_nvtxMemRegionsRegister, &register_regions);
  set(NVTX3EXT_CBID_nvtxMemRegionsName, &name_regions);
  set(NVTX3EXT_CBID_nvtxMemRegionsUnregister, &unregister_regions);
  return 1;
}

TEST_CASE("heaps are arenas, regions are buffers, with their names") {
  NvtxCudaDevice device;
  const auto stream = device.create_stream(), other = device.create_stream();
  {
    HbmArena<NvtxCudaDevice> hbm{device, 1_MiB, {.fill_freed = true}};
    PinnedHostArena<NvtxCudaDevice> host{device, 1_MiB};
    REQUIRE(heaps.size() == 2);
    auto weight = hbm.allocate(1000_B, "weight", Role::weight, stream);
    auto page = host.allocate(3000_B, "page 0", Role::optimizer_state, stream);
    REQUIRE(regions.size() == 2);
    CHECK(regions[weight.bytes().data()].bytes == 1000);
    CHECK(regions[weight.bytes().data()].name == "weight");
    CHECK(heaps[regions[weight.bytes().data()].heap] == "HbmArena");
    CHECK(heaps[regions[page.bytes().data()].heap] == "PinnedHostArena");
    weight.rename("weight of layer 3");
    CHECK(regions[weight.bytes().data()].name == "weight of layer 3");
    const void* const there = weight.bytes().data();
    weight.free(stream);
    CHECK_FALSE(regions.contains(there));
    auto gradient = hbm.allocate(500_B, "gradient", Role::gradient, other);
    CHECK(regions[gradient.bytes().data()].bytes == 500);
  }
  CHECK(heaps.empty());
  CHECK(regions.empty());
  CHECK(wrong == 0);
}

TEST_CASE("the optimizer runs on it as on CudaDevice") {
  NvtxCudaDevice device;
  const auto stream = device.create_stream();
  HbmArena<NvtxCudaDevice> hbm{device, 1_MiB};
  PinnedHostArena<NvtxCudaDevice> host{device, 1_MiB};
  auto weight = hbm.allocate(4000_B, "weight", Role::weight, stream);
  auto gradient = hbm.allocate(4000_B, "gradient", Role::gradient, stream);
  device.fill_async(weight.bytes(), std::byte{0x3f}, stream);
  device.fill_async(gradient.bytes(), std::byte{0x3d}, stream);
  PagedAdamW optimizer{hbm, host, OffloadOptimizerState{}, {.page = 1_KiB}};
  optimizer.add({.name = "w", .count = 1000}, weight.as<float>(), device_span<const float>{gradient.as<float>()});
  CHECK(optimizer.report(optimizer.step(stream)).applied);
  device.synchronize(CudaDevice::StreamRef{stream});
  CHECK(wrong == 0);
}
