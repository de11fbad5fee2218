#include "transport/choose.h"

#include <filesystem>
#include <fstream>

namespace forebay {
namespace {

std::string FirstLine(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

Result<TransportKind> ParseTransportKind(std::string_view text) {
  if (text == "auto") return TransportKind::kAuto;
  if (text == "tcp") return TransportKind::kTcp;
  if (text == "tls") return TransportKind::kTls;
  if (text == "ucx") return TransportKind::kUcx;
  return Status(Code::kInvalidArgument,
                StrCat("'", text, "' is no transport: write auto, tcp, tls or ucx"));
}

bool HasInfiniBand(const std::string& folder) {
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator(folder, error)) {
    std::error_code none;
    for (const auto& port : std::filesystem::directory_iterator(device.path() / "ports", none)) {
      // "4: ACTIVE"
      if (FirstLine(port.path() / "link_layer") == "InfiniBand" &&
          FirstLine(port.path() / "state").find("ACTIVE") != std::string::npos) {
        return true;
      }
    }
  }
  return false;
}

Result<std::unique_ptr<Transport>> MakeTransport(TransportKind kind,
                                                 const TransportOptions& options,
                                                 TransportHandler& handler, std::string* trust) {
  trust->clear();
  if (kind == TransportKind::kAuto) {
    kind = HasInfiniBand() && UcxVersion() ? TransportKind::kUcx : TransportKind::kTcp;
  }
  if (kind == TransportKind::kUcx) {
    *trust =
        "UCX writes to this process's memory for whoever reaches its ports, so only the job's "
        "nodes may reach them; FOREBAY_PEER_TRANSPORT=tcp or tls needs no such trust";
    return MakeUcxTransport(options, handler);
  }
  if (kind == TransportKind::kTls) return MakeTlsTransport(options, handler);
  return MakeTcpTransport(options, handler);
}

}  // namespace forebay
