// How a program becomes a node of its cluster: by its user's word, and the environment.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "peer/peers.h"
#include "stage/engine.h"

namespace forebay::peer {

struct Started {
  std::unique_ptr<Peers> peers;  // null: this engine has none
  std::string note;              // one line for a log; empty: nothing to say
  bool failed = false;           // the note says why there are none though they were meant to be
  std::string warning;           // what its user should know all the same; empty: nothing
};

// `wanted`: as FOREBAY_PEERS, which it goes before; empty: what the environment says. A process is
// one node: its second engine has no peers, and no engine of a forked child has. Where peers cannot
// be had (no secret, no way to the others) the engine does without, and its Cluster() says why;
// what makes no sense is an error, unless nobody asked for peers. `suffix`: of the job's name, as
// for ClusterFromEnvironment.
Result<Started> StartPeers(Engine& engine, std::string_view wanted, std::string_view suffix = "");

// The cluster that this would be a node of: its name and its size. Empty: none.
std::string ClusterName(std::string_view wanted, std::string_view suffix = "");

// Whether that would start them, or say why it cannot.
bool WantsPeers(std::string_view wanted);

// An engine whose peers go right before it. In a forked child both are left alone.
std::shared_ptr<Engine> WithPeers(EnginePtr engine, std::unique_ptr<Peers> peers);

}  // namespace forebay::peer
