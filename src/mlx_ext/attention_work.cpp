#include "attention_work.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "kvpool/cache/attend_pages.h"

namespace kvpool::mlx_ext {

using kernels::MaskKind;
using kernels::PagedAttentionParams;
using mlx::core::array;

namespace {

MaskRows mask_rows(const array& mask) {
  MaskRows rows;
  rows.data = mask.data<std::byte>();
  rows.kind = mask.dtype() == mlx::core::bool_     ? MaskKind::kBoolean
              : mask.dtype() == mlx::core::float32 ? MaskKind::kFp32
              : mask.dtype() == mlx::core::float16 ? MaskKind::kFp16
                                                   : MaskKind::kBf16;
  rows.shape.fill(1);
  const std::size_t missing = 4 - mask.ndim();
  for (std::size_t i = 0; i < mask.ndim(); ++i) {
    rows.shape[missing + i] = mask.shape()[i];
    rows.strides[missing + i] = mask.shape()[i] == 1 ? 0 : mask.strides()[i];
  }
  return rows;
}

std::int64_t number_bytes(MaskKind kind) noexcept {
  if (kind == MaskKind::kBoolean) return 1;
  return kind == MaskKind::kFp32 ? 4 : 2;
}

/// A number of the mask that hides what it stands for.
void hide(MaskKind kind, std::byte* to) noexcept {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  switch (kind) {
    case MaskKind::kNone:
      break;
    case MaskKind::kBoolean:
      *to = std::byte{0};
      break;
    case MaskKind::kFp32:
      std::memcpy(to, &kHidden, sizeof kHidden);
      break;
    case MaskKind::kFp16:
    case MaskKind::kBf16: {
      const std::uint16_t bits = kind == MaskKind::kFp16 ? 0xfc00 : 0xff80;
      std::memcpy(to, &bits, sizeof bits);
      break;
    }
  }
}

/// Scratch memory of a stream's thread, kept while it is small: fresh pages from the system would
/// cost more than the attention of one token.
class Scratch {
 public:
  std::byte* get(std::size_t bytes) {
    if (bytes > size_) {
      kept_.reset();
      size_ = 0;
      kept_.reset(new (std::align_val_t{64}) std::byte[bytes]);
      size_ = bytes;
    }
    return kept_.get();
  }
  void trim() noexcept {
    constexpr std::size_t kKept = std::size_t{8} << 20;
    if (size_ <= kKept) return;
    kept_.reset();
    size_ = 0;
  }

 private:
  struct Delete {
    void operator()(std::byte* bytes) const noexcept {
      ::operator delete[](bytes, std::align_val_t{64});
    }
  };
  std::unique_ptr<std::byte[], Delete> kept_;
  std::size_t size_ = 0;
};

}  // namespace

AttentionWork::AttentionWork(std::shared_ptr<const VisibleBatch> batch,
                             const PagedAttention::Options& options,
                             const std::vector<array>& inputs, array& output)
    : batch_(std::move(batch)),
      options_(options),
      queries_(inputs[batch_->size()]),
      output_(output.data<std::byte>()) {
  std::size_t next = batch_->size() + 1;
  if (options.has_mask) mask_ = mask_rows(inputs[next++]);
  if (options.has_sinks) {
    sinks_ = inputs[next].data<float>();
    sink_stride_ = inputs[next].strides(0);
  }
  std::copy_n(output.strides().begin(), 3, out_strides_.begin());
  for (const VisibleRows& rows : *batch_) n_rows_ = std::max(n_rows_, rows.n_rows);
}

void AttentionWork::run() {
  std::unique_ptr<std::byte[]> query_copy;
  queries_.make_dense(query_copy);
  std::vector<float> dense_sinks;
  if (sinks_ != nullptr && sink_stride_ != 1) {
    for (std::int64_t head = 0; head < queries_.dim(1); ++head) {
      dense_sinks.push_back(sinks_[head * sink_stride_]);
    }
    sinks_ = dense_sinks.data();
  }
  if (runs_as_one()) {
    run_batch();
  } else {
    for (std::size_t i = 0; i < batch_->size(); ++i) run_sequence(i);
  }
}

// A kernel's mask has one stride a dim, its sequences end where their pages do, and a method may
// have been fitted to each sequence.
bool AttentionWork::runs_as_one() const noexcept {
  if (batch_->size() == 1 || mask_) return false;
  return std::all_of(batch_->begin(), batch_->end(), [&](const VisibleRows& rows) {
    return rows.hidden() == 0 && !stream_of(*rows.view, options_.keys).layout->has_codec() &&
           !stream_of(*rows.view, options_.values).layout->has_codec();
  });
}

void AttentionWork::run(const PagedAttentionParams& p, const cache::PageView& view,
                        kernels::WorkerPool* workers) const {
  thread_local Scratch scratch;
  const cache::StreamLayout& keys = *stream_of(view, options_.keys).layout;
  const cache::StreamLayout& values = *stream_of(view, options_.values).layout;
  const int n_workers = workers == nullptr ? 1 : workers->n_threads();
  const std::size_t bytes = cache::attend_pages_scratch_bytes(p, keys, values, n_workers);
  cache::attend_pages(p, keys, values, scratch.get(bytes), workers);
  scratch.trim();
}

PagedAttentionParams AttentionWork::params() const noexcept {
  PagedAttentionParams p;
  p.queries = queries_.data();
  p.query_format = queries_.format();
  for (std::size_t i = 0; i < 3; ++i) p.q_strides[i] = queries_.stride(i);
  const cache::PageView& first = *batch_->front().view;
  p.keys.shape = stream_of(first, options_.keys).layout->shape();
  p.values.shape = stream_of(first, options_.values).layout->shape();
  p.batch = queries_.dim(0);
  p.n_q_heads = queries_.dim(1);
  p.n_queries = queries_.dim(2);
  p.scale = options_.scale;
  p.causal = options_.causal;
  p.sinks = sinks_;
  p.output = output_;
  std::copy_n(out_strides_.begin(), 3, p.out_strides);
  return p;
}

void AttentionWork::run_batch() {
  std::vector<kernels::PageRef> key_pages, value_pages;
  std::vector<std::int32_t> indptr{0}, last_page_len;
  for (const VisibleRows& rows : *batch_) {
    const auto keys = stream_of(*rows.view, options_.keys).pages;
    const auto values = stream_of(*rows.view, options_.values).pages;
    key_pages.insert(key_pages.end(), keys.begin(), keys.end());
    value_pages.insert(value_pages.end(), values.begin(), values.end());
    indptr.push_back(static_cast<std::int32_t>(key_pages.size()));
    last_page_len.push_back(static_cast<std::int32_t>(rows.view->last_page_len()));
  }
  PagedAttentionParams p = params();
  p.keys.pages = key_pages.data();
  p.values.pages = value_pages.data();
  p.keys.n_pages = p.values.n_pages = static_cast<std::int64_t>(key_pages.size());
  p.indptr = indptr.data();
  p.last_page_len = last_page_len.data();
  run(p, *batch_->front().view, batch_->front().pool->workers());
}

void AttentionWork::run_sequence(std::size_t index) {
  const VisibleRows& rows = (*batch_)[index];
  const std::int32_t indptr[2] = {0, static_cast<std::int32_t>(rows.view->n_pages())};
  const auto last_page_len = static_cast<std::int32_t>(rows.view->last_page_len());
  PagedAttentionParams p = params();
  const auto at = static_cast<std::int64_t>(index);
  const std::int64_t query_bytes = formats::traits(p.query_format).bits / 8;
  p.batch = 1;
  p.queries = static_cast<const std::byte*>(p.queries) + at * p.q_strides[0] * query_bytes;
  p.output = output_ + at * p.out_strides[0] * query_bytes;
  p.keys.pages = stream_of(*rows.view, options_.keys).pages.data();
  p.values.pages = stream_of(*rows.view, options_.values).pages.data();
  p.keys.n_pages = p.values.n_pages = rows.view->n_pages();
  p.indptr = indptr;
  p.last_page_len = &last_page_len;
  std::vector<std::byte> wide_mask;
  if (mask_) {
    p.mask_kind = mask_->kind;
    wide_mask = widened_mask(*mask_, index, p);
  } else if (rows.hidden() > 0) {
    // The only query, or the window that the mask "causal" stands for: see attend().
    p.window = rows.n_rows - p.n_queries + 1;
  }
  run(p, *rows.view, rows.pool->workers());
}

std::vector<std::byte> AttentionWork::widened_mask(const MaskRows& mask, std::size_t index,
                                                   PagedAttentionParams& p) const {
  const VisibleRows& rows = (*batch_)[index];
  const std::int64_t size = number_bytes(mask.kind);
  // Shorter sequences are padded on their left.
  const std::int64_t first_column = mask.shape[3] == 1 ? 0 : n_rows_ - rows.n_rows;
  const std::byte* from =
      mask.data +
      (static_cast<std::int64_t>(index) * mask.strides[0] + first_column * mask.strides[3]) * size;
  if (rows.hidden() == 0) {
    p.mask = from;
    std::copy(mask.strides.begin(), mask.strides.end(), p.mask_strides);
    return {};
  }
  const std::int64_t n_tokens = rows.view->length();
  std::vector<std::byte> wide(
      static_cast<std::size_t>(mask.shape[1] * mask.shape[2] * n_tokens * size));
  std::byte* to = wide.data();
  for (std::int64_t head = 0; head < mask.shape[1]; ++head) {
    for (std::int64_t query = 0; query < mask.shape[2]; ++query) {
      const std::int64_t row = head * mask.strides[1] + query * mask.strides[2];
      for (std::int64_t token = 0; token < n_tokens; ++token, to += size) {
        if (token < rows.hidden()) {
          hide(mask.kind, to);
        } else {
          const std::int64_t column = (token - rows.hidden()) * mask.strides[3];
          std::memcpy(to, from + (row + column) * size, static_cast<std::size_t>(size));
        }
      }
    }
  }
  p.mask = wide.data();
  p.mask_strides[0] = 0;
  p.mask_strides[1] = mask.shape[1] == 1 ? 0 : mask.shape[2] * n_tokens;
  p.mask_strides[2] = mask.shape[2] == 1 ? 0 : n_tokens;
  p.mask_strides[3] = 1;
  return wide;
}

}  // namespace kvpool::mlx_ext
