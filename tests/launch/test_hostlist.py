"""Slurm's short forms of hosts and tasks, against what ``scontrol show hostnames`` prints for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualeval.launch.hostlist import expand_hosts, expand_tasks


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h0", ["h0"]),
        ("h[0-1]", ["h0", "h1"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("n[01-04,7]-ib", ["n01-ib", "n02-ib", "n03-ib", "n04-ib", "n7-ib"]),
        ("login,n[9-11],gpu-a[099-101].cluster", ["login", "n9", "n10", "n11"]
         + [f"gpu-a{n}.cluster" for n in ("099", "100", "101")]),
        ("a[1,3-4,08]", ["a1", "a3", "a4", "a08"]),
        ("r[1-2]-[1-2]x", ["r1-1x", "r1-2x", "r2-1x", "r2-2x"]),
    ],
)  # fmt: skip
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "n[", "n[1-", "n]", "n[]", "n[a]", "n[1-2", "n[3-1]", "n[1--2]"]
)
def test_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of hosts|not a name of hosts|not a range of numbers"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "tasks"), [("1", (1,)), ("1(x2)", (1, 1)), ("2(x2),1", (2, 2, 1)), ("3,1(x2),16", (3, 1, 1, 16))]
)
def test_tasks(text: str, tasks: tuple[int, ...]) -> None:
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x2", "2(x2", "-1", "1,,2", "1.5"])
def test_no_tasks(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of tasks per node"):
        expand_tasks(text)


@given(st.lists(st.text("abz-.019", min_size=1, max_size=5), min_size=1, max_size=5))
def test_names_without_brackets_stay(names: list[str]) -> None:
    assert expand_hosts(",".join(names)) == names


@given(st.text("n[]-,012", max_size=12))
def test_any_text_is_hosts_or_a_value_error(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert hosts
    assert not any(set("[],") & set(host) for host in hosts)
