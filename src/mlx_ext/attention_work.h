#pragma once

#include <mlx/array.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dense_rows.h"
#include "kvpool/kernels/paged_attention.h"
#include "kvpool/mlx_ext/gather_pages.h"
#include "kvpool/mlx_ext/paged_attention.h"

namespace kvpool::mlx_ext {

/// A mask as it lies in memory, [batch, q heads, queries, rows]; dims of size 1 broadcast and have
/// stride 0.
struct MaskRows {
  const std::byte* data = nullptr;
  kernels::MaskKind kind = kernels::MaskKind::kNone;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};
};

/// The part of a PagedAttention that runs on its stream: everything by pointer, no arrays.
class AttentionWork {
 public:
  /// `inputs` as the primitive gets them; `output` has its memory.
  AttentionWork(std::shared_ptr<const VisibleBatch> batch, const PagedAttention::Options& options,
                const std::vector<mlx::core::array>& inputs, mlx::core::array& output);

  void run();

 private:
  bool runs_as_one() const noexcept;
  void run_batch();
  void run_sequence(std::size_t index);
  kernels::PagedAttentionParams params() const noexcept;
  /// Of sequences whose streams are laid out as those of `view`.
  void run(const kernels::PagedAttentionParams& p, const cache::PageView& view,
           kernels::WorkerPool* workers) const;
  /// The mask over all tokens of the sequence's pages, those out of sight hidden.
  std::vector<std::byte> widened_mask(const MaskRows& mask, std::size_t index,
                                      kernels::PagedAttentionParams& p) const;

  std::shared_ptr<const VisibleBatch> batch_;
  PagedAttention::Options options_;
  DenseRows queries_;
  std::optional<MaskRows> mask_;
  const float* sinks_ = nullptr;
  std::int64_t sink_stride_ = 1;
  std::byte* output_;
  std::array<std::int64_t, 3> out_strides_{};
  std::int64_t n_rows_ = 0;  // of the longest sequence: the mask's last dim
};

}  // namespace kvpool::mlx_ext
