#pragma once

#include <mlx/primitives.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "kvpool/mlx_ext/gather_pages.h"

namespace kvpool::mlx_ext {

/// A mask as it is, and what is known of it: that it hides the padding of a ragged batch and
/// nothing else. Attention that reads pages meets no padding and need not look at such a mask; for
/// all others it is a mask like any.
class PaddingMask : public mlx::core::UnaryPrimitive {
 public:
  PaddingMask(mlx::core::Stream stream, std::vector<std::int64_t> n_rows)
      : UnaryPrimitive(stream), n_rows_(std::move(n_rows)) {}

  /// Of each sequence, at the right of the columns.
  const std::vector<std::int64_t>& n_rows() const noexcept { return n_rows_; }

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& mask) override;
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& mask) override;
  const char* name() const override { return "PaddingMask"; }

 private:
  std::vector<std::int64_t> n_rows_;
};

/// `mask`, [sequences, 1, 1, columns] of booleans for one query each, which hides the columns
/// before the last n_rows[i] of sequence i. Throws InvalidArgument for another shape or dtype.
mlx::core::array padding_mask(const mlx::core::array& mask, std::vector<std::int64_t> n_rows);

/// Whether the array is such a mask, not evaluated, for just these sequences.
bool hides_padding_alone(const mlx::core::array& mask, const VisibleBatch& batch) noexcept;

}  // namespace kvpool::mlx_ext
