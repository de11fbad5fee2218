// Residency: which samples are in memory, why, and which of them stay. A part of Scheduler. Pure.
//
// Every sample of a data set has an Entry: unsized, absent, reading or resident. These are
// reasons for it to stay in memory:
//   ahead  positions of some stream's look-ahead window that will use it,
//   pins   leases that hand it out now (or will, once their missing samples have arrived),
//   kept   the memory tier holds it for later epochs,
//   store  its copy for the second tier waits to be taken, or, while there is room, to be written.
// A resident sample without any of the four is freed at once. Keeping the samples that were read
// first, and never replacing them, is optimal when each sample is used once an epoch: no policy can
// have more hits an epoch than the tier has room.
//
// A data set may grow. A sample whose file changed is invalidated: it is dead from then on, and its
// number is never used again. Leases that have it keep it until they are released.
//
// A data set that nobody uses any more is parked: what memory keeps of it may serve who opens it
// again, and leaves before anything else when room is needed, all of it as soon as it does not fit
// beside everything that is open. A removed one's number is used again.
//
// A data set may have a second tier below memory, its folder. While the two together cannot hold
// everything, a sample lies in one of them only, so that they cover the most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "core/actions.h"
#include "core/arena.h"
#include "core/remote_samples.h"

namespace forebay {

class Residency {
 public:
  enum class State : uint8_t { kUnsized, kAbsent, kReading, kResident };
  // Whether the copy for the second tier is a reason to stay in memory.
  enum class Store : uint8_t {
    kNone,
    kDue,      // until it is taken
    kWriting,  // until it is written, or the room is needed
  };
  // Entry flags.
  static constexpr uint8_t kKept = 1;
  static constexpr uint8_t kUrgent = 2;  // the read or lookup under way was asked for by a lease
  static constexpr uint8_t kFailedSoon = 4;  // look-ahead read failed; the lease will try again
  static constexpr uint8_t kFailedNow = 8;   // an urgent read failed; the lease reports it
  static constexpr uint8_t kCrcKnown = 16;
  static constexpr uint8_t kSuspect = 32;  // the last read's checksum differed; read once more
  static constexpr uint8_t kInTier = 64;   // the second tier holds it, for all we know

  struct Entry {
    uint64_t offset = 0;
    Arena::Block block = Arena::kNone;
    uint32_t length = 0;
    uint16_t pins = 0;
    uint16_t ahead = 0;
    State state : 2 = State::kAbsent;
    Store store : 2 = Store::kNone;
    bool dead : 1 = false;  // invalidated: stays only while leases have it
    uint8_t flags = 0;
    JobId owner = kNoJob;  // of a kept one: whose quota it takes
  };
  static_assert(sizeof(Entry) == 24);
  static constexpr uint16_t kMaxRefs = std::numeric_limits<uint16_t>::max();
  // Entry 24, checksum 4, allocator node 40, two epochs' orders and the permutation being made 12.
  static constexpr uint64_t kBytesPerSample = 80;

  struct Dataset {
    static Dataset Sized(std::span<const uint32_t> lengths);
    // `samples` whose lengths OnLengths will tell; until it has told some, they count as `guess`
    // each.
    static Dataset Unsized(size_t samples, uint32_t guess);
    // The second tier holds the sample. Before it is added; not twice for one.
    void AddInTier(SampleId s) {
      entries[s].flags |= kInTier;
      --uncovered;
    }

    std::vector<Entry> entries;
    std::vector<uint32_t> crcs;
    uint64_t rounded_bytes = 0;  // of samples without a length: as if they had the others' mean
    uint64_t mean_rounded = 0;
    size_t unsized = 0;          // samples without a length
    size_t dead = 0;             // samples that were invalidated; no sum here counts them
    uint64_t sized_bytes = 0;    // rounded, of the others
    uint64_t allotted = 0;       // samples that were given memory so far
    uint64_t kept_bytes = 0;     // of its samples that the memory tier keeps
    uint32_t largest = 0;        // length of a sample
    uint64_t batch_samples = 0;  // of one batch of each open stream
    // Samples that may be kept, and that neither memory keeps nor the second tier holds.
    uint64_t uncovered = 0;
    SampleId clock_hand = 0;  // where the search for a kept sample to give up goes on
    // Whoever fetches its samples keeps them: the memory tier does not, and the second tier only
    // what other nodes asked for. Set before the first stream over it.
    bool passing = false;
    TierShape tier;  // set before the first stream over it, and once more when it has grown
    ReadCosts costs;
    std::shared_ptr<const Catalog> layout;  // for grouped reads; set before the first stream
    DatasetId id = 0;
    uint64_t parked = 0;                    // 0: in use; else the more, the later it was parked
    const RemoteSamples* remote = nullptr;  // null: nothing is remote
    std::vector<uint8_t> share;             // KeepShare by sample; empty: all may be kept

    // `shares`: of the samples at the end; empty: they live here.
    void Resize(size_t samples, std::span<const uint8_t> shares = {});
    void UpdateMean();
    bool Dead(SampleId s) const { return entries[s].dead; }
    // Of samples with a length, how many were not used yet; fewer where samples are read
    // repeatedly.
    size_t SizedAhead() const {
      const uint64_t sized = entries.size() - unsized;
      return static_cast<size_t>(sized - std::min(sized, allotted));
    }
    // Whether the memory tier or the folder has the sample.
    bool Held(SampleId s) const {
      const Entry& e = entries[s];
      return (e.flags & kInTier) || ((e.flags & kKept) && e.state == State::kResident);
    }
    // Bit s: Held(s).
    std::vector<std::byte> HeldBits() const;
    // Since the last call; at the first one, everything held is new.
    HeldChanges TakeHeldChanges();
    // Its part in Held() may have changed.
    void Touch(SampleId s);
    // Whether a read would ask another node for it; that is no load on the source.
    bool Remote(SampleId s) const { return remote != nullptr && remote->IsRemote(id, s); }
    // Whether a read is held back until other nodes have joined.
    bool AwaitsNodes(SampleId s) const { return remote != nullptr && remote->AwaitsNodes(id, s); }
    KeepShare ShareOf(SampleId s) const {
      return share.empty() ? KeepShare::kHome : static_cast<KeepShare>(share[s]);
    }
    // Kept, and not living here.
    bool Spare(SampleId s) const {
      return (entries[s].flags & kKept) && ShareOf(s) != KeepShare::kHome;
    }

   private:
    // What TakeHeldChanges has returned, and what may differ from it since; empty: never asked.
    std::vector<bool> announced_;
    std::vector<bool> is_touched_;
    std::vector<SampleId> touched_;
  };

  struct Bytes {
    uint64_t kept = 0;   // by the memory tier
    uint64_t spare = 0;  // of those, what does not live here
    // Of home samples that no tier holds: memory and folder both leave room for them.
    uint64_t reserved = 0;
    // Of samples that are neither kept nor pinned nor only waiting for their copy: there or being
    // read, and those that are there.
    uint64_t ahead = 0;
    uint64_t ready = 0;
    uint64_t storing = 0;  // of samples that are in memory only because their copy waits
    uint64_t pinned = 0;   // of samples that consumers hold and the memory tier does not
  };

  Residency(const SchedulerOptions& options, Arena& arena, SchedulerCommon& common,
            const RemoteSamples* remote)
      : options_(options), arena_(arena), common_(common), remote_(remote) {}

  DatasetId Add(Dataset dataset);
  // Under a number that no data set has: one that was removed, or any beyond those there are.
  void AddAs(DatasetId d, Dataset dataset);
  // Nobody uses it: no stream is open over it, nothing of it is pinned, read or stored.
  void Park(DatasetId d);
  void Unpark(DatasetId d);
  // Gives up what memory keeps of a parked one, looking at no more than `most` samples from
  // `*next` on, which it moves. True: that was all.
  bool GiveUpParked(DatasetId d, SampleId* next, size_t most);
  // The file of a parked one's sample is another one now: what memory keeps of it goes.
  void ForgetParked(DatasetId d, SampleId s);
  // Takes out a parked one that memory has nothing of; the caller destroys the tables where that
  // may take its time.
  Dataset Remove(DatasetId d);
  // More samples at the data set's end.
  void Append(DatasetId d, std::span<const uint32_t> lengths, std::span<const uint8_t> shares);
  // The sample, which has no copy for the second tier under way, is dead from now on.
  void Invalidate(DatasetId d, SampleId s);
  const std::vector<Dataset>& datasets() const { return datasets_; }
  const Dataset& dataset(DatasetId d) const { return datasets_[d]; }
  Dataset& dataset(DatasetId d) { return datasets_[d]; }
  // True: some could not be had.
  bool OnLengths(DatasetId d, std::span<const SampleLength> lengths);

  // What may be kept: one KeepShare a sample, or empty for everything. What is kept against it goes
  // when room is needed, before anything else does.
  void SetShare(DatasetId d, std::vector<uint8_t> share);
  // Of some samples; those not named stay. Nothing happens where everything may be kept.
  void ChangeShares(DatasetId d, std::span<const std::pair<SampleId, KeepShare>> changes);
  // Changes SchedulerOptions::keep_bytes; a tier that holds more gives up what is not in use.
  void SetKeepBytes(uint64_t bytes);
  // What look-ahead may have, as the tuner finds it. What is not needed of that, as the use of
  // staging shows, may be kept.
  void SetAheadBytes(uint64_t bytes);
  // After a change of streams, or of what is set aside: how much the memory tier leaves to staging.
  void ChooseStaging();
  // The most that the memory tier takes, as things are.
  uint64_t keep_quota() const;
  bool WouldKeep(DatasetId d, SampleId s, JobId job) const;
  // Gives up a kept sample that is not in use, of `job` if given; false: there is none.
  bool EvictOne(const JobId* job = nullptr);
  // One that a parked data set has; false: there is none.
  bool EvictOneParked();

  // A block for an absent sample from what is free, and, for one that lives here and would be kept,
  // from copies of what does not; kNone: there is none.
  Arena::Block FindBlock(DatasetId d, SampleId s, bool keep);
  // The sample is read into `block`. `asked`: for a lease. `keep`: what WouldKeep said.
  void BeginRead(DatasetId d, SampleId s, Arena::Block block, bool asked, bool keep, JobId job);
  // Its read goes on in another block. The former one, which is the caller's.
  Arena::Block ReplaceBlock(DatasetId d, SampleId s, Arena::Block block);
  // A read has succeeded, from where is known. True: the sample is resident. False: its bytes
  // differ from an earlier read's, and are to be read once more.
  bool Accept(const ReadAction& read, uint32_t crc, Origin from);
  // The block, which was set aside, holds the sample's bytes. It is kept where that is allowed,
  // else given up.
  void Adopt(DatasetId d, SampleId s, Arena::Block block, uint32_t crc);
  // The second tier has it, or turned out not to. What is dead is in none.
  void SetInTier(DatasetId d, SampleId s, bool in_tier);
  void SetStore(DatasetId d, SampleId s, Store store);

  void Pin(Entry& e) {
    Uncount(e);
    ++e.pins;
    Count(e);
  }
  void Unpin(DatasetId d, SampleId s);
  void AddAhead(Entry& e, int32_t n) {
    Uncount(e);
    e.ahead = static_cast<uint16_t>(e.ahead + n);
    Count(e);
  }
  // Once the last reason to stay is gone.
  void MaybeFree(DatasetId d, SampleId s);
  // Whatever the reasons; a copy that is due is kept for it.
  void FreeBlock(DatasetId d, SampleId s);

  const Bytes& bytes() const { return bytes_; }

 private:
  Entry& entry(DatasetId d, SampleId s) { return datasets_[d].entries[s]; }
  const Entry& entry(DatasetId d, SampleId s) const { return datasets_[d].entries[s]; }
  void NoteOrigin(const ReadAction& read, Origin from);
  void SetResident(DatasetId d, SampleId s, uint32_t crc);
  // Not covered by a tier, though it may be.
  static bool Uncovered(const Entry& e) { return !e.dead && !(e.flags & (kKept | kInTier)); }
  static bool OnlyStoring(const Entry& e) { return e.store != Store::kNone && e.ahead == 0; }
  // What Bytes counts changes only between these two.
  void Uncount(const Entry& e);
  void Count(const Entry& e);
  // Flags that decide whether a tier holds the sample change through these.
  void SetFlag(DatasetId d, SampleId s, uint8_t flag);
  void ClearFlag(DatasetId d, SampleId s, uint8_t flag);
  // Its cover by a tier changes, or its share does.
  void Cover(DatasetId d, SampleId s);
  void Uncover(DatasetId d, SampleId s);
  void Keep(DatasetId d, SampleId s, JobId job);
  void Unkeep(DatasetId d, SampleId s);
  bool MayKeep(DatasetId d, SampleId s, uint64_t bytes, JobId job) const;
  // Keeps a sample that has a block, if it may be; copies of what lives elsewhere make room.
  void KeepIfMay(DatasetId d, SampleId s, JobId job);
  bool EvictAmong(const JobId* job, bool spare_only);
  void LetParkedGo(uint64_t open_bytes);
  bool LetSpareGo();
  void EvictExcess();
  uint64_t StagingUsed() const { return bytes_.ahead + bytes_.pinned + bytes_.storing; }
  // What staging needed lately; 0: not known yet.
  uint64_t RecentUse();

  SchedulerOptions options_;  // keep_bytes changes while running
  Arena& arena_;
  SchedulerCommon& common_;
  const RemoteSamples* const remote_;
  std::vector<Dataset> datasets_;
  uint64_t staging_bytes_ = 0;
  uint64_t ahead_need_ = 0;  // of staging_bytes_, for look-ahead; 0: not known
  uint64_t used_need_ = 0;   // of staging_bytes_, as its use shows; 0: not known
  // The most that staging held since the window began and in the one before; the bytes that were
  // begun to be read in this one, and those that were evicted because no room was found.
  uint64_t use_peak_ = 0;
  uint64_t use_before_ = 0;
  uint64_t use_begun_ = 0;
  uint64_t use_evicted_ = 0;
  uint64_t use_floor_ = 0;  // with less, kept samples came and went
  uint64_t parked_ = 0;     // how often one was parked
  size_t parked_now_ = 0;
  Bytes bytes_;
};

}  // namespace forebay
