// The store of one process: the default where nothing beyond a node is controlled, and the model
// that tests compare with.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "control/store.h"

namespace forebay::control {

// What several MemoryStore handles share. Safe for concurrent use by multiple threads. Leases end
// by `clock`, which must outlive it.
class MemoryStoreState {
 public:
  explicit MemoryStoreState(Clock& clock);
  ~MemoryStoreState();

  // Every call of every handle fails as if the store were gone; leases run on.
  void SetDown(bool down);
  // As an etcd that others use, too.
  void SetShared(bool shared);

 private:
  friend class MemoryStore;
  friend class MemoryWatch;
  struct Rep;
  // Shared with handles and watches, which may outlive this.
  std::shared_ptr<Rep> rep_;
};

class MemoryStore final : public ControlStore {
 public:
  explicit MemoryStore(const MemoryStoreState& state) : rep_(state.rep_) {}

  Status PutMany(std::span<const StoreWrite> writes, const Fence* fence = nullptr) override;
  Result<StoreSnapshot> Range(std::string_view prefix) override;
  Status Delete(std::string_view key) override;
  Result<LeaseId> GrantLease(Nanos ttl) override;
  Status KeepAlive(LeaseId lease) override;
  Status Revoke(LeaseId lease) override;
  Result<std::unique_ptr<StoreWatch>> Watch(std::string_view prefix, int64_t revision) override;
  Result<Leadership> Campaign(std::string_view election, std::string_view name,
                              LeaseId lease) override;
  Result<std::optional<Leadership>> Leader(std::string_view election) override;
  Status Compact(int64_t revision) override;
  bool shared() const override;
  std::string Describe() const override { return "the in-memory store"; }

 private:
  std::shared_ptr<MemoryStoreState::Rep> rep_;
};

}  // namespace forebay::control
