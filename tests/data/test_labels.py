"""Which class each folder is: order, class maps, and the names of known classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualeval.data.labels import (
    ClassMap,
    KnownClasses,
    Labels,
    are_wnids,
    choose_labels,
    imagenet_wnids,
    read_class_map,
)
from dualeval.data.table_labels import TableLabels
from dualeval.errors import UsageError
from dualeval.models import published
from dualeval.vision_library import torchvision
from tests.vehicles.assets import package_folder

TORCHVISION = torchvision()
ENTRY = TORCHVISION.models.ResNet18_Weights.IMAGENET1K_V1
# Two classes of one name, as in older versions of torchvision's list, and two that differ in a capital.
BIRDS = KnownClasses(
    of="Birds_V1",
    names=("crane", "night heron", "crane", "Cardigan", "cardigan"),
    wnids=("n02012849", "n02009912", "n03126707", "n02113186", "n02963159"),
)


def mapped(folders: list[str], known: KnownClasses | None = None, **classes: int | None) -> Labels:
    return choose_labels(folders, class_map=ClassMap(path=Path("m.csv"), classes=classes), known=known)


# -- order -----------------------------------------------------------------------------------------------


def test_folders_are_classes_in_the_order_of_their_names() -> None:
    labels = choose_labels(["B", "a", "b"])
    assert labels.classes == {"B": 0, "a": 1, "b": 2}
    assert (labels.num_classes, labels.largest, labels.notes, labels.warnings) == (3, 2, (), ())
    assert labels.to_json(3) == {
        "rule": "order of names",
        "folders": {"B": 0, "a": 1, "b": 2},
        "left_out": [],
        "classes": ["B", "a", "b"],
    }


@pytest.mark.parametrize("prefix", ["", "class", "class_"])
def test_numbers_in_order_of_names_are_warned_of(prefix: str) -> None:
    folders = sorted(f"{prefix}{number}" for number in range(12))
    labels = choose_labels(folders)
    assert labels.classes[f"{prefix}2"] == 4
    [warning] = labels.warnings
    assert f"'{prefix}10' is class 2" in warning
    assert "--class-order number" in warning
    assert choose_labels(folders, order="name").warnings == ()
    assert choose_labels(folders, order="name").classes == labels.classes


def test_one_number_anywhere_in_a_name_numbers_the_classes() -> None:
    """Where these count from 0 or 1: 1_cat, 10_dog, 2_bird were the classes 0 to 2 without a word."""
    folders = sorted(f"{number}_{'abcdefghijk'[-number]}" for number in range(1, 12))
    [warning] = choose_labels(folders).warnings
    assert "--class-order number" in warning
    labels = choose_labels(folders, order="number")
    assert [labels.classes[name] for name in ("1_k", "2_j", "11_a")] == [0, 1, 10]
    assert choose_labels(["3_a", "10_b"]).warnings == (), "numbers of something else"


@pytest.mark.parametrize(
    "folders", [["0", "1", "2"], ["00", "01", "10"], ["1", "10", "x"], ["a1", "b10", "b2"], ["cat", "dog"]]
)
def test_folders_whose_order_is_not_in_doubt_give_no_warning(folders: list[str]) -> None:
    assert choose_labels(folders).warnings == ()


def test_folders_are_classes_in_the_order_of_their_numbers() -> None:
    folders = sorted(f"c{number}" for number in range(1, 13))
    labels = choose_labels(folders, order="number")
    assert labels.classes == {f"c{number}": number - 1 for number in range(1, 13)}
    assert list(labels.classes) == folders, "samples stay in the order of names"
    assert labels.names[1] == "c2"
    assert labels.warnings == ()
    assert labels.num_classes == 12


# -- class maps ------------------------------------------------------------------------------------------


def test_a_class_map_gives_each_folder_its_index() -> None:
    labels = mapped(["cat", "dog"], cat=7, dog=2)
    assert labels.classes == {"cat": 7, "dog": 2}
    assert (labels.rule, labels.num_classes, labels.largest) == ("class map", None, 7)
    assert labels.to_json(9)["classes"] == [None, None, "dog", None, None, None, None, "cat", None]
    assert labels.notes == ("classes: 2 folders by m.csv",)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_class_map_is_read_from_its_file(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(f'{mark}{{"cat": 3, "left out": null, "größe": 12}}', "utf-8")
    assert read_class_map(path) == ClassMap(path=path, classes={"cat": 3, "left out": None, "größe": 12})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("cat,1", r"is not JSON: .*expected a JSON file, \{\"FOLDER\": INDEX, ...\}"),
        (b'{"caf\xe9": 1}', "is not JSON: 'utf-8' codec"),
        ("[1, 2]", r"holds \[1, 2\]: expected"),
        ("{}", "holds {}: expected"),
        ('{"cat": 1, "dog": 2, "cat": 3}', ": 'cat' is there twice"),
        (
            '{"cat": 4294967296}',
            "'cat' is mapped to 4294967296: expected the class's index, a whole number from 0 to 2,1",
        ),
        ('{"cat": "1"}', "'cat' is mapped to \"1\": expected the class's index"),
        ('{"0": "cat"}', "A map of index to folder has to be inverted"),
        ('{"0": ["n01440764", "tench"]}', "the class's index.*A map of index to folder"),
        ('{"cat": -1}', "mapped to -1"),
        ('{"cat": true}', "mapped to true.*null to leave the folder out"),
    ],
)
def test_a_file_that_is_no_class_map_is_refused(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    path = tmp_path / "map.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=said) as caught:
        read_class_map(path)
    assert str(caught.value).startswith(f"--class-map {path}")


def test_a_class_map_may_leave_folders_out_and_join_them() -> None:
    labels = mapped(["a", "b", "c"], a=1, b=None, c=1, d=5, e=None)
    assert labels.classes == {"a": 1, "c": 1}
    assert labels.left_out == ("b",)
    assert labels.names == {1: "a, c"}
    assert labels.notes[1:] == ("class map: 1 folder left out: b",)


def test_a_class_map_keeps_the_number_and_names_of_known_classes() -> None:
    labels = mapped(["heron", "night heron"], BIRDS, **{"heron": 1, "night heron": 3})
    assert labels.num_classes == 5
    assert labels.to_json(5)["classes"][1] == "night heron"


def test_labels_are_the_same_whatever_rule_has_given_them() -> None:
    """The rule does not: only what it comes to."""
    by_name = choose_labels(["0", "1"])
    assert by_name.fingerprint() == choose_labels(["0", "1"], order="number").fingerprint()
    assert by_name.fingerprint() == mapped(["0", "1"], None, **{"0": 0, "1": 1}).fingerprint()
    assert by_name.fingerprint() != mapped(["0", "1"], None, **{"0": 1, "1": 0}).fingerprint()


# -- known classes ---------------------------------------------------------------------------------------


def test_the_wnids_are_those_of_the_package() -> None:
    wnids = imagenet_wnids()
    listed = package_folder("timm") / "data/_info/imagenet_synsets.txt"
    assert wnids == tuple(listed.read_text("ascii").split())
    assert len(set(wnids)) == 1000
    assert list(wnids) == sorted(wnids)


def test_folders_named_by_wnids_have_the_indices_of_all_classes() -> None:
    known = published.classes_of(ENTRY)
    labels = choose_labels(["N02099601", "n01440764", "n15075141"], known=known)
    assert list(labels.classes.values()) == [207, 0, 999]
    assert labels.num_classes == 1000
    assert labels.names[207] == "golden retriever"
    assert labels.rule == "wnids of the classes of ResNet18_Weights.IMAGENET1K_V1"
    assert labels.notes == (
        "classes: 3 folders by wnids of the 1,000 classes of ResNet18_Weights.IMAGENET1K_V1",
    )


def test_folders_named_by_class_names_have_the_indices_of_all_classes() -> None:
    known = published.classes_of(ENTRY)
    labels = choose_labels(["golden_retriever", "n15075141", "tench"], known=known)
    assert list(labels.classes.values()) == [207, 999, 0]
    assert labels.rule.startswith("wnids and names of")


def test_all_names_in_their_own_order_are_their_own_classes() -> None:
    """Their order by name is another one."""
    known = published.classes_of(ENTRY)
    labels = choose_labels(sorted(known.names), known=known)
    assert labels.classes == {name: index for index, name in enumerate(known.names)}
    assert list(labels.classes.values()) != sorted(labels.classes.values())


def test_a_model_of_ones_own_has_wnids_alone() -> None:
    known = published.imagenet_classes()
    assert choose_labels(["n02099601"], known=known).classes == {"n02099601": 207}
    assert choose_labels(["golden retriever", "tench"], known=known).rule == "order of names"
    assert are_wnids(["n02099601", "N01440764"], known.wnids)
    assert not are_wnids(["n02099601", "cat"], known.wnids)
    assert not are_wnids([], known.wnids)


def test_folders_that_are_no_known_classes_are_in_order_of_names() -> None:
    assert choose_labels(["x", "y"], known=BIRDS).rule == "order of names"
    assert choose_labels(["crane", "y"], known=BIRDS, order="name").classes == {"crane": 0, "y": 1}


def test_two_classes_of_one_name_are_told_apart_by_wnid() -> None:
    labels = choose_labels(["n02012849", "n03126707"], known=BIRDS)
    assert list(labels.classes.values()) == [0, 2]
    assert (labels.names[0], labels.names[2]) == ("crane (n02012849)", "crane (n03126707)")


def test_capitals_tell_two_classes_apart_only_where_all_names_are_exact() -> None:
    assert choose_labels(["Cardigan", "cardigan"], known=BIRDS).classes == {"Cardigan": 3, "cardigan": 4}
    assert choose_labels(["NIGHT_HERON"], known=BIRDS).classes == {"NIGHT_HERON": 1}


def map_of(**classes: int | None) -> dict[str, ClassMap]:
    return {"class_map": ClassMap(path=Path("m.csv"), classes=classes)}


@pytest.mark.parametrize(
    ("folders", "options", "said"),
    [
        ("0 1 x", {"order": "number"}, "found 0, 1, x. Give --class-map"),
        ("a1 b3", {"order": "number"}, "found a1, b3"),
        ("01 1 2", {"order": "number"}, "found 01, 1, 2"),
        ("0 10 2", {"order": "number"}, "each number once"),
        ("a b c", map_of(b=1, z=2), "m.csv does not name 2 of 3 class folders: a, c. Add them; null"),
        ("a", map_of(a=None), "leaves every class folder out"),
        ("a", {**map_of(a=5), "known": BIRDS}, "makes 'a' class 5, but Birds_V1 has 5 classes (0 to 4)"),
        (
            "night_herron n02012849",
            {"known": BIRDS},
            "while the others are: night_herron. Nearest: night heron.",
        ),
        ("crane", {"known": BIRDS}, "classes 0, 2 of Birds_V1: crane, crane. Name it by its wnid (n0201"),
        ("CARDIGAN", {"known": BIRDS}, "may be any of the classes 3, 4"),
        ("Night_Heron cardigan", {"known": BIRDS}, "may be any of the classes 3, 4"),
        ("Night_heron night_heron", {"known": BIRDS}, "Night_heron, night_heron are all class 1 of Birds_V1"),
    ],
)
def test_folders_that_are_refused(folders: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_labels(folders.split(), **options)
    assert said in str(caught.value)


# -- labels of a table -----------------------------------------------------------------------------------


class Asked:
    """What was asked for about labels, and the model's classes."""

    def __init__(self, *names: str, order: str | None = None, of: Any = None, **classes: int) -> None:
        self.known = KnownClasses(of="the model", names=names) if names else None
        self.order = order
        mapped = {**(of or {}), **classes}
        self.class_map = ClassMap(path=Path("m.json"), classes=mapped) if mapped else None

    def __call__(self, names: Sequence[str], noun: str, where: Callable[[str], str]) -> Labels:
        return choose_labels(
            names, class_map=self.class_map, order=self.order, known=self.known, noun=noun, where=where
        )


def of_table(
    values: Sequence[Any], asked: Asked, class_names: Sequence[str] = (), *, of_model: bool = False
) -> tuple[Labels, list[int]]:
    """What labels are, and the class of each row."""
    table = TableLabels(lambda number: f"t.csv, line {number}", "label", class_names)
    places = [table.place(number, value) for number, value in enumerate(values, 2)]
    labels, classes = table.decide(asked, of_model=of_model)
    return labels, [classes[place] for place in places]


PLAIN = Asked()
STARS = ("1", "2", "3")
OF_MODEL = "(names of the classes of the model)"
INDICES = "as names of class folders they are other classes: --class-order name"
READ: list[tuple[list[Any], Asked, list[int], str]] = [
    (["001", "002", "010"], PLAIN, [0, 1, 2], "3 names: 001, 002, 010 (order of names)"),
    (["0", "1", "2"], PLAIN, [0, 1, 2], "indices 0 to 2"),
    ([" 1", 0, np.int64(1), torch.tensor(0)], PLAIN, [1, 0, 1, 0], "indices 0 to 1"),
    (["2", "1", "01"], PLAIN, [2, 1, 0], "3 names: 01, 1, 2 (order of names)"),
    (["1", "2", "cat"], PLAIN, [0, 1, 2], "3 names: 1, 2, cat (order of names)"),
    (["1", "3"], PLAIN, [1, 3], f"indices 1 to 3 ({INDICES})"),
    ([*map(str, range(11))], PLAIN, [*range(11)], f"indices 0 to 10 ({INDICES})"),
    ([5], PLAIN, [5], f"index 5 ({INDICES} or number)"),
    (["1", "3"], Asked(order="name"), [0, 1], "2 names: 1, 3 (order of names)"),
    (["9", "10"], Asked(order="number"), [0, 1], "2 names: 9, 10 (order of numbers)"),
    (["9.0", "10.0"], Asked(order="number"), [0, 1], "2 names: 9, 10 (order of numbers)"),
    (["True", "False"], Asked(order="number"), [1, 0], "2 names: 0, 1 (order of numbers)"),
    (["True", "False"], Asked(order="name"), [1, 0], "2 names: False, True (order of names)"),
    (["1.0", "2.0"], Asked(of={"1": 5, "2": 3}), [5, 3], "2 names: 2, 1 (class map)"),
    (["1.0", "2.0"], Asked(of={"1.0": 5, "2.0": 3}), [5, 3], "2 names: 2.0, 1.0 (class map)"),
    (["True", "False"], Asked(of={"1": 2, "0": 3}), [2, 3], "2 names: 1, 0 (class map)"),
    (["1.0", "0.0"], PLAIN, [1, 0], "indices 0 to 1"),
    ([1.0, 0], PLAIN, [1, 0], "indices 0 to 1"),
    ([True, False], PLAIN, [1, 0], "indices 0 to 1"),
    ([np.bool_(True), False], Asked("no", "yes"), [1, 0], "indices 0 to 1"),
    ([True, False], Asked("TRUE", "False"), [0, 1], f"2 names: TRUE, False {OF_MODEL}"),
    ([True, "maybe"], Asked(true=4, maybe=2), [4, 2], "2 names: maybe, true (class map)"),
    ([1, "3"], Asked(*STARS), [0, 2], f"2 names: 1, 3 {OF_MODEL}"),
    (["1.0", "3.0"], Asked(*STARS), [0, 2], f"2 names: 1, 3 {OF_MODEL}"),
    (["3.5", "-1"], Asked("-1", "3.5"), [1, 0], f"2 names: -1, 3.5 {OF_MODEL}"),
    (["3.5", "-1"], Asked(order="name"), [1, 0], "2 names: -1, 3.5 (order of names)"),
    (["Cat", "cat", "DOG"], Asked("dog", "cat"), [1, 1, 0], f"3 names: DOG, Cat, cat {OF_MODEL}"),
]


@pytest.mark.parametrize(("values", "asked", "classes", "said"), READ)
def test_a_label_is_a_name_or_an_index(
    values: list[Any], asked: Asked, classes: list[int], said: str
) -> None:
    labels, found = of_table(values, asked)
    assert found == classes
    assert str(labels) == said


def test_indices_of_a_table_with_other_names_are_refused() -> None:
    assert of_table([1, 2], Asked(*STARS), STARS)[1] == [1, 2]
    other = ("tench, Tinca tinca", "goldfish")
    assert of_table([1], Asked("tench", "goldfish"), other)[1] == [1]
    for names, of_model in ((("goldfish", "tench"), False), (other, True)):
        with pytest.raises(UsageError, match="are indices of other classes than the model's, or in another"):
            of_table([1], Asked("tench", "goldfish"), names, of_model=of_model)


def test_texts_of_bools_are_1_and_0() -> None:
    assert of_table(["TRUE", "False"], PLAIN, of_model=True)[1] == [1, 0]
    assert of_table(["True", "False"], PLAIN)[1] == [1, 0], "as class folders"
