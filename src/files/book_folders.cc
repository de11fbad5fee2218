// Observed order: files of a folder that are asked for in the order of their names are copied ahead
// of their reader, though nobody has announced them. Only as long as there is room to keep them:
// then what is copied too early is not read twice.
#include <algorithm>

#include "files/book_entry.h"

namespace forebay::files {
namespace {

constexpr uint32_t kRising = 4;  // names in order, before a folder is listed
constexpr size_t kMostFolders = 4096;
constexpr size_t kNear = 16;        // several readers of one folder are not in step
constexpr size_t kMostWindow = 64;  // files ahead
constexpr uint64_t kMostAhead = uint64_t{64} << 20;  // bytes, by the average
constexpr Nanos kPatience = 2 * kSecond;

}  // namespace

void Book::Observe(std::string_view path, Nanos now, JobNumber by) {
  const size_t slash = path.rfind('/');
  if (slash == 0 || slash == std::string_view::npos) return;
  const std::string_view name = path.substr(slash + 1);
  auto found = folders_.find(path.substr(0, slash));
  if (found == folders_.end()) {
    if (folders_.size() >= kMostFolders) return;
    found = folders_.try_emplace(std::string(path.substr(0, slash))).first;
    found->second.path = found->first;
  }
  Folder& folder = found->second;
  folder.job = by;
  if (!folder.listed) {
    folder.rising = name > folder.last ? folder.rising + 1 : 0;
    folder.last = name;
    if (folder.rising < kRising || folder.listing) return;
    folder.listing = true;
    CopyJob job;
    job.kind = CopyJob::Kind::kList;
    job.job = by;
    job.path = folder.path;
    job.owner = next_owner_++;
    listing_.emplace(job.owner, &folder);
    return Submit(std::move(job));
  }
  const auto place = std::lower_bound(folder.names.begin(), folder.names.end(), name);
  if (place == folder.names.end() || *place != name) return;
  const auto at = static_cast<size_t>(place - folder.names.begin());
  const bool goes_on = at + kNear >= folder.at && at <= std::max(folder.at, folder.end) + kNear;
  folder.window = goes_on ? std::clamp<size_t>(folder.window * 2, 4, kMostWindow) : 0;
  folder.at = goes_on ? std::max(folder.at, at) : at;
  if (!goes_on) folder.end = at + 1;
  if (goes_on) ReadOn(folder, now);
}

void Book::DoneList(CopyResult& result, Nanos now) {
  const auto found = listing_.find(result.job.owner);
  if (found == listing_.end()) return;
  Folder& folder = *found->second;
  listing_.erase(found);
  // One that cannot be listed, or is too large, has no names and is left alone.
  folder.listed = true;
  if (result.outcome != CopyResult::Outcome::kDone) return;
  folder.names = std::move(result.names);
  const auto place = std::lower_bound(folder.names.begin(), folder.names.end(), folder.last);
  folder.at = static_cast<size_t>(place - folder.names.begin());
  folder.end = folder.at + 1;
  if (folder.rising < kRising) return;
  folder.window = 4;
  ReadOn(folder, now);
}

void Book::ReadOn(Folder& folder, Nanos now) {
  const size_t fit = average_ == 0 ? 1 : static_cast<size_t>(kMostAhead / average_);
  const size_t window = std::clamp<size_t>(fit, 1, folder.window);
  const size_t end = std::min(folder.at + window + 1, folder.names.size());
  folder.end = std::max(folder.end, folder.at + 1);
  while (folder.end < end && in_flight_ < options_.in_flight && MayStart(folder.job) && !full_) {
    Entry* const entry = FindOrAdd(StrCat(folder.path, "/", folder.names[folder.end]));
    ++folder.end;
    if (entry == nullptr || entry->changed || entry->refused || entry->copying ||
        entry->real != nullptr || entry->place != CopyPlace::kNone || entry->announced > 0 ||
        now < entry->retry_at) {
      continue;
    }
    StartCopy(*entry, false, folder.job);
  }
  folder.trigger = folder.at + std::max<size_t>(1, window / 2);
  folder.until = now + kPatience;
  if (std::find(reading_.begin(), reading_.end(), &folder) == reading_.end()) {
    reading_.push_back(&folder);
  }
}

// A reader that finds its copies asks for nothing: whether it has come to what triggers the next
// ones is looked up.
bool Book::PumpFolders(Nanos now) {
  for (size_t i = 0; i < reading_.size(); ++i) {
    Folder& folder = *reading_[i];
    bool over = full_ || now > folder.until || folder.end >= folder.names.size();
    if (!over && folder.trigger < folder.names.size()) {
      const auto found = entries_.find(StrCat(folder.path, "/", folder.names[folder.trigger]));
      if (found != entries_.end() && OpensOf(found->second) > 0) {
        folder.at = folder.trigger;
        folder.window = std::clamp<size_t>(folder.window * 2, 4, kMostWindow);
        ReadOn(folder, now);
      }
    }
    if (over) reading_.erase(reading_.begin() + static_cast<ptrdiff_t>(i--));
  }
  return !reading_.empty();
}

}  // namespace forebay::files
