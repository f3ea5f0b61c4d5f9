#pragma once

#include <mlx/primitives.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/cache/page_view.h"
#include "kvpool/cache/paged_pool.h"

namespace kvpool::mlx_ext {

namespace cuda {
class PageTables;
}

/// One sequence as a reader sees it: the newest `n_rows` tokens of the view, but for `n_after`. A
/// window leaves older ones in the first pages that no query is to see.
struct VisibleRows {
  std::shared_ptr<cache::PagedPool> pool;  // its threads attend
  std::shared_ptr<const cache::PageView> view;
  std::int64_t n_rows = 0;
  std::shared_ptr<cuda::PageTables> tables;  // of a layer whose pages lie on a GPU
  /// Tokens that come after the query of this reader; for attention on a GPU alone.
  std::int64_t n_after = 0;

  std::int64_t end() const noexcept { return view->length() - n_after; }
  /// The first tokens of the view, which stay out of sight.
  std::int64_t hidden() const noexcept { return end() - n_rows; }
};

/// The sequences of a batch. The arrays of keys and of values that come from one call share one:
/// equal pointers mean the same tokens.
using VisibleBatch = std::vector<VisibleRows>;

enum class Which : std::uint8_t { kKeys, kValues };

inline const cache::PageView::Stream& stream_of(const cache::PageView& view, Which which) noexcept {
  return which == Which::kKeys ? view.keys() : view.values();
}

/// Tokens of a batch as one array [batch, heads, rows, dim], gathered when it is evaluated. Shorter
/// sequences are padded with zeros on their left. Inputs: the order token of each sequence.
///
/// Attention that finds such an array, not evaluated, reads the pages instead.
class GatherPages : public mlx::core::UnaryPrimitive {
 public:
  GatherPages(mlx::core::Stream stream, std::shared_ptr<const VisibleBatch> batch, Which which)
      : UnaryPrimitive(stream), batch_(std::move(batch)), which_(which) {}

  const std::shared_ptr<const VisibleBatch>& batch() const noexcept { return batch_; }
  Which which() const noexcept { return which_; }

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& rows) override;
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& rows) override;
  const char* name() const override { return "GatherPages"; }

 private:
  std::shared_ptr<const VisibleBatch> batch_;
  Which which_;
};

/// The array, of fp32, fp16 or bf16 numbers; `tokens` are the order tokens of the sequences.
mlx::core::array gather_pages(const std::shared_ptr<const VisibleBatch>& batch, Which which,
                              const std::vector<mlx::core::array>& tokens, mlx::core::Dtype dtype);

/// The primitive behind an array that gather_pages() made; nullptr for any other array, and for one
/// that was evaluated since.
const GatherPages* gathered_from(const mlx::core::array& rows) noexcept;

}  // namespace kvpool::mlx_ext
