// Slots: the fixed pieces of HBM that pages pass through, owned by one scheduler or shared by several.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/device/detail/try_twice.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/hbm_arena.hpp"
#include "hbmoff/paging/home.hpp"
#include "hbmoff/paging/page.hpp"

namespace hbmoff {

/// Streams that one lease can be used on.
inline constexpr std::uint32_t max_streams_per_lease = 4;

/// What a scheduler has decided for a slot when its lease ends.
enum class SlotFate : std::uint8_t { release, write_back, retain };

/// A piece of HBM and everything known about its use. Belongs to the scheduler that holds it; not for users.
template <Device D>
struct Slot {
  /// A user stream that touched the slot, and the event behind its last touch.
  struct Release {
    std::optional<typename D::StreamRef> stream;
    typename D::Event event;
  };

  typename HbmArena<D>::Buffer buffer;
  std::optional<PageId> page;  ///< the page it is assigned to
  SlotFate fate = SlotFate::release;
  bool valid = false;       ///< holds the page's content
  bool dirty = false;       ///< newer than the home
  bool leased = false;
  bool leased_for_writing = false;
  bool launched = false;    ///< a kernel that writes it was launched: the slot is the truth until written back
  bool unrecorded =
      false;  ///< its lease ended but a release could not be recorded: never reused before that is made up for
  bool permanent = false;   ///< a resident page's memory: never written back, never given to another page
  std::uint64_t generation = 0;  ///< of the homes when it was filled or leased for writing
  std::uint64_t version = 0;     ///< of its ranges of the homes then, or when it was written
  std::uint64_t limit = ~std::uint64_t{0};  ///< only so many of its first bytes hold content
  std::uint32_t next_use = 0;    ///< position in the plan, for eviction

  // What work on the slot must come after: the last copy, and the streams of the last lease where no copy waited for
  // them since.
  Mark<D> last_copy;
  bool copied_under_lease = false;  ///< the lease's streams did not wait for the last copy
  std::array<Release, max_streams_per_lease> releases;
  std::uint32_t release_count = 0;

  [[nodiscard]] device_span<std::byte> memory() const { return buffer.bytes(); }

  /// Makes later work on `stream` come after everything that was done to the slot.
  void order_before(D& device, typename D::StreamRef stream, std::source_location at) {
    if (last_copy.valid() && last_copy.timeline->stream() != stream) {
      last_copy.timeline->order_before(stream, last_copy.ticket, at);
    }
    order_releases_before(device, stream, at);
  }
  /// As above, but for the last copy.
  void order_releases_before(D& device, typename D::StreamRef stream, std::source_location at) {
    for (std::uint32_t i = 0; i < release_count; ++i) {
      if (*releases[i].stream != stream) device.wait(stream, releases[i].event, at);
    }
  }

  /// Notes a copy on a stream that was ordered behind everything else that was done to the slot.
  void note_copy(Mark<D> mark) {
    last_copy = mark;
    if (leased) {
      copied_under_lease = true;
    } else {
      release_count = 0;
    }
  }

  /// Before the memory is given back in the order of `stream`: whoever used it comes first. For destructors.
  void settle_for_free(D& device, typename D::StreamRef stream) noexcept {
    detail::try_twice(device, [&] { order_before(device, stream, std::source_location::current()); });
  }
};

/// `count` slots of one size in one arena. Schedulers that share a pool are each guaranteed a minimum that the others
/// cannot take; what is beyond goes to who asks first. HBM held: `count * HbmArena::footprint(slot_bytes)`, always.
/// The order in which slots are handed out depends on the order of the calls alone. A pool outlives its schedulers.
template <Device D>
class SlotPool {
 public:
  /// How a scheduler takes part; it lives inside the scheduler.
  struct Client {
    std::uint32_t guaranteed = 0;
    std::vector<Slot<D>*> slots = {};  ///< those it holds
    void* scheduler = nullptr;
    /// Gives one kept, unleased slot back to the pool (written back first if need be); false if there is none.
    bool (*evict_one)(void* scheduler, std::source_location at) = nullptr;

    [[nodiscard]] std::uint32_t held() const { return static_cast<std::uint32_t>(slots.size()); }
  };

  /// Takes the slots from `arena`, and gives them back, in the order of `stream`, which outlives the pool.
  /// Throws OutOfMemory.
  SlotPool(HbmArena<D>& arena, Bytes slot_bytes, std::uint32_t count, Role role, typename D::StreamRef stream,
           std::string_view name = "slot")
      : device_{&arena.device()}, stream_{stream}, slot_bytes_{slot_bytes} {
    if (count == 0) throw InvalidArgument{"a slot pool needs at least one slot"};
    slots_.reserve(count);
    free_.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      slots_.push_back(std::make_unique<Slot<D>>(make_slot(arena, slot_bytes, role, stream, name)));
      free_.push_back(slots_.back().get());
    }
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  ~SlotPool() {
    for (auto& slot : slots_) slot->settle_for_free(*device_, stream_);
  }

  [[nodiscard]] Bytes slot_bytes() const { return slot_bytes_; }
  /// In whose order the slots' memory is given back.
  [[nodiscard]] typename D::StreamRef stream() const { return stream_; }
  [[nodiscard]] std::uint32_t count() const { return static_cast<std::uint32_t>(slots_.size()); }
  [[nodiscard]] std::uint32_t free_count() const { return static_cast<std::uint32_t>(free_.size()); }

  /// Throws InvalidArgument when the guarantees no longer fit.
  void join(Client& client) {
    std::uint64_t promised = client.guaranteed;
    for (const Client* other : clients_) promised += other->guaranteed;
    if (promised > slots_.size()) {
      throw InvalidArgument{"a pool of " + std::to_string(slots_.size()) + " slots cannot guarantee " +
                            std::to_string(promised)};
    }
    client.slots.reserve(slots_.size());
    clients_.push_back(&client);
  }
  /// The client holds no slot any more.
  void leave(Client& client) noexcept { std::erase(clients_, &client); }

  /// How many slots `client` could take now without touching what the others are guaranteed.
  [[nodiscard]] std::uint32_t available(const Client& client) const {
    std::uint32_t reserved = 0;
    for (const Client* other : clients_) {
      if (other != &client && other->guaranteed > other->held()) reserved += other->guaranteed - other->held();
    }
    return free_count() > reserved ? free_count() - reserved : 0;
  }

  /// The slot that has been free longest, or null. Work on it must be ordered by `Slot::order_before`.
  Slot<D>* try_take(Client& client) {
    if (available(client) == 0) return nullptr;
    Slot<D>* slot = free_.front();
    free_.erase(free_.begin());  // a handful of pointers
    client.slots.push_back(slot);
    return slot;
  }

  /// As `try_take`, after making other clients give up slots that they keep beyond their guarantee.
  Slot<D>* take_from_others(Client& client, std::source_location at) {
    for (Client* other : clients_) {
      while (other != &client && other->held() > other->guaranteed && other->evict_one(other->scheduler, at)) {
        if (Slot<D>* slot = try_take(client)) return slot;
      }
    }
    return nullptr;
  }

  /// A slot whose release could not be recorded is never handed out again: nobody could wait for it.
  void give_back(Client& client, Slot<D>& slot) noexcept {
    slot.page.reset();
    slot.valid = slot.dirty = slot.leased = slot.leased_for_writing = slot.launched = false;
    std::erase(client.slots, &slot);
    if (!slot.unrecorded) free_.push_back(&slot);  // within the reserved room
  }

  /// Forgets the points of a timeline that was drained and is about to end.
  void forget(const Timeline<D>& timeline) noexcept {
    for (auto& slot : slots_) {
      if (slot->last_copy.timeline == &timeline) slot->last_copy = {};
    }
  }

  /// A slot outside any pool, with its release events made and the first one recorded on `stream`: the point behind
  /// which its memory may be touched.
  static Slot<D> make_slot(HbmArena<D>& arena, Bytes bytes, Role role, typename D::StreamRef stream,
                           std::string_view name) {
    D& device = arena.device();
    const auto event = [&] { return typename Slot<D>::Release{std::nullopt, device.create_event(EventTiming::none)}; };
    Slot<D> slot{.buffer = arena.allocate(bytes, name, role, stream),
                 .page = {},
                 .last_copy = {},
                 .releases = {event(), event(), event(), event()}};
    slot.releases[0].stream = stream;
    device.record(slot.releases[0].event, stream);
    slot.release_count = 1;
    return slot;
  }

 private:
  D* device_;
  typename D::StreamRef stream_;
  Bytes slot_bytes_;
  std::vector<std::unique_ptr<Slot<D>>> slots_;
  std::vector<Slot<D>*> free_;
  std::vector<Client*> clients_;
};

}  // namespace hbmoff
