// What paged_attention.cu reads: tiles of pages, and queries.
#pragma once

#include "attention_parameters.cuh"

/// Calls body.template operator()<format>() for a format that may occur.
template <class Body>
__device__ __forceinline__ void with_format(int format, Body body) {
  if (takes(kBf16) && (kOneFormat || format == kBf16)) return body.template operator()<kBf16>();
  if (takes(kFp16) && (kOneFormat || format == kFp16)) return body.template operator()<kFp16>();
  if (takes(kInt8) && (kOneFormat || format == kInt8)) return body.template operator()<kInt8>();
  if (takes(kInt4) && (kOneFormat || format == kInt4)) return body.template operator()<kInt4>();
}

/// Starts the copy of a tile of one head. Rows past `n_valid` become zeros.
template <int dim>
__device__ __forceinline__ void copy_tile(u32 to, u64 page, int format, u32 head, u32 tile_of_page,
                                          u32 block_size, int n_valid, const Lane& lane) {
  to += lane.id * 16;
  with_format(format, [&]<int f>() {
    const u32 at_head = head * head_bytes(f, block_size, dim);
    if constexpr (is_coded(f)) {
      constexpr u32 kWordBytes = kTile * code_words(f, dim) * 4;
      const u64 words = page + (at_head + lane.id * 16 + tile_of_page * kWordBytes);
#pragma unroll
      for (u32 at = 0; at < kWordBytes; at += 512) copy16_async(to + at, words + at, true);
      // Scales, then minimums: 32 bytes a group.
      constexpr int kChunks = scale_groups(dim) * 4;
      const u32 scales = at_head + scales_offset(f, block_size, dim) +
                         (lane.id >> 1) * block_size * 2 + (lane.id & 1) * 16;
      if (lane.id < kChunks) {
        copy16_async(to + kWordBytes, page + (scales + tile_of_page * (kTile * 2)), true);
      }
    } else {
      constexpr int kChunks = dim / 8;  // of a row
      const u64 rows = page + (at_head + tile_of_page * (kTile * dim * 2) + lane.id * 16);
#pragma unroll
      for (int i = 0; i < kTile * kChunks / 32; ++i) {
        const int at = i * 32 + lane.id;
        const int row = at / kChunks;
        const int chunk = at % kChunks;
        copy16_async(to + i * 512 + (((chunk ^ row >> 1) - chunk) << 4), rows + i * 512,
                     row < n_valid);
      }
    }
  });
}

__device__ __forceinline__ float read_number(u64 numbers, u64 at) {
  if (QUERY_FORMAT == kFp32) return reinterpret_cast<const float*>(numbers)[at];
  const u16 bits = reinterpret_cast<const u16*>(numbers)[at];
  return QUERY_FORMAT == kBf16 ? bf16_to_float(bits) : half_to_float(bits);
}

__device__ __forceinline__ void write_number(u64 numbers, u64 at, float value) {
  if (QUERY_FORMAT == kFp32) {
    reinterpret_cast<float*>(numbers)[at] = value;
  } else {
    reinterpret_cast<u16*>(numbers)[at] =
        QUERY_FORMAT == kBf16 ? float_to_bf16(value) : float_to_half(value);
  }
}

/// Brings a query to fp32 rows whose largest number is between 2^14 and 2^15, where fp16 has most
/// room below, and returns the power of two that was taken out.
__device__ float stage_query(float* row, const Parameters& p, int sequence, int head,
                             const Lane& lane) {
  float numbers[KEY_DIM / 32];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < KEY_DIM / 32; ++i) {
    numbers[i] = read_number(p.queries, sequence * p.query_strides[0] + head * p.query_strides[1] +
                                            (i * 32 + lane.id) * p.query_strides[2]);
    largest = fmaxf(largest, fabsf(numbers[i]));
  }
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  const u32 exponent = __float_as_uint(largest) >> 23;
  const bool ordinary = exponent > 1 && exponent < 253;
  const float factor = ordinary ? __uint_as_float((254 - exponent) << 23) : 1.0f;
#pragma unroll
  for (int i = 0; i < KEY_DIM / 32; ++i) {
    row[i * 32 + lane.id] = numbers[i] * factor * (1 << 14);
  }
  return (ordinary ? __uint_as_float(exponent << 23) : 1.0f) / (1 << 14);
}
