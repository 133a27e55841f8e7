// Device math through the host's libm: the approximate intrinsics (__expf, ...) are as exact as the others.
#pragma once
#include "types.h"

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF ((double)INFINITY)
#define CUDART_NAN ((double)NAN)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> inline T __ldg(const T* p) { return *p; }

// The h* functions of both 16-bit types, evaluated in float32 and rounded once.
#define EMU_HALF_MATH(name, expression)                                                 \
  inline half_t name(half_t h) {                                                        \
    float x = h;                                                                        \
    return half_t(expression);                                                          \
  }                                                                                     \
  inline bfloat16_t name(bfloat16_t h) {                                                \
    float x = h;                                                                        \
    return bfloat16_t(expression);                                                      \
  }
EMU_HALF_MATH(hexp, expf(x))
EMU_HALF_MATH(hexp2, exp2f(x))
EMU_HALF_MATH(hlog, logf(x))
EMU_HALF_MATH(hlog2, log2f(x))
EMU_HALF_MATH(hsqrt, sqrtf(x))
EMU_HALF_MATH(hrsqrt, 1.0f / sqrtf(x))
EMU_HALF_MATH(hrcp, 1.0f / x)
EMU_HALF_MATH(htanh, tanhf(x))
EMU_HALF_MATH(hfloor, floorf(x))
EMU_HALF_MATH(hceil, ceilf(x))
EMU_HALF_MATH(__habs, fabsf(x))
#undef EMU_HALF_MATH

namespace tl {

template <class T> inline T fast_max(T a, T b) { return a < b ? b : a; }
template <class T> inline T fast_min(T a, T b) { return b < a ? b : a; }
template <> inline float fast_max(float a, float b) { return fmaxf(a, b); }
template <> inline float fast_min(float a, float b) { return fminf(a, b); }
inline float fast_rcp(float x) { return 1.0f / x; }
inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 sub2(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 fma2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
inline float clamp(float x, float low, float high) {
  if (x != x || low != low || high != high) return x != x ? x : low != low ? low : high;
  return fminf(fmaxf(x, low), high);
}
template <class T> inline T clamp(T x, T low, T high) { return T(clamp(float(x), float(low), float(high))); }

}  // namespace tl
