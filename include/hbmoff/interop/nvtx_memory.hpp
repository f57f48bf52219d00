// A CUDA device that tells tools what arenas hold, buffer by buffer, through NVTX's memory extension: compute-sanitizer's
// memcheck then finds a kernel that leaves its buffer for a neighbour's, and names the buffer. Needs the toolkit's nvtx3.
#pragma once

#include <nvtx3/nvToolsExtMem.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <source_location>
#include <string>
#include <string_view>

#include "hbmoff/device/cuda_device.hpp"

namespace hbmoff {

/// A `CudaDevice` for debugging, in its place in every template:
///
///     hbmoff::NvtxCudaDevice device{0};
///     hbmoff::HbmArena hbm{device, 2_GiB};      // $ compute-sanitizer --nvtx yes ./trainer
///
/// The memory of each arena is registered as a heap of the domain "hbmoff", each buffer as a region of it, with its name;
/// gaps and free memory are no region. A free waits for its stream before the region ends, so that no kernel is blamed
/// that was put there before; without a tool it costs no more than that wait. Thread-safe.
class NvtxCudaDevice : public CudaDevice {
 public:
  explicit NvtxCudaDevice(int ordinal = 0, std::source_location at = std::source_location::current())
      : CudaDevice{ordinal, at}, domain_{nvtxDomainCreateA("hbmoff")} {}
  explicit NvtxCudaDevice(CudaDeviceOptions options, std::source_location at = std::source_location::current())
      : CudaDevice{options, at}, domain_{nvtxDomainCreateA("hbmoff")} {}
  ~NvtxCudaDevice() { nvtxDomainDestroy(domain_); }

  template <class Space>
  void note_divided(memory_span<const std::byte, Space> memory, bool divided) noexcept {
    if (memory.empty()) return;
    const std::scoped_lock lock{mutex_};
    const std::byte* const end = memory.data() + memory.count();
    regions_.erase(regions_.lower_bound(memory.data()), regions_.lower_bound(end));
    const auto heap = heaps_.find(memory.data());
    if (heap != heaps_.end()) {
      nvtxMemHeapUnregister(domain_, heap->second.handle);
      heaps_.erase(heap);
    }
    if (!divided) return;
    const nvtxMemVirtualRangeDesc_t range{memory.count(), memory.data()};
    nvtxMemHeapDesc_t heap_of{};
    heap_of.extCompatID = NVTX_EXT_COMPATID_MEM;
    heap_of.structSize = sizeof heap_of;
    heap_of.usage = NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR;
    heap_of.type = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    heap_of.typeSpecificDescSize = sizeof range;
    heap_of.typeSpecificDesc = &range;
    heap_of.messageType = NVTX_MESSAGE_TYPE_ASCII;
    heap_of.message.ascii = std::is_same_v<Space, DeviceSpace> ? "HbmArena" : "PinnedHostArena";
    try {
      heaps_[memory.data()] = {end, nvtxMemHeapRegister(domain_, &heap_of)};
    } catch (const std::exception&) {
      // Without memory for the table the arena is not shown: what it does stays right.
    }
  }

  template <class T, class Space>
  void note_block(BlockNote what, memory_span<T, Space> memory, std::string_view name, StreamRef stream,
                  std::source_location at = std::source_location::current()) {
    if (memory.empty()) return;
    const auto* const data = reinterpret_cast<const std::byte*>(memory.data());
    if (what == BlockNote::freed && !lost()) synchronize(stream, at);
    const std::scoped_lock lock{mutex_};
    switch (what) {
      case BlockNote::allocated:
        return add(data, memory.size_bytes(), name);
      case BlockNote::named:
        if (regions_.contains(data)) rename(data, name);
        return;
      case BlockNote::freed:
        return remove(data);
    }
  }

 private:
  struct Heap {
    const std::byte* end = nullptr;
    nvtxMemHeapHandle_t handle = nullptr;
  };

  void add(const std::byte* data, Bytes bytes, std::string_view name) {
    auto heap = heaps_.upper_bound(data);
    if (heap == heaps_.begin() || (--heap)->second.end <= data) return;
    regions_[data] = bytes;
    const nvtxMemVirtualRangeDesc_t range{bytes.count(), data};
    nvtxMemRegionHandle_t handle{};
    nvtxMemRegionsRegisterBatch_t batch{};
    batch.extCompatID = NVTX_EXT_COMPATID_MEM;
    batch.structSize = sizeof batch;
    batch.regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    batch.heap = heap->second.handle;
    batch.regionCount = 1;
    batch.regionDescElementSize = sizeof range;
    batch.regionDescElements = &range;
    batch.regionHandleElementsOut = &handle;
    nvtxMemRegionsRegister(domain_, &batch);
    rename(data, name);
  }
  void rename(const std::byte* data, std::string_view name) {
    const std::string text{name};
    nvtxMemRegionNameDesc_t region{};
    region.regionRefType = NVTX_MEM_REGION_REF_TYPE_POINTER;
    region.nameType = NVTX_MESSAGE_TYPE_ASCII;
    region.region.pointer = data;
    region.name.ascii = text.c_str();
    nvtxMemRegionsNameBatch_t batch{};
    batch.extCompatID = NVTX_EXT_COMPATID_MEM;
    batch.structSize = sizeof batch;
    batch.regionCount = 1;
    batch.regionElementSize = sizeof region;
    batch.regionElements = &region;
    nvtxMemRegionsName(domain_, &batch);
  }
  void remove(const std::byte* data) {
    if (regions_.erase(data) == 0) return;
    nvtxMemRegionRef_t region{};
    region.pointer = data;
    nvtxMemRegionsUnregisterBatch_t batch{};
    batch.extCompatID = NVTX_EXT_COMPATID_MEM;
    batch.structSize = sizeof batch;
    batch.refType = NVTX_MEM_REGION_REF_TYPE_POINTER;
    batch.refCount = 1;
    batch.refElementSize = sizeof region;
    batch.refElements = &region;
    nvtxMemRegionsUnregister(domain_, &batch);
  }

  nvtxDomainHandle_t domain_;
  std::mutex mutex_;
  std::map<const std::byte*, Heap> heaps_;  // by where they begin
  std::map<const std::byte*, Bytes> regions_;  // as registered
};

static_assert(Device<NvtxCudaDevice>);

}  // namespace hbmoff
