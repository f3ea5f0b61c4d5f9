#include "dense_rows.h"

#include <algorithm>
#include <cstring>

#include "kvpool/mlx_ext/dtypes.h"

namespace kvpool::mlx_ext {

DenseRows::DenseRows(const mlx::core::array& rows)
    : data_(rows.data<std::byte>()), format_(checked_format_of(rows.dtype())) {
  std::copy_n(rows.shape().begin(), 4, shape_.begin());
  std::copy_n(rows.strides().begin(), 4, strides_.begin());
}

DenseRows::DenseRows(const mlx::core::array& rows, std::int64_t index) : DenseRows(rows) {
  data_ += index * strides_[0] * (formats::traits(format_).bits / 8);
  shape_[0] = 1;
}

void DenseRows::make_dense(std::unique_ptr<std::byte[]>& copy) {
  const auto [n_batch, n_heads, n_tokens, dim] = shape_;
  if (strides_[3] == 1 || dim == 1) return;
  const std::int64_t size = formats::traits(format_).bits / 8;
  const std::int64_t n = n_batch * n_heads * n_tokens * dim;
  copy = std::make_unique<std::byte[]>(static_cast<std::size_t>(n * size));
  std::byte* to = copy.get();
  for (std::int64_t row = 0; row < n_batch * n_heads * n_tokens; ++row) {
    const std::int64_t at = row / (n_heads * n_tokens) * strides_[0] +
                            row / n_tokens % n_heads * strides_[1] + row % n_tokens * strides_[2];
    for (std::int64_t d = 0; d < dim; ++d, to += size) {
      std::memcpy(to, data_ + (at + d * strides_[3]) * size, static_cast<std::size_t>(size));
    }
  }
  data_ = copy.get();
  strides_ = {n_heads * n_tokens * dim, n_tokens * dim, dim, 1};
}

}  // namespace kvpool::mlx_ext
