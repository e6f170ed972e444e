// Disentangled attention of consecutive queries on a CPU, forward and backward, in float32.
//
// One call computes some heads of all rows. A block is one head of one row, some queries and the
// keys that they see; its scores S stay in the second-level cache. With c = j - i + (length - 1)
// the column of a distance, M the dropout mask, f its scale and o the output:
//
//     S[i][j] = q_i . k_j + q_i . c2p[c] + k_j . p2c[c'],    c' = i - j + (length - 1)
//     P = softmax(S)      o = f (P * M) v
//     dv += f (P * M)^T do      G = f (P * M) * (do v^T)      dS = G - P rowsum(G)
//
// Queries and the p2c table arrive with the scale of the scores. Every product is a call of
// `product`, whose operands have any strides: the elements of one column c lie on a diagonal of S,
// where the distance between rows is one element more than a row. No product of a position term is
// wasted, and nothing is gathered or scattered. A tile of kRows rows starts up to kRows - 1 columns
// before and ends as many after the elements it needs, so S has unused elements around it; in dS,
// they are zero.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;
#else
constexpr int kLanes = 8, kVectors = 2;
#endif
constexpr int kRows = 6;                      // of a register tile
constexpr int64_t kPad = 32;                  // unused elements (rows) on each side of a block
constexpr int64_t kBlockScores = 1 << 16;     // about; two buffers of it fit the cache
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

// Random words of a row, see dropout_bits; their bytes in memory order belong to four columns.
inline void fill_words(uint32_t row, int64_t first, int64_t count, uint32_t* words) {
  for (int64_t w = 0; w < count; ++w)
    words[w] = mix(row ^ (0x9e3779b9u * static_cast<uint32_t>(first + w)));
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

extern "C" {

// Token t, head h of a tensor begins at data[t * token + h * head].
struct Tokens {
  float* data;
  int64_t token, head;
};

struct Call {
  int64_t rows, heads, head_dim, length;  // heads: of this call; length: of the longest row
  int64_t all_heads;                      // of row_keys and lse, which begin at the first of ours
  const int64_t* starts;                  // [rows], first token
  const int64_t* lengths;                 // [rows], tokens
  const int32_t* first_key;               // [all tokens], first visible key; null: all are visible
  const int32_t* last_key;                // [all tokens], end of the visible keys
  const int32_t* row_keys;                // [rows, all_heads, length], see dropout_bits; null: none
  int32_t threshold;                      // bytes below are dropped
  float scale, keep_scale;
  Tokens q, k, v, out;
  const float* c2p;  // [heads, 2 * length - 1, head_dim]; null: no such term
  const float* p2c;  // the same, with the scale
  float* lse;        // [rows, all_heads, length]; written by forward, read by backward
  Tokens d_out, d_q, d_k, d_v;
  float *d_c2p, *d_p2c;  // like the tables, zeros at first
};
}

namespace {

// Position table of a head: rows with zeros around them, and their transpose.
struct HeadTable {
  Buffer rows_, columns_, gradient_;
  const float* rows = nullptr;     // [2 * length - 1, head_dim]
  const float* columns = nullptr;  // [head_dim, width]
  float* gradient = nullptr;
  int64_t width = 0;

  void lay_out(const float* table, int64_t count, int64_t dim) {
    if (!table) return;
    const int64_t margin = kPad * dim;
    float* to = rows_.get(count * dim + 2 * margin) + margin;
    std::memcpy(to, table, count * dim * 4);
    rows = to;
    width = count + 2 * kPad;
    float* transposed = columns_.get(dim * width) + kPad;
    transposed_copy(table, count, dim, dim, transposed, width);
    columns = transposed;
  }

  void clear_gradient(int64_t count, int64_t dim) {
    if (!rows) return;
    const int64_t margin = kPad * dim;
    gradient = gradient_.get(count * dim + 2 * margin) + margin;
    std::memset(gradient - margin, 0, (count * dim + 2 * margin) * 4);
  }
};

struct Block {
  int64_t first, queries;    // queries first ... first + queries - 1 of the row
  int64_t key, keys_end;     // keys that any of them sees
  int64_t keys() const { return keys_end - key; }
};

class Worker {
 public:
  explicit Worker(const Call& call) : call_(call), dim_(call.head_dim) {}

  void forward() {
    for_rows([&](int64_t row, int64_t head) {
      for_blocks(row, [&](const Block& b) { forward_block(row, head, b); });
    }, false);
  }

  void backward() {
    for_rows([&](int64_t row, int64_t head) {
      const int64_t n = call_.lengths[row];
      transpose(call_.v, row, head, n, v_columns_, v_width_);
      d_k_ = d_k_buffer_.get(n * dim_);
      d_v_ = d_v_buffer_.get(n * dim_);
      std::memset(d_k_, 0, n * dim_ * 4);
      std::memset(d_v_, 0, n * dim_ * 4);
      for_blocks(row, [&](const Block& b) { backward_block(row, head, b); });
      write(d_k_, n, row, head, call_.d_k, 1.0f);
      write(d_v_, n, row, head, call_.d_v, call_.keep_scale);
    }, true);
  }

 private:
  template <class F>
  void for_rows(F&& f, bool gradients) {
    const int64_t count = 2 * call_.length - 1;
    for (int64_t head = 0; head < call_.heads; ++head) {
      const int64_t at = head * count * dim_;
      c2p_.lay_out(call_.c2p ? call_.c2p + at : nullptr, count, dim_);
      p2c_.lay_out(call_.p2c ? call_.p2c + at : nullptr, count, dim_);
      if (gradients) {
        c2p_.clear_gradient(count, dim_);
        p2c_.clear_gradient(count, dim_);
      }
      for (int64_t row = 0; row < call_.rows; ++row) {
        const int64_t n = call_.lengths[row];
        if (n == 0) continue;
        q_ = read(call_.q, row, head, n, q_rows_, call_.scale);
        k_ = read(call_.k, row, head, n, k_rows_, 1.0f);
        v_ = read(call_.v, row, head, n, v_rows_, 1.0f);
        transpose(call_.k, row, head, n, k_columns_, k_width_);
        f(row, head);
      }
      if (!gradients) continue;
      if (call_.d_c2p) std::memcpy(call_.d_c2p + at, c2p_.gradient, count * dim_ * 4);
      if (call_.d_p2c) std::memcpy(call_.d_p2c + at, p2c_.gradient, count * dim_ * 4);
    }
  }

  template <class F>
  void for_blocks(int64_t row, F&& f) {
    const int64_t n = call_.lengths[row];
    const int64_t parts = std::max<int64_t>(1, (n * n + kBlockScores / 2) / kBlockScores);
    const int64_t size = round_up((n + parts - 1) / parts, kRows);
    for (int64_t first = 0; first < n; first += size) {
      Block b{first, std::min(size, n - first), 0, n};
      if (call_.first_key) {
        const int64_t token = call_.starts[row] + first;
        b.key = n;
        b.keys_end = 0;
        for (int64_t i = 0; i < b.queries; ++i) {
          if (call_.first_key[token + i] >= call_.last_key[token + i]) continue;
          b.key = std::min<int64_t>(b.key, call_.first_key[token + i]);
          b.keys_end = std::max<int64_t>(b.keys_end, call_.last_key[token + i]);
        }
        if (b.key >= b.keys_end) b.key = b.keys_end = 0;
      }
      f(b);
    }
  }

  const float* at(const Tokens& x, int64_t row, int64_t head) const {
    return x.data + call_.starts[row] * x.token + head * x.head;
  }

  float* read(const Tokens& x, int64_t row, int64_t head, int64_t n, Buffer& buffer, float factor) {
    const float* from = at(x, row, head);
    float* to = buffer.get(n * dim_);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < dim_; ++d) to[i * dim_ + d] = from[i * x.token + d] * factor;
    return to;
  }

  void write(const float* from, int64_t n, int64_t row, int64_t head, const Tokens& x,
             float factor) {
    float* to = const_cast<float*>(at(x, row, head));
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < dim_; ++d) to[i * x.token + d] = from[i * dim_ + d] * factor;
  }

  void transpose(const Tokens& x, int64_t row, int64_t head, int64_t n, Buffer& buffer,
                 int64_t& width) {
    const float* from = at(x, row, head);
    width = round_up(n, kLanes) + kLanes * kVectors;
    transposed_copy(from, n, x.token, dim_, buffer.get(dim_ * width), width);
  }

  // Scores of a block: row i of s_ is query first + i, column j - key is key j.
  void scores(const Block& b) {
    const int64_t keys = b.keys(), zero = call_.length - 1;
    s_width_ = round_up(keys, kLanes) + 2 * kPad;
    s_ = s_buffer_.get((b.queries + 2 * kRows) * s_width_) + kRows * s_width_ + kPad;
    product(b.queries, keys, dim_, q_ + b.first * dim_, dim_, 1, k_columns_.get(0) + b.key,
            k_width_, s_, s_width_, false);
    if (c2p_.rows) {
      for_tiles(0, b.queries, [&](int64_t m, auto r) {
        constexpr int R = decltype(r)::value;
        // The last row of the tile begins at the first key; the others before it.
        const int64_t column = b.key - (b.first + m + R - 1) + zero;
        row_of_tiles<R>(keys + R - 1, dim_, q_ + (b.first + m) * dim_, dim_, 1,
                        c2p_.columns + column, c2p_.width, s_ + m * s_width_ - (R - 1),
                        s_width_ + 1, true);
      });
    }
    if (!p2c_.rows) return;
    t_width_ = round_up(b.queries, kLanes) + 2 * kPad;
    t_ = t_buffer_.get((keys + 2 * kLanes) * t_width_) + kPad;
    for_tiles(0, keys, [&](int64_t m, auto r) {
      constexpr int R = decltype(r)::value;
      const int64_t column = b.first - (b.key + m + R - 1) + zero;
      row_of_tiles<R>(b.queries + R - 1, dim_, k_ + (b.key + m) * dim_, dim_, 1,
                      p2c_.columns + column, p2c_.width, t_ + m * t_width_ - (R - 1),
                      t_width_ + 1, false);
    });
    add_transposed(b.queries, keys);
  }

  // s[i][j] += t[j][i], in squares that are transposed in registers.
  void add_transposed(int64_t queries, int64_t keys) {
    for (int64_t i = 0; i < queries; i += kLanes) {
      const int64_t rows = std::min<int64_t>(kLanes, queries - i);
      for (int64_t j = 0; j < keys; j += kLanes) {
        Floats x[kLanes];
        for (int r = 0; r < kLanes; ++r) x[r] = load(t_ + (j + r) * t_width_ + i);
        transpose_square(x);
        for (int64_t r = 0; r < rows; ++r) {
          float* to = s_ + (i + r) * s_width_ + j;
          store(to, load(to) + x[r]);
        }
      }
    }
  }

  // Bounds of the visible keys of a query, as columns of the block.
  void visible(int64_t row, const Block& b, int64_t i, int32_t& first, int32_t& last) const {
    first = 0;
    last = static_cast<int32_t>(b.keys());
    if (!call_.first_key) return;
    const int64_t token = call_.starts[row] + b.first + i;
    first = static_cast<int32_t>(std::max<int64_t>(0, call_.first_key[token] - b.key));
    last = static_cast<int32_t>(std::min<int64_t>(last, call_.last_key[token] - b.key));
  }

  // Random bytes of a query for the block's keys; null without dropout.
  const uint8_t* random_bytes(int64_t row, int64_t head, const Block& b, int64_t i) {
    if (!call_.row_keys) return nullptr;
    const uint32_t state = static_cast<uint32_t>(
        call_.row_keys[(row * call_.all_heads + head) * call_.length + b.first + i]);
    const int64_t first = b.key / 4, count = (b.keys_end + 3) / 4 - first;
    auto* words = reinterpret_cast<uint32_t*>(word_buffer_.get(count + kLanes));
    fill_words(state, first, count, words);
    return reinterpret_cast<const uint8_t*>(words) + b.key % 4;
  }

  Ints kept(const uint8_t* bytes, int64_t j) const {
    if (!bytes) return Ints{} - 1;
    const Ints value = __builtin_convertvector(*reinterpret_cast<const Bytes*>(bytes + j), Ints);
    return value >= call_.threshold;
  }

  float* lse(int64_t row, int64_t head, int64_t query) const {
    return call_.lse + (row * call_.all_heads + head) * call_.length + query;
  }

  void forward_block(int64_t row, int64_t head, const Block& b) {
    float* out = out_buffer_.get(b.queries * dim_);
    scores(b);
    for (int64_t i = 0; i < b.queries; ++i) {
      float* s = s_ + i * s_width_;
      int32_t first, last;
      visible(row, b, i, first, last);
      *lse(row, head, b.first + i) = first < last
          ? softmax(s, b.keys(), first, last, random_bytes(row, head, b, i))
          : -INFINITY;
      if (first >= last) std::memset(s, 0, b.keys() * 4);
    }
    product(b.queries, dim_, b.keys(), s_, s_width_, 1, v_ + b.key * dim_, dim_, out, dim_, false);
    Tokens to = call_.out;
    to.data += b.first * to.token;
    write(out, b.queries, row, head, to, call_.keep_scale);
  }

  static Ints lane_numbers() {
    Ints x{};
    for (int e = 0; e < kLanes; ++e) x[e] = e;
    return x;
  }

  // Replace scores by probabilities after dropout, without its scale; return the log-sum-exp.
  float softmax(float* s, int64_t keys, int32_t first, int32_t last, const uint8_t* bytes) {
    const Ints lanes = lane_numbers();
    Floats most = all(kLowest);
    for (int64_t j = 0; j < keys; j += kLanes) {
      const Ints number = lanes + static_cast<int32_t>(j);
      const Floats x = (number >= first) & (number < last) ? load(s + j) : all(kLowest);
      most = x > most ? x : most;
    }
    float largest = most[0];
    for (int e = 1; e < kLanes; ++e) largest = std::max(largest, most[e]);
    Floats total{};
    for (int64_t j = 0; j < keys; j += kLanes) {
      const Ints number = lanes + static_cast<int32_t>(j);
      const Floats e = exponential(load(s + j) - largest);
      const Floats p = (number >= first) & (number < last) ? e : Floats{};
      total += p;
      store(s + j, p);
    }
    const float norm = sum(total), factor = 1.0f / norm;
    for (int64_t j = 0; j < keys; j += kLanes)
      store(s + j, kept(bytes, j) ? load(s + j) * factor : Floats{});
    return largest + std::log(norm);
  }

  void backward_block(int64_t row, int64_t head, const Block& b) {
    const int64_t keys = b.keys();
    Tokens from = call_.d_out;
    from.data += b.first * from.token;
    float* d_o = read(from, row, head, b.queries, d_o_rows_, 1.0f);
    float* d_q = out_buffer_.get(b.queries * dim_);
    scores(b);
    // Zeros around dS are read by the tiles of the position terms.
    const int64_t size = (b.queries + 2 * kRows) * s_width_;
    float* whole = g_buffer_.get(size);
    std::memset(whole, 0, kRows * s_width_ * 4);
    g_ = whole + kRows * s_width_ + kPad;
    std::memset(g_ + b.queries * s_width_ - kPad, 0, kRows * s_width_ * 4);
    product(b.queries, keys, dim_, d_o, dim_, 1, v_columns_.get(0) + b.key, v_width_, g_, s_width_,
            false);
    for (int64_t i = 0; i < b.queries; ++i) {
      float *s = s_ + i * s_width_, *g = g_ + i * s_width_;
      int32_t first, last;
      visible(row, b, i, first, last);
      softmax_gradient(s, g, keys, first, last, *lse(row, head, b.first + i),
                       random_bytes(row, head, b, i));
      std::memset(g - kPad, 0, kPad * 4);
      std::memset(g + keys, 0, (s_width_ - kPad - keys) * 4);
    }
    const float* q = q_ + b.first * dim_;
    product(keys, dim_, b.queries, s_, 1, s_width_, d_o, dim_, d_v_ + b.key * dim_, dim_, true);
    product(keys, dim_, b.queries, g_, 1, s_width_, q, dim_, d_k_ + b.key * dim_, dim_, true);
    product(b.queries, dim_, keys, g_, s_width_, 1, k_ + b.key * dim_, dim_, d_q, dim_, false);
    c2p_gradients(b, q, d_q);
    p2c_gradients(b);
    Tokens to = call_.d_q;
    to.data += b.first * to.token;
    write(d_q, b.queries, row, head, to, call_.scale);
  }

  // Turn scores s into probabilities after dropout, and g = do v^T into the scores' gradient.
  void softmax_gradient(float* s, float* g, int64_t keys, int32_t first, int32_t last, float lse,
                        const uint8_t* bytes) {
    const Ints lanes = lane_numbers();
    Floats total{};
    for (int64_t j = 0; j < keys; j += kLanes) {
      const Ints number = lanes + static_cast<int32_t>(j);
      const Ints is_visible = (number >= first) & (number < last);
      const Floats p = is_visible ? exponential(load(s + j) - lse) : Floats{};
      const Floats value = is_visible & kept(bytes, j) ? load(g + j) * call_.keep_scale : Floats{};
      total += p * value;
      store(s + j, p);
      store(g + j, value);
    }
    const float mean = sum(total);
    for (int64_t j = 0; j < keys; j += kLanes) {
      const Floats p = load(s + j);
      store(g + j, p * (load(g + j) - mean));
      store(s + j, kept(bytes, j) ? p : Floats{});
    }
  }

  void c2p_gradients(const Block& b, const float* q, float* d_q) {
    if (!c2p_.rows) return;
    const int64_t keys = b.keys(), zero = call_.length - 1;
    for_tiles(0, b.queries, [&](int64_t m, auto r) {
      constexpr int R = decltype(r)::value;
      const int64_t column = b.key - (b.first + m + R - 1) + zero;
      row_of_tiles<R>(dim_, keys + R - 1, g_ + m * s_width_ - (R - 1), s_width_ + 1, 1,
                      c2p_.rows + column * dim_, dim_, d_q + m * dim_, dim_, true);
    });
    // Column c of query i is key c - zero + i.
    const int64_t begin = b.key - (b.first + b.queries - 1) + zero;
    const int64_t end = b.keys_end - b.first + zero;
    for_tiles(begin, end, [&](int64_t c, auto r) {
      constexpr int R = decltype(r)::value;
      const int64_t offset = c - zero + b.first - b.key;  // column of S of query 0 and row 0
      const int64_t from = std::max<int64_t>(0, -offset - (R - 1));
      const int64_t to = std::min<int64_t>(b.queries, keys - offset);
      row_of_tiles<R>(dim_, to - from, g_ + from * s_width_ + offset + from, 1, s_width_ + 1,
                      q + from * dim_, dim_, c2p_.gradient + c * dim_, dim_, true);
    });
  }

  void p2c_gradients(const Block& b) {
    if (!p2c_.rows) return;
    const int64_t keys = b.keys(), zero = call_.length - 1;
    for_tiles(0, keys, [&](int64_t m, auto r) {
      constexpr int R = decltype(r)::value;
      const int64_t column = b.first - (b.key + m + R - 1) + zero;
      row_of_tiles<R>(dim_, b.queries + R - 1, g_ - (R - 1) * s_width_ + m, s_width_ + 1, s_width_,
                      p2c_.rows + column * dim_, dim_, d_k_ + (b.key + m) * dim_, dim_, true);
    });
    // Column c of key j is query c - zero + j.
    const int64_t begin = b.first - (b.keys_end - 1) + zero;
    const int64_t end = b.first + b.queries - b.key + zero;
    for_tiles(begin, end, [&](int64_t c, auto r) {
      constexpr int R = decltype(r)::value;
      const int64_t offset = c - zero + b.key - b.first;  // row of S of key 0 and row 0
      const int64_t from = std::max<int64_t>(0, -offset - (R - 1));
      const int64_t to = std::min<int64_t>(keys, b.queries - offset);
      row_of_tiles<R>(dim_, to - from, g_ + (from + offset) * s_width_ + from, s_width_,
                      s_width_ + 1, k_ + (b.key + from) * dim_, dim_, p2c_.gradient + c * dim_,
                      dim_, true);
    });
  }

  const Call& call_;
  const int64_t dim_;
  HeadTable c2p_, p2c_;
  Buffer q_rows_, k_rows_, v_rows_, d_o_rows_, k_columns_, v_columns_, s_buffer_, t_buffer_,
      g_buffer_, out_buffer_, d_k_buffer_, d_v_buffer_, word_buffer_;
  float *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *s_ = nullptr, *t_ = nullptr, *g_ = nullptr,
        *d_k_ = nullptr, *d_v_ = nullptr;
  int64_t k_width_ = 0, v_width_ = 0, s_width_ = 0, t_width_ = 0;
};

}  // namespace

extern "C" {

// out[r][j] = residual[r][j] + (kept ? scale * x[r][j] : 0), see dropout_bits; residual may be null.
void dropout(const float* x, const float* residual, float* out, const int32_t* row_keys,
             int64_t rows, int64_t features, int32_t threshold, float scale) {
  std::unique_ptr<uint32_t[]> words(new uint32_t[(features + 3) / 4]);
  const auto* bytes = reinterpret_cast<const uint8_t*>(words.get());
  for (int64_t r = 0; r < rows; ++r, x += features, out += features) {
    fill_words(static_cast<uint32_t>(row_keys[r]), 0, (features + 3) / 4, words.get());
    for (int64_t j = 0; j < features; ++j) out[j] = bytes[j] >= threshold ? x[j] * scale : 0.0f;
    if (!residual) continue;
    for (int64_t j = 0; j < features; ++j) out[j] += residual[j];
    residual += features;
  }
}
}

extern "C" void attention_forward(const Call* call) { Worker(*call).forward(); }
extern "C" void attention_backward(const Call* call) { Worker(*call).backward(); }
