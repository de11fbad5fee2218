// StoreQueue: copies of samples for the second tier. A part of Scheduler. Pure.
//
// What is read from the source for the second tier stays in memory until its writer has taken the
// bytes. A writer that falls behind so fills memory, and read-ahead, then consumers, wait for it:
// no copy is lost. A writer that hangs stops nobody for good: once no copy has ended for a while,
// those that wait are given up, and none is due until one ends. The next epoch makes up for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "core/actions.h"
#include "core/residency.h"

namespace forebay {

class StoreQueue {
 public:
  StoreQueue(Nanos patience, Residency& residency, SchedulerCommon& common)
      : patience_(patience), residency_(residency), common_(common) {}

  // Bytes that the folder can still take; copies in excess of the node's share leave enough for
  // what lives here.
  void SetFolderRoom(uint64_t bytes) { folder_room_ = bytes; }
  // A read begins: whether what comes from the source is to be copied.
  void OnReadBegun(ReadAction* read);
  void OnReadEnded(const ReadAction& read);
  // The sample of a read with `store` has become resident.
  void Add(const ReadAction& read);

  // The one that has waited longest; false: none waits.
  bool First(StoreAction* out) const;
  // The driver takes it: its bytes stay where they are until OnTaken.
  void Begin(const StoreAction& store);
  // They were copied out of the arena.
  void OnTaken(const StoreAction& store);
  // The sample is invalidated: a copy that is due is not wanted any more, and one that is under way
  // is no reason to stay.
  void Drop(DatasetId d, SampleId s);
  // False: none was under way.
  bool OnEnded(DatasetId d, SampleId s, bool stored);
  // `step` of time has passed. True: the second tier hangs from now on, and those that waited for
  // it are given up.
  bool Advance(Nanos step);
  // The second tier is left: those that waited for it are given up. And it is used again.
  void OnTierLeft() { GiveUpAll(); }
  void OnTierBack() { moved_ = common_.now; }

  // For memory: a sample that the writer has already, and one that waits to be taken.
  bool FreeOneWriting();
  bool GiveUpOneDue();

  // Copies that wait to be taken, or were and have not ended.
  size_t under_way() const { return due_.size() + writing_.size(); }
  // None has ended for a while, or the second tier is left: nobody waits for them.
  bool hangs() const { return hangs_ || common_.tier_left; }
  bool Moving() const { return !hangs() && under_way() > 0; }
  // Whether it is on its way into the second tier.
  bool Writing(DatasetId d, SampleId s) const {
    return !writing_.empty() && writing_.contains(Key(d, s));
  }
  // Read from there as soon as it has arrived, and not from the source before.
  bool Awaits(DatasetId d, SampleId s) const { return !hangs() && Writing(d, s); }
  // Whether any of the data set's is.
  bool AnyOf(DatasetId d) const;
  // SchedulerOptions::copy_patience, unless it was set.
  Nanos patience() const { return patience_; }
  void SetPatience(Nanos patience) { patience_ = patience; }
  size_t due() const { return due_.size(); }
  // Those whose samples are pinned, until they are taken: data set << 32 | sample.
  const std::unordered_set<uint64_t>& taking() const { return taking_; }

 private:
  using Store = Residency::Store;
  // Not begun yet.
  struct Due {
    DatasetId dataset = 0;
    SampleId sample = 0;
    JobId job = kNoJob;  // whose share of the folder it takes
    bool spare = false;  // it does not live here
  };
  static uint64_t Key(DatasetId d, SampleId s) { return uint64_t{d} << 32 | s; }
  const Residency::Entry& entry(DatasetId d, SampleId s) const {
    return residency_.datasets()[d].entries[s];
  }
  bool MayStore(DatasetId d, SampleId s, JobId job) const;
  bool FolderMayTake(DatasetId d, SampleId s) const;
  void Cancel(const Due& due);
  void GiveUp(const Due& due);
  void GiveUpAll();

  Nanos patience_;
  Residency& residency_;
  SchedulerCommon& common_;
  uint64_t folder_room_ = ~uint64_t{0};
  uint64_t reading_spare_ = 0;  // being read, and meant for the folder though it lives elsewhere
  uint64_t due_spare_ = 0;      // bytes of those in `due_` that do not live here
  std::deque<Due> due_;
  std::unordered_map<uint64_t, JobId> writing_;  // begun and not ended, by Key()
  std::unordered_set<uint64_t> taking_;          // of those, not taken yet: they are pinned
  Nanos moved_ = 0;  // when one ended last, or the first of them became due
  bool hangs_ = false;
};

}  // namespace forebay
