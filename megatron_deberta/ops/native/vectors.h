// Vectors of floats, products of register tiles, exponentials, transposition and buffers.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace {

#if !defined(__AVX2__) || !defined(__FMA__)
#error "the processor has no AVX2 and FMA"
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;
#else
constexpr int kLanes = 8, kVectors = 2;
#endif
constexpr int kRows = 6;                      // of a register tile
constexpr int64_t kPad = 32;                  // unused elements (rows) on each side of a block
constexpr float kLowest = -3.0e38f;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef float FloatsU __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const FloatsU*>(p); }
inline void store(float* p, Floats x) { *reinterpret_cast<FloatsU*>(p) = x; }
inline Floats all(float x) { return x - Floats{}; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline float sum(Floats x) {
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += x[i];
  return s;
}

// Register tile: C[m][n] (+)= sum over k of A[m * a_row + k * a_step] * B[k * b_step + n].
template <int R, int V>
inline void tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b,
                 int64_t b_step, float* c, int64_t c_row, bool add) {
  Floats out[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) out[r][v] = add ? load(c + r * c_row + v * kLanes) : Floats{};
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    Floats row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + v * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) out[r][v] += a[r * a_row] * row[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(c + r * c_row + v * kLanes, out[r][v]);
}

// The same for any number of columns, rounded up to a vector: C and B have that many.
template <int R>
inline void row_of_tiles(int64_t columns, int64_t depth, const float* a, int64_t a_row,
                         int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_row,
                         bool add) {
  int64_t n = 0;
  for (; n + kVectors * kLanes <= columns; n += kVectors * kLanes)
    tile<R, kVectors>(depth, a, a_row, a_step, b + n, b_step, c + n, c_row, add);
  for (; n < columns; n += kLanes)
    tile<R, 1>(depth, a, a_row, a_step, b + n, b_step, c + n, c_row, add);
}

// Call f(first, rows) for tiles of rows, `rows` a compile-time constant.
template <class F>
inline void for_tiles(int64_t first, int64_t last, F&& f) {
  for (; first + kRows <= last; first += kRows) f(first, std::integral_constant<int, kRows>{});
  for (; first + 2 <= last; first += 2) f(first, std::integral_constant<int, 2>{});
  for (; first < last; ++first) f(first, std::integral_constant<int, 1>{});
}

// C[m][n] (+)= sum over k of A[m][k] B[k][n] with any strides of A; columns as in row_of_tiles.
inline void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row,
                    int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_row,
                    bool add) {
  for_tiles(0, rows, [&](int64_t m, auto r) {
    row_of_tiles<decltype(r)::value>(columns, depth, a + m * a_row, a_row, a_step, b, b_step,
                                     c + m * c_row, c_row, add);
  });
}

// One row: c[n] += sum over k of a[k] B[k][n], or of A[k][n] B[k][n]; columns rounded up to a vector.
template <bool kMatrix>
inline void add_row(int64_t columns, int64_t depth, const float* a, int64_t a_step, const float* b,
                    int64_t b_step, float* c) {
  const auto part = [&](int64_t n, auto count) {
    constexpr int V = decltype(count)::value;
    Floats out[V];
    for (int v = 0; v < V; ++v) out[v] = load(c + n + v * kLanes);
    for (int64_t k = 0; k < depth; ++k)
      for (int v = 0; v < V; ++v) {
        const Floats row = load(b + k * b_step + n + v * kLanes);
        if constexpr (kMatrix) out[v] += load(a + k * a_step + n + v * kLanes) * row;
        else out[v] += a[k * a_step] * row;
      }
    for (int v = 0; v < V; ++v) store(c + n + v * kLanes, out[v]);
  };
  int64_t n = 0;
  for (; n + 8 * kLanes <= columns; n += 8 * kLanes) part(n, std::integral_constant<int, 8>{});
  for (; n + 4 * kLanes <= columns; n += 4 * kLanes) part(n, std::integral_constant<int, 4>{});
  for (; n < columns; n += kLanes) part(n, std::integral_constant<int, 1>{});
}

// exp of numbers of at most 0 (about; NaN stays NaN), relative error below 3e-7.
inline Floats exponential(Floats x) {
  x = x < all(-87.0f) ? all(-87.0f) : x;
  const Floats shift = all(12582912.0f);
  const Floats n = (x * 1.44269504088896341f + shift) - shift;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  return p * (Floats)bits;  // reinterprets the bits
}

  inline void transpose_square(Floats (&x)[kLanes]) {
    for (int step = 1; step < kLanes; step *= 2) {
      Ints low{}, high{};  // lanes of the pair (a, b) that form the new a and the new b
      for (int e = 0; e < kLanes; ++e) {
        low[e] = (e & step) ? kLanes + e - step : e;
        high[e] = (e & step) ? kLanes + e : e + step;
      }
      for (int r = 0; r < kLanes; ++r) {
        if (r & step) continue;
        const Floats a = x[r], b = x[r + step];
#if defined(__clang__)
        for (int e = 0; e < kLanes; ++e) {
          x[r][e] = low[e] < kLanes ? a[low[e]] : b[low[e] - kLanes];
          x[r + step][e] = high[e] < kLanes ? a[high[e]] : b[high[e] - kLanes];
        }
#else
        x[r] = __builtin_shuffle(a, b, low);
        x[r + step] = __builtin_shuffle(a, b, high);
#endif
      }
    }
  }

// to[d * width + i] = from[i * step + d] for n vectors of dim features; the rest of a square of
// vectors is filled with copies of the last one.
inline void transposed_copy(const float* from, int64_t n, int64_t step, int64_t dim, float* to,
                            int64_t width) {
  for (int64_t i = 0; i < n; i += kLanes)
    for (int64_t d = 0; d < dim; d += kLanes) {
      Floats x[kLanes];
      for (int64_t r = 0; r < kLanes; ++r) x[r] = load(from + std::min(i + r, n - 1) * step + d);
      transpose_square(x);
      for (int64_t r = 0; r < kLanes; ++r) store(to + (d + r) * width + i, x[r]);
    }
}

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Random words of a row, see dropout_bits. Of hidden states, their bytes in memory order belong to
// four features; of attention, to two queries and two keys.
inline void fill_words(uint32_t row, int64_t first, int64_t count, uint32_t* words) {
  for (int64_t w = 0; w < count; ++w)
    words[w] = mix(row ^ (0x9e3779b9u * static_cast<uint32_t>(first + w)));
}

// Bytes of the first or the second query of a pair, for blocks of 16 keys: each word has those of
// keys k and k + 8.
inline void pair_bytes(const uint32_t* words, int64_t count, int second, uint8_t* bytes) {
  typedef uint32_t Words8 __attribute__((vector_size(32), aligned(4), may_alias));
  typedef uint8_t Bytes8 __attribute__((vector_size(8), aligned(1), may_alias));
  for (int64_t w = 0; w < count; w += 8) {
    const Words8 x = *reinterpret_cast<const Words8*>(words + w) >> (16 * second);
    *reinterpret_cast<Bytes8*>(bytes + 2 * w) = __builtin_convertvector(x, Bytes8);
    *reinterpret_cast<Bytes8*>(bytes + 2 * w + 8) = __builtin_convertvector(x >> 8, Bytes8);
  }
}

// Zeroed buffer with kPad more elements on each side.
struct Buffer {
  std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
  int64_t size = 0;
  float* get(int64_t n) {
    if (n + 2 * kPad > size) {
      size = round_up(n + 2 * kPad, kLanes);
      memory.reset(static_cast<float*>(std::aligned_alloc(64, round_up(size * 4, 64))));
      if (!memory) std::abort();
      std::memset(memory.get(), 0, size * 4);
    }
    return memory.get() + kPad;
  }
};

}  // namespace
