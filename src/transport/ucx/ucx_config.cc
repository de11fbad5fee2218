#include "transport/ucx/ucx_config.h"

#include <dirent.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <ucm/api/ucm.h>
#include <ucs/config/global_opts.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace forebay {
namespace {

// Larger payloads go by rendezvous: where the fabric writes to memory itself it is cheaper than a
// copy on the receiver's side.
constexpr size_t kEager = 32 << 10;
// A rendezvous over TCP takes four small messages, each of which costs as much as copying 30 KiB.
// A payload that comes with its header in one piece takes one copy, out of the core's cache.
constexpr size_t kTcpEager = 256 << 10;
constexpr const char* kTcpSegment = "264k";  // with headers

// UCX takes settings of a transport by their names in its own table up to 1.16, by those of the
// environment from 1.17 on; the other one it ignores.
const char* TcpSegmentName() {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return major > 1 || minor >= 17 ? "TCP_RX_SEG_SIZE" : "RX_SEG_SIZE";
}

bool SameHost(const sockaddr& a, const SocketAddress& b) {
  if (a.sa_family != b.storage.ss_family) return false;
  if (a.sa_family == AF_INET) {
    sockaddr_in one, other;
    std::memcpy(&one, &a, sizeof one);
    std::memcpy(&other, &b.storage, sizeof other);
    return one.sin_addr.s_addr == other.sin_addr.s_addr;
  }
  if (a.sa_family == AF_INET6) {
    sockaddr_in6 one, other;
    std::memcpy(&one, &a, sizeof one);
    std::memcpy(&other, &b.storage, sizeof other);
    return std::memcmp(&one.sin6_addr, &other.sin6_addr, sizeof one.sin6_addr) == 0;
  }
  return false;
}

// The interface that has this address; empty: none, or all.
std::string InterfaceOf(const SocketAddress& address) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* one = all; one != nullptr && name.empty(); one = one->ifa_next) {
    if (one->ifa_addr != nullptr && SameHost(*one->ifa_addr, address)) name = one->ifa_name;
  }
  ::freeifaddrs(all);
  return name;
}

bool HasRdma() {
  DIR* const folder = ::opendir("/sys/class/infiniband");
  if (folder == nullptr) return false;
  bool found = false;
  while (const dirent* entry = ::readdir(folder)) found |= entry->d_name[0] != '.';
  ::closedir(folder);
  return found;
}

}  // namespace

void QuietUcx(bool told) {
  if (std::getenv("UCX_LOG_LEVEL") == nullptr) ucs_global_opts_set_value("LOG_LEVEL", "fatal");
  if (std::getenv("UCX_WARN_UNUSED_ENV_VARS") == nullptr) {
    ucs_global_opts_set_value("WARN_UNUSED_ENV_VARS", "n");
  }
  // We name the kind of memory with every call; nobody has to watch allocations for it.
  if (std::getenv("UCX_MEMTYPE_CACHE") == nullptr) {
    ucs_global_opts_set_value("MEMTYPE_CACHE", "n");
  }
  // UCX has read its environment again meanwhile.
  if (told) {
    ucm_global_config_t memory = ucm_global_opts;
    memory.enable_events = 0;
    memory.mmap_hook_mode = UCM_MMAP_HOOK_NONE;
    ucm_set_global_opts(&memory);
  }
}

Result<ucp_config_t*> UcxConfig(const SocketAddress& listen, size_t* eager) {
  ucp_config_t* config = nullptr;
  const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    return Status(Code::kUnavailable, StrCat("ucp_config_read: ", ucs_status_string(status)));
  }
  *eager = kEager;
  if (!HasRdma() && std::getenv("UCX_TCP_RX_SEG_SIZE") == nullptr &&
      std::getenv("UCX_ZCOPY_THRESH") == nullptr &&
      ucp_config_modify(config, TcpSegmentName(), kTcpSegment) == UCS_OK &&
      ucp_config_modify(config, "ZCOPY_THRESH", "16k") == UCS_OK) {
    *eager = kTcpEager;
  }
  // Without RDMA, data takes the interface that we listen at: UCX would also try those that other
  // nodes cannot reach (of containers, say).
  if (std::getenv("UCX_NET_DEVICES") == nullptr && !HasRdma()) {
    if (const std::string name = InterfaceOf(listen); !name.empty()) {
      ucp_config_modify(config, "NET_DEVICES", name.c_str());
    }
  }
  return config;
}

}  // namespace forebay
