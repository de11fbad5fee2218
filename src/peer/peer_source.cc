#include "peer/peer_source.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace forebay::peer {

Result<std::unique_ptr<PeerSource>> PeerSource::Make(std::shared_ptr<Exchange> exchange,
                                                     std::shared_ptr<PeerDataset> dataset,
                                                     std::unique_ptr<Source> inner) {
  Result<WakeFd> wake = WakeFd::Make();
  if (!wake) return wake.error();
  FOREBAY_RETURN_IF_ERROR(wake->Watch(inner->event_fd()));
  FOREBAY_RETURN_IF_ERROR(wake->Watch(dataset->event_fd()));
  return std::unique_ptr<PeerSource>(
      new PeerSource(std::move(exchange), std::move(dataset), std::move(inner), *std::move(wake)));
}

PeerSource::PeerSource(std::shared_ptr<Exchange> exchange, std::shared_ptr<PeerDataset> dataset,
                       std::unique_ptr<Source> inner, WakeFd wake)
    : exchange_(std::move(exchange)),
      dataset_(std::move(dataset)),
      creator_(getpid()),
      slots_(inner->capacity()),
      wake_(std::move(wake)),
      inner_(std::move(inner)) {}

PeerSource::~PeerSource() {
  if (getpid() != creator_) return;
  dataset_->Leave();
  // Nothing may write to the reads' memory once they are gone. Every ask ends within its time. Some
  // may have been answered, and wait for a Reap that had room for them.
  asked_ -= answers_.size() - answers_at_;
  while (asked_ > 0) {
    pollfd waiting{dataset_->event_fd(), POLLIN, 0};
    poll(&waiting, 1, 50);
    answers_.clear();
    dataset_->TakeAnswers(&answers_);
    asked_ -= std::min(asked_, answers_.size());
  }
  dataset_->Retire();
}

std::string PeerSource::Describe() const { return StrCat("peers, then ", inner_->Describe()); }

bool PeerSource::MayWait(Nanos now) const { return now - dataset_->added < exchange_->join_wait; }

int32_t PeerSource::Elsewhere(SampleId sample) const {
  if (!exchange_->coordinate) return -1;
  const Choice choice = dataset_->ChooseOne(sample, false);
  return choice.to == Choice::To::kPeer ? static_cast<int32_t>(choice.node) : -1;
}

bool PeerSource::AwaitsNodes(SampleId sample) const {
  if (!exchange_->coordinate || !MayWait(SteadyClock().Now())) return false;
  return dataset_->ChooseOne(sample, true).to == Choice::To::kWait;
}

PeerCost& PeerSource::Cost(uint32_t node) {
  if (costs_.size() <= node) costs_.resize(node + 1);
  if (costs_[node] == nullptr)
    costs_[node] = std::make_unique<PeerCost>(exchange_->request_wait / 2);
  return *costs_[node];
}

size_t PeerSource::Submit(std::span<const SourceRead> reads) {
  const size_t taken = std::min(reads.size(), slots_.left());
  if (taken == 0) return 0;
  const Nanos now = SteadyClock().Now();
  placed_.clear();
  samples_.clear();
  for (const SourceRead& read : reads.first(taken)) {
    const uint32_t index = slots_.Take();
    slots_[index] = {.read = read, .start = now, .at = At::kWaiting};
    placed_.push_back(index);
    samples_.push_back(read.sample);
  }
  if (exchange_->coordinate) {
    plan_ = dataset_->plan_digest();
    dataset_->Choose(samples_, MayWait(now), &choices_);
  } else {
    choices_.assign(taken, Choice{});
  }
  Dispatch(true, now);
  Flush(now);
  return taken;
}

void PeerSource::Dispatch(bool groups, Nanos now) {
  // A group is what is read in one piece: one that goes to a peer ends it, so that the source does
  // not read what lies between.
  uint32_t group = 0;
  uint32_t group_of = 0;
  for (size_t i = 0; i < placed_.size(); ++i) {
    const uint32_t index = placed_[i];
    Slot& slot = slots_[index];
    Choice choice = choices_[i];
    if (slot.read.skip_tier) choice = {};
    if (choice.to == Choice::To::kPeer) {
      PeerCost& cost = Cost(choice.node);
      if (cost.Avoid(slot.read.dest.size(), source_model_, inner_depth_, now)) {
        exchange_->avoided.Add(1);
        choice = {};
      } else {
        cost.OnAsk(now);
        slot.node = choice.node;
        slot.depth = static_cast<uint32_t>(cost.in_flight());
        slot.at = At::kPeer;
        slot.start = now;
        ++asked_;
        asks_.push_back({.dataset = dataset_,
                         .slot = index,
                         .node = choice.node,
                         .sample = slot.read.sample,
                         .held_only = choice.held_only,
                         .urgent = slot.read.urgent,
                         .dest = slot.read.dest,
                         .start = now,
                         .plan = plan_});
        group = 0;
        continue;
      }
    }
    if (choice.to == Choice::To::kWait) {
      slot.at = At::kWaiting;
      waiting_.push_back(index);
      group = 0;
      continue;
    }
    if (!groups || slot.read.group == 0) {
      ToInner(index, 0, now);
      continue;
    }
    if (group == 0 || group_of != slot.read.group) {
      if (++last_group_ == 0) ++last_group_;
      group = last_group_;
      group_of = slot.read.group;
    }
    ToInner(index, group, now);
  }
  if (!asks_.empty() && !exchange_->Push(&asks_)) {
    for (const Ask& ask : asks_) {
      slots_[ask.slot].node = kNoNode;
      --asked_;
      ToInner(ask.slot, 0, now);
    }
    asks_.clear();
  }
}

void PeerSource::ToInner(uint32_t index, uint32_t group, Nanos now) {
  Slot& slot = slots_[index];
  slot.at = At::kInner;
  slot.node = kNoNode;
  slot.start = now;
  slot.depth = static_cast<uint32_t>(++inner_depth_);
  to_inner_.push_back({.tag = index,
                       .sample = slot.read.sample,
                       .dest = slot.read.dest,
                       .group = group,
                       .urgent = slot.read.urgent});
}

void PeerSource::Flush(Nanos now) {
  if (!to_inner_.empty()) {
    const size_t taken = inner_->Submit(to_inner_);
    to_inner_.erase(to_inner_.begin(), to_inner_.begin() + static_cast<ptrdiff_t>(taken));
  }
  if (answers_at_ < answers_.size()) {
    wake_.SetTime(0);
  } else if (!to_inner_.empty()) {
    wake_.SetTime(now + kMilli);
  } else if (!waiting_.empty()) {
    wake_.SetTime(dataset_->added + exchange_->join_wait);
  } else {
    wake_.SetTime(WakeFd::kNever);
  }
}

void PeerSource::TryWaiting(Nanos now) {
  if (waiting_.empty()) return;
  const uint64_t version = dataset_->version();
  if (version == version_ && MayWait(now)) return;
  version_ = version;
  ChooseAgain(waiting_, now);
}

void PeerSource::ChooseAgain(std::vector<uint32_t>& slots, Nanos now) {
  if (slots.empty()) return;
  placed_.clear();
  placed_.swap(slots);
  samples_.clear();
  for (const uint32_t index : placed_) samples_.push_back(slots_[index].read.sample);
  plan_ = dataset_->plan_digest();
  dataset_->Choose(samples_, MayWait(now), &choices_);
  Dispatch(false, now);
}

size_t PeerSource::Reap(std::span<SourceDone> out) {
  const Nanos now = SteadyClock().Now();
  size_t taken = ReapAnswers(out, now);
  ChooseAgain(moved_, now);
  TryWaiting(now);
  // What failed over is with the inner source before it is asked for what has ended.
  if (!to_inner_.empty()) Flush(now);
  taken += ReapInner(out.subspan(taken), now);
  Flush(now);
  return taken;
}

size_t PeerSource::ReapAnswers(std::span<SourceDone> out, Nanos now) {
  if (answers_at_ == answers_.size()) {
    answers_.clear();
    answers_at_ = 0;
  }
  dataset_->TakeAnswers(&answers_);
  size_t taken = 0;
  for (; answers_at_ < answers_.size() && taken < out.size(); ++answers_at_) {
    const Answer& answer = answers_[answers_at_];
    Slot& slot = slots_[answer.slot];
    PeerCost& cost = Cost(slot.node);
    --asked_;
    if (answer.outcome == Outcome::kMoved && !slot.moved) {
      slot.moved = true;
      cost.OnFailure(now);
      moved_.push_back(answer.slot);
      continue;
    }
    if (answer.outcome != Outcome::kArrived) {
      if (answer.outcome == Outcome::kTimeout) {
        cost.OnTimeout(slot.read.dest.size(), slot.depth, now - slot.start, now);
      } else if (answer.outcome == Outcome::kRefused && dataset_->growing) {
        cost.OnRefused(now);
      } else {
        cost.OnFailure(now);
      }
      ToInner(answer.slot, 0, now);
      continue;
    }
    const Nanos latency = now - slot.start;
    cost.OnAnswer(slot.read.dest.size(), slot.depth, latency, now);
    SourceDone& done = out[taken++];
    done = {};
    done.tag = slot.read.tag;
    done.crc = answer.crc;
    done.latency_ns = latency;
    done.peer = static_cast<int32_t>(slot.node);
    slot.at = At::kFree;
    slots_.Free(answer.slot);
  }
  return taken;
}

size_t PeerSource::ReapInner(std::span<SourceDone> out, Nanos now) {
  const size_t taken = inner_->Reap(out);
  for (SourceDone& done : out.first(taken)) {
    const auto index = static_cast<uint32_t>(done.tag);
    Slot& slot = slots_[index];
    if (done.status.ok()) {
      source_model_.OnRead(slot.read.dest.size(), slot.depth, now - slot.start);
    }
    --inner_depth_;
    done.tag = slot.read.tag;
    slot.at = At::kFree;
    slots_.Free(index);
  }
  return taken;
}

}  // namespace forebay::peer
