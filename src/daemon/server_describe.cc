// What the server tells of itself: Describe's JSON (docs/daemon.md) and Prometheus text.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string_view>

#include "daemon/server.h"
#include "wire/quoted.h"

namespace forebay {
namespace {

constexpr Nanos kLookWait = 2 * kSecond;

using wire::Quoted;

// As the value of a Prometheus label, which must be UTF-8.
std::string Label(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else {
      out += byte < 0x20 || byte > 0x7e ? '?' : c;
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

std::string WaitsJson(const StreamWatch::Waits& waits) {
  std::string out;
  for (size_t i = 0; i < kStallCauses; ++i) {
    out += StrCat(i == 0 ? "{\"" : ",\"", kStallCauseNames[i], "\":", waits[i]);
  }
  return out + "}";
}

// What this node knows of its cluster; null without peers.
std::string ClusterJson(const ClusterReport& report) {
  if (report.nodes == 0) return "null";
  const std::string peers = Joined(report.peers, [](const PeerReport& p) {
    return StrCat(
        "{\"node\":", p.node, ",\"address\":", Quoted(p.address), ",\"state\":", Quoted(p.state),
        ",\"fault\":", Quoted(p.fault), ",\"faults\":", p.faults, ",\"reads\":", p.reads,
        ",\"bytes\":", p.bytes, ",\"served\":", p.served, ",\"served_bytes\":", p.served_bytes,
        ",\"timeouts\":", p.timeouts, ",\"refused\":", p.refused, ",\"corrupt\":", p.corrupt,
        ",\"lost\":", p.lost, ",\"latency_ns\":", p.latency_ns, "}");
  });
  return StrCat("{\"node\":", report.node, ",\"nodes\":", report.nodes,
                ",\"coordinated\":", report.coordinated ? "true" : "false",
                ",\"description\":", Quoted(report.description),
                ",\"health\":", Quoted(report.health), ",\"peers\":[", peers, "]}");
}

std::string DatasetJson(DatasetId id, const Catalog& catalog) {
  const bool grows = catalog.format() == Format::kGrowing;
  const std::string seen = grows ? StrCat(",\"name\":", Quoted(catalog.given_name()),
                                          ",\"files\":", catalog.object_count())
                                 : "";
  return StrCat("{\"dataset\":", id, ",\"root\":", Quoted(catalog.root()),
                ",\"grows\":", grows ? "true" : "false", seen, ",\"samples\":", catalog.size(),
                ",\"bytes\":", catalog.total_bytes(), "}");
}

// Of this rank in an epoch; 0: not known.
uint64_t BatchesAnEpoch(const StreamOptions& opened) {
  const uint64_t batch = opened.shape.batch_size;
  if (opened.declared || opened.sampler.world == 0 || batch == 0) return 0;
  const uint64_t mine = opened.sampler.RankSize();
  return opened.shape.drop_last ? mine / batch : (mine + batch - 1) / batch;
}

std::string WatchJson(const StreamWatch& watch, Nanos now) {
  const StreamWatch::Recent recent = watch.LastSeconds(now);
  return StrCat(",\"batches_total\":", watch.batches(), ",\"samples_total\":", watch.samples(),
                ",\"bytes_total\":", watch.bytes(), ",\"stall_ns\":", WaitsJson(watch.waits()),
                ",\"epoch_stall_ns\":", WaitsJson(watch.epoch_waits()),
                ",\"recent_stall_ns\":", WaitsJson(recent.waits), ",\"recent_ns\":", recent.span,
                ",\"recent_stall_share\":", recent.WaitingShare());
}

class Values {
 public:
  explicit Values(const std::vector<Registry::Sample>& samples) {
    for (const Registry::Sample& sample : samples) values_[sample.name] = sample.value;
  }
  uint64_t operator[](std::string_view name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? 0 : found->second;
  }

 private:
  std::map<std::string, uint64_t, std::less<>> values_;
};

}  // namespace

std::string Server::JobOf(const Peer& peer, const StreamInfo& stream) {
  return stream.opened.shape.job.empty() ? StrCat("pid ", peer.pid) : stream.opened.shape.job;
}

StreamWatch Server::Watched(const Peer& peer, StreamId stream, Nanos now) const {
  const StreamInfo& info = peer.streams.at(stream);
  StreamWatch watch = info.watch;
  // Who works ahead of a consumer tells what that one waited for.
  if (info.opened.ahead_of_consumer) return watch;
  const auto ring = peer.rings.find(stream);
  if (ring != peer.rings.end() && ring->second->wanted_since >= 0) {
    watch.Waited(ring->second->cause, ring->second->wanted_since, now);
  }
  for (const Pending& ask : pending_) {
    if (ask.peer == &peer && ask.stream == stream && ask.since >= 0 && !ask.fetch) {
      watch.Waited(ask.cause, ask.since, now);
    }
  }
  return watch;
}

std::string Server::Describe() const {
  const Nanos now = SteadyClock().Now();
  // Those that clients have open, and those of programs that open files.
  std::map<DatasetId, std::shared_ptr<const Catalog>> listed_sets;
  for (DatasetId id = 0; id < engine_.dataset_count(); ++id) {
    std::shared_ptr<const Catalog> catalog = engine_.shared_catalog(id);
    const bool listed =
        catalog != nullptr && (options_.open_datasets || catalog->format() == Format::kGrowing ||
                               std::any_of(peers_.begin(), peers_.end(), [&](const auto& entry) {
                                 return entry.second->datasets.contains(id);
                               }));
    if (listed) listed_sets.emplace(id, std::move(catalog));
  }
  const std::string datasets = Joined(
      listed_sets, [](const auto& listed) { return DatasetJson(listed.first, *listed.second); });
  const std::string clients = Joined(peers_, [&](const auto& entry) {
    const Peer& peer = *entry.second;
    const std::string streams = Joined(peer.streams, [&](const auto& stream) {
      const StreamOptions& opened = stream.second.opened;
      const auto ring = peer.rings.find(stream.first);
      const size_t ready = ring == peer.rings.end() ? 0 : ring->second->announced.size();
      const StreamWatch watch = Watched(peer, stream.first, now);
      return StrCat("{\"stream\":", stream.first, ",\"job\":", Quoted(JobOf(peer, stream.second)),
                    ",\"dataset\":", opened.shape.dataset,
                    ",\"batch_size\":", opened.shape.batch_size, ",\"rank\":", opened.sampler.rank,
                    ",\"world\":", opened.sampler.world, ",\"seed\":", opened.sampler.seed,
                    ",\"epoch\":", watch.epoch(), ",\"batches\":", watch.epoch_batches(),
                    ",\"epoch_batches\":", BatchesAnEpoch(opened), ",\"ready\":", ready,
                    WatchJson(watch, now), "}");
    });
    return StrCat("{\"pid\":", peer.pid, ",\"leases\":", peer.leases.size(), ",\"streams\":[",
                  streams, "]}");
  });
  std::string programs;
  if (options_.programs != nullptr) {
    programs = Joined(options_.programs->Programs(now), [&](const ProgramWatch::Program& program) {
      return StrCat("{\"pid\":", program.pid,
                    ",\"program\":true,\"leases\":0,\"streams\":[{\"stream\":0,\"job\":",
                    Quoted(program.name), ",\"dataset\":0,\"batch_size\":1,\"rank\":0,\"world\":1",
                    ",\"seed\":0,\"epoch\":0,\"batches\":", program.watch.samples(),
                    ",\"epoch_batches\":0,\"ready\":0", WatchJson(program.watch, now), "}]}");
    });
    if (!clients.empty() && !programs.empty()) programs = StrCat(",", programs);
  }
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
  const std::vector<Registry::Sample> snapshot = engine_.registry().Snapshot();
  const std::string metrics = Joined(snapshot, [](const Registry::Sample& sample) {
    return StrCat(Quoted(sample.name), ":", sample.value);
  });
  const Values value(snapshot);
  const std::string source =
      StrCat("{\"reads\":", value["forebay_source_reads_total"],
             ",\"bytes\":", value["forebay_source_read_bytes_total"],
             ",\"requests\":", value["forebay_source_requests_total"],
             ",\"errors\":", value["forebay_source_errors_total"],
             ",\"in_flight\":", value["forebay_source_in_flight_reads"],
             ",\"in_flight_limit\":", value["forebay_source_in_flight_limit_reads"], "}");
  const Status cache = engine_.CacheStatus();
  const std::string cache_status = Quoted(cache.ok() ? "" : cache.ToString());
  std::string tiers =
      StrCat("{\"name\":\"memory\",\"used\":", value["forebay_stage_arena_used_bytes"],
             ",\"kept\":", value["forebay_stage_kept_bytes"], ",\"limit\":", engine_.arena_bytes(),
             ",\"status\":\"\"}");
  if (const Result<uint64_t> limit = engine_.CacheLimit(); limit) {
    const uint64_t used = value["forebay_tier_used_bytes"];
    tiers += StrCat(",{\"name\":\"folder\",\"used\":", used, ",\"kept\":", used,
                    ",\"limit\":", *limit, ",\"status\":", cache_status, "}");
  }
  const ClusterReport cluster = engine_.Cluster();
  return StrCat("{\"pid\":", getpid(), ",\"time_ms\":", now / kMilli,
                ",\"uptime_ms\":", (now - started_) / kMilli, ",\"budget\":", engine_.budget(),
                ",\"arena_bytes\":", engine_.arena_bytes(),
                ",\"settings\":", Quoted(options_.settings), ",\"url\":", Quoted(options_.url),
                ",\"cache_status\":", cache_status,
                ",\"cache_warning\":", Quoted(engine_.CacheWarning()),
                ",\"changed_files\":", Quoted(engine_.ChangedFiles()), ",\"datasets\":[", datasets,
                "],\"clients\":[", clients, programs, "],\"source\":", source, ",\"tiers\":[",
                tiers, "],\"mechanisms\":[", listed, "],\"cluster\":", ClusterJson(cluster),
                ",\"peers_off\":", Quoted(cluster.nodes == 0 ? cluster.health : ""),
                ",\"control\":", options_.control ? options_.control() : "null", ",\"metrics\":{",
                metrics, "}}");
}

std::string Server::PrometheusText() const {
  const Nanos now = SteadyClock().Now();
  struct Row {
    std::string labels;
    uint64_t ready;
    StreamWatch watch;
    double share;
  };
  std::vector<Row> rows;
  for (const auto& [id, peer] : peers_) {
    for (const auto& [stream, info] : peer->streams) {
      const auto ring = peer->rings.find(stream);
      Row row{StrCat("job=", Label(JobOf(*peer, info)), ",rank=\"", info.opened.sampler.rank,
                     "\",stream=\"", stream, "\""),
              ring == peer->rings.end() ? 0 : ring->second->announced.size(),
              Watched(*peer, stream, now), 0.0};
      row.share = row.watch.LastSeconds(now).WaitingShare();
      rows.push_back(std::move(row));
    }
  }
  if (options_.programs != nullptr) {
    for (const ProgramWatch::Program& program : options_.programs->Programs(now)) {
      Row row{StrCat("job=", Label(program.name), ",rank=\"0\",stream=\"files\""), 0, program.watch,
              program.watch.LastSeconds(now).WaitingShare()};
      rows.push_back(std::move(row));
    }
  }
  std::string out = engine_.registry().PrometheusText();
  const auto family = [&out](std::string_view name, std::string_view type, std::string_view help) {
    out += StrCat("# HELP ", name, " ", help, "\n# TYPE ", name, " ", type, "\n");
  };
  const auto each = [&](std::string_view name, std::string_view type, std::string_view help,
                        auto value) {
    family(name, type, help);
    for (const Row& row : rows) out += StrCat(name, "{", row.labels, "} ", value(row), "\n");
  };
  each("forebay_rank_samples_total", "counter", "Samples that a rank has taken",
       [](const Row& row) { return row.watch.samples(); });
  each("forebay_rank_sample_bytes_total", "counter", "Bytes of those samples",
       [](const Row& row) { return row.watch.bytes(); });
  each("forebay_rank_batches_total", "counter", "Batches that a rank has taken",
       [](const Row& row) { return row.watch.batches(); });
  each("forebay_rank_epoch", "gauge", "The epoch that a rank is in",
       [](const Row& row) { return row.watch.epoch(); });
  each("forebay_rank_ready_batches", "gauge", "Batches announced to a rank and not taken yet",
       [](const Row& row) { return row.ready; });
  each("forebay_rank_stall_ratio", "gauge", "Share of the last ten seconds that a rank waited",
       [](const Row& row) { return row.share; });
  constexpr std::string_view kStall = "forebay_rank_stall_nanoseconds_total";
  family(kStall, "counter", "Time that a rank waited, by cause");
  for (const Row& row : rows) {
    for (size_t i = 0; i < kStallCauses; ++i) {
      out += StrCat(kStall, "{", row.labels, ",cause=\"", kStallCauseNames[i], "\"} ",
                    row.watch.waits()[i], "\n");
    }
  }
  family("forebay_knob_value", "gauge", "What a knob is set to");
  for (const Registry::MechanismInfo& info : engine_.registry().Mechanisms()) {
    for (const Knob* knob : info.knobs) {
      out += StrCat("forebay_knob_value{mechanism=", Label(info.mechanism->name()),
                    ",knob=", Label(knob->name()), "} ", knob->value(), "\n");
    }
  }
  return out;
}

Result<std::string> Server::Render(View view) {
  MutexLock lock(look_mutex_);
  Asked& asked = asked_[view];
  const uint64_t seen = asked.version;
  asked.wanted = true;
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
  const bool done =
      looked_.wait_for(lock.native(), std::chrono::nanoseconds(kLookWait),
                       [&]() NO_THREAD_SAFETY_ANALYSIS { return asked.version != seen; });
  if (!done) return Status(Code::kUnavailable, "the server's thread does not answer");
  return asked.text;
}

void Server::AnswerLooks() {
  MutexLock lock(look_mutex_);
  for (size_t i = 0; i < kViews; ++i) {
    Asked& asked = asked_[i];
    if (!asked.wanted) continue;
    asked.wanted = false;
    asked.text = i == kStatusView ? Describe() : PrometheusText();
    ++asked.version;
    looked_.notify_all();
  }
}

}  // namespace forebay
