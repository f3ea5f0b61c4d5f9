#pragma once

#include <mlx/primitives.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kvpool/mlx_ext/gather_pages.h"

namespace kvpool::mlx_ext {

/// mlx.fast.scaled_dot_product_attention over tokens that lie in pages, read there. Inputs: the
/// order token of each sequence; queries [batch, q heads, queries, key_dim]; a mask and sinks where
/// there are any. Output: [batch, q heads, queries, value_dim] in the dtype of the queries.
class PagedAttention : public mlx::core::UnaryPrimitive {
 public:
  struct Options {
    /// What serves as keys and as values: some models keep one latent for both.
    Which keys = Which::kKeys;
    Which values = Which::kValues;
    float scale = 1;
    bool causal = false;
    bool has_mask = false;
    bool has_sinks = false;
  };

  PagedAttention(mlx::core::Stream stream, std::shared_ptr<const VisibleBatch> batch,
                 const Options& options)
      : UnaryPrimitive(stream), batch_(std::move(batch)), options_(options) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& output) override;
  void eval_gpu(const std::vector<mlx::core::array>& inputs, mlx::core::array& output) override;
  const char* name() const override { return "PagedAttention"; }

 private:
  std::shared_ptr<const VisibleBatch> batch_;
  Options options_;
};

/// The keys and values of a call are no paged cache's, or were evaluated since.
struct NotPaged {};
/// They are, and the kernels do not answer this call.
struct NotCovered {
  std::string_view reason;
};
using Attended = std::variant<NotPaged, NotCovered, mlx::core::array>;

/// `mask`: "" (none) or "causal"; `mask_array` instead: booleans, or floats that are added to the
/// scores, that broadcast to [batch, q heads, queries, rows]. `sinks`: [q heads], one more logit a
/// head. What is wrong with the shapes is for the ordinary attention to say: not covered.
Attended attend(const mlx::core::array& queries, const mlx::core::array& keys,
                const mlx::core::array& values, float scale, std::string_view mask,
                const std::optional<mlx::core::array>& mask_array,
                const std::optional<mlx::core::array>& sinks);

}  // namespace kvpool::mlx_ext
