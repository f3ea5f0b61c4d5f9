#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvpool/kernels/row_kernels.h"

namespace kvpool::methods {

/// The memory of up to `capacity` tokens of one head and one stream (keys or values). How it is
/// laid out is its codec's business; it starts on an even address.
struct ConstPage {
  const std::byte* data = nullptr;
  std::int64_t capacity = 0;
};
struct Page {
  std::byte* data = nullptr;
  std::int64_t capacity = 0;

  operator ConstPage() const noexcept { return {data, capacity}; }
};

/// Tokens of a page.
struct TokenRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// How one stream of one head is quantised: vectors of head_dim floats into pages of the caller's
/// memory, and back.
///
/// Attention never rebuilds vectors. A codec decodes a token into *code space*, code_dims() floats,
/// and a linear map M from vectors to code space says what they mean:
///
///   <key, query> ~ <decode(key), M query>        value ~ M^T decode(value)
///
/// so a rotation or projection is applied to each query once (enter) and to each weighted sum of
/// values once (leave), never to a token.
///
/// Codecs are immutable: one may serve many caches and threads. What they encode is the same bytes
/// on every machine.
class StreamCodec {
 public:
  explicit StreamCodec(std::int64_t head_dim) noexcept : head_dim_(head_dim) {}
  StreamCodec(const StreamCodec&) = delete;
  StreamCodec& operator=(const StreamCodec&) = delete;
  virtual ~StreamCodec() = default;

  std::int64_t head_dim() const noexcept { return head_dim_; }
  virtual std::int64_t code_dims() const noexcept { return head_dim_; }

  /// Tokens that are encoded together, >= 1: page capacities and ranges to encode are multiples.
  virtual std::int64_t group() const noexcept { return 1; }

  /// Bytes of a page, linear in its capacity (a multiple of group()).
  virtual std::int64_t page_bytes(std::int64_t capacity) const noexcept = 0;

  /// Floats of scratch memory to encode or decode up to `n_tokens` at once.
  virtual std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept = 0;

  /// Quantises range.count vectors, rows of head_dim finite floats of at most kLargestInput that
  /// are `stride` apart, as tokens range of the page.
  virtual void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                      float* scratch) const noexcept = 0;

  /// Decodes tokens into rows of code space; out.stride >= padded_row(code_dims()).
  virtual void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                      kernels::FloatRows out, float* scratch) const noexcept = 0;

  /// M: a vector [head_dim] to code space [code_dims()]. The identity unless overridden.
  virtual void enter(const float* vector, float* code_vector) const noexcept {
    std::copy_n(vector, head_dim_, code_vector);
  }
  /// M^T: code space [code_dims()] to a vector [head_dim].
  virtual void leave(const float* code_vector, float* vector) const noexcept {
    std::copy_n(code_vector, head_dim_, vector);
  }

  /// What the codec itself takes: rotations, codebooks.
  virtual std::int64_t constant_bytes() const noexcept { return 0; }

 private:
  std::int64_t head_dim_;
};

}  // namespace kvpool::methods
