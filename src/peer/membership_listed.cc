// A node of a static list: every two have a connection, and each keeps the table for itself.
#include <memory>
#include <string>

#include "peer/membership_role.h"

namespace forebay::peer {
namespace {

class Listed final : public Role {
 public:
  Listed(const MembershipOptions& options, Links& links, PublishedView& published)
      : options_(options),
        links_(links),
        at_(*ParseHostPort(options.cluster.nodes_at[options.cluster.node])),
        own_(options, links, published) {}

  std::string Describe() const override { return StrCat("listens on ", at_.ToString()); }

  void Begin() override {
    own_.Begin();
    links_.ListenOn(at_);
    for (uint32_t node = 0; node < options_.cluster.node; ++node) {
      links_.DialTo(node, *ParseHostPort(options_.cluster.nodes_at[node]));
    }
  }

  void Tick() override {
    own_.table().Expire(links_.now());
    own_.PublishIfChanged();
  }

  void OnOpinion(const PeerOpinion& opinion) override { own_.OnOpinion(opinion); }
  uint64_t version() const override { return own_.table().version(); }

  bool OnRegister(Link& link, const frame::Register& theirs) override {
    if (!Fits(options_, links_, link, theirs) || !own_.Admit(link, theirs)) return false;
    if (link.accepted && !links_.Send(link, links_.Own())) return false;
    links_.Connected(link);
    return true;
  }

  void OnTraffic(const Link& link) override {
    own_.table().Renew(link.node, link.incarnation, links_.now());
  }

  bool OnMessage(Link& link, const frame::Frame& /*message*/) override {
    links_.Refuse(link.id);
    return false;
  }

  // A node that is not there yet, or no more, is no trouble; one that refuses is.
  void OnUnreached(const Dial& dial) override {
    if (dial.last.code() != Code::kPermissionDenied) return;
    links_.SetTrouble(
        dial.node, Status(dial.last.code(), StrCat("node ", dial.node, " at ", dial.at.ToString(),
                                                   ": ", dial.last.message())));
  }

  void OnEnd(const Link& link) override { own_.table().Gone(link.node, link.incarnation); }

 private:
  const MembershipOptions& options_;
  Links& links_;
  const HostPort at_;
  OwnTable own_;
};

}  // namespace

std::unique_ptr<Role> MakeListed(const MembershipOptions& options, Links& links,
                                 PublishedView& published) {
  return std::make_unique<Listed>(options, links, published);
}

}  // namespace forebay::peer
