"""Class maps: what is read, and what each odd file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualeval.data.class_map import read_class_map
from dualeval.errors import UsageError


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", '{"cat": 3, "dog": 0, "left out": null, "größe": 12}'),
        ("map.JSON", '\ufeff{"cat": 3, "dog": 0, "left out": null, "größe": 12}'),
        ("map.csv", "cat,3\ndog,0\nleft out,\ngröße,12\n"),
        ("map.csv", 'folder,index\r\ncat, 3\r\n\r\n"dog",0\r\nleft out,\r\ngröße,12'),
    ],
)
def test_both_formats_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text)
    found = read_class_map(path)
    assert found.path == path
    assert found.classes == {"cat": 3, "dog": 0, "left out": None, "größe": 12}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("map.txt", "cat,1", r"expected \{\"FOLDER\": INDEX, ...\} in a \.json file or lines FOLDER,INDEX"),
        ("map.json", "{", "is not JSON"),
        ("map.json", "[1, 2]", "holds a list: expected"),
        ("map.json", "{}", "is empty"),
        ("map.csv", "", "is empty"),
        ("map.json", '{"cat": 1, "dog": 2, "cat": 3}', ": 'cat' is there twice"),
        ("map.csv", "cat,1\ncat,1", "line 2: 'cat' is there twice"),
        ("map.json", '{"cat": "1"}', "'cat' is mapped to \"1\": expected the class's index"),
        ("map.json", '{"0": "cat"}', "A map of index to folder has to be turned round"),
        ("map.json", '{"0": ["n01440764", "tench"]}', "the class's index.*A map of index to folder"),
        ("map.json", '{"cat": -1}', "mapped to -1"),
        ("map.json", '{"cat": 1.0}', "mapped to 1.0"),
        ("map.json", '{"cat": true}', "mapped to true.*null to leave the folder out"),
        (
            "map.csv",
            "cat,1\ndog,two",
            "line 2: 'dog' is mapped to \"two\": .*an empty one to leave the folder out",
        ),
        ("map.csv", "cat,1\ndog,1_0", "line 2: 'dog' is mapped to \"1_0\": expected"),
        ("map.csv", "cat,-1", "line 1: 'cat' is mapped to -1"),
        ("map.csv", "cat;1", "line 1 has 1 columns, expected 2"),
        ("map.csv", 'cat,1\n"dog,2', "is not CSV"),
    ],
)
def test_what_is_no_class_map(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_class_map(written(tmp_path, name, text))
    assert str(caught.value).startswith(f"--class-map {tmp_path / name}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_class_map(tmp_path / "none.json")
    (tmp_path / "map.csv").write_bytes(b"caf\xe9,1")
    with pytest.raises(UsageError, match="is not UTF-8"):
        read_class_map(tmp_path / "map.csv")
