#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/methods/stream_codec.h"

namespace kvpool::methods {

/// Keeps some channels of a vector apart, as int8 with a scale of their own, and lets another codec
/// have the rest with zeros in their place: few channels that are large for every key then do not
/// spend the codes of all others. 2 bytes a token and one a channel more than the other codec.
class OutlierChannels final : public StreamCodec {
 public:
  /// `rest` outlives the codec and has a group of one. `channels` are different ones of head_dim.
  OutlierChannels(const StreamCodec& rest, std::vector<std::int64_t> channels);

  std::int64_t code_dims() const noexcept override { return channels_at() + n_channels(); }
  std::int64_t page_bytes(std::int64_t capacity) const noexcept override;
  std::int64_t scratch_floats(std::int64_t n_tokens) const noexcept override;
  void encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
              float* scratch) const noexcept override;
  void decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
              kernels::FloatRows out, float* scratch) const noexcept override;
  void enter(const float* vector, float* code_vector) const noexcept override;
  void leave(const float* code_vector, float* vector) const noexcept override;

  /// The `n` channels of largest sum[channel], ascending; of equal ones the first.
  static std::vector<std::int64_t> largest(const std::vector<double>& sums, std::int64_t n);

 private:
  std::int64_t n_channels() const noexcept { return static_cast<std::int64_t>(channels_.size()); }
  /// Where they lie in code space.
  std::int64_t channels_at() const noexcept { return kernels::padded_row(rest_.code_dims()); }
  /// Where the other codec's page starts.
  std::int64_t rest_at(std::int64_t capacity) const noexcept;

  const StreamCodec& rest_;
  std::vector<std::int64_t> channels_;
};

}  // namespace kvpool::methods
