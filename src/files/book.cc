#include "files/book.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "files/book_entry.h"

namespace forebay::files {

namespace {

using Outcome = CopyResult::Outcome;

constexpr Nanos kLookAgain = 5 * kMilli;    // whether a copy was opened
constexpr Nanos kLongStall = 500 * kMilli;  // what readers have passed is not waited for longer

}  // namespace

BookMetrics::BookMetrics(Mechanism& m)
    : gets(m.AddCounter("forebay_files_gets_total", "Files that programs asked for")),
      waits(m.AddCounter("forebay_files_waits_total", "Files that programs waited for")),
      kept(m.AddCounter("forebay_files_kept_total", "Copies made to be kept")),
      staged(m.AddCounter("forebay_files_staged_total", "Copies made ahead, for one reading")),
      left(m.AddCounter("forebay_files_left_total", "Files left to the source")),
      unread(m.AddCounter("forebay_files_unread_total", "Copies made ahead that nobody opened")),
      changed(m.AddCounter("forebay_files_changed_total", "Files that programs changed")),
      discarded(m.AddCounter("forebay_files_discarded_total",
                             "Copies discarded: the file changed while it was read")),
      errors(m.AddCounter("forebay_files_errors_total", "Files that the source failed to give")),
      missing(m.AddCounter("forebay_files_missing_total",
                           "Names that programs asked for and that do not exist")),
      full(m.AddCounter("forebay_files_full_total", "Times that the cache's disk was full")),
      kept_bytes(m.AddGauge("forebay_files_kept_bytes", "Bytes of copies that are kept")),
      staged_bytes(m.AddGauge("forebay_files_staged_bytes", "Bytes of copies made ahead")),
      open_files(m.AddGauge("forebay_files_open_files", "Files of the source held open")) {}

Book::Book(FileTable table, const BookOptions& options, Room& room, BookMetrics& metrics,
           BookActions& actions)
    : table_(table), options_(options), room_(room), metrics_(metrics), actions_(actions) {}

Book::~Book() = default;

void Book::AddSource(std::string_view folder) {
  if (std::find(sources_.begin(), sources_.end(), folder) == sources_.end()) {
    sources_.emplace_back(folder);
  }
}

bool Book::Covers(std::string_view path) const {
  std::array<char, 4096> normal;
  const size_t length = NormalPath("/", path, normal.data(), normal.size());
  if (length == 0 || std::string_view(normal.data(), length) != path) return false;
  if (!cache_.empty() && IsBelow(path, cache_)) return false;
  return std::any_of(sources_.begin(), sources_.end(),
                     [&](const std::string& source) { return IsBelow(path, source); });
}

bool Book::BelowChanged(std::string_view path) const {
  if (changes_ == 0) return false;
  for (size_t end = path.size(); end > 0 && end != std::string_view::npos;
       end = path.rfind('/', end - 1)) {
    const FileSlot* slot = table_.Find(KeyOf(path.substr(0, end)));
    if (slot != nullptr && FileTable::StateOf(*slot) == FileState::kChanged) return true;
    if (end == 0) break;
  }
  return false;
}

Book::Entry* Book::FindOrAdd(std::string_view path) {
  if (const auto found = entries_.find(path); found != entries_.end()) return &found->second;
  if (!Covers(path)) return nullptr;
  Entry& entry = entries_.try_emplace(std::string(path)).first->second;
  entry.path = &entries_.find(path)->first;
  entry.key = KeyOf(path);
  entry.slot = table_.Find(entry.key);
  if (BelowChanged(path)) {
    entry.changed = true;
    (void)SetState(entry, FileState::kChanged);
  }
  return &entry;
}

FileSlot* Book::AddSlot(const FileKey& key, FileState state) {
  FileSlot* slot = table_.Add(key, state);
  if (slot == nullptr && actions_.GrowTable()) slot = table_.Add(key, state);
  return slot;
}

bool Book::SetState(Entry& entry, FileState state) {
  if (entry.rare != nullptr) {
    for (Entry* alias : entry.rare->aliases) {
      if (!alias->changed && !alias->refused) (void)SetState(*alias, state);
    }
  }
  if (entry.slot == nullptr) {
    entry.slot = AddSlot(entry.key, state);
    return entry.slot != nullptr;
  }
  FileTable::Set(*entry.slot, state);
  return true;
}

// Of a file without a copy: a program had better ask only where asking is of use.
FileState Book::IdleState(const Entry& entry) const {
  if (entry.changed) return FileState::kChanged;
  if (entry.refused || entry.too_large) return FileState::kSource;
  return full_ && entry.announced == 0 ? FileState::kSource : FileState::kKnown;
}

void Book::AnswerAll(Entry& entry, Answer answer, uint64_t a) {
  if (entry.rare == nullptr) return;
  ShowRoom();
  if (answer == Answer::kSource) metrics_.left.Add(entry.rare->waiters.size());
  for (const uint64_t waiter : std::exchange(entry.rare->waiters, {})) {
    actions_.Answer(waiter, answer, a);
  }
}

void Book::Wait(Entry& entry, uint64_t waiter) {
  metrics_.waits.Add(1);
  entry.rare_part().waiters.push_back(waiter);
}

// Ahead of its readers.
bool Book::MayStart(JobNumber job) const {
  if (jobs_ == 1) return in_flight_ < options_.in_flight;
  const auto found = in_flight_of_.find(job);
  return found == in_flight_of_.end() ||
         found->second < std::max<size_t>(1, options_.in_flight / jobs_);
}

void Book::Submit(CopyJob job) {
  ++in_flight_;
  ++in_flight_of_[job.job];
  actions_.Start(std::move(job));
}

void Book::StartCopy(Entry& entry, bool urgent, JobNumber for_job) {
  Rare& rare = entry.rare_part();
  rare.ticket = std::make_shared<Ticket>();
  CopyJob job;
  job.urgent = urgent;
  job.job = for_job;
  job.may_stage = entry.announced > 0;
  job.path = *entry.path;
  job.key = entry.key;
  job.ticket = rare.ticket;
  job.source = rare.source;
  job.young = rare.young;
  job.known = job.source != nullptr;
  job.owner = next_owner_++;
  if (job.source != nullptr) {
    job.reserved = OnDisk(static_cast<uint64_t>(job.source->stat.st_size));
    job.place = room_.Reserve(job.reserved, job.may_stage, urgent);
  } else {
    ++unknown_;
  }
  rare.owner = job.owner;
  owners_.emplace(job.owner, &entry);
  entry.copying = true;
  entry.looked = looks_;
  Submit(std::move(job));
}

void Book::Get(std::string_view path, uint64_t waiter, Nanos now, JobNumber job) {
  metrics_.gets.Add(1);
  Entry* entry = FindOrAdd(path);
  const auto leave = [&] {
    metrics_.left.Add(1);
    actions_.Answer(waiter, Answer::kSource, 0);
  };
  if (entry == nullptr || table_.closed()) return leave();
  Entry& named = *entry;
  if (entry->real != nullptr) {
    entry = entry->real;
    if (entry->changed) Change(named);
  }
  if (named.changed || entry->refused || entry->too_large) return leave();
  ForgetUnlooked(*entry);
  if (entry->place != CopyPlace::kNone) {
    if (actions_.Exists(named.key)) return actions_.Answer(waiter, Answer::kReady, 0);
    if (entry == &named || !actions_.Exists(entry->key)) {
      Forget(*entry);
    } else {
      (void)actions_.Link(named.key, entry->key);
      return actions_.Answer(waiter, Answer::kReady, 0);
    }
  }
  if (entry->large() != nullptr && entry->large()->looks > 0) return leave();
  if (entry->large() != nullptr && entry->large()->size > options_.partial) {
    return actions_.Answer(waiter, Answer::kPartial, entry->large()->size);
  }
  last_read_ = now;
  if (entry->copying) {
    Wait(*entry, waiter);
    if (entry->large() != nullptr) HurryLarge(*entry, job);
    return;
  }
  const bool asks = entry->announced > 0 || !full_;
  if (!asks) {
    (void)SetState(*entry, FileState::kSource);
    return leave();
  }
  if (now < entry->retry_at || now < paused_until_) return leave();
  if (full_ && entry->rare != nullptr && entry->rare->source != nullptr) {
    (void)MakeRoom(OnDisk(static_cast<uint64_t>(entry->rare->source->stat.st_size)));
  }
  if (entry->announced > 0 && entry->wanted == 0) ++entry->early;
  Wait(*entry, waiter);
  StartCopy(*entry, true, job);
  if (entry->announced == 0) Observe(path, now, job);
}

void Book::Changed(std::span<const std::string_view> paths, uint64_t waiter, bool follow) {
  metrics_.changed.Add(paths.size());
  uint32_t left = 0;
  for (const std::string_view path : paths) {
    ChangeAll(path);
    // It may be reached by another name, through a link.
    CopyJob job;
    job.kind = CopyJob::Kind::kResolve;
    job.urgent = true;
    job.follow = follow;
    job.path = path;
    job.owner = next_owner_++;
    resolving_.emplace(job.owner, waiter);
    ++left;
    Submit(std::move(job));
  }
  if (left == 0) return actions_.Answer(waiter, Answer::kReady, 0);
  resolves_left_[waiter] = left;
}

void Book::ChangeAll(std::string_view path) {
  ++changes_;
  const FileKey key = KeyOf(path);
  FileSlot* slot = table_.Find(key);
  if (slot == nullptr) slot = AddSlot(key, FileState::kChanged);
  if (slot == nullptr) {
    // It cannot be remembered, so no copy can be trusted.
    if (!table_.closed()) {
      actions_.Say(
          "the table of files is full, or gets no more memory: all go to the source from now");
    }
    table_.Close();
    return;
  }
  FileTable::Set(*slot, FileState::kChanged);
  if (const auto exact = entries_.find(path); exact != entries_.end()) {
    exact->second.slot = slot;
    Change(exact->second);
  }
  std::string below(path);
  if (below != "/") below += '/';
  for (auto at = entries_.lower_bound(below); at != entries_.end() && at->first.starts_with(below);
       ++at) {
    Change(at->second);
  }
}

void Book::Change(Entry& entry) {
  if (entry.changed) return;
  entry.changed = true;
  (void)SetState(entry, FileState::kChanged);
  Drop(entry);
  actions_.Forget(*entry.path);
  if (entry.real != nullptr) {
    actions_.Remove(entry.key);
    actions_.RemovePart(entry.key);
  }
  Forget(entry);
  AnswerAll(entry, Answer::kSource);
}

// What is being copied is not to be published.
void Book::Drop(Entry& entry) {
  if (entry.rare == nullptr) return;
  Rare& rare = *entry.rare;
  if (rare.ticket != nullptr) {
    rare.ticket->Drop(!table_.passed_by());
    actions_.Remove(entry.key);  // it may have been, a moment ago
    rare.ticket = nullptr;
  }
  EndLarge(entry);
  CloseSource(entry);
}

void Book::CloseSource(Entry& entry) {
  if (entry.rare == nullptr) return;
  if (entry.rare->retained) metrics_.open_files.Set(--opened_);
  entry.rare->retained = false;
  entry.rare->source = nullptr;
}

// There is no copy, or shall be none.
void Book::Forget(Entry& entry) {
  if (entry.place == CopyPlace::kNone) return;
  (void)SetState(entry, IdleState(entry));
  actions_.Remove(entry.key);
  room_.Release(entry.place, entry.bytes);
  if (entry.place == CopyPlace::kKept && full_) {
    full_ = room_.used(CopyPlace::kKept) > room_.most(CopyPlace::kKept) / 20 * 19;
  }
  entry.place = CopyPlace::kNone;
  ++entry.staging;
  entry.wanted = entry.opened = 0;
}

void Book::LookAgain() {
  ++looks_;
  CloseIdle();  // a path may lead to another file by now
  for (auto& [path, entry] : entries_) {
    if (entry.real != nullptr) ForgetAlias(entry);
    if (entry.place != CopyPlace::kNone) (void)SetState(entry, FileState::kKnown);
  }
  for (Entry* entry : large_) LookAtLarge(*entry);
}

void Book::ForgetAlias(Entry& entry) {
  Entry& real = *std::exchange(entry.real, nullptr);
  real.announced -= entry.announced;
  std::erase(real.rare->aliases, &entry);
  if (entry.slot != nullptr) entry.slot->parts.fetch_add(1, std::memory_order_acq_rel);
  actions_.Remove(entry.key);
  actions_.RemovePart(entry.key);
  if (!entry.changed && !entry.refused) (void)SetState(entry, IdleState(entry));
}

void Book::ForgetUnlooked(Entry& entry) {
  if (entry.place != CopyPlace::kNone && entry.looked != looks_) Forget(entry);
}

void Book::MaybeErase(Entry& entry) {
  if (entry.slot != nullptr || entry.copying || entry.announced > 0 || entry.changed ||
      entry.place != CopyPlace::kNone || (entry.rare != nullptr && !entry.rare->waiters.empty()) ||
      entry.pinned) {
    return;
  }
  entries_.erase(entries_.find(*entry.path));
}

void Book::Refuse(Entry& entry) {
  entry.refused = true;
  (void)SetState(entry, FileState::kSource);
  AnswerAll(entry, Answer::kSource);
}

// First come, first kept: which of the files that are read again and again are open matters less
// than that the same ones are.
void Book::Retain(Entry& entry, std::shared_ptr<SourceFile> source) {
  Rare& rare = entry.rare_part();
  if (!rare.retained && source != nullptr && opened_ < options_.open_files) {
    rare.retained = entry.pinned = true;
    retained_.push_back(&entry);
    metrics_.open_files.Set(++opened_);
  }
  rare.source = rare.retained ? std::move(source) : nullptr;
}

void Book::Done(CopyResult result, Nanos now) {
  --in_flight_;
  if (const auto of = in_flight_of_.find(result.job.job); --of->second == 0)
    in_flight_of_.erase(of);
  if (result.job.kind == CopyJob::Kind::kResolve) return DoneResolve(result);
  if (result.job.kind == CopyJob::Kind::kList) return DoneList(result, now);
  const auto owner = owners_.find(result.job.owner);
  if (owner == owners_.end()) {
    // A block of a copy that was given up.
    return;
  }
  Entry& entry = *owner->second;
  if (result.job.kind == CopyJob::Kind::kLook) return DoneLook(entry, result, now);
  if (result.job.kind == CopyJob::Kind::kCopy) {
    owners_.erase(owner);
    entry.rare->owner = 0;
    entry.copying = false;
    if (!result.job.known) --unknown_;
    DoneCopy(entry, result, now);
  } else {
    DoneBlock(entry, result, now);
  }
}

void Book::DoneResolve(CopyResult& result) {
  const auto found = resolving_.find(result.job.owner);
  if (found == resolving_.end()) return;
  const uint64_t waiter = found->second;
  resolving_.erase(found);
  if (!result.real.empty() && result.real != result.job.path) ChangeAll(result.real);
  if (--resolves_left_[waiter] > 0) return;
  resolves_left_.erase(waiter);
  actions_.Answer(waiter, Answer::kReady, 0);
}

void Book::DoneCopy(Entry& entry, CopyResult& result, Nanos now) {
  CopyJob& job = result.job;
  if (entry.changed && result.outcome != Outcome::kDropped) {
    if (result.outcome == Outcome::kDone) actions_.Remove(entry.key);
    if (result.outcome == Outcome::kLarge) actions_.RemovePart(entry.key);
    result.outcome = Outcome::kDropped;
  }
  switch (result.outcome) {
    case Outcome::kDone:
      return Placed(entry, result);
    case Outcome::kLarge:
      return FoundLarge(entry, result);
    case Outcome::kAlias:
      return FoundAlias(entry, result, now);
    case Outcome::kRefused:
      room_.Release(job.place, job.reserved);
      return Refuse(entry);
    case Outcome::kNoRoom:
      return FoundNoRoom(entry, result);
    default:
      room_.Release(job.place, job.reserved);
      return Failed(entry, result, now);
  }
}

void Book::Placed(Entry& entry, CopyResult& result) {
  CopyJob& job = result.job;
  const bool kept = job.place == CopyPlace::kKept;
  const uint32_t opens = entry.slot == nullptr ? 0 : entry.slot->opens.load();
  if (!SetState(entry, kept ? FileState::kKept : FileState::kStaged)) {
    actions_.Remove(entry.key);
    room_.Release(job.place, job.reserved);
    entry.refused = true;
    return AnswerAll(entry, Answer::kSource);
  }
  entry.place = job.place;
  entry.bytes = job.reserved;
  entry.rare->young = nullptr;
  if (entry.looked != looks_) (void)SetState(entry, FileState::kKnown);
  if (!result.stored) (kept ? metrics_.kept : metrics_.staged).Add(1);
  average_ = average_ == 0 ? entry.bytes : (average_ * 15 + entry.bytes) / 16;
  if (kept) {
    CloseSource(entry);
  } else {
    entry.opens_base = opens;
    if (entry.wanted == 0) {
      entry.wanted = static_cast<uint32_t>(std::max<size_t>(1, entry.rare->waiters.size()));
    }
    staged_.emplace_back(&entry, entry.staging);
    Retain(entry, std::move(job.source));
  }
  AnswerAll(entry, Answer::kReady);
}

void Book::FoundAlias(Entry& entry, const CopyResult& result, Nanos now) {
  if (entry.looked != looks_) {
    return StartCopy(entry, !entry.rare->waiters.empty(), result.job.job);
  }
  Entry* const real = FindOrAdd(result.real);
  if (real == nullptr || real == &entry || real->changed || real->refused ||
      real->real != nullptr) {
    if (real != nullptr && real->changed) {
      Change(entry);
    } else {
      Refuse(entry);
    }
    return;
  }
  if (!actions_.Link(entry.key, real->key)) return Refuse(entry);
  entry.real = real;
  real->pinned = true;
  real->announced += entry.announced;
  real->rare_part().aliases.push_back(&entry);
  const FileState state =
      real->slot == nullptr ? FileState::kKnown : FileTable::StateOf(*real->slot);
  if (!SetState(entry, state)) return Refuse(entry);
  for (const uint64_t waiter : std::exchange(entry.rare->waiters, {})) {
    Get(*entry.path, waiter, now, result.job.job);
  }
}

void Book::FoundNoRoom(Entry& entry, CopyResult& result) {
  const uint64_t bytes = result.job.reserved;
  const bool waited = !entry.rare->waiters.empty();
  bool fits = entry.announced > 0 && MakeRoom(bytes);
  // Making room may have gone far enough for who waits.
  if (!fits && waited) fits = room_.Fits(bytes, entry.announced > 0, true);
  if (fits) {
    entry.rare->source = std::move(result.job.source);
    return StartCopy(entry, waited, result.job.job);
  }
  // One that is larger than what others leave says nothing of small ones.
  if (bytes <= options_.partial) full_ = true;
  entry.too_large = bytes > room_.most(CopyPlace::kStaged);
  if (entry.announced > 0 && !entry.too_large) {
    Retain(entry, std::move(result.job.source));
    entry.bytes = bytes;
    (void)SetState(entry, FileState::kKnown);
    Rewind(entry);
  } else {
    (void)SetState(entry, FileState::kSource);
  }
  AnswerAll(entry, Answer::kSource);
}

void Book::Failed(Entry& entry, const CopyResult& result, Nanos now) {
  switch (result.outcome) {
    case Outcome::kNoSpace:
    case Outcome::kCacheBad:
      if (now >= paused_until_) {
        actions_.Say(StrCat(
            "the cache folder ", cache_, " takes no copies: ", std::strerror(result.error),
            "; files without one are read from the source, and it is tried again "
            "every ",
            options_.pause / kSecond, " s. Free its disk, or name another folder with --cache"));
        metrics_.full.Add(1);
      }
      paused_until_ = now + options_.pause;
      break;
    case Outcome::kDiscarded:
      metrics_.discarded.Add(1);
      entry.retry_at = now + 3 * options_.retry;
      break;
    case Outcome::kYoung:
      entry.rare->young = result.job.young;
      (void)SetState(entry, FileState::kKnown);  // it stays, and with it how young it was
      entry.retry_at = now + options_.retry;
      break;
    case Outcome::kDropped:
      entry.retry_at = now + options_.retry;
      break;
    case Outcome::kMissing:
      // That there is no such file is an answer: nobody failed, and nothing is left to the source.
      metrics_.missing.Add(1);
      entry.retry_at = 0;
      for (const uint64_t waiter : std::exchange(entry.rare->waiters, {})) {
        actions_.Answer(waiter, Answer::kSource, 0);
      }
      break;
    default:
      metrics_.errors.Add(1);
      entry.retry_at = now + options_.retry;
      break;
  }
  CloseSource(entry);  // it may be of a file that is gone
  AnswerAll(entry, Answer::kSource);
  MaybeErase(entry);
}

void Book::CloseIdle() {
  for (Entry* entry : std::exchange(retained_, {})) CloseSource(*entry);
}

void Book::OnAllLeft() {
  CloseIdle();
  for (Entry* entry : std::vector<Entry*>(large_)) {
    entry->rare->ticket->Drop(!table_.passed_by());
    actions_.Remove(entry->key);
    EndLarge(*entry);
    AnswerAll(*entry, Answer::kSource);
  }
}

void Book::ShowRoom() {
  metrics_.kept_bytes.Set(room_.used(CopyPlace::kKept));
  metrics_.staged_bytes.Set(room_.used(CopyPlace::kStaged));
}

Nanos Book::Pump(Nanos now) {
  ShowRoom();
  if (now < paused_until_) return paused_until_ - now;
  if (streams_.empty() && opened_ > 0) {
    // Nobody is likely to come back for them, and they keep a mount busy.
    if (idle_since_ == 0) idle_since_ = now;
    if (now - idle_since_ >= options_.open_idle) CloseIdle();
  } else {
    idle_since_ = 0;
  }
  stalled_ = false;
  bool more = true;
  while (more && in_flight_ < options_.in_flight) {
    // Whoever is nearest to what its reader has come to.
    Stream* next = nullptr;
    for (auto& [id, stream] : streams_) {
      if (stream.done() || stream.stalled || !MayStart(stream.job)) continue;
      if (next == nullptr || stream.lead() < next->lead()) next = &stream;
    }
    if (PumpBegun()) continue;
    more = next != nullptr && PumpStream(*next, now);
    if (next != nullptr && !more) {
      next->stalled = true;
      stalled_ = true;
      more = true;
    }
    if (next == nullptr) more = PumpLarge();
  }
  for (auto& [id, stream] : streams_) stream.stalled = false;
  const bool reads = PumpFolders(now);
  const Nanos idle = PumpIdle(now);
  if (!stalled_) {
    stalled_since_ = 0;
    return reads ? kLookAgain : idle;
  }
  if (stalled_since_ == 0) stalled_since_ = now;
  if (now - stalled_since_ > kLongStall) {
    for (auto& [id, stream] : streams_) ReleasePassed(stream, stream.at);
    stalled_since_ = now;
  }
  return kLookAgain;
}

}  // namespace forebay::files
