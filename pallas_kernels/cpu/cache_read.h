// Attention of one new token of each row to a layer's cache, for one instruction set.
//
// Only slots that the query sees are read, in the order of their positions.

template <class T>
INLINE float dot_of(const float* q, const T* k, int64_t E) {
  Vector sum = {};
  int64_t e = 0;
  for (; e + kLanes <= E; e += kLanes) sum += load(q + e) * load(k + e);
  float total = total_of(sum);
  for (; e < E; ++e) total += q[e] * to_float(k[e]);
  return total;
}

template <class T>
INLINE void add_scaled(float p, const T* v, float* o, int64_t E) {
  int64_t e = 0;
  for (; e + kLanes <= E; e += kLanes) store(o + e, load(o + e) + broadcast(p) * load(v + e));
  for (; e < E; ++e) o[e] += p * to_float(v[e]);
}

// Calls work(i, slot) for what a row's query sees, from the oldest on.
template <class Work>
INLINE void by_slot(int64_t oldest, int64_t count, int64_t S, Work work) {
  for (int64_t i = 0, slot = oldest % S; i < count; ++i, slot = slot + 1 < S ? slot + 1 : 0)
    work(i, slot);
}

// What the queries of some key heads of one row find: all of them at a slot before the next,
// as the heads of a slot lie side by side. `logits` has room for `stride` of each query.
template <class T>
static void look(const CacheRead& call, int64_t b, int64_t first, int64_t last, float* logits,
                 int64_t stride) {
  const int64_t S = call.S, E = call.E, K = call.K, shared = call.H / K;
  const int64_t newest = call.newest[b], oldest = call.oldest(newest);
  const int64_t count = newest - oldest + 1;
  const int64_t row = ((int64_t)call.layer * call.B + b) * S * K * E;
  const T *keys = (const T*)call.keys + row, *values = (const T*)call.values + row;
  const float* q = call.q + b * call.H * E;
  float* o = call.o + b * call.H * E;
  const int64_t begin = first * shared, end = last * shared;
  by_slot(oldest, count, S, [&](int64_t i, int64_t slot) {
    float* at = logits + i;
    for (int64_t k = first; k < last; ++k)
      for (int64_t h = k * shared; h < (k + 1) * shared; ++h, at += stride)
        *at = dot_of(q + h * E, keys + (slot * K + k) * E, E) * call.scale;
  });
  for (int64_t h = begin; h < end; ++h) {
    float* of_head = logits + (h - begin) * stride;
    float largest = kLowest;
    for (int64_t i = 0; i < count; ++i) largest = of_head[i] > largest ? of_head[i] : largest;
    for (int64_t i = count; i < count + kLanes; ++i) of_head[i] = kLowest;
    Vector sums = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      Vector p = exp2((load(of_head + i) - broadcast(largest)) * broadcast(kLog2E));
      store(of_head + i, p);
      sums += p;
    }
    const float total = total_of(sums);
    for (int64_t i = 0; i < count; ++i) of_head[i] /= total;
    for (int64_t e = 0; e < E; ++e) o[h * E + e] = 0;
  }
  by_slot(oldest, count, S, [&](int64_t i, int64_t slot) {
    const float* at = logits + i;
    for (int64_t k = first; k < last; ++k)
      for (int64_t h = k * shared; h < (k + 1) * shared; ++h, at += stride)
        add_scaled(*at, values + (slot * K + k) * E, o + h * E, E);
  });
}

static void cache_read(const CacheRead& call, int64_t b, int64_t first, int64_t last,
                       float* logits, int64_t stride) {
  auto* function = call.is_bfloat16 ? look<Bfloat16> : look<float>;
  function(call, b, first, last, logits, stride);
}
