#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvpool/formats/page_layout.h"

namespace kvpool::kernels {

/// Rows of numbers outside of pages: [n_heads, tokens, head_dim] in fp32, fp16 or bf16, the last
/// dim dense, strides in numbers.
template <class Byte>
struct HeadRows {
  Byte* data = nullptr;
  formats::Format format{};
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};
using SourceRows = HeadRows<const std::byte>;
using TargetRows = HeadRows<std::byte>;

/// Writes the rows of all heads as tokens first .. first + count of a page: rows of the page's own
/// format are copied, others go through fp32. Bytes are those of formats::encode_tokens.
void append_rows(const formats::PageLayout& layout, std::byte* page, std::int64_t first,
                 std::int64_t count, const SourceRows& rows) noexcept;

/// Reads tokens first .. first + count of a page, of all heads, as formats::decode_tokens does;
/// rounded to the format of `rows`.
void gather_rows(const formats::PageLayout& layout, const std::byte* page, std::int64_t first,
                 std::int64_t count, const TargetRows& rows) noexcept;

/// Writes the first n_tokens of a page as a page of another format; the shapes are equal. A page of
/// the same format is copied as it is.
void convert_page(const formats::PageLayout& from_layout, const std::byte* from,
                  const formats::PageLayout& to_layout, std::byte* to,
                  std::int64_t n_tokens) noexcept;

/// Tokens of one head as fp32 rows, row_stride apart: formats::decode_tokens with vectors.
void decode_head(const formats::PageLayout& layout, const std::byte* page, std::int64_t head,
                 std::int64_t first, std::int64_t count, float* rows,
                 std::int64_t row_stride) noexcept;

/// One implementation of the four.
struct PageKernels {
  /// The instructions it uses, or "scalar".
  std::string_view target;
  decltype(&kernels::append_rows) append_rows = nullptr;
  decltype(&kernels::gather_rows) gather_rows = nullptr;
  decltype(&kernels::convert_page) convert_page = nullptr;
  decltype(&kernels::decode_head) decode_head = nullptr;
};

/// Those that this machine can run, fastest first; the last one is scalar_page_kernels().
std::span<const PageKernels> all_page_kernels();

/// The fastest one.
const PageKernels& page_kernels();

/// The meaning of each kernel, in plain C++.
const PageKernels& scalar_page_kernels() noexcept;

}  // namespace kvpool::kernels
