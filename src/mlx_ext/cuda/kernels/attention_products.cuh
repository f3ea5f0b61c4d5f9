// The two products of paged_attention.cu, for keys and values of each format: see there for what a
// lane holds.
#pragma once

#include "attention_parameters.cuh"

/// The queries as operands, for keys of one format.
struct Queries {
  u32 operands[kKeySteps][4];
  /// Over each group of dims: of the queries, and of what the operands make of 1024 in each dim.
  float sums[kKeyGroups];
  float magic[kKeyGroups];
};

/// The running state of a warp. Sums refer to the maximum of the lane's query.
struct State {
  float maximum = kHidden;
  /// Over the lane's tokens.
  float total = 0;
  float offsets[kValueGroups] = {};
  float sums[kValueTiles][4] = {};
  /// Of the weights, scaled, by group: a tile of output whose values are all one.
  float ones[takes(kInt4) ? kValueGroups : 1][4] = {};
};

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
/// Whether queries lose bits as operands for such keys. (Those of bf16 lose none in fp16: their
/// largest number is about one.)
__host__ __device__ constexpr bool rounds_queries(int format) {
  return QUERY_FORMAT == kFp32 || (QUERY_FORMAT == kFp16 && in_bf16(format));
}

template <int format>
__device__ void load_queries(Queries& q, const float* rows, const Lane& lane) {
  constexpr bool bf16 = in_bf16(format);
  const float* row = rows + (kQueriesTwice ? lane.g & 3 : lane.g) * KEY_DIM;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) q.sums[group] = q.magic[group] = 0;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      // The upper code of a byte comes as sixteen times itself.
      const float unit = format == kInt4 && step % 2 == 1 ? 1.0f / 16 : 1.0f;
      const float x = unit * row[key_dim_of<format>(step, part, 0, lane.t)];
      const float y = unit * row[key_dim_of<format>(step, part, 1, lane.t)];
      const u32 high = pack2<bf16>(x, y);
      const u32 low = rounds_queries(format) ? pack2<bf16>(x - unpack_low<bf16>(high),
                                                           y - unpack_high<bf16>(high))
                                             : 0;
      q.operands[step][2 * part] = high;
      q.operands[step][2 * part + 1] = low;
      const float sum = (unpack_low<bf16>(high) + unpack_low<bf16>(low)) +
                        (unpack_high<bf16>(high) + unpack_high<bf16>(low));
      q.magic[step / 4] += 1024 * sum;
      q.sums[step / 4] += sum / unit;
    }
  }
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    q.sums[group] += __shfl_xor_sync(~0u, q.sums[group], 1);
    q.sums[group] += __shfl_xor_sync(~0u, q.sums[group], 2);
    q.magic[group] += __shfl_xor_sync(~0u, q.magic[group], 1);
    q.magic[group] += __shfl_xor_sync(~0u, q.magic[group], 2);
  }
}

// Scores of the lane's query with tokens 4t .. 4t + 3.

/// What both rows of a query say of token 4t + j.
template <int format>
__device__ __forceinline__ float row_sum(const float (&sums)[2][4], int j) {
  const float sum = sums[j >> 1][j & 1];
  return rounds_queries(format) ? sum + sums[j >> 1][2 + (j & 1)] : sum;
}

template <int format>
__device__ __forceinline__ void score_rows(float (&scores)[4], u32 keys, const Queries& q,
                                           const Lane& lane) {
  float sums[2][4] = {};
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    u32 m[4];
    load_matrices(m, keys + lane.matrix_token * (KEY_DIM * 2) + ((2 * step ^ lane.matrix_chunk) << 4));
    multiply<in_bf16(format)>(sums[0], q.operands[step], m[0], m[1]);
    multiply<in_bf16(format)>(sums[1], q.operands[step], m[2], m[3]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) scores[j] = row_sum<format>(sums, j);
}

/// Four halfs, those of tokens 4t .. 4t + 3.
__device__ __forceinline__ void load_halves(float (&values)[4], u32 address) {
  const uint2 words = load_shared2(address);
  values[0] = half_to_float(u16(words.x));
  values[1] = half_to_float(u16(words.x >> 16));
  values[2] = half_to_float(u16(words.y));
  values[3] = half_to_float(u16(words.y >> 16));
}

/// Codes come as 1024 + code, or 1024 + 16 * code.
template <int format>
__device__ __forceinline__ void score_codes(float (&scores)[4], u32 keys, const Queries& q,
                                            const Lane& lane) {
  constexpr int kScales = kTile * code_words(format, KEY_DIM) * 4;
  const u32 words = keys + lane.t * 64 + (4 * (lane.g >> 1) + (lane.g & 1)) * 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) scores[j] = 0;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    const float magic = q.magic[group];
    float sums[2][4] = {{-magic, -magic}, {-magic, -magic}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (format == kInt4) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int step = 4 * group + 2 * pair;
          const u32 word = load_shared(words + (2 * group + pair) * 256 + i * 8);
          multiply<false>(sums[i], q.operands[step], masked<0x000f000f, 0x64006400>(word),
                          masked<0x000f000f, 0x64006400>(word >> 8));
          multiply<false>(sums[i], q.operands[step + 1], masked<0x00f000f0, 0x64006400>(word),
                          masked<0x00f000f0, 0x64006400>(word >> 8));
        }
      } else {
#pragma unroll
        for (int step = 4 * group; step < 4 * group + 4; ++step) {
          const u32 word = load_shared(words + step * 256 + i * 8);
          multiply<false>(sums[i], q.operands[step], __byte_perm(word, 0x64646464, 0x4140),
                          __byte_perm(word, 0x64646464, 0x4342));
        }
      }
    }
    float scales[4], minimums[4];
    load_halves(scales, keys + kScales + group * 32 + lane.t * 8);
    load_halves(minimums, keys + kScales + (kKeyGroups + group) * 32 + lane.t * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scores[j] += scales[j] * row_sum<format>(sums, j) + minimums[j] * q.sums[group];
    }
  }
}

/// Weights as an operand, of tokens 4t .. 4t + 3.
template <bool bf16>
__device__ __forceinline__ void pack_weights(u32 (&packed)[2], const float (&weights)[4],
                                             const Lane& lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    packed[i] = pack2<bf16>(weights[2 * i], weights[2 * i + 1]);
    if (kWeightsTwice) {
      const u32 rest = pack2<bf16>(weights[2 * i] - unpack_low<bf16>(packed[i]),
                                   weights[2 * i + 1] - unpack_high<bf16>(packed[i]));
      packed[i] = lane.g < 4 ? packed[i] : rest;
    }
  }
}

template <int format>
__device__ __forceinline__ void add_rows(State& state, u32 values, const float (&weights)[4],
                                         const Lane& lane) {
  u32 packed[2];
  pack_weights<format == kBf16>(packed, weights, lane);
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
    u32 m[4];
    load_matrices_transposed(
        m, values + lane.matrix_token * (VALUE_DIM * 2) + ((2 * tile ^ lane.matrix_chunk) << 4));
    multiply<format == kBf16>(state.sums[tile], m, packed[0], packed[1]);
  }
}

/// Codes of int8 as a pair of bf16: byte `at` of two words.
template <int at>
__device__ __forceinline__ u32 byte_pair(u32 a, u32 b) {
  constexpr float kMagic = 8388608;
  return pack2<true>(__uint_as_float(__byte_perm(a, 0x4b000000, 0x7440 + at)) - kMagic,
                     __uint_as_float(__byte_perm(b, 0x4b000000, 0x7440 + at)) - kMagic);
}

/// `n_valid`: tokens of the tile that there are; scales of the others may be NaN.
template <int format>
__device__ __forceinline__ void add_codes(State& state, u32 values, const float (&weights)[4],
                                          int n_valid, const Lane& lane) {
  constexpr int kScales = kTile * code_words(format, VALUE_DIM) * 4;
  const u32 words = values + lane.g * 64 + lane.t * 16;
#pragma unroll
  for (int group = 0; group < kValueGroups; ++group) {
    float scales[4], minimums[4];
    load_halves(scales, values + kScales + group * 32 + lane.t * 8);
    load_halves(minimums, values + kScales + (kValueGroups + group) * 32 + lane.t * 8);
    if (n_valid < kTile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * lane.t + j >= n_valid) scales[j] = minimums[j] = 0;
      }
    }
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scaled[j] = weights[j] * scales[j];
      state.offsets[group] += weights[j] * minimums[j];
    }
    u32 packed[2];
    pack_weights<true>(packed, scaled, lane);
    if (format == kInt4) {
      const uint4 w = load_shared4(words + group * 512);
      u32 m[4][4];  // [tile][register]
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 a = i == 0 ? w.x : w.z;
        const u32 b = i == 0 ? w.y : w.w;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const u32 bytes = __byte_perm(a, b, pair == 0 ? 0x5410 : 0x7632);
          m[2 * pair][2 * i] = masked<0x000f000f, 0x43004300>(bytes);
          m[2 * pair][2 * i + 1] = masked<0x000f000f, 0x43004300>(bytes >> 4);
          m[2 * pair + 1][2 * i] = masked<0x000f000f, 0x43004300>(bytes >> 8);
          m[2 * pair + 1][2 * i + 1] = masked<0x000f000f, 0x43004300>(bytes >> 12);
        }
      }
      // 128 + code
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        multiply<true>(state.sums[4 * group + tile], m[tile], packed[0], packed[1]);
      }
      const u32 ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
      multiply<true>(state.ones[group], ones, packed[0], packed[1]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 w = load_shared4(words + (2 * group + half) * 512);
        const u32 low[4] = {byte_pair<0>(w.x, w.y), byte_pair<1>(w.x, w.y), byte_pair<0>(w.z, w.w),
                            byte_pair<1>(w.z, w.w)};
        multiply<true>(state.sums[4 * group + 2 * half], low, packed[0], packed[1]);
        const u32 high[4] = {byte_pair<2>(w.x, w.y), byte_pair<3>(w.x, w.y),
                             byte_pair<2>(w.z, w.w), byte_pair<3>(w.z, w.w)};
        multiply<true>(state.sums[4 * group + 2 * half + 1], high, packed[0], packed[1]);
      }
    }
  }
}

/// Turns scores, in powers of two, into weights and brings the sums to a new maximum if need be.
__device__ __forceinline__ void weigh(State& state, float (&scores)[TILES][4], const Lane& lane) {
  float largest = kHidden;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    largest = fmaxf(largest, fmaxf(fmaxf(scores[tile][0], scores[tile][1]),
                                   fmaxf(scores[tile][2], scores[tile][3])));
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const bool grows = largest > state.maximum + kSlack;
  if (__any_sync(~0u, grows)) {
    const float maximum = grows ? largest : state.maximum;
    const float factor = exp2_fast(state.maximum - maximum);
    state.maximum = maximum;
    state.total *= factor;
#pragma unroll
    for (int group = 0; group < kValueGroups; ++group) state.offsets[group] *= factor;
    const float column[2] = {__shfl_sync(~0u, factor, 8 * lane.t),
                             __shfl_sync(~0u, factor, 8 * lane.t + 4)};
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 4; ++r) state.sums[tile][r] *= column[r & 1];
    }
    for (auto& ones : state.ones) {
#pragma unroll
      for (int r = 0; r < 4; ++r) ones[r] *= column[r & 1];
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scores[tile][j] = exp2_fast(scores[tile][j] - state.maximum);
      state.total += scores[tile][j];
    }
  }
}

/// Brings a warp's sums into rows [queries, VALUE_DIM]; columns of the same query are added.
template <int format>
__device__ void store_sums(float* rows, State& state, const Lane& lane) {
  if (format == kInt4) {
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 4; ++r) state.sums[tile][r] -= 128 * state.ones[tile / 4][r];
    }
    for (auto& ones : state.ones) ones[0] = ones[1] = ones[2] = ones[3] = 0;
  }
#pragma unroll
  for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float sum = state.sums[tile][r];
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
          query < QUERIES ? rows[query * VALUE_DIM + value_dim_of<format>(tile, r >> 1, lane.g)] : 0;
    }
  }
}
