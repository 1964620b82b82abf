// Products of a few rows with a matrix, for one instruction set.
//
// Of int8, each weight is read once, in memory order, and widened to float32 in a
// register. A row's sums have one order, whatever the number of threads.

constexpr int kPanel = 8;  // Inputs whose weights are read side by side.

// Adds x[b][i] w[i] for B rows and R inputs to sums [B][M], of `columns` outputs.
template <int B, int R>
static void add_inputs(const float* x, int64_t N, const int8_t* w, int64_t M, float* sums,
                       int64_t columns) {
  Vector one_row[B == 1 ? R : 1];  // Of more rows they do not fit into registers.
  if (B == 1)
    for (int r = 0; r < R; ++r) one_row[r] = broadcast(x[r]);
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Vector in[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) in[r] = load(w + r * M + c);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      Vector sum = load(sums + b * M + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        sum += (B == 1 ? one_row[r] : broadcast(x[b * N + r])) * in[r];
      store(sums + b * M + c, sum);
    }
  }
  for (; c < columns; ++c)
    for (int b = 0; b < B; ++b)
      for (int r = 0; r < R; ++r) sums[b * M + c] += x[b * N + r] * to_float(w[r * M + c]);
}

INLINE float total_of(Vector x) {
  float lanes[kLanes];
  store(lanes, x);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Writes y[b] = x[b] . w for B rows and one output of a transposed matrix.
template <int B>
static void dot(const float* x, int64_t N, const int8_t* w, float* y, int64_t M) {
  constexpr int kParts = 4 / B;  // Sums that do not wait for each other.
  Vector sum[B][kParts] = {};
  int64_t n = 0;
  for (; n + kParts * kLanes <= N; n += kParts * kLanes)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Vector in = load(w + n + part * kLanes);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) sum[b][part] += load(x + b * N + n + part * kLanes) * in;
    }
  for (int b = 0; b < B; ++b) {
    Vector all = sum[b][0];
    for (int part = 1; part < kParts; ++part) all += sum[b][part];
    float total = total_of(all);
    for (int64_t i = n; i < N; ++i) total += x[b * N + i] * to_float(w[i]);
    y[b * M] = total;
  }
}

// Calls work with all rows, four, two or one at a time.
template <class Work>
INLINE void by_rows(int64_t B, Work work) {
  int64_t b = 0;
  for (; b + 4 <= B; b += 4) work(Count<4>{}, b);
  for (; b + 2 <= B; b += 2) work(Count<2>{}, b);
  for (; b < B; ++b) work(Count<1>{}, b);
}

// The outputs from `first` to `last` of y [B][M] = x W; W is [N][M].
static void outputs(const FewRows& call, int64_t first, int64_t last) {
  const int64_t N = call.N, M = call.M, columns = last - first;
  const int8_t* w = call.weight + first;
  float* y = call.y + first;
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t c = 0; c < columns; ++c) y[b * M + c] = 0;
  // A panel for all rows before the next: they find its weights in the cache.
  auto panel = [&](auto inputs, int64_t n) {
    by_rows(call.B, [&](auto rows, int64_t b) {
      add_inputs<decltype(rows)::value, decltype(inputs)::value>(
          call.x + b * N + n, N, w + n * M, M, y + b * M, columns);
    });
  };
  int64_t n = 0;
  for (; n + kPanel <= N; n += kPanel) panel(Count<kPanel>{}, n);
  for (; n < N; ++n) panel(Count<1>{}, n);
}

// The same of a transposed W, [M][N].
static void transposed_outputs(const FewRows& call, int64_t first, int64_t last) {
  const int64_t N = call.N, M = call.M;
  for (int64_t m = first; m < last; ++m)
    by_rows(call.B, [&](auto rows, int64_t b) {
      dot<decltype(rows)::value>(call.x + b * N, N, call.weight + m * N, call.y + b * M + m, M);
    });
}

static void few_rows(const FewRows& call, int64_t first, int64_t last) {
  call.transposed ? transposed_outputs(call, first, last) : outputs(call, first, last);
}

// Of float32, the panels from `first` to `last` of all matrices, counted through.
static void panels(const Panels& call, int64_t first, int64_t last) {
  const int64_t B = call.B, N = call.N, columns = call.P * kTile;
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t l = panel / call.P;
    float* y = call.y + l * B * columns + panel % call.P * kTile;
    product(B, kTile, N, call.x + l * B * N, N, 1, call.panels + panel * N * kTile, kTile, y,
            columns, false);
  }
}
