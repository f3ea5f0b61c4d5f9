#pragma once

#include <cstdint>
#include <string_view>

namespace kvpool::mlx_ext {

/// Throws InvalidArgument inside mx.compile, mx.grad and their like: an append writes once, when it
/// is evaluated, and a traced function would run it never or again.
void refuse_tracing(std::string_view call);

/// A number that no other thread of the process has or had: ids of threads are used again.
std::uint64_t thread_number() noexcept;

}  // namespace kvpool::mlx_ext
