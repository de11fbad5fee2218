// Announced orders: what is copied ahead of its reader, and when a copy has had its reader.
#include <algorithm>

#include "files/book_entry.h"

namespace forebay::files {
namespace {

// Workers of one reader are not all at the position that it tells.
constexpr uint64_t kSlack = 2048;
constexpr size_t kLookAt = 1024;  // copies at a time
constexpr uint64_t kMostPositions = 1 << 24;
constexpr uint64_t kLastPosition = uint64_t{1} << 62;

}  // namespace

bool Book::Names(uint64_t stream_id, uint64_t first, std::span<const std::string_view> paths,
                 JobNumber job) {
  Stream& stream = streams_[stream_id];
  stream.job = job;
  if (first != stream.names.size() || paths.size() > options_.most_names - first) return false;
  for (const std::string_view path : paths) {
    Entry* const entry = FindOrAdd(path);
    if (entry != nullptr) {
      ++entry->announced;
      if (entry->real != nullptr) ++entry->real->announced;
      if (entry->slot != nullptr && entry->place == CopyPlace::kNone && entry->real == nullptr) {
        (void)SetState(*entry, IdleState(*entry));  // asking is of use again
      }
    }
    stream.names.push_back(entry);
  }
  return true;
}

bool Book::Order(uint64_t stream_id, uint64_t position, std::span<const uint32_t> numbers) {
  if (position > kLastPosition) return false;
  Stream& stream = streams_[stream_id];
  if (position < stream.first || position > stream.end()) {
    ReleasePassed(stream, kLastPosition + kMostPositions);
    stream.order.clear();
    stream.first = position;
  }
  if (numbers.size() > kMostPositions - (position - stream.first)) return false;
  for (const uint32_t number : numbers) {
    if (number >= stream.names.size()) return false;
  }
  for (auto at = stream.wants.lower_bound(position); at != stream.wants.end();) {
    ReleaseWant(at->second);
    at = stream.wants.erase(at);
  }
  stream.order.resize(position - stream.first);
  stream.order.insert(stream.order.end(), numbers.begin(), numbers.end());
  stream.cursor = std::clamp(std::min(stream.cursor, position), stream.first, stream.end());
  return true;
}

bool Book::At(uint64_t stream_id, uint64_t position) {
  const auto found = streams_.find(stream_id);
  if (found == streams_.end() || position > kLastPosition) return false;
  Stream& stream = found->second;
  stream.at = std::max(stream.at, position);
  if (stream.at > kSlack) ReleasePassed(stream, stream.at - kSlack);
  while (!stream.order.empty() && stream.first + kSlack < stream.at) {
    stream.order.pop_front();
    ++stream.first;
  }
  return true;
}

void Book::EndStream(uint64_t stream_id) {
  const auto found = streams_.find(stream_id);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  ReleasePassed(stream, stream.end());
  for (Entry* entry : stream.names) {
    if (entry == nullptr) continue;
    --entry->announced;
    if (entry->real != nullptr) --entry->real->announced;
    if (entry->slot != nullptr && entry->place == CopyPlace::kNone && entry->real == nullptr) {
      (void)SetState(*entry, IdleState(*entry));
    }
  }
  streams_.erase(found);
}

void Book::ReleasePassed(Stream& stream, uint64_t before) {
  while (!stream.wants.empty() && stream.wants.begin()->first < before) {
    ReleaseWant(stream.wants.begin()->second);
    stream.wants.erase(stream.wants.begin());
  }
}

// Those who have opened it are taken for those who pass first.
void Book::ReleaseWant(const Want& want) {
  Entry& entry = *want.entry;
  if (entry.staging != want.staging || entry.wanted == 0) return;
  --entry.wanted;
  if (entry.place == CopyPlace::kStaged && OpensOf(entry) != entry.opens_base && entry.wanted > 0) {
    ++entry.opens_base;
  }
}

void Book::AddWant(Stream& stream, Entry& entry) {
  const auto [at, added] = stream.wants.try_emplace(stream.cursor, Want{&entry, entry.staging});
  if (!added && at->second.entry == &entry && at->second.staging == entry.staging) return;
  at->second = Want{&entry, entry.staging};
  ++entry.wanted;
}

// A file came back without a copy: the streams that counted on it come by again.
void Book::Rewind(const Entry& entry) {
  for (auto& [id, stream] : streams_) {
    for (auto at = stream.wants.begin(); at != stream.wants.end(); ++at) {
      if (at->second.entry != &entry) continue;
      stream.cursor = std::min(stream.cursor, at->first);
      ReleaseWant(at->second);
      stream.wants.erase(at);
      break;
    }
  }
}

uint32_t Book::OpensOf(const Entry& entry) const {
  uint32_t opens = entry.slot == nullptr ? 0 : entry.slot->opens.load(std::memory_order_relaxed);
  if (entry.rare == nullptr) return opens;
  for (const Entry* alias : entry.rare->aliases) {
    if (alias->slot != nullptr) opens += alias->slot->opens.load(std::memory_order_relaxed);
  }
  return opens;
}

void Book::CountOpens(size_t most) {
  for (size_t left = std::min(most, staged_.size()); left > 0; --left) {
    const auto [entry, staging] = staged_.front();
    staged_.pop_front();
    if (entry->place != CopyPlace::kStaged || entry->staging != staging) continue;
    const bool had = entry->wanted == 0 || OpensOf(*entry) - entry->opens_base >= entry->wanted;
    (had ? consumed_ : staged_).emplace_back(entry, staging);
  }
}

bool Book::MakeRoom(uint64_t bytes) {
  const uint64_t most = room_.most(CopyPlace::kStaged);
  if (bytes > most) return false;
  const auto fits = [&] { return room_.used(CopyPlace::kStaged) <= most - bytes; };
  for (int pass = 0; !fits() && pass < 2; ++pass) {
    if (pass == 1) CountOpens(kLookAt);
    while (!consumed_.empty() && !fits()) {
      const auto [entry, staging] = consumed_.front();
      consumed_.pop_front();
      if (entry->place != CopyPlace::kStaged || entry->staging != staging) continue;
      if (entry->wanted > 0 && OpensOf(*entry) - entry->opens_base < entry->wanted) {
        staged_.emplace_back(entry, staging);  // another stream wants it, too
      } else {
        Unstage(*entry);
      }
    }
  }
  return fits();
}

void Book::Unstage(Entry& entry) {
  if (OpensOf(entry) == entry.opens_base) metrics_.unread.Add(1);
  Forget(entry);
}

// Makes room for a file that may be staged. Those under way whose size is not known may take what
// is left, and what is farther ahead must not take the place of what is nearer.
bool Book::HasRoom(const Entry& entry) {
  const bool known = entry.rare != nullptr && entry.rare->source != nullptr;
  const uint64_t bytes = known ? OnDisk(static_cast<uint64_t>(entry.rare->source->stat.st_size))
                               : std::max(entry.bytes, (unknown_ + 1) * average_);
  const uint64_t most = room_.most(CopyPlace::kKept);
  if (bytes <= most - std::min(room_.used(CopyPlace::kKept), most)) return true;
  if (bytes > room_.most(CopyPlace::kStaged) && unknown_ > 0) return false;
  return MakeRoom(std::min(bytes, room_.most(CopyPlace::kStaged)));
}

bool Book::PumpStream(Stream& stream, Nanos now) {
  stream.cursor = std::max({stream.cursor, stream.first, std::min(stream.at, stream.end())});
  if (stream.done()) return true;
  Entry* entry = stream.names[stream.order[stream.cursor - stream.first]];
  if (entry != nullptr && entry->real != nullptr) entry = entry->real;
  if (entry != nullptr) ForgetUnlooked(*entry);
  bool skip = entry == nullptr || entry->changed || entry->refused || entry->too_large ||
              entry->place == CopyPlace::kKept || now < entry->retry_at;
  if (!skip && entry->early > 0) {
    --entry->early;  // it has been read, as far as can be told
    skip = true;
  }
  if (!skip && entry->place == CopyPlace::kNone && !entry->copying) {
    if (!HasRoom(*entry)) return false;
    StartCopy(*entry, false, stream.job);
  }
  if (!skip) AddWant(stream, *entry);
  ++stream.cursor;
  return true;
}

}  // namespace forebay::files
