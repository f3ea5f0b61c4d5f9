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
// The tokens of a sequence are cut into splits, one a CTA, and these into steps of TILES tiles of 16
// tokens that the warps take in turn. A warp copies its steps into a ring of its own, a few ahead of
// the one it computes, and waits for nobody. Its sums, those of the CTA and those of the splits are then put
// together in a fixed order; the last CTA of a sequence and head to arrive does that for the splits.
//
// Tensor cores do both products, m16n8k16 with fp32 sums. With g = lane / 4 and t = lane % 4:
//
//   scores  = queries [16 x dims] * keys^T [dims x 8 tokens], twice, for 16 tokens. Row r holds
//             query r % 8, rounded; row r + 8 what rounding took from it. A lane gets the scores of
//             query g with tokens 4t .. 4t + 3: column c of product i is token
//             4 (c / 2) + 2 i + c % 2.
//   output^T += values^T [16 dims x 16 tokens] * weights^T [16 tokens x 8 queries]. What a lane
//             holds of the scores is what it must hold of the weights: nothing moves between lanes.
//
// Up to four queries appear twice, in columns q and q + 4, which can carry the weights rounded and
// what rounding took from them. The contraction index of a product may be permuted as long as both sides
// are, so the dims of coded keys are taken in the order in which words hold them. Codes are never
// scaled one by one: a token's scale goes into its score, or into its weight, once a group. They
// become floats by setting exponent bits above them, and what that adds is taken off the sums.
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

  const u64* const key_pages = reinterpret_cast<const u64*>(kept(sequence.key_pages));
  const u64* const value_pages = reinterpret_cast<const u64*>(kept(sequence.value_pages));
  const int block_size = 1 << p.block_shift;
  const int block_shift = kept(p.block_shift);

  // Entries of the tables are read a step before the pages.
  u64 key_entries[TILES] = {};
  u64 value_entries[TILES] = {};
  int entry_token = first_token;  // of the step whose entries come next
  int entry_steps = n_steps;      // steps whose entries were not read yet
  const auto read_entries = [&] {
    if (entry_steps-- > 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int token = entry_token + tile * kTile;
        if (tile == 0 || token < n_tokens) {
          key_entries[tile] = key_pages[token >> block_shift];
          value_entries[tile] = value_pages[token >> block_shift];
        }
      }
      entry_token += WARPS * kStep;
    }
  };
  const u32 ring_begin = kept(int(shared_address(ring)));
  int copy_token = first_token;
  int copy_steps = n_steps;
  int copy_stage = 0;
  const auto start_copy = [&] {
    if (copy_steps-- > 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int token = copy_token + tile * kTile;
        if (tile > 0 && token >= n_tokens) break;
        const u64 key = key_entries[tile];
        const u64 value = value_entries[tile];
        const int of_page = (token & (block_size - 1)) / kTile;
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
    read_entries();
  };
  read_entries();
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) start_copy();

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
  const float score_factor = query_factors[kQueriesTwice ? lane.g & 3 : lane.g];

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
    start_copy();

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
      });
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[tile][j] *= score_factor;
    }
    if (token + kStep > n_tokens || token < n_hidden) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = token + tile * kTile + 4 * lane.t + j;
          if (at >= n_tokens || at < n_hidden) weights[tile][j] = kHidden;
        }
      }
    }
    weigh(state, weights, lane);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int n_valid = n_tokens - token - tile * kTile;
      if (tile > 0 && n_valid <= 0) break;
      if (!kOneFormat) {
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
          add_codes<f>(state, values, weights[tile], n_valid, lane);
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
  const auto over_tokens = [](float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  };
  state.total = over_tokens(state.total);
#pragma unroll
  for (int group = 0; group < kValueGroups; ++group) {
    state.offsets[group] = over_tokens(state.offsets[group]);
  }
  if (lane.t == 0 && lane.g < QUERIES) {
    warp_maximums[warp * QUERIES + lane.g] = state.maximum;
    warp_totals[warp * QUERIES + lane.g] = state.total;
#pragma unroll
    for (int group = 0; group < kValueGroups; ++group) {
      warp_offsets[(warp * QUERIES + lane.g) * kValueGroups + group] = state.offsets[group];
    }
  }
  __syncthreads();

  const Partial partial(p, blockIdx.x, blockIdx.y);
  const bool whole = sequence.n_splits == 1;
  for (int i = threadIdx.x; i < QUERIES * VALUE_DIM; i += WARPS * 32) {
    const int query = i / VALUE_DIM;
    const int dim = i % VALUE_DIM;
    float maximum = kHidden;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, warp_maximums[w * QUERIES + query]);
    float sum = 0;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int at = w * QUERIES + query;
      const float factor = exp2f(warp_maximums[at] - maximum);
      sum += factor * (warp_rows[at * VALUE_DIM + dim] +
                       warp_offsets[at * kValueGroups + dim / kGroup]);
      total += factor * warp_totals[at];
    }
    if (whole) {
      if (query < n_queries) {
        write_number(p.output, output + i,
                     sum * output_factor(p, first_head + query, maximum, total));
      }
    } else {
      partial.sums[i] = sum;
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
