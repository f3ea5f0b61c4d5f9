// Vector version of paged attention for few queries. Highway compiles this file once a target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paged_decode_simd.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "decode_rows-inl.h"
#include "float_lanes-inl.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"
#include "paged_attention_common.h"
#include "paged_codes-inl.h"
#include "paged_decode.h"
#include "paged_rows-inl.h"
#include "paged_weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvpool::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE  // as in paged_rows-inl.h

PagedAttentionKernel PagedDecode() { return {}; }
PagedAttentionKernel PagedDecodeVnni() { return {}; }

#else

namespace hn = hwy::HWY_NAMESPACE;

using formats::Format;
using formats::PageLayout;

/// Calls function.template operator()<n>() for n = count, 1..4.
template <class Function>
HWY_INLINE void with_rows(std::int64_t count, Function function) {
  switch (count) {
    case 1:
      return function.template operator()<1>();
    case 2:
      return function.template operator()<2>();
    case 3:
      return function.template operator()<3>();
    default:
      return function.template operator()<4>();
  }
}

/// The same for the code formats' bits.
template <class Function>
HWY_INLINE void with_bits(Format format, Function function) {
  switch (format) {
    case Format::kInt8:
      return function.template operator()<8>();
    case Format::kInt4:
      return function.template operator()<4>();
    case Format::kInt3:
      return function.template operator()<3>();
    default:
      return function.template operator()<2>();
  }
}

// CodeScorer::score goes by this order.
static_assert(static_cast<int>(Format::kInt4) == static_cast<int>(Format::kInt8) + 1 &&
              static_cast<int>(Format::kInt3) == static_cast<int>(Format::kInt8) + 2 &&
              static_cast<int>(Format::kInt2) == static_cast<int>(Format::kInt8) + 3);

/// One call of paged_attention().
class Decode {
 public:
  Decode(const PagedAttentionParams& params, std::byte* scratch, std::int64_t n_workers,
         const CodeScorer& scorer) noexcept
      : p_(params), plan_(params), scorer_(scorer), n_workers_(n_workers) {
    first_splits_ = reinterpret_cast<std::int64_t*>(scratch);
    std::int64_t n = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      first_splits_[b] = n;
      n += plan_.n_splits(sequence_length(p_, b));
    }
    first_splits_[p_.batch] = n;
    queries_ = reinterpret_cast<float*>(scratch) + plan_.first_splits_size(p_);
    partials_ = queries_ + n_heads() * plan_.queries_size;
    workers_ = partials_ + n * plan_.n_heads * plan_.partial_size;
    // Many heads to an item let each one's pages be fetched while the one before is computed, as
    // long as there is work for all.
    item_heads_ = plan_.n_heads;
    while (item_heads_ > 1 && n * (plan_.n_heads / item_heads_) < 4 * n_workers && n_workers > 1) {
      item_heads_ = (item_heads_ + 1) / 2;
    }
    for (const Format format : formats::kPageFormats) {
      key_bytes_[static_cast<int>(format)] = PageLayout{format, p_.keys.shape}.head_bytes();
      value_bytes_[static_cast<int>(format)] = PageLayout{format, p_.values.shape}.head_bytes();
    }
  }

  /// Of (sequence, kv head).
  std::int64_t n_heads() const { return p_.batch * plan_.n_heads; }
  std::int64_t n_items() const { return first_splits_[p_.batch] * items_of_split(); }

  /// The query rows of (sequence, kv head) in fp32, times the scale, and as integers.
  void prepare(std::int64_t which) const noexcept {
    for (std::int64_t row = 0; row < plan_.rows; ++row) {
      const std::int64_t h = which % plan_.n_heads * plan_.group + row / p_.n_queries;
      const std::int64_t at = which / plan_.n_heads * p_.q_strides[0] + h * p_.q_strides[1] +
                              row % p_.n_queries * p_.q_strides[2];
      float* part = queries_ + which * plan_.queries_size;
      float* numbers = part + plan_.numbers + row * plan_.key_width;
      with_float_lanes(p_.query_format,
                       [&](auto kind) HWY_ATTR { load_query<decltype(kind)>(at, numbers); });
      scorer_.prepare(code_query(which, row), p_.keys.shape.head_dim,
                      reinterpret_cast<std::uint32_t*>(part + plan_.codes) + row * plan_.key_width,
                      part + plan_.steps + row * plan_.key_groups,
                      part + plan_.sums + row * plan_.key_groups);
    }
  }

  /// The partial results of an item.
  void attend(std::int64_t item, std::int64_t worker) const noexcept {
    const std::int64_t which = item / items_of_split();
    const std::int64_t b =
        std::upper_bound(first_splits_, first_splits_ + p_.batch, which) - first_splits_ - 1;
    const std::int64_t start = (which - first_splits_[b]) * plan_.split;
    const std::int64_t n_tokens = sequence_length(p_, b);
    const std::int64_t head = item % items_of_split() * item_heads_;
    const std::int64_t end_head = std::min(plan_.n_heads, head + item_heads_);
    Split split = {
        b, head, start, std::max(start, visible(p_, n_tokens, 0).first),
        std::min({start + plan_.split, n_tokens, visible(p_, n_tokens, p_.n_queries - 1).last})};
    for (; split.head < end_head; ++split.head) {
      float* partial = partials_ + (which * plan_.n_heads + split.head) * plan_.partial_size;
      if (split.first >= split.last) {
        std::fill_n(partial, plan_.rows, kHidden);
        std::fill_n(partial + plan_.rows, plan_.rows, 0.0f);
        continue;
      }
      Split next = split;
      ++next.head;
      if (next.head == end_head) {  // a guess: the item that this worker gets next
        next.head = head;
        next.start = next.first = start + n_workers_ * plan_.split;
        next.last = std::min(next.start + plan_.split, n_tokens);
      }
      float* scratch = workers_ + worker * plan_.worker_size;
      score(split, scratch);
      soften(split, n_tokens, scratch, partial);
      float* sums = partial + paged_padded(2 * plan_.rows);
      add_values(split, next, scratch, sums);
      if (p_.n_queries > 1 || p_.mask_kind != MaskKind::kNone)
        leave_out_unseen(split, scratch, sums);
    }
  }

  /// Adds the partial results of (sequence, kv head) in order, and writes its outputs.
  void combine(std::int64_t which, std::int64_t worker) const noexcept {
    const std::int64_t b = which / plan_.n_heads;
    const std::int64_t head = which % plan_.n_heads;
    float* sum = workers_ + worker * plan_.worker_size + plan_.tile;
    const std::int64_t step = plan_.n_heads * plan_.partial_size;
    const float* first = partials_ + first_splits_[b] * step + head * plan_.partial_size;
    const float* last = partials_ + first_splits_[b + 1] * step;
    for (std::int64_t row = 0; row < plan_.rows; ++row) {
      const std::int64_t h = head * plan_.group + row / p_.n_queries;
      float largest = p_.sinks == nullptr ? kHidden : p_.sinks[h];
      for (const float* part = first; part < last; part += step) {
        largest = std::max(largest, part[row]);
      }
      float total = p_.sinks == nullptr ? 0.0f : std::exp(p_.sinks[h] - largest);
      std::fill_n(sum, plan_.value_width, 0.0f);
      for (const float* part = first; part < last; part += step) {
        const float part_total = part[plan_.rows + row];
        if (part_total == 0) continue;
        const float shrink = std::exp(part[row] - largest);
        total += shrink * part_total;
        add_scaled(part + paged_padded(2 * plan_.rows) + row * plan_.value_width, shrink, sum);
      }
      write(total == 0 ? 0.0f : 1 / total, sum,
            b * p_.out_strides[0] + h * p_.out_strides[1] + row % p_.n_queries * p_.out_strides[2]);
    }
  }

 private:
  /// Tokens first .. last of a split that starts at `start`, of one sequence and kv head.
  struct Split {
    std::int64_t sequence;
    std::int64_t head;
    std::int64_t start;
    std::int64_t first;
    std::int64_t last;
  };

  /// Tokens first .. last of a page, of which token 0 is number `at` of the split.
  struct Piece {
    const std::byte* head;
    PageLayout layout;
    std::int64_t first;
    std::int64_t last;
    std::int64_t at;
  };

  std::int64_t items_of_split() const { return (plan_.n_heads + item_heads_ - 1) / item_heads_; }

  std::int64_t first_page(const Split& split) const { return split.first / plan_.block_size; }
  std::int64_t end_page(const Split& split) const {
    return (split.last + plan_.block_size - 1) / plan_.block_size;
  }
  HWY_INLINE Piece piece(const Split& split, const PagedStream& stream,
                         const std::int64_t (&head_bytes)[8], std::int64_t page) const {
    const PageRef& ref = page_of(p_, stream, split.sequence, page);
    const std::int64_t token = page * plan_.block_size;
    return {ref.data + split.head * head_bytes[static_cast<int>(ref.format)],
            {ref.format, stream.shape},
            std::max<std::int64_t>(0, split.first - token),
            std::min(plan_.block_size, split.last - token),
            token - split.start};
  }
  HWY_INLINE Piece keys(const Split& split, std::int64_t page) const {
    return piece(split, p_.keys, key_bytes_, page);
  }
  HWY_INLINE Piece values(const Split& split, std::int64_t page) const {
    return piece(split, p_.values, value_bytes_, page);
  }
  /// The bytes of a page's head in `steps` steps.
  HWY_INLINE Ahead ahead(const Piece& piece, const std::int64_t (&head_bytes)[8],
                         std::int64_t steps) const {
    return Ahead::over(piece.head, head_bytes[static_cast<int>(piece.layout.format)], steps);
  }

  /// Rows of floats that are read where they lie: no vector runs past a row's end.
  bool in_place(const PageLayout& layout) const {
    if (layout.coded()) return plan_.lanes % kLanes == 0;
    return layout.shape.head_dim % kLanes == 0;
  }

  HWY_INLINE void add_scaled(const float* from, float factor, float* sum) const {
    const V scale = hn::Set(D(), factor);
    for (std::int64_t j = 0; j < plan_.value_width; j += kLanes) {
      hn::StoreU(hn::MulAdd(scale, hn::LoadU(D(), from + j), hn::LoadU(D(), sum + j)), D(),
                 sum + j);
    }
  }

  /// output[at ..] = factor * sum
  void write(float factor, const float* sum, std::int64_t at) const {
    with_float_lanes(p_.query_format,
                     [&](auto kind) HWY_ATTR { write_as<decltype(kind)>(factor, sum, at); });
  }
  template <class Rows>
  HWY_INLINE void write_as(float factor, const float* sum, std::int64_t at) const {
    const std::int64_t dim = p_.values.shape.head_dim;
    auto* to = static_cast<typename Rows::Number*>(p_.output) + at;
    const V scale = hn::Set(D(), factor);
    std::int64_t j = 0;
    for (; j + kLanes <= dim; j += kLanes) {
      Rows::store(D(), hn::Mul(scale, hn::LoadU(D(), sum + j)), to + j);
    }
    for (; j < dim; ++j) write_float(p_.query_format, p_.output, at + j, factor * sum[j]);
  }

  template <class Rows>
  HWY_INLINE void load_query(std::int64_t at, float* to) const {
    const auto* from = static_cast<const typename Rows::Number*>(p_.queries) + at;
    const std::int64_t dim = p_.keys.shape.head_dim;
    const std::int64_t whole = dim - dim % kLanes;
    const V scale = hn::Set(D(), p_.scale);
    std::int64_t j = 0;
    for (; j < whole; j += kLanes)
      hn::StoreU(hn::Mul(scale, Rows::load(D(), from + j)), D(), to + j);
    for (; j < plan_.key_width; ++j) {
      to[j] = j < dim ? p_.scale * read_float(p_.query_format, p_.queries, at + j) : 0.0f;
    }
  }

  HWY_INLINE CodeQuery code_query(std::int64_t which, std::int64_t row) const {
    const float* part = queries_ + which * plan_.queries_size;
    return {part + plan_.numbers + row * plan_.key_width,
            reinterpret_cast<const std::uint32_t*>(part + plan_.codes) + row * plan_.key_width,
            part + plan_.steps + row * plan_.key_groups, part + plan_.sums + row * plan_.key_groups,
            plan_.key_width / 4};
  }
  std::int64_t which(const Split& split) const {
    return split.sequence * plan_.n_heads + split.head;
  }

  /// scores[row][token - start] for the tokens of the split. Meanwhile its values are fetched.
  void score(const Split& split, float* scratch) const {
    for (std::int64_t page = first_page(split); page < end_page(split); ++page) {
      const Piece part = keys(split, page);
      const Piece soon = values(split, page);
      if (!in_place(part.layout)) {
        score_decoded(split, part, scratch);
        continue;
      }
      if (part.layout.coded()) {
        score_page(split, part, soon, scratch);
      } else {
        with_float_lanes(part.layout.format, [&](auto kind) HWY_ATTR {
          score_rows_of<decltype(kind)>(split, part, soon, p_.keys.shape.head_dim, scratch);
        });
      }
    }
  }

  /// part.head is the rows' token 0.
  template <class Rows>
  void score_rows_of(const Split& split, const Piece& part, const Piece& soon, std::int64_t width,
                     float* scratch) const {
    const auto* rows =
        reinterpret_cast<const typename Rows::Number*>(part.head) + part.first * width;
    const std::int64_t count = part.last - part.first;
    Ahead fetch = ahead(soon, value_bytes_, std::max<std::int64_t>(1, count / kTileTokens));
    for (std::int64_t r = 0; r < plan_.rows; r += kDecodeRows) {
      with_rows(plan_.rows - r, [&]<int R>() HWY_ATTR {
        score_rows<Rows, R>(code_query(which(split), r).numbers, plan_.key_width, rows, width,
                            width, count, fetch,
                            scratch + plan_.scores + r * plan_.split_width + part.at + part.first,
                            plan_.split_width);
      });
      fetch = {};
    }
  }

  void score_page(const Split& split, const Piece& part, const Piece& soon, float* scratch) const {
    const std::int64_t vectors = (part.last - part.first / kLanes * kLanes + kLanes - 1) / kLanes;
    Ahead fetch = ahead(soon, value_bytes_, vectors * ((p_.keys.shape.head_dim + 31) / 32));
    const auto& score =
        scorer_.score[static_cast<int>(part.layout.format) - static_cast<int>(Format::kInt8)];
    for (std::int64_t r = 0; r < plan_.rows; r += kDecodeRows) {
      const std::int64_t n = std::min(kDecodeRows, plan_.rows - r);
      CodeQuery queries[kDecodeRows];
      for (std::int64_t i = 0; i < n; ++i) queries[i] = code_query(which(split), r + i);
      score[n - 1](queries, part.head, part.layout, plan_.lanes, part.first, part.last, fetch,
                   scratch + plan_.scores + r * plan_.split_width + part.at, plan_.split_width);
      fetch = {};
    }
  }

  /// Decodes tokens to rows of fp32, at most kPagedPadding of them, and returns the rows.
  const float* decode_tile(const Piece& part, std::int64_t first, std::int64_t count,
                           std::int64_t width, float* scratch) const {
    float* tile = scratch + plan_.tile;
    const std::int64_t dim = part.layout.shape.head_dim;
    decode_rows(part.layout, part.head, 0, first, count, tile, width);
    for (std::int64_t t = 0; t < count; ++t) {
      std::fill(tile + t * width + dim, tile + (t + 1) * width, 0.0f);
    }
    return tile;
  }

  void score_decoded(const Split& split, const Piece& part, float* scratch) const {
    for (std::int64_t first = part.first; first < part.last; first += kPagedPadding) {
      const std::int64_t count = std::min(kPagedPadding, part.last - first);
      const float* tile = decode_tile(part, first, count, plan_.key_width, scratch);
      score_rows_of<Fp32Lanes>(
          split, {reinterpret_cast<const std::byte*>(tile), part.layout, 0, count, part.at + first},
          {nullptr, part.layout, 0, 0, 0}, plan_.key_width, scratch);
    }
  }

  /// Turns scores into weights relative to each row's largest, zero for tokens that it does not
  /// see and around them.
  void soften(const Split& split, std::int64_t n_tokens, float* scratch, float* partial) const {
    for (std::int64_t row = 0; row < plan_.rows; ++row) {
      float* scores = scratch + plan_.scores + row * plan_.split_width;
      const std::int64_t i = row % p_.n_queries;
      const TokenRange seen = visible(p_, n_tokens, i);
      const std::int64_t first = std::clamp(seen.first, split.first, split.last) - split.start;
      const std::int64_t last = std::clamp(seen.last, split.first, split.last) - split.start;
      std::fill(scores, scores + first, kHidden);
      std::fill(scores + std::max(first, last), scores + plan_.split_width, kHidden);
      if (p_.mask_kind != MaskKind::kNone) {
        const std::int64_t h = split.head * plan_.group + row / p_.n_queries;
        std::int64_t t =
            apply_mask(p_, split.sequence, h, i, split.start + first, last - first, scores + first);
        for (t += first; t < last; ++t) {
          scores[t] = masked(p_, split.sequence, h, i, split.start + t, scores[t]);
        }
      }
      partial[plan_.rows + row] = exponentiate(scores, plan_.split_width, partial[row]);
    }
  }

  /// sums[row] = weights[row] . values. Meanwhile the keys of `next` are fetched.
  void add_values(const Split& split, const Split& next, float* scratch, float* sums) const {
    std::fill_n(sums, plan_.rows * plan_.value_width, 0.0f);
    auto* pages = reinterpret_cast<Run*>(scratch + plan_.runs);
    const std::int64_t begin = first_page(split);
    const std::int64_t end = end_page(split);
    for (std::int64_t page = begin; page < end;) {
      const Piece first = values(split, page);
      if (!in_place(first.layout)) {
        add_decoded(first, scratch, sums);
        ++page;
        continue;
      }
      // Pages of one format go together, so that sums stay in registers.
      std::int64_t n = 0;
      for (; page + n < end; ++n) {
        const Piece part = values(split, page + n);
        if (part.layout.format != first.layout.format) break;
        const std::int64_t soon = first_page(next) + page + n - begin;
        const bool there = soon < end_page(next);
        pages[n] = {part.head, part.last,
                    there ? ahead(keys(next, soon), key_bytes_, steps(part)) : Ahead{}};
      }
      add_run(first, {pages, n, first.layout, plan_.lanes}, scratch, sums);
      page += n;
    }
  }

  /// Steps of a page's Run.
  std::int64_t steps(const Piece& part) const {
    if (part.layout.coded()) return (part.layout.shape.head_dim + 3) / 4;
    const std::int64_t columns = kTileColumns * kLanes;
    return (part.last - part.first) * ((part.layout.shape.head_dim + columns - 1) / columns);
  }

  static void fetch_no_more(const PageRun& run) {
    for (std::int64_t i = 0; i < run.n_pages; ++i) run.pages[i].ahead = {};
  }

  /// `first` is the first of the run's pages.
  void add_run(const Piece& first, const PageRun& run, float* scratch, float* sums) const {
    const float* weights = scratch + plan_.scores + first.at;
    if (!first.layout.coded()) {
      return with_float_lanes(first.layout.format, [&](auto kind) HWY_ATTR {
        add_rows_of<decltype(kind)>(first, run, weights, first.layout.shape.head_dim, sums);
      });
    }
    with_bits(first.layout.format, [&]<int bits>() HWY_ATTR {
      for (std::int64_t r = 0; r < plan_.rows; r += kDecodeRows) {
        with_rows(plan_.rows - r, [&]<int R>() HWY_ATTR {
          add_codes<bits, R>(run, weights + r * plan_.split_width, plan_.split_width,
                             plan_.split_width, scratch + plan_.scaled,
                             sums + r * plan_.value_width, plan_.value_width);
        });
        fetch_no_more(run);
      }
    });
  }

  /// `weights` is the first page's token 0.
  template <class Rows>
  void add_rows_of(const Piece& first, const PageRun& run, const float* weights, std::int64_t width,
                   float* sums) const {
    // The first page may begin behind its first token.
    run.pages[0].rows +=
        first.first * width * static_cast<std::int64_t>(sizeof(typename Rows::Number));
    run.pages[0].n_rows -= first.first;
    for (std::int64_t r = 0; r < plan_.rows; r += kDecodeRows) {
      with_rows(plan_.rows - r, [&]<int R>() HWY_ATTR {
        add_rows<Rows, R>(weights + first.first + r * plan_.split_width, plan_.split_width,
                          run.pages, run.n_pages, width, width, sums + r * plan_.value_width,
                          plan_.value_width);
      });
      fetch_no_more(run);
    }
  }

  void add_decoded(const Piece& part, float* scratch, float* sums) const {
    for (std::int64_t first = part.first; first < part.last; first += kPagedPadding) {
      const std::int64_t count = std::min(kPagedPadding, part.last - first);
      const float* tile = decode_tile(part, first, count, plan_.value_width, scratch);
      Run rows = {reinterpret_cast<const std::byte*>(tile), count, {}};
      const Piece all = {part.head, part.layout, 0, count, 0};
      add_rows_of<Fp32Lanes>(all, {&rows, 1, part.layout, plan_.lanes},
                             scratch + plan_.scores + part.at + first, plan_.value_width, sums);
    }
  }

  /// A weight of zero does not keep out a value that is infinite or no number. Where a sum has
  /// become none, it is added up again from the tokens that have a weight.
  void leave_out_unseen(const Split& split, float* scratch, float* sums) const {
    for (std::int64_t row = 0; row < plan_.rows; ++row) {
      float* sum = sums + row * plan_.value_width;
      if (all_numbers(sum)) continue;
      float* again = scratch + plan_.tile + plan_.value_width;  // behind the row that is decoded
      std::fill_n(again, plan_.value_width, 0.0f);
      const float* weights = scratch + plan_.scores + row * plan_.split_width;
      for (std::int64_t page = first_page(split); page < end_page(split); ++page) {
        const Piece part = values(split, page);
        for (std::int64_t t = part.first; t < part.last; ++t) {
          const float weight = weights[part.at + t];
          if (weight != 0) {
            add_scaled(decode_tile(part, t, 1, plan_.value_width, scratch), weight, again);
          }
        }
      }
      for (std::int64_t j = 0; j < plan_.value_width; ++j) {
        if (std::isnan(sum[j])) sum[j] = again[j];
      }
    }
  }

  bool all_numbers(const float* sum) const {
    V zeros = hn::Zero(D());
    for (std::int64_t j = 0; j < plan_.value_width; j += kLanes) {
      zeros = hn::MulAdd(hn::Zero(D()), hn::LoadU(D(), sum + j), zeros);
    }
    return hn::AllTrue(D(), hn::Eq(zeros, zeros));
  }

  const PagedAttentionParams& p_;
  const DecodePlan plan_;
  const CodeScorer& scorer_;
  const std::int64_t n_workers_;
  std::int64_t item_heads_;
  std::int64_t key_bytes_[8] = {};  // of a head, by format
  std::int64_t value_bytes_[8] = {};
  std::int64_t* first_splits_;
  float* queries_;
  float* partials_;
  float* workers_;
};

/// Calls work(i, worker) for each i below n, in order where there are no workers to share it.
template <class Work>
void share(WorkerPool* workers, std::int64_t n, const Work& work) {
  if (workers != nullptr) return workers->run(n, work);
  for (std::int64_t i = 0; i < n; ++i) work(i, 0);
}

template <class Dot>
void run(const PagedAttentionParams& params, std::byte* scratch, WorkerPool* workers) noexcept {
  // Less than this many products are done before a thread would have woken.
  constexpr std::int64_t kSmallWork = std::int64_t{1} << 20;
  std::int64_t tokens = 0;
  for (std::int64_t b = 0; b < params.batch; ++b) tokens += sequence_length(params, b);
  const std::int64_t row_products = params.keys.shape.head_dim + params.values.shape.head_dim;
  if (tokens * params.n_q_heads * params.n_queries * row_products < kSmallWork) workers = nullptr;
  const Decode decode(params, scratch, workers == nullptr ? 1 : workers->n_threads(),
                      kCodeScorer<Dot>);
  // Few of them cost less than waking anybody.
  share(decode.n_heads() < 32 ? nullptr : workers, decode.n_heads(),
        [&](std::int64_t i, int) noexcept { decode.prepare(i); });
  share(workers, decode.n_items(),
        [&](std::int64_t i, int worker) noexcept { decode.attend(i, worker); });
  share(workers, decode.n_heads(),
        [&](std::int64_t i, int worker) noexcept { decode.combine(i, worker); });
}

#if HWY_ARCH_X86
using PlainDot = PairDot;
#else
using PlainDot = FloatDot;
#endif

PagedAttentionKernel PagedDecode() {
  return {hwy::TargetName(HWY_TARGET), {paged_decode_scratch_bytes, run<PlainDot>}, {}};
}

PagedAttentionKernel PagedDecodeVnni() {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  if (__builtin_cpu_supports("avx512vnni")) {
    return {"AVX3_VNNI", {paged_decode_scratch_bytes, run<VnniDot>}, {}};
  }
#endif
  return {};
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvpool::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "simd_dispatch.h"

namespace kvpool::kernels {

std::size_t paged_decode_scratch_bytes(const PagedAttentionParams& params,
                                       std::int64_t n_workers) noexcept {
  return DecodePlan(params).scratch_bytes(params, n_workers);
}

HWY_EXPORT(PagedDecode);
HWY_EXPORT(PagedDecodeVnni);

std::vector<PagedAttentionKernel> paged_decode_simd_kernels() {
  const auto is_there = [](const PagedAttentionKernel& kernel) {
    return kernel.decode.run != nullptr;
  };
  auto kernels = made_kernels(HWY_DISPATCH_TABLE(PagedDecodeVnni), is_there);
  const auto others = made_kernels(HWY_DISPATCH_TABLE(PagedDecode), is_there);
  kernels.insert(kernels.end(), others.begin(), others.end());
  return kernels;
}

}  // namespace kvpool::kernels
#endif
