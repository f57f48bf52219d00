// GPT-2 as a user of hbmoff writes it: parameters and gradients in HBM, one bundle of saved activations per layer.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "hbmoff/hbmoff.hpp"
#include "kernels.hpp"
#include "thread_pool.hpp"

namespace gpt {

using hbmoff::Bytes;
using hbmoff::device_span;
using hbmoff::DType;
using hbmoff::Role;
using hbmoff::TensorInfo;

/// Sizes of a model and of its micro-batch.
struct Shape {
  uint64_t vocab, layers, channels, heads, context, batch;
  [[nodiscard]] uint64_t tokens() const { return batch * context; }
};

/// A parameter: its place in the one array that holds all of them, in elements.
struct Parameter {
  TensorInfo info;
  uint64_t offset;
  bool matrix;         ///< decays, and starts random; gains start at 1, biases at 0
  bool residual_exit;  ///< starts smaller by sqrt(2 layers), as GPT-2's do
};

/// Parameters of a layer, in the order in which they lie.
enum LayerParameter : std::uint32_t {
  ln_1_weight,
  ln_1_bias,
  attn_weight,
  attn_bias,
  attn_proj_weight,
  attn_proj_bias,
  ln_2_weight,
  ln_2_bias,
  fc_weight,
  fc_bias,
  mlp_proj_weight,
  mlp_proj_bias,
  layer_parameters
};

/// All parameters under GPT-2's names: wte, wpe, layer by layer, ln_f. Matrices are [outputs, inputs]. The head is wte.
inline std::vector<Parameter> parameters_of(const Shape& s, DType dtype) {
  std::vector<Parameter> all;
  uint64_t next = 0;
  const auto add = [&](std::string name, std::int32_t layer, uint64_t count, bool matrix, bool exit = false) {
    all.push_back({{.name = std::move(name),
                    .role = Role::weight,
                    .layer = layer,
                    .layers = static_cast<std::int32_t>(s.layers),
                    .dtype = dtype,
                    .count = count},
                   next,
                   matrix,
                   exit});
    next = hbmoff::round_up(next + count, 128);  // 256 bytes in either type
  };
  const uint64_t c = s.channels;
  add("wte", -1, s.vocab * c, true);
  add("wpe", -1, s.context * c, true);
  for (uint64_t l = 0; l < s.layers; ++l) {
    const auto layer = static_cast<std::int32_t>(l);
    std::string h = "h.";  // g++ 12 warns of "h." + std::to_string(l)
    h += std::to_string(l) + ".";
    add(h + "ln_1.weight", layer, c, false);
    add(h + "ln_1.bias", layer, c, false);
    add(h + "attn.c_attn.weight", layer, 3 * c * c, true);
    add(h + "attn.c_attn.bias", layer, 3 * c, false);
    add(h + "attn.c_proj.weight", layer, c * c, true, true);
    add(h + "attn.c_proj.bias", layer, c, false);
    add(h + "ln_2.weight", layer, c, false);
    add(h + "ln_2.bias", layer, c, false);
    add(h + "mlp.c_fc.weight", layer, 4 * c * c, true);
    add(h + "mlp.c_fc.bias", layer, 4 * c, false);
    add(h + "mlp.c_proj.weight", layer, 4 * c * c, true, true);
    add(h + "mlp.c_proj.bias", layer, c, false);
  }
  add("ln_f.weight", -1, c, false);
  add("ln_f.bias", -1, c, false);
  return all;
}

/// Index of the first parameter of layer 0.
inline constexpr std::uint32_t first_layer_parameter = 2;

/// What a layer saves for its backward. The first is its input, from which all others can be computed again.
enum Saved : std::uint32_t {
  saved_input,
  ln_1,
  stats_1,
  qkv,
  lse,
  attention,
  middle,
  ln_2,
  stats_2,
  fc,
  gelu,
  saved_tensors
};

inline hbmoff::BundleLayout bundle_of(const Shape& s, DType dtype) {
  const uint64_t n = s.tokens(), c = s.channels;
  hbmoff::BundleLayout layout{.tensors = {}, .rows = n};
  const auto add = [&](const char* name, DType type, uint64_t per_token, bool checkpoint = false) {
    layout.tensors.push_back({{.name = name, .dtype = type, .count = n * per_token}, checkpoint});
  };
  add("input", dtype, c, true);
  add("ln_1", dtype, c);
  add("ln_1 statistics", DType::fp32, 2);
  add("qkv", dtype, 3 * c);
  add("attention log-sum-exp", DType::fp32, s.heads);
  add("attention", dtype, c);
  add("middle", dtype, c);
  add("ln_2", dtype, c);
  add("ln_2 statistics", DType::fp32, 2);
  add("fc", dtype, 4 * c);
  add("gelu", dtype, 4 * c);
  return layout;
}

/// The buffers a model takes beside its saved activations, all from one HbmArena.
enum DeviceBuffer : std::uint32_t {
  weights,
  gradients,
  residual,
  branch,
  final_norm,
  d_residual,
  d_branch,
  d_wide,
  final_stats,
  logits,
  losses,
  loss_sum,
  tokens_in,
  tokens_out,
  scratch,
  device_buffers
};

struct BufferSpec {
  const char* name;
  Role role;
  Bytes bytes;
};

/// Rows of logits that are computed at once: about 32 MiB of them, at least one block.
inline uint64_t head_rows(const Shape& s) {
  const uint64_t rows = (uint64_t{8} << 20) / s.vocab / row_block * row_block;
  return std::clamp<uint64_t>(rows, row_block, hbmoff::round_up(s.tokens(), row_block));
}

template <class T>
uint64_t scratch_floats(const Shape& s) {
  return std::max(product_scratch<T>(4 * s.channels), attention_scratch(s.context, s.channels / s.heads));
}

template <class T>
std::vector<BufferSpec> buffers_of(const Shape& s, std::uint32_t threads) {
  const std::vector<Parameter> parameters = parameters_of(s, hbmoff::dtype_of<T>);
  const uint64_t all = parameters.back().offset + parameters.back().info.count;
  const uint64_t n = s.tokens(), c = s.channels, element = sizeof(T);
  return {{"weights", Role::weight, Bytes{all * element}},
          {"gradients", Role::gradient, Bytes{all * element}},
          {"residual", Role::workspace, Bytes{n * c * element}},
          {"branch", Role::workspace, Bytes{n * c * element}},
          {"final norm", Role::workspace, Bytes{n * c * element}},
          {"residual gradient", Role::workspace, Bytes{n * c * 4}},
          {"branch gradient", Role::workspace, Bytes{n * c * 4}},
          {"wide gradient", Role::workspace, Bytes{n * 4 * c * 4}},
          {"final norm statistics", Role::workspace, Bytes{n * 2 * 4}},
          {"logits", Role::workspace, Bytes{head_rows(s) * s.vocab * 4}},
          {"losses", Role::workspace, Bytes{n * 4}},
          {"loss", Role::workspace, Bytes{8}},
          {"inputs", Role::workspace, Bytes{n * 2}},
          {"targets", Role::workspace, Bytes{n * 2}},
          {"scratch", Role::workspace, Bytes{threads * scratch_floats<T>(s) * 4}}};
}

/// The model: memory, and the work of its layers put on a stream of device `D`. `Store` is an `ActivationStore`.
template <class T, class D, class Store>
class Model {
 public:
  using Stream = typename D::StreamRef;

  Model(D& device, hbmoff::HbmArena<D>& hbm, Store& store, Shape shape, ThreadPool& pool, Stream stream)
      : device_{device}, store_{store}, shape_{shape}, parameters_{parameters_of(shape, hbmoff::dtype_of<T>)} {
    for (const BufferSpec& spec : buffers_of<T>(shape, pool.threads())) {
      buffers_.push_back(hbm.allocate(spec.bytes, spec.name, spec.role, stream));
    }
    workers_ = {&pool, floats(scratch).data(), scratch_floats<T>(shape)};
    // One thread per call: OpenBLAS shares out a product by its number of threads, which changes bits.
    openblas_set_num_threads(1);
  }

  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }
  [[nodiscard]] device_span<T> weight(std::size_t p) const { return part(weights, p); }
  [[nodiscard]] device_span<T> gradient(std::size_t p) const { return part(gradients, p); }
  [[nodiscard]] device_span<std::byte> buffer(DeviceBuffer which) const { return buffers_[which].bytes(); }

  /// Zeroes the gradients and the loss: the start of a step.
  void begin_step(Stream stream) {
    device_.fill_async(buffer(gradients), std::byte{0}, stream);
    device_.fill_async(buffer(loss_sum), std::byte{0}, stream);
  }

  /// Forward and backward of the micro-batch in the token buffers: adds to the gradients, each token's loss weighed by
  /// `loss_scale`, and to the loss sum.
  void train(float loss_scale, Stream stream) {
    forward(shape_.tokens(), shape_.context, true, stream);
    head(shape_.tokens(), loss_scale, stream);
    for (auto l = static_cast<std::uint32_t>(shape_.layers); l-- > 0;) {
      auto saved = store_.restore(l, stream);
      Layer layer = layer_of(l, saved, shape_.tokens(), shape_.context);
      if (saved.missing(gelu)) {
        note_layer(l, saved, Pass::recompute, stream);
        device_.enqueue(stream, [layer] { layer.forward(true); }, {.name = "recompute layer"});
      }
      note_layer(l, saved, Pass::backward, stream);
      device_.enqueue(stream, [layer] { layer.backward(); }, {.name = "layer backward"});
    }
    device_.note_access(stream, "embedding backward", {buffer(tokens_in), buffer(d_residual), gradient(0), gradient(1)},
                        {gradient(0), gradient(1)});
    device_.enqueue(stream,
                    [w = workers_, dwte = gradient(0).data(), dwpe = gradient(1).data(), dx = floats(d_residual).data(),
                     in = tokens(tokens_in).data(),
                     s = shape_] { embedding_backward(w, dwte, dwpe, dx, in, s.tokens(), s.context, s.channels); },
                    {.name = "embedding backward"});
  }

  /// Forward only, of the first `rows` tokens (sequences of `context`): adds their losses to the loss sum.
  void evaluate(uint64_t rows, uint64_t context, Stream stream) {
    forward(rows, context, false, stream);
    head(rows, 0.0f, stream);
  }

  /// Forward only, of one sequence of `rows` tokens; leaves the logits of its last token at the start of the logits.
  void predict(uint64_t rows, Stream stream) {
    forward(rows, rows, false, stream);
    device_.note_access(stream, "last logits",
                        {elements(residual).subspan(0, rows * shape_.channels), weight(0),
                         weight(parameters_.size() - 2), weight(parameters_.size() - 1)},
                        {buffer(final_norm), buffer(final_stats), buffer(logits), buffer(scratch)});
    device_.enqueue(stream,
                    [w = workers_, lnf = elements(final_norm).data(), stats = floats(final_stats).data(),
                     x = elements(residual).data(), gain = weight(parameters_.size() - 2).data(),
                     bias = weight(parameters_.size() - 1).data(), out = floats(logits).data(), wte = weight(0).data(),
                     rows, s = shape_] {
                      layer_norm_forward(w, lnf, stats, x, gain, bias, rows, s.channels);
                      linear_forward<T, float>(w, out, lnf + (rows - 1) * s.channels, wte, nullptr, 1, s.channels,
                                               s.vocab);
                    },
                    {.name = "last logits"});
  }

 private:
  // One layer's operands, by value: what a kernel launch carries.
  struct Layer {
    Workers w;
    const T* weight;  // of the layer's first parameter
    T* gradient;  // the same place among the gradients
    std::uint32_t offset[layer_parameters];  // of each parameter from the first
    T *input, *ln1, *qkv, *attention, *middle, *ln2, *fc, *gelu;
    float *stats1, *lse, *stats2;
    T *residual, *branch;
    float *d_residual, *d_branch, *d_wide;
    uint64_t n, context, heads, c;

    [[nodiscard]] const T* p(LayerParameter i) const { return weight + offset[i]; }
    [[nodiscard]] T* g(LayerParameter i) const { return gradient + offset[i]; }

    // `again`: from the saved input, for a backward that misses the rest; the layer's output is not wanted then.
    void forward(bool again) const {
      if (!again) std::copy_n(residual, n * c, input);
      layer_norm_forward(w, ln1, stats1, input, p(ln_1_weight), p(ln_1_bias), n, c);
      linear_forward(w, qkv, ln1, p(attn_weight), p(attn_bias), n, c, 3 * c);
      attention_forward(w, attention, lse, qkv, n / context, context, heads, c);
      linear_forward(w, branch, attention, p(attn_proj_weight), p(attn_proj_bias), n, c, c);
      add(w, middle, input, branch, n * c);
      layer_norm_forward(w, ln2, stats2, middle, p(ln_2_weight), p(ln_2_bias), n, c);
      linear_forward(w, fc, ln2, p(fc_weight), p(fc_bias), n, c, 4 * c);
      gelu_forward(w, gelu, fc, n * 4 * c);
      if (again) return;
      linear_forward(w, branch, gelu, p(mlp_proj_weight), p(mlp_proj_bias), n, 4 * c, c);
      add(w, residual, middle, branch, n * c);
    }

    // d_residual: from the gradient of the layer's output to that of its input, in place.
    void backward() const {
      linear_backward_weight(w, g(mlp_proj_weight), g(mlp_proj_bias), d_residual, gelu, n, 4 * c, c);
      linear_backward_input(w, d_wide, d_residual, p(mlp_proj_weight), n, 4 * c, c, false);
      gelu_backward(w, d_wide, fc, n * 4 * c);
      linear_backward_weight(w, g(fc_weight), g(fc_bias), d_wide, ln2, n, c, 4 * c);
      linear_backward_input(w, d_branch, d_wide, p(fc_weight), n, c, 4 * c, false);
      layer_norm_backward(w, d_residual, g(ln_2_weight), g(ln_2_bias), d_branch, stats2, middle, p(ln_2_weight), n, c);
      linear_backward_weight(w, g(attn_proj_weight), g(attn_proj_bias), d_residual, attention, n, c, c);
      linear_backward_input(w, d_branch, d_residual, p(attn_proj_weight), n, c, c, false);
      attention_backward(w, d_wide, d_branch, attention, lse, qkv, n / context, context, heads, c);
      linear_backward_weight(w, g(attn_weight), g(attn_bias), d_wide, ln1, n, c, 3 * c);
      linear_backward_input(w, d_branch, d_wide, p(attn_weight), n, c, 3 * c, false);
      layer_norm_backward(w, d_residual, g(ln_1_weight), g(ln_1_bias), d_branch, stats1, input, p(ln_1_weight), n, c);
    }
  };

  // The final norm, the tied head and the loss, a few rows of logits at a time; with a loss scale also their backward.
  struct Head {
    Workers w;
    T *x, *lnf;
    const T *gain, *bias, *wte;
    T *d_gain, *d_bias, *d_wte;
    float *stats, *logits, *losses, *d_x, *d_lnf;
    double* sum;
    const std::uint16_t* targets;
    uint64_t n, c, v, rows_at_once;
    float loss_scale;

    void operator()() const {
      layer_norm_forward(w, lnf, stats, x, gain, bias, n, c);
      for (uint64_t first = 0; first < n; first += rows_at_once) {
        const uint64_t rows = std::min(rows_at_once, n - first);
        linear_forward<T, float>(w, logits, lnf + first * c, wte, nullptr, rows, c, v);
        cross_entropy(w, logits, losses + first, targets + first, rows, v, loss_scale);
        if (loss_scale == 0.0f) continue;
        linear_backward_weight<T>(w, d_wte, nullptr, logits, lnf + first * c, rows, c, v);
        linear_backward_input(w, d_lnf + first * c, logits, wte, rows, c, v, false);
      }
      for (uint64_t i = 0; i < n; ++i) *sum += static_cast<double>(losses[i]);
      if (loss_scale == 0.0f) return;
      std::fill_n(d_x, n * c, 0.0f);
      layer_norm_backward(w, d_x, d_gain, d_bias, d_lnf, stats, x, gain, n, c);
    }
  };

  enum class Pass { forward, recompute, backward };

  // What a pass over a layer touches, for a device that checks.
  template <class Bundle>
  void note_layer(std::uint32_t l, const Bundle& saved, Pass pass, Stream stream) {
    if constexpr (hbmoff::takes_notes<D>) {
      const uint64_t n = saved.rows() * shape_.channels;
      const device_span<T> x = elements(residual).subspan(0, n);
      std::vector<hbmoff::AccessRange> reads, writes{buffer(scratch)};
      const auto read = [&](auto span) { reads.push_back(span); };
      const auto write = [&](auto span) { writes.push_back(span); };
      const auto update = [&](auto span) { read(span), write(span); };
      const auto saved_bytes = [&](std::uint32_t i) -> device_span<std::byte> {
        const bool statistics = i == stats_1 || i == lse || i == stats_2;
        return statistics ? saved.template tensor<float>(i).bytes() : saved.template tensor<T>(i).bytes();
      };
      const std::size_t first = first_layer_parameter + std::size_t{l} * layer_parameters;
      for (std::size_t p = first; p < first + layer_parameters; ++p) {
        read(weight(p));
        if (pass == Pass::backward) update(gradient(p));
      }
      for (std::uint32_t i = 0; i < saved_tensors; ++i) {
        const bool reads_it = pass == Pass::backward || (pass == Pass::recompute && i == saved_input);
        reads_it ? read(saved_bytes(i)) : write(saved_bytes(i));
      }
      if (pass == Pass::backward) {
        update(floats(d_residual).subspan(0, n));
        write(floats(d_branch).subspan(0, n));
        write(floats(d_wide).subspan(0, 4 * n));
      } else {
        write(elements(branch).subspan(0, n));
        if (pass == Pass::forward) update(x);
      }
      device_.note_access(stream,
                          pass == Pass::forward     ? "layer forward"
                          : pass == Pass::recompute ? "recompute layer"
                                                    : "layer backward",
                          reads, writes);
    }
  }

  void forward(uint64_t rows, uint64_t context, bool keep, Stream stream) {
    device_.note_access(stream, "embedding", {tokens(tokens_in).subspan(0, rows), weight(0), weight(1)},
                        {elements(residual).subspan(0, rows * shape_.channels)});
    device_.enqueue(stream,
                    [w = workers_, x = elements(residual).data(), in = tokens(tokens_in).data(), wte = weight(0).data(),
                     wpe = weight(1).data(), rows, context,
                     c = shape_.channels] { embedding_forward(w, x, in, wte, wpe, rows, context, c); },
                    {.name = "embedding"});
    for (std::uint32_t l = 0; l < shape_.layers; ++l) {
      auto saved = store_.save(l, stream, rows);
      note_layer(l, saved, Pass::forward, stream);
      device_.enqueue(stream, [layer = layer_of(l, saved, rows, context)] { layer.forward(false); },
                      {.name = "layer forward"});
      if (keep) saved.commit();
    }
  }

  void head(uint64_t rows, float loss_scale, Stream stream) {
    const std::size_t gain = parameters_.size() - 2, bias = gain + 1;
    const device_span<T> x = elements(residual).subspan(0, rows * shape_.channels);
    const device_span<std::uint16_t> targets = tokens(tokens_out).subspan(0, rows);
    if (loss_scale == 0.0f) {
      device_.note_access(
          stream, "head and loss", {x, weight(gain), weight(bias), weight(0), targets, buffer(loss_sum)},
          {buffer(final_norm), buffer(final_stats), buffer(logits), buffer(losses), buffer(scratch), buffer(loss_sum)});
    } else {
      device_.note_access(
          stream, "head and loss, with their backward",
          {x, weight(gain), weight(bias), weight(0), targets, buffer(loss_sum), gradient(gain), gradient(bias),
           gradient(0)},
          {buffer(final_norm), buffer(final_stats), buffer(logits), buffer(losses), buffer(scratch), buffer(loss_sum),
           gradient(gain), gradient(bias), gradient(0), buffer(d_residual), buffer(d_branch)});
    }
    device_.enqueue(stream,
                    Head{workers_,
                         elements(residual).data(),
                         elements(final_norm).data(),
                         weight(gain).data(),
                         weight(bias).data(),
                         weight(0).data(),
                         gradient(gain).data(),
                         gradient(bias).data(),
                         gradient(0).data(),
                         floats(final_stats).data(),
                         floats(logits).data(),
                         floats(losses).data(),
                         floats(d_residual).data(),
                         floats(d_branch).data(),
                         buffer(loss_sum).template as<double>().data(),
                         tokens(tokens_out).data(),
                         rows,
                         shape_.channels,
                         shape_.vocab,
                         head_rows(shape_),
                         loss_scale},
                    {.name = "head and loss"});
  }

  template <class Bundle>
  Layer layer_of(std::uint32_t l, const Bundle& saved, uint64_t rows, uint64_t context) const {
    const std::size_t first = first_layer_parameter + std::size_t{l} * layer_parameters;
    const auto t = [&](Saved i) { return saved.template tensor<T>(i).data(); };
    const auto f = [&](Saved i) { return saved.template tensor<float>(i).data(); };
    Layer layer{workers_,
                weight(first).data(),
                gradient(first).data(),
                {},
                t(saved_input),
                t(ln_1),
                t(qkv),
                t(attention),
                t(middle),
                t(ln_2),
                t(fc),
                t(gelu),
                f(stats_1),
                f(lse),
                f(stats_2),
                elements(residual).data(),
                elements(branch).data(),
                floats(d_residual).data(),
                floats(d_branch).data(),
                floats(d_wide).data(),
                rows,
                context,
                shape_.heads,
                shape_.channels};
    for (std::uint32_t i = 0; i < layer_parameters; ++i) {
      layer.offset[i] = static_cast<std::uint32_t>(parameters_[first + i].offset - parameters_[first].offset);
    }
    return layer;
  }

  [[nodiscard]] device_span<T> part(DeviceBuffer which, std::size_t p) const {
    return elements(which).subspan(parameters_[p].offset, parameters_[p].info.count);
  }
  [[nodiscard]] device_span<T> elements(DeviceBuffer which) const { return buffers_[which].template as<T>(); }
  [[nodiscard]] device_span<float> floats(DeviceBuffer which) const { return buffers_[which].template as<float>(); }
  [[nodiscard]] device_span<std::uint16_t> tokens(DeviceBuffer which) const {
    return buffers_[which].template as<std::uint16_t>();
  }

  D& device_;
  Store& store_;
  Shape shape_;
  std::vector<Parameter> parameters_;
  std::vector<typename hbmoff::HbmArena<D>::Buffer> buffers_;
  Workers workers_{};
};

/// Uniform bits from a position in a sequence (splitmix64 of Steele, Lea and Flood, with its published constants).
inline uint64_t random_bits(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
inline double random_unit(uint64_t seed, uint64_t index) {  // (0, 1]
  return static_cast<double>((random_bits(seed, index) >> 11) + 1) * 0x1p-53;
}
/// Normal numbers by Box and Muller.
inline double random_normal(uint64_t seed, uint64_t index) {
  return std::sqrt(-2.0 * std::log(random_unit(seed, 2 * index))) *
         std::cos(2.0 * std::numbers::pi * random_unit(seed, 2 * index + 1));
}

/// The start value of element `i` of a parameter.
inline float initial_value(const Parameter& p, uint64_t seed, uint64_t i) {
  if (!p.matrix) return p.info.name.ends_with(".weight") ? 1.0f : 0.0f;
  const double deviation = 0.02 / (p.residual_exit ? std::sqrt(2.0 * p.info.layers) : 1.0);
  return static_cast<float>(deviation * random_normal(seed, p.offset + i));
}

}  // namespace gpt
