#include "move_tokens.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "kernels.h"
#include "kvpool/mlx_ext/dtypes.h"

namespace kvpool::mlx_ext::cuda {

using mlx::core::array;

namespace {

constexpr std::size_t kKinds = 8;
/// As many as a step of one token has: the parameters of a launch are copied, and more than once.
constexpr std::uint32_t kFewMoves = 4;
constexpr std::int64_t kItemsOfBlock = 16;

struct Move {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::int32_t from_token = 0;
  std::int32_t to_token = 0;
  std::int32_t n_tokens = 0;
  std::int32_t kind = 0;
};

template <std::uint32_t most>
struct Moves {
  std::int32_t block_size = 0;
  MoveKind kinds[std::min<std::size_t>(kKinds, most)];
  Move moves[most];
};

std::int64_t groups_of(std::int64_t head_dim) noexcept {
  return (head_dim + formats::kPageGroup - 1) / formats::kPageGroup;
}

/// Moves that may run side by side, launched as they become too many for one launch.
class Launches {
 public:
  Launches(std::int64_t block_size, const std::vector<const array*>& inputs, const array& token,
           mlx::core::cu::CommandEncoder& encoder)
      : inputs_(inputs), token_(token), encoder_(encoder) {
    moves_.block_size = static_cast<std::int32_t>(block_size);
  }
  ~Launches() = default;
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  void add(const MoveKind& kind, Move move) {
    std::size_t at = 0;
    while (at < n_kinds_ && !(moves_.kinds[at] == kind)) ++at;
    if (at == kKinds || n_moves_ == kMaxMoves) {
      flush();
      at = 0;
    }
    moves_.kinds[at] = kind;
    n_kinds_ = std::max(n_kinds_, at + 1);
    move.kind = static_cast<std::int32_t>(at);
    moves_.moves[n_moves_++] = move;
    most_items_ = std::max(most_items_,
                           std::int64_t{move.n_tokens} * kind.n_heads * groups_of(kind.head_dim));
  }

  void flush() {
    if (n_moves_ == 0) return;
    for (const array* input : inputs_) encoder_.set_input_array(*input);
    encoder_.set_output_array(token_);
    if (n_moves_ <= kFewMoves) {
      Moves<kFewMoves> few;
      few.block_size = moves_.block_size;
      std::copy_n(moves_.kinds, n_kinds_, few.kinds);
      std::copy_n(moves_.moves, n_moves_, few.moves);
      launch(few, kFewMoves);
    } else {
      launch(moves_, kMaxMoves);
    }
    n_moves_ = 0;
    n_kinds_ = 0;
    most_items_ = 0;
  }

 private:
  template <class SomeMoves>
  void launch(SomeMoves& moves, std::uint32_t most) {
    void* parameters[] = {&moves};
    encoder_.add_kernel_node_raw(move_kernel("move_tokens", most),
                                 {move_blocks(most_items_), n_moves_, 1}, {256, 1, 1}, {}, 0,
                                 parameters);
  }

  const std::vector<const array*>& inputs_;
  const array& token_;
  mlx::core::cu::CommandEncoder& encoder_;
  Moves<kMaxMoves> moves_;
  std::uint32_t n_moves_ = 0;
  std::size_t n_kinds_ = 0;
  std::int64_t most_items_ = 0;
};

std::uint64_t address(const storage::SlotRef& slot) {
  return reinterpret_cast<std::uint64_t>(slot.data());
}

MoveKind between_pages(const cache::StreamLayout& layout, std::size_t from, std::size_t to) {
  MoveKind kind;
  kind.from_format = static_cast<std::int32_t>(layout.level(from).layout.format);
  kind.to_format = static_cast<std::int32_t>(layout.level(to).layout.format);
  kind.from_page = kind.to_page = 1;
  kind.n_heads = static_cast<std::int32_t>(layout.shape().n_heads);
  kind.head_dim = static_cast<std::int32_t>(layout.shape().head_dim);
  return kind;
}

MoveKind from_rows(const cache::StreamLayout& layout, const array& rows) {
  MoveKind kind = between_pages(layout, 0, 0);
  kind.from_format = static_cast<std::int32_t>(checked_format_of(rows.dtype()));
  kind.from_page = 0;
  kind.head_stride = static_cast<std::uint64_t>(rows.strides(1));
  kind.token_stride = static_cast<std::uint64_t>(rows.strides(2));
  kind.dim_stride = static_cast<std::uint64_t>(rows.strides(3));
  return kind;
}

}  // namespace

CUfunc_st* move_kernel(const char* name, std::uint32_t most_moves) {
  // Few names, each a literal; looked up once by each thread.
  thread_local std::map<std::pair<std::string_view, std::uint32_t>, CUfunc_st*> functions;
  CUfunc_st*& function = functions[{name, most_moves}];
  if (function == nullptr) {
    function = kernel("move_tokens.cu", name, {"MAX_MOVES=" + std::to_string(most_moves)});
  }
  return function;
}

void make_append_kernels() {
  for (const std::uint32_t most : {kFewMoves, kMaxMoves}) move_kernel("move_tokens", most);
}

std::uint32_t move_blocks(std::int64_t n_items) noexcept {
  constexpr std::int64_t kMost = 1024;
  return static_cast<std::uint32_t>(
      std::clamp((n_items + kItemsOfBlock - 1) / kItemsOfBlock, std::int64_t{1}, kMost));
}

void add_append(const cache::AppendPlan& plan, const array* keys, const array* values,
                std::int64_t sequence, const array& token, mlx::core::cu::CommandEncoder& encoder) {
  std::vector<const array*> inputs;
  if (keys != nullptr) inputs = {keys, values};
  Launches launches(plan.keys().layout->shape().block_size, inputs, token, encoder);
  const auto convert = [&](auto member) {
    for (const auto* stream : {&plan.keys(), &plan.values()}) {
      for (const cache::AppendPlan::Conversion& c : stream->*member) {
        launches.add(between_pages(*stream->layout, c.from_level, c.to_level),
                     {address(c.from), address(c.to), 0, 0, static_cast<std::int32_t>(c.n_tokens)});
      }
    }
    launches.flush();
  };
  convert(&cache::AppendPlan::StreamPlan::copies);
  if (keys != nullptr) {
    for (const auto& [stream, rows] : {std::pair{&plan.keys(), keys}, {&plan.values(), values}}) {
      const MoveKind kind = from_rows(*stream->layout, *rows);
      const std::uint64_t from =
          cuda::address(*rows) +
          static_cast<std::uint64_t>(sequence * rows->strides(0)) * rows->itemsize();
      for (const cache::AppendPlan::Piece& piece : stream->pieces) {
        launches.add(kind, {from, address(piece.page), static_cast<std::int32_t>(piece.source_row),
                            static_cast<std::int32_t>(piece.first_slot),
                            static_cast<std::int32_t>(piece.count)});
      }
    }
    launches.flush();
  }
  convert(&cache::AppendPlan::StreamPlan::demotions);
}

}  // namespace kvpool::mlx_ext::cuda
