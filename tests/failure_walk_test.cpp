// Every call of a whole training fails, and every piece of queued work: the error says what it was, nothing leaks or
// hangs, and the training ends with the bits of an undisturbed one.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "gate.hpp"
#include "hbmoff/device/checked_device.hpp"
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/training/activation_store.hpp"
#include "hbmoff/training/paged_adamw.hpp"
#include "support/adamw_model.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;
using adamw_test::hash;
using adamw_test::load;
using adamw_test::number;
using adamw_test::same_bits;
using adamw_test::store;
using adamw_test::TensorSpec;
using adamw_test::with_type;

namespace {

constexpr std::uint64_t steps = 3;
constexpr std::uint32_t layers = 4;
constexpr std::uint64_t width = 208;  // elements of an activation; no weight has more, so every weight has a gradient
constexpr Bytes page = 1_KiB;
constexpr Bytes arena_bytes = 64_KiB;  // the device has two, and not a byte more

/// One weight for each layer; the first two have paged state, of two and three pages.
const std::vector<TensorSpec>& tensors() {
  static const std::vector<TensorSpec> specs{{"paged.fp32", 200, DType::fp32, DType::fp32, 0},
                                             {"paged.bf16", 170, DType::bf16, DType::fp32, 1},
                                             {"kept.fp32", 70, DType::fp32, DType::bf16, 1},
                                             {"kept.bf16", 66, DType::bf16, DType::bf16, 0}};
  return specs;
}
const OffloadMatching& policy() {
  static const OffloadMatching paged{{"paged.*"}};
  return paged;
}

/// What a layer saves.
enum : std::uint32_t { input, product, mask, scale };
BundleLayout bundle() {
  return {{{.info = {.name = "input", .count = width}, .checkpoint = true},
           {.info = {.name = "product", .count = width}},
           {.info = {.name = "mask", .dtype = DType::bf16, .count = width}},
           {.info = {.name = "scale", .count = 2}}},
          1};
}
struct OneOfEach {
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    return info.name == "mask" ? SaveMode::recompute : info.name == "scale" ? SaveMode::keep : SaveMode::offload;
  }
};

/// A weight or a gradient, as kernels see it: element i of a layer meets element i % count.
struct Elements {
  std::byte* data;
  DType dtype;
  std::uint64_t count;
  [[nodiscard]] float operator[](std::uint64_t i) const { return load(data, dtype, i % count); }
};

/// Everything that a training has to go on from: a checkpoint.
struct State {
  std::uint64_t step = 0;
  std::vector<std::vector<std::byte>> weights;
  std::vector<std::array<std::vector<float>, 3>> moments;  ///< by `OptimizerState`
  std::vector<std::uint64_t> applied;
};
bool operator==(const State& a, const State& b) {
  if (a.step != b.step || a.weights != b.weights || a.applied != b.applied) return false;
  for (std::size_t t = 0; t < a.moments.size(); ++t) {
    for (std::size_t i = 0; i < 3; ++i) {
      if (!same_bits(a.moments[t][i], b.moments[t][i])) return false;
    }
  }
  return a.moments.size() == b.moments.size();
}
bool has_state(std::uint32_t t, std::uint32_t which) { return which < 2 || tensors()[t].weight != DType::fp32; }

State initial_state() {
  State state;
  for (const auto& tensor : adamw_test::AdamWModel{tensors(), 7}.tensors) {
    state.weights.push_back(tensor.weight);
    state.moments.push_back({tensor.m, tensor.v, tensor.master});
    state.applied.push_back(0);
  }
  return state;
}

/// What a training leaves.
struct Outcome {
  State state;
  std::array<float, steps + 1> losses = {};
  std::array<double, steps + 1> norms = {};
};
/// Of the steps behind `from`.
bool same_from(std::uint64_t from, const Outcome& a, const Outcome& b) {
  for (std::uint64_t s = from + 1; s <= steps; ++s) {
    if (!same_bits(std::array{a.losses[s]}, std::array{b.losses[s]})) return false;
    if (!same_bits(std::array{a.norms[s]}, std::array{b.norms[s]})) return false;
  }
  return a.state == b.state;
}

std::string reason_for(CallKind kind, std::uint64_t n) {
  return "planted " + std::to_string(static_cast<int>(kind)) + "." + std::to_string(n);
}

struct Planted {
  CallKind kind = CallKind::copy;
  std::uint64_t nth = 0;  ///< 0: nothing fails
  FaultOutcome outcome = FaultOutcome::call_failed;
};

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> all) {
  return std::find(all.begin(), all.end(), text) != all.end();
}

bool api_is_of(CallKind kind, std::string_view api) {
  switch (kind) {
    case CallKind::allocation:
      return api == "allocate_device";
    case CallKind::pinning:
      return api == "allocate_pinned";
    case CallKind::copy:
      return is_one_of(api, {"copy_async", "fill_async"});
    case CallKind::kernel:
      return api == "enqueue";
    case CallKind::host_function:
      return api == "host_func";
    case CallKind::event:
      return api == "create_event";
    case CallKind::stream:
      return api == "create_stream";
    case CallKind::ordering:
      return is_one_of(api, {"record", "wait"});
    case CallKind::waiting:
      return is_one_of(api, {"query", "synchronize", "elapsed"});
  }
  return false;
}

// The part of the message that names the work: 'NAME' put on stream 'STREAM' at FILE:LINE failed: REASON
std::string work_of(const DeviceError& error) {
  const std::string text = error.what();
  const std::size_t quote = text.find('\'');
  return quote == std::string::npos ? text : text.substr(quote);
}

void check_names_work(const DeviceError& error, const Planted& planted) {
  CHECK(error.context_lost());
  CHECK(!error.api().empty());
  CHECK(error.where().line() > 0);
  CHECK(!std::string_view{error.where().file_name()}.empty());
  const std::string work = work_of(error);
  INFO(work);
  const std::string put = "' put on stream '", at = "' at ", failed = " failed: ";
  const std::size_t stream = work.find(put), place = work.find(at, stream + put.size());
  const std::size_t reason = work.find(failed, place);
  REQUIRE(stream != std::string::npos);
  REQUIRE(place != std::string::npos);
  REQUIRE(reason != std::string::npos);
  const std::string name = work.substr(1, stream - 1);
  const std::string stream_name = work.substr(stream + put.size(), place - stream - put.size());
  const std::string where = work.substr(place + at.size(), reason - place - at.size());
  if (planted.kind == CallKind::copy) CHECK(is_one_of(name, {"copy_async", "fill_async"}));
  if (planted.kind == CallKind::host_function) CHECK(name == "host_func");
  if (planted.kind == CallKind::kernel) CHECK(!name.empty());
  CHECK(is_one_of(stream_name, {"compute", "backward", "check", "adamw control", "adamw in", "adamw out",
                                "activations control", "activations in", "activations out"}));
  const std::size_t colon = where.rfind(':');
  REQUIRE(colon != std::string::npos);
  CHECK(where.substr(0, colon).find("pp") != std::string::npos);  // .hpp or .cpp
  CHECK(std::stoul(where.substr(colon + 1)) > 0);
  CHECK(work.substr(reason + failed.size()) == reason_for(planted.kind, planted.nth));
}

/// A training of three steps. A call that fails is made again, or made up for by `resume`.
template <class D>
class Training {
 public:
  /// Goes on from `from`. With `note_states` its state is read after every step.
  Training(D& device, State from, Planted planted = {}, bool note_states = false)
      : device_{device}, from_{std::move(from)}, planted_{planted}, note_states_{note_states} {
    if (planted_.nth == 0) return;
    calls_before_ = calls_made();
    device_.inject(Fault{.kinds = planted_.kind,
                         .nth = planted_.nth,
                         .outcome = planted_.outcome,
                         .reason = reason_for(planted_.kind, planted_.nth)});
  }

  /// Throws when the context is lost.
  void run() {
    set_up();
    outcome_.state.step = from_.step;
    for (std::uint64_t s = from_.step + 1; s <= steps; ++s) {
      forward(s);
      order(*compute_, *backward_);
      run_backward();
      order(*backward_, *compute_);
      step(s);
      attempt([&] { device_.synchronize(*loss_ready_); });
      device_.note_host_access("loss", {loss_seen_.bytes()}, {});
      outcome_.losses[s] = loss_seen_.template as<float>()[0];
      outcome_.norms[s] = attempt([&] { return optimizer_->report(s - from_.step); }).norm;
      outcome_.state.step = s;
      if (s == 1) checkpoint_ = read_state(s);
      if (note_states_) states_.push_back(read_state(s));
    }
    outcome_.state = read_state(steps);
    attempt([&] { device_.record(*end_, *compute_); });
    CHECK(attempt([&] { return optimizer_->try_report(steps - from_.step); }).has_value());
    attempt([&] { device_.synchronize(*end_); });
    CHECK(attempt([&] { return device_.query(*end_); }));
    CHECK(attempt([&] { return device_.elapsed(*begin_, *end_); }) >= std::chrono::nanoseconds{0});
  }

  /// Gives everything back, and checks on the way that all memory of the arenas is there to be had. Throws when the
  /// context is lost; `end_lost` goes on from there.
  void end() {
    destroy([&] {
      store_.reset();
      optimizer_.reset();
    });
    for (std::uint32_t t = 0; t < weights_.size(); t += 2) attempt([&] { weights_[t].free(*compute_); });
    destroy([&] { drop_buffers(); });
    {
      const auto check = attempt([&] { return device_.create_stream("check"); });
      const auto take_all = [&](auto& arena) {
        auto all = attempt([&] { return arena.try_allocate(arena_bytes, "all", Role::other, check); });
        REQUIRE(all.has_value());
        const ArenaUsage usage = arena.usage();
        CHECK(usage.by_role[static_cast<std::uint32_t>(Role::other)] == usage.used);
        attempt([&] { all->free(check); });
      };
      take_all(*parameters_);
      take_all(*state_);
      take_all(*host_);
      take_all(*staging_);
      attempt([&] { device_.synchronize(check); });
    }
    end_lost();
  }
  void end_lost() {
    destroy([&] {
      store_.reset();
      optimizer_.reset();
      drop_buffers();
      for (auto* arena : {&host_, &staging_}) arena->reset();
      for (auto* arena : {&parameters_, &state_}) arena->reset();
      for (auto* event : {&turn_, &loss_ready_, &begin_, &end_}) event->reset();
      for (auto* stream : {&compute_, &backward_}) stream->reset();
    });
  }

  [[nodiscard]] const Outcome& outcome() const { return outcome_; }
  [[nodiscard]] const std::optional<State>& checkpoint() const { return checkpoint_; }
  /// After steps 1, 2, ...
  [[nodiscard]] const std::vector<State>& states() const { return states_; }
  /// The error that was planted came out of a call.
  [[nodiscard]] bool told() const { return failures_ == 1; }
  /// It met a call of a destructor, which has nobody to tell.
  [[nodiscard]] bool swallowed() const { return swallowed_; }
  /// It may have: the call was one of `read` or `write` of resident state, which take and give back memory.
  [[nodiscard]] bool maybe_swallowed() const { return maybe_swallowed_; }

  // ---------------------------------------------------------------------------------- after the loss of the context

  /// Every call of every object says what `error` says, or refuses, or does nothing.
  void check_refuses(const DeviceError& error) {
    const std::string work = work_of(error);
    enum class Answer { lost, refused, none, other };
    const auto answer = [&](auto&& call) {
      try {
        call();
        return Answer::none;
      } catch (const DeviceError& again) {
        return again.context_lost() && work_of(again) == work ? Answer::lost : Answer::other;
      } catch (const InvalidArgument&) {
        return Answer::refused;
      } catch (const OutOfMemory&) {
        return Answer::refused;
      }
    };
    const auto lost = [&](auto&& call) { return answer(call) == Answer::lost; };
    const auto harmless = [&](auto&& call) { return answer(call) != Answer::other; };

    CHECK(device_.lost());
    CHECK(lost([&] { static_cast<void>(device_.create_event()); }));
    CHECK(lost([&] { static_cast<void>(device_.create_stream()); }));
    CHECK(lost([&] { static_cast<void>(device_.allocate_device(Bytes{256})); }));
    CHECK(lost([&] { static_cast<void>(device_.allocate_pinned(Bytes{256})); }));
    if (compute_) {
      const typename D::StreamRef stream = *compute_;
      CHECK(lost([&] { device_.synchronize(stream); }));
      CHECK(lost([&] { device_.fill_async({}, std::byte{0}, stream); }));
      CHECK(lost([&] { device_.copy_async(device_span<std::byte>{}, pinned_span<const std::byte>{}, stream); }));
      CHECK(lost([&] { device_.enqueue(stream, [] {}); }));
      CHECK(lost([&] { device_.host_func(stream, [] {}); }));
      if (end_) {
        const typename D::EventRef event = *end_;
        CHECK(lost([&] { device_.record(event, stream); }));
        CHECK(lost([&] { device_.wait(stream, event); }));
        CHECK(lost([&] { static_cast<void>(device_.query(event)); }));
        CHECK(lost([&] { device_.synchronize(event); }));
        CHECK(lost([&] { static_cast<void>(device_.elapsed(*begin_, event)); }));
      }
      for (auto* arena : {&host_, &staging_}) {
        if (*arena) CHECK(harmless([&] { (*arena)->allocate(Bytes{300}, "late", Role::other, stream).free(stream); }));
      }
      for (auto* arena : {&parameters_, &state_}) {
        if (*arena) CHECK(harmless([&] { (*arena)->allocate(Bytes{300}, "late", Role::other, stream).free(stream); }));
      }
      if (store_) {
        CHECK(harmless([&] { static_cast<void>(store_->restore(layers - 1, stream)); }));
        CHECK(harmless([&] { store_->save(0, stream).commit(); }));
        CHECK(harmless([&] { store_->save(1, stream).commit(); }));
      }
      if (optimizer_) check_optimizer_refuses(stream, lost, harmless);
    }
  }

  /// What the optimizer calls whole is the state of the step that it says. How many pages are at which step, and how
  /// many of them are whole.
  struct PageCount {
    std::array<std::uint32_t, steps + 1> whole = {}, at = {};
  };
  PageCount check_pages(const std::vector<State>& undisturbed) {
    PageCount count;
    if (!optimizer_) return count;
    CHECK(optimizer_->failed());
    const std::vector<OptimizerPageState> pages = optimizer_->page_states();
    if (pages.empty()) return count;  // it had not taken its memory yet
    std::vector<TensorInfo> infos;
    for (const TensorSpec& spec : tensors())
      infos.push_back({.name = spec.name, .role = Role::weight, .dtype = spec.weight, .count = spec.count});
    const AdamWLayout layout = adamw_layout(std::span<const TensorInfo>{infos}, policy(), page);
    REQUIRE(pages.size() == layout.pages.size());
    for (std::uint32_t p = 0; p < pages.size(); ++p) {
      INFO("page ", p, " at step ", pages[p].step);
      REQUIRE(pages[p].step <= steps);
      CHECK(pages[p].step <= optimizer_->steps());
      CHECK(pages[p].label.find(infos[layout.slices[layout.pages[p].first_slice].tensor].name) != std::string::npos);
      if (layout.pages[p].home == Tier::hbm) CHECK(!pages[p].whole);
      if (layout.pages[p].home == Tier::hbm) continue;
      ++count.at[pages[p].step];
      count.whole[pages[p].step] += pages[p].whole ? 1 : 0;
      // The checkpoint was read from these homes, so what was not written since is known to be whole.
      if (checkpoint_ && pages[p].step == 1) CHECK(pages[p].whole);
    }
    for (std::uint32_t t = 0; t < tensors().size(); ++t) {
      for (std::uint32_t which = 0; which < 3; ++which) {
        if (!has_state(t, which)) continue;
        INFO("tensor ", t, " state ", which);
        std::vector<SalvagedRange> expected;
        for (std::uint32_t p = 0; p < pages.size(); ++p) {
          const AdamWPage& place = layout.pages[p];
          for (std::uint32_t i = place.first_slice; i < place.first_slice + place.slice_count; ++i) {
            const AdamWSlice& slice = layout.slices[i];
            if (slice.tensor == t && pages[p].whole)
              expected.push_back({slice.tensor_first, slice.count, pages[p].step});
          }
        }
        constexpr float untouched = -1234.5f;
        std::vector<float> values(tensors()[t].count, untouched), wanted = values;
        CHECK(optimizer_->salvage(tensors()[t].name, static_cast<OptimizerState>(which), values) == expected);
        for (const SalvagedRange& range : expected) {
          std::copy_n(undisturbed[range.step].moments[t][which].begin() + static_cast<std::ptrdiff_t>(range.first),
                      range.count, wanted.begin() + static_cast<std::ptrdiff_t>(range.first));
        }
        CHECK(same_bits(values, wanted));
      }
    }
    return count;
  }

 private:
  using Hbm = HbmArena<D>;
  using Host = PinnedHostArena<D>;
  using Optimizer = PagedAdamW<D, OffloadMatching, 2>;
  using Store = ActivationStore<D, OneOfEach, 2>;
  using StreamRef = typename D::StreamRef;

  // What a user does: makes the call again.
  template <class Call>
  auto attempt(Call&& call) -> decltype(call()) {
    while (true) {
      try {
        return call();
      } catch (const OutOfMemory& error) {
        note(error);
      } catch (const DeviceError& error) {
        if (error.context_lost()) throw;
        note(error);
      }
    }
  }
  void note(const DeviceError& error) {
    REQUIRE(++failures_ == 1);
    CHECK(planted_.outcome == FaultOutcome::call_failed);
    CHECK(error.kind() == DeviceError::Kind::call_failed);
    INFO(error.what());
    CHECK(api_is_of(planted_.kind, error.api()));
    CHECK(std::string_view{error.where().file_name()}.size() > 3);
    CHECK(error.where().line() > 0);
    const std::string place = error.api() + " (" + error.where().file_name() + ":" +
                              std::to_string(error.where().line()) + "): " + reason_for(planted_.kind, planted_.nth);
    CHECK(error.what() == place);
    CHECK(!device_.lost());
  }
  void note(const OutOfMemory& error) {
    REQUIRE(++failures_ == 1);
    CHECK(planted_.outcome == FaultOutcome::out_of_memory);
    const bool hbm = planted_.kind == CallKind::allocation;
    CHECK(error.details().tier == (hbm ? Tier::hbm : Tier::pinned_host));
    CHECK(error.details().requested == arena_bytes);
    CHECK(error.details().what_for == (hbm ? "allocate_device" : "allocate_pinned"));
    CHECK(error.details().remedy == reason_for(planted_.kind, planted_.nth));
    CHECK(!device_.lost());
  }

  // Of destructors, which have nobody to tell.
  template <class F>
  void destroy(F&& f) {
    if (meets_fault(f)) swallowed_ = true;
  }
  template <class F>
  void attempt_with_temporaries(F&& f) {
    if (meets_fault([&] { attempt(f); })) maybe_swallowed_ = true;
  }
  // Of the planted failure's kind.
  [[nodiscard]] std::uint64_t calls_made() const {
    if constexpr (requires { device_.inner(); }) {
      return device_.inner().calls_made(planted_.kind);
    } else {
      return device_.calls_made(planted_.kind);
    }
  }
  // Whether the planted failure meets one of the calls that `f` makes.
  template <class F>
  [[nodiscard]] bool meets_fault(F&& f) {
    const std::uint64_t before = calls_made() - calls_before_;
    f();
    const std::uint64_t after = calls_made() - calls_before_;
    return before < planted_.nth && planted_.nth <= after;
  }
  void drop_buffers() {
    for (auto* buffers : {&weights_, &gradients_}) buffers->clear();
    hidden_ = {}, hidden_gradient_ = {}, loss_ = {};
    copies_.clear();
    loss_seen_ = {};
  }

  template <class F>
  void launch(StreamRef stream, std::string_view name, AccessList reads, AccessList writes, F kernel) {
    attempt([&] {
      device_.note_access(stream, name, reads, writes);
      device_.enqueue(stream, kernel, {.name = name});
    });
  }
  void order(StreamRef first, StreamRef second) {
    attempt([&] { device_.record(*turn_, first); });
    attempt([&] { device_.wait(second, *turn_); });
  }
  [[nodiscard]] Elements weight(std::uint32_t t) const {
    return {weights_[t].bytes().data(), tensors()[t].weight, tensors()[t].count};
  }
  [[nodiscard]] Elements gradient(std::uint32_t t) const {
    return {gradients_[t].bytes().data(), tensors()[t].gradient, tensors()[t].count};
  }

  void set_up() {
    compute_.emplace(attempt([&] { return device_.create_stream("compute"); }));
    backward_.emplace(attempt([&] { return device_.create_stream("backward"); }));
    turn_.emplace(attempt([&] { return device_.create_event(); }));
    loss_ready_.emplace(attempt([&] { return device_.create_event(); }));
    begin_.emplace(attempt([&] { return device_.create_event(EventTiming::timed); }));
    end_.emplace(attempt([&] { return device_.create_event(EventTiming::timed); }));
    attempt([&] { device_.record(*begin_, *compute_); });
    const ArenaOptions options{.max_blocks = 128, .max_streams = 8, .fill_freed = true};
    parameters_ = attempt([&] { return std::make_unique<Hbm>(device_, arena_bytes, options); });
    state_ = attempt([&] { return std::make_unique<Hbm>(device_, arena_bytes, options); });
    host_ = attempt([&] { return std::make_unique<Host>(device_, arena_bytes, options); });
    staging_ = attempt([&] { return std::make_unique<Host>(device_, arena_bytes, options); });
    const auto take = [&](auto& arena, Bytes bytes, std::string_view name, Role role) {
      return attempt([&] { return arena.allocate(bytes, name, role, *compute_); });
    };
    for (std::uint32_t t = 0; t < layers; ++t) {
      const TensorSpec& spec = tensors()[t];
      weights_.push_back(take(*parameters_, size_of(spec.weight) * spec.count, spec.name, Role::weight));
      gradients_.push_back(take(*parameters_, size_of(spec.gradient) * spec.count, spec.name, Role::gradient));
      copies_.push_back(take(*staging_, size_of(spec.weight) * spec.count, spec.name, Role::workspace));
      device_.note_host_access("load", {}, {copies_[t].bytes()});
      std::memcpy(copies_[t].bytes().data(), from_.weights[t].data(), from_.weights[t].size());
      attempt([&] { device_.copy_async(weights_[t].bytes(), copies_[t].bytes(), *compute_); });
    }
    hidden_ = take(*parameters_, Bytes{width * 4}, "hidden", Role::workspace);
    hidden_gradient_ = take(*parameters_, Bytes{width * 4}, "gradient of hidden", Role::workspace);
    loss_ = take(*parameters_, Bytes{4}, "loss", Role::workspace);
    loss_seen_ = take(*staging_, Bytes{8}, "loss", Role::workspace);
    attempt([&] { device_.synchronize(*compute_); });

    optimizer_ = attempt([&] {
      return std::make_unique<Optimizer>(*state_, *host_, policy(),
                                         PagedAdamWOptions{.page = page, .fill_evicted = true});
    });
    optimizer_->add_group({.learning_rate = 2e-3f, .weight_decay = 0.01f});
    for (std::uint32_t t = 0; t < layers; ++t) {
      const TensorSpec& spec = tensors()[t];
      with_type(spec.weight, [&]<class W>(W) {
        with_type(spec.gradient, [&]<class G>(G) {
          optimizer_->add(TensorInfo{.name = spec.name, .dtype = spec.weight, .count = spec.count},
                          weights_[t].template as<W>(), device_span<const G>{gradients_[t].template as<G>()},
                          GroupId{spec.group});
        });
      });
    }
    store_ = attempt([&] {
      return std::make_unique<Store>(*state_, *host_, OneOfEach{}, layers, bundle(),
                                     ActivationStoreOptions{.fill_evicted = true});
    });
    if (from_.step == 0) return;  // the first step prepares
    attempt([&] { optimizer_->unfinished() ? optimizer_->resume(*compute_) : optimizer_->prepare(*compute_); });
    for (std::uint32_t t = 0; t < layers; ++t) {
      for (std::uint32_t which = 0; which < 3; ++which) {
        if (!has_state(t, which)) continue;
        attempt_with_temporaries(
            [&] { optimizer_->write(tensors()[t].name, static_cast<OptimizerState>(which), from_.moments[t][which]); });
      }
      attempt([&] { optimizer_->set_applied_steps(tensors()[t].name, from_.applied[t]); });
    }
  }

  void forward(std::uint64_t s) {
    launch(*compute_, "embed", {}, {hidden_.bytes()}, [h = hidden_.template as<float>(), s] {
      for (std::uint64_t i = 0; i < width; ++i) h.data()[i] = number(3, s, 0, i);
    });
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = attempt([&] { return store_->save(l, *compute_); });
      const device_span<float> x = saved[input], a = saved[product], c = saved[scale];
      const device_span<bf16> m = saved[mask];
      launch(*compute_, "forward", {hidden_.bytes(), weights_[l].bytes()}, {hidden_.bytes(), x, a, m, c},
             [h = hidden_.template as<float>().data(), w = weight(l), x = x.data(), a = a.data(), m = m.data(),
              c = c.data(), l] {
               float sum = 0.0f;
               for (std::uint64_t i = 0; i < width; ++i) {
                 x[i] = h[i];
                 a[i] = x[i] * w[i];
                 m[i] = mask_of(x[i], w[i]);
                 sum += a[i];
               }
               c[0] = 1.0f / (1.0f + sum * sum);
               c[1] = static_cast<float>(l + 1);
               for (std::uint64_t i = 0; i < width; ++i) h[i] = x[i] + c[0] * a[i] * to_float(m[i]);
             });
      attempt([&] { saved.commit(); });
    }
    launch(*compute_, "loss", {hidden_.bytes()}, {loss_.bytes(), hidden_gradient_.bytes()},
           [h = hidden_.template as<float>().data(), g = hidden_gradient_.template as<float>().data(),
            loss = loss_.template as<float>().data()] {
             float sum = 0.0f;
             for (std::uint64_t i = 0; i < width; ++i) {
               sum += h[i] * h[i];
               g[i] = 2.0f * h[i] / width;
             }
             *loss = sum / width;
           });
    const pinned_span<std::byte> copied = loss_seen_.bytes().subspan(4, 4), seen = loss_seen_.bytes().subspan(0, 4);
    attempt([&] { device_.copy_async(copied, loss_.bytes(), *compute_); });
    attempt([&] {
      device_.note_access(*compute_, "log", {copied}, {seen});
      device_.host_func(*compute_, [from = copied.data(), to = seen.data()] { std::memcpy(to, from, 4); });
    });
    attempt([&] { device_.record(*loss_ready_, *compute_); });
  }

  static bf16 mask_of(float x, float w) { return from_float<bf16>(x * w > 0.0f ? 1.0f : 0.25f); }

  void run_backward() {
    for (std::uint32_t l = layers; l-- > 0;) {
      auto saved = attempt([&] { return store_->restore(l, *backward_); });
      const device_span<float> x = saved[input], a = saved[product], c = saved[scale];
      const device_span<bf16> m = saved[mask];
      CHECK(saved.missing(mask) == (l < layers - 2));
      if (saved.missing(mask)) {
        launch(*backward_, "recompute", {x, weights_[l].bytes()}, {m}, [x = x.data(), m = m.data(), w = weight(l)] {
          for (std::uint64_t i = 0; i < width; ++i) m[i] = mask_of(x[i], w[i]);
        });
      }
      // Every bit of what was saved goes into the gradients.
      launch(*backward_, "backward", {x, a, m, c, hidden_gradient_.bytes(), weights_[l].bytes()},
             {hidden_gradient_.bytes(), gradients_[l].bytes()},
             [x = x.data(), a = a.data(), m = m.data(), c = c.data(), w = weight(l), to = gradient(l),
              g = hidden_gradient_.template as<float>().data()] {
               for (std::uint64_t j = 0; j < to.count; ++j) {
                 float sum = 0.0f;
                 for (std::uint64_t i = j; i < width; i += to.count)
                   sum += g[i] * c[0] * to_float(m[i]) * x[i] + 1e-2f * c[1] * a[i];
                 store(to.data, to.dtype, j, sum);
               }
               for (std::uint64_t i = 0; i < width; ++i) g[i] *= 1.0f + c[0] * to_float(m[i]) * w[i];
             });
      if (l % 2 == 0) {
        attempt([&] { saved.commit(); });
      } else {
        destroy([&] { auto ended = std::move(saved); });
      }
    }
  }

  void step(std::uint64_t s) {
    const AdamWStep options{.gradient_scale = 0.5f, .max_norm = 1.0f, .skip_nonfinite = true};
    optimizer_->group(GroupId{1}).learning_rate = 0.01f / static_cast<float>(s);
    const std::uint64_t written_before = optimizer_->stats().write_backs;
    attempt([&] {
      if (optimizer_->unfinished()) {
        // A page is at this step where its write-back was put on its way, and only there. (A first step writes twice.)
        const auto pages = optimizer_->page_states();
        const auto here = std::count_if(pages.begin(), pages.begin() + optimizer_->offloaded_pages(),
                                        [&](const OptimizerPageState& state) { return state.step == s - from_.step; });
        const std::uint64_t written = optimizer_->stats().write_backs - written_before;
        if (s - from_.step > 1) CHECK(static_cast<std::uint64_t>(here) == written);
        optimizer_->resume(*compute_);
      } else {
        optimizer_->step(*compute_, options);
      }
    });
    CHECK(!optimizer_->unfinished());
    if (planted_.outcome != FaultOutcome::work_failed) CHECK(!optimizer_->failed());
    CHECK(optimizer_->steps() == s - from_.step);
  }

  State read_state(std::uint64_t s) {
    State state{.step = s, .weights = {}, .moments = {}, .applied = {}};
    for (std::uint32_t t = 0; t < layers; ++t) {
      attempt([&] { device_.copy_async(copies_[t].bytes(), weights_[t].bytes(), *compute_); });
      state.moments.emplace_back();
      for (std::uint32_t which = 0; which < 3; ++which) {
        if (!has_state(t, which)) continue;
        auto& values = state.moments[t][which];
        values.resize(tensors()[t].count);
        attempt_with_temporaries(
            [&] { optimizer_->read(tensors()[t].name, static_cast<OptimizerState>(which), values); });
      }
      state.applied.push_back(attempt([&] { return optimizer_->applied_steps(tensors()[t].name); }));
    }
    attempt([&] { device_.synchronize(*compute_); });
    for (const auto& copy : copies_) {
      device_.note_host_access("checkpoint", {copy.bytes()}, {});
      state.weights.emplace_back(copy.bytes().begin(), copy.bytes().end());
    }
    return state;
  }

  template <class Lost, class Harmless>
  void check_optimizer_refuses(StreamRef stream, Lost&& lost, Harmless&& harmless) {
    const auto told = [&] {
      std::vector<std::tuple<std::string, std::uint64_t, bool>> pages;
      for (const OptimizerPageState& state : optimizer_->page_states())
        pages.emplace_back(state.label, state.step, state.whole);
      return pages;
    };
    const auto before = told();
    std::vector<float> values(tensors()[0].count);
    const std::string& name = tensors()[0].name;
    const bool unfinished = optimizer_->unfinished();
    CHECK(optimizer_->failed());
    if (unfinished) CHECK(lost([&] { optimizer_->resume(stream); }));
    for (const std::uint64_t s : {1u, 2u, 3u}) {
      CHECK(harmless([&] { static_cast<void>(optimizer_->report(s)); }));
      CHECK(harmless([&] { static_cast<void>(optimizer_->try_report(s)); }));
    }
    if (optimizer_->steps() > 1) CHECK(lost([&] { static_cast<void>(optimizer_->report(1)); }));
    CHECK(harmless([&] { optimizer_->read(name, OptimizerState::first_moment, values); }));
    CHECK(harmless([&] { optimizer_->write(name, OptimizerState::first_moment, values); }));
    CHECK(harmless([&] { static_cast<void>(optimizer_->applied_steps(name)); }));
    CHECK(harmless([&] { optimizer_->set_applied_steps(name, 9); }));
    CHECK(harmless([&] { optimizer_->set_frozen(optimizer_->id(name), false); }));
    if (!unfinished && optimizer_->pages() != 0)
      CHECK(lost([&] { optimizer_->read(name, OptimizerState::first_moment, values); }));
    CHECK(harmless([&] { optimizer_->prepare(stream); }));
    CHECK(harmless([&] { optimizer_->refresh(stream); }));
    CHECK(harmless([&] { static_cast<void>(optimizer_->step(stream)); }));
    CHECK(harmless([&] { optimizer_->resume(stream); }));
    if (!before.empty()) CHECK(told() == before);
    CHECK(optimizer_->failed());
  }

  D& device_;
  State from_;
  Planted planted_;
  bool note_states_;
  std::uint64_t calls_before_ = 0;
  std::uint32_t failures_ = 0;
  bool swallowed_ = false;
  bool maybe_swallowed_ = false;
  Outcome outcome_;
  std::optional<State> checkpoint_;
  std::vector<State> states_;

  std::optional<typename D::Stream> compute_, backward_;
  std::optional<typename D::Event> turn_, loss_ready_, begin_, end_;
  std::unique_ptr<Hbm> parameters_, state_;
  std::unique_ptr<Host> host_, staging_;
  std::vector<typename Hbm::Buffer> weights_, gradients_;
  typename Hbm::Buffer hidden_, hidden_gradient_, loss_;
  std::vector<typename Host::Buffer> copies_;
  typename Host::Buffer loss_seen_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Store> store_;
};

HostDeviceOptions device_options(std::uint64_t ring_capacity = 1024) {
  return {.hbm_capacity = 2 * arena_bytes, .ring_capacity = ring_capacity};
}

/// An undisturbed training: what it ends with, its states after every step, and how many calls of each kind it makes.
struct Undisturbed {
  explicit Undisturbed(const State& from) {
    HostDevice device{device_options()};
    {
      Training<HostDevice> noted{device, from, {}, true};
      noted.run();
      noted.end();
      states.resize(from.step);  // nobody looks at those
      states.push_back(from);
      states.insert(states.end(), noted.states().begin(), noted.states().end());
      outcome = noted.outcome();
    }
    for (std::uint32_t kind = 0; kind < call_kind_count; ++kind)
      calls[kind] = device.calls_made(static_cast<CallKind>(kind));
    Training<HostDevice> plain{device, from};
    plain.run();
    plain.end();
    REQUIRE(same_from(from.step, plain.outcome(), outcome));
    for (std::uint32_t kind = 0; kind < call_kind_count; ++kind)
      calls[kind] = device.calls_made(static_cast<CallKind>(kind)) - calls[kind];
    if (plain.checkpoint()) REQUIRE(*plain.checkpoint() == states[1]);
    REQUIRE(outcome.state == states[steps]);
    for (std::uint64_t s = from.step + 1; s <= steps; ++s) {
      REQUIRE(outcome.losses[s] != outcome.losses[s - 1]);
      REQUIRE(outcome.norms[s] > 0.0);
      REQUIRE(states[s].applied == std::vector<std::uint64_t>(layers, s));
      for (std::uint32_t t = 0; t < layers; ++t) REQUIRE(states[s].weights[t] != states[s - 1].weights[t]);
    }
  }

  Outcome outcome;
  std::vector<State> states;  ///< by step
  std::array<std::uint64_t, call_kind_count> calls = {};
};

constexpr CallKinds memory_kinds{CallKind::allocation, CallKind::pinning};
constexpr CallKinds work_kinds{CallKind::copy, CallKind::kernel, CallKind::host_function};

/// Fails calls first, first + stride, ... of every kind.
void walk_calls(const State& from, std::uint64_t first, std::uint64_t stride) {
  const Watchdog watchdog{"a failing call", std::chrono::seconds{600}};
  const Undisturbed undisturbed{from};
  HostDevice device{device_options()};
  std::uint64_t walked = 0, told = 0;
  for (std::uint32_t k = 0; k < call_kind_count; ++k) {
    const auto kind = static_cast<CallKind>(k);
    CHECK(undisturbed.calls[k] > 0);
    for (const FaultOutcome outcome : {FaultOutcome::call_failed, FaultOutcome::out_of_memory}) {
      if (outcome == FaultOutcome::out_of_memory && !CallKinds{kind}.is_within(memory_kinds)) continue;
      // Of the memory there are few.
      const bool few = CallKinds{kind}.is_within(memory_kinds);
      for (std::uint64_t n = few ? 1 : first; n <= undisturbed.calls[k]; n += few ? 1 : stride) {
        INFO("kind ", k, " call ", n);
        Training<HostDevice> training{device, from, {kind, n, outcome}};
        training.run();
        training.end();
        REQUIRE(!device.clear_fault());  // it has happened
        if (training.told()) {
          CHECK(!training.swallowed());
        } else {
          CHECK((training.swallowed() || training.maybe_swallowed()));
        }
        REQUIRE(same_from(from.step, training.outcome(), undisturbed.outcome));
        if (from.step == 0) REQUIRE(training.checkpoint() == undisturbed.states[1]);
        REQUIRE(!device.lost());
        REQUIRE(device.memory_info().free == 2 * arena_bytes);
        ++walked;
        told += training.told() ? 1 : 0;
      }
    }
  }
  std::uint64_t all = 0;
  for (const std::uint64_t calls : undisturbed.calls) all += calls;
  MESSAGE(walked, " failures in ", all, " calls, ", told, " told of, the others met destructors");
}

/// Fails the work of calls first, first + stride, ... of every kind that queues any.
void walk_work(std::uint64_t ring_capacity, std::uint64_t first, std::uint64_t stride) {
  const Watchdog watchdog{"failing work", std::chrono::seconds{600}};
  const State from = initial_state();
  const Undisturbed undisturbed{from};
  std::uint64_t walked = 0, thrown = 0, mixed = 0, whole_pages = 0;
  for (std::uint32_t k = 0; k < call_kind_count; ++k) {
    const auto kind = static_cast<CallKind>(k);
    if (!CallKinds{kind}.is_within(work_kinds)) continue;
    for (std::uint64_t n = first; n <= undisturbed.calls[k]; n += stride) {
      INFO("kind ", k, " call ", n);
      const Planted planted{kind, n, FaultOutcome::work_failed};
      std::optional<State> checkpoint;
      {
        HostDevice device{device_options(ring_capacity)};
        {
          Training<HostDevice> training{device, from, planted};
          std::optional<DeviceError> error;
          try {
            training.run();
            training.end();
          } catch (const DeviceError& lost) {
            error = lost;
          }
          if (error) {
            ++thrown;
            check_names_work(*error, planted);
            const auto count = training.check_pages(undisturbed.states);
            training.check_refuses(*error);
            static_cast<void>(training.check_pages(undisturbed.states));
            for (std::uint64_t s = 0; s <= steps; ++s) whole_pages += count.whole[s];
            for (std::uint64_t s = 1; s <= steps; ++s) {
              if (count.at[s] != 0 && count.at[s - 1] != 0 && count.whole[s - 1] == count.at[s - 1] &&
                  count.whole[s] < count.at[s])
                ++mixed;
            }
            training.end_lost();
          } else {
            REQUIRE(same_from(0, training.outcome(), undisturbed.outcome));
          }
          checkpoint = training.checkpoint();
        }
        CHECK(!device.clear_fault());
        CHECK(device.lost());
        try {
          static_cast<void>(device.create_event());
          CHECK(false);
        } catch (const DeviceError& lost) {
          check_names_work(lost, planted);
        }
        CHECK(device.memory_info().free == 2 * arena_bytes);
      }
      if (checkpoint) REQUIRE(*checkpoint == undisturbed.states[1]);
      HostDevice device{device_options(ring_capacity)};
      Training<HostDevice> again{device, checkpoint.value_or(from)};
      again.run();
      again.end();
      REQUIRE(same_from(checkpoint ? 1 : 0, again.outcome(), undisturbed.outcome));
      ++walked;
    }
  }
  MESSAGE(walked, " failures, ", thrown, " met by the training, ", whole_pages, " whole pages left, ", mixed,
          " runs with whole pages of one step and others of the next");
  CHECK(thrown > 0);
  if (stride == 1 && ring_capacity == 1) CHECK(mixed > 0);
}

/// Some of both, on a device that checks order: what makes up for a failure is in order too.
void walk_checked(std::uint64_t first, std::uint64_t stride) {
  using Checked = CheckedDevice<HostDevice>;
  const Watchdog watchdog{"a checked training", std::chrono::seconds{600}};
  const State from = initial_state();
  const Undisturbed undisturbed{from};
  std::uint64_t walked = 0;
  for (std::uint32_t k = 0; k < call_kind_count; ++k) {
    const auto kind = static_cast<CallKind>(k);
    for (const FaultOutcome outcome : {FaultOutcome::call_failed, FaultOutcome::work_failed}) {
      if (outcome == FaultOutcome::work_failed && !CallKinds{kind}.is_within(work_kinds)) continue;
      for (std::uint64_t n = first; n <= undisturbed.calls[k]; n += stride) {
        INFO("kind ", k, " call ", n, " outcome ", static_cast<int>(outcome));
        const Planted planted{kind, n, outcome};
        Checked device{device_options()};
        {
          Training<Checked> training{device, from, planted};
          try {
            training.run();
            training.end();
            CHECK(same_from(0, training.outcome(), undisturbed.outcome));
          } catch (const DeviceError& lost) {
            CHECK(outcome == FaultOutcome::work_failed);
            check_names_work(lost, planted);
            static_cast<void>(training.check_pages(undisturbed.states));
            training.end_lost();
          }
        }
        CHECK(!device.inner().clear_fault());
        CHECK(device.lost() == (outcome == FaultOutcome::work_failed));
        for (const CheckReport& report : device.reports()) {
          INFO(report.message());
          CHECK(false);
        }
        ++walked;
      }
    }
  }
  MESSAGE(walked, " failures");
  CHECK(walked > 0);
}

State after_step_1() { return Undisturbed{initial_state()}.states[1]; }

}  // namespace

TEST_CASE("every call of a training fails: the call is made again, and the bits are the undisturbed ones") {
  walk_calls(initial_state(), 1, 1);
}
TEST_CASE("every call of a training that goes on from a checkpoint fails") { walk_calls(after_step_1(), 1, 1); }

TEST_CASE("every piece of queued work fails: what is whole is said and can be saved, a checkpoint goes on") {
  walk_work(1024, 1, 1);
}

TEST_CASE("the same, where the host runs no more than one operation ahead") { walk_work(1, 1, 1); }

TEST_CASE("an arena of any size that is too small: the error names whose memory, the tier and the bytes") {
  const std::vector<TensorSpec>& specs = tensors();
  const auto is_known = [&](std::string_view name) {
    // Of a page it says whose state is in it.
    if (name.starts_with("adamw page ")) {
      return std::any_of(specs.begin(), specs.end(),
                         [&](const TensorSpec& spec) { return name.find(spec.name) != std::string_view::npos; });
    }
    return name.starts_with("adamw ") || name.starts_with("activations ");
  };
  for (const Tier small : {Tier::hbm, Tier::pinned_host}) {
    std::vector<std::string> named;
    bool enough = false;
    for (Bytes capacity = 256_B; !enough; capacity = capacity + 256_B) {
      INFO(to_string(small), " of ", capacity.count(), " bytes");
      REQUIRE(capacity <= arena_bytes);
      HostDevice device{device_options()};
      const auto stream = device.create_stream("compute");
      HbmArena<HostDevice> weights{device, arena_bytes};
      HbmArena<HostDevice> hbm{device, small == Tier::hbm ? capacity : arena_bytes};
      PinnedHostArena<HostDevice> host{device, small == Tier::pinned_host ? capacity : arena_bytes};
      try {
        PagedAdamW<HostDevice, OffloadMatching, 2> optimizer{hbm, host, policy(), PagedAdamWOptions{.page = page}};
        std::vector<HbmArena<HostDevice>::Buffer> buffers;
        for (const TensorSpec& spec : specs) {
          buffers.push_back(weights.allocate(Bytes{spec.count * 4}, spec.name, Role::weight, stream));
          buffers.push_back(weights.allocate(Bytes{spec.count * 4}, spec.name, Role::gradient, stream));
          with_type(spec.weight, [&]<class W>(W) {
            optimizer.add(TensorInfo{.name = spec.name, .dtype = spec.weight, .count = spec.count},
                          buffers[buffers.size() - 2].bytes().subspan(0, spec.count * sizeof(W)).template as<W>(),
                          device_span<const float>{buffers.back().template as<float>()});
          });
        }
        optimizer.prepare(stream);
        ActivationStore<HostDevice, OneOfEach, 2> store{hbm, host, OneOfEach{}, layers, bundle()};
        enough = true;
      } catch (const OutOfMemory& error) {
        const OutOfMemory::Details& details = error.details();
        INFO(error.what());
        CHECK(details.tier == small);
        CHECK(details.capacity == capacity);
        CHECK(details.requested > Bytes{});
        CHECK(details.requested > details.largest_free);
        CHECK(!details.remedy.empty());
        CHECK(is_known(details.what_for));
        CHECK(std::string_view{error.what()}.find(details.what_for) != std::string_view::npos);
        if (std::find(named.begin(), named.end(), details.what_for) == named.end()) named.push_back(details.what_for);
      }
      // Nothing of it is taken any more.
      const auto can_be_had = [&](auto& arena) {
        return arena.try_allocate(capacity, "all", Role::other, stream).has_value();
      };
      CHECK((small == Tier::hbm ? can_be_had(hbm) : can_be_had(host)));
    }
    CHECK(named.size() >= (small == Tier::hbm ? 5 : 9));  // tables, reports, slots, pages and layers
  }
}

TEST_CASE("failures are made up for in order: the device that checks has nothing to report") { walk_checked(5, 17); }

TEST_SUITE("nightly") {
  TEST_CASE("every failure is made up for in order") { walk_checked(1, 1); }
}
