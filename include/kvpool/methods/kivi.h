#pragma once

#include <cstdint>
#include <span>

#include "kvpool/formats/format.h"
#include "kvpool/methods/magnitude.h"
#include "kvpool/methods/method.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

// KIVI (Liu, Yuan et al., arXiv:2402.02750): plain rounding between the ends of a group,
// x ~ code * step + zero. Keys have a few channels that are large for every token, so their groups
// are a channel's numbers over some tokens; values have none, so theirs are channels of one token.
// Zeros are kept in the format of the numbers themselves, so the smallest number is exact.

/// Keys: groups of `group` tokens in each channel.
/// head_dim * (bits / 8 + 4 / group) bytes a token.
class KiviKeys final : public StreamCodec {
 public:
  /// 1 <= bits <= 8, group >= 1; `number_format` is fp16 or bf16.
  KiviKeys(std::int64_t head_dim, int bits, std::int64_t group, formats::Format number_format);

  std::int64_t group() const noexcept override { return group_; }
  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept override;
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;

 private:
  int bits_;
  std::int64_t group_;
  formats::Format number_format_;
};

/// Where the grid of codes of a group of values ends.
enum class GridEnds : std::uint8_t {
  /// At the smallest and the largest number, as published.
  kExtremes,
  /// For codes of one or two bits, closer together where that makes the squared error less. Keys do
  /// not do that: what sticks out in a channel is often the token that attention goes to.
  kBest,
};

/// Values: groups of gcd(head_dim, `group`) channels of each token.
/// head_dim * (bits / 8 + 4 / group) bytes a token.
class KiviValues final : public StreamCodec {
 public:
  /// As for KiviKeys.
  KiviValues(std::int64_t head_dim, int bits, std::int64_t group, formats::Format number_format,
             GridEnds ends);

  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept override;
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;

 private:
  std::int64_t n_groups() const noexcept { return head_dim() / group_; }

  int bits_;
  std::int64_t group_;
  formats::Format number_format_;
  GridEnds ends_;
};

/// The method "kivi".
Method make_kivi(const KVCacheConfig& config);

}  // namespace kvpool::methods
