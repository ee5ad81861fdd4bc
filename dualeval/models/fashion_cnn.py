"""The small convolutional network of the embedded job."""

from __future__ import annotations

from torch import Tensor, nn


class FashionCNN(nn.Module):
    """Three 3x3 convolutions and two linear layers for 28x28 grey images; 358,186 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 96),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(96, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, 1, 28, 28) to logits (batch, num_classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
