// LookBoard: the looks at files that ranks of one job on this node share.
//
// Who opens a data set asks. The first is to look, those who come meanwhile wait, those who come
// soon after take what was found. What somebody takes was seen before it opened the data set, and
// only a rank of the same job, at its how-manyth opening of it, may have seen it so: nobody takes
// what was begun before its own opening before this one, or before it wrote to a data set.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/clock.h"
#include "base/owned.h"

namespace forebay {

struct LookBoardLimits {
  // How long a look is offered once it was handed in. Ranks of a job start within seconds; who
  // comes later looks by itself, which is what everybody would do otherwise.
  Nanos offered = 30 * kSecond;
  Nanos still = 4 * kSecond;      // without progress: those who wait look by themselves
  Nanos longest = 600 * kSecond;  // however much progress there is
  size_t looks = 256;             // under way and offered, together
  size_t jobs = 256;
  size_t looks_of_client = 16;           // under way
  uint32_t ranks = 4096;                 // higher ones are left alone
  uint64_t bytes = uint64_t{256} << 20;  // of those that are offered
};

// Pure: times are told. For one thread.
class LookBoard {
 public:
  using ClientId = uint64_t;
  using Ticket = uint64_t;  // never 0

  struct Question {
    ClientId client = 0;
    std::string job;
    std::string name;
    uint32_t rank = 0;
    uint32_t ranks = 0;  // of the job on this node; all have taken a look: it is not kept
    uint64_t opening = 0;
    Ticket waited_for = 0;    // 0: it asks for the first time
    Nanos wrote_at = kNever;  // when the client last wrote to a data set
    static constexpr Nanos kNever = -1;
  };
  // What was handed in. The memory is sealed; `charge` is what it is charged to.
  struct Seen {
    OwnedFd memory;
    uint64_t list = 0;
    uint64_t files = 0;
    uint64_t bytes = 0;
    std::shared_ptr<void> charge;
  };
  enum class Turn : uint8_t {
    kAlone,  // look; the board does not want it
    kLook,   // look, and hand it in, or drop it
    kWait,   // ask again
    kTake,   // here it is
  };
  struct Answer {
    Turn turn = Turn::kAlone;
    Ticket ticket = 0;                 // kLook, kWait
    std::shared_ptr<const Seen> seen;  // kTake; shared with the board, which may drop it
  };

  explicit LookBoard(const LookBoardLimits& limits = {}) : limits_(limits) {}

  Answer Ask(const Question& question, Nanos now);
  // Of a look that is under way and the client's.
  void Progress(ClientId client, Ticket ticket, Nanos now);
  void Drop(ClientId client, Ticket ticket, Nanos now);
  // The client writes to a data set: what its jobs have seen so far is not offered any more.
  void Wrote(ClientId client);
  // False: it is not wanted any more, or too large.
  bool HandIn(ClientId client, Ticket ticket, Seen seen, Nanos now);
  // The client has gone: its looks under way are somebody else's to make. A job's last one takes
  // all looks of the job along.
  void Gone(ClientId client);
  // Drops what was offered for long enough.
  void Expire(Nanos now);
  // When Expire has something to do; kNothing: not at all.
  static constexpr Nanos kNothing = -1;
  Nanos NextExpiry() const;

  size_t looks() const { return looks_.size(); }  // under way, offered, or dropped a moment ago
  size_t askers() const { return asked_.size(); }
  uint64_t bytes() const { return bytes_; }  // of those that are offered

 private:
  enum class State : uint8_t { kUnderWay, kOffered, kDropped };
  struct Look {
    std::string job;
    std::string name;
    uint64_t opening = 0;
    ClientId client = 0;  // that looks
    State state = State::kUnderWay;
    Nanos began = 0;
    Nanos moved = 0;           // its last progress; then when it was handed in or dropped
    std::set<uint32_t> ranks;  // that look or took it
    std::shared_ptr<const Seen> seen;
  };
  using Looks = std::map<Ticket, Look>;  // few: they are searched one after the other
  struct Asker {
    std::string job;
    std::string name;
    uint32_t rank = 0;
    auto operator<=>(const Asker&) const = default;
  };
  struct Asked {
    Nanos last = kNothing;
    Nanos before = kNothing;  // the one before it
  };

  Answer Begin(const Question& question, Nanos now);
  Answer Take(const Question& question, Looks::iterator look);
  Looks::iterator Find(const Question& question);
  Look* UnderWay(ClientId client, Ticket ticket);
  Looks::iterator Erase(Looks::iterator look);
  // Questions that no look is compared with.
  void Forget();

  const LookBoardLimits limits_;
  std::map<std::string, std::set<ClientId>> jobs_;  // with clients that live
  Looks looks_;
  // Where there is a look: one that is made later is newer than all questions before.
  std::map<Asker, Asked> asked_;
  Ticket next_ = 1;
  uint64_t bytes_ = 0;
};

}  // namespace forebay
