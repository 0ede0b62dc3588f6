// Kernels on a CPU: every lane is a fiber, the instructions of a warp and of a block wait for all of its lanes.
// Included by device.cu where no CUDA compiler reads it; `run` at the end is called by tests through ctypes.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define LANE ((int)(now & 31))
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct Dim3 { u32 x, y, z; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Slot { uint4 a; u32 b0, b1; };
static int now, lanes;
static Dim3 threadIdx, blockIdx, blockDim, gridDim;
static uint4* shared;
static ucontext_t scheduler;
struct Fiber { ucontext_t context; char* stack; bool done; };
static const int STACK = 1 << 16;
static Fiber fibers[1024];
static void yield() { const int me = now; swapcontext(&fibers[me].context, &scheduler); now = me; threadIdx.x = me; }

// Rounds of a group of lanes; slots alternate, as a lane may be one round ahead of another.
struct Group { int arrived, round; Slot slots[2][32]; int votes[2]; };
static Group groups[33];  // a warp each, and the block
static Slot* meet(Group& group, int members, const Slot& mine, int vote = 0) {
  const int round = group.round, odd = round & 1;
  if (group.arrived == 0) group.votes[odd] = 0;
  group.slots[odd][now & 31] = mine;
  group.votes[odd] |= vote;
  if (++group.arrived == members) { group.arrived = 0; group.round++; }
  while (group.round == round) yield();
  return group.slots[odd];
}
static Slot* meet_warp(const Slot& mine) { return meet(groups[now / 32], 32, mine); }
static int __syncthreads_or(int vote) {
  Group& group = groups[32];
  const int odd = group.round & 1;
  meet(group, lanes, Slot{}, vote);
  return group.votes[odd];
}
static void __syncthreads() { __syncthreads_or(0); }
static float __int_as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static u32 bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static float across(float x, int by) { return __int_as_float(meet_warp({{bits(x)}})[(now & 31) ^ by].a.x); }
static int from_lane(int x, int lane) { return (int)meet_warp({{(u32)x}})[lane & 31].a.x; }
static float from_lane(float x, int lane) { return __int_as_float((u32)from_lane((int)bits(x), lane)); }
static u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

static float half(u32 h) { _Float16 x; const u16 v = (u16)h; memcpy(&x, &v, 2); return (float)x; }
static u32 to_half(float f) { const _Float16 x = (_Float16)f; u16 v; memcpy(&v, &x, 2); return v; }
static float bfloat(u32 h) { return __int_as_float(h << 16); }
static u32 to_bfloat(float f) { const u32 x = bits(f); return f != f ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16; }
static u32 halves(float lo, float hi) { return to_half(lo) | to_half(hi) << 16; }
static float held(float f) { return f != f ? f : fminf(fmaxf(f, -65504.f), 65504.f); }
static u32 held_halves(float lo, float hi) { return halves(held(lo), held(hi)); }
static u32 bfloats(float lo, float hi) { return to_bfloat(lo) | to_bfloat(hi) << 16; }
static float from_half(u32 x) { return half(x & 0xffff); }
static u32 sub16(u32 a, u32 b) { return halves(half(a) - half(b), half(a >> 16) - half(b >> 16)); }
static u32 mul16(u32 a, u32 b) { return halves(half(a & 0xffff) * half(b & 0xffff), half(a >> 16) * half(b >> 16)); }
static float least(float a, float b) { return a != a || a < b ? a : b; }  // NaN where one of both is none
static u32 min16(u32 a, u32 b) { return halves(least(half(a & 0xffff), half(b & 0xffff)), least(half(a >> 16), half(b >> 16))); }
static void __syncwarp() { meet_warp({}); }
static float ex2(float x) { return exp2f(x); }
static u32 prmt(u32 a, u32 b, u32 s) {
  const u64 both = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 pick = s >> 4 * i & 15, byte = (u32)(both >> 8 * (pick & 7)) & 255;
    r |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}
// The PTX manual's fragments of m16n8k16.
static void mma(float* c, uint4 a, u32 b0, u32 b1, float number(u32)) {
  const Slot* slots = meet_warp({a, b0, b1});
  const int g = (now & 31) >> 2, t = now & 3;
  for (int i = 0; i < 4; i++) {
    const int row = g + (i >> 1) * 8, column = 2 * t + (i & 1);
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      const Slot &left = slots[row % 8 * 4 + k % 8 / 2], &right = slots[column * 4 + k % 8 / 2];
      const u32 x = (&left.a.x)[row / 8 + k / 8 * 2], y = k < 8 ? right.b0 : right.b1;
      sum += number(x >> k % 2 * 16 & 0xffff) * number(y >> k % 2 * 16 & 0xffff);
    }
    c[i] += sum;
  }
}
static void mma_half(float* c, uint4 a, u32 b0, u32 b1) { mma(c, a, b0, b1, half); }
static void mma_bfloat(float* c, uint4 a, u32 b0, u32 b1) { mma(c, a, b0, b1, bfloat); }
static uint4 read16(const u8* p) { uint4 r; memcpy(&r, (const uint4*)__builtin_assume_aligned(p, 16), 16); return r; }
static uint2 read8(const u8* p) { uint2 r; memcpy(&r, p, 8); return r; }
static void write16(u16* p, uint4 x) { memcpy(__builtin_assume_aligned(p, 16), &x, 16); }
static void others_may_start() {}
static void wait_for_others() {}

static void call(int which, const void* args);  // a kernel of the file
static int which_;
static const void* arguments;
static void start() { call(which_, arguments); fibers[now].done = true; }
extern "C" void run(int which, int x, int y, int z, int threads, int bytes, const void* args) {
  arguments = args;
  which_ = which;
  lanes = threads;
  blockDim = {(u32)threads, 1, 1};
  gridDim = {(u32)x, (u32)y, (u32)z};
  for (int block = 0; block < x * y * z; block++) {
    blockIdx = {(u32)(block % x), (u32)(block / x % y), (u32)(block / x / y)};
    shared = (uint4*)malloc(bytes + 16);
    memset(shared, 255, bytes + 16);
    memset(groups, 0, sizeof groups);
    for (int i = 0; i < threads; i++) {
      fibers[i].done = false;
      fibers[i].stack = fibers[i].stack ? fibers[i].stack : (char*)malloc(STACK);
      getcontext(&fibers[i].context);
      fibers[i].context.uc_stack.ss_sp = fibers[i].stack;
      fibers[i].context.uc_stack.ss_size = STACK;
      fibers[i].context.uc_link = &scheduler;
      makecontext(&fibers[i].context, start, 0);
    }
    for (int left = threads; left;)
      for (int i = 0; i < threads; i++)
        if (!fibers[i].done) {
          now = i;
          threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i].context);
          left -= fibers[i].done;
        }
    free(shared);
  }
}
