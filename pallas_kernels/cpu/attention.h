// Causal flash attention on tiles of 64 queries and 64 keys, for one instruction set.
//
// Logits of a tile are [key][query]: the queries are the lanes of vectors, so that
// maxima and sums over keys run down the vectors. Inputs are copied tile by tile to
// float32, heads padded with zeros to `width`, a multiple of 16. Queries are scaled by
// log2(e) as well, so that exp2 serves and the log-sum-exp is in base 2.

enum Sight { kHidden, kPartly, kAll };

// Copies up to 64 tokens of a head to [64][width], with zeros after the last.
template <class X>
static void copy_rows(const X* from, int64_t stride, int64_t tokens, int64_t E, int64_t width,
                      float* to) {
  for (int64_t i = 0; i < kTile; ++i, to += width) {
    int64_t e = 0;
    if (i < tokens) {
      const X* row = from + i * stride;
      for (; e + kLanes <= E; e += kLanes) store(to + e, load(row + e));
      for (; e < E; ++e) to[e] = to_float(row[e]);
    }
    for (; e < width; ++e) to[e] = 0;
  }
}

// Copies [64][width] to [width][64], times a factor.
static void transpose(const float* from, int64_t width, float factor, float* to) {
  for (int64_t e = 0; e < width; ++e)
    for (int64_t i = 0; i < kTile; ++i) to[e * kTile + i] = from[i * width + e] * factor;
}

// Writes the first tokens of [64][width] to a head's rows, times a factor.
template <class X>
static void write_rows(const float* from, int64_t width, float factor, int64_t tokens, int64_t E,
                       X* to, int64_t stride) {
  for (int64_t i = 0; i < tokens; ++i, from += width, to += stride) {
    int64_t e = 0;
    for (; e + kLanes <= E; e += kLanes) store(to + e, factor * load(from + e));
    for (; e < E; ++e) from_float(factor * from[e], to + e);
  }
}

// Copies [width][64] to the first tokens of a head's rows, times a number per token.
template <class X>
static void write_transposed(const float* from, const float* factors, int64_t tokens, int64_t E,
                             X* to, int64_t stride) {
  for (int64_t i = 0; i < tokens; ++i)
    for (int64_t e = 0; e < E; ++e)
      from_float(from[e * kTile + i] * factors[i], to + i * stride + e);
}

// The head of one row that a task works on: where its arrays begin.
template <class X>
struct Head {
  const Attention& call;
  int64_t row, head;

  int64_t key_head() const { return head / (call.H / call.K); }
  int64_t query_stride() const { return call.H * call.E; }
  int64_t key_stride() const { return call.K * call.E; }
  int64_t tokens(int64_t tile) const {
    int64_t rest = call.T - tile * kTile;
    return rest < kTile ? rest : kTile;
  }
  template <class Y>
  Y* queries(Y* array, int64_t tile) const {
    return array + (row * call.T + tile * kTile) * query_stride() + head * call.E;
  }
  template <class Y>
  Y* keys(Y* array, int64_t tile) const {
    return array + (row * call.T + tile * kTile) * key_stride() + key_head() * call.E;
  }
  float* per_query(float* array, int64_t tile) const {
    return array + (row * call.H + head) * call.T + tile * kTile;
  }
  float slope() const {
    if (call.slopes == nullptr) return 0;
    // Under vmap every group of rows has a copy of the slopes.
    int64_t group = row / (call.B / call.slope_rows);
    return kLog2E * call.slopes[group * call.H + head];
  }
  void segments(int64_t tile, int32_t* to) const {
    const int32_t* from = call.segments + row * call.T + tile * kTile;
    for (int64_t i = 0, count = tokens(tile); i < kTile; ++i)
      to[i] = from[i < count ? i : count - 1];
  }

  // What the queries of a tile see of a tile of keys no later than it.
  Sight sight(int64_t query_tile, int64_t key_tile) const {
    int64_t distance = (query_tile - key_tile) * kTile;
    if (distance - (kTile - 1) > call.window) return kHidden;
    bool all = query_tile > key_tile && distance + (kTile - 1) <= call.window;
    if (call.segments != nullptr) {
      int32_t low[2], high[2];
      for (int n = 0; n < 2; ++n) {
        int32_t numbers[kTile];
        segments(n ? key_tile : query_tile, numbers);
        low[n] = high[n] = numbers[0];
        for (int32_t number : numbers) {
          low[n] = number < low[n] ? number : low[n];
          high[n] = number > high[n] ? number : high[n];
        }
      }
      if (high[0] < low[1] || high[1] < low[0]) return kHidden;
      all = all && low[0] == high[1] && high[0] == low[1];
    }
    return all ? kAll : kPartly;
  }

  // Adds ALiBi's bias to a tile of logits and puts -inf where a key is hidden.
  void bias(int64_t query_tile, int64_t key_tile, Sight seen, float* logits) const {
    if (call.slopes == nullptr && seen == kAll) return;
    int32_t q[kTile] = {}, k[kTile] = {};
    if (call.segments != nullptr && seen == kPartly) {
      segments(query_tile, q);
      segments(key_tile, k);
    }
    const Vector of_distance = broadcast(-slope());
    const Vector hidden = broadcast(-__builtin_inff());
    const int32_t window = call.window;
    for (int64_t s = 0; s < kTile; ++s) {
      int32_t first = (query_tile - key_tile) * kTile - s;
      for (int64_t j = 0; j < kTile; j += kLanes) {
        Integers distance = counting() + (first + (int32_t)j);
        float* at = logits + s * kTile + j;
        Vector x = load(at) + of_distance * __builtin_convertvector(distance, Vector);
        if (seen == kPartly) {
          Integers visible =
              (distance >= 0) & (distance <= window) & (load_as<Integers>(q + j) == k[s]);
          x = visible ? x : hidden;
        }
        store(at, x);
      }
    }
  }
};

// One tile of queries of one head: o and the log-sum-exp. A pass over the visible tiles
// of keys keeps o [width][64], the maxima and the sums; each tile of keys and values is
// read once per tile of queries.
template <class X>
static void forward_task(const Attention& call, int64_t task, float* scratch) {
  const int64_t tiles = call.tiles(), width = call.width(), heads = call.B * call.H;
  // The last tiles of queries see most keys: they go first.
  const int64_t at = tiles - 1 - task / heads;
  const Head<X> head{call, task % heads / call.H, task % call.H};
  float* queries = scratch;
  float* out = queries + width * kTile;
  float* keys = out + width * kTile;
  float* logits = keys + width * kTile;
  float top[kTile], sum[kTile], factor[kTile];

  copy_rows(head.queries((const X*)call.q, at), head.query_stride(), head.tokens(at), call.E, width,
            keys);
  transpose(keys, width, call.scale * kLog2E, queries);
  for (int64_t i = 0; i < width * kTile; ++i) out[i] = 0;
  for (int64_t i = 0; i < kTile; ++i) top[i] = kLowest, sum[i] = 0;

  for (int64_t key = call.first_key_tile(at); key <= at; ++key) {
    const Sight seen = head.sight(at, key);
    if (seen == kHidden) continue;
    copy_rows(head.keys((const X*)call.k, key), head.key_stride(), head.tokens(key), call.E, width,
              keys);
    product(kTile, kTile, width, keys, width, 1, queries, kTile, logits, kTile, false);
    head.bias(at, key, seen, logits);
    // p = exp2(logits - maximum), and what earlier sums shrink by.
    bool rises = false;
    constexpr int64_t kWide = kTile / kLanes < 4 ? kTile / kLanes : 4;
    for (int64_t j = 0; j < kTile; j += kWide * kLanes) {
      Vector largest[kWide], total[kWide] = {};
#pragma GCC unroll 4
      for (int n = 0; n < kWide; ++n) largest[n] = load(top + j + n * kLanes);
      for (int64_t s = 0; s < kTile; ++s)
#pragma GCC unroll 4
        for (int n = 0; n < kWide; ++n)
          largest[n] = larger(largest[n], load(logits + s * kTile + j + n * kLanes));
      for (int64_t s = 0; s < kTile; ++s)
#pragma GCC unroll 4
        for (int n = 0; n < kWide; ++n) {
          float* at_key = logits + s * kTile + j + n * kLanes;
          Vector p = exp2(load(at_key) - largest[n]);
          store(at_key, p);
          total[n] += p;
        }
#pragma GCC unroll 4
      for (int n = 0; n < kWide; ++n) {
        const int64_t lane = j + n * kLanes;
        store(factor + lane, exp2(load(top + lane) - largest[n]));
        store(top + lane, largest[n]);
        store(sum + lane, load(sum + lane) * load(factor + lane) + total[n]);
      }
    }
    for (int64_t i = 0; i < kTile; ++i) rises |= factor[i] != 1;
    if (rises)
      for (int64_t e = 0; e < width; ++e)
        for (int64_t j = 0; j < kTile; j += kLanes)
          store(out + e * kTile + j, load(out + e * kTile + j) * load(factor + j));
    copy_rows(head.keys((const X*)call.v, key), head.key_stride(), head.tokens(key), call.E, width,
              keys);
    product(width, kTile, kTile, keys, 1, width, logits, kTile, out, kTile, true);
  }

  for (int64_t i = 0; i < kTile; ++i) factor[i] = 1 / sum[i];
  write_transposed(out, factor, head.tokens(at), call.E, head.queries((X*)call.o, at),
                   head.query_stride());
  float* lse = head.per_query(call.lse, at);
  for (int64_t i = 0; i < head.tokens(at); ++i) lse[i] = top[i] + __builtin_log2f(sum[i]);
}

// One key head of one row and every `chunks`-th tile of its keys: dk, dv, and this
// chunk's part of dq, transposed by tiles. The queries that share the key head follow
// one another; q and do are copied once per head, in both orders.
template <class X>
static void backward_task(const Attention& call, int64_t task, float* scratch) {
  const int64_t tiles = call.tiles(), width = call.width(), size = width * kTile;
  const int64_t share = call.H / call.K, chunk = task % call.chunks;
  const int64_t key_head = task / call.chunks % call.K;
  const int64_t row = task / call.chunks / call.K;
  float* dk = scratch;
  float* dv = dk + tiles * size;
  float* q = dv + tiles * size;
  float* turned_q = q + tiles * size;
  float* d_o = turned_q + tiles * size;
  float* turned_do = d_o + tiles * size;
  float* lse = turned_do + tiles * size;
  float* delta = lse + tiles * kTile;
  float* keys = delta + tiles * kTile;
  float* values = keys + size;
  float* p = values + size;
  float* dp = p + kTile * kTile;

  for (int64_t h = 0; h < share; ++h) {
    const Head<X> head{call, row, key_head * share + h};
    const int64_t stride = head.query_stride();
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t tokens = head.tokens(t);
      copy_rows(head.queries((const X*)call.q, t), stride, tokens, call.E, width, q + t * size);
      transpose(q + t * size, width, call.scale * kLog2E, turned_q + t * size);
      copy_rows(head.queries((const X*)call.d_o, t), stride, tokens, call.E, width, d_o + t * size);
      transpose(d_o + t * size, width, 1, turned_do + t * size);
      copy_rows(head.queries((const X*)call.o, t), stride, tokens, call.E, width, keys);
      for (int64_t i = 0; i < kTile; ++i) {
        float sum = 0;
        for (int64_t e = 0; e < width; ++e)
          sum += keys[i * width + e] * d_o[t * size + i * width + e];
        delta[t * kTile + i] = sum;
        // Padding has no gradient: do is zero there.
        lse[t * kTile + i] = i < tokens ? head.per_query(call.lse, t)[i] : 0;
      }
    }
    float* part = call.dq_parts + ((chunk * call.B + row) * call.H + head.head) * tiles * size;
    for (int64_t key = chunk; key < tiles; key += call.chunks) {
      copy_rows(head.keys((const X*)call.k, key), head.key_stride(), head.tokens(key), call.E,
                width, keys);
      copy_rows(head.keys((const X*)call.v, key), head.key_stride(), head.tokens(key), call.E,
                width, values);
      const int64_t end = call.last_query_tile(key) + 1;
      bool add = h > 0;
      for (int64_t t = key; t < end; ++t) {
        const Sight seen = head.sight(t, key);
        if (seen == kHidden) continue;
        product(kTile, kTile, width, keys, width, 1, turned_q + t * size, kTile, p, kTile, false);
        head.bias(t, key, seen, p);
        product(kTile, kTile, width, values, width, 1, turned_do + t * size, kTile, dp, kTile,
                false);
        for (int64_t s = 0; s < kTile; ++s)
          for (int64_t j = 0; j < kTile; j += kLanes) {
            const int64_t lane = s * kTile + j;
            Vector weight = exp2(load(p + lane) - load(lse + t * kTile + j));
            store(p + lane, weight);
            store(dp + lane, weight * (load(dp + lane) - load(delta + t * kTile + j)));
          }
        product(kTile, width, kTile, p, kTile, 1, d_o + t * size, width, dv + key * size, width,
                add);
        product(kTile, width, kTile, dp, kTile, 1, q + t * size, width, dk + key * size, width,
                add);
        product(width, kTile, kTile, keys, 1, width, dp, kTile, part + t * size, kTile, true);
        add = true;
      }
    }
  }
  const Head<X> head{call, row, key_head * share};
  for (int64_t key = chunk; key < tiles; key += call.chunks) {
    const int64_t tokens = head.tokens(key);
    write_rows(dk + key * size, width, call.scale, tokens, call.E, head.keys((X*)call.dk, key),
               head.key_stride());
    write_rows(dv + key * size, width, 1, tokens, call.E, head.keys((X*)call.dv, key),
               head.key_stride());
  }
}

// One tile of queries of one head: dq, the sum of all chunks' parts in their order.
template <class X>
static void gather_task(const Attention& call, int64_t task, float*) {
  const int64_t tiles = call.tiles(), size = call.width() * kTile;
  const int64_t heads = call.B * call.H, at = task / heads;
  const Head<X> head{call, task % heads / call.H, task % call.H};
  float* sum = call.dq_parts + (task % heads * tiles + at) * size;
  for (int64_t chunk = 1; chunk < call.chunks; ++chunk)
    for (int64_t i = 0; i < size; i += kLanes)
      store(sum + i, load(sum + i) + load(sum + chunk * heads * tiles * size + i));
  float factors[kTile];
  for (int64_t i = 0; i < kTile; ++i) factors[i] = call.scale;
  write_transposed(sum, factors, head.tokens(at), call.E, head.queries((X*)call.dq, at),
                   head.query_stride());
}

template <class X>
static void run_task(const Attention& call, Stage stage, int64_t task, float* scratch) {
  if (stage == kForward) forward_task<X>(call, task, scratch);
  if (stage == kBackward) backward_task<X>(call, task, scratch);
  if (stage == kGather) gather_task<X>(call, task, scratch);
}

static void attention(const Attention& call, Stage stage, int64_t task, float* scratch) {
  if (call.is_bfloat16)
    run_task<Bfloat16>(call, stage, task, scratch);
  else
    run_task<float>(call, stage, task, scratch);
}
