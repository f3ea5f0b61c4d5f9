#include "kvpool/mlx_ext/append_pages.h"

#include <mlx/backend/cpu/encoder.h>

#include <cstddef>
#include <memory>

#include "dense_rows.h"
#include "kvpool/base/error.h"

namespace kvpool::mlx_ext {

using mlx::core::array;

void Append::claim() {
  if (schedule()) return;
  throw Error(
      "[AppendPages::eval] the cache went on without these tokens: they were appended in another "
      "thread, which did not evaluate them");
}

void AppendPages::eval_cpu(const std::vector<array>& inputs, array& token) {
  // Throws where the stream is another thread's: before the append is claimed.
  auto& encoder = mlx::core::cpu::get_command_encoder(stream());
  append_->claim();
  token.copy_shared_buffer(inputs[0]);
  encoder.dispatch([plan = append_->plan(), keys = DenseRows(inputs[1], sequence_),
                    values = DenseRows(inputs[2], sequence_)]() mutable {
    std::unique_ptr<std::byte[]> key_copy, value_copy;
    keys.make_dense(key_copy);
    values.make_dense(value_copy);
    plan->run(keys.source(), values.source());
  });
}

void SkipAppend::eval_cpu(const std::vector<array>& inputs, array& token) {
  auto& encoder = mlx::core::cpu::get_command_encoder(stream());
  token.copy_shared_buffer(inputs[0]);
  encoder.dispatch([append = append_] { append->run_without_rows(); });
}

}  // namespace kvpool::mlx_ext
