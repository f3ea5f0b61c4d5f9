#include "kvpool/cache/buffer_growth.h"

#include <algorithm>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool::cache {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) noexcept {
  return (n + unit - 1) / unit * unit;
}

// From `least` rows, in whole blocks, to `wanted`: what lies between is halved `halvings` times.
constexpr std::int64_t halved(std::int64_t least, std::int64_t wanted, std::int64_t block_size,
                              int halvings) noexcept {
  const std::int64_t needed = std::min(round_up(least, block_size), wanted);
  const std::int64_t extra = (wanted - needed) >> halvings;
  return std::min(needed + round_up(extra, block_size), wanted);
}

void require(bool holds, const char* what, std::int64_t value) {
  if (!holds) throw InvalidArgument("[BufferGrowth] " + std::string(what) + std::to_string(value));
}

}  // namespace

BufferGrowth BufferGrowth::exact(std::int64_t step) {
  require(step >= 1, "step must be >= 1, got ", step);
  return BufferGrowth(Exact{step});
}

BufferGrowth BufferGrowth::spare(std::int64_t quantum, std::int64_t block_size) {
  require(quantum >= 1, "quantum must be >= 1, got ", quantum);
  require(block_size >= 1, "block_size must be >= 1, got ", block_size);
  return BufferGrowth(Spare{quantum, block_size});
}

BufferGrowth BufferGrowth::ring(std::int64_t max_size, std::int64_t keep, std::int64_t step,
                                std::int64_t block_size) {
  require(max_size >= 1, "max_size must be >= 1, got ", max_size);
  require(keep >= 0 && keep < max_size, "keep must be in 0..max_size - 1, got ", keep);
  require(step >= 1, "step must be >= 1, got ", step);
  require(block_size >= 0, "block_size must be >= 0, got ", block_size);
  return BufferGrowth(Ring{max_size, keep, step, block_size});
}

BufferGrowth BufferGrowth::leading(std::int64_t lead) const {
  require(lead >= 0, "lead must be >= 0, got ", lead);
  BufferGrowth growth = *this;
  if (auto* spare = std::get_if<Spare>(&growth.kind_)) spare->lead = lead;
  return growth;
}

std::int64_t BufferGrowth::lead() const noexcept {
  const auto* spare = std::get_if<Spare>(&kind_);
  return spare == nullptr ? 0 : spare->lead;
}

BufferShape BufferGrowth::grown(const Exact& kind, const BufferShape& now, std::int64_t n_tokens,
                                int /*halvings*/) {
  const std::int64_t offset = now.offset + n_tokens;
  std::int64_t rows = now.rows;
  if (offset > rows) {
    if (now.offset % kind.step != 0) rows = now.offset;
    rows += round_up(n_tokens, kind.step);
  }
  return {offset, rows, offset};
}

BufferShape BufferGrowth::grown(const Spare& kind, const BufferShape& now, std::int64_t n_tokens,
                                int halvings) {
  const std::int64_t offset = now.offset + n_tokens;
  const std::int64_t lead = halvings == 0 ? kind.lead : 0;
  if (offset <= now.rows && offset + std::min(lead, now.rows / 2) <= now.rows) {
    return {offset, now.rows, offset};
  }
  const std::int64_t wanted = round_up(std::max(offset, now.rows + now.rows / 2), kind.quantum);
  return {offset, halved(offset, wanted, kind.block_size, halvings), offset};
}

BufferShape BufferGrowth::grown(const Ring& kind, const BufferShape& now, std::int64_t n_tokens,
                                int halvings) {
  BufferShape next = now;
  next.offset += n_tokens;
  if (n_tokens == 1) {
    if (next.rows < kind.max_size && now.offset >= next.rows) {
      next.index = next.rows;
      const std::int64_t wanted = std::min(next.rows + kind.step, kind.max_size);
      next.rows =
          kind.block_size == 0 ? wanted : halved(next.rows + 1, wanted, kind.block_size, halvings);
    } else if (next.rows > kind.max_size) {
      next.rows = kind.max_size;
      next.index = kind.max_size;
    }
    if (next.index == kind.max_size) next.index = kind.keep;
    ++next.index;
    return next;
  }
  // In temporal order a ring that has not wrapped ends at its index.
  const bool wrapped = now.index != now.rows && now.index < now.offset;
  const std::int64_t ordered = wrapped ? now.rows : now.index;
  next.rows = std::min(ordered, kind.max_size - 1) + n_tokens;
  next.index = next.rows;
  return next;
}

BufferShape BufferGrowth::after(const BufferShape& now, std::int64_t n_tokens, int halvings) const {
  return std::visit([&](const auto& kind) { return grown(kind, now, n_tokens, halvings); }, kind_);
}

BufferShape BufferGrowth::trimmed(const BufferShape& now, std::int64_t n_tokens,
                                  std::int64_t block_size) const {
  BufferShape next{now.offset - n_tokens, now.rows, now.index - n_tokens};
  const std::int64_t kept = round_up(next.offset, block_size);
  if (kept < round_up(now.offset, block_size)) next.rows = std::min(kept, now.rows);
  return next;
}

BufferShape BufferGrowth::undone(const BufferShape& before, const BufferShape& after,
                                 std::int64_t rows_in_buffer, bool written) const {
  const auto* ring = std::get_if<Ring>(&kind_);
  if (ring == nullptr) return {before.offset, std::min(rows_in_buffer, before.rows), before.offset};
  if (!written) return {before.offset, rows_in_buffer, before.index};
  const std::int64_t n_tokens = after.offset - before.offset;
  if (n_tokens == 1 && rows_in_buffer > before.rows) return before;
  // The next token overwrites the row of the one taken back.
  if (n_tokens == 1) return {before.offset, rows_in_buffer, after.index - 1};
  const std::int64_t kept = rows_in_buffer - n_tokens;
  if (before.used() <= kept) return {before.offset, kept, kept};
  // The chunk pushed out the oldest token: its row is the one that the next token overwrites.
  return {before.offset, ring->max_size, kept};
}

BufferShape BufferGrowth::tightened(const BufferShape& now) const noexcept {
  std::int64_t block_size = 0;
  if (const auto* spare = std::get_if<Spare>(&kind_)) block_size = spare->block_size;
  if (const auto* ring = std::get_if<Ring>(&kind_)) block_size = ring->block_size;
  // A ring whose index lies among its tokens is full.
  if (block_size == 0 || now.index < now.used()) return now;
  return {now.offset, std::min(now.rows, round_up(now.index, block_size)), now.index};
}

bool BufferGrowth::is_trimmable(const BufferShape& now) const noexcept {
  const auto* ring = std::get_if<Ring>(&kind_);
  return ring == nullptr || now.offset < ring->max_size;
}

}  // namespace kvpool::cache
