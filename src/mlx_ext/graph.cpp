#include "kvpool/mlx_ext/graph.h"

#include <mlx/array.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext {

void refuse_tracing(std::string_view call) {
  // MLX does not export whether a transformation is under way; a tracer knows.
  mlx::core::array probe(0.0f);
  probe.set_tracer(true);
  if (probe.is_tracer()) {
    throw InvalidArgument(
        "[" + std::string(call) +
        "] a paged cache cannot be used inside mx.compile, mx.grad or another transformation: its "
        "appends write in place");
  }
}

std::uint64_t thread_number() noexcept {
  static std::atomic<std::uint64_t> next{1};
  thread_local const std::uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace kvpool::mlx_ext
