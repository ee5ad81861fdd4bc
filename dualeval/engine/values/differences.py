"""Differences of two jobs, or of other plain values: by name, and in words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualeval.result import Result

_NAMED = ("structure.", "constants.", "task_attributes.", "metric_options.")
_HASH = re.compile("[0-9a-f]{6,64}")
# What hashes are of, by the beginning of their names; {} is the rest of one.
_OF_HASHES = {
    "job.source.dualeval": "the code of dualeval itself",
    "job.source.functions ": "functions {}",
    "job.source.": "the code of {}",
    "job.weights.": "the weights' values",
    "job.data": "the data's labels, sizes or texts",
    "job.contents": "the data's contents",
    "job.structure.": "the model's {}",
    "job.task_options.": "the option {}",
    "job.options.": "the option {}",
}
_SHOWN_OF_HASH = 16
_MOST_LISTED = 16
# Options that change no number, or whose change the data's fingerprints would show.
_NO_NUMBER = (
    *("workers", "device", "data", "annotations", "masks", "image_root", "metric", "by", "bins", "keep"),
    *("keep_masks", "keep_losses"),
    *("bootstrap", "bootstrap_iters", "on_error"),
)


def differences(one: Any, other: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Differences of two nests of plain values: name with dots, value in each (None if it is missing)."""
    differing: list[tuple[str, Any, Any]] = []
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            differing += differences(one.get(key), other.get(key), f"{name}.{key}" if name else key)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            differing += differences(first, second, f"{name}[{place}]")
    # Compared as JSON: 1 is not 1.0, 0.0 is not -0.0, and NaN equals NaN.
    elif one != other if isinstance(one, str) else json.dumps(one) != json.dumps(other):
        differing.append((name, one, other))
    return differing


def job_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Differences of two jobs; if their metrics differ, without what follows from the metrics."""
    differing = differences({"job": there}, {"job": here})
    one, other = (
        [
            name
            for name in job.get("metrics", ())
            if not name.startswith("nonfinite_") and name != "tie_warning"
        ]
        for job in (there, here)
    )
    if one == other:
        return differing
    rest = [
        (name, *values)
        for name, *values in differing
        if not name.startswith(("job.metrics", "job.columns"))
        and not (name.startswith("job.metric_options.") and None in values)
    ]
    return [("job.metrics", one, other), *rest]


def differing_fingerprints(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How two runs' data differ beyond the samples' ids, for a message; empty if they do not.

    Each argument holds a result's ``data`` and ``job``.
    """
    # One run may have hashed whole files, the other their ends.
    same_way = one["job"].get("data_fingerprint") == other["job"].get("data_fingerprint")
    differing = []
    for name, words in (("fingerprint", "labels, sizes or texts"), ("contents", "contents")):
        here, there = one["data"].get(name), other["data"].get(name)
        known = name == "fingerprint" or (here is not None and there is not None and same_way)
        if known and here != there:
            differing.append(f"{words} ({str(here)[:8]}, {str(there)[:8]})")
    return " and ".join(differing)


def listing(differing: Sequence[tuple[str, Any, Any]], there: str, here: str) -> str:
    """Differences in words."""
    # Readable values come before hashes.
    named = sorted(differing, key=lambda item: _is_hash(item[1]) or _is_hash(item[2]))
    shown = [
        f"{_in_words(name) if _is_hash(one) or _is_hash(other) else name}: {_brief(one)} {there}, "
        f"{_brief(other)} {here}"
        for name, one, other in named
    ]
    more = [f"and {len(shown) - _MOST_LISTED} more"] if len(shown) > _MOST_LISTED else []
    return "; ".join(shown[:_MOST_LISTED] + more)


def _in_words(name: str) -> str:
    begin = next((begin for begin in _OF_HASHES if name.startswith(begin)), None)
    return name if begin is None else f"{_OF_HASHES[begin].format(name.removeprefix(begin))} ({name})"


def typed_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    """Where two tasks' ``options()`` differ, in words by name: what people have typed, or left out."""
    named = [name for name in here if name in there and name != "metric"]
    return {
        name: f"--{name.replace('_', '-')} {_as_typed(there[name])} there, {_as_typed(here[name])} now"
        for name in named
        if json.dumps(there[name]) != json.dumps(here[name])
    }


def option_differences(there: Result, here: Result) -> dict[str, list[Any]]:
    """The options that two runs do not share, each with its value in both; and the weights' fingerprints."""
    # A tuple in a job is a list in its file.
    one, other = (json.loads(json.dumps(run.job)) for run in (there, here))
    names = one.keys() & other.keys() - {*_NO_NUMBER}
    options = {name: [one[name], other[name]] for name in names if one[name] != other[name]}
    weights = [run.weights.get("fingerprint") for run in (there, here)]
    if weights[0] != weights[1]:
        options["weights_fingerprint"] = weights
    elif weights[0] is not None:
        options.pop("weights", None)  # another copy of the file
    return dict(sorted(options.items()))


def _as_typed(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "not given"
    return "not given" if value is None else str(value).removeprefix(f"{Path.cwd()}/")


def _brief(value: Any) -> Any:
    if isinstance(value, Mapping):
        return f"{len(value)} values"
    return value[:_SHOWN_OF_HASH] if _is_hash(value) else value


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def structure_hint(differing: Sequence[tuple[str, Any, Any]]) -> str:
    """A sentence if dualeval's files, the layout, the structure or constants differ; else empty."""
    names = [name.removeprefix("job.") for name, _, _ in differing]
    if "source.dualeval" in names:
        return (
            " (source.dualeval is a hash of dualeval's own files: the other one has a different version of "
            "it.)"
        )
    if "layout" in names:
        return (
            " (None is contiguous. If the model's forward fails channels-last on one of the two, give both "
            "--layout contiguous.)"
        )
    if not any(name.startswith(_NAMED) for name in names):
        return ""
    return (
        " (structure.CLASS.NAME is a hash of what the attribute NAME holds in the model's modules of that "
        "class, and constants.CLASS has the values that the methods of CLASS read: a rank, a time or a "
        "random number does not belong there. A class that says dualeval_identity_ignores = "
        '("NAME OF ATTRIBUTE",) leaves out attributes that change no number.)'
    )
