// What attend.cu and cache.cu share, compiled in front of each: instructions, the transform, codes to numbers.
// Macros: D, KEY_BITS (8 or 4; values have 4), KEY_TABLE, VALUE_TABLE (see `Table`), WIDE (rows of float, not of half or
// bfloat16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef __CUDACC__
#define LANE (threadIdx.x & 31)
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
__device__ __forceinline__ float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ u32 sub16(u32 a, u32 b) { u32 r; asm("sub.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 halves(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
// Held at 65504, where float16 ends, instead of becoming infinite; what is no number stays none.
__device__ __forceinline__ u32 held_halves(float lo, float hi) { u32 r; asm("cvt.rn.satfinite.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ u32 bfloats(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float from_half(u32 x) { float r; asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x)); return r; }
__device__ __forceinline__ void mma_half(float* c, uint4 a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bfloat(float* c, uint4 a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 mul16(u32 a, u32 b) { u32 r; asm("mul.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 min16(u32 a, u32 b) { u32 r; asm("min.NaN.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ void write16(u16* p, uint4 x) { asm volatile("st.global.cg.v4.u32 [%0],{%1,%2,%3,%4};" :: "l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory"); }
// The cache is read once: no place in L1.
__device__ __forceinline__ uint4 read16(const u8* p) { uint4 r; asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p)); return r; }
__device__ __forceinline__ uint2 read8(const u8* p) { uint2 r; asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "l"(p)); return r; }
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void others_may_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ __forceinline__ void others_may_start() {}
__device__ __forceinline__ void wait_for_others() {}
#endif
__device__ __forceinline__ float across(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
__device__ __forceinline__ int from_lane(int x, int lane) { return __shfl_sync(~0u, x, lane); }
__device__ __forceinline__ float from_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }
#else
#include "shim.h"
#endif

#define KEY_BYTES (D * KEY_BITS / 8)
#define VALUE_BYTES (D / 2)

__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += from_lane(x, LANE ^ i);
  return x;
}

// A lane's D / 32 neighbours of a row of keys, values, queries or results, as they lie.
#if WIDE
struct Raw { float x[D / 32]; };
#else
struct Raw { u32 x[D / 64]; };
#endif
__device__ __forceinline__ Raw load_row(const u8* p) {
  Raw r;
#if WIDE
#pragma unroll
  for (int j = 0; j < D / 32; j++) r.x[j] = ((const float*)p)[j];
#elif D == 256
  const uint4 x = *(const uint4*)p;
  r.x[0] = x.x; r.x[1] = x.y; r.x[2] = x.z; r.x[3] = x.w;
#elif D == 128
  const uint2 x = *(const uint2*)p;
  r.x[0] = x.x; r.x[1] = x.y;
#else
  r.x[0] = *(const u32*)p;
#endif
  return r;
}
__device__ __forceinline__ float component(const Raw& r, int j, int bfloat) {
#if WIDE
  return r.x[j];
#else
  if (bfloat) return __int_as_float(j & 1 ? r.x[j / 2] & 0xffff0000u : r.x[j / 2] << 16);
  return from_half(j & 1 ? r.x[j / 2] >> 16 : r.x[j / 2] & 0xffff);
#endif
}
#define NUMBER_SIZE (WIDE ? 4 : 2)
__device__ __forceinline__ void store_row(u8* p, const float* x, int bfloat) {
#if WIDE
#pragma unroll
  for (int j = 0; j < D / 32; j++) ((float*)p)[j] = x[j];
#else
#pragma unroll
  for (int j = 0; j < D / 32; j += 2) ((u32*)p)[j / 2] = bfloat ? bfloats(x[j], x[j + 1]) : halves(x[j], x[j + 1]);
#endif
}

// Orthonormal Walsh-Hadamard transform of D numbers, lane i holding D / 32 neighbours.
__device__ __forceinline__ void hadamard(float* x) {
#pragma unroll
  for (int i = 1; i < D / 32; i <<= 1)
#pragma unroll
    for (int j = 0; j < D / 32; j++) if (!(j & i)) { const float u = x[j], v = x[j | i]; x[j] = u + v; x[j | i] = u - v; }
#pragma unroll 1  // code that is short is fetched soon
  for (int i = 1; i < 32; i <<= 1)
#pragma unroll
    for (int j = 0; j < D / 32; j++) { const float v = across(x[j], i); x[j] = LANE & i ? v - x[j] : v + x[j]; }
#pragma unroll
  for (int j = 0; j < D / 32; j++) x[j] *= D == 256 ? 0.0625f : D == 128 ? 0.08838834764831845f : 0.125f;
}

// Eight codes to numbers. Magnitudes are found by their three bits; h: high bytes, l: low bytes.
struct Table { u32 h0, h1, l0, l1; };
__device__ __forceinline__ Table key_table() { Table t = {KEY_TABLE}; return t; }
__device__ __forceinline__ Table value_table() { Table t = {VALUE_TABLE}; return t; }

// Numbers 0 to 7 by the selectors `even` and `odd`: 0x6240, 0x7351 make (0, 2), (4, 6), (1, 3), (5, 7) of them and
// 0x5140, 0x7362 make (0, 1), (4, 5), (2, 3), (6, 7).
// Keys: nibble n has its magnitude in bits 0 to 2; its sign is in bit 8 n + 7 (n < 4) or 8 (n - 4) + 3.
__device__ __forceinline__ void unpack_key(const Table& t, u32 w, u32 even, u32 odd, u32* r) {
  const u32 a = w & 0x77777777u, b = a >> 16;
  const u32 h0 = prmt(t.h0, t.h1, a) | (w & 0x80808080u), l0 = prmt(t.l0, t.l1, a);
  const u32 h1 = prmt(t.h0, t.h1, b) | ((w << 4) & 0x80808080u), l1 = prmt(t.l0, t.l1, b);
  r[0] = prmt(l0, h0, even); r[2] = prmt(l0, h0, odd);
  r[1] = prmt(l1, h1, even); r[3] = prmt(l1, h1, odd);
}
// Values: each nibble has its sign in bit 3.
__device__ __forceinline__ void unpack_value(const Table& t, u32 w, u32 even, u32 odd, u32* r) {
  const u32 a = w & 0x77777777u, b = a >> 16, v = w << 4;
  const u32 h0 = prmt(t.h0, t.h1, a) | (prmt(v, w, 0x5140) & 0x80808080u), l0 = prmt(t.l0, t.l1, a);
  const u32 h1 = prmt(t.h0, t.h1, b) | (prmt(v, w, 0x7362) & 0x80808080u), l1 = prmt(t.l0, t.l1, b);
  r[0] = prmt(l0, h0, even); r[2] = prmt(l0, h0, odd);
  r[1] = prmt(l1, h1, even); r[3] = prmt(l1, h1, odd);
}
