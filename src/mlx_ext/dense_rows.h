#pragma once

#include <mlx/array.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvpool/formats/format.h"
#include "kvpool/kernels/page_append.h"

namespace kvpool::mlx_ext {

/// An evaluated array [batch, heads, tokens, dim] of floats as kernels read it: in place, but for
/// an array whose last dim is not dense. Holds no reference: MLX keeps the inputs of work that was
/// dispatched, whose numbers may not be there before it runs.
class DenseRows {
 public:
  explicit DenseRows(const mlx::core::array& rows);
  /// Sequence `index` alone.
  DenseRows(const mlx::core::array& rows, std::int64_t index);

  std::int64_t dim(std::size_t axis) const noexcept { return shape_[axis]; }
  formats::Format format() const noexcept { return format_; }

  /// Makes the last dim dense, by way of `copy`, which must outlive what is read from here then.
  /// To be called where the work runs, on a copy of this that nobody else uses.
  void make_dense(std::unique_ptr<std::byte[]>& copy);

  const void* data() const noexcept { return data_; }
  /// In numbers; valid for the last dim once it is dense.
  std::int64_t stride(std::size_t axis) const noexcept { return strides_[axis]; }
  /// Of the only sequence.
  kernels::SourceRows source() const noexcept { return {data_, format_, strides_[1], strides_[2]}; }

 private:
  const std::byte* data_;
  formats::Format format_;
  std::array<std::int64_t, 4> shape_;
  std::array<std::int64_t, 4> strides_;
};

}  // namespace kvpool::mlx_ext
