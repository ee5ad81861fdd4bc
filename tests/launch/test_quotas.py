"""Quotas of CPU time, as containers set them: in files of both versions of cgroups, and from the kernel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dualeval.launch.quotas import cpu_quotas
from tests.conftest import BIN, Launch
from tests.requirements import CPU_CGROUPS

CPU = "cpu,cpuacct"


def machine(folder: Path, cgroup: str | None, files: dict[str, str]) -> Path:
    """A folder with the files that the kernel would show; ``files`` below /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    if cgroup is not None:
        (folder / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "files", "quotas"),
    [
        # Docker and Kubernetes with version 2: a namespace of its own, whose root is the container.
        ("0::/\n", {"cpu.max": "400000 100000\n"}, [4.0]),
        ("0::/\n", {"cpu.max": "max 100000\n"}, []),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, [1.5]),
        # A period of its own. The outermost group of a machine has no such file.
        ("0::/user.slice\n", {"user.slice/cpu.max": "50000 20000\n"}, [2.5]),
        ("0::/user.slice\n", {"user.slice/cgroup.procs": "1\n"}, []),
        # Every group around it counts, and others' do not.
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, [2.0]),
        ("0::/pod/box\n", {"pod/cpu.max": "2 1\n", "pod/box/cpu.max": "300000 100000\n"}, [2.0, 3.0]),
        ("0::/pod/box\n", {"pod/other/cpu.max": "2 1\n", "pod/box/cpu.max": "max 100000\n"}, []),
        # The host's namespace, with what is mounted a part of the tree.
        ("0::/docker/ab\n", {"cpu.max": "300000 100000\n"}, [3.0]),
        # A mount from outside the namespace: nobody tells under which name the container is in there.
        ("0::/../../other\n", {"cpu.max": "300000 100000\n"}, [3.0]),
        # Version 1, with Docker: the container's own part is mounted, and named as the host names it.
        (
            "11:cpu,cpuacct:/docker/ab\n10:cpuset:/docker/ab\n1:name=systemd:/docker/ab\n",
            {f"{CPU}/cpu.cfs_quota_us": "250000\n", f"{CPU}/cpu.cfs_period_us": "100000\n"},
            [2.5],
        ),
        (
            "11:cpu,cpuacct:/docker/ab\n0::/\n",
            {f"{CPU}/cpu.cfs_quota_us": "-1\n", f"{CPU}/cpu.cfs_period_us": "100000\n"},
            [],
        ),
        # Version 1, a job of a batch system in groups within groups.
        (
            "4:cpuacct,cpu:/batch/job7\n",
            {
                f"{CPU}/batch/cpu.cfs_quota_us": "6400000\n",
                f"{CPU}/batch/cpu.cfs_period_us": "100000\n",
                f"{CPU}/batch/job7/cpu.cfs_quota_us": "800000\n",
                f"{CPU}/batch/job7/cpu.cfs_period_us": "100000\n",
            },
            [8.0, 64.0],
        ),
        # What says nothing that can be understood.
        ("4:cpu,cpuacct:/\n", {f"{CPU}/cpu.cfs_quota_us": "250000\n"}, []),
        ("0::/\n", {"cpu.max": "100000 0\n"}, []),
        ("0::/\n", {"cpu.max": "many 100000\n"}, []),
        ("garbage\n\n0::/\n", {"cpu.max": "1 2\n"}, [0.5]),
        # Nothing mounted; no cgroups in the kernel.
        ("0::/\n", {}, []),
        (None, {}, []),
    ],
)
def test_cpu_quotas(cgroup: str | None, files: dict[str, str], quotas: list[float], tmp_path: Path) -> None:
    assert sorted(cpu_quotas(machine(tmp_path, cgroup, files)).values()) == quotas


def test_groups_have_names_of_their_own(tmp_path: Path) -> None:
    """Two containers that both take themselves for '/' share nothing; one that is seen in two ways is one."""
    files = {"one/cpu.max": "100000 100000\n", "two/cpu.max": "100000 100000\n"}
    first = machine(tmp_path / "first", "0::/one\n", files)
    seen: list[set[str]] = []
    for name in ("one", "two", "one"):
        folder = machine(tmp_path / str(len(seen)), "0::/\n", {})
        (folder / "sys/fs").mkdir(parents=True)
        (folder / "sys/fs/cgroup").symlink_to(first / "sys/fs/cgroup" / name)
        seen.append(set(cpu_quotas(folder)))
    assert seen[0] == seen[2] == set(cpu_quotas(first))
    assert not seen[0] & seen[1]


@pytest.fixture
def limited() -> Iterator[Path]:
    """A group of the kernel's with the time of one core, and one inside it without a limit of its own."""
    assert CPU_CGROUPS is not None
    outer = CPU_CGROUPS / f"dualeval-test-{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    try:
        if (outer / "cpu.max").exists():
            (outer / "cpu.max").write_text("100000 100000")
        else:
            (outer / "cpu.cfs_quota_us").write_text("100000")
        yield inner
    finally:
        for group in (inner, outer):
            with suppress(FileNotFoundError):
                group.rmdir()


JOIN = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
# As a container is started: the outermost group that it sees is its own.
IS_SECOND = Path("/sys/fs/cgroup/cgroup.subtree_control").exists()
KIND, PLACE = ("cgroup2", "/sys/fs/cgroup") if IS_SECOND else ("cgroup -o cpu", "/sys/fs/cgroup/cpu")
MOUNT = f'umount -l {PLACE} && mount -t {KIND} none {PLACE} && exec "$@"'
ASK = "from dualeval.launch.cores import *; print(usable_cores(), own_cores().quotas)"


@pytest.mark.needs("quotas")
def test_the_kernels_own_quota(limited: Path, launch: Launch) -> None:
    """Threads, and what doctor says of them; and the same group, seen from a namespace like a container's."""
    done = launch(["sh", "-c", JOIN, limited, BIN / "dualeval", "doctor", "--json"])
    facts = json.loads(done.stdout)["ranks"]["0"]
    assert facts["threads"] == 1
    assert list(facts["cpu_quotas"].values()) == [1.0]
    container = ["unshare", "--cgroup", "--mount", "sh", "-c", MOUNT, "sh"]
    done = launch(["sh", "-c", JOIN, limited.parent, *container, sys.executable, "-c", ASK])
    assert done.stdout == f"1 {facts['cpu_quotas']}\n", done.stderr
