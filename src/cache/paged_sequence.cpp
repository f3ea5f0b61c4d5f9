#include "kvpool/cache/paged_sequence.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cache/attend_pages.h"
#include "kvpool/kernels/paged_attention.h"

namespace kvpool::cache {

namespace {

[[noreturn]] void refuse(const char* call, const std::string& what) {
  throw InvalidArgument(std::string("[PagedSequence::") + call + "] " + what);
}

template <class Byte>
void check_rows(const char* call, const char* name, const kernels::HeadRows<Byte>& rows) {
  if (rows.data == nullptr) refuse(call, std::string(name) + " must not be null");
  const formats::FormatTraits& traits = formats::traits(rows.format);
  if (traits.kind != formats::Kind::kFloat) {
    refuse(call,
           std::string(name) + " must be fp32, fp16 or bf16, got " + std::string(traits.name));
  }
}

std::vector<PagedLayerSpec> repeated(const PagedLayerSpec& spec, std::int64_t n_layers) {
  if (n_layers < 1) {
    throw InvalidArgument("[PagedSequence] n_layers must be >= 1, got " + std::to_string(n_layers));
  }
  return std::vector<PagedLayerSpec>(static_cast<std::size_t>(n_layers), spec);
}

}  // namespace

PagedSequence::PagedSequence(std::shared_ptr<PagedPool> pool, OwnerId owner,
                             const PagedLayerSpec& spec, std::int64_t n_layers)
    : PagedSequence(std::move(pool), owner, repeated(spec, n_layers)) {}

PagedSequence::PagedSequence(std::shared_ptr<PagedPool> pool, OwnerId owner,
                             const std::vector<PagedLayerSpec>& specs) {
  if (specs.empty()) throw InvalidArgument("[PagedSequence] specs must not be empty");
  const auto group = std::make_shared<PagedGroup>(std::move(pool), owner);
  layers_.reserve(specs.size());
  for (const PagedLayerSpec& spec : specs) layers_.push_back(group->add_layer(spec));
}

PagedLayer& PagedSequence::layer(std::int64_t index) const {
  if (index < 0 || index >= n_layers()) {
    refuse("layer", "index must be in 0.." + std::to_string(n_layers() - 1) + ", got " +
                        std::to_string(index));
  }
  return *layers_[static_cast<std::size_t>(index)];
}

void PagedSequence::append(std::int64_t layer_index, std::int64_t n_tokens,
                           const kernels::SourceRows& keys, const kernels::SourceRows& values) {
  check_rows("append", "keys", keys);
  check_rows("append", "values", values);
  PagedLayer& target = layer(layer_index);
  const auto plan = target.append(n_tokens);
  try {
    plan->run(keys, values);
  } catch (...) {  // no memory to move a codec's page
    target.roll_back(n_tokens);
    throw;
  }
}

void PagedSequence::attend(std::int64_t layer_index, std::int64_t n_q_heads, std::int64_t n_queries,
                           const kernels::SourceRows& queries, const kernels::TargetRows& output,
                           const AttendOptions& options) {
  constexpr const char* kCall = "attend";
  check_rows(kCall, "queries", queries);
  check_rows(kCall, "output", output);
  const PagedLayer& source = layer(layer_index);
  const PagedLayerSpec& spec = source.spec();
  if (output.format != queries.format) refuse(kCall, "output must have the queries' format");
  if (n_q_heads < 1 || n_q_heads % spec.n_kv_heads != 0) {
    refuse(kCall, "n_q_heads must be a multiple of the " + std::to_string(spec.n_kv_heads) +
                      " kv heads, got " + std::to_string(n_q_heads));
  }
  const auto view = source.view();
  if (n_queries < 1 || n_queries > view->length()) {
    refuse(kCall, "n_queries must be in 1.." + std::to_string(view->length()) + ", got " +
                      std::to_string(n_queries));
  }
  const std::int32_t indptr[2] = {0, static_cast<std::int32_t>(view->n_pages())};
  const auto last_page_len = static_cast<std::int32_t>(view->last_page_len());
  kernels::PagedAttentionParams params;
  params.queries = queries.data;
  params.query_format = queries.format;
  params.q_strides[1] = queries.head_stride;
  params.q_strides[2] = queries.token_stride;
  const StreamLayout& key_layout = *view->keys().layout;
  const StreamLayout& value_layout = *view->values().layout;
  params.keys = {view->keys().pages.data(), view->n_pages(), key_layout.shape()};
  params.values = {view->values().pages.data(), view->n_pages(), value_layout.shape()};
  params.batch = 1;
  params.n_q_heads = n_q_heads;
  params.n_queries = n_queries;
  params.indptr = indptr;
  params.last_page_len = &last_page_len;
  params.scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(spec.key_dim)));
  params.causal = options.causal;
  params.window = options.causal ? spec.window : 0;
  params.sinks = options.sinks;
  params.output = output.data;
  params.out_strides[1] = output.head_stride;
  params.out_strides[2] = output.token_stride;
  kernels::WorkerPool* const workers = source.group()->pool()->workers();
  const std::size_t needed = attend_pages_scratch_bytes(
      params, key_layout, value_layout, workers == nullptr ? 1 : workers->n_threads());
  // Lengths rise step by step: by half again, so that few steps allocate.
  if (scratch_.size() < needed) scratch_ = AlignedBuffer(needed + needed / 2);
  attend_pages(params, key_layout, value_layout, scratch_.data(), workers);
}

std::int64_t PagedSequence::trim(std::int64_t n_tokens) {
  std::int64_t dropped = 0;
  for (const auto& layer : layers_) dropped = std::max(dropped, layer->trim(n_tokens));
  return dropped;
}

PagedSequence PagedSequence::fork(std::optional<OwnerId> owner) const {
  return PagedSequence(group().fork(owner));
}

}  // namespace kvpool::cache
