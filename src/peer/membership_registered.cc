// A node that registers with node 0 and believes what that says, for as long as it is there.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "peer/membership_role.h"

namespace forebay::peer {
namespace {

constexpr size_t kMostUnsent = 64 << 10;  // of suspicions to a registrar that does not read

class Registered final : public Role {
 public:
  Registered(const MembershipOptions& options, Links& links, PublishedView& published)
      : options_(options),
        links_(links),
        published_(published),
        registrar_at_(*ParseHostPort(options.cluster.master)) {}

  std::string Describe() const override {
    return StrCat("registered with node 0 at ", registrar_at_.ToString());
  }

  void Begin() override {
    published_.SetHealth(Status(Code::kUnavailable,
                                StrCat("node 0 at ", registrar_at_.ToString(), ": not asked yet")));
    links_.DialTo(0, registrar_at_);
  }

  void Tick() override {
    const Dial& dial = links_.dials().front();
    if (dial.last_received > 0 && links_.now() - dial.last_received >= options_.lease) OnLost();
    PublishIfChanged();
  }

  void OnOpinion(const PeerOpinion& opinion) override {
    const auto& [node, incarnation, trusted, why] = opinion;
    if (node == options_.cluster.node) return;
    if (!trusted) {
      for (auto& [id, link] : links_.all()) {
        if (link.phase != Link::Phase::kReady) continue;
        // The registrar itself: the connection to it is what counts, and is tried now.
        if (node == link.node) {
          link.deadline = std::min(link.deadline, links_.now() + options_.lease / 4);
          if (link.out.empty()) (void)links_.Send(link, frame::Beat{});
        } else if (link.out.size() < kMostUnsent) {
          (void)links_.Send(link, frame::Suspicion{node, incarnation, why});
        }
        return;
      }
    }
    suspicions_.OnOpinion(opinion);
    changed_ = true;
  }

  void OnAnswer(const frame::Answer& answer, frame::Register* own) override {
    own->version = published_.version();
    // A registrar that was started anew; once somebody has told it, its versions are far above.
    if (!base_.empty() && base_.front().node == 0 &&
        base_.front().incarnation != answer.incarnation &&
        answer.version < published_.version() + options_.cluster.nodes) {
      own->known = base_;
    }
  }

  bool OnRegister(Link& link, const frame::Register& /*theirs*/) override {
    links_.Refuse(link.id);
    return false;
  }
  bool registers_alone() const override { return true; }

  bool OnMessage(Link& link, const frame::Frame& message) override {
    if (const auto* changes = std::get_if<frame::Changes>(&message)) {
      return OnChanges(link, *changes);
    }
    links_.Refuse(link.id);
    return false;
  }

  // The others keep what they know, and decide for themselves.
  void OnLost() override {
    if (registrar_lost_ || base_.empty()) return;
    registrar_lost_ = true;
    changed_ = true;
  }

  void OnUnreached(const Dial& dial) override {
    const bool answers = dial.last.code() == Code::kPermissionDenied;
    published_.SetHealth(Status(
        dial.last.code(), StrCat("node 0 at ", dial.at.ToString(),
                                 answers ? ": " : " does not answer: ", dial.last.message())));
  }

 private:
  bool OnChanges(Link& link, const frame::Changes& changes) {
    for (const Member& member : changes.members) {
      if (member.node >= options_.cluster.nodes) {
        links_.Refuse(link.id);
        return false;
      }
    }
    if (link.first_view) base_.clear();
    link.first_view = false;
    for (const Member& member : changes.members) {
      const auto at =
          std::lower_bound(base_.begin(), base_.end(), member,
                           [](const Member& a, const Member& b) { return a.node < b.node; });
      if (at != base_.end() && at->node == member.node) {
        *at = member;
      } else {
        base_.insert(at, member);
      }
    }
    base_version_ = changes.version;
    registrar_lost_ = false;
    suspicions_.Clear();
    changed_ = true;
    if (link.phase == Link::Phase::kRegister) {
      links_.Connected(link);
      published_.SetHealth(Status());
    }
    return true;
  }

  void PublishIfChanged() {
    if (!std::exchange(changed_, false) || base_.empty()) return;
    std::vector<Member> members = base_;
    if (registrar_lost_) {
      for (Member& member : members) {
        if (member.node == 0) member.alive = false;
      }
      suspicions_.Apply(&members);
    }
    published_.Publish(std::move(members), base_version_);
  }

  const MembershipOptions& options_;
  Links& links_;
  PublishedView& published_;
  const HostPort registrar_at_;
  std::vector<Member> base_;  // what the registrar said
  uint64_t base_version_ = 0;
  bool registrar_lost_ = false;
  OwnSuspicions suspicions_;
  bool changed_ = false;
};

}  // namespace

std::unique_ptr<Role> MakeRegistered(const MembershipOptions& options, Links& links,
                                     PublishedView& published) {
  return std::make_unique<Registered>(options, links, published);
}

}  // namespace forebay::peer
