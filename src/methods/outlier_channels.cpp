#include "kvpool/methods/outlier_channels.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kvpool/methods/linear_map.h"
#include "kvpool/methods/magnitude.h"
#include "kvpool/methods/page_layout.h"

namespace kvpool::methods {

// Page: scale [capacity], channels [capacity, n_channels] int8, up to an even address; the other
// codec's page.

OutlierChannels::OutlierChannels(const StreamCodec& rest, std::vector<std::int64_t> channels)
    : StreamCodec(rest.head_dim()), rest_(rest), channels_(std::move(channels)) {}

std::int64_t OutlierChannels::rest_at(std::int64_t capacity) const noexcept {
  return (capacity * (2 + n_channels()) + 1) / 2 * 2;
}

std::int64_t OutlierChannels::page_bytes(std::int64_t capacity) const noexcept {
  return rest_at(capacity) + rest_.page_bytes(capacity);
}

std::int64_t OutlierChannels::scratch_floats(std::int64_t n_tokens) const noexcept {
  return head_dim() + rest_.scratch_floats(n_tokens);
}

void OutlierChannels::encode(const float* vectors, std::int64_t stride, TokenRange range, Page page,
                             float* scratch) const noexcept {
  constexpr float kLargestCode = 127;
  const Page rest{page.data + rest_at(page.capacity), page.capacity};
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    const float* vector = vectors + t * stride;
    float largest = 0;
    for (const std::int64_t channel : channels_) {
      largest = std::max(largest, std::abs(vector[channel]));
    }
    const Magnitude magnitude = to_magnitude(largest / kLargestCode);
    const float scale = from_magnitude(magnitude);
    const float inverse = scale > 0 ? 1 / scale : 0;
    halves_at(page, 0)[token] = magnitude;
    auto* codes =
        reinterpret_cast<std::int8_t*>(page.data + 2 * page.capacity) + token * n_channels();
    std::copy_n(vector, head_dim(), scratch);
    for (const std::int64_t channel : channels_) {
      *codes++ = static_cast<std::int8_t>(
          std::clamp(std::nearbyint(vector[channel] * inverse), -kLargestCode, kLargestCode));
      scratch[channel] = 0;
    }
    rest_.encode(scratch, head_dim(), {token, 1}, rest, scratch + head_dim());
  }
}

void OutlierChannels::decode(ConstPage page, TokenRange range, const kernels::RowKernels& kernels,
                             kernels::FloatRows out, float* scratch) const noexcept {
  rest_.decode({page.data + rest_at(page.capacity), page.capacity}, range, kernels, out,
               scratch + head_dim());
  const auto* codes = reinterpret_cast<const std::int8_t*>(page.data + 2 * page.capacity);
  for (std::int64_t t = 0; t < range.count; ++t) {
    const std::int64_t token = range.first + t;
    const float scale = from_magnitude(halves_at(page, 0)[token]);
    float* row = out.data + t * out.stride + channels_at();
    for (std::int64_t i = 0; i < n_channels(); ++i) {
      row[i] = scale * static_cast<float>(codes[token * n_channels() + i]);
    }
  }
}

void OutlierChannels::enter(const float* vector, float* code_vector) const noexcept {
  // The rest is zero there, so what its codes say of those channels is error.
  float others[kMaxDims];
  std::copy_n(vector, head_dim(), others);
  for (const std::int64_t channel : channels_) others[channel] = 0;
  rest_.enter(others, code_vector);
  std::fill(code_vector + rest_.code_dims(), code_vector + channels_at(), 0.0f);
  for (std::int64_t i = 0; i < n_channels(); ++i) {
    code_vector[channels_at() + i] = vector[channels_[static_cast<std::size_t>(i)]];
  }
}

void OutlierChannels::leave(const float* code_vector, float* vector) const noexcept {
  rest_.leave(code_vector, vector);
  for (std::int64_t i = 0; i < n_channels(); ++i) {
    vector[channels_[static_cast<std::size_t>(i)]] = code_vector[channels_at() + i];
  }
}

std::vector<std::int64_t> OutlierChannels::largest(const std::vector<double>& sums,
                                                   std::int64_t n) {
  std::vector<std::int64_t> order(sums.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return sums[static_cast<std::size_t>(a)] > sums[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(n));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace kvpool::methods
