#pragma once

#include <mlx/array.h>

#include <cstdint>
#include <vector>

#include "kvpool/cache/append_plan.h"
#include "kvpool/formats/format.h"
#include "mlx_cuda.h"

namespace kvpool::mlx_ext::cuda {

/// Moves, and entries of tables, that one launch takes.
inline constexpr std::uint32_t kMaxMoves = 64;

// As in kernels/move_tokens.cu.

struct MoveKind {
  std::uint64_t head_stride = 0, token_stride = 0, dim_stride = 0;
  std::int32_t from_format = 0, to_format = 0;
  std::int32_t from_page = 0, to_page = 0;
  std::int32_t n_heads = 0, head_dim = 0;

  bool operator==(const MoveKind&) const = default;
};

struct GatherParameters {
  std::uint64_t pages = 0;
  std::uint64_t to = 0;
  MoveKind kind;
  std::int32_t block_size = 0;
  std::int32_t first_token = 0;
  std::int32_t n_padding = 0;
  std::int32_t n_rows = 0;
};

/// A function of kernels/move_tokens.cu, for so many moves at most.
CUfunc_st* move_kernel(const char* name, std::uint32_t most_moves = kMaxMoves);

/// Makes those that appends use; throws where that fails.
void make_append_kernels();

/// Adds the kernels of an append; the first and last run after and before what else names `token`.
/// Without rows (nullptr) the plan's other moves alone.
void add_append(const cache::AppendPlan& plan, const mlx::core::array* keys,
                const mlx::core::array* values, std::int64_t sequence,
                const mlx::core::array& token, mlx::core::cu::CommandEncoder& encoder);

/// Blocks for `n_items` items of a move.
std::uint32_t move_blocks(std::int64_t n_items) noexcept;

}  // namespace kvpool::mlx_ext::cuda
