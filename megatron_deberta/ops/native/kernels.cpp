// Disentangled attention on a CPU, forward and backward, in float32.
//
// One call computes some heads of all rows. A block is one head of one row, some queries and the
// keys that they see; its scores S stay in the second-level cache. With c = j - i + (length - 1)
// the column of a distance, M the dropout mask, f its scale and o the output:
//
//     S[i][j] = q_i . k_j + q_i . c2p[c] + k_j . p2c[c'],    c' = i - j + (length - 1)
//     P = softmax(S)      o = f (P * M) v
//     dv += f (P * M)^T do      G = f (P * M) * (do v^T)      dS = G - P rowsum(G)
//
// Queries and the p2c table are multiplied by the scale of the scores. Every product is a call of
// `product`, whose operands have any strides: the elements of one column c lie on a diagonal of S,
// where the distance between rows is one element more than a row. No product of a position term is
// wasted, and nothing is gathered or scattered. A tile of kRows rows starts up to kRows - 1 columns
// before and ends as many after the elements it needs, so S has unused elements around it; in dS,
// they are zero. Gathered queries stand anywhere, so their position terms are computed one by one.

#include "vectors.h"

#include <vector>

namespace {

constexpr int64_t kBlockScores = 1 << 16;  // about; a few buffers of it fit the cache

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
  int64_t queries;                        // of every row if gathered, else `length`
  const int32_t* positions;               // [rows, queries], of gathered queries; null: all, in order
  const int32_t* first_key;               // [all queries], first visible key; null: all are visible
  const int32_t* last_key;                // [all queries], end of the visible keys
  const int32_t* row_keys;                // [rows, all_heads, queries], of pairs; null: no dropout
  int32_t threshold;                      // bytes below are dropped
  float scale, keep_scale;
  Tokens q, k, v, out;
  Tokens c2p, p2c;  // position tables, a token being a slot; null: no such term
  const int64_t *c2p_slots, *p2c_slots;  // [2 * length - 1], slot of each column
  float* lse;        // [rows, all_heads, queries]; written by forward, read by backward
  Tokens d_out, d_q, d_k, d_v;
  Tokens d_c2p, d_p2c;  // zeros at first
};
}

namespace {

// Position table of a head: rows with zeros around them, and their transpose.
struct HeadTable {
  Buffer rows_, columns_, gradient_, reversed_;
  const float* rows = nullptr;      // [2 * length - 1, head_dim]
  const float* columns = nullptr;   // [head_dim, width]
  const float* reversed = nullptr;  // the same, from the last column to the first
  float* gradient = nullptr;
  int64_t width = 0;

  void lay_out(const Tokens& table, const int64_t* slots, int64_t head, float factor,
               int64_t count, int64_t dim) {
    if (!table.data) return;
    const int64_t margin = kPad * dim;
    float* to = rows_.get(count * dim + 2 * margin) + margin;
    for (int64_t c = 0; c < count; ++c) {
      const float* from = table.data + slots[c] * table.token + head * table.head;
      for (int64_t d = 0; d < dim; ++d) to[c * dim + d] = from[d] * factor;
    }
    rows = to;
    width = count + 2 * kPad;
    float* transposed = columns_.get(dim * width) + kPad;
    transposed_copy(rows, count, dim, dim, transposed, width);
    columns = transposed;
  }

  void reverse(int64_t count, int64_t dim) {
    if (!rows) return;
    float* to = reversed_.get(dim * width) + kPad;
    for (int64_t d = 0; d < dim; ++d)
      std::reverse_copy(columns + d * width, columns + d * width + count, to + d * width);
    reversed = to;
  }

  void clear_gradient(int64_t count, int64_t dim) {
    if (!rows) return;
    const int64_t margin = kPad * dim;
    gradient = gradient_.get(count * dim + 2 * margin) + margin;
    std::memset(gradient - margin, 0, (count * dim + 2 * margin) * 4);
  }

  // Add the columns' gradients to those of their slots.
  void add_gradient(const Tokens& to, const int64_t* slots, int64_t head, float factor,
                    int64_t count, int64_t dim) const {
    if (!to.data) return;
    for (int64_t c = 0; c < count; ++c) {
      float* slot = to.data + slots[c] * to.token + head * to.head;
      for (int64_t d = 0; d < dim; ++d) slot[d] += gradient[c * dim + d] * factor;
    }
  }
};

struct Block {
  int64_t first, queries;    // queries first ... first + queries - 1 of the row
  int64_t key, keys_end;     // keys that any of them sees
  int64_t keys() const { return keys_end - key; }
};

// Random words of a pair of queries.
struct Words {
  uint32_t state = 0;
  int64_t first = 0, count = -1;
  Buffer buffer;
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
      transpose(keys_of(call_.v, row), head, n, v_columns_, v_width_);
      d_k_ = d_k_buffer_.get(n * dim_);
      d_v_ = d_v_buffer_.get(n * dim_);
      std::memset(d_k_, 0, n * dim_ * 4);
      std::memset(d_v_, 0, n * dim_ * 4);
      for_blocks(row, [&](const Block& b) { backward_block(row, head, b); });
      write(d_k_, n, head, keys_of(call_.d_k, row), 1.0f);
      write(d_v_, n, head, keys_of(call_.d_v, row), call_.keep_scale);
    }, true);
  }

 private:
  template <class F>
  void for_rows(F&& f, bool gradients) {
    const int64_t count = 2 * call_.length - 1;
    for (int64_t head = 0; head < call_.heads; ++head) {
      c2p_.lay_out(call_.c2p, call_.c2p_slots, head, 1.0f, count, dim_);
      p2c_.lay_out(call_.p2c, call_.p2c_slots, head, call_.scale, count, dim_);
      if (call_.positions) p2c_.reverse(count, dim_);
      if (gradients) {
        c2p_.clear_gradient(count, dim_);
        p2c_.clear_gradient(count, dim_);
      }
      for (int64_t row = 0; row < call_.rows; ++row) {
        const int64_t n = call_.lengths[row];
        if (n == 0) continue;
        q_ = read(queries_of(call_.q, row, 0), head, num_queries(row), q_rows_, call_.scale);
        k_ = read(keys_of(call_.k, row), head, n, k_rows_, 1.0f);
        v_ = read(keys_of(call_.v, row), head, n, v_rows_, 1.0f);
        transpose(keys_of(call_.k, row), head, n, k_columns_, k_width_);
        f(row, head);
      }
      if (!gradients) continue;
      c2p_.add_gradient(call_.d_c2p, call_.c2p_slots, head, 1.0f, count, dim_);
      p2c_.add_gradient(call_.d_p2c, call_.p2c_slots, head, call_.scale, count, dim_);
    }
  }

  template <class F>
  void for_blocks(int64_t row, F&& f) {
    const int64_t n = call_.lengths[row], queries = num_queries(row);
    const int64_t parts = std::max<int64_t>(1, (n * queries + kBlockScores / 2) / kBlockScores);
    const int64_t size = round_up((queries + parts - 1) / parts, kRows);
    for (int64_t first = 0; first < queries; first += size) {
      Block b{first, std::min(size, queries - first), 0, n};
      if (call_.first_key) {
        const int64_t token = first_query(row) + first;
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

  int64_t num_queries(int64_t row) const {
    return call_.positions ? call_.queries : call_.lengths[row];
  }

  int64_t first_query(int64_t row) const {
    return call_.positions ? row * call_.queries : call_.starts[row];
  }

  // Tokens of a row, from a query or from the first key.
  Tokens queries_of(Tokens x, int64_t row, int64_t query) const {
    x.data += (first_query(row) + query) * x.token;
    return x;
  }

  Tokens keys_of(Tokens x, int64_t row) const {
    x.data += call_.starts[row] * x.token;
    return x;
  }

  float* read(const Tokens& x, int64_t head, int64_t n, Buffer& buffer, float factor) {
    const float* from = x.data + head * x.head;
    float* to = buffer.get(n * dim_);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < dim_; ++d) to[i * dim_ + d] = from[i * x.token + d] * factor;
    return to;
  }

  void write(const float* from, int64_t n, int64_t head, const Tokens& x, float factor) {
    float* to = x.data + head * x.head;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < dim_; ++d) to[i * x.token + d] = from[i * dim_ + d] * factor;
  }

  void transpose(const Tokens& x, int64_t head, int64_t n, Buffer& buffer, int64_t& width) {
    width = round_up(n, kLanes) + kLanes * kVectors;
    transposed_copy(x.data + head * x.head, n, x.token, dim_, buffer.get(dim_ * width), width);
  }

  // Scores of a block: row i of s_ is query first + i, column j - key is key j.
  void scores(int64_t row, const Block& b) {
    const int64_t keys = b.keys(), zero = call_.length - 1;
    s_width_ = round_up(keys, kLanes) + 2 * kPad;
    s_ = s_buffer_.get((b.queries + 2 * kRows) * s_width_) + kRows * s_width_ + kPad;
    product(b.queries, keys, dim_, q_ + b.first * dim_, dim_, 1, k_columns_.get(0) + b.key,
            k_width_, s_, s_width_, false);
    if (call_.positions) {
      for (int64_t i = 0; i < b.queries; ++i) {
        // Key j is in column - key + j of the c2p table and of the reversed p2c table.
        const int64_t column = b.key - position(row, b, i) + zero;
        float* s = s_ + i * s_width_;
        if (c2p_.rows)
          add_row<false>(keys, dim_, q_ + (b.first + i) * dim_, 1, c2p_.columns + column,
                         c2p_.width, s);
        if (p2c_.rows)
          add_row<true>(keys, dim_, k_columns_.get(0) + b.key, k_width_, p2c_.reversed + column,
                        p2c_.width, s);
      }
      return;
    }
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

  // Position of a gathered query; padding queries (-1) see no key, so any is valid for them.
  int64_t position(int64_t row, const Block& b, int64_t i) const {
    return std::max(0, call_.positions[row * call_.queries + b.first + i]);
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
    const int64_t token = first_query(row) + b.first + i;
    first = static_cast<int32_t>(std::max<int64_t>(0, call_.first_key[token] - b.key));
    last = static_cast<int32_t>(std::min<int64_t>(last, call_.last_key[token] - b.key));
  }

  // Random bytes of a query for the block's keys; null without dropout.
  const uint8_t* random_bytes(int64_t row, int64_t head, const Block& b, int64_t i) {
    if (!call_.row_keys) return nullptr;
    const uint32_t state = static_cast<uint32_t>(
        call_.row_keys[(row * call_.all_heads + head) * call_.queries + b.first + i]);
    const int64_t first = b.key / 16 * 8, count = (b.keys_end + 15) / 16 * 8 - first;
    // The query eight rows later has the same words.
    const int64_t at = call_.positions ? position(row, b, i) : b.first + i;
    Words& words = words_[at % 8];
    if (words.state != state || words.first != first || words.count != count) {
      words = {state, first, count, std::move(words.buffer)};
      fill_words(state, first, count, reinterpret_cast<uint32_t*>(words.buffer.get(count)));
    }
    // Two bytes for each word.
    auto* bytes = reinterpret_cast<uint8_t*>(byte_buffer_.get(count / 2 + kLanes));
    pair_bytes(reinterpret_cast<const uint32_t*>(words.buffer.get(count)), count, at / 8 % 2, bytes);
    return bytes + b.key % 16;
  }

  Ints kept(const uint8_t* bytes, int64_t j) const {
    if (!bytes) return Ints{} - 1;
    const Ints value = __builtin_convertvector(*reinterpret_cast<const Bytes*>(bytes + j), Ints);
    return value >= call_.threshold;
  }

  float* lse(int64_t row, int64_t head, int64_t query) const {
    return call_.lse + (row * call_.all_heads + head) * call_.queries + query;
  }

  void forward_block(int64_t row, int64_t head, const Block& b) {
    float* out = out_buffer_.get(b.queries * dim_);
    scores(row, b);
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
    write(out, b.queries, head, queries_of(call_.out, row, b.first), call_.keep_scale);
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
    float* d_o = read(queries_of(call_.d_out, row, b.first), head, b.queries, d_o_rows_, 1.0f);
    float* d_q = out_buffer_.get(b.queries * dim_);
    scores(row, b);
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
    if (call_.positions) {
      gathered_gradients(row, b, q, d_q);
    } else {
      c2p_gradients(b, q, d_q);
      p2c_gradients(b);
    }
    write(d_q, b.queries, head, queries_of(call_.d_q, row, b.first), call_.scale);
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

  void gathered_gradients(int64_t row, const Block& b, const float* q, float* d_q) {
    const int64_t keys = b.keys(), zero = call_.length - 1;
    // Query i and key j, counted in the block, are in column j - offsets_[i] + zero of the c2p
    // table and in column offsets_[i] - j + zero of the p2c table.
    offsets_.resize(b.queries);
    for (int64_t i = 0; i < b.queries; ++i) offsets_[i] = position(row, b, i) - b.key;
    if (c2p_.rows) {
      for (int64_t i = 0; i < b.queries; ++i)
        add_row<false>(dim_, keys, g_ + i * s_width_, 1, c2p_.rows + (zero - offsets_[i]) * dim_,
                       dim_, d_q + i * dim_);
      for_columns(b, zero, [&](int64_t c, int64_t i) { return c - zero + offsets_[i]; },
                  [&](int64_t i, int64_t) { return q + i * dim_; }, c2p_.gradient, -1);
    }
    if (!p2c_.rows) return;
    for (int64_t j = 0; j < keys; ++j)
      sum_rows(d_k_ + (b.key + j) * dim_, b.queries, [&](int64_t i, float& factor) {
        factor = g_[i * s_width_ + j];
        return p2c_.rows + (offsets_[i] - j + zero) * dim_;
      });
    for_columns(b, zero, [&](int64_t c, int64_t i) { return zero - c + offsets_[i]; },
                [&](int64_t, int64_t j) { return k_ + (b.key + j) * dim_; }, p2c_.gradient, 1);
  }

  // gradient[c] += sum over queries of dS[i][key(c, i)] * vector(i, key), for all columns of a block.
  template <class Key, class Vector>
  void for_columns(const Block& b, int64_t zero, Key&& key, Vector&& vector, float* gradient,
                   int64_t sign) {
    const auto [least, most] = std::minmax_element(offsets_.begin(), offsets_.end());
    const int64_t last = b.keys() - 1;
    const int64_t begin = zero + (sign > 0 ? *least - last : -*most);
    const int64_t end = zero + (sign > 0 ? *most : last - *least) + 1;
    for (int64_t c = begin; c < end; ++c)
      sum_rows(gradient + c * dim_, b.queries, [&](int64_t i, float& factor) -> const float* {
        const int64_t j = key(c, i);
        if (j < 0 || j > last) return nullptr;
        factor = g_[i * s_width_ + j];
        return vector(i, j);
      });
  }

  // to[d] += sum over i of factor_i * row_i[d]; term(i, factor) returns the row, null to skip it.
  template <class Term>
  void sum_rows(float* to, int64_t count, Term&& term) const {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim_; d += 4 * kLanes) sum_part<4>(to + d, d, count, term);
    for (; d < dim_; d += kLanes) sum_part<1>(to + d, d, count, term);
  }

  template <int V, class Term>
  static void sum_part(float* to, int64_t d, int64_t count, Term&& term) {
    Floats out[V];
    for (int v = 0; v < V; ++v) out[v] = load(to + v * kLanes);
    for (int64_t i = 0; i < count; ++i) {
      float factor;
      const float* row = term(i, factor);
      if (!row) continue;
      for (int v = 0; v < V; ++v) out[v] += factor * load(row + d + v * kLanes);
    }
    for (int v = 0; v < V; ++v) store(to + v * kLanes, out[v]);
  }

  const Call& call_;
  const int64_t dim_;
  HeadTable c2p_, p2c_;
  Buffer q_rows_, k_rows_, v_rows_, d_o_rows_, k_columns_, v_columns_, s_buffer_, t_buffer_,
      g_buffer_, out_buffer_, d_k_buffer_, d_v_buffer_, byte_buffer_;
  Words words_[8];  // of the last queries with each remainder modulo 8
  float *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *s_ = nullptr, *t_ = nullptr, *g_ = nullptr,
        *d_k_ = nullptr, *d_v_ = nullptr;
  int64_t k_width_ = 0, v_width_ = 0, s_width_ = 0, t_width_ = 0;
  std::vector<int64_t> offsets_;
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

// Size of `Call`, which the caller compares with its own definition.
extern "C" int64_t call_size() { return sizeof(Call); }
extern "C" void attention_forward(const Call* call) { Worker(*call).forward(); }
extern "C" void attention_backward(const Call* call) { Worker(*call).backward(); }
