#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <list>
#include <numeric>
#include <random>
#include <vector>

#include "kvpool/base/aligned_buffer.h"
#include "kvpool/base/half.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/kernels/worker_pool.h"

namespace kvpool::testing {

/// What to make a PagedProblem of.
struct PagedShape {
  std::int64_t n_q_heads = 4;
  std::int64_t n_kv_heads = 2;
  std::int64_t key_dim = 64;
  std::int64_t value_dim = 64;
  std::int64_t block_size = 16;
  std::int64_t n_queries = 20;
  /// One sequence each.
  std::vector<std::int64_t> n_tokens = {100};
  /// Pages take turns.
  std::vector<formats::Format> formats = {formats::Format::kFp32};
  formats::Format query_format = formats::Format::kFp32;
  bool causal = true;
  std::int64_t window = 0;
  bool sinks = false;
  kernels::MaskKind mask = kernels::MaskKind::kNone;
  bool mask_per_head = false;
  /// Values are the keys' pages; value_dim is key_dim then.
  bool one_stream = false;
};

/// Makes all numbers of a sequence's token in a stream of `p` the same.
inline void overwrite(const kernels::PagedAttentionParams& p, const kernels::PagedStream& stream,
                      std::int64_t sequence, std::int64_t token, float number) {
  const formats::PageShape& shape = stream.shape;
  const kernels::PageRef& page = kernels::page_of(p, stream, sequence, token / shape.block_size);
  const std::vector<float> row(static_cast<std::size_t>(shape.head_dim), number);
  for (std::int64_t h = 0; h < shape.n_heads; ++h) {
    formats::encode_tokens({page.format, shape}, const_cast<std::byte*>(page.data), h,
                           token % shape.block_size, 1, row.data(), shape.head_dim);
  }
}

/// Random attention over pages: the pages lie in random order, slots past a sequence's tokens hold
/// NaN, queries and outputs have gaps between rows.
class PagedProblem {
 public:
  explicit PagedProblem(const PagedShape& shape, unsigned seed = 7) : shape_(shape), random_(seed) {
    if (shape_.one_stream) shape_.value_dim = shape_.key_dim;
    make_table();
    make_pages(shape_.key_dim, key_bytes_, params_.keys);
    if (shape_.one_stream) {
      params_.values = params_.keys;
    } else {
      make_pages(shape_.value_dim, value_bytes_, params_.values);
    }
    make_queries();
    make_mask();
    params_.scale = 1.0f / std::sqrt(static_cast<float>(shape_.key_dim));
    params_.causal = shape_.causal;
    params_.window = shape_.window;
    if (shape_.sinks) {
      sinks_ = normal(shape_.n_q_heads);
      params_.sinks = sinks_.data();
    }
  }
  PagedProblem(const PagedProblem&) = delete;
  PagedProblem& operator=(const PagedProblem&) = delete;

  const kernels::PagedAttentionParams& params() const { return params_; }
  kernels::PagedAttentionParams& params() { return params_; }

  /// The output as fp32, [batch, n_q_heads, n_queries, value_dim].
  std::vector<float> run(const kernels::PagedAttentionKernel& kernel,
                         kernels::WorkerPool* workers = nullptr) {
    return collect([&](const kernels::PagedAttentionParams& p) {
      const std::int64_t n_workers = workers == nullptr ? 1 : workers->n_threads();
      AlignedBuffer scratch(kernel.scratch_bytes(p, n_workers));
      std::memset(scratch.data(), 0xff, scratch.size());  // NaN
      kernel.run(p, scratch.data(), workers);
    });
  }

  std::vector<float> expected() {
    return collect([](const kernels::PagedAttentionParams& p) {
      kernels::validate(p);
      const auto& scalar = kernels::paged_attention_kernels().back();
      AlignedBuffer scratch(scalar.scratch_bytes(p, 1));
      kernels::paged_attention_scalar(p, scratch.data());
    });
  }

  std::vector<float> normal(std::int64_t n, float size = 1) {
    std::normal_distribution<float> distribution(0, size);
    std::vector<float> numbers(static_cast<std::size_t>(n));
    for (float& number : numbers) number = distribution(random_);
    return numbers;
  }

 private:
  static constexpr std::int64_t kGap = 3;  // numbers between rows of queries and outputs

  void make_table() {
    params_.batch = static_cast<std::int64_t>(shape_.n_tokens.size());
    params_.n_q_heads = shape_.n_q_heads;
    params_.n_queries = shape_.n_queries;
    indptr_ = {0};
    for (const std::int64_t n : shape_.n_tokens) {
      const std::int64_t pages = (n + shape_.block_size - 1) / shape_.block_size;
      indptr_.push_back(static_cast<std::int32_t>(indptr_.back() + pages));
      last_page_len_.push_back(static_cast<std::int32_t>(n - (pages - 1) * shape_.block_size));
    }
    indices_.resize(static_cast<std::size_t>(indptr_.back()));
    std::iota(indices_.begin(), indices_.end(), 0);
    std::shuffle(indices_.begin(), indices_.end(), random_);
    params_.indptr = indptr_.data();
    params_.indices = indices_.data();
    params_.last_page_len = last_page_len_.data();
  }

  void make_pages(std::int64_t dim, std::vector<std::vector<std::byte>>& bytes,
                  kernels::PagedStream& stream) {
    const formats::PageShape page_shape{shape_.n_kv_heads, shape_.block_size, dim};
    auto& refs = refs_.emplace_back(indices_.size());
    bytes.resize(indices_.size());
    for (std::size_t b = 0; b + 1 < indptr_.size(); ++b) {
      for (std::int32_t i = indptr_[b]; i < indptr_[b + 1]; ++i) {
        const auto page = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
        const formats::PageLayout layout{
            shape_.formats[static_cast<std::size_t>(i) % shape_.formats.size()], page_shape};
        // All ones are NaN in every float format, so also as scales of codes.
        bytes[page].assign(static_cast<std::size_t>(layout.page_bytes()), std::byte{0xff});
        const std::int64_t count = i + 1 == indptr_[b + 1] ? last_page_len_[b] : shape_.block_size;
        for (std::int64_t h = 0; h < shape_.n_kv_heads; ++h) {
          formats::encode_tokens(layout, bytes[page].data(), h, 0, count,
                                 normal(count * dim).data(), dim);
        }
        refs[page] = {bytes[page].data(), layout.format};
      }
    }
    stream = {refs.data(), static_cast<std::int64_t>(refs.size()), page_shape};
  }

  void make_queries() {
    const std::int64_t row = shape_.key_dim + kGap;
    const std::int64_t n = params_.batch * shape_.n_queries * shape_.n_q_heads * row;
    query_bytes_ = in_query_format(normal(n));
    params_.queries = query_bytes_.data();
    params_.query_format = shape_.query_format;
    set_strides(params_.q_strides, row);
    set_strides(params_.out_strides, shape_.value_dim + kGap);
  }

  /// Heads inside tokens, as a projection leaves them.
  void set_strides(std::int64_t (&strides)[3], std::int64_t row) const {
    strides[0] = shape_.n_queries * shape_.n_q_heads * row;
    strides[1] = row;
    strides[2] = shape_.n_q_heads * row;
  }

  std::vector<std::byte> in_query_format(const std::vector<float>& numbers) const {
    const std::int64_t size = formats::traits(shape_.query_format).bits / 8;
    std::vector<std::byte> bytes(numbers.size() * static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (shape_.query_format == formats::Format::kFp32) {
        std::memcpy(bytes.data() + 4 * i, &numbers[i], 4);
        continue;
      }
      const std::uint16_t bits = shape_.query_format == formats::Format::kFp16
                                     ? float_to_half(numbers[i])
                                     : float_to_bfloat16(numbers[i]);
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
    }
    return bytes;
  }

  float number_at(const std::vector<std::byte>& bytes, std::int64_t i) const {
    if (shape_.query_format == formats::Format::kFp32) {
      float number;
      std::memcpy(&number, bytes.data() + 4 * i, 4);
      return number;
    }
    std::uint16_t bits;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    return shape_.query_format == formats::Format::kFp16 ? half_to_float(bits)
                                                         : bfloat16_to_float(bits);
  }

  /// One for the batch's longest sequence, broadcast over the batch.
  void make_mask() {
    if (shape_.mask == kernels::MaskKind::kNone) return;
    const std::int64_t n_tokens = *std::max_element(shape_.n_tokens.begin(), shape_.n_tokens.end());
    const std::int64_t n_heads = shape_.mask_per_head ? shape_.n_q_heads : 1;
    const std::int64_t n = n_heads * shape_.n_queries * n_tokens;
    const std::vector<float> numbers = normal(n);
    for (std::int64_t i = 0; i < n; ++i) {
      // A quarter is hidden; so is all that the third query sees.
      const bool hidden =
          numbers[static_cast<std::size_t>(i)] > 0.7f || i / n_tokens % shape_.n_queries == 2;
      const float bias =
          hidden ? -std::numeric_limits<float>::infinity() : numbers[static_cast<std::size_t>(i)];
      const auto append = [&](auto value) {
        const auto* bytes = reinterpret_cast<const std::byte*>(&value);
        mask_.insert(mask_.end(), bytes, bytes + sizeof value);
      };
      switch (shape_.mask) {
        case kernels::MaskKind::kBoolean:
          append(static_cast<std::uint8_t>(!hidden));
          break;
        case kernels::MaskKind::kFp16:
          append(float_to_half(bias));
          break;
        case kernels::MaskKind::kBf16:
          append(float_to_bfloat16(bias));
          break;
        default:
          append(bias);
      }
    }
    params_.mask = mask_.data();
    params_.mask_kind = shape_.mask;
    params_.mask_strides[1] = shape_.mask_per_head ? shape_.n_queries * n_tokens : 0;
    params_.mask_strides[2] = n_tokens;
    params_.mask_strides[3] = 1;
  }

  template <class Run>
  std::vector<float> collect(Run run) {
    const std::int64_t row = shape_.value_dim + kGap;
    const std::int64_t n_rows = params_.batch * shape_.n_queries * shape_.n_q_heads;
    std::vector<std::byte> output =
        in_query_format(std::vector<float>(static_cast<std::size_t>(n_rows * row), -99.0f));
    params_.output = output.data();
    run(params_);
    std::vector<float> numbers;
    for (std::int64_t b = 0; b < params_.batch; ++b) {
      for (std::int64_t h = 0; h < shape_.n_q_heads; ++h) {
        for (std::int64_t i = 0; i < shape_.n_queries; ++i) {
          const std::int64_t at =
              b * params_.out_strides[0] + h * params_.out_strides[1] + i * params_.out_strides[2];
          for (std::int64_t j = 0; j < shape_.value_dim; ++j) {
            numbers.push_back(number_at(output, at + j));
          }
        }
      }
    }
    return numbers;
  }

  PagedShape shape_;
  std::mt19937 random_;
  kernels::PagedAttentionParams params_;
  std::vector<std::int32_t> indptr_, indices_, last_page_len_;
  std::vector<std::vector<std::byte>> key_bytes_, value_bytes_;
  std::list<std::vector<kernels::PageRef>> refs_;
  std::vector<std::byte> query_bytes_, mask_;
  std::vector<float> sinks_;
};

}  // namespace kvpool::testing
