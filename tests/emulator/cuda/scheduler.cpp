// Fibers, barriers, warp collectives and the launch of a grid. Never compiled with a sanitizer; EMU_TSAN only tells
// TSan about the stacks and about which operations order memory.
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <sys/mman.h>

#include "runtime.h"

extern "C" void emu_switch(void** save, void* to);
// System V: only these six registers survive a call.
asm(R"(.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emu {

Block block;
Thread threads[MAX_THREADS];
Thread* current;

namespace {

#ifdef EMU_TSAN
void* scheduler_fiber;
void release(void* p) { __tsan_release(p); }
void acquire(void* p) { __tsan_acquire(p); }
// Every block gets fresh memory: nothing orders one block after another, so two that write one location are reported.
constexpr bool FRESH_MEMORY = true;
#else
void release(void*) {}
void acquire(void*) {}
constexpr bool FRESH_MEMORY = false;
#endif

constexpr size_t STACK = 256 * 1024, SHARED_SPACE = 1 << 20;

char block_begin, grid_end;  // what TSan takes as order: inputs and reset, then a block; all blocks, then the outputs
void* scheduler_stack;
dim3 grid, block_size, block_at;
unsigned char* shared;
void (*kernel)();
char message[1024];

void switch_stack(void** save, void* to, void* fiber) {
#ifdef EMU_TSAN
  __tsan_switch_to_fiber(fiber, 1);  // 1: a switch orders nothing, only barriers do
#else
  (void)fiber;
#endif
  emu_switch(save, to);
}

void resume(Thread& thread) {
  current = &thread;
  switch_stack(&scheduler_stack, thread.stack_pointer, thread.fiber);
  current = nullptr;
}

void fiber_main() {
  acquire(&block_begin);
  kernel();
  check_bulk_stores();
  release(&grid_end);
  current->done = true;
  suspend();
  abort();
}

void start_thread(int linear, char* stack) {
  Thread& t = threads[linear];
  unsigned i = linear;
  t.index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
  t.linear = linear;
  t.done = t.fenced = false;
  t.waiting = nullptr;
  t.copies.clear();
  t.bulk_stores.clear();
  t.wgmmas.clear();
  t.accumulators.clear();
  void** top = (void**)(stack + STACK - 64);
  *--top = nullptr;  // keeps the stack of fiber_main aligned as after a call
  *--top = (void*)fiber_main;
  for (int r = 0; r < 6; r++) *--top = nullptr;
  t.stack_pointer = top;
#ifdef EMU_TSAN
  t.fiber = __tsan_create_fiber(1);
#endif
}

void report_deadlock() {
  int at = 0, exited = 0;
  char list[512] = "";
  const Group* last = nullptr;
  for (int i = 0; i < block.threads; i++) {
    const Thread& t = threads[i];
    exited += t.done;
    if (t.done || t.waiting == last || at > 400) continue;
    last = t.waiting;
    at += snprintf(list + at, sizeof list - at, "; thread %d waits in %s at line %d with %d of %d threads", i,
                   last->site.what, last->site.line, last->arrived, last->expected);
  }
  fail("deadlock: %d of %d threads have exited%s", exited, block.threads, list);
}

void run_block() {
  int left = block.threads;
  while (left) {
    bool progress = false;
    for (int i = 0; i < block.threads; i++) {
      Thread& t = threads[i];
      if (t.done || (t.waiting && t.waiting->generation == t.generation)) continue;
      t.waiting = nullptr;
      progress = true;
      resume(t);
      if (*message) return;
      left -= t.done;
    }
    if (!progress) return report_deadlock();
  }
}

// Shared memory and the stacks of one block.
struct Region {
  size_t bytes = SHARED_SPACE + STACK * block.threads;
  char* start = nullptr;
  ~Region() { unmap(); }
  void unmap() {
    if (start) munmap(start, bytes);
  }
  bool map() {
    unmap();
    void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    start = fresh == MAP_FAILED ? nullptr : (char*)fresh;
    return start;
  }
};

// TSan drops a race with an access of a fiber once 16 more are destroyed; each one kept costs 1.5 MB.
void retire_fibers() {
#ifdef EMU_TSAN
  static std::deque<void*> ended;
  for (int i = 0; i < block.threads; i++) ended.push_back(threads[i].fiber);
  for (; ended.size() > MAX_THREADS; ended.pop_front()) __tsan_destroy_fiber(ended.front());
#endif
}

void run_grid() {
  Region region;
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        block_at = {x, y, z};
        if ((FRESH_MEMORY || !region.start) && !region.map()) return fail("no memory for the stacks of a block");
        shared = (unsigned char*)region.start;
        memset(shared, 0xff, DYNAMIC_SHARED + STATIC_SHARED);
        reset_async_view();
        memset(block.barrier, 0, sizeof block.barrier);
        memset(block.warp, 0, sizeof block.warp);
        memset(block.warpgroup, 0, sizeof block.warpgroup);
        release(&block_begin);
        for (int i = 0; i < block.threads; i++) start_thread(i, region.start + SHARED_SPACE + STACK * i);
        run_block();
        if (*message) return;
        retire_fibers();
      }
}

#ifndef EMU_SANITIZED
// A wild or misaligned access ends the launch with a message instead of the process.
void on_fault(int signal, siginfo_t* info, void*) {
  fail("%s: invalid or misaligned access (address %p)", signal == SIGSEGV ? "SIGSEGV" : "SIGBUS", info->si_addr);
  _Exit(1);
}

struct FaultHandler {
  struct sigaction before[2];
  stack_t stack_before;
  char stack[64 * 1024];
  FaultHandler() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t own = {stack, 0, sizeof stack};
    sigaltstack(&own, &stack_before);
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};
#else
struct FaultHandler {};
#endif

}  // namespace

dim3 thread_index() { return current->index; }
dim3 block_index() { return block_at; }
dim3 block_extent() { return block_size; }
dim3 grid_extent() { return grid; }
int linear_thread() { return current->linear; }
unsigned char* shared_memory() { return shared; }

void suspend() {
#ifdef EMU_TSAN
  switch_stack(&current->stack_pointer, scheduler_stack, scheduler_fiber);
#else
  switch_stack(&current->stack_pointer, scheduler_stack, nullptr);
#endif
}

void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  int at = snprintf(message, sizeof message, "block (%u, %u, %u)", block_at.x, block_at.y, block_at.z);
  if (current) at += snprintf(message + at, sizeof message - at, " thread %d", current->linear);
  at += snprintf(message + at, sizeof message - at, ": ");
  vsnprintf(message + at, sizeof message - at, format, values);
  va_end(values);
  if (current) suspend();
}

void check_arrival(Group& group, int expected, Site site) {
  if (group.arrived == 0) {
    group.site = site;
    group.expected = expected;
  } else if (group.site.line != site.line || strcmp(group.site.what, site.what)) {
    fail("divergent barrier: %s at line %d meets %s at line %d", site.what, site.line, group.site.what,
         group.site.line);
  } else if (group.expected != expected) {
    fail("%s at line %d expects %d threads, others expect %d", site.what, site.line, expected, group.expected);
  }
}

// What orders memory in TSan's eyes: for each barrier and block an address, two in turn, so that whoever still leaves
// one barrier is not ordered after those who have reached the next.
static void* order(const Group& group, unsigned generation) {
  return shared + SHARED_SPACE / 2 + ((const char*)&group - (const char*)&block) + (generation & 1) * 8;
}

template <class Action> static void ordered_rendezvous(Group& group, int expected, Site site, Action action) {
  void* memory = order(group, group.generation);
  release(memory);
  rendezvous(group, expected, site, action);
  acquire(memory);
}

void block_barrier(int id, int count, Site site) {
  if (id < 0 || id > 15) fail("%s at line %d: barrier %d does not exist", site.what, site.line, id);
  ordered_rendezvous(block.barrier[id], count ? count : block.threads, site, publish_to_async_view);
}

static int members(unsigned mask) {
  int present = block.threads - (current->linear & ~31);
  return __builtin_popcount(present < WARP ? mask & ((1u << present) - 1) : mask);
}

void warp_barrier(unsigned mask, Site site) {
  ordered_rendezvous(block.warp[current->linear / WARP], members(mask), site, [] {});
}

// Two buffers suffice: a lane can deposit for the next collective, but not for the one after it, before all have read.
const Slot* warp_gather(unsigned mask, const Slot& mine, Site site) {
  Group& group = block.warp[current->linear / WARP];
  Slot* slots = &block.slots[group.generation & 1][current->linear & ~31];
  slots[current->linear & 31] = mine;
  rendezvous(group, members(mask), site, [] {});
  return slots;
}

const char* launch(void (*entry)(), const int* extents) {
  *message = 0;
  kernel = entry;
  grid = {unsigned(extents[0]), unsigned(extents[1]), unsigned(extents[2])};
  block_size = {unsigned(extents[3]), unsigned(extents[4]), unsigned(extents[5])};
  block.threads = extents[3] * extents[4] * extents[5];
  current = nullptr;
#ifdef EMU_TSAN
  scheduler_fiber = __tsan_get_current_fiber();
#endif
  {
    [[maybe_unused]] FaultHandler handler;
    run_grid();
  }
  acquire(&grid_end);
  return *message ? message : nullptr;
}

}  // namespace emu
