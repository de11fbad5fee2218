// EngineSupply: files as samples of an engine. Each data folder is a data set that grows by the
// files that are asked for; a large file is one sample for each of its blocks.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "files/key.h"
#include "files/shard_parts.h"
#include "files/supply.h"
#include "stage/engine.h"
#include "tier/folder_tier.h"

namespace forebay::files {

class EngineSupply final : public FileSupply {
 public:
  // `engine` outlives the supply. `job`: the name of who has none. `alone`: no other node has a
  // part of the files.
  EngineSupply(Engine& engine, std::string job, bool alone = true);
  ~EngineSupply() override;

  Status AddSource(const std::string& folder, const std::string& name) override EXCLUDES(mutex_);
  Result<FileLoan> Read(const std::string& path, const std::shared_ptr<const SourceFile>& file,
                        const Extent& extent, const Purpose& purpose,
                        const std::stop_token& stop) override EXCLUDES(mutex_);
  void OpenJob(JobNumber job, const std::string& name) override EXCLUDES(mutex_);
  void CloseJob(JobNumber job) override EXCLUDES(mutex_);
  bool opens_files() const override { return alone_; }
  Status LinkCopy(const std::string& path, const SourceFile& file, int folder,
                  const char* name) override EXCLUDES(mutex_);
  Status KeepCopy(const std::string& path, const SourceFile& file, int folder, const char* name,
                  uint32_t crc) override EXCLUDES(mutex_);
  void DropCopy(const std::string& path, const SourceFile& file) override EXCLUDES(mutex_);
  void Forget(const std::string& path) override EXCLUDES(mutex_);
  void Removed(const FileKey& key) override EXCLUDES(mutex_);
  bool CopiesAnswer() override;
  std::vector<FileKey> TakeUnlinks() override EXCLUDES(mutex_);

 private:
  struct Root {
    std::string folder;
    uint32_t number = 0;
    DatasetId dataset = 0;
    std::shared_ptr<const Catalog> catalog;  // the engine's
  };
  // A file as it was when it was appended.
  struct Known {
    uint64_t size = 0;
    int64_t mtime_ns = 0;
    uint32_t block = 0;
    uint32_t root = 0;
    Appended samples;  // none: only its copy was of use so far
    TierKey copy;
  };
  struct KeyHash {
    size_t operator()(const FileKey& key) const { return static_cast<size_t>(key.low); }
  };
  struct Found {
    std::shared_ptr<const Catalog> catalog;
    uint32_t root = 0;
    SampleId sample = 0;
  };
  // It has a share of the source as long as it has streams: from its first read on.
  struct Job {
    std::string name;
    bool open = false;
    size_t reads = 0;                      // under way
    std::map<uint32_t, StreamId> streams;  // by root
  };
  class JobStream;

  void Release(uint64_t lease) override;
  // The innermost data folder; null: it lies in none.
  const Root* RootOf(std::string_view path) const REQUIRES(mutex_);
  // One that was never opened is that of 0.
  Job& JobOf(JobNumber number) REQUIRES(mutex_);
  Job& BeginRead(JobNumber number) EXCLUDES(mutex_);
  Result<StreamId> StreamOf(Job& job, uint32_t root) EXCLUDES(mutex_);
  void EndRead(Job& job) EXCLUDES(mutex_);
  void CloseStreams(Job& job) REQUIRES(mutex_);
  Result<Found> Find(const std::string& path, const SourceFile& file, const Extent& extent)
      EXCLUDES(mutex_);
  Known& FindOrAdd(const std::string& path, const SourceFile& file, const Root& root)
      REQUIRES(mutex_);
  // The extent from what the store has of its samples; none: it has too little.
  std::optional<FileLoan> ReadParts(const std::string& path, const SourceFile& file,
                                    const Extent& extent, bool urgent);
  // So that Forget and Removed find its copy.
  void Remember(const std::string& path, const SourceFile& file) EXCLUDES(mutex_);
  void ForgetLocked(const FileKey& key) REQUIRES(mutex_);
  // kNotFound: the path lies in no data folder, or there is no store.
  Result<TierKey> CopyOf(const std::string& path, const SourceFile& file) const EXCLUDES(mutex_);

  Engine& engine_;
  const bool alone_;
  const std::shared_ptr<FolderStore> store_;  // null: there is none; shared with the engine's tiers
  std::optional<ShardParts> parts_;           // where there is a store

  mutable Mutex mutex_;
  std::deque<Root> roots_ GUARDED_BY(mutex_);
  std::map<JobNumber, Job> jobs_ GUARDED_BY(mutex_);
  std::unordered_map<FileKey, Known, KeyHash> known_ GUARDED_BY(mutex_);
};

}  // namespace forebay::files
