// Any bytes as calls to paged sequences: four for their pool and layers, then commands.
#include <cstddef>
#include <cstdint>

#include "support/sequence_model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using kvpool::cache::testing::SequenceModel;
  if (size < SequenceModel::kConfigSize) return 0;
  SequenceModel model(
      std::span<const std::uint8_t, SequenceModel::kConfigSize>(data, SequenceModel::kConfigSize));
  for (std::size_t at = SequenceModel::kConfigSize; at + SequenceModel::kCommandSize <= size;
       at += SequenceModel::kCommandSize) {
    model.step(std::span<const std::uint8_t, SequenceModel::kCommandSize>(
        data + at, SequenceModel::kCommandSize));
  }
  model.finish();
  return 0;
}
