#include "storage_state.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "poison.h"

namespace kvpool::storage {

std::string head(const char* call) { return std::string("[BlockStorage::") + call + "] "; }

std::string named(const core::BlockHandle& block) {
  return "block " + std::to_string(value(block.id));
}

core::BlockInfo BlockStorage::State::live(const char* call, const core::BlockPoolAllocator& pool,
                                          const core::BlockHandle& block) const {
  if (block.pool != pool_id) {
    throw InvalidArgument(head(call) + named(block) + " is not of this storage's pool");
  }
  if (const auto info = pool.info(block)) return *info;
  throw InvalidArgument(head(call) + named(block) + " is stale: it was given back to the pool");
}

formats::Format BlockStorage::State::format_of(const char* call,
                                               const core::BlockPoolAllocator& pool,
                                               core::FormatTag tag) {
  const auto index = static_cast<std::size_t>(tag);
  if (index < format_by_tag.size()) {
    if (const auto known = format_by_tag[index]) return *known;
  }
  const std::string tag_name = pool.format_name(tag);
  const auto format = formats::format_from_name(tag_name);
  if (!format) {
    throw InvalidArgument(head(call) + "format '" + tag_name +
                          "' has no layout; those that have: " + formats::format_names());
  }
  if (format_by_tag.size() <= index) format_by_tag.resize(index + 1);
  format_by_tag[index] = format;
  return *format;
}

BlockSlot& BlockStorage::State::touch(const char* call, const core::BlockHandle& block,
                                      const core::BlockInfo& info, formats::Format format) {
  const auto found = slots.find(block.record);
  if (found != slots.end() && found->second.checkout == info.checkout) {
    BlockSlot& slot = found->second;
    if (slot.format == format) return slot;
    if (std::min(slot.n_written, info.n_used) > 0) {
      if (!formats::same_representation(slot.format, format)) {
        throw InvalidArgument(head(call) + "format of " + named(block) + " must stay '" +
                              std::string(formats::traits(slot.format).name) +
                              "' while it holds rows, got '" +
                              std::string(formats::traits(format).name) + "'");
      }
      slot.format = format;
      return slot;
    }
  }

  const std::size_t size = block_bytes(format);
  AlignedBuffer fresh;  // what may throw comes first
  if (found == slots.end() || found->second.buffer.size() != size) fresh = idle.take(size);
  BlockSlot& slot = found == slots.end() ? slots[block.record] : found->second;
  if (!fresh.empty()) {
    if (!slot.buffer.empty()) idle.put(detach(slot));
    slot.buffer = std::move(fresh);
    slot.zero = false;
    resident_bytes += size;
  }
  unpoison(slot.buffer.bytes());
  if (!slot.zero) slot.buffer.zero();
  slot.zero = true;
  slot.checkout = info.checkout;
  slot.id = info.id;
  slot.format = format;
  slot.free = false;
  slot.n_written = 0;
  return slot;
}

AlignedBuffer BlockStorage::State::detach(BlockSlot& slot) noexcept {
  resident_bytes -= slot.buffer.size();
  unpoison(slot.buffer.bytes());
  if (options.scrub_on_free && !slot.zero) slot.buffer.zero();
  return std::move(slot.buffer);
}

void BlockStorage::State::blocks_freed(std::span<const Event> events) noexcept {
  std::lock_guard guard(lock);
  for (const Event& event : events) {
    const auto found = slots.find(event.record);
    if (found == slots.end() || found->second.checkout != event.checkout) continue;
    BlockSlot& slot = found->second;
    slot.free = true;
    if (options.scrub_on_free && !slot.zero) {
      slot.buffer.zero();
      slot.zero = true;
    }
    poison(slot.buffer.bytes());
  }
}

// Shrinking is meant to give memory back, so these buffers go to the system.
void BlockStorage::State::blocks_retired(std::span<const Event> events) noexcept {
  std::lock_guard guard(lock);
  for (const Event& event : events) {
    const auto found = slots.find(event.record);
    // Ids are never used twice: with another one, the record has a new block already.
    if (found == slots.end() || found->second.id != event.id) continue;
    detach(found->second);
    slots.erase(found);
  }
}

}  // namespace kvpool::storage
