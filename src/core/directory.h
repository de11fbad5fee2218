// Directory: where each sample of a data set should be, and where it is as far as is known.
//
// The plan is a pure function of the view, so every node finds a sample's home without asking; what
// peers report corrects it: samples that a home lacks, and copies elsewhere.
//
// A sample's home is a hash (core/home.h) as long as that node has room, or, once a plan by use is
// adopted (core/home_plan.h), the node that uses it most. The plan is made for all
// nodes first, the dead included, so that a death moves only what lived with the dead and a return
// moves only that back. What a node cannot take goes to its next choices, then to whoever has most
// room. When the job has another number of nodes, those that stay keep what they can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "core/home_plan.h"
#include "core/keep_share.h"
#include "core/view.h"

namespace forebay::peer {

inline constexpr uint32_t kNoNode = UINT32_MAX;

struct Found {
  uint32_t home = kNoNode;  // who reads it from the source; kNoNode: each for itself
  uint32_t holder =
      kNoNode;  // who is known to have a copy, other than this node; the home if it has
};

// Pure: no clock, thread or I/O. Not safe for concurrent use. Eight bytes a sample, beside the
// lengths: up to kMostNodes nodes and 100 million samples.
class Directory {
 public:
  // lengths[s]: the room that sample s takes in a tier.
  Directory(uint32_t self, std::vector<uint32_t> lengths);

  // Plans for the members that are alive; members that never came count as dead, with as much room
  // as the others have on average. Samples whose home stays alive keep it; those of the dead go to
  // the others that have room; who comes back gets its own again. (Where a second death finds no
  // room for all, some that the first one moved may move again.) The same view gives every node the
  // same homes, whatever views it saw before. A node's room is for this data set alone: subtract
  // home_bytes() of the node's other directories. Forgets the copies of the dead. True: homes have
  // changed.
  bool OnView(const View& view);
  // The rooms by which OnView plans: the same on all nodes that have the same view.
  static std::vector<NodeTiers> Rooms(const View& view);
  // From the next OnView on homes are the plan's, whatever rooms that view tells, until another one
  // is adopted. Copies stay known where they are. `here`: bit s, this node has sample s. What of
  // that lived here stays as if it still did until its new home, by the same plan, says that it has
  // it: nothing is read from the source twice for a plan. Copies beside the homes do not: they
  // would take the room that is needed to move the others.
  void Adopt(std::shared_ptr<const HomePlan> plan, std::span<const std::byte> here);
  // `node` places by the adopted plan too: what it says it has from now on, it keeps.
  void OnPlanUsed(uint32_t node);
  // Of the plan that was adopted; 0: homes are by hash.
  uint64_t plan_digest() const { return plan_ == nullptr ? 0 : plan_->digest; }

  // A few nanoseconds: two array look-ups. `sample` must exist.
  Found Locate(SampleId sample) const {
    const uint16_t home = homes_[sample], known = known_[sample];
    const uint16_t other = known & kOther;
    Found found;
    if (home != kNowhere) found.home = home;
    if ((known & kHomeHas) != 0) {
      found.holder = home;
    } else if (other != kOther) {
      found.holder = other;
    }
    return found;
  }
  KeepShare ShareOf(SampleId sample) const {
    if (homes_[sample] == self_) return KeepShare::kHome;
    if (!leaving_.empty() && leaving_[sample]) return KeepShare::kHome;
    if (plan_ != nullptr && !plan_->replicas[sample]) return KeepShare::kNone;
    return lengths_[sample] <= spare_ ? KeepShare::kReplica : KeepShare::kNone;
  }
  // By sample, for Engine::SetShare.
  std::vector<uint8_t> Shares() const;
  // Whose share has changed since the last call, because their home has got them.
  std::vector<SampleId> TakeLeft() { return std::exchange(left_, {}); }
  uint32_t size() const { return static_cast<uint32_t>(lengths_.size()); }
  std::span<const uint32_t> lengths() const { return lengths_; }
  // What lives with `node`.
  uint64_t home_bytes(uint32_t node) const;
  uint32_t home_samples(uint32_t node) const;
  // Samples that no node has room for.
  uint32_t homeless() const { return homeless_; }

  // What peers say: bit i of `bits` is sample `first` + i. Samples and nodes that do not exist, and
  // this node itself, are ignored. One copy is remembered beside the home's.
  void OnHave(uint32_t node, SampleId first, std::span<const std::byte> bits);
  void OnGot(uint32_t node, SampleId sample);
  void OnLost(uint32_t node, SampleId sample);  // also: it was asked and has not got it
  void OnDead(uint32_t node);                   // forgets its copies

 private:
  static constexpr uint16_t kNowhere = UINT16_MAX;
  // Of known_: whether the home has it, and another node that has.
  static constexpr uint16_t kHomeHas = 1 << 15;
  static constexpr uint16_t kOther = kHomeHas - 1;  // this number: no other one is known

  struct Room {
    uint64_t memory = 0;
    uint64_t folder = 0;
    bool operator==(const Room&) const = default;
    uint64_t most() const { return memory > folder ? memory : folder; }
    bool Take(uint64_t length);
  };

  void PlanAll();
  void PlanDead(std::vector<uint16_t>* homes, std::vector<Room>* free) const;
  void PlaceRest(std::vector<SampleId> rest, const std::vector<bool>& open,
                 std::vector<uint16_t>* homes, std::vector<Room>* free) const;
  void Move(SampleId sample, uint16_t to);

  const uint32_t self_;
  const std::vector<uint32_t> lengths_;

  // By use; shared with the copies of this directory, immutable.
  std::shared_ptr<const HomePlan> plan_;
  bool adopted_ = false;       // plan_ is to be taken over by OnView
  std::vector<bool> leaving_;  // held here, until the home has it; empty: nothing
  std::vector<SampleId> left_;
  std::vector<bool> by_plan_;  // nodes that place by plan_ too; those beyond its end do not
  std::vector<Room> rooms_;    // of all nodes, as planned for
  std::vector<bool> alive_;
  std::vector<uint16_t> all_;  // homes while all are alive
  std::vector<Room> all_free_;
  std::vector<uint16_t> homes_;  // now
  std::vector<uint16_t> known_;
  std::vector<uint64_t> home_bytes_;
  std::vector<uint32_t> home_samples_;
  uint32_t homeless_ = 0;
  uint64_t spare_ = 0;  // what this node has left beside what lives here
};

}  // namespace forebay::peer
