// The arithmetic of mma.sync and wgmma. A wgmma reads its operands at the wait, the latest time the device may.
//
// Products of 16-bit floats are exact in float32; they are added to the accumulator one after another, k ascending,
// in float32 (the device's inner order and width are not specified).
#include "runtime.h"

namespace emu {

namespace {

const uint32_t POISON = 0x7fc0dead;  // a NaN that no arithmetic produces

float widen(uint16_t raw, bool half) {
  half_t value;
  value.raw = raw;
  return half ? float(value) : from_bits(uint32_t(raw) << 16);
}

struct Operand {
  uint64_t descriptor;
  bool mn_major, half;
};

// Shared-memory offset of the 8 contiguous elements that hold (mn, k): along k if K-major, along mn if MN-major.
uint32_t chunk_offset(const Operand& operand, int mn, int k) {
  uint64_t d = operand.descriptor;
  uint32_t layout = d >> 62, stride = (d >> 32 & 0x3fff) << 4, leading = (d >> 16 & 0x3fff) << 4;
  uint32_t span = layout == 1 ? 128 : layout == 2 ? 64 : layout == 3 ? 32 : 16;  // bytes of one swizzled row
  uint32_t at = (d & 0x3fff) << 4;
  if (!operand.mn_major) {
    at += (mn & 7) * span + (mn >> 3) * stride + (layout ? k * 2 : (k >> 3) * leading);
  } else if (layout) {
    int per_span = span / 2;
    at += mn % per_span * 2 + mn / per_span * leading + (k & 7) * span + (k >> 3) * stride;
  } else {
    at += (mn >> 3) * stride + (k & 7) * 16 + (k >> 3) * leading;
  }
  uint32_t rows = span / 16 - 1;  // the swizzle: 16-byte columns exchanged by the row number
  at ^= (at >> 7 & rows) << 4;
  if (at + 16 > sizeof async_view) fail("wgmma reads shared memory at byte %u, past its end", at);
  return at;
}

// element(mn, k) = value, for all mn < extent and k < 16
template <class Store> void gather(const Operand& operand, int extent, Store store) {
  for (int outer = 0; outer < (operand.mn_major ? 16 : extent); outer++)
    for (int inner = 0; inner < (operand.mn_major ? extent : 16); inner += 8) {
      int mn = operand.mn_major ? inner : outer, k = operand.mn_major ? outer : inner;
      uint16_t chunk[8];
      memcpy(chunk, async_view + chunk_offset(operand, mn, k), 16);
      for (int j = 0; j < 8; j++) {
        float value = widen(chunk[j], operand.half);
        if (operand.mn_major) store(mn + j, k, value);
        else store(mn, k + j, value);
      }
    }
}

void multiply(float* __restrict d, const float* __restrict a, const float* __restrict b, int rows, int columns,
              int depth) {
  for (int m = 0; m < rows; m++)
    for (int k = 0; k < depth; k++) {
      float x = a[m * depth + k];
      for (int n = 0; n < columns; n++) d[m * columns + n] += x * b[k * columns + n];
    }
}

// Row and column of accumulator register i of a thread (wgmma m64nN and mma m16n8 share the pattern of a warp).
int fragment_row(int thread, int i) { return thread / 32 * 16 + (thread & 31) / 4 + (i >> 1 & 1) * 8; }
int fragment_column(int thread, int i) { return (thread & 3) * 2 + (i & 1) + (i >> 2) * 8; }

// A from registers: word i of a lane holds k = 2 (lane % 4), +1 of row lane / 4; words 1, 3 are 8 rows below,
// words 2, 3 are 8 columns to the right.
void unpack_a(float* a, int thread, const uint32_t* words, bool half) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      int row = thread / 32 * 16 + (thread & 31) / 4 + (i & 1) * 8, k = (thread & 3) * 2 + (i >> 1) * 8 + j;
      a[row * 16 + k] = widen(words[i] >> (16 * j), half);
    }
}

Accumulator* find(Thread& thread, const float* registers) {
  for (Accumulator& a : thread.accumulators)
    if (a.registers == registers) return &a;
  return nullptr;
}

void check_agreement(const Wgmma& x, const Wgmma& y) {
  if (x.a != y.a || x.b != y.b || x.columns != y.columns || x.a_in_regs != y.a_in_regs ||
      x.accumulate != y.accumulate || x.negate != y.negate)
    fail("the threads of a warpgroup issue different wgmmas");
}

void run_wgmma(Thread* group, size_t index) {
  static float a[64 * 16], b[16 * 256], d[64 * 256];
  const Wgmma& op = group->wgmmas.items[index];
  int columns = op.columns;
  for (int t = 0; t < WARPGROUP; t++) {
    if (group[t].wgmmas.items.size() <= index) fail("a thread of the warpgroup has not issued this wgmma");
    check_agreement(op, group[t].wgmmas.items[index]);
    const Accumulator* from = find(group[t], group[t].wgmmas.items[index].accumulator);
    for (int i = 0; i < columns / 2; i++)
      d[fragment_row(t, i) * columns + fragment_column(t, i)] = op.accumulate ? from->value[i] : 0.0f;
    if (op.a_in_regs) unpack_a(a, t, group[t].wgmmas.items[index].a_regs, op.a_half);
  }
  if (!op.a_in_regs)
    gather({op.a, op.a_mn_major, op.a_half}, 64, [](int m, int k, float x) { a[m * 16 + k] = x; });
  gather({op.b, op.b_mn_major, op.b_half}, columns, [&](int n, int k, float x) { b[k * columns + n] = x; });
  if (op.negate)
    for (float& x : a) x = -x;
  multiply(d, a, b, 64, columns, 16);
  for (int t = 0; t < WARPGROUP; t++) {
    Accumulator* to = find(group[t], group[t].wgmmas.items[index].accumulator);
    for (int i = 0; i < columns / 2; i++) to->value[i] = d[fragment_row(t, i) * columns + fragment_column(t, i)];
  }
}

// Registers get their value once no wgmma in flight uses them any more.
void release_accumulator(Thread& thread, const Wgmma& op, int line) {
  Accumulator* a = find(thread, op.accumulator);
  if (--a->uses) return;
  for (int i = 0; i < a->columns / 2; i++) {
    if (bits(a->registers[i]) != POISON)
      fail("the program wrote accumulator registers of a wgmma in flight (wait at line %d)", line);
    a->registers[i] = a->value[i];
  }
  *a = thread.accumulators.back();
  thread.accumulators.pop_back();
}

#ifdef EMU_TSAN
// The tensor core reads A rows of each warp and all of B between issue and wait: both ends count as reads.
void touch(const Wgmma& op, void* pc) {
  if (lane()) return;
  auto read = [&](const Operand& operand, int begin, int end) {
    for (int mn = begin; mn < end; mn += operand.mn_major ? 8 : 1)
      for (int k = 0; k < 16; k += operand.mn_major ? 1 : 8)
        __tsan_read_range_pc(shared_memory() + chunk_offset(operand, mn, k), 16, pc);
  };
  int row = current->linear % WARPGROUP / WARP * 16;
  if (!op.a_in_regs) read({op.a, op.a_mn_major, op.a_half}, row, row + 16);
  read({op.b, op.b_mn_major, op.b_half}, 0, op.columns);
}
#else
void touch(const Wgmma&, void*) {}
#endif

}  // namespace

void fence_wgmma() { current->fenced = true; }

__attribute__((noinline)) void issue_wgmma(const Wgmma& op, int line) {
  touch(op, __builtin_return_address(0));
  Untracked scope;
  Thread& thread = *current;
  Accumulator* a = find(thread, op.accumulator);
  if (!a) {
    if (!thread.fenced) fail("wgmma at line %d without wgmma.fence (warpgroup_arrive)", line);
    for (const Accumulator& other : thread.accumulators)
      if (op.accumulator < other.registers + other.columns / 2 && other.registers < op.accumulator + op.columns / 2)
        fail("wgmma at line %d: its accumulator overlaps another one in flight", line);
    thread.accumulators.push_back({op.accumulator, op.columns, 0, {}});
    a = &thread.accumulators.back();
    for (int i = 0; i < op.columns / 2; i++) {
      a->value[i] = op.accumulator[i];
      op.accumulator[i] = from_bits(POISON);
    }
  } else if (a->columns != op.columns) {
    fail("wgmma at line %d: its accumulator is in flight with another shape", line);
  }
  a->uses++;
  thread.wgmmas.items.push_back(op);
}

void commit_wgmma() {
  Untracked scope;
  current->wgmmas.commit();
}

__attribute__((noinline)) void wait_wgmma(int pending, int line) {
  CommitQueue<Wgmma>& queue = current->wgmmas;
  current->fenced = false;
  size_t begin = queue.begin, end = queue.due(pending);
  if (begin >= end) return;
  for (size_t i = begin; i < end; i++) touch(queue.items[i], __builtin_return_address(0));
  int group = current->linear / WARPGROUP;
  if (block.threads < (group + 1) * WARPGROUP) fail("wgmma needs warpgroups of 128 threads (line %d)", line);
  rendezvous(block.warpgroup[group], WARPGROUP, {"wgmma.wait_group", line}, [&] {
    Untracked scope;
    publish_to_async_view();
    for (size_t i = begin; i < end; i++) run_wgmma(threads + group * WARPGROUP, i);
  });
  Untracked scope;
  for (size_t i = begin; i < end; i++) release_accumulator(*current, queue.items[i], line);
  queue.retire(end);
}

__attribute__((noinline)) void mma_m16n8k16(bool a_half, bool b_half, float* c, const uint32_t* a, const uint32_t* b,
                                            int line) {
  // A lane deposits its operands and accumulator; the last to arrive computes the tile for the warp.
  Thread& thread = *current;
  Group& group = block.warp[thread.linear / WARP];
  Slot* slots = &block.slots[group.generation & 1][thread.linear & ~31];
  slots[thread.linear & 31] = {{a[0] | uint64_t(a[1]) << 32, a[2] | uint64_t(a[3]) << 32, b[0] | uint64_t(b[1]) << 32,
                                (uint64_t)c}};
  rendezvous(group, WARP, {"mma.sync", line}, [&] {
    float x[16 * 16], y[16 * 8], d[16 * 8];
    for (int t = 0; t < WARP; t++) {
      const uint64_t* word = slots[t].word;
      uint32_t words[4] = {uint32_t(word[0]), uint32_t(word[0] >> 32), uint32_t(word[1]), uint32_t(word[1] >> 32)};
      unpack_a(x, t, words, a_half);
      for (int i = 0; i < 4; i++) {
        y[((t & 3) * 2 + (i & 1) + (i >> 1) * 8) * 8 + t / 4] = widen(word[2] >> (16 * i), b_half);
        d[fragment_row(t, i) * 8 + fragment_column(t, i)] = ((const float*)word[3])[i];
      }
    }
    multiply(d, x, y, 16, 8, 16);
    for (int t = 0; t < WARP; t++)
      for (int i = 0; i < 4; i++) ((float*)slots[t].word[3])[i] = d[fragment_row(t, i) * 8 + fragment_column(t, i)];
  });
}

}  // namespace emu
