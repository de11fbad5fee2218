// Sizer: learns the sizes of listed files in the order in which they are needed.
//
// A listing of names is quick, one stat a file is not. A catalog whose names are known may be used
// while its sizes are still being looked up: by threads of this class, those first that a consumer
// waits for, then those that the streams will come to, then the rest.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "catalog/catalog.h"

namespace forebay {

// Safe for concurrent use by multiple threads. A forked child has none of the threads: there every
// wait ends in kCancelled, and nothing else happens.
class Sizer {
 public:
  struct Found {
    SampleId sample = 0;
    uint32_t length = 0;
    Status status;  // not ok: there is no length; who wants it asks again
  };
  using Size = FileSize;
  struct Work {
    size_t samples = 0;
    size_t threads = 64;
    uint32_t guess = 0;  // what a length is about; 0: nobody knows
    // One lookup. Many threads; may hang for as long as the storage does, and may still run when
    // the Sizer is gone.
    std::function<Result<Size>(SampleId)> look;
    // Takes it over into the catalog; a lock is held.
    std::function<void(SampleId, const Size&)> set;
    // Every sample was looked up once; `first_error` tells whether all have their length. On a
    // thread of the Sizer, without a lock; may still run when the Sizer is gone.
    std::function<void(const Status& first_error)> finish;
  };

  explicit Sizer(Work work);
  // Drops what has not begun, waits a little for lookups that have, and leaves those that hang.
  ~Sizer();
  Sizer(const Sizer&) = delete;
  Sizer& operator=(const Sizer&) = delete;

  // ---- For the one engine that reads the catalog while lengths are missing.

  // False: another one does. What was found already, also in vain, is told to it like the rest.
  bool Attach();
  void Detach();
  // Moves out what was found since the last call; never blocks.
  void Reap(std::vector<Found>* out);
  // Readable when some has been found; Reap empties it. Not for each at once.
  int event_fd() const;
  // A stream's order, as far as it was not told; one of another generation takes the place of what
  // was told of the stream.
  void Follow(uint32_t stream, uint64_t generation, std::span<const SampleId> order);
  // Before all others; again if they were looked up in vain.
  void Want(std::span<const SampleId> samples);
  // How many lengths are known beyond those in use: lookups take few threads while there are
  // enough, and leave the storage to reads.
  void SetAhead(size_t lengths);

  // ---- For everybody.

  // Every sample was looked up, and `finish` has returned.
  bool complete() const;
  uint32_t guess() const;
  // Complete, and every length is known.
  bool all_known() const;
  // kUnavailable: not within `wait`.
  Status Wait(Nanos wait);
  // Not ok: the first sample whose lookup failed, once complete.
  Status first_error() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads, which may outlive this
};

}  // namespace forebay
