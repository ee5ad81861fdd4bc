"""Which data set of images ``--data`` names, and how it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dualeval.data.labels import indices_of_classes
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import IMAGENET, TABLES, is_table, named_set
from dualeval.data.small_images import FASHION_MNIST_CLASSES, IdxImages, SmallImages, read_small
from dualeval.data.small_images import SPLITS as IDX_SPLITS
from dualeval.errors import UsageError

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.data.image_files import ImageFiles
    from dualeval.data.labels import KnownClasses
    from dualeval.tasks.labels import FolderLabels
    from dualeval.tasks.options.image_classification import ImageClassificationOptions

    ImageData: TypeAlias = ImageFiles | SmallImages

# What the embedded job evaluates: files that ship with this package.
ASSETS = Path(__file__).resolve().parent.parent / "assets"


class DataSource:
    """Where a job's images are. Making one reads only the names of files."""

    def __init__(self, options: ImageClassificationOptions) -> None:
        self._options = options
        data = ASSETS if options.data is None else options.data
        self._named = named_set(str(data), options.split)
        self._path = Path(data)
        self._is_manifest = self._named is None and is_table(self._path)
        self.is_small = self._is_small()
        self.name = str(self._path if self._named is None else self._named)
        self.text = (
            str(self._path.absolute())
            if self._named is None
            else f"{self._named.name}:{self._named.root.absolute()}"
        )
        self._refuse_meaningless()

    def _is_small(self) -> bool:
        """Whether the images are held in memory in their own size."""
        if self._named is not None:
            return self._named.name != IMAGENET
        return not self._is_manifest and IdxImages.is_in(self._path)

    @property
    def is_embedded(self) -> bool:
        """Whether it is the test set that ships with this package."""
        return self._named is None and self._path.resolve() == ASSETS and self._options.split != "train"

    def _refuse_meaningless(self) -> None:
        options = self._options
        of_manifest = ("image_root", "path_column", "label_column", "quoting")
        meaningless = [name for name in of_manifest if getattr(options, name) is not None]
        if meaningless and not self._is_manifest:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in meaningless)
            raise UsageError(
                f"{flags} does not apply to {self.name}: it is for a manifest, a file that ends with "
                f"{', '.join(TABLES)}. Leave it out."
            )
        if options.split is None or self._named is not None:
            return
        if self.is_small and options.split in IDX_SPLITS:
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
        if not is_imagenet or asked is not None:
            return asked
        from dualeval.data.class_folders import imagenet_wnids

        return len(imagenet_wnids())

    def read_small(self, cache: DataCache | None, known: KnownClasses | None) -> SmallImages:
        """Read small images."""
        key = ("small images", self.text, self._options.split)
        images = self._small() if cache is None else cache.once(key, self._small)
        return images if images.labels.names else images.with_labels(indices_of_classes((), known))

    def _small(self) -> SmallImages:
        if self._named is not None:
            return read_small(self._named)
        split = None if self._options.split is None else IDX_SPLITS[self._options.split]
        return IdxImages(self._path, split, classes=FASHION_MNIST_CLASSES if self.is_embedded else ())

    def open_files(self, label: FolderLabels, *, whole_files: bool, cache: DataCache | None) -> ImageData:
        """Open pictures in files; what is done to each is decided afterwards (``prepared``)."""
        # With Pillow, which small images do without.
        from dualeval.data.labelled_images import ImageFolder, ManifestImages

        if self._is_manifest:
            from dualeval.data.table import TableOptions

            options = self._options
            return ManifestImages(
                self._path,
                Preprocessing(),
                label=label,
                image_root=None if options.image_root is None else Path(options.image_root),
                path_column=options.path_column,
                label_column=options.label_column,
                options=TableOptions(options.keep, options.quoting),
                whole_files=whole_files,
                cache=cache,
            )
        return ImageFolder(self._folder(), Preprocessing(), label=label, whole_files=whole_files, cache=cache)

    def _folder(self) -> Path:
        if self._named is None:
            return self._path
        from dualeval.data.class_folders import imagenet_folder

        return imagenet_folder(self._named.root, self._named.split)

    def to_json(self) -> dict[str, Any]:
        """The options as they are used; None where they have no meaning."""
        options, named = self._options, self._named
        root = self._path.parent if options.image_root is None else Path(options.image_root)
        return {
            "data": self.text,
            "split": options.split if named is None else named.split,
            "image_root": str(root.absolute()) if self._is_manifest else None,
            "path_column": options.path_column,
            "label_column": options.label_column,
            "quoting": options.quoting,
        }

    def description(self) -> str:
        """The data for people."""
        if self.is_embedded:
            return "Fashion-MNIST's test set, shipped with dualeval"
        if self._named is not None:
            return f"{self._named.name}, {self._named.split} split, in {self._named.root}"
        return str(self._path)
