"""Options as dataclasses: what texts, TOML and signatures are turned into, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from dualeval.engine.session import Session
from dualeval.engine.values.options import NEW_FOLDER, RunOptions, check_session_options
from dualeval.errors import UsageError
from dualeval.options.fields import OptionField, as_json, check_fields, fields_of, option, options_of_call


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a task may ask for.

    Args:
        words: said in the docstring
            on two lines.
    """

    folder: Path = option(help="Where it lies.", metavar="DIR")
    count: int = option(3, "How many.", group="Numbers", least=1)
    share: float | None = None
    mode: Literal["a", "b"] = "a"
    level: Literal[1, 2] = 1
    deep: bool = False
    pair: tuple[int, float] = (1, 0.5)
    sizes: tuple[int, ...] = ()
    words: list[str] = field(default_factory=list, metadata={"group": "Texts"})
    either: int | str = 0
    where: str | None = option(None, is_path=lambda text: text.endswith(".pt"))
    step: str = option("x", choices=("x", "y"))
    hook: object = None
    size: Literal["auto"] | int = "auto"
    named: tuple[int, str] = (1, "x")
    degree: Literal[1, 2] | None = 1


FIELDS = {each.name: each for each in fields_of(Options)}


def test_a_field_has_its_flag_default_group_and_help() -> None:
    folder, count, words = FIELDS["folder"], FIELDS["count"], FIELDS["words"]
    assert (folder.flag, folder.is_required, folder.help, folder.metavar) == (
        *("--folder", True),
        *("Where it lies.", "DIR"),
    )
    assert (count.default, count.group, count.least, count.metavar) == (3, "Numbers", 1, "N")
    assert (words.default, words.group, words.help) == ([], "Texts", "Said in the docstring")
    assert [each.name for each in FIELDS.values() if not each.is_settable] == ["hook"]
    assert [each.name for each in FIELDS.values() if each.is_switch] == ["deep"]
    assert FIELDS["mode"].metavar == "a|b"


TEXTS: dict[str, dict[str, Any]] = {
    "folder": {"a/b": Path("a/b")},
    "count": {"-7": -7},
    "share": {"1e-3": 1e-3, "none": None, "2": 2.0},
    "mode": {"b": "b"},
    "level": {"2": 2},
    "deep": {"Yes": True, "0": False},
    "pair": {"2, 0.25": (2, 0.25)},
    "sizes": {"1,2,3": (1, 2, 3), "": ()},
    "words": {"a,b": ["a", "b"]},
    "either": {"12": 12, "1x": "1x"},
    "where": {"none": "none"},
    "step": {"y": "y"},
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_become_values_of_the_fields_type(name: str) -> None:
    for text, value in TEXTS[name].items():
        parsed = FIELDS[name].parse(text, "-T x")
        assert parsed == value
        assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "1.5", "-T count '1.5': expected a whole number"),
        ("share", "much", "expected a number"),
        ("mode", "c", "expected one of a, b"),
        ("level", "3", "expected one of 1, 2"),
        ("deep", "maybe", "expected true or false"),
        ("pair", "1", "expected 2 values with commas between"),
        ("sizes", "1,x", "expected whole numbers with commas between, such as 1,2,3"),
        ("step", "z", "expected one of x, y"),
    ],
)
def test_texts_that_stand_for_no_value_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FIELDS[name].parse(text, f"-T {name}")


def test_toml_counts_paths_from_its_folder(tmp_path: Path) -> None:
    def read(name: str, value: Any) -> Any:
        return FIELDS[name].of_toml(value, "x", tmp_path)

    assert read("folder", "a") == tmp_path / "a"
    assert read("where", "w.pt") == str(tmp_path / "w.pt")
    assert read("where", "DEFAULT") == "DEFAULT"
    assert read("sizes", [1, 2]) == (1, 2)
    assert read("share", 1) == 1.0
    assert read("level", 2) == 2
    assert read("either", "a") == "a"
    assert (read("size", 3), read("size", "auto")) == (3, "auto")
    assert read("named", [4, "y"]) == (4, "y")
    assert read("degree", 2) == 2
    for name, value, message in (
        ("count", True, "expected an int, found a bool"),
        ("folder", 3, "expected a str, found an int"),
        ("folder", "", "x is empty, expected a path"),
        ("either", 0.5, "expected an int or a str, found a float"),
        ("mode", "c", "expected one of a, b"),
        ("deep", 1, "expected a bool, found an int"),
        ("size", "large", "expected 'auto' or an int, found a str"),
        ("named", [4], "expected 2 values, found 1"),
        ("named", ["y", 4], "expected an int, found a str"),
        ("degree", "1", "expected one of 1, 2"),
        ("degree", True, "expected one of 1, 2"),
        ("degree", 1.0, "expected one of 1, 2"),
    ):
        with pytest.raises(UsageError, match=message):
            read(name, value)


def test_bounds_are_checked() -> None:
    with pytest.raises(UsageError, match="--count 0: expected a whole number of at least 1"):
        check_fields(Options(folder=Path(), count=0))
    with pytest.raises(UsageError, match="--step 'z': expected one of x, y"):
        check_fields(Options(folder=Path(), step="z"))
    with pytest.raises(UsageError, match=r"--folder \{\}: expected a path"):
        check_fields(Options(folder={}))  # type: ignore[arg-type]


def test_json_has_what_can_be_typed() -> None:
    plain = as_json(Options(folder=Path("a"), hook=print, share=math.inf))
    assert (plain["folder"], plain["pair"], plain["words"], plain["share"]) == ("a", [1, 0.5], [], "inf")
    assert "hook" not in plain


class Task:
    """A class whose arguments are its options.

    Args:
        rate: how fast.
        model: which one.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self, model: Path, rate: float = 0.1, names=("a",), count=2, *rest: int, hook=None, **more: int
    ):
        pass


def described(fields: tuple[OptionField, ...]) -> list[tuple[Any, ...]]:
    return [(each.name, each.kind, each.default, each.is_required, each.help) for each in fields]


def test_arguments_are_options() -> None:
    made = options_of_call(Task)
    assert described(fields_of(made)) == [
        ("model", Path, None, True, "Which one."),
        ("rate", float, 0.1, False, "How fast."),
        ("names", tuple[str, ...], ("a",), False, ""),
        ("count", int, 2, False, ""),
        ("hook", Any, None, False, ""),
    ]
    options = made(model=Path("m"))
    assert (options.model, options.rate, options.names) == (Path("m"), 0.1, ("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.rate = 3


def test_an_argument_of_an_unseen_type_cannot_be_set() -> None:
    def make(good: int = 1, strange: Unseen = None) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    good, strange = fields_of(options_of_call(make))
    assert (good.kind, good.is_settable, strange.is_settable) == (int, True, False)


def test_arguments_without_a_name_are_refused() -> None:
    def make(first: int, /) -> None:
        pass

    with pytest.raises(UsageError, match="first only by position"):
        options_of_call(make)


# -- RunOptions: what it refuses, and that nothing else is left to be found later ------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0: expected a whole number of at least 1"),
        ({"batch_size": 2**63}, f"batch_size {2**63}: expected a whole number from 1 to {2**63 - 1}"),
        ({"batch_size": 2.0}, "batch_size 2.0: expected a whole number"),
        ({"batch_size": None}, "expected a whole number, found None"),
        ({"limit": 0}, "limit 0: expected"),
        ({"limit": -3}, "limit -3: expected"),
        ({"limit": 2.5}, "limit 2.5: expected"),
        ({"workers": -1}, "workers -1: expected"),
        ({"workers": True}, "workers True: expected"),
        ({"precision": "bf-16"}, "precision 'bf-16': expected one of .* Did you mean bf16?"),
        ({"precision": "fp23"}, "precision 'fp23': expected .* Did you mean fp32"),
        ({"layout": "nhwc"}, "layout 'nhwc': expected one of auto, contiguous, channels-last"),
        ({"optimize": "folding"}, "optimize 'folding': expected one of fold, compile. Did you mean fold?"),
        ({"on_error": "ignore"}, "on_error 'ignore': expected one of stop, skip"),
        (
            {"schedule": "dynamc"},
            "schedule 'dynamc': expected one of static, dynamic, lockstep. Did you mean dynamic?",
        ),
        ({"out": 3}, r"out 3: expected a path, None \(nothing is written\) or dualeval\.NEW_FOLDER"),
        ({"out": ""}, "out '': expected a path"),
        ({"replay": "x"}, "replay 'x': expected True or False"),
        ({"mix_machines": "no"}, "mix_machines 'no': expected True or False"),
        ({"fresh": "no"}, "fresh 'no': expected True or False"),
        ({"replay": None}, "replay None: expected True or False"),
        ({"fresh": True}, "out is None: give a folder"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heartbeat_timeout": "60"}, r"heartbeat_timeout '60': expected seconds, as 60\.0"),
        ({"heartbeat_timeout": None}, "heartbeat_timeout None: expected seconds"),
        ({"forward_timeout": True}, "forward_timeout True: expected seconds"),
        ({"stop_signals": None}, "stop_signals None: expected names of signals"),
        ({"stop_signals": [15]}, r"stop_signals \[15\]: expected names"),
        ({"stop_signals": "SIGTERM"}, r"stop_signals 'SIGTERM': expected names of signals, as \('SIGTERM', "),
        ({"backend": 5}, "backend 5: expected the name of a backend"),
        ({"launcher": 5}, "launcher 5: expected the name of a launcher"),
        ({"allow_shared_gpu": "no"}, "allow_shared_gpu 'no': expected True or False"),
        ({"stop": 5}, "stop 5: expected a function"),
    ],
)
def test_an_option_of_a_session_of_another_kind_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_session_options(options)


def test_the_options_that_a_session_has_are_taken() -> None:
    given = inspect.signature(Session).parameters
    check_session_options({name: parameter.default for name, parameter in given.items()})
    check_session_options({"heartbeat_timeout": 5, "stop_signals": ["SIGTERM"], "stop": lambda: False})


def test_options_cannot_be_changed(tmp_path: Path) -> None:
    options = RunOptions(out=str(tmp_path))
    assert options.path == tmp_path
    assert RunOptions(out=NEW_FOLDER).path is RunOptions().path is None
    with pytest.raises(FrozenInstanceError):
        options.limit = 3  # type: ignore[misc]
