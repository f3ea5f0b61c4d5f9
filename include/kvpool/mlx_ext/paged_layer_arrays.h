#pragma once

#include <mlx/array.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/cache/paged_layer.h"
#include "kvpool/mlx_ext/append_pages.h"
#include "kvpool/mlx_ext/backend.h"
#include "kvpool/mlx_ext/gather_pages.h"

namespace kvpool::mlx_ext {

/// A PagedLayer for MLX: appends are nodes of MLX's graph, and readers come after them.
///
/// The books move when a method is called, the bytes when MLX evaluates. Every array that is handed
/// out keeps the blocks it reads, whatever happens to the cache meanwhile (see cache::PageView).
///
/// An order token stands for "all appends so far have run". Each append takes the token before it
/// and makes the next one, so appends run in order in whatever stream they are evaluated.
///
/// A stream belongs to a thread. Where a thread built appends, did not evaluate them and another
/// one goes on with the cache, the appends are evaluated if they can be; else the tokens are taken
/// back, and an evaluation that reaches them later fails. Where that takes more than a window has
/// kept, every layer of the group is emptied, and the call that finds out throws Error.
///
/// Not synchronised, like every cache of a model: one thread at a time, or InvalidArgument.
class PagedLayerArrays {
 public:
  using array = mlx::core::array;

  /// An empty layer at the end of `group`. Throws what PagedGroup::add_layer throws.
  PagedLayerArrays(const std::shared_ptr<cache::PagedGroup>& group,
                   const cache::PagedLayerSpec& spec);
  ~PagedLayerArrays();
  PagedLayerArrays(const PagedLayerArrays&) = delete;
  PagedLayerArrays& operator=(const PagedLayerArrays&) = delete;

  const cache::PagedLayer& layer() const noexcept { return *layer_; }

  /// Appends keys [1, heads, tokens, key_dim] and values, of fp32, fp16 or bf16 numbers, and
  /// returns what a query is to see, in the dtypes given: all tokens, or those that the window
  /// leaves the first of the new ones, oldest first. The arrays are gathered when they are
  /// evaluated. Throws InvalidArgument for other shapes and inside mx.compile and mx.grad, and
  /// what PagedLayer::append throws; then nothing has changed.
  std::pair<array, array> update_and_fetch(const array& keys, const array& values);
  /// Appends the first `n_tokens` of one of keys [n_sequences, heads, tokens, key_dim] and values:
  /// nothing is cut out of the batch that a model makes. Throws as update_and_fetch does.
  void append(const array& keys, const array& values, std::int64_t n_sequences,
              std::int64_t sequence, std::int64_t n_tokens);
  /// What the last update_and_fetch returned, or would return now; nothing where empty.
  std::optional<std::pair<array, array>> fetch();
  /// Puts `keys` and `values` in place of what is held: PagedLayer::adopt. `offset` is the position
  /// after the last of them, above their number for what a window left of a longer sequence: at
  /// least what the next query sees of it.
  /// Throws as update_and_fetch, before anything changes, and StepExhausted, after which the layer
  /// is empty.
  void load(const array& keys, const array& values, std::int64_t offset);

  std::int64_t offset();
  /// Rows that fetch() returns.
  std::int64_t n_rows();
  /// Drops the newest tokens and returns how many: PagedLayer::trim.
  std::int64_t trim(std::int64_t n_tokens);
  /// Takes the newest tokens of this layer alone back: PagedLayer::roll_back.
  void roll_back(std::int64_t n_tokens);
  void reset();
  /// A copy at the end of `group`, whose appends come after those of this layer.
  std::unique_ptr<PagedLayerArrays> fork(const std::shared_ptr<cache::PagedGroup>& group);

  /// Evaluating it runs the appends so far and gathers nothing.
  array order_token();

  /// What a batch of readers takes: the tokens to see, and what they come after.
  std::pair<VisibleRows, array> visible(std::string_view call);

  mlx::core::Dtype key_dtype() const noexcept { return key_dtype_; }
  mlx::core::Dtype value_dtype() const noexcept { return value_dtype_; }

  /// Another thread left appends behind: the next use takes as long as their evaluation.
  bool has_left_behind() const noexcept;
  /// Deals with them.
  void catch_up();

  /// Waits for what this thread has put on its way, and says whether blocks or bytes came back
  /// meanwhile: readers keep theirs until they have run, and a demotion the larger page.
  bool await_blocks() const;

 private:
  /// An append that may not have been evaluated yet.
  struct Pending {
    std::shared_ptr<Append> append;
    array before;
    std::int64_t start;  // the layer's offset then
  };
  /// Refuses a second thread inside.
  class Use {
   public:
    Use(PagedLayerArrays& layer, std::string_view call);
    ~Use() { layer_.busy_.store(false, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    PagedLayerArrays& layer_;
  };

  PagedLayerArrays(std::unique_ptr<cache::PagedLayer> layer, const PagedLayerArrays& from);

  void check_rows(std::string_view call, const char* name, const array& rows,
                  std::int64_t n_sequences, std::int64_t dim, std::int64_t n_tokens) const;
  void add_append(const std::shared_ptr<const cache::AppendPlan>& plan, const array& keys,
                  const array& values, std::int64_t sequence);
  void start_anew();
  VisibleRows visible_rows() const;
  mlx::core::Stream stream() const { return page_stream(*layer_->group()->pool()); }
  std::int64_t count_rows() const;
  std::pair<array, array> gathered() const;
  void settle();
  void forget_scheduled();
  void withdraw_pending();

  std::unique_ptr<cache::PagedLayer> layer_;
  std::shared_ptr<cuda::PageTables> tables_;
  array token_;
  std::vector<Pending> pending_;
  std::uint64_t thread_ = 0;  // that built the pending appends
  mlx::core::Dtype key_dtype_;
  mlx::core::Dtype value_dtype_;
  std::int64_t last_append_ = 1;
  std::int64_t oldest_ = 0;  // position of the first token that was ever there
  std::atomic<bool> busy_{false};
};

/// Keys and values of a ragged batch, one layer a sequence, [batch, heads, rows, dim]; shorter
/// sequences are padded with zeros on their left. Throws InvalidArgument where a layer is empty and
/// where shapes differ.
std::pair<mlx::core::array, mlx::core::array> fetch_batch(
    const std::vector<PagedLayerArrays*>& layers);

}  // namespace kvpool::mlx_ext
