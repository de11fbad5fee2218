// Membership in etcd: each node's key below the job's prefix, under a lease that its node keeps; a
// watch tells of the others. One thread has it all.

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/thread.h"
#include "base/thread_annotations.h"
#include "control/etcd_store.h"
#include "peer/membership.h"
#include "peer/membership_message.h"
#include "peer/membership_view.h"
#include "peer/secret.h"

namespace forebay::peer {
namespace {

using control::EtcdStore;
using control::LeaseId;
using control::StoreEvent;
using control::StoreSnapshot;
using control::StoreWatch;

class EtcdMembership final : public Membership {
 public:
  EtcdMembership(const MembershipOptions& options, std::unique_ptr<EtcdStore> store)
      : options_(options),
        prefix_(EtcdPrefix(options.cluster) + "nodes/"),
        secret_key_(EtcdPrefix(options.cluster) + "secret"),
        own_key_(StrCat(prefix_, options.cluster.node)),
        fork_generation_(ForkGeneration()),
        published_(options.cluster.nodes),
        store_(std::move(store)) {}

  ~EtcdMembership() override {
    if (fork_generation_ != ForkGeneration()) {  // a child: the thread is its parent's
      (void)thread_.release();
      return;
    }
    {
      MutexLock lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_ != nullptr) thread_->join();
  }

  Status Start() {
    if (published_.event_fd() < 0) return ErrnoStatus(errno, "eventfd");
    published_.SetHealth(
        Status(Code::kUnavailable, StrCat("etcd at ", options_.cluster.etcd, ": not asked yet")));
    auto started = StartThread<std::thread>("forebay-members", [this] { Run(); });
    if (!started) return started.error();
    thread_ = std::make_unique<std::thread>(*std::move(started));
    return Status();
  }

  View Current() const override {
    if (fork_generation_ != ForkGeneration()) return {};
    return published_.Current();
  }
  int event_fd() const override { return published_.event_fd(); }
  void Suspect(uint32_t node, uint64_t incarnation, const std::string& why) override {
    MutexLock lock(mutex_);
    AddOpinion({node, incarnation, false, why}, &opinions_);
  }
  void Trust(uint32_t node, uint64_t incarnation) override {
    MutexLock lock(mutex_);
    AddOpinion({node, incarnation, true, ""}, &opinions_);
  }
  Status health() const override { return published_.health(); }
  std::string Describe() const override {
    const Status now = health();
    return StrCat(
        "node ", options_.cluster.node, " of ", options_.cluster.nodes, " by ",
        options_.cluster.source.empty() ? "options" : options_.cluster.source, ", ",
        now.ok() ? StrCat("registered in etcd at ", options_.cluster.etcd) : now.message(), "; ",
        published_.Describe());
  }
  MembershipCounts counts() const override { return published_.counts(); }
  std::string Holder() const override { return StrCat("etcd at ", options_.cluster.etcd); }

 private:
  void Run() {
    while (!Stopping()) {
      now_ = SteadyClock().Now();
      Status status = Contact();
      if (status.code() == Code::kChanged) {  // for good
        published_.SetHealth(status);
        Pause(3600 * kSecond);
        continue;
      }
      if (!status.ok()) {
        published_.SetHealth(status);
        reached_ = false;
        watch_.reset();
      }
      TakeWords();
      Publish();
      // Etcd is left alone for a while after a failure.
      if (!status.ok()) Pause(std::min<Nanos>(options_.lease / 5, kSecond));
    }
    // Leaves: its key goes with its lease.
    if (lease_ != 0) (void)store_->Revoke(lease_);
  }

  bool Stopping() {
    MutexLock lock(mutex_);
    return stop_;
  }
  void Pause(Nanos wait) {
    MutexLock lock(mutex_);
    const Nanos until = SteadyClock().Now() + wait;
    while (!stop_) {
      const Nanos left = until - SteadyClock().Now();
      if (left <= 0) return;
      changed_.wait_for(lock.native(), std::chrono::nanoseconds(left));
    }
  }

  // One turn: the own key, the list, then what the watch tells within a short wait.
  Status Contact() {
    if (lease_ != 0 && now_ >= next_beat_) {
      const Status alive = store_->KeepAlive(lease_);
      if (alive.code() == Code::kNotFound) {
        lease_ = 0;  // this node was silent for too long
      } else if (!alive.ok()) {
        return alive;
      }
      next_beat_ = now_ + options_.lease / 5;
    }
    if (lease_ == 0) {
      const Result<LeaseId> lease = store_->GrantLease(options_.lease);
      if (!lease) return lease.error();
      lease_ = *lease;
      next_beat_ = now_ + options_.lease / 5;
      const Status put = store_->Put(own_key_, Value(), lease_);
      if (!put.ok()) {
        lease_ = 0;
        return put;
      }
      registered_ = true;
      watch_.reset();
    }
    if (now_ >= next_renewal_) {
      // The job's secret stays for as long as somebody is there.
      next_renewal_ = now_ + 3600 * kSecond;
      const auto secret = store_->Leader(secret_key_);
      if (secret && *secret) (void)store_->KeepAlive((*secret)->lease);
    }
    // Who answers no more may send no news either.
    if (store_->Describe() != watched_) watch_.reset();
    if (watch_ == nullptr) {
      const Result<StoreSnapshot> list = store_->Range(prefix_);
      if (!list) return list.error();
      for (auto& [node, member] : members_) member.alive = false;
      for (const control::StoreEntry& entry : list->entries) {
        FOREBAY_RETURN_IF_ERROR(Apply(entry.key, entry.value));
      }
      version_ = std::max(version_, static_cast<uint64_t>(std::max<int64_t>(0, list->revision)));
      Result<std::unique_ptr<StoreWatch>> watch = store_->Watch(prefix_, list->revision + 1);
      if (!watch) return watch.error();
      watch_ = *std::move(watch);
      watched_ = store_->Describe();
      published_.CountContact();
      published_.SetHealth(Status());
      reached_ = true;
      suspicions_.Clear();
      return Status();
    }
    const Nanos wait = std::clamp<Nanos>(next_beat_ - now_, kMilli, 100 * kMilli);
    Result<std::vector<StoreEvent>> events = watch_->Poll(wait);
    if (!events) {
      // The list again, and a new watch; an etcd that is not there shows then.
      watch_.reset();
      return events.error().code() == Code::kChanged ? Status() : events.error();
    }
    for (const StoreEvent& event : *events) {
      FOREBAY_RETURN_IF_ERROR(Apply(event.key, event.value));
      version_ = std::max(version_, static_cast<uint64_t>(std::max<int64_t>(0, event.revision)));
    }
    return Status();
  }

  // kChanged: another process has taken this node's place.
  Status Apply(std::string_view key, const std::optional<std::string>& value) {
    key.remove_prefix(std::min(prefix_.size(), key.size()));
    uint32_t node = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), node);
    if (error != std::errc() || end != key.data() + key.size() || node >= options_.cluster.nodes) {
      return Status();  // nobody's
    }
    if (!value) {
      const auto at = members_.find(node);
      if (at != members_.end()) at->second.alive = false;
      // Its own key: the lease has ended.
      if (node == options_.cluster.node) lease_ = 0;
      return Status();
    }
    std::string_view bytes = *value;
    const Result<std::optional<frame::Frame>> taken = frame::Take(&bytes, frame::kLongest);
    const frame::Register* said =
        taken && *taken ? std::get_if<frame::Register>(&**taken) : nullptr;
    if (said == nullptr || said->member.node != node || said->nodes != options_.cluster.nodes) {
      return Status();
    }
    if (node == options_.cluster.node && registered_ &&
        said->member.incarnation != options_.self.incarnation) {
      return Status(Code::kChanged, StrCat("another process has taken the place of node ", node,
                                           " in etcd at ", options_.cluster.etcd));
    }
    members_[node] = said->member;
    members_[node].alive = true;
    return Status();
  }

  std::string Value() const {
    frame::Register mine;
    mine.nodes = options_.cluster.nodes;
    mine.member = options_.self;
    mine.member.alive = true;
    std::string value;
    frame::Append(mine, &value);
    return value;
  }

  // While etcd answers its leases decide.
  void TakeWords() {
    std::vector<PeerOpinion> opinions;
    {
      MutexLock lock(mutex_);
      opinions.swap(opinions_);
    }
    if (reached_) return;
    for (const PeerOpinion& opinion : opinions) {
      if (opinion.node != options_.cluster.node) suspicions_.OnOpinion(opinion);
    }
  }

  void Publish() {
    if (members_.empty()) return;
    std::vector<Member> members;
    for (const auto& [node, member] : members_) members.push_back(member);
    // An etcd that does not answer is no reason to give anyone up; connections tell.
    if (!reached_) suspicions_.Apply(&members);
    published_.Publish(std::move(members), version_);
  }

  const MembershipOptions options_;
  const std::string prefix_;
  const std::string secret_key_;
  const std::string own_key_;
  const uint64_t fork_generation_;
  mutable PublishedView published_;

  Mutex mutex_;
  std::condition_variable changed_;
  bool stop_ GUARDED_BY(mutex_) = false;
  std::vector<PeerOpinion> opinions_ GUARDED_BY(mutex_);

  // The thread's own.
  Nanos now_ = 0;
  std::unique_ptr<EtcdStore> store_;
  std::unique_ptr<StoreWatch> watch_;
  std::string watched_;  // the one of etcd's members that was asked last when it began
  LeaseId lease_ = 0;
  bool registered_ = false;
  bool reached_ = false;
  Nanos next_beat_ = 0;
  Nanos next_renewal_ = 0;
  std::map<uint32_t, Member> members_;
  uint64_t version_ = 0;
  OwnSuspicions suspicions_;

  std::unique_ptr<std::thread> thread_;  // a forked child leaves it alone
};

}  // namespace

Result<std::unique_ptr<Membership>> JoinByEtcd(const MembershipOptions& options) {
  Result<std::unique_ptr<EtcdStore>> store =
      EtcdStore::Open(options.cluster.EtcdEndpoints(),
                      std::clamp<Nanos>(options.lease / 2, 100 * kMilli, 2 * kSecond));
  if (!store) return store.error();
  auto membership = std::make_unique<EtcdMembership>(options, *std::move(store));
  FOREBAY_RETURN_IF_ERROR(membership->Start());
  return std::unique_ptr<Membership>(std::move(membership));
}

}  // namespace forebay::peer
