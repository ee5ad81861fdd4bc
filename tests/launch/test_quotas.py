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

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:31 {root} /sys/fs/cgroup/cpuset rw,nosuid shared:10 - cgroup cgroup rw,cpuset\n"
)
OTHERS = "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n24 23 0:22 / /dev/shm rw - tmpfs shm rw,size=65536k\n"


def machine(folder: Path, cgroup: str | None, mountinfo: str, files: dict[str, str]) -> Path:
    """A folder with the files that the kernel would show; ``files`` below /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    if cgroup is not None:
        (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "proc/self/mountinfo").write_text(OTHERS + mountinfo)
    for name, content in files.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files", "quotas"),
    [
        # Docker and Kubernetes with version 2: a namespace of its own, whose root is the container.
        ("0::/\n", V2.format(root="/"), {"cpu.max": "400000 100000\n"}, [4.0]),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "max 100000\n"}, []),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "150000 100000\n"}, [1.5]),
        # A period of its own. The outermost group of a machine has no such file.
        ("0::/user.slice\n", V2.format(root="/"), {"user.slice/cpu.max": "50000 20000\n"}, [2.5]),
        ("0::/user.slice\n", V2.format(root="/"), {"user.slice/cgroup.procs": "1\n"}, []),
        # Every group around it counts: a container without a quota, or with a greater one, in a pod with one.
        (
            "0::/pod/box\n",
            V2.format(root="/"),
            {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"},
            [2.0],
        ),
        (
            "0::/pod/box\n",
            V2.format(root="/"),
            {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "300000 100000\n"},
            [2.0, 3.0],
        ),
        # Others' quotas do not.
        (
            "0::/pod/box\n",
            V2.format(root="/"),
            {"pod/other/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"},
            [],
        ),
        # The host's namespace, with what is mounted a part of the tree.
        ("0::/docker/ab\n", V2.format(root="/docker/ab"), {"cpu.max": "300000 100000\n"}, [3.0]),
        ("0::/docker/ab/c\n", V2.format(root="/docker/ab"), {"c/cpu.max": "300000 100000\n"}, [3.0]),
        # A mount from outside the namespace: nobody tells under which name the container is in there.
        ("0::/\n", V2.format(root="/.."), {"cpu.max": "300000 100000\n"}, [3.0]),
        ("0::/../../other\n", V2.format(root="/"), {"cpu.max": "300000 100000\n"}, [3.0]),
        # Version 1, with Docker: the container's own part is mounted, and named as the host names it.
        (
            "11:cpu,cpuacct:/docker/ab\n10:cpuset:/docker/ab\n1:name=systemd:/docker/ab\n",
            V1.format(root="/docker/ab"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            [2.5],
        ),
        (
            "11:cpu,cpuacct:/docker/ab\n0::/\n",
            V1.format(root="/docker/ab"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            [],
        ),
        # Version 1, a job of a batch system in groups within groups.
        (
            "4:cpuacct,cpu:/batch/job7\n",
            V1.format(root="/"),
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/batch/cpu.cfs_quota_us": "6400000\n",
                "cpu,cpuacct/batch/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/batch/job7/cpu.cfs_quota_us": "800000\n",
                "cpu,cpuacct/batch/job7/cpu.cfs_period_us": "100000\n",
            },
            [8.0, 64.0],
        ),
        # A name with a blank, as mountinfo writes it.
        ("0::/a b/c\n", V2.format(root="/a\\040b"), {"c/cpu.max": "100000 100000\n"}, [1.0]),
        # What says nothing that can be understood.
        ("4:cpu,cpuacct:/\n", V1.format(root="/"), {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n"}, []),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "100000 0\n"}, []),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "many 100000\n"}, []),
        ("garbage\n\n0::/\n", "x\n\ny - cgroup2\n" + V2.format(root="/"), {"cpu.max": "1 2\n"}, [0.5]),
        # Nothing mounted; no cgroups in the kernel.
        ("0::/\n", "", {}, []),
        (None, "", {}, []),
    ],
)
def test_cpu_quotas(
    cgroup: str | None, mountinfo: str, files: dict[str, str], quotas: list[float], tmp_path: Path
) -> None:
    assert sorted(cpu_quotas(machine(tmp_path, cgroup, mountinfo, files)).values()) == quotas


def test_names_of_mounts_in_any_encoding(tmp_path: Path) -> None:
    folder = machine(tmp_path, "0::/\n", "", {})
    line = b"29 23 0:26 / /cgr\xe9up rw - cgroup2 cgroup2 rw\n"
    (folder / "proc/self/mountinfo").write_bytes(b"24 23 0:22 / /mnt/m\xe9x rw - tmpfs none rw\n" + line)
    group = folder / os.fsdecode(b"cgr\xe9up")
    group.mkdir()
    (group / "cpu.max").write_text("300000 100000\n")
    assert list(cpu_quotas(folder).values()) == [3.0]


def test_groups_have_names_of_their_own(tmp_path: Path) -> None:
    """Two containers that both take themselves for '/' share nothing; one that is seen in two ways is one."""
    files = {"one/cpu.max": "100000 100000\n", "two/cpu.max": "100000 100000\n"}
    first = machine(tmp_path / "first", "0::/one\n", V2.format(root="/"), files)
    seen: list[set[str]] = []
    for name in ("one", "two", "one"):
        folder = machine(tmp_path / str(len(seen)), "0::/\n", V2.format(root="/"), {})
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
KIND = "cgroup2" if Path("/sys/fs/cgroup/cgroup.subtree_control").exists() else "cgroup -o cpu"
MOUNT = f'mount -t {KIND} none "$0" && exec "$@"'
ASK = "from dualeval.launch.cores import *; print(usable_cores(), own_cores().quotas)"


@pytest.mark.needs("quotas")
def test_the_kernels_own_quota(limited: Path, launch: Launch, tmp_path: Path) -> None:
    """Threads, and what doctor says of them; and the same group, seen from a namespace like a container's."""
    done = launch(["sh", "-c", JOIN, limited, BIN / "dualeval", "doctor", "--json"])
    facts = json.loads(done.stdout)["ranks"]["0"]
    assert facts["threads"] == 1
    assert list(facts["cpu_quotas"].values()) == [1.0]
    container = ["unshare", "--cgroup", "--mount", "sh", "-c", MOUNT]
    done = launch(["sh", "-c", JOIN, limited.parent, *container, tmp_path, sys.executable, "-c", ASK])
    assert done.stdout == f"1 {facts['cpu_quotas']}\n", done.stderr
