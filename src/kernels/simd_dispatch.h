#pragma once

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace kvpool::kernels {

/// The entries of a HWY_EXPORT table that this machine can run, best first, each made into a
/// Kernel{name of its target, function}. Unlike Highway's own dispatch this keeps no global choice,
/// so a test can call each.
template <class Kernel, class Function, std::size_t size>
std::vector<Kernel> supported_kernels(const Function (&table)[size]) {
  std::vector<Kernel> kernels;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    // Targets are table entries 1, 2, ... by bit; the emulated one, outside those bits, comes last.
    // A build for a single target has a table of one.
    const auto bits = static_cast<std::uint64_t>(HWY_CHOSEN_TARGET_SHIFT(target));
    std::size_t index = size - 1;
    if (bits != 0 && size > 1) index = hwy::Num0BitsBelowLS1Bit_Nonzero64(bits);
    if (table[index] != nullptr) kernels.push_back({hwy::TargetName(target), table[index]});
  }
  return kernels;
}

/// What the functions of a HWY_EXPORT table make, for those targets that have it: is_there(kernel).
template <class Kernel, std::size_t size, class IsThere>
std::vector<Kernel> made_kernels(Kernel (*const (&table)[size])(), IsThere is_there) {
  struct Target {
    std::string_view name;
    Kernel (*make)();
  };
  std::vector<Kernel> kernels;
  for (const Target& target : supported_kernels<Target>(table)) {
    const Kernel kernel = target.make();
    if (is_there(kernel)) kernels.push_back(kernel);
  }
  return kernels;
}

}  // namespace kvpool::kernels
