#include "kvpool/storage/block_storage.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "kvpool/base/error.h"
#include "storage_state.h"

namespace kvpool::storage {

BlockStorage::BlockStorage(core::BlockPoolAllocator& pool, std::int64_t row_width,
                           StorageOptions options)
    : pool_(pool) {
  if (row_width < 1 || row_width > kMaxRowWidth) {
    throw InvalidArgument("[BlockStorage] row_width must be in 1.." + std::to_string(kMaxRowWidth) +
                          ", got " + std::to_string(row_width));
  }
  state_ = std::make_shared<State>(pool.pool_id(), pool.config().block_size, row_width, options);
  pool.add_observer(state_);
}

BlockStorage::~BlockStorage() = default;

std::int64_t BlockStorage::row_width() const noexcept { return state_->row_width; }

const StorageOptions& BlockStorage::options() const noexcept { return state_->options; }

formats::Format BlockStorage::format(const core::BlockHandle& block) const {
  std::lock_guard guard(state_->lock);
  const core::BlockInfo info = state_->live("format", pool_, block);
  return state_->format_of("format", pool_, info.format);
}

void BlockStorage::write(const core::BlockHandle& block, std::int64_t offset,
                         formats::Format format, std::span<const std::byte> rows) {
  constexpr const char* kCall = "write";
  const auto refuse = [](const std::string& why) {
    throw InvalidArgument("[BlockStorage::write] " + why);
  };
  State& state = *state_;
  std::lock_guard guard(state.lock);
  const core::BlockInfo info = state.live(kCall, pool_, block);
  const formats::Format kept = state.format_of(kCall, pool_, info.format);
  if (kept != format) {
    refuse("rows are '" + std::string(formats::traits(format).name) + "', the block is '" +
           std::string(formats::traits(kept).name) + "'");
  }
  const std::size_t row_bytes = state.row_bytes(format);
  if (rows.size() % row_bytes != 0) {
    refuse("rows must be whole rows of " + std::to_string(row_bytes) + " bytes, got " +
           std::to_string(rows.size()) + " bytes");
  }
  const auto n = static_cast<std::int64_t>(rows.size() / row_bytes);
  if (offset < 0 || n > state.block_rows - offset) {
    refuse("offset must be >= 0 and leave room for " + std::to_string(n) + " rows in a block of " +
           std::to_string(state.block_rows) + ", got " + std::to_string(offset));
  }
  if (n > 0 && info.n_references > 1) {
    refuse("block " + std::to_string(value(block.id)) + " has " +
           std::to_string(info.n_references) + " references: make it writable first");
  }
  BlockSlot& slot = state.touch(kCall, block, info, format);
  if (n == 0) return;
  if (offset + n > info.n_used) pool_.mark_used(block, offset + n);
  std::memcpy(slot.buffer.data() + static_cast<std::size_t>(offset) * row_bytes, rows.data(),
              rows.size());
  slot.zero = false;
  slot.n_written = std::max(slot.n_written, offset + n);
}

BlockRows BlockStorage::copy(const char* call, const core::BlockHandle& block, bool all) {
  State& state = *state_;
  std::lock_guard guard(state.lock);
  const core::BlockInfo info = state.live(call, pool_, block);
  const formats::Format format = state.format_of(call, pool_, info.format);
  const BlockSlot& slot = state.touch(call, block, info, format);
  const std::int64_t n_rows = all ? state.block_rows : info.n_used;
  const auto bytes =
      slot.buffer.bytes().first(static_cast<std::size_t>(n_rows) * state.row_bytes(format));
  return {format, n_rows, {bytes.begin(), bytes.end()}};
}

BlockRows BlockStorage::read(const core::BlockHandle& block) { return copy("read", block, false); }

BlockRows BlockStorage::read_all(const core::BlockHandle& block) {
  return copy("read_all", block, true);
}

std::span<const std::byte> BlockStorage::bytes(const core::BlockHandle& block) {
  constexpr const char* kCall = "bytes";
  State& state = *state_;
  std::lock_guard guard(state.lock);
  const core::BlockInfo info = state.live(kCall, pool_, block);
  const formats::Format format = state.format_of(kCall, pool_, info.format);
  return state.touch(kCall, block, info, format).buffer.bytes();
}

std::optional<core::Shortage> BlockStorage::try_writable(const core::BlockHandle& block,
                                                         core::BlockHandle& out) {
  constexpr const char* kCall = "writable";
  State& state = *state_;
  std::lock_guard guard(state.lock);
  const core::BlockInfo info = state.live(kCall, pool_, block);
  if (info.n_references == 1) {
    out = block;
    return std::nullopt;
  }
  const formats::Format format = state.format_of(kCall, pool_, info.format);
  // All memory is found before the pool changes anything: the copy's buffer and its slot's node.
  state.touch(kCall, block, info, format);
  std::unordered_map<std::uint32_t, BlockSlot> made(1);
  made[0].buffer = state.idle.take(state.block_bytes(format));
  auto node = made.extract(std::uint32_t{0});
  state.slots.reserve(state.slots.size() + 1);

  core::BlockHandle fresh;
  auto shortage = pool_.try_writable(block, fresh);
  if (!shortage) out = fresh;
  // No copy where the pool had none to give, where the other owners let go meanwhile, or where
  // another thread has freed it already.
  const auto copy_info = shortage || fresh == block ? std::nullopt : pool_.info(fresh);
  if (!copy_info) {
    state.idle.put(std::move(node.mapped().buffer));
    return shortage;
  }
  const BlockSlot& source = state.slots.at(block.record);
  BlockSlot& copy = node.mapped();
  std::memcpy(copy.buffer.data(), source.buffer.data(), copy.buffer.size());
  copy.checkout = copy_info->checkout;
  copy.id = fresh.id;
  copy.format = format;
  copy.zero = source.zero;
  copy.n_written = source.n_written;
  state.resident_bytes += copy.buffer.size();
  const auto placed = state.slots.find(fresh.record);
  if (placed == state.slots.end()) {
    node.key() = fresh.record;
    state.slots.insert(std::move(node));
  } else {  // bytes that the block kept from an earlier checkout
    state.idle.put(state.detach(placed->second));
    placed->second = std::move(copy);
  }
  return std::nullopt;
}

void BlockStorage::release(const core::BlockHandle& block) {
  State& state = *state_;
  std::lock_guard guard(state.lock);
  if (block.pool != state.pool_id) {
    throw InvalidArgument(head("release") + named(block) + " is not of this storage's pool");
  }
  const auto info = pool_.info(block);
  if (info && info->n_references > 1) {
    throw InvalidArgument(head("release") + named(block) + " has " +
                          std::to_string(info->n_references) + " references");
  }
  const auto found = state.slots.find(block.record);
  if (found == state.slots.end()) return;
  BlockSlot& slot = found->second;
  // A stale handle reaches only what its own checkout left behind.
  if (!info && !(slot.free && slot.checkout == block.serial)) return;
  state.idle.put(state.detach(slot));
  state.slots.erase(found);
}

std::size_t BlockStorage::resident_bytes() const {
  std::lock_guard guard(state_->lock);
  return state_->resident_bytes;
}

std::size_t BlockStorage::idle_bytes() const {
  std::lock_guard guard(state_->lock);
  return state_->idle.bytes();
}

void BlockStorage::drop_idle() {
  std::lock_guard guard(state_->lock);
  state_->idle.clear();
}

void BlockStorage::check_invariants() const {
  const State& state = *state_;
  std::lock_guard guard(state.lock);
  state.idle.check_invariants();
  std::size_t resident = 0;
  for (const auto& [record, slot] : state.slots) {
    const auto require = [&, id = value(slot.id)](bool holds, const char* what) {
      if (!holds) throw Error("[BlockStorage] block " + std::to_string(id) + ": " + what);
    };
    resident += slot.buffer.size();
    require(slot.checkout != 0, "has bytes without a checkout");
    require(slot.buffer.size() == state.block_bytes(slot.format),
            "buffer is not its format's size");
    require(slot.n_written >= 0 && slot.n_written <= state.block_rows, "rows out of range");
    if (slot.free) continue;  // its bytes are poisoned
    const std::size_t first_unwritten = static_cast<std::size_t>(slot.n_written);
    const auto rest =
        slot.buffer.bytes().subspan(slot.zero ? 0 : first_unwritten * state.row_bytes(slot.format));
    require(std::ranges::all_of(rest, [](std::byte byte) { return byte == std::byte{0}; }),
            "unwritten rows are not zero");
  }
  if (resident != state.resident_bytes) {
    throw Error("[BlockStorage] resident_bytes is not the sum of the buffers");
  }
}

}  // namespace kvpool::storage
