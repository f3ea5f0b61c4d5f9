#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "kvpool/cache/buffer_growth.h"
#include "kvpool/cache/lease_group.h"

namespace kvpool::cache {

/// One layer of a LeaseGroup, for as long as its cache lives: the destructor takes the layer out of
/// the group and gives its blocks back, in whatever thread, and leaves the other layers alone.
class LayerLease {
 public:
  /// A new layer behind those that the group has.
  LayerLease(std::shared_ptr<LeaseGroup> group, const BufferGrowth& growth);
  ~LayerLease();
  LayerLease(const LayerLease&) = delete;
  LayerLease& operator=(const LayerLease&) = delete;

  const std::shared_ptr<LeaseGroup>& group() const noexcept { return group_; }
  BufferShape shape() const;
  std::int64_t offset() const;
  std::int64_t batch() const;
  /// Blocks held, keys and values together.
  std::int64_t n_blocks() const;
  bool is_trimmable() const;

  /// Moves the layer by `n_tokens` (>= 1) for `batch` (>= 1) sequences and charges the buffers that
  /// take them, whose shape it returns. Nothing where the step under way turns out to be torn: undo
  /// it first. Throws StepExhausted (no layer has moved where it is the step's first) and
  /// LeaseLost.
  std::optional<BufferShape> append(std::int64_t batch, std::int64_t n_tokens);
  /// Whether append would find room after every layer of the group was tightened.
  bool fits_tightened(std::int64_t batch, std::int64_t n_tokens) const;
  /// Gives spare rows back and returns the rows that the buffers are to be cut to.
  std::int64_t tighten();
  /// The buffers have the shape that append returned, with the tokens in them.
  void commit();
  /// undo() would take a step back: nothing but appends to other layers came since this one's.
  bool has_moved() const;
  /// A step is under way that append would find torn.
  bool is_torn() const;
  /// A step is under way and torn, whether or not this layer has moved.
  bool in_torn_step() const;
  /// Takes back the step under way, or the last one where nothing came since; see
  /// BufferGrowth::undone. Returns the shape that the buffers, now `rows_in_buffer` long, are to be
  /// cut to.
  BufferShape undo(std::int64_t rows_in_buffer);

  /// Drops up to `n_tokens` (>= 0) of the newest tokens and returns how many: as many as the
  /// shortest layer that holds any can, where the other layers are trimmed by the same amount. 0
  /// for a ring that has wrapped.
  std::int64_t trim(std::int64_t n_tokens);
  /// Charges buffers that were put in place from outside; none of their rows is padding. `batch` 0:
  /// no blocks, though the buffers stay (the next append charges them). Throws StepExhausted, whose
  /// message starts with `call`, and LeaseLost; then nothing has changed.
  void replace(std::int64_t batch, const BufferShape& shape,
               const char* call = "LayerLease::replace");
  /// Counts rows of the buffers as held but unused; see TokenLease::set_padding.
  void set_padding(std::int64_t first, std::vector<std::int64_t> counts);
  /// Names the format of the layer's blocks.
  void set_formats(std::string_view keys, std::string_view values);

  /// A new layer of the same shape that takes this one's place in the group, charged on its own.
  /// This one becomes a group of its own; where the pool is too full for both, it gives its blocks
  /// to the new one and is empty.
  std::unique_ptr<LayerLease> supersede(const BufferGrowth& growth, std::string_view format);
  /// A copy of the layer at the end of `group`, charged there. Throws StepExhausted, with `call` at
  /// the start of its message.
  std::unique_ptr<LayerLease> copy_into(std::shared_ptr<LeaseGroup> group,
                                        const char* call = "LayerLease::copy_into") const;

 private:
  LayerLease(std::shared_ptr<LeaseGroup> group, LeaseGroup::Layer* layer) noexcept
      : group_(std::move(group)), layer_(layer) {}

  std::shared_ptr<LeaseGroup> group_;
  LeaseGroup::Layer* layer_;  // the group's, as long as this lives
};

}  // namespace kvpool::cache
