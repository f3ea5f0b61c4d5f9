#include "kvpool/methods/token_pages.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvpool::methods {
namespace {
std::int64_t even(std::int64_t n) { return (n + 1) / 2 * 2; }
}  // namespace

TokenPages::TokenPages(std::vector<CodecPair> codecs, std::int64_t page_tokens)
    : codecs_(std::move(codecs)),
      page_tokens_(page_tokens),
      key_bytes_(even(codecs_.front().keys->page_bytes(page_tokens))),
      value_bytes_(even(codecs_.front().values->page_bytes(page_tokens))) {}

void TokenPages::reserve(std::int64_t end) {
  while (begin_ + static_cast<std::int64_t>(pages_.size()) * page_tokens_ < end) {
    pages_.emplace_back(static_cast<std::size_t>(page_bytes()));
  }
}

void TokenPages::encode(std::int64_t head, const float* keys, const float* values,
                        std::int64_t stride, std::int64_t n_tokens, float* scratch) noexcept {
  for (std::int64_t done = 0; done < n_tokens;) {
    const std::int64_t offset = end_ + done - begin_;
    const std::int64_t first = offset % page_tokens_;
    const TokenRange range{first, std::min(n_tokens - done, page_tokens_ - first)};
    std::byte* data =
        pages_[static_cast<std::size_t>(offset / page_tokens_)].data() + head * head_bytes();
    const CodecPair pair = codecs(head);
    pair.keys->encode(keys + done * stride, stride, range, {data, page_tokens_}, scratch);
    pair.values->encode(values + done * stride, stride, range, {data + key_bytes_, page_tokens_},
                        scratch);
    done += range.count;
  }
}

void TokenPages::drop_before(std::int64_t position) noexcept {
  while (!pages_.empty() && begin_ + page_tokens_ <= std::min(position, end_)) {
    pages_.pop_front();
    begin_ += page_tokens_;
  }
}

void TokenPages::drop_unused() noexcept {
  while (begin_ + (static_cast<std::int64_t>(pages_.size()) - 1) * page_tokens_ >= end_ &&
         !pages_.empty()) {
    pages_.pop_back();
  }
}

void TokenPages::check_invariants() const {
  const auto reach = begin_ + static_cast<std::int64_t>(pages_.size()) * page_tokens_;
  if (begin_ % page_tokens_ != 0 || begin_ > end_ || end_ > reach || reach - end_ >= page_tokens_) {
    throw std::logic_error("[TokenPages::check_invariants] pages do not cover the tokens");
  }
}

}  // namespace kvpool::methods
