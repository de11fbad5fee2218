// The network of the simulated cluster: transports of peers, and the connections of members.
//
// What a TCP stack under faults may do, and no more: messages of a connection arrive once and in
// their order, late, or not at all with the connection; payloads end in any order; bits of payloads
// flip; nothing comes through a partition before it has healed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/owned.h"
#include "sim/faults/world.h"
#include "transport/transport.h"

namespace forebay::sim {

class FaultNetwork {
 public:
  FaultNetwork(World& world, uint32_t nodes);
  ~FaultNetwork();

  // ---- what the schedule does
  void Cut(uint32_t a, uint32_t b, Nanos until);    // of each other
  void Slow(uint32_t node, Nanos until, Nanos by);  // what it sends and gets is so much later
  void Corrupt(uint32_t node, Nanos until) { corrupt_[node] = until; }
  void Reset(uint32_t a, uint32_t b);  // their connections end
  void GarbleNext(uint32_t node) { garble_[node] = true; }
  // The process is gone. `silent`: and so is its machine; nobody is told. Before its transport and
  // membership are destroyed.
  void Kill(uint32_t node, bool silent);
  void Revive(uint32_t node);

  // ---- for the nodes
  Result<std::unique_ptr<Transport>> Make(uint32_t node, TransportHandler& handler);
  static std::string Address(uint32_t node) { return StrCat("n", node); }
  // Somebody called Wake, or something came, since the last call.
  bool TakeWoken(uint32_t node);
  // Something came that its membership has to know: bytes, or the fate of a connection of peers.
  bool TakeMembersPoked(uint32_t node);
  // Moves what the members of `node` have sent; after each of its steps.
  void PumpMembers(uint32_t node);

  // A request that was answered twice; empty: none was.
  const std::string& violation() const { return violation_; }

 private:
  struct Endpoint;
  struct Link;
  class SimTransport;
  struct Tube;

  Nanos Delay(uint32_t from, uint32_t to);
  // When what arrives at `at` gets through.
  Nanos Passable(uint32_t a, uint32_t b, Nanos at);
  void Post(const std::shared_ptr<Endpoint>& to, Nanos at, std::function<void()> what);
  void CheckAnswers(uint64_t link, std::span<const std::byte> header);
  void EndSide(const std::shared_ptr<Link>& link, int side, const Status& why);
  void TellOther(const std::shared_ptr<Link>& link, int side, const std::string& why);
  std::string Name(const std::string& what, uint32_t a, uint32_t b) const;
  OwnedFd ListenAs(const std::string& name) const;
  OwnedFd ConnectTo(const std::string& name) const;
  void Deliver(const std::shared_ptr<Tube>& tube, int side, std::string bytes, bool end);

  World& world_;
  const uint32_t nodes_;
  std::map<std::pair<uint32_t, uint32_t>, Nanos> cuts_;
  std::vector<std::pair<Nanos, Nanos>> slow_;  // until, by
  std::vector<Nanos> corrupt_;
  std::vector<bool> garble_;
  std::vector<bool> down_;
  std::vector<bool> silent_;
  std::vector<bool> woken_;
  std::vector<bool> members_poked_;
  bool in_use_ = false;                               // somebody was sent to the hole
  std::vector<std::shared_ptr<Endpoint>> endpoints_;  // by node; shared with what is on its way
  std::vector<std::weak_ptr<Link>> links_;
  uint64_t next_link_ = 0;
  std::set<std::pair<uint64_t, uint32_t>> answered_;
  std::string violation_;

  std::vector<OwnedFd> proxies_;  // from * nodes + to
  OwnedFd hole_;                  // takes connections and says nothing
  std::vector<OwnedFd> in_hole_;
  std::vector<bool> dialed_;
  std::vector<uint64_t> ports_;  // counts the processes of a node
  std::vector<std::shared_ptr<Tube>> tubes_;
};

}  // namespace forebay::sim
