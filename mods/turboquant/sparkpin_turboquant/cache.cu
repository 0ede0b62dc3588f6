// All but attention: new tokens into the cache, a history out of it for prefill, queries into the rotated space and
// results back. After device.cu. Macros besides its: EDGES, LEVELS (see `encode`), MOST (largest norms of key and value,
// halves, whose products with all levels are finite), EXPAND_WARPS, ROW_WARPS.

#define E (D / 32)

// Where in a block: from block to block, from head to head, and in a head's part where values and norms start.
struct At { i64 block_bytes, head_bytes, values, norms; };

struct Store {
  const u8 *key, *value;     // [tokens, heads, D]
  u8* cache;
  const i64* slots;          // [tokens]: block * block_size + place; negative: padding
  const float* signs;        // [D]
  i64 key_stride, value_stride;  // elements from token to token
  At at;
  int tokens, heads, block_size, bfloat;
};

// The larger one; NaN where one of both is no number, which fmaxf would hide.
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// A lane's components to codes, which are a magnitude's index below a sign; BITS 8: int8. The norm is the same in all lanes,
// at most 65504, and NaN where a component is no number.
template <int BITS> __device__ __forceinline__ u32 encode(float* y, u8* codes) {
  float size = 0.f;
  if (BITS == 8) {
#pragma unroll
    for (int j = 0; j < E; j++) size = larger(size, fabsf(y[j]));
#pragma unroll
    for (int i = 16; i; i >>= 1) size = larger(size, across(size, i));
    const u32 norm = held_halves(size / 127.f, 0.f);
    const float step = from_half(norm);
#pragma unroll
    for (int j = 0; j < E; j++) codes[j] = (u8)(int)floorf(fminf(fmaxf(step > 0.f ? y[j] / step : 0.f, -127.f), 127.f) + 0.5f);
    return norm;
  }
#pragma unroll
  for (int j = 0; j < E; j++) size += y[j] * y[j];
#pragma unroll
  for (int i = 16; i; i >>= 1) size += across(size, i);
  const float length = sqrtf(size), unit = (D == 256 ? 16.f : D == 128 ? 11.313708498984761f : 8.f) / (length > 0.f ? length : 1.f);
  const float edges[] = {EDGES}, levels[] = {LEVELS};
  float coded = 0.f;
#pragma unroll
  for (int j = 0; j < E; j++) {
    const float u = y[j] * unit;
    float level = levels[0];
    u32 index = 0;
#pragma unroll
    for (int i = 0; i < 7; i++) {
      const bool above = !(fabsf(u) <= edges[i]);  // what is no number, too, as in naive.py
      index += above;
      level = above ? levels[i + 1] : level;
    }
    coded += level * level;
    codes[j] = (u8)(index | (u < 0.f ? 8u : 0u));
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) coded += across(coded, i);
  return held_halves(length / sqrtf(coded), 0.f);
}

// Codes of a row, in shared memory, to bytes, as formats.Layout says.
__device__ __forceinline__ void pack_key(const u8* code, u8* packed) {
#if KEY_BITS == 8
#pragma unroll
  for (int j = 0; j < D / 128 + (D == 64); j++)
    if (D >= 128 || LANE < 16) ((u32*)packed)[j * 32 + LANE] = ((const u32*)code)[j * 32 + LANE];
#else
  for (int w = LANE; w < D / 8; w += 32) {
    u32 word = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) { const u32 m = code[8 * w + n]; word |= (m & 7) << 4 * n | (m >> 3) << (n < 4 ? 8 * n + 7 : 8 * n - 29); }
    ((u32*)packed)[w] = word;
  }
#endif
}
__device__ __forceinline__ void pack_value(const u8* code, u8* packed, int token) {
  for (int i = LANE; i < D / 2; i += 32) {
    const int r = i / 8, g = i % 8;
    packed[r / 2 * 256 + g * 32 + token / 4 * 8 + r % 2 * 4 + token % 4] = (u8)(code[16 * r + g] | code[16 * r + 8 + g] << 4);
  }
}

// A warp for each token, head, and key or value; ROW_WARPS of them in a block, whose shared memory holds their codes.
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS) store(const Store a) {
#ifdef __CUDACC__
  extern __shared__ uint4 shared[];
#endif
  const int lane = LANE, task = blockIdx.x * ROW_WARPS + (threadIdx.x >> 5);
  const int is_value = task & 1, head = task / 2 % a.heads, token = task / 2 / a.heads;
  if (token >= a.tokens) return;
  const i64 slot = a.slots[token];
  if (slot < 0) return;
  const i64 block = slot / a.block_size;
  const int place = (int)(slot - block * a.block_size);
  u8* const here = a.cache + block * a.at.block_bytes + head * a.at.head_bytes;
  u8* const codes = (u8*)shared + (threadIdx.x >> 5) * D;
  const Raw raw = load_row((is_value ? a.value : a.key) + ((is_value ? a.value_stride : a.key_stride) * token + head * D + lane * E) * NUMBER_SIZE);
  float y[E];
#pragma unroll
  for (int j = 0; j < E; j++) y[j] = component(raw, j, a.bfloat) * a.signs[lane * E + j];
  hadamard(y);
  u32 norm;
  if (is_value) {
    norm = encode<4>(y, codes + lane * E);
    __syncwarp();
    pack_value(codes, here + a.at.values + place / 16 * (16 * VALUE_BYTES), place % 16);
  } else {
    norm = encode<KEY_BITS>(y, codes + lane * E);
    __syncwarp();
    pack_key(codes, here + place * KEY_BYTES);
  }
  if (lane == 0) ((u16*)(here + a.at.norms))[2 * place + is_value] = (u16)norm;
}

struct Expand {
  const u8* cache;
  const int* row;      // block numbers of the sequence
  u16 *key, *value;    // [heads, >= count, D] half: codes times norms, rotated
  i64 stride;          // elements from head to head
  At at;
  int first, count, block_groups;
  int overlap;         // `turn` or another `expand` may still run, and the next one may start
};

__device__ __forceinline__ void put(u16* packed, const u32* r, u32 norm) {
  write16(packed, make_uint4(mul16(r[0], norm), mul16(r[2], norm), mul16(r[1], norm), mul16(r[3], norm)));
}

// Grid (GROUPS of 16 tokens, heads). A block takes the codes of its groups, which lie one after another, to shared memory.
// A warp works on 64 components of 16 tokens, a lane on eight components, which are 16 bytes of the result, of tokens 4 t
// to 4 t + 3.
#define GROUPS (EXPAND_WARPS * 64 / D)
extern "C" __global__ void __launch_bounds__(32 * EXPAND_WARPS) expand(const Expand a) {
#ifdef __CUDACC__
  extern __shared__ uint4 shared[];
#endif
  if (a.overlap) others_may_start();
  const int c = LANE & 7, t = LANE >> 3, warp = threadIdx.x >> 5, segment = warp % (D / 64), head = blockIdx.y;
  const int first_group = a.first / 16 + blockIdx.x * GROUPS, groups = (a.first + a.count - 1) / 16 + 1 - first_group;
  auto head_of = [&](int group, int& place) {
    const int n = first_group + group, index = n / a.block_groups;
    place = n - index * a.block_groups;
    return a.cache + a.row[index] * a.at.block_bytes + head * a.at.head_bytes;
  };
#pragma unroll
  for (int start = 0; start < GROUPS * (KEY_BYTES + VALUE_BYTES); start += 32 * EXPAND_WARPS) {
    const int i = start + threadIdx.x, of_values = i >= GROUPS * KEY_BYTES, at = of_values ? i - GROUPS * KEY_BYTES : i;
    const int bytes = of_values ? VALUE_BYTES : KEY_BYTES, group = at / bytes;
    if (i >= GROUPS * (KEY_BYTES + VALUE_BYTES) || group >= groups) continue;
    int place;
    const u8* const from = head_of(group, place) + (of_values ? a.at.values : 0);
    shared[i] = read16(from + place * (16 * bytes) + (at - group * bytes) * 16);
  }
  const int group = warp / (D / 64), n = first_group + group, chunk = segment * 8 + c;
  uint4 pairs = make_uint4(0, 0, 0, 0);
  if (group < groups) {
    int place;
    pairs = read16(head_of(group, place) + a.at.norms + place * 64 + t * 16);
  }
  __syncthreads();
  if (group >= groups) return;
  const u8* const keys = (const u8*)(shared + group * KEY_BYTES) + 4 * t * KEY_BYTES;
  const u8* const values = (const u8*)(shared + GROUPS * KEY_BYTES + group * VALUE_BYTES);

#if KEY_BITS == 8
  uint2 k[4];
#pragma unroll
  for (int j = 0; j < 4; j++) k[j] = *(const uint2*)(keys + j * KEY_BYTES + chunk * 8);
#else
  u32 k[4];
#pragma unroll
  for (int j = 0; j < 4; j++) k[j] = *(const u32*)(keys + j * KEY_BYTES + chunk * 4);
#endif
  // Component g of the chunk, of four tokens: a nibble in each byte.
  const int half = 4 * (c & 1);
  u32 v[8];
#pragma unroll
  for (int g = 0; g < 8; g++) {
    v[g] = (*(const u32*)(values + chunk / 4 * 256 + g * 32 + t * 8 + chunk / 2 % 2 * 4) >> half) & 0x0f0f0f0fu;
  }
  // Bytes of tokens side by side: a word for each token.
  const u32 v0 = v[0] | v[1] << 4, v1 = v[2] | v[3] << 4, v2 = v[4] | v[5] << 4, v3 = v[6] | v[7] << 4;
  const u32 a0 = prmt(v0, v1, 0x5140), a1 = prmt(v2, v3, 0x5140), b0 = prmt(v0, v1, 0x7362), b1 = prmt(v2, v3, 0x7362);
  const u32 words[4] = {prmt(a0, a1, 0x5410), prmt(a0, a1, 0x7632), prmt(b0, b1, 0x5410), prmt(b0, b1, 0x7632)};
  const u32 norms[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
  const Table keys_table = key_table(), values_table = value_table();
  const int first = n * 16 + 4 * t - a.first;
  const i64 packed = head * a.stride + (i64)first * D + chunk * 8;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (first + j < 0 || first + j >= a.count) continue;
    const u32 norm = min16(norms[j], MOST);
    u32 r[4];
#if KEY_BITS == 8
    const u32 x = k[j].x ^ 0x80808080u, y = k[j].y ^ 0x80808080u;
    r[0] = sub16(prmt(x, 0x64646464u, 0x4140), 0x64806480u); r[2] = sub16(prmt(x, 0x64646464u, 0x4342), 0x64806480u);
    r[1] = sub16(prmt(y, 0x64646464u, 0x4140), 0x64806480u); r[3] = sub16(prmt(y, 0x64646464u, 0x4342), 0x64806480u);
#else
    unpack_key(keys_table, k[j], 0x5140, 0x7362, r);
#endif
    put(a.key + packed + j * D, r, prmt(norm, norm, 0x1010));
    unpack_value(values_table, words[j], 0x5140, 0x7362, r);
    put(a.value + packed + j * D, r, prmt(norm, norm, 0x3232));
  }
  if (a.overlap) wait_for_others();  // what comes next reads what they write, too
}

// Queries, and the keys and values of their tokens if there are kv_heads: these go behind the histories that `expand` makes.
struct Turn {
  const u8 *query, *key, *value;  // [tokens, heads, D], [tokens, kv_heads, D]
  u16* out;                       // [tokens, heads, D] half, rotated
  u16 *new_key, *new_value;       // [kv_heads, keys, D] half, rotated
  const float* signs;             // [D]
  const int *starts, *key_starts; // [requests + 1] where a request's queries start, and its keys, of which the last are new
  i64 stride, key_stride, value_stride;  // elements from token to token
  i64 new_stride;                 // elements from head to head
  int tokens, heads, kv_heads, requests, bfloat;
};

// Where a token's key goes.
__device__ __forceinline__ int place_of(const Turn& a, int token) {
  int request = 0;
  for (int base = 0; base < a.requests; base += 32) request += warp_sum(base + (int)LANE < a.requests && a.starts[base + LANE + 1] <= token);
  return a.key_starts[request + 1] - a.starts[request + 1] + token;
}

// A warp for each row.
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS) turn(const Turn a) {
  if (a.kv_heads) others_may_start();  // `expand`, which reads nothing of this
  const int each = a.heads + 2 * a.kv_heads, row = blockIdx.x * ROW_WARPS + (threadIdx.x >> 5), token = row / each;
  if (token >= a.tokens) return;
  const int lane = LANE, of = row - token * each, more = of - a.heads, is_value = more >= a.kv_heads, head = more < 0 ? of : more - is_value * a.kv_heads;
  const u8* const from = more < 0 ? a.query : is_value ? a.value : a.key;
  const Raw raw = load_row(from + (token * (more < 0 ? a.stride : is_value ? a.value_stride : a.key_stride) + head * D + lane * E) * NUMBER_SIZE);
  float x[E];
#pragma unroll
  for (int j = 0; j < E; j++) x[j] = component(raw, j, a.bfloat) * a.signs[lane * E + j];
  hadamard(x);
  u16* packed = a.out + ((i64)token * a.heads + head) * D;
  if (more >= 0) packed = (is_value ? a.new_value : a.new_key) + head * a.new_stride + (i64)place_of(a, token) * D;
#pragma unroll
  for (int j = 0; j < E; j += 2) ((u32*)(packed + lane * E))[j / 2] = held_halves(x[j], x[j + 1]);
}

struct Fold {
  u8* out;                   // [tokens, heads, D]: what was found so far
  float* logs;               // [heads, tokens], logs_stride apart: natural logarithms of its sums of exponents; or null: nothing was
  const u16* part;           // [tokens, heads, D] half, rotated: what was found besides
  const float* part_logs;    // infinite where a query saw nothing
  const float* signs;        // [D]
  i64 stride, logs_stride, part_logs_stride;
  int tokens, heads, bfloat;
};

// A warp for each row: the part is turned back and added.
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS) fold(const Fold a) {
  wait_for_others();
  const int lane = LANE, row = blockIdx.x * ROW_WARPS + (threadIdx.x >> 5), token = row / a.heads, head = row - token * a.heads;
  if (token >= a.tokens) return;
  float old = 0.f, weight = 1.f, top = 0.f;
  if (a.logs) {
    const float log = a.logs[head * a.logs_stride + token], more = a.part_logs[head * a.part_logs_stride + token];
    if (fabsf(more) > 3.0e38f) return;
    top = fmaxf(log, more); old = expf(log - top); weight = expf(more - top);
  }
  const float total = old + weight;
  const u16* const from = a.part + (i64)row * D + lane * E;
  float x[E];
#pragma unroll
  for (int j = 0; j < E; j += 2) { const u32 two = ((const u32*)from)[j / 2]; x[j] = from_half(two & 0xffff); x[j + 1] = from_half(two >> 16); }
  hadamard(x);
  u8* const packed = a.out + (token * a.stride + head * D + lane * E) * NUMBER_SIZE;
#pragma unroll
  for (int j = 0; j < E; j++) x[j] *= a.signs[lane * E + j];
  if (a.logs) {
    const Raw raw = load_row(packed);
#pragma unroll
    for (int j = 0; j < E; j++) x[j] = (component(raw, j, a.bfloat) * old + x[j] * weight) / total;
    if (lane == 0) a.logs[head * a.logs_stride + token] = top + logf(total);
  }
  store_row(packed, x, a.bfloat);
}

#ifndef __CUDACC__
static void call(int which, const void* a) {
  which == 0 ? store(*(const Store*)a) : which == 1 ? expand(*(const Expand*)a) : which == 2 ? turn(*(const Turn*)a) : fold(*(const Fold*)a);
}
#endif
