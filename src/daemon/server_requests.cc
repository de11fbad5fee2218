// The server's answers about data sets, knobs and itself.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string_view>
#include <utility>

#include "base/crc32c.h"
#include "daemon/server.h"
#include "source/delay_source.h"

namespace forebay {
namespace {

constexpr uint64_t kLargestImage = uint64_t{64} << 30;

// Not mapped: a client could shrink the file under us.
Result<std::vector<std::byte>> ReadImage(int fd, uint64_t bytes) {
  struct stat st = {};
  if (fd < 0 || fstat(fd, &st) != 0) {
    return Status(Code::kInvalidArgument, "the catalog's image did not come along");
  }
  if (bytes > kLargestImage || st.st_size < 0 || static_cast<uint64_t>(st.st_size) != bytes) {
    return Status(Code::kInvalidArgument,
                  StrCat("a catalog of ", bytes, " bytes came as ", st.st_size));
  }
  std::vector<std::byte> image(bytes);
  uint64_t at = 0;
  while (at < bytes) {
    const ssize_t n = pread(fd, image.data() + at, bytes - at, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n == 0 ? EIO : errno, "reading a catalog's image");
    at += static_cast<uint64_t>(n);
  }
  return image;
}

// As a JSON string. Bytes that are no ASCII come as \u00XX, one for each byte: names of files may
// be in no encoding at all.
std::string Quoted(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte > 0x7e) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Joins what `item` makes of each element with commas.
template <typename List, typename Item>
std::string Joined(const List& list, Item item) {
  std::string out;
  for (const auto& element : list) out += StrCat(out.empty() ? "" : ",", item(element));
  return out;
}

}  // namespace

Result<DatasetId> Server::OnOpenDataset(Peer& peer, const wire::OpenDataset& open) {
  if (!options_.open_datasets) {
    return Status(Code::kPermissionDenied, "this engine takes no data sets from its clients");
  }
  const auto key = std::make_tuple(open.fingerprint, open.image_bytes, open.image_crc, open.delay);
  const OwnedFd image = std::move(peer.received);
  const auto known = datasets_.find(key);
  if (known != datasets_.end()) return known->second;
  if (!open.has_image) return Status(Code::kNotFound, "this engine does not know the data set");
  Result<std::vector<std::byte>> bytes = ReadImage(image.get(), open.image_bytes);
  if (!bytes) return bytes.error();
  if (Crc32c(*bytes) != open.image_crc) {
    return Status(Code::kDataLoss, "a catalog's image is not the one that was announced");
  }
  Result<std::unique_ptr<Catalog>> catalog = Catalog::FromImage(*std::move(bytes));
  if (!catalog) return catalog.error();
  // Shared with the engine, whose streams keep it.
  const std::shared_ptr<const Catalog> shared = *std::move(catalog);
  if (shared->fingerprint() != open.fingerprint) {
    return Status(Code::kDataLoss, "a catalog's fingerprint is not the one that was announced");
  }
  std::unique_ptr<Source> source;
  if (!open.delay.empty()) {
    DelayOptions options;
    Result<StorageSettings> storage = StorageSettings::Parse(open.delay);
    if (!storage) return storage.error();
    options.storage = *storage;
    Result<std::unique_ptr<Source>> inner = MakePosixSource(*shared, {});
    if (!inner) return inner.error();
    Result<std::unique_ptr<DelaySource>> delayed = DelaySource::Make(*std::move(inner), options);
    if (!delayed) return delayed.error();
    source = *std::move(delayed);
  }
  const Result<DatasetId> added = engine_.AddDataset(shared, std::move(source));
  if (added) datasets_.emplace(key, *added);
  return added;
}

Status Server::OnSetKnobs(const wire::SetKnobs& set) {
  std::vector<KnobSetting> settings;
  for (size_t i = 0; i < set.names.size(); ++i) settings.push_back({set.names[i], set.values[i]});
  return engine_.registry().Apply(settings);
}

void Server::OnQuery(Peer& peer, uint64_t request, const wire::Query& query) {
  wire::Text reply;
  if (query.what == wire::Query::kDescribe) reply.text = Describe();
  if (query.what == wire::Query::kPrometheus) reply.text = engine_.registry().PrometheusText();
  if (query.what == wire::Query::kWaitingFor) reply.text = engine_.WaitingFor(query.stream);
  const Status encoded = wire::Encode(reply, request, &peer.out);
  if (!encoded.ok()) Reply(peer, request, encoded);
}

void Server::OnStats(Peer& peer, uint64_t request, StreamId stream) {
  wire::StatsReply reply;
  for (const EpochStats& epoch : engine_.Stats(stream)) {
    if (epoch.batches == 0) continue;  // which one it is shows with its first batch
    reply.epochs.push_back(epoch.epoch);
    reply.reads.push_back(epoch.source_reads);
    reply.bytes.push_back(epoch.source_bytes);
  }
  const Status encoded = wire::Encode(reply, request, &peer.out);
  if (!encoded.ok()) Reply(peer, request, encoded);
}

std::string Server::Describe() const {
  const std::string datasets = Joined(datasets_, [this](const auto& entry) {
    const auto catalog = engine_.shared_catalog(entry.second);
    return StrCat("{\"dataset\":", entry.second, ",\"root\":", Quoted(catalog->root()),
                  ",\"samples\":", catalog->size(), ",\"bytes\":", catalog->total_bytes(), "}");
  });
  const std::string clients = Joined(peers_, [](const auto& entry) {
    const Peer& peer = *entry.second;
    const std::string streams = Joined(peer.streams, [&](const auto& stream) {
      const wire::OpenStream& opened = stream.second.opened;
      const auto ring = peer.rings.find(stream.first);
      const size_t ready = ring == peer.rings.end() ? 0 : ring->second->announced.size();
      return StrCat("{\"stream\":", stream.first, ",\"dataset\":", opened.dataset,
                    ",\"batch_size\":", opened.batch_size, ",\"rank\":", opened.sampler_rank,
                    ",\"world\":", opened.sampler_world, ",\"seed\":", opened.sampler_seed,
                    ",\"epoch\":", stream.second.epoch, ",\"batches\":", stream.second.batches,
                    ",\"ready\":", ready, "}");
    });
    return StrCat("{\"pid\":", peer.pid, ",\"leases\":", peer.leases.size(), ",\"streams\":[",
                  streams, "]}");
  });
  const auto mechanisms = engine_.registry().Mechanisms();
  const std::string listed = Joined(mechanisms, [](const Registry::MechanismInfo& info) {
    const std::string knobs = Joined(info.knobs, [](const Knob* knob) {
      return StrCat("{\"name\":", Quoted(knob->name()), ",\"value\":", knob->value(),
                    ",\"type\":", Quoted(KnobTypeName(knob->type())),
                    ",\"minimum\":", knob->minimum(), ",\"maximum\":", knob->maximum(),
                    ",\"meaning\":", Quoted(knob->meaning()), "}");
    });
    return StrCat("{\"name\":", Quoted(info.mechanism->name()),
                  ",\"meaning\":", Quoted(info.mechanism->meaning()), ",\"knobs\":[", knobs,
                  "],\"metrics\":[", Joined(info.metrics, Quoted), "]}");
  });
  const std::string metrics =
      Joined(engine_.registry().Snapshot(), [](const Registry::Sample& sample) {
        return StrCat(Quoted(sample.name), ":", sample.value);
      });
  const Status cache = engine_.CacheStatus();
  return StrCat("{\"pid\":", getpid(), ",\"uptime_ms\":", (SteadyClock().Now() - started_) / kMilli,
                ",\"budget\":", engine_.budget(), ",\"arena_bytes\":", engine_.arena_bytes(),
                ",\"settings\":", Quoted(options_.settings),
                ",\"cache_status\":", Quoted(cache.ok() ? "" : cache.ToString()), ",\"datasets\":[",
                datasets, "],\"clients\":[", clients, "],\"mechanisms\":[", listed,
                "],\"metrics\":{", metrics, "}}");
}

}  // namespace forebay
