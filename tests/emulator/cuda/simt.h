// One CUDA thread = one fiber on its own stack. Fibers switch only inside a barrier or a warp collective, so a
// program runs deterministically. The state lives in scheduler.cpp, which is never built with a sanitizer.
#pragma once
#include <utility>

#include "types.h"

#if defined(EMU_TSAN) || defined(EMU_ASAN)
#define EMU_SANITIZED 1
#endif

namespace emu {

// Where a collective operation was called: threads that meet at different sites are an error.
struct Site {
  const char* what;
  int line;
};

// What one lane brings to a warp collective.
struct Slot {
  uint64_t word[4];
};

dim3 thread_index();
dim3 block_index();
dim3 block_extent();
dim3 grid_extent();
int linear_thread();
inline int lane() { return linear_thread() & 31; }

// Dynamic shared memory, filled with NaN at the start of every block; static arrays lie behind it.
unsigned char* shared_memory();
enum { DYNAMIC_SHARED = 232448, STATIC_SHARED = 16384 };

// Ends the launch with this message; does not return when a fiber calls it.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void block_barrier(int id, int threads, Site site);  // threads == 0: the whole block
void warp_barrier(unsigned mask, Site site);

// All lanes of `mask` deposit a slot; returns the 32 slots, valid until this lane's next collective but one.
const Slot* warp_gather(unsigned mask, const Slot& mine, Site site);

template <class T> inline T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8);
  if (!(mask >> source & 1)) fail("%s at line %d: lane %d reads lane %d, which does not take part", site.what,
                                  site.line, lane(), source);
  Slot mine;
  memcpy(mine.word, &value, sizeof(T));
  memcpy(&value, warp_gather(mask, mine, site)[source].word, sizeof(T));
  return value;
}

// Calls a kernel with arguments given by address, as the CUDA driver does.
template <class... P, size_t... I>
inline void invoke(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*(P*)arguments[I]...);
}
template <class... P> inline void invoke(void (*kernel)(P...), void** arguments) {
  invoke(kernel, arguments, std::index_sequence_for<P...>{});
}

// Runs all blocks of the grid one after another. Returns nullptr or the message of the first error.
const char* launch(void (*entry)(), const int* extents);

}  // namespace emu

inline void __syncthreads(int line = __builtin_LINE()) { emu::block_barrier(0, 0, {"__syncthreads", line}); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  emu::warp_barrier(mask, {"__syncwarp", line});
}
// One launch is one grid here: nothing runs before it or beside it.
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void __threadfence_block() {}
inline void __threadfence() {}

// A shuffle is not a memory barrier: a program that uses it as one is reported as a race.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  int base = emu::lane() & ~(width - 1);
  return emu::shuffle(mask, value, base + (source & (width - 1)), {"__shfl_sync", line});
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, int line = __builtin_LINE()) {
  int source = emu::lane() ^ flip, end = (emu::lane() | (width - 1)) + 1;
  return emu::shuffle(mask, value, source < end ? source : emu::lane(), {"__shfl_xor_sync", line});
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, int line = __builtin_LINE()) {
  int source = emu::lane() + delta, end = (emu::lane() | (width - 1)) + 1;
  return emu::shuffle(mask, value, source < end ? source : emu::lane(), {"__shfl_down_sync", line});
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, int line = __builtin_LINE()) {
  int source = emu::lane() - delta, base = emu::lane() & ~(width - 1);
  return emu::shuffle(mask, value, source >= base ? source : emu::lane(), {"__shfl_up_sync", line});
}

// Under TSan an atomic is a relaxed atomic, so it never races with another atomic and never orders anything.
namespace emu {
template <class T, class F> inline T atomic_update(T* address, F update) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
  using Word = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  Word* word = (Word*)address;
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED), next;
  T before;
  do {
    memcpy(&before, &seen, sizeof(T));
    T after = update(before);
    memcpy(&next, &after, sizeof(T));
  } while (!__atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
}  // namespace emu
template <class T, class U> inline T atomicAdd(T* address, U value) {
  return emu::atomic_update(address, [&](T old) { return T(old + T(value)); });
}
template <class T, class U> inline T atomicMax(T* address, U value) {
  return emu::atomic_update(address, [&](T old) { return old < T(value) ? T(value) : old; });
}
template <class T, class U> inline T atomicMin(T* address, U value) {
  return emu::atomic_update(address, [&](T old) { return T(value) < old ? T(value) : old; });
}
