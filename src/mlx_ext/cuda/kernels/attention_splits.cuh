// How the splits of a sequence are put together.
#pragma once

#include "attention_parameters.cuh"
#include "attention_tiles.cuh"

/// What a CTA found, for the one that puts the splits together.
struct Partial {
  float* sums;
  __device__ Partial(const Parameters& p, int split, int column)
      : sums(reinterpret_cast<float*>(p.partials) +
             (u64(split) * (p.n_key_heads * p.parts) + column) * kPartialFloats) {}
  /// Maximum and total of a query.
  __device__ float* statistics(int query) const {
    return sums + QUERIES * VALUE_DIM + 2 * query;
  }
};

// Written by other CTAs: past the first-level cache.
__device__ __forceinline__ float2 read2_shared_by_all(const float* at) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(at));
  return value;
}
__device__ __forceinline__ float4 read4_shared_by_all(const float* at) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(at));
  return value;
}

/// What sums that refer to `maximum` (in powers of two) are multiplied with to give the output. A
/// sink is a logit whose value is zero.
__device__ __forceinline__ float output_factor(const Parameters& p, int head, float maximum,
                                               float total) {
  float factor = 1;
  if (p.sinks != 0) {
    constexpr float kLog2e = 1.4426950408889634f;
    const float sink = reinterpret_cast<const float*>(p.sinks)[head * p.sink_stride] * kLog2e;
    const float larger = fmaxf(maximum, sink);
    factor = exp2f(maximum - larger);
    total = total * factor + exp2f(sink - larger);
  }
  return total > 0 ? factor / total : 0;
}

template <class Combine>
__device__ __forceinline__ float over_warp(float value, Combine combine) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) value = combine(value, __shfl_xor_sync(~0u, value, i));
  return value;
}

/// Puts the splits of a sequence and key head together. `factors` has room for [splits, QUERIES],
/// `rows` for [WARPS, QUERIES, VALUE_DIM].
__device__ void combine_splits(const Parameters& p, const Sequence& sequence, int first_head,
                               int n_queries, u64 output, float* factors, float* rows,
                               const Lane& lane, int warp) {
  // An item is four dims of a query; a warp sums its share of the splits.
  constexpr int kItems = (QUERIES * VALUE_DIM / 4 + 31) / 32;
  constexpr int kBatch = kItems >= 16 ? 1 : 16 / kItems;
  const int n_splits = sequence.n_splits;
  const auto read = [&](float4 (&parts)[kBatch][kItems], int first) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int split = first + k * WARPS;
      const Partial partial(p, sequence.first_split + min(split, n_splits - 1), blockIdx.y);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int item = min(i * 32 + lane.id, QUERIES * VALUE_DIM / 4 - 1);
        parts[k][i] = read4_shared_by_all(partial.sums + item * 4);
      }
    }
  };
  float4 parts[kBatch][kItems];
  read(parts, warp);  // on its way while the factors are worked out

  for (int query = warp; query < QUERIES; query += WARPS) {
    float maximum = kHidden;
    for (int s = lane.id; s < n_splits; s += 32) {
      const float2 statistics = read2_shared_by_all(
          Partial(p, sequence.first_split + s, blockIdx.y).statistics(query));
      maximum = fmaxf(maximum, statistics.x);
      factors[s * QUERIES + query] = statistics.x;
      rows[s * QUERIES + query] = statistics.y;
    }
    maximum = over_warp(maximum, [](float a, float b) { return fmaxf(a, b); });
    float total = 0;
    for (int s = lane.id; s < n_splits; s += 32) {
      const float factor = exp2_fast(factors[s * QUERIES + query] - maximum);
      factors[s * QUERIES + query] = factor;
      total += factor * rows[s * QUERIES + query];
    }
    total = over_warp(total, [](float a, float b) { return a + b; });
    const float of_output =
        query < n_queries ? output_factor(p, first_head + query, maximum, total) : 0;
    for (int s = lane.id; s < n_splits; s += 32) factors[s * QUERIES + query] *= of_output;
  }
  __syncthreads();

  float4 sums[kItems] = {};
  for (int first = warp; first < n_splits; first += kBatch * WARPS) {
    if (first != warp) read(parts, first);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int split = first + k * WARPS;
      if (split >= n_splits) break;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int item = min(i * 32 + lane.id, QUERIES * VALUE_DIM / 4 - 1);
        const float factor = factors[split * QUERIES + item / (VALUE_DIM / 4)];
        sums[i].x += factor * parts[k][i].x;
        sums[i].y += factor * parts[k][i].y;
        sums[i].z += factor * parts[k][i].z;
        sums[i].w += factor * parts[k][i].w;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = i * 32 + lane.id;
    if (item < QUERIES * VALUE_DIM / 4) {
      reinterpret_cast<float4*>(rows)[warp * (QUERIES * VALUE_DIM / 4) + item] = sums[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_queries * VALUE_DIM; i += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += rows[w * QUERIES * VALUE_DIM + i];
    write_number(p.output, output + i, sum);
  }
}
