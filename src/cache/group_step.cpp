#include "kvpool/cache/group_step.h"

#include <utility>

namespace kvpool::cache {

std::string step_message(std::string why, std::int64_t n_tokens, std::int64_t n_layers,
                         std::int64_t fitting) {
  const auto counted = [](std::int64_t n, const char* what) {
    return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
  };
  return std::move(why) + " for " + counted(n_tokens, "token") + " in " +
         counted(n_layers, "layer") + "; " + counted(fitting, "token") +
         (fitting == 1 ? " fits" : " fit");
}

}  // namespace kvpool::cache
