// ldmatrix, mma.sync and wgmma as TileLang's templates call them; the arithmetic is in tensor_core.cpp.
#pragma once
#include "simt.h"

namespace tl {

enum class DataType {
  kInt4, kUInt4, kInt8, kUInt8, kInt16, kUInt16, kInt32, kUInt32, kInt64, kUInt64,
  kFloat8_e4m3, kFloat8_e5m2, kFloat16, kBFloat16, kFloat16x2, kFloat32, kTensorFloat32, kFloat64,
};

}  // namespace tl

namespace emu {

// One wgmma of shape m64 n<columns> k16, as one thread issues it.
struct Wgmma {
  uint64_t a, b;       // shared-memory descriptors
  uint32_t a_regs[4];  // the thread's part of A when it comes from registers
  float* accumulator;  // columns / 2 registers
  int columns;
  bool a_in_regs, a_mn_major, b_mn_major, a_half, b_half, negate, accumulate;
};

void issue_wgmma(const Wgmma& op, int line);
void commit_wgmma();
void wait_wgmma(int pending, int line);
void fence_wgmma();
void fence_proxy();
void mma_m16n8k16(bool a_half, bool b_half, float* c, const uint32_t* a, const uint32_t* b, int line);

template <tl::DataType A, tl::DataType B, tl::DataType C> constexpr void check_types() {
  static_assert(A == tl::DataType::kFloat16 || A == tl::DataType::kBFloat16, "emulator: A must be fp16 or bf16");
  static_assert(B == tl::DataType::kFloat16 || B == tl::DataType::kBFloat16, "emulator: B must be fp16 or bf16");
  static_assert(C == tl::DataType::kFloat32, "emulator: the accumulator must be float32");
}

// Each lane names one row of 16 bytes; matrix i takes its rows from lanes 8 i to 8 i + 7.
template <int COUNT, bool TRANSPOSE> inline void ldmatrix(const void* row, void* out, int line) {
  if ((uintptr_t)row & 15) fail("ldmatrix at line %d: row address is not a multiple of 16", line);
  Slot mine = {{(uint64_t)row}};
  const Slot* rows = warp_gather(~0u, mine, {"ldmatrix", line});
  uint16_t* values = (uint16_t*)out;
  int major = lane() >> 2, minor = (lane() & 3) * 2;
  for (int i = 0; i < COUNT; i++)
    for (int j = 0; j < 2; j++) {
      const Slot& from = rows[i * 8 + (TRANSPOSE ? minor + j : major)];
      values[i * 2 + j] = ((const uint16_t*)from.word[0])[TRANSPOSE ? major : minor + j];
    }
}

}  // namespace emu

namespace tl {

#define EMU_LDMATRIX(COUNT)                                                                                \
  inline void ptx_ldmatrix_x##COUNT(const void* row, void* out, int line = __builtin_LINE()) {             \
    emu::ldmatrix<COUNT, false>(row, out, line);                                                           \
  }                                                                                                        \
  inline void ptx_ldmatrix_x##COUNT##_trans(const void* row, void* out, int line = __builtin_LINE()) {     \
    emu::ldmatrix<COUNT, true>(row, out, line);                                                            \
  }
EMU_LDMATRIX(1)
EMU_LDMATRIX(2)
EMU_LDMATRIX(4)
#undef EMU_LDMATRIX

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB, bool SATURATE = false>
inline void mma_sync(float* c, const unsigned* a, const unsigned* b, int line = __builtin_LINE()) {
  emu::check_types<A, B, C>();
  static_assert(M == 16 && N == 8 && K == 16 && !TA && TB, "emulator: mma.sync must be m16n8k16 row.col");
  emu::mma_m16n8k16(A == DataType::kFloat16, B == DataType::kFloat16, c, a, b, line);
}

inline uint32_t smem_ptr_to_uint(const void* p) {
  return uint32_t((const unsigned char*)p - emu::shared_memory());
}

union GmmaDescriptor {
  uint64_t desc_ = 0;
  uint32_t reg32_[2];
  GmmaDescriptor operator+(int units) const {
    GmmaDescriptor sum = *this;
    sum.reg32_[0] += uint32_t(units);
    return sum;
  }
  operator uint64_t() const { return desc_; }
};
// Offsets in units of 16 bytes; layout 0 none, 1 = 128-byte, 2 = 64-byte, 3 = 32-byte swizzle.
template <int LAYOUT, int LEADING, int STRIDE, class T>
inline void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  descriptor.desc_ = uint64_t(LAYOUT) << 62 | uint64_t(STRIDE & 0x3fff) << 32 | uint64_t(LEADING & 0x3fff) << 16 |
                     (smem_ptr_to_uint(start) >> 4 & 0x3fff);
}
template <class O> inline void increase_descriptor_offset(GmmaDescriptor& descriptor, O bytes) {
  descriptor.reg32_[0] += uint32_t(bytes) >> 4;
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB, int SA = 1, int SB = 1>
inline void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, bool accumulate, int line = __builtin_LINE()) {
  emu::check_types<A, B, C>();
  static_assert(M == 64 && K == 16 && N % 8 == 0 && N <= 256, "emulator: wgmma must be m64nNk16");
  emu::issue_wgmma({a, b, {}, (float*)c, N, false, TA, TB, A == DataType::kFloat16, B == DataType::kFloat16,
                    SA * SB < 0, accumulate}, line);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool TA, bool TB, int SA = 1, int SB = 1>
inline void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, bool accumulate, int line = __builtin_LINE()) {
  emu::check_types<A, B, C>();
  static_assert(M == 64 && K == 16 && N % 8 == 0 && N <= 256 && !TA, "emulator: wgmma must be m64nNk16");
  emu::issue_wgmma({0, b, {a[0], a[1], a[2], a[3]}, (float*)c, N, true, false, TB, A == DataType::kFloat16,
                    B == DataType::kFloat16, SA * SB < 0, accumulate}, line);
}
inline void warpgroup_arrive() { emu::fence_wgmma(); }
inline void warpgroup_commit_batch() { emu::commit_wgmma(); }
template <int N> inline void warpgroup_wait(int line = __builtin_LINE()) { emu::wait_wgmma(N, line); }
template <int N> inline void wait_wgmma(int line = __builtin_LINE()) { emu::wait_wgmma(N, line); }
template <class T> inline void warpgroup_fence_operand(T*, int) {}
inline void fence_proxy_async() { emu::fence_proxy(); }

}  // namespace tl
