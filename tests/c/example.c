/* Reads a data set through libforebay.so: two epochs, in a new order each.
 *
 *   example PATH [BATCH]
 *
 * For each epoch it prints how many samples and bytes arrived, and the sum of the samples' CRC-32.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "forebay/forebay.h"

struct totals {
  uint64_t samples;
  uint64_t bytes;
  uint64_t crc_sum;
};

static uint32_t crc32(const unsigned char* data, size_t n) {
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < n; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
  }
  return ~crc;
}

static int add_batch(const fb_batch* batch, struct totals* totals) {
  const int64_t size = fb_batch_size(batch);
  for (size_t i = 0; i < (size_t)size; ++i) {
    const void* data = NULL;
    size_t length = 0;
    const int rc = fb_batch_data(batch, i, &data, &length);
    if (rc != 0) return rc;
    totals->samples += 1;
    totals->bytes += length;
    totals->crc_sum += crc32(data, length);
  }
  return 0;
}

static int read_all(fb_loader* loader) {
  struct totals totals = {0, 0, 0};
  int epoch = 0;
  for (;;) {
    fb_batch* batch = NULL;
    int rc = fb_loader_next(loader, 1000, &batch);
    if (rc == -EAGAIN) {
      fprintf(stderr, "still waiting: %s\n", fb_last_error());
    } else if (rc == FB_END_OF_STREAM) {
      return 0;
    } else if (rc == FB_END_OF_EPOCH) {
      printf("epoch %d: %" PRIu64 " samples, %" PRIu64 " bytes, crc sum %016" PRIx64 "\n", epoch++,
             totals.samples, totals.bytes, totals.crc_sum);
      totals = (struct totals){0, 0, 0};
    } else if (rc == FB_BATCH) {
      rc = add_batch(batch, &totals);
      fb_batch_release(batch);
      if (rc != 0) return rc;
    } else {
      return rc;
    }
  }
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    fprintf(stderr, "usage: %s PATH [BATCH]\n", argv[0]);
    return 2;
  }
  fb_engine_options engine_options;
  fb_engine_options_init(&engine_options, sizeof engine_options);
  engine_options.memory = (uint64_t)64 << 20;
  fb_loader_options loader_options;
  fb_loader_options_init(&loader_options, sizeof loader_options);
  loader_options.batch_size = argc == 3 ? (uint32_t)strtoul(argv[2], NULL, 10) : 16;
  loader_options.epochs = 2;

  fb_engine* engine = NULL;
  fb_dataset* dataset = NULL;
  fb_loader* loader = NULL;
  int rc = fb_engine_open(&engine_options, &engine);
  if (rc == 0) rc = fb_dataset_open(engine, argv[1], NULL, &dataset);
  if (rc == 0) rc = fb_loader_open(dataset, &loader_options, &loader);
  if (rc == 0) rc = read_all(loader);
  if (rc != 0) fprintf(stderr, "%s: error %d: %s\n", argv[0], -rc, fb_last_error());
  fb_loader_close(loader);
  fb_dataset_close(dataset);
  fb_engine_close(engine);
  return rc == 0 ? 0 : 1;
}
