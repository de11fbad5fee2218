// A node under a launcher. One node at a time holds the list of members: node 0, or the lowest that
// lives when that is gone. The others register with it and believe what it says.
// docs/decisions/0062-who-holds-the-list.md has the protocol.
#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "peer/holder_file.h"
#include "peer/membership_role.h"

namespace forebay::peer {
namespace {

constexpr size_t kMostUnsent = 64 << 10;  // of suspicions to a holder that does not read
constexpr size_t kFirstAsked = 2;         // candidates at a time; twice as many each time
constexpr size_t kMostProbes = 3;         // of the dead, at a time
// The version in an answer of one who holds no list: it wants to be told none.
constexpr uint64_t kNoList = UINT64_MAX;

class Launched final : public Role {
 public:
  Launched(const MembershipOptions& options, Links& links, PublishedView& published)
      : options_(options),
        self_(options.cluster.node),
        links_(links),
        published_(published),
        master_(*ParseHostPort(options.cluster.master)),
        note_(self_ == 0 ? "" : options.holder_file, options.secret) {}

  std::string Describe() const override {
    MutexLock lock(mutex_);
    const Status untold = note_.error();
    return holding_ && !untold.ok() ? StrCat(description_, " (", untold.message(), ")")
                                    : description_;
  }

  void Begin() override {
    if (self_ == 0) {
      links_.ListenOn(master_);
      Hold({});
      return;
    }
    if (!options_.host.empty()) (void)links_.ListenHere(options_.host);
    published_.SetHealth(
        Status(Code::kUnavailable, StrCat("node 0 at ", master_.ToString(), ": not asked yet")));
    Say(StrCat("looking for node 0 at ", master_.ToString()), false);
    links_.DialTo(0, master_);
  }

  void Tick() override {
    std::vector<HolderHint> wanted;
    if (state_ == State::kLooking) wanted = Look();
    if (state_ == State::kHolding) {
      own_->table().Expire(links_.now());
      Spread();
      own_->PublishIfChanged();
      // One that is gone, or has yielded, may have written to it last.
      if (links_.now() >= next_tell_) Tell();
      wanted = Probes();
    } else {
      if (state_ == State::kRegistered) wanted.push_back({holder_->node, AddressOf(holder_->node)});
      PublishIfChanged();
    }
    DialOnly(wanted);
  }

  void OnOpinion(const PeerOpinion& opinion) override {
    if (state_ == State::kHolding) {
      own_->OnOpinion(opinion);
      return;
    }
    const auto& [node, incarnation, trusted, why] = opinion;
    if (node == self_) return;
    const auto at = links_.all().find(up_);
    if (!trusted && state_ == State::kRegistered && at != links_.all().end()) {
      Link& link = at->second;
      // The holder itself: the connection to it is what counts, and is tried now.
      if (node == link.node) {
        link.deadline = std::min(link.deadline, links_.now() + options_.lease / 4);
        if (link.out.empty()) (void)links_.Send(link, frame::Beat{});
      } else if (link.out.size() < kMostUnsent) {
        (void)links_.Send(link, frame::Suspicion{node, incarnation, why});
      }
      return;
    }
    suspicions_.OnOpinion(opinion);
    changed_ = true;
  }

  uint64_t version() const override {
    return state_ == State::kHolding ? own_->table().version() : kNoList;
  }
  bool registers_alone() const override { return true; }
  bool any_may_connect() const override { return true; }
  bool decides() const override { return state_ == State::kHolding; }

  void OnAnswer(const frame::Answer& answer, frame::Register* own) override {
    own->version = published_.version();
    if (state_ == State::kHolding) {
      own->holds = true;
      if (answer.version != kNoList) own->known = own_->table().Since(0);
      return;
    }
    // Another holder, or one that was started anew; once somebody has told it, its versions are far
    // above.
    if (holder_ && answer.version < published_.version() + options_.cluster.nodes &&
        (holder_->node != answer.node || holder_->incarnation != answer.incarnation)) {
      own->known = base_;
    }
  }

  bool OnRegister(Link& link, const frame::Register& theirs) override {
    if (!Fits(options_, links_, link, theirs)) return false;
    if (theirs.holds && state_ == State::kHolding && link.node < self_) {
      Yield(link);
      SetTold(link.node, theirs.member.registrar, link.node);
    }
    if (state_ != State::kHolding) {
      if (theirs.holds && state_ == State::kLooking) {
        SetTold(link.node, theirs.member.registrar, link.node);
      }
      return links_.Send(link, Where());  // the other side closes
    }
    // It may know more than one that was started anew.
    MemberTable& table = own_->table();
    table.Above(theirs.known.empty() ? theirs.version : theirs.version + options_.cluster.nodes);
    table.Adopt(theirs.known, theirs.version, links_.now(), theirs.holds);
    if (!own_->Admit(link, theirs)) return false;
    links_.Connected(link);
    if (theirs.holds) Tell();  // the file may name the other
    return true;
  }

  void OnTraffic(const Link& link) override {
    if (state_ == State::kHolding) {
      own_->table().Renew(link.node, link.incarnation, links_.now());
    } else if (link.id == up_) {
      heard_ = links_.now();
    }
  }

  bool OnMessage(Link& link, const frame::Frame& message) override {
    if (!link.accepted) {
      if (const auto* changes = std::get_if<frame::Changes>(&message)) {
        return OnChanges(link, *changes);
      }
      if (const auto* redirect = std::get_if<frame::Redirect>(&message)) {
        return OnRedirect(link, *redirect);
      }
    } else if (const auto* suspicion = std::get_if<frame::Suspicion>(&message)) {
      if (state_ != State::kHolding || link.phase != Link::Phase::kReady) return true;
      const uint64_t id = link.id;
      own_->OnOpinion({suspicion->node, suspicion->incarnation, false, suspicion->why});
      return links_.all().contains(id);
    }
    links_.Refuse(link.id);
    return false;
  }

  void OnEnd(const Link& link) override {
    if (state_ == State::kHolding && link.accepted) {
      own_->table().Gone(link.node, link.incarnation);
    } else if (state_ == State::kRegistered && link.id == up_) {
      BeginLooking();
    }
  }

  // The others keep what they know, and the lowest of them takes its part.
  void OnLost(uint32_t node) override {
    if (state_ != State::kHolding && holder_ && holder_->node == node) SetDead();
  }

  void OnUnreached(const Dial& dial) override {
    if (redirected_) return;
    if (dial.stopped) {
      Stop(dial);
      return;
    }
    std::erase(probes_, dial.node);
    // Who closes a connection that was there is alive, and is asked again.
    const bool failed = !dial.reached || dial.last.code() == Code::kDeadlineExceeded;
    if (failed) {
      alive_.erase(dial.node);
      failed_.insert(dial.node);
      if (told_ && (told_->by == dial.node || state_ == State::kHolding)) told_.reset();
      if (hint_ && hint_->node == dial.node) hint_.reset();
    }
    if (state_ == State::kHolding) return;
    const bool answers = dial.last.code() == Code::kPermissionDenied;
    if (!answers && dial.node != (holder_ ? holder_->node : 0)) return;
    published_.SetHealth(Status(
        dial.last.code(), StrCat("node ", dial.node, " at ", dial.at.ToString(),
                                 answers ? ": " : " does not answer: ", dial.last.message())));
  }

 private:
  enum class State : uint8_t {
    kLooking,     // for who holds the list
    kRegistered,  // over the link `up_`
    kHolding,
    kStopped,  // another process is this node
  };
  struct Holder {
    uint32_t node = 0;
    uint64_t incarnation = 0;
  };
  // Who holds the list, by the word of another.
  struct Told {
    HolderHint holder;
    uint32_t by = 0;
    Nanos when = 0;
  };

  // Where a node listens for members; empty: nobody knows.
  std::string AddressOf(uint32_t node) const {
    if (node == 0) return master_.ToString();
    if (told_ && told_->holder.node == node) return told_->holder.at;
    if (hint_ && hint_->node == node) return hint_->at;
    if (state_ == State::kHolding) {
      const Member* member = own_->table().Find(node);
      return member == nullptr ? "" : member->registrar;
    }
    const Member* member = Known(node);
    return member == nullptr ? "" : member->registrar;
  }

  const Member* Known(uint32_t node) const {
    const auto at = std::ranges::lower_bound(base_, node, {}, &Member::node);
    return at != base_.end() && at->node == node ? &*at : nullptr;
  }

  void SetTold(uint32_t node, const std::string& at, uint32_t by) {
    told_ = Told{{node, node == 0 ? master_.ToString() : at}, by, links_.now()};
  }

  frame::Redirect Where() const {
    if (state_ != State::kRegistered) return {frame::kNobody, ""};
    return {holder_->node, holder_->node == 0 ? "" : AddressOf(holder_->node)};
  }

  void Say(std::string text, bool holding) {
    MutexLock lock(mutex_);
    description_ = std::move(text);
    holding_ = holding;
  }

  // ---- looking

  void SetDead() {
    if (dead_ || base_.empty()) return;
    lost_ = dead_ = changed_ = true;
  }

  void BeginLooking() {
    state_ = State::kLooking;
    up_ = 0;
    asked_ = kFirstAsked;
    failed_.clear();
    alive_.clear();
    next_hint_ = links_.now();
    if (holder_) {
      Say(StrCat("node ", holder_->node, " held the list, looking for who does now"), false);
    }
  }

  // Whom to ask; or takes the list, where nobody is left to be asked.
  std::vector<HolderHint> Look() {
    const Nanos now = links_.now();
    if (holder_ && !dead_ && now - heard_ >= options_.lease) SetDead();
    if (told_ && now - told_->when >= options_.lease) told_.reset();
    if ((base_.empty() || lost_) && now >= next_hint_) {
      next_hint_ = now + options_.lease / 5;
      note_.Ask();
    }
    if (auto hint = note_.Take();
        hint && hint->node != self_ && hint->node != 0 && hint->node < options_.cluster.nodes) {
      hint_ = std::move(hint);
    }
    std::vector<HolderHint> wanted;
    const auto want = [&](uint32_t node) {
      if (node != self_) wanted.push_back({node, AddressOf(node)});
    };
    want(0);
    if (told_) {
      want(told_->holder.node);
      want(told_->by);
    }
    if (hint_) want(hint_->node);
    if (holder_) want(holder_->node);
    if (!lost_) return wanted;
    // The living below this one, lowest first.
    bool all_failed = true;
    size_t asked = 0;
    for (const Member& member : base_) {
      if (member.node >= self_) break;
      if (!member.alive || AddressOf(member.node).empty()) continue;
      if (dead_ && member.node == holder_->node) continue;
      if (asked == asked_) {
        if (!all_failed) break;
        asked_ *= 2;
      }
      ++asked;
      want(member.node);
      if (!failed_.contains(member.node)) all_failed = false;
      if (alive_.contains(member.node)) break;
    }
    if (all_failed && !told_ && !links_.own_at().empty()) TakeOver();
    return wanted;
  }

  void TakeOver() {
    const Holder before = *holder_;
    const std::set<uint32_t> silent = std::exchange(failed_, {});
    Hold(base_);
    MemberTable& table = own_->table();
    if (dead_) table.Gone(before.node, before.incarnation);
    for (const Member& member : base_) {
      if (silent.contains(member.node))
        table.Suspect(member.node, member.incarnation, links_.now());
    }
    suspicions_.Clear();
    hint_.reset();
    Tell();
  }

  // ---- holding

  // Late joiners; for node 0 the master's address does.
  void Tell() {
    next_tell_ = links_.now() + std::min<Nanos>(options_.lease, 5 * kSecond);
    if (self_ != 0) note_.Write({self_, links_.own_at()});
  }

  void Hold(const std::vector<Member>& known) {
    state_ = State::kHolding;
    up_ = 0;
    links_.ForgetTroubles();
    own_.emplace(options_, links_, published_);
    own_->Begin(known);
    Say(StrCat("registrar at ", self_ == 0 ? master_.ToString() : links_.own_at()), true);
  }

  // To a lower node that holds a list as well. This one goes on with what it knows.
  void Yield(const Link& to) {
    base_ = own_->table().Since(0);
    base_version_ = own_->table().version();
    holder_ = Holder{to.node, to.incarnation};
    heard_ = links_.now();
    lost_ = dead_ = false;
    probes_.clear();
    BeginLooking();
  }

  // The members of a list that this node has given up.
  void SendOn() {
    std::vector<uint64_t> members;
    for (const auto& [id, link] : links_.all()) {
      if (link.accepted && link.phase == Link::Phase::kReady) members.push_back(id);
    }
    for (const uint64_t id : members) {
      const auto at = links_.all().find(id);
      if (at != links_.all().end() && links_.Send(at->second, Where())) {
        links_.Close(id, Status(Code::kCancelled, "another node holds the list"));
      }
    }
  }

  // The news to everyone whose link has room.
  void Spread() {
    const MemberTable& table = own_->table();
    std::vector<uint64_t> behind;
    for (const auto& [id, link] : links_.all()) {
      if (link.accepted && link.phase == Link::Phase::kReady && link.sent < table.version() &&
          link.out.empty()) {
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

  // Some of the dead, in turn: they may live behind a link that was cut, with a list of their own.
  std::vector<HolderHint> Probes() {
    const MemberTable& table = own_->table();
    const auto dead = [&](uint32_t node) {
      const Member* member = table.Find(node);
      return node != self_ && (member == nullptr || !member->alive);
    };
    std::erase_if(probes_, [&](uint32_t node) { return !dead(node); });
    if (links_.now() >= next_probe_ && probes_.size() < kMostProbes) {
      next_probe_ = links_.now() + options_.lease / 20;
      for (uint32_t step = 0; step < options_.cluster.nodes; ++step) {
        const uint32_t node = probed_ = (probed_ + 1) % options_.cluster.nodes;
        if (node == 0 || !dead(node) || AddressOf(node).empty() ||
            std::ranges::find(probes_, node) != probes_.end()) {
          continue;
        }
        probes_.push_back(node);
        break;
      }
    }
    std::vector<HolderHint> wanted;
    if (dead(0)) wanted.push_back({0, master_.ToString()});
    for (const uint32_t node : probes_) wanted.push_back({node, AddressOf(node)});
    if (told_ && dead(told_->holder.node)) wanted.push_back(told_->holder);
    return wanted;
  }

  void DialOnly(const std::vector<HolderHint>& wanted) {
    std::vector<uint32_t> ended;
    for (const Dial& dial : links_.dials()) {
      if (std::ranges::find(wanted, dial.node, &HolderHint::node) == wanted.end()) {
        ended.push_back(dial.node);
      }
    }
    for (const uint32_t node : ended) links_.EndDial(node);
    for (const HolderHint& one : wanted) {
      if (const Result<HostPort> at = ParseHostPort(one.at)) links_.DialTo(one.node, *at);
    }
  }

  // ---- what others say

  bool OnRedirect(Link& link, const frame::Redirect& redirect) {
    const uint32_t by = link.node;
    if (redirect.holder == frame::kNobody || redirect.holder == self_ ||
        redirect.holder >= options_.cluster.nodes) {
      // One that was started anew knows no list, and takes none.
      const Member* member = Known(by);
      if (member != nullptr && member->incarnation == link.incarnation) {
        failed_.erase(by);
        alive_.insert(by);
      } else {
        failed_.insert(by);
      }
      if (told_ && told_->by == by) told_.reset();
      // The one that held it, and knows no other: somebody has to.
      if (holder_ && holder_->node == by && holder_->incarnation == link.incarnation) lost_ = true;
    } else {
      failed_.erase(by);
      alive_.insert(by);
      SetTold(redirect.holder, redirect.at, by);
    }
    if (holder_ && holder_->node == by && holder_->incarnation == link.incarnation) {
      heard_ = links_.now();
      dead_ = false;
      changed_ = true;
    }
    std::erase(probes_, by);
    if (state_ == State::kHolding) Tell();  // as it may have held it
    redirected_ = true;
    links_.Close(link.id, Status(Code::kUnavailable, "it does not hold the list"));
    redirected_ = false;
    return false;
  }

  bool OnChanges(Link& link, const frame::Changes& changes) {
    for (const Member& member : changes.members) {
      if (member.node >= options_.cluster.nodes) {
        links_.Refuse(link.id);
        return false;
      }
    }
    if ((state_ == State::kHolding && link.node > self_) || state_ == State::kStopped ||
        (state_ == State::kRegistered && link.id != up_)) {
      links_.Close(link.id, Status(Code::kCancelled, "another node holds the list"));
      return false;
    }
    if (state_ == State::kHolding) Yield(link);
    if (link.first_view) base_.clear();
    link.first_view = false;
    for (const Member& member : changes.members) {
      const auto at = std::ranges::lower_bound(base_, member.node, {}, &Member::node);
      if (at != base_.end() && at->node == member.node) {
        *at = member;
      } else {
        base_.insert(at, member);
      }
    }
    base_version_ = changes.version;
    lost_ = dead_ = false;
    suspicions_.Clear();
    changed_ = true;
    if (state_ == State::kRegistered) return true;
    state_ = State::kRegistered;
    up_ = link.id;
    heard_ = links_.now();
    holder_ = Holder{link.node, link.incarnation};
    told_.reset();
    hint_.reset();
    links_.Connected(link);
    published_.SetHealth(Status());
    Say(StrCat("registered with node ", link.node, " at ", AddressOf(link.node)), false);
    SendOn();
    return true;  // that closed accepted links only
  }

  // Another process has taken this node's place: nobody is to wait for this one.
  void Stop(const Dial& dial) {
    state_ = State::kStopped;
    up_ = 0;
    links_.StopListening();
    published_.SetHealth(
        Status(dial.last.code(),
               StrCat("node ", dial.node, " at ", dial.at.ToString(), ": ", dial.last.message())));
  }

  void PublishIfChanged() {
    if (!std::exchange(changed_, false) || base_.empty()) return;
    std::vector<Member> members = base_;
    if (dead_) {
      for (Member& member : members) {
        if (member.node == holder_->node) member.alive = false;
      }
    }
    if (lost_) suspicions_.Apply(&members);
    published_.Publish(std::move(members), base_version_);
  }

  const MembershipOptions& options_;
  const uint32_t self_;
  Links& links_;
  PublishedView& published_;
  const HostPort master_;

  mutable Mutex mutex_;
  std::string description_ GUARDED_BY(mutex_);
  bool holding_ GUARDED_BY(mutex_) = false;
  HolderNote note_;

  // The thread's own.
  State state_ = State::kLooking;
  std::optional<Holder> holder_;  // the last one that this node was registered with
  std::vector<Member> base_;      // what that said, by node
  uint64_t base_version_ = 0;
  bool changed_ = false;
  uint64_t up_ = 0;    // the link to it
  Nanos heard_ = 0;    // when it was heard of last
  bool lost_ = false;  // nobody holds the list, as far as this node knows
  bool dead_ = false;  // so because `holder_` is gone
  OwnSuspicions suspicions_;

  std::set<uint32_t> failed_;  // could not be reached since this node looks
  std::set<uint32_t> alive_;   // answered, and hold no list
  size_t asked_ = kFirstAsked;
  std::optional<Told> told_;
  std::optional<HolderHint> hint_;
  Nanos next_hint_ = 0;
  bool redirected_ = false;  // a link is being closed by this node's own will

  std::optional<OwnTable> own_;
  std::vector<uint32_t> probes_;
  uint32_t probed_ = 0;
  Nanos next_probe_ = 0;
  Nanos next_tell_ = 0;
};

}  // namespace

std::unique_ptr<Role> MakeLaunched(const MembershipOptions& options, Links& links,
                                   PublishedView& published) {
  return std::make_unique<Launched>(options, links, published);
}

}  // namespace forebay::peer
