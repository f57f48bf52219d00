// The trainer's kernels and model against naive double arithmetic: values, gradients by central differences, equal bits
// for any number of threads, bf16 against fp32.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gpt/kernels.hpp"
#include "gpt/model.hpp"

namespace {

using namespace gpt;
using hbmoff::bf16;
using Numbers = std::vector<double>;

// Random numbers that fp32 and bf16 hold exactly, so that all arithmetic starts from the same values.
Numbers random_numbers(uint64_t count, uint64_t seed, double scale = 1.0) {
  Numbers numbers(count);
  for (uint64_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<double>(to_float(from_float<bf16>(static_cast<float>(scale * random_normal(seed, i)))));
  }
  return numbers;
}

template <class T>
std::vector<T> as(const Numbers& numbers) {
  std::vector<T> all;
  for (const double x : numbers) all.push_back(from_float<T>(static_cast<float>(x)));
  return all;
}

double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double rms(const Numbers& a) { return std::sqrt(dot(a, a) / static_cast<double>(std::max<std::size_t>(a.size(), 1))); }

// A pool and its scratch.
class Bench {
 public:
  explicit Bench(std::uint32_t threads = 1) : pool_{threads}, memory_(threads * floats + 64) {
    openblas_set_num_threads(1);
    auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    address = (address + 255) / 256 * 256;
    workers = {&pool_, reinterpret_cast<float*>(address), floats};
  }

 private:
  static constexpr uint64_t floats = uint64_t{1} << 19;
  ThreadPool pool_;
  std::vector<float> memory_;

 public:
  Workers workers{};
};

template <class T>
void check_near(const std::vector<T>& got, const Numbers& wanted, double tolerance) {
  REQUIRE(got.size() == wanted.size());
  const double scale = rms(wanted);
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(to_float(got[i])) - wanted[i]) / (scale + std::abs(wanted[i]));
    worst = error <= worst ? worst : error;  // a NaN becomes the worst
  }
  CHECK(worst <= tolerance);
}

// Whether `gradient` is the derivative of `loss()`, which reads `x`: at both ends and at some elements between.
template <class T, class Loss>
void check_gradient(const char* what, const std::vector<T>& gradient, Numbers& x, const Loss& loss,
                    double tolerance = 1e-4) {
  CAPTURE(what);
  REQUIRE(gradient.size() == x.size());
  double scale = 0;
  for (const T g : gradient) scale += std::abs(static_cast<double>(to_float(g)));
  scale /= static_cast<double>(gradient.size());
  constexpr uint64_t samples = 24;
  for (uint64_t s = 0; s < samples; ++s) {
    const uint64_t i = s == 0 ? 0 : s == 1 ? x.size() - 1 : random_bits(7, s) % x.size();
    constexpr double h = 1e-4;
    const double at = x[i];
    x[i] = at + h;
    const double above = loss();
    x[i] = at - h;
    const double below = loss();
    x[i] = at;
    const double wanted = (above - below) / (2 * h);
    CAPTURE(i);
    CAPTURE(wanted);
    CAPTURE(to_float(gradient[i]));
    CHECK(std::abs(static_cast<double>(to_float(gradient[i])) - wanted) <= tolerance * (scale + std::abs(wanted)));
  }
}

// ---------------------------------------------------------------------------------------------------- naive forwards

Numbers linear(const Numbers& x, const Numbers& w, const Numbers& bias, uint64_t n, uint64_t k, uint64_t o) {
  Numbers y(n * o);
  for (uint64_t r = 0; r < n; ++r) {
    for (uint64_t c = 0; c < o; ++c) {
      y[r * o + c] = bias.empty() ? 0.0 : bias[c];
      for (uint64_t i = 0; i < k; ++i) y[r * o + c] += x[r * k + i] * w[c * k + i];
    }
  }
  return y;
}

Numbers layer_norm(const Numbers& x, const Numbers& weight, const Numbers& bias, uint64_t n, uint64_t c) {
  Numbers y(n * c);
  for (uint64_t r = 0; r < n; ++r) {
    double mean = 0, variance = 0;
    for (uint64_t i = 0; i < c; ++i) mean += x[r * c + i] / static_cast<double>(c);
    for (uint64_t i = 0; i < c; ++i) variance += (x[r * c + i] - mean) * (x[r * c + i] - mean) / static_cast<double>(c);
    for (uint64_t i = 0; i < c; ++i)
      y[r * c + i] = (x[r * c + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
  }
  return y;
}

Numbers attention_of(const Numbers& qkv, uint64_t sequences, uint64_t context, uint64_t heads, uint64_t c) {
  const uint64_t d = c / heads;
  Numbers out(sequences * context * c, 0.0);
  for (uint64_t s = 0; s < sequences; ++s) {
    for (uint64_t h = 0; h < heads; ++h) {
      for (uint64_t i = 0; i < context; ++i) {
        const double* q = &qkv[(s * context + i) * 3 * c + h * d];
        Numbers p(i + 1);
        double sum = 0;
        for (uint64_t j = 0; j <= i; ++j) {
          const double* k = &qkv[(s * context + j) * 3 * c + c + h * d];
          double score = 0;
          for (uint64_t e = 0; e < d; ++e) score += q[e] * k[e];
          sum += p[j] = std::exp(score / std::sqrt(static_cast<double>(d)));
        }
        for (uint64_t j = 0; j <= i; ++j) {
          const double* v = &qkv[(s * context + j) * 3 * c + 2 * c + h * d];
          for (uint64_t e = 0; e < d; ++e) out[(s * context + i) * c + h * d + e] += p[j] / sum * v[e];
        }
      }
    }
  }
  return out;
}

Numbers gelu_of(const Numbers& x) {
  Numbers y;
  for (const double a : x) {
    y.push_back(0.5 * a * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (a + 0.044715 * a * a * a))));
  }
  return y;
}

Numbers cross_entropy_of(const Numbers& logits, const std::vector<std::uint16_t>& targets, uint64_t v) {
  Numbers losses;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    const double top = *std::max_element(&logits[r * v], &logits[r * v] + v);
    double sum = 0;
    for (uint64_t j = 0; j < v; ++j) sum += std::exp(logits[r * v + j] - top);
    losses.push_back(std::log(sum) + top - logits[r * v + targets[r]]);
  }
  return losses;
}

std::vector<std::uint16_t> random_tokens(uint64_t count, uint64_t vocab, uint64_t seed) {
  std::vector<std::uint16_t> tokens(count);
  for (uint64_t i = 0; i < count; ++i) tokens[i] = static_cast<std::uint16_t>(random_bits(seed, i) % vocab);
  return tokens;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

TEST_CASE("the thread pool runs each block once, and every thread has scratch of its own") {
  for (const std::uint32_t threads : {1u, 2u, 5u}) {
    ThreadPool pool{threads};
    for (const uint64_t blocks : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{97}}) {
      std::vector<std::atomic<int>> runs(blocks), inside(threads);
      std::atomic<bool> shared{false};
      pool.run(blocks, [&](uint64_t block, std::uint32_t thread) {
        if (inside[thread]++ != 0) shared = true;
        ++runs[block];
        --inside[thread];
      });
      for (const auto& count : runs) CHECK(count == 1);
      CHECK_FALSE(shared);
    }
  }
}

TEST_CASE("exp and tanh without a table") {
  for (int i = 0; i <= 870; ++i) {
    const float x = -0.1f * static_cast<float>(i);
    CHECK(static_cast<double>(exp_nonpositive(x)) == doctest::Approx(std::exp(static_cast<double>(x))).epsilon(4e-7));
  }
  CHECK(exp_nonpositive(0.0f) == 1.0f);
  CHECK(exp_nonpositive(-1e30f) < 2e-38f);
  CHECK(std::isnan(exp_nonpositive(-std::numeric_limits<float>::infinity())));
  CHECK(std::isnan(exp_nonpositive(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::isnan(exp_nonpositive(-std::numeric_limits<float>::quiet_NaN())));
  for (int i = -1000; i <= 1000; ++i) {
    const float x = 0.02f * static_cast<float>(i);
    CHECK(std::abs(static_cast<double>(tanh_fast(x)) - std::tanh(static_cast<double>(x))) < 3e-7);
  }
}

TEST_CASE("linear layer") {
  Bench bench;
  struct Size {
    uint64_t n, k, o;
  };
  // Across blocks of rows, of columns, and of a long inner sum.
  for (const auto [n, k, o] :
       {Size{1, 1, 1}, Size{70, 5, 67}, Size{3, 4, column_block + 2}, Size{column_block + 3, 3, 5}}) {
    CAPTURE(n);
    CAPTURE(o);
    Numbers x = random_numbers(n * k, 1), w = random_numbers(o * k, 2), b = random_numbers(o, 3);
    const Numbers seeds = random_numbers(n * o, 4);
    const auto loss = [&] { return dot(linear(x, w, b, n, k, o), seeds); };

    std::vector<float> y(n * o), dx(n * k), dw(o * k, 0.0f), db(o, 0.0f);
    const auto xf = as<float>(x), wf = as<float>(w), bf = as<float>(b), dy = as<float>(seeds);
    linear_forward(bench.workers, y.data(), xf.data(), wf.data(), bf.data(), n, k, o);
    check_near(y, linear(x, w, b, n, k, o), 1e-5);
    linear_backward_input(bench.workers, dx.data(), dy.data(), wf.data(), n, k, o, false);
    linear_backward_weight(bench.workers, dw.data(), db.data(), dy.data(), xf.data(), n, k, o);
    check_gradient("x", dx, x, loss);
    check_gradient("w", dw, w, loss);
    check_gradient("b", db, b, loss);

    // Weight gradients add up; so do input gradients, where asked to.
    const auto dx_once = dx, dw_once = dw, db_once = db;
    linear_backward_input(bench.workers, dx.data(), dy.data(), wf.data(), n, k, o, true);
    linear_backward_weight(bench.workers, dw.data(), db.data(), dy.data(), xf.data(), n, k, o);
    const auto twice = [](const std::vector<float>& g) {
      Numbers doubled;
      for (const float e : g) doubled.push_back(2 * static_cast<double>(e));
      return doubled;
    };
    check_near(dx, twice(dx_once), 1e-5);
    check_near(dw, twice(dw_once), 1e-5);
    check_near(db, twice(db_once), 1e-5);

    // bf16 operands are these very values, so the result is the fp32 one, rounded.
    std::vector<bf16> y16(n * o), dw16(o * k, bf16{0}), db16(o, bf16{0});
    std::vector<float> dx16(n * k);
    const auto x16 = as<bf16>(x), w16 = as<bf16>(w), b16 = as<bf16>(b);
    linear_forward(bench.workers, y16.data(), x16.data(), w16.data(), b16.data(), n, k, o);
    linear_backward_input(bench.workers, dx16.data(), dy.data(), w16.data(), n, k, o, false);
    linear_backward_weight(bench.workers, dw16.data(), db16.data(), dy.data(), x16.data(), n, k, o);
    std::vector<bf16> y_rounded;
    for (const float e : y) y_rounded.push_back(from_float<bf16>(e));
    CHECK(same_bits(y16, y_rounded));
    CHECK(same_bits(dx16, dx_once));
    check_near(dw16, Numbers(dw_once.begin(), dw_once.end()), 0x1p-8);
    check_near(db16, Numbers(db_once.begin(), db_once.end()), 0x1p-8);
  }
}

TEST_CASE("layer norm") {
  Bench bench;
  for (const uint64_t c : {uint64_t{1}, uint64_t{7}, uint64_t{67}}) {
    const uint64_t n = 70;
    Numbers x = random_numbers(n * c, 1), w = random_numbers(c, 2), b = random_numbers(c, 3);
    const Numbers seeds = random_numbers(n * c, 4);
    const auto loss = [&] { return dot(layer_norm(x, w, b, n, c), seeds); };
    std::vector<float> y(n * c), stats(2 * n), dx(n * c, 1.0f), dw(c, 0.0f), db(c, 0.0f);
    const auto xf = as<float>(x), wf = as<float>(w), bf = as<float>(b), dy = as<float>(seeds);
    layer_norm_forward(bench.workers, y.data(), stats.data(), xf.data(), wf.data(), bf.data(), n, c);
    check_near(y, layer_norm(x, w, b, n, c), 1e-5);
    layer_norm_backward(bench.workers, dx.data(), dw.data(), db.data(), dy.data(), stats.data(), xf.data(), wf.data(),
                        n, c);
    for (float& g : dx) g -= 1.0f;  // it adds
    check_gradient("x", dx, x, loss, 1e-3);
    check_gradient("weight", dw, w, loss);
    check_gradient("bias", db, b, loss);
  }
}

TEST_CASE("attention") {
  Bench bench;
  struct Size {
    uint64_t sequences, context, heads, c;
  };
  for (const auto [sequences, context, heads, c] : {Size{1, 1, 1, 1}, Size{2, 67, 3, 12}, Size{3, 64, 1, 5}}) {
    CAPTURE(context);
    const uint64_t n = sequences * context;
    Numbers qkv = random_numbers(n * 3 * c, 1);
    const Numbers seeds = random_numbers(n * c, 2);
    const auto loss = [&] { return dot(attention_of(qkv, sequences, context, heads, c), seeds); };
    std::vector<float> out(n * c), sums(n * heads), dqkv(n * 3 * c);
    const auto in = as<float>(qkv), dout = as<float>(seeds);
    attention_forward(bench.workers, out.data(), sums.data(), in.data(), sequences, context, heads, c);
    check_near(out, attention_of(qkv, sequences, context, heads, c), 1e-5);
    attention_backward(bench.workers, dqkv.data(), dout.data(), out.data(), sums.data(), in.data(), sequences, context,
                       heads, c);
    check_gradient("qkv", dqkv, qkv, loss, 1e-3);

    std::vector<bf16> out16(n * c);
    std::vector<float> sums16(n * heads);
    const auto in16 = as<bf16>(qkv);
    attention_forward(bench.workers, out16.data(), sums16.data(), in16.data(), sequences, context, heads, c);
    std::vector<bf16> rounded;
    for (const float e : out) rounded.push_back(from_float<bf16>(e));
    CHECK(same_bits(out16, rounded));
    CHECK(same_bits(sums16, sums));
  }
}

TEST_CASE("attention sees nothing of what comes later") {
  Bench bench;
  const uint64_t context = 70, c = 4;
  auto qkv = as<float>(random_numbers(context * 3 * c, 1));
  std::vector<float> before(context * c), after(context * c), sums(context);
  attention_forward(bench.workers, before.data(), sums.data(), qkv.data(), 1, context, 1, c);
  for (uint64_t i = 66 * 3 * c; i < qkv.size(); ++i) qkv[i] += 3.0f;
  attention_forward(bench.workers, after.data(), sums.data(), qkv.data(), 1, context, 1, c);
  CHECK(std::equal(before.begin(), before.begin() + 66 * c, after.begin()));
  CHECK_FALSE(std::equal(before.begin() + 66 * c, before.end(), after.begin() + 66 * c));
}

TEST_CASE("GELU") {
  Bench bench;
  const uint64_t count = 16384 + 5;  // one block and a little
  Numbers x = random_numbers(count, 1, 3.0);
  const Numbers seeds = random_numbers(count, 2);
  std::vector<float> y(count), d = as<float>(seeds);
  const auto xf = as<float>(x);
  gelu_forward(bench.workers, y.data(), xf.data(), count);
  check_near(y, gelu_of(x), 1e-6);
  gelu_backward(bench.workers, d.data(), xf.data(), count);
  check_gradient("x", d, x, [&] { return dot(gelu_of(x), seeds); }, 1e-3);
}

TEST_CASE("embedding") {
  Bench bench;
  const uint64_t vocab = 11, context = 7, n = 10 * context, c = 66;
  const auto tokens = random_tokens(n, vocab, 5);
  const Numbers wte = random_numbers(vocab * c, 1), wpe = random_numbers(context * c, 2), dx = random_numbers(n * c, 3);
  Numbers x(n * c), dwte(vocab * c, 0.0), dwpe(context * c, 0.0);
  for (uint64_t i = 0; i < n * c; ++i) {
    const uint64_t token = tokens[i / c] * c + i % c, position = i / c % context * c + i % c;
    x[i] = wte[token] + wpe[position];
    dwte[token] += dx[i];
    dwpe[position] += dx[i];
  }
  std::vector<float> got(n * c), got_wte(vocab * c, 0.0f), got_wpe(context * c, 0.0f);
  embedding_forward(bench.workers, got.data(), tokens.data(), as<float>(wte).data(), as<float>(wpe).data(), n, context,
                    c);
  check_near(got, x, 1e-7);
  embedding_backward(bench.workers, got_wte.data(), got_wpe.data(), as<float>(dx).data(), tokens.data(), n, context, c);
  check_near(got_wte, dwte, 1e-5);
  check_near(got_wpe, dwpe, 1e-5);
}

TEST_CASE("cross-entropy") {
  Bench bench;
  const uint64_t n = 5, v = 37;
  Numbers logits = random_numbers(n * v, 1, 4.0);
  const auto targets = random_tokens(n, v, 2);
  std::vector<float> losses(n), evaluated(n), gradient = as<float>(logits), scratch = gradient;
  cross_entropy(bench.workers, gradient.data(), losses.data(), targets.data(), n, v, 0.25f);
  check_near(losses, cross_entropy_of(logits, targets, v), 1e-5);
  const auto loss = [&] { return 0.25 * dot(cross_entropy_of(logits, targets, v), Numbers(n, 1.0)); };
  check_gradient("logits", gradient, logits, loss, 1e-3);
  cross_entropy(bench.workers, scratch.data(), evaluated.data(), targets.data(), n, v, 0.0f);
  CHECK(same_bits(losses, evaluated));

  std::vector<float> extreme{1e4f, -1e4f, 0.0f};
  const std::uint16_t second = 1;
  float one = 0;
  cross_entropy(bench.workers, extreme.data(), &one, &second, 1, 3, 1.0f);
  CHECK(one == doctest::Approx(2e4));
  CHECK(extreme[0] == doctest::Approx(1.0));
  CHECK(extreme[1] == doctest::Approx(-1.0));
}

// ---------------------------------------------------------------------------------------------------- the model

namespace {

// A model on a device of its own.
template <class T>
struct Machine {
  using Store = hbmoff::ActivationStore<hbmoff::HostDevice, hbmoff::KeepResident>;

  explicit Machine(const Shape& s, std::uint32_t threads = 1)
      : shape{s}, pool{threads}, device{{.hbm_capacity = Bytes{uint64_t{64} << 20}}}, owner{device.create_stream()},
        hbm{device, Bytes{uint64_t{64} << 20}}, host{device, Bytes{uint64_t{1} << 16}},
        store{hbm, host, hbmoff::KeepResident{}, static_cast<std::uint32_t>(s.layers),
              bundle_of(s, hbmoff::dtype_of<T>)},
        model{device, hbm, store, s, pool, owner} {
    openblas_set_num_threads(1);
  }

  // Work on the stream, to the end of it.
  template <class F>
  void on_device(const F& f) {
    device.enqueue(owner, [&f] { f(); });
    device.synchronize(hbmoff::HostDevice::StreamRef{owner});
  }
  void set(const std::vector<Numbers>& weights, const std::vector<std::uint16_t>& in,
           const std::vector<std::uint16_t>& out) {
    on_device([&] {
      for (std::size_t p = 0; p < weights.size(); ++p) std::ranges::copy(as<T>(weights[p]), model.weight(p).data());
      std::ranges::copy(in, model.buffer(tokens_in).template as<std::uint16_t>().data());
      std::ranges::copy(out, model.buffer(tokens_out).template as<std::uint16_t>().data());
    });
  }
  std::vector<T> gradient(std::size_t p) {
    std::vector<T> g;
    on_device([&] { g.assign(model.gradient(p).data(), model.gradient(p).data() + model.gradient(p).count()); });
    return g;
  }
  double loss() {
    double sum = 0;
    on_device([&] { sum = *model.buffer(loss_sum).template as<double>().data(); });
    return sum;
  }

  Shape shape;
  ThreadPool pool;
  hbmoff::HostDevice device;
  hbmoff::HostDevice::Stream owner;
  hbmoff::HbmArena<hbmoff::HostDevice> hbm;
  hbmoff::PinnedHostArena<hbmoff::HostDevice> host;
  Store store;
  Model<T, hbmoff::HostDevice, Store> model;
};

double loss_of(const Shape& s, const std::vector<Numbers>& w, const std::vector<std::uint16_t>& in,
               const std::vector<std::uint16_t>& targets) {
  const uint64_t n = in.size(), c = s.channels;
  const auto sum_of = [](const Numbers& a, const Numbers& b) {
    Numbers sum(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
    return sum;
  };
  Numbers x(n * c);
  for (uint64_t i = 0; i < n * c; ++i) x[i] = w[0][in[i / c] * c + i % c] + w[1][i / c % s.context * c + i % c];
  for (uint64_t l = 0; l < s.layers; ++l) {
    const Numbers* p = &w[first_layer_parameter + l * layer_parameters];
    const Numbers normed = layer_norm(x, p[ln_1_weight], p[ln_1_bias], n, c);
    const Numbers heads =
        attention_of(linear(normed, p[attn_weight], p[attn_bias], n, c, 3 * c), n / s.context, s.context, s.heads, c);
    x = sum_of(x, linear(heads, p[attn_proj_weight], p[attn_proj_bias], n, c, c));
    const Numbers wide =
        gelu_of(linear(layer_norm(x, p[ln_2_weight], p[ln_2_bias], n, c), p[fc_weight], p[fc_bias], n, c, 4 * c));
    x = sum_of(x, linear(wide, p[mlp_proj_weight], p[mlp_proj_bias], n, 4 * c, c));
  }
  const Numbers last = layer_norm(x, w[w.size() - 2], w[w.size() - 1], n, c);
  const Numbers losses = cross_entropy_of(linear(last, w[0], {}, n, c, s.vocab), targets, s.vocab);
  return dot(losses, Numbers(n, 1.0));
}

std::vector<Numbers> random_weights(const Shape& s) {
  std::vector<Numbers> weights;
  for (const Parameter& p : parameters_of(s, DType::fp32)) {
    Numbers values = random_numbers(p.info.count, 100 + weights.size(), p.matrix ? 0.3 : 0.1);
    if (p.info.name.ends_with(".weight") && !p.matrix) {
      for (double& value : values) value += 1.0;
    }
    for (double& value : values) value = static_cast<double>(to_float(from_float<bf16>(static_cast<float>(value))));
    weights.push_back(values);
  }
  return weights;
}

constexpr Shape small{.vocab = 19, .layers = 2, .channels = 6, .heads = 2, .context = 5, .batch = 3};

}  // namespace

TEST_CASE("the model's loss and all its gradients") {
  std::vector<Numbers> weights = random_weights(small);
  const auto in = random_tokens(small.tokens(), small.vocab, 1), out = random_tokens(small.tokens(), small.vocab, 2);
  Machine<float> machine{small};
  machine.set(weights, in, out);
  machine.model.begin_step(machine.owner);
  machine.model.train(0.5f, machine.owner);
  const double loss = loss_of(small, weights, in, out);
  CHECK(machine.loss() == doctest::Approx(loss).epsilon(1e-5));
  for (std::size_t p = 0; p < weights.size(); ++p) {
    check_gradient(
        machine.model.parameters()[p].info.name.c_str(), machine.gradient(p), weights[p],
        [&] { return 0.5 * loss_of(small, weights, in, out); }, 2e-3);
  }

  // A second micro-batch adds to both; an evaluation adds to the loss alone.
  std::vector<std::vector<float>> once;
  for (std::size_t p = 0; p < weights.size(); ++p) once.push_back(machine.gradient(p));
  machine.model.train(0.5f, machine.owner);
  CHECK(machine.loss() == doctest::Approx(2 * loss).epsilon(1e-5));
  std::vector<std::vector<float>> twice;
  for (std::size_t p = 0; p < weights.size(); ++p) {
    twice.push_back(machine.gradient(p));
    Numbers doubled;
    for (const float g : once[p]) doubled.push_back(2 * static_cast<double>(g));
    check_near(twice[p], doubled, 1e-4);
  }
  machine.model.evaluate(small.tokens(), small.context, machine.owner);
  CHECK(machine.loss() == doctest::Approx(3 * loss).epsilon(1e-5));
  for (std::size_t p = 0; p < weights.size(); ++p) CHECK(same_bits(machine.gradient(p), twice[p]));

  machine.model.begin_step(machine.owner);
  CHECK(machine.loss() == 0.0);
  for (const float g : machine.gradient(0)) CHECK(g == 0.0f);
}

TEST_CASE("in bf16 the model's gradients are those of fp32 but for rounding") {
  const std::vector<Numbers> weights = random_weights(small);
  const auto in = random_tokens(small.tokens(), small.vocab, 1), out = random_tokens(small.tokens(), small.vocab, 2);
  Machine<float> exact{small};
  Machine<bf16> rounded{small};
  const auto train = [&](auto& machine) {
    machine.set(weights, in, out);
    machine.model.begin_step(machine.owner);
    machine.model.train(0.5f, machine.owner);
  };
  train(exact);
  train(rounded);
  CHECK(rounded.loss() == doctest::Approx(exact.loss()).epsilon(0.01));
  for (std::size_t p = 0; p < weights.size(); ++p) {
    CAPTURE(exact.model.parameters()[p].info.name);
    Numbers wanted, error;
    const auto a = exact.gradient(p);
    const auto b = rounded.gradient(p);
    for (std::size_t i = 0; i < a.size(); ++i) {
      wanted.push_back(static_cast<double>(a[i]));
      error.push_back(static_cast<double>(to_float(b[i])) - wanted.back());
    }
    CHECK(rms(error) <= 0.05 * rms(wanted));
  }
}

TEST_CASE_TEMPLATE("no bit depends on the number of threads", T, float, bf16) {
  // Several blocks of rows in every kernel, and products of several blocks of columns.
  constexpr Shape shape{.vocab = 2500, .layers = 2, .channels = 72, .heads = 3, .context = 70, .batch = 2};
  const std::vector<Numbers> weights = random_weights(shape);
  const auto in = random_tokens(shape.tokens(), shape.vocab, 1), out = random_tokens(shape.tokens(), shape.vocab, 2);
  std::vector<std::vector<T>> expected;
  double expected_loss = 0;
  for (const std::uint32_t threads : {1u, 2u, 3u}) {
    CAPTURE(threads);
    Machine<T> machine{shape, threads};
    machine.set(weights, in, out);
    machine.model.begin_step(machine.owner);
    machine.model.train(1.0f, machine.owner);
    if (threads == 1) expected_loss = machine.loss();
    CHECK(machine.loss() == expected_loss);
    for (std::size_t p = 0; p < weights.size(); ++p) {
      if (threads == 1) expected.push_back(machine.gradient(p));
      CHECK(same_bits(machine.gradient(p), expected[p]));
    }
  }
}

TEST_CASE("the last token's logits are those of the loss") {
  const std::vector<Numbers> weights = random_weights(small);
  const auto in = random_tokens(small.tokens(), small.vocab, 1), out = random_tokens(small.tokens(), small.vocab, 2);
  Machine<float> machine{small};
  machine.set(weights, in, out);
  for (const uint64_t rows : {uint64_t{1}, uint64_t{3}, small.context}) {
    // The last token's loss is the loss of `rows` tokens less that of one token fewer.
    const auto loss_of_first = [&](uint64_t n) {
      Shape s = small;
      s.context = n;
      return n == 0 ? 0.0
                    : loss_of(s, weights, {in.begin(), in.begin() + static_cast<std::ptrdiff_t>(n)},
                              {out.begin(), out.begin() + static_cast<std::ptrdiff_t>(n)});
    };
    machine.model.predict(rows, machine.owner);
    Numbers logits_there;
    machine.on_device([&] {
      const float* first = machine.model.buffer(logits).as<float>().data();
      logits_there.assign(first, first + small.vocab);
    });
    CHECK(cross_entropy_of(logits_there, {out[rows - 1]}, small.vocab)[0] ==
          doctest::Approx(loss_of_first(rows) - loss_of_first(rows - 1)).epsilon(1e-4));
  }
}
