// The remaining templates of TileLang's device library that generated kernels call: reductions, scans, atomics.
#pragma once
#include "cuda_math.h"
#include "simt.h"

namespace tl {

template <int ID, int THREADS> inline void named_barrier(int line) {
  emu::block_barrier(ID, THREADS, {"bar.sync", line});
}
template <int ID, int THREADS> inline void __sync_thread_partial(int line = __builtin_LINE()) {
  named_barrier<ID, THREADS>(line);
}
inline void __sync_thread_partial(int id, int threads, int line = __builtin_LINE()) {
  emu::block_barrier(id, threads, {"bar.sync", line});
}

// A vector from one repeated unit, or from its elements.
template <class V, class U> inline V broadcast(U unit) {
  static_assert(sizeof(V) % sizeof(U) == 0);
  V vector;
  for (size_t i = 0; i < sizeof(V) / sizeof(U); i++) memcpy((char*)&vector + i * sizeof(U), &unit, sizeof(U));
  return vector;
}
template <class V, class E, class... Rest> inline V make_vec(E first, Rest... rest) {
  static_assert(sizeof(V) == (1 + sizeof...(Rest)) * sizeof(E));
  const E elements[] = {first, E(rest)...};
  V vector;
  memcpy(&vector, elements, sizeof(V));
  return vector;
}

template <class T> inline T shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
  return __shfl_sync(mask, value, source, 32, line);
}
template <class T> inline T shfl_xor_sync(unsigned mask, T value, int flip, int line = __builtin_LINE()) {
  return __shfl_xor_sync(mask, value, flip, 32, line);
}
template <class T> inline T shfl_down_sync(unsigned mask, T value, int delta, int line = __builtin_LINE()) {
  return __shfl_down_sync(mask, value, delta, 32, line);
}
template <class T> inline T shfl_up_sync(unsigned mask, T value, int delta, int line = __builtin_LINE()) {
  return __shfl_up_sync(mask, value, delta, 32, line);
}

struct SumOp {
  template <class T> T operator()(T a, T b) const { return a + b; }
};
struct MaxOp {
  template <class T> T operator()(T a, T b) const { return fast_max(a, b); }
};
struct MinOp {
  template <class T> T operator()(T a, T b) const { return fast_min(a, b); }
};
struct SumOp_f32x2 {
  float2 operator()(float2 a, float2 b) const { return add2(a, b); }
};

struct SyncThreadsBarrier {
  template <int PHASE = 0> static void sync(int line) { emu::block_barrier(0, 0, {"__syncthreads", line}); }
};
template <int THREADS> struct NamedBarrier {
  template <int PHASE = 1> static void sync(int line) { named_barrier<PHASE, THREADS>(line); }
};

// Butterfly over `THREADS / SCALE` threads that are SCALE apart: the far half through shared memory, the steps
// within a warp by shuffles; the order of the additions is the device's.
template <class Op, int THREADS, int SCALE, int OFFSET = 0, class Barrier = SyncThreadsBarrier, int BATCH = 1,
          int STRIDE = 0>
struct AllReduce {
  template <class T> static T run(T value, T* buffer = nullptr, int line = __builtin_LINE()) {
    reduce<1>(&value, buffer, line);
    return value;
  }
  template <class T> static void run_batch(T* values, T* buffer = nullptr, int line = __builtin_LINE()) {
    reduce<BATCH>(values, buffer, line);
  }

 private:
  template <int COUNT, class T> static void reduce(T* values, T* buffer, int line) {
    int self = int(emu::thread_index().x) - OFFSET;
    for (int step = THREADS / 2; step >= SCALE; step /= 2) {
      if (step < 32) {
        for (int i = 0; i < COUNT; i++) values[i] = Op()(values[i], shfl_xor_sync(~0u, values[i], step, line));
        continue;
      }
      Barrier::template sync<1>(line);
      for (int i = 0; i < COUNT; i++) buffer[self + i * STRIDE] = values[i];
      Barrier::template sync<2>(line);
      for (int i = 0; i < COUNT; i++) values[i] = Op()(values[i], buffer[(self ^ step) + i * STRIDE]);
    }
  }
};

template <class Op, class T> inline T warp_reduce(T value, Op op, int line = __builtin_LINE()) {
  for (int step = 16; step; step /= 2) value = op(value, shfl_xor_sync(~0u, value, step, line));
  return value;
}
template <class T> inline T warp_reduce_sum(T v, int line = __builtin_LINE()) { return warp_reduce(v, SumOp(), line); }
template <class T> inline T warp_reduce_max(T v, int line = __builtin_LINE()) { return warp_reduce(v, MaxOp(), line); }
template <class T> inline T warp_reduce_min(T v, int line = __builtin_LINE()) { return warp_reduce(v, MinOp(), line); }

// Inclusive sum of one line by SEG lanes, segment after segment (doubling steps, then the carry).
template <bool REVERSE, int SEG, class T>
inline void sum_line(const T* source, T* target, int extent, int source_stride, int target_stride, int line) {
  int lane = int(emu::thread_index().x) % SEG, segments = (extent + SEG - 1) / SEG;
  T carry = T(0);
  for (int i = 0; i < segments; i++) {
    int at = (REVERSE ? segments - 1 - i : i) * SEG + lane;
    T sum = at < extent ? source[at * source_stride] : T(0);
    for (int step = 1; step < SEG; step *= 2) {
      T other = REVERSE ? shfl_down_sync(~0u, sum, step, line) : shfl_up_sync(~0u, sum, step, line);
      if (REVERSE ? lane < SEG - step : lane >= step) sum = sum + other;
    }
    sum = sum + carry;
    if (at < extent) target[at * target_stride] = sum;
    carry = shfl_sync(~0u, sum, REVERSE ? 0 : SEG - 1, line);
  }
}
template <int THREADS, bool REVERSE = false> struct CumSum1D {
  template <class T, int SEG = 32> static void run(const T* source, T* target, int n, int line = __builtin_LINE()) {
    if (int(emu::thread_index().x) < SEG) sum_line<REVERSE, SEG>(source, target, n, 1, 1, line);
  }
};
template <int THREADS, int AXIS = 0, bool REVERSE = false> struct CumSum2D {
  template <class T, int SEG = 32>
  static void run(const T* source, T* target, int height, int width, int source_stride, int target_stride,
                  int line = __builtin_LINE()) {
    int lines = AXIS == 1 ? height : width;
    for (int i = int(emu::thread_index().x) / SEG; i < lines; i += THREADS / SEG) {
      if (AXIS == 1)
        sum_line<REVERSE, SEG>(source + i * source_stride, target + i * target_stride, width, 1, 1, line);
      else
        sum_line<REVERSE, SEG>(source + i, target + i, height, source_stride, target_stride, line);
    }
  }
};

template <class T, class U> inline void AtomicAdd(T* address, U value, int = 0) { atomicAdd(address, value); }
template <class T, class U> inline T AtomicAddRet(T* address, U value, int = 0) { return atomicAdd(address, value); }
template <class T, class U> inline void AtomicMax(T* address, U value, int = 0) { atomicMax(address, value); }
template <class T, class U> inline void AtomicMin(T* address, U value, int = 0) { atomicMin(address, value); }
template <class T> inline void AtomicAddx2(T* address, const T* values, int = 0) {
  for (int i = 0; i < 2; i++) atomicAdd(address + i, values[i]);
}
template <class T> inline void AtomicAddx4(T* address, const T* values, int = 0) {
  for (int i = 0; i < 4; i++) atomicAdd(address + i, values[i]);
}
template <int EXTENT> inline bool tl_shuffle_elect() {
  return emu::linear_thread() % (EXTENT ? (EXTENT + 31) / 32 * 32 : 1024) == 0;
}

}  // namespace tl

using tl::AtomicAdd;
using tl::AtomicAddRet;
using tl::AtomicAddx2;
using tl::AtomicAddx4;
using tl::AtomicMax;
using tl::AtomicMin;
