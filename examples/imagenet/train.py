#!/usr/bin/env python3
"""Trains an image classifier on a folder laid out as ImageNet: train/CLASS/*.jpg, val/CLASS/*.jpg.

python train.py /data/imagenet                           one GPU, or the processor
torchrun --nproc-per-node 8 train.py /data/imagenet      eight GPUs
python train.py /data/imagenet --resume checkpoint.pt    goes on inside the epoch, batch for batch
python train.py --demo                                   pictures of its own, half a minute
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import forebay
import torch
import torch.distributed as dist
from forebay import transforms as T
from torch import nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", nargs="?", help="folder with train/ and val/")
    add("--model", default="resnet50", help="a torchvision model, or 'small' (default: resnet50)")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=256, help="of one rank (default: 256)")
    add("--lr", type=float, default=0.1, help="for 256 images a step, scaled to the global batch")
    add("--crop", type=int, default=224, help="side of the training crop (default: 224)")
    add("--memory", help="Forebay's memory budget, such as 64G (default: chosen by Forebay)")
    add("--cache-dir", help="local folder that keeps the data set from run to run")
    add("--skip-corrupt", action="store_true", help="leave out images that do not decode")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=int, default=0)
    add("--checkpoint", default="checkpoint.pt", help="file to save to (default: checkpoint.pt)")
    add("--save-every", type=int, default=1000, help="steps between checkpoints (default: 1000)")
    add("--resume", metavar="FILE", help="go on from this checkpoint")
    add("--print-every", type=int, default=50, help="steps between lines (default: 50)")
    add("--max-steps", type=int, help="end early, after this many steps in all")
    add("--demo", action="store_true", help="a small data set and model, made on the spot")
    args = parser.parse_args()
    if args.data is None and not args.demo:
        parser.error("name the data folder, or try --demo")
    return args


# ---- data


def loaders(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """Rank and world size come from torchrun, SLURM or MPI."""
    common = dict(
        seed=args.seed, decode="image", device="cuda" if device.type == "cuda" else None,
        channels_last=True, memory=args.memory, cache_dir=args.cache_dir,
        on_error="skip" if args.skip_corrupt else "raise",
    )  # fmt: skip
    end = [T.ToTensor(), T.Normalize(MEAN, STD)]
    train = forebay.DataLoader(
        os.path.join(args.data, "train"), args.batch_size, shuffle=True, drop_last=True,
        transform=[T.RandomResizedCrop(args.crop), T.RandomHorizontalFlip(), *end], **common,
    )  # fmt: skip
    val = forebay.DataLoader(
        os.path.join(args.data, "val"), args.batch_size,
        transform=[T.Resize(args.crop * 8 // 7), T.CenterCrop(args.crop), *end], **common,
    )  # fmt: skip
    return train, val


def make_demo(args: argparse.Namespace, folder: str) -> None:
    """Four classes: a disc or a square, filled or not, anywhere, in any colour, on noise."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(args.seed)
    for part, count in (("train", 320), ("val", 80)):
        for i in range(count):
            kind = i % 4
            target = os.path.join(folder, part, f"class{kind}")
            os.makedirs(target, exist_ok=True)
            image = Image.fromarray(rng.integers(90, 160, (120, 160, 3), dtype=np.uint8))
            x, y, radius = rng.integers(50, 110), rng.integers(45, 75), rng.integers(28, 42)
            box = [int(v) for v in (x - radius, y - radius, x + radius, y + radius)]
            colour = tuple(int(v) for v in rng.choice([0, 255], 3))
            draw = ImageDraw.Draw(image)
            shape = draw.ellipse if kind < 2 else draw.rectangle
            shape(box, fill=colour if kind % 2 else None, outline=colour, width=8)
            image.save(os.path.join(target, f"{i:04d}.jpg"), quality=92)
    args.data, args.model, args.crop, args.batch_size = folder, "small", 64, 32
    args.epochs, args.print_every, args.lr = min(args.epochs, 3), 5, 0.8
    args.memory = args.memory or "128M"


# ---- model


def make_model(name: str, classes: int) -> nn.Module:
    if name != "small":
        import torchvision.models

        return getattr(torchvision.models, name)(num_classes=classes)
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm2d(outside),
                   nn.ReLU(inplace=True)]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def learning_rate(step: int, steps: int, warm_up: int, peak: float) -> float:
    """A line up, then a cosine down."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def validate(model: nn.Module, loader: Any, device: torch.device) -> float:
    """Share of right answers over all ranks."""
    model.eval()
    right = torch.zeros(2, device=device)
    with torch.no_grad(), autocast(device):
        for images, labels in loader:
            right[0] += (model(images).argmax(1) == labels).sum()
            right[1] += len(images)
    if dist.is_initialized():
        dist.all_reduce(right)
    return float(right[0] / right[1])


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    torch.manual_seed(args.seed)
    train_loader, val_loader = loaders(args, device)
    classes = sum(e.is_dir() for e in os.scandir(os.path.join(args.data, "train")))
    model = make_model(args.model, classes).to(device, memory_format=torch.channels_last)
    peak = args.lr * args.batch_size * world / 256
    optimizer = torch.optim.SGD(
        model.parameters(), peak, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    steps = args.epochs * len(train_loader)
    if steps == 0:
        raise SystemExit(f"{args.data}: fewer training images than one batch of {args.batch_size}")
    step = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train_loader.load_state_dict(state["loader"])
        step = state["step"]
        say(f"resumed from {args.resume}: epoch {train_loader.epoch}, step {step}")

    def save() -> None:
        if rank == 0:
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "loader": train_loader.state_dict(), "step": step,
            }  # fmt: skip
            torch.save(state, f"{args.checkpoint}.new")
            os.replace(f"{args.checkpoint}.new", args.checkpoint)

    network: nn.Module = model
    if dist.is_initialized():
        network = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
    if args.compile:
        network = torch.compile(network)  # type: ignore[assignment]

    last = min(steps, args.max_steps or steps)
    while step < last:
        epoch = train_loader.epoch
        network.train()
        marked, seen = time.monotonic(), 0
        for images, labels in train_loader:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, min(500, steps // 10), peak)
            with autocast(device):
                loss = loss_of(network(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            seen += len(images) * world
            if step % args.print_every == 0:
                value = loss.item()  # waits for the GPU
                rate = seen / (time.monotonic() - marked)
                say(f"epoch {epoch} step {step}/{steps}  loss {value:.3f}  {rate:,.0f} images/s")
                marked, seen = time.monotonic(), 0
            if step % args.save_every == 0 and step < last:
                save()
            if step >= last:
                break
        if train_loader.epoch > epoch or step == steps:
            accuracy = validate(network, val_loader, device)
            say(f"epoch {epoch}  validation accuracy {accuracy:.1%}")
        save()
    say(train_loader.report())


def main() -> None:
    args = arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if args.demo:
            with tempfile.TemporaryDirectory() as folder:
                make_demo(args, folder)
                train(args, device)
        else:
            train(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
