"""Ragged columns and text: indexing, the same rows in torch and numpy, their files, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dualeval
from dualeval.columns.ragged import (
    NumpyRows,
    Ragged,
    RaggedRows,
    Text,
    TextRows,
    as_column,
    as_columns,
    concatenated,
    concatenated_rows,
    host_columns,
    kind_of,
    to_column,
    to_rows,
    values_of,
)
from dualeval.engine.checks.first_batch import check_columns
from dualeval.engine.device.transfer import start_download
from dualeval.engine.folder import row_windows
from dualeval.engine.folder.journal import JournalWriter, read_journal_file
from dualeval.engine.folder.recorder import Recorder
from dualeval.engine.folder.row_windows import MappedColumns
from dualeval.engine.folder.stored_rows import MemoryWriter, collect_rows
from dualeval.engine.samples.feed import FailedSample
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import UsageError
from tests.engine.folder.test_recorder import work_of
from tests.vehicles.played_device import Played
from tests.vehicles.ragged_task import WORDS

ROWS = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0], []]


def ragged() -> Ragged:
    return Ragged(torch.arange(1.0, 7.0), torch.tensor([2, 0, 1, 3, 0], dtype=torch.int32))


INDICES: dict[str, Any] = {
    "mask": torch.tensor([True, False, True, True, False]),
    "none": torch.zeros(5, dtype=torch.bool),
    "slice": slice(1, 4),
    "steps": slice(None, None, 2),
    "empty slice": slice(4, 1),
    "places": [4, 3, 3, 0],
}


@pytest.mark.parametrize("chosen", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("entries", [ROWS, WORDS[:5]], ids=["ragged", "text"])
def test_chosen_samples_are_those_of_a_list(entries: list[Any], chosen: Any) -> None:
    column = ragged() if entries is ROWS else Text(entries)
    places = torch.arange(5)[chosen].tolist()
    found, rows = (
        column[chosen],
        to_rows(column)[np.asarray(chosen) if isinstance(chosen, Tensor) else chosen],
    )
    wanted = [entries[place] for place in places]
    assert type(found) is type(column)
    assert found.tolist() == rows.tolist() == wanted
    assert len(found) == len(rows) == len(wanted)
    assert isinstance(rows, RaggedRows)
    assert rows.offsets[0] == 0 and rows.offsets[-1] == len(rows.values)


def test_one_sample_is_a_tensor_an_array_or_a_string() -> None:
    column, words = ragged(), Text(WORDS)
    assert column[3].tolist() == column[-2].tolist() == [4, 5, 6]
    assert [row.tolist() for row in column] == ROWS
    assert words[2] == words[-6] == list(words)[2] == "𝄞 clef"
    assert column[np.int64(3)].tolist() == column[np.int8(-2)].tolist() == [4, 5, 6]
    assert words[np.int64(2)] == words[np.int32(-6)] == "𝄞 clef"
    rows, strings = to_rows(column), to_rows(words)
    assert isinstance(strings, TextRows)
    assert [row.tolist() for row in rows] == [rows[place].tolist() for place in range(5)] == ROWS
    assert list(strings) == [strings[place] for place in range(len(WORDS))] == WORDS
    assert (strings[-1], strings.index("é"), "plain" in strings) == ("\0", 1, True)
    for sequence in (column, words, rows, strings):
        for place in (len(sequence), np.int64(len(sequence))):
            with pytest.raises(IndexError):
                sequence[place]


@pytest.mark.parametrize("column", [ragged(), Text(WORDS), torch.arange(6.0).view(3, 2)])
def test_columns_are_the_same_in_torch_and_numpy(column: Any) -> None:
    twice = concatenated([column, column])
    assert kind_of(twice) == kind_of(column)
    assert twice.tolist() == 2 * column.tolist()
    again = concatenated_rows([to_rows(column), to_rows(column)])
    assert to_column(again).tolist() == twice.tolist()


# -- what a task may give ----------------------------------------------------------------------------


def test_lists_become_columns() -> None:
    made = as_columns(
        {
            "boxes": [torch.zeros(2, 4), torch.ones(0, 4), torch.ones(1, 4)],
            "words": ("é", ""),
            "single": [torch.tensor(3), torch.tensor(4)],
            "plain": torch.ones(3),
        }
    )
    assert (type(made["boxes"]), made["boxes"].lengths.tolist()) == (Ragged, [2, 0, 1])
    assert made["boxes"].values.shape == (3, 4)
    assert list(made["words"]) == ["é", ""]
    assert made["single"].tolist() == [3, 4]
    assert as_columns([1]) == [1]


def of_lengths(*lengths: int) -> dict[str, Any]:
    return {"plain": torch.ones(5), "c": Ragged(torch.arange(6.0), torch.tensor(lengths))}


def to_write(values: Tensor) -> None:
    columns = {"c": Ragged(values, torch.tensor([1, 2])), "read": Text(["a", "b"])}
    check_columns(columns, ["read"], 2)
    check_columns(columns, ["c"], 2)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: as_column("c", []), r"'c' is a list of nothing, expected a tensor"),
    (lambda: as_column("c", [1.0, 2.0]), r"'c' is a list of float"),
    (lambda: as_column("c", ["a", torch.ones(1)]), r"'c' is a list of Tensor, str"),
    (
        lambda: as_column("c", [torch.ones(1, 4), torch.zeros(0)]),
        r"'c'.* entry 1 is .* of shape \(0,\).*zeros\(\(0, 4",
    ),
    (lambda: as_column("c", [torch.ones(1), torch.ones(1).long()]), r"'c'.* entry 1 is torch.int64"),
    (
        lambda: as_column("c", ["a", "\ud800"]),
        r"'c': the text of sample 1 of the batch is not Unicode .*'\\ud800'",
    ),
    (
        lambda: host_columns(of_lengths(2, 0, 1, 2, 0), range(10, 15)),
        "'c' of samples 10 to 14 has lengths that add up to 5, and 6 values",
    ),
    (
        lambda: host_columns(of_lengths(2, 0, -1, 3, 2), range(10, 15)),
        "'c' of samples 10 to 14 has the length -1 at position 2",
    ),
    (lambda: Ragged(torch.tensor(1.0), torch.tensor([1])), "values of a ragged column are one number"),
    (
        lambda: Ragged(torch.ones(2), torch.tensor([[1, 1]])),
        r"lengths of a ragged column have shape \(1, 2\)",
    ),
    (lambda: Ragged(torch.ones(2), torch.tensor([0.5, 1.5])), r"lengths of a ragged column .*torch.float32"),
    (lambda: to_write(torch.ones(3).bfloat16()), "'c' is torch.bfloat16, which cannot be written"),
    (
        lambda: to_write(torch.ones(3, 2, 2)),
        r"'c' has shape \(3, 2, 2\), expected \(total,\) or \(total, values\)",
    ),
    (lambda: to_write(torch.ones(3, 0)), "'c' .*at least one value an entry of a row"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_odd_columns_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# -- to the host -------------------------------------------------------------------------------------


def test_both_tensors_come_to_the_host_without_a_wait() -> None:
    device = Played()
    values, lengths = device.empty(torch.zeros(6)), device.empty(torch.zeros(5, dtype=torch.int64))
    plain = device.empty(torch.zeros(5))

    def kernel(*memory: Tensor) -> None:
        for tensor, numbers in zip(memory, (ragged().values, ragged().lengths, torch.ones(5)), strict=True):
            tensor.copy_(numbers)

    device.launch(kernel, values, lengths, plain)
    pending = start_download(device, {"r": Ragged(values, lengths), "p": plain, "t": Text(WORDS[:5])})
    assert device.computing.done == 0, "the host has waited"
    found = pending()
    assert list(found) == ["r", "p", "t"]
    assert (type(found["r"]), type(found["t"])) == (Ragged, Text)
    assert (found["r"].tolist(), found["t"].tolist()) == (ROWS, WORDS[:5])


# -- files -------------------------------------------------------------------------------------------


def columns() -> dict[str, Any]:
    return {
        "evaluated": torch.ones(5, dtype=torch.uint8),
        "boxes": Ragged(torch.arange(12.0).view(6, 2), ragged().lengths),
        "loss": torch.arange(5.0),
        "words": Text(WORDS[:5]),
        "nothing": Ragged(torch.zeros(0, dtype=torch.bool), torch.zeros(5).long()),
    }


def write(folder: Path, made: dict[str, Any], prefix: str = "t-00000") -> Path:
    folder.mkdir(exist_ok=True)
    writer = JournalWriter(folder, fingerprint="f" * 64, machine={"model": "m"}, prefix=prefix)
    delta = torch.zeros(50, dtype=torch.int64)
    delta[3] = 7
    writer.write([4, 9], [2, 3], delta, made)
    return writer.written[0]


def test_what_is_written_is_read_from_disk_and_memory(tmp_path: Path) -> None:
    file = read_journal_file(write(tmp_path, columns()))
    memory = MemoryWriter(keeps=True)
    memory.write([4, 9], [2, 3], torch.zeros(50, dtype=torch.int64), columns())
    with dualeval.connect(None, dualeval.World.alone(), "cpu") as backend:
        [held] = collect_rows(memory, backend, 1)
    for name, column in columns().items():
        for start in range(6):
            for stop in range(start, 6):
                for source in (file, held):
                    assert source.read_rows(name, start, stop).tolist() == column[start:stop].tolist()
    assert file.read_offsets("boxes").tolist() == held.read_offsets("boxes").tolist() == [0, 2, 2, 3, 6, 6]


def test_plain_columns_have_the_files_of_old(tmp_path: Path) -> None:
    made = columns()
    assert write(tmp_path / "new", made).read_bytes().startswith(b"DUALEVL4")
    old = write(tmp_path / "old", {name: made[name] for name in ("evaluated", "loss")}).read_bytes()
    assert old.startswith(b"DUALEVL3")
    header = (
        b'{"fingerprint": "' + b"f" * 64 + b'", "machine": {"model": "m"}, "chunks": [4, 9], "rows": [2, 3], '
        b'"failed": 0, "failures": [], "entries": 1, "columns": [{"name": "evaluated", "dtype": "|u1", '
        b'"shape": []}, {"name": "loss", "dtype": "<f4", "shape": []}]}'
    )
    body = np.array([3, 7], "<i8").tobytes() + b"\1" * 5 + np.arange(5, dtype="<f4").tobytes()
    assert old[8:-32] == len(header).to_bytes(8, "little") + header + body


def test_a_file_without_columns_has_empty_rows() -> None:
    plan = EvalPlan(num_samples=6, batch_size=3)
    writer = MemoryWriter(keeps=True)
    taking = Recorder(plan, [], ["c"], writer)
    taking.add(work_of(plan, 0, [FailedSample(index=index, error="OSError") for index in range(3)]), None)
    taking.flush()
    taking.add(work_of(plan, 1), {"c": Text(["a", "", "é"])})
    taking.flush()
    with dualeval.connect(None, dualeval.World.alone(), "cpu") as backend:
        files = collect_rows(writer, backend, 2)
    assert [sorted(file.columns) for file in files] == [["evaluated"], ["c", "evaluated"]]
    [(_, rows)] = row_windows.windows_of(files, plan, ["c"])
    assert rows["c"].tolist() == ["", "", "", "a", "", "é"]
    check_read_only(row_windows.read_columns(files, plan, ["c"], None), {"c": to_rows(Text(["a", "", "é"]))})


# -- mapped columns ----------------------------------------------------------------------------------


def pieces() -> list[dict[str, NumpyRows]]:
    whole = {name: to_rows(column) for name, column in columns().items()}
    return [
        {name: rows[part] for name, rows in whole.items()} for part in (slice(0, 2), slice(2, 2), slice(2, 5))
    ]


@pytest.mark.parametrize("where", ["folder", "temporary"])
def test_columns_come_back_whole_and_read_only(tmp_path: Path, where: str) -> None:
    with MappedColumns(tmp_path if where == "folder" else None) as held:
        for piece in pieces():
            held.append(piece)
        assert list(tmp_path.iterdir()) == [], "the files have no names"
        found = held.columns()
    check_read_only(found, {name: to_rows(column) for name, column in columns().items()})


def check_read_only(found: Mapping[str, NumpyRows], wanted: Mapping[str, NumpyRows]) -> None:
    for name, column in wanted.items():
        assert found[name].tolist() == column.tolist(), name
        assert type(found[name]) is type(column)
        assert values_of(found[name]).dtype == values_of(column).dtype
        assert type(values_of(found[name])) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            values_of(found[name])[...] = 0
