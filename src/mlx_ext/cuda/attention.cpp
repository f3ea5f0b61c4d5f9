#include "attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "../gpu.h"
#include "driver.h"
#include "kernels.h"
#include "kvpool/mlx_ext/dtypes.h"
#include "memory.h"
#include "mlx_cuda.h"
#include "page_tables.h"

namespace kvpool::mlx_ext::cuda {

using formats::Format;
using mlx::core::array;

namespace {

constexpr std::int64_t kTile = 16;
constexpr std::int64_t kGroup = formats::kPageGroup;
/// Query heads that a CTA answers at most: up to four have the weights in twice the precision.
std::int64_t most_queries(Format query_format) noexcept {
  return query_format == Format::kFp32 ? 4 : 8;
}
/// A launch takes the parameters of one of these numbers of sequences.
constexpr std::size_t kSmallBatch = 4;
constexpr std::size_t kLargeBatch = 96;

// As in kernels/paged_attention.cu.

struct Sequence {
  std::uint64_t key_pages = 0, value_pages = 0;
  std::int32_t n_tokens = 0, first_token = 0, first_split = 0, n_splits = 0;
};

struct Header {
  std::uint64_t queries = 0;
  std::uint64_t query_strides[3] = {};
  std::uint64_t output = 0, partials = 0, arrivals = 0, sinks = 0, sink_stride = 0;
  float scale = 1;
  std::int32_t n_key_heads = 0, ratio = 0, parts = 0, block_shift = 0, batch = 0;
};

struct Parameters {
  Header header;
  Sequence sequences[kLargeBatch];
};

/// One compilation of the kernel.
class Variant {
 public:
  std::int64_t key_dim = 0, value_dim = 0;
  Format query_format{};
  unsigned formats = 0;
  std::int64_t queries = 1;
  std::size_t max_batch = kSmallBatch;
  // Worked out from those:
  std::int64_t warps = 8, stages = 3, tiles = 1;
  std::int64_t shared_bytes = 0;

  std::int64_t tile_bytes(std::int64_t dim) const noexcept {
    std::int64_t largest = 0;
    for (const formats::FormatTraits& traits : formats::kFormats) {
      if ((formats >> static_cast<unsigned>(traits.format) & 1) == 0) continue;
      const std::int64_t row = dim * traits.bits / 8;
      const bool coded = traits.kind == formats::Kind::kCode;
      largest = std::max(largest, kTile * (coded ? row + dim / kGroup * 4 : row));
    }
    return largest;
  }

  /// fit() and the function compiled, from earlier calls where there were any.
  CUfunc_st* prepare() {
    struct Prepared {
      std::mutex lock;
      std::map<std::array<std::int64_t, 6>, std::pair<Variant, CUfunc_st*>> variants;
    };
    static Prepared* const prepared = new Prepared;
    const std::array<std::int64_t, 6> key = {
        key_dim, value_dim, static_cast<std::int64_t>(query_format),
        formats, queries,   static_cast<std::int64_t>(max_batch)};
    const std::lock_guard lock(prepared->lock);
    auto found = prepared->variants.find(key);
    if (found == prepared->variants.end()) {
      fit(Driver::get().shared_bytes());
      found = prepared->variants.emplace(key, std::pair{*this, compile()}).first;
    }
    *this = found->second.first;
    return found->second.second;
  }

 private:
  /// As many warps and stages as there is shared memory for.
  void fit(std::int64_t limit) noexcept {
    const bool mixed = !std::has_single_bit(formats);
    constexpr unsigned kInt8 = 1u << static_cast<unsigned>(Format::kInt8);
    constexpr unsigned kInt4 = 1u << static_cast<unsigned>(Format::kInt4);
    // The smaller a tile, the more there must be to a step; as far as registers go.
    tiles = 1;
    if ((formats & ~(kInt8 | kInt4)) == 0) tiles = 2;
    if (formats == kInt4 && std::max(key_dim, value_dim) <= 128) tiles = 4;
    const std::int64_t stage =
        tiles * (tile_bytes(key_dim) + tile_bytes(value_dim) + (mixed ? 16 : 0));
    for (const auto& [w, s] : {std::pair{8, 3}, {8, 2}, {4, 3}, {4, 2}, {2, 2}}) {
      if (tiles > 1 && s > 2) continue;  // measured: no gain
      warps = w;
      stages = s;
      const std::int64_t loop =
          warps * stages * stage + 8 * key_dim * 4 + (mixed ? warps * 8 * value_dim * 4 : 0) + 32;
      const std::int64_t end = warps * queries * (value_dim + value_dim / kGroup + 2) * 4;
      shared_bytes = std::max(loop, end);
      if (shared_bytes + 1024 <= limit) break;
    }
  }

  CUfunc_st* compile() const {
    const auto macro = [](const char* name, std::int64_t value) {
      return std::string(name) + "=" + std::to_string(value);
    };
    return kernel("paged_attention.cu", "paged_attention",
                  {macro("KEY_DIM", key_dim), macro("VALUE_DIM", value_dim),
                   macro("QUERY_FORMAT", static_cast<int>(query_format)), macro("FORMATS", formats),
                   macro("QUERIES", queries), macro("WARPS", warps), macro("STAGES", stages),
                   macro("TILES", tiles), "MIN_CTAS=1",
                   macro("MAX_BATCH", static_cast<std::int64_t>(max_batch))},
                  static_cast<int>(shared_bytes));
  }
};

/// Of any sequence: what one has in fp16 another may have in int4.
unsigned formats_of(const VisibleBatch& batch, Which which) noexcept {
  unsigned bits = 0;
  for (const VisibleRows& rows : batch) {
    for (const auto& level : stream_of(*rows.view, which).layout->levels()) {
      bits |= 1u << static_cast<unsigned>(level.ref_format());
    }
  }
  return bits;
}

/// Splits of each sequence: enough to keep the device busy, and none so short that starting it is
/// what takes the time.
std::vector<std::int32_t> split(const std::vector<Sequence>& sequences, std::int64_t columns,
                                std::int64_t most) {
  std::int64_t n_tokens = 0;
  for (const Sequence& s : sequences) n_tokens += s.n_tokens - s.first_token;
  const std::int64_t slots = std::max<std::int64_t>(1, Driver::get().multiprocessors() / columns);
  // Sequences of unlike lengths end together where there are more splits than slots.
  const std::int64_t wanted = sequences.size() == 1
                                  ? std::max<std::int64_t>(256, (n_tokens + slots - 1) / slots)
                                  : std::max<std::int64_t>(1024, n_tokens / (4 * slots));
  std::vector<std::int32_t> splits;
  splits.reserve(sequences.size());
  for (const Sequence& s : sequences) {
    splits.push_back(static_cast<std::int32_t>(
        std::clamp<std::int64_t>((s.n_tokens - s.first_token) / wanted, 1, most)));
  }
  return splits;
}

}  // namespace

std::string_view why_not(const VisibleBatch& batch, Which keys, Which values,
                         std::int64_t n_queries, bool has_mask) {
  constexpr unsigned kCovered =
      1u << static_cast<unsigned>(Format::kFp16) | 1u << static_cast<unsigned>(Format::kBf16) |
      1u << static_cast<unsigned>(Format::kInt8) | 1u << static_cast<unsigned>(Format::kInt4);
  if (n_queries > gpu::kMostQueries) {
    return "more than 8 queries on the GPU: gathered, then ordinary attention";
  }
  if (has_mask) return "a mask on the GPU";
  if (((formats_of(batch, keys) | formats_of(batch, values)) & ~kCovered) != 0) {
    return "pages of a format that the GPU's kernel does not read";
  }
  const formats::PageShape& of_keys = stream_of(*batch.front().view, keys).layout->shape();
  const formats::PageShape& of_values = stream_of(*batch.front().view, values).layout->shape();
  const std::int64_t block_size = of_keys.block_size;
  if (block_size < kTile || !std::has_single_bit(static_cast<std::uint64_t>(block_size))) {
    return "a block size on the GPU that is no power of two from 16 on";
  }
  for (const std::int64_t dim : {of_keys.head_dim, of_values.head_dim}) {
    if (dim % kGroup != 0 || dim > 256) return "a head_dim on the GPU other than 64, 128, 192, 256";
  }
  return {};
}

void add_attention(const VisibleBatch& batch, const PagedAttention::Options& options,
                   const std::vector<array>& inputs, const array& output,
                   mlx::core::Stream stream) {
  const cache::PageView& view = *batch.front().view;
  const formats::PageShape& key_shape = stream_of(view, options.keys).layout->shape();
  const formats::PageShape& value_shape = stream_of(view, options.values).layout->shape();
  const array& queries = inputs[batch.size()];
  const std::int64_t n_key_heads = key_shape.n_heads;
  const std::int64_t ratio = queries.shape(1) / n_key_heads;
  const std::int64_t most = most_queries(checked_format_of(queries.dtype()));
  const std::int64_t parts = (ratio + most - 1) / most;

  Variant variant;
  variant.key_dim = key_shape.head_dim;
  variant.value_dim = value_shape.head_dim;
  variant.query_format = checked_format_of(queries.dtype());
  variant.formats = formats_of(batch, options.keys) | formats_of(batch, options.values);
  variant.queries = (ratio + parts - 1) / parts;
  variant.max_batch = batch.size() <= kSmallBatch ? kSmallBatch : kLargeBatch;
  CUfunc_st* const function = variant.prepare();

  auto& encoder = mlx::core::cu::get_command_encoder(stream);
  const auto tables = follow_tables(batch, inputs, stream);
  const std::int64_t columns = n_key_heads * parts;
  // One counter a sequence and column.
  const std::size_t most_sequences = std::clamp<std::size_t>(
      Scratch::kCounterBytes / 4 / static_cast<std::size_t>(columns), 1, kLargeBatch);
  // The room that the kernel has for the factors of splits.
  const std::int64_t most_splits = 8 * variant.key_dim / variant.queries;
  for (std::size_t first = 0; first < batch.size(); first += most_sequences) {
    const std::size_t n = std::min(most_sequences, batch.size() - first);
    std::vector<Sequence> sequences(n);
    for (std::size_t i = 0; i < n; ++i) {
      const VisibleRows& rows = batch[first + i];
      const auto& [keys, values] = tables[first + i];
      sequences[i].key_pages = options.keys == Which::kKeys ? keys : values;
      sequences[i].value_pages = options.values == Which::kKeys ? keys : values;
      sequences[i].n_tokens = static_cast<std::int32_t>(rows.end());
      sequences[i].first_token = static_cast<std::int32_t>(rows.hidden());
    }
    const auto splits = split(sequences, columns, most_splits);
    std::int32_t n_splits = 0;
    for (std::size_t i = 0; i < n; ++i) {
      sequences[i].first_split = n_splits;
      sequences[i].n_splits = splits[i];
      n_splits += splits[i];
    }
    const std::int64_t partial_floats = (variant.queries * (variant.value_dim + 2) + 3) / 4 * 4;
    const auto scratch = std::make_shared<Scratch>(
        static_cast<std::size_t>(n_splits * columns * partial_floats) * sizeof(float), stream);
    encoder.add_completed_handler([scratch] {});

    Parameters p;
    Header& header = p.header;
    const auto number = static_cast<std::uint64_t>(queries.itemsize());
    header.queries =
        address(queries) + first * static_cast<std::uint64_t>(queries.strides(0)) * number;
    for (int i = 0; i < 2; ++i) {
      header.query_strides[i] = static_cast<std::uint64_t>(queries.strides(i));
    }
    header.query_strides[2] = static_cast<std::uint64_t>(queries.strides(3));
    header.output =
        address(output) + first * static_cast<std::uint64_t>(output.strides(0)) * number;
    header.partials = scratch->data();
    header.arrivals = scratch->counters();
    if (options.has_sinks) {
      header.sinks = address(inputs[batch.size() + 1]);
      header.sink_stride = static_cast<std::uint64_t>(inputs[batch.size() + 1].strides(0));
    }
    header.scale = options.scale;
    header.n_key_heads = static_cast<std::int32_t>(n_key_heads);
    header.ratio = static_cast<std::int32_t>(ratio);
    header.parts = static_cast<std::int32_t>(parts);
    header.block_shift = std::countr_zero(static_cast<std::uint64_t>(key_shape.block_size));
    header.batch = static_cast<std::int32_t>(n);
    std::copy(sequences.begin(), sequences.end(), p.sequences);

    // Later appends to these sequences come after this reader.
    for (std::size_t i = 0; i < n; ++i) encoder.set_output_array(inputs[first + i]);
    encoder.set_input_array(queries);
    if (options.has_sinks) encoder.set_input_array(inputs[batch.size() + 1]);
    encoder.set_output_array(output);
    void* parameters[] = {&p};
    encoder.add_kernel_node_raw(
        function, {static_cast<unsigned>(n_splits), static_cast<unsigned>(columns), 1},
        {static_cast<unsigned>(variant.warps * 32), 1, 1}, {},
        static_cast<std::uint32_t>(variant.shared_bytes), parameters);
  }
}

}  // namespace kvpool::mlx_ext::cuda
