// One reservation of memory, divided into named buffers that are freed in stream order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/tier.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/detail/try_twice.hpp"
#include "hbmoff/device/device.hpp"
#include "hbmoff/memory/block_allocator.hpp"
#include "hbmoff/memory/detail/guard_bands.hpp"

namespace hbmoff {

struct ArenaOptions {
  std::uint32_t max_blocks = 65536;  ///< buffers alive at once, pending ones included; about 160 bytes of table each
  std::uint32_t max_streams = 16;    ///< streams whose frees are tracked at once; one event each
  /// Fill what is freed with 0xFF (as numbers: NaN) in stream order, so that a stale read shows. For tests.
  bool fill_freed = false;
  /// Keep so many bytes behind each buffer, 1 MiB at most, and look on free whether somebody wrote there: `Buffer::free`
  /// throws `Overrun`, once, and then can be called again; destructors say so on standard error. A free waits for its
  /// stream then, and footprints are those of buffers so much larger, which estimates do not know. For debugging. (A
  /// device that checks takes the band for a part of the buffer.)
  Bytes guard_band = {};
};

/// What an arena holds. All counts include the padding of `arena_footprint`.
struct ArenaUsage {
  Bytes capacity;
  Bytes used;  ///< buffers alive, and freed ones still kept for their stream
  Bytes high_water;  ///< largest `used` so far
  Bytes free;  ///< capacity - used
  Bytes largest_free;  ///< largest free run; kept blocks may make more once they are joined
  Bytes by_role[role_count] = {};  ///< sums to `used`
};

/// What a buffer of `bytes` takes of an arena, to the byte; depends on the size alone, so that plans can be exact.
/// 0 takes 0. `bytes` must be below 2^63.
///
/// Blocks are multiples of 256 bytes. From 1 MiB on they are also coloured: arrays that one kernel walks in lockstep
/// (weights, gradient, both moments) and that start an exact multiple of 256 MiB apart more than halve the bandwidth
/// of a CPU Adam (26 against 55 GB/s on a Zen 4; 128 MiB already costs a third), because their lines compete for the
/// same cache sets and memory banks; 4160 bytes of stagger restore it. So each such block is followed by 4352 bytes
/// (4160 rounded up to 4096 + 256), which moves the next one. Where that would bring the next block within 4352 bytes
/// of a multiple of 1 MiB instead, three times as much follows: neighbours are never nearly a multiple of 1 MiB apart.
/// (So a slightly larger size may take up to 8704 bytes less.)
[[nodiscard]] constexpr Bytes arena_footprint(Bytes bytes) {
  constexpr std::uint64_t coloured_from = std::uint64_t{1} << 20, period = std::uint64_t{1} << 20, stagger = 4096 + 256;
  std::uint64_t size = round_up(bytes.count(), BlockAllocator::alignment.count());
  if (bytes.count() >= coloured_from) {
    size += stagger;
    const std::uint64_t phase = size % period;
    if (phase < stagger || phase > period - stagger) size += 2 * stagger;
  }
  return Bytes{size};
}

/// Memory of one kind, reserved once and handed out as buffers. Use it as `HbmArena` or `PinnedHostArena`.
///
/// - Every buffer starts at a multiple of 256 bytes and takes `footprint(size)` bytes.
/// - Nothing is taken from the heap or the device after construction, no stream or event created.
/// - No call waits on the host; every order between streams is a wait in stream order. Which block a call gets
///   depends on the sequence of calls alone, never on timing.
/// - Freeing is in stream order. A freed block is kept for the stream that freed it, which may have a block of exactly
///   the same footprint again at once. When no run of the pool fits, first the stream's own kept blocks join the pool,
///   then the other streams' in the order of the streams' first use, one stream at a time; a stream that takes memory
///   from the pool waits, in stream order, for the last free of each stream whose blocks joined it since. Only then is
///   the arena out of memory.
/// - At most `max_streams` streams are tracked. A further one takes the place of the one tracked longest, in turn: it
///   waits for that stream's last free, and that stream's kept blocks join the pool.
///
/// The memory is the stream's: what the host itself reads or writes in a pinned buffer must be ordered behind the
/// stream's earlier work by the caller (a synchronisation, or a host function).
///
/// One thread at a time uses an arena and its buffers. The arena outlives its buffers. A stream used with it is
/// destroyed only when its work has ended and buffers allocated on it are freed. Neither copyable nor movable.
template <Device D, class Space>
class Arena {
 public:
  using StreamRef = typename D::StreamRef;
  using Span = memory_span<std::byte, Space>;

  static constexpr Tier tier = std::is_same_v<Space, DeviceSpace> ? Tier::hbm : Tier::pinned_host;

  /// A block of an arena, owned. Move-only; a moved-from or freed buffer is empty and converts to false.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept
        : arena_{std::exchange(other.arena_, nullptr)}, slot_{std::exchange(other.slot_, no_slot)},
          span_{std::exchange(other.span_, Span{})}, stream_{std::exchange(other.stream_, std::nullopt)} {}
    Buffer& operator=(Buffer&& other) noexcept {
      if (this != &other) {
        drop();
        arena_ = std::exchange(other.arena_, nullptr);
        slot_ = std::exchange(other.slot_, no_slot);
        span_ = std::exchange(other.span_, Span{});
        stream_ = std::exchange(other.stream_, std::nullopt);
      }
      return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    /// Frees on the stream it was allocated on. When the device's calls for that fail, twice, the block stays with its
    /// stream, and no other stream gets it before the order is known; `Arena::failed_frees` counts it.
    ~Buffer() { drop(); }

    /// Whether it owns a block; true for a buffer of 0 bytes too.
    [[nodiscard]] explicit operator bool() const noexcept { return arena_ != nullptr; }
    /// The bytes asked for, without padding; aligned to 256. Empty for a buffer of 0 bytes.
    [[nodiscard]] Span bytes() const noexcept { return span_; }
    /// The same memory as whole elements of `T`.
    template <class T>
    [[nodiscard]] memory_span<T, Space> as() const noexcept {
      static_assert(alignof(T) <= BlockAllocator::alignment.count());
      return span_.template as<T>();
    }
    [[nodiscard]] Bytes size() const noexcept { return span_.size_bytes(); }
    /// The name it was allocated under, cut to `max_name` characters; empty for an empty buffer.
    [[nodiscard]] std::string_view name() const noexcept {
      return slot_ == no_slot ? std::string_view{} : arena_->slots_[slot_].name_view();
    }
    /// Changes the name that errors and checking devices show.
    void rename(std::string_view name, std::source_location at = std::source_location::current()) {
      if (slot_ == no_slot) return;
      arena_->device_.note_block(BlockNote::named, Arena::constant(span_), name, *stream_, at);
      arena_->slots_[slot_].set_name(name);
    }

    /// From now on the destructor frees in the order of `stream`, which the caller orders behind the buffer's other
    /// uses.
    void move_to(StreamRef stream) noexcept {
      if (arena_ != nullptr) stream_ = stream;
    }

    /// Gives the block back behind the work put on `stream` so far; work of other streams that uses it must already be
    /// ordered before that. Does nothing on an empty buffer. When a device call fails it throws the device's error and
    /// the buffer still owns its block (with `fill_freed` its content may be gone). With `guard_band` it waits for the
    /// stream, and throws `Overrun`.
    void free(StreamRef stream, std::source_location at = std::source_location::current()) {
      if (slot_ != no_slot) arena_->release(slot_, stream, at);
      forget();
    }

   private:
    friend class Arena;
    Buffer(Arena& arena, std::uint32_t slot, Span span, StreamRef stream) noexcept
        : arena_{&arena}, slot_{slot}, span_{span}, stream_{stream} {}

    void forget() noexcept {
      arena_ = nullptr;
      slot_ = no_slot;
      span_ = Span{};
      stream_.reset();
    }
    void drop() noexcept {
      if (slot_ != no_slot) arena_->release_or_quarantine(slot_, *stream_);
      forget();
    }

    Arena* arena_ = nullptr;
    std::uint32_t slot_ = no_slot;
    Span span_;
    std::optional<StreamRef> stream_;
  };

  /// How many characters of a buffer's name are kept.
  static constexpr std::size_t max_name = 47;

  /// See `arena_footprint`.
  [[nodiscard]] static constexpr Bytes footprint(Bytes bytes) { return arena_footprint(bytes); }

  /// Reserves `capacity` bytes (rounded down to 256) from the device and gives them back at the end. Throws
  /// `OutOfMemory` or the device's error when the device does not have them, `InvalidArgument` for zero `max_blocks` or
  /// `max_streams`.
  Arena(D& device, Bytes capacity, ArenaOptions options = {}, std::source_location at = std::source_location::current())
      : Arena{device, Reservation{device, usable(capacity), at}, options, at} {}

  /// Hands out `memory`, which the caller owns, keeps alive and frees. Throws `InvalidArgument` unless it is aligned to
  /// 256 bytes.
  Arena(D& device, Span memory, ArenaOptions options = {}, std::source_location at = std::source_location::current())
      : Arena{device, Reservation{memory}, options, at} {}

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Waits, unless the device is lost, until the last free of each stream has been reached, then gives the memory back.
  ~Arena() {
    for (StreamList& list : lists_) {
      if (list.frees != 0) detail::try_twice(device_, [&] { device_.synchronize(list.event); });
    }
    if constexpr (takes_notes<D>) {
      for (const Slot& slot : slots_) {
        if (slot.alive) device_.note_leak(constant(span_of(slot.block, slot.size)), slot.name_view());
      }
    }
    device_.note_divided(constant(reservation_.memory()), false);
  }

  /// A buffer of `bytes` for work put on `stream` from now on, aligned to 256 bytes. `name` and `role` serve errors
  /// and accounting. A buffer of 0 bytes takes no memory. Does not wait on the host. Throws `OutOfMemory`, which says
  /// who holds the memory, or the device's error; no buffer is lost then.
  [[nodiscard]] Buffer allocate(Bytes bytes, std::string_view name, Role role, StreamRef stream,
                                std::source_location at = std::source_location::current()) {
    std::optional<Buffer> buffer = try_allocate(bytes, name, role, stream, at);
    if (!buffer) [[unlikely]]
      throw OutOfMemory{why_full(bytes, name)};
    return std::move(*buffer);
  }

  /// As `allocate`, but without room it returns nothing instead of throwing. Device errors are thrown.
  [[nodiscard]] std::optional<Buffer> try_allocate(Bytes bytes, std::string_view name, Role role, StreamRef stream,
                                                   std::source_location at = std::source_location::current()) {
    if (bytes == Bytes{}) return Buffer{*this, no_slot, Span{}, stream};
    if (bytes > blocks_.capacity()) return std::nullopt;
    std::optional<Buffer> buffer = attempt(bytes, name, role, stream, at);
    if (buffer || orphans_ == no_slot) return buffer;
    adopt_orphans(at);
    return attempt(bytes, name, role, stream, at);
  }

  [[nodiscard]] ArenaUsage usage() const noexcept {
    ArenaUsage usage{.capacity = blocks_.capacity(),
                     .used = blocks_.capacity() - blocks_.free_bytes(),
                     .high_water = high_water_,
                     .free = blocks_.free_bytes(),
                     .largest_free = blocks_.largest_free()};
    std::copy(std::begin(by_role_), std::end(by_role_), std::begin(usage.by_role));
    return usage;
  }
  [[nodiscard]] Bytes capacity() const noexcept { return blocks_.capacity(); }
  /// Buffers whose destructor could not free in stream order because a device call failed.
  [[nodiscard]] std::uint64_t failed_frees() const noexcept { return failed_frees_; }
  [[nodiscard]] D& device() const noexcept { return device_; }
  [[nodiscard]] const ArenaOptions& options() const noexcept { return options_; }

 private:
  static constexpr std::uint32_t no_slot = 0xffffffffu;
  static constexpr std::uint32_t buckets_log2 = 6;

  // Memory with its way back: the device's, or (null device) the caller's.
  class Reservation {
   public:
    Reservation(D& device, Bytes capacity, std::source_location at) : device_{&device} {
      if constexpr (tier == Tier::hbm) {
        memory_ = device.allocate_device(capacity, at);
      } else {
        memory_ = device.allocate_pinned(capacity, at);
      }
    }
    explicit Reservation(Span memory) : memory_{memory} {
      if (reinterpret_cast<std::uintptr_t>(memory.data()) % BlockAllocator::alignment.count() != 0) {
        throw InvalidArgument{"Arena: the memory given to it must be aligned to 256 bytes"};
      }
    }
    Reservation(Reservation&& other) noexcept
        : device_{std::exchange(other.device_, nullptr)}, memory_{std::exchange(other.memory_, Span{})} {}
    Reservation& operator=(Reservation&&) = delete;
    ~Reservation() {
      if (device_ == nullptr) return;
      if constexpr (tier == Tier::hbm) {
        device_->free_device(memory_);
      } else {
        device_->free_pinned(memory_);
      }
    }
    [[nodiscard]] Span memory() const noexcept { return memory_; }

   private:
    D* device_ = nullptr;
    Span memory_;
  };

  // A buffer alive, or a freed block kept for its stream.
  struct Slot {
    BlockAllocator::BlockId block = BlockAllocator::no_block;
    std::uint32_t next = no_slot;  // in a bucket of kept blocks, among the orphans, or among the spare slots
    Bytes size;  // as asked for
    std::optional<StreamRef> orphan_of;
    Role role = Role::other;
    bool alive = false;
    bool unnoted = false;  // freed by a destructor that could not tell the device
    bool overrun_told = false;
    std::uint8_t name_length = 0;
    char name[max_name];

    [[nodiscard]] std::string_view name_view() const noexcept { return {name, name_length}; }
    void set_name(std::string_view text) noexcept {
      name_length = static_cast<std::uint8_t>((std::min)(text.size(), max_name));
      std::copy_n(text.data(), name_length, name);
    }
  };

  // A tracked stream: the blocks kept for it, and the event of its last free.
  struct StreamList {
    explicit StreamList(typename D::Event last_free) : event{std::move(last_free)} {}

    typename D::Event event;
    std::optional<StreamRef> stream;
    std::uint64_t frees = 0;  // records of `event` so far
    std::uint64_t pooled = 0;  // what `frees` was when its blocks last joined the pool
    std::uint64_t seen_joins = 0;  // what `joins_` was when the stream was last ordered behind the pool
    std::uint32_t kept = 0;  // blocks in its buckets
    bool unsettled = false;  // some kept block was freed by a destructor whose device call failed
  };

  Arena(D& device, Reservation reservation, ArenaOptions options, std::source_location at)
      : device_{device}, options_{options}, reservation_{std::move(reservation)},
        bands_{device, options.guard_band, at}, blocks_{reservation_.memory().size_bytes(), options.max_blocks} {
    if (options.max_streams == 0 || options.max_streams > 1024) {
      throw InvalidArgument{"Arena: max_streams must be 1 to 1024, not " + std::to_string(options.max_streams)};
    }
    slots_.reserve(options.max_blocks);
    kept_.assign(std::size_t{options.max_streams} << buckets_log2, no_slot);
    ordered_.assign(std::size_t{options.max_streams} * options.max_streams, 0);
    lists_.reserve(options.max_streams);
    for (std::uint32_t i = 0; i < options.max_streams; ++i) {
      lists_.emplace_back(device.create_event(EventTiming::none, at));
    }
    device_.note_divided(constant(reservation_.memory()), true);  // nothing below throws
  }

  static Bytes usable(Bytes capacity) {
    return Bytes{capacity.count() / BlockAllocator::alignment.count() * BlockAllocator::alignment.count()};
  }
  static memory_span<const std::byte, Space> constant(Span span) { return span; }
  [[nodiscard]] Span span_of(BlockAllocator::BlockId block, Bytes size) const {
    return reservation_.memory().subspan(blocks_.offset(block).count(), size.count());
  }
  Bytes& role_bytes(Role role) noexcept { return by_role_[static_cast<std::uint32_t>(role)]; }

  // One attempt; see the class comment for the order.
  std::optional<Buffer> attempt(Bytes bytes, std::string_view name, Role role, StreamRef stream,
                                std::source_location at) {
    const Bytes taken = bytes + bands_.bytes();
    const Bytes need = footprint(taken);
    const std::uint32_t consumer = list_of(stream, at);
    if (std::uint32_t* link = find_kept(consumer, need)) {
      const std::uint32_t slot = *link;
      const Span span = span_of(slots_[slot].block, bytes);
      note_freed_late(slot, stream, at);
      open_block(slots_[slot].block, bytes, name, stream, at);
      *link = slots_[slot].next;
      --lists_[consumer].kept;
      role_bytes(slots_[slot].role) -= need;
      occupy(slot, slots_[slot].block, bytes, name, role);
      return Buffer{*this, slot, span, stream};
    }
    const BlockAllocator::BlockId block = from_pool(consumer, need, at);
    if (block == BlockAllocator::no_block) return std::nullopt;
    const Span span = span_of(block, bytes);
    try {
      order_behind_pool(consumer, at);
      open_block(block, bytes, name, stream, at);
    } catch (...) {
      blocks_.free(block);  // nobody has used it: the pool is as before
      throw;
    }
    const std::uint32_t slot = take_slot();
    occupy(slot, block, bytes, name, role);
    high_water_ = (std::max)(high_water_, blocks_.capacity() - blocks_.free_bytes());
    return Buffer{*this, slot, span, stream};
  }

  BlockAllocator::BlockId from_pool(std::uint32_t consumer, Bytes need, std::source_location at) {
    BlockAllocator::BlockId block = blocks_.allocate(need);
    if (block != BlockAllocator::no_block) return block;
    if (join_pool(consumer, at)) block = blocks_.allocate(need);
    for (std::uint32_t i = 0; i < lists_.size() && block == BlockAllocator::no_block; ++i) {
      if (i != consumer && join_pool(i, at)) block = blocks_.allocate(need);
    }
    return block;
  }

  // Makes the stream of list `consumer` wait for the last free of every other stream whose blocks joined the pool since
  // it last did.
  void order_behind_pool(std::uint32_t consumer, std::source_location at) {
    StreamList& to = lists_[consumer];
    if (to.seen_joins == joins_) return;
    std::uint64_t* ordered = &ordered_[std::size_t{consumer} * lists_.size()];
    for (std::uint32_t i = 0; i < lists_.size(); ++i) {
      if (i == consumer || lists_[i].pooled <= ordered[i]) continue;
      device_.wait(*to.stream, lists_[i].event, at);
      ordered[i] = lists_[i].frees;
    }
    to.seen_joins = joins_;
  }

  // Moves the kept blocks of a list to the pool. False when there are none.
  bool join_pool(std::uint32_t index, std::source_location at) {
    StreamList& list = lists_[index];
    if (list.kept == 0) return false;
    if (list.unsettled) settle(index, at);
    list.pooled = list.frees;
    ++joins_;
    for (std::uint32_t bucket = 0; bucket < (1u << buckets_log2); ++bucket) {
      std::uint32_t& head = kept_[(std::size_t{index} << buckets_log2) + bucket];
      while (head != no_slot) {
        const std::uint32_t slot = head;
        head = slots_[slot].next;
        role_bytes(slots_[slot].role) -= blocks_.size(slots_[slot].block);
        blocks_.free(slots_[slot].block);
        give_slot(slot);
      }
    }
    list.kept = 0;
    return true;
  }

  // Makes up for what destructors could not do: tells the device of the blocks freed, then records the event behind
  // all of them.
  void settle(std::uint32_t index, std::source_location at) {
    StreamList& list = lists_[index];
    for (std::uint32_t bucket = 0; bucket < (1u << buckets_log2); ++bucket) {
      std::uint32_t slot = kept_[(std::size_t{index} << buckets_log2) + bucket];
      for (; slot != no_slot; slot = slots_[slot].next) note_freed_late(slot, *list.stream, at);
    }
    record_free(list, *list.stream, at);
    list.unsettled = false;
  }

  void record_free(StreamList& list, StreamRef stream, std::source_location at) {
    device_.record(list.event, stream, at);
    ++list.frees;
  }

  // The list that tracks `stream`, which takes the next list in turn when it has none.
  std::uint32_t list_of(StreamRef stream, std::source_location at) {
    const std::uint32_t found = find_list(stream);
    if (found != no_slot) return found;
    StreamList& list = lists_[next_list_];
    join_pool(next_list_, at);
    // From here on the event's records on the new stream come after the old stream's last: whoever waits for a later
    // one is behind the earlier ones too.
    if (list.frees != 0) device_.wait(stream, list.event, at);
    list.stream = stream;
    list.unsettled = false;
    list.seen_joins = 0;
    std::fill_n(&ordered_[std::size_t{next_list_} * lists_.size()], lists_.size(), 0);
    return std::exchange(next_list_, (next_list_ + 1) % static_cast<std::uint32_t>(lists_.size()));
  }
  [[nodiscard]] std::uint32_t find_list(StreamRef stream) const noexcept {
    for (std::uint32_t i = 0; i < lists_.size(); ++i) {
      if (lists_[i].stream && *lists_[i].stream == stream) return i;
    }
    return no_slot;
  }

  [[nodiscard]] std::uint32_t& bucket_of(std::uint32_t list, Bytes need) noexcept {
    const std::uint64_t hash = (need / BlockAllocator::alignment) * 0x9e3779b97f4a7c15u;
    return kept_[(std::size_t{list} << buckets_log2) + (hash >> (64 - buckets_log2))];
  }
  // The link to the block of footprint `need` that the list's stream freed last, or null.
  [[nodiscard]] std::uint32_t* find_kept(std::uint32_t list, Bytes need) noexcept {
    for (std::uint32_t* link = &bucket_of(list, need); *link != no_slot; link = &slots_[*link].next) {
      if (blocks_.size(slots_[*link].block) == need) return link;
    }
    return nullptr;
  }
  void keep(std::uint32_t list, std::uint32_t slot) noexcept {
    std::uint32_t& head = bucket_of(list, blocks_.size(slots_[slot].block));
    slots_[slot].next = head;
    slots_[slot].alive = false;
    head = slot;
    ++lists_[list].kept;
  }

  // A block is about to be a buffer of `bytes` bytes.
  void open_block(BlockAllocator::BlockId block, Bytes bytes, std::string_view name, StreamRef stream,
                  std::source_location at) {
    device_.note_block(BlockNote::allocated, constant(span_of(block, bytes + bands_.bytes())), name, stream, at);
    bands_.write(band_of(block, bytes), stream, at);
  }
  [[nodiscard]] Span band_of(BlockAllocator::BlockId block, Bytes bytes) const {
    return span_of(block, bytes + bands_.bytes()).subspan(bytes.count(), bands_.bytes().count());
  }
  void check_band(std::uint32_t slot, StreamRef stream, std::source_location at) {
    Slot& of = slots_[slot];
    if (bands_.bytes() == Bytes{} || of.overrun_told) return;
    const std::optional<std::uint64_t> wrong = bands_.first_wrong(band_of(of.block, of.size), stream, at);
    if (!wrong) return;
    of.overrun_told = true;
    throw Overrun{std::string{of.name_view()}, of.size, *wrong};
  }

  void release(std::uint32_t slot, StreamRef stream, std::source_location at) {
    check_band(slot, stream, at);
    const std::uint32_t list = list_of(stream, at);
    const Span span = span_of(slots_[slot].block, slots_[slot].size);
    if (options_.fill_freed) fill_freed(span, stream, at);
    record_free(lists_[list], stream, at);
    note_freed(slot, stream, at);
    keep(list, slot);
  }

  void release_or_quarantine(std::uint32_t slot, StreamRef stream) noexcept {
    try {
      check_band(slot, stream, std::source_location::current());
    } catch (const Overrun& overrun) {
      std::fprintf(stderr, "hbmoff: %s\n", overrun.what());
    } catch (const std::exception&) {
      slots_[slot].overrun_told = true;  // it cannot be looked at
    }
    if (detail::try_twice(device_, [&] { release(slot, stream, std::source_location::current()); })) return;
    ++failed_frees_;
    slots_[slot].unnoted = true;
    const std::uint32_t list = find_list(stream);
    if (list != no_slot) {
      keep(list, slot);
      lists_[list].unsettled = true;
      return;
    }
    slots_[slot].alive = false;
    slots_[slot].orphan_of = stream;
    slots_[slot].next = std::exchange(orphans_, slot);
  }

  void note_freed(std::uint32_t slot, StreamRef stream, std::source_location at) {
    const Slot& of = slots_[slot];
    device_.note_block(BlockNote::freed, constant(span_of(of.block, of.size + bands_.bytes())), of.name_view(), stream,
                       at);
  }
  void note_freed_late(std::uint32_t slot, StreamRef stream, std::source_location at) {
    if (!slots_[slot].unnoted) return;
    note_freed(slot, stream, at);
    slots_[slot].unnoted = false;
  }

  // Brings blocks that a destructor could not put on any list to their stream's.
  void adopt_orphans(std::source_location at) {
    while (orphans_ != no_slot) {
      const std::uint32_t slot = orphans_;
      const std::uint32_t list = list_of(*slots_[slot].orphan_of, at);
      orphans_ = slots_[slot].next;
      slots_[slot].orphan_of.reset();
      keep(list, slot);
      lists_[list].unsettled = true;
    }
  }

  void fill_freed(Span span, StreamRef stream, std::source_location at) {
    if constexpr (tier == Tier::hbm) {
      device_.fill_async(span, std::byte{0xff}, stream, at);
    } else {
      if constexpr (requires { device_.no_touch(); }) {
        if (device_.no_touch()) return;
      }
      device_.note_access(stream, "fill of freed memory", {}, {span}, at);
      device_.host_func(stream, [data = span.data(), count = span.count()] { std::memset(data, 0xff, count); }, at);
    }
  }

  // There are as many slots as the allocator has blocks, and each holds one: a block at hand means a slot is free.
  std::uint32_t take_slot() noexcept {
    if (spare_slots_ == no_slot) {
      slots_.emplace_back();  // within the reserved memory
      return static_cast<std::uint32_t>(slots_.size() - 1);
    }
    return std::exchange(spare_slots_, slots_[spare_slots_].next);
  }
  void give_slot(std::uint32_t slot) noexcept {
    slots_[slot].block = BlockAllocator::no_block;
    slots_[slot].next = std::exchange(spare_slots_, slot);
  }
  void occupy(std::uint32_t slot, BlockAllocator::BlockId block, Bytes size, std::string_view name,
              Role role) noexcept {
    Slot& taken = slots_[slot];
    taken.block = block;
    taken.size = size;
    taken.role = role;
    taken.alive = true;
    taken.overrun_told = false;
    taken.set_name(name);
    role_bytes(role) += blocks_.size(block);
  }

  [[nodiscard]] OutOfMemory::Details why_full(Bytes bytes, std::string_view name) const {
    OutOfMemory::Details details;
    details.tier = tier;
    details.what_for = name;
    details.requested = bytes;
    details.capacity = blocks_.capacity();
    details.free = blocks_.free_bytes();
    details.largest_free = blocks_.largest_free();
    std::copy(std::begin(by_role_), std::end(by_role_), std::begin(details.by_role));
    std::vector<const Slot*> alive;
    for (const Slot& slot : slots_) {
      if (slot.alive) alive.push_back(&slot);
    }
    const std::size_t shown = std::min<std::size_t>(alive.size(), 5);
    const auto larger = [this](const Slot* a, const Slot* b) {
      const Bytes x = blocks_.size(a->block), y = blocks_.size(b->block);
      return x != y ? x > y : blocks_.offset(a->block) < blocks_.offset(b->block);
    };
    std::partial_sort(alive.begin(), alive.begin() + static_cast<std::ptrdiff_t>(shown), alive.end(), larger);
    for (std::size_t i = 0; i < shown; ++i) {
      details.largest.push_back({std::string{alive[i]->name_view()}, alive[i]->role, blocks_.size(alive[i]->block)});
    }
    if (blocks_.live_blocks() == blocks_.max_blocks()) {
      details.remedy = "all " + std::to_string(blocks_.max_blocks()) +
                       " blocks of the arena are in use: raise ArenaOptions::max_blocks";
    } else if (bytes < blocks_.capacity() && footprint(bytes) <= blocks_.free_bytes()) {
      details.remedy = "the free bytes are scattered: allocate what lives long before what does not";
    } else {
      details.remedy = "give the arena more memory, or offload more of what fills it";
    }
    return details;
  }

  D& device_;
  ArenaOptions options_;
  Reservation reservation_;
  detail::GuardBands<D, Space> bands_;
  BlockAllocator blocks_;
  Bytes high_water_;
  Bytes by_role_[role_count] = {};
  std::uint64_t joins_ = 0;  // how often blocks joined the pool from a list
  std::uint64_t failed_frees_ = 0;
  std::uint32_t next_list_ = 0;  // the list that the next new stream takes
  std::uint32_t spare_slots_ = no_slot;
  std::uint32_t orphans_ = no_slot;  // blocks whose free failed when their stream had no list
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> kept_;  // per list, buckets of kept blocks by footprint
  std::vector<std::uint64_t> ordered_;  // [consumer][producer]: how many frees of the producer it is ordered behind
  std::vector<StreamList> lists_;
};

}  // namespace hbmoff
