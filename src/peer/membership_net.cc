// Membership without anything else to run: one node holds the list and the others connect to it, or
// (static) every two nodes have a connection and each keeps the table for itself. One thread has it
// all.
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/thread.h"
#include "base/thread_annotations.h"
#include "peer/membership.h"
#include "peer/membership_links.h"
#include "peer/membership_role.h"
#include "peer/membership_view.h"

namespace forebay::peer {
namespace {

std::unique_ptr<Role> MakeRole(const MembershipOptions& options, Links& links,
                               PublishedView& published) {
  if (options.cluster.method == ClusterSpec::Method::kStatic) {
    return MakeListed(options, links, published);
  }
  return MakeLaunched(options, links, published);
}

class NetMembership final : public Membership {
 public:
  explicit NetMembership(const MembershipOptions& options)
      : options_(options),
        fork_generation_(ForkGeneration()),
        published_(options.cluster.nodes),
        links_(options_, published_),
        role_(MakeRole(options_, links_, published_)) {}

  ~NetMembership() override {
    if (fork_generation_ != ForkGeneration()) {  // a child: the thread is its parent's
      (void)thread_.release();
      return;
    }
    {
      MutexLock lock(mutex_);
      stop_ = true;
    }
    links_.Wake();
    if (thread_ != nullptr) {
      thread_->join();
    } else if (!options_.own_thread) {
      links_.SendLeaves();
    }
  }

  Status Start() {
    if (published_.event_fd() < 0) return ErrnoStatus(errno, "eventfd");
    FOREBAY_RETURN_IF_ERROR(links_.Open(role_.get()));
    role_->Begin();
    if (!options_.own_thread) return Status();
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
    Post({node, incarnation, false, why});
  }
  void Trust(uint32_t node, uint64_t incarnation) override { Post({node, incarnation, true, ""}); }
  Status health() const override { return published_.health(); }
  std::string Describe() const override {
    const Status now = health();
    return StrCat("node ", options_.cluster.node, " of ", options_.cluster.nodes, " by ",
                  options_.cluster.source.empty() ? "options" : options_.cluster.source, ", ",
                  now.ok() ? role_->Describe() : now.message(), "; ", published_.Describe());
  }
  MembershipCounts counts() const override { return published_.counts(); }
  Nanos Step() override {
    links_.Wait(0);
    (void)Round();
    return links_.WaitMillis() * kMilli;
  }
  std::string Holder() const override {
    return options_.cluster.method == ClusterSpec::Method::kLauncher ? role_->Describe() : "";
  }

 private:
  void Run() {
    while (Round()) links_.Wait(links_.WaitMillis());
    links_.SendLeaves();
  }

  // False: it is to end.
  bool Round() {
    links_.ReadClock();
    std::vector<PeerOpinion> opinions;
    {
      MutexLock lock(mutex_);
      if (stop_) return false;
      opinions.swap(opinions_);
    }
    for (const PeerOpinion& opinion : opinions) role_->OnOpinion(opinion);
    links_.Advance();
    role_->Tick();
    return true;
  }

  void Post(PeerOpinion opinion) {
    {
      MutexLock lock(mutex_);
      AddOpinion(std::move(opinion), &opinions_);
    }
    links_.Wake();
  }

  const MembershipOptions options_;
  const uint64_t fork_generation_;
  mutable PublishedView published_;

  Mutex mutex_;
  bool stop_ GUARDED_BY(mutex_) = false;
  std::vector<PeerOpinion> opinions_ GUARDED_BY(mutex_);

  // The thread's own.
  Links links_;
  const std::unique_ptr<Role> role_;

  std::unique_ptr<std::thread> thread_;  // a forked child leaves it alone
};

}  // namespace

Result<std::unique_ptr<Membership>> JoinByNetwork(const MembershipOptions& options) {
  auto membership = std::make_unique<NetMembership>(options);
  FOREBAY_RETURN_IF_ERROR(membership->Start());
  return std::unique_ptr<Membership>(std::move(membership));
}

}  // namespace forebay::peer
