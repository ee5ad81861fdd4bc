"""What the README's examples need: its script, weights, pictures, masks, texts, models. CLONE PICTURES."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

from dualeval.vision_library import torchvision
from tests.docs.test_readme import first_example
from tests.vehicles import masked_pictures, texts
from tests.vehicles.causal_models import save_causal
from tests.vehicles.coco_data import write_coco
from tests.vehicles.made_detectors import write_detector
from tests.vehicles.questions import save_tiny_bert, write_questions


def make(clone: Path, pictures: Path) -> None:
    for number, name in enumerate(("ant", "bee", "cat", "dog")):
        (pictures / name).mkdir(parents=True)
        Image.new("RGB", (260, 240), (60 * number, 200, 90)).save(pictures / name / "one.png")
    (clone / "runs").mkdir()
    (clone / "runs/mine.py").write_text(first_example())
    network = torchvision().models.resnet18(num_classes=4)
    torch.save(network.state_dict(), clone / "checkpoint.pt")
    masked_pictures.write_pictures(clone, 1)
    network = torchvision().models.segmentation.fcn_resnet50(weights=None, weights_backbone=None)
    torch.save(network.state_dict(), clone / "masks.pt")
    boxes, annotations = write_coco(clone / "made", 4)
    boxes.rename(clone / "val2017")
    annotations.rename(clone / "instances_val2017.json")
    write_detector(clone / "models/rtdetr", "rt_detr")
    texts.save_classifier(clone / "models/bert-sst2")
    texts.write(clone / "dev.csv", texts.rows(4))
    save_causal(clone / "models/gpt2")
    (clone / "texts").mkdir()
    (clone / "texts/one.txt").write_text("what people write, once more")
    save_tiny_bert(clone / "models/bert-squad")
    write_questions(clone / "dev-v2.0.json", unanswerable=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
