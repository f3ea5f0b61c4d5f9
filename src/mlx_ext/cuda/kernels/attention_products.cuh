// The two products of paged_attention.cu, for keys and values of each format: see there for what a
// lane holds.
#pragma once

#include "attention_parameters.cuh"

/// Whether queries lose bits as operands for keys of a format. (Those of bf16 lose none in fp16:
/// their largest number has most of its room.)
__host__ __device__ constexpr bool rounds_queries(int format) {
  return QUERY_FORMAT == kFp32 || (QUERY_FORMAT == kFp16 && format == kBf16);
}
/// Queries that do not appear twice need products of their own for what rounding took from them.
constexpr bool kRestApart = !kQueriesTwice && QUERY_FORMAT != kBf16 && takes(kBf16);

/// The queries as operands, for keys of one format.
struct Queries {
  u32 operands[kKeySteps][2];
  u32 rest[kRestApart ? kKeySteps : 1][2];
  /// What minimums are multiplied with: the sums over each group of dims.
  u32 sums;
};

/// The running state of a warp. A lane has queries 2t and 2t + 1. Sums refer to a maximum of the
/// query, less kLift.
struct State {
  float maximum[2] = {kHidden, kHidden};
  /// Over the lane's tokens.
  float total[2] = {};
  float sums[kValueTiles][4] = {};
  /// A tile of output^T whose row i is what the minimums of group i add.
  float offsets[4] = {};
};

// A code, set alone into the low bits of a float of 16 bits, is that float's denormal: the code
// times a power of two. That holds for eight bits of bf16 and for eleven of fp16, the exponents 0
// and 1 having the same steps. Tensor cores take denormals as they are.

/// What a code of a key counts for, in fp16.
constexpr float kKeyUnit = 1.0f / (1 << 24);
/// Sums over 64 dims of queries below 2^15 become halfs by this.
constexpr float kSumUnit = 1.0f / (1 << 6);
/// Scaled weights go up by this much, so that products with codes of values, which count for 2^-133
/// in bf16, are ordinary floats.
constexpr float kWeightUnit = 1208925819614629174706176.0f;  // 2^80
constexpr float kValueUnit = 9007199254740992.0f;            // 2^133 / 2^80

/// The dim of element `e` of register `part` of the operand of a step.
template <int format>
__device__ __forceinline__ int key_dim_of(int step, int part, int e, int t) {
  if (format == kInt4) return 8 * (4 * (step >> 1) + t) + 4 * (step & 1) + part + 2 * e;
  if (format == kInt8) return 16 * step + 4 * t + 2 * part + e;
  return 16 * step + 8 * part + 2 * t + e;
}

/// The dim of row g + 8 * half of a tile of output^T.
template <int format>
__device__ __forceinline__ int value_dim_of(int tile, int half, int g) {
  if (format == kInt4) return 64 * (tile >> 2) + 8 * g + (tile & 3) + 4 * half;
  if (format == kInt8) return 32 * (tile >> 1) + 4 * g + 2 * (tile & 1) + half;
  return 16 * tile + 8 * half + g;
}

/// Keys of bf16 meet queries in bf16, the others in fp16.
__host__ __device__ constexpr bool in_bf16(int format) { return format == kBf16; }
template <int format>
__device__ void load_queries(Queries& q, const float* rows, const Lane& lane) {
  constexpr bool bf16 = in_bf16(format);
  const float* row = rows + (kQueriesTwice ? lane.g & 3 : lane.g) * KEY_DIM;
  const bool is_rest = kQueriesTwice && rounds_queries(format) && lane.g >= 4;
  float sums[4] = {};
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      // The upper code of a byte comes as sixteen times itself.
      const float unit = format == kInt4 && step % 2 == 1 ? 1.0f / 16 : 1.0f;
      const float x = unit * row[key_dim_of<format>(step, part, 0, lane.t)];
      const float y = unit * row[key_dim_of<format>(step, part, 1, lane.t)];
      const u32 high = pack2<bf16>(x, y);
      const u32 low = pack2<bf16>(x - unpack_low<bf16>(high), y - unpack_high<bf16>(high));
      const u32 mine = is_rest ? low : high;
      q.operands[step][part] = mine;
      if (kRestApart) q.rest[step][part] = low;
      sums[step / 4] += (unpack_low<bf16>(mine) + unpack_high<bf16>(mine)) / unit;
    }
  }
  if (!is_coded(format)) return;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    sums[group] += __shfl_xor_sync(~0u, sums[group], 1);
    sums[group] += __shfl_xor_sync(~0u, sums[group], 2);
    sums[group] *= kSumUnit;
  }
  // Lanes of t = 0 hold groups 0 and 1, those of t = 1 groups 2 and 3; the next two what rounding
  // took from them.
  const bool upper = lane.t & 1;
  const float x = upper ? sums[2] : sums[0];
  const float y = upper ? sums[3] : sums[1];
  const u32 high = pack2<false>(x, y);
  const u32 low = pack2<false>(x - unpack_low<false>(high), y - unpack_high<false>(high));
  q.sums = lane.t < 2 ? high : low;
}

// Scores of the lane's queries with its tokens: [token][query]. Columns q and q + 4 of a query that
// appears twice are what its rounded numbers and the rest give.

template <int format>
__device__ __forceinline__ void add_rest(float (&scores)[4]) {
  if (!kQueriesTwice || !rounds_queries(format)) return;
#pragma unroll
  for (float& score : scores) score += __shfl_xor_sync(~0u, score, 2);
}

template <int format>
__device__ __forceinline__ void score_rows(float (&scores)[4], u32 keys, const Queries& q,
                                           const Lane& lane) {
  const int token = token_of_row(lane.id & 15);
  const u32 row = keys + token * (KEY_DIM * 2);
  float sums[2][4] = {};
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    u32 m[4];
    load_matrices(m, row + ((2 * step + (lane.id >> 4) ^ token >> 1) << 4));
    multiply<in_bf16(format)>(sums[step & 1], m, q.operands[step][0], q.operands[step][1]);
    if (kRestApart && rounds_queries(format)) {
      multiply<in_bf16(format)>(sums[step & 1], m, q.rest[step][0], q.rest[step][1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) scores[j] = sums[0][j] + sums[1][j];
  add_rest<format>(scores);
}

/// Two halfs, those of the lane's tokens.
__device__ __forceinline__ float2 load_halves(u32 address) {
  const u32 word = load_shared(address);
  return {unpack_low<false>(word), unpack_high<false>(word)};
}

/// In multiples of kKeyUnit.
template <int format>
__device__ __forceinline__ void score_codes(float (&scores)[4], u32 keys, const Queries& q,
                                            const Lane& lane) {
  const u32 words = keys + lane.t * 64 + lane.g * 8;
  const u32 scales_at = keys + kTile * code_words(format, KEY_DIM) * 4 + lane.g * 4;
  // A pair of groups as neighbours along the contraction. Where there are fewer groups than lanes
  // can hold, queries' sums are zero.
  const int pair = kKeyGroups > 2 ? 2 * (lane.t & 1) : 0;
  const u32 minimums = scales_at + kKeyGroups * 32;
  const u32 first = load_shared(minimums + pair * 32);
  const u32 second = load_shared(minimums + min(pair + 1, kKeyGroups - 1) * 32);
  const u32 rows[2] = {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)};
#pragma unroll
  for (float& score : scores) score = 0;
  multiply8(scores, rows, q.sums);
#pragma unroll
  for (float& score : scores) score *= kKeyUnit / kSumUnit;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    float sums[4] = {};
    if (format == kInt4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 4 * group + 2 * half;
        const uint2 w = load_shared2(words + (2 * group + half) * 256);
        const u32 low[4] = {w.x & 0x000f000f, w.y & 0x000f000f, w.x >> 8 & 0x000f000f,
                            w.y >> 8 & 0x000f000f};
        multiply<false>(sums, low, q.operands[step][0], q.operands[step][1]);
        const u32 high[4] = {w.x & 0x00f000f0, w.y & 0x00f000f0, w.x >> 8 & 0x00f000f0,
                             w.y >> 8 & 0x00f000f0};
        multiply<false>(sums, high, q.operands[step + 1][0], q.operands[step + 1][1]);
      }
    } else {
#pragma unroll
      for (int step = 4 * group; step < 4 * group + 4; ++step) {
        const uint2 w = load_shared2(words + step * 256);
        const u32 codes[4] = {__byte_perm(w.x, 0, 0x4140), __byte_perm(w.y, 0, 0x4140),
                              __byte_perm(w.x, 0, 0x4342), __byte_perm(w.y, 0, 0x4342)};
        multiply<false>(sums, codes, q.operands[step][0], q.operands[step][1]);
      }
    }
    const float2 scales = load_halves(scales_at + group * 32);
#pragma unroll
    for (int j = 0; j < 4; ++j) scores[j] += (j < 2 ? scales.x : scales.y) * sums[j];
  }
  add_rest<format>(scores);
}

/// Weights as an operand [16 tokens x 8 queries].
template <bool bf16>
__device__ __forceinline__ void pack_weights(u32 (&packed)[2], const float (&weights)[4],
                                             const Lane& lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 pair = pack2<bf16>(weights[2 * i], weights[2 * i + 1]);
    if (kWeightsTwice) {
      const u32 rest = pack2<bf16>(weights[2 * i] - unpack_low<bf16>(pair),
                                   weights[2 * i + 1] - unpack_high<bf16>(pair));
      pair = lane.t < 2 ? pair : rest;
    }
    packed[i] = transposed(pair);
  }
}

template <int format>
__device__ __forceinline__ void add_rows(State& state, u32 values, const float (&weights)[4],
                                         const Lane& lane) {
  u32 packed[2];
  pack_weights<format == kBf16>(packed, weights, lane);
  const int token = token_of_row((lane.id & 7) + 8 * (lane.id >> 4));
  const u32 row = values + token * (VALUE_DIM * 2);
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
    u32 m[4];
    load_matrices_transposed(m, row + ((2 * tile + (lane.id >> 3 & 1) ^ token >> 1) << 4));
    multiply<format == kBf16>(state.sums[tile], m, packed[0], packed[1]);
  }
}

/// Zeroes the scales and minimums of tokens from `n_valid` on, which may be NaN.
template <int format>
__device__ __forceinline__ void blank_scales(u32 values, int n_valid, const Lane& lane) {
  constexpr int kScales = kTile * code_words(format, VALUE_DIM) * 4;
  for (int i = lane.id; i < 2 * kValueGroups * kTile; i += 32) {
    if (i % kTile >= n_valid) store_shared_half(values + kScales + i * 2, 0);
  }
}

template <int format>
__device__ __forceinline__ void add_codes(State& state, u32 values, const float (&weights)[4],
                                          const Lane& lane) {
  const u32 words = values + lane.g * 64 + lane.t * 16;
  const u32 scales_at = values + kTile * code_words(format, VALUE_DIM) * 4;
  u32 packed[2];
  pack_weights<false>(packed, weights, lane);
  // A lane's tokens along the contraction are 4t and 4t + 2, then 4t + 1 and 4t + 3.
  const uint2 minimums = load_shared2(
      scales_at + (kValueGroups + min(lane.g, kValueGroups - 1)) * 32 + lane.t * 8);
  const u32 rows[4] = {__byte_perm(minimums.x, minimums.y, 0x5410), 0,
                       __byte_perm(minimums.x, minimums.y, 0x7632), 0};
  multiply<false>(state.offsets, rows, packed[0], packed[1]);
  float raised[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) raised[j] = weights[j] * kWeightUnit;
#pragma unroll
  for (int group = 0; group < kValueGroups; ++group) {
    const float2 scales = load_halves(scales_at + group * 32 + lane.g * 4);
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scaled[j] = raised[j] * (j < 2 ? scales.x : scales.y);
    pack_weights<true>(packed, scaled, lane);
#pragma unroll
    for (int part = 0; part < (format == kInt4 ? 1 : 2); ++part) {
      // Words of tokens 4t .. 4t + 3, brought to 16 bits of two tokens.
      const uint4 w = load_shared4(words + (format == kInt4 ? group : 2 * group + part) * 512);
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const u32 selector = upper == 0 ? 0x5410 : 0x7632;
        const u32 two[2] = {__byte_perm(w.x, w.z, selector), __byte_perm(w.y, w.w, selector)};
        if (format == kInt4) {
          const int tile = 4 * group + 2 * upper;
          const u32 low[4] = {two[0] & 0x000f000f, two[0] & 0x00f000f0, two[1] & 0x000f000f,
                              two[1] & 0x00f000f0};
          multiply<true>(state.sums[tile], low, packed[0], packed[1]);
          const u32 high[4] = {two[0] >> 8 & 0x000f000f, two[0] >> 8 & 0x00f000f0,
                               two[1] >> 8 & 0x000f000f, two[1] >> 8 & 0x00f000f0};
          multiply<true>(state.sums[tile + 1], high, packed[0], packed[1]);
        } else {
          const u32 codes[4] = {two[0] & 0x00ff00ff, __byte_perm(two[0], 0, 0x4341),
                                two[1] & 0x00ff00ff, __byte_perm(two[1], 0, 0x4341)};
          multiply<true>(state.sums[4 * group + 2 * part + upper], codes, packed[0], packed[1]);
        }
      }
    }
  }
}

/// What the sums of rows g (half = 0) and g + 8 count for.
template <int format>
__host__ __device__ constexpr float value_unit(int half) {
  return !is_coded(format) ? 1 : format == kInt4 && half == 1 ? kValueUnit / 16 : kValueUnit;
}

/// Turns scores, in powers of two, into weights and brings the sums to a new maximum if need be.
__device__ __forceinline__ void weigh(State& state, float (&scores)[TILES][4]) {
  bool grows[2];
  float largest[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    largest[i] = kHidden;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      largest[i] = fmaxf(largest[i], fmaxf(scores[tile][i], scores[tile][2 + i]));
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], distance));
    }
    grows[i] = largest[i] > state.maximum[i] + kLift + kSlack;
  }
  if (__any_sync(~0u, grows[0] || grows[1])) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float maximum = grows[i] ? largest[i] - kLift : state.maximum[i];
      const float factor = exp2_fast(state.maximum[i] - maximum);
      state.maximum[i] = maximum;
      state.total[i] *= factor;
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        state.sums[tile][i] *= factor;
        state.sums[tile][2 + i] *= factor;
      }
      state.offsets[i] *= factor;
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scores[tile][j] = exp2_fast(scores[tile][j] - state.maximum[j & 1]);
      state.total[j & 1] += scores[tile][j];
    }
  }
}

/// Brings a warp's sums into rows [queries, VALUE_DIM]; columns of the same query are added.
template <int format>
__device__ void store_sums(float* rows, State& state, const Lane& lane) {
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float sum = state.sums[tile][r] * value_unit<format>(r >> 1);
      if (kWeightsTwice) sum += __shfl_xor_sync(~0u, sum, 2);
      const int query = 2 * lane.t + (r & 1);
      if (query < QUERIES) rows[query * VALUE_DIM + value_dim_of<format>(tile, r >> 1, lane.g)] = sum;
    }
  }
}

template <int format>
__device__ void reload_sums(State& state, const float* rows, const Lane& lane) {
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int query = 2 * lane.t + (r & 1);
      state.sums[tile][r] =
          query < QUERIES ? rows[query * VALUE_DIM + value_dim_of<format>(tile, r >> 1, lane.g)] /
                                value_unit<format>(r >> 1)
                          : 0;
    }
  }
}
