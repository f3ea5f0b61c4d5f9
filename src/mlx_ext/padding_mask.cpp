#include "kvpool/mlx_ext/padding_mask.h"

#include <mlx/device.h>
#include <mlx/utils.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext {

using mlx::core::array;

void PaddingMask::eval_cpu(const std::vector<array>& inputs, array& mask) {
  mask.copy_shared_buffer(inputs[0]);
}

void PaddingMask::eval_gpu(const std::vector<array>& inputs, array& mask) {
  mask.copy_shared_buffer(inputs[0]);
}

array padding_mask(const array& mask, std::vector<std::int64_t> n_rows) {
  const std::int64_t longest = n_rows.empty() ? 0 : *std::max_element(n_rows.begin(), n_rows.end());
  const mlx::core::Shape shape = {static_cast<int>(n_rows.size()), 1, 1, static_cast<int>(longest)};
  if (mask.dtype() != mlx::core::bool_ || mask.shape() != shape) {
    std::ostringstream got;
    got << mask.dtype() << " of " << mask.ndim() << " dims";
    throw InvalidArgument("[padding_mask] mask must be of booleans [" +
                          std::to_string(n_rows.size()) + ", 1, 1, " + std::to_string(longest) +
                          "], got " + got.str());
  }
  const mlx::core::Stream stream = mlx::core::default_stream(mlx::core::default_device());
  return array(mask.shape(), mask.dtype(), std::make_shared<PaddingMask>(stream, std::move(n_rows)),
               {mask});
}

bool hides_padding_alone(const array& mask, const VisibleBatch& batch) noexcept {
  if (!mask.has_primitive()) return false;
  const auto* padding = dynamic_cast<const PaddingMask*>(&mask.primitive());
  return padding != nullptr &&
         std::equal(
             batch.begin(), batch.end(), padding->n_rows().begin(), padding->n_rows().end(),
             [](const VisibleRows& rows, std::int64_t n_rows) { return rows.n_rows == n_rows; });
}

}  // namespace kvpool::mlx_ext
