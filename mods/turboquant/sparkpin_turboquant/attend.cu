// Decode attention over the compressed cache, for sm_80 and newer: mma.sync, no header needed. README.md has the design,
// formats.py where bytes lie, kernel.py what the macros mean and who compiles and launches this.
//
// A block (CTA) of W warps works on tiles of T = 16 W tokens of one KV head. Warp w unpacks the keys of the tile's w-th
// group of 16 tokens straight into operands of S = Q K^T, which holds MT x 16 rows: query tokens x heads. The weights P go
// through shared memory to all warps, each of which unpacks the values of its D / W dimensions for O += P V. So every
// code is unpacked once, between products, and nothing but weights passes through shared memory in the loop.
//
// Macros besides device.cu's: MT, W, CTAS (for each multiprocessor).

#define T (16 * W)
#define DW (D / W)        // dimensions of the output for each warp
#define UNITS (DW / 32)
#define STEPS (D / 16)    // products of Q K^T
#define AT_ONCE (16 / W * MT < 6 ? 16 / W * MT : 6)  // queries that a warp loads at a time
#define CHAINS (MT == 1 ? 2 : 1)
#define WARP ((int)(threadIdx.x >> 5))
#define LOWEST -1.0e30f
#define INFINITE __int_as_float(0x7f800000)
#define MUCH 1.0e18f      // weights may grow to that before the reference of their exponents is moved

// heads: KV heads, each `splits` times if its group of query heads is too large for one block.
struct Args {
  u16* part;           // [programs + sequences, heads, rows, D] half: partial results
  float* logs;         // [programs + sequences, heads, rows]: log2 of their weights
  const u8* q;         // [tokens, heads * group, D]
  u8* out;             // the same
  const float* signs;  // [D]
  const u8* cache;
  const int* table;    // [requests, table_width] block numbers
  const int* lengths;  // [sequences] cached tokens
  const int* starts;   // [sequences + 1] first query of each
  const int* owners;   // [sequences] its row of the table, or null
  i64 q_stride, out_stride;       // elements
  i64 block_bytes, head_bytes;    // from block to block, from head to head within one
  i64 values, norms;              // where they start within a head's part of a block
  float scale;                    // of logits, for exponents to base 2
  float heads_share;              // 1 / group
  int sequences, programs, rows, group, splits, table_width, block_groups;
  u32 block_magic;                // ceil(2^32 / block_groups); unused where that is 1
  int bfloat;                     // queries of 16 bits: bfloat16, not half
};

// How the tiles of all sequences are cut into runs, one for each program. Lane i keeps what it needs of sequence i.
struct Work { int total, runs, b, before, length, start, end; };

__device__ __forceinline__ int tiles(int length) { return (length + T - 1) / T; }
__device__ __forceinline__ int length_of(const Args& a, int b) { return b < a.sequences ? a.lengths[b] : 0; }
__device__ __forceinline__ Work count(const Args& a) {
  Work work;
  work.length = length_of(a, LANE);
  work.start = a.starts[LANE < a.sequences ? LANE : a.sequences];
  work.end = a.starts[LANE + 1 < a.sequences ? LANE + 1 : a.sequences];
  int sum = tiles(work.length);
  for (int b = LANE + 32; b < a.sequences; b += 32) sum += tiles(a.lengths[b]);
  work.total = warp_sum(sum);
  work.runs = work.total > a.programs ? a.programs : work.total > 1 ? work.total : 1;
  return work;
}
__device__ __forceinline__ int first_of(const Work& work, int program) { return (int)((i64)program * work.total / work.runs); }
// The sequence of a tile, and how many tiles come before that sequence's.
__device__ __forceinline__ void find(const Args& a, Work& work, int tile) {
  int before = 0;
  for (int base = 0; base < a.sequences; base += 32) {
    const int mine = tiles(base ? length_of(a, base + LANE) : work.length);
    int sum = mine;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) { const int other = from_lane(sum, LANE - i); if ((int)LANE >= i) sum += other; }
    if (before + from_lane(sum, 31) > tile) {
      const int at = warp_sum(before + sum <= tile);
      work.b = base + at;
      work.before = before + from_lane(sum - mine, at);
      return;
    }
    before += from_lane(sum, 31);
  }
  work.b = a.sequences;
  work.before = before;
}

// The query token of a row.
__device__ __forceinline__ int token_of(const Args& a, int row) { return (int)((row + 0.5f) * a.heads_share); }

// Where component d of a query lies among the 16-bit numbers of the operands for one tile of rows.
__device__ __forceinline__ int operand_place(int row, int d) {
#if KEY_BITS == 8
  const int word = d / 4, t = word / 4 % 4, step = word / 16 * 4 + word % 4, high = d / 2 % 2, half = d % 2;
#else
  const int L = D >= 128 ? 4 : 2;
  const int word = d / 8, t = word / L % 4, own = word / (4 * L) * L + word % L, n = d % 8;
  const int step = own * 2 + n % 2, high = n / 4, half = n / 2 % 2;
#endif
  return ((step * 32 + row % 8 * 4 + t) * 4 + high * 2 + row / 8) * 2 + half;
}

// What a lane holds of 16 tokens' keys: tokens 4 (g / 2) + g % 2 and that + 2.
#if KEY_BITS == 8
struct Keys { uint4 c[2][D / 64]; };
#else
struct Keys { u32 w[2][D / 32]; };
#endif

__device__ __forceinline__ void load_keys(const u8* p, Keys& k) {
  const int g = LANE >> 2, t = LANE & 3;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u8* row = p + (4 * (g >> 1) + (g & 1) + 2 * i) * KEY_BYTES;
#if KEY_BITS == 8
#pragma unroll
    for (int c = 0; c < D / 64; c++) k.c[i][c] = read16(row + c * 64 + t * 16);
#elif D >= 128
#pragma unroll
    for (int c = 0; c < D / 128; c++) {
      const uint4 x = read16(row + c * 64 + t * 16);
      k.w[i][4 * c] = x.x; k.w[i][4 * c + 1] = x.y; k.w[i][4 * c + 2] = x.z; k.w[i][4 * c + 3] = x.w;
    }
#else
    const uint2 x = read8(row + t * 8);
    k.w[i][0] = x.x; k.w[i][1] = x.y;
#endif
  }
}

// Two products' worth (four for 8 bits: one) of a token's keys.
__device__ __forceinline__ void unpack_keys(const Table& table, const Keys& k, int i, int own, u32* r) {
#if KEY_BITS == 8
  const uint4 c = k.c[i][own / 2];
  const u32 x = (own & 1 ? c.z : c.x) ^ 0x80808080u, y = (own & 1 ? c.w : c.y) ^ 0x80808080u;
  r[0] = sub16(prmt(x, 0x64646464u, 0x4140), 0x64806480u); r[1] = sub16(prmt(x, 0x64646464u, 0x4342), 0x64806480u);
  r[2] = sub16(prmt(y, 0x64646464u, 0x4140), 0x64806480u); r[3] = sub16(prmt(y, 0x64646464u, 0x4342), 0x64806480u);
#else
  unpack_key(table, k.w[i][own], 0x6240, 0x7351, r);
#endif
}

// What a lane holds of 16 tokens' values: tokens 4 t to 4 t + 3 for its warp's dimensions.
struct Values { uint2 w[UNITS]; };

__device__ __forceinline__ void load_values(const u8* p, int warp, Values& v) {
#pragma unroll
  for (int u = 0; u < UNITS; u++) v.w[u] = read8(p + (warp * UNITS + u) * 256 + LANE * 8);
}
__device__ __forceinline__ void unpack_values(const Table& table, const Values& v, int u, int k, u32* r) {
  unpack_value(table, k ? v.w[u].y : v.w[u].x, 0x6240, 0x7351, r);
}

// Shared memory of a block.
struct Shared {
  uint4* queries;   // [MT][STEPS][32]
  uint4* weights;   // [2][W][MT][32]
  u64* values_at;   // [2][W]
  float* tops;      // [W][MT * 16]
  float* totals;    // the same
};
__device__ __forceinline__ Shared divide(uint4* memory) {
  Shared of;
  of.queries = memory;
  of.weights = of.queries + MT * STEPS * 32;
  of.values_at = (u64*)(of.weights + 2 * W * MT * 32);
  of.tops = (float*)(of.values_at + 2 * W);
  of.totals = of.tops + W * MT * 16;
  return of;
}

// A sequence that a program works on. tiles_before: how many tiles the sequences before it have.
struct Sequence { int number, tiles_before, length, first_query, queries; };

__device__ __forceinline__ Sequence sequence_of(const Args& a, Work& work, int tile) {
  find(a, work, tile);
  const int b = work.b;
  Sequence of;
  of.number = b;
  of.tiles_before = work.before;
  of.length = b < 32 ? from_lane(work.length, b) : a.lengths[b];
  of.first_query = b < 32 ? from_lane(work.start, b) : a.starts[b];
  of.queries = (b < 32 ? from_lane(work.end, b) : a.starts[b + 1]) - of.first_query;
  return of;
}
// Goes on to the next sequence that has tokens, unless its tiles begin at `last`, or behind it.
__device__ __forceinline__ bool advance(const Args& a, Sequence& of, int last) {
  do {
    of.tiles_before += tiles(of.length);
    if (of.tiles_before >= last) return false;
    of.length = a.lengths[++of.number];
  } while (!of.length);
  of.first_query = a.starts[of.number];
  of.queries = a.starts[of.number + 1] - of.first_query;
  return true;
}

__device__ __forceinline__ bool is_query(const Args& a, const Sequence& of, int row) {
  return row < of.queries * a.group && row < a.rows;
}
// Queries of rows start, start + W and so on.
__device__ __forceinline__ void load_queries(const Args& a, const Sequence& of, int start, Raw* raw) {
  const int head = blockIdx.y;
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) {
    const int row = start + i * W;
    const bool is = row < MT * 16 && is_query(a, of, row);
    const int token = is ? token_of(a, row) : 0;
    const i64 at = is ? (of.first_query + token) * a.q_stride + (head * a.group + row - token * a.group) * D : 0;
    raw[i] = load_row(a.q + (at + LANE * (D / 32)) * NUMBER_SIZE);
  }
}
// All of this warp's rows, rotated, as operands. A row that is no query is zero. raw: the first, which are loaded.
__device__ __forceinline__ void rotate_queries(
    const Args& a, const Sequence& of, const float* signs, Raw* raw, uint4* queries) {
  for (int start = WARP; start < MT * 16; start += AT_ONCE * W) {
    if (start > WARP) load_queries(a, of, start, raw);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int row = start + i * W;
      if (row >= MT * 16) continue;
      const bool is = is_query(a, of, row);
      float x[D / 32];
#pragma unroll
      for (int j = 0; j < D / 32; j++) x[j] = is ? component(raw[i], j, a.bfloat) * signs[j] : 0.f;
      hadamard(x);
      u16* const operands = (u16*)(queries + (row / 16) * STEPS * 32);
#pragma unroll
      for (int j = 0; j < D / 32; j++) operands[operand_place(row % 16, LANE * (D / 32) + j)] = (u16)held_halves(x[j], 0.f);
    }
  }
}

// A sequence's blocks, as far as one KV head goes.
struct Blocks {
  const int* numbers;  // by their order in the sequence
  const u8* origin;    // the head's part of block 0
  u32 last_group;      // of 16 tokens
};
__device__ __forceinline__ Blocks blocks_of(const Args& a, const Sequence& of) {
  Blocks blocks;
  blocks.numbers = a.table + (i64)(a.owners ? a.owners[of.number] : of.number) * a.table_width;
  blocks.origin = a.cache + (int)blockIdx.y / a.splits * a.head_bytes;
  blocks.last_group = (u32)(of.length - 1) / 16;
  return blocks;
}
// This warp's group of a tile, and the block that it lies in, by its order in the sequence.
__device__ __forceinline__ u32 group_of(const Blocks& blocks, int tile) {
  const u32 group = (u32)tile * W + WARP;
  return group < blocks.last_group ? group : blocks.last_group;
}
__device__ __forceinline__ u32 block_of(const Args& a, u32 group) {
  return a.block_groups == 1 ? group : __umulhi(group, a.block_magic);
}

// Where a group of 16 tokens lies: the head's part of its block, and which of the block's groups it is.
struct Place { const u8* part; u32 group; };

__device__ __forceinline__ Place place_of(const Args& a, const Blocks& blocks, u32 group, u32 index, int block) {
  Place at;
  at.part = blocks.origin + (i64)block * a.block_bytes;
  at.group = group - index * a.block_groups;
  return at;
}
__device__ __forceinline__ void load_group(const Args& a, const Place& at, Keys& keys, u64* values_at) {
  load_keys(at.part + at.group * (16 * KEY_BYTES), keys);
  if (LANE == 0) values_at[WARP] = (u64)(at.part + a.values + at.group * (16 * VALUE_BYTES));
}
__device__ __forceinline__ uint4 load_norms(const Args& a, const Place& at) {
  return read16(at.part + a.norms + at.group * 64 + (LANE & 3) * 16);
}

// Logits of a warp's 16 tokens. A lane has rows g (numbers 0 and 1) and g + 8 (2 and 3) of each 16, tokens 4 t and 4 t + 1
// (the first four), 4 t + 2 and 4 t + 3.
typedef float Logits[MT][2][4];

// S = Q K^T. With few rows each sum is two, as a product waits for the one before it.
__device__ __forceinline__ void multiply_keys(const Table& table, const Keys& keys, const uint4* queries, Logits& s) {
  Logits more;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 8; i++) s[m][i >> 2][i & 3] = more[m][i >> 2][i & 3] = 0.f;
#pragma unroll
  for (int own = 0; own < STEPS / 2; own++) {
    u32 x[4], y[4];
    unpack_keys(table, keys, 0, own, x);
    unpack_keys(table, keys, 1, own, y);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 q = queries[(m * STEPS + own * 2 + i) * 32 + LANE];
        mma_half(CHAINS > 1 && i ? more[m][0] : s[m][0], q, x[2 * i], x[2 * i + 1]);
        mma_half(CHAINS > 1 && i ? more[m][1] : s[m][1], q, y[2 * i], y[2 * i + 1]);
      }
  }
#if CHAINS > 1
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 8; i++) s[m][i >> 2][i & 3] += more[m][i >> 2][i & 3];
#endif
}

// Logits get their keys' norms and `a.scale`. Tokens behind a row's query, or behind the sequence, count for nothing.
__device__ __forceinline__ void scale_and_mask(
    const Args& a, const Sequence& of, int tile, uint4 norms, Logits& s, float* value_norm) {
  const u32 pair[4] = {norms.x, norms.y, norms.z, norms.w};
  float key_norm[4];
#pragma unroll
  for (int i = 0; i < 4; i++) { key_norm[i] = from_half(pair[i] & 0xffff) * a.scale; value_norm[i] = from_half(pair[i] >> 16); }
  const int g = LANE >> 2, t = LANE & 3, token = tile * T + WARP * 16 + t * 4;
  const bool masked = tile * T + T > of.length - of.queries + 1;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 8; i++) s[m][i >> 2][i & 3] *= key_norm[(i >> 2) * 2 + (i & 1)];
  if (masked) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int j = (i >> 2) * 2 + (i & 1), row = m * 16 + g + (i >> 1 & 1) * 8;
        const int end = of.length - of.queries + token_of(a, row);
        if (token + j > end || token + j >= of.length) s[m][i >> 2][i & 3] = -INFINITE;
      }
#pragma unroll
    for (int j = 0; j < 4; j++) if (token + j >= of.length) value_norm[j] = 0.f;
  }
}

// What a lane has of rows g and g + 8 of each 16. Weights are relative to `top`, which is a row's maximum over its first
// tile and is seldom moved; `total` is of the lane's own tokens.
struct Rows { float out[MT][DW / 8][4], top[MT][2], total[MT][2]; };

__device__ __forceinline__ void clear(Rows& rows) {
#pragma unroll
  for (int m = 0; m < MT; m++) {
    rows.top[m][0] = rows.top[m][1] = LOWEST;
    rows.total[m][0] = rows.total[m][1] = 0.f;
#pragma unroll
    for (int i = 0; i < DW / 8; i++) rows.out[m][i][0] = rows.out[m][i][1] = rows.out[m][i][2] = rows.out[m][i][3] = 0.f;
  }
}
// Weights P of a tile with their values' norms, into shared memory, and their sums by row. Returns the sum of all.
__device__ __forceinline__ float weigh(
    const Logits& s, const Rows& rows, const float* value_norm, uint4* weights, float (&sums)[MT][2]) {
  float all = 0.f;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    float p[8];
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = ex2(s[m][i >> 2][i & 3] - rows.top[m][i >> 1 & 1]);
    sums[m][0] = (p[0] + p[1]) + (p[4] + p[5]);
    sums[m][1] = (p[2] + p[3]) + (p[6] + p[7]);
    all += sums[m][0] + sums[m][1];
    weights[m * 32] = make_uint4(bfloats(p[0] * value_norm[0], p[1] * value_norm[1]), bfloats(p[2] * value_norm[0], p[3] * value_norm[1]),
                                 bfloats(p[4] * value_norm[2], p[5] * value_norm[3]), bfloats(p[6] * value_norm[2], p[7] * value_norm[3]));
  }
  return all;
}
// The whole block's: `top` rises to the largest of its logits so far, and what was summed is made relative to it.
__device__ __forceinline__ void raise_tops(const Logits& s, float* tops, Rows& rows) {
  const int g = LANE >> 2, t = LANE & 3;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x = fmaxf(fmaxf(s[m][0][2 * i], s[m][0][2 * i + 1]), fmaxf(s[m][1][2 * i], s[m][1][2 * i + 1]));
      x = fmaxf(x, across(x, 1)); x = fmaxf(x, across(x, 2));
      if (t == 0) tops[WARP * (MT * 16) + m * 16 + i * 8 + g] = x;
    }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x = rows.top[m][i];
#pragma unroll
      for (int j = 0; j < W; j++) x = fmaxf(x, tops[j * (MT * 16) + m * 16 + i * 8 + g]);
      const float factor = ex2(rows.top[m][i] - x);
      rows.top[m][i] = x;
      rows.total[m][i] *= factor;
#pragma unroll
      for (int j = 0; j < DW / 8; j++) { rows.out[m][j][2 * i] *= factor; rows.out[m][j][2 * i + 1] *= factor; }
    }
}
// O += P V for this warp's dimensions. weights: all warps'.
__device__ __forceinline__ void multiply_values(const Table& table, const Values* values, const uint4* weights, Rows& rows) {
#pragma unroll
  for (int i = 0; i < W; i++) {
    uint4 p[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) p[m] = weights[(i * MT + m) * 32 + LANE];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 x[4];
        unpack_values(table, values[i], u, k, x);
#pragma unroll
        for (int m = 0; m < MT; m++) {
          mma_bfloat(rows.out[m][u * 4 + k * 2], p[m], x[0], x[1]);
          mma_bfloat(rows.out[m][u * 4 + k * 2 + 1], p[m], x[2], x[3]);
        }
      }
  }
}
// A sequence's part of the result, divided by its weights' sum, and that sum's logarithm.
__device__ __forceinline__ void store_partial(const Args& a, const Sequence& of, const Rows& rows, float* totals) {
  const int g = LANE >> 2, t = LANE & 3;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x = rows.total[m][i];
      x += across(x, 1); x += across(x, 2);
      if (t == 0) totals[WARP * (MT * 16) + m * 16 + i * 8 + g] = x;
    }
  __syncthreads();
  const i64 first_row = ((i64)(blockIdx.x + of.number) * gridDim.y + (int)blockIdx.y) * a.rows;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = m * 16 + i * 8 + g;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < W; j++) sum += totals[j * (MT * 16) + row];
      if (row >= a.rows) continue;
      const float one = sum > 0.f ? 1.f / sum : 0.f;
      if (WARP == 0 && t == 0) a.logs[first_row + row] = sum > 0.f ? rows.top[m][i] + log2f(sum) : -INFINITE;
      u32* const pairs = (u32*)(a.part + (first_row + row) * D + WARP * DW) + t;
#pragma unroll
      for (int j = 0; j < DW / 8; j++) pairs[j * 4] = held_halves(rows.out[m][j][2 * i] * one, rows.out[m][j][2 * i + 1] * one);
    }
  __syncthreads();
}

// Grid (programs, heads): each program's run of tiles, by sequence. While a tile's weights and values are worked on, the
// next one's keys are on their way.
extern "C" __global__ void __launch_bounds__(32 * W, CTAS) attend(const Args a) {
#ifdef __CUDACC__
  extern __shared__ uint4 shared[];
#endif
  const Shared memory = divide(shared);
  const Table keys_table = key_table(), values_table = value_table();
  Work work = count(a);
  others_may_start();
  if ((int)blockIdx.x >= work.runs) return;
  const int first = first_of(work, blockIdx.x), last = first_of(work, blockIdx.x + 1);
  if (first >= last) return;
  Sequence sequence = sequence_of(a, work, first);
  do {
    const int from = first > sequence.tiles_before ? first - sequence.tiles_before : 0;
    const int to = last - sequence.tiles_before < tiles(sequence.length) ? last - sequence.tiles_before : tiles(sequence.length);
    float signs[D / 32];
#pragma unroll
    for (int j = 0; j < D / 32; j++) signs[j] = a.signs[LANE * (D / 32) + j];

    Raw raw[AT_ONCE];
    load_queries(a, sequence, WARP, raw);  // before a block's number is waited for
    const Blocks blocks = blocks_of(a, sequence);
    const u32 group = group_of(blocks, from), index = block_of(a, group);
    Place at = place_of(a, blocks, group, index, blocks.numbers[index]);
    Keys keys;
    load_group(a, at, keys, memory.values_at);
    uint4 norms = load_norms(a, at);
    rotate_queries(a, sequence, signs, raw, memory.queries);
    __syncthreads();

    Rows rows;
    clear(rows);
    for (int tile = from; tile < to; tile++) {
      const int odd = (tile - from) & 1;
      Values values[W];
#pragma unroll
      for (int i = 0; i < W; i++) load_values((const u8*)memory.values_at[odd * W + i], WARP, values[i]);
      const u32 next = group_of(blocks, tile + 1), next_index = block_of(a, next);
      const int next_block = blocks.numbers[next_index];

      Logits s;
      multiply_keys(keys_table, keys, memory.queries, s);
      at = place_of(a, blocks, next, next_index, next_block);
      load_group(a, at, keys, memory.values_at + (odd ^ 1) * W);

      float value_norm[4], sums[MT][2];
      scale_and_mask(a, sequence, tile, norms, s, value_norm);
      uint4* const weights = memory.weights + odd * W * MT * 32;
      uint4* const mine = weights + WARP * MT * 32 + LANE;
      if (__syncthreads_or(tile == from || !(weigh(s, rows, value_norm, mine, sums) < MUCH))) {
        raise_tops(s, memory.tops, rows);
        weigh(s, rows, value_norm, mine, sums);
        __syncthreads();
      }
#pragma unroll
      for (int m = 0; m < MT; m++) { rows.total[m][0] += sums[m][0]; rows.total[m][1] += sums[m][1]; }
      norms = load_norms(a, at);
      multiply_values(values_table, values, weights, rows);
    }
    store_partial(a, sequence, rows, memory.totals);
  } while (advance(a, sequence, last));
}

// Grid (rows, heads, sequences), up to 32 warps: partial results -> out, rotated back. A sequence of no tokens gives zeros.
extern "C" __global__ void __launch_bounds__(1024) merge(const Args a) {
#ifdef __CUDACC__
  extern __shared__ uint4 shared[];
#endif
  const int warps = blockDim.x / 32;
  float* const sums = (float*)shared;       // [warps][D]
  float* const tops = sums + warps * D;     // [warps]
  float* const shares = tops + warps;       // [warps]
  const int lane = LANE, warp = threadIdx.x >> 5, m = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const int E = D / 32, MANY = 5;
  float signs[E];
#pragma unroll
  for (int j = 0; j < E; j++) signs[j] = a.signs[lane * E + j];
  wait_for_others();
  const int query = a.starts[b], end = a.starts[b + 1];
  const Work work = count(a);
  const int mine = tiles(a.lengths[b]);
  int before = 0;
  for (int i = lane; i < b; i += 32) before += tiles(a.lengths[i]);
  if (b) before = warp_sum(before);
  const int token = token_of(a, m);
  if (token >= end - query) return;
  float sum[E];
#pragma unroll
  for (int j = 0; j < E; j++) sum[j] = 0.f;
  float top = LOWEST, weight = 0.f;
  if (mine > 0) {
    // Program p works on tile i when p * total / runs <= i < (p + 1) * total / runs.
    const int first = (int)(((i64)(before + 1) * work.runs - 1) / work.total);
    const int last = (int)(((i64)(before + mine) * work.runs - 1) / work.total);
    for (int start = first + warp; start <= last; start += warps * MANY) {
      u32 x[MANY][E / 2];
      float log[MANY];
#pragma unroll
      for (int i = 0; i < MANY; i++) {
        const int p = start + i * warps;
        log[i] = -INFINITE;
#pragma unroll
        for (int j = 0; j < E / 2; j++) x[i][j] = 0;
        if (p > last) continue;
        const i64 at = ((i64)(p + b) * gridDim.y + head) * a.rows + m;
        log[i] = a.logs[at];
        const u16* const from = a.part + at * D + lane * E;
#if D == 256
        const uint4 y = *(const uint4*)from;
        x[i][0] = y.x; x[i][1] = y.y; x[i][2] = y.z; x[i][3] = y.w;
#elif D == 128
        const uint2 y = *(const uint2*)from;
        x[i][0] = y.x; x[i][1] = y.y;
#else
        x[i][0] = *(const u32*)from;
#endif
      }
      float now = top;
#pragma unroll
      for (int i = 0; i < MANY; i++) now = fmaxf(now, log[i]);
      const float factor = ex2(top - now);
      top = now;
      weight *= factor;
#pragma unroll
      for (int j = 0; j < E; j++) sum[j] *= factor;
#pragma unroll
      for (int i = 0; i < MANY; i++) {
        const float w = ex2(log[i] - now);
        weight += w;
#pragma unroll
        for (int j = 0; j < E / 2; j++) { sum[2 * j] += w * from_half(x[i][j] & 0xffff); sum[2 * j + 1] += w * from_half(x[i][j] >> 16); }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < E; j++) sums[warp * D + j * 32 + lane] = sum[j];
  if (lane == 0) { tops[warp] = top; shares[warp] = weight; }
  __syncthreads();

  // Of the warps' sums: a thread for each component, in the order j * 32 + lane; then the first warp rotates.
  float all = lane < warps ? tops[lane] : LOWEST;
#pragma unroll
  for (int i = 16; i; i >>= 1) all = fmaxf(all, across(all, i));
  const float w = lane < warps ? ex2(tops[lane] - all) : 0.f;
  weight = lane < warps ? shares[lane] * w : 0.f;
#pragma unroll
  for (int i = 16; i; i >>= 1) weight += across(weight, i);
  const float one = weight > 0.f ? 1.f / weight : 0.f;
  for (int d = threadIdx.x; d < D; d += blockDim.x) {
    float y = 0.f;
    for (int i = 0; i < warps; i++) y += sums[i * D + d] * from_lane(w, i);
    sums[d] = y * one;
  }
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int j = 0; j < E; j++) sum[j] = sums[j * 32 + lane];
  hadamard(sum);
  const i64 at = (query + token) * a.out_stride + (head * a.group + m - token * a.group) * D + lane * E;
#pragma unroll
  for (int j = 0; j < E; j++) sum[j] *= signs[j];
  store_row(a.out + at * NUMBER_SIZE, sum, a.bfloat);
}

#ifndef __CUDACC__
static void call(int which, const void* args) { which ? merge(*(const Args*)args) : attend(*(const Args*)args); }
#endif
