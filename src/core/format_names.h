#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/core/block_handle.h"

namespace kvpool::core {

/// Format names by tag and back. Tag 0 is "fp16", the default of every pool.
class FormatNames {
 public:
  FormatNames() { intern("fp16"); }

  bool contains(FormatTag tag) const noexcept { return index(tag) < names_.size(); }
  /// Throws Error where all 65,535 tags are taken.
  FormatTag intern(std::string_view name);
  const std::string& name(FormatTag tag) const noexcept { return *names_[index(tag)]; }

 private:
  static std::size_t index(FormatTag tag) noexcept { return static_cast<std::uint16_t>(tag); }

  std::map<std::string, FormatTag, std::less<>> tags_;
  std::vector<const std::string*> names_;  // keys of tags_
};

}  // namespace kvpool::core
