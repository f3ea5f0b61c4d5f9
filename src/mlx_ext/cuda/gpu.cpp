#include "../gpu.h"

#include <mlx/backend/cuda/cuda.h>

#include <exception>

#include "attention.h"
#include "driver.h"
#include "kvpool/mlx_ext/dtypes.h"
#include "memory.h"
#include "mlx_cuda.h"
#include "move_tokens.h"
#include "page_tables.h"

namespace kvpool::mlx_ext::gpu {

using mlx::core::array;

namespace {

/// Empty where everything is there.
std::string find_fault() {
  if (!mlx::core::cu::is_available()) return "MLX has no CUDA device";
  if (&mlx::core::cu::get_command_encoder == nullptr) return "MLX does not export its encoder";
  try {
    cuda::Driver::get();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

const std::string& fault() {
  // Never destroyed: another thread may ask while the process ends.
  static const auto* const text = new std::string(find_fault());
  static const auto* const in_child =
      new std::string("a child of fork() cannot use its parent's GPU");
  return text->empty() && cuda::Driver::get().in_child() ? *in_child : *text;
}

}  // namespace

bool is_available() noexcept {
  try {
    return fault().empty();
  } catch (...) {
    return false;
  }
}

std::string description() {
  return fault().empty() ? "CUDA on " + cuda::Driver::get().device_name() : fault();
}

HeldMemory held_memory() noexcept { return {cuda::held_bytes(), cuda::peak_held_bytes()}; }
void reset_peak_memory() noexcept { cuda::reset_peak_held_bytes(); }

std::shared_ptr<storage::SlabMemory> slab_memory() { return std::make_shared<cuda::DeviceSlabs>(); }

bool is_gpu_memory(const storage::SlabMemory* memory) noexcept {
  return dynamic_cast<const cuda::DeviceSlabs*>(memory) != nullptr;
}

std::shared_ptr<cuda::PageTables> make_tables() { return std::make_shared<cuda::PageTables>(); }

std::string_view why_not(const VisibleBatch& batch, Which keys, Which values,
                         std::int64_t n_queries, bool has_mask) {
  return cuda::why_not(batch, keys, values, n_queries, has_mask);
}

void require_append(mlx::core::Stream stream) {
  mlx::core::cu::get_command_encoder(stream);
  cuda::make_append_kernels();
}

void append(mlx::core::Stream stream, const std::shared_ptr<const cache::AppendPlan>& plan,
            const array* keys, const array* values, std::int64_t sequence, const array& token) {
  auto& encoder = mlx::core::cu::get_command_encoder(stream);
  encoder.add_completed_handler([plan] {});
  cuda::add_append(*plan, keys, values, sequence, token, encoder);
}

void gather(mlx::core::Stream stream, const std::shared_ptr<const VisibleBatch>& batch, Which which,
            const std::vector<array>& tokens, array& rows) {
  auto& encoder = mlx::core::cu::get_command_encoder(stream);
  encoder.add_completed_handler([batch] {});
  rows.set_data(cuda::output_memory(rows.nbytes(), stream));
  const auto tables = cuda::follow_tables(*batch, tokens, stream);
  const formats::PageShape& shape = stream_of(*batch->front().view, which).layout->shape();
  cuda::GatherParameters p;
  p.kind.to_format = static_cast<std::int32_t>(checked_format_of(rows.dtype()));
  p.kind.from_page = 1;
  p.kind.head_stride = static_cast<std::uint64_t>(rows.strides(1));
  p.kind.token_stride = static_cast<std::uint64_t>(rows.strides(2));
  p.kind.dim_stride = 1;
  p.kind.n_heads = static_cast<std::int32_t>(shape.n_heads);
  p.kind.head_dim = static_cast<std::int32_t>(shape.head_dim);
  p.block_size = static_cast<std::int32_t>(shape.block_size);
  p.n_rows = rows.shape(2);
  const std::int64_t groups = (shape.head_dim + formats::kPageGroup - 1) / formats::kPageGroup;
  for (std::size_t i = 0; i < batch->size(); ++i) {
    const VisibleRows& sequence = (*batch)[i];
    p.pages = which == Which::kKeys ? tables[i].keys : tables[i].values;
    p.to = cuda::address(rows) + i * static_cast<std::uint64_t>(rows.strides(0)) * rows.itemsize();
    p.first_token = static_cast<std::int32_t>(sequence.hidden());
    p.n_padding = static_cast<std::int32_t>(rows.shape(2) - sequence.n_rows);
    encoder.set_output_array(tokens[i]);
    encoder.set_output_array(rows);
    void* parameters[] = {&p};
    encoder.add_kernel_node_raw(cuda::move_kernel("gather_pages"),
                                {cuda::move_blocks(p.n_rows * shape.n_heads * groups), 1, 1},
                                {256, 1, 1}, {}, 0, parameters);
  }
}

void attend(mlx::core::Stream stream, const std::shared_ptr<const VisibleBatch>& batch,
            const PagedAttention::Options& options, const std::vector<array>& inputs,
            array& output) {
  mlx::core::cu::get_command_encoder(stream).add_completed_handler([batch] {});
  output.set_data(cuda::output_memory(output.nbytes(), stream));
  cuda::add_attention(*batch, options, inputs, output, stream);
}

}  // namespace kvpool::mlx_ext::gpu
