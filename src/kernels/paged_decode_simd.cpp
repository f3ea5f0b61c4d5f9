// Vector version of paged attention for few queries. Highway compiles this file once a target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "paged_decode_simd.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>
//
#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvpool/kernels/page_append.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"
#include "paged_attention_common.h"
#include "paged_codes-inl.h"
#include "paged_decode.h"
#include "paged_rows-inl.h"

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

/// One call of paged_attention().
template <class Dot>
class Decode {
 public:
  Decode(const PagedAttentionParams& params, std::byte* scratch) noexcept
      : p_(params),
        plan_(params),
        first_items_(reinterpret_cast<std::int64_t*>(scratch)),
        partials_(reinterpret_cast<float*>(scratch) + plan_.first_items_size(params)) {
    std::int64_t n = 0;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      first_items_[b] = n;
      n += plan_.n_splits(sequence_length(p_, b)) * plan_.n_heads;
    }
    first_items_[p_.batch] = n;
    workers_ = partials_ + n * plan_.partial_size;
  }

  std::int64_t n_items() const { return first_items_[p_.batch]; }
  std::int64_t n_heads() const { return p_.batch * plan_.n_heads; }

  /// The partial result of an item: heads of a split lie side by side in its pages, so they follow
  /// each other.
  void attend(std::int64_t item, std::int64_t worker) const noexcept {
    const std::int64_t b =
        std::upper_bound(first_items_, first_items_ + p_.batch, item) - first_items_ - 1;
    const std::int64_t in_sequence = item - first_items_[b];
    const std::int64_t head = in_sequence % plan_.n_heads;
    const std::int64_t start = in_sequence / plan_.n_heads * plan_.split;
    const std::int64_t n_tokens = sequence_length(p_, b);
    const Split split = {
        b, head, start, std::max(start, visible(p_, n_tokens, 0).first),
        std::min({start + plan_.split, n_tokens, visible(p_, n_tokens, p_.n_queries - 1).last})};
    float* partial = partials_ + item * plan_.partial_size;
    if (split.first >= split.last) {
      std::fill_n(partial, plan_.rows, kHidden);
      std::fill_n(partial + plan_.rows, plan_.rows, 0.0f);
      return;
    }
    float* scratch = workers_ + worker * plan_.worker_size;
    load_queries(split, scratch);
    score(split, scratch);
    soften(split, n_tokens, scratch, partial);
    add_values(split, scratch, partial + 2 * plan_.rows);
  }

  /// Adds the partial results of (sequence, head) in order, and writes its outputs.
  void combine(std::int64_t which, std::int64_t worker) const noexcept {
    const std::int64_t b = which / plan_.n_heads;
    const std::int64_t head = which % plan_.n_heads;
    float* sum = workers_ + worker * plan_.worker_size + plan_.tile;
    const float* first = partials_ + (first_items_[b] + head) * plan_.partial_size;
    const float* last = partials_ + first_items_[b + 1] * plan_.partial_size;
    const std::int64_t step = plan_.n_heads * plan_.partial_size;
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
        add_scaled(part + 2 * plan_.rows + row * plan_.value_width, shrink, sum);
      }
      const V inverse = hn::Set(D(), total == 0 ? 0.0f : 1 / total);
      for (std::int64_t j = 0; j < plan_.value_width; j += kLanes) {
        hn::StoreU(hn::Mul(inverse, hn::LoadU(D(), sum + j)), D(), sum + j);
      }
      write_output(p_, b, h, row % p_.n_queries, sum);
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

  /// The n-th page that a split touches.
  HWY_INLINE Piece piece(const Split& split, const PagedStream& stream, std::int64_t page) const {
    const PageRef& ref = page_of(p_, stream, split.sequence, page);
    const PageLayout layout{ref.format, stream.shape};
    const std::int64_t token = page * plan_.block_size;
    return {ref.data + split.head * layout.head_bytes(), layout,
            std::max<std::int64_t>(0, split.first - token),
            std::min(plan_.block_size, split.last - token), token - split.start};
  }
  std::int64_t first_page(const Split& split) const { return split.first / plan_.block_size; }
  std::int64_t end_page(const Split& split) const {
    return (split.last + plan_.block_size - 1) / plan_.block_size;
  }

  /// Rows of floats that are read where they lie: no vector runs past a row's end.
  static bool in_place(const PageLayout& layout) {
    if (layout.coded()) return layout.lanes() % kLanes == 0;
    return layout.shape.head_dim % kLanes == 0;
  }

  HWY_INLINE void add_scaled(const float* from, float factor, float* sum) const {
    const V scale = hn::Set(D(), factor);
    for (std::int64_t j = 0; j < plan_.value_width; j += kLanes) {
      hn::StoreU(hn::MulAdd(scale, hn::LoadU(D(), from + j), hn::LoadU(D(), sum + j)), D(),
                 sum + j);
    }
  }

  template <class Rows>
  HWY_INLINE void load_query(std::int64_t at, float* to) const {
    const auto* from = static_cast<const typename Rows::Number*>(p_.queries) + at;
    const std::int64_t dim = p_.keys.shape.head_dim;
    const std::int64_t whole = dim - dim % kLanes;
    const V scale = hn::Set(D(), p_.scale);
    std::int64_t j = 0;
    for (; j < whole; j += kLanes) hn::StoreU(hn::Mul(scale, Rows::load(from + j)), D(), to + j);
    for (; j < plan_.key_width; ++j) {
      to[j] = j < dim ? p_.scale * read_float(p_.query_format, p_.queries, at + j) : 0.0f;
    }
  }

  /// The head's query rows in fp32, times the scale, and as integers.
  void load_queries(const Split& split, float* scratch) const {
    for (std::int64_t row = 0; row < plan_.rows; ++row) {
      const std::int64_t h = split.head * plan_.group + row / p_.n_queries;
      const std::int64_t at = split.sequence * p_.q_strides[0] + h * p_.q_strides[1] +
                              row % p_.n_queries * p_.q_strides[2];
      float* to = scratch + plan_.queries + row * plan_.key_width;
      switch (p_.query_format) {
        case Format::kFp32:
          load_query<Fp32Rows>(at, to);
          break;
        case Format::kFp16:
          load_query<Fp16Rows>(at, to);
          break;
        default:
          load_query<Bf16Rows>(at, to);
      }
    }
    if (!any_coded(split, p_.keys)) return;
    for (std::int64_t row = 0; row < plan_.rows; ++row) {
      const CodeQuery query = code_query(scratch, row);
      prepare_query<Dot>(query.numbers, (p_.keys.shape.head_dim + 3) / 4,
                         const_cast<std::uint32_t*>(query.a), const_cast<std::uint32_t*>(query.b),
                         const_cast<float*>(query.steps), const_cast<float*>(query.sums));
    }
  }

  bool any_coded(const Split& split, const PagedStream& stream) const {
    for (std::int64_t page = first_page(split); page < end_page(split); ++page) {
      const Format format = page_of(p_, stream, split.sequence, page).format;
      if (formats::traits(format).kind == formats::Kind::kCode) return true;
    }
    return false;
  }

  HWY_INLINE CodeQuery code_query(const float* scratch, std::int64_t row) const {
    const auto* codes = reinterpret_cast<const std::uint32_t*>(scratch + plan_.codes);
    const std::int64_t quads = plan_.key_width / 4;
    return {codes + row * quads, codes + (plan_.rows + row) * quads,
            scratch + plan_.code_scales + row * plan_.key_groups,
            scratch + plan_.query_sums + row * plan_.key_groups,
            scratch + plan_.queries + row * plan_.key_width};
  }

  /// scores[row][token - start] for the tokens of the split.
  void score(const Split& split, float* scratch) const {
    for (std::int64_t page = first_page(split); page < end_page(split); ++page) {
      const Piece keys = piece(split, p_.keys, page);
      if (!in_place(keys.layout)) {
        score_decoded(keys, scratch);
      } else if (keys.layout.format == Format::kFp32) {
        score_rows_of<Fp32Rows>(keys.head, p_.keys.shape.head_dim, keys, scratch);
      } else if (keys.layout.format == Format::kFp16) {
        score_rows_of<Fp16Rows>(keys.head, p_.keys.shape.head_dim, keys, scratch);
      } else if (keys.layout.format == Format::kBf16) {
        score_rows_of<Bf16Rows>(keys.head, p_.keys.shape.head_dim, keys, scratch);
      } else {
        with_bits(keys.layout.format,
                  [&]<int bits>() HWY_ATTR { score_page<bits>(keys, scratch); });
      }
    }
  }

  /// `rows` is the page's token 0.
  template <class Rows>
  void score_rows_of(const std::byte* rows, std::int64_t width, const Piece& keys,
                     float* scratch) const {
    const auto* first = reinterpret_cast<const typename Rows::Number*>(rows) + keys.first * width;
    for (std::int64_t r = 0; r < plan_.rows; r += 4) {
      with_rows(plan_.rows - r, [&]<int R>() HWY_ATTR {
        score_rows<Rows, R>(scratch + plan_.queries + r * plan_.key_width, plan_.key_width, first,
                            width, width, keys.last - keys.first,
                            scratch + plan_.scores + r * plan_.split_width + keys.at + keys.first,
                            plan_.split_width);
      });
    }
  }

  template <int bits>
  void score_page(const Piece& keys, float* scratch) const {
    for (std::int64_t r = 0; r < plan_.rows; r += 4) {
      with_rows(plan_.rows - r, [&]<int R>() HWY_ATTR {
        CodeQuery queries[R];
        for (int i = 0; i < R; ++i) queries[i] = code_query(scratch, r + i);
        score_codes<Dot, bits, R>(queries, keys.head, keys.layout, keys.first, keys.last,
                                  scratch + plan_.scores + r * plan_.split_width + keys.at,
                                  plan_.split_width);
      });
    }
  }

  /// Decodes tokens to rows of fp32, at most kPagedPadding of them, and returns the rows.
  const float* decode_tile(const Piece& piece, std::int64_t first, std::int64_t count,
                           std::int64_t width, float* scratch) const {
    float* tile = scratch + plan_.tile;
    const std::int64_t dim = piece.layout.shape.head_dim;
    decode_head(piece.layout, piece.head, 0, first, count, tile, width);
    for (std::int64_t t = 0; t < count; ++t) {
      std::fill(tile + t * width + dim, tile + (t + 1) * width, 0.0f);
    }
    return tile;
  }

  void score_decoded(const Piece& keys, float* scratch) const {
    for (std::int64_t first = keys.first; first < keys.last; first += kPagedPadding) {
      Piece part = keys;
      part.first = 0;
      part.last = std::min(kPagedPadding, keys.last - first);
      part.at = keys.at + first;
      const float* tile = decode_tile(keys, first, part.last, plan_.key_width, scratch);
      score_rows_of<Fp32Rows>(reinterpret_cast<const std::byte*>(tile), plan_.key_width, part,
                              scratch);
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
        for (std::int64_t t = first; t < last; ++t) {
          scores[t] = masked(p_, split.sequence, h, i, split.start + t, scores[t]);
        }
      }
      partial[plan_.rows + row] = exponentiate(scores, partial[row]);
    }
  }

  /// Replaces scores by exp(score - largest) and returns their sum; all zeros if all are hidden.
  HWY_INLINE float exponentiate(float* HWY_RESTRICT scores, float& largest) const {
    V most = hn::Set(D(), kHidden);
    for (std::int64_t t = 0; t < plan_.split_width; t += kLanes) {
      most = hn::Max(most, hn::LoadU(D(), scores + t));
    }
    largest = hn::GetLane(hn::MaxOfLanes(D(), most));
    V sum = hn::Zero(D());
    const V shift = hn::Set(D(), largest == kHidden ? 0.0f : largest);
    for (std::int64_t t = 0; t < plan_.split_width; t += kLanes) {
      const V below = hn::Sub(hn::LoadU(D(), scores + t), shift);
      // Exp does not keep a NaN.
      const V weight = hn::IfThenElse(hn::Eq(below, below), hn::Exp(D(), below), below);
      hn::StoreU(weight, D(), scores + t);
      sum = hn::Add(sum, weight);
    }
    return hn::GetLane(hn::SumOfLanes(D(), sum));
  }

  /// sums[row] = weights[row] . values.
  void add_values(const Split& split, float* scratch, float* sums) const {
    std::fill_n(sums, plan_.rows * plan_.value_width, 0.0f);
    auto* run = reinterpret_cast<Run*>(scratch + plan_.runs);
    const std::int64_t end = end_page(split);
    for (std::int64_t page = first_page(split); page < end;) {
      const Piece values = piece(split, p_.values, page);
      if (!in_place(values.layout)) {
        add_decoded(values, scratch, sums);
        ++page;
        continue;
      }
      // Pages of one format go together, so that sums stay in registers.
      std::int64_t n = 0;
      for (; page + n < end; ++n) {
        const Piece next = piece(split, p_.values, page + n);
        if (next.layout.format != values.layout.format) break;
        run[n] = {next.head, next.last};
      }
      add_run(values, {run, n, values.layout}, scratch, sums);
      page += n;
    }
  }

  /// `first` is the first of the run's pages.
  void add_run(const Piece& first, const CodeRun& run, float* scratch, float* sums) const {
    const std::int64_t dim = first.layout.shape.head_dim;
    const float* weights = scratch + plan_.scores + first.at;
    switch (first.layout.format) {
      case Format::kFp32:
        return add_rows_of<Fp32Rows>(first, run, weights, dim, sums);
      case Format::kFp16:
        return add_rows_of<Fp16Rows>(first, run, weights, dim, sums);
      case Format::kBf16:
        return add_rows_of<Bf16Rows>(first, run, weights, dim, sums);
      default:
        break;
    }
    with_bits(first.layout.format, [&]<int bits>() HWY_ATTR {
      for (std::int64_t r = 0; r < plan_.rows; r += kCodeRows) {
        with_rows(std::min<std::int64_t>(kCodeRows, plan_.rows - r), [&]<int R>() HWY_ATTR {
          add_codes<bits, R>(run, weights + r * plan_.split_width, plan_.split_width,
                             plan_.split_width, scratch + plan_.scaled,
                             sums + r * plan_.value_width, plan_.value_width);
        });
      }
    });
  }

  template <class Rows>
  void add_rows_of(const Piece& first, const CodeRun& run, const float* weights, std::int64_t width,
                   float* sums) const {
    // The first page may begin behind its first token.
    auto* pages = const_cast<Run*>(run.pages);
    pages[0].rows += first.first * width * static_cast<std::int64_t>(sizeof(typename Rows::Number));
    pages[0].n_rows -= first.first;
    for (std::int64_t r = 0; r < plan_.rows; r += 4) {
      with_rows(plan_.rows - r, [&]<int R>() HWY_ATTR {
        add_rows<Rows, R>(weights + first.first + r * plan_.split_width, plan_.split_width, pages,
                          run.n_pages, width, width, sums + r * plan_.value_width,
                          plan_.value_width);
      });
    }
  }

  void add_decoded(const Piece& values, float* scratch, float* sums) const {
    for (std::int64_t first = values.first; first < values.last; first += kPagedPadding) {
      const std::int64_t count = std::min(kPagedPadding, values.last - first);
      const float* tile = decode_tile(values, first, count, plan_.value_width, scratch);
      Run run = {reinterpret_cast<const std::byte*>(tile), count};
      Piece part = values;
      part.first = 0;
      add_rows_of<Fp32Rows>(part, {&run, 1, {}}, scratch + plan_.scores + values.at + first,
                            plan_.value_width, sums);
    }
  }

  const PagedAttentionParams& p_;
  const DecodePlan plan_;
  std::int64_t* first_items_;
  float* partials_;
  float* workers_ = nullptr;
};

template <class Dot>
void run(const PagedAttentionParams& params, std::byte* scratch, WorkerPool* workers) noexcept {
  const Decode<Dot> decode(params, scratch);
  const auto attend = [&](std::int64_t item, int worker) noexcept { decode.attend(item, worker); };
  const auto combine = [&](std::int64_t item, int worker) noexcept {
    decode.combine(item, worker);
  };
  if (workers == nullptr) {
    for (std::int64_t item = 0; item < decode.n_items(); ++item) attend(item, 0);
    for (std::int64_t item = 0; item < decode.n_heads(); ++item) combine(item, 0);
    return;
  }
  workers->run(decode.n_items(), attend);
  workers->run(decode.n_heads(), combine);
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
  struct Target {
    std::string_view name;
    PagedAttentionKernel (*kernel)();
  };
  std::vector<PagedAttentionKernel> kernels;
  const auto add = [&](const auto& targets) {
    for (const Target& target : targets) {
      const PagedAttentionKernel kernel = target.kernel();
      if (kernel.decode.run != nullptr) kernels.push_back(kernel);
    }
  };
  add(supported_kernels<Target>(HWY_DISPATCH_TABLE(PagedDecodeVnni)));
  add(supported_kernels<Target>(HWY_DISPATCH_TABLE(PagedDecode)));
  return kernels;
}

}  // namespace kvpool::kernels
#endif
