"""Labelled pictures: of class folders, or of the rows of a manifest."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualeval.columns.of_data import KeptColumns, WithColumns
from dualeval.data.cache import DataCache
from dualeval.data.class_folders import EXTENSIONS, PassedOver, class_folders, images_in, is_image, shown_name
from dualeval.data.image_files import FileNames, ImageFiles
from dualeval.data.labels import LEFT_OUT, Labeler, Labels, TableLabels, choose_labels, refuse_other_names
from dualeval.data.preprocessing import Normalisation, Preprocessing
from dualeval.data.table import AS_USUAL, Table, TableOptions, column_of, open_table
from dualeval.errors import UsageError
from dualeval.messages import counted
from dualeval.process.status_line import doing


class ImageFolder(ImageFiles):
    """Images below ``root/CLASS/``, folders and files in name order; sub-folders of a class count to it.

    A class folder may be empty. Files and folders whose names begin with a dot are passed over.
    """

    def __init__(
        self,
        root: Path,
        preprocessing: Normalisation,
        *,
        label: Callable[[Sequence[str]], Labels] = choose_labels,
        whole_files: bool = False,
        cache: DataCache | None = None,
    ) -> None:
        cache = cache or DataCache()
        files, self.passed_over = cache.once(("class folders", root.absolute()), lambda: _by_class(root))
        self.classes = list(files)
        if not any(map(len, files.values())):
            raise self._without_images(root)
        labels = label(self.classes)
        counts = [len(files[name]) for name in labels.classes]
        if not any(counts):
            raise UsageError(
                f"data folder {root} holds no sample: the class map leaves out all folders that hold images."
            )
        super().__init__(
            root,
            FileNames(path for name in labels.classes for path in files[name]),
            np.repeat(np.array([*labels.classes.values()], np.int64), counts),
            labels=labels,
            preprocessing=preprocessing,
            whole_files=whole_files,
            cache=cache,
        )

    def _without_images(self, root: Path) -> UsageError:
        loose = sum(is_image(path.name) for path in root.iterdir())
        folders = f"{len(self.classes)} class folders without images and {loose} images beside them"
        return UsageError(
            f"data folder {root} holds no sample: found {folders}; expected {root}/CLASS/IMAGE "
            f"({' '.join(EXTENSIONS)})." + (f" {self.passed_over}." if str(self.passed_over) else "")
        )

    def notes(self) -> list[str]:
        """Which classes the folders are, and what was passed over and is no picture."""
        sentence = "" if self.passed_over.holds_pictures else str(self.passed_over)
        return [*super().notes(), *filter(None, [sentence])]

    def warnings(self) -> list[str]:
        """Where classes may be others than the model's, and where pictures are no samples."""
        sentence = str(self.passed_over) if self.passed_over.holds_pictures else ""
        return [*super().warnings(), *filter(None, [sentence])]

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """How folders became classes, and what was passed over, as in result.json."""
        return {**super().labels_used(num_classes), "passed_over": self.passed_over.to_json()}


def _by_class(root: Path) -> tuple[dict[str, FileNames], PassedOver]:
    """The images of each class folder, as paths below the root, and what lies there beside them."""
    passed_over = PassedOver()
    folders = {shown_name(name): name for name in class_folders(root, passed_over)}
    files = {}
    with doing(f"listing the files of {root}") as listing:
        for name, folder in folders.items():
            files[name] = FileNames(images_in(root, folder, passed_over))
            listing.count += len(files[name])
    return files, passed_over


PATH_COLUMNS = ("path", "image_path", "file_path", "filepath", "file_name", "filename", "file", "image")
_LABEL_COLUMNS = ("label", "class", "target", "y")
# Of questions on texts, as SQuAD has them.
_OF_QUESTIONS = {"question", "questions", "context", "answers"}
_LOOKED_FOR = 1000


class ManifestImages(WithColumns, ImageFiles):
    """Pictures in the order of a manifest; their ids are the paths as they stand there."""

    def __init__(
        self,
        path: Path,
        preprocessing: Preprocessing,
        *,
        label: Labeler,
        image_root: Path | None = None,
        path_column: str | None = None,
        label_column: str | None = None,
        whole_files: bool = False,
        options: TableOptions = AS_USUAL,
        cache: DataCache | None = None,
    ) -> None:
        cache = cache or DataCache()
        if image_root is not None and not image_root.is_dir():
            raise UsageError(f"--image-root {image_root} is not a folder")
        with doing(f"reading {path}"):
            read = cache.once(
                ("manifest", path.absolute(), path_column, label_column, options),
                lambda: _read(_opened(path, path_column, label_column, options)),
            )
        labels, classes = read.labels.decide(label)
        targets = np.array(classes, np.int64)[np.frombuffer(read.codes, np.int32)]
        refuse_other_names(path, labels, label.known, targets, read.kept)
        paths, self.kept = read.paths, read.kept
        if (targets == LEFT_OUT).any():
            kept = np.flatnonzero(targets != LEFT_OUT)
            if not len(kept):
                raise UsageError(f"{path}: the class map leaves out all labels that rows have.")
            paths, targets, self.kept = paths.select(kept), targets[kept], read.kept.select(kept)
        _check_once(path, paths)
        super().__init__(
            path.parent if image_root is None else image_root,
            paths,
            targets,
            labels=labels,
            preprocessing=preprocessing,
            whole_files=whole_files,
            cache=cache,
        )
        self._check_files(path, given_root=image_root is not None)

    def _check_files(self, path: Path, *, given_root: bool) -> None:
        """Refuse a manifest of whose files none is where it is looked for."""
        places = np.unique(np.linspace(0, len(self) - 1, _LOOKED_FOR).astype(np.int64)).tolist()
        if any(Path(self.path(place)).exists() for place in places):
            return
        root = "that of --image-root" if given_root else "the manifest's; give --image-root DIR for another"
        raise UsageError(
            f"{path}: its rows name {counted(len(places), 'file')}, and none exists; the first was "
            f"looked for at {self.path(0)}. Paths are relative to the folder {root}."
        )

    def select(self, indices: Any) -> ManifestImages:
        """As for ``ImageFiles``."""
        images = super().select(indices)
        images.kept = self.kept.select(np.asarray(indices, np.int64))
        return images


def _opened(path: Path, path_column: str | None, label_column: str | None, options: TableOptions) -> Table:
    if not path.is_file():
        raise UsageError(f"--data {path} does not exist: expected a manifest, or a folder of images.")

    def choose(columns: Sequence[str]) -> tuple[str, str]:
        hint = ""
        if _OF_QUESTIONS & {name.casefold() for name in columns}:
            hint = (
                " For questions on texts type: dualeval run --task question-answering --model DIR --data "
                f"{path}"
            )
        return (
            column_of(path, columns, path_column, PATH_COLUMNS, "--path-column", "the pictures' paths", hint),
            column_of(path, columns, label_column, _LABEL_COLUMNS, "--label-column", "their labels", hint),
        )

    of_texts = ", the paths of picture files. Pictures inside a Parquet file are not read."
    return open_table(path, choose, {"path": "a.jpg", "label": 3}, of_texts, options=options)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What a manifest holds, in little room."""

    # One a row.
    paths: FileNames
    # The place of each row's label among `labels`.
    codes: array[int]
    labels: TableLabels
    # The columns that are kept for the rows of a run.
    kept: KeptColumns


def _read(of: Table) -> _Read:
    """Read all rows."""
    paths, codes = FileNames(), array("i")
    column = of.columns[1]
    labels = TableLabels(of.where, column, of.class_names.get(column, ()))
    for number, path, label in of.rows:
        place = labels.place(number, label)
        if type(path) is not str or not path or "\0" in path:
            raise _no_path(of, number, path)
        try:
            paths.append(path)
        except UnicodeEncodeError as error:
            raise _no_path(of, number, path) from error
        codes.append(place)
    if not len(paths):
        raise UsageError(
            f"{of.path} holds no sample: found only its headings, expected rows of path and label"
        )
    return _Read(paths=paths, codes=codes, labels=labels, kept=of.further.kept())


def _no_path(of: Table, number: int, path: object) -> UsageError:
    fault = "is empty" if path is None or path == "" else f"is {path!r}"
    return UsageError(
        f"{of.where(number)}: the path {fault}, expected the path of a picture file (column "
        f"{of.columns[0]!r})"
    )


def _check_once(path: Path, paths: FileNames) -> None:
    """Refuse a manifest that lists a picture twice."""
    hashes = np.fromiter((hash(paths.stored(place)) for place in range(len(paths))), np.int64, len(paths))
    values, counts = np.unique(hashes, return_counts=True)
    # Paths of one hash need not be equal.
    seen: set[bytes] = set()
    for place in np.flatnonzero(np.isin(hashes, values[counts > 1])).tolist():
        name = paths.stored(place)
        if name in seen:
            raise UsageError(
                f"{path} lists {paths.shown(place)!r} more than once: keep one of them, so that each picture "
                "counts once."
            )
        seen.add(name)
