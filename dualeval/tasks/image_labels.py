"""Which class each folder of a job is, and what the result says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualeval.choices import CLASS_ORDERS, check_choice
from dualeval.data.class_map import read_class_map
from dualeval.data.labels import KnownClasses, Labels, are_wnids, choose_labels
from dualeval.data.wnids import imagenet_wnids
from dualeval.errors import UsageError
from dualeval.models import published


class FolderLabels:
    """Decides which class each folder is, from what was asked for and from what is known of the weights.

    Args:
        class_map: a file that says it; as for ``read_class_map``.
        order: as for ``choose_labels``.
        num_classes: the number of classes that was asked for; None where it was not.
        of_weights: the classes that model and weights tell apart, where they are known.

    Raises:
        UsageError: the file is no class map, or options contradict each other.
    """

    def __init__(
        self,
        *,
        class_map: Path | None,
        order: str | None,
        num_classes: int | None,
        of_weights: KnownClasses | None,
    ) -> None:
        if order is not None:
            check_choice("--class-order", order, CLASS_ORDERS)
            if class_map is not None:
                raise UsageError(
                    f"--class-map {class_map} and --class-order {order} both say which class a folder is. "
                    "Leave one out."
                )
        self._map = None if class_map is None else read_class_map(class_map)
        self._order = order
        self._num_classes = num_classes
        self._of_weights = of_weights

    def __call__(self, folders: Sequence[str]) -> Labels:
        """Decide for folders, given by their names in order.

        Raises:
            UsageError: a folder has no class, or it is not clear which.
        """
        known = self._known(folders)
        return choose_labels(folders, class_map=self._map, order=self._order, known=known)

    def _known(self, folders: Sequence[str]) -> KnownClasses | None:
        if self._of_weights is not None:
            return self._of_weights
        wnids = imagenet_wnids()
        if len(wnids) in (self._num_classes, len(folders)) and are_wnids(folders, wnids):
            return published.imagenet_classes()
        return None


def hint_for(labels: Labels, classes: int) -> str:
    """What to type where a model tells more classes apart than there are folders; "" for nothing to say.

    Args:
        labels: of the folders.
        classes: how many the model tells apart.
    """
    wnids = imagenet_wnids()
    if labels.rule != "class map" and classes == len(wnids) and are_wnids(labels.classes, wnids):
        return (
            f" The folders are {len(labels.classes):,} of ImageNet's {classes:,} wnids: add --num-classes "
            f"{classes}."
        )
    if classes > len(labels.classes):
        return (
            " Where the folders are some of the model's classes, say which with --class-map FILE (folder to "
            "index, JSON or CSV)."
        )
    return ""


def names_of(labels: Labels, rows: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Columns of text: the names of each sample's class and of the predicted one; None where not known."""
    return {
        f"{column}_name": [labels.names.get(index) for index in rows[column].tolist()]
        for column in ("target", "prediction")
    }
