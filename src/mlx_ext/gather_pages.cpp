#include "kvpool/mlx_ext/gather_pages.h"

#include <mlx/backend/cpu/encoder.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kvpool/formats/rows.h"
#include "kvpool/kernels/page_append.h"
#include "kvpool/mlx_ext/backend.h"
#include "kvpool/mlx_ext/dtypes.h"

namespace kvpool::mlx_ext {

using mlx::core::array;

namespace {

/// Dense rows [heads, rows, dim] of one sequence.
struct Target {
  std::byte* data = nullptr;
  formats::Format format{};
  std::int64_t n_rows = 0;

  std::int64_t number_bytes() const noexcept { return formats::traits(format).bits / 8; }
};

/// Pages of numbers go straight to the target's format.
void gather_numbers(const kernels::PageRef& page, const formats::PageShape& shape,
                    std::int64_t first, std::int64_t count, std::int64_t row,
                    const Target& to) noexcept {
  kernels::gather_rows({page.format, shape}, page.data, first, count,
                       {to.data + row * shape.head_dim * to.number_bytes(), to.format,
                        to.n_rows * shape.head_dim, shape.head_dim});
}

/// Pages that a method encoded come out as floats.
void gather_codes(const cache::PageView& view, Which which, const formats::PageShape& shape,
                  std::int64_t first_token, std::int64_t count, std::int64_t row,
                  const Target& to) {
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  std::vector<float> numbers(static_cast<std::size_t>(count) * dim);
  const std::size_t row_bytes = formats::row_bytes(to.format, dim);
  for (std::int64_t head = 0; head < shape.n_heads; ++head) {
    if (which == Which::kKeys) {
      view.read_keys(head, first_token, count, numbers.data(), shape.head_dim);
    } else {
      view.read_values(head, first_token, count, numbers.data(), shape.head_dim);
    }
    std::byte* out = to.data + static_cast<std::size_t>(head * to.n_rows + row) * row_bytes;
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i, out += row_bytes) {
      (void)formats::encode_row(to.format, {numbers.data() + i * dim, dim}, {out, row_bytes});
    }
  }
}

void gather_sequence(const VisibleRows& rows, Which which, const Target& to) {
  const cache::PageView& view = *rows.view;
  const cache::PageView::Stream& stream = stream_of(view, which);
  const formats::PageShape& shape = stream.layout->shape();
  const std::int64_t padding = to.n_rows - rows.n_rows;
  if (padding > 0) {
    const std::int64_t row_bytes = shape.head_dim * to.number_bytes();
    for (std::int64_t head = 0; head < shape.n_heads; ++head) {
      std::memset(to.data + head * to.n_rows * row_bytes, 0,
                  static_cast<std::size_t>(padding * row_bytes));
    }
  }
  for (std::int64_t token = rows.hidden(); token < view.length();) {
    const std::int64_t first = token % shape.block_size;
    const std::int64_t count = std::min(shape.block_size - first, view.length() - token);
    const std::int64_t row = padding + token - rows.hidden();
    const auto& page = stream.pages[static_cast<std::size_t>(token / shape.block_size)];
    if (page.format == cache::kCodecPage) {
      gather_codes(view, which, shape, token, count, row, to);
    } else {
      gather_numbers(page, shape, first, count, row, to);
    }
    token += count;
  }
}

}  // namespace

void GatherPages::eval_cpu(const std::vector<array>&, array& rows) {
  auto& encoder = mlx::core::cpu::get_command_encoder(stream());
  rows.set_data(mlx::core::allocator::malloc(rows.nbytes()));
  encoder.dispatch([batch = batch_, which = which_, data = rows.data<std::byte>(),
                    format = checked_format_of(rows.dtype()), n_rows = std::int64_t{rows.shape(2)},
                    sequence_bytes = rows.nbytes() / batch_->size()] {
    for (std::size_t i = 0; i < batch->size(); ++i) {
      gather_sequence((*batch)[i], which, {data + i * sequence_bytes, format, n_rows});
    }
  });
}

array gather_pages(const std::shared_ptr<const VisibleBatch>& batch, Which which,
                   const std::vector<array>& tokens, mlx::core::Dtype dtype) {
  std::int64_t n_rows = 0;
  for (const VisibleRows& rows : *batch) n_rows = std::max(n_rows, rows.n_rows);
  const formats::PageShape& shape = stream_of(*batch->front().view, which).layout->shape();
  return array({static_cast<int>(batch->size()), static_cast<int>(shape.n_heads),
                static_cast<int>(n_rows), static_cast<int>(shape.head_dim)},
               dtype,
               std::make_shared<GatherPages>(page_stream(*batch->front().pool), batch, which),
               tokens);
}

const GatherPages* gathered_from(const array& rows) noexcept {
  if (!rows.has_primitive()) return nullptr;
  return dynamic_cast<const GatherPages*>(&rows.primitive());
}

}  // namespace kvpool::mlx_ext
