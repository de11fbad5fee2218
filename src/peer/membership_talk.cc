// What comes over a member's connection, up to where both have registered: the proofs.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "peer/membership_links.h"
#include "peer/membership_role.h"

namespace forebay::peer {
namespace {

constexpr std::string_view kSecretRemedy =
    " has another secret: it is another job's, or the home folder is not shared (set "
    "FOREBAY_PEER_SECRET to a file that all nodes share)";

}  // namespace

void Links::OnReady(uint64_t id, uint32_t events) {
  const auto at = links_.find(id);
  if (at == links_.end()) return;
  Link& link = at->second;
  if (link.phase == Link::Phase::kConnecting) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(link.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    Dial* dial = DialOf(link);
    if (error != 0) {
      End(link);
      links_.erase(at);
      if (dial != nullptr) {
        dial->link = 0;
        ConnectFailed(*dial, error);
      }
      return;
    }
    if (dial != nullptr) dial->reached = true;
    link.phase = Link::Phase::kAnswer;
    link.handshake = Handshake::Initiate(options_.secret, self(), link.node, RandomDigest());
    frame::Hello hello;
    hello.node = self().node;
    hello.incarnation = self().incarnation;
    hello.nonce = link.handshake->nonce();
    link.writing = true;  // as it is watched
    Send(link, hello);
    return;
  }
  if ((events & EPOLLOUT) != 0 && !Flush(link)) return;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) Receive(id);
}

void Links::Receive(uint64_t id) {
  // A bound, so that one does not keep the thread from the others.
  for (int round = 0; round < 8; ++round) {
    const auto at = links_.find(id);
    if (at == links_.end()) return;
    Link& link = at->second;
    std::array<char, 16 << 10> bytes;
    const ssize_t got = ::recv(link.fd.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      const std::string why = got == 0 ? "closed its connection" : std::strerror(errno);
      if (link.unproven()) {
        Refuse(id);
      } else {
        Close(id, Status(Code::kUnavailable, why));
      }
      return;
    }
    link.in.append(bytes.data(), static_cast<size_t>(got));
    if (!TakeFrames(id)) return;
  }
}

// False, here and below: the link is gone.
bool Links::TakeFrames(uint64_t id) {
  Link& link = links_.at(id);
  std::string in = std::exchange(link.in, {});
  std::string_view rest = in;
  while (true) {
    const size_t longest =
        link.phase >= Link::Phase::kRegister ? frame::kLongest : frame::kLongestUnproven;
    Result<std::optional<frame::Frame>> taken = frame::Take(&rest, longest);
    if (!taken) {
      Refuse(id);
      return false;
    }
    if (!*taken) break;
    if (!OnFrame(link, **taken)) return false;
  }
  in.erase(0, in.size() - rest.size());
  link.in = std::move(in);
  return true;
}

bool Links::OnFrame(Link& link, frame::Frame& message) {
  using Phase = Link::Phase;
  if (auto* refused = std::get_if<frame::Refused>(&message); refused != nullptr && !link.accepted) {
    // Who has not proven the secret may be anybody: it does not decide, and is asked again.
    const bool proven = link.phase >= Phase::kRegister;
    Dial* dial = DialOf(link);
    if (dial != nullptr && refused->final && proven) dial->stopped = true;
    Close(link.id, Status(Code::kPermissionDenied,
                          StrCat("refused: ", refused->why,
                                 proven ? "" : " (by one who has not proven the job's secret)")));
    return false;
  }
  switch (link.phase) {
    case Phase::kHello:
      if (auto* hello = std::get_if<frame::Hello>(&message)) return OnHello(link, *hello);
      break;
    case Phase::kAnswer:
      if (auto* answer = std::get_if<frame::Answer>(&message)) return OnAnswer(link, *answer);
      break;
    case Phase::kProof:
      if (auto* proof = std::get_if<frame::ProofOf>(&message)) {
        if (!link.handshake->OnProof(proof->proof).ok()) break;
        link.phase = Phase::kRegister;
        return true;
      }
      break;
    case Phase::kRegister:
      if (auto* theirs = std::get_if<frame::Register>(&message)) {
        return role_->OnRegister(link, *theirs);
      }
      if (role_->registers_alone()) return OnProven(link, message);
      break;
    case Phase::kReady:
      return OnProven(link, message);
    case Phase::kConnecting:
      break;
  }
  Refuse(link.id);
  return false;
}

bool Links::OnHello(Link& link, const frame::Hello& hello) {
  const uint32_t own = self().node;
  link.handshake =
      Handshake::Accept(options_.secret, self(), options_.cluster.nodes, RandomDigest());
  const Result<Digest> proof =
      link.handshake->OnHello({hello.node, hello.incarnation}, hello.nonce);
  // Of two nodes the higher one connects, unless the list's holder may be any.
  const bool wrong_way = hello.node < own && !role_->any_may_connect();
  if (!proof || hello.protocol != frame::kProtocol || wrong_way || hello.incarnation == 0) {
    SendLast(link,
             frame::Refused{false, StrCat("protocol ", hello.protocol, ", node ", hello.node,
                                          "; node ", own, " has protocol ", frame::kProtocol,
                                          " and ", options_.cluster.nodes, " nodes in its job")});
    return false;
  }
  if (IsCut(hello.node)) {
    Close(link.id, Status(Code::kDeadlineExceeded, "the link is cut"));
    return false;
  }
  link.node = hello.node;
  link.incarnation = hello.incarnation;
  link.phase = Link::Phase::kProof;
  frame::Answer answer;
  answer.node = own;
  answer.incarnation = self().incarnation;
  answer.version = role_->version();
  answer.nonce = link.handshake->nonce();
  answer.proof = *proof;
  return Send(link, answer);
}

bool Links::OnAnswer(Link& link, const frame::Answer& answer) {
  const Result<Digest> proof =
      link.handshake->OnAnswer({answer.node, answer.incarnation}, answer.nonce, answer.proof);
  if (!proof) {
    Close(link.id, Status(Code::kPermissionDenied, StrCat("who answers there", kSecretRemedy)));
    return false;
  }
  link.incarnation = answer.incarnation;
  link.phase = Link::Phase::kRegister;
  link.next_beat = now_ + options_.lease / 5;
  frame::Register own = Own();
  role_->OnAnswer(answer, &own);
  return Send(link, frame::ProofOf{*proof}) && Send(link, own);
}

frame::Register Links::Own() const {
  frame::Register own;
  own.nodes = options_.cluster.nodes;
  own.member = options_.self;
  own.member.alive = true;
  own.member.registrar = own_at_;
  return own;
}

// Its Hello was right, its proof was not, or it left before: most likely it saw that ours is wrong.
void Links::OnUnproven(const Link& link) {
  if (!link.accepted || link.phase != Link::Phase::kProof || !role_->decides()) return;
  for (const auto& [id, other] : links_) {
    if (other.node == link.node && other.phase == Link::Phase::kReady) return;  // a stranger
  }
  SetTrouble(link.node, Status(Code::kPermissionDenied,
                               StrCat("who connects as node ", link.node, kSecretRemedy)));
}

void Links::Connected(Link& link) {
  link.phase = Link::Phase::kReady;
  if (troubles_.erase(link.node) > 0 && role_->decides()) PublishHealth();
  link.deadline = now_ + options_.lease;
  published_.CountContact();
  if (Dial* dial = DialOf(link)) {
    dial->pause = 0;
    dial->last_received = now_;
    dial->last = Status();
  }
}

bool Links::OnProven(Link& link, frame::Frame& message) {
  link.deadline = now_ + options_.lease;
  Dial* dial = DialOf(link);
  if (dial != nullptr) dial->last_received = now_;
  role_->OnTraffic(link);
  if (const auto* beat = std::get_if<frame::Beat>(&message)) {
    return beat->reply || !link.out.empty() || Send(link, frame::Beat{true});
  }
  if (std::holds_alternative<frame::Leave>(message)) {
    if (dial != nullptr) role_->OnLost(link.node);
    Close(link.id, Status(Code::kUnavailable, "it has left"));
    return false;
  }
  return role_->OnMessage(link, message);
}

}  // namespace forebay::peer
