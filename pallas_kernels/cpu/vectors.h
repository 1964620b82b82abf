// Vectors of float32 and the small matrix product on them, once for each instruction
// set. kernels.cc includes this file and the kernels' once per namespace, with
// VECTOR_LANES floats in a vector and VECTOR_COLUMNS vectors in a row of the product's
// tile. Nothing here may call a function of the standard library that is a template:
// the linker could take its copy for an instruction set that the processor lacks.

constexpr int64_t kLanes = VECTOR_LANES;
constexpr int kColumns = VECTOR_COLUMNS;

typedef float Vector __attribute__((vector_size(4 * VECTOR_LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * VECTOR_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * VECTOR_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * VECTOR_LANES)));
typedef int8_t Bytes __attribute__((vector_size(VECTOR_LANES)));

#define INLINE static inline __attribute__((always_inline))

template <class To, class From>
INLINE To load_as(const From* from) {
  To to;
  __builtin_memcpy(&to, from, sizeof to);
  return to;
}

INLINE Vector load(const float* from) { return load_as<Vector>(from); }

INLINE Vector load(const Bfloat16* from) {
  Bits wide = __builtin_convertvector(load_as<Halves>(from), Bits) << 16;
  return (Vector)wide;
}

// g++ converts bytes one by one.
INLINE Vector load(const int8_t* from) {
#if VECTOR_LANES == 16
  return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif VECTOR_LANES == 8
  return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(load_as<Bytes>(from), Vector);
#endif
}

INLINE void store(float* to, Vector x) { __builtin_memcpy(to, &x, sizeof x); }

// Rounds to nearest, ties to even; a NaN stays one.
INLINE void store(Bfloat16* to, Vector x) {
  Bits bits = (Bits)x;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits narrow = x != x ? (Bits{} + 0x7fc0) : rounded;
  Halves halves = __builtin_convertvector(narrow, Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}

INLINE Vector broadcast(float x) { return Vector{} + x; }
INLINE Vector larger(Vector a, Vector b) { return a < b ? b : a; }

INLINE Integers counting() {
  Integers lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// 2^x for x <= 127, 0 below the normal numbers, NaN for NaN. The polynomial in
// [-1/2, 1/2] has a relative error of 2e-9, less than the rounding of its terms.
INLINE Vector exp2(Vector x) {
  // Adding this number rounds to an integer and leaves it in the low bits.
  const Vector shift = broadcast(12582912.f);
  Vector shifted = x + shift;
  Vector r = x - (shifted - shift);
  Vector p = broadcast(0x1.41fbbcp-13f);
  p = p * r + 0x1.5f3e54p-10f;
  p = p * r + 0x1.3b2d4cp-7f;
  p = p * r + 0x1.c6aee8p-5f;
  p = p * r + 0x1.ebfbdcp-3f;
  p = p * r + 0x1.62e43p-1f;
  p = p * r + 1.f;
  Bits power = ((Bits)shifted << 23) + (127u << 23);
  Vector y = p * (Vector)power;
  return x < -126.f ? Vector{} : y;
}

// Rows of C [R][C vectors] = A B, added to C where `add`. A(i, k) = a[i * row + k * step].
template <int R, int C>
INLINE void tile(const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride,
                 float* c, int64_t c_stride, int64_t depth, bool add) {
  Vector sum[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) sum[i][j] = add ? load(c + i * c_stride + j * kLanes) : Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector column[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) column[j] = load(b + k * b_stride + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      Vector x = broadcast(a[i * row + k * step]);
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sum[i][j] += x * column[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) store(c + i * c_stride + j * kLanes, sum[i][j]);
}

template <int C>
static void columns(int64_t rows, const float* a, int64_t row, int64_t step, const float* b,
                    int64_t b_stride, float* c, int64_t c_stride, int64_t depth, bool add) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6)
    tile<6, C>(a + i * row, row, step, b, b_stride, c + i * c_stride, c_stride, depth, add);
  for (; i + 2 <= rows; i += 2)
    tile<2, C>(a + i * row, row, step, b, b_stride, c + i * c_stride, c_stride, depth, add);
  if (i < rows)
    tile<1, C>(a + i * row, row, step, b, b_stride, c + i * c_stride, c_stride, depth, add);
}

// C [rows][width] = A B, added to C where `add`; the width is a multiple of 16.
static void product(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t row,
                    int64_t step, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                    bool add) {
  int64_t j = 0;
  for (; j + kColumns * kLanes <= width; j += kColumns * kLanes)
    columns<kColumns>(rows, a, row, step, b + j, b_stride, c + j, c_stride, depth, add);
  if constexpr (kColumns * kLanes > 16)
    for (; j < width; j += kLanes)
      columns<1>(rows, a, row, step, b + j, b_stride, c + j, c_stride, depth, add);
}
