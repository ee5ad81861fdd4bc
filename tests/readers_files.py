"""What the README's examples need: its script, a checkpoint, pictures, a model, questions. CLONE PICTURES."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

from dualeval.vision_library import torchvision
from tests.docs.test_readme import first_example
from tests.questions import save_tiny_bert, write_questions


def make(clone: Path, pictures: Path) -> None:
    for number, name in enumerate(("ant", "bee", "cat", "dog")):
        (pictures / name).mkdir(parents=True)
        Image.new("RGB", (260, 240), (60 * number, 200, 90)).save(pictures / name / "one.png")
    (clone / "mine.py").write_text(first_example())
    network = torchvision().models.resnet18(num_classes=4)
    torch.save(network.state_dict(), clone / "checkpoint.pt")
    save_tiny_bert(clone / "models/bert-squad")
    write_questions(clone / "dev-v2.0.json", unanswerable=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
