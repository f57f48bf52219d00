// Every device call of a training fails once, twice, and for good: nothing hangs, nothing is lost, no bit changes.
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "gate.hpp"
#include "hbmoff/device/host_device.hpp"
#include "hbmoff/training/activation_store.hpp"
#include "hbmoff/training/paged_adamw.hpp"
#include "support/activation_model.hpp"
#include "support/adamw_model.hpp"
#include "support/watchdog.hpp"

using namespace hbmoff;
using namespace adamw_test;

namespace {

constexpr Bytes capacity = 512_KiB;  // below what is coloured, so that one buffer can take all of it

const std::vector<TensorSpec>& tensors() {
  static const std::vector<TensorSpec> specs{{"offloaded", 300, DType::fp32, DType::fp32, 0},
                                             {"offloaded.bf16", 150, DType::bf16, DType::fp32, 1},
                                             {"resident", 70, DType::fp32, DType::bf16, 5},
                                             {"resident.bf16", 66, DType::bf16, DType::bf16, 2}};
  return specs;
}

BundleLayout layout() {
  return {{{.info = {.name = "input", .count = 64}, .checkpoint = true},
           {.info = {.name = "mask", .count = 70}},
           {.info = {.name = "statistics", .count = 3}}},
          1};
}
struct OneOfEach {
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    return info.name == "mask" ? SaveMode::recompute : info.name == "statistics" ? SaveMode::keep : SaveMode::offload;
  }
};

/// What a training leaves: bits to compare.
struct Outcome {
  std::vector<std::vector<std::byte>> weights;
  std::vector<std::vector<float>> states;
  std::vector<std::uint64_t> applied;
  std::vector<double> norms;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

/// One device and its arenas for all the trainings, so that what one leaves behind would show in the next.
struct Machine {
  HostDevice device{{.hbm_capacity = capacity}};
  HbmArena<HostDevice> hbm{device, capacity, {.max_blocks = 512, .max_streams = 12, .fill_freed = true}};
  PinnedHostArena<HostDevice> host{device, capacity, {.max_blocks = 512, .max_streams = 12, .fill_freed = true}};

  /// All memory is there to be had again.
  void check_recovered() {
    const HostDevice::Stream stream = device.create_stream("check");
    {
      const auto hbm_all = hbm.try_allocate(capacity, "all", Role::other, stream);
      const auto host_all = host.try_allocate(capacity, "all", Role::other, stream);
      CHECK(hbm_all.has_value());
      CHECK(host_all.has_value());
    }
    device.synchronize(stream);
  }
};

/// A training of three steps whose `failing`-th device call fails. With `again`, more calls fail while the user is making
/// up for the first one.
class Training {
 public:
  Training(Machine& machine, std::uint64_t failing, bool again) : m_{machine}, failing_{failing}, again_{again} {}

  Outcome run() {
    device().fail_call(failing_);
    const std::uint64_t calls_before = device().calls_made();
    Outcome outcome;
    {
      const HostDevice::Stream stream = attempt([&] { return device().create_stream("compute"); });
      // Another stream for the backward, so that leases have something to wait for.
      const HostDevice::Stream backward = attempt([&] { return device().create_stream("backward"); });
      const HostDevice::Event turn = attempt([&] { return device().create_event(); });
      for (const TensorSpec& spec : tensors()) {
        weights_.push_back(attempt(
            [&] { return m_.hbm.allocate(size_of(spec.weight) * spec.count, spec.name, Role::weight, stream); }));
        gradients_.push_back(attempt(
            [&] { return m_.hbm.allocate(size_of(spec.gradient) * spec.count, spec.name, Role::gradient, stream); }));
      }
      const AdamWModel initial{tensors(), 7};
      for (std::uint32_t t = 0; t < tensors().size(); ++t) {
        put(stream, [to = weights_[t].bytes(), from = initial.tensors[t].weight.data()] {
          std::memcpy(to.data(), from, to.count());
        });
      }
      {
        using Optimizer = PagedAdamW<HostDevice, OffloadMatching, 2>;
        using Store = ActivationStore<HostDevice, OneOfEach, 2>;
        auto optimizer = attempt([&] {
          return std::make_unique<Optimizer>(m_.hbm, m_.host, OffloadMatching{{"off*"}},
                                             PagedAdamWOptions{.page = 1_KiB, .fill_evicted = true});
        });
        for (std::uint32_t g = 1; g < 6; ++g) optimizer->add_group({.learning_rate = 1e-3f * static_cast<float>(g)});
        add_tensors(*optimizer);
        auto store = attempt([&] {
          return std::make_unique<Store>(m_.hbm, m_.host, OneOfEach{}, layers, layout(),
                                         ActivationStoreOptions{.fill_evicted = true});
        });
        for (std::uint64_t s = 1; s <= 3; ++s) {
          forward(stream, *store, s);
          order(stream, backward, turn);
          run_backward(backward, *store, s);
          order(backward, stream, turn);
          optimizer->group(GroupId{5}).learning_rate = 0.01f / static_cast<float>(s);
          step(stream, *optimizer, s);
        }
        attempt([&] { device().synchronize(stream); });
        for (std::uint64_t s = 1; s <= 3; ++s)
          outcome.norms.push_back(attempt([&] { return optimizer->report(s); }).norm);
        for (std::uint32_t t = 0; t < tensors().size(); ++t) read_states(*optimizer, t, outcome);
        if (failing_ % 2 == 0) {  // destruction right behind work that was just put on the stream
          put_gradients(stream, 4);
          step(stream, *optimizer, 4);
        }
      }
      for (std::uint32_t t = 0; t < tensors().size(); ++t) {
        outcome.weights.emplace_back(weights_[t].size().count());
        if (failing_ % 2 == 0) continue;  // at step 4 already
        put(stream, [from = weights_[t].bytes(), to = outcome.weights.back().data()] {
          std::memcpy(to, from.data(), from.count());
        });
      }
      attempt([&] { device().synchronize(stream); });
      weights_.clear();
      gradients_.clear();
    }
    device().fail_call(0);
    calls_ = device().calls_made() - calls_before;
    return outcome;
  }

  [[nodiscard]] std::uint64_t calls() const { return calls_; }
  [[nodiscard]] bool failed() const { return failures_ != 0; }

 private:
  static constexpr std::uint32_t layers = 5;

  HostDevice& device() { return m_.device; }

  // What a user does: makes the call again. `here`: the error must tell of the call site in this file.
  template <class Call>
  auto attempt(Call&& call, bool here = false) -> decltype(call()) {
    while (true) {
      try {
        return call();
      } catch (const DeviceError& error) {
        note(error, here);
      }
    }
  }
  void note(const DeviceError& error, bool here = false) {
    ++failures_;
    if (here) CHECK(std::string{error.where().file_name()}.find("paged_adamw_failure_test") != std::string::npos);
    CHECK(error.kind() == DeviceError::Kind::call_failed);
    CHECK(!error.api().empty());
    CHECK(std::string_view{error.where().file_name()}.size() > 3);
    CHECK(error.where().line() > 0);
    if (again_ && failures_ < 4) device().fail_call(1 + hash(failing_ + failures_) % 12);
  }

  template <class F>
  void put(HostDevice::StreamRef stream, F kernel) {
    attempt([&] { device().enqueue(stream, kernel); });
  }
  void put_gradients(HostDevice::StreamRef stream, std::uint64_t step) {
    for (std::uint32_t t = 0; t < tensors().size(); ++t) {
      const TensorSpec& spec = tensors()[t];
      put(stream, [to = gradients_[t].bytes().data(), count = spec.count, dtype = spec.gradient,
                   source = GradientSource{.seed = 5, .step = step}, t] {
        for (std::uint64_t i = 0; i < count; ++i) store(to, dtype, i, source.at(t, i));
      });
    }
  }

  template <class Optimizer>
  void add_tensors(Optimizer& optimizer) {
    for (std::uint32_t t = 0; t < tensors().size(); ++t) {
      const TensorSpec& spec = tensors()[t];
      with_type(spec.weight, [&]<class W>(W) {
        with_type(spec.gradient, [&]<class G>(G) {
          optimizer.add(TensorInfo{.name = spec.name, .dtype = spec.weight, .count = spec.count}, weights_[t].as<W>(),
                        device_span<const G>{gradients_[t].as<G>()}, GroupId{spec.group});
        });
      });
    }
  }

  void order(HostDevice::StreamRef first, HostDevice::StreamRef second, HostDevice::EventRef event) {
    attempt([&] { device().record(event, first); });
    attempt([&] { device().wait(second, event); });
  }

  void compute(HostDevice::StreamRef stream, device_span<float> to, std::uint64_t step, std::uint32_t layer,
               std::uint32_t tensor) {
    put(stream, [=] {
      for (std::uint64_t i = 0; i < to.count(); ++i)
        to.data()[i] = activation_test::saved_number(step, layer, tensor, i);
    });
  }

  template <class Store>
  void forward(HostDevice::StreamRef stream, Store& store, std::uint64_t step) {
    put_gradients(stream, step);
    for (std::uint32_t l = 0; l < layers; ++l) {
      auto saved = attempt([&] { return store.save(l, stream); }, true);
      for (std::uint32_t i = 0; i < 3; ++i) compute(stream, saved.template tensor<float>(i), step, l, i);
      attempt([&] { saved.commit(); }, true);
    }
  }

  // Adds to the gradients what the forward saved.
  template <class Store>
  void run_backward(HostDevice::StreamRef stream, Store& store, std::uint64_t step) {
    for (std::uint32_t l = layers; l-- > 0;) {
      auto saved = attempt([&] { return store.restore(l, stream); }, true);
      CHECK(saved.missing(1) == (l < layers - 2));
      if (saved.missing(1)) compute(stream, saved.template tensor<float>(1), step, l, 1);
      for (std::uint32_t i = 0; i < 3; ++i) {
        put(stream, [from = saved.template tensor<float>(i), to = gradients_[0].template as<float>()] {
          for (std::uint64_t e = 0; e < from.count(); ++e) to.data()[e] += from.data()[e];
        });
      }
      if (l % 2 == 0) attempt([&] { saved.commit(); }, true);
    }
  }

  template <class Optimizer>
  void step(HostDevice::StreamRef stream, Optimizer& optimizer, std::uint64_t number) {
    const AdamWStep options{.gradient_scale = 0.5f, .max_norm = 1.0f, .skip_nonfinite = true};
    while (true) {
      try {
        const std::uint64_t made = optimizer.step(stream, options);  // not inside CHECK, which catches
        CHECK(made == number);
        break;
      } catch (const DeviceError& error) {
        note(error, number > 1);
      }
      if (!optimizer.unfinished()) continue;  // nothing was begun
      check_refuses_all(optimizer, stream, number);
      // Groups may be changed for the next step: this one keeps the values of its time.
      const AdamWGroup group = std::exchange(optimizer.group(GroupId{5}), AdamWGroup{.learning_rate = 1e9f});
      attempt([&] { optimizer.resume(stream); }, number > 1);
      optimizer.group(GroupId{5}) = group;
      break;
    }
    CHECK(!optimizer.unfinished());
    CHECK(!optimizer.failed());
    CHECK(optimizer.steps() == number);
    CHECK(attempt([&] { return optimizer.report(number); }).step == number);
    const std::uint64_t calls = device().calls_made();
    optimizer.resume(stream);  // nothing to do
    CHECK(device().calls_made() == calls);
  }

  template <class Optimizer>
  void check_refuses_all(Optimizer& optimizer, HostDevice::StreamRef stream, std::uint64_t number) {
    std::vector<float> values(tensors()[0].count);
    const std::string& name = tensors()[0].name;
    const TensorId id = optimizer.id(name);
    const std::uint64_t calls = device().calls_made();
    CHECK_THROWS_AS(optimizer.step(stream), InvalidArgument);
    CHECK_THROWS_AS(optimizer.prepare(stream), InvalidArgument);
    CHECK_THROWS_AS(optimizer.refresh(stream), InvalidArgument);
    CHECK_THROWS_AS(optimizer.set_frozen(id, true), InvalidArgument);
    CHECK_THROWS_AS(optimizer.set_gradient(id, device_span<const float>{}), InvalidArgument);
    CHECK_THROWS_AS(optimizer.read(name, OptimizerState::first_moment, values), InvalidArgument);
    CHECK_THROWS_AS(optimizer.write(name, OptimizerState::first_moment, values), InvalidArgument);
    CHECK_THROWS_AS(static_cast<void>(optimizer.applied_steps(name)), InvalidArgument);
    CHECK_THROWS_AS(optimizer.set_applied_steps(name, 5), InvalidArgument);
    CHECK(device().calls_made() == calls);
    try {  // the step that was cut short has decided, or it says so
      const std::uint64_t armed_calls = device().calls_made();
      const StepReport report = optimizer.report(number);
      CHECK(report.step == number);
      CHECK(device().calls_made() == armed_calls + 1);
    } catch (const InvalidArgument&) {
    } catch (const DeviceError& error) {
      note(error);
    }
  }

  template <class Optimizer>
  void read_states(Optimizer& optimizer, std::uint32_t t, Outcome& outcome) {
    for (const OptimizerState which :
         {OptimizerState::first_moment, OptimizerState::second_moment, OptimizerState::master_weight}) {
      if (which == OptimizerState::master_weight && tensors()[t].weight == DType::fp32) continue;
      std::vector<float> values(tensors()[t].count);
      attempt([&] { optimizer.read(tensors()[t].name, which, values); });
      attempt([&] { optimizer.write(tensors()[t].name, which, values); });
      outcome.states.push_back(values);
    }
    const std::uint64_t applied = attempt([&] { return optimizer.applied_steps(tensors()[t].name); });
    attempt([&] { optimizer.set_applied_steps(tensors()[t].name, applied); });
    outcome.applied.push_back(applied);
  }

  Machine& m_;
  std::uint64_t failing_;
  bool again_;
  std::uint64_t failures_ = 0;
  std::uint64_t calls_ = 0;
  std::vector<HbmArena<HostDevice>::Buffer> weights_, gradients_;
};

// Fails one call after the other. `first`, `stride`: which of them.
void walk(std::uint64_t first, std::uint64_t stride, bool again) {
  const Watchdog watchdog{"a failing call", std::chrono::seconds{300}};
  Machine machine;
  Training odd{machine, 0, false};
  const Outcome undisturbed_even = odd.run();
  REQUIRE(undisturbed_even.applied == std::vector<std::uint64_t>(4, 3));
  Training plain{machine, 999999999, false};  // never comes; an odd number, so weights are compared
  const Outcome undisturbed = plain.run();
  REQUIRE(undisturbed.weights != undisturbed_even.weights);
  REQUIRE(undisturbed.states == undisturbed_even.states);
  machine.check_recovered();
  std::uint64_t failed = 0, last = 0;
  for (std::uint64_t n = first; n <= plain.calls() + 60; n += stride) {
    INFO("call ", n);
    Training training{machine, n, again};
    const Outcome outcome = training.run();
    const bool equal = outcome == (n % 2 == 0 ? undisturbed_even : undisturbed);
    CHECK(equal);
    failed += training.failed() ? 1 : 0;
    if (training.failed()) last = n;
    if (n % 16 == 0) machine.check_recovered();
    if (!equal) break;
  }
  machine.check_recovered();
  MESSAGE(failed, " of ", plain.calls(), " calls failed and were told of, the last was call ", last);
  CHECK(failed > 0);
}

}  // namespace

TEST_CASE("each device call of a training fails once: the error says which, and the bits are the undisturbed ones") {
  walk(1, 3, false);
}

TEST_CASE("calls fail again while a failure is made up for") { walk(2, 7, true); }

TEST_CASE("an optimizer whose step failed is destroyed without resume, and its memory is there again") {
  const Watchdog watchdog{"destruction"};
  Machine machine;
  bool failed = true;
  std::uint64_t n = 0;
  while (failed) {
    ++n;
    INFO("call ", n);
    failed = false;
    const HostDevice::Stream stream = machine.device.create_stream("compute");
    auto weight = machine.hbm.allocate(Bytes{4000}, "weight", Role::weight, stream);
    auto gradient = machine.hbm.allocate(Bytes{4000}, "gradient", Role::gradient, stream);
    {
      PagedAdamW<HostDevice, OffloadMatching, 2> optimizer{
          machine.hbm, machine.host, OffloadMatching{{"a"}}, {.page = 1_KiB, .fill_evicted = true}};
      optimizer.add(TensorInfo{.name = "a", .count = 600}, weight.as<float>().subspan(0, 600),
                    gradient.as<float>().subspan(0, 600));
      optimizer.add(TensorInfo{.name = "b", .count = 400}, weight.as<float>().subspan(600, 400),
                    gradient.as<float>().subspan(600, 400));
      machine.device.fail_call(n);
      try {
        for (int s = 0; s < 2; ++s) optimizer.step(stream);
      } catch (const DeviceError&) {
        failed = true;
      }
    }  // other calls may fail in here
    machine.device.fail_call(0);
    machine.device.synchronize(stream);
  }
  CHECK(n > 100);
  machine.check_recovered();
}

TEST_CASE("a store whose call failed is destroyed at once, and its memory is there again") {
  const Watchdog watchdog{"destruction"};
  Machine machine;
  bool failed = true;
  std::uint64_t n = 0;
  while (failed) {
    ++n;
    INFO("call ", n);
    failed = false;
    const HostDevice::Stream stream = machine.device.create_stream("compute");
    machine.device.fail_call(n);
    try {
      ActivationStore<HostDevice, OneOfEach, 2> store{machine.hbm, machine.host, OneOfEach{}, 4, layout()};
      for (std::uint32_t l = 0; l < 4; ++l) store.save(l, stream).commit();
      for (std::uint32_t l = 4; l-- > 0;) static_cast<void>(store.restore(l, stream));
    } catch (const DeviceError&) {
      failed = true;
    }
    machine.device.fail_call(0);
    // And one without paging, whose only device calls are in its construction and its destruction.
    {
      ActivationStore<HostDevice, KeepResident> kept{machine.hbm, machine.host, KeepResident{}, 2, layout()};
      for (std::uint32_t l = 0; l < 2; ++l) kept.save(l, stream).commit();
      machine.device.fail_call(n);
    }
    machine.device.fail_call(0);
    machine.device.synchronize(stream);
  }
  CHECK(n > 50);
  machine.check_recovered();
}

TEST_CASE("state that does not fit is refused whole: nothing is taken, and a smaller page may do") {
  Machine machine;
  const HostDevice::Stream stream = machine.device.create_stream("compute");
  auto weight = machine.hbm.allocate(Bytes{100000}, "weight", Role::weight, stream);
  auto gradient = machine.hbm.allocate(Bytes{100000}, "gradient", Role::gradient, stream);
  auto rest = machine.hbm.allocate(Bytes{200000}, "rest", Role::other, stream);
  const auto try_page = [&](Bytes page, bool fits, auto policy) {
    PagedAdamW optimizer{machine.hbm, machine.host, policy, {.page = page}};
    optimizer.add(TensorInfo{.name = "w", .count = 25000}, weight.as<float>(), gradient.as<float>());
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (fits) {
        CHECK(optimizer.step(stream) == static_cast<std::uint64_t>(attempt) + 1);
        continue;
      }
      const auto error = thrown_by<OutOfMemory>([&] { optimizer.step(stream); });
      REQUIRE(error);
      CHECK(error->details().tier == Tier::hbm);
      CHECK(error->details().what_for.find("adamw") != std::string::npos);
      CHECK(!optimizer.unfinished());
      CHECK(optimizer.steps() == 0);
      CHECK(optimizer.stats() == TransferStats{});
    }
    machine.device.synchronize(stream);
  };
  try_page(64_KiB, false, OffloadOptimizerState{});  // three slots
  try_page(16_KiB, false, KeepResident{});
  try_page(16_KiB, true, OffloadOptimizerState{});
  try_page(64_KiB, false, OffloadOptimizerState{});
  try_page(16_KiB, true, OffloadOptimizerState{});
  weight = {}, gradient = {}, rest = {};
  machine.device.synchronize(stream);
  machine.check_recovered();
}

TEST_CASE("after the loss of the context every call says so, and destructors return") {
  const Watchdog watchdog{"lost context"};
  const auto lost = [](auto&& call) {
    const auto error = thrown_by<DeviceError>(call);
    return error && error->context_lost() && std::string{error->what()}.find("planted") != std::string::npos;
  };
  for (const int moment : {0, 1, 2, 3}) {
    INFO("moment ", moment);
    Machine machine;
    const HostDevice::Stream stream = machine.device.create_stream("compute");
    auto weight = machine.hbm.allocate(Bytes{4000}, "weight", Role::weight, stream);
    auto gradient = machine.hbm.allocate(Bytes{4000}, "gradient", Role::gradient, stream);
    PagedAdamW optimizer{machine.hbm, machine.host, OffloadOptimizerState{}, {.page = 1_KiB}};
    optimizer.add(TensorInfo{.name = "w", .count = 1000}, weight.as<float>(), gradient.as<float>());
    ActivationStore store{machine.hbm, machine.host, OneOfEach{}, 5, layout()};
    for (std::uint32_t l = 0; l < 5; ++l) store.save(l, stream).commit();
    Gate gate;
    if (moment > 0) optimizer.step(stream);
    if (moment == 2) machine.device.enqueue(stream, gate.pass());
    const auto open = moment == 3 ? std::optional{store.restore(4, stream)} : std::nullopt;
    machine.device.enqueue(stream, [] { throw std::runtime_error{"planted"}; });
    if (moment == 2) {  // with steps in flight behind it, all of which are dropped
      for (int s = 0; s < 3; ++s) optimizer.step(stream);
      gate.open();
    }
    CHECK(lost([&] { machine.device.synchronize(stream); }));
    CHECK(optimizer.failed());
    for (int again = 0; again < 2; ++again) {
      // The first of these may find the operation begun; whatever it finds, nothing goes on.
      CHECK_THROWS_AS(optimizer.step(stream), Error);
      CHECK_THROWS_AS(optimizer.refresh(stream), Error);
    }
    if (optimizer.unfinished()) CHECK(lost([&] { optimizer.resume(stream); }));
    if (moment > 0) CHECK(lost([&] { static_cast<void>(optimizer.report(1)); }));
    CHECK(lost([&] {  // a layer still in its slot needs no device call, the others do
      for (std::uint32_t l = moment == 3 ? 4 : 5; l-- > 0;) static_cast<void>(store.restore(l, stream));
    }));
    CHECK(lost([&] { static_cast<void>(store.save(0, stream)); }));
    CHECK(optimizer.failed());
  }
}

TEST_SUITE("nightly") {
  TEST_CASE("every single device call fails, once and several times") {
    walk(1, 1, false);
    walk(1, 1, true);
  }
}
