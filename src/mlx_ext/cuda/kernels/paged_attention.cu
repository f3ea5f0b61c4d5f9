// Decode attention (one query a sequence) over keys and values that lie in pages.
//
// Compiled at run time with these macros:
//   KEY_DIM, VALUE_DIM   numbers of a key and of a value, multiples of 64
//   QUERY_FORMAT         kFp32, kFp16 or kBf16 of queries and output
//   FORMATS              bit f is set where pages of format f may occur (fp16, bf16, int8, int4)
//   QUERIES              query heads that a CTA answers, 1..8, all of one key head
//   WARPS, STAGES, TILES warps of a CTA; steps that each has in shared memory; tiles of a step
//   MIN_CTAS             CTAs that are to fit on a multiprocessor
//   MAX_BATCH            sequences that one launch can take
//
// The tokens of a sequence are cut into splits, one a CTA, and these into steps of TILES tiles of
// 16 tokens that the warps take in turn. A warp copies its steps into a ring of its own, a few ahead
// of the one it computes, and waits for nobody. Its sums, those of the CTA and those of the splits
// are then put together in a fixed order; the last CTA of a sequence and head to arrive does that
// for the splits.
//
// Tensor cores do both products, m16n8k16 with fp32 sums. With g = lane / 4 and t = lane % 4:
//
//   scores   = keys [16 tokens x dims] * queries^T [dims x 8]. Row r is token 2 (r % 8) + r / 8, so
//              that a lane has queries 2t, 2t + 1 of tokens 2g, 2g + 1, whose words are neighbours.
//   output^T += values^T [16 dims x 16 tokens] * weights [16 tokens x 8 queries]. movmatrix makes
//              the operand from weights as the scores lie.
//
// Up to four queries appear twice, in columns q and q + 4, which can carry a number rounded and
// what rounding took from it: of queries in the first product, of weights in the second. The
// contraction index of a product may be permuted as long as both sides are, so the dims of coded
// keys are taken in the order in which words hold them. Codes are never scaled one by one: a token's
// scale goes into its score, or into its weight, once a group, and minimums have products of their
// own. Nor are codes turned into floats: as the low bits of a 16-bit float they are one already, a
// denormal.
#include "attention_products.cuh"
#include "attention_splits.cuh"
#include "attention_tiles.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    paged_attention(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(128) u8 shared[];
  // Behind the ring: queries [8, KEY_DIM], a place where each warp can turn its sums around, the
  // queries' factors.
  const int warp = kept(int(threadIdx.x >> 5));
  u8* const ring = shared + warp * (STAGES * kStageBytes);
  float* const query_rows = reinterpret_cast<float*>(shared + WARPS * STAGES * kStageBytes);
  float* const fold_rows = query_rows + 8 * KEY_DIM;
  float* const query_factors = fold_rows + kFoldBytes / 4;

  const Lane lane;
  int b = 0;
  while (b + 1 < p.batch && p.sequences[b + 1].first_split <= int(blockIdx.x)) ++b;
  const Sequence& sequence = p.sequences[b];
  const int split = blockIdx.x - sequence.first_split;
  const int key_head = blockIdx.y / p.parts;
  const int first_query = blockIdx.y % p.parts * QUERIES;  // among those of the key head
  const int n_queries = min(QUERIES, p.ratio - first_query);
  const int first_head = key_head * p.ratio + first_query;
  const u64 output = (u64(b) * p.n_key_heads * p.ratio + first_head) * VALUE_DIM;

  // This warp's steps: tokens from first_token on, and every WARPS * kStep further.
  const int n_tokens = kept(sequence.n_tokens);
  const int n_hidden = kept(sequence.first_token);
  const int hidden_steps = n_hidden / kStep;
  const int all_steps = (n_tokens + kStep - 1) / kStep - hidden_steps;
  const int first_step = hidden_steps + int(u64(all_steps) * split / sequence.n_splits);
  const int end_step = hidden_steps + int(u64(all_steps) * (split + 1) / sequence.n_splits);
  const int n_steps = kept(max(0, (end_step - first_step - warp + WARPS - 1) / WARPS));
  const int first_token = (first_step + warp) * kStep;

  const u64 key_pages = kept(sequence.key_pages);
  const u64 value_pages = kept(sequence.value_pages);
  const int block_size = kept(1 << p.block_shift);
  const int block_shift = kept(p.block_shift);

  // Entries of the tables are read a step before the pages.
  struct Entries {
    u64 keys[TILES], values[TILES];
  };
  int entry_token = first_token;  // of the step whose entries come next
  int entry_steps = n_steps;      // steps whose entries were not read yet
  const auto read_entries = [&](Entries& entries) {
    if (entry_steps-- > 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        // A tile past the end is any tile: its weights are zero.
        const u64 at = u64(u32(min(entry_token + tile * kTile, n_tokens - 1)) >> block_shift) * 8;
        entries.keys[tile] = load_global(key_pages + at);
        entries.values[tile] = load_global(value_pages + at);
      }
      entry_token += WARPS * kStep;
    }
  };
  const u32 ring_begin = kept(int(shared_address(ring)));
  int copy_token = first_token;
  int copy_steps = n_steps;
  int copy_stage = 0;
  const auto start_copy = [&](const Entries& entries) {
    if (copy_steps-- > 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int token = copy_token + tile * kTile;
        const u64 key = entries.keys[tile];
        const u64 value = entries.values[tile];
        const u32 of_page = u32(token & (block_size - 1)) / kTile;
        const u32 to = ring_begin + copy_stage * kStageBytes + tile * kPairBytes;
        copy_tile<KEY_DIM>(to, page_address(key), page_format(key), key_head, of_page, block_size,
                           n_tokens - token, lane);
        copy_tile<VALUE_DIM>(to + kKeyTileBytes, page_address(value), page_format(value), key_head,
                             of_page, block_size, n_tokens - token, lane);
        if (!kOneFormat && lane.id == 0) {
          *reinterpret_cast<u32*>(ring + copy_stage * kStageBytes + (tile + 1) * kPairBytes - 16) =
              u32(page_format(key) | page_format(value) << 8);
        }
      }
      copy_token += WARPS * kStep;
      copy_stage = copy_stage + 1 == STAGES ? 0 : copy_stage + 1;
    }
    close_copies();
  };
  // Those of the first steps together, since a short sequence has no others.
  Entries first_entries[STAGES] = {};
#pragma unroll
  for (int step = 0; step < STAGES; ++step) read_entries(first_entries[step]);
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) start_copy(first_entries[step]);
  Entries next_entries = first_entries[STAGES - 1];

  constexpr float kLog2e = 1.4426950408889634f;
  constexpr int kRows = kQueriesTwice ? 4 : 8;
  for (int row = warp; row < kRows; row += WARPS) {
    float factor = 1;
    if (row < n_queries) {
      factor = stage_query(query_rows + row * KEY_DIM, p, b, first_head + row, lane);
    } else {
      for (int i = lane.id; i < KEY_DIM; i += 32) query_rows[row * KEY_DIM + i] = 0;
    }
    if (lane.id == 0) query_factors[row] = factor * p.scale * kLog2e;
  }
  __syncthreads();
  const int my_query = kQueriesTwice ? 2 * (lane.t & 1) : 2 * lane.t;
  const float score_factors[2] = {query_factors[my_query], query_factors[my_query + 1]};

  Queries queries;
  State state;
  int key_format = -1;
  int value_format = -1;
  float* const my_fold = fold_rows + warp * 8 * VALUE_DIM;
  if (kOneFormat) {
    with_format(0, [&]<int f>() { load_queries<f>(queries, query_rows, lane); });
  }
  int token = first_token;
  int stage = 0;
  for (int step = 0; step < n_steps; ++step, token += WARPS * kStep) {
    await_copies<STAGES - 2>();
    __syncwarp();
    start_copy(next_entries);
    read_entries(next_entries);

    const u32 keys = ring_begin + stage * kStageBytes;
    const u8* const formats_at = ring + stage * kStageBytes + kPairBytes - 16;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    float weights[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      if (!kOneFormat) {
        const int format =
            *reinterpret_cast<const u32*>(formats_at + tile * kPairBytes) & 0xff;
        if (key_format != format && (tile == 0 || token + tile * kTile < n_tokens)) {
          key_format = format;
          with_format(key_format, [&]<int f>() { load_queries<f>(queries, query_rows, lane); });
        }
      }
      with_format(key_format, [&]<int f>() {
        if constexpr (is_coded(f)) {
          score_codes<f>(weights[tile], keys + tile * kPairBytes, queries, lane);
        } else {
          score_rows<f>(weights[tile], keys + tile * kPairBytes, queries, lane);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          weights[tile][j] *= is_coded(f) ? score_factors[j & 1] / kKeyUnit : score_factors[j & 1];
        }
      });
    }
    if (token + kStep > n_tokens || token < n_hidden) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int first = token + tile * kTile;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = first + 2 * lane.g + j / 2;
          if (at >= n_tokens || at < n_hidden) weights[tile][j] = kHidden;
        }
        // What a page holds past its tokens may be NaN. Rows of numbers were copied as zeros.
        if (n_tokens - first < kTile && (kOneFormat || n_tokens > first)) {
          const u32 at = tile * kPairBytes;
          const int format = kOneFormat ? 0 : *reinterpret_cast<const u32*>(formats_at + at) >> 8;
          with_format(format, [&]<int f>() {
            if constexpr (is_coded(f)) {
              blank_scales<f>(keys + at + kKeyTileBytes, n_tokens - first, lane);
            }
          });
        }
      }
      __syncwarp();
    }
    weigh(state, weights);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      if (!kOneFormat) {
        if (tile > 0 && token + tile * kTile >= n_tokens) break;
        const int format =
            *reinterpret_cast<const u32*>(formats_at + tile * kPairBytes) >> 8;
        if (value_format != format) {
          // Rows of the sums stand for other dims.
          if (value_format >= 0) {
            with_format(value_format, [&]<int f>() { store_sums<f>(my_fold, state, lane); });
            __syncwarp();
            with_format(format, [&]<int f>() { reload_sums<f>(state, my_fold, lane); });
            __syncwarp();
          }
          value_format = format;
        }
      }
      const u32 values = keys + tile * kPairBytes + kKeyTileBytes;
      with_format(value_format, [&]<int f>() {
        if constexpr (is_coded(f)) {
          add_codes<f>(state, values, weights[tile], lane);
        } else {
          add_rows<f>(state, values, weights[tile], lane);
        }
      });
    }
  }
  await_copies<0>();
  __syncthreads();

  // The CTA's warps, put together over the ring: rows [warp, QUERIES, VALUE_DIM], then offsets,
  // maximums and totals.
  float* const warp_rows = reinterpret_cast<float*>(shared);
  float* const warp_offsets = warp_rows + WARPS * QUERIES * VALUE_DIM;
  float* const warp_maximums = warp_offsets + WARPS * QUERIES * kValueGroups;
  float* const warp_totals = warp_maximums + WARPS * QUERIES;
  if (kOneFormat || value_format >= 0) {
    with_format(value_format, [&]<int f>() {
      store_sums<f>(warp_rows + warp * QUERIES * VALUE_DIM, state, lane);
    });
  } else {
    for (int i = lane.id; i < QUERIES * VALUE_DIM; i += 32) {
      warp_rows[warp * QUERIES * VALUE_DIM + i] = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = state.total[i];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      total += __shfl_xor_sync(~0u, total, distance);
    }
    float offset = state.offsets[i];
    if (kWeightsTwice) offset += __shfl_xor_sync(~0u, offset, 2);
    const int query = 2 * lane.t + i;
    if (query < QUERIES && lane.g == 0) {
      warp_maximums[warp * QUERIES + query] = state.maximum[i];
      warp_totals[warp * QUERIES + query] = total;
    }
    if (query < QUERIES && lane.g < kValueGroups) {
      warp_offsets[(warp * QUERIES + query) * kValueGroups + lane.g] = offset;
    }
  }
  __syncthreads();

  const Partial partial(p, blockIdx.x, blockIdx.y);
  const bool whole = sequence.n_splits == 1;
  // Two dims a thread.
  for (int i = 2 * threadIdx.x; i < QUERIES * VALUE_DIM; i += WARPS * 64) {
    const int query = i / VALUE_DIM;
    const int dim = i % VALUE_DIM;
    float maximum = kHidden;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, warp_maximums[w * QUERIES + query]);
    float2 sum = {0, 0};
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int at = w * QUERIES + query;
      const float factor = exp2_fast(warp_maximums[at] - maximum);
      const float2 row = *reinterpret_cast<const float2*>(warp_rows + at * VALUE_DIM + dim);
      const float offset = kNoCodes ? 0 : warp_offsets[at * kValueGroups + dim / kGroup];
      sum.x += factor * (row.x + offset);
      sum.y += factor * (row.y + offset);
      total += factor * warp_totals[at];
    }
    if (whole) {
      if (query < n_queries) {
        const float factor = output_factor(p, first_head + query, maximum, total);
        write_number(p.output, output + i, sum.x * factor);
        write_number(p.output, output + i + 1, sum.y * factor);
      }
    } else {
      *reinterpret_cast<float2*>(partial.sums + i) = sum;
      if (dim == 0) {
        partial.statistics(query)[0] = maximum;
        partial.statistics(query)[1] = total;
      }
    }
  }
  if (whole) return;

  // The last CTA to arrive puts the splits together, in order.
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* const arrived = reinterpret_cast<u32*>(p.arrivals) + b * gridDim.y + blockIdx.y;
    is_last = add_ordered(arrived, 1) == sequence.n_splits - 1;
    if (is_last) *arrived = 0;
  }
  __syncthreads();
  if (is_last) {
    combine_splits(p, sequence, first_head, n_queries, output, query_rows, warp_rows, lane, warp);
  }
}
