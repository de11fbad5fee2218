#!/usr/bin/env python3
"""Grain over a folder of images, train/CLASS/*.jpg, and a step in JAX (NumPy where there is none).

python jax_grain.py [FOLDER]
"""

from __future__ import annotations

import argparse
import io
import time

import forebay.grain
import grain
import numpy as np
from make_data import images
from PIL import Image

try:
    import jax.numpy as jnp
except ImportError:
    jnp = np


class Decode(grain.transforms.Map):
    def map(self, record: dict) -> dict:
        image = Image.open(io.BytesIO(record["data"])).convert("RGB").resize((8, 8))
        pixels = np.asarray(image, np.float32).reshape(-1) / 255
        return {"image": pixels, "label": np.int32(record["label"])}


def step(weights: dict, batch: dict) -> tuple[dict, float]:
    """A step of softmax regression."""
    inputs, labels = jnp.asarray(batch["image"]), jnp.asarray(batch["label"])
    scores = inputs @ weights["w"] + weights["b"]
    scores = scores - scores.max(1, keepdims=True)
    chances = jnp.exp(scores) / jnp.exp(scores).sum(1, keepdims=True)
    wanted = jnp.eye(chances.shape[1])[labels]
    loss = -(jnp.log(chances + 1e-9) * wanted).sum(1).mean()
    error = 0.1 * (chances - wanted) / len(labels)
    moved = {"w": weights["w"] - inputs.T @ error, "b": weights["b"] - error.sum(0)}
    return moved, float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", help="folder with train/ (default: its own pictures)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    source = forebay.grain.Source(f"{args.data or images()}/train")
    sampler = grain.samplers.IndexSampler(
        len(source), shuffle=True, seed=0, num_epochs=args.epochs,
        shard_options=grain.sharding.NoSharding(),
    )  # fmt: skip
    source.follow(sampler)  # its order is known: read ahead
    loader = grain.DataLoader(
        data_source=source, sampler=sampler, worker_count=args.workers,
        operations=[Decode(), grain.transforms.Batch(32, drop_remainder=True)],
    )  # fmt: skip

    classes = len(source.catalog.classes)
    weights = {"w": jnp.zeros((8 * 8 * 3, classes)), "b": jnp.zeros(classes)}
    steps = max(1, len(source) // 32)
    start, losses = time.monotonic(), []
    for n, batch in enumerate(loader, 1):
        weights, loss = step(weights, batch)
        losses.append(loss)
        if n % steps == 0:
            spent, start = time.monotonic() - start, time.monotonic()
            mean = sum(losses[-steps:]) / steps
            print(f"epoch {n // steps - 1}  loss {mean:.3f}  {spent:.2f} s", flush=True)


if __name__ == "__main__":
    main()
