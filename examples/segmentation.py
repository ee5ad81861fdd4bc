"""Mean intersection over union, from counts of all pixels; 6 lines are for dualeval.

    python examples/segmentation.py
    torchrun --nproc-per-node 2 examples/segmentation.py
    horovodrun -np 2 python examples/segmentation.py
    dualeval run --task examples/segmentation.py:shapes --nproc 2 --out runs/shapes

The ranks add up counts of pixels by class, and no pictures. If it is killed or stopped, type the same command
again to resume.
"""

import torch
from torch import Tensor, nn

import dualeval
from dualeval.metrics import IoU

# -- model and data: noisy pictures of a disc and a square; a convolution tells each pixel's class -------

CLASSES, SIZE, WINDOW = 3, 32, 5


def picture(seed: int) -> tuple[Tensor, Tensor]:
    """A picture (2, SIZE, SIZE), and the class of each pixel: background, disc or square."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.arange(SIZE), torch.arange(SIZE)[:, None]
    labels = torch.zeros(SIZE, SIZE, dtype=torch.long)
    for kind in (1, 2):
        left, top, radius = torch.randint(5, SIZE - 5, (2,), generator=draw).tolist() + [3 + seed % 5]
        inside = (x - left) ** 2 + (y - top) ** 2 <= radius**2
        square = ((x - left).abs() <= radius) & ((y - top).abs() <= radius)
        labels[inside if kind == 1 else square] = kind
    colours = torch.stack([labels == 1, labels == 2])
    return colours + torch.randn(2, SIZE, SIZE, generator=draw), labels


def fitted(seeds: range) -> nn.Conv2d:
    """The convolution whose outputs come nearest to the classes, by least squares."""
    images, labels = map(torch.stack, zip(*map(picture, seeds), strict=True))
    seen = nn.functional.unfold(images.double(), WINDOW, padding=WINDOW // 2).mT.flatten(0, 1)
    seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
    wanted = nn.functional.one_hot(labels.flatten(), CLASSES).double()
    # Rounded, they are the same bits, however many threads have fitted them.
    weights = torch.linalg.solve(seen.T @ seen, seen.T @ wanted).round(decimals=4).T
    layer = nn.Conv2d(2, CLASSES, WINDOW, padding=WINDOW // 2)
    layer.load_state_dict({"weight": weights[:, :-1].view_as(layer.weight), "bias": weights[:, -1]})
    return layer.eval()


model = fitted(range(1000, 1050))
pictures = [picture(seed) for seed in range(300)]

# -- for dualeval ----------------------------------------------------------------------------------------

metrics = [IoU(CLASSES)]
shapes = dualeval.ModelTask(model=model, data=pictures, metrics=metrics, name="shapes")
if __name__ == "__main__":
    print(dualeval.evaluate(shapes, out="runs/segmentation").metrics)
