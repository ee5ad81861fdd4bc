"""``dualeval conformance``: what it makes of its runs, what it shares, and real runs."""

from __future__ import annotations

import copy
import getpass
import itertools
import json
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner

from dualeval.cli import dualeval
from dualeval.errors import EXIT_USAGE, DualevalError, LaunchError, UsageError
from dualeval.launch.site import Node, Site
from dualeval.report.anonymous import Names
from dualeval.tools.conformance.command import _Runs
from dualeval.tools.conformance.page import agrees, judge, judge_self_test, page, summary
from dualeval.tools.node_facts import _nodes_of_job
from dualeval.tools.starts import Ended, Interrupts, Start, ask, run_supervised
from tests.conftest import BIN, ROOT, Launch

CONFORMANCE: list[str | Path] = [BIN / "dualeval", "conformance"]
MACHINE = {"device": "cpu", "model": "Xeon", "cpu_capability": "AVX512", "bits": "31a2", "versions": {}}
OTHER = {**MACHINE, "model": "EPYC", "bits": "77b0"}


def found(digest: str = "aa" * 32, loss: float = 0.19, size: int = 1, **changes: Any) -> dict[str, Any]:
    """What a run has found."""
    backend = "single" if size == 1 else "torch"
    return {
        "metrics_digest": digest,
        "samples_digest": "5a" * 32,
        "metrics": {"loss": loss, "top1": 0.93, "top5": 1.0},
        "samples": {"total": 2000, "evaluated": 2000, "failed": 0},
        "resumed": 0,
        "world": {"size": size, "nodes": 1, "launcher": "none", "backend": backend},
        "homogeneous": True,
        "machines": [MACHINE],
        **changes,
    }


WANTED = {"ranks": 2, "nodes": 1, "backend": "torch"}


@pytest.mark.parametrize(
    ("result", "outcome", "reason"),
    [
        (found(size=2), "ok", None),
        (found("bb" * 32, 0.2, size=2), "digest differs", "on the same model of machine: loss 0.2, not 0.19"),
        (
            found("bb" * 32, size=2),
            "digest differs",
            "on the same model of machine: another metric than loss, top1 and top5",
        ),
        (found(size=2, samples_digest="0b" * 32), "digest differs", f"samples_digest {'0b' * 32}, not 5a5a"),
        # Each process took itself for the only one.
        (found(size=1), "failed", "size 2 was started, and the result says 1"),
        (
            found(size=2, world={"size": 2, "nodes": 2, "backend": "torch"}),
            "failed",
            "nodes 1 was started, and the result says 2",
        ),
        (
            found(size=2, samples={"total": 2000, "evaluated": 1999, "failed": 1}),
            "failed",
            "2,000 samples should have been evaluated",
        ),
        (found(size=2, resumed=3), "failed", "2,000 samples should have been evaluated"),
        # The same digest by chance or by another machine's bits: said, and compared to tolerance.
        (found("bb" * 32, 0.1903, size=2, machines=[OTHER]), "agrees to tolerance", "at most 3.0e-04"),
        (found("bb" * 32, 0.192, size=2, machines=[OTHER]), "differs beyond tolerance", "at most 2.0e-03"),
        (
            found(size=2, machines=[MACHINE, OTHER], homogeneous=False),
            "agrees to tolerance",
            "another model of machine",
        ),
    ],
)
def test_a_start_is_judged_with_its_reason(result: dict[str, Any], outcome: str, reason: str | None) -> None:
    said = judge(result, WANTED, 2000, found())
    assert said[0] == outcome
    assert (said[1] is None) if reason is None else (reason in str(said[1]))


def test_the_reference_is_compared_with_what_was_started_alone() -> None:
    alone = {"ranks": 1, "nodes": 1, "backend": "single"}
    assert judge(found(), alone, 2000, None) == ("ok", None)
    assert judge(found(), alone, 1000, None)[0] == "failed"


def test_a_self_test_fails_by_a_wrong_operation_or_a_missing_rank() -> None:
    ranks = {str(rank): {"rank": rank, "operations": {"gather": None, "barrier": None}} for rank in (0, 1)}
    report: dict[str, Any] = {"size": 2, "ranks": ranks, "problems": []}
    assert judge_self_test(report) == ("ok", None)
    wrong = copy.deepcopy(report)
    wrong["ranks"]["1"]["operations"]["gather"] = "got 1"
    assert judge_self_test(wrong) == ("failed", "gather is wrong on rank 1: got 1")
    untried = {**report, "size": 3, "problems": ["rank 2 did not report within 20 s"]}
    assert judge_self_test(untried) == ("failed", "rank 2 did not report within 20 s")


def row(outcome: str, launcher: str = "torchrun", ranks: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "launcher": launcher,
        "backend": "torch",
        "ranks": ranks,
        "nodes": 1,
        "device": "cpu",
        "outcome": outcome,
        "reason": None,
        "last_lines": [],
        "seconds": 3.25,
        "command": f"{launcher} -np {ranks} dualeval run",
        "found": found(size=ranks),
        **changes,
    }


def report(*runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    node = {
        "name": "node1",
        "cpu": "Xeon",
        "cpu_capability": "AVX512",
        "cores": 64,
        "gpus": [{"model": "H100", "memory_gib": 79.6}] * 4,
        "driver": "570.1",
    }
    return {
        "schema_version": 1,
        "when": "2026-11-22 01:00 UTC",
        "options": {"launchers": None, "ranks": None, "device": None, "limit": 2000, "timeout_s": 120.0},
        "site": {"scheduler": "slurm 23.11", "nodes": [node, {**node, "name": "node2"}]},
        "versions": {"dualeval": "0.1.0", "NCCL of torch": "2.27.5", "mpi4py": None},
        "references": [row("ok", "none", 1)],
        "runs": list(runs),
        "self_tests": [],
        "interrupted": False,
        **changes,
    }


ABSENT = row("not here", "horovodrun", 2, reason="Horovod is built without MPI", found=None, seconds=None)
BROKEN = row("failed", "mpirun", 2, found=None, reason="exit code 3", last_lines=["no | slots", "```"])


@pytest.mark.parametrize(
    ("content", "good"),
    [
        (report(row("ok"), row("agrees to tolerance"), ABSENT), True),
        (report(row("ok"), row("digest differs")), False),
        (report(row("ok"), BROKEN), False),
        (report(row("ok"), row("timed out")), False),
        (report(row("ok"), self_tests=[row("failed")]), False),
        (report(row("ok"), interrupted=True), False),
        (report(row("not run"), references=[row("failed", "none", 1)]), False),
        # Asked for by name, and not here.
        (report(row("ok"), ABSENT, options={"launchers": ["torchrun"], "limit": 9}), True),
        (report(row("ok"), ABSENT, options={"launchers": ["torchrun", "horovodrun"], "limit": 9}), False),
    ],
)
def test_a_report_agrees_unless_a_run_or_self_test_does_not(content: dict[str, Any], good: bool) -> None:
    assert agrees(content) is good


def test_the_page_has_a_table_of_launchers_and_each_failure() -> None:
    text = page(report(row("ok"), row("ok", ranks=8), BROKEN, ABSENT))
    assert text.startswith("# dualeval conformance\n\n**Does not agree.** 2 of 3 runs have the bits of one ")
    assert "| launcher | backend | device | 2 ranks | 8 ranks |" in text
    assert "| torchrun | torch | cpu | ok, 3.2 s | ok, 3.2 s |" in text
    assert "| mpirun | torch | cpu | **failed**, 3.2 s | - |" in text
    assert "### failed: mpirun, torch, 2 ranks, cpu (run)\n\nexit code 3\n\n`mpirun -np 2 dua" in text
    assert "\n\n```\nno | slots\n'''\n```" in text
    assert "- horovodrun (torch; 2 ranks): Horovod is built without MPI." in text
    assert "| node2 | Xeon (AVX512) | 64 | 4 x H100, 80 GiB | 570.1 |" in text
    assert "| NCCL of torch | 2.27.5 |" in text
    assert "mpi4py" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for line, following in itertools.pairwise(rows):
        if following.startswith("|---"):
            assert line.count("|") == following.count("|")


def test_the_speed_of_several_devices_is_shown() -> None:
    """Self-tests on host and device tensors are timed apart."""
    speed = {"latency_us": 12.0, "bandwidth_gb_s": 1.5}
    test = {**row("ok"), "operations": {"gather": True}}
    text = page(report(row("ok"), self_tests=[{**test, "speed": {"cpu": speed, "cuda": speed}}]))
    assert "| 1 right | cpu: 12 us for 8 bytes, 1.50 GB/s at 64 MiB; cuda: 12 us" in text


def test_nothing_compared_does_not_agree() -> None:
    said = (
        "Nothing was compared. 0 of 0 runs have the bits of one process. 0 of 0 self-tests of backends are "
    )
    assert summary(report()) == f"{said}right."
    assert not agrees(report())


NAMES = Names(
    folders={"/scratch/ada/runs/c1": "OUT", "/home/ada/env": "ENV"},
    homes=("/users/ada",),
    hosts={"gpu01.site.org": "node1", "gpu01": "node1", "gpu-a100-02": "node2", "h0": "node3", "vm": "node4"},
    users=("ada",),
)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        # Hosts of the run, in any case, with any domain, beside other words; and others of the same cluster.
        ("slurmstepd-h0: error: *** STEP 2.2 ON gpu01", "slurmstepd-node3: error: *** STEP 2.2 ON node1"),
        ("GPU01, Gpu01.Site.Org, gpu01.other.org.", "node1, node1, node1."),
        ("at h0:\\ngpu01\\r \x1b[31mh0\x1b[0m", "at node3:\\nnode1\\r node3"),
        ("gpu02, gpu-a100-17, license.site.org", "another-host, another-host, another-host"),
        ("nodes gpu[01-02,07],h[0-1] and gpu-a100-[01", "nodes HOSTS,HOSTS and HOSTS"),
        ("-H gpu01:2,vm:2", "-H node1:2,node4:2"),
        # No hosts.
        ("Open MPI 4.1.4, torch 2.13.0+cpu, hdf5, vmlinux, run --vm x", None),
        ("digest 9f0ch07e1 eccb6c44204111a5 at 12:30:05, std::runtime_error", None),
        # Addresses, but those of this machine.
        ("connect to 10.77.0.11. From fd77::11.", "connect to ADDRESS. From ADDRESS."),
        ("peer:10.77.0.11 peer:fd77::11: refused", "peer:ADDRESS peer:ADDRESS: refused"),
        ("[::ffff:10.77.0.11]:29500 ::ffff:127.0.0.1", "[ADDRESS]:29500 ::ffff:127.0.0.1"),
        ("10.77.0.11_x 10.77.0.11.29500 10.77.0.11/24", "ADDRESS_x ADDRESS.29500 ADDRESS/24"),
        ("port 02:42:ac:11:00:02 is down", "port ADDRESS is down"),
        ("::1 0.0.0.0 127.0.0.1 c10::Error std::fd::add", None),
        # Folders and persons.
        ("in /scratch/ada/runs/c1/logs/003.err", "in OUT/logs/003.err"),
        ("/home/ada/env/bin/torchrun: not found", "ENV/bin/torchrun: not found"),
        ("/home/ada/env2/bin", "~/.../bin"),
        ('File "/users/ada/secret project/a.py", line 3', 'File "~/.../a.py", line 3'),
        ("/home/bob smith/a, b/c: denied", "~/.../c: denied"),
        ("/export/home/bob/secret/x in /Users/ada/x", "~/.../x in ~/.../x"),
        ("/users/ada/bin/mpirun --out runs/1", "~/.../mpirun --out runs/1"),
        ("cd /root; ls /rootfs", "cd ~; ls /rootfs"),
        ("ada@gpu01: /scratch/ada_1/x, adagrad", "USER@node1: /scratch/USER_1/x, adagrad"),
    ],
)
def test_folders_hosts_and_addresses_are_taken_out(text: str, cleaned: str | None) -> None:
    assert NAMES.clean(text) == (text if cleaned is None else cleaned)


def test_hosts_that_have_the_reports_own_names_are_not_mixed_up() -> None:
    names = Names(folders={}, hosts={"node2": "node1", "node1": "node2"})
    assert names.clean("node1 waits for node2 and node3") == "node2 waits for node1 and another-host"


@pytest.mark.parametrize("address", ["10.1.2.3", "fd77::11"])
def test_an_address_that_names_a_host_takes_no_number_out(address: str) -> None:
    names = Names(folders={}, hosts={address: "node1", address.partition(".")[0]: "node1"})
    assert names.clean(f"10 ranks at {address}") == "10 ranks at ADDRESS"


def shared(folder: Path) -> dict[str, Any]:
    """The report; it, and its page, name nobody."""
    texts = [(folder / f"conformance.{kind}").read_text("utf-8") for kind in ("json", "md")]
    private = {socket.gethostname(), str(Path.home()), str(folder.parent), str(BIN.parent.parent)}
    if getpass.getuser() != "root":
        private.add(getpass.getuser())
    for text in texts:
        for word in private:
            assert not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), word
    content: dict[str, Any] = json.loads(texts[0])
    assert texts[1] == page(content)
    return content


def outcomes(content: dict[str, Any]) -> list[tuple[str, str, int, str]]:
    return [(run["launcher"], run["backend"], run["ranks"], run["outcome"]) for run in content["runs"]]


@pytest.mark.needs("mpi")
def test_a_broken_launcher_is_reported_without_names_of_the_site(launch: Launch, tmp_path: Path) -> None:
    """A site's own wrapper around mpirun, say."""
    stub = tmp_path / "bin/mpirun"
    stub.parent.mkdir()
    stub.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exit\n"
        f"echo no route to {socket.gethostname()}, {ROOT}/a.py >&2; exit 3\n"
    )
    stub.chmod(0o755)
    words = ["--launchers", "mpirun,srun", "--ranks", "1", "--limit", "64", "--out", "report"]
    path = f"{stub.parent}{os.pathsep}{os.environ['PATH']}"
    done = launch([*CONFORMANCE, *words], cwd=tmp_path, variables={"PATH": path})
    assert done.returncode == 1
    content = shared(tmp_path / "report")
    broken = [run for run in content["runs"] if run["launcher"] == "mpirun" and run["backend"] == "mpi"]
    assert [(run["outcome"], run["reason"]) for run in broken] == [("failed", "exit code 3")]
    assert broken[0]["last_lines"] == ["no route to node1, DUALEVAL/a.py"]
    absent = {run["reason"] for run in content["runs"] if run["launcher"] == "srun"}
    assert len(absent) == 1, absent


@pytest.mark.long
def test_an_interrupted_conformance_leaves_a_report_and_nothing_else(launch: Launch, tmp_path: Path) -> None:
    words = ["--launchers", "nproc", "--ranks", "2", "--limit", "64", "--out", "report"]
    with launch.started([*CONFORMANCE, *words], cwd=tmp_path) as process:
        assert process.stdout is not None
        assert "ok" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted by SIGINT" in said
    content = shared(tmp_path / "report")
    assert content["interrupted"] and len(content["references"]) == 1
    assert "**Does not agree.** Interrupted." in (tmp_path / "report/conformance.md").read_text()


def test_a_signal_as_the_last_start_ends_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends_with_a_signal(*words: Any, **options: Any) -> Ended:
        os.kill(os.getpid(), signal.SIGINT)
        options["stderr"].touch()
        options["stdout"].touch()
        return Ended(code=3, seconds=1.0, how="exit code 3")

    monkeypatch.setattr("dualeval.tools.starts.run_supervised", ends_with_a_signal)
    site, handler = Site(nodes=(Node(host="box", cores=2),)), signal.getsignal(signal.SIGINT)
    header = {name: report()[name] for name in ("schema_version", "when", "options", "site", "versions")}
    with Interrupts() as interrupts:
        runs = _Runs(
            folder=tmp_path / "out",
            environ=os.environ,
            interrupts=interrupts,
            timeout_s=60,
            limit=64,
            site=site,
            names=Names(folders={}, hosts={}),
            header=header,
        )
        content = runs.run([replace(Start.on(site, "none", "single", 1, "cpu"), is_reference=True)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert content["interrupted"] and content["references"][0]["reason"] == "exit code 3"
    assert "interrupted by SIGINT; what was run until then is reported" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/conformance.json").read_text()) == content


def typed(*words: str, **variables: str) -> Any:
    return CliRunner().invoke(dualeval, ["conformance", *words], env=variables, obj=[])


def test_a_dry_run_prints_the_commands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = typed("--dry-run", "--launchers", "torchrun", "--ranks", "2", PATH=path)
    assert done.stdout.splitlines()[:2] == [
        "dualeval run --launcher none --device cpu --limit 2000 --out OUT/runs/000",
        "torchrun --standalone --nproc-per-node=2 --no-python dualeval run --backend torch --device cpu "
        "--limit 2000 --out OUT/runs/001",
    ]
    assert list(tmp_path.iterdir()) == []


OF_RANK_0 = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--ranks", "1,two"], {}, "expected whole numbers of at least 1 with commas between"),
        (
            [],
            {f"OMPI_COMM_WORLD_{name}": size for name, size in OF_RANK_0.items()},
            "openmpi started this process as rank 0 of 2, and 'dualeval conformance' starts all launchers",
        ),
        # A job's shell, of which half is missing; srun is there or not.
        ([], {"RANK": "1"}, "torchrun's variables are half set"),
    ],
)
def test_wrong_use_has_its_code_and_message(words: list[str], variables: dict[str, str], said: str) -> None:
    done = typed(*words, **variables)
    code = done.exception.exit_code if isinstance(done.exception, DualevalError) else done.exit_code
    assert code == EXIT_USAGE
    assert said in str(done.exception) + done.output


@pytest.mark.parametrize(
    ("out", "said"), [("file", "this is not a folder"), ("file/new", "file is not a folder")]
)
def test_a_folder_that_cannot_be_made_is_refused(out: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = typed("--dry-run", "--out", str(tmp_path / out))
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)


@pytest.mark.parametrize("size", ["SLURM_HET_SIZE", "SLURM_PACK_SIZE"])
def test_a_heterogeneous_job_is_refused(size: str) -> None:
    """salloc sets no SLURM_JOB_NODELIST there."""
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "7", size: "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1"}
    with pytest.raises(LaunchError, match=r"this is a heterogeneous Slurm job of 2 components.*without ':'"):
        _nodes_of_job(environ)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.needs("horovod", "mpi")
def test_all_launchers_of_this_machine_have_one_digest(launch: Launch, tmp_path: Path) -> None:
    done = launch([*CONFORMANCE, "--limit", "500", "--out", "report"], cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    content = shared(tmp_path / "report")
    here = [run for run in content["runs"] if run["outcome"] == "ok"]
    launchers = {"nproc", "torchrun", "horovodrun", "horovodrun-mpi", "mpirun"}
    assert {run["launcher"] for run in here} == launchers
    [reference] = content["references"]
    assert reference["found"]["world"]["backend"] == "single"
    assert {run["found"]["metrics_digest"] for run in here} == {reference["found"]["metrics_digest"]}
    for test in content["self_tests"]:
        assert test["outcome"] == "ok" and test["speed"], test
        assert len(test["operations"]) >= 7 and all(test["operations"].values())
    assert "have the bits of one process" in done.stdout
    # The folder of a report is never gone on in.
    again = launch([*CONFORMANCE, "--out", "report"], cwd=tmp_path)
    assert again.returncode == 2
    assert "this folder is not empty" in again.stderr


# -- what is started: run to its end or a limit, it leaves no process behind ------------------------------


# A launcher whose rank is in a session of its own, takes no SIGTERM, and outlives it.
WANDERING = """
import os, signal, subprocess, sys, time
rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
rank += "; print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
if sys.argv[1] == "stays":
    time.sleep(600)
"""


def runs_on(path: Path) -> bool:
    """Whether the rank whose number is in a file is alive; one that nobody has waited for yet is not."""
    try:
        status = psutil.Process(int(path.read_text().split()[0])).status()
    except psutil.NoSuchProcess:
        return False
    return bool(status != psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(("manner", "code"), [("stays", None), ("leaves", 0)])
def test_a_supervised_start_leaves_no_process(tmp_path: Path, manner: str, code: int | None) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    start = monotonic()
    ended = run_supervised(
        [sys.executable, "-c", WANDERING, manner], stdout=out, stderr=err, environ=os.environ, timeout_s=2
    )
    assert ended.code == code, err.read_text()
    assert 0 < ended.seconds <= monotonic() - start
    assert not runs_on(out)


def test_a_command_that_is_asked_gives_code_output_and_errors() -> None:
    words = ["bash", "-c", "echo out; echo err >&2; exit 3"]
    assert ask(words, os.environ, 10) == (3, "out\n", "err\n")
