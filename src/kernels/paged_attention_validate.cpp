#include <string>

#include "kvpool/base/error.h"
#include "kvpool/kernels/paged_attention.h"

namespace kvpool::kernels {
namespace {

using formats::Format;

[[noreturn]] void refuse(const std::string& what) {
  throw InvalidArgument("[paged_attention] " + what);
}

void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) {
    refuse(std::string(name) + " must be >= " + std::to_string(least) + ", got " +
           std::to_string(value));
  }
}

void check_pointer(const char* name, const void* pointer) {
  if (pointer == nullptr) refuse(std::string(name) + " must not be null");
}

void check_stream(const char* name, const PagedStream& stream) {
  formats::check_page(std::string("paged_attention") + " " + name, {Format::kFp32, stream.shape});
  check_at_least((std::string(name) + ".n_pages").c_str(), stream.n_pages, 0);
  if (stream.n_pages > 0) check_pointer((std::string(name) + ".pages").c_str(), stream.pages);
}

void check_page(const char* name, const PagedStream& stream, std::int64_t page,
                const std::string& where) {
  if (page < 0 || page >= stream.n_pages) {
    refuse(where + " names page " + std::to_string(page) + ", but " + name + " has " +
           std::to_string(stream.n_pages) + " pages");
  }
  check_pointer((std::string(name) + " page " + std::to_string(page)).c_str(),
                stream.pages[page].data);
  formats::check_page(std::string("paged_attention") + " " + name,
                      {stream.pages[page].format, stream.shape});
}

void check_table(const PagedAttentionParams& p) {
  check_pointer("indptr", p.indptr);
  check_pointer("last_page_len", p.last_page_len);
  check_at_least("indptr[0]", p.indptr[0], 0);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::string at = "[" + std::to_string(b + 1) + "]";
    // A sequence without tokens has nothing to attend to: leave it out of the batch.
    check_at_least(("indptr" + at).c_str(), p.indptr[b + 1], std::int64_t{p.indptr[b]} + 1);
    const std::int64_t last = p.last_page_len[b];
    if (last < 1 || last > p.keys.shape.block_size) {
      refuse("last_page_len[" + std::to_string(b) + "] must be in 1.." +
             std::to_string(p.keys.shape.block_size) + ", got " + std::to_string(last));
    }
    for (std::int64_t at_page = p.indptr[b]; at_page < p.indptr[b + 1]; ++at_page) {
      const std::int64_t page = p.indices == nullptr ? at_page : p.indices[at_page];
      const std::string where =
          p.indices == nullptr ? "indptr" + at : "indices[" + std::to_string(at_page) + "]";
      check_page("keys", p.keys, page, where);
      check_page("values", p.values, page, where);
    }
  }
}

}  // namespace

void validate(const PagedAttentionParams& p) {
  if (formats::traits(p.query_format).kind != formats::Kind::kFloat) {
    refuse("query_format must be fp32, fp16 or bf16, got " +
           std::string(formats::traits(p.query_format).name));
  }
  check_at_least("batch", p.batch, 0);
  check_at_least("n_q_heads", p.n_q_heads, 1);
  check_at_least("n_queries", p.n_queries, 1);
  check_at_least("window", p.window, 0);
  check_stream("keys", p.keys);
  check_stream("values", p.values);
  if (p.values.shape.n_heads != p.keys.shape.n_heads) {
    refuse("values.n_heads must be keys' " + std::to_string(p.keys.shape.n_heads) + ", got " +
           std::to_string(p.values.shape.n_heads));
  }
  if (p.values.shape.block_size != p.keys.shape.block_size) {
    refuse("values.block_size must be keys' " + std::to_string(p.keys.shape.block_size) + ", got " +
           std::to_string(p.values.shape.block_size));
  }
  if (p.n_q_heads % p.keys.shape.n_heads != 0) {
    refuse("n_q_heads must be a multiple of keys.n_heads " + std::to_string(p.keys.shape.n_heads) +
           ", got " + std::to_string(p.n_q_heads));
  }
  if (p.mask_kind != MaskKind::kNone) check_pointer("mask", p.mask);
  if (p.batch == 0) return;
  check_pointer("queries", p.queries);
  check_pointer("output", p.output);
  check_table(p);
}

}  // namespace kvpool::kernels
