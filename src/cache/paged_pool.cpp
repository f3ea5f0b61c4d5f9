#include "kvpool/cache/paged_pool.h"

#include <utility>

#include "group_registry.h"
#include "kvpool/base/error.h"

namespace kvpool::cache {

namespace {

std::shared_ptr<core::BlockPoolAllocator> checked(
    std::shared_ptr<core::BlockPoolAllocator> blocks) {
  if (blocks == nullptr) throw InvalidArgument("[PagedPool] blocks must not be null");
  return blocks;
}

}  // namespace

PagedPool::PagedPool(std::shared_ptr<core::BlockPoolAllocator> blocks,
                     storage::PageStoreOptions store, std::shared_ptr<kernels::WorkerPool> workers)
    : blocks_(checked(std::move(blocks))),
      store_(std::move(store)),
      workers_(std::move(workers)),
      groups_(std::make_shared<GroupRegistry>()) {
  blocks_->add_pin_observer(groups_);
}

PagedPool::~PagedPool() = default;

}  // namespace kvpool::cache
