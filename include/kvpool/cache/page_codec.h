#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvpool/formats/page_layout.h"
#include "kvpool/methods/paged_attention.h"
#include "kvpool/methods/stream_codec.h"

namespace kvpool::cache {

/// The format that a PageRef names where a PageCodec encoded the page: kernels that do not know
/// codecs refuse such a page.
using methods::kCodecPage;

/// Pages of one stream encoded by a method: full blocks only, each head by its own codec. Head h
/// takes head_bytes() from h * head_bytes(). Immutable.
class PageCodec {
 public:
  /// `heads`: a codec for each head, of equal head_dim, group and page size. `name` is what the
  /// blocks are tagged with. Throws InvalidArgument where they differ, and where `block_size` is no
  /// multiple of the codecs' group.
  PageCodec(std::string name, std::vector<std::shared_ptr<const methods::StreamCodec>> heads,
            std::int64_t block_size);

  const std::string& name() const noexcept { return name_; }
  const formats::PageShape& shape() const noexcept { return shape_; }
  const methods::StreamCodec& head(std::int64_t head) const noexcept {
    return *heads_[static_cast<std::size_t>(head)];
  }
  /// For methods::paged_attention; valid as long as this is.
  methods::PageCodecs codecs() const noexcept { return {heads_, head_bytes_}; }
  std::int64_t head_bytes() const noexcept { return head_bytes_; }
  std::int64_t page_bytes() const noexcept { return shape_.n_heads * head_bytes_; }
  methods::ConstPage page_of(const std::byte* page, std::int64_t head) const noexcept {
    return {page + head * head_bytes_, shape_.block_size};
  }

  /// Encodes all tokens of a full page of numbers. Throws std::bad_alloc.
  void encode(const formats::PageLayout& from, const std::byte* numbers, std::byte* page) const;
  /// The approximate numbers of tokens first .. first + count of a head, rows of head_dim floats
  /// `stride` apart. Throws std::bad_alloc.
  void decode(const std::byte* page, std::int64_t head, std::int64_t first, std::int64_t count,
              float* rows, std::int64_t stride) const;

 private:
  std::string name_;
  std::vector<std::shared_ptr<const methods::StreamCodec>> heads_;
  formats::PageShape shape_;
  std::int64_t head_bytes_ = 0;
};

}  // namespace kvpool::cache
