// Blocks off the free lists.
#include "pool_state.h"

namespace kvpool::core {

namespace {

void check_size(const char* call, const char* argument, std::size_t size, std::int64_t needed) {
  if (size != static_cast<std::size_t>(needed)) {
    throw InvalidArgument(in_call(call) + argument + " must hold " + std::to_string(needed) +
                          " handles, got " + std::to_string(size));
  }
}

constexpr const char* kAllocate = "BlockPoolAllocator::allocate";
constexpr const char* kAllocateKv = "BlockPoolAllocator::allocate_kv";

}  // namespace

BlockPoolAllocator::State::Runs BlockPoolAllocator::State::check_runs(const char* call,
                                                                      std::int64_t n_tokens,
                                                                      std::int64_t copies) const {
  const auto refuse = [&](const char* what, std::int64_t got) {
    throw InvalidArgument(in_call(call) + what + " must be > 0, got " + std::to_string(got));
  };
  if (n_tokens <= 0) refuse("n_tokens", n_tokens);
  if (copies <= 0) refuse("copies", copies);
  Runs runs;
  runs.copies = copies;
  const std::int64_t last = n_tokens - 1;
  if (last >> 32 == 0) {  // a 32-bit division takes half the time
    const auto small = static_cast<std::uint32_t>(last);
    runs.length = std::int64_t{small / block_size} + 1;
    runs.last_used = small % block_size + 1;
  } else {
    runs.length = last / block_size + 1;
    runs.last_used = static_cast<std::uint32_t>(last % block_size + 1);
  }
  if (__builtin_mul_overflow(runs.length, copies, &runs.total)) {
    runs.total = std::numeric_limits<std::int64_t>::max();
  }
  // Two streams' needs are added up.
  runs.total = std::min(runs.total, std::numeric_limits<std::int64_t>::max() / 2);
  return runs;
}

std::optional<Shortage> BlockPoolAllocator::try_allocate(Stream stream, std::int64_t n_tokens,
                                                         OwnerId owner, FormatTag format,
                                                         std::span<BlockHandle> out,
                                                         std::int64_t copies) {
  State& state = *state_;
  const State::Runs runs = state.check_runs(kAllocate, n_tokens, copies);
  const int list = state.list_of(kAllocate, stream);
  check_size(kAllocate, "out", out.size(), runs.total);
  std::lock_guard guard(state.lock);
  state.check_owner(kAllocate, "owner", owner);
  state.check_format(kAllocate, format);
  State::Demand wanted;
  wanted.blocks[list] = runs.total;
  std::uint32_t slot = kNoOwner;
  if (auto shortage = state.obtain(owner, wanted, slot)) return shortage;
  state.take_runs(list, slot, format, runs, out);
  state.note_peak();
  state.history.add(state.stats);
  return std::nullopt;
}

std::optional<Shortage> BlockPoolAllocator::try_allocate_kv(
    std::int64_t n_tokens, OwnerId owner, FormatTag key_format, FormatTag value_format,
    std::span<BlockHandle> keys, std::span<BlockHandle> values, std::int64_t copies) {
  State& state = *state_;
  const State::Runs runs = state.check_runs(kAllocateKv, n_tokens, copies);
  check_size(kAllocateKv, "keys", keys.size(), runs.total);
  check_size(kAllocateKv, "values", values.size(), runs.total);
  const int key_list = 0;
  const int value_list = state.config.separate_kv ? 1 : 0;
  std::lock_guard guard(state.lock);
  state.check_owner(kAllocateKv, "owner", owner);
  state.check_format(kAllocateKv, key_format);
  state.check_format(kAllocateKv, value_format);
  State::Demand wanted;
  wanted.blocks[key_list] += runs.total;
  wanted.blocks[value_list] += runs.total;
  std::uint32_t slot = kNoOwner;
  if (auto shortage = state.obtain(owner, wanted, slot)) return shortage;
  state.take_runs(key_list, slot, key_format, runs, keys);
  state.take_runs(value_list, slot, value_format, runs, values);
  state.note_peak();
  state.history.add(state.stats);
  return std::nullopt;
}

std::vector<BlockHandle> BlockPoolAllocator::allocate(Stream stream, std::int64_t n_tokens,
                                                      OwnerId owner, FormatTag format,
                                                      std::int64_t copies) {
  State& state = *state_;
  const State::Runs runs = state.check_runs(kAllocate, n_tokens, copies);
  const int list = state.list_of(kAllocate, stream);
  {
    // A request that the pool cannot meet asks for no memory, however large it is.
    std::lock_guard guard(state.lock);
    state.check_owner(kAllocate, "owner", owner);
    state.check_format(kAllocate, format);
    State::Demand wanted;
    wanted.blocks[list] = runs.total;
    State::Demand to_mint;
    if (auto shortage = state.plan(owner, state.owners.find(owner), wanted, to_mint)) {
      state.note_exhausted();
      throw BlockPoolExhausted(shortage->message(kAllocate));
    }
  }
  std::vector<BlockHandle> handles(static_cast<std::size_t>(runs.total));
  if (auto shortage = try_allocate(stream, n_tokens, owner, format, handles, copies)) {
    throw BlockPoolExhausted(shortage->message(kAllocate));
  }
  return handles;
}

}  // namespace kvpool::core
