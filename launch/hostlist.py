"""Slurm's short forms: lists of hosts, and of tasks on each node."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

# Text outside brackets, then perhaps a bracket: rack[1-2]n[3-4].
_PIECE = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hosts(text: str) -> list[str]:
    """Write out a list of hosts: ``"n[01-03,7]-ib,login"`` is n01-ib, n02-ib, n03-ib, n7-ib and login.

    Several brackets in a name count like digits, the last one fastest. Numbers keep the width of the range's
    first one.
    """
    return [host for name in _names(text) for host in _expand_name(name)]


def expand_tasks(text: str) -> tuple[int, ...]:
    """Write out the number of tasks on each node: ``"2(x2),1"`` is (2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node, such as '2(x2),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def order_by_component(environ: Mapping[str, str], hosts: list[str]) -> list[str]:
    """Put the hosts of a step in the order of the components of its heterogeneous job.

    Slurm numbers nodes and tasks component by component, but lists the hosts of all in the order of names.
    """
    components = itertools.takewhile(bool, (_component(environ, number) for number in itertools.count()))
    ordered = [host for component in components for host in expand_hosts(component) if host in hosts]
    return ordered if sorted(ordered) == sorted(hosts) else hosts


def _component(environ: Mapping[str, str], number: int) -> str:
    # Both names up to Slurm 22.05, where srun alone sets the older; the newer one since.
    names = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{number}" for kind in ("HET", "PACK"))
    return next((environ[name] for name in names if name in environ), "")


def _names(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    names = re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text)
    if not names or ",".join(names) != text:
        raise ValueError(f"{text!r} is not a list of hosts, such as 'n[01-03,7],login'")
    return names


def _expand_name(name: str) -> list[str]:
    choices: list[list[str]] = []
    end = 0
    while end < len(name):
        match = _PIECE.match(name, end)
        if match is None or match.end() == end:
            raise ValueError(f"{name!r} is not a name of hosts, such as 'n[01-03,7]'")
        choices.append([match[1]])
        if match[2] is not None:
            choices.append([number for part in match[2].split(",") for number in _expand_range(part, name)])
        end = match.end()
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_range(text: str, name: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
    if int(first) > int(last):
        raise ValueError(f"{text!r} in {name!r} is not a range of numbers, such as 01-03")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
