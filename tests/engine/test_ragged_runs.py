"""Ragged columns and text through whole runs: the same bits on all ranks, resumed, and from the rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

import dualeval
from dualeval.columns.ragged import Ragged, to_rows
from dualeval.engine.checks import replay as proving
from dualeval.engine.folder import recorder, row_windows
from dualeval.engine.scoring.rescoring import verify
from dualeval.errors import DualevalError, UsageError
from dualeval.result import Result
from tests.conftest import Launch
from tests.engine.test_engine_ranks import OTHER_WAYS, run_ranks
from tests.engine.test_evaluator import evaluate, rows
from tests.engine.test_own_loop import opened
from tests.vehicles.launchers import way
from tests.vehicles.ragged_task import RAGGED, WORDS, RaggedTask, length_of, unnamed
from tests.vehicles.workers.engine_worker import BROKEN_ROWS, RAGGED_SAMPLES

BATCH = 8
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "on_error": "skip"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("ragged") / "out"
    return out, evaluate(RaggedTask(RAGGED_SAMPLES, BROKEN_ROWS), out, **OPTIONS)


def test_the_rows_are_those_that_the_task_has_made(done: tuple[Path, Result]) -> None:
    out, result = done
    table = rows(out)
    for index in range(RAGGED_SAMPLES):
        found = {name: table[name][index] for name in (*RAGGED, "word", "said", "score")}
        if index in BROKEN_ROWS:
            assert set(found.values()) == {None}
            continue
        assert {len(found[name]) for name in RAGGED} == {length_of(index)}
        assert found["word"] == WORDS[index % len(WORDS)] * (index % 3)
        assert found["said"] == f"{found['word']}{length_of(index)}"
        assert [int(box[0]) for box in found["boxes"]] == found["tokens"]
        assert [int(box[0]) % 2 == 1 for box in found["boxes"]] == found["flags"]
        assert [np.float16(box[0]) for box in found["boxes"]] == found["halves"]
    kept = [index for index in range(RAGGED_SAMPLES) if index not in BROKEN_ROWS]
    words = [table["word"][index] for index in kept]
    counted = [len(kept), sum(map(length_of, kept)), sum(sum(table["tokens"][index]) for index in kept)]
    counted += [sum(len(word.encode()) for word in words), sum(map(len, words))]
    assert [result.metrics[name] for name in ("samples", "values", "sum", "utf8", "letters")] == counted
    assert result.samples == {"total": RAGGED_SAMPLES, "evaluated": len(kept), "failed": len(BROKEN_ROWS)}


def test_columns_have_their_own_types_in_parquet(done: tuple[Path, Result]) -> None:
    schema = pyarrow.parquet.read_schema(done[0] / "predictions.parquet")
    found = {name: str(schema.field(name).type).replace("element: ", "") for name in schema.names}
    assert found == {
        "id": "string",
        "index": "int64",
        "index_read": "int64",
        "score": "float",
        "flags": "list<bool>",
        "halves": "list<halffloat>",
        "doubles": "list<double>",
        "bytes": "list<uint8>",
        "tokens": "list<int64>",
        "word": "string",
        "said": "string",
        "boxes": "list<fixed_size_list<float>[4]>",
    }


def test_files_of_the_tasks_own_hold_the_rows_of_their_columns(done: tuple[Path, Result]) -> None:
    table = rows(done[0])
    for name, column in (("tokens.json", "tokens"), ("words.json", "word")):
        found = json.loads((done[0] / name).read_text("ascii"))
        pairs = zip(table["id"], table[column], strict=True)
        assert found == {key: value for key, value in pairs if value is not None}


@pytest.mark.parametrize(
    ("launcher", "backend", "size"),
    [
        way("torchrun", "torch", 2, long=True),
        way("torchrun", "torch", 3),
        *(way(*names, 3, long=True) for names in OTHER_WAYS),
    ],
)
def test_any_number_of_ranks_has_the_same_digest_and_files(
    launch: Launch, tmp_path: Path, done: tuple[Path, Result], launcher: str, backend: str, size: int
) -> None:
    """Two ranks share a folder; of three rank 0 has a disk of its own, the others one together, where nothing
    is left; and each makes a run without a folder, too."""
    reports = run_ranks(launch, "ragged", size, tmp_path, (launcher, backend))
    out, result = done
    for report in reports:
        assert report["digests"] == 2 * [result.metrics_digest]
        assert report["resumed"] == 0
    names = ("predictions.parquet", "tokens.json", "words.json")
    assert reports[0]["left"] == sorted([*names, "job.json", "result.json", "status.json"])
    assert size == 2 or [report["left"] for report in reports[1:]] == [[], []]
    for name in names:
        assert (Path(reports[0]["out"]) / name).read_bytes() == (out / name).read_bytes()


def begin(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a run that breaks when 17 of its batches, one without a forward, are saved, 32 rows a file."""
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 32)
    monkeypatch.setitem(unnamed, "batches", 16)
    with pytest.raises(RuntimeError, match="enough"):
        go_on(out)
    monkeypatch.setitem(unnamed, "batches", math.inf)


def go_on(out: Path) -> Result:
    return evaluate(RaggedTask(RAGGED_SAMPLES, BROKEN_ROWS), out, **OPTIONS)


def test_a_resumed_run_has_the_same_bits(
    tmp_path: Path, no_look: None, done: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "out", monkeypatch)
    found = go_on(tmp_path / "out")
    # Files with a failed sample are tried again.
    assert found.chunks["resumed"] == 17 - len(
        {index // BATCH for index in BROKEN_ROWS if index < 17 * BATCH}
    )
    assert found.replay == "same bits"
    assert found.metrics_digest == done[1].metrics_digest
    for name in ("predictions.parquet", "tokens.json", "words.json"):
        assert (tmp_path / "out" / name).read_bytes() == (done[0] / name).read_bytes()
    assert go_on(tmp_path / "out").earlier


# -- from the rows -----------------------------------------------------------------------------------


def test_metrics_come_from_the_rows_to_the_bit(done: tuple[Path, Result]) -> None:
    out, result = done
    before = sorted(path.name for path in out.iterdir())
    metrics = RaggedTask(1).metrics()
    assert dualeval.rescore(out, metrics=metrics).metrics_digest == result.metrics_digest
    differing = [check for check in verify(out, metrics) if check.differences]
    assert not differing
    assert sorted(path.name for path in out.iterdir()) == before


def test_a_changed_row_is_noticed(tmp_path: Path) -> None:
    result = evaluate(RaggedTask(60), tmp_path, batch_size=BATCH)
    path = tmp_path / "predictions.parquet"
    table = pyarrow.parquet.read_table(path)
    for column, change in (("word", lambda word: f"{word}."), ("tokens", lambda row: [*row, 1])):
        place = table.column_names.index(column)
        values = [
            change(value) if number == 59 else value for number, value in enumerate(table[column].to_pylist())
        ]
        field = table.schema.field(column)
        pyarrow.parquet.write_table(table.set_column(place, field, [values]), path)
        checks = {check.name: check.differences for check in verify(tmp_path, RaggedTask(1).metrics())}
        assert any(f"{column}: " in difference for difference in checks["metrics"]), checks
        assert checks["metrics_digest"]
    with pytest.raises(DualevalError, match="not the file that the run wrote"):
        dualeval.rescore(tmp_path, metrics=RaggedTask(1).metrics())
    assert result.metrics_digest == evaluate(RaggedTask(60), None, batch_size=BATCH).metrics_digest


def test_a_full_temporary_folder_is_named(done: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: Any) -> None:
            raise OSError(28, "No space left on device")

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(row_windows, "_nameless", lambda folder: Full())
    with pytest.raises(DualevalError, match=r"temporary file in .*No space left.*TMPDIR"):
        dualeval.rescore(done[0], metrics=RaggedTask(1).metrics())


# -- comparing a finished batch ----------------------------------------------------------------------


def compare(there: Any, now: Any, *, same_machine: bool = True) -> str:
    stored = proving.StoredBatch(
        start=0,
        evaluated=np.ones(len(there), np.bool_),
        columns={"c": to_rows(there)},
        machines=({} if same_machine else {"model": "another"},),
    )
    evaluated = ({"c": to_rows(now)}, ())
    proof = proving.Proof(
        stored=stored,
        evaluate=lambda samples: evaluated,
        machine={},
        tolerance=1e-3,
        place="out",
        start_over="Start over",
        name=str,
    )
    return proof.rows()[0]


def boxes(*rows: list[float]) -> Ragged:
    return Ragged(torch.tensor([value for row in rows for value in row]), torch.tensor([*map(len, rows)]))


SAME = boxes([1.0, 2.0], [], [3.0])
OTHERS: dict[str, tuple[Any, Any, str, str]] = {
    # There, now; what is said on the same machine, and on another.
    "same": (SAME, SAME, "same bits", "same bits"),
    "NaN": (boxes([torch.nan]), boxes([torch.nan]), "same bits", "same bits"),
    "last bit": (SAME, boxes([1.0, 2.0], [], [3.0000002]), "sample 2", "within tolerance"),
    "far": (SAME, boxes([1.0, 2.0], [], [4.0]), "sample 2", "sample 2"),
    "minus zero": (boxes([0.0]), boxes([-0.0]), "sample 0", "within tolerance"),
    "plain": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "sample 0", "within tolerance"),
    "plain NaN": (torch.tensor([torch.nan]), torch.tensor([torch.nan]), "same bits", "same bits"),
    "dtype": (torch.ones(1), torch.ones(1).double(), "sample 0", "sample 0"),
    "length": (SAME, boxes([1.0, 2.0], [3.0], []), "sample 1", "sample 1"),
    "number": (SAME, boxes([1.0, 2.0], [], [3.0, 4.0]), "sample 2", "sample 2"),
    "text": (dualeval.Text(["a", "é"]), dualeval.Text(["a", "è"]), "sample 1", "sample 1"),
    "form": (
        dualeval.Text(["a"]),
        Ragged(torch.tensor([97]).byte(), torch.tensor([1])),
        "sample 0",
        "sample 0",
    ),
}


@pytest.mark.parametrize(("there", "now", "here", "elsewhere"), OTHERS.values(), ids=OTHERS)
def test_a_finished_batch_is_compared(there: Any, now: Any, here: str, elsewhere: str) -> None:
    for same_machine, expected in ((True, here), (False, elsewhere)):
        if expected.startswith("sample"):
            with pytest.raises(UsageError, match=rf"holds other numbers .* {expected}, column 'c'"):
                compare(there, now, same_machine=same_machine)
        else:
            assert compare(there, now, same_machine=same_machine) == expected


# -- loops of one's own ------------------------------------------------------------------------------

LOOP_SAMPLES = 40


def loop(out: Path | None, change: Mapping[str, Callable[[list[int]], Any]] = {}, **options: Any) -> Result:
    made: dict[str, Callable[[list[int]], Any]] = {
        "loss": lambda indices: torch.tensor(indices) / 3,
        "tokens": lambda indices: [torch.arange(index % 4) for index in indices],
        "words": lambda indices: [WORDS[index % len(WORDS)] for index in indices],
        "halves": lambda indices: Ragged(torch.ones(sum(indices)).bfloat16(), torch.tensor(indices)),
        **change,
    }
    with opened(list(range(LOOP_SAMPLES)), out, **{"batch_size": 4, **options}) as own:
        for batch in own.batches():
            indices = batch.tolist()
            own.add(batch, **{name: make(indices) for name, make in made.items() if make is not None})
        return own.result()


def test_a_loop_keeps_ragged_columns_and_text(tmp_path: Path) -> None:
    result = loop(tmp_path)
    assert list(result.metrics) == ["loss"], "the others have no mean"
    table = rows(tmp_path)
    assert table["tokens"] == [list(range(index % 4)) for index in range(LOOP_SAMPLES)]
    assert table["words"] == [WORDS[index % len(WORDS)] for index in range(LOOP_SAMPLES)]
    assert table["halves"] == [[1.0] * index for index in range(LOOP_SAMPLES)]
    again = loop(tmp_path)
    assert (again.earlier, again.replay) == (True, "same bits")
    assert loop(None).metrics_digest == result.metrics_digest
    with pytest.raises(UsageError, match=r"holds other numbers .*column 'words'"):
        loop(tmp_path, {"words": lambda indices: ["x"] * len(indices)})
    with pytest.raises(UsageError, match=r"another job .*columns"):
        loop(tmp_path, {"words": lambda indices: [torch.ones(1).byte()] * len(indices)})
