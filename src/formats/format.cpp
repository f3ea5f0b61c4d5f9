#include "kvpool/formats/format.h"

#include "kvpool/formats/packed_group.h"

namespace kvpool::formats {
namespace {

template <int bits>
constexpr bool matches_table(Format format) {
  using Group = PackedGroup<bits>;
  const FormatTraits& entry = traits(format);
  return entry.format == format && entry.bits == bits && entry.group_numbers == Group::kNumbers &&
         entry.group_bytes == sizeof(Group) && entry.max_code() == Group::kMaxCode;
}
static_assert(matches_table<8>(Format::kInt8));
static_assert(matches_table<4>(Format::kInt4));
static_assert(matches_table<3>(Format::kInt3));
static_assert(matches_table<2>(Format::kInt2));
static_assert(matches_table<1>(Format::kInt1));

}  // namespace

std::optional<Format> format_from_name(std::string_view name) noexcept {
  for (const FormatTraits& entry : kFormats) {
    if (entry.name == name) return entry.format;
  }
  return std::nullopt;
}

std::string format_names() {
  std::string names;
  for (const FormatTraits& entry : kFormats) {
    if (!names.empty()) names += ", ";
    names += entry.name;
  }
  return names;
}

}  // namespace kvpool::formats
