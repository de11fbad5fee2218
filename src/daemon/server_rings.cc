// The server's rings: batches announced to clients before they ask.
#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "daemon/server.h"

namespace forebay {

Status Server::OnSeek(Peer& peer, const wire::Seek& seek) {
  // A refused seek leaves everything where it is.
  FOREBAY_RETURN_IF_ERROR(engine_.Seek(seek.stream, seek.epoch, seek.position));
  const auto found = peer.rings.find(seek.stream);
  if (found == peer.rings.end()) return Status();
  Ring& ring = *found->second;
  FOREBAY_RETURN_IF_ERROR(ring.writer.ReadPosition());
  DropAnnounced(peer, ring);
  ring.writer.Rewind();
  ring.ended = false;
  ring.failed = false;
  ring.wanted_since = -1;
  ring.blocked_since = -1;
  peer.streams[ring.stream].watch.Sought(seek.epoch);
  return Status();
}

void Server::CountTaken(Peer& peer, const Ring& ring, const Ring::Announced& entry) {
  StreamWatch& watch = peer.streams[ring.stream].watch;
  if (entry.lease != kNoLease) {
    watch.Took(entry.epoch, entry.index, entry.samples, entry.bytes);
  } else if (entry.ends_epoch) {
    watch.EndedEpoch();
  }
}

void Server::ChargeWait(Peer& peer, Ring& ring, Nanos now) {
  if (ring.wanted_since < 0) return;
  const Nanos since = std::exchange(ring.wanted_since, -1);
  ring.waits[static_cast<size_t>(ring.cause)] += now - since;
  StreamInfo& info = peer.streams[ring.stream];
  // Who works ahead of a consumer tells what that one waited for.
  if (info.opened.ahead_of_consumer) return;
  engine_.CountStall(ring.cause, now - since);
  info.watch.Waited(ring.cause, since, now);
}

// What the entry's wait was for, most of it: the client charges it to one cause, and the last thing
// that a batch lacks is always a read.
uint8_t Server::MainCause(Ring& ring) {
  const std::array<Nanos, kStallCauses> waits = std::exchange(ring.waits, {});
  const auto most = std::max_element(waits.begin(), waits.end());
  return static_cast<uint8_t>(*most > 0 ? most - waits.begin()
                                        : static_cast<ptrdiff_t>(ring.cause));
}

void Server::DropAnnounced(Peer& peer, Ring& ring) {
  // Those at the front may have been taken since the last look: they stay the client's loans.
  const size_t untaken = std::min<size_t>(ring.writer.outstanding(), ring.announced.size());
  const size_t taken = ring.announced.size() - untaken;
  for (size_t i = 0; i < taken; ++i) CountTaken(peer, ring, ring.announced[i]);
  for (size_t i = taken; i < ring.announced.size(); ++i) {
    const LeaseId lease = ring.announced[i].lease;
    if (lease != kNoLease && peer.leases.erase(lease) != 0) (void)engine_.Release(lease);
  }
  for (const Ring::Announced& entry : ring.announced) Forget(ring, entry);
  ring.announced.clear();
}

void Server::Forget(Ring& ring, const Ring::Announced& entry) {
  ahead_bytes_ -= entry.bytes;
  ring.ahead_bytes -= entry.bytes;
}

bool Server::MayGoAhead(const Ring& ring) const {
  if (pressed_) return false;
  // Rings that nobody takes from, a validation loader's or a stopped process's, leave the others a
  // part.
  return ahead_bytes_ + ring.batch_bytes <= ahead_limit_ ||
         ring.ahead_bytes + ring.batch_bytes <= ahead_limit_ / (2 * ring_count_);
}

void Server::DropRing(Peer& peer, StreamId stream) {
  const auto found = peer.rings.find(stream);
  if (found == peer.rings.end()) return;
  Ring& ring = *found->second;
  if (ring.writer.ReadPosition().ok()) {
    released_.clear();
    (void)ring.writer.PopReleases(&released_);
    for (const LeaseId lease : released_) {
      if (peer.leases.erase(lease) != 0) (void)engine_.Release(lease);
    }
  }
  DropAnnounced(peer, ring);
  peer.rings.erase(found);
  rings_.Set(--ring_count_);
}

Status Server::HeldByOthers(const Peer& peer) const {
  uint64_t all = 0;
  uint64_t own = 0;
  uint64_t most = 0;
  const Peer* who = &peer;
  for (const auto& [id, other] : peers_) {
    uint64_t bytes = 0;
    for (const auto& [lease, size] : other->leases) bytes += size;
    for (const auto& [number, share] : other->shares) bytes += share.bytes;
    all += bytes;
    if (other.get() == &peer) {
      own = bytes;
    } else if (bytes > most) {
      most = bytes;
      who = other.get();
    }
  }
  if (own >= all - own) return Status();
  return Status(Code::kResourceExhausted,
                StrCat("the next batch finds no room: other processes hold ", all - own, " of ",
                       engine_.arena_bytes(), " bytes, process ", who->pid, " most of them"));
}

bool Server::Announce(Peer& peer, Ring& ring, Nanos now) {
  const bool wanted = ring.writer.outstanding() == 0 && ring.writer.wanted();
  if (wanted && ring.wanted_since < 0) {
    ring.wanted_since = now;
    ring.cause = engine_.WaitCause(ring.stream);
  }
  // Ahead of the asking: only while it takes memory from nobody who waits, and no error is told
  // that nobody may ever come to.
  if (!wanted && (ring.failed || !MayGoAhead(ring))) return false;
  Result<TakeKind> kind = engine_.Take(ring.stream, 0, &loan_);
  if (kind && *kind == TakeKind::kPending) {
    ring.waiting = true;
    const StallCause cause = wanted ? engine_.WaitCause(ring.stream) : ring.cause;
    if (cause != ring.cause) {
      // What it lacks now is another thing: the rest of the wait is charged to that.
      ChargeWait(peer, ring, now);
      ring.wanted_since = now;
      ring.cause = cause;
    }
    const Status blocked = wanted ? engine_.Blocked(ring.stream) : Status();
    if (blocked.ok()) {
      ring.blocked_since = -1;
      return false;
    }
    if (ring.blocked_since < 0) ring.blocked_since = now;
    const Nanos since = now - ring.blocked_since;
    if (since <= std::min(options_.release_wait, options_.others_wait)) return false;
    const Status others = HeldByOthers(peer);
    if (!others.ok()) {
      // It need not stand still for what it cannot help.
      ring.failed = true;
      ring.announced.emplace_back();
      ring.writer.PublishError(others, static_cast<uint8_t>(ring.cause), wire::RingEntry::kNoRoom);
      return false;
    }
    if (since <= options_.release_wait) return false;
    ring.blocked_since = -1;
    kind = blocked;
  }
  if (!kind && !wanted) {
    ring.failed = true;
    return false;
  }
  ring.failed = false;
  ring.waiting = false;
  ring.blocked_since = -1;
  ChargeWait(peer, ring, now);
  const uint8_t cause = MainCause(ring);
  if (!kind) {
    ring.failed = true;  // the next try is for the next asking
    ring.announced.emplace_back();
    ring.writer.PublishError(kind.error(), cause);
    return false;
  }
  wire::RingEntry entry;
  entry.kind = static_cast<uint8_t>(*kind);
  entry.cause = cause;
  if (*kind != TakeKind::kBatch) {
    ring.ended = *kind == TakeKind::kEndOfStream;
    ring.announced.emplace_back();
    ring.announced.back().ends_epoch = *kind == TakeKind::kEndOfEpoch;
    ring.writer.Publish(entry, {}, {}, {});
    return true;
  }
  entry.lease = loan_.lease;
  entry.dataset = loan_.dataset;
  entry.epoch = loan_.epoch;
  entry.index = loan_.index;
  ring.batch_bytes = 0;
  for (const uint32_t length : loan_.lengths) ring.batch_bytes += length;
  ahead_bytes_ += ring.batch_bytes;
  ring.ahead_bytes += ring.batch_bytes;
  peer.leases.emplace(loan_.lease, ring.batch_bytes);
  ring.announced.push_back(
      {loan_.lease, ring.batch_bytes, loan_.samples.size(), loan_.epoch, loan_.index, false});
  ring.writer.Publish(entry, loan_.samples, loan_.offsets, loan_.lengths);
  return true;
}

Status Server::Pump(Peer& peer, Ring& ring, Nanos now) {
  ring.writer.Awake();
  FOREBAY_RETURN_IF_ERROR(ring.writer.ReadPosition());
  const size_t before = ring.announced.size();
  while (ring.announced.size() > ring.writer.outstanding()) {
    Forget(ring, ring.announced.front());
    CountTaken(peer, ring, ring.announced.front());
    ring.announced.pop_front();
  }
  ring.pace.Saw(static_cast<uint32_t>(before - ring.announced.size()), now);
  released_.clear();
  FOREBAY_RETURN_IF_ERROR(ring.writer.PopReleases(&released_));
  for (const LeaseId lease : released_) {
    // Nobody gives back what another one reads, or what was not taken yet.
    const bool untaken = std::any_of(ring.announced.begin(), ring.announced.end(),
                                     [&](const auto& entry) { return entry.lease == lease; });
    if (!untaken && peer.leases.erase(lease) != 0) {
      FOREBAY_RETURN_IF_ERROR(engine_.Release(lease));
    }
  }
  ring.waiting = false;
  if (ring.ended && ring.writer.outstanding() == 0 && ring.writer.wanted()) {
    ring.ended = false;  // said again, to who asks again
  }
  while (ring.writer.free_slots() != 0 && !ring.ended && Announce(peer, ring, now)) {
  }
  return Status();
}

void Server::PumpAll() {
  const auto pump = [this](bool only_waiting) {
    const Nanos now = SteadyClock().Now();
    bool waiting = false;
    for (auto& [id, peer] : peers_) {
      for (auto& [stream, ring] : peer->rings) {
        if (peer->gone || (only_waiting && !ring->waiting)) continue;
        if (!Pump(*peer, *ring, now).ok()) {
          dropped_total_.Add(1);
          MarkGone(*peer);
        }
        waiting |= ring->waiting;
      }
    }
    return waiting;
  };
  if (pump(false)) {
    // Armed before the asking: what happens after an ask has looked is signalled.
    engine_.ArmProgress();
    (void)pump(true);
  }
  size_t ready = 0;
  for (const auto& [id, peer] : peers_) {
    for (const auto& [stream, ring] : peer->rings) ready += ring->announced.size();
  }
  ready_batches_.Set(ready);
}

Nanos Server::SleepOnRings() {
  Nanos wait = wire::RingPace::kLongest;
  bool blocked = std::any_of(pending_.begin(), pending_.end(),
                             [](const Pending& ask) { return ask.blocked_since >= 0; });
  for (const auto& [id, peer] : peers_) {
    for (const auto& [stream, ring] : peer->rings) blocked |= ring->blocked_since >= 0;
  }
  pressed_ = blocked;
  for (auto& [id, peer] : peers_) {
    for (auto& [stream, ring] : peer->rings) {
      if (peer->gone) continue;
      if (ring->writer.Sleep(blocked, ring->wanted_since >= 0)) wait = 0;
      if (const uint32_t ready = ring->writer.outstanding(); ready != 0) {
        wait = std::min(wait, ring->pace.SleepFor(ready));
      }
    }
  }
  return wait;
}

}  // namespace forebay
