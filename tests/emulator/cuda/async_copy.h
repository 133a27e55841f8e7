// Copies that run beside the threads.
// cp.async is executed at the wait: between issue and wait the destination holds NaN, so that a missing wait, or a
// reader that was not yet done with the old contents, is seen in the numbers. The copies themselves are made here,
// in code that the sanitizers see, by the thread that waits.
#pragma once
#include "simt.h"

namespace emu {

struct Copy {
  unsigned char* target;
  const unsigned char* source;  // nullptr: fill with zero
  int bytes;
};

void issue_copy(const Copy& copy, int line);
void commit_copies();
// The next copy that cp.async.wait_group `pending` still has to complete; pending < 0 means wait_all.
bool next_due_copy(int pending, Copy& copy);

template <int N> inline void async_copy(void* target, const void* source, int line) {
  static_assert(N == 4 || N == 8 || N == 16);
#ifdef EMU_SANITIZED
  if (source) {  // a first read at the issue: the sanitizers name this line for a bad source address
    volatile unsigned char first = *(const volatile unsigned char*)source;
    volatile unsigned char last = ((const volatile unsigned char*)source)[N - 1];
    (void)first, (void)last;
  }
#endif
  issue_copy({(unsigned char*)target, (const unsigned char*)source, N}, line);
  memset(target, 0xff, N);
}

// A bulk copy from shared to global memory. It reads through the async proxy at some time between issue and wait, so
// its bytes have to be behind a proxy fence at the issue and still be the same at the wait; else the target gets NaN.
struct BulkStore {
  unsigned char *target, *source;
  int bytes, line;
  unsigned char* at_issue;
};

BulkStore issue_bulk_store(void* target, void* source, int bytes, int line);
void commit_bulk_stores();
bool next_due_bulk_store(int pending, BulkStore& store);
void finish_bulk_store(BulkStore& store);

}  // namespace emu

namespace tl {

template <int N> inline void cp_async_gs(void* target, const void* source, int line = __builtin_LINE()) {
  emu::async_copy<N>(target, source, line);
}
template <int N>
inline void cp_async_gs_conditional(void* target, const void* source, bool condition, int line = __builtin_LINE()) {
  emu::async_copy<N>(target, condition ? source : nullptr, line);
}
inline void cp_async_commit() { emu::commit_copies(); }
template <int N> inline void cp_async_wait() {
  emu::Copy copy;
  while (emu::next_due_copy(N == 0 ? -1 : N, copy)) {
    if (!copy.source) memset(copy.target, 0, copy.bytes);
    else if (copy.bytes == 16) memcpy(copy.target, copy.source, 16);
    else if (copy.bytes == 8) memcpy(copy.target, copy.source, 8);
    else memcpy(copy.target, copy.source, 4);
  }
}

enum class CacheHintSm90 { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
template <CacheHintSm90 HINT = CacheHintSm90::EVICT_NORMAL>
inline void tma_store(void* target, void* source, uint32_t bytes, int line = __builtin_LINE()) {
  emu::BulkStore store = emu::issue_bulk_store(target, source, int(bytes), line);
#ifdef EMU_SANITIZED
  // a first read at the issue: a writer that nothing orders before it is a race
  for (uint32_t i = 0; i < bytes; i += 8) (void)*(const volatile uint64_t*)(store.source + i);
#else
  (void)store;
#endif
}
inline void tma_store_arrive() { emu::commit_bulk_stores(); }
template <int N, bool READ = true> inline void tma_store_wait() {
  emu::BulkStore store;
  while (emu::next_due_bulk_store(N, store)) {
    bool same = true;
    for (int i = 0; i < store.bytes; i++) same &= store.source[i] == store.at_issue[i];
    if (same) memcpy(store.target, store.source, store.bytes);
    else memset(store.target, 0xff, store.bytes);
    emu::finish_bulk_store(store);
  }
}

}  // namespace tl
