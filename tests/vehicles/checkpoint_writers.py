"""Writes checkpoints with the libraries that people train with. FOLDER"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dualeval.vision_library import torchvision
from tests.models.test_weights import small


def write_with_lightning(path: Path) -> None:
    """Train a step and let the Trainer save, with a callback that has a state of its own."""
    torchvision()
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self, lr: float, layers: list[int]) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = small()
            self.lr = lr

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    torch.manual_seed(1)
    module = Module(0.1, [4, 3, 2])
    trainer: Any = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path.parent,
        callbacks=[ModelCheckpoint(path.parent / "kept", monitor="loss")],
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.rand(6, 4)), batch_size=6))
    trainer.save_checkpoint(path)
    torch.save(module.model.state_dict(), path.with_suffix(".wanted"))


def write_with_timm(folder: Path) -> None:
    """Let timm's CheckpointSaver write what its training script does."""
    torchvision()
    from timm.utils.checkpoint_saver import CheckpointSaver
    from timm.utils.model_ema import ModelEmaV3

    model = small()
    average: Any = ModelEmaV3(model, decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    average.update(model)
    make: Any = CheckpointSaver
    saver = make(
        model=model,
        optimizer=optimizer,
        args=argparse.Namespace(model="resnet18", lr=0.5),
        model_ema=average,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
    )
    saver.save_checkpoint(1, metric=0.5)
    torch.save(model.state_dict(), folder / "model.wanted")
    torch.save(average.module.state_dict(), folder / "average.wanted")


def tied() -> nn.Module:
    """A model of which two layers have the same weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


if __name__ == "__main__":
    write_with_timm(Path(sys.argv[1]))
    write_with_lightning(Path(sys.argv[1]) / "a.ckpt")
