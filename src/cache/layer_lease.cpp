#include "kvpool/cache/layer_lease.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvpool/base/error.h"
#include "kvpool/cache/lease_errors.h"

namespace kvpool::cache {
namespace {

// Layers copy at most so many tokens before they have to.
constexpr std::int64_t kMaxLead = 128;

void require_positive(const char* call, const char* name, std::int64_t value) {
  if (value >= 1) return;
  throw InvalidArgument("[LayerLease::" + std::string(call) + "] " + name + " must be >= 1, got " +
                        std::to_string(value));
}

}  // namespace

LayerLease::LayerLease(std::shared_ptr<LeaseGroup> group, const BufferGrowth& growth)
    : group_(std::move(group)) {
  auto layer = std::make_unique<LeaseGroup::Layer>(group_->pool_, group_->owner_, growth);
  const std::lock_guard lock(group_->mutex_);
  const auto place = static_cast<std::int64_t>(group_->layers_.size());
  layer->growth = growth.leading(place % kMaxLead);
  layer_ = group_->layers_.emplace_back(std::move(layer)).get();
}

LayerLease::~LayerLease() {
  const std::lock_guard lock(group_->mutex_);
  if (group_->writing_ == layer_) group_->writing_ = nullptr;
  std::erase_if(group_->layers_, [this](const auto& layer) { return layer.get() == layer_; });
  group_->close_step_if_complete();
}

BufferShape LayerLease::shape() const {
  const std::lock_guard lock(group_->mutex_);
  return layer_->now;
}

std::int64_t LayerLease::offset() const { return shape().offset; }

std::int64_t LayerLease::batch() const {
  const std::lock_guard lock(group_->mutex_);
  return layer_->lease.batch();
}

std::int64_t LayerLease::n_blocks() const {
  const std::lock_guard lock(group_->mutex_);
  return layer_->lease.n_blocks();
}

bool LayerLease::is_trimmable() const {
  const std::lock_guard lock(group_->mutex_);
  return layer_->growth.is_trimmable(layer_->now);
}

bool LayerLease::has_moved() const {
  const std::lock_guard lock(group_->mutex_);
  return layer_->moved;
}

bool LayerLease::is_torn() const {
  const std::lock_guard lock(group_->mutex_);
  return group_->torn_before(*layer_);
}

bool LayerLease::in_torn_step() const {
  const std::lock_guard lock(group_->mutex_);
  return group_->torn();
}

std::optional<BufferShape> LayerLease::append(std::int64_t batch, std::int64_t n_tokens) {
  require_positive("append", "batch", batch);
  require_positive("append", "n_tokens", n_tokens);
  const std::lock_guard lock(group_->mutex_);
  if (group_->torn_before(*layer_)) return std::nullopt;
  if (layer_->moved) group_->close_step();  // what has not moved since was left out
  const bool opens = !group_->in_step_;
  if (opens) {
    layer_->lease.verify();
    group_->plan_step(batch, n_tokens);
  }
  BufferShape next = layer_->growth.after(layer_->now, n_tokens, group_->halvings_);
  TokenLease& lease = layer_->lease;
  const std::int64_t pairs = lease.n_pairs();
  try {
    auto shortage = lease.try_resize(batch, next.rows);
    const BufferShape least = layer_->growth.after(layer_->now, n_tokens, BufferGrowth::kNoSpare);
    if (shortage && least != next) {
      next = least;
      shortage = lease.try_resize(batch, next.rows);
    }
    if (shortage) group_->throw_exhausted(*shortage, batch, n_tokens);
    lease.set_used(next.used());
  } catch (...) {
    if (opens) group_->close_step();
    throw;
  }
  if (opens) group_->open_step();
  group_->reservation_.note_taken(std::max<std::int64_t>(lease.n_pairs() - pairs, 0));
  layer_->before = std::exchange(layer_->now, next);
  layer_->moved = true;
  group_->writing_ = layer_;
  return next;
}

bool LayerLease::fits_tightened(std::int64_t batch, std::int64_t n_tokens) const {
  const std::lock_guard lock(group_->mutex_);
  return group_->has_room_for(group_->pairs_needed_tightened(batch, n_tokens));
}

std::int64_t LayerLease::tighten() {
  const std::lock_guard lock(group_->mutex_);
  const BufferShape next = layer_->growth.tightened(layer_->now);
  (void)layer_->lease.try_resize(layer_->lease.batch(), next.rows);
  layer_->now = next;
  return next.rows;
}

void LayerLease::commit() {
  const std::lock_guard lock(group_->mutex_);
  if (group_->writing_ == layer_) group_->writing_ = nullptr;
  group_->close_step_if_complete();
}

BufferShape LayerLease::undo(std::int64_t rows_in_buffer) {
  const std::lock_guard lock(group_->mutex_);
  if (!layer_->moved) return layer_->now;
  const BufferShape undone = layer_->growth.undone(layer_->before, layer_->now, rows_in_buffer,
                                                   group_->writing_ != layer_);
  // Not more than the step charged, so there is no shortage to hear of.
  (void)layer_->lease.try_resize(layer_->lease.batch(), undone.rows);
  layer_->lease.set_used(undone.used());
  layer_->now = layer_->before = undone;
  layer_->moved = false;
  if (group_->writing_ == layer_) group_->writing_ = nullptr;
  return undone;
}

std::int64_t LayerLease::trim(std::int64_t n_tokens) {
  if (n_tokens < 0) {
    throw InvalidArgument("[LayerLease::trim] n must be >= 0, got " + std::to_string(n_tokens));
  }
  const std::lock_guard lock(group_->mutex_);
  LeaseGroup& group = *group_;
  if (!layer_->growth.is_trimmable(layer_->now)) return 0;
  group.close_step();
  TrimRound& round = group.trim_round_;
  if (round.asked != n_tokens || layer_->trimmed) {
    round = {n_tokens, n_tokens};
    for (const auto& layer : group.layers_) {
      layer->trimmed = false;
      if (!layer->growth.is_trimmable(layer->now)) round.granted = 0;
      if (layer->now.offset > 0) round.granted = std::min(round.granted, layer->now.offset);
    }
  }
  const std::int64_t dropped = std::min(round.granted, layer_->now.offset);
  const std::int64_t block_size = group.pool_ == nullptr ? 1 : group.pool_->config().block_size;
  const BufferShape next = layer_->growth.trimmed(layer_->now, dropped, block_size);
  (void)layer_->lease.try_resize(layer_->lease.batch(), next.rows);
  layer_->lease.set_used(next.used());
  layer_->now = layer_->before = next;
  layer_->moved = false;
  layer_->trimmed = true;
  return dropped;
}

void LayerLease::replace(std::int64_t batch, const BufferShape& shape, const char* call) {
  const std::lock_guard lock(group_->mutex_);
  TokenLease& lease = layer_->lease;
  const std::int64_t pairs = lease.n_pairs();
  if (auto shortage = lease.try_resize(batch, shape.rows)) {
    throw StepExhausted(shortage->message(call), *shortage, 0);
  }
  lease.set_padding(0, {});
  lease.set_used(shape.used());
  group_->reservation_.note_taken(std::max<std::int64_t>(lease.n_pairs() - pairs, 0));
  layer_->now = layer_->before = shape;
  layer_->moved = false;
  if (group_->writing_ == layer_) group_->writing_ = nullptr;
}

void LayerLease::set_padding(std::int64_t first, std::vector<std::int64_t> counts) {
  const std::lock_guard lock(group_->mutex_);
  layer_->lease.set_padding(first, std::move(counts));
}

void LayerLease::set_formats(std::string_view keys, std::string_view values) {
  if (group_->pool_ == nullptr) return;
  const core::FormatTag key_tag = group_->pool_->intern_format(keys);
  const core::FormatTag value_tag = group_->pool_->intern_format(values);
  const std::lock_guard lock(group_->mutex_);
  layer_->lease.set_formats(key_tag, value_tag);
}

std::unique_ptr<LayerLease> LayerLease::supersede(const BufferGrowth& growth,
                                                  std::string_view format) {
  auto alone = std::make_shared<LeaseGroup>(group_->pool_, group_->owner_);
  alone->layers_.reserve(1);
  const std::shared_ptr<LeaseGroup> shared = group_;
  std::unique_ptr<LayerLease> heir(new LayerLease(shared, growth));
  const std::lock_guard lock(shared->mutex_);
  LeaseGroup::Layer& mine = *layer_;
  LeaseGroup::Layer& theirs = *heir->layer_;
  if (theirs.lease.try_resize(mine.lease.batch(), mine.lease.rows())) {
    theirs.lease = std::exchange(mine.lease, TokenLease(shared->pool_, shared->owner_));
    theirs.now = theirs.before = std::exchange(mine.now, {});
  } else {
    theirs.lease.set_used(mine.lease.used());
    theirs.now = theirs.before = mine.now;
  }
  if (shared->pool_ != nullptr) {
    const core::FormatTag tag = shared->pool_->intern_format(format);
    theirs.lease.set_formats(tag, tag);
  }
  theirs.moved = std::exchange(mine.moved, false);
  theirs.growth = growth.leading(mine.growth.lead());
  if (shared->writing_ == &mine) shared->writing_ = &theirs;
  auto& layers = shared->layers_;
  const auto place =
      std::ranges::find_if(layers, [&](auto& layer) { return layer.get() == &mine; });
  alone->layers_.push_back(std::move(*place));
  *place = std::move(layers.back());
  layers.pop_back();
  shared->close_step_if_complete();
  group_ = std::move(alone);
  return heir;
}

std::unique_ptr<LayerLease> LayerLease::copy_into(std::shared_ptr<LeaseGroup> group,
                                                  const char* call) const {
  LeaseGroup::Layer copied(nullptr, 0, layer_->growth);
  bool in_step = false;
  bool writing = false;
  std::int64_t batch = 0;
  core::FormatTag key_format{};
  core::FormatTag value_format{};
  std::int64_t padding_first = 0;
  std::vector<std::int64_t> padding;
  {
    const std::lock_guard lock(group_->mutex_);
    copied.now = layer_->now;
    copied.before = layer_->before;
    copied.moved = layer_->moved;
    writing = group_->writing_ == layer_;
    in_step = group_->in_step_;
    batch = layer_->lease.batch();
    key_format = layer_->lease.key_format();
    value_format = layer_->lease.value_format();
    padding_first = layer_->lease.padding_first();
    padding = layer_->lease.padding();
  }
  std::unique_ptr<LayerLease> copy(new LayerLease(std::move(group), copied.growth));
  copy->layer_->lease.set_formats(key_format, value_format);
  copy->replace(batch, copied.now, call);
  copy->set_padding(padding_first, std::move(padding));
  const std::lock_guard lock(copy->group_->mutex_);
  copy->layer_->before = copied.before;
  // A torn step stays torn in the copy, and is undone there when it is next used.
  copy->layer_->moved = in_step && copied.moved;
  if (writing) copy->group_->writing_ = copy->layer_;
  copy->group_->in_step_ = in_step;
  return copy;
}

}  // namespace kvpool::cache
