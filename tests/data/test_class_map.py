"""Class maps: what is read, and what each odd file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualeval.data.class_map import read_class_map
from dualeval.errors import UsageError


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_class_map(tmp_path: Path, mark: str) -> None:
    path = written(tmp_path, "map.json", f'{mark}{{"cat": 3, "dog": 0, "left out": null, "größe": 12}}')
    found = read_class_map(path)
    assert found.path == path
    assert found.classes == {"cat": 3, "dog": 0, "left out": None, "größe": 12}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("map.csv", "cat,1", r"is not JSON: .*expected a JSON file, \{\"FOLDER\": INDEX, ...\}"),
        ("map.json", "{", "is not JSON"),
        ("map.json", "[1, 2]", "holds a list: expected"),
        ("map.json", "{}", "is empty"),
        ("map.json", '{"cat": 1, "dog": 2, "cat": 3}', ": 'cat' is there twice"),
        ("map.json", '{"cat": "1"}', "'cat' is mapped to \"1\": expected the class's index"),
        ("map.json", '{"0": "cat"}', "A map of index to folder has to be turned round"),
        ("map.json", '{"0": ["n01440764", "tench"]}', "the class's index.*A map of index to folder"),
        ("map.json", '{"cat": -1}', "mapped to -1"),
        ("map.json", '{"cat": 1.0}', "mapped to 1.0"),
        ("map.json", '{"cat": true}', "mapped to true.*null to leave the folder out"),
    ],
)
def test_what_is_no_class_map(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_class_map(written(tmp_path, name, text))
    assert str(caught.value).startswith(f"--class-map {tmp_path / name}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_class_map(tmp_path / "none.json")
    (tmp_path / "map.json").write_bytes(b'{"caf\xe9": 1}')
    with pytest.raises(UsageError, match="is not JSON: 'utf-8' codec"):
        read_class_map(tmp_path / "map.json")
