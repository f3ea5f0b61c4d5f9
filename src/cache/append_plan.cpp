#include "kvpool/cache/append_plan.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/kernels/page_append.h"

namespace kvpool::cache {

namespace {

using Conversion = AppendPlan::Conversion;
using StreamPlan = AppendPlan::StreamPlan;

void check_source(const char* name, const kernels::SourceRows& rows) {
  if (formats::traits(rows.format).kind == formats::Kind::kFloat && rows.data != nullptr) return;
  throw InvalidArgument(
      std::string("[AppendPlan::run] ") + name + " must be rows of fp32, fp16 or bf16, got " +
      (rows.data == nullptr ? "no memory" : std::string(formats::traits(rows.format).name)));
}

void move(const StreamLayout& layout, const std::vector<Conversion>& conversions) {
  for (const Conversion& c : conversions) {
    layout.convert(c.from_level, c.from.data(), c.to_level, c.to.data(), c.n_tokens);
  }
}

void run_stream(const StreamPlan& plan, const kernels::SourceRows& rows) {
  const StreamLayout& layout = *plan.layout;
  move(layout, plan.copies);
  const formats::PageLayout& recent = layout.level(0).layout;
  const std::int64_t token_bytes = rows.token_stride * (formats::traits(rows.format).bits / 8);
  for (const AppendPlan::Piece& piece : plan.pieces) {
    kernels::SourceRows part = rows;
    part.data += piece.source_row * token_bytes;
    kernels::page_kernels().append_rows(recent, piece.page.data(), piece.first_slot, piece.count,
                                        part);
  }
  move(layout, plan.demotions);
}

void zero_stream(const StreamPlan& plan) {
  const std::vector<float> zeros(static_cast<std::size_t>(plan.layout->shape().head_dim));
  // One row for all heads and tokens.
  run_stream(plan,
             {reinterpret_cast<const std::byte*>(zeros.data()), formats::Format::kFp32, 0, 0});
}

}  // namespace

bool AppendPlan::moves_pages() const noexcept {
  return !keys_.copies.empty() || !values_.copies.empty() || !keys_.demotions.empty() ||
         !values_.demotions.empty();
}

void AppendPlan::run(const kernels::SourceRows& keys, const kernels::SourceRows& values) const {
  check_source("keys", keys);
  check_source("values", values);
  run_stream(keys_, keys);
  run_stream(values_, values);
}

void AppendPlan::run_without_rows() const {
  zero_stream(keys_);
  zero_stream(values_);
}

}  // namespace kvpool::cache
