// How pages lie in memory: see formats/page_layout.h, whose numbers these are.
#pragma once

#include "ptx.cuh"

constexpr int kFp32 = 0;
constexpr int kFp16 = 1;
constexpr int kBf16 = 2;
constexpr int kInt8 = 3;
constexpr int kInt4 = 4;
constexpr int kInt3 = 5;
constexpr int kInt2 = 6;

/// Numbers along head_dim that share a scale and a minimum.
constexpr int kGroup = 64;

/// An entry of a page table: the page's address, and its format in the top byte.
__device__ __forceinline__ u64 page_address(u64 entry) { return entry & 0x00ffffffffffffffull; }
__device__ __forceinline__ int page_format(u64 entry) { return int(entry >> 56); }

__host__ __device__ constexpr bool is_coded(int format) { return format >= kInt8; }

__host__ __device__ constexpr int format_bits(int format) {
  return format == kFp32 ? 32
         : format <= kBf16 ? 16
         : format == kInt8 ? 8
         : format == kInt4 ? 4
         : format == kInt3 ? 3
                           : 2;
}

/// 32-bit words of codes that a token takes.
__host__ __device__ constexpr int code_words(int format, int head_dim) {
  return format == kInt3 ? (head_dim + 31) / 32 * 3 : (head_dim * format_bits(format) + 31) / 32;
}

__host__ __device__ constexpr int scale_groups(int head_dim) {
  return (head_dim + kGroup - 1) / kGroup;
}

/// From a head's start to its first scale.
__host__ __device__ constexpr int scales_offset(int format, int block_size, int head_dim) {
  return block_size * code_words(format, head_dim) * 4;
}

__host__ __device__ constexpr int head_bytes(int format, int block_size, int head_dim) {
  return is_coded(format)
             ? scales_offset(format, block_size, head_dim) + scale_groups(head_dim) * block_size * 4
             : block_size * head_dim * format_bits(format) / 8;
}
