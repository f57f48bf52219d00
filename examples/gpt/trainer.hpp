// The training run: memory under a limit, steps, evaluation, sampling, saving and going on from a saved file.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numbers>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoint_file.hpp"
#include "data.hpp"
#include "hbmoff/hbmoff.hpp"
#include "log.hpp"
#include "model.hpp"
#include "options.hpp"

namespace gpt {

/// The run does not fit its HBM limit. `main` prints what() and ends with exit code 3.
class DoesNotFit : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Where this trainer's state lives, decided by its options: an OffloadPolicy as a user writes one.
struct TrainerPolicy {
  bool offload_optimizer = false;
  bool offload_activations = false;
  std::int32_t keep_last = 0;
  std::int32_t recompute = 0;

  explicit TrainerPolicy(const Options& o)
      : offload_optimizer{o.offload == Offload::optimizer || o.offload == Offload::all},
        offload_activations{o.offload == Offload::activations || o.offload == Offload::all},
        keep_last{static_cast<std::int32_t>(o.keep_last)}, recompute{static_cast<std::int32_t>(o.recompute)} {}

  [[nodiscard]] hbmoff::Tier home(const TensorInfo&) const {
    return offload_optimizer ? hbmoff::Tier::pinned_host : hbmoff::Tier::hbm;
  }
  [[nodiscard]] hbmoff::SaveMode save(const TensorInfo& tensor) const {
    if (tensor.layer < recompute && !tensor.checkpoint) return hbmoff::SaveMode::recompute;
    const bool last = tensor.layer >= tensor.layers - keep_last;
    return offload_activations && !last ? hbmoff::SaveMode::offload : hbmoff::SaveMode::keep;
  }
};

inline Shape shape_of(const Options& o) { return {o.vocab, o.layers, o.channels, o.heads, o.context, o.batch}; }

/// Pinned memory for what goes between the host and the device by itself: tokens, losses, loaded and saved tensors.
inline constexpr Bytes staging_bytes{std::uint64_t{1} << 20};

inline uint64_t token_staging_bytes(const Options& o) {
  return 2 * o.micro_batches * o.batch * o.context * sizeof(Token);
}

/// The tensors that the optimizer is told of.
inline std::vector<TensorInfo> infos_of(const Options& o) {
  std::vector<TensorInfo> infos;
  for (const Parameter& p : parameters_of(shape_of(o), o.dtype)) infos.push_back(p.info);
  return infos;
}

/// Bytes of a slot that holds a page of the optimizer as well as a layer's bundle.
inline Bytes shared_slot_bytes(const Options& o) {
  const TrainerPolicy policy{o};
  const std::vector<hbmoff::BundleLayout> layouts(o.layers, bundle_of(shape_of(o), o.dtype));
  return std::max(hbmoff::adamw_slot_bytes(infos_of(o), policy, {.page = o.page}),
                  hbmoff::activation_slot_bytes(policy, layouts));
}

/// Everything the run takes from its arenas, to the byte.
template <class T>
hbmoff::MemoryEstimate estimate_run(const Options& o) {
  using namespace hbmoff;
  const TrainerPolicy policy{o};
  const Slots slots = o.share_slots ? Slots::shared : Slots::own;
  MemoryEstimate estimate;
  if (o.share_slots) estimate += estimate_slot_pool(shared_slot_bytes(o), o.depth + 1, Role::other);
  for (const BufferSpec& spec : buffers_of<T>(shape_of(o), static_cast<std::uint32_t>(o.threads))) {
    estimate += estimate_buffer(Tier::hbm, spec.role, spec.bytes);
  }
  estimate += estimate_adamw(infos_of(o), policy, {.page = o.page, .depth = o.depth}, slots);
  estimate += estimate_activations(policy, static_cast<std::uint32_t>(o.layers), bundle_of(shape_of(o), dtype_of<T>),
                                   {.depth = o.depth}, slots);
  estimate += estimate_buffer(Tier::pinned_host, Role::workspace, staging_bytes);
  estimate += estimate_buffer(Tier::pinned_host, Role::workspace, Bytes{token_staging_bytes(o)});
  return estimate;
}

inline hbmoff::MemoryEstimate estimate_run(const Options& o) {
  return o.dtype == DType::fp32 ? estimate_run<float>(o) : estimate_run<bf16>(o);
}

/// What a limit bounds: HBM, or HBM and pinned host memory together, as on a machine where one is part of the other.
enum class Bounds { hbm, both };

/// What fills HBM, how much is missing, and the first of a list of options under which the run does fit.
inline std::string why_it_does_not_fit(const Options& o, Bytes limit, Bounds bounds) {
  using namespace hbmoff;
  const auto bounded = [&](const MemoryEstimate& e) {
    return bounds == Bounds::hbm ? e.total(Tier::hbm) : e.total(Tier::hbm) + e.total(Tier::pinned_host);
  };
  const MemoryEstimate estimate = estimate_run(o);
  const Bytes needed = bounded(estimate);
  std::string text = "the run needs " + to_string(needed) + " of HBM" +
                     (bounds == Bounds::both ? " and pinned host memory" : "") + " (" + std::to_string(needed.count()) +
                     " bytes), " + to_string(needed - limit) + " (" + std::to_string((needed - limit).count()) +
                     " bytes) more than the limit of " + to_string(limit) + ":";
  for (std::uint32_t role = 0; role < role_count; ++role) {
    const Bytes bytes = estimate.of(Tier::hbm, static_cast<Role>(role));
    if (bytes != Bytes{}) text += " " + std::string{to_string(static_cast<Role>(role))} + " " + to_string(bytes) + ",";
  }
  text.back() = '.';

  // From what changes least to what changes most; all keep every bit.
  std::optional<std::string> best;
  Bytes least = needed;
  for (const std::uint64_t recompute : {o.recompute, o.layers}) {
    for (const std::uint32_t depth : {o.depth, 2u, 1u}) {
      for (const Bytes page : {o.page, 1_MiB, 256_KiB, 64_KiB, 16_KiB, 4_KiB, 1_KiB}) {
        if (page < least_page_of(o)) continue;
        for (const Offload offload : {o.offload, Offload::optimizer, Offload::activations, Offload::all}) {
          Options changed = o;
          changed.offload = offload;
          changed.page = std::min(page, o.page);
          changed.depth = std::min(depth, o.depth);
          changed.recompute = recompute;
          changed.share_slots = o.share_slots && offload == Offload::all;
          if (offload == Offload::all || recompute != o.recompute) changed.keep_last = 0;
          if (depth < 2) changed.keep_last = 0;
          const MemoryEstimate other = estimate_run(changed);
          const Bytes takes = bounded(other);
          if (takes >= least) continue;
          least = takes;
          std::string words;
          if (changed.offload != o.offload) words += " --offload " + std::string{to_string(changed.offload)};
          if (changed.keep_last != o.keep_last) words += " --keep-last " + std::to_string(changed.keep_last);
          if (changed.page != o.page) words += " --page " + format_bytes(changed.page);
          if (changed.depth != o.depth) words += " --depth " + std::to_string(changed.depth);
          if (changed.recompute != o.recompute) words += " --recompute " + std::to_string(changed.recompute);
          best = words + " (" + to_string(other.total(Tier::hbm)) + ", and " +
                 to_string(other.total(Tier::pinned_host)) + " of pinned host memory)";
          if (takes <= limit) return text + " It fits with" + *best + ".";
        }
      }
    }
  }
  if (!best) return text + " None of the options tried takes less.";
  return text + " None of the options tried makes it fit; least is taken with" + *best + ".";
}

/// Throws DoesNotFit when the run does not fit its HBM limit or, without one, this machine: here HBM is a part of its
/// memory. Takes nothing.
inline void require_memory(const Options& o) {
  using namespace hbmoff;
  const MemoryEstimate estimate = estimate_run(o);
  const Bytes needed = estimate.total(Tier::hbm);
  if (o.hbm && needed > *o.hbm) throw DoesNotFit{why_it_does_not_fit(o, *o.hbm, Bounds::hbm)};
  const HostMemoryLimit machine = host_memory_limit();
  if (needed + estimate.total(Tier::pinned_host) <= machine.available) return;
  throw DoesNotFit{why_it_does_not_fit(o, machine.available, Bounds::both) +
                   " (The limit is what this machine has left: " + machine.set_by + ".)"};
}

/// A hash over bits, word by word: FNV-1a on 64-bit words, whose high bits are folded back so that they count too.
class Digest {
 public:
  Digest() = default;
  explicit Digest(uint64_t state) : state_{state} {}
  void add(uint64_t word) {
    state_ = (state_ ^ word) * 0x100000001b3u;
    state_ ^= state_ >> 29;
  }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  void add(std::span<const std::byte> bytes) {
    while (bytes.size() >= 8) {
      uint64_t word;
      std::memcpy(&word, bytes.data(), 8);
      add(word);
      bytes = bytes.subspan(8);
    }
    for (const std::byte b : bytes) add(std::to_integer<uint64_t>(b));
  }
  [[nodiscard]] uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325u;
};

inline std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

/// Learning rate of step `step` (0 for the first): linear warm-up, then a cosine down to a tenth.
inline double learning_rate(const Options& o, uint64_t step) {
  if (step < o.warmup) return o.learning_rate * static_cast<double>(step + 1) / static_cast<double>(o.warmup);
  if (step >= o.decay_steps) return 0.1 * o.learning_rate;
  const double done =
      static_cast<double>(step - o.warmup) / static_cast<double>(std::max<uint64_t>(o.decay_steps - o.warmup, 1));
  return o.learning_rate * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * done)));
}

/// One run, on a device `D`: HostDevice, or one that checks it. T is the type of weights, gradients and activations.
template <class T, class D>
class Trainer {
 public:
  /// Takes all memory (see `require_memory`); then starts from the seed or from `resume`. Throws BadInput.
  Trainer(const Options& options, const Dataset& data, RunLog& log, const CheckpointReader* resume)
      : o_{options}, data_{data}, log_{log}, estimate_{estimate_run<T>(options)}, limit_{limit()},
        pool_{static_cast<std::uint32_t>(o_.threads)},
        device_{hbmoff::HostDeviceOptions{.hbm_capacity = limit_,
                                          .ring_capacity = 4096,
                                          .host_to_device = {.gigabytes_per_second = o_.link_gbps},
                                          .device_to_host = {.gigabytes_per_second = o_.link_gbps},
                                          .debug_protection = hbmoff::takes_notes<D>}},  // the notes are checked too
        hbm_{device_,
             estimate_.total(hbmoff::Tier::hbm),
             {.max_blocks = most_blocks()}},  // a limit may be higher than what this machine has
        host_{device_,
              estimate_.total(hbmoff::Tier::pinned_host) + hbmoff::arena_footprint(staging_bytes),
              {.max_blocks = most_blocks()}},
        stream_{device_.create_stream("compute")}, recorder_{device_, recorder_size(), stream_},
        staging_{host_.allocate(staging_bytes, "staging", Role::workspace, stream_)},
        token_staging_{host_.allocate(Bytes{token_staging_bytes(o_)}, "tokens", Role::workspace, stream_)},
        slots_{o_.share_slots ? std::make_unique<hbmoff::SlotPool<D>>(hbm_, shared_slot_bytes(o_), o_.depth + 1,
                                                                      Role::other, stream_)
                              : nullptr},
        activations_{make_store()}, model_{device_, hbm_, activations_, shape_of(o_), pool_, stream_},
        optimizer_{make_optimizer()} {
    const hbmoff::AdamWGroup matrices{
        .learning_rate = 0, .weight_decay = static_cast<float>(o_.weight_decay), .beta2 = 0.95f};
    const hbmoff::AdamWGroup others{.learning_rate = 0, .weight_decay = 0, .beta2 = 0.95f};
    optimizer_.group({}) = matrices;
    others_ = optimizer_.add_group(others);
    for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
      const Parameter& parameter = model_.parameters()[p];
      optimizer_.add(parameter.info, model_.weight(p), model_.gradient(p),
                     parameter.matrix ? hbmoff::GroupId{} : others_);
    }
    if (resume != nullptr) {
      load(*resume);
    } else {
      for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
        uint64_t next = 0;
        upload(model_.weight(p).bytes(), [&](std::span<std::byte> piece) {
          for (std::size_t i = 0; i < piece.size(); i += sizeof(T)) {
            const T value = hbmoff::from_float<T>(initial_value(model_.parameters()[p], o_.seed, next++));
            std::memcpy(piece.data() + i, &value, sizeof value);
          }
        });
      }
      optimizer_.prepare(stream_);
    }
    device_.synchronize(stream());
    recorder_.collect([](const auto&) {});
    moved_before_ = moved();
  }

  /// Trains until the total of steps is reached or `stop` is set; evaluates, samples, saves, and ends the log. Returns the exit code.
  int run(const std::atomic<bool>& stop) {
    while (position_.step < o_.steps && !stop) {
      step();
      if (o_.eval_every != 0 && position_.step % o_.eval_every == 0 && position_.step != o_.steps) report_evaluation();
      if (o_.save_every != 0 && position_.step % o_.save_every == 0 && position_.step != o_.steps) save();
    }
    if (!o_.save.empty()) save();  // first of all: nothing that comes now can lose it
    if (!stop && position_.step == o_.steps) report_evaluation(&stop);
    if (!stop && o_.sample != 0) sample(stop);
    const nlohmann::json result = summary();
    if constexpr (hbmoff::takes_notes<D>) {
      // What a call could not throw, and warnings: a launch that nobody declared was not checked.
      const std::vector<hbmoff::CheckReport> reports = device_.reports();
      if (!reports.empty()) throw hbmoff::CheckError{reports.front()};
      log_.note("checked: no access to memory was out of order or out of bounds");
    }
    log_.finish(result, o_.summary_json);
    return stop ? 130 : 0;
  }

 private:
  using Store =
      hbmoff::ActivationStore<D, TrainerPolicy, hbmoff::dynamic_depth, typename hbmoff::Recorder<D>::Observer>;
  using Optimizer = hbmoff::PagedAdamW<D, TrainerPolicy, hbmoff::dynamic_depth, typename hbmoff::Recorder<D>::Observer>;
  using Stream = typename D::StreamRef;
  using State = hbmoff::OptimizerState;

  [[nodiscard]] Store make_store() {
    const std::vector<hbmoff::BundleLayout> layouts(o_.layers, bundle_of(shape_of(o_), hbmoff::dtype_of<T>));
    const hbmoff::ActivationStoreOptions options{.depth = o_.depth};
    if (slots_ != nullptr) {
      return Store{hbm_, host_, *slots_, TrainerPolicy{o_}, layouts, options, recorder_.observer()};
    }
    return Store{hbm_, host_, TrainerPolicy{o_}, layouts, options, recorder_.observer()};
  }
  [[nodiscard]] Optimizer make_optimizer() {
    const hbmoff::PagedAdamWOptions options{.page = o_.page, .depth = o_.depth};
    if (slots_ != nullptr) {
      return Optimizer{hbm_, host_, *slots_, TrainerPolicy{o_}, options, recorder_.observer()};
    }
    return Optimizer{hbm_, host_, TrainerPolicy{o_}, options, recorder_.observer()};
  }

  [[nodiscard]] Stream stream() const { return stream_; }

  [[nodiscard]] Bytes limit() const { return o_.hbm.value_or(estimate_.total(hbmoff::Tier::hbm)); }

  // A block for each page of the optimizer, wherever it lives, two for each layer, one for each slot, and some more.
  [[nodiscard]] std::uint32_t most_blocks() const {
    const uint64_t state = estimate_.of(hbmoff::Tier::pinned_host, Role::optimizer_state).count() +
                           estimate_.of(hbmoff::Tier::hbm, Role::optimizer_state).count();
    return static_cast<std::uint32_t>(2 * (state / o_.page.count()) + 2 * o_.layers + 2 * o_.depth + 256);
  }

  // Fills, write-backs and stalls of one step.
  [[nodiscard]] std::uint32_t recorder_size() const {
    const uint64_t state = estimate_.of(hbmoff::Tier::pinned_host, Role::optimizer_state).count();
    return static_cast<std::uint32_t>(3 * (state / o_.page.count() + 8) + 4 * o_.layers * o_.micro_batches + 64);
  }

  // ------------------------------------------------------------------------------------------------ one step

  void step() {
    const auto begin = std::chrono::steady_clock::now();
    model_.begin_step(stream_);
    const uint64_t n = o_.batch * o_.context;
    const float loss_scale = 1.0f / static_cast<float>(n * o_.micro_batches);
    for (uint64_t m = 0; m < o_.micro_batches; ++m) {
      const auto inputs = tokens_at(2 * m), targets = tokens_at(2 * m + 1);
      device_.note_host_access("tokens of a batch", {}, {inputs, targets});
      data_.training_batch(o_.seed, position_, m, o_.context, {inputs.data(), n}, {targets.data(), n});
      send_tokens(2 * m, n);
      model_.train(loss_scale, stream_);
    }
    const double rate = learning_rate(o_, position_.step);
    optimizer_.group({}).learning_rate = static_cast<float>(rate);
    optimizer_.group(others_).learning_rate = static_cast<float>(rate);
    const uint64_t number = optimizer_.step(stream_, {.max_norm = static_cast<float>(o_.clip), .skip_nonfinite = true});
    // A trainer that did not print each step would not wait here.
    const double loss = receive_loss() / static_cast<double>(n * o_.micro_batches);
    const double norm = optimizer_.report(number).norm;
    const double seconds = std::chrono::duration<double>{std::chrono::steady_clock::now() - begin}.count();
    const double stall = recorder_.collect_total(hbmoff::Activity::stall).count();
    ++position_.step;
    digest_.add(loss);
    digest_.add(norm);
    if (!first_loss_) first_loss_ = loss;
    final_loss_ = loss;
    stall_seconds_ += stall;
    step_seconds_.push_back(seconds);
    const hbmoff::TransferStats now = moved();
    log_.step({.step = position_.step,
               .steps = o_.steps,
               .loss = loss,
               .norm = norm,
               .learning_rate = rate,
               .step_seconds = seconds,
               .tokens_per_second = static_cast<double>(n * o_.micro_batches) / seconds,
               .hbm_used = hbm_.usage().high_water,
               .h2d_bytes = Bytes{now.h2d_bytes - moved_last_.h2d_bytes},
               .d2h_bytes = Bytes{now.d2h_bytes - moved_last_.d2h_bytes},
               .stall_seconds = stall});
    moved_last_ = now;
  }

  [[nodiscard]] hbmoff::pinned_span<Token> tokens_at(uint64_t half) const {
    const uint64_t n = o_.batch * o_.context;
    return token_staging_.bytes().subspan(half * n * sizeof(Token), n * sizeof(Token)).template as<Token>();
  }
  // Inputs and targets of `n` tokens from the staging halves `half` and `half` + 1.
  void send_tokens(uint64_t half, uint64_t n) {
    const auto source = [&](uint64_t h) {
      return hbmoff::pinned_span<const std::byte>{tokens_at(h).subspan(0, n).bytes()};
    };
    device_.copy_async(model_.buffer(tokens_in).subspan(0, n * sizeof(Token)), source(half), stream_);
    device_.copy_async(model_.buffer(tokens_out).subspan(0, n * sizeof(Token)), source(half + 1), stream_);
  }
  // Waits for the loss sum.
  double receive_loss() {
    const auto to = staging_.bytes().subspan(0, sizeof(double));
    device_.copy_async(to, device_span<const std::byte>{model_.buffer(loss_sum)}, stream_);
    device_.synchronize(stream());
    device_.note_host_access("loss", {to}, {});
    return to.template as<double>()[0];
  }

  [[nodiscard]] hbmoff::TransferStats moved() const {
    return optimizer_.stats() + activations_.stats() - moved_before_;
  }

  // ------------------------------------------------------------------------------------------------ looking at it

  // `stop` given: may end it early, without a result.
  void report_evaluation(const std::atomic<bool>* stop = nullptr) {
    const uint64_t rows = data_.evaluation_rows(o_.context, o_.eval_batches * o_.batch);
    if (!bigram_loss_) bigram_loss_ = data_.bigram_loss(o_.context, rows);
    device_.fill_async(model_.buffer(loss_sum), std::byte{0}, stream_);
    for (uint64_t first = 0; first < rows; first += o_.batch) {
      if (stop != nullptr && *stop) return;
      const uint64_t n = std::min(o_.batch, rows - first) * o_.context;
      device_.synchronize(stream());  // the staging is free again
      device_.note_host_access("tokens of an evaluation", {}, {tokens_at(0), tokens_at(1)});
      data_.evaluation_batch(rows, first, o_.context, {tokens_at(0).data(), n}, {tokens_at(1).data(), n});
      send_tokens(0, n);
      model_.evaluate(n, o_.context, stream_);
    }
    val_loss_ = receive_loss() / static_cast<double>(rows * o_.context);
    recorder_.collect([](const auto&) {});
    log_.evaluation(position_.step, *val_loss_, *bigram_loss_);
  }

  // Draws tokens one by one, each from a forward over what fits the context.
  void sample(const std::atomic<bool>& stop) {
    std::vector<Token> text(data_.held_out().begin(), data_.held_out().begin() + 1);
    std::vector<float> scores(o_.vocab);
    for (uint64_t i = 0; i < o_.sample && !stop; ++i) {
      const uint64_t n = std::min<uint64_t>(text.size(), o_.context);
      device_.note_host_access("tokens of a sample", {}, {tokens_at(0), tokens_at(1)});
      std::copy(text.end() - static_cast<std::ptrdiff_t>(n), text.end(), tokens_at(0).data());
      send_tokens(0, n);
      model_.predict(n, stream_);
      uint64_t next = 0;
      download(model_.buffer(logits).subspan(0, o_.vocab * 4), [&](std::span<const std::byte> piece) {
        std::memcpy(reinterpret_cast<std::byte*>(scores.data()) + next, piece.data(), piece.size());
        next += piece.size();
      });
      const float top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (float& score : scores) sum += static_cast<double>(score = std::exp((score - top) / 0.8f));
      double draw = random_unit(o_.seed ^ 0x73616d706c65u, i) * sum;  // its own sequence
      std::size_t token = 0;
      while (token + 1 < scores.size() && (draw -= static_cast<double>(scores[token])) > 0) ++token;
      text.push_back(static_cast<Token>(token));
    }
    recorder_.collect([](const auto&) {});
    std::string words;
    for (const Token token : std::span{text}.subspan(1)) {
      if (data_.text()) {
        words += token == '\n' || (token >= ' ' && token != 127) ? static_cast<char>(token) : '?';
      } else {
        words += std::to_string(token) + " ";
      }
    }
    log_.note("sample:\n" + words);
  }

  [[nodiscard]] nlohmann::json summary() {
    Digest digest = digest_;
    hash_state(digest);
    std::vector<double> sorted = step_seconds_;
    std::sort(sorted.begin(), sorted.end());
    const double median = sorted.empty() ? 0.0 : sorted[sorted.size() / 2];
    const auto number = [](const std::optional<double>& value) {
      return value ? nlohmann::json(*value) : nlohmann::json();
    };
    const hbmoff::TransferStats total = moved();
    return {{"steps", position_.step},
            {"first_loss", number(first_loss_)},
            {"final_loss", number(final_loss_)},
            {"val_loss", number(val_loss_)},
            {"bigram_loss", number(bigram_loss_)},
            {"digest", hex(digest.value())},
            {"peak_hbm_bytes", hbm_.usage().high_water.count()},
            {"hbm_limit_bytes", limit_.count()},
            {"host_bytes", host_.usage().used.count()},
            {"h2d_bytes", total.h2d_bytes},
            {"d2h_bytes", total.d2h_bytes},
            {"stall_seconds", stall_seconds_},
            {"step_seconds_median", median},
            {"tokens_per_second",
             median == 0.0 ? 0.0 : static_cast<double>(o_.batch * o_.context * o_.micro_batches) / median},
            {"offload", to_string(o_.offload)},
            {"depth", o_.depth},
            {"share_slots", o_.share_slots},
            {"check", o_.check},
            {"page_bytes", o_.page.count()}};
  }

  // ------------------------------------------------------------------------------------------------ saved files

  // The states that a parameter has.
  static std::vector<std::pair<State, const char*>> states() {
    std::vector<std::pair<State, const char*>> all{{State::first_moment, ".m"}, {State::second_moment, ".v"}};
    if constexpr (sizeof(T) != sizeof(float)) all.push_back({State::master_weight, ".master"});
    return all;
  }

  void hash_state(Digest& digest) {
    std::vector<float> values;
    for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
      const TensorInfo& info = model_.parameters()[p].info;
      download(model_.weight(p).bytes(), [&](std::span<const std::byte> piece) { digest.add(piece); });
      values.resize(info.count);
      for (const auto& [state, suffix] : states()) {
        optimizer_.read(info.name, state, values);
        digest.add(std::as_bytes(std::span{values}));
      }
      digest.add(optimizer_.applied_steps(info.name));
    }
  }

  void save() {
    CheckpointWriter writer{o_.save};
    std::vector<float> values;
    nlohmann::json applied = nlohmann::json::object();
    for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
      const TensorInfo& info = model_.parameters()[p].info;
      writer.begin(info.name, info.dtype, info.count);
      download(model_.weight(p).bytes(), [&](std::span<const std::byte> piece) { writer.append(piece); });
      values.resize(info.count);
      for (const auto& [state, suffix] : states()) {
        optimizer_.read(info.name, state, values);
        writer.add(info.name + suffix, std::span<const float>{values});
      }
      applied[info.name] = optimizer_.applied_steps(info.name);
    }
    const Bytes size = writer.commit({{"options", saved_options(o_)},
                                      {"decay_steps", o_.decay_steps},
                                      {"step", position_.step},
                                      {"data_fingerprint", hex(data_.fingerprint())},
                                      {"running_hash", hex(digest_.value())},
                                      {"first_loss", first_loss_ ? nlohmann::json(*first_loss_) : nlohmann::json()},
                                      {"final_loss", final_loss_ ? nlohmann::json(*final_loss_) : nlohmann::json()},
                                      {"applied_steps", applied}});
    log_.saved(position_.step, o_.save, size);
  }

  void load(const CheckpointReader& file) {
    const nlohmann::json& header = file.header();
    try {
      if (header.at("data_fingerprint").get<std::string>() != hex(data_.fingerprint())) {
        throw BadInput{"--resume " + o_.resume + ": it was saved with other data than --data"};
      }
      position_.step = header.at("step").get<uint64_t>();
      digest_ = Digest{std::stoull(header.at("running_hash").get<std::string>(), nullptr, 16)};
      if (!header.at("first_loss").is_null()) first_loss_ = header["first_loss"].get<double>();
      if (!header.at("final_loss").is_null()) final_loss_ = header["final_loss"].get<double>();
      for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
        const TensorInfo& info = model_.parameters()[p].info;
        file.require(info.name, info.dtype, info.count);
        uint64_t next = 0;
        upload(model_.weight(p).bytes(), [&](std::span<std::byte> piece) {
          const std::span<T> elements{reinterpret_cast<T*>(piece.data()), piece.size() / sizeof(T)};
          file.read(info.name, elements, next);
          next += elements.size();
        });
      }
      optimizer_.prepare(stream_);
      std::vector<float> values;
      for (const Parameter& parameter : model_.parameters()) {
        const std::string& name = parameter.info.name;
        values.resize(parameter.info.count);
        for (const auto& [state, suffix] : states()) {
          file.require(name + suffix, DType::fp32, parameter.info.count);
          file.read(name + suffix, std::span{values});
          optimizer_.write(name, state, values);
        }
        optimizer_.set_applied_steps(name, header.at("applied_steps").at(name).get<uint64_t>());
      }
    } catch (const nlohmann::json::exception&) {
      throw BadInput{"--resume " + o_.resume + ": its header is not one of this trainer's"};
    } catch (const std::logic_error&) {
      throw BadInput{"--resume " + o_.resume + ": its header is not one of this trainer's"};
    }
  }

  // Device memory from and to the host, piece by piece through the staging. Both block.
  template <class Fill>
  void upload(device_span<std::byte> to, const Fill& fill) {
    for (uint64_t done = 0; done < to.count(); done += staging_bytes.count()) {
      const auto piece = staging_.bytes().subspan(0, std::min(staging_bytes.count(), to.count() - done));
      device_.note_host_access("upload", {}, {piece});
      fill(std::span<std::byte>{piece.data(), piece.count()});
      device_.copy_async(to.subspan(done, piece.count()), hbmoff::pinned_span<const std::byte>{piece}, stream_);
      device_.synchronize(stream());
    }
  }
  template <class Sink>
  void download(device_span<std::byte> from, const Sink& sink) {
    for (uint64_t done = 0; done < from.count(); done += staging_bytes.count()) {
      const auto piece = staging_.bytes().subspan(0, std::min(staging_bytes.count(), from.count() - done));
      device_.copy_async(piece, device_span<const std::byte>{from.subspan(done, piece.count())}, stream_);
      device_.synchronize(stream());
      device_.note_host_access("download", {piece}, {});
      sink(std::span<const std::byte>{piece.data(), piece.count()});
    }
  }

  const Options& o_;
  const Dataset& data_;
  RunLog& log_;
  hbmoff::MemoryEstimate estimate_;
  Bytes limit_;
  ThreadPool pool_;
  D device_;
  hbmoff::HbmArena<D> hbm_;
  hbmoff::PinnedHostArena<D> host_;
  typename D::Stream stream_;
  hbmoff::Recorder<D> recorder_;
  typename hbmoff::PinnedHostArena<D>::Buffer staging_, token_staging_;
  std::unique_ptr<hbmoff::SlotPool<D>> slots_;  // null: optimizer and activations have slots of their own
  Store activations_;
  Model<T, D, Store> model_;
  Optimizer optimizer_;
  hbmoff::GroupId others_{};

  DataPosition position_;
  Digest digest_;  // over losses and norms so far
  std::optional<double> first_loss_, final_loss_, val_loss_, bigram_loss_;
  double stall_seconds_ = 0;
  std::vector<double> step_seconds_;
  hbmoff::TransferStats moved_before_, moved_last_;
};

}  // namespace gpt
