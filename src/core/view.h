// The nodes of a job as one of them sees them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forebay::peer {

inline constexpr uint32_t kMostNodes = 4096;     // of a job
inline constexpr size_t kLongestRegistrar = 64;  // a numeric host and a port

struct Member {
  uint32_t node = 0;
  uint64_t incarnation = 0;  // random; another one: the process was started anew
  std::string address;       // of its transport
  uint64_t memory = 0;       // bytes that it can keep for the cluster
  uint64_t folder = 0;
  bool alive = true;
  bool suspected = false;      // dead by this node's own word only: it may answer again
  std::string registrar = {};  // where it listens for members; empty: nowhere, or at the launcher's
                               // master host
  // What others are told of it.
  template <typename Self, typename Io>
  static void Fields(Self& m, Io& io) {
    io(m.node, m.incarnation, m.memory, m.folder, m.alive);
    io.ShortText(m.address);
    io.ShortText(m.registrar);
  }
  bool Valid() const { return node < kMostNodes && registrar.size() <= kLongestRegistrar; }
  bool operator==(const Member&) const = default;
};

struct View {
  uint64_t version = 0;         // grows with every change; 0: nothing known yet
  uint32_t nodes = 1;           // of the job
  std::vector<Member> members;  // by node; those that never came are missing
  bool complete() const { return members.size() == nodes; }
};

}  // namespace forebay::peer
