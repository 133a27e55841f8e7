// The queue of cp.async copies and the view that the async proxy has of shared memory.
#include "runtime.h"

namespace emu {

unsigned char async_view[DYNAMIC_SHARED + STATIC_SHARED];
static bool fence_pending;

void reset_async_view() {
  Untracked scope;
  fence_pending = false;
  memset(async_view, 0xff, sizeof async_view);
}

void publish_to_async_view() {
  Untracked scope;
  if (fence_pending) memcpy(async_view, shared_memory(), sizeof async_view);
  fence_pending = false;
}

void fence_proxy() { fence_pending = true; }

void issue_copy(const Copy& copy, int line) {
  Untracked scope;
  unsigned char* begin = shared_memory();
  if (copy.target < begin || copy.target + copy.bytes > begin + DYNAMIC_SHARED + STATIC_SHARED)
    fail("cp.async at line %d: the target is not in shared memory", line);
  if (((uintptr_t)copy.target | (uintptr_t)copy.source) & (copy.bytes - 1))
    fail("cp.async at line %d: misaligned address for %d bytes", line, copy.bytes);
  current->copies.items.push_back(copy);
}

void commit_copies() {
  Untracked scope;
  current->copies.commit();
}

bool next_due_copy(int pending, Copy& copy) {
  Untracked scope;
  CommitQueue<Copy>& queue = current->copies;
  if (queue.begin >= queue.due(pending)) return false;
  copy = queue.items[queue.begin];
  queue.retire(queue.begin + 1);
  return true;
}

}  // namespace emu
