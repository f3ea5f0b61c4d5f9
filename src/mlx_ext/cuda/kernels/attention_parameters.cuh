// What paged_attention.cu is called with, and how it shares the work out: see there.
#pragma once

#include "page_format.cuh"

constexpr bool kQueriesTwice = QUERIES <= 4;
/// An output of bf16 does not show what the rounding of the weights takes.
constexpr bool kWeightsTwice = kQueriesTwice && QUERY_FORMAT != kBf16;
constexpr int kTile = 16;
constexpr int kStep = TILES * kTile;
constexpr int kKeyGroups = KEY_DIM / kGroup;
constexpr int kValueGroups = VALUE_DIM / kGroup;
/// Products along the dims of a key, and along those of a value.
constexpr int kKeySteps = KEY_DIM / 16;
constexpr int kValueTiles = VALUE_DIM / 16;
constexpr float kHidden = -1e30f;
/// In powers of two: how far scores may pass the maximum that sums refer to before they are scaled
/// down. Saves most of that work and costs no accuracy.
constexpr float kSlack = 8;
/// In powers of two: weights are made this much larger, so that halfs hold small ones. With the
/// slack they stay below 2^16.
constexpr float kLift = 7;

__host__ __device__ constexpr bool takes(int format) { return FORMATS >> format & 1; }
constexpr bool kNoCodes = !takes(kInt8) && !takes(kInt4);
constexpr bool kOneFormat = (FORMATS & (FORMATS - 1)) == 0;

/// Bytes of a tile in shared memory: rows of floats; or words, scales and minimums.
__host__ __device__ constexpr int tile_bytes(int format, int dim) {
  return is_coded(format) ? kTile * (code_words(format, dim) * 4 + scale_groups(dim) * 4)
                          : kTile * dim * 2;
}
__host__ __device__ constexpr int largest_tile(int dim) {
  int largest = 0;
  for (int format = 0; format < 8; ++format) {
    if (takes(format) && tile_bytes(format, dim) > largest) largest = tile_bytes(format, dim);
  }
  return largest;
}
constexpr int kKeyTileBytes = largest_tile(KEY_DIM);
/// Of a step's tile: keys, values, and the two formats.
constexpr int kPairBytes = kKeyTileBytes + largest_tile(VALUE_DIM) + (kOneFormat ? 0 : 16);
constexpr int kStageBytes = TILES * kPairBytes;
constexpr int kFoldBytes = kOneFormat ? 0 : WARPS * 8 * VALUE_DIM * 4;

constexpr int kPartialFloats = (QUERIES * (VALUE_DIM + 2) + 3) / 4 * 4;

struct Sequence {
  /// Page tables.
  u64 key_pages;
  u64 value_pages;
  int n_tokens;
  /// Tokens before this one are hidden, by a window.
  int first_token;
  /// Of all splits of the batch.
  int first_split;
  int n_splits;
};

struct Parameters {
  /// [batch, query heads, KEY_DIM] with strides in numbers.
  u64 queries;
  u64 query_strides[3];
  /// [batch, query heads, VALUE_DIM] without gaps.
  u64 output;
  /// [splits, key heads * parts, kPartialFloats]: sums, then maximum and total of each query.
  u64 partials;
  /// [batch, key heads * parts], all zero between launches.
  u64 arrivals;
  /// [query heads] floats or null: one more logit.
  u64 sinks;
  u64 sink_stride;
  float scale;
  int n_key_heads;
  /// Query heads of a key head, and the CTAs that share them.
  int ratio;
  int parts;
  /// log2 of the block size.
  int block_shift;
  int batch;
  Sequence sequences[MAX_BATCH];
};

/// Where a lane of a warp stands in the operands of tensor cores, g = id / 4 and t = id % 4.
struct Lane {
  int id, g, t;

  __device__ Lane() : id(kept(int(threadIdx.x & 31))), g(kept(id >> 2)), t(kept(id & 3)) {}
};

/// Row r of a tile's scores stands for this token: rows g and g + 8 of a lane for neighbours.
__host__ __device__ constexpr int token_of_row(int row) { return 2 * (row & 7) + (row >> 3); }
