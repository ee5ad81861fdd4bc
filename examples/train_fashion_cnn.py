"""Train the embedded job's network on Fashion-MNIST and write its weights as safetensors.

The 60,000 training images come from Debian's package dataset-fashion-mnist; the 10,000 test images are
used once, at the end. With the default arguments this wrote dualeval/assets/fashion_cnn.safetensors.

    apt-get install dataset-fashion-mnist
    python examples/train_fashion_cnn.py --out fashion_cnn.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dualeval.data.small_images import read_idx
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import FASHION_MEAN, FASHION_STD


def load(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) float32, normalised, and targets (n,) int64 of one split ("train" or "t10k")."""
    images = torch.from_numpy(read_idx(folder / f"{split}-images-idx3-ubyte.gz"))
    targets = torch.from_numpy(read_idx(folder / f"{split}-labels-idx1-ubyte.gz"))
    return images[:, None].float().div_(255).sub_(FASHION_MEAN).div_(FASHION_STD), targets.long()


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each image with probability 1/2, then shift the batch by up to two pixels each way."""
    flip = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(flip, images.flip(3), images)
    dx, dy = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return images.roll((dy, dx), dims=(2, 3))


def train(images: Tensor, targets: Tensor, epochs: int, batch_size: int, seed: int) -> FashionCNN:
    """Train a network with SGD, Nesterov momentum and one cosine cycle; the seed fixes everything."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = FashionCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * (len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(images), generator=generator)
        total = 0.0
        for rows in torch.split(order, batch_size)[: len(images) // batch_size]:
            loss = loss_of(model(augment(images[rows], generator)), targets[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(
            f"epoch {epoch + 1}/{epochs}: mean batch loss {total / (len(images) // batch_size):.4f}",
            flush=True,
        )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()

    model = train(*load(args.data, "train"), epochs=args.epochs, batch_size=args.batch_size, seed=args.seed)
    save_file(model.state_dict(), args.out)
    images, targets = load(args.data, "t10k")
    with torch.inference_mode():
        predictions = torch.cat([model(part).argmax(1) for part in torch.split(images, 1000)])
    print(f"top-1 on the 10,000 test images: {(predictions == targets).double().mean():.4f}")


if __name__ == "__main__":
    main()
