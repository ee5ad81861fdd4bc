"""Mean average precision of boxes, as COCO defines it, by pycocotools; 12 lines are for dualeval.

    python examples/detection.py
    torchrun --nproc-per-node 2 examples/detection.py
    horovodrun -np 2 python examples/detection.py
    dualeval run --task examples/detection.py:rectangles --nproc 2 --out runs/rectangles

A picture has any number of true boxes: columns may be ragged. If it is killed or stopped, type the same
command again to resume. Needs pycocotools.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dualeval
from dualeval.metrics import AveragePrecision

# -- model and data: up to four coloured rectangles a picture, at most one in each quarter ---------------

CATEGORIES = ["red", "green", "blue"]
CELL, WIDTH = 16, 256
CORNERS = torch.tensor(np.indices((2, 2)).reshape(2, 4).T[:, ::-1] * CELL).float()


def picture(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture (3, 32, 32), its boxes (n, 4) as left, top, width and height, and their labels (n,)."""
    draw = torch.Generator().manual_seed(seed)
    image = 0.3 * torch.randn(3, 2 * CELL, 2 * CELL, generator=draw)
    place, size = torch.randint(4, (4, 2), generator=draw), torch.randint(4, 13, (4, 2), generator=draw)
    boxes = torch.cat([CORNERS + place, size], dim=1)[torch.rand(4, generator=draw) < 0.6]
    labels = torch.randint(len(CATEGORIES), (len(boxes),), generator=draw)
    for label, (left, top, width, height) in zip(labels.tolist(), boxes.int().tolist(), strict=True):
        image[label, top : top + height, left : left + width] += 1
    return image, {"boxes": boxes, "labels": labels}


def collate(samples: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """As detection has it everywhere: the pictures are stacked, and the truth stays a list."""
    images, truth = zip(*samples, strict=True)
    return torch.stack(images), list(truth)


class Detector(nn.Module):
    """DETR in small: queries look at the picture by attention; each gives a class, or none, and one box."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, WIDTH, CELL, stride=CELL)
        self.places = nn.Parameter(torch.eye(4))
        self.queries = nn.Parameter(100 * torch.eye(4))
        self.classes = nn.Linear(WIDTH, len(CATEGORIES) + 1)
        self.boxes = nn.Linear(WIDTH, 4)
        self.corners = nn.Buffer(nn.functional.pad(CORNERS, (0, 2)))

    def look(self, images: Tensor) -> Tensor:
        """What each query sees, shape (n, 4, WIDTH)."""
        attention = (self.queries @ self.places.T).softmax(dim=1)
        seen: Tensor = attention @ self.backbone(images).relu().flatten(2).mT
        return seen

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        seen = self.look(images)
        return {"logits": 10 * self.classes(seen), "boxes": self.boxes(seen) + self.corners}


def fitted(seeds: range) -> Detector:
    """A detector with a backbone of chance, and heads that come nearest to the truth, by least squares."""
    images, truth = collate(map(picture, seeds))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Detector().double()
    seen = nn.functional.pad(model.look(images.double()).detach(), (0, 1), value=1.0)
    wanted = torch.zeros(len(images), 4, len(CATEGORIES) + 1).double()
    wanted[:, :, -1] = 1
    boxes = torch.zeros(len(images), 4, 4).double()
    for image, each in enumerate(truth):
        cells = (each["boxes"][:, :2] // CELL @ torch.tensor([1.0, 2.0])).long()
        boxes[image, cells] = each["boxes"].double() - model.corners[cells]
        wanted[image, cells] = nn.functional.one_hot(each["labels"], len(CATEGORIES) + 1).double()
    full = wanted[:, :, -1] == 0
    everywhere = torch.ones_like(full)
    for head, where, truths in ((model.classes, everywhere, wanted), (model.boxes, full, boxes)):
        x, y = seen[where], truths[where]
        # Rounded, they are the same bits, however many threads have fitted them.
        weights = torch.linalg.solve(x.T @ x + torch.eye(WIDTH + 1), x.T @ y).round(decimals=3).T
        head.load_state_dict({"weight": weights[:, :-1], "bias": weights[:, -1]})
    return model.float().eval()


detr = fitted(range(1000, 1500))
pictures = [picture(seed) for seed in range(200)]

# -- for dualeval ----------------------------------------------------------------------------------------


def observe(outputs: Any, batch: Any) -> dict[str, Any]:
    scores, labels = outputs["logits"].softmax(-1)[..., :-1].max(-1)
    corners, sizes = outputs["boxes"].split(2, dim=-1)
    boxes = torch.cat([corners, corners + sizes.clamp(min=0)], dim=-1)
    true = {f"true_{name}": [each[name] for each in batch[1]] for name in ("boxes", "labels")}
    return {"boxes": list(boxes), "scores": scores, "labels": labels, **true}


metrics = [AveragePrecision(dict(enumerate(CATEGORIES)), true_format="xywh")]
rectangles = dualeval.ModelTask(model=detr, data=pictures, collate=collate, observe=observe, metrics=metrics)
if __name__ == "__main__":
    print(dualeval.evaluate(rectangles, out="runs/detection").metrics)
