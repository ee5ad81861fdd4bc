"""Which data set of images ``--data`` names, and how it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import from_numpy

from dualeval.data.labels import imagenet_wnids, indices_of_classes
from dualeval.data.set_names import IMAGENET, KINDS, SETS, Kind, kind_at, named_set
from dualeval.data.small_images import FASHION_MNIST_CLASSES, SmallImages, read_idx
from dualeval.errors import UsageError
from dualeval.options.fields import flag_of
from dualeval.urls import url_of

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.data.image_files import ImageFiles
    from dualeval.tasks.labels import FolderLabels
    from dualeval.tasks.options.image_classification import ImageClassificationOptions

    ImageData: TypeAlias = ImageFiles | SmallImages

# What the embedded job evaluates: files that ship with this package.
ASSETS = Path(__file__).resolve().parent.parent / "assets"
_EMBEDDED = Kind(module="", splits=("test",), in_memory=True)


class DataSource:
    """Where a job's images are. Making one reads only the names of files."""

    def __init__(self, options: ImageClassificationOptions) -> None:
        self._options = options
        data = ASSETS if options.data is None else options.data
        if url_of(data):
            from dualeval.data.stores.path import path_at

            self._named, self._path = None, path_at(data)
        else:
            self._named, self._path = named_set(str(data), options.split), Path(data)
        # Whether it is the test set that ships with this package.
        self.is_embedded = self._named is None and self._path.resolve() == ASSETS and options.split != "train"
        if (named := self._named) is not None:
            self._kind = KINDS[SETS[named.name][1]]
            self.name, self.text = str(named), f"{named.name}:{named.root.absolute()}"
        else:
            self._kind = _EMBEDDED if self.is_embedded else kind_at(self._path)
            self.name, self.text = str(self._path), str(self._path.absolute())
        self._is_manifest = self._kind.module == "manifest"
        # Whether the images are held in memory in their own size.
        self.is_small = self._kind.in_memory
        self._refuse_meaningless()

    def _refuse_meaningless(self) -> None:
        options = self._options
        for kind in KINDS.values():
            others = [name for name in kind.options if name not in self._kind.options]
            if flags := [flag_of(name) for name in others if getattr(options, name) is not None]:
                raise UsageError(
                    f"{' and '.join(flags)} does not apply to {self.name}: it is for {kind.what}. Leave it "
                    "out."
                )
        if options.split is None or self._named is not None or options.split in self._kind.splits:
            return
        raise UsageError(
            f"--split {options.split} does not apply to {self.name}: a folder or manifest is evaluated "
            "whole. Leave it out, and give the folder or manifest of that split."
        )

    def check_labels(self, flags: Mapping[str, object]) -> None:
        """Check that options about labels have a meaning for this data."""
        if not self.is_small:
            return
        for flag, value in flags.items():
            if value is not None:
                raise UsageError(
                    f"{flag} does not apply to the {self.small_description}: their labels are numbers. Leave "
                    "it out."
                )

    @property
    def small_description(self) -> str:
        """Small images in messages."""
        return f"idx files in {self.name}" if self._named is None else f"images of {self.name}"

    def least_classes(self, asked: int | None) -> int | None:
        """The number of classes by which wnids are known: ImageNet's own, where nobody asked for another."""
        is_imagenet = self._named is not None and self._named.name == IMAGENET
        return len(imagenet_wnids()) if is_imagenet and asked is None else asked

    def open(self, label: FolderLabels, *, whole_files: bool, cache: DataCache | None) -> ImageData:
        """Open the images; what is done to each is decided afterwards (``prepared``)."""
        options = self._options
        if self.is_small:
            key = ("small images", self.text, options.split)
            read = _embedded if self.is_embedded else partial(self._open, split=options.split)
            images: SmallImages = read() if cache is None else cache.once(key, read)
            return images if images.labels.names else images.with_labels(indices_of_classes((), label.known))
        named = (*self._kind.options, *(("keep",) if self._kind.has_columns else ()))
        of_kind = {name: getattr(options, name) for name in named}
        files: ImageFiles = self._open(label=label, whole_files=whole_files, cache=cache, **of_kind)
        return files

    def _open(self, **options: Any) -> Any:
        # With Pillow, which small images do without.
        kind = import_module(f"dualeval.data.image_sets.{self._kind.module}")
        return kind.open_images(self._named or self._path, **options)

    def to_json(self) -> dict[str, Any]:
        """The options as they are used; None where they have no meaning."""
        options, named = self._options, self._named
        root = self._path.parent if options.image_root is None else Path(options.image_root)
        return {
            "data": self.text,
            "split": options.split if named is None else named.split,
            "image_root": url_of(root) or str(root.absolute()) if self._is_manifest else None,
            "path_column": options.path_column,
            "label_column": options.label_column,
            "label_key": options.label_key,
            "quoting": options.quoting,
        }

    def description(self) -> str:
        """The data for people."""
        if self.is_embedded:
            return "Fashion-MNIST's test set, shipped with dualeval"
        if self._named is not None:
            return f"{self._named.name}, {self._named.split} split, in {self._named.root}"
        return str(self._path)


def _embedded() -> SmallImages:
    files = (ASSETS / "t10k-images-idx3-ubyte.gz", ASSETS / "t10k-labels-idx1-ubyte.gz")
    images, targets = (from_numpy(read_idx(file)) for file in files)
    return SmallImages(images.unsqueeze(1), targets.long(), "t10k", classes=FASHION_MNIST_CLASSES)
