#!/usr/bin/env python3
"""Lightning over a folder of images: train/CLASS/*.jpg.

python lightning_fit.py [FOLDER]
"""

from __future__ import annotations

import argparse

import forebay
import lightning
import torch
from make_data import images
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder


class Images(lightning.LightningDataModule):
    def __init__(self, folder: str, workers: int) -> None:
        super().__init__()
        self.workers = workers
        transform = T.Compose([T.RandomResizedCrop(32), T.ToTensor()])
        self.dataset = ImageFolder(f"{folder}/train", transform)

    def train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.dataset, batch_size=32, shuffle=True, num_workers=self.workers)
        return forebay.accelerate(loader)


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(128, classes),
        )  # fmt: skip

    def training_step(self, batch: tuple, _: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("loss", loss, on_epoch=True, on_step=False, batch_size=len(labels))
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        print(f"epoch {self.current_epoch}  loss {loss:.3f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", help="folder with train/ (default: its own pictures)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = Images(args.data or images(), args.workers)
    trainer = lightning.Trainer(
        max_epochs=args.epochs, accelerator="auto", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(len(data.dataset.classes)), data)
    print(trainer.train_dataloader.report())


if __name__ == "__main__":
    main()
