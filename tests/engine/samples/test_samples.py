"""Ids and fingerprints of data sets that have none of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import dualeval
from dualeval.errors import UsageError
from dualeval.tasks.question_answering import QuestionAnswering
from tests.vehicles import questions

# A task that collates as torch does.
COLLATES: Any = SimpleNamespace(_collates_as_torch=lambda: True)


class Held(Dataset[int]):
    """Map-style, with an attribute, and a cache that grows."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.cache: dict[int, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self._last = self.cache[index] = index
        return index


ROWS = {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "label": [0, 1, 1], "name": ["a", "b", "ü"]}


def rows(**changes: Any) -> Any:
    return datasets.Dataset.from_dict({**ROWS, **changes})


class Letters(Dataset[dict[str, Any]]):
    """Map-style, each sample a dict."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"key": "abc"[index], "value": index}


@pytest.mark.parametrize(
    ("data", "ids", "expected"),
    [
        ([1, 2, 3], None, ["0", "1", "2"]),
        ([1, 2, 3], ["x", "y", "z"], ["x", "y", "z"]),
        ([1, 2, 3], lambda index: f"n{index}", ["n0", "n1", "n2"]),
        (Letters(), "key", ["a", "b", "c"]),
        (rows(), "name", ["a", "b", "ü"]),
        (rows(), None, ["0", "1", "2"]),
    ],
)
def test_samples_have_the_given_ids_or_their_numbers(data: Any, ids: Any, expected: list[str]) -> None:
    wrapped = dualeval.wrap(data, ids=ids)
    assert [wrapped.id(index) for index in range(3)] == expected


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda: dualeval.wrap([1, 2], ids=["x"]), "ids has 1 entries for 2 samples"),
        (lambda: dualeval.wrap(Letters(), ids="kye").id(1), "sample 1 has the columns key, value"),
        (lambda: dualeval.wrap([1, 2], ids="key").id(0), "sample 0 is a int"),
        (lambda: dualeval.wrap(rows(), ids="key"), "the data set has the columns x, label, name"),
        (
            lambda: dualeval.wrap(datasets.DatasetDict({"test": rows()})),
            r"Give one part of it: data\['test'\]",
        ),
        (
            lambda: dualeval.wrap(rows().to_iterable_dataset()),
            "Load it without streaming=True. Or keep its samples",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused(wrap: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap()


def of(data: Any, **options: Any) -> str:
    return dualeval.wrap(data, **options).fingerprint(2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], [1, 2, 4]),
        (["a", "b"], ["a", "ä"]),
        (torch.zeros(3), torch.ones(3)),
        (TensorDataset(torch.zeros(3)), TensorDataset(torch.ones(3))),
        ([{"x": torch.zeros(2)}] * 2, [{"x": torch.ones(2)}] * 2),
        (rows(), rows().rename_column("x", "z")),
        (["/a"], ["/b"]),
        (["see /usr/a now"], ["see /usr/b now"]),
        ([Path("/a/1.png")], [Path("/a/2.png")]),
        ([date(2020, 1, 1)], [date(2020, 1, 2)]),
        ([SimpleNamespace(rank=1)], [SimpleNamespace(rank=2)]),
        (Held(1), Held(2)),
    ],
)
def test_other_contents_have_another_fingerprint(one: Any, other: Any) -> None:
    assert of(one) != of(other)
    assert of(one) == of(one)
    # What is given is taken at its word.
    assert of(one, fingerprint="v1") != of(one, fingerprint="v2")
    assert of(one, fingerprint="v1") == of(type(one)(one) if isinstance(one, list) else one, fingerprint="v1")


def test_reading_changes_no_fingerprint() -> None:
    data = Held(1)
    before = of(data)
    dualeval.wrap(data).__getitems__([0, 2])
    assert data.cache and of(data) == before


def test_a_mapped_file_is_not_read_for_its_fingerprint(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "array", np.float32, "w+", shape=(4, 2))
    before = of(mapped), of(Held(mapped))
    mapped[0] = 1
    assert (of(mapped), of(Held(mapped))) == before
    assert not dualeval.wrap(mapped).in_memory


def contents(data: Any) -> str:
    wrapped = dualeval.wrap(data)
    return str(wrapped.content_fingerprint(range(3)))  # type: ignore[attr-defined]


def test_stored_values_of_hugging_face_are_the_contents() -> None:
    assert contents(rows()) == contents(rows())
    assert contents(rows()) != contents(rows(label=[0, 1, 0]))
    # Its order is an index beside the table.
    assert contents(rows()) != contents(rows().shuffle(seed=3))
    # A text is what is evaluated, also where it looks like a path; likewise a time.
    assert contents(rows(name=["/a", "b", "c"])) != contents(rows(name=["/b", "b", "c"]))
    times = [[datetime(2020, 1, day)] * 3 for day in (1, 2)]
    assert contents(rows(t=times[0])) != contents(rows(t=times[1]))
    pictures = [
        {"bytes": None, "path": "/here/a.png"},
        {"bytes": b"1", "path": None},
        {"bytes": None, "path": ""},
    ]
    moved = [{"bytes": None, "path": "/there/a.png"}, *pictures[1:]]
    other = [pictures[0], {"bytes": b"2", "path": None}, pictures[2]]
    assert contents(rows(p=pictures)) == contents(rows(p=moved))
    assert contents(rows(p=pictures)) != contents(rows(p=other))


def test_rows_of_hugging_face_are_evaluated_and_gone_on_with(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    options: dict[str, Any] = {"model": model, "out": tmp_path, "launcher": "none", "workers": 0}
    result = dualeval.evaluate(data=dualeval.wrap(rows(), ids="name"), metrics=["top1"], **options)
    wanted = model(torch.tensor(ROWS["x"])).argmax(1) == torch.tensor(ROWS["label"])
    assert result.metrics["top1"] == wanted.double().mean().item()
    table = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")
    assert table["id"].to_pylist() == ROWS["name"]
    again = dualeval.evaluate(data=dualeval.wrap(rows(), ids="name"), metrics=["top1"], **options)
    assert again.earlier
    with pytest.raises(UsageError, match=r"holds another job.*contents"):
        changed = rows(x=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.5]])
        dualeval.evaluate(data=dualeval.wrap(changed, ids="name"), metrics=["top1"], **options)


def squad_rows(path: Path) -> list[dict[str, Any]]:
    """A file of questions as ``load_dataset("squad")`` gives it."""
    from dualeval.data.squad import read_questions

    return [
        {
            "id": question.id,
            "title": "",
            "context": question.context,
            "question": question.question,
            "answers": {"text": list(question.answers), "answer_start": list(question.starts)},
        }
        for question in read_questions(path).questions
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("unanswerable", [False, True])
def test_questions_as_rows_have_the_digest_of_their_file(
    tmp_path: Path, model: Path, unanswerable: bool
) -> None:
    file = questions.write_questions(tmp_path / "data.json", unanswerable=unanswerable)
    of_rows = datasets.Dataset.from_list(squad_rows(file))
    results = [
        dualeval.evaluate(
            QuestionAnswering(model=model, data=data, batch_size=4), batch_size=4, workers=0, launcher="none"
        )
        for data in (file, of_rows)
    ]
    assert results[0].metrics_digest == results[1].metrics_digest
    assert "rows of a Dataset" in results[1].description["data"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": None}, r"row 1 of the questions: answers is null"),
        ({"answers": {"text": ["a"], "answer_start": []}}, "has 1 texts and 0 values of answer_start"),
        ({"id": 3}, "row 1 of the questions: id is"),
        ({"id": "first"}, "question ids must be unique"),
    ],
)
def test_rows_that_are_no_questions_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    from dualeval.data.squad import questions_of_rows

    row = {"id": "first", "context": "c", "question": "q", "answers": {"text": ["c"], "answer_start": [0]}}
    with pytest.raises(UsageError, match=message):
        questions_of_rows([row, {**row, "id": "second", **change}])
    with pytest.raises(UsageError, match=r"give one, as data\['validation'\]"):
        questions_of_rows({"validation": [row]})  # type: ignore[arg-type]


class Own:
    """Has ids and a fingerprint, and no ``__getitems__``."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(2), index % 2

    def id(self, index: int) -> str:
        return f"own {index}"

    def fingerprint(self, count: int) -> str:
        return f"{count} of mine"

    def placeholder(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2), 0


def test_ids_and_fingerprint_of_its_own_stay(tmp_path: Path) -> None:
    result = dualeval.evaluate(
        model=nn.Linear(2, 2), data=Own(), metrics=["top1"], launcher="none", workers=0, out=tmp_path
    )
    assert result.data["fingerprint"] == "3 of mine"
    table = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")
    assert table["id"].to_pylist() == ["own 0", "own 1", "own 2"]


@pytest.mark.parametrize("indices", [range(2, 5), range(1, 6, 2), [4, 1], range(3, 3)])
def test_rows_of_tensors_are_the_samples_of_their_data_set(indices: Sequence[int]) -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    found = dualeval.wrap(data).__getitems__(indices)
    assert [[part.tolist() for part in sample] for sample in found] == [
        [part.tolist() for part in data[index]] for index in indices
    ]
    assert all(type(sample) is tuple for sample in found)


@pytest.mark.parametrize("places", [None, [5, 0, 3, 3, 1], range(1, 6), np.arange(6)[::-1].copy()])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_rows_of_tensors_are_stacked_as_torch_collates_them(layout: torch.memory_format, places: Any) -> None:
    images = torch.rand(6, 3, 4, 4).contiguous(memory_format=layout)
    rows = TensorDataset(images, torch.arange(6))
    data = rows if places is None else Subset(rows, places)
    samples = dualeval.wrap(data)
    stacker = samples.stacker(COLLATES)
    assert stacker is not None
    stacked = stacker(range(1, 4))
    expected = default_collate(samples.__getitems__(range(1, 4)))
    assert type(stacked) is type(expected) is list
    for one, other in zip(stacked, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
        assert one.data_ptr() % 64 == 0
        one.zero_()
    assert rows.tensors[0].all() and rows.tensors[1].tolist() == [*range(6)], "the caller's own are copied"


@pytest.mark.parametrize("data", [[torch.zeros(2)] * 3, torch.zeros(3, 2), ["a"] * 3])
def test_samples_without_tensors_of_a_data_set_are_not_stacked(data: Any) -> None:
    assert dualeval.wrap(data).stacker(COLLATES) is None


def test_a_collate_of_ones_own_gets_samples(tmp_path: Path) -> None:
    data = TensorDataset(torch.rand(10, 4), torch.arange(10) % 3)
    seen: list[Any] = []

    def collate(samples: list[Any]) -> Any:
        seen.extend(samples)
        return default_collate(samples)

    model = nn.Linear(4, 3).eval()
    by_hand = dualeval.evaluate(model=model, data=data, collate=collate, metrics=["loss"], batch_size=4)
    assert {type(sample) for sample in seen} == {tuple}
    found = dualeval.evaluate(model=model, data=data, metrics=["loss"], batch_size=4)
    assert found.metrics_digest == by_hand.metrics_digest


def test_a_data_set_derived_from_one_of_tensors_gives_its_own_samples() -> None:
    class Negative(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(-tensor[index] for tensor in self.tensors)

    samples = dualeval.wrap(Negative(torch.arange(3)))
    [sample] = samples.__getitems__(range(1, 2))
    assert sample[0].item() == -1
    assert samples.stacker(COLLATES) is None


def test_ids_that_are_no_unicode_are_escaped(tmp_path: Path) -> None:
    """As os.listdir gives names in Latin-1: they are spelled, in a file too."""
    data = TensorDataset(torch.randn(4, 3), torch.arange(4) % 3)
    wrapped = dualeval.wrap(data, ids=[f"caf\udce9-{number}" for number in range(4)])
    dualeval.evaluate(model=nn.Identity(), data=wrapped, out=tmp_path, workers=0, launcher="none")
    ids = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")["id"].to_pylist()
    assert ids == [f"caf\\udce9-{number}" for number in range(4)]


def test_a_data_frame_is_refused_by_what_to_type() -> None:
    import pandas  # type: ignore[import-untyped]

    frame = pandas.DataFrame({"input": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    with pytest.raises(UsageError, match=r'a DataFrame, .* Give its rows: data\.to_dict\("records"\)'):
        dualeval.wrap(frame)
    assert dualeval.wrap(frame.to_dict("records"))[1] == {"input": [3.0, 4.0], "label": 1}
