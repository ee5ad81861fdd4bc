"""The same samples in each form that data lie in: one digest, on any number of ranks and launchers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

from tests.conftest import Launch
from tests.engine.test_digests import Table, table
from tests.tasks.test_tar_rows import as_object, as_parts, question_rows, text_rows
from tests.tasks.test_task_ranks import DUALEVAL
from tests.vehicles import masked_pictures, questions, texts
from tests.vehicles.assets import build_pictures
from tests.vehicles.launchers import start
from tests.vehicles.moto_store import moto_store
from tests.vehicles.object_store import CREDENTIALS
from tests.vehicles.packed_pictures import as_folder, fashion, pack

STORE = "s3://bucket"


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What is evaluated: the options besides those of the data, and these by form."""

    options: Sequence[str | Path]
    forms: Mapping[str, Sequence[str | Path]]


def in_tars(folder: Path, members: Sequence[dict[str, bytes]]) -> Path:
    """Three shards, of one, two and the other samples."""
    for number, part in enumerate((members[:1], members[1:3], members[3:])):
        pack(folder / f"val-{number}.tar", {name: data for each in part for name, data in each.items()})
    return folder / "val-{0..2}.tar"


def stored(path: Path, home: Path) -> str:
    return f"{STORE}/{path.relative_to(home).as_posix()}"


def of_pictures(home: Path) -> Samples:
    """Twenty real ones, with a real model."""
    real = build_pictures(home)
    names, order = sorted(real.labels), sorted(each.name for each in real.data.iterdir())
    contents = [(real.data / name).read_bytes() for name in names]
    wnids = [name.partition("/")[0] for name in names]
    tars = in_tars(
        home / "shards",
        [
            {name: data, f"{name.rpartition('.')[0]}.cls": wnid.encode()}
            for name, data, wnid in zip(names, contents, wnids, strict=True)
        ],
    )
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=order)})
    rows = [
        {"image": {"bytes": data, "path": name}, "label": order.index(wnid)}
        for name, data, wnid in zip(names, contents, wnids, strict=True)
    ]
    found = datasets.Dataset.from_list(rows, features=features).data.table
    pyarrow.parquet.write_table(found, home / "val.parquet", row_group_size=3)
    at = real.arguments.index("--data")
    # The tree has a folder for each of ImageNet's classes, the other forms have the pictures' 19 wnids.
    options = [
        *real.arguments[:at],
        *real.arguments[at + 2 : -1],
        "--num-classes",
        "1000",
        "--batch-size",
        "4",
    ]
    return Samples(
        options=options,
        forms={
            "folder": ["--data", real.data],
            "tar": ["--data", tars],
            "Parquet": ["--data", home / "val.parquet"],
            "pack": ["--data", home / "val.pack"],
            "tar in the store": ["--data", stored(tars, home)],
            "folder in the store": ["--data", stored(real.data, home)],
            "Parquet in the store": ["--data", stored(home / "val.parquet", home)],
        },
    )


def of_masks(home: Path) -> Samples:
    masked_pictures.write_pictures(home / "val")
    (home / "nets.py").write_text(masked_pictures.NETS)
    members = [
        {path.name: path.read_bytes(), f"{path.stem}.mask.png": (home / "val/masks" / path.name).read_bytes()}
        for path in sorted((home / "val/img").iterdir())
    ]
    tars = in_tars(home / "shards", members)
    return Samples(
        options=[
            *(
                "--task",
                "segmentation",
                "--model",
                "nets:make",
                "--weights",
                "random:0",
                "--num-classes",
                "5",
            ),
            *("--preprocessing", "none", "--batch-size", "3"),
        ],
        forms={
            "folder": ["--data", home / "val/img", "--masks", home / "val/masks"],
            "tar": ["--data", tars],
            "pack": ["--data", home / "val.pack"],
            "tar in the store": ["--data", stored(tars, home)],
        },
    )


def of_rows(
    home: Path, rows: Sequence[dict[str, Any]], members: Callable[[Any], dict[str, bytes]]
) -> dict[str, Sequence[str | Path]]:
    texts.write(home / "rows.jsonl", rows)
    texts.write(home / "rows.parquet", rows)
    tars = in_tars(home / "shards", [members(row) for row in rows])
    return {
        "JSON lines": ["--data", home / "rows.jsonl"],
        "Parquet": ["--data", home / "rows.parquet"],
        "tar": ["--data", tars],
        "tar in the store": ["--data", stored(tars, home)],
        "Parquet in the store": ["--data", stored(home / "rows.parquet", home)],
    }


def of_texts(home: Path) -> Samples:
    model = texts.save_classifier(home / "model")
    return Samples(
        options=["--task", "text-classification", "--model", model, "--batch-size", "4"],
        forms=of_rows(home, text_rows(), as_parts),
    )


def of_questions(home: Path) -> Samples:
    model = questions.save_tiny_bert(home / "model")
    squad: dict[str, Sequence[str | Path]] = {"SQuAD's JSON": ["--data", questions.squad_file()]}
    return Samples(
        options=["--task", "question-answering", "--model", model, "--batch-size", "2"],
        forms={**squad, **of_rows(home, question_rows(), as_object)},
    )


KINDS: dict[str, Callable[[Path], Samples]] = {
    "pictures": of_pictures,
    "masks": of_masks,
    "texts": of_texts,
    "questions": of_questions,
}
WAYS = [("none", 1), ("torchrun", 2), ("torchrun", 3), ("horovodrun", 2)]

forms_table = table(
    "forms",
    "Digests of the same samples in each form of data",
    ["samples", "form", "launcher", "processes", "metrics_digest", "samples_digest"],
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.needs("moto", "horovod")
@pytest.mark.parametrize("kind", KINDS)
def test_each_form_has_one_digest_on_any_ranks(
    launch: Launch, tmp_path: Path, forms_table: Table, kind: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    samples = KINDS[kind](home)
    if "pack" in samples.forms:
        words = [*samples.options, *samples.forms["folder"], "--out", home / "val.pack"]
        batch = words.index("--batch-size")
        launch([*DUALEVAL, "pack", *words[:batch], *words[batch + 2 :]], cwd=home).ok()
    bits = set()
    with moto_store(home) as endpoint:
        variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        for form, data in samples.forms.items():
            for launcher, size in WAYS:
                out = tmp_path / f"{form}-{launcher}-{size}"
                ranks = start(launcher, size) if size > 1 else []
                words = ["run", *samples.options, *data, "--no-progress", "--out", out]
                launch([*ranks, *DUALEVAL, *words], cwd=home, variables=variables, timeout=300).ok()
                result = json.loads((out / "result.json").read_text())
                assert (result["world"]["size"], result["samples"]["failed"]) == (size, 0)
                digests = result["metrics_digest"], result["samples_digest"]
                forms_table.append((kind, form, launcher, size, *(f"`{each[:16]}`" for each in digests)))
                bits.add(digests)
    assert len(bits) == 1


OPENED = """
import os
import sys
from pathlib import Path

import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import dualeval


def collate(samples):
    pixels = [pil_to_tensor(picture).float() for picture, _ in samples]
    return torch.stack(pixels), torch.tensor([label for _, label in samples])


data = [(Image.open(path), int(path.parent.name)) for path in sorted(Path("val").rglob("*.png"))]
if os.environ.get("RANK") == "0":
    for picture, _ in data:
        picture.load()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10)).eval()
options = {"metrics": ["accuracy"], "batch_size": 2, "out": sys.argv[1]}
dualeval.evaluate(model=model, data=data, collate=collate, **options)
"""


def test_a_list_of_pictures_that_are_opened_and_not_read_is_one_data_set(
    launch: Launch, tmp_path: Path
) -> None:
    """Also where one rank has looked at them: a picture that has been read was another one."""
    as_folder(fashion(10), tmp_path)
    (tmp_path / "opened.py").write_text(OPENED)
    digests = []
    for size in (1, 2):
        ranks = start("torchrun", size) if size > 1 else []
        launch([*ranks, sys.executable, tmp_path / "opened.py", f"of {size}"], cwd=tmp_path).ok()
        result = json.loads((tmp_path / f"of {size}" / "result.json").read_text())
        assert (result["world"]["size"], result["samples"]["evaluated"]) == (size, 10)
        digests.append((result["metrics_digest"], result["samples_digest"]))
    assert digests[0] == digests[1]
