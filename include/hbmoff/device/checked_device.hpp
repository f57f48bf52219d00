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
#include "hbmoff/device/fault_injection.hpp"

namespace hbmoff {

/// What a `CheckedDevice` does with what it finds.
struct CheckOptions {
  /// Where reports go as well. Outlives the device, so that it also gets those of the device's own end; the caller
  /// reads it when no other thread uses the device. Without it the device prints on standard error, at its end, what
  /// was not asked for by `reports()`.
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
/// this sequence of calls is wrong. (A `query` that returned true orders the host behind the event; a program that acts
/// on one has other sequences of calls as well.)
///
/// It knows of copies and fills by itself. Of kernels and host functions it knows what `note_access` said before the
/// launch, and of the host's own accesses to pinned memory what `note_host_access` says. Memory of arenas is checked
/// block by block; other memory as it was allocated. Memory that the device did not allocate takes part from its first
/// use on; it has content, and no bounds. (Where it lies where the device had memory before, `note_block` introduces it.)
///
/// Faults are the values of `CheckFault`. A call at fault throws `CheckError` and has no effect, on `D` or on what is
/// known here; the same call, made once the order is right, succeeds. Calls that cannot throw note theirs and go
/// through, and so do warnings. A call that `D` itself refuses has no effect here either. `reports()` has all of them.
///
/// - Host threads are not ordered with each other by what the device sees. A thread that took over from others (by its
///   start, a join, or a mutex) says so: `note_threads_joined`.
/// - A copy hands on whether bytes were ever written; reading bytes that were not is a fault of kernels and of the host
///   only, so padding may travel.
/// - The end of a stream orders nothing.
/// - Once the context is lost nothing is checked: what was queued does not run.
/// - With HostDeviceOptions::debug_protection each kernel runs at once, alone, with nothing of HBM accessible but what
///   its note names; touching more is reported with its name.
///
/// Thread-safe, as `D` is; calls take one lock, and one that waits for room on its stream holds it. Streams and events
/// are its own; `inner` gives what `D` made. It takes memory for every stream and thread that ever was and for every
/// range of bytes that was last touched differently from its neighbours.
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
    [[nodiscard]] typename D::StreamRef inner() const { return *state_->ref; }
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

  /// Reports memory that was not given back. Streams and events must have been (else the program ends: their owners
  /// would use a dead device).
  ~CheckedDevice() {
    for (const auto& [begin, reservation] : reservations_) {
      CheckReport report{.fault = CheckFault::leak, .remedy = "free it before the device ends"};
      report.later = side({.at = reservation.at}, false, reservation.block.get(), begin, reservation.block->end);
      report.later.actor = "the end of the device";
      report.later.what = "nobody freed";
      note(std::move(report));
    }
    for (std::size_t i = told_; check_.reports == nullptr && i < reports_.size(); ++i) {
      std::fprintf(stderr, "hbmoff::CheckedDevice: %s\n", reports_[i].message().c_str());
    }
    if (live_streams_ != 0 || *live_events_ != 0) {
      std::fputs("hbmoff::CheckedDevice destroyed before its streams and events\n", stderr);
      std::abort();
    }
  }

  /// The device that is checked. What is called on it directly is not seen.
  [[nodiscard]] D& inner() noexcept { return device_; }
  [[nodiscard]] const D& inner() const noexcept { return device_; }

  /// Everything found so far, warnings included, in the order of the calls.
  [[nodiscard]] std::vector<CheckReport> reports() const {
    const std::scoped_lock lock{mutex_};
    told_ = reports_.size();
    return reports_;
  }
  /// How many of them are no warnings.
  [[nodiscard]] std::uint64_t errors() const {
    const std::scoped_lock lock{mutex_};
    return static_cast<std::uint64_t>(std::count_if(
        reports_.begin(), reports_.end(), [](const CheckReport& report) { return !is_warning(report.fault); }));
  }

  // ------------------------------------------------------------------------------------------------ streams, events

  [[nodiscard]] Stream create_stream(std::string_view name = "stream", At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    auto stream = device_.create_stream(name, at);
    StreamState& state = add_stream(name, typename D::StreamRef{stream});
    state.owned.emplace(std::move(stream));
    ++live_streams_;
    return Stream{&state};
  }

  /// A stream of the caller's, who keeps it alive; the same one gives the same view. What the caller puts on it past
  /// this device is known by `note_access` alone.
  [[nodiscard]] StreamRef adopt_stream(typename D::StreamRef stream, std::string_view name = "adopted stream") {
    const std::scoped_lock lock{mutex_};
    for (const auto& state : streams_) {
      if (state->ref == stream) return StreamRef{state.get()};
    }
    return StreamRef{&add_stream(name, stream)};
  }

  [[nodiscard]] Event create_event(EventTiming timing = EventTiming::none, At at = At::current()) {
    return Event{std::make_unique<EventState>(this, device_.create_event(timing, at), live_events_)};
  }

  void record(EventRef event, StreamRef stream, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = own(stream);
    EventState& state = own(event);
    device_.record(event.inner(), stream.inner(), at);
    enqueued(on);
    state.recorded = true;
    state.clock = on.clock;
    on.records.push_back({on.clock.at(on.actor), at});
    if (on.records.size() > most_records) on.records.pop_front();
  }

  void wait(StreamRef stream, EventRef event, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = own(stream);
    const EventState& state = own(event);
    device_.wait(stream.inner(), event.inner(), at);
    enqueued(on);
    if (state.recorded) return learn(on, state.clock);
    never_recorded(on.actor, at);
  }

  [[nodiscard]] bool query(EventRef event, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    const EventState& state = own(event);
    const bool done = device_.query(event.inner(), at);
    if (done && state.recorded) host().clock.join(state.clock);
    return done;
  }
  void synchronize(EventRef event, At at = At::current()) {
    std::unique_lock lock{mutex_};
    if (!own(event).recorded) never_recorded(host().actor, at);
    const detail::VectorClock reached = own(event).clock;
    const typename D::EventRef inner = event.inner();
    lock.unlock();  // it may block
    device_.synchronize(inner, at);
    lock.lock();
    host().clock.join(reached);
  }
  void synchronize(StreamRef stream, At at = At::current()) {
    std::unique_lock lock{mutex_};
    const detail::VectorClock reached = own(stream).clock;
    const typename D::StreamRef inner = stream.inner();
    lock.unlock();
    device_.synchronize(inner, at);
    lock.lock();
    host().clock.join(reached);
  }
  /// The host must know, by a synchronisation or `query`, that both are done.
  [[nodiscard]] auto elapsed(EventRef begin, EventRef end, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    for (const EventState* event : {&own(begin), &own(end)}) {
      if (event->recorded && host().clock.knows(event->clock)) continue;
      CheckReport report{.fault = CheckFault::unfinished_time};
      report.later = {.what = "asks for the time of an event", .actor = actors_[host().actor].name, .at = at};
      report.remedy =
          event->recorded ? "synchronize with the event, or with its stream, first" : "record the event first";
      found_.push_back(std::move(report));
      break;
    }
    deliver();
    return device_.elapsed(begin.inner(), end.inner(), at);
  }

  // ------------------------------------------------------------------------------------------------ memory

  [[nodiscard]] device_span<std::byte> allocate_device(Bytes bytes, At at = At::current()) {
    const auto memory = device_.allocate_device(bytes, at);
    add_reservation(memory, at);
    return memory;
  }
  [[nodiscard]] pinned_span<std::byte> allocate_pinned(Bytes bytes, At at = At::current()) {
    const auto memory = device_.allocate_pinned(bytes, at);
    add_reservation(memory, at);
    return memory;
  }
  /// The host must know, by a synchronisation or `query`, that all work on the memory is done: that `D` waits for it
  /// here is not relied on. Cannot throw; what was not allocated here, whole, is reported and not given to `D`.
  void free_device(device_span<std::byte> memory, At at = At::current()) noexcept {
    if (end_reservation(memory, at)) device_.free_device(memory);
  }
  void free_pinned(pinned_span<std::byte> memory, At at = At::current()) noexcept {
    if (end_reservation(memory, at)) device_.free_pinned(memory);
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
    StreamState& on = own(stream);
    AccessStamp work = stamp(on, AccessBy::fill, at);
    check(work, known_on(on), memory, Reads::nothing, true);
    deliver();
    device_.fill_async(memory, value, stream.inner(), at);
    start(on, work);
    apply_write(work, memory);
  }

  /// As `D::enqueue`. What the last `note_access` on the stream said is what this launch touches, and is checked here;
  /// without one a warning is noted, once for each name.
  template <class F>
    requires requires(D& d, typename D::StreamRef s, F&& f, LaunchOptions o) { d.enqueue(s, std::forward<F>(f), o); }
  void enqueue(StreamRef stream, F&& callable, LaunchOptions options = {}, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = own(stream);
    check(on.pending, known_on(on));
    deliver();
    if constexpr (requires { options.declared; }) {
      if (device_.options().debug_protection) {
        return run_guarded(stream, std::forward<F>(callable), options, at);
      }
    }
    device_.enqueue(stream.inner(), std::forward<F>(callable), options, at);
    launched(on, options.name, at);
  }

  /// As `D::host_func`; notes count as for `enqueue`.
  template <class F>
  void host_func(StreamRef stream, F&& callable, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = own(stream);
    check(on.pending, known_on(on));
    deliver();
    device_.host_func(stream.inner(), std::forward<F>(callable), at);
    launched(on, "host function", at);
  }

  // ------------------------------------------------------------------------------------------------ notes

  /// The next launch on `stream`, called `label`, reads and writes these ranges (a range that it updates belongs in
  /// both). Replaces an earlier note that no launch has followed yet. Where `D` has `enqueue` it is checked by the
  /// launch, which throws; where kernels are launched past the device (`<<<>>>`), by this call, and counts at once.
  void note_access(StreamRef stream, std::string_view label, AccessList reads, AccessList writes,
                   At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = own(stream);
    Pending pending{.noted = true, .work = stamp(on, AccessBy::kernel, at, label)};
    pending.reads.assign(reads.begin(), reads.end());
    pending.writes.assign(writes.begin(), writes.end());
    if constexpr (!requires { typename D::LaunchOptions; }) {
      check(pending, known_on(on));
      deliver();
      apply(on, pending);
      pending.reads.clear();
      pending.writes.clear();
    }
    on.pending = std::move(pending);
  }

  /// The calling thread is about to read and write these ranges of pinned memory.
  void note_host_access(std::string_view label, AccessList reads, AccessList writes, At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    HostState& thread = host();
    const JoinedClock known{thread.clock};
    AccessStamp work{.actor = thread.actor, .by = AccessBy::host, .label = intern(label), .at = at};
    for (const AccessRange& range : reads) check(work, known, range, Reads::content, false);
    for (const AccessRange& range : writes) check(work, known, range, Reads::nothing, true);
    deliver();
    work.time = thread.clock.tick(thread.actor);
    for (const AccessRange& range : reads) apply_read(work, range);
    for (const AccessRange& range : writes) apply_write(work, range);
  }

  /// The calling thread comes after everything that other threads have called on this device so far.
  void note_threads_joined() {
    const std::scoped_lock lock{mutex_};
    HostState& me = host();
    for (const auto& [token, other] : hosts_) me.clock.join(other.clock);
  }

  /// `allocated`: the range is a block called `name` for work put on `stream` from now on, its content worthless.
  /// `freed`: nothing put on `stream` or elsewhere from now on may touch the block. `named`: the name of a live block,
  /// or of a part of one; parts that it overlaps lose theirs.
  template <class Space>
  void note_block(BlockNote what, memory_span<const std::byte, Space> memory, std::string_view name, StreamRef stream,
                  At at = At::current()) {
    const std::scoped_lock lock{mutex_};
    if (memory.empty()) return;
    switch (what) {
      case BlockNote::allocated:
        begin_block(memory, std::is_same_v<Space, DeviceSpace>, name, own(stream), at);
        break;
      case BlockNote::freed:
        end_block(memory, own(stream), at);
        break;
      case BlockNote::named:
        name_part(memory, name);
        break;
    }
    device_.note_block(what, memory, name, stream.inner(), at);
  }

  void note_discarded(device_span<const std::byte> memory, std::string_view name) noexcept {
    const std::scoped_lock lock{mutex_};
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    name_part(memory, name);
    map_.visit(begin, end, [](Address, Cell& cell) { cell.defined = false; });
  }

  template <class Space>
  void note_divided(memory_span<const std::byte, Space> memory, bool divided) noexcept {
    const std::scoped_lock lock{mutex_};
    if (memory.empty()) return;
    const auto [begin, end] = range_of(memory);
    device_.note_divided(memory, divided);
    if (!divided) return undivide(begin, end);
    const Cell* there = map_.find(begin);
    if (there != nullptr && there->extent == Extent::freed && there->block != nullptr &&
        there->block->outer == nullptr) {
      map_.erase(begin, end);  // the system handed out again what a device gave back to it
    }
    map_.fill_gaps(begin, end);
    const std::shared_ptr<MemoryBlock> outer = map_.find(begin)->block;
    const auto division =
        std::make_shared<MemoryBlock>(MemoryBlock{.begin = begin,
                                                  .end = end,
                                                  .device = std::is_same_v<Space, DeviceSpace>,
                                                  .division = true,
                                                  .name = outer != nullptr ? outer->name : "memory given to an arena",
                                                  .outer = outer});
    map_.visit(begin, end, [&](Address, Cell& cell) {
      cell.extent = Extent::divided;
      cell.block = division;
    });
  }

  /// Nobody freed the block before the end of its arena: noted as a leak.
  template <class Space>
  void note_leak(memory_span<const std::byte, Space> memory, std::string_view name) noexcept {
    const std::scoped_lock lock{mutex_};
    if (device_.lost()) return;
    const auto [begin, end] = range_of(memory);
    const Cell* cell = map_.find(begin);
    CheckReport report{.fault = CheckFault::leak, .remedy = "end the buffer before its arena"};
    report.later = side({}, false, cell == nullptr ? nullptr : cell->block.get(), begin, end);
    report.later.tensor = name;
    report.later.actor = "the end of the arena";
    report.later.what = "nobody freed";
    note(std::move(report));
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
  template <class Fault>
  void inject(Fault&& fault)
    requires requires(D& d) { d.inject(std::forward<Fault>(fault)); }
  {
    device_.inject(std::forward<Fault>(fault));
  }
  bool clear_fault() noexcept
    requires requires(D& d) { d.clear_fault(); }
  {
    return device_.clear_fault();
  }
  [[nodiscard]] std::uint64_t calls_made(CallKinds kinds = CallKinds::any()) const noexcept
    requires requires(const D& d) { d.calls_made(kinds); }
  {
    return device_.calls_made(kinds);
  }

 private:
  using Address = detail::AccessMap::Address;
  using Cell = detail::AccessMap::Cell;
  using AccessBy = detail::AccessBy;
  using AccessStamp = detail::AccessStamp;
  using Extent = detail::Extent;
  using JoinedClock = detail::JoinedClock;
  using MemoryBlock = detail::MemoryBlock;

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
    std::optional<typename D::Stream> owned;  ///< none: the caller's
    std::optional<typename D::StreamRef> ref;
    std::string name;
    detail::Actor actor = 0;
    detail::VectorClock clock;
    std::deque<Record> records;
    Pending pending;
  };
  struct EventState {
    EventState(const CheckedDevice* of, typename D::Event event, std::shared_ptr<std::atomic<std::uint64_t>> live)
        : device{of}, inner{std::move(event)}, live_events{std::move(live)} {
      ++*live_events;
    }
    EventState(const EventState&) = delete;
    EventState& operator=(const EventState&) = delete;
    ~EventState() { --*live_events; }
    const CheckedDevice* device;
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
    std::shared_ptr<MemoryBlock> block;
    At at;
  };

  // A range that wraps around (a size that went below zero) ends with the address space.
  static std::pair<Address, Address> range_of(AccessRange range) {
    const auto begin = reinterpret_cast<Address>(range.data);
    const Address end = begin + range.bytes.count();
    return {begin, end < begin ? ~Address{0} : end};
  }
  static bool wraps(AccessRange range) {
    const auto begin = reinterpret_cast<Address>(range.data);
    return begin + range.bytes.count() < begin;
  }

  // Clocks of two devices have nothing to do with each other.
  StreamState& own(StreamRef stream) const {
    if (stream.state_->device != this) throw InvalidArgument{"a stream of another device was used"};
    return *stream.state_;
  }
  EventState& own(EventRef event) const {
    if (event.state_->device != this) throw InvalidArgument{"an event of another device was used"};
    return *event.state_;
  }

  // ------------------------------------------------------------------------------------------------ actors

  detail::Actor new_actor(std::string name, StreamState* stream) {
    actors_.push_back({std::move(name), stream});
    return static_cast<detail::Actor>(actors_.size() - 1);
  }
  StreamState& add_stream(std::string_view name, typename D::StreamRef ref) {
    auto state = std::make_unique<StreamState>();
    state->device = this;
    state->ref = ref;
    state->name = name;
    const std::uint64_t number = ++stream_names_[state->name];
    state->actor = new_actor(
        "stream '" + state->name + "'" + (number == 1 ? "" : " (number " + std::to_string(number) + " of that name)"),
        state.get());
    streams_.push_back(std::move(state));
    return *streams_.back();
  }
  // A thread is known by an object of its own, whose identity outlives it here: ids of threads are used again.
  HostState& host() {
    thread_local const auto token = std::make_shared<const char>();
    const auto [found, is_new] = hosts_.try_emplace(token);
    if (is_new) {
      const std::string name = hosts_.size() == 1 ? "the host" : "host thread " + std::to_string(hosts_.size());
      found->second.actor = new_actor(name, nullptr);
    }
    return found->second;
  }
  // The stream comes after what `clock` knows. Its own time tells what it knew: a free has no other to be told by.
  void learn(StreamState& stream, const detail::VectorClock& clock) {
    if (stream.clock.join(clock)) stream.clock.tick(stream.actor);
  }
  // Work put on a stream comes after what the calling thread has done and seen.
  void enqueued(StreamState& stream) { learn(stream, host().clock); }
  // What work that is put on the stream now comes after.
  JoinedClock known_on(const StreamState& stream) { return {stream.clock, host().clock}; }
  // Of work that is about to be put on `on`; its time is set when it has been.
  AccessStamp stamp(const StreamState& on, AccessBy by, At at, std::string_view label = {}) {
    return {.actor = on.actor, .by = by, .label = intern(label), .time = 0, .at = at};
  }
  // The work has been put on `on`.
  void start(StreamState& on, AccessStamp& work) {
    enqueued(on);
    work.time = on.clock.tick(on.actor);
  }
  std::uint32_t intern(std::string_view label) {
    const auto [found, is_new] = label_ids_.try_emplace(std::string{label}, static_cast<std::uint32_t>(labels_.size()));
    if (is_new) labels_.push_back(found->first);
    return found->second;
  }

  void never_recorded(detail::Actor actor, At at) {
    CheckReport report{.fault = CheckFault::wait_never_recorded};
    report.later = {.what = "waits for an event that was never recorded", .actor = actors_[actor].name, .at = at};
    report.remedy = "record the event first: the wait orders nothing";
    note(std::move(report));
  }

  void destroy(StreamState& stream) noexcept {
    {
      std::unique_lock lock{mutex_};
      [[maybe_unused]] const typename D::Stream owned = std::move(*stream.owned);
      stream.owned.reset();
      stream.ref.reset();
      stream.clock = {};
      stream.pending = {};
      lock.unlock();  // it may block
    }
    --live_streams_;
  }

  // ------------------------------------------------------------------------------------------------ life of memory

  template <class Span>
  void add_reservation(Span memory, At at) {
    if (memory.empty()) return;
    const std::scoped_lock lock{mutex_};
    const auto [begin, end] = range_of(memory);
    const auto block =
        std::make_shared<MemoryBlock>(MemoryBlock{.begin = begin,
                                                  .end = end,
                                                  .device = std::is_same_v<typename Span::space, DeviceSpace>,
                                                  .name = "memory allocated at " + where(at)});
    reservations_.insert_or_assign(begin, Reservation{block, at});
    map_.put(begin, end, {.block = block});
  }

  // Memory given back to the system: everything that was put on a stream for it must be known to the host to be done.
  // False when it is none to give back.
  template <class Span>
  bool end_reservation(Span memory, At at) noexcept {
    if (memory.empty()) return true;
    const std::scoped_lock lock{mutex_};
    const auto [begin, end] = range_of(memory);
    HostState& thread = host();
    const AccessStamp work{.actor = thread.actor, .by = AccessBy::release, .at = at};
    const auto found = reservations_.find(begin);
    if (found == reservations_.end() || found->second.block->end != end) {
      const Cell* cell = map_.find(begin);
      const bool freed = cell != nullptr && cell->extent == Extent::freed;
      find({.fault = freed ? CheckFault::use_after_free : CheckFault::out_of_range,
            .block = cell == nullptr ? nullptr : cell->block,
            .first = begin,
            .last = end,
            .earlier = freed ? cell->write : AccessStamp{}},
           work, true, JoinedClock{thread.clock});
      note_found();
      return false;
    }
    check_free(work, JoinedClock{thread.clock}, begin, end);
    note_found();
    map_.put(begin, end, {.block = found->second.block, .extent = Extent::freed, .write = work});
    reservations_.erase(found);
    return true;
  }

  void begin_block(AccessRange memory, bool device, std::string_view name, StreamState& on, At at) {
    const auto [begin, end] = range_of(memory);
    const auto block = std::make_shared<MemoryBlock>(
        MemoryBlock{.begin = begin, .end = end, .device = device, .name = std::string{name}});
    const AccessStamp work = stamp(on, AccessBy::nobody, at);
    const JoinedClock known = known_on(on);
    std::optional<Finding> finding;
    map_.visit(begin, end, [&](Address first, Cell& cell) {
      if (cell.write.before(known)) return;
      extend(finding, {CheckFault::unordered_reuse, cell.block, first, cell.end, cell.write, true});
    });
    if (finding) {
      find(*finding, work, true, known);
      found_.back().later = side(work, true, block.get(), finding->first, finding->last);
    }
    deliver();
    enqueued(on);
    map_.fill_gaps(begin, end);
    const Cell& there = *map_.find(begin);
    block->outer = there.block;
    const bool replaced = there.extent != Extent::divided && there.block != nullptr && there.block->begin == begin &&
                          there.block->end == end;
    if (block->outer != nullptr && (there.extent == Extent::freed || replaced)) block->outer = block->outer->outer;
    map_.visit(begin, end, [&](Address, Cell& cell) {
      cell.block = block;
      cell.extent = Extent::open;
      cell.defined = false;
    });
  }

  void end_block(AccessRange memory, StreamState& on, At at) {
    const auto [begin, end] = range_of(memory);
    AccessStamp work = stamp(on, AccessBy::release, at);
    const JoinedClock known = known_on(on);
    const Cell* cell = map_.find(begin);
    std::shared_ptr<MemoryBlock> block = cell == nullptr ? nullptr : cell->block;
    // Out of what an arena of its own may have cut the block into.
    while (block != nullptr && !(block->begin == begin && block->end == end && !block->division)) block = block->outer;
    if (block == nullptr && cell != nullptr && cell->block != nullptr) {
      find({CheckFault::out_of_range, cell->block, begin, end}, work, true, known);
    } else if (cell != nullptr && cell->extent == Extent::freed) {
      find({CheckFault::use_after_free, block, begin, end, cell->write}, work, true, known);
    } else {
      check_free(work, known, begin, end);
    }
    deliver();
    enqueued(on);
    // A point in the stream's order, behind which nothing was put yet: an event recorded just before stands for it too.
    work.time = on.clock.at(on.actor);
    map_.put(begin, end, {.block = block, .extent = Extent::freed, .write = work});
  }

  void name_part(AccessRange memory, std::string_view name) {
    const auto [begin, end] = range_of(memory);
    const Cell* cell = map_.find(begin);
    if (cell == nullptr || cell->block == nullptr) return;
    MemoryBlock& block = *cell->block;
    if (block.begin != begin || block.end != end) return block.parts.put(begin, end, name);
    block.name = name;
    block.parts.clear();
  }

  // The memory of an arena that ends is what it was before, whatever became of its blocks.
  void undivide(Address begin, Address end) {
    const auto is_division = [&](const std::shared_ptr<MemoryBlock>& block) {
      return block != nullptr && block->division && block->begin == begin && block->end == end;
    };
    map_.visit(begin, end, [&](Address, Cell& cell) {
      if (cell.block == nullptr) return;
      if (cell.extent != Extent::divided && is_division(cell.block->outer)) cell.block = cell.block->outer;
      if (!is_division(cell.block)) return;
      cell.block = cell.block->outer;
      cell.extent = Extent::open;
    });
  }

  // ------------------------------------------------------------------------------------------------ checks

  enum class Reads : std::uint8_t { nothing, for_a_copy, content };

  // What is wrong with an access, and with which bytes.
  struct Finding {
    CheckFault fault = {};
    std::shared_ptr<MemoryBlock> block = {};
    Address first = 0;
    Address last = 0;
    AccessStamp earlier = {};
    bool earlier_writes = false;
  };
  // Keeps the first finding, with the bytes behind it that it is true of as well.
  static void extend(std::optional<Finding>& kept, const Finding& next) {
    if (!kept) {
      kept = next;
    } else if (kept->fault == next.fault && kept->last == next.first && kept->earlier == next.earlier &&
               kept->block == next.block) {
      kept->last = next.last;
    }
  }

  // Whether `work`, which knows of `clock`, may touch the range. One report for each range.
  void check(const AccessStamp& work, const JoinedClock& clock, AccessRange range, Reads reads, bool writes) {
    if (range.bytes == Bytes{}) return;
    const auto [begin, end] = range_of(range);
    std::optional<Finding> finding;
    std::optional<std::shared_ptr<MemoryBlock>> block;  // that the access begins in
    const auto look = [&](Address first, Address last, const Cell& cell) {
      if (!block) block = cell.block != nullptr ? cell.block : reservation_beside(first, last);
      Finding next{.block = *block, .first = first, .last = last};
      if (*block != cell.block || cell.extent == Extent::divided) {
        next.fault = CheckFault::out_of_range;
      } else if (cell.extent == Extent::freed) {
        next.fault = CheckFault::use_after_free;
        next.earlier = cell.write;
      } else if (const AccessStamp* conflict = conflict_of(cell, clock, writes)) {
        const bool host = work.by == AccessBy::host || conflict->by == AccessBy::host;
        next.fault = conflict->by == AccessBy::release ? CheckFault::unordered_reuse
                     : host                            ? CheckFault::host_access
                     : writes                          ? CheckFault::write_before_access
                                                       : CheckFault::read_before_write;
        next.earlier = *conflict;
        next.earlier_writes = conflict == &cell.write;
      } else if (reads == Reads::content && !cell.defined) {
        next.fault = CheckFault::uninitialised_read;
        next.earlier = cell.write;
        next.earlier_writes = true;
      } else {
        return;
      }
      extend(finding, next);
    };
    const Cell unknown{.defined = true};
    map_.visit(
        begin, end, [&](Address first, const Cell& cell) { look(first, cell.end, cell); },
        [&](Address first, Address last) { look(first, last, unknown); });
    if (!finding && wraps(range)) finding = {CheckFault::out_of_range, block ? *block : nullptr, begin, end};
    if (finding) find(*finding, work, writes, clock);
  }
  // Where the device keeps other memory away from its own, an access just outside of an allocation is meant for it.
  std::shared_ptr<MemoryBlock> reservation_beside(Address first, Address last) const {
    if constexpr (requires { D::bytes_between_allocations; }) {
      auto it = reservations_.upper_bound(first);
      if (it != reservations_.end() && last <= it->first && it->first - last < D::bytes_between_allocations) {
        return it->second.block;
      }
      if (it == reservations_.begin()) return nullptr;
      --it;
      const Address end = it->second.block->end;
      if (first >= end && first - end < D::bytes_between_allocations) return it->second.block;
    }
    return nullptr;
  }
  // The access of the cell that comes to nobody's order.
  static const AccessStamp* conflict_of(const Cell& cell, const JoinedClock& clock, bool writes) {
    if (!cell.write.before(clock)) return &cell.write;
    if (!writes) return nullptr;
    for (const AccessStamp& read : cell.reads) {
      if (!read.before(clock)) return &read;
    }
    return nullptr;
  }
  void check(const Pending& pending, const JoinedClock& clock) {
    for (const AccessRange& range : pending.reads) check(pending.work, clock, range, Reads::content, false);
    for (const AccessRange& range : pending.writes) check(pending.work, clock, range, Reads::nothing, true);
  }

  void check_free(const AccessStamp& work, const JoinedClock& clock, Address begin, Address end) {
    std::optional<Finding> finding;
    map_.visit(begin, end, [&](Address first, const Cell& cell) {
      if (const AccessStamp* conflict = conflict_of(cell, clock, true)) {
        extend(finding, {CheckFault::free_under_work, cell.block, first, cell.end, *conflict, conflict == &cell.write});
      }
    });
    if (finding) find(*finding, work, true, clock);
  }

  void apply_read(const AccessStamp& work, AccessRange range) {
    if (wraps(range)) return;
    const auto [begin, end] = range_of(range);
    map_.fill_gaps(begin, end);
    map_.visit(begin, end, [&](Address, Cell& cell) {
      if (cell.extent != Extent::open) return;
      for (AccessStamp& read : cell.reads) {
        if (read.actor == work.actor) {
          read = work;
          return;
        }
      }
      cell.reads.push_back(work);
    });
    map_.join(begin, end);
  }

  void apply_write(const AccessStamp& work, AccessRange range, bool defined = true) {
    if (wraps(range)) return;
    const auto [begin, end] = range_of(range);
    map_.fill_gaps(begin, end);
    map_.visit(begin, end, [&](Address, Cell& cell) {
      if (cell.extent != Extent::open) return;
      cell.write = work;
      cell.reads.clear();
      cell.defined = defined;
    });
    map_.join(begin, end);
  }

  void apply(StreamState& on, Pending& pending) {
    start(on, pending.work);
    for (const AccessRange& range : pending.reads) apply_read(pending.work, range);
    for (const AccessRange& range : pending.writes) apply_write(pending.work, range);
  }
  // A launch has succeeded, and uses up the note.
  void launched(StreamState& on, std::string_view name, At at) {
    Pending pending = std::exchange(on.pending, {});
    if (pending.noted) return apply(on, pending);
    enqueued(on);
    if (!undeclared_.insert(std::string{name}).second) return;
    CheckReport report{.fault = CheckFault::undeclared_kernel};
    report.later = {.what = "launches '" + std::string{name} + "'", .actor = actors_[on.actor].name, .at = at};
    report.remedy = "call note_access before it: what it touches is not checked";
    note(std::move(report));
  }

  template <class To, class From>
  void copy(To to, From from, StreamRef stream, At at) {
    const std::scoped_lock lock{mutex_};
    StreamState& on = own(stream);
    AccessStamp work = stamp(on, AccessBy::copy, at);
    check(work, known_on(on), from, Reads::for_a_copy, false);
    check(work, known_on(on), to, Reads::nothing, true);
    deliver();
    device_.copy_async(to, from, stream.inner(), at);
    start(on, work);
    apply_read(work, from);
    struct Piece {
      std::uint64_t first, count;
      bool defined;
    };
    std::vector<Piece> pieces;
    const auto [begin, end] = range_of(from);
    map_.visit(begin, end, [&, source = begin](Address first, const Cell& cell) {
      pieces.push_back({first - source, cell.end - first, cell.defined});
    });
    for (const Piece& piece : pieces) apply_write(work, to.subspan(piece.first, piece.count), piece.defined);
  }

  template <class F>
  void run_guarded(StreamRef stream, F&& callable, LaunchOptions options, At at) {
    StreamState& on = own(stream);
    AccessStamp work = on.pending.noted ? on.pending.work : stamp(on, AccessBy::kernel, at, options.name);
    using Declared = std::remove_pointer_t<decltype(options.declared)>;
    struct Launch {
      std::vector<AccessRange> reads, writes;
      Declared declared;
    };
    const auto launch = std::make_shared<Launch>(Launch{on.pending.reads, on.pending.writes, {}});
    launch->declared = {.reads = launch->reads, .writes = launch->writes};
    options.declared = &launch->declared;
    unfinished_.push_back(launch);
    try {
      device_.enqueue(stream.inner(), std::forward<F>(callable), options, at);
    } catch (...) {
      unfinished_.pop_back();
      throw;
    }
    launched(on, options.name, at);
    try {
      device_.synchronize(stream.inner(), at);  // one at a time is what this mode is for
    } catch (const DeviceError&) {
      return;  // the launch itself has succeeded, and its kernel may run still; a lost context tells of itself
    }
    unfinished_.pop_back();
    if (!launch->declared.violation) return;
    const auto address = reinterpret_cast<Address>(launch->declared.violation->address);
    const Cell* cell = map_.find(address);
    find({.fault = CheckFault::undeclared_access,
          .block = cell == nullptr ? nullptr : cell->block,
          .first = address,
          .last = address + 1},
         work, launch->declared.violation->write, known_on(on));
    deliver();
  }

  // ------------------------------------------------------------------------------------------------ reports

  static std::string where(At at) { return std::string{at.file_name()} + ":" + std::to_string(at.line()); }

  [[nodiscard]] CheckedAccess side(const AccessStamp& stamp, bool writes, const MemoryBlock* block, Address first,
                                   Address last) const {
    CheckedAccess access{.at = stamp.at};
    if (stamp.actor < actors_.size()) access.actor = actors_[stamp.actor].name;
    const std::string verb = writes ? " writes" : " reads";
    switch (stamp.by) {
      case AccessBy::nobody:
        access.what = "the allocation of";
        break;
      case AccessBy::kernel:
      case AccessBy::host:
        access.what = "'" + labels_[stamp.label] + "'" + verb;
        break;
      case AccessBy::copy:
        access.what = "a copy" + verb;
        break;
      case AccessBy::fill:
        access.what = "a fill" + verb;
        break;
      case AccessBy::release:
        access.what = "the free of";
        break;
    }
    access.tensor = block == nullptr ? "memory that the device did not allocate" : block->name;
    access.memory = block == nullptr ? "memory of the caller" : block->device ? "HBM" : "pinned memory";
    access.first_byte = first - (block == nullptr ? 0 : block->begin);
    if (const auto* part = block == nullptr ? nullptr : block->parts.find(first)) {
      access.tensor = part->text + "' in '" + access.tensor;
      access.first_byte = first - part->begin;
    }
    access.bytes = Bytes{last - first};
    return access;
  }

  // The missing edge from `earlier` to work of `actor`, which knows of `clock`.
  [[nodiscard]] std::string missing_edge(detail::Actor actor, const AccessStamp& earlier,
                                         const JoinedClock& clock) const {
    const ActorInfo& to = actors_[actor];
    const ActorInfo& from = actors_[earlier.actor];
    if (from.stream == nullptr) {
      return (to.stream == nullptr ? to.name : "the thread that puts the work on " + to.name) + " must come after " +
             from.name + ", and say so (note_threads_joined)";
    }
    const std::string must = to.name + (to.stream == nullptr ? " must synchronize with " : " must wait for ");
    std::string text;
    for (const Record& record : from.stream->records) {
      if (record.time < earlier.time) continue;
      text = must + "the event recorded at " + where(record.at) + " on " + from.name;
      break;
    }
    if (text.empty()) text = must + "an event recorded on " + from.name + " behind that; none was recorded";
    for (const Record& record : from.stream->records) {
      if (record.time != clock.at(earlier.actor)) continue;
      text += "; the one recorded at " + where(record.at) + " comes before it";
      break;
    }
    return text;
  }
  [[nodiscard]] std::string remedy(const Finding& finding, const AccessStamp& work, const JoinedClock& clock) const {
    switch (finding.fault) {
      case CheckFault::undeclared_access:
        return "name the range in note_access, or do not touch it";
      case CheckFault::out_of_range:
        if (finding.block == nullptr || finding.block->division) return "no block is there";
        return "'" + finding.block->name + "' has " + std::to_string(finding.block->end - finding.block->begin) +
               " bytes";
      case CheckFault::uninitialised_read:
        return "nothing wrote them since they were allocated or given up, nor what was copied there";
      case CheckFault::use_after_free:
        return "the free must come behind it";
      default:
        return missing_edge(work.actor, finding.earlier, clock);
    }
  }

  void find(const Finding& finding, const AccessStamp& work, bool writes, const JoinedClock& clock) {
    const auto seen = [&](const AccessStamp& stamp, bool wrote) {
      return side(stamp, wrote, finding.block.get(), finding.first, finding.last);
    };
    CheckReport report{.fault = finding.fault, .later = seen(work, writes), .remedy = remedy(finding, work, clock)};
    if (finding.earlier.by != AccessBy::nobody) report.earlier = seen(finding.earlier, finding.earlier_writes);
    // A launch that reads and writes the same bytes is at fault once.
    const auto same = [](const CheckedAccess& a, const CheckedAccess& b) {
      return a.actor == b.actor && a.tensor == b.tensor && a.first_byte == b.first_byte && a.bytes == b.bytes &&
             a.at.line() == b.at.line();
    };
    for (const CheckReport& other : found_) {
      if (same(other.later, report.later) && other.earlier.has_value() == report.earlier.has_value() &&
          (!report.earlier || same(*other.earlier, *report.earlier))) {
        return;
      }
    }
    found_.push_back(std::move(report));
  }

  void note(CheckReport report) {
    if (check_.reports != nullptr) check_.reports->push_back(report);
    reports_.push_back(std::move(report));
  }
  void note_found() {
    if (!device_.lost()) {
      for (CheckReport& report : found_) note(std::move(report));
    }
    found_.clear();
  }
  // Throws the first of what was found, if the options say so.
  void deliver() {
    if (found_.empty()) return;
    const CheckReport first = found_.front();
    const bool lost = device_.lost();
    note_found();
    if (check_.throws && !lost) throw CheckError{first};
  }

  D device_;
  CheckOptions check_;
  mutable std::mutex mutex_;  // never taken by stream work
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<ActorInfo> actors_;
  std::map<std::weak_ptr<const char>, HostState, std::owner_less<>> hosts_;
  std::unordered_map<std::string, std::uint64_t> stream_names_;
  std::atomic<std::uint64_t> live_streams_ = 0;
  std::shared_ptr<std::atomic<std::uint64_t>> live_events_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::map<Address, Reservation> reservations_;
  detail::AccessMap map_;
  std::unordered_map<std::string, std::uint32_t> label_ids_;
  std::vector<std::string> labels_;
  std::unordered_set<std::string> undeclared_;
  std::vector<CheckReport> found_;  ///< by the call that runs
  std::vector<CheckReport> reports_;
  std::vector<std::shared_ptr<void>> unfinished_;  ///< launches that were not seen to end; what they look at
  mutable std::size_t told_ = 0;  ///< how many of them the caller has asked for
};

/// Kernels of devices that run them past the device: `note_access` has checked the launch.
template <Device D, class Kernel>
  requires(!requires { typename D::LaunchOptions; })
void launch_kernel(CheckedDevice<D>& device, const Kernel& kernel, typename CheckedDevice<D>::StreamRef stream,
                   std::source_location at = std::source_location::current()) {
  launch_kernel(device.inner(), kernel, stream.inner(), at);
}

}  // namespace hbmoff
