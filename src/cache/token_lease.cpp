#include "kvpool/cache/token_lease.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {

using core::BlockHandle;

TokenLease::TokenLease(std::shared_ptr<Pool> pool, OwnerId owner)
    : pool_(std::move(pool)), owner_(owner) {
  // So that format names read alike whoever allocates first.
  if (pool_ != nullptr) key_format_ = value_format_ = pool_->intern_format("fp16");
}

TokenLease::~TokenLease() { release(); }

TokenLease::TokenLease(TokenLease&& other) noexcept
    : pool_(std::move(other.pool_)),
      owner_(other.owner_),
      batch_(other.batch_),
      rows_(other.rows_),
      used_(other.used_),
      n_pairs_(other.n_pairs_),
      padding_first_(other.padding_first_),
      padding_(std::move(other.padding_)),
      key_format_(other.key_format_),
      value_format_(other.value_format_),
      handles_(std::move(other.handles_)) {
  other.forget();
}

TokenLease& TokenLease::operator=(TokenLease&& other) noexcept {
  if (this == &other) return *this;
  release();
  pool_ = std::move(other.pool_);
  owner_ = other.owner_;
  batch_ = other.batch_;
  rows_ = other.rows_;
  used_ = other.used_;
  n_pairs_ = other.n_pairs_;
  padding_first_ = other.padding_first_;
  padding_ = std::move(other.padding_);
  key_format_ = other.key_format_;
  value_format_ = other.value_format_;
  handles_ = std::move(other.handles_);
  other.forget();
  return *this;
}

std::int64_t TokenLease::pairs_for(std::int64_t batch, std::int64_t rows) const noexcept {
  return pool_ == nullptr ? 0 : batch * pool_->blocks_for_tokens(rows);
}

std::span<const BlockHandle> TokenLease::columns(std::int64_t first,
                                                 std::int64_t last) const noexcept {
  const auto width = static_cast<std::size_t>(2 * batch_);
  return std::span(handles_).subspan(static_cast<std::size_t>(first) * width,
                                     static_cast<std::size_t>(last - first) * width);
}

bool TokenLease::is_padded(std::int64_t column) const noexcept {
  if (padding_.empty()) return false;
  const std::int64_t block_size = pool_->config().block_size;
  return (column + 1) * block_size > padding_first_ &&
         column * block_size < padding_first_ + *std::ranges::max_element(padding_);
}

std::int64_t TokenLease::fill(std::int64_t column, std::int64_t sequence,
                              std::int64_t used) const noexcept {
  const std::int64_t block_size = pool_->config().block_size;
  const std::int64_t first = column * block_size;
  const std::int64_t last = std::clamp(used, first, first + block_size);
  if (!is_padded(column)) return last - first;
  const std::int64_t padding =
      std::max<std::int64_t>(padding_[static_cast<std::size_t>(sequence)], 0);
  const std::int64_t padded =
      std::clamp(padding_first_ + padding, first, last) - std::clamp(padding_first_, first, last);
  return last - first - padded;
}

void TokenLease::mark(std::span<const BlockHandle> blocks, std::int64_t n_used) const {
  try {
    pool_->mark_used(blocks, n_used);
  } catch (const InvalidArgument&) {
    // The values are in range and the handles ours: only a free behind our back makes them stale.
    throw LeaseLost("[TokenLease] the blocks of owner " + std::to_string(owner_) +
                    " were freed behind the cache that holds them; release it to use it again");
  }
}

void TokenLease::write_fill(std::int64_t first, std::int64_t last, std::int64_t used) const {
  for (std::int64_t column = first; column < last;) {
    const std::int64_t start = column++;
    if (is_padded(start)) {
      for (std::int64_t i = 0; i < batch_; ++i) {
        mark(columns(start, start + 1).subspan(static_cast<std::size_t>(2 * i), 2),
             fill(start, i, used));
      }
      continue;
    }
    const std::int64_t value = fill(start, 0, used);
    while (column < last && !is_padded(column) && fill(column, 0, used) == value) ++column;
    mark(columns(start, column), value);
  }
}

void TokenLease::verify() const {
  if (n_pairs_ == 0) return;
  const std::int64_t block_size = pool_->config().block_size;
  const std::int64_t tail = used_ == 0 ? 0 : (used_ - 1) / block_size;
  write_fill(tail, tail + 1, used_);
}

std::optional<core::Shortage> TokenLease::try_resize(std::int64_t batch, std::int64_t rows) {
  if (batch < 0 || rows < 0) {
    throw InvalidArgument("[TokenLease::try_resize] batch and rows must be >= 0, got " +
                          std::to_string(batch) + " and " + std::to_string(rows));
  }
  if (batch == batch_ && rows == rows_) return std::nullopt;
  const std::int64_t needed = pairs_for(batch, rows);
  const std::int64_t grown = needed - n_pairs_;
  if (pool_ != nullptr && grown != 0) verify();
  if (grown > 0) {
    std::vector<BlockHandle> keys(static_cast<std::size_t>(grown));
    std::vector<BlockHandle> values(static_cast<std::size_t>(grown));
    handles_.reserve(handles_.size() + 2 * keys.size());
    if (auto shortage = pool_->try_allocate_kv(grown * pool_->config().block_size, owner_,
                                               key_format_, value_format_, keys, values)) {
      return shortage;
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      handles_.push_back(keys[i]);
      handles_.push_back(values[i]);
    }
  } else if (grown < 0) {
    const auto kept = static_cast<std::size_t>(2 * needed);
    pool_->free(std::span(handles_).subspan(kept));
    handles_.resize(kept);
  }
  const bool repartitioned = batch != batch_;
  const std::int64_t first_new =
      repartitioned || batch == 0 || n_pairs_ == 0 ? 0 : n_pairs_ / batch;
  batch_ = batch;
  rows_ = rows;
  n_pairs_ = needed;
  used_ = std::min(used_, rows);
  if (repartitioned) padding_.clear();
  if (needed == 0) return std::nullopt;
  if (repartitioned || grown > 0) {
    write_fill(first_new, pool_->blocks_for_tokens(rows_), used_);
  } else {
    verify();
  }
  return std::nullopt;
}

void TokenLease::set_used(std::int64_t used) {
  if (used < 0 || used > rows_) {
    throw InvalidArgument("[TokenLease::set_used] used must be in 0.." + std::to_string(rows_) +
                          ", got " + std::to_string(used));
  }
  if (n_pairs_ == 0) {
    used_ = used;
    return;
  }
  const std::int64_t block_size = pool_->config().block_size;
  const std::int64_t last = used == 0 ? 0 : (used - 1) / block_size;
  // The last block first: where the lease is lost, nothing has changed.
  write_fill(last, last + 1, used);
  if (used > used_) {
    write_fill(used_ / block_size, last, used);
  } else {
    write_fill(last + 1, pool_->blocks_for_tokens(used_), used);
  }
  used_ = used;
}

void TokenLease::set_padding(std::int64_t first, std::vector<std::int64_t> counts) {
  if (first < 0 || (!counts.empty() && static_cast<std::int64_t>(counts.size()) != batch_)) {
    throw InvalidArgument(
        "[TokenLease::set_padding] first must be >= 0 and counts as many as the " +
        std::to_string(batch_) + " sequences, got " + std::to_string(first) + " and " +
        std::to_string(counts.size()));
  }
  const auto any = [](std::int64_t count) { return count > 0; };
  if (std::ranges::none_of(counts, any)) counts.clear();
  if (counts == padding_ && (counts.empty() || first == padding_first_)) return;
  if (n_pairs_ > 0) verify();
  padding_first_ = first;
  padding_ = std::move(counts);
  if (n_pairs_ > 0) write_fill(0, pool_->blocks_for_tokens(rows_), used_);
}

void TokenLease::set_formats(core::FormatTag keys, core::FormatTag values) {
  for (std::size_t i = 0; i + 1 < handles_.size(); i += 2) {
    if (keys != key_format_) pool_->set_format(handles_[i], keys);
    if (values != value_format_) pool_->set_format(handles_[i + 1], values);
  }
  key_format_ = keys;
  value_format_ = values;
}

void TokenLease::release() noexcept {
  if (!handles_.empty()) {
    try {
      pool_->free(handles_);
    } catch (...) {  // NOLINT(bugprone-empty-catch)
      // Own handles are never refused; what else can fail must not leave a destructor.
    }
  }
  forget();
}

void TokenLease::forget() noexcept {
  handles_.clear();
  batch_ = rows_ = used_ = n_pairs_ = padding_first_ = 0;
  padding_.clear();
}

void TokenLease::check_invariants() const {
  const auto require = [&](bool holds, const char* book) {
    if (!holds) throw Error(std::string("[TokenLease::check_invariants] ") + book);
  };
  require(n_pairs_ == pairs_for(batch_, rows_), "n_pairs is not batch * ceil(rows / block_size)");
  require(handles_.size() == static_cast<std::size_t>(2 * n_pairs_), "handles are not in pairs");
  require(used_ >= 0 && used_ <= rows_, "used is not in 0..rows");
  if (n_pairs_ == 0) return;
  for (std::size_t i = 0; i < handles_.size(); ++i) {
    const auto info = pool_->info(handles_[i]);
    if (!info) continue;  // lost: the next use says so
    const auto place = static_cast<std::int64_t>(i);
    require(info->n_used == fill(place / (2 * batch_), place / 2 % batch_, used_),
            "n_used of a block does not follow the tokens");
    require(info->owner == owner_, "a block is another owner's");
  }
}

}  // namespace kvpool::cache
