// The file service: one process a cache folder, that copies files of the source into it for the
// programs of this node.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/warnings.h"
#include "files/observer.h"
#include "files/supply.h"
#include "metrics/registry.h"
#include "wire/start.h"

namespace forebay::files {

struct ServiceOptions {
  std::string cache;   // a RunFolder; an absolute path, made when it is not there
  std::string socket;  // path of the socket
  // Each DIR or NAME=DIR, see FileSupply::AddSource.
  std::vector<std::string> sources;
  uint64_t cache_bytes = 0;  // the most that copies which are kept may take
  uint64_t ahead_bytes = 0;  // 0: an eighth of the above, 16 to 256 MiB
  uint64_t reads_in_flight = 64;
  uint64_t slots = 1 << 21;  // of the table's last part (it grows), a power of two
  uint64_t partial_bytes = uint64_t{16} << 20;  // files above this are read while they are copied
  Nanos young = 3 * kSecond;
  Nanos linger = 5 * kSecond;
  bool temporary = false;  // the store goes with the daemon; told in the status
  // The engine that reads the source and stores copies beyond this service's life, and where its
  // metrics are; both outlive the service.
  FileSupply* supply = nullptr;
  Registry* registry = nullptr;
  FileObserver* observer = nullptr;  // outlives the service
  std::string store;             // the folder of the supply's copies, which are no source either
  std::string settings;          // what the daemon was started with, for the status
  Warnings* warnings = nullptr;  // for the status; outlives the service
  std::function<void(const std::string&)> say = [](const std::string&) {};

  Status Validate() const;
};

class Service {
 public:
  // kUnavailable when another service has the folder; kUnimplemented when its file system lacks
  // extended attributes.
  static Result<std::unique_ptr<Service>> Start(const ServiceOptions& options);
  virtual ~Service() = default;  // ends it, and removes what is not to stay

  // Answers nobody any more, leaves its folder to the next one, and waits for the threads that read
  // the source. False: some still wait for it, or for the disk of the copies, and whoever destroys
  // this waits for them.
  virtual bool End(Nanos wait) = 0;
  // Somebody is there, or was a moment ago.
  virtual bool busy() const = 0;
  // Its folder was removed, so that it is of no use any more.
  virtual bool folder_gone() const = 0;
  // Readable when nobody has been there for long enough.
  virtual int ended_fd() const = 0;
  virtual Registry& registry() = 0;
};

// Where the service of a cache folder and its clients meet.
wire::ProgramPlace ServicePlace(const std::string& folder, const std::string& cache);

}  // namespace forebay::files
