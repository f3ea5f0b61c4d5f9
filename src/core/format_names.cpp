#include "format_names.h"

#include "kvpool/base/error.h"

namespace kvpool::core {

FormatTag FormatNames::intern(std::string_view name) {
  if (const auto found = tags_.find(name); found != tags_.end()) return found->second;
  constexpr std::size_t kMaxNames = 65'535;
  if (names_.size() == kMaxNames) {
    throw Error("[BlockPoolAllocator::intern_format] no tag is left for format '" +
                std::string(name) + "': the pool has " + std::to_string(kMaxNames) + " already");
  }
  if (names_.size() == names_.capacity()) names_.reserve(2 * names_.size() + 1);
  const auto tag = static_cast<FormatTag>(names_.size());
  names_.push_back(&tags_.emplace(name, tag).first->first);
  return tag;
}

}  // namespace kvpool::core
