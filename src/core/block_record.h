#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvpool/core/stream.h"

namespace kvpool::core {

/// A reference as the pool's own lists name it: the index of a record for the reference of the
/// checkout itself, kExtraBit plus a slot of the ReferenceSlab for any other.
using Reference = std::uint32_t;
inline constexpr Reference kExtraBit = 0x8000'0000u;
inline constexpr Reference kNoReference = 0xffff'ffffu;
/// Records and extra references a pool can have at a time.
inline constexpr std::int64_t kMaxReferences = kExtraBit - 1;

constexpr bool is_extra(Reference reference) noexcept { return (reference & kExtraBit) != 0; }
constexpr std::uint32_t slot_of(Reference reference) noexcept { return reference & ~kExtraBit; }

/// Slot 0 of the OwnerTable: nobody.
inline constexpr std::uint32_t kNoOwner = 0;

/// A reference's place in its owner's list of one stream, in allocation order.
struct Links {
  std::uint32_t owner = kNoOwner;  // slot in the OwnerTable
  Reference prev = kNoReference;
  Reference next = kNoReference;
};

/// The books of one block. 40 bytes are all that a block costs.
///
/// On a free list: links.prev is the block below (towards the coldest). A record keeps its last
/// checkout's fields there: free_all of an owner that shares nothing hands over the whole list
/// without touching them, and the references of that checkout are dead because serial is below
/// OwnerRecord::first_serial of whoever has the slot.
struct BlockRecord {
  std::uint64_t serial = 0;  // of the latest checkout; keeps rising when the record is used again
  std::uint32_t id = 0;
  Stream stream = Stream::kKey;
  bool ever_allocated : 1 = false;
  bool retired : 1 = false;
  bool recycled : 1 = false;  // had another id before
  std::uint16_t format = 0;
  std::uint32_t references = 0;  // meaningful while in use
  Links links;                   // of the checkout's own reference; owner kNoOwner once dropped
  std::uint32_t n_used = 0;      // token slots, meaningful while in use
};
static_assert(sizeof(BlockRecord) == 40);

/// Id and stream in one word: they lie alike in handles and records, and comparing them together is
/// what makes checking a list of handles quick.
template <typename T>
std::uint64_t id_and_stream(const T& named) noexcept {
  constexpr std::size_t kAt = offsetof(T, id);
  static_assert(offsetof(T, stream) == kAt + 4 && kAt + 8 <= sizeof(T));
  std::uint64_t word;
  std::memcpy(&word, reinterpret_cast<const char*>(&named) + kAt, sizeof word);
  return std::endian::native == std::endian::little ? word << 24 : word >> 24;
}

}  // namespace kvpool::core
