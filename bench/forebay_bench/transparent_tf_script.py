"""A tf.data script as people write them: it knows nothing of Forebay. `bench transparent` runs it.

python transparent_tf_script.py FOLDER --epochs 3

Prints one line of JSON an epoch.
"""

import argparse
import glob
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--parallel-reads", type=int, default=tf.data.AUTOTUNE, help="0: one file")
    options = parser.parse_args()
    start = time.perf_counter()
    files = sorted(glob.glob(os.path.join(options.folder, "*.tfrecord")))
    # The reader checks the checksum of every record.
    data = tf.data.TFRecordDataset(files, num_parallel_reads=options.parallel_reads or None)
    data = data.batch(options.batch).prefetch(2)
    listing = time.perf_counter() - start
    for epoch in range(options.epochs):
        start = time.perf_counter()
        samples = count = 0
        for batch in data:
            samples += int(batch.shape[0])
            count += int(tf.reduce_sum(tf.strings.length(batch)))
        seconds = time.perf_counter() - start
        said = {"epoch": epoch, "seconds": seconds, "samples": samples, "bytes": count}
        said["listing"] = listing if epoch == 0 else 0.0
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
