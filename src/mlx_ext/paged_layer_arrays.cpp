#include "kvpool/mlx_ext/paged_layer_arrays.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>
#include <mlx/utils.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "gpu.h"
#include "kvpool/base/error.h"
#include "kvpool/mlx_ext/backend.h"
#include "kvpool/mlx_ext/dtypes.h"
#include "kvpool/mlx_ext/graph.h"

namespace kvpool::mlx_ext {

using mlx::core::array;

namespace {

std::string text_of(const mlx::core::Shape& shape) {
  std::string text = "[";
  for (const auto dim : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  text += "]";
  return text;
}

/// Rows [1, heads, n + tokens, dim] whose first n are zeros.
array after_zeros(const array& rows, std::int64_t n, mlx::core::Stream stream) {
  if (n == 0) return rows;
  const array zeros = mlx::core::zeros({1, rows.shape(1), static_cast<int>(n), rows.shape(3)},
                                       rows.dtype(), stream);
  return mlx::core::concatenate({zeros, rows}, 2, stream);
}

/// Of a layer whose pages lie on a GPU; else null.
std::shared_ptr<cuda::PageTables> tables_for(const cache::PagedLayer& layer) {
  if (backend_of(*layer.group()->pool()) != Backend::kCuda) return nullptr;
  if (layer.key_layout()->has_codec() || layer.value_layout()->has_codec()) {
    throw InvalidArgument(
        "[PagedLayer] pages that a method encodes have no kernels on a GPU: make the pool's caches "
        "with backend=\"cpu\"");
  }
  return gpu::make_tables();
}

}  // namespace

PagedLayerArrays::Use::Use(PagedLayerArrays& layer, std::string_view call) : layer_(layer) {
  if (layer_.busy_.exchange(true, std::memory_order_acquire)) {
    throw InvalidArgument("[" + std::string(call) +
                          "] another thread is using this cache: a cache serves one at a time");
  }
}

PagedLayerArrays::PagedLayerArrays(const std::shared_ptr<cache::PagedGroup>& group,
                                   const cache::PagedLayerSpec& spec)
    : layer_(group->add_layer(spec)),
      tables_(tables_for(*layer_)),
      token_(false),
      key_dtype_(dtype_of(spec.keys.recent)),
      value_dtype_(dtype_of(spec.values.recent)) {}

PagedLayerArrays::PagedLayerArrays(std::unique_ptr<cache::PagedLayer> layer,
                                   const PagedLayerArrays& from)
    : layer_(std::move(layer)),
      tables_(tables_for(*layer_)),
      token_(from.token_),
      pending_(from.pending_),
      thread_(from.thread_),
      key_dtype_(from.key_dtype_),
      value_dtype_(from.value_dtype_),
      oldest_(from.oldest_),
      last_append_(from.last_append_) {}

PagedLayerArrays::~PagedLayerArrays() = default;

void PagedLayerArrays::check_rows(std::string_view call, const char* name, const array& rows,
                                  std::int64_t n_sequences, std::int64_t dim,
                                  std::int64_t n_tokens) const {
  const std::int64_t n_heads = layer_->spec().n_kv_heads;
  const std::string start = "[" + std::string(call) + "] " + name + " must ";
  if (rows.ndim() != 4 || rows.shape(0) != n_sequences || rows.shape(1) != n_heads ||
      rows.shape(2) != n_tokens || rows.shape(3) != dim || n_tokens < 1) {
    const std::string tokens = n_tokens < 1 ? ">= 1" : std::to_string(n_tokens);
    throw InvalidArgument(start + "be of shape [" + std::to_string(n_sequences) + ", " +
                          std::to_string(n_heads) + ", " + tokens + ", " + std::to_string(dim) +
                          "], got " + text_of(rows.shape()));
  }
  if (!format_of(rows.dtype())) {
    std::ostringstream dtype;
    dtype << rows.dtype();
    throw InvalidArgument(start + "be of float32, float16 or bfloat16, got " + dtype.str());
  }
}

void PagedLayerArrays::add_append(const std::shared_ptr<const cache::AppendPlan>& plan,
                                  const array& keys, const array& values, std::int64_t sequence) {
  auto append = std::make_shared<Append>(plan);
  array token({}, mlx::core::bool_, std::make_shared<AppendPages>(stream(), append, sequence),
              {token_, keys, values});
  pending_.push_back({std::move(append), token_, layer_->offset() - plan->n_tokens()});
  token_ = std::move(token);
  thread_ = thread_number();
  last_append_ = plan->n_tokens();
  key_dtype_ = keys.dtype();
  value_dtype_ = values.dtype();
}

std::pair<array, array> PagedLayerArrays::update_and_fetch(const array& keys, const array& values) {
  append(keys, values, 1, 0, keys.ndim() == 4 ? keys.shape(2) : 0);
  const Use use(*this, "PagedLayer::update_and_fetch");
  return gathered();
}

void PagedLayerArrays::append(const array& keys, const array& values, std::int64_t n_sequences,
                              std::int64_t sequence, std::int64_t n_tokens) {
  constexpr std::string_view kCall = "PagedLayer::update_and_fetch";
  const Use use(*this, kCall);
  const std::int64_t n_columns = keys.ndim() == 4 ? keys.shape(2) : 0;
  check_rows(kCall, "keys", keys, n_sequences, layer_->spec().key_dim, n_columns);
  check_rows(kCall, "values", values, n_sequences, layer_->spec().value_dim, n_columns);
  if (n_tokens < 1 || n_tokens > n_columns) {
    throw InvalidArgument("[" + std::string(kCall) + "] tokens to append must be from 1 to " +
                          std::to_string(n_columns) + ", got " + std::to_string(n_tokens));
  }
  refuse_tracing(kCall);
  settle();
  forget_scheduled();
  const auto plan = layer_->append(n_tokens);
  if (layer_->offset() == n_tokens) oldest_ = 0;  // the group was released since
  try {
    add_append(plan, keys, values, sequence);
  } catch (...) {
    layer_->roll_back(n_tokens);
    throw;
  }
}

std::optional<std::pair<array, array>> PagedLayerArrays::fetch() {
  const Use use(*this, "PagedLayer::keys_and_values");
  settle();
  if (layer_->offset() == 0) return std::nullopt;
  return gathered();
}

void PagedLayerArrays::load(const array& keys, const array& values, std::int64_t offset) {
  constexpr std::string_view kCall = "PagedLayer::adopt";
  const Use use(*this, kCall);
  const std::int64_t n_tokens = keys.ndim() == 4 ? keys.shape(2) : 0;
  check_rows(kCall, "keys", keys, 1, layer_->spec().key_dim, n_tokens);
  check_rows(kCall, "values", values, 1, layer_->spec().value_dim, n_tokens);
  if (offset < n_tokens) {
    throw InvalidArgument("[PagedLayer::adopt] offset must be >= the " + std::to_string(n_tokens) +
                          " tokens of keys, got " + std::to_string(offset));
  }
  const std::int64_t oldest = offset - n_tokens;
  const std::int64_t window = layer_->spec().window;
  if (oldest > 0 && window == 0) {
    throw InvalidArgument("[PagedLayer::adopt] offset must be the " + std::to_string(n_tokens) +
                          " tokens of keys without a window, got " + std::to_string(offset));
  }
  if (oldest > 0 && n_tokens < window - 1) {
    throw InvalidArgument("[PagedLayer::adopt] keys must have the " + std::to_string(window - 1) +
                          " tokens before offset " + std::to_string(offset) +
                          " that the next query sees, got " + std::to_string(n_tokens));
  }
  refuse_tracing(kCall);
  const std::int64_t block_size = layer_->key_layout()->shape().block_size;
  const std::int64_t n_before = oldest % block_size;
  try {
    const auto plan = layer_->adopt(oldest - n_before, n_before + n_tokens);
    start_anew();
    add_append(plan, after_zeros(keys, n_before, stream()), after_zeros(values, n_before, stream()),
               0);
  } catch (const InvalidArgument&) {
    throw;
  } catch (...) {
    layer_->reset();
    start_anew();
    throw;
  }
  oldest_ = oldest;
  last_append_ = n_tokens;
}

void PagedLayerArrays::start_anew() {
  pending_.clear();
  token_ = array(false);
  // Nothing orders what follows behind readers of the tokens before: those keep their tables.
  tables_ = tables_for(*layer_);
  oldest_ = 0;
}

std::int64_t PagedLayerArrays::offset() {
  const Use use(*this, "PagedLayer::offset");
  settle();
  return layer_->offset();
}

std::int64_t PagedLayerArrays::count_rows() const {
  const std::int64_t window = layer_->spec().window;
  if (window == 0) return layer_->length();
  const std::int64_t there = std::min(layer_->length(), layer_->offset() - oldest_);
  return std::clamp<std::int64_t>(there, 0, window - 1 + last_append_);
}

std::int64_t PagedLayerArrays::n_rows() {
  const Use use(*this, "PagedLayer::n_rows");
  settle();
  return count_rows();
}

std::int64_t PagedLayerArrays::trim(std::int64_t n_tokens) {
  const Use use(*this, "PagedLayer::trim");
  settle();
  return layer_->trim(n_tokens);
}

void PagedLayerArrays::roll_back(std::int64_t n_tokens) {
  const Use use(*this, "PagedLayer::roll_back");
  settle();
  layer_->roll_back(n_tokens);
}

void PagedLayerArrays::reset() {
  const Use use(*this, "PagedLayer::reset");
  layer_->reset();
  start_anew();
}

std::unique_ptr<PagedLayerArrays> PagedLayerArrays::fork(
    const std::shared_ptr<cache::PagedGroup>& group) {
  const Use use(*this, "PagedLayer::fork");
  settle();
  return std::unique_ptr<PagedLayerArrays>(new PagedLayerArrays(layer_->fork(group), *this));
}

array PagedLayerArrays::order_token() {
  const Use use(*this, "PagedLayer::order");
  settle();
  return token_;
}

VisibleRows PagedLayerArrays::visible_rows() const {
  return {layer_->group()->pool(), layer_->view(), count_rows(), tables_};
}

std::pair<VisibleRows, array> PagedLayerArrays::visible(std::string_view call) {
  const Use use(*this, call);
  settle();
  if (layer_->offset() == 0) {
    throw InvalidArgument("[" + std::string(call) + "] the layers must hold tokens, one is empty");
  }
  return {visible_rows(), token_};
}

std::pair<array, array> PagedLayerArrays::gathered() const {
  const auto batch = std::make_shared<const VisibleBatch>(VisibleBatch{visible_rows()});
  return {gather_pages(batch, Which::kKeys, {token_}, key_dtype_),
          gather_pages(batch, Which::kValues, {token_}, value_dtype_)};
}

bool PagedLayerArrays::has_left_behind() const noexcept {
  return !pending_.empty() && thread_ != thread_number() && !pending_.back().append->is_scheduled();
}

void PagedLayerArrays::catch_up() {
  const Use use(*this, "PagedLayer");
  settle();
}

bool PagedLayerArrays::await_blocks() const {
  const cache::PagedPool& pool = *layer_->group()->pool();
  const auto in_use = [&pool] {
    return std::pair{pool.allocator()->stats().blocks_in_use(), pool.store().stats().used_bytes};
  };
  const auto before = in_use();
  mlx::core::synchronize(stream());
  const auto after = in_use();
  return after.first < before.first || after.second < before.second;
}

void PagedLayerArrays::settle() {
  if (!has_left_behind()) return;
  try {
    mlx::core::eval({token_});
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The stream, or the numbers, are another thread's.
  }
  forget_scheduled();
  if (!pending_.empty()) withdraw_pending();
}

void PagedLayerArrays::forget_scheduled() {
  const auto first = std::find_if(pending_.begin(), pending_.end(), [](const Pending& pending) {
    return !pending.append->is_scheduled();
  });
  pending_.erase(pending_.begin(), first);
}

void PagedLayerArrays::withdraw_pending() {
  // Appends are scheduled in order, so from the first that is not on none is.
  std::int64_t start = layer_->offset();
  array token = pending_.front().before;
  for (const Pending& pending : pending_) {
    if (!pending.append->withdraw()) continue;
    start = std::min(start, pending.start);
    if (pending.append->plan()->moves_pages()) {
      token = array({}, mlx::core::bool_, std::make_shared<SkipAppend>(stream(), pending.append),
                    {token});
    }
  }
  pending_.clear();
  token_ = std::move(token);
  const std::int64_t n_tokens = layer_->offset() - start;
  if (n_tokens == 0) return;
  if (n_tokens > layer_->most_to_roll_back()) {
    // All layers go, so that those without a window do not go on alone.
    layer_->release();
    oldest_ = 0;
    throw Error("[PagedLayer] " + std::to_string(n_tokens) +
                " tokens were appended in a thread that ended before it evaluated them, and the "
                "window has given back what came before: the caches of this request are empty now");
  }
  layer_->roll_back(n_tokens);
  if (oldest_ == 0 || layer_->offset() > oldest_) return;
  layer_->reset();  // what was adopted is gone, and with it the position that it had
  oldest_ = 0;
}

std::pair<array, array> fetch_batch(const std::vector<PagedLayerArrays*>& layers) {
  constexpr std::string_view kCall = "fetch_batch";
  if (layers.empty()) throw InvalidArgument("[fetch_batch] layers must not be empty");
  VisibleBatch batch;
  std::vector<array> tokens;
  for (PagedLayerArrays* layer : layers) {
    if (layer->layer().key_layout()->shape() != layers.front()->layer().key_layout()->shape() ||
        layer->layer().value_layout()->shape() != layers.front()->layer().value_layout()->shape()) {
      throw InvalidArgument("[fetch_batch] layers must have the same heads, dims and block size");
    }
    auto [rows, token] = layer->visible(kCall);
    batch.push_back(std::move(rows));
    tokens.push_back(std::move(token));
  }
  const auto shared = std::make_shared<const VisibleBatch>(std::move(batch));
  return {gather_pages(shared, Which::kKeys, tokens, layers.front()->key_dtype()),
          gather_pages(shared, Which::kValues, tokens, layers.front()->value_dtype())};
}

}  // namespace kvpool::mlx_ext
