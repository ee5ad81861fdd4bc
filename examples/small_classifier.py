"""Train a small classifier; runs/small gets its checkpoints, and pictures in a folder for each class, val/.

    python examples/small_classifier.py
    dualeval run --model examples.small_classifier:net --weights runs/small/epoch-3.pt \\
        --data runs/small/val --preprocessing none
"""

from pathlib import Path

import torch
from PIL import Image
from torch import nn

from dualeval.data.small_images import read_idx
from dualeval.tasks.image_data import ASSETS

# As Fashion-MNIST numbers them. The network's classes are in the order of the folders' names.
KINDS = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]

# Below runs/, which git ignores.
OUT = Path("runs/small")


def net() -> nn.Module:
    """A network for RGB pictures of 28 x 28 pixels, with values from 0 to 1."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, len(KINDS))),
    )


if __name__ == "__main__":
    pictures = read_idx(ASSETS / "t10k-images-idx3-ubyte.gz")
    kinds = [KINDS[number] for number in read_idx(ASSETS / "t10k-labels-idx1-ubyte.gz")]
    for number in range(8000, 10_000):
        folder = OUT / "val" / kinds[number]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures[number]).save(folder / f"{number}.png")
    inputs = torch.from_numpy(pictures[:8000]).div(255)[:, None].expand(-1, 3, -1, -1)
    targets = torch.tensor([sorted(KINDS).index(kind) for kind in kinds[:8000]])
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in (1, 2, 3):
        for places in torch.randperm(8000).view(-1, 64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[places]), targets[places])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.save(model.state_dict(), OUT / f"epoch-{epoch}.pt")
