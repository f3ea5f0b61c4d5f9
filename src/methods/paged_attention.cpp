#include "kvpool/methods/paged_attention.h"

#include <algorithm>
#include <cmath>

#include "kernels/paged_attention_common.h"
#include "kvpool/kernels/page_append.h"
#include "kvpool/kernels/worker_pool.h"
#include "kvpool/methods/attention_run.h"
#include "kvpool/methods/exact_rows.h"
#include "kvpool/methods/linear_map.h"

namespace kvpool::methods {
namespace {

using kernels::PagedAttentionParams;
using kernels::PagedStream;
using kernels::PageRef;

/// Numbers lie in the first code space, codes in the second.
constexpr std::int64_t kNumbers = 0;
constexpr std::int64_t kCodes = 1;
/// Tokens of a split, where there are any.
constexpr std::int64_t kSplitTokens = 256;
/// Tokens of all heads, times rows, below which threads cost more than they bring: some 20 us.
constexpr std::int64_t kLittleWork = 2048;

std::size_t index(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t space_of(const PageRef& page) { return page.format == kCodecPage ? kCodes : kNumbers; }

/// How the work is cut and where each piece finds its memory.
///
/// Rows of a sequence's kv head are its queries: query i of q head g of the group is row
/// g * n_queries + i. Many rows are work enough: each tile of rows goes over all tokens by itself.
/// Few are one tile, whose tokens are split.
struct Plan {
  const PagedAttentionParams& p;
  const PageCodecs& keys;
  const PageCodecs& values;
  ExactRows exact_keys;
  ExactRows exact_values;
  CodeSpaces first_head;

  std::int64_t n_kv_heads;
  std::int64_t n_rows;
  std::int64_t n_row_tiles;
  std::int64_t split_tokens = 0;
  /// Of the longest sequence; 0: no splits.
  std::int64_t n_splits = 0;
  std::int64_t query_floats;
  std::int64_t sum_floats;
  std::int64_t work_floats;

  Plan(const PagedAttentionParams& params, const PageCodecs& key_codecs,
       const PageCodecs& value_codecs) noexcept
      : p(params),
        keys(key_codecs),
        values(value_codecs),
        exact_keys(params.keys.shape.head_dim, formats::Format::kFp32),
        exact_values(params.values.shape.head_dim, formats::Format::kFp32),
        first_head(spaces(0)),
        n_kv_heads(params.keys.shape.n_heads),
        n_rows(params.n_q_heads / n_kv_heads * params.n_queries),
        n_row_tiles((n_rows + AttentionRun::kMaxRows - 1) / AttentionRun::kMaxRows) {
    if (n_row_tiles == 1) {
      const std::int64_t block_size = p.keys.shape.block_size;
      split_tokens = (kSplitTokens + block_size - 1) / block_size * block_size;
      for (std::int64_t b = 0; b < p.batch; ++b) {
        n_splits = std::max(n_splits, (sequence_length(p, b) + split_tokens - 1) / split_tokens);
      }
    }
    const std::int64_t rows = std::min(n_rows, AttentionRun::kMaxRows);
    query_floats = AttentionRun::query_floats(first_head, rows);
    sum_floats = AttentionRun::sum_floats(first_head, rows);
    work_floats = AttentionRun::work_floats(first_head, rows);
  }

  CodeSpaces spaces(std::int64_t head) const noexcept {
    CodeSpaces found;
    found.spaces[index(kNumbers)] = {&exact_keys, &exact_values};
    found.n = 1;
    if (keys.heads.empty() && values.heads.empty()) return found;
    // A stream without codecs never lies in this space.
    found.spaces[index(kCodes)] = {
        keys.heads.empty() ? &exact_keys : keys.heads[index(head)].get(),
        values.heads.empty() ? &exact_values : values.heads[index(head)].get()};
    found.n = 2;
    return found;
  }

  std::int64_t n_heads() const noexcept { return p.batch * n_kv_heads; }
  /// [n_heads] queries, then [n_heads, n_splits] sums.
  std::int64_t shared_floats() const noexcept {
    return n_splits == 0 ? 0 : n_heads() * (query_floats + n_splits * sum_floats);
  }
  std::int64_t floats_of_a_worker() const noexcept {
    return work_floats + (n_splits == 0 ? query_floats + sum_floats : 0);
  }

  AttentionRun::Memory memory(float* scratch, std::int64_t head, std::int64_t split,
                              std::int64_t worker) const noexcept {
    float* const own = scratch + shared_floats() + worker * floats_of_a_worker();
    if (n_splits == 0) return {own + work_floats, own + work_floats + query_floats, own};
    return {scratch + head * query_floats,
            scratch + n_heads() * query_floats + (head * n_splits + split) * sum_floats, own};
  }
};

/// One kv head of one sequence.
struct Head {
  const Plan& plan;
  std::int64_t b;
  std::int64_t kv_head;
  std::int64_t n_tokens;
  CodeSpaces spaces;

  Head(const Plan& of, std::int64_t head) noexcept
      : plan(of),
        b(head / of.n_kv_heads),
        kv_head(head % of.n_kv_heads),
        n_tokens(sequence_length(of.p, b)),
        spaces(of.spaces(kv_head)) {}

  std::int64_t q_head(std::int64_t row) const noexcept {
    return kv_head * (plan.p.n_q_heads / plan.n_kv_heads) + row / plan.p.n_queries;
  }
  std::int64_t query(std::int64_t row) const noexcept { return row % plan.p.n_queries; }

  void enter(const AttentionRun& run, std::int64_t first_row) const noexcept {
    float numbers[kMaxDims];
    for (std::int64_t row = 0; row < run.n_rows(); ++row) {
      read_query(plan.p, b, q_head(first_row + row), query(first_row + row), numbers);
      run.enter(row, numbers, plan.p.scale);
    }
  }

  void finish(const AttentionRun& run, std::int64_t first_row) const noexcept {
    float numbers[kMaxDims];
    for (std::int64_t row = 0; row < run.n_rows(); ++row) {
      const std::int64_t h = q_head(first_row + row);
      run.finish(row, numbers, plan.p.sinks ? plan.p.sinks[h] : kernels::kHidden);
      write_output(plan.p, b, h, query(first_row + row), numbers);
    }
  }

  const PageRef& page(const PagedStream& stream, std::int64_t token) const noexcept {
    return page_of(plan.p, stream, b, token / plan.p.keys.shape.block_size);
  }

  /// Decodes tokens of a tile that starts at `start`, page after page.
  auto reader(const AttentionRun& run, const PagedStream& stream, const PageCodecs& codecs,
              std::int64_t start) const noexcept {
    return [&run, &stream, &codecs, start, this](TokenRange range, kernels::FloatRows out,
                                                 float* scratch) {
      const std::int64_t block_size = stream.shape.block_size;
      for (std::int64_t done = 0; done < range.count;) {
        const std::int64_t token = start + range.first + done;
        const std::int64_t slot = token % block_size;
        const std::int64_t count = std::min(range.count - done, block_size - slot);
        const kernels::FloatRows rows{out.data + done * out.stride, out.stride};
        const PageRef& ref = page(stream, token);
        if (ref.format == kCodecPage) {
          codecs.heads[index(kv_head)]->decode({ref.data + kv_head * codecs.head_bytes, block_size},
                                               {slot, count}, run.kernels(), rows, scratch);
        } else {
          kernels::decode_head({ref.format, stream.shape}, ref.data, kv_head, slot, count,
                               rows.data, rows.stride);
        }
        done += count;
      }
    };
  }

  /// Tokens from `first` up to `last` that some row sees, in tiles of one kind.
  void add(AttentionRun& run, std::int64_t first_row, std::int64_t first,
           std::int64_t last) const noexcept {
    const std::int64_t block_size = plan.p.keys.shape.block_size;
    std::int64_t begin = last;
    std::int64_t end = first;
    for (std::int64_t row = 0; row < run.n_rows(); ++row) {
      const kernels::TokenRange seen = visible(plan.p, n_tokens, query(first_row + row));
      run.see(row, seen.first, seen.last);
      begin = std::min(begin, std::max(first, seen.first));
      end = std::max(end, std::min(last, seen.last));
    }
    // Tiles start at multiples of their length, whatever is seen of the first.
    const std::int64_t start = first + (begin - first) / AttentionRun::kTile * AttentionRun::kTile;
    for (std::int64_t token = start; token < end;) {
      const std::int64_t key_space = space_of(page(plan.p.keys, token));
      const std::int64_t value_space = space_of(page(plan.p.values, token));
      const std::int64_t most = std::min(token + AttentionRun::kTile, end);
      std::int64_t stop = std::min(most, (token / block_size + 1) * block_size);
      while (stop < most && space_of(page(plan.p.keys, stop)) == key_space &&
             space_of(page(plan.p.values, stop)) == value_space) {
        stop = std::min(most, stop + block_size);
      }
      const auto bias = [&](std::int64_t row, std::int64_t position, std::int64_t count,
                            float* scores) {
        for (std::int64_t t = 0; t < count; ++t) {
          scores[t] = masked(plan.p, b, q_head(first_row + row), query(first_row + row),
                             position + t, scores[t]);
        }
      };
      const auto read_keys = reader(run, plan.p.keys, plan.keys, token);
      const auto read_values = reader(run, plan.p.values, plan.values, token);
      if (plan.p.mask_kind == kernels::MaskKind::kNone) {
        run.add(key_space, value_space, token, stop - token, read_keys, read_values,
                AttentionRun::NoBias{});
      } else {
        run.add(key_space, value_space, token, stop - token, read_keys, read_values, bias);
      }
      token = stop;
    }
  }
};

/// Whether threads are worth waking.
bool is_little(const Plan& plan) noexcept {
  std::int64_t tokens = 0;
  for (std::int64_t b = 0; b < plan.p.batch; ++b) tokens += sequence_length(plan.p, b);
  return tokens * plan.n_kv_heads * plan.n_rows < kLittleWork;
}

template <class Item>
void for_each(kernels::WorkerPool* workers, std::int64_t n_items, Item item) noexcept {
  if (workers != nullptr && n_items > 1) return workers->run(n_items, item);
  for (std::int64_t i = 0; i < n_items; ++i) item(i, 0);
}

}  // namespace

std::size_t paged_attention_scratch_bytes(const PagedAttentionParams& params,
                                          const PageCodecs& keys, const PageCodecs& values,
                                          std::int64_t n_workers) noexcept {
  const Plan plan(params, keys, values);
  return index(plan.shared_floats() + n_workers * plan.floats_of_a_worker()) * sizeof(float);
}

void paged_attention(const PagedAttentionParams& params, const PageCodecs& keys,
                     const PageCodecs& values, std::byte* scratch, kernels::WorkerPool* workers,
                     const kernels::RowKernels& kernels) noexcept {
  const Plan plan(params, keys, values);
  auto* const floats = reinterpret_cast<float*>(scratch);
  if (is_little(plan)) workers = nullptr;

  if (plan.n_splits == 0) {
    for_each(
        workers, plan.n_heads() * plan.n_row_tiles, [&](std::int64_t item, int worker) noexcept {
          const Head head(plan, item / plan.n_row_tiles);
          const std::int64_t first_row = item % plan.n_row_tiles * AttentionRun::kMaxRows;
          AttentionRun run(head.spaces, std::min(AttentionRun::kMaxRows, plan.n_rows - first_row),
                           kernels, plan.memory(floats, 0, 0, worker));
          head.enter(run, first_row);
          run.clear();
          head.add(run, first_row, 0, head.n_tokens);
          head.finish(run, first_row);
        });
    return;
  }

  const auto run_of = [&](const Head& head, std::int64_t item, std::int64_t split, int worker) {
    return AttentionRun(head.spaces, plan.n_rows, kernels,
                        plan.memory(floats, item, split, worker));
  };
  for_each(workers, plan.n_heads(), [&](std::int64_t item, int worker) noexcept {
    const Head head(plan, item);
    head.enter(run_of(head, item, 0, worker), 0);
  });
  for_each(workers, plan.n_heads() * plan.n_splits, [&](std::int64_t item, int worker) noexcept {
    const Head head(plan, item / plan.n_splits);
    const std::int64_t split = item % plan.n_splits;
    const std::int64_t first = split * plan.split_tokens;
    AttentionRun run = run_of(head, item / plan.n_splits, split, worker);
    run.clear();
    if (first >= head.n_tokens) return;
    head.add(run, 0, first, std::min(first + plan.split_tokens, head.n_tokens));
  });
  for_each(workers, plan.n_heads(), [&](std::int64_t item, int worker) noexcept {
    const Head head(plan, item);
    const AttentionRun run = run_of(head, item, 0, worker);
    for (std::int64_t split = 1; split * plan.split_tokens < head.n_tokens; ++split) {
      run.merge(run_of(head, item, split, worker));
    }
    head.finish(run, 0);
  });
}

}  // namespace kvpool::methods
