// A bounded queue of callables from host threads to one worker thread, stored in place.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "hbmoff/device/detail/futex.hpp"

namespace hbmoff::detail {

/// Any number of threads push; one thread calls `work`. Operations run in push order and are numbered by tickets 1,
/// 2, ... One allocation, made by the constructor.
///
/// Each slot carries one word: `2 * ticket` once the operation is in it, `2 * ticket + 1` once it is done. A ticket's
/// completion is read from its own slot, so a thread that waits for a ticket is ordered after that operation and the
/// ones before it, and after none that merely happened to be done too. ThreadSanitizer therefore sees a missing or
/// misplaced wait even when the timing was lucky. For the same reason worker and host share no mutex.
///
/// An operation is called with the time it starts at, the later of its push and the end of the operation before it (not
/// the moment the worker woke up), and returns the time it ended at. An operation that only models time sleeps until
/// its end, so that what one sleep overshoots is not added to the next.
class StreamQueue {
 public:
  using Clock = std::chrono::steady_clock;
  using TimePoint = Clock::time_point;

  /// Bytes an operation may take.
  static constexpr std::size_t payload_bytes = 448;
  static constexpr std::size_t payload_alignment = 64;

  /// `capacity` > 0. std::bad_alloc when there is no memory for as many.
  explicit StreamQueue(std::uint64_t capacity) : capacity_{capacity}, slots_{make_slots(capacity)} {}
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  /// Puts `Op{args...}` behind what was pushed; gives its ticket. The worker calls it once, destroys it, and then the
  /// ticket is done. A full queue blocks; `waited()` is called when it did, and may throw. After a throw nothing was
  /// pushed.
  template <class Op, class Waited, class... Args>
  std::uint64_t push(Waited&& waited, Args&&... args) {
    static_assert(sizeof(Op) <= payload_bytes,
                  "the callable captures more than a stream's slot holds: capture pointers");
    static_assert(alignof(Op) <= payload_alignment, "the callable is aligned more strictly than a stream's slot");
    const std::scoped_lock lock{producers_};
    const std::uint64_t ticket = last_.load(std::memory_order_relaxed) + 1;
    if (ticket > capacity_ && !done(ticket - capacity_)) {
      wait_done(ticket - capacity_);
      waited();
    }
    Slot& slot = slot_of(ticket);
    ::new (static_cast<void*>(slot.payload)) Op{std::forward<Args>(args)...};
    slot.run = [](std::byte* payload, TimePoint start) noexcept {
      Op* op = std::launder(reinterpret_cast<Op*>(payload));
      const TimePoint end = (*op)(start);
      op->~Op();
      return end;
    };
    slot.pushed = Clock::now();
    publish(slot, ticket);
    return ticket;
  }

  /// Makes `work` return once everything pushed is done. Nothing is pushed afterwards.
  void close() noexcept {
    const std::scoped_lock lock{producers_};
    const std::uint64_t ticket = last_.load(std::memory_order_relaxed) + 1;
    if (ticket > capacity_) wait_done(ticket - capacity_);
    Slot& slot = slot_of(ticket);
    slot.run = nullptr;
    publish(slot, ticket);
  }

  /// The ticket of the newest operation, 0 when there was none.
  [[nodiscard]] std::uint64_t last() const noexcept { return last_.load(std::memory_order_relaxed); }

  /// Whether operation `ticket` is done; true for 0.
  [[nodiscard]] bool done(std::uint64_t ticket) const noexcept {
    return ticket == 0 || slot_of(ticket).word.load(std::memory_order_acquire) > 2 * ticket;
  }

  /// Blocks until operation `ticket` is done.
  void wait_done(std::uint64_t ticket) const noexcept {
    if (ticket == 0) return;
    const std::atomic<std::uint64_t>& word = slot_of(ticket).word;
    for (;;) {
      const std::uint64_t seen = word.load(std::memory_order_acquire);
      if (seen > 2 * ticket) return;
      sleep_while_equal(word, seen);
    }
  }

  /// When operation `ticket`, which is done, ended, or a later one that has taken its slot since.
  [[nodiscard]] TimePoint ended(std::uint64_t ticket) const noexcept {
    return ticket == 0 ? TimePoint{} : slot_of(ticket).ended.load(std::memory_order_relaxed);
  }

  /// The worker's loop; returns after `close`.
  void work() noexcept {
    TimePoint now{};
    for (std::uint64_t ticket = 1;; ++ticket) {
      Slot& slot = slot_of(ticket);
      for (;;) {
        const std::uint64_t seen = slot.word.load(std::memory_order_acquire);
        if (seen == 2 * ticket) break;
        sleep_while_equal(slot.word, seen);
      }
      if (slot.run == nullptr) return;
      now = slot.run(slot.payload, (std::max)(now, slot.pushed));
      slot.ended.store(now, std::memory_order_relaxed);
      slot.word.store(2 * ticket + 1, std::memory_order_release);
      wake_all(slot.word);
    }
  }

 private:
  struct alignas(payload_alignment) Slot {
    std::atomic<std::uint64_t> word{0};
    TimePoint (*run)(std::byte*, TimePoint) noexcept = nullptr;
    TimePoint pushed{};
    std::atomic<TimePoint> ended{};
    alignas(payload_alignment) std::byte payload[payload_bytes];
  };

  static std::unique_ptr<Slot[]> make_slots(std::uint64_t count) {
    // Tested here: an array too large to count reaches aligned operator new of some libraries as a small one.
    if (count > static_cast<std::uint64_t>(PTRDIFF_MAX) / sizeof(Slot)) throw std::bad_array_new_length{};
    return std::unique_ptr<Slot[]>{new Slot[count]};
  }

  [[nodiscard]] Slot& slot_of(std::uint64_t ticket) const noexcept { return slots_[ticket % capacity_]; }

  void publish(Slot& slot, std::uint64_t ticket) noexcept {
    last_.store(ticket, std::memory_order_relaxed);
    slot.word.store(2 * ticket, std::memory_order_release);
    wake_all(slot.word);
  }

  std::uint64_t capacity_;
  std::unique_ptr<Slot[]> slots_;
  std::mutex producers_;  // never taken by the worker
  std::atomic<std::uint64_t> last_{0};
};

}  // namespace hbmoff::detail
