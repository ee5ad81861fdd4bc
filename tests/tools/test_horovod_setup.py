"""``dualeval setup-horovod``: the cache, the steps, what is said; with a false pip, and with the true one."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import sysconfig
import textwrap
from pathlib import Path
from time import monotonic

import pytest
import torch
from click.testing import CliRunner

from dualeval.tools.horovod.setup import cache_folder, excerpt, hint, setup_horovod
from tests.conftest import Launch
from tests.engine.end.test_endings import await_that
from tests.vehicles.horovod_bench import COMMAND, Bench, programs

# Where these tests run under nohup or in a shell's background, some signals come to them ignored.
HEARD = ["env", "--default-signal=HUP,INT,TERM"]

# The cache.


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/me"}, "/me/.cache/dualeval/horovod"),
        ({"HOME": "/me", "XDG_CACHE_HOME": "/cache"}, "/cache/dualeval/horovod"),
        ({"HOME": "/me", "XDG_CACHE_HOME": ""}, "/me/.cache/dualeval/horovod"),
    ],
)
def test_the_cache_folder_follows_from_the_environment(environ: dict[str, str], expected: str) -> None:
    assert cache_folder(environ) == Path(expected)


# What is said of a failure.


def test_excerpt_has_the_first_error_and_the_end() -> None:
    noise = [f"line {number}" for number in range(50)]
    lines = excerpt("\n".join(["fine", "a.cc:1: error: no such thing", "  detail", *noise])).splitlines()
    assert lines[:2] == ["  | a.cc:1: error: no such thing", "  |   detail"]
    assert lines[-1] == "  | line 49"
    assert len(lines) < 20
    assert excerpt("\n".join(noise)).splitlines() == [f"  | {line}" for line in noise[-8:]]
    assert excerpt("CMake Error at x\n  reason") == "  | CMake Error at x\n  |   reason"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("cc1plus: fatal: No space left on device", "TMPDIR"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "MAKEFLAGS=-j1"),
        ("ERROR: No matching distribution found for horovod==0.28.1", "pip download"),
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "--without-mpi"),
        ("pyport.h:1:10: fatal error: Python.h: No such file or directory", "apt install python3-dev"),
        ('CMake was unable to find a build program corresponding to "Unix Makefiles".', "gcc make"),
        ("something else", "first error"),
    ],
)
def test_an_error_in_the_log_has_its_hint(log: str, words: str) -> None:
    assert words in hint(log)


# The command, with a false pip that takes no time.


@pytest.fixture
def bench(tmp_path: Path, launch: Launch) -> Bench:
    return Bench(tmp_path, launch)


def test_a_wheel_is_built_once_and_then_taken_from_the_cache(bench: Bench) -> None:
    built = bench().ok()
    assert re.search(r"MPI +Open MPI 4\.1\.4", built.stdout)
    assert re.search(r"takes \d+ to \d+ min, and more on a busy machine", built.stdout)
    assert "Horovod 0.28.1 is installed (gloo, Open MPI 4.1.4, no NCCL)." in built.stdout
    assert bench.calls() == ["download", "wheel", "install"]
    [entry] = bench.entries()
    assert {file.name for file in entry.iterdir()} >= {"build.json", "build.log"}
    record = json.loads((entry / "build.json").read_text())
    assert record["torch"]["version"] == torch.__version__
    assert (bench.site / "horovod/torch/__init__.py").exists()

    again = bench().ok()
    assert again.stdout.startswith("Nothing to do")
    assert bench.calls() == []

    shutil.rmtree(bench.site / "horovod")
    shutil.rmtree(bench.site / "horovod-0.28.1.dist-info")
    cached = bench().ok()
    assert f"Installing the wheel in {entry}" in cached.stdout
    assert bench.calls() == ["install"]
    assert list(bench.temporary.iterdir()) == []


def test_another_horovod_is_replaced(bench: Bench) -> None:
    """Whether it is another build of the same version, or one that does not load."""
    assert bench().returncode == 0
    [library] = bench.site.glob("horovod/torch/*.so")
    bench.calls()
    for damaged in (library, bench.site / "horovod/torch/__init__.py"):
        damaged.write_text("not it")
        assert bench().returncode == 0
        assert bench.calls() == ["install"]
        assert bench().stdout.startswith("Nothing to do")


def test_what_its_ranks_need_is_installed_with_it(bench: Bench) -> None:
    """And again where it was taken away since, by the same command."""
    bench.hide("mpi4py")
    assert bench("--without-mpi").returncode == 0
    assert bench.calls() == ["download", "wheel", "install"]
    for expected in (["install", "download", "wheel", "install"], ["install", "install"]):
        done = bench().ok()
        assert "Installing mpi4py." in done.stdout
        assert bench.calls() == expected
        assert bench().stdout.startswith("Nothing to do")
        (bench.site / "mpi4py-1.dist-info").rmdir()


def test_other_options_build_another_wheel(bench: Bench) -> None:
    assert bench().returncode == 0
    without = bench("--without-mpi")
    assert "installed (gloo, no MPI, no NCCL)" in without.stdout
    assert bench.calls() == ["download", "wheel", "install"] * 2
    assert len(bench.entries()) == 2
    assert bench("--without-mpi", "--rebuild").returncode == 0
    assert bench.calls() == ["download", "wheel", "install"]
    assert len(bench.entries()) == 2
    # Found again without asking: there is an MPI.
    assert "Installing the wheel in" in bench().stdout


def test_constraint_reaches_every_install(bench: Bench) -> None:
    (bench.folder / "pins.txt").write_text("cffi==2\n")
    assert bench("--constraint", "pins.txt").returncode == 0
    calls = [json.loads(line)[0] for line in (bench.site / "calls").read_text().splitlines()]
    installs = [call for call in calls if "install" in call]
    assert installs
    for call in installs:
        assert call[call.index("--constraint") + 1] == str(bench.folder / "pins.txt")
    assert bench("--constraint", "none.txt").returncode == 2


def test_a_dry_run_does_nothing(bench: Bench) -> None:
    done = bench("--dry-run").ok()
    key = re.search(r"^key: ([0-9a-f]{64})", done.stdout, re.MULTILINE)
    assert key is not None
    for word in (
        *("pip", "download", "wheel", "--force-reinstall", '"compiler": "c++ 12.2"', "in the cache: no"),
    ):
        assert word in done.stdout
    assert bench.calls() == []
    assert bench.entries() == []
    assert not bench.cache.exists()
    bench()
    after = bench("--dry-run").stdout
    assert "in the cache: yes" in after
    assert "installed: yes" in after
    assert key[0] in after


def test_all_that_is_missing_is_named_at_once(bench: Bench) -> None:
    """Before anything is begun; also by a dry run."""
    empty = programs(bench.folder / "empty", cmake="echo cmake version 3.12.4")
    said = ["apt install g++", f"3.12.4 in {empty}/cmake", "apt install openmpi-bin libopenmpi-dev"]
    said += ["MPI, for --with-mpi: ", "NCCL, for --with-nccl: ", "nothing was started"]
    for option in ("--rebuild", "--dry-run"):
        done = bench(option, "--with-mpi", "--with-nccl", variables={"PATH": str(empty)})
        assert done.returncode == 2
        assert [words for words in said if words not in done.stderr] == []
        assert bench.calls() == []
        assert not bench.cache.exists()


def test_a_compiler_too_old_for_torch_is_refused(bench: Bench) -> None:
    programs(bench.programs, **{"c++": 'case $1 in --version) echo "c++ 7.5";; *) exit 1;; esac'})
    done = bench()
    assert done.returncode == 2
    assert "CXX" in done.stderr
    assert re.search(r"a compiler for C\+\+\d+, which torch .* needs \(found c\+\+ 7\.5\)", done.stderr)


def test_a_cache_that_cannot_be_made_is_refused(bench: Bench) -> None:
    bench.cache.touch()
    done = bench()
    assert done.returncode == 2
    assert "--cache" in done.stderr
    (bench.folder / ".cache").touch()
    done = bench.launch(COMMAND, variables=bench.variables)
    assert done.returncode == 2
    assert f"The cache {bench.folder}/.cache/dualeval/horovod cannot be made" in done.stderr


@pytest.mark.parametrize("step", ["download", "wheel", "install"])
def test_a_failing_step_shows_its_error_and_the_log(step: str, bench: Bench) -> None:
    (bench.site / "fail").write_text(step)
    done = bench()
    assert done.returncode == 1
    assert "ended with exit code 3" in done.stderr
    assert "x.cc:7: error: 'at' is not a member of 'torch'" in done.stderr
    log = re.search(r"^Full log: (.+)$", done.stderr, re.MULTILINE)
    assert log is not None
    assert "not a member" in Path(log[1]).read_text()
    assert list(bench.temporary.iterdir()) == []
    folders = [entry for entry in bench.entries() if entry.is_dir()]
    assert len(folders) == (step == "install"), "a wheel that was built is kept"


def test_another_source_is_refused(bench: Bench) -> None:
    tree = bench.folder / "horovod-0.28.1"
    (tree / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 17)\n")
    bench.source(tree)
    done = bench()
    assert done.returncode == 1
    assert "not the source of Horovod 0.28.1: its CMakeLists.txt" in done.stderr
    assert bench.calls() == ["download"]
    assert bench.entries() == []
    assert list(bench.temporary.iterdir()) == []


def test_a_build_without_what_was_wanted_is_found_out(bench: Bench) -> None:
    """And its wheel is not kept: the next set-up would take it for right."""
    pip = bench.site / "pip/__main__.py"
    pip.write_text(pip.read_text().replace('os.environ.get("HOROVOD_WITH_MPI", "0")', '"0"'))
    done = bench()
    assert done.returncode == 1
    assert (
        "built with gloo True, MPI False, NCCL False; expected gloo True, MPI True, NCCL False" in done.stderr
    )
    assert bench.entries() == []


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGINT, "install"), (signal.SIGTERM, "install"), (signal.SIGHUP, "wheel")]
)
def test_an_interrupted_setup_leaves_nothing(number: signal.Signals, step: str, bench: Bench) -> None:
    """All that was started ends (``launch`` looks), pip puts back what it replaces, and no folder stays."""
    (bench.site / "wait").write_text(step)
    command = [*HEARD, *COMMAND, "--cache", bench.cache]
    with bench.launch.started(command, variables=bench.variables) as process:
        await_that((bench.site / "waiting").exists, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert (bench.site / "rolled back").exists()
    assert list(bench.temporary.iterdir()) == []
    assert len(bench.entries()) == (step == "install"), "a wheel that was built is kept"


# The true pip and the true source.


@pytest.fixture
def environment(tmp_path: Path, launch: Launch) -> Path:
    """A new virtual environment with links to all packages of this one, save Horovod; returns its Python."""
    folder = tmp_path / "environment"
    assert launch([sys.executable, "-m", "venv", "--without-pip", folder]).returncode == 0
    [packages] = folder.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith("horovod"):
            (packages / package.name).symlink_to(package)
    return folder / "bin/python"


HOROVOD_IS_WHERE = textwrap.dedent("""
    import horovod.torch as hvd
    hvd.init()
    assert hvd.size() == 1
    print(hvd.__file__, hvd.gloo_built(), hvd.mpi_built())
""")


@pytest.mark.long
@pytest.mark.needs("horovod")
def test_a_second_environment_takes_seconds(environment: Path, tmp_path: Path, launch: Launch) -> None:
    """From the user's own cache, where ``make horovod`` has put it."""
    if "in the cache: yes" not in CliRunner().invoke(setup_horovod, ["--dry-run"]).output:
        pytest.skip("the cache has no wheel for this machine; type: make horovod")
    begin = monotonic()
    done = launch([environment, "-m", "dualeval", "setup-horovod"], cwd=tmp_path)
    seconds = monotonic() - begin
    assert done.returncode == 0, done.stderr
    assert "Installing the wheel in" in done.stdout
    assert seconds < 60
    found = launch([environment, "-c", HOROVOD_IS_WHERE], cwd=tmp_path)
    assert str(tmp_path / "environment") in found.stdout, found.stderr
    again = launch([environment, "-m", "dualeval", "setup-horovod"], cwd=tmp_path)
    assert again.stdout.startswith("Nothing to do")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mpi", [pytest.param(True, marks=pytest.mark.needs("mpi")), False], ids=["with MPI", "without MPI"]
)
def test_horovod_is_built_from_source(mpi: bool, environment: Path, tmp_path: Path, launch: Launch) -> None:
    command: list[str | Path] = [
        *(environment, "-m", "dualeval", "setup-horovod", "--cache", tmp_path / "cache")
    ]
    command.append("--with-mpi" if mpi else "--without-mpi")
    launch(command, timeout=1500, cwd=tmp_path).ok()
    found = launch([environment, "-c", HOROVOD_IS_WHERE], cwd=tmp_path)
    assert found.stdout.split() == [
        str(next(environment.parent.parent.glob("lib/python*/site-packages/horovod/torch/__init__.py"))),
        "True",
        str(mpi),
    ], found.stderr
    assert launch(command, cwd=tmp_path).stdout.startswith("Nothing to do")
