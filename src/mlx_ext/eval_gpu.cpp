// The primitives on a GPU's stream.

#include "gpu.h"
#include "kvpool/mlx_ext/append_pages.h"

namespace kvpool::mlx_ext {

using mlx::core::array;

void AppendPages::eval_gpu(const std::vector<array>& inputs, array& token) {
  gpu::require_append(stream());  // before the append is claimed
  append_->claim();
  token.copy_shared_buffer(inputs[0]);
  gpu::append(stream(), append_->plan(), &inputs[1], &inputs[2], sequence_, token);
}

void SkipAppend::eval_gpu(const std::vector<array>& inputs, array& token) {
  token.copy_shared_buffer(inputs[0]);
  gpu::append(stream(), append_->plan(), nullptr, nullptr, 0, token);
}

void GatherPages::eval_gpu(const std::vector<array>& inputs, array& rows) {
  gpu::gather(stream(), batch_, which_, inputs, rows);
}

void PagedAttention::eval_gpu(const std::vector<array>& inputs, array& output) {
  gpu::attend(stream(), batch_, options_, inputs, output);
}

}  // namespace kvpool::mlx_ext
