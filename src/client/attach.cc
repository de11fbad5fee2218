#include "client/attach.h"

#include <utility>

namespace forebay {

DaemonPlace::DaemonPlace(const std::string& where) : wire::ProgramPlace(where, "forebayd") {}

Result<std::unique_ptr<SocketClient>> AttachRunningDaemon(const std::string& folder,
                                                          Nanos timeout) {
  return SocketClient::Attach(DaemonPlace(folder).socket, timeout, true, true);
}

Result<std::unique_ptr<SocketClient>> AttachDaemon(const DaemonOptions& options) {
  const DaemonPlace place(options.folder);
  const wire::StartOptions start{.program = options.program,
                                 .name = "forebayd",
                                 .settings = options.settings,
                                 .timeout = options.timeout};
  std::unique_ptr<SocketClient> client;
  FOREBAY_RETURN_IF_ERROR(wire::AttachOrStart(place, start, [&](Nanos timeout) {
    Result<std::unique_ptr<SocketClient>> made = SocketClient::Attach(place.socket, timeout, true);
    if (made) client = *std::move(made);
    return made ? Status() : made.error();
  }));
  return client;
}

void ClearDeadDaemon(const std::string& folder) {
  const DaemonPlace place(folder);
  wire::ClearDead(
      place, [&](Nanos timeout) { return SocketClient::Attach(place.socket, timeout).status(); });
}

}  // namespace forebay
