#!/usr/bin/env python3
"""tf.data over TFRecord shards.

python tensorflow_train.py [FOLDER]                        forebay:// and one import
forebay run -- python tensorflow_train.py --plain FOLDER   no line: the same without them
"""

from __future__ import annotations

import argparse
import time

import tensorflow as tf
from make_data import tfrecords

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", nargs="?", help="folder of *.tfrecord (default: shards of its own)")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--plain", action="store_true", help="without forebay://")
args = parser.parse_args()

folder = args.data or tfrecords()
if not args.plain:
    import forebay.tensorflow  # noqa: F401 - registers forebay://

    folder = f"forebay://{folder}"


def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    label = tf.io.decode_raw(tf.strings.substr(record, 0, 1), tf.uint8)[0]
    image = tf.io.decode_jpeg(tf.strings.substr(record, 1, -1), channels=3)
    return tf.image.resize(image, (32, 32)) / 255.0, tf.cast(label, tf.int32)


files = sorted(tf.io.gfile.glob(f"{folder}/*.tfrecord"))
data = tf.data.TFRecordDataset(files).map(decode, tf.data.AUTOTUNE)
data = data.shuffle(256, seed=0).batch(32).prefetch(tf.data.AUTOTUNE)

tf.keras.utils.set_random_seed(0)
model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(8, 3, 2, activation="relu"), tf.keras.layers.AveragePooling2D(4),
    tf.keras.layers.Flatten(), tf.keras.layers.Dense(4),
])  # fmt: skip
optimizer = tf.keras.optimizers.Adam(0.01)


@tf.function
def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs))
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(args.epochs):
    start, losses = time.monotonic(), []
    for inputs, labels in data:
        losses.append(step(inputs, labels))
    mean = sum(float(x) for x in losses) / len(losses)
    print(f"epoch {epoch}  loss {mean:.3f}  {time.monotonic() - start:.2f} s", flush=True)
