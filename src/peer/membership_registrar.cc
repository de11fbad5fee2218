// The registrar, node 0: the others register with it, and it tells them all who is there.
#include <memory>
#include <string>
#include <vector>

#include "peer/membership_role.h"

namespace forebay::peer {
namespace {

class Registrar final : public Role {
 public:
  Registrar(const MembershipOptions& options, Links& links, PublishedView& published)
      : links_(links),
        at_(*ParseHostPort(options.cluster.master)),
        own_(options, links, published) {}

  std::string Describe() const override { return StrCat("registrar at ", at_.ToString()); }

  void Begin() override {
    own_.Begin();
    links_.ListenOn(at_);
  }

  void Tick() override {
    own_.table().Expire(links_.now());
    Spread();
    own_.PublishIfChanged();
  }

  void OnOpinion(const PeerOpinion& opinion) override { own_.OnOpinion(opinion); }
  uint64_t version() const override { return own_.table().version(); }

  bool OnRegister(Link& link, const frame::Register& theirs) override {
    if (!own_.Fits(link, theirs)) return false;
    // It may know more than a registrar that was started anew.
    own_.table().Above(theirs.version);
    own_.table().Adopt(theirs.known, theirs.version, links_.now());
    if (!own_.Admit(link, theirs)) return false;
    links_.Connected(link);
    return true;
  }

  void OnTraffic(const Link& link) override {
    own_.table().Renew(link.node, link.incarnation, links_.now());
  }

  bool OnMessage(Link& link, const frame::Frame& message) override {
    const uint64_t id = link.id;
    const auto* suspicion = std::get_if<frame::Suspicion>(&message);
    if (suspicion == nullptr) {
      links_.Refuse(id);
      return false;
    }
    own_.OnOpinion({suspicion->node, suspicion->incarnation, false, suspicion->why});
    return links_.all().contains(id);
  }

  void OnEnd(const Link& link) override { own_.table().Gone(link.node, link.incarnation); }

 private:
  // The news to everyone whose link has room.
  void Spread() {
    const MemberTable& table = own_.table();
    std::vector<uint64_t> behind;
    for (const auto& [id, link] : links_.all()) {
      if (link.phase == Link::Phase::kReady && link.sent < table.version() && link.out.empty()) {
        behind.push_back(id);
      }
    }
    for (const uint64_t id : behind) {
      const auto at = links_.all().find(id);
      if (at == links_.all().end()) continue;
      frame::Changes changes{table.version(), table.Since(at->second.sent)};
      at->second.sent = changes.version;
      (void)links_.Send(at->second, changes);
    }
  }

  Links& links_;
  const HostPort at_;
  OwnTable own_;
};

}  // namespace

std::unique_ptr<Role> MakeRegistrar(const MembershipOptions& options, Links& links,
                                    PublishedView& published) {
  return std::make_unique<Registrar>(options, links, published);
}

}  // namespace forebay::peer
