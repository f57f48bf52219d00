// CheckedDevice: proves the order of every access, whatever the timing was.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hbmoff/core/error.hpp"
#include "hbmoff/core/units.hpp"
#include "hbmoff/device/check_report.hpp"
#include "hbmoff/device/detail/access_map.hpp"
#include "hbmoff/device/device.hpp"

namespace hbmoff {

struct CheckOptions {
  /// Where reports go as well. Outlives the device, so that it also gets those of the device's own end. Without it those
  /// are printed on standard error.
  std::vector<CheckReport>* reports = nullptr;
  /// A call that is at fault throws CheckError and has no effect. Else it is only noted, and goes through.
  bool throws = true;
};

namespace detail {

// The launch options of a device that has some.
template <class D>
struct LaunchOptionsOf {
  struct type {};
};
template <class D>
  requires requires { typename D::LaunchOptions; }
struct LaunchOptionsOf<D> {
  using type = typename D::LaunchOptions;
};

}  // namespace detail

/// A device that checks how another one is used. It stands in the place of `D` in a program,
///
///     hbmoff::CheckedDevice<hbmoff::HostDevice> device{{.hbm_capacity = 2_GiB}};
///
/// and runs it in the same way, but proves for every access to device and pinned memory that the program's own waits
/// and synchronisations order it after the accesses that it must come after. It does so with a vector clock for each
/// stream, event and host thread: a report does not depend on how the timing fell, and silence means that no timing of
/// this sequence of calls is wrong.
///
/// It knows of copies and fills by itself. Of kernels and host functions it knows what `note_access` said before the
/// launch, and of the host's own accesses to pinned memory what `note_host_access` says. Memory of arenas is checked
/// block by block; other memory as it was allocated. Pinned memory that the device did not allocate takes part from its
/// first use on.
///
/// Faults are the values of `CheckFault`. A call at fault throws `CheckError` and has no effect; calls that cannot throw
/// note theirs, and so do warnings. `reports()` has all of them.
///
/// - Host threads are not ordered with each other by what the device sees. A thread that took over from others (by a
///   join, or a mutex) says so: `note_threads_joined`.
/// - A copy hands on whether bytes were ever written; reading bytes that were not is a fault of kernels and of the host
///   only, so padding may travel.
/// - The end of a stream orders nothing.
/// - With HostDeviceOptions::debug_protection each kernel runs at once, alone, with nothing of HBM accessible but what
///   its note names; touching more is reported with its name.
///
/// Thread-safe, as `D` is; calls take one lock. Streams and events are its own; `inner` gives what `D` made.
template <Device D>
class CheckedDevice {
  struct StreamState;
  struct EventState;

 public:
  using Options = typename D::Options;
  using LaunchOptions = typename detail::LaunchOptionsOf<D>::type;
  using At = std::source_location;

  /// Notes are looked at: see `hbmoff::takes_notes`.
  static constexpr bool takes_notes = true;

  /// A view of a stream. Never null; two are equal when they are of the same stream.
  class StreamRef {
   public:
    StreamRef() = delete;
    StreamRef(std::nullptr_t) = delete;
    [[nodiscard]] std::string_view name() const noexcept { return state_->name; }
    /// The stream of `D`, to launch kernels on.
    [[nodiscard]] typename D::StreamRef inner() const { return *state_->inner; }
    friend bool operator==(StreamRef, StreamRef) = default;

   private:
    friend CheckedDevice;
    explicit StreamRef(StreamState* state) noexcept : state_{state} {}
    StreamState* state_;
  };

  /// A view of an event. Never null.
  class EventRef {
   public:
    EventRef() = delete;
    EventRef(std::nullptr_t) = delete;
    [[nodiscard]] typename D::EventRef inner() const { return state_->inner; }
    friend bool operator==(EventRef, EventRef) = default;

   private:
    friend CheckedDevice;
    explicit EventRef(EventState* state) noexcept : state_{state} {}
    EventState* state_;
  };

  /// Owns a stream. Move-only; a moved-from stream is empty.
  class Stream {
   public:
    Stream(Stream&& other) noexcept : state_{std::exchange(other.state_, nullptr)} {}
    Stream& operator=(Stream&& other) noexcept {
      Stream old{std::move(*this)};
      state_ = std::exchange(other.state_, nullptr);
      return *this;
    }
    ~Stream() {
      if (state_ != nullptr) state_->device->destroy(*state_);
    }
    [[nodiscard]] bool empty() const noexcept { return state_ == nullptr; }
    /// Throws `InvalidArgument` when empty.
    operator StreamRef() const {  // NOLINT(google-explicit-constructor): an owner converts to its view
      if (state_ == nullptr) throw InvalidArgument{"a moved-from stream was used"};
      return StreamRef{state_};
    }

   private:
    friend CheckedDevice;
    explicit Stream(StreamState* state) noexcept : state_{state} {}
    StreamState* state_;
  };

  /// Owns an event. Move-only; a moved-from event is empty.
  class Event {
   public:
    Event(Event&& other) noexcept = default;
    Event& operator=(Event&& other) noexcept = default;
    ~Event() = default;
    [[nodiscard]] bool empty() const noexcept { return state_ == nullptr; }
    /// Throws `InvalidArgument` when empty.
    operator EventRef() const {  // NOLINT(google-explicit-constructor): an owner converts to its view
      if (state_ == nullptr) throw InvalidArgument{"a moved-from event was used"};
      return EventRef{state_.get()};
    }

   private:
    friend CheckedDevice;
    explicit Event(std::unique_ptr<EventState> state) noexcept : state_{std::move(state)} {}
    std::unique_ptr<EventState> state_;
  };

  /// Makes the device it checks.
  explicit CheckedDevice(Options options = {}, CheckOptions check = {}) : device_{options}, check_{check} {}
  CheckedDevice(const CheckedDevice&) = delete;
  CheckedDevice& operator=(const CheckedDevice&) = delete;

  /// Reports what was not given back. Streams and events must have been (else the program ends: their owners would use a
  /// dead device).
  ~CheckedDevice() {
    for (const auto& [begin, reservation] : reservations_) {
      CheckReport report{.fault = CheckFault::leak,
                         .later = side({.at = reservation.at}, false, begin, reservation.end)};
      report.later.what = "nobody freed";
      note(std::move(report), false);
    }
    for (const Noted& noted : reports_) {
      if (check_.reports != nullptr || noted.told) continue;
      std::fprintf(stderr, "hbmoff::CheckedDevice: %s\n", noted.report.message().c_str());
    }
    if (live_streams_ != 0 || *live_events_ != 0) {
      std::fputs("hbmoff::CheckedDevice destroyed before its streams and events\n", stderr);
      std::abort();
    }
  }

  /// The device that is checked. What is called on it directly is not seen.
  [[nodiscard]] D& inner() noexcept { return device_; }
  [[nodiscard]] const D& inner() const noexcept { return device_; }

  /// Everything found so far, warnings included. `errors` counts what is no warning.
  [[nodiscard]] std::vector<CheckReport> reports() const {
    const std::scoped_lock lock{mutex_};
    std::vector<CheckReport> all;
    for (Noted& noted : reports_) {
      noted.told = true;
      all.push_back(noted.report);
    }
    return all;
  }
  [[nodiscard]] std::uint64_t errors() const {
    const std::scoped_lock lock{mutex_};
    return static_cast<std::uint64_t>(std::count_if(
        reports_.begin(), reports_.end(), [](const Noted& noted) { return !is_warning(noted.report.fault); }));
  }

  // ------------------------------------------------------------------------------------------------ streams, events

  [[nodiscard]] Stream create_stream(std::string_view name = "stream", At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    auto state = std::make_unique<StreamState>();
    state->inner.emplace(device_.create_stream(name, at));
    state->device = this;
    state->name = name;
    state->actor = new_actor("stream '" + state->name + "'", state.get());
    state->clock.tick(state->actor);
    streams_.push_back(std::move(state));
    ++live_streams_;
    return Stream{streams_.back().get()};
  }

  [[nodiscard]] Event create_event(EventTiming timing = EventTiming::none, At at = At::current()) {
    return Event{std::make_unique<EventState>(device_.create_event(timing, at), live_events_)};
  }

  void record(EventRef event, StreamRef stream, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    device_.record(event.inner(), stream.inner(), at);
    StreamState& on = *stream.state_;
    enqueued(on);
    event.state_->recorded = true;
    event.state_->clock = on.clock;
    on.records.push_back({on.clock.at(on.actor), at});
    if (on.records.size() > most_records) on.records.pop_front();
  }

  void wait(StreamRef stream, EventRef event, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    if (!event.state_->recorded) {
      CheckReport report{.fault = CheckFault::wait_never_recorded};
      report.later = {
          .what = "waits for an event that was never recorded", .actor = actors_[stream.state_->actor].name, .at = at};
      report.remedy = "record the event first: the wait orders nothing";
      note(std::move(report), false);
    }
    device_.wait(stream.inner(), event.inner(), at);
    enqueued(*stream.state_);
    if (!event.state_->recorded) return;
    StreamState& on = *stream.state_;
    on.clock.join(event.state_->clock);
    on.clock.tick(on.actor);  // events recorded before do not stand for what the stream waited for
  }

  [[nodiscard]] bool query(EventRef event, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    const bool done = device_.query(event.inner(), at);
    if (done && event.state_->recorded) host().clock.join(event.state_->clock);
    return done;
  }
  void synchronize(EventRef event, At at = At::current()) {
    std::unique_lock lock{mutex_};
    const detail::VectorClock reached = event.state_->clock;
    const typename D::EventRef inner = event.inner();
    lock.unlock();  // it may block
    device_.synchronize(inner, at);
    lock.lock();
    host().clock.join(reached);
  }
  void synchronize(StreamRef stream, At at = At::current()) {
    std::unique_lock lock{mutex_};
    const detail::VectorClock reached = stream.state_->clock;
    const typename D::StreamRef inner = stream.inner();
    lock.unlock();
    device_.synchronize(inner, at);
    lock.lock();
    host().clock.join(reached);
  }
  [[nodiscard]] auto elapsed(EventRef begin, EventRef end, At at = At::current()) {
    return device_.elapsed(begin.inner(), end.inner(), at);
  }

  // ------------------------------------------------------------------------------------------------ memory

  [[nodiscard]] device_span<std::byte> allocate_device(Bytes bytes, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    const auto memory = device_.allocate_device(bytes, at);
    add_reservation(memory, true, at);
    return memory;
  }
  [[nodiscard]] pinned_span<std::byte> allocate_pinned(Bytes bytes, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    const auto memory = device_.allocate_pinned(bytes, at);
    add_reservation(memory, false, at);
    return memory;
  }
  void free_device(device_span<std::byte> memory) noexcept {
    const std::scoped_lock lock{mutex_};
    end_reservation(memory);
    device_.free_device(memory);
  }
  void free_pinned(pinned_span<std::byte> memory) noexcept {
    const std::scoped_lock lock{mutex_};
    end_reservation(memory);
    device_.free_pinned(memory);
  }
  [[nodiscard]] MemoryInfo memory_info() const { return device_.memory_info(); }
  [[nodiscard]] bool lost() const noexcept { return device_.lost(); }

  // ------------------------------------------------------------------------------------------------ work

  void copy_async(device_span<std::byte> to, pinned_span<const std::byte> from, StreamRef stream,
                  At at = At::current()) {
    copy(to, from, stream, at);
  }
  void copy_async(pinned_span<std::byte> to, device_span<const std::byte> from, StreamRef stream,
                  At at = At::current()) {
    copy(to, from, stream, at);
  }
  void copy_async(device_span<std::byte> to, device_span<const std::byte> from, StreamRef stream,
                  At at = At::current()) {
    copy(to, from, stream, at);
  }
  void fill_async(device_span<std::byte> memory, std::byte value, StreamRef stream, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = *stream.state_;
    enqueued(on);
    AccessStamp work = stamp(on, AccessBy::fill, "fill", at);
    check(work, on.clock, memory, Reads::nothing, true);
    deliver();
    device_.fill_async(memory, value, stream.inner(), at);
    work.time = on.clock.tick(on.actor);
    apply_write(work, memory);
  }

  /// As `D::enqueue`. What the last `note_access` on the stream said is what this launch touches; without one a warning
  /// is noted, once for each name.
  template <class F>
    requires requires(D& d, typename D::StreamRef s, F&& f, LaunchOptions o) { d.enqueue(s, std::forward<F>(f), o); }
  void enqueue(StreamRef stream, F&& callable, LaunchOptions options = {}, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = *stream.state_;
    Pending pending = std::exchange(on.pending, {});
    if (!pending.noted) warn_undeclared(on, options.name, at);
    if constexpr (requires { options.declared; }) {
      if (device_.options().debug_protection) {
        run_guarded(stream, std::forward<F>(callable), options, pending, at);
        apply(on, pending);
        return;
      }
    }
    device_.enqueue(stream.inner(), std::forward<F>(callable), options, at);
    apply(on, pending);
  }

  /// As `D::host_func`; notes count as for `enqueue`.
  template <class F>
  void host_func(StreamRef stream, F&& callable, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = *stream.state_;
    Pending pending = std::exchange(on.pending, {});
    if (!pending.noted) warn_undeclared(on, "host function", at);
    device_.host_func(stream.inner(), std::forward<F>(callable), at);
    apply(on, pending);
  }

  // ------------------------------------------------------------------------------------------------ notes

  /// The next launch on `stream`, called `label`, reads and writes these ranges (a range that it updates belongs in
  /// both). Checked here. Where `D` has `enqueue` the launch itself makes them count, elsewhere this call does.
  void note_access(StreamRef stream, std::string_view label, AccessList reads, AccessList writes,
                   At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = *stream.state_;
    enqueued(on);
    Pending pending{.noted = true, .work = stamp(on, AccessBy::kernel, label, at)};
    pending.reads.assign(reads.begin(), reads.end());
    pending.writes.assign(writes.begin(), writes.end());
    for (const AccessRange& range : pending.reads) check(pending.work, on.clock, range, Reads::content, false);
    for (const AccessRange& range : pending.writes) check(pending.work, on.clock, range, Reads::nothing, true);
    deliver();
    if constexpr (requires { typename D::LaunchOptions; }) {
      on.pending = std::move(pending);
    } else {
      apply(on, pending);
    }
  }

  /// The calling thread is about to read and write these ranges of pinned memory.
  void note_host_access(std::string_view label, AccessList reads, AccessList writes, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    HostState& thread = host();
    AccessStamp work{.actor = thread.actor, .by = AccessBy::host, .label = intern(label), .at = at};
    for (const AccessRange& range : reads) check(work, thread.clock, range, Reads::content, false);
    for (const AccessRange& range : writes) check(work, thread.clock, range, Reads::nothing, true);
    deliver();
    work.time = thread.clock.tick(thread.actor);
    for (const AccessRange& range : reads) apply_read(work, range);
    for (const AccessRange& range : writes) apply_write(work, range);
  }

  /// The calling thread comes after everything that other threads have called on this device so far.
  void note_threads_joined() {
    const std::scoped_lock lock{mutex_};
    HostState& me = host();
    for (const auto& [id, other] : hosts_) me.clock.join(other.clock);
  }

  template <class Space>
  void note_block(BlockNote what, memory_span<const std::byte, Space> memory, std::string_view name, StreamRef stream,
                  At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    if (what == BlockNote::named) {
      parts_.put(begin, end, name);
      return;
    }
    StreamState& on = *stream.state_;
    enqueued(on);
    const bool device = std::is_same_v<Space, DeviceSpace>;
    if (what == BlockNote::allocated) {
      map_.visit(begin, end, [&](Address first, Cell& cell) {
        if (cell.write.before(on.clock) || !found_.empty()) return;
        AccessStamp work = stamp(on, AccessBy::nobody, name, at);
        find(CheckFault::unordered_reuse, work, true, &cell.write, first, cell.end, on.clock);
      });
      deliver();
      blocks_.put(begin, end, name);
      parts_.erase(begin, end);
      map_.visit(begin, end, [&, block = ++last_block_](Address, Cell& cell) {
        cell.block = block;
        cell.extent = Extent::open;
        cell.defined = false;
      });
      return;
    }
    AccessStamp work = stamp(on, AccessBy::release, name, at);
    map_.visit(begin, end, [&](Address first, Cell& cell) {
      if (!found_.empty()) return;
      if (cell.extent == Extent::freed) {
        return find(CheckFault::use_after_free, work, true, &cell.write, first, cell.end, on.clock);
      }
      check_free(work, on.clock, first, cell);
    });
    deliver();
    // A point in the stream's order, behind which nothing was put yet: an event recorded just before stands for it too.
    work.time = on.clock.at(on.actor);
    map_.put(begin, end, {.block = ++last_block_, .extent = Extent::freed, .device = device, .write = work});
  }

  void note_discarded(device_span<const std::byte> memory, std::string_view name) noexcept {
    const std::scoped_lock lock{mutex_};
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    parts_.put(begin, end, name);
    map_.visit(begin, end, [](Address, Cell& cell) { cell.defined = false; });
  }

  template <class Space>
  void note_divided(memory_span<const std::byte, Space> memory, bool divided) noexcept {
    const std::scoped_lock lock{mutex_};
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    const bool known = map_.touches(begin, end);
    const std::uint64_t block = ++last_block_;
    if (!known) map_.put(begin, end, {.device = std::is_same_v<Space, DeviceSpace>, .defined = true});
    map_.visit(begin, end, [&](Address, Cell& cell) {
      cell.extent = divided ? Extent::divided : Extent::open;
      cell.block = block;
    });
    if (!divided) blocks_.erase(begin + 1, end);
  }

  // ------------------------------------------------------------------------------------------------ what D has

  [[nodiscard]] bool no_touch() const noexcept
    requires requires(const D& d) { d.no_touch(); }
  {
    return device_.no_touch();
  }
  [[nodiscard]] const auto& options() const noexcept
    requires requires(const D& d) { d.options(); }
  {
    return device_.options();
  }
  void fail_call(std::uint64_t n) noexcept
    requires requires(D& d) { d.fail_call(n); }
  {
    device_.fail_call(n);
  }

 private:
  using Address = detail::AccessMap::Address;
  using Cell = detail::AccessMap::Cell;
  using AccessBy = detail::AccessBy;
  using AccessStamp = detail::AccessStamp;
  using Extent = detail::Extent;

  /// Of the records of a stream, how many are remembered to be named in reports.
  static constexpr std::size_t most_records = 512;

  /// What a note said of the next launch.
  struct Pending {
    bool noted = false;
    AccessStamp work = {};
    std::vector<AccessRange> reads = {};
    std::vector<AccessRange> writes = {};
  };
  struct Record {
    std::uint64_t time;
    At at;
  };
  struct StreamState {
    CheckedDevice* device = nullptr;
    std::optional<typename D::Stream> inner;
    std::string name;
    detail::Actor actor = 0;
    detail::VectorClock clock;
    std::deque<Record> records;
    Pending pending;
  };
  struct EventState {
    EventState(typename D::Event event, std::shared_ptr<std::atomic<std::uint64_t>> live)
        : inner{std::move(event)}, live_events{std::move(live)} {
      ++*live_events;
    }
    EventState(const EventState&) = delete;
    EventState& operator=(const EventState&) = delete;
    ~EventState() { --*live_events; }
    typename D::Event inner;
    std::shared_ptr<std::atomic<std::uint64_t>> live_events;
    bool recorded = false;
    detail::VectorClock clock;
  };
  struct HostState {
    detail::Actor actor = 0;
    detail::VectorClock clock;
  };
  struct ActorInfo {
    std::string name;
    StreamState* stream;  ///< null: a host thread
  };
  struct Reservation {
    Address end;
    At at;
  };

  static std::pair<Address, Address> range_of(AccessRange range) {
    const auto begin = reinterpret_cast<Address>(range.data);
    return {begin, begin + range.bytes.count()};
  }

  // ------------------------------------------------------------------------------------------------ actors

  detail::Actor new_actor(std::string name, StreamState* stream) {
    actors_.push_back({std::move(name), stream});
    return static_cast<detail::Actor>(actors_.size() - 1);
  }
  HostState& host() {
    const auto [found, is_new] = hosts_.try_emplace(std::this_thread::get_id());
    if (is_new) {
      const std::string name = hosts_.size() == 1 ? "the host" : "host thread " + std::to_string(hosts_.size());
      found->second.actor = new_actor(name, nullptr);
      found->second.clock.tick(found->second.actor);
    }
    return found->second;
  }
  // Work put on a stream comes after what the calling thread has done and seen.
  void enqueued(StreamState& stream) {
    HostState& from = host();
    stream.clock.join(from.clock);
    from.clock.tick(from.actor);  // what the thread does now is not before that work
  }
  // Of work that is about to be put on `on`; its time is set when it has been.
  AccessStamp stamp(const StreamState& on, AccessBy by, std::string_view label, At at) {
    return {.actor = on.actor, .by = by, .label = intern(label), .time = 0, .at = at};
  }
  std::uint32_t intern(std::string_view label) {
    const auto [found, is_new] = label_ids_.try_emplace(std::string{label}, static_cast<std::uint32_t>(labels_.size()));
    if (is_new) labels_.push_back(found->first);
    return found->second;
  }

  void destroy(StreamState& stream) noexcept {
    const std::scoped_lock lock{mutex_};
    stream.inner.reset();
    --live_streams_;
  }

  // ------------------------------------------------------------------------------------------------ reservations

  template <class Span>
  void add_reservation(Span memory, bool device, At at) {
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    reservations_.insert_or_assign(begin, Reservation{end, at});
    map_.put(begin, end, {.block = ++last_block_, .device = device});
    parts_.erase(begin, end);
    blocks_.put(begin, end, "memory allocated at " + where(at));
  }

  // Memory given back to the system: everything that was put on a stream for it must be known to the host to be done.
  template <class Span>
  void end_reservation(Span memory) noexcept {
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    const auto found = reservations_.find(begin);
    if (found == reservations_.end()) return;
    if (!device_.lost()) {
      HostState& from = host();
      const AccessStamp stamp{.actor = from.actor, .by = AccessBy::release, .at = found->second.at};
      map_.visit(begin, end, [&](Address first, Cell& cell) { check_free(stamp, from.clock, first, cell); });
      note_found();
    }
    reservations_.erase(found);
    parts_.erase(begin, end);
    if constexpr (std::is_same_v<typename Span::space, DeviceSpace>) {
      map_.put(begin, end,
               {.block = ++last_block_, .extent = Extent::freed, .device = true, .write = {.by = AccessBy::release}});
    } else {
      // The system may hand these addresses out as ordinary memory now.
      map_.erase(begin, end);
      blocks_.erase(begin, end);
    }
  }

  // ------------------------------------------------------------------------------------------------ checks

  enum class Reads : std::uint8_t { nothing, for_a_copy, content };

  // Whether `work`, which knows of `clock`, may touch the range. One report for each range.
  void check(const AccessStamp& work, const detail::VectorClock& clock, AccessRange range, Reads reads, bool writes) {
    if (range.bytes == Bytes{}) return;
    const auto [begin, end] = range_of(range);
    const bool known = map_.touches(begin, end);
    bool reported = false;
    std::optional<std::uint64_t> block;
    const auto report = [&](CheckFault fault, const AccessStamp* earlier, Address first, Address last) {
      if (!std::exchange(reported, true)) find(fault, work, writes, earlier, first, last, clock);
    };
    map_.visit(
        begin, end,
        [&](Address first, Cell& cell) {
          if (cell.extent == Extent::freed) return report(CheckFault::use_after_free, &cell.write, first, cell.end);
          if (cell.extent == Extent::divided || block.value_or(cell.block) != cell.block) {
            return report(CheckFault::out_of_range, nullptr, first, cell.end);
          }
          block = cell.block;
          const auto conflict = [&](const AccessStamp& earlier) {
            const bool host = work.by == AccessBy::host || earlier.by == AccessBy::host;
            const bool reuse = earlier.by == AccessBy::release;
            report(reuse    ? CheckFault::unordered_reuse
                   : host   ? CheckFault::host_access
                   : writes ? CheckFault::write_before_access
                            : CheckFault::read_before_write,
                   &earlier, first, cell.end);
          };
          if (!cell.write.before(clock)) conflict(cell.write);
          for (const AccessStamp& read : cell.reads) {
            if (writes && !read.before(clock)) conflict(read);
          }
          if (reads == Reads::content && !cell.defined) {
            report(CheckFault::uninitialised_read, &cell.write, first, cell.end);
            cell.defined = true;  // said once
          }
        },
        [&](Address first, Address last) {
          if (known) report(CheckFault::out_of_range, nullptr, first, last);
        });
  }

  void check_free(const AccessStamp& work, const detail::VectorClock& clock, Address first, const Cell& cell) {
    if (!cell.write.before(clock)) {
      return find(CheckFault::free_under_work, work, true, &cell.write, first, cell.end, clock);
    }
    for (const AccessStamp& read : cell.reads) {
      if (!read.before(clock)) return find(CheckFault::free_under_work, work, true, &read, first, cell.end, clock);
    }
  }

  // Memory that this device did not allocate takes part from its first use on.
  void adopt(Address begin, Address end) {
    if (!map_.touches(begin, end)) map_.put(begin, end, {.block = ++last_block_, .defined = true});
  }

  void apply_read(const AccessStamp& work, AccessRange range) {
    if (range.bytes == Bytes{}) return;
    const auto [begin, end] = range_of(range);
    adopt(begin, end);
    map_.visit(begin, end, [&](Address, Cell& cell) {
      for (AccessStamp& read : cell.reads) {
        if (read.actor == work.actor) {
          read = work;
          return;
        }
      }
      cell.reads.push_back(work);
    });
  }

  void apply_write(const AccessStamp& work, AccessRange range, bool defined = true) {
    if (range.bytes == Bytes{}) return;
    const auto [begin, end] = range_of(range);
    adopt(begin, end);
    map_.visit(begin, end, [&](Address, Cell& cell) {
      if (cell.extent != Extent::open) return;
      cell.write = work;
      cell.reads.clear();
      cell.defined = defined;
    });
    map_.join(begin, end);
  }

  void apply(StreamState& on, Pending& pending) {
    pending.work.time = on.clock.tick(on.actor);
    for (const AccessRange& range : pending.reads) apply_read(pending.work, range);
    for (const AccessRange& range : pending.writes) apply_write(pending.work, range);
  }

  template <class To, class From>
  void copy(To to, From from, StreamRef stream, At at) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = *stream.state_;
    enqueued(on);
    AccessStamp work = stamp(on, AccessBy::copy, "copy", at);
    check(work, on.clock, from, Reads::for_a_copy, false);
    check(work, on.clock, to, Reads::nothing, true);
    deliver();
    device_.copy_async(to, from, stream.inner(), at);
    work.time = on.clock.tick(on.actor);
    struct Piece {
      std::uint64_t first, count;
      bool defined;
    };
    std::vector<Piece> pieces;
    const auto [begin, end] = range_of(from);
    apply_read(work, from);
    map_.visit(begin, end, [&, first_of_all = begin](Address first, Cell& cell) {
      pieces.push_back({first - first_of_all, cell.end - first, cell.defined});
    });
    for (const Piece& piece : pieces) apply_write(work, to.subspan(piece.first, piece.count), piece.defined);
  }

  template <class F>
  void run_guarded(StreamRef stream, F&& callable, LaunchOptions options, const Pending& pending, At at) {
    if constexpr (requires { options.declared; }) {
      std::remove_pointer_t<decltype(options.declared)> declared{.reads = pending.reads, .writes = pending.writes};
      options.declared = &declared;
      device_.enqueue(stream.inner(), std::forward<F>(callable), options, at);
      device_.synchronize(stream.inner(), at);  // `declared` ends here; one at a time is what this mode is for
      if (!declared.violation) return;
      const auto address = reinterpret_cast<Address>(declared.violation->address);
      AccessStamp work = pending.work;
      if (!pending.noted) work = stamp(*stream.state_, AccessBy::kernel, options.name, at);
      find(CheckFault::undeclared_access, work, declared.violation->write, nullptr, address, address + 1,
           stream.state_->clock);
      deliver();
    }
  }

  // ------------------------------------------------------------------------------------------------ reports

  static std::string where(At at) { return std::string{at.file_name()} + ":" + std::to_string(at.line()); }

  [[nodiscard]] CheckedAccess side(const AccessStamp& stamp, bool writes, Address first, Address last) {
    CheckedAccess access{.at = stamp.at};
    if (stamp.actor < actors_.size()) access.actor = actors_[stamp.actor].name;
    const std::string label = stamp.label < labels_.size() ? labels_[stamp.label] : std::string{};
    switch (stamp.by) {
      case AccessBy::nobody:
        access.what = "the allocation of";
        break;
      case AccessBy::kernel:
        access.what = "'" + label + "'" + (writes ? " writes" : " reads");
        break;
      case AccessBy::copy:
        access.what = writes ? "a copy writes" : "a copy reads";
        break;
      case AccessBy::fill:
        access.what = "a fill writes";
        break;
      case AccessBy::host:
        access.what = "'" + label + "'" + (writes ? " writes" : " reads");
        break;
      case AccessBy::release:
        access.what = "the free of";
        break;
    }
    Address begin = first;
    if (const auto* block = blocks_.find(first, begin)) access.tensor = block->text;
    access.first_byte = first - begin;
    Address part_begin = first;
    if (const auto* part = parts_.find(first, part_begin)) {
      access.tensor = part->text + (access.tensor.empty() ? "" : "' in '" + access.tensor);
      access.first_byte = first - part_begin;
    }
    access.bytes = Bytes{last - first};
    const Cell* cell = map_.find(first);
    access.memory = cell != nullptr && cell->device ? "HBM" : "host memory";
    return access;
  }

  // The missing edge from `earlier` to work of `actor`, which knows of `clock`.
  [[nodiscard]] std::string remedy(detail::Actor actor, const AccessStamp& earlier, const detail::VectorClock& clock) {
    const ActorInfo& to = actors_[actor];
    const ActorInfo& from = actors_[earlier.actor];
    if (from.stream == nullptr) {
      return to.stream == nullptr ? to.name + " must come after " + from.name + ", and say so (note_threads_joined)"
                                  : "the work must be put on " + to.name + " after " + from.name + " is done with it";
    }
    const std::string must = to.stream == nullptr ? to.name + " must synchronize with " : to.name + " must wait for ";
    const std::uint64_t knows = clock.at(earlier.actor);
    std::string text;
    for (const Record& record : from.stream->records) {
      if (record.time < earlier.time) continue;
      text = must + "the event recorded at " + where(record.at) + " on " + from.name;
      break;
    }
    if (text.empty()) {
      text = to.stream == nullptr ? must + from.name + ", or with an event recorded on it behind that"
                                  : must + "an event recorded on " + from.name + " behind that; none was recorded";
    }
    for (const Record& record : from.stream->records) {
      if (record.time != knows) continue;
      text += "; what it waited for, recorded at " + where(record.at) + ", came before";
      break;
    }
    return text;
  }

  void find(CheckFault fault, const AccessStamp& work, bool writes, const AccessStamp* earlier, Address first,
            Address last, const detail::VectorClock& clock) {
    CheckReport report{.fault = fault, .later = side(work, writes, first, last)};
    if (earlier != nullptr && earlier->by != AccessBy::nobody) {
      // What was read last or written last: a write, unless the later access conflicts with it by writing itself.
      const Cell* cell = map_.find(first);
      const bool earlier_writes =
          cell != nullptr && cell->write.actor == earlier->actor && cell->write.time == earlier->time;
      report.earlier = side(*earlier, earlier_writes, first, last);
      const bool order = fault != CheckFault::uninitialised_read && fault != CheckFault::use_after_free;
      if (order) report.remedy = remedy(work.actor, *earlier, clock);
    }
    if (fault == CheckFault::undeclared_access) {
      report.remedy = "name the range in note_access, or do not touch it";
    } else if (fault == CheckFault::out_of_range) {
      report.remedy = "the access must stay within one block";
    } else if (fault == CheckFault::uninitialised_read) {
      report.remedy = "nothing wrote them since they were allocated or given up";
    }
    found_.push_back(std::move(report));
  }

  void warn_undeclared(const StreamState& on, std::string_view name, At at) {
    if (!undeclared_.insert(std::string{name}).second) return;
    CheckReport report{.fault = CheckFault::undeclared_kernel};
    report.later = {.what = "launches '" + std::string{name} + "'", .actor = actors_[on.actor].name, .at = at};
    report.remedy = "call note_access before it: what it touches is not checked";
    note(std::move(report), false);
  }

  // Keeps a report; `told` when the caller learns of it by itself.
  void note(CheckReport report, bool told) {
    if (check_.reports != nullptr) check_.reports->push_back(report);
    reports_.push_back({std::move(report), told});
  }
  void note_found() noexcept {
    for (CheckReport& report : found_) note(std::move(report), false);
    found_.clear();
  }
  // Throws the first of what was found, if the options say so.
  void deliver() {
    if (found_.empty()) return;
    std::vector<CheckReport> found = std::exchange(found_, {});
    for (const CheckReport& report : found) note(report, check_.throws);
    if (check_.throws) throw CheckError{found.front()};
  }

  struct Noted {
    CheckReport report;
    bool told;
  };

  D device_;
  CheckOptions check_;
  mutable std::mutex mutex_;  // never taken by stream work
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<ActorInfo> actors_;
  std::unordered_map<std::thread::id, HostState> hosts_;
  std::uint64_t live_streams_ = 0;
  std::shared_ptr<std::atomic<std::uint64_t>> live_events_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::map<Address, Reservation> reservations_;
  detail::AccessMap map_;
  detail::RangeNames blocks_;
  detail::RangeNames parts_;
  std::uint64_t last_block_ = 0;
  std::unordered_map<std::string, std::uint32_t> label_ids_;
  std::vector<std::string> labels_;
  std::unordered_set<std::string> undeclared_;
  std::vector<CheckReport> found_;  ///< by the call that runs
  mutable std::vector<Noted> reports_;
};

}  // namespace hbmoff
