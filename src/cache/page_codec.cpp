#include "kvpool/cache/page_codec.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/kernels/page_append.h"
#include "kvpool/kernels/row_kernels.h"
#include "kvpool/methods/magnitude.h"

namespace kvpool::cache {

PageCodec::PageCodec(std::string name,
                     std::vector<std::shared_ptr<const methods::StreamCodec>> heads,
                     std::int64_t block_size)
    : name_(std::move(name)), heads_(std::move(heads)) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw InvalidArgument("[PageCodec] " + what);
  };
  require(block_size >= 1, "block_size must be >= 1, got " + std::to_string(block_size));
  require(!heads_.empty(), "heads must not be empty");
  require(std::ranges::none_of(heads_, [](const auto& head) { return head == nullptr; }),
          "heads must not be null");
  const methods::StreamCodec& first = *heads_.front();
  require(block_size % first.group() == 0,
          "block_size must be a multiple of the " + std::to_string(first.group()) +
              " tokens that " + name_ + " encodes together, got " + std::to_string(block_size));
  for (const auto& head : heads_) {
    require(head->head_dim() == first.head_dim() && head->group() == first.group() &&
                head->page_bytes(block_size) == first.page_bytes(block_size),
            "heads must have equal head_dim, group and page size");
  }
  shape_ = {static_cast<std::int64_t>(heads_.size()), block_size, first.head_dim()};
  head_bytes_ = first.page_bytes(block_size);
  head_bytes_ += head_bytes_ % 2;  // a page starts on an even address
}

void PageCodec::encode(const formats::PageLayout& from, const std::byte* numbers,
                       std::byte* page) const {
  const std::int64_t n_tokens = shape_.block_size;
  const std::int64_t dim = shape_.head_dim;
  std::vector<float> rows(static_cast<std::size_t>(n_tokens * dim));
  std::vector<float> scratch(static_cast<std::size_t>(heads_.front()->scratch_floats(n_tokens)));
  for (std::int64_t h = 0; h < shape_.n_heads; ++h) {
    kernels::page_kernels().decode_head(from, numbers, h, 0, n_tokens, rows.data(), dim);
    for (float& number : rows) {
      number = std::clamp(number, -methods::kLargestInput, methods::kLargestInput);
      if (!(number == number)) number = 0;
    }
    head(h).encode(rows.data(), dim, {0, n_tokens}, {page + h * head_bytes_, n_tokens},
                   scratch.data());
  }
}

void PageCodec::decode(const std::byte* page, std::int64_t h, std::int64_t first,
                       std::int64_t count, float* rows, std::int64_t stride) const {
  if (count == 0) return;
  const methods::StreamCodec& codec = head(h);
  const std::int64_t width = kernels::padded_row(codec.code_dims());
  std::vector<float> codes(static_cast<std::size_t>(count * width));
  std::vector<float> scratch(static_cast<std::size_t>(codec.scratch_floats(count)));
  codec.decode(page_of(page, h), {first, count}, kernels::row_kernels(), {codes.data(), width},
               scratch.data());
  for (std::int64_t t = 0; t < count; ++t) codec.leave(codes.data() + t * width, rows + t * stride);
}

}  // namespace kvpool::cache
