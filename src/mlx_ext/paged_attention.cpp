#include "kvpool/mlx_ext/paged_attention.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/ops.h>

#include <algorithm>
#include <utility>

#include "attention_work.h"
#include "gpu.h"
#include "kvpool/mlx_ext/backend.h"
#include "kvpool/mlx_ext/dtypes.h"
#include "kvpool/mlx_ext/padding_mask.h"

namespace kvpool::mlx_ext {

using mlx::core::array;

namespace {

bool broadcasts(const array& mask, const std::array<int, 4>& to) {
  if (mask.ndim() > 4) return false;
  const std::size_t missing = 4 - mask.ndim();
  for (std::size_t i = 0; i < mask.ndim(); ++i) {
    if (mask.shape()[i] != 1 && mask.shape()[i] != to[missing + i]) return false;
  }
  return true;
}

bool any_hidden(const VisibleBatch& batch) {
  return std::any_of(batch.begin(), batch.end(),
                     [](const VisibleRows& rows) { return rows.hidden() > 0; });
}

/// Why the kernels do not answer; empty where they do.
std::string_view why_not(const array& queries, const array& keys, const array& values,
                         const GatherPages& from, Which value_stream, std::string_view mask,
                         const std::optional<array>& mask_array,
                         const std::optional<array>& sinks) {
  const Backend backend = backend_of(*from.batch()->front().pool);
  if (backend == Backend::kGather) return "no kernels that read pages on this device";
  if (page_stream(*from.batch()->front().pool).device != mlx::core::default_device()) {
    return "pages of another device than MLX's default";
  }
  if (queries.is_tracer()) return "inside a transformation";
  if (queries.ndim() != 4 || queries.shape(0) != keys.shape(0) ||
      queries.shape(3) != keys.shape(3) || keys.shape(1) != values.shape(1) ||
      queries.shape(1) % keys.shape(1) != 0 || queries.size() == 0) {
    return "shapes that do not fit";
  }
  const bool one_query = queries.shape(2) == 1;
  // An array says who sees what; without one queries have positions, the last the last token's.
  if (!mask_array && std::any_of(from.batch()->begin(), from.batch()->end(), [&](const auto& rows) {
        return rows.n_rows < queries.shape(2);
      })) {
    return "more queries than tokens";
  }
  if (!mask.empty() && mask != "causal") return "an unknown mask";
  if (!mask.empty() && mask_array) return "two masks";
  if (mask_array) {
    if (mask_array->dtype() != mlx::core::bool_ && !format_of(mask_array->dtype())) {
      return "a mask that is neither boolean nor of floats";
    }
    if (!broadcasts(*mask_array,
                    {queries.shape(0), queries.shape(1), queries.shape(2), keys.shape(2)})) {
      return "a mask that does not fit";
    }
  } else if (!one_query && any_hidden(*from.batch())) {
    return "a window without its mask";
  }
  if (sinks && (sinks->ndim() != 1 || sinks->shape(0) != queries.shape(1))) {
    return "sinks that do not fit";
  }
  if (!format_of(mlx::core::result_type({queries, keys, values})))
    return "numbers of another dtype";
  if (backend == Backend::kCuda) {
    return gpu::why_not(*from.batch(), from.which(), value_stream, queries.shape(2),
                        mask_array.has_value());
  }
  return {};
}

/// Each query of a chunk as a sequence of its own, query after query. Under a causal mask each sees
/// one token more than the query before it.
std::shared_ptr<const VisibleBatch> sequence_a_query(const VisibleBatch& batch,
                                                     std::int64_t n_queries, bool causal) {
  auto folded = std::make_shared<VisibleBatch>();
  for (const VisibleRows& rows : batch) {
    for (std::int64_t after = n_queries - 1; after >= 0; --after) {
      folded->push_back(rows);
      if (!causal) continue;
      folded->back().n_after = after;
      folded->back().n_rows -= after;
    }
  }
  return folded;
}

}  // namespace

void PagedAttention::eval_cpu(const std::vector<array>& inputs, array& output) {
  auto& encoder = mlx::core::cpu::get_command_encoder(stream());
  output.set_data(mlx::core::allocator::malloc(output.nbytes()));
  encoder.dispatch(
      [work = AttentionWork(batch_, options_, inputs, output)]() mutable { work.run(); });
}

Attended attend(const array& queries, const array& keys, const array& values, float scale,
                std::string_view mask, const std::optional<array>& mask_given,
                const std::optional<array>& sinks) {
  const GatherPages* from = gathered_from(keys);
  const GatherPages* values_from = gathered_from(values);
  if (from == nullptr && values_from == nullptr) return NotPaged{};
  if (from == nullptr || values_from == nullptr || from->batch() != values_from->batch()) {
    return NotCovered{"keys and values from different places"};
  }
  // Pages have no padding.
  const bool padding_alone = mask_given && mask.empty() && queries.ndim() == 4 &&
                             queries.shape(2) == 1 &&
                             hides_padding_alone(*mask_given, *from->batch());
  const std::optional<array> mask_array = padding_alone ? std::nullopt : mask_given;
  const std::string_view reason =
      why_not(queries, keys, values, *from, values_from->which(), mask, mask_array, sinks);
  if (!reason.empty()) return NotCovered{reason};

  PagedAttention::Options options;
  options.keys = from->which();
  options.values = values_from->which();
  options.scale = scale;
  options.causal = mask == "causal" && queries.shape(2) > 1;
  options.has_mask = mask_array.has_value();
  options.has_sinks = sinks.has_value();
  const mlx::core::Stream stream = page_stream(*from->batch()->front().pool);
  const mlx::core::Dtype dtype = mlx::core::result_type({queries, keys, values});
  const std::vector<array>& tokens = keys.inputs();  // that order who reads and writes the pages
  std::vector<array> inputs = tokens;
  array given = mlx::core::astype(queries, dtype, stream);
  std::shared_ptr<const VisibleBatch> batch = from->batch();
  const int n_queries = queries.shape(2);
  const bool folds = n_queries > 1 && backend_of(*batch->front().pool) == Backend::kCuda;
  if (folds) {
    batch = sequence_a_query(*batch, n_queries, options.causal);
    options.causal = false;
    inputs.clear();
    for (const array& token : tokens) inputs.insert(inputs.end(), n_queries, token);
    given = mlx::core::reshape(mlx::core::transpose(given, {0, 2, 1, 3}, stream),
                               {-1, queries.shape(1), 1, queries.shape(3)}, stream);
  }
  inputs.push_back(given);
  if (mask_array) inputs.push_back(*mask_array);
  if (sinks) inputs.push_back(mlx::core::astype(*sinks, mlx::core::float32, stream));
  const int value_dim = values.shape(3);
  array answer({given.shape(0), given.shape(1), given.shape(2), value_dim}, dtype,
               std::make_shared<PagedAttention>(stream, batch, options), std::move(inputs));
  if (!folds) return answer;
  answer = mlx::core::reshape(answer, {queries.shape(0), n_queries, queries.shape(1), value_dim},
                              stream);
  return mlx::core::transpose(answer, {0, 2, 1, 3}, stream);
}

}  // namespace kvpool::mlx_ext
