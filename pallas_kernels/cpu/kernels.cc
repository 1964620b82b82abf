// Kernels for CPUs, called by XLA's foreign function interface (jax.ffi).
//
// Threads are XLA's own. The order of every sum is fixed by the call's shape and the
// number of threads, so that results are reproducible. Kernels are compiled for AVX-512 and for
// AVX2, or, on other processors, for vectors of 128 bits; Python chooses by the number of lanes.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Any = ffi::AnyBuffer;
using Int8 = ffi::Buffer<ffi::S8>;
using Int32 = ffi::Buffer<ffi::S32>;
using Float32 = ffi::Buffer<ffi::F32>;

struct Bfloat16 {
  uint16_t bits;
};

constexpr int64_t kTile = 64;  // Queries and keys of a tile of attention, columns of a panel.
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLowest = -1e30f;
constexpr int64_t kWorkOfAThread = 1 << 18;  // Numbers to read or multiply, worth its waking up.

enum Stage { kForward, kBackward, kGather };

// A call of attention: arrays are [B, T, H or K, E], segments [B, T], slopes
// [slope_rows, H], lse [B, H, T].
struct Attention {
  const void *q, *k, *v, *d_o;
  void *o, *dq, *dk, *dv;
  float* lse;
  const int32_t* segments;  // Or null.
  const float* slopes;      // Or null.
  float* dq_parts;          // [chunks, B, H, tiles, width, 64]
  int64_t B, T, H, K, E, slope_rows, chunks;
  int64_t window;  // A key at a larger distance is hidden.
  float scale;
  bool is_bfloat16;

  int64_t tiles() const { return (T + kTile - 1) / kTile; }
  int64_t width() const { return (E + 15) / 16 * 16; }
  int64_t first_key_tile(int64_t at) const {
    int64_t first = at * kTile - window;
    return first < 0 ? 0 : first / kTile;
  }
  int64_t last_query_tile(int64_t key) const {
    int64_t last = key * kTile + kTile - 1 + window;
    return last >= T ? tiles() - 1 : last / kTile;
  }
  int64_t scratch_size(Stage stage) const {
    int64_t size = width() * kTile;
    if (stage == kForward) return 3 * size + kTile * kTile;
    if (stage == kGather) return 0;
    return 6 * tiles() * size + 2 * tiles() * kTile + 2 * size + 2 * kTile * kTile;
  }
};

// Few rows times a matrix: x [B, N], y [B, M], the weight [N, M] or, transposed, [M, N].
struct FewRows {
  const float* x;
  const int8_t* weight;
  float* y;
  int64_t B, N, M;
  bool transposed;
};

// Few rows times matrices in panels: x [L, B, N], y [L, B, 64 P], panels [L, P, N, 64].
struct Panels {
  const float *x, *panels;
  float* y;
  int64_t L, B, N, P;
};

// One query of each row, q and o [B, H, E], on keys and values [L, B, S, K, E] of one of L
// layers. Slot s holds the newest position p <= newest[b] with p mod S = s.
struct CacheRead {
  const float* q;
  const void *keys, *values;
  const int32_t* newest;
  float* o;
  int64_t B, H, E, S, K;
  int64_t window;  // A key at a larger distance is hidden.
  int32_t layer;
  float scale;
  bool is_bfloat16;

  int64_t oldest(int64_t newest) const {
    int64_t reach = window < S - 1 ? window : S - 1;
    return newest > reach ? newest - reach : 0;
  }
};

template <int N>
using Count = std::integral_constant<int, N>;

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline void from_float(float x, float* to) { *to = x; }
inline float to_float(Bfloat16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline void from_float(float x, Bfloat16* to) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#if defined(__x86_64__) && !defined(__clang__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define VECTOR_LANES 16
#define VECTOR_COLUMNS 4
namespace avx512 {
#include "vectors.h"

#include "attention.h"
#include "few_rows.h"
#include "cache_read.h"
}  // namespace avx512
#undef VECTOR_LANES
#undef VECTOR_COLUMNS
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define VECTOR_LANES 8
#define VECTOR_COLUMNS 2
namespace avx2 {
#include "vectors.h"

#include "attention.h"
#include "few_rows.h"
#include "cache_read.h"
}  // namespace avx2
#pragma GCC pop_options

// The floats in the processor's widest vectors, 0 if it has none that serve.
int64_t best_lanes() {
  __builtin_cpu_init();
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  return wide ? 16 : 8;
}

#define CHOOSE(lanes, function) ((lanes) == 16 ? avx512::function : avx2::function)

#else

#define VECTOR_LANES 4
#define VECTOR_COLUMNS 4
namespace generic {
#include "vectors.h"

#include "attention.h"
#include "few_rows.h"
#include "cache_read.h"
}  // namespace generic

int64_t best_lanes() { return 4; }

#define CHOOSE(lanes, function) generic::function

#endif

// Runs task(number, worker) for all numbers on XLA's threads and waits for them. A
// worker is below workers(pool). A thread that XLA starts late finds nothing left.
int64_t workers(ffi::ThreadPool& pool) {
  int64_t threads = pool.num_threads();
  return threads < 1 ? 1 : threads;
}

template <class Task>
void parallel(ffi::ThreadPool& pool, int64_t count, Task task) {
  struct State {
    std::atomic<int64_t> next{0}, finished{0};
    std::mutex mutex;
    std::condition_variable all_finished;
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, task](int64_t worker) {
    for (int64_t number; (number = state->next++) < count;) {
      task(number, worker);
      if (++state->finished == count) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_finished.notify_all();
      }
    }
  };
  for (int64_t worker = 1; worker < workers(pool) && worker < count; ++worker)
    pool.Schedule([work, worker] { work(worker); });
  work(0);
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] { return state->finished == count; });
}

// How many threads an amount of work is worth.
int64_t threads_for(ffi::ThreadPool& pool, int64_t work) {
  const int64_t worth = 1 + work / kWorkOfAThread;
  return worth < workers(pool) ? worth : workers(pool);
}

// Runs work(first, last, thread) on a range of `count` for each thread; ranges begin at
// multiples of `step`.
template <class Work>
void in_ranges(ffi::ThreadPool& pool, int64_t count, int64_t threads, int64_t step, Work work) {
  const int64_t share = ((count + threads - 1) / threads + step - 1) / step * step;
  parallel(pool, (count + share - 1) / share, [work, count, share](int64_t thread, int64_t) {
    const int64_t first = thread * share, last = first + share;
    work(first, last < count ? last : count, thread);
  });
}

ffi::Error out_of_memory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "a kernel for CPUs found no memory to work in");
}

// Runs all tasks of a stage.
void run(ffi::ThreadPool& pool, const Attention& call, Stage stage, int64_t tasks, int64_t lanes) {
  const int64_t size = call.scratch_size(stage);
  std::unique_ptr<float[]> scratch(new float[workers(pool) * size + 16]);
  // A cache line's start: a vector then never crosses two.
  float* first = scratch.get() + (-(uintptr_t)scratch.get() & 63) / sizeof(float);
  auto* function = CHOOSE(lanes, attention);
  parallel(pool, tasks, [&call, function, first, size, stage](int64_t task, int64_t at) {
    function(call, stage, task, first + at * size);
  });
}

// Reads the shapes of a call; axes in front of a row's are vmap's.
Attention read_call(Any q, Any k, Any v, Int32 segments, Float32 slopes, float scale,
                    int64_t window) {
  Attention call{};
  auto sizes = q.dimensions();
  auto last = sizes.size();
  call.T = sizes[last - 3], call.H = sizes[last - 2], call.E = sizes[last - 1];
  call.K = k.dimensions()[last - 2];
  call.B = q.element_count() / (call.T * call.H * call.E);
  call.q = q.untyped_data(), call.k = k.untyped_data(), call.v = v.untyped_data();
  if (segments.element_count() > 0) call.segments = segments.typed_data();
  if (slopes.element_count() > 0) call.slopes = slopes.typed_data();
  call.slope_rows = slopes.element_count() / call.H;
  call.scale = scale;
  call.window = window;
  call.is_bfloat16 = q.element_type() == ffi::BF16;
  return call;
}

ffi::Error forward(ffi::ThreadPool pool, float scale, int64_t window, int64_t lanes, Any q, Any k,
                   Any v, Int32 segments, Float32 slopes, ffi::Result<Any> o,
                   ffi::Result<Float32> lse) try {
  Attention call = read_call(q, k, v, segments, slopes, scale, window);
  call.o = o->untyped_data(), call.lse = lse->typed_data();
  run(pool, call, kForward, call.B * call.H * call.tiles(), lanes);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error backward(ffi::ThreadPool pool, float scale, int64_t window, int64_t lanes, Any q, Any k,
                    Any v, Int32 segments, Float32 slopes, Any o, Float32 lse, Any d_o,
                    ffi::Result<Any> dq, ffi::Result<Any> dk, ffi::Result<Any> dv) try {
  Attention call = read_call(q, k, v, segments, slopes, scale, window);
  call.o = o.untyped_data(), call.lse = lse.typed_data(), call.d_o = d_o.untyped_data();
  call.dq = dq->untyped_data(), call.dk = dk->untyped_data();
  call.dv = dv->untyped_data();
  // Few key heads leave threads idle: their keys are shared out, two chunks a thread.
  const int64_t units = call.B * call.K, wished = 2 * workers(pool);
  call.chunks = workers(pool) == 1 || units >= wished ? 1 : (wished + units - 1) / units;
  if (call.chunks > call.tiles()) call.chunks = call.tiles();
  const int64_t query_tiles = call.B * call.H * call.tiles();
  std::vector<float> parts(call.chunks * query_tiles * call.width() * kTile);
  call.dq_parts = parts.data();
  run(pool, call, kBackward, units * call.chunks, lanes);
  run(pool, call, kGather, query_tiles, lanes);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

// Threads take ranges of outputs, a multiple of 64, so that no vector crosses two.
ffi::Error few_rows(ffi::ThreadPool pool, int64_t transposed, int64_t lanes, Float32 x, Int8 weight,
                    ffi::Result<Float32> y) try {
  FewRows call{};
  call.B = x.dimensions()[0], call.N = x.dimensions()[1], call.M = y->dimensions()[1];
  call.x = x.typed_data(), call.weight = weight.typed_data(), call.y = y->typed_data();
  call.transposed = transposed;
  auto* function = CHOOSE(lanes, few_rows);
  in_ranges(pool, call.M, threads_for(pool, call.N * call.M), kTile,
            [&call, function](int64_t from, int64_t to, int64_t) { function(call, from, to); });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

// Threads take ranges of panels.
ffi::Error panels(ffi::ThreadPool pool, int64_t lanes, Float32 x, Float32 panels,
                  ffi::Result<Float32> y) try {
  Panels call{};
  call.L = x.dimensions()[0], call.B = x.dimensions()[1], call.N = x.dimensions()[2];
  call.P = panels.dimensions()[1];
  call.x = x.typed_data(), call.panels = panels.typed_data(), call.y = y->typed_data();
  const int64_t count = call.L * call.P, products = count * call.B * call.N * kTile;
  auto* function = CHOOSE(lanes, panels);
  in_ranges(pool, count, threads_for(pool, products), 1,
            [&call, function](int64_t from, int64_t to, int64_t) { function(call, from, to); });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

ffi::Error cache_read(ffi::ThreadPool pool, float scale, int64_t window, int64_t lanes, Float32 q,
                      Any keys, Any values, Int32 layer, Int32 newest,
                      ffi::Result<Float32> o) try {
  CacheRead call{};
  auto sizes = keys.dimensions();
  call.B = sizes[1], call.S = sizes[2], call.K = sizes[3], call.E = sizes[4];
  call.H = q.element_count() / (call.B * call.E);
  call.q = q.typed_data(), call.keys = keys.untyped_data(), call.values = values.untyped_data();
  call.layer = layer.typed_data()[0], call.newest = newest.typed_data(), call.o = o->typed_data();
  call.window = window, call.scale = scale;
  call.is_bfloat16 = keys.element_type() == ffi::BF16;
  // Clamped, as XLA clamps an index.
  const int32_t last = static_cast<int32_t>(sizes[0]) - 1;
  call.layer = call.layer < 0 ? 0 : call.layer > last ? last : call.layer;
  int64_t seen = 0;
  for (int64_t b = 0; b < call.B; ++b) seen += call.newest[b] - call.oldest(call.newest[b]) + 1;
  const int64_t threads = threads_for(pool, 2 * seen * call.K * call.E);
  // A task is some heads of a row: all, where there are enough rows for the threads.
  const int64_t wished = (threads + call.B - 1) / call.B;
  const int64_t share = (call.K + wished - 1) / wished, parts = (call.K + share - 1) / share;
  const int64_t stride = call.S + 16, size = share * (call.H / call.K) * stride;
  std::unique_ptr<float[]> scratch(new float[threads * size]);
  float* logits = scratch.get();
  auto* function = CHOOSE(lanes, cache_read);
  auto work = [&call, function, share, parts, stride, size, logits](int64_t first, int64_t last,
                                                                    int64_t thread) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t head = task % parts * share, end = head + share;
      function(call, task / parts, head, end < call.K ? end : call.K, logits + thread * size,
               stride);
    }
  };
  in_ranges(pool, call.B * parts, threads, 1, work);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

auto bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Attr<float>("scale")
      .Attr<int64_t>("window")
      .Attr<int64_t>("lanes")
      .Arg<Any>()
      .Arg<Any>()
      .Arg<Any>()
      .Arg<Int32>()
      .Arg<Float32>();
}

}  // namespace

extern "C" int64_t recurjax_cpu_lanes() { return best_lanes(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(recurjax_attention_forward, forward,
                              bind().Ret<Any>().Ret<Float32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    recurjax_attention_backward, backward,
    bind().Arg<Any>().Arg<Float32>().Arg<Any>().Ret<Any>().Ret<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(recurjax_few_rows, few_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("transposed")
                                  .Attr<int64_t>("lanes")
                                  .Arg<Float32>()
                                  .Arg<Int8>()
                                  .Ret<Float32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(recurjax_panels, panels,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("lanes")
                                  .Arg<Float32>()
                                  .Arg<Float32>()
                                  .Ret<Float32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(recurjax_cache_read, cache_read,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("lanes")
                                  .Arg<Float32>()
                                  .Arg<Any>()
                                  .Arg<Any>()
                                  .Arg<Int32>()
                                  .Arg<Int32>()
                                  .Ret<Float32>());
