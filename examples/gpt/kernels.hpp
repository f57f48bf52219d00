// The arithmetic of a GPT-2 layer on the CPU, forward and backward, as plain functions over device memory.
//
// T is the type that weights, gradients and activations are stored in (float or hbmoff::bf16); all arithmetic is fp32.
// Gradients of activations are fp32. Work is cut into fixed blocks, so no bit depends on the number of threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include <cblas.h>

#include "hbmoff/core/dtype.hpp"
#include "thread_pool.hpp"

namespace gpt {

using hbmoff::bf16;
using hbmoff::from_float;
using hbmoff::to_float;
using std::uint64_t;

/// Rows of an output that one block computes.
inline constexpr uint64_t row_block = 64;
/// Elements that one block of an elementwise kernel computes.
inline constexpr uint64_t element_block = 16384;
/// Columns of an output, or vocabulary entries, that one product computes; bounds the fp32 scratch.
inline constexpr uint64_t column_block = 2048;

/// What kernels need besides their operands. `scratch` is `scratch_floats` floats per thread, 256-byte aligned.
struct Workers {
  ThreadPool* pool;
  float* scratch;
  uint64_t scratch_floats;

  [[nodiscard]] float* of(std::uint32_t thread) const { return scratch + thread * scratch_floats; }
};

/// A multiple of 64 floats, so that pieces of scratch stay 256-byte aligned.
constexpr uint64_t padded(uint64_t floats) { return (floats + 63) / 64 * 64; }

/// e^x within a few ulp for x <= 0, or above 0 by no more than rounding; about e^-87 below -87, NaN for infinities and
/// NaN. No table, call or branch, so that loops over it become vector code: 2^n times a polynomial (Taylor's, degree 7)
/// on |r| <= ln 2 / 2.
inline float exp_nonpositive(float x) {
  // Among numbers that are not positive the larger has the smaller bits. Of std::max g++ makes a branch.
  constexpr std::uint32_t least = std::bit_cast<std::uint32_t>(-87.0f), infinity = 0x7f800000u, above = 0x80000000u;
  const std::uint32_t bits = std::min(std::bit_cast<std::uint32_t>(x), least);
  // No integer stands for an infinity or a NaN: the last line makes them a NaN, whatever n is.
  const float y = std::bit_cast<float>(bits - infinity < above - infinity ? least : bits);
  const float n = static_cast<float>(static_cast<int>(y * 1.44269504f - 0.5f));  // truncation rounds y <= 0 to nearest
  const float r = (y - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23) + (x - x);
}

inline float tanh_fast(float x) {
  const float e = exp_nonpositive(-2.0f * std::fabs(x));
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

/// Sum of f(i) for i < n, in 16 lanes of a fixed order, so that it becomes vector code without changing a bit.
template <class F>
float sum_of(uint64_t n, const F& f) {
  constexpr uint64_t lanes = 16;
  float sums[lanes] = {};
  uint64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (uint64_t lane = 0; lane < lanes; ++lane) sums[lane] += f(i + lane);
  }
  for (uint64_t lane = 0; i + lane < n; ++lane) sums[lane] += f(i + lane);
  float sum = 0;
  for (const float lane : sums) sum += lane;
  return sum;
}

namespace detail {
// Calls body(first, last) for fixed pieces of [0, count).
template <class Body>
void in_pieces(const Workers& workers, uint64_t count, uint64_t piece, const Body& body) {
  workers.pool->run((count + piece - 1) / piece,
                    [&](uint64_t block, std::uint32_t) { body(block * piece, std::min(count, (block + 1) * piece)); });
}
}  // namespace detail

// ---------------------------------------------------------------------------------------------------- products

/// fp32 copy of `count` elements, or the elements themselves.
inline const float* as_floats(const float* x, uint64_t, float*) { return x; }
inline const float* as_floats(const bf16* x, uint64_t count, float* scratch) {
  for (uint64_t i = 0; i < count; ++i) scratch[i] = to_float(x[i]);
  return scratch;
}

/// Floats of scratch per thread that the products below need.
template <class T>
constexpr uint64_t product_scratch(uint64_t max_inner) {
  const uint64_t operands =
      sizeof(T) == sizeof(float) ? 0 : padded(row_block * max_inner) + padded(column_block * max_inner);
  return operands + padded(row_block * std::max(column_block, max_inner));
}

inline void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, uint64_t m, uint64_t n, uint64_t k, const float* a,
                 uint64_t lda, const float* b, uint64_t ldb, float beta, float* c, uint64_t ldc) {
  if (m == 0 || n == 0) return;
  cblas_sgemm(CblasRowMajor, ta, tb, static_cast<blasint>(m), static_cast<blasint>(n), static_cast<blasint>(k), 1.0f, a,
              static_cast<blasint>(lda), b, static_cast<blasint>(ldb), beta, c, static_cast<blasint>(ldc));
}

/// y[n, o] = x[n, k] w[o, k]^T + bias[o]
template <class T, class Y>
void linear_forward(const Workers& workers, Y* y, const T* x, const T* w, const T* bias, uint64_t n, uint64_t k,
                    uint64_t o) {
  const uint64_t row_blocks = (n + row_block - 1) / row_block, column_blocks = (o + column_block - 1) / column_block;
  workers.pool->run(row_blocks * column_blocks, [&](uint64_t block, std::uint32_t thread) {
    const uint64_t r0 = block % row_blocks * row_block, rows = std::min(row_block, n - r0);
    const uint64_t c0 = block / row_blocks * column_block, columns = std::min(column_block, o - c0);
    float* scratch = workers.of(thread);
    float* x_scratch = scratch + padded(row_block * std::max(column_block, k));
    const float* xf = as_floats(x + r0 * k, rows * k, x_scratch);
    const float* wf = as_floats(w + c0 * k, columns * k, x_scratch + padded(row_block * k));
    Y* to = y + r0 * o + c0;
    float* out = scratch;  // fp32 results are made in place
    uint64_t stride = columns;
    if constexpr (sizeof(Y) == sizeof(float)) {
      out = to;
      stride = o;
    }
    for (uint64_t r = 0; bias != nullptr && r < rows; ++r) {
      for (uint64_t c = 0; c < columns; ++c) out[r * stride + c] = to_float(bias[c0 + c]);
    }
    gemm(CblasNoTrans, CblasTrans, rows, columns, k, xf, k, wf, k, bias == nullptr ? 0.0f : 1.0f, out, stride);
    if constexpr (sizeof(Y) != sizeof(float)) {
      for (uint64_t r = 0; r < rows; ++r) {
        for (uint64_t c = 0; c < columns; ++c) to[r * o + c] = from_float<Y>(out[r * stride + c]);
      }
    }
  });
}

/// dx[n, k] = dy[n, o] w[o, k], or += where `accumulate`
template <class T>
void linear_backward_input(const Workers& workers, float* dx, const float* dy, const T* w, uint64_t n, uint64_t k,
                           uint64_t o, bool accumulate) {
  workers.pool->run((n + row_block - 1) / row_block, [&](uint64_t block, std::uint32_t thread) {
    const uint64_t r0 = block * row_block, rows = std::min(row_block, n - r0);
    float* scratch = workers.of(thread);
    for (uint64_t c0 = 0; c0 < o; c0 += column_block) {
      const uint64_t columns = std::min(column_block, o - c0);
      const float* wf = as_floats(w + c0 * k, columns * k, scratch);
      gemm(CblasNoTrans, CblasNoTrans, rows, k, columns, dy + r0 * o + c0, o, wf, k,
           accumulate || c0 != 0 ? 1.0f : 0.0f, dx + r0 * k, k);
    }
  });
}

/// dw[o, k] += dy[n, o]^T x[n, k]; db[o] += column sums of dy
template <class T>
void linear_backward_weight(const Workers& workers, T* dw, T* db, const float* dy, const T* x, uint64_t n, uint64_t k,
                            uint64_t o) {
  workers.pool->run((o + row_block - 1) / row_block, [&](uint64_t block, std::uint32_t thread) {
    const uint64_t o0 = block * row_block, rows = std::min(row_block, o - o0);
    float* out = workers.of(thread);
    if constexpr (sizeof(T) == sizeof(float)) {
      gemm(CblasTrans, CblasNoTrans, rows, k, n, dy + o0, o, x, k, 1.0f, dw + o0 * k, k);
    } else {
      float* x_scratch = out + padded(row_block * std::max(column_block, k));
      for (uint64_t n0 = 0; n0 < n; n0 += column_block) {
        const uint64_t inner = std::min(column_block, n - n0);
        const float* xf = as_floats(x + n0 * k, inner * k, x_scratch);
        gemm(CblasTrans, CblasNoTrans, rows, k, inner, dy + n0 * o + o0, o, xf, k, n0 == 0 ? 0.0f : 1.0f, out, k);
      }
      T* to = dw + o0 * k;
      for (uint64_t i = 0; i < rows * k; ++i) to[i] = from_float<T>(to_float(to[i]) + out[i]);
    }
    if (db == nullptr) return;
    std::fill_n(out, rows, 0.0f);
    for (uint64_t r = 0; r < n; ++r) {
      for (uint64_t c = 0; c < rows; ++c) out[c] += dy[r * o + o0 + c];
    }
    for (uint64_t c = 0; c < rows; ++c) db[o0 + c] = from_float<T>(to_float(db[o0 + c]) + out[c]);
  });
}

// ---------------------------------------------------------------------------------------------------- embedding

/// x[i] = wte[token i] + wpe[position i]
template <class T>
void embedding_forward(const Workers& workers, T* x, const std::uint16_t* tokens, const T* wte, const T* wpe,
                       uint64_t n, uint64_t context, uint64_t c) {
  detail::in_pieces(workers, n, row_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      const T* token = wte + tokens[i] * c;
      const T* position = wpe + i % context * c;
      for (uint64_t j = 0; j < c; ++j) x[i * c + j] = from_float<T>(to_float(token[j]) + to_float(position[j]));
    }
  });
}

/// Adds dx to the gradients of the tokens' and positions' rows, row after row in the order of the batch; blocks cut columns.
template <class T>
void embedding_backward(const Workers& workers, T* dwte, T* dwpe, const float* dx, const std::uint16_t* tokens,
                        uint64_t n, uint64_t context, uint64_t c) {
  detail::in_pieces(workers, c, row_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = 0; i < n; ++i) {
      T* token = dwte + tokens[i] * c;
      T* position = dwpe + i % context * c;
      for (uint64_t j = first; j < last; ++j) {
        token[j] = from_float<T>(to_float(token[j]) + dx[i * c + j]);
        position[j] = from_float<T>(to_float(position[j]) + dx[i * c + j]);
      }
    }
  });
}

// ---------------------------------------------------------------------------------------------------- layer norm

/// y = (x - mean) * rstd * weight + bias, row by row; stats[i] = {mean, rstd}
template <class T>
void layer_norm_forward(const Workers& workers, T* y, float* stats, const T* x, const T* weight, const T* bias,
                        uint64_t n, uint64_t c) {
  detail::in_pieces(workers, n, row_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      const T* row = x + i * c;
      const float mean = sum_of(c, [&](uint64_t j) { return to_float(row[j]); }) / static_cast<float>(c);
      const float squares =
          sum_of(c, [&](uint64_t j) { return (to_float(row[j]) - mean) * (to_float(row[j]) - mean); });
      const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(c) + 1e-5f);
      stats[2 * i] = mean;
      stats[2 * i + 1] = rstd;
      for (uint64_t j = 0; j < c; ++j) {
        y[i * c + j] = from_float<T>((to_float(row[j]) - mean) * rstd * to_float(weight[j]) + to_float(bias[j]));
      }
    }
  });
}

/// With h = (x - mean) rstd and g = dy weight:  dx += rstd (g - mean(g) - h mean(g h));  dweight += dy h;  dbias += dy
template <class T>
void layer_norm_backward(const Workers& workers, float* dx, T* dweight, T* dbias, const float* dy, const float* stats,
                         const T* x, const T* weight, uint64_t n, uint64_t c) {
  detail::in_pieces(workers, n, row_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      const float mean = stats[2 * i], rstd = stats[2 * i + 1];
      const auto g = [weight, row = dy + i * c](uint64_t j) { return row[j] * to_float(weight[j]); };
      const auto h = [mean, rstd, row = x + i * c](uint64_t j) { return (to_float(row[j]) - mean) * rstd; };
      const float mean_g = sum_of(c, g) / static_cast<float>(c);
      const float mean_gh = sum_of(c, [&](uint64_t j) { return g(j) * h(j); }) / static_cast<float>(c);
      float* to = dx + i * c;
      for (uint64_t j = 0; j < c; ++j) to[j] += rstd * (g(j) - mean_g - h(j) * mean_gh);
    }
  });
  detail::in_pieces(workers, c, row_block, [=](uint64_t first, uint64_t last) {
    float dw[row_block] = {}, db[row_block] = {};
    for (uint64_t i = 0; i < n; ++i) {
      const float mean = stats[2 * i], rstd = stats[2 * i + 1];
      for (uint64_t j = first; j < last; ++j) {
        dw[j - first] += dy[i * c + j] * ((to_float(x[i * c + j]) - mean) * rstd);
        db[j - first] += dy[i * c + j];
      }
    }
    for (uint64_t j = first; j < last; ++j) {
      dweight[j] = from_float<T>(to_float(dweight[j]) + dw[j - first]);
      dbias[j] = from_float<T>(to_float(dbias[j]) + db[j - first]);
    }
  });
}

// ---------------------------------------------------------------------------------------------------- attention

/// Floats of scratch per thread for a head: q, k, v, o, do, dq, dk, dv and three blocks of scores.
constexpr uint64_t attention_scratch(uint64_t context, uint64_t head) {
  return 8 * padded(context * head) + 3 * padded(row_block * context);
}

namespace detail {
// Copies the rows of one head out of an interleaved array, as fp32 side by side.
template <class T>
void gather(float* to, const T* from, uint64_t rows, uint64_t stride, uint64_t head, float scale = 1.0f) {
  for (uint64_t r = 0; r < rows; ++r) {
    for (uint64_t j = 0; j < head; ++j) to[r * head + j] = to_float(from[r * stride + j]) * scale;
  }
}
// The reverse.
template <class T>
void scatter(T* to, const float* from, uint64_t rows, uint64_t stride, uint64_t head, float scale = 1.0f) {
  for (uint64_t r = 0; r < rows; ++r) {
    for (uint64_t j = 0; j < head; ++j) to[r * stride + j] = from_float<T>(from[r * head + j] * scale);
  }
}
}  // namespace detail

/// Causal multi-head attention. qkv[n, 3c] holds q, k and v of a token side by side, n = sequences x context; out[n, c];
/// lse[n, heads] keeps log(sum(exp(scores))) for the backward, so that no probability is stored.
template <class T>
void attention_forward(const Workers& workers, T* out, float* lse, const T* qkv, uint64_t sequences, uint64_t context,
                       uint64_t heads, uint64_t c) {
  const uint64_t d = c / heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  workers.pool->run(sequences * heads, [&](uint64_t task, std::uint32_t thread) {
    const uint64_t first = task / heads * context, h = task % heads;
    float* q = workers.of(thread);
    float* k = q + padded(context * d);
    float* v = k + padded(context * d);
    float* o = v + padded(context * d);
    float* p = o + padded(context * d);
    const T* base = qkv + first * 3 * c + h * d;
    detail::gather(q, base, context, 3 * c, d, scale);
    detail::gather(k, base + c, context, 3 * c, d);
    detail::gather(v, base + 2 * c, context, 3 * c, d);
    for (uint64_t r0 = 0; r0 < context; r0 += row_block) {
      const uint64_t rows = std::min(row_block, context - r0),
                     columns = r0 + rows;  // what is right of the diagonal is not computed
      gemm(CblasNoTrans, CblasTrans, rows, columns, d, q + r0 * d, d, k, d, 0.0f, p, columns);
      for (uint64_t r = 0; r < rows; ++r) {
        float* row = p + r * columns;
        const uint64_t seen = r0 + r + 1;
        float top = row[0];
        for (uint64_t j = 1; j < seen; ++j) top = std::max(top, row[j]);
        for (uint64_t j = 0; j < seen; ++j) row[j] = exp_nonpositive(row[j] - top);
        const float sum = sum_of(seen, [&](uint64_t j) { return row[j]; });
        for (uint64_t j = 0; j < seen; ++j) row[j] /= sum;
        std::fill(row + seen, row + columns, 0.0f);
        lse[(first + r0 + r) * heads + h] = top + std::log(sum);
      }
      gemm(CblasNoTrans, CblasNoTrans, rows, d, columns, p, columns, v, d, 0.0f, o + r0 * d, d);
    }
    detail::scatter(out + first * c + h * d, o, context, c, d);
  });
}

/// dqkv[n, 3c] from dout[n, c]. With p the probabilities: dv = p^T do; ds = p (do v^T - sum(do o)); dq = ds k scale; dk = ds^T q scale.
template <class T>
void attention_backward(const Workers& workers, float* dqkv, const float* dout, const T* out, const float* lse,
                        const T* qkv, uint64_t sequences, uint64_t context, uint64_t heads, uint64_t c) {
  const uint64_t d = c / heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  workers.pool->run(sequences * heads, [&](uint64_t task, std::uint32_t thread) {
    const uint64_t first = task / heads * context, h = task % heads, piece = padded(context * d);
    float* q = workers.of(thread);
    float *k = q + piece, *v = k + piece, *o = v + piece, *dO = o + piece, *dq = dO + piece, *dk = dq + piece,
          *dv = dk + piece;
    float *p = dv + piece, *dp = p + padded(row_block * context);
    const T* base = qkv + first * 3 * c + h * d;
    detail::gather(q, base, context, 3 * c, d, scale);
    detail::gather(k, base + c, context, 3 * c, d);
    detail::gather(v, base + 2 * c, context, 3 * c, d);
    detail::gather(o, out + first * c + h * d, context, c, d);
    detail::gather(dO, dout + first * c + h * d, context, c, d);
    std::fill_n(dk, context * d, 0.0f);
    std::fill_n(dv, context * d, 0.0f);
    for (uint64_t r0 = 0; r0 < context; r0 += row_block) {
      const uint64_t rows = std::min(row_block, context - r0), columns = r0 + rows;
      gemm(CblasNoTrans, CblasTrans, rows, columns, d, q + r0 * d, d, k, d, 0.0f, p, columns);
      gemm(CblasNoTrans, CblasTrans, rows, columns, d, dO + r0 * d, d, v, d, 0.0f, dp, columns);
      for (uint64_t r = 0; r < rows; ++r) {
        float *row = p + r * columns, *drow = dp + r * columns;
        const uint64_t seen = r0 + r + 1;
        const float norm = lse[(first + r0 + r) * heads + h];
        const float dot = sum_of(d, [&](uint64_t j) { return dO[(r0 + r) * d + j] * o[(r0 + r) * d + j]; });
        for (uint64_t j = 0; j < seen; ++j) row[j] = exp_nonpositive(row[j] - norm);
        for (uint64_t j = 0; j < seen; ++j) drow[j] = row[j] * (drow[j] - dot);
        std::fill(row + seen, row + columns, 0.0f);
        std::fill(drow + seen, drow + columns, 0.0f);
      }
      gemm(CblasTrans, CblasNoTrans, columns, d, rows, p, columns, dO + r0 * d, d, 1.0f, dv, d);
      gemm(CblasNoTrans, CblasNoTrans, rows, d, columns, dp, columns, k, d, 0.0f, dq + r0 * d, d);
      gemm(CblasTrans, CblasNoTrans, columns, d, rows, dp, columns, q + r0 * d, d, 1.0f, dk, d);  // q carries the scale
    }
    float* to = dqkv + first * 3 * c + h * d;
    detail::scatter(to, dq, context, 3 * c, d, scale);
    detail::scatter(to + c, dk, context, 3 * c, d);
    detail::scatter(to + 2 * c, dv, context, 3 * c, d);
  });
}

// ---------------------------------------------------------------------------------------------------- elementwise

inline constexpr float gelu_scale = 0.7978845608f;  // sqrt(2 / pi)

/// GPT-2's GELU, in its tanh form: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
template <class T>
void gelu_forward(const Workers& workers, T* y, const T* x, uint64_t count) {
  detail::in_pieces(workers, count, element_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      const float a = to_float(x[i]);
      y[i] = from_float<T>(0.5f * a * (1.0f + tanh_fast(gelu_scale * (a + 0.044715f * a * a * a))));
    }
  });
}

/// d *= gelu'(x), in place
template <class T>
void gelu_backward(const Workers& workers, float* d, const T* x, uint64_t count) {
  detail::in_pieces(workers, count, element_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) {
      const float a = to_float(x[i]);
      const float t = tanh_fast(gelu_scale * (a + 0.044715f * a * a * a));
      d[i] *= 0.5f * (1.0f + t) + 0.5f * a * (1.0f - t * t) * gelu_scale * (1.0f + 3.0f * 0.044715f * a * a);
    }
  });
}

/// y = a + b
template <class T>
void add(const Workers& workers, T* y, const T* a, const T* b, uint64_t count) {
  detail::in_pieces(workers, count, element_block, [=](uint64_t first, uint64_t last) {
    for (uint64_t i = first; i < last; ++i) y[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  });
}

// ---------------------------------------------------------------------------------------------------- the head

/// Turns rows of logits[n, v] into losses[n] = -log softmax(logits)[target] and, where `dscale` is not 0, the logits into
/// their gradient dscale (softmax - onehot). Double sums: with 50,257 terms an fp32 sum loses bits.
inline void cross_entropy(const Workers& workers, float* logits, float* losses, const std::uint16_t* targets,
                          uint64_t n, uint64_t v, float dscale) {
  workers.pool->run(n, [&](uint64_t i, std::uint32_t) {
    float* row = logits + i * v;
    float top = row[0];
    for (uint64_t j = 1; j < v; ++j) top = std::max(top, row[j]);
    const float at_target = row[targets[i]] - top;
    for (uint64_t j = 0; j < v; ++j) row[j] = exp_nonpositive(row[j] - top);
    double sum = 0;
    for (uint64_t j = 0; j < v; ++j) sum += static_cast<double>(row[j]);
    losses[i] = static_cast<float>(std::log(sum)) - at_target;
    if (dscale == 0.0f) return;
    const float factor = dscale / static_cast<float>(sum);
    for (uint64_t j = 0; j < v; ++j) row[j] *= factor;
    row[targets[i]] -= dscale;
  });
}

}  // namespace gpt
