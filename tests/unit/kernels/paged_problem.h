#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvpool/base/half.h"
#include "kvpool/formats/format.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/attention.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"

namespace kvpool::kernels {

/// What a test asks of paged attention; the numbers are random.
struct PagedProblem {
  std::vector<std::int64_t> lengths = {100};
  std::int64_t n_q_heads = 4;
  std::int64_t n_kv_heads = 2;
  std::int64_t n_queries = 1;
  std::int64_t key_dim = 64;
  std::int64_t value_dim = 64;
  std::int64_t block_size = 16;
  /// Page i of keys has format i modulo their number, of values the next one.
  std::vector<formats::Format> formats = {formats::Format::kFp16};
  formats::Format query_format = formats::Format::kFp32;
  bool causal = true;
  std::int64_t window = 0;
  bool sinks = false;
  MaskKind mask = MaskKind::kNone;
  unsigned seed = 1;
};

inline std::string describe(const PagedProblem& p) {
  std::string text = "lengths";
  for (const std::int64_t n : p.lengths) text += " " + std::to_string(n);
  text += ", heads " + std::to_string(p.n_q_heads) + "/" + std::to_string(p.n_kv_heads) +
          ", queries " + std::to_string(p.n_queries) + ", dims " + std::to_string(p.key_dim) + "/" +
          std::to_string(p.value_dim) + ", block size " + std::to_string(p.block_size) + ",";
  for (const auto format : p.formats) text += " " + std::string(formats::traits(format).name);
  return text + ", window " + std::to_string(p.window) + ", mask " +
         std::to_string(static_cast<int>(p.mask));
}

/// A problem's memory. Pages lie in shuffled order; slots without a token are filled with 0xff,
/// which is a NaN in every float format and in every scale.
class PagedData {
 public:
  explicit PagedData(const PagedProblem& problem) : problem_(problem), random_(problem.seed) {
    const std::int64_t bs = problem_.block_size;
    indptr_ = {0};
    for (const std::int64_t n : problem_.lengths) {
      indptr_.push_back(indptr_.back() + static_cast<std::int32_t>((n + bs - 1) / bs));
      last_page_len_.push_back(static_cast<std::int32_t>((n - 1) % bs + 1));
    }
    indices_.resize(static_cast<std::size_t>(indptr_.back()));
    std::iota(indices_.begin(), indices_.end(), 0);
    std::ranges::shuffle(indices_, random_);
    fill_pages({problem_.n_kv_heads, bs, problem_.key_dim}, 0, keys_, key_pages_);
    fill_pages({problem_.n_kv_heads, bs, problem_.value_dim}, 1, values_, value_pages_);
    const std::int64_t n_rows = batch() * problem_.n_q_heads * problem_.n_queries;
    queries_ = numbers(n_rows * problem_.key_dim, 1, problem_.query_format);
    for (std::int64_t h = 0; h < problem_.n_q_heads; ++h) sinks_.push_back(normal_(random_));
    longest_ = *std::ranges::max_element(problem_.lengths);
    fill_mask(n_rows * longest_);
  }

  std::int64_t batch() const { return static_cast<std::int64_t>(problem_.lengths.size()); }

  PagedAttentionParams params() {
    const PagedProblem& p = problem_;
    PagedAttentionParams params;
    params.queries = queries_.data();
    params.query_format = p.query_format;
    const std::int64_t bs = p.block_size;
    params.keys = {key_pages_.data(), indptr_.back(), {p.n_kv_heads, bs, p.key_dim}};
    params.values = {value_pages_.data(), indptr_.back(), {p.n_kv_heads, bs, p.value_dim}};
    params.batch = batch();
    params.n_q_heads = p.n_q_heads;
    params.n_queries = p.n_queries;
    params.indptr = indptr_.data();
    params.indices = indices_.data();
    params.last_page_len = last_page_len_.data();
    params.scale = attention_scale(p.key_dim);
    params.causal = p.causal;
    params.window = p.window;
    params.sinks = p.sinks ? sinks_.data() : nullptr;
    params.mask = mask_.data();
    params.mask_kind = p.mask;
    strides(p.key_dim, params.q_strides);
    strides(p.value_dim, params.out_strides);
    strides(longest_, params.mask_strides);
    params.mask_strides[3] = 1;
    output_.assign(static_cast<std::size_t>(batch() * p.n_q_heads * p.n_queries * p.value_dim *
                                            formats::traits(p.query_format).bits / 8),
                   std::byte{0xff});
    params.output = output_.data();
    return params;
  }

  /// [batch, n_q_heads, n_queries, value_dim]
  std::vector<float> run(const PagedAttentionKernel& kernel, WorkerPool* workers = nullptr) {
    return run(kernel, params(), workers);
  }
  std::vector<float> run(const PagedAttentionKernel& kernel, const PagedAttentionParams& params,
                         WorkerPool* workers = nullptr) {
    const std::int64_t n_workers = workers == nullptr ? 1 : workers->n_threads();
    // NaN and of the size asked for: what is read before it was written shows, as do overruns.
    std::vector<float> scratch((kernel.scratch_bytes(params, n_workers) + 3) / 4,
                               std::numeric_limits<float>::quiet_NaN());
    kernel.run(params, reinterpret_cast<std::byte*>(scratch.data()), workers);
    return output();
  }

  /// What paged_attention_scalar makes of it.
  std::vector<float> expected() { return run(paged_attention_kernels().back()); }

  std::vector<float> output() const {
    std::vector<float> numbers(output_.size() * 8 / formats::traits(problem_.query_format).bits);
    widen(problem_.query_format, output_, numbers);
    return numbers;
  }

  /// The numbers of a token as its page keeps them.
  std::vector<float> row(const PagedStream& stream, std::int64_t b, std::int64_t head,
                         std::int64_t token) {
    const PagedAttentionParams p = params();
    const PageRef& page = page_of(p, stream, b, token / problem_.block_size);
    std::vector<float> numbers(static_cast<std::size_t>(stream.shape.head_dim));
    formats::decode_tokens({page.format, stream.shape}, page.data, head,
                           token % problem_.block_size, 1, numbers.data(), stream.shape.head_dim);
    return numbers;
  }

  std::vector<std::byte>& queries() { return queries_; }
  std::vector<std::byte>& mask() { return mask_; }
  std::vector<float>& sinks() { return sinks_; }

 private:
  void strides(std::int64_t last, std::int64_t* out) const {
    out[2] = last;
    out[1] = last * problem_.n_queries;
    out[0] = out[1] * problem_.n_q_heads;
  }

  static void widen(formats::Format format, const std::vector<std::byte>& bytes,
                    std::vector<float>& numbers) {
    const formats::PageLayout row{format, {1, 1, static_cast<std::int64_t>(numbers.size())}};
    formats::decode_tokens(row, bytes.data(), 0, 0, 1, numbers.data(), 0);
  }

  std::vector<std::byte> numbers(std::int64_t n, float size, formats::Format format) {
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& value : values) value = size * normal_(random_);
    std::vector<std::byte> bytes(formats::row_bytes(format, values.size()));
    const formats::PageLayout row{format, {1, 1, n}};
    formats::encode_tokens(row, bytes.data(), 0, 0, 1, values.data(), 0);
    return bytes;
  }

  void fill_pages(const formats::PageShape& shape, std::size_t shift, std::vector<std::byte>& bytes,
                  std::vector<PageRef>& pages) {
    const auto n = static_cast<std::size_t>(indptr_.back());
    const std::int64_t room = formats::PageLayout{formats::Format::kFp32, shape}.page_bytes() + 64;
    bytes.assign(n * static_cast<std::size_t>(room), std::byte{0xff});
    pages.resize(n);
    std::vector<float> rows(static_cast<std::size_t>(shape.block_size * shape.head_dim));
    for (std::size_t b = 0; b + 1 < indptr_.size(); ++b) {
      for (std::int32_t i = indptr_[b]; i < indptr_[b + 1]; ++i) {
        const auto page = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
        const auto format =
            problem_.formats[(static_cast<std::size_t>(i) + shift) % problem_.formats.size()];
        std::byte* data = bytes.data() + page * static_cast<std::size_t>(room);
        pages[page] = {data, format};
        const std::int64_t count =
            i + 1 == indptr_[b + 1] ? last_page_len_[b] : problem_.block_size;
        for (std::int64_t h = 0; h < shape.n_heads; ++h) {
          for (float& number : rows) number = normal_(random_) + (h % 2 == 0 ? 0.5f : 0.0f);
          formats::encode_tokens({format, shape}, data, h, 0, count, rows.data(), shape.head_dim);
        }
      }
    }
  }

  void fill_mask(std::int64_t n) {
    if (problem_.mask == MaskKind::kNone) return;
    if (problem_.mask == MaskKind::kBoolean) {
      mask_.resize(static_cast<std::size_t>(n));
      for (std::byte& seen : mask_) seen = std::byte{random_() % 3 != 0};
      return;
    }
    mask_ = numbers(n, 2,
                    problem_.mask == MaskKind::kFp32   ? formats::Format::kFp32
                    : problem_.mask == MaskKind::kFp16 ? formats::Format::kFp16
                                                       : formats::Format::kBf16);
  }

  PagedProblem problem_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::int64_t longest_ = 0;
  std::vector<std::int32_t> indptr_, indices_, last_page_len_;
  std::vector<std::byte> keys_, values_, queries_, mask_, output_;
  std::vector<PageRef> key_pages_, value_pages_;
  std::vector<float> sinks_;
};

}  // namespace kvpool::kernels
