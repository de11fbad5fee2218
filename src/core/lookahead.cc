#include "core/lookahead.h"

#include <algorithm>
#include <utility>

namespace forebay {

// ---- streams and their orders -----------------------------------------------------------------

StreamId Lookahead::Open(const StreamShape& shape, JobId job, std::optional<StreamId> closed) {
  Stream stream;
  stream.shape = shape;
  stream.job = job;
  stream.next_epoch = shape.first_epoch;
  stream.next_first_position = shape.first_position;
  const StreamId id = closed.value_or(static_cast<StreamId>(streams_.size()));
  if (closed) {
    // What was under way for the old one comes too late, and is known by this.
    stream.generation = streams_[id].generation + 1;
    streams_[id] = std::move(stream);
  } else {
    streams_.push_back(std::move(stream));
  }
  if (shape.serving) ++serving_streams_;
  residency_.dataset(shape.dataset).batch_samples += shape.batch_size;
  WantOrder(id);
  return id;
}

void Lookahead::Close(StreamId id) {
  Stream& stream = streams_[id];
  Unplan(stream);
  ++stream.generation;
  if (!std::exchange(stream.open, false)) return;
  common_.jobs.Close(stream.job);
  if (stream.shape.serving) --serving_streams_;
  residency_.dataset(stream.shape.dataset).batch_samples -= stream.shape.batch_size;
}

void Lookahead::Seek(StreamId id, uint64_t epoch, uint64_t first_position) {
  Stream& stream = streams_[id];
  Unplan(stream);
  ++stream.generation;
  stream.next_epoch = epoch;
  stream.next_first_position = first_position;
  stream.last_known = false;
  stream.order_asked = false;
  stream.batch_index = 0;
  WantOrder(id);
}

void Lookahead::WantOrder(StreamId id) {
  Stream& stream = streams_[id];
  // The epoch being consumed and the one after it are known; look-ahead crosses the boundary.
  if (!stream.open || stream.last_known || stream.order_asked || stream.epochs.size() >= 2) return;
  if (stream.shape.serving) return;
  if (stream.shape.epochs != 0 &&
      stream.next_epoch >= stream.shape.first_epoch + stream.shape.epochs) {
    stream.last_known = true;
    return;
  }
  stream.order_asked = true;
  orders_.push_back({id, stream.next_epoch, stream.next_first_position, stream.generation});
}

bool Lookahead::Extend(StreamId id, uint64_t generation, uint64_t epoch,
                       std::vector<SampleId> order, bool last) {
  Stream& stream = streams_[id];
  if (!stream.open || generation != stream.generation) return false;
  stream.epochs.push_back({epoch, std::move(order)});
  stream.order_asked = false;
  stream.next_epoch = epoch + 1;
  stream.next_first_position = 0;
  stream.last_known |= last;
  WantOrder(id);
  return true;
}

std::vector<OrderAction> Lookahead::TakeOrders() { return std::exchange(orders_, {}); }

// ---- what consumers take ----------------------------------------------------------------------

Lookahead::Next Lookahead::PeekNext(StreamId id) const {
  const Stream& stream = streams_[id];
  if (stream.epochs.empty()) return Next::kUnknown;
  const uint64_t left = stream.epochs.front().order.size() - stream.taken;
  const bool ended = left == 0 || (stream.shape.drop_last && left < stream.shape.batch_size);
  return ended ? Next::kEndOfEpoch : Next::kBatch;
}

Lookahead::Batch Lookahead::TakeBatch(StreamId id) {
  Stream& stream = streams_[id];
  const std::vector<SampleId>& order = stream.epochs.front().order;
  const uint64_t n = std::min<uint64_t>(stream.shape.batch_size, order.size() - stream.taken);
  const auto first = order.begin() + static_cast<int64_t>(stream.taken);
  Batch batch;
  batch.epoch = stream.epochs.front().epoch;
  batch.index = stream.batch_index++;
  batch.samples.assign(first, first + static_cast<int64_t>(n));
  const uint64_t planned = stream.cursor_epoch > 0 ? order.size() : stream.cursor;
  for (uint64_t i = 0; i < n && stream.taken + i < planned; ++i) {
    residency_.AddAhead(entry(stream.shape.dataset, batch.samples[i]), -1);
  }
  stream.taken += n;
  if (stream.cursor_epoch == 0 && stream.cursor < stream.taken) stream.cursor = stream.taken;
  return batch;
}

void Lookahead::EndEpoch(StreamId id) {
  Stream& stream = streams_[id];
  // Positions a dropped last batch had planned are given up.
  const std::vector<SampleId>& order = stream.epochs.front().order;
  const uint64_t planned = stream.cursor_epoch > 0 ? order.size() : stream.cursor;
  for (uint64_t p = stream.taken; p < planned; ++p) UnplanPosition(stream, order[p]);
  PopEpoch(stream);
  stream.taken = 0;
  stream.batch_index = 0;
  WantOrder(id);
}

void Lookahead::PopEpoch(Stream& stream) {
  stream.epochs.pop_front();
  if (stream.cursor_epoch > 0) {
    --stream.cursor_epoch;
  } else {
    stream.cursor = 0;
  }
}

bool Lookahead::AtEnd(StreamId id) {
  if (streams_[id].last_known) return true;
  WantOrder(id);
  return false;
}

void Lookahead::OnFetch(StreamId id, SampleId s) {
  Stream& stream = streams_[id];
  int32_t& balance = stream.outstanding[s];
  if (balance > 0) residency_.AddAhead(entry(stream.shape.dataset, s), -1);
  if (--balance == 0) stream.outstanding.erase(s);
  ++stream.fetched;
  PopFetched(id);
}

void Lookahead::UndoFetch(StreamId id, SampleId s) {
  Stream& stream = streams_[id];
  if (!stream.open || stream.fetched == 0) return;  // its epoch is over, or forgotten
  --stream.fetched;
  int32_t& balance = stream.outstanding[s];
  if (++balance > 0) residency_.AddAhead(entry(stream.shape.dataset, s), 1);
  if (balance == 0) stream.outstanding.erase(s);
}

// Itemised: an epoch is over when as many samples were fetched as it has, and all were planned; the
// balance by sample carries what is out of order.
void Lookahead::PopFetched(StreamId id) {
  Stream& stream = streams_[id];
  while (!stream.epochs.empty() && stream.fetched >= stream.epochs.front().order.size()) {
    const uint64_t size = stream.epochs.front().order.size();
    if (stream.cursor_epoch == 0 && stream.cursor < size) break;
    stream.fetched -= size;
    PopEpoch(stream);
  }
  WantOrder(id);
}

// ---- the window -------------------------------------------------------------------------------

template <typename F>
void Lookahead::ForWindow(const Stream& stream, F f) {
  for (size_t i = 0; i < stream.epochs.size() && i <= stream.cursor_epoch; ++i) {
    const std::vector<SampleId>& order = stream.epochs[i].order;
    const uint64_t begin = i == 0 ? stream.taken : 0;
    const uint64_t end = i < stream.cursor_epoch ? order.size() : stream.cursor;
    for (uint64_t p = begin; p < end; ++p) f(order[p]);
  }
}

void Lookahead::CountWindows(std::vector<std::vector<uint32_t>>* ahead) const {
  for (const Stream& stream : streams_) {
    std::vector<uint32_t>& counts = (*ahead)[stream.shape.dataset];
    if (!stream.shape.itemised) {
      ForWindow(stream, [&](SampleId s) { ++counts[s]; });
      continue;
    }
    for (const auto& [s, n] : stream.outstanding) {
      if (n > 0) counts[s] += static_cast<uint32_t>(n);
    }
  }
}

void Lookahead::UnplanPosition(Stream& stream, SampleId s) {
  if (stream.shape.itemised) {
    auto it = stream.outstanding.find(s);
    if (it == stream.outstanding.end()) return;
    if (it->second > 0) {
      residency_.AddAhead(entry(stream.shape.dataset, s), -1);
      residency_.MaybeFree(stream.shape.dataset, s);
    }
    if (--it->second <= 0) stream.outstanding.erase(it);
    return;
  }
  residency_.AddAhead(entry(stream.shape.dataset, s), -1);
  residency_.MaybeFree(stream.shape.dataset, s);
}

void Lookahead::Unplan(Stream& stream) {
  if (stream.shape.itemised) {
    for (const auto& [s, count] : stream.outstanding) {
      if (count <= 0) continue;
      residency_.AddAhead(entry(stream.shape.dataset, s), -count);
      residency_.MaybeFree(stream.shape.dataset, s);
    }
    stream.outstanding.clear();
    stream.fetched = 0;
  } else {
    ForWindow(stream, [&](SampleId s) { UnplanPosition(stream, s); });
  }
  stream.epochs.clear();
  stream.taken = 0;
  stream.cursor = 0;
  stream.cursor_epoch = 0;
}

bool Lookahead::RetractOne() {
  Stream* longest = nullptr;
  uint64_t length = 0;
  for (Stream& stream : streams_) {
    if (!stream.open || stream.shape.itemised || stream.epochs.empty()) continue;
    if (stream.window() > length) {
      longest = &stream;
      length = stream.window();
    }
  }
  if (longest == nullptr) return false;
  if (longest->cursor == 0) {
    --longest->cursor_epoch;
    longest->cursor = longest->epochs[longest->cursor_epoch].order.size();
    if (longest->cursor == 0) return false;
  }
  --longest->cursor;
  const SampleId s = longest->epochs[longest->cursor_epoch].order[longest->cursor];
  UnplanPosition(*longest, s);
  ++common_.counters.retracted;
  return true;
}

// ---- planning ---------------------------------------------------------------------------------

size_t Lookahead::ActiveStreams() const {
  return static_cast<size_t>(
      std::count_if(streams_.begin(), streams_.end(),
                    [](const Stream& stream) { return stream.open && !stream.epochs.empty(); }));
}

uint64_t Lookahead::batch_bytes() const {
  uint64_t bytes = 0;
  for (const Stream& stream : streams_) {
    if (!stream.open || stream.epochs.empty()) continue;
    bytes += stream.shape.batch_size * residency_.dataset(stream.shape.dataset).mean_rounded;
  }
  return bytes;
}

bool Lookahead::MayRead(DatasetId d, SampleId s, JobId job) {
  const Residency::Dataset& dataset = residency_.dataset(d);
  return (dataset.entries[s].flags & Residency::kInTier) || !common_.jobs.Limited(job) ||
         dataset.Remote(s) || common_.jobs.Ready(job, common_.now);
}

bool Lookahead::MayReadAhead(const Stream& stream, SampleId s) const {
  const DatasetId d = stream.shape.dataset;
  const Residency::Dataset& dataset = residency_.dataset(d);
  const uint64_t then =
      residency_.bytes().ahead + ArenaAllocator::Rounded(dataset.entries[s].length);
  if (then <= read_ahead_bytes_ / 2 || stream.window() < stream.shape.batch_size) return true;
  if (residency_.WouldKeep(d, s, stream.job)) return true;
  if (then > read_ahead_bytes_) return false;
  // The second half is for those that have less than their share.
  const uint64_t active = ActiveStreams();
  return active <= 1 || stream.window() * dataset.mean_rounded < read_ahead_bytes_ / active;
}

// What is neither kept nor free is staging; streams share it evenly.
bool Lookahead::StagingHasRoom(const Stream& stream, SampleId s, bool serving) const {
  const Residency::Dataset& dataset = residency_.dataset(stream.shape.dataset);
  const uint64_t rounded = ArenaAllocator::Rounded(dataset.entries[s].length);
  const uint64_t staged = arena_.used() - residency_.bytes().kept - arena_.set_aside();
  uint64_t room = arena_.capacity() - arena_.set_aside() - residency_.keep_quota();
  if (!serving && serving_streams_ > 0) room -= room / kServingOneIn;
  if (staged + rounded > room) return false;
  if (serving) return true;
  const uint64_t active = ActiveStreams();
  if (active <= 1) return true;
  const uint64_t own = stream.window() * dataset.mean_rounded;
  return own + rounded <= room / active || own == 0 || staged + rounded <= room / 2;
}

bool Lookahead::Allot(StreamId id, SampleId s, bool serving) {
  const Stream& stream = streams_[id];
  const DatasetId d = stream.shape.dataset;
  const bool keep = residency_.WouldKeep(d, s, stream.job);
  if (!keep && !StagingHasRoom(stream, s, serving)) return false;
  const Arena::Block block = residency_.FindBlock(d, s, keep);
  if (block == Arena::kNone) return false;
  residency_.BeginRead(d, s, block, serving, keep, stream.job);
  return true;
}

bool Lookahead::Advance(StreamId id, ReadAction* out, size_t* budget, bool joins) {
  Stream& stream = streams_[id];
  const DatasetId d = stream.shape.dataset;
  while (*budget > 0 && stream.cursor_epoch < stream.epochs.size()) {
    const std::vector<SampleId>& order = stream.epochs[stream.cursor_epoch].order;
    if (stream.cursor == order.size()) {
      if (stream.shape.itemised) {
        const size_t known = stream.epochs.size();
        PopFetched(id);
        if (stream.epochs.size() != known) continue;
      }
      if (stream.cursor_epoch + 1 == stream.epochs.size()) return false;
      ++stream.cursor_epoch;
      stream.cursor = 0;
      continue;
    }
    const SampleId s = order[stream.cursor];
    Entry& e = entry(d, s);
    if (stream.shape.itemised) {
      int32_t& balance = stream.outstanding[s];
      if (balance < 0) {  // fetched before it was planned
        if (++balance == 0) stream.outstanding.erase(s);
        ++stream.cursor;
        --*budget;
        continue;
      }
    }
    if (e.ahead == Residency::kMaxRefs) return false;
    constexpr uint8_t kFailed = Residency::kFailedSoon | Residency::kFailedNow;
    if (e.state == State::kUnsized && !(e.flags & kFailed)) {
      if (stream.shape.itemised && stream.outstanding[s] == 0) stream.outstanding.erase(s);
      return false;
    }
    bool read = false;
    // What is on its way into the second tier is left to the lease, which reads it from there.
    if (e.state == State::kAbsent && !e.dead && !(e.flags & Residency::kFailedSoon) &&
        !stores_.Awaits(d, s)) {
      const bool may = MayRead(d, s, stream.job) && (joins || MayReadAhead(stream, s));
      if (!may || !Allot(id, s)) {
        if (may) stream.blocked_at = arena_.frees();
        if (stream.shape.itemised && stream.outstanding[s] == 0) stream.outstanding.erase(s);
        return false;
      }
      read = true;
    }
    if (stream.shape.itemised) ++stream.outstanding[s];
    residency_.AddAhead(e, 1);
    ++stream.cursor;
    --*budget;
    if (read) {
      *out = {.dataset = d, .sample = s, .offset = e.offset, .length = e.length};
      out->job = stream.job;
      return true;
    }
  }
  return false;
}

bool Lookahead::IsNext(StreamId id, SampleId s) const {
  const Stream& stream = streams_[id];
  if (stream.cursor_epoch >= stream.epochs.size()) return false;
  const std::vector<SampleId>& order = stream.epochs[stream.cursor_epoch].order;
  return stream.cursor < order.size() && order[stream.cursor] == s;
}

std::vector<SampleId> Lookahead::Upcoming(DatasetId d, size_t most) const {
  constexpr size_t kLookAt = 8192;  // positions, so that a lock held around it is short
  constexpr uint8_t kNot = Residency::kInTier | Residency::kFailedSoon | Residency::kFailedNow;
  const Residency::Dataset& dataset = residency_.dataset(d);
  std::vector<SampleId> next, own;
  size_t looked = 0;
  const auto all = [&] {
    own.resize(std::min(own.size(), most - next.size()));
    next.insert(next.end(), own.begin(), own.end());
    return next;
  };
  for (const Stream& stream : streams_) {
    if (!stream.open || stream.shape.dataset != d) continue;
    for (size_t i = stream.cursor_epoch; i < stream.epochs.size(); ++i) {
      const std::vector<SampleId>& order = stream.epochs[i].order;
      for (uint64_t p = i == stream.cursor_epoch ? stream.cursor : 0; p < order.size(); ++p) {
        if (next.size() >= most || ++looked > kLookAt) return all();
        const Entry& e = dataset.entries[order[p]];
        if (e.state != State::kAbsent || (e.flags & kNot)) continue;
        if (!residency_.WouldKeep(d, order[p], kNoJob)) continue;
        std::vector<SampleId>& to = dataset.ShareOf(order[p]) == KeepShare::kHome ? own : next;
        if (to.size() < most) to.push_back(order[p]);
      }
    }
  }
  return all();
}

}  // namespace forebay
