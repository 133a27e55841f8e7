// State shared by the emulator's own source files; generated kernels see only simt.h, async_copy.h, tensor_core.h.
#pragma once
#include <vector>

#include "async_copy.h"
#include "tensor_core.h"

#ifdef EMU_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber();
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_read_range_pc(void*, unsigned long, void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

namespace emu {

// Hides the emulator's own memory accesses (memcpy, free) from TSan, which would take them for the program's.
struct Untracked {
#ifdef EMU_TSAN
  Untracked() { AnnotateIgnoreReadsBegin(__FILE__, 0), AnnotateIgnoreWritesBegin(__FILE__, 0); }
  ~Untracked() { AnnotateIgnoreReadsEnd(__FILE__, 0), AnnotateIgnoreWritesEnd(__FILE__, 0); }
#else
  Untracked() {}
#endif
};

// Items in order of issue, closed into groups by a commit; cp.async, bulk stores and wgmma share this bookkeeping.
template <class T> struct CommitQueue {
  std::vector<T> items;
  std::vector<size_t> commits;  // number of items at each commit
  size_t begin = 0;             // first item not yet executed

  void commit() { commits.push_back(items.size()); }
  // All groups but the `pending` latest have to be complete: the number of items in them.
  size_t due(int pending) const {
    if (pending < 0) return items.size();
    return commits.size() > size_t(pending) ? commits[commits.size() - 1 - pending] : 0;
  }
  void retire(size_t end) {
    begin = end;
    if (begin == items.size()) clear();
  }
  void clear() { items.clear(), commits.clear(), begin = 0; }
};

// Accumulator registers of wgmmas in flight: the registers hold poison, the value is here.
struct Accumulator {
  float* registers;
  int columns, uses;
  float value[128];
};

struct Group {  // a barrier or warp collective
  Site site;
  int expected, arrived;
  unsigned generation;
};

struct Thread {
  dim3 index;
  int linear;
  bool done, fenced;
  void* stack_pointer;
  void* fiber;           // TSan's name for the stack
  const Group* waiting;  // runnable once this group has left `generation`
  unsigned generation;
  CommitQueue<Copy> copies;
  CommitQueue<BulkStore> bulk_stores;
  CommitQueue<Wgmma> wgmmas;
  std::vector<Accumulator> accumulators;
};

enum { MAX_THREADS = 1024, WARP = 32, WARPGROUP = 128 };

struct Block {
  int threads;
  Group barrier[16], warp[MAX_THREADS / WARP], warpgroup[MAX_THREADS / WARPGROUP];
  Slot slots[2][MAX_THREADS];
};

extern Block block;
extern Thread threads[MAX_THREADS];
extern Thread* current;

void suspend();
void check_arrival(Group& group, int expected, Site site);

// Waits until `expected` threads have arrived; the last of them runs `action` before the others go on.
template <class Action> void rendezvous(Group& group, int expected, Site site, Action action) {
  check_arrival(group, expected, site);
  if (++group.arrived == group.expected) {
    action();
    group.arrived = 0;
    group.generation++;
    return;
  }
  current->waiting = &group;
  current->generation = group.generation;
  suspend();
}

// The async proxy (wgmma, bulk stores) sees shared memory as of the last proxy fence. A fence publishes what is written
// up to the next barrier, wgmma wait or bulk store: a little more than on the device, but a missing fence leaves stale
// data or NaN.
extern unsigned char async_view[DYNAMIC_SHARED + STATIC_SHARED];
void reset_async_view();
void publish_to_async_view();
void check_bulk_stores();

}  // namespace emu
