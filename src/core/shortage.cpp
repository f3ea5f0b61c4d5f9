#include "kvpool/core/shortage.h"

namespace kvpool::core {

std::string Shortage::message(const char* call) const {
  return std::string("[") + call + "] stream " + std::string(name(stream)) + " needs " +
         std::to_string(needed) + (needed == 1 ? " block, " : " blocks, ") +
         std::to_string(available) + " free of " + std::to_string(managed);
}

}  // namespace kvpool::core
