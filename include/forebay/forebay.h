/* Forebay for C, and for every language that can call C.
 *
 *   fb_engine   owns the memory budget and the threads, in this process or in the node's daemon,
 *   fb_dataset  knows where each sample lies,
 *   fb_loader   is one rank's stream of batches, in the order of PyTorch's DistributedSampler,
 *   fb_batch    is a batch on loan, in the engine's memory.
 *
 * Results. Negative values are errno codes; fb_last_error() then says what happened to which file.
 *   -EINVAL           an argument is wrong
 *   -ENOENT           a file or folder does not exist
 *   -EACCES           permission denied
 *   -EBADMSG          bytes are missing or do not match their checksum
 *   -ESTALE           the data set differs from what was listed
 *   -ENOMEM           the memory budget, the memory or another limit of the system does not suffice
 *   -EIO              the storage does not answer now; a retry may succeed
 *   -ETIMEDOUT        the storage took too long
 *   -ECANCELED        cancelled, or the handle belongs to the parent of this process
 *   -ENOTSUP          this build, this kernel or this version lacks the feature
 *   -EBUSY            another thread is using the loader
 *   -EAGAIN           fb_loader_next only: the time is over, ask again
 *   -ENOTRECOVERABLE  a bug in Forebay
 *
 * Threads. Every function is safe for concurrent use by multiple threads, except that a handle is
 * closed, and a batch released, when no other call uses it.
 *
 * Lifetime. Handles may be closed in any order: a data set, a loader or a batch keeps the engine
 * running until it is closed or released itself. Closing NULL does nothing.
 *
 * Fork. Handles belong to the process that made them. In a forked child, calls that need the engine
 * return -ECANCELED and closing does nothing; a child opens an engine of its own.
 */
#ifndef FOREBAY_FOREBAY_H_
#define FOREBAY_FOREBAY_H_

#include <stddef.h>
#include <stdint.h>

#define FOREBAY_API __attribute__((visibility("default"), nothrow))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fb_engine fb_engine;
typedef struct fb_dataset fb_dataset;
typedef struct fb_loader fb_loader;
typedef struct fb_batch fb_batch;

/* "major.minor.patch", of the library that is loaded. Never freed. */
FOREBAY_API const char* fb_version(void);

/* What the last call that failed on this thread had to say; "" when none has. Valid until another
 * call fails on this thread. Long messages are cut. */
FOREBAY_API const char* fb_last_error(void);

/* ---- options ----------------------------------------------------------------------------------
 *
 * Each structure starts with its size as the caller was compiled. The init functions set that size
 * and the defaults: fb_engine_options_init(&options, sizeof options). A caller compiled against an
 * older, smaller structure gets the defaults of the fields it does not know. Fields that the
 * library does not know must be 0, else the call returns -ENOTSUP. NULL stands for the defaults. */

enum { FB_IO_AUTO = 0, FB_IO_THREADS = 1, FB_IO_URING = 2 };

enum { FB_EVENT_ALONE = 0, FB_EVENT_RETURNED = 1 };

/* FB_EVENT_ALONE: this process goes on without the daemon, and why; FB_EVENT_RETURNED: it is back
 * with one. Once for each change, by any thread, also before fb_engine_open has returned. Must
 * neither throw nor call Forebay. */
typedef void (*fb_event)(void* context, int event, const char* what);

typedef struct fb_engine_options {
  size_t size;
  /* Bytes for all that the engine holds. Default 0: chosen from what the machine has free. */
  uint64_t memory;
  /* How long fb_loader_next waits for memory that only unreleased batches hold. Default 10000. */
  uint64_t release_wait_ms;
  /* Most source reads at once. Default 256. */
  uint32_t max_in_flight;
  /* This many reads at once. Default 0: as many as turn out to help. */
  uint32_t in_flight;
  /* Threads that make contiguous batches. Default 2. */
  uint32_t copy_threads;
  /* FB_IO_... Default FB_IO_AUTO. */
  int32_t io;
  /* 1: samples stay in memory for later epochs as far as they fit. Default 1. */
  uint32_t keep;
  /* 1: check the bytes of each sample once more as they arrive. Default 0. */
  uint32_t verify;
  /* Other nodes of the job: "off", "auto" (the launcher's variables) or "host:port,host:port,...".
   * Default NULL: $FOREBAY_PEERS, or "auto". Where they cannot be had the engine does without. */
  const char* peers;
  /* A folder on a local disk that keeps copies of samples for later epochs and jobs; made where it
   * is missing. Default NULL: none. */
  const char* cache_dir;
  /* The most bytes of samples in it. Default 0: four fifths of what the disk has free and the
   * folder holds. */
  uint64_t cache_bytes;
  /* 1: one engine for all of this user's processes on the node, in a process of its own, forebayd,
   * which the first to need it starts. memory, cache_dir and the other options are then meant for
   * all of them together, and those of who starts it hold. When it dies, loaders go on with the
   * next batch from an engine in this process, and return to a new daemon some seconds later.
   * Default 0: an engine in this process. */
  uint32_t shared;
  /* Seconds that a daemon which this call starts stays without a client. Default 5. */
  uint32_t linger_s;
  /* Where its socket lies. Default NULL: $XDG_RUNTIME_DIR/forebay, or /tmp/forebay-UID. */
  const char* daemon_folder;
  /* The executable. Default NULL: $FOREBAYD, else forebayd beside this library or a folder above
   * it, else along $PATH. */
  const char* daemon_program;
  /* The job that this process belongs to, for policies. Default NULL: $FOREBAY_JOB, else SLURM's or
   * torchrun's, else the process group. */
  const char* job;
  /* Called when a shared engine was lost or came back. Default NULL. */
  fb_event event;
  void* event_context;
  /* A group, by name or number, whose members share cache_dir on purpose and choose what the others
   * read from it. Default NULL: the folder is this user's alone. */
  const char* cache_group;
} fb_engine_options;

/* Called while a data set is listed, by one thread at a time, at most ten times a second. Any value
 * but 0 cancels. Must not throw. */
typedef int (*fb_progress)(void* context, uint64_t objects_done, uint64_t objects_total,
                           uint64_t samples);

typedef struct fb_dataset_options {
  size_t size;
  /* "folder", "webdataset" or "tfrecord". Default NULL: decided from what lies at the path. */
  const char* format;
  /* Of a folder, only files with these suffixes, lower-case, such as ".jpg". Default: every file.
   */
  const char* const* extensions;
  size_t extension_count;
  /* Default NULL. */
  fb_progress progress;
  void* progress_context;
  /* Listing calls in flight. Default 64. */
  uint32_t threads;
  /* 1: keep the listing for the next start, and use a kept one while it is fresh. Default 1. */
  uint32_t use_cache;
} fb_dataset_options;

typedef struct fb_loader_options {
  size_t size;
  /* Default 0. */
  uint64_t seed;
  /* The stream ends after so many, counted from first_epoch; 0: never. Default 1. */
  uint64_t epochs;
  /* Where to start, as from fb_loader_position. Default 0 and 0. */
  uint64_t first_epoch;
  uint64_t first_position;
  /* Samples. Default 1. */
  uint32_t batch_size;
  /* Which of the world ranks that share an epoch this is. Default 0 of 1. */
  uint32_t rank;
  uint32_t world;
  /* 0: samples come in the order of the data set. Default 1. */
  uint32_t shuffle;
  /* 1: an epoch's last batch is dropped when it is not full. Default 0. */
  uint32_t drop_last;
  /* Samples that do not divide by world: 1 drops them, 0 repeats others to fill up. Default 0. */
  uint32_t sampler_drop_last;
  /* 1: the samples of a batch lie in one piece, which costs a copy. Default 0. */
  uint32_t contiguous;
  /* Must be 0. */
  uint32_t reserved;
} fb_loader_options;

/* -EINVAL for NULL and for a size that no version of the structure had. */
FOREBAY_API int fb_engine_options_init(fb_engine_options* options, size_t size);
FOREBAY_API int fb_dataset_options_init(fb_dataset_options* options, size_t size);
FOREBAY_API int fb_loader_options_init(fb_loader_options* options, size_t size);

/* ---- engine ------------------------------------------------------------------------------------
 */

/* *out is the caller's to close; NULL after an error. */
FOREBAY_API int fb_engine_open(const fb_engine_options* options, fb_engine** out);

/* Stops the engine once its data sets, loaders and batches are gone too. */
FOREBAY_API void fb_engine_close(fb_engine* engine);

/* Metrics of the engine, where it is now, in Prometheus' text format, as snprintf: writes at most n
 * bytes with the final NUL and returns the length of the whole text without it. buffer may be NULL
 * when n is 0. */
FOREBAY_API int64_t fb_metrics_text(const fb_engine* engine, char* buffer, size_t n);

/* ---- data set ----------------------------------------------------------------------------------
 */

/* Lists what lies at path: a folder of files, tar shards, TFRecord files, or one shard. *out is the
 * caller's to close; NULL after an error. */
FOREBAY_API int fb_dataset_open(fb_engine* engine, const char* path,
                                const fb_dataset_options* options, fb_dataset** out);

/* Loaders over it go on. With the last of them it gives back its tables and descriptors; samples
 * stay in memory for a while, as far as there is room, for an equal data set that is opened soon.
 */
FOREBAY_API void fb_dataset_close(fb_dataset* dataset);

/* Samples, and the bytes of all of them. */
FOREBAY_API int64_t fb_dataset_size(const fb_dataset* dataset);
FOREBAY_API int64_t fb_dataset_bytes(const fb_dataset* dataset);

/* Path relative to the data set, "shard.tar/key" or "file@offset". As snprintf, see
 * fb_metrics_text. */
FOREBAY_API int64_t fb_dataset_sample_name(const fb_dataset* dataset, uint32_t sample, char* buffer,
                                           size_t n);

/* Bytes of one sample. */
FOREBAY_API int64_t fb_dataset_sample_bytes(const fb_dataset* dataset, uint32_t sample);

/* *label is the index of the class; -1 where there is none. */
FOREBAY_API int fb_dataset_label(const fb_dataset* dataset, uint32_t sample, int64_t* label);

/* ---- loader ------------------------------------------------------------------------------------
 */

/* Starts to read ahead. *out is the caller's to close; NULL after an error. */
FOREBAY_API int fb_loader_open(fb_dataset* dataset, const fb_loader_options* options,
                               fb_loader** out);

/* Batches on loan stay valid until they are released. */
FOREBAY_API void fb_loader_close(fb_loader* loader);

enum { FB_END_OF_EPOCH = 0, FB_BATCH = 1, FB_END_OF_STREAM = 2 };

/* Waits at most timeout_ms (0 or more) for the next batch.
 *   FB_BATCH           *out is on loan until fb_batch_release; *out is NULL with every other result
 *   FB_END_OF_EPOCH    once after each epoch, the last included
 *   FB_END_OF_STREAM   from then on
 *   -EAGAIN            not there yet; fb_last_error() says what it waits for
 * Any other error leaves the stream where it is: the next call tries the same batch again. */
FOREBAY_API int fb_loader_next(fb_loader* loader, int timeout_ms, fb_batch** out);

/* The next batch starts at position of epoch. position counts the samples of all ranks and is a
 * multiple of world. -EBUSY while another thread is in fb_loader_next. */
FOREBAY_API int fb_loader_seek(fb_loader* loader, uint64_t epoch, uint64_t position);

/* Where the next batch starts: given to fb_loader_seek, or to a new loader as first_epoch and
 * first_position, the stream goes on right after the last batch handed out. */
FOREBAY_API int fb_loader_position(const fb_loader* loader, uint64_t* epoch, uint64_t* position);

/* ---- batch -------------------------------------------------------------------------------------
 *
 * i counts from 0 to fb_batch_size() - 1; -EINVAL beyond. */

FOREBAY_API int64_t fb_batch_size(const fb_batch* batch);
FOREBAY_API int64_t fb_batch_epoch(const fb_batch* batch);

/* Of the batch in its epoch. After a start inside an epoch it counts from position / (batch_size *
 * world). */
FOREBAY_API int64_t fb_batch_index(const fb_batch* batch);

/* The bytes of sample i. Nobody changes them before the release; they must not be written to. */
FOREBAY_API int fb_batch_data(const fb_batch* batch, size_t i, const void** data, size_t* length);

/* All samples, one right after the other. -EINVAL unless the loader was opened with contiguous. */
FOREBAY_API int fb_batch_contiguous(const fb_batch* batch, const void** data, size_t* length);

/* Number of sample i in the data set. */
FOREBAY_API int64_t fb_batch_sample(const fb_batch* batch, size_t i);

/* As fb_dataset_label. */
FOREBAY_API int fb_batch_label(const fb_batch* batch, size_t i, int64_t* label);

/* Gives the memory back. -EINVAL for a batch that is released already; but a pointer that was
 * released is dead: fb_loader_next may have given it to another batch since, and it is freed with
 * the loader. */
FOREBAY_API int fb_batch_release(fb_batch* batch);

#ifdef __cplusplus
}
#endif

#endif /* FOREBAY_FOREBAY_H_ */
