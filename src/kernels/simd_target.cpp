#include "kvpool/kernels/simd_target.h"

#if KVPOOL_HAVE_HIGHWAY
#include <hwy/highway.h>
#endif

namespace kvpool::kernels {

std::string_view simd_target_name() {
#if KVPOOL_HAVE_HIGHWAY
  return hwy::TargetName(hwy::SupportedAndGeneratedTargets().front());
#else
  return "scalar";
#endif
}

}  // namespace kvpool::kernels
