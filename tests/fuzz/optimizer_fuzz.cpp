// Random trainings with PagedAdamW, alone or beside an activation store in one pool, held against a plain model of AdamW
// (support/adamw_model.hpp): every bit of weights, moments, masters and counts, whatever fails on the way.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <variant>

#define DOCTEST_CONFIG_IMPLEMENT  // the model's header has checks, and there is no test runner here
#include "../support/adamw_model.hpp"
#include "fuzz.hpp"

namespace {

using namespace fuzz;
using adamw_test::AdamWModel;
using adamw_test::GradientSource;
using adamw_test::load;
using adamw_test::same_bits;
using adamw_test::store;
using adamw_test::TensorSpec;
using adamw_test::with_type;

/// One of the policies that ship, chosen by the input.
struct ChosenPolicy {
  std::variant<OffloadOptimizerState, OffloadLargerThan, OffloadMatching> chosen;
  [[nodiscard]] Tier home(const TensorInfo& info) const {
    return std::visit([&](const auto& policy) { return policy.home(info); }, chosen);
  }
};
using ActivationPolicy = RecomputeFirstLayers<KeepLastLayers<OffloadAll>>;
using Store = ActivationStore<Checked, ActivationPolicy, dynamic_depth>;

constexpr OptimizerState states[] = {OptimizerState::first_moment, OptimizerState::second_moment,
                                     OptimizerState::master_weight};

template <class Policy>
class Program {
  using Optimizer = PagedAdamW<Checked, Policy, dynamic_depth>;
  static constexpr bool pages = !OffloadPolicyTraits<Policy>::state_always_resident;

  // Gradients are written to one of two buffers, so that a step need not wait for the one before it for their sake.
  struct Gradient {
    HbmBuffer buffer[2];
    DType dtype[2];
    bool present = true;
  };

 public:
  Program(Checked& device, Input& input)
      : device_{device}, in_{input}, streams_{device.create_stream("a"), device.create_stream("b"),
                                              device.create_stream("c"), device.create_stream("before")},
        pinned_{device, Bytes{128 << 10}},
        hbm_{device, Bytes{256 << 10}, {.max_blocks = 256, .fill_freed = input.flip()}},
        host_{device, pinned_.memory, {.max_blocks = 256, .fill_freed = input.flip()}} {}

  void run(Policy policy) {
    policy_ = std::move(policy);
    if (in_.flip()) {  // memory that somebody used before, on a stream that the optimizer does not know
      auto used = hbm_.allocate(hbm_.usage().largest_free, "before", Role::other, streams_[3]);
      device_.fill_async(used.bytes(), std::byte{0xff}, streams_[3]);
      auto pinned = host_.allocate(host_.usage().largest_free, "before", Role::other, streams_[3]);
      device_.copy_async(pinned.bytes(), device_span<const std::byte>{used.bytes().subspan(0, pinned.size().count())},
                         streams_[3]);
    }
    make_tensors();
    options_ = {
        .page = Bytes{768 + 256 * std::uint64_t{in_.below(8)}}, .depth = in_.between(1, 5), .fill_evicted = in_.flip()};
    make_store_and_pool();
    open();
    for (int steps = 0; steps < 80 && !in_.empty() && !device_.lost(); ++steps) action();
    if (!device_.lost()) compare_all();
    close();
    end();
  }

 private:
  // ---------------------------------------------------------------------------------------------- what there is

  void make_tensors() {
    constexpr std::uint64_t counts[] = {0, 1, 2, 3, 17, 31, 64, 65, 97, 128, 191, 256, 331, 613};
    constexpr DType types[] = {DType::fp32, DType::bf16, DType::fp16};
    const std::uint32_t tensors = in_.below(9);
    groups_.resize(in_.between(1, 3));
    for (AdamWGroup& group : groups_) change(group);
    std::vector<TensorSpec> specs;
    for (std::uint32_t t = 0; t < tensors; ++t) {
      specs.push_back({.name = "t" + std::to_string(t),
                       .count = in_.pick(counts),
                       .weight = in_.pick(types),
                       .gradient = in_.pick(types),
                       .group = in_.below(groups_.size())});
      const TensorSpec& spec = specs.back();
      weights_.push_back(hbm_.allocate(size_of(spec.weight) * spec.count, spec.name, Role::weight, streams_[0]));
      Gradient gradient{.buffer = {}, .dtype = {spec.gradient, in_.flip() ? spec.gradient : in_.pick(types)}};
      for (std::uint32_t k = 0; k < 2; ++k) {
        gradient.buffer[k] =
            hbm_.allocate(size_of(gradient.dtype[k]) * spec.count, "gradient", Role::gradient, streams_[k]);
      }
      gradient.present = !in_.one_in(6);
      gradients_.push_back(std::move(gradient));
    }
    seed_ = in_.byte();
    model_.emplace(specs, seed_);
    for (std::uint32_t t = 0; t < tensors; ++t) {
      ties_.push_back(in_.one_in(4));
      model_->tensors[t].has_gradient = gradients_[t].present;
    }
    load_weights(streams_[0]);
  }

  void make_store_and_pool() {
    const std::uint32_t layers = in_.below(5);
    const std::uint64_t rows = in_.between(1, 3);
    for (std::uint32_t l = 0; l < layers; ++l) {
      BundleLayout layout{.tensors = {}, .rows = rows};
      const std::uint32_t tensors = in_.between(1, 3);
      for (std::uint32_t i = 0; i < tensors; ++i) {
        layout.tensors.push_back({.info = {.name = "activation " + std::to_string(i), .count = rows * in_.below(40)},
                                  .checkpoint = in_.one_in(3)});
      }
      layouts_.push_back(std::move(layout));
    }
    const ActivationPolicy policy{static_cast<std::int32_t>(in_.below(4)), {static_cast<std::int32_t>(in_.below(3))}};
    const ActivationStoreOptions options{.depth = in_.between(1, 4), .fill_evicted = in_.flip()};
    const bool shared = in_.flip();
    if constexpr (pages) {
      if (shared) {
        const Bytes slot = std::max(
            {activation_slot_bytes(policy, std::span<const BundleLayout>{layouts_}), options_.page, Bytes{256}});
        pool_.emplace(hbm_, slot, in_.between(2, 6), Role::workspace, streams_[3]);
        store_.emplace(hbm_, host_, *pool_, policy, layouts_, options);
        return;
      }
    }
    store_.emplace(hbm_, host_, policy, layouts_, options);
  }

  void open() {
    const std::uint32_t armed = in_.one_in(4) ? in_.between(1, 30) : 0;
    again_failing(armed, [&] {
      optimizer_.reset();
      if constexpr (pages) {
        if (pool_) {
          optimizer_.emplace(hbm_, host_, *pool_, policy_, options_);
          return;
        }
      }
      optimizer_.emplace(hbm_, host_, policy_, options_);
    });
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (g > 0) require(optimizer_->add_group(groups_[g]) == static_cast<GroupId>(g), "a group has another number");
      optimizer_->group(static_cast<GroupId>(g)) = groups_[g];
    }
    for (std::uint32_t t = 0; t < weights_.size(); ++t) {
      const TensorId id = add(t, model_->tensors[t].spec.name, gradients_[t].present);
      require(id == static_cast<TensorId>(t), "a tensor has another number");
      if (ties_[t] && model_->tensors[t].spec.count != 0) {
        require(add(t, model_->tensors[t].spec.name + ".tied", gradients_[t].present && in_.flip()) == id,
                "a tied tensor is another");
      }
      if (in_.one_in(8))
        expect_refused("a name used twice", [&] { add(t, model_->tensors[t].spec.name, gradients_[t].present); });
      if (model_->tensors[t].frozen) optimizer_->set_frozen(id, true);
    }
    prepared_ = false;
    history_.clear();
  }

  TensorId add(std::uint32_t t, const std::string& name, bool with_gradient) {
    const TensorSpec& spec = model_->tensors[t].spec;
    return with_type(spec.weight, [&]<class W>(W) {
      return with_type(gradients_[t].dtype[set_], [&]<class G>(G) {
        const auto gradient = with_gradient ? gradients_[t].buffer[set_].template as<G>() : device_span<G>{};
        return optimizer_->add({.name = name, .role = Role::weight, .dtype = spec.weight, .count = spec.count},
                               weights_[t].template as<W>(), device_span<const G>{gradient},
                               static_cast<GroupId>(spec.group));
      });
    });
  }

  void change(AdamWGroup& group) {
    constexpr float rates[] = {1e-3f, 0.0f, 0.5f, 3e-5f}, decays[] = {0.0f, 0.01f, 0.3f}, beta1[] = {0.9f, 0.0f, 0.5f},
                    beta2[] = {0.999f, 0.0f, 0.95f}, epsilons[] = {1e-8f, 1e-3f, 1e-20f};
    group = {in_.pick(rates), in_.pick(decays), in_.pick(beta1), in_.pick(beta2), in_.pick(epsilons)};
  }

  // ---------------------------------------------------------------------------------------------- what is done

  void action() {
    switch (in_.below(20)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        return step();
      case 5:
        return refresh();
      case 6:
        return prepare();
      case 7:
        return compare_all();
      case 8:
        return with_tensor([&](std::uint32_t t) { compare(t); });
      case 9:
        return with_tensor([&](std::uint32_t t) {
          AdamWModel::Tensor& tensor = model_->tensors[t];
          tensor.frozen = in_.flip();
          optimizer_->set_frozen(optimizer_->id(name_of(t)), tensor.frozen);
        });
      case 10:
        return with_tensor([&](std::uint32_t t) { give_gradient(t, in_.flip()); });
      case 11:
        change(groups_[in_.below(groups_.size())]);
        for (std::size_t g = 0; g < groups_.size(); ++g) optimizer_->group(static_cast<GroupId>(g)) = groups_[g];
        return;
      case 12:
        return with_tensor([&](std::uint32_t t) { write(t, in_.pick(states)); });
      case 13:
        return with_tensor([&](std::uint32_t t) {
          const std::uint64_t applied = in_.below(5) * 100;
          if (!prepared_) return refused_before_prepare(t);
          armed([&] { optimizer_->set_applied_steps(name_of(t), applied); });
          model_->tensors[t].applied = applied;
        });
      case 14:
        return report();
      case 15:
        return save_and_restore();
      case 16:
        return misuse();
      case 17:
        return activations();
      case 18:
        return salvage(false);
      default:
        if (in_.one_in(16)) lose();
        return;
    }
  }

  void step() {
    constexpr float scales[] = {1.0f, 0.5f, 0.0f, 1e-3f, -1.0f, 64.0f}, norms[] = {0.0f, 1.0f, 1e-3f, 100.0f};
    constexpr float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30f};
    if (in_.flip()) {  // the other buffers, for all that have a gradient
      set_ ^= 1u;
      for (std::uint32_t t = 0; t < weights_.size(); ++t) give_gradient(t, gradients_[t].present);
    }
    const StreamRef stream = any_stream(), writer = streams_[set_];
    GradientSource source{.seed = seed_, .step = ++gradient_steps_};
    source.zero = in_.one_in(8);
    if (in_.one_in(4) && !weights_.empty()) {
      source.bad_tensor = in_.below(weights_.size());
      source.bad_value = in_.pick(bad);
    }
    AdamWStep options{.gradient_scale = in_.pick(scales), .max_norm = in_.pick(norms), .skip_nonfinite = in_.flip()};
    if (reader_[set_]) order(device_, writer, *reader_[set_]);
    for (std::uint32_t t = 0; t < weights_.size(); ++t) {
      const auto memory = gradients_[t].buffer[set_].bytes();
      if (memory.empty()) continue;
      device_.note_access(writer, "write gradients", {}, {memory});
      device_.enqueue(writer, [&] {
        for (std::uint64_t i = 0; i < model_->tensors[t].spec.count; ++i)
          store(memory.data(), gradients_[t].dtype[set_], i, source.at(t, i));
      });
    }
    HbmBuffer norm_memory;
    GradientNorm norm{};
    if (in_.one_in(6)) {
      norm = {.squared_norm = static_cast<double>(in_.below(100)), .finite = in_.flip() ? 1u : 0u, .reserved = 0};
      norm_memory = hbm_.allocate(Bytes{sizeof norm}, "norm", Role::other, writer);
      device_.note_access(writer, "write norm", {}, {norm_memory.bytes()});
      device_.enqueue(writer, [&] { std::memcpy(norm_memory.bytes().data(), &norm, sizeof norm); });
      options.norm = reinterpret_cast<const GradientNorm*>(norm_memory.bytes().data());
    }
    order(device_, stream, writer);
    take_weights(stream);
    std::uint64_t number = 0;
    const bool completed = operation(stream, [&] { number = optimizer_->step(stream, options); });
    reader_[set_] = stream;
    weights_on_ = stream;
    if (!prepared_) prepared(Moments::reset);
    if (optimizer_->steps() == model_->steps - base_) {  // the preparation was cut short
      require(!completed, "a step was not counted");
      return lose();
    }
    const StepReport expected = model_->step(source, groups_, options, options.norm != nullptr ? &norm : nullptr);
    reports_[expected.step - base_] = expected;
    require(optimizer_->steps() == expected.step - base_, "a step has another number");
    require(number == 0 || number == optimizer_->steps(), "a step gives another number");
    remember(optimizer_->steps());
    if (norm_memory) norm_memory.move_to(stream);
    if (!completed) lose();
  }

  void prepare() {
    const StreamRef stream = any_stream();
    if (prepared_) return optimizer_->prepare(stream);  // does nothing
    take_weights(stream);
    const bool completed = operation(stream, [&] { optimizer_->prepare(stream); });
    prepared(Moments::reset);
    weights_on_ = stream;
    if (!completed) lose();
  }
  // The optimizer orders its own uses of the weights, and not those of others.
  void take_weights(StreamRef stream) {
    if (!prepared_ || std::exchange(looked_at_, false)) order(device_, stream, weights_on_);
  }
  void refresh() {
    const StreamRef stream = any_stream();
    const bool load = in_.flip();
    if (load) {  // other weights come from outside
      order(device_, stream, weights_on_);
      for (std::uint32_t t = 0; t < weights_.size(); ++t) {
        AdamWModel::Tensor& tensor = model_->tensors[t];
        for (std::uint64_t i = 0; i < tensor.spec.count; ++i)
          store(tensor.weight.data(), tensor.spec.weight, i, adamw_test::number(seed_, 2000 + t, ++loads_, i));
      }
      load_weights(stream);
    }
    take_weights(stream);
    const Moments moments = in_.flip() ? Moments::keep : Moments::reset;
    const bool completed = operation(stream, [&] { optimizer_->refresh(stream, moments); });
    prepared(prepared_ ? moments : Moments::reset);
    weights_on_ = stream;
    if (!completed) lose();
  }
  void prepared(Moments moments) {
    prepared_ = true;
    model_->refresh(moments);
    remember(0);
  }

  void give_gradient(std::uint32_t t, bool present) {
    gradients_[t].present = present;
    model_->tensors[t].has_gradient = present;
    model_->tensors[t].spec.gradient = gradients_[t].dtype[set_];
    with_type(gradients_[t].dtype[set_], [&]<class G>(G) {
      optimizer_->set_gradient(static_cast<TensorId>(t),
                               present ? gradients_[t].buffer[set_].template as<G>() : device_span<G>{});
    });
  }

  // Makes a call of an operation, which may be cut short, until it is done, or, now and then, as far as it came: false.
  template <class F>
  bool operation(StreamRef stream, F&& call) {
    const auto arm = [&] {
      const std::uint32_t most = in_.flip() ? 16 : 120;
      const std::uint32_t failing = in_.one_in(3) ? in_.between(1, most) : 0, times = in_.between(1, 2);
      device_.inner().fail_call(failing, times);
    };
    arm();
    bool done = false;
    for (bool begun = false; !done;) {
      try {
        if (begun) {
          optimizer_->resume(stream);
        } else {
          call();
        }
        done = true;
      } catch (const DeviceError&) {
        begun = optimizer_->unfinished();
        if (begun && in_.flip()) cut_short();
        if (begun && in_.one_in(32)) return device_.inner().fail_call(0), false;
        arm();
      }
    }
    device_.inner().fail_call(0);
    require(!optimizer_->unfinished(), "an operation that ended is unfinished");
    return true;
  }
  // Until it is resumed nothing else goes.
  void cut_short() {
    device_.inner().fail_call(0);
    expect_refused("a step that is not resumed", [&] { optimizer_->step(streams_[0]); });
    expect_refused("a refresh before resume", [&] { optimizer_->refresh(streams_[0]); });
    if (!weights_.empty()) {
      expect_refused("a change before resume", [&] { optimizer_->set_frozen(TensorId{0}, true); });
      std::vector<float> out(model_->tensors[0].spec.count);
      expect_refused("a read before resume", [&] { optimizer_->read(name_of(0), OptimizerState::first_moment, out); });
    }
    static_cast<void>(optimizer_->page_states());
  }

  // A call that has no effect when it fails.
  template <class F>
  void armed(F&& call) {
    again_failing(in_.one_in(4) ? in_.between(1, 6) : 0, call);
  }
  template <class F>
  void again_failing(std::uint32_t n, F&& call) {
    device_.inner().fail_call(n);
    again(call);
    device_.inner().fail_call(0);
  }

  void write(std::uint32_t t, OptimizerState state) {
    AdamWModel::Tensor& tensor = model_->tensors[t];
    std::vector<float> values(tensor.spec.count);
    for (std::uint64_t i = 0; i < values.size(); ++i) {
      values[i] = adamw_test::number(seed_, 3000 + t, ++loads_, i);
      if (state == OptimizerState::second_moment) values[i] = std::fabs(values[i]);
    }
    if (state == OptimizerState::master_weight && tensor.spec.weight == DType::fp32) {
      return expect_refused("a master of fp32 weights", [&] { optimizer_->write(name_of(t), state, values); });
    }
    if (!prepared_) return refused_before_prepare(t);
    armed([&] { optimizer_->write(name_of(t), state, values); });
    state_of(tensor, state) = values;
    for (auto& [step, kept] : history_) kept.assign(1, *model_);  // all is home, whichever step it is of
  }
  void refused_before_prepare(std::uint32_t t) {
    std::vector<float> out(model_->tensors[t].spec.count);
    expect_refused("a read before prepare", [&] { optimizer_->read(name_of(t), OptimizerState::first_moment, out); });
    expect_refused("a count before prepare", [&] { static_cast<void>(optimizer_->applied_steps(name_of(t))); });
  }

  void report() {
    const std::uint64_t steps = optimizer_->steps();
    if (steps == 0) return expect_refused("a report of no step", [&] { static_cast<void>(optimizer_->report(0)); });
    const std::uint64_t back = in_.below(10);
    if (back >= steps || back >= 8) {
      return expect_refused("an old report",
                            [&] { static_cast<void>(optimizer_->report(back >= steps ? steps + 1 : steps - back)); });
    }
    StepReport got;
    armed([&] { got = in_.flip() ? optimizer_->report(steps - back) : *optimizer_->try_report(steps - back); });
    const StepReport& expected = reports_[steps - back];
    require(got.step == expected.step - base_ && got.applied == expected.applied &&
                got.skipped_total == expected.skipped_total - base_skipped_ &&
                std::memcmp(&got.norm, &expected.norm, sizeof got.norm) == 0,
            "a report tells something else");
  }

  // Destroys the optimizer and makes one anew from what was read.
  void save_and_restore() {
    const bool was_prepared = prepared_;
    if (was_prepared) compare_all();  // what is saved is what the model has
    close();
    open();
    base_ = model_->steps;
    base_skipped_ = model_->skipped;
    reports_.clear();
    if (!was_prepared) return;
    const AdamWModel saved = *model_;
    const StreamRef stream = any_stream();
    take_weights(stream);
    const bool completed = operation(stream, [&] { optimizer_->prepare(stream); });
    prepared_ = completed;
    if (!completed) return lose();
    weights_on_ = stream;
    remember(0);
    for (std::uint32_t t = 0; t < weights_.size(); ++t) {
      for (const OptimizerState state : states) {
        if (state == OptimizerState::master_weight && model_->tensors[t].spec.weight == DType::fp32) continue;
        armed([&] { optimizer_->write(name_of(t), state, state_of(model_->tensors[t], state)); });
      }
      armed([&] { optimizer_->set_applied_steps(name_of(t), saved.tensors[t].applied); });
    }
  }

  void misuse() {
    AdamWGroup& group = optimizer_->group({});
    const AdamWGroup before = group;
    constexpr float bad[] = {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
    const float value = in_.pick(bad);
    switch (in_.below(6)) {
      case 0:
        group.beta1 = value;
        break;
      case 1:
        group.epsilon = value;
        break;
      case 2:
        group.learning_rate = value;
        break;
      case 3:
        return expect_refused("a bad norm", [&] { optimizer_->step(streams_[0], {.max_norm = value}); });
      case 4:
        expect_refused("a tensor that there is not", [&] { optimizer_->set_frozen(TensorId{99}, true); });
        expect_refused("a name that there is not", [&] { static_cast<void>(optimizer_->id("nobody")); });
        return expect_refused("a group that there is not", [&] { static_cast<void>(optimizer_->group(GroupId{9})); });
      default:
        if (weights_.empty()) return;
        std::vector<float> out(model_->tensors[0].spec.count + 1);
        expect_refused("a read of too much", [&] { optimizer_->read(name_of(0), OptimizerState::first_moment, out); });
        if (prepared_) expect_refused("a tensor added late", [&] { add(0, "late", false); });
        return;
    }
    expect_refused("a bad group", [&] { optimizer_->step(streams_[0]); });
    group = before;
  }

  // ---------------------------------------------------------------------------------------------- activations

  // A forward and the backward of it, both perhaps cut off; what is restored is what was saved.
  void activations() {
    if (layouts_.empty()) return;
    const StreamRef stream = any_stream();
    const std::uint64_t rows = in_.between(1, static_cast<std::uint32_t>(layouts_[0].rows));
    const bool commits = !in_.one_in(4);
    const std::uint64_t pass = ++passes_;
    const std::uint32_t layers = in_.one_in(5) ? in_.below(layouts_.size()) : store_->layers();
    const auto content = [&](std::uint32_t l, std::uint32_t i) { return pass * 1000 + l * 10 + i; };
    const auto compute = [&](auto& bundle, StreamRef on, std::uint32_t l, std::uint32_t i) {
      const auto memory = bundle.template tensor<float>(i).bytes();
      if (memory.empty()) return;
      device_.note_access(on, "compute", {}, {memory});
      device_.enqueue(on, [&] {
        for (std::uint64_t b = 0; b < memory.count(); ++b) memory.data()[b] = content_byte(content(l, i), b);
      });
    };
    for (std::uint32_t l = 0; l < layers; ++l) {
      std::optional<typename Store::SavedBundle> saved;
      armed([&] { saved.emplace(store_->save(l, stream, rows)); });
      for (std::uint32_t i = 0; i < layouts_[l].tensors.size(); ++i) compute(*saved, stream, l, i);
      if (commits) armed([&] { saved->commit(); });
    }
    if (!commits || layers != store_->layers()) {
      return expect_refused("a restore of what was not saved",
                            [&] { static_cast<void>(store_->restore(store_->layers() - 1, stream)); });
    }
    const StreamRef back = any_stream();
    const std::uint32_t stop = in_.one_in(5) ? in_.below(layouts_.size()) : 0;
    for (std::uint32_t l = store_->layers(); l-- > stop;) {
      std::optional<typename Store::SavedBundle> saved;
      armed([&] { saved.emplace(store_->restore(l, back)); });
      require(saved->rows() == rows, "other rows come back");
      for (std::uint32_t i = 0; i < layouts_[l].tensors.size(); ++i) {
        const auto memory = saved->template tensor<float>(i).bytes();
        require(memory.count() == layouts_[l].tensors[i].info.count / layouts_[l].rows * rows * sizeof(float),
                "another size comes back");
        if (memory.empty()) continue;
        if (saved->missing(i)) {
          compute(*saved, back, l, i);
          continue;
        }
        device_.note_access(back, "backward", {memory}, {});
        device_.enqueue(back, [&] {
          for (std::uint64_t b = 0; b < memory.count(); ++b)
            require(memory.data()[b] == content_byte(content(l, i), b), "an activation comes back changed");
        });
      }
      if (in_.flip()) armed([&] { saved->commit(); });
    }
  }

  // ---------------------------------------------------------------------------------------------- comparing

  static std::vector<float>& state_of(AdamWModel::Tensor& tensor, OptimizerState state) {
    return state == OptimizerState::first_moment    ? tensor.m
           : state == OptimizerState::second_moment ? tensor.v
                                                    : tensor.master;
  }
  void compare_all() {
    for (std::uint32_t t = 0; t < weights_.size(); ++t) compare(t);
    if (!weights_.empty()) salvage(true);
  }
  void compare(std::uint32_t t) {
    AdamWModel::Tensor& tensor = model_->tensors[t];
    const auto memory = weights_[t].bytes();
    if (!memory.empty()) {
      device_.note_access(weights_on_, "look at weights", {memory}, {});
      device_.enqueue(weights_on_, [&] {
        require(std::memcmp(memory.data(), tensor.weight.data(), tensor.weight.size()) == 0,
                "the weights of tensor " + std::to_string(t) + " differ");
      });
      looked_at_ = true;
    }
    if (!prepared_) return;
    for (const OptimizerState state : states) {
      if (state == OptimizerState::master_weight && tensor.spec.weight == DType::fp32) continue;
      std::vector<float> out(tensor.spec.count, -1234.5f);
      armed([&] { optimizer_->read(name_of(t), state, out); });
      require(same_bits(out, state_of(tensor, state)),
              "state " + std::to_string(static_cast<int>(state)) + " of tensor " + std::to_string(t) + " differs");
    }
    std::uint64_t applied = 0;
    armed([&] { applied = optimizer_->applied_steps(name_of(t)); });
    require(applied == tensor.applied, "another number of applied steps");
  }

  // What is kept for `salvage`: the states as the steps left them.
  void remember(std::uint64_t step) {
    std::vector<AdamWModel>& of_step = history_[step];
    of_step.push_back(*model_);
    if (of_step.size() > 3) of_step.erase(of_step.begin());
    // No page is older than the write before its last.
    if (step > 2) history_.erase(step - 2);
  }

  // Whatever is called whole holds a state of its step. `settled`: the host has just read it.
  void salvage(bool settled) {
    if (!prepared_) return;
    for (std::uint32_t t = 0; t < weights_.size(); ++t) {
      const TensorSpec& spec = model_->tensors[t].spec;
      for (const OptimizerState state : states) {
        if (state == OptimizerState::master_weight && spec.weight == DType::fp32) continue;
        std::vector<float> out(spec.count, -1.0f);
        std::uint64_t whole = 0;
        for (const SalvagedRange& range : optimizer_->salvage(name_of(t), state, out)) {
          require(range.first + range.count <= spec.count, "more is saved than there is");
          whole += range.count;
          const auto found = history_.find(range.step);
          require(found != history_.end(), "what is saved is of a step that was not made");
          const auto same = [&](AdamWModel& then) {
            return std::memcmp(out.data() + range.first, state_of(then.tensors[t], state).data() + range.first,
                               range.count * sizeof(float)) == 0;
          };
          require(std::any_of(found->second.begin(), found->second.end(), same),
                  "what is saved is no state of its step");
        }
        if (settled && optimizer_->offloaded_pages() == optimizer_->pages())
          require(whole == spec.count, "the host has read the state, and not all of it is whole");
      }
    }
  }

  // The context goes, perhaps in the middle of a step.
  void lose() {
    device_.note_access(streams_[0], "what fails", {}, {});
    device_.enqueue(streams_[0], [] { throw 0; });
    require(device_.lost() && optimizer_->failed(), "the context is lost and nobody says so");
    try {
      if (optimizer_->unfinished()) {
        optimizer_->resume(streams_[0]);
      } else {
        optimizer_->step(streams_[0]);
      }
      finding("a step on a lost context");
    } catch (const DeviceError& error) {
      require(error.context_lost(), "a lost context is told as something else");
    }
    salvage(false);
  }

  // ---------------------------------------------------------------------------------------------- ends

  void close() {
    // A destructor survives one failure; user memory is freed behind the last operation.
    if (!device_.lost()) device_.inner().fail_call(in_.one_in(4) ? in_.between(1, 10) : 0);
    optimizer_.reset();
    device_.inner().fail_call(0);
  }
  void end() {
    store_.reset();
    pool_.reset();
    if (device_.lost()) return;
    for (std::uint32_t k = 0; k < 2; ++k) {
      if (reader_[k]) order(device_, streams_[k], *reader_[k]);
    }
    order(device_, streams_[0], weights_on_);
    weights_.clear();
    gradients_.clear();
    require(hbm_.failed_frees() == 0 && host_.failed_frees() == 0, "memory could not be given back in order");
    const std::uint64_t all = hbm_.capacity().count();
    require(hbm_.try_allocate(Bytes{all}, "all", Role::other, streams_[0]).has_value(), "HBM is missing at the end");
    require(host_.try_allocate(host_.capacity(), "all", Role::other, streams_[1]).has_value(),
            "pinned memory is missing at the end");
  }

  void load_weights(StreamRef stream) {
    for (std::uint32_t t = 0; t < weights_.size(); ++t) {
      const auto memory = weights_[t].bytes();
      if (memory.empty()) continue;
      device_.note_access(stream, "load weights", {}, {memory});
      device_.enqueue(stream, [&] {
        std::memcpy(memory.data(), model_->tensors[t].weight.data(), model_->tensors[t].weight.size());
      });
    }
    weights_on_ = stream;
  }

  [[nodiscard]] std::string name_of(std::uint32_t t) {
    const std::string& name = model_->tensors[t].spec.name;
    return ties_[t] && model_->tensors[t].spec.count != 0 && in_.flip() ? name + ".tied" : name;
  }
  StreamRef any_stream() { return streams_[in_.below(3)]; }
  template <class F>
  void with_tensor(F&& f) {
    if (!weights_.empty()) f(in_.below(weights_.size()));
  }

  Checked& device_;
  Input& in_;
  Checked::Stream streams_[4];
  Pinned pinned_;
  HbmArena<Checked> hbm_;
  PinnedHostArena<Checked> host_;
  std::optional<SlotPool<Checked>> pool_;
  Policy policy_{};
  PagedAdamWOptions options_;
  std::optional<AdamWModel> model_;
  std::vector<AdamWGroup> groups_;
  std::vector<bool> ties_;
  std::vector<HbmBuffer> weights_;
  std::vector<Gradient> gradients_;
  std::vector<BundleLayout> layouts_;
  std::optional<Store> store_;
  std::optional<Optimizer> optimizer_;
  StreamRef weights_on_{streams_[0]};  ///< behind the last write of the weights
  std::optional<StreamRef> reader_[2];  ///< of a set of gradients, the last
  std::uint32_t set_ = 0;
  bool prepared_ = false;
  bool looked_at_ = false;  ///< the weights were read on `weights_on_` since
  std::uint64_t seed_ = 0, gradient_steps_ = 0, loads_ = 0, passes_ = 0;
  std::uint64_t base_ = 0, base_skipped_ = 0;  ///< the model's steps when this optimizer was made
  std::map<std::uint64_t, StepReport> reports_;
  std::map<std::uint64_t, std::vector<AdamWModel>> history_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input{data, size};
  with_device([&](Checked& device) {
    switch (input.below(5)) {
      case 0:
        return Program<KeepResident>{device, input}.run({});
      case 1:
        return Program<ChosenPolicy>{device, input}.run({OffloadLargerThan{Bytes{std::uint64_t{input.byte()} * 8}}});
      case 2:
        return Program<ChosenPolicy>{device, input}.run(
            {OffloadMatching{{"t[1]", "t2", "t?", input.flip() ? "t3*" : ""}}});
      default:
        return Program<ChosenPolicy>{device, input}.run({OffloadOptimizerState{}});
    }
  });
  return 0;
}
