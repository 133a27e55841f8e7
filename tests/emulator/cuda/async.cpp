// The queues of cp.async copies and bulk stores, and the view that the async proxy has of shared memory.
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

BulkStore issue_bulk_store(void* target, void* source, int bytes, int line) {
  Untracked scope;
  unsigned char *begin = shared_memory(), *from = (unsigned char*)source;
  if (from < begin || from + bytes > begin + DYNAMIC_SHARED + STATIC_SHARED)
    fail("bulk store at line %d: the source is not in shared memory", line);
  if (((uintptr_t)from | (uintptr_t)target | bytes) & 15)
    fail("bulk store at line %d: addresses and size must be multiples of 16 bytes", line);
  publish_to_async_view();
  BulkStore store = {(unsigned char*)target, from, bytes, line, new unsigned char[bytes]};
  memcpy(store.at_issue, async_view + (from - begin), bytes);
  current->bulk_stores.items.push_back(store);
  return store;
}

void commit_bulk_stores() {
  Untracked scope;
  current->bulk_stores.commit();
}

bool next_due_bulk_store(int pending, BulkStore& store) {
  Untracked scope;
  CommitQueue<BulkStore>& queue = current->bulk_stores;
  if (queue.begin >= queue.due(pending)) return false;
  store = queue.items[queue.begin];
  queue.retire(queue.begin + 1);
  return true;
}

void finish_bulk_store(BulkStore& store) {
  Untracked scope;
  delete[] store.at_issue;
}

// Shared memory may go to the next block as soon as the thread is gone.
void check_bulk_stores() {
  Untracked scope;
  CommitQueue<BulkStore>& queue = current->bulk_stores;
  if (!queue.items.empty())
    fail("the thread exits while its bulk store of line %d is in flight", queue.items.back().line);
}

}  // namespace emu
