"""Pictures and labels in the rows of a manifest."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dualeval.columns.of_data import KeptColumns, WithColumns
from dualeval.data.cache import DataCache
from dualeval.data.image_files import PATH_COLUMNS, FileNames, ImageFiles
from dualeval.data.packed import InPieces
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import LABEL_COLUMNS, PICTURE_COLUMNS
from dualeval.data.stored import ObjectPieces
from dualeval.data.stores.path import path_at
from dualeval.data.table import AS_USUAL, Table, TableOptions, column_of, open_table
from dualeval.data.table_labels import LEFT_OUT, Labeler, TableLabels, refuse_other_names
from dualeval.errors import UsageError
from dualeval.messages import counted
from dualeval.process.status_line import doing
from dualeval.urls import is_plain, url_of, without_secrets

# Of questions on texts, as SQuAD has them.
_OF_QUESTIONS = {"question", "questions", "context", "answers"}
_LOOKED_FOR = 1000


def open_images(
    at: Path, *, image_root: str | Path | None, keep: tuple[str, ...], quoting: str | None, **options: Any
) -> ManifestImages:
    """Open those that a manifest lists; what is done to each is decided afterwards (``prepared``)."""
    root = None if image_root is None else path_at(image_root, "--image-root")
    return (StoredManifest if url_of(root or at) else ManifestImages)(
        at, Preprocessing(), image_root=root, options=TableOptions(keep, quoting), **options
    )


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
        targets = np.array(classes, np.int32)[np.frombuffer(read.codes, np.int32)]
        refuse_other_names(path, labels, label.known, targets, read.kept)
        paths, self.kept = read.paths, read.kept
        if (targets == LEFT_OUT).any():
            kept = np.flatnonzero(targets != LEFT_OUT)
            if not len(kept):
                raise UsageError(f"{path}: the class map leaves out all labels that rows have.")
            paths, targets, self.kept = paths.select(kept), targets[kept], read.kept.select(kept)
        if (twice := paths.repeated()) is not None:
            raise UsageError(
                f"{path} lists {paths.shown(twice)!r} more than once: keep one of them, so that each picture "
                "counts once."
            )
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
        if not any(Path(self.path(place)).exists() for place in places):
            self._refuse_all(path, len(places), given_root=given_root)

    def _refuse_all(self, path: Path, missing: int, *, given_root: bool) -> NoReturn:
        root = "that of --image-root" if given_root else "the manifest's; give --image-root DIR for another"
        raise UsageError(
            f"{path}: its rows name {counted(missing, 'file')}, and none exists; the first was "
            f"looked for at {self.path(0)}. Paths are relative to the folder {root}."
        )

    def select(self, indices: Any) -> ManifestImages:
        """As for ``ImageFiles``."""
        images = super().select(indices)
        images.kept = self.kept.select(np.asarray(indices, np.int64))
        return images


class StoredManifest(InPieces, ManifestImages):
    """Pictures in an object store, in the order of a manifest."""

    def _check_files(self, path: Path, *, given_root: bool) -> None:
        if str(self._root).startswith("http"):
            raise UsageError(
                f"{path}: single pictures are read from object stores and disks, not over https://. Give "
                "--image-root DIR, or pack them in tar shards."
            )
        if odd := next((name for name in self._paths if not is_plain(name)), None):
            raise UsageError(
                f"{path}: the path {odd!r} has an empty part, . or .. in it, expected that of a picture "
                f"below {self._root}, such as dog/1.jpg."
            )
        self._pieces = ObjectPieces.below(self._root, self._paths)
        if self._pieces.are_missing:
            self._refuse_all(path, len(self), given_root=given_root)


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
            column_of(path, columns, label_column, LABEL_COLUMNS, "--label-column", "their labels", hint),
        )

    of_texts = f", the paths of picture files. {PICTURE_COLUMNS}"
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
        if "://" in path and (url := url_of(path)):
            raise UsageError(
                f"{of.where(number)}: the path is the address {without_secrets(url)}, expected a path below "
                "one folder, such as dog/1.jpg with --image-root s3://bucket/pictures"
            )
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
