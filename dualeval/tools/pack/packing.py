"""Write a pack: samples read by several processes, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from dualeval.columns.of_data import NO_COLUMNS, Texts
from dualeval.data.cache import DataCache
from dualeval.data.pack_file import FAILED, TURNED, PackFile, PackWriter, pixels_of, row_type, stored, sums_of
from dualeval.engine.samples.feed import Feed, Read, Reader, why_not_forked
from dualeval.engine.values.differences import differences, listing
from dualeval.errors import DualevalError, StoreError, UsageError, text_of, with_type
from dualeval.launch.cores import usable_cores
from dualeval.messages import counted
from dualeval.options.job import Job
from dualeval.process.status_line import doing

_AT_ONCE = 16
_LISTED = 3


def pack_job(job: Job, out: Path, workers: int | None) -> str:
    """Pack the data of a job, and return what is to be said of it."""
    if fetch := getattr(job.options, "fetch", None):
        fetch()
    cache = DataCache()
    with doing("setting up the task"):
        task: Any = job.make_task(cache)
    return pack_task(task, out, workers, cache)


def pack_task(task: Any, out: Path, workers: int | None, cache: DataCache) -> str:
    """Pack the data of a task that has a method ``to_pack``."""
    dataset, labels = task.to_pack(cache)
    with doing("reading the sizes of files"):
        files = [dataset.pictures, dataset.masks] if hasattr(dataset, "masks") else [dataset]
        made_of = _made_of(task, dataset, files[0], labels)
    return _packed(out, made_of, _Packing(dataset, task, files), workers)


def _made_of(task: Any, dataset: Any, pictures: Any, labels: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides what a pack holds."""
    if "function" in (pixels := pixels_of(pictures.preprocessing)):
        raise UsageError(f"--preprocessing: {pixels['function']} returns floats, and a pack holds 8 bits.")
    return {
        "task": task.name,
        "data_fingerprint": "content" if pictures._whole_files else "ends",
        "preprocessing": pixels,
        "labels": labels,
        "columns": [*getattr(dataset, "kept", NO_COLUMNS).values],
        "data": dataset.fingerprint(len(dataset)),
        "pillow": version("pillow"),
    }


def _packed(out: Path, made_of: Mapping[str, Any], reader: _Packing, workers: int | None) -> str:
    """Write a pack, or go on with it; what is to be said of it."""
    if out.exists():
        made = PackFile(out)
        if differing := differences(made.values["made_of"], made_of):
            raise UsageError(
                f"--out {out} is a pack of something else: {listing(differing, 'there', 'now')}. Remove it, "
                "or give another --out."
            )
        return _said(made, f"{out} is complete: {counted(len(made.rows), 'sample')}", reader)
    seen = [each._seen(range(len(reader))).hex() for each in reader.files]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with doing("checking what is packed"):
            writer = PackWriter(out, len(reader.files), {**made_of, "seen": seen})
        with closing(writer):
            before = writer.count
            _write(writer, reader, made_of, workers)
    except OSError as error:
        raise DualevalError(
            f"--out {out} cannot be written: {text_of(error)}. Mend that, and type the same command: "
            "it goes on."
        ) from error
    made = PackFile(out)
    resumed = f", {before:,} of them before" if before else ""
    what = f"{out}: {counted(len(made.rows), 'sample')}{resumed}, {out.stat().st_size:,} bytes"
    return _said(made, what, reader)


def _said(made: PackFile, what: str, reader: _Packing) -> str:
    """What is said of a pack: that, and which samples have failed."""
    failed, lines = np.flatnonzero(made.rows["flags"] & FAILED), [what]
    if len(failed):
        lines.append(
            f"{len(failed):,} of them could not be read, and are failed samples of each run, also where they "
            f"can be read by now: then remove {made.path}, and pack again."
        )
        lines += [f"  {reader.files[0].id(index)}: {made.error(index)}" for index in failed[:_LISTED]]
        lines += ["  ..."] * (len(failed) > _LISTED)
    return "\n".join(lines)


def _write(writer: PackWriter, reader: _Packing, made_of: Mapping[str, Any], workers: int | None) -> None:
    count = len(reader)
    batches = [range(first, min(first + _AT_ONCE, count)) for first in range(writer.count, count, _AT_ONCE)]
    processes = 0 if why_not_forked() else usable_cores() if workers is None else workers
    feed = Feed(reader, batches, workers=processes, device=torch.device("cpu"))
    with doing("packing pictures") as packing:
        packing.count = writer.count
        try:
            for (samples, rows), _ in feed:
                writer.add(samples.numpy(), rows.numpy().view(reader.row).copy())
                packing.count = writer.count
        finally:
            feed.close()
    for note in dict.fromkeys(feed.notes):
        click.echo(f"dualeval: note: {note}", err=True)
    arrays, values = reader.index()
    writer.finish(arrays, {"made_of": made_of, **values})


class _Packing(Reader):
    """Reads samples as they lie in a pack, and what is known of each."""

    def __init__(self, dataset: Any, task: Any, files: Sequence[Any]) -> None:
        super().__init__(dataset, task)
        self.files, self.row = files, row_type(len(files))
        self._data, self._has_masks = dataset, len(files) > 1
        count = len(dataset)
        # What the fingerprint has looked at is not looked at again.
        self._sizes = [
            each._first_seen[:, 0] if len(each._first_seen) == count else [*each._sizes(range(count))]
            for each in files
        ]

    def __getitem__(self, indices: range) -> Read:
        rows, parts, good = np.zeros(len(indices), self.row), [], []
        for row, index in zip(rows, indices, strict=True):
            row["sizes"] = [sizes[index] for sizes in self._sizes]
            row["digests"] = [np.frombuffer(each._digest(index), np.uint8) for each in self.files]
            try:
                sample = self._read_twice(index)
                good.append(sample)
            except StoreError:
                raise  # no sample is at fault
            except Exception as error:  # noqa: BLE001 - it stays so: each run names it
                sample = self._data.placeholder(index) if self._has_masks else (torch.empty(0, 0, 0), 0)
                row["flags"] = FAILED
                parts.append(stored(np.frombuffer(with_type(error).encode(), np.uint8)))
            else:
                row["flags"] = TURNED * (self._has_masks and sample[2])
                tensors = (sample[1], sample[0]) if self._has_masks else sample[:1]
                parts.append(stored(*(each.numpy().reshape(-1).view(np.uint8) for each in tensors)))
            row["shape"] = (*sample[0].shape, *(sample[1].shape if self._has_masks else (0, 0)))
            row["sum"] = sums_of(parts[-1][None])[0]
        if good:
            self._task.collate(good)  # refuses pictures of several sizes, as in a run
        rows["end"] = np.cumsum([*map(len, parts)])
        return (torch.from_numpy(np.concatenate(parts)), torch.from_numpy(rows.view(np.uint8))), ()

    def _read_twice(self, index: int) -> Any:
        try:
            return self._read_one(index)
        except Exception:  # noqa: BLE001 - once more, as in a run
            return self._read_one(index)

    def index(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Arrays and values of all samples."""
        data = self._data
        kept, arrays = getattr(data, "kept", NO_COLUMNS), dict[str, npt.NDArray[Any]]()
        for number, each in enumerate(self.files):
            names, arrays[f"ends{number}"] = each._paths.stored_all()
            arrays[f"names{number}"] = np.frombuffer(names, np.uint8)
        columns = []
        for number, (name, values) in enumerate(kept.values.items()):
            arrays[f"column{number}"] = values.places if isinstance(values, Texts) else values
            columns.append([name, [*values.distinct] if isinstance(values, Texts) else None])
        if self._has_masks:
            notes, warnings = data.notes, [*data.warnings, *data.pictures.left_out()]
        else:
            notes, warnings = data.notes(), data.warnings()
            arrays["codes"] = data.targets
        said = {"notes": notes, "warnings": warnings}
        return arrays, {"columns": columns, "left_out": dict(kept.left_out), **said}
