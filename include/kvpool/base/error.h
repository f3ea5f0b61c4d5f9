#pragma once

#include <stdexcept>
#include <string>

namespace kvpool {

/// Base of every exception that the library throws on purpose. what() starts with the call:
/// `[BlockPoolAllocator::shrink] target_free must be >= 0, got -1`.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A broken contract: an argument outside its range, a foreign or stale handle. Nothing changed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// register_owner of an owner that is still active.
class OwnerAlreadyActive : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// The pool has too few blocks for a request. Nothing changed.
class BlockPoolExhausted : public Error {
 public:
  using Error::Error;
};

}  // namespace kvpool
