#include "peer/options.h"

#include <charconv>
#include <string_view>

namespace forebay::peer {
namespace {

constexpr double kMostSeconds = 3600;

Status Seconds(const GetEnv& get, std::string_view name, Nanos least, Nanos* to) {
  const auto text = get(name);
  if (!text || text->empty()) return Status();
  double seconds = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  if (error != std::errc() || end != text->data() + text->size() ||
      !(seconds * kSecond >= static_cast<double>(least)) || seconds > kMostSeconds) {
    return Status(Code::kInvalidArgument,
                  StrCat(name, "=", *text, ": it takes seconds, at least ",
                         static_cast<double>(least) / kSecond, " and at most ", kMostSeconds));
  }
  *to = static_cast<Nanos>(seconds * kSecond);
  return Status();
}

}  // namespace

Result<PeerOptions> PeerOptionsFromEnvironment(const GetEnv& get, std::string_view suffix) {
  PeerOptions options;
  auto cluster = ClusterFromEnvironment(get, suffix);
  if (!cluster) return cluster.error();
  options.cluster = *std::move(cluster);
  FOREBAY_RETURN_IF_ERROR(Seconds(get, "FOREBAY_PEER_LEASE", 100 * kMilli, &options.lease));
  FOREBAY_RETURN_IF_ERROR(Seconds(get, "FOREBAY_PEER_WAIT", 10 * kMilli, &options.request_wait));
  FOREBAY_RETURN_IF_ERROR(Seconds(get, "FOREBAY_PEER_JOIN_WAIT", 0, &options.join_wait));
  if (const auto text = get("FOREBAY_PEER_TRANSPORT"); text && !text->empty()) {
    const Result<TransportKind> kind = ParseTransportKind(*text);
    if (!kind) {
      return Status(kind.error().code(),
                    StrCat("FOREBAY_PEER_TRANSPORT=", *text, ": ", kind.error().message()));
    }
    options.transport = *kind;
  }
  if (const auto text = get("FOREBAY_PEER_COORDINATE"); text && !text->empty()) {
    if (*text != "0" && *text != "1") {
      return Status(Code::kInvalidArgument,
                    StrCat("FOREBAY_PEER_COORDINATE=", *text, ": it takes 0 or 1"));
    }
    options.coordinate = *text == "1";
  }
  return options;
}

}  // namespace forebay::peer
