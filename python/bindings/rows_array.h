#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpool/formats/format.h"

namespace kvpool::bindings {

/// [n_rows, width] of any real dtype, as numpy hands it over.
using RowsArray =
    nanobind::ndarray<nanobind::ro, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

/// The rows as `format` keeps them. `bfloat16` says that uint16 numbers are bits of bfloat16s,
/// which numpy has no dtype for. Throws nanobind::value_error, starting with `call`, for a number
/// that is no code of the format, and nanobind::type_error for a dtype that is not real.
std::vector<std::byte> encode_rows(const char* call, formats::Format format,
                                   const RowsArray& values, bool bfloat16);

/// A numpy array [n_rows, width] of rows as they lie in a block: float32, float16, the bits of a
/// bfloat16 as uint16, or codes as uint8.
nanobind::object rows_to_numpy(formats::Format format, const std::vector<std::byte>& bytes,
                               std::int64_t n_rows, std::int64_t width);

}  // namespace kvpool::bindings
