// CUDA's keywords, vector types and 16-bit floats for a host compiler.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __forceinline__ inline

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

struct dim3 {
  unsigned x, y, z;
};

// A vector is aligned to its own size, as on the device: a misaligned 16-byte access faults or is reported.
#define EMU_VECTOR(T, name)                                                             \
  struct name##1 {                                                                      \
    T x;                                                                                \
  };                                                                                    \
  struct alignas(2 * sizeof(T)) name##2 {                                               \
    T x, y;                                                                             \
  };                                                                                    \
  struct name##3 {                                                                      \
    T x, y, z;                                                                          \
  };                                                                                    \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 {                     \
    T x, y, z, w;                                                                       \
  };                                                                                    \
  inline name##1 make_##name##1(T x) { return {x}; }                                    \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                            \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                    \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(signed char, char)
EMU_VECTOR(uchar, uchar)
EMU_VECTOR(short, short)
EMU_VECTOR(ushort, ushort)
EMU_VECTOR(int, int)
EMU_VECTOR(uint, uint)
EMU_VECTOR(long long, longlong)
EMU_VECTOR(unsigned long long, ulonglong)
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
#undef EMU_VECTOR

namespace emu {
inline uint32_t bits(float value) {
  uint32_t raw;
  memcpy(&raw, &value, 4);
  return raw;
}
inline float from_bits(uint32_t raw) {
  float value;
  memcpy(&value, &raw, 4);
  return value;
}
}  // namespace emu

// Round to nearest even, NaN becomes the device's canonical 0x7fff.
struct bfloat16_t {
  uint16_t raw;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t x = emu::bits(value);
    raw = value != value ? 0x7fff : uint16_t((x + 0x7fff + ((x >> 16) & 1)) >> 16);
  }
  template <class T> explicit bfloat16_t(T value) : bfloat16_t(float(value)) {}
  operator float() const { return emu::from_bits(uint32_t(raw) << 16); }
};

struct half_t {
  uint16_t raw;
  half_t() = default;
  explicit half_t(float value) {
    uint32_t x = emu::bits(value), sign = x >> 16 & 0x8000, size = x & 0x7fffffff;
    if (size > 0x7f800000) raw = 0x7fff;
    else if (size >= 0x477ff000) raw = sign | 0x7c00;  // 65520 and above
    else if (size < 0x38800000) raw = sign | (emu::bits(emu::from_bits(size) + 0.5f) - emu::bits(0.5f));  // subnormal
    else raw = sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
  }
  template <class T> explicit half_t(T value) : half_t(float(value)) {}
  operator float() const {
    uint32_t size = (raw & 0x7fff) << 13, sign = uint32_t(raw & 0x8000) << 16;
    if (size >= 0x7c00u << 13) return emu::from_bits(sign | 0x7f800000 | size);
    return emu::from_bits(sign | emu::bits(emu::from_bits(size) * 0x1p112f));
  }
};

// Arithmetic of two 16-bit values is rounded to 16 bits before anything else sees it, as on the device.
#define EMU_ARITHMETIC(T)                                                               \
  inline T operator+(T a, T b) { return T(float(a) + float(b)); }                       \
  inline T operator-(T a, T b) { return T(float(a) - float(b)); }                       \
  inline T operator*(T a, T b) { return T(float(a) * float(b)); }                       \
  inline T operator/(T a, T b) { return T(float(a) / float(b)); }                       \
  inline T operator-(T a) { return T(-float(a)); }                                      \
  inline T& operator+=(T& a, T b) { return a = a + b; }                                 \
  inline T& operator-=(T& a, T b) { return a = a - b; }                                 \
  inline T& operator*=(T& a, T b) { return a = a * b; }
EMU_ARITHMETIC(bfloat16_t)
EMU_ARITHMETIC(half_t)
#undef EMU_ARITHMETIC

typedef bfloat16_t __nv_bfloat16;
typedef half_t half;
typedef half_t __half;
struct alignas(4) __nv_bfloat162 {
  bfloat16_t x, y;
};
struct alignas(4) half2 {
  half_t x, y;
};
typedef half2 __half2;

inline float __bfloat162float(bfloat16_t v) { return v; }
inline bfloat16_t __float2bfloat16(float v) { return bfloat16_t(v); }
inline float __half2float(half_t v) { return v; }
inline half_t __float2half(float v) { return half_t(v); }
inline half_t __float2half_rn(float v) { return half_t(v); }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {bfloat16_t(a), bfloat16_t(b)}; }
inline float2 __half22float2(half2 v) { return {float(v.x), float(v.y)}; }
inline half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
inline half2 __floats2half2_rn(float a, float b) { return {half_t(a), half_t(b)}; }

namespace emu {
template <class T> inline unsigned pack(T low, T high) {
  static_assert(sizeof(T) == 2);
  unsigned word;
  T both[2] = {low, high};
  memcpy(&word, both, 4);
  return word;
}
}  // namespace emu
inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return emu::pack(a, b); }
inline unsigned __pack_half2(half_t a, half_t b) { return emu::pack(a, b); }
inline unsigned __pack_half2(bfloat16_t a, bfloat16_t b) { return emu::pack(a, b); }
