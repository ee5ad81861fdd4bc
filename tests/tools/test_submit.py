"""``dualeval submit``: what it hands to sbatch, and what it refuses before. Its sbatch here is a stub."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from dualeval.errors import EXIT_USAGE, DualevalError, LaunchError, UsageError
from dualeval.tools.submit.command import SlurmJob, directives, sbatch_text, submit
from tests.conftest import BIN, Finished, Launch
from tests.vehicles.environments import read_variables

STUB = """\
#!/bin/bash
printf '%s\\0' "$@" > {folder}/argv
printf '%s' "$PATH" > {folder}/path
for word in "$@"; do
  if [[ $word == *.sbatch ]]; then cat "$word" > {folder}/script; fi
done
{answer}
"""


@dataclass(frozen=True, kw_only=True)
class Sbatch:
    """A stub on the PATH that keeps what it was given."""

    folder: Path

    def answers(self, answer: str) -> None:
        file = self.folder / "sbatch"
        file.write_text(STUB.format(folder=self.folder, answer=answer), "utf-8")
        file.chmod(0o755)

    def given(self, name: str) -> str:
        """The ``script`` or the ``path`` that it was given."""
        return (self.folder / name).read_text("utf-8")

    @property
    def was_called(self) -> bool:
        return (self.folder / "argv").exists()

    @property
    def argv(self) -> list[str]:
        return self.given("argv").split("\0")[:-1]


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sbatch]:
    folder, working = tmp_path / "stub", tmp_path / "work"
    folder.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    Path("nets.py").write_text("def net(num_classes=2): raise SystemExit('not called')\n", "utf-8")
    for name in ("ckpt_1.pt", "rows.csv", "bert/config.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("{}", "utf-8")
    stub = Sbatch(folder=folder)
    stub.answers("echo 4711")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield stub
    for name in ("nets", "broken"):
        sys.modules.pop(name, None)


def call(*arguments: str) -> None:
    submit.main(list(arguments), prog_name="dualeval submit", standalone_mode=False)


ASKED = ("--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu", "--time", "1:00:00")
JOB = SlurmJob(nodes=2, gpus_per_node=8, partition="gpu", time="1:00:00")


def test_job_is_handed_to_sbatch(sbatch: Sbatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(*ASKED, "--", "--limit", "5", "--out", "a b; echo $HOME", "--no-progress")
    script = sbatch.argv[2 + len(directives(JOB))]
    assert sbatch.argv == [
        *("--parsable", "--export=ALL", *directives(JOB), script),
        *("--limit", "5", "--out", "a b; echo $HOME", "--no-progress"),
    ]
    # Over SBATCH_SIGNAL and SBATCH_NO_REQUEUE too.
    assert {"--signal=USR2@90", "--requeue"} < set(sbatch.argv)
    assert sbatch.given("script") == sbatch_text(JOB)
    assert sbatch.given("path") == f"{BIN}:{sbatch.folder}:/usr/bin:/bin"
    printed = capsys.readouterr()
    assert printed.out == f"job 4711\nlog {Path.cwd()}/dualeval-4711.log\n"
    assert printed.err == ""
    # Slurm has its own copy by then.
    assert not Path(script).exists()


def test_every_option_is_a_field_of_the_job(sbatch: Sbatch) -> None:
    counts = {"nodes": 2, "ntasks_per_node": 3, "gpus_per_node": 4, "cpus_per_task": 5, "shares": 4}
    given = counts | read_variables(
        "mem=6G time=7 partition=p account=a qos=q array=1-3 job_name=n log=l-%j backend=horovod "
        "container_image=i container_mounts=/d:/d"
    )
    several = {"setup": ("module load x", "echo 'y'"), "sbatch_option": ("--constraint=a100", "exclusive")}
    assert {*given, *several} == {field.name for field in fields(SlurmJob)}
    pairs = [*given.items(), *((name, value) for name, values in several.items() for value in values)]
    call(*(f"--{name.replace('_', '-')}={value}" for name, value in pairs))
    assert sbatch.given("script") == sbatch_text(SlurmJob(**given, **several))  # type: ignore[arg-type]
    assert {"--constraint=a100", "--exclusive"} < {*sbatch.argv}


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ("--gpus-per-node 4 -- --workers 14", "--cpus-per-task=16"),
        ("--gpus-per-node 4 --cpus-per-task 8 -- --workers 14", "--cpus-per-task=8"),
        ("--gpus-per-node 4 --sbatch-option cpus-per-gpu=8 -- --workers 14", None),
        ("--gpus-per-node 4 -- --workers 0", None),
        ("--gpus-per-node 4", None),
        ("-- --workers 14", None),
    ],
)
def test_cores_are_asked_for_by_the_processes_that_read_beside_a_gpu(
    sbatch: Sbatch, options: str, cores: str | None
) -> None:
    call(*options.split())
    asked = [word for word in sbatch.argv if word.startswith("--cpus-per-task")]
    assert asked == ([] if cores is None else [cores])
    assert cores is None or f"#SBATCH {cores}\n" in sbatch.given("script")


def test_shares_are_the_tasks_of_an_array(sbatch: Sbatch, capsys: pytest.CaptureFixture[str]) -> None:
    call("--shares", "100", "--", "--limit", "10", "--out", "runs/a b")
    assert "--array=1-100" in sbatch.argv
    assert sbatch.argv[-6:] == ["--limit", "10", "--out", "runs/a b", "--share", "%a/100"]
    assert capsys.readouterr().out.splitlines()[-1] == "at the end: dualeval finish 'runs/a b'"
    call("--shares", "100", "--array", "4,17")
    assert "--array=4,17" in sbatch.argv
    assert capsys.readouterr().out.splitlines()[-1] == "at the end: dualeval finish runs/job-4711"


@pytest.mark.parametrize(
    "answer", ["echo '4711;cluster'", "echo 'Welcome, 12 users'; echo 4711; echo note >&2"]
)
def test_number_of_the_job_is_read(sbatch: Sbatch, capsys: pytest.CaptureFixture[str], answer: str) -> None:
    sbatch.answers(answer)
    Path("logs").mkdir()
    call("--log", "logs/%x-%j", "--job-name", "eval")
    printed = capsys.readouterr()
    assert printed.out == f"job 4711\nlog {Path.cwd()}/logs/eval-4711\n"
    assert printed.err == ("note\n" if "note" in answer else "")


def test_dry_run_prints_the_script_and_submits_nothing(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(*ASKED, "--dry-run", "--", "--out", "a b")
    printed = capsys.readouterr()
    assert printed.out == sbatch_text(JOB)
    options = " ".join(directives(JOB))
    assert printed.err == f"PATH={BIN}:$PATH sbatch --parsable --export=ALL {options} FILE --out 'a b'\n"
    assert not sbatch.was_called


REFUSED = {
    "no node": (["--nodes", "0"], UsageError, ["--nodes 0", "at least 1"]),
    "sbatch's option of submit": (["--sbatch-option=nodes=2"], UsageError, ["sets --nodes itself"]),
    "sbatch's warning": (["--sbatch-option=--signal=9"], UsageError, ["sets --signal itself"]),
    "two words for sbatch": (["--sbatch-option=a b"], UsageError, ["--sbatch-option 'a b'", "one word"]),
    "mounts of no container": (["--container-mounts=/a"], UsageError, ["--container-image IMAGE"]),
    "a line of its own": (["--partition", "a\n#SBATCH -A b"], UsageError, ["--partition", "one word"]),
    "a backend without a script": (["--backend", "mpi"], UsageError, ["--backend 'mpi'", "torch, horovod"]),
    "no folder for the log": (["--log", "nowhere/%j"], UsageError, ["--log nowhere/%j", "mkdir -p nowhere"]),
    "an option of run's before the dashes": (
        ["--limit", "5"],
        UsageError,
        ["--limit is an option of 'dualeval run'", "'dualeval submit -- --limit"],
    ),
    "a misspelt option": (["--", "--limt", "5"], UsageError, ["'dualeval run --limt 5'", "--limit"]),
    "a wrong value": (["--", "--batch-size", "x"], UsageError, ["--batch-size", "'x'"]),
    "a value out of range": (["--", "--limit", "0"], UsageError, ["--limit 0", "at least 1"]),
    "a missing job file": (["--", "--config", "none.toml"], UsageError, ["none.toml", "cannot be read"]),
    "a misspelt model and a missing folder": (
        ["--", "--model", "resnet81", "--data", "nowhere"],
        UsageError,
        ["--data nowhere does not exist here", "no model 'resnet81'. Nearest: resnet18", "type --no-check"],
    ),
    "a missing file beside others": (
        ["--", "--weights", "ckpt_2.pt", "--model", "resnet18", "--data", "."],
        UsageError,
        ["--weights ckpt_2.pt does not exist here. Nearest: ckpt_1.pt"],
    ),
    "no such weights": (
        ["--", "--model", "resnet18", "--weights", "IMAGENET1K_V7", "--data", "."],
        UsageError,
        ["--weights IMAGENET1K_V7", "IMAGENET1K_V1"],
    ),
    "no such function": (
        ["--", "--model", "nets:nett", "--weights", "random:0", "--data", "."],
        UsageError,
        ["--model nets:nett: nets has no callable 'nett'. Nearest: net"],
    ),
    "no such preprocessing": (
        ["--", "--model", "nets:net", "--data", ".", "--preprocessing", "nets.py:prepare"],
        UsageError,
        ["--preprocessing nets.py:prepare: nets.py has no 'prepare'"],
    ),
    "no such metric": (["--", "--metric", "acuracy"], UsageError, ["no metric 'acuracy'", "accuracy"]),
    "no such metric of texts": (
        [
            *("--", "--task", "text-classification", "--model", "bert"),
            *("--data", "rows.csv", "--metric", "pearsn"),
        ],
        UsageError,
        ["no metric 'pearsn'"],
    ),
    "no model in the folder": (
        ["--", "--task", "language-modeling", "--model", ".", "--data", "rows.csv"],
        UsageError,
        ["--model . holds no config.json"],
    ),
    "a pattern that fits none": (
        ["--", "--model", "resnet18", "--data", ".", "--weights", "epoch-*.pt"],
        UsageError,
        ["--weights epoch-*.pt: no file or folder matches", "ckpt_1.pt"],
    ),
    "the first file of an array": (
        ["--array", "3-4", "--", "--model", "resnet18", "--data", ".", "--weights", "ckpt_%a.pt"],
        UsageError,
        ["--weights ckpt_3.pt does not exist here"],
    ),
    "no run to compare with": (
        ["--", "--reference", "runs/a"],
        UsageError,
        ["--reference runs/a does not exist here"],
    ),
    "--nproc": (["--", "--nproc", "2"], LaunchError, ["--nproc 2", "--ntasks-per-node before the --"]),
    "--launcher": (["--", "--launcher=none"], LaunchError, ["--launcher none", "srun"]),
    "--backend": (["--", "--backend", "torch"], LaunchError, ["--backend torch", "before the --"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_sbatch(sbatch: Sbatch, name: str) -> None:
    arguments, error, words = REFUSED[name]
    with pytest.raises(DualevalError) as caught:
        call(*arguments)
    assert type(caught.value) is error
    assert caught.value.exit_code == EXIT_USAGE
    for word in words:
        assert word in str(caught.value)
    assert not sbatch.was_called


MISSING = "-- --model resnet18 --data /local/of/a/node --weights ckpt_1.pt"
ONLY_THERE = {
    "a disk that is only there": MISSING,
    "a data set on it": MISSING.replace("/local", "CIFAR10:/local"),
    "a model on it": "-- --model hf:/local/of/a/node --data .",
    "a file that the job makes first": "--setup make -- --model resnet18 --data . --weights best.pt",
    "a file that an earlier job writes": (
        "--sbatch-option dependency=afterok:1 -- --model resnet18 --data . --weights best.pt"
    ),
    "another folder to start in": "--sbatch-option chdir=/tmp -- --model other:net --data val",
    "a model's name in an image": "--container-image i -- --model resnet999 --data .",
    "code that breaks here": "-- --model broken:net --data .",
}


@pytest.mark.parametrize("name", ONLY_THERE)
def test_inputs_that_only_the_job_may_have_are_a_note(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    Path("broken.py").write_text("raise OSError('libcuda.so.1: no such file')", "utf-8")
    call(*ONLY_THERE[name].split())
    assert sbatch.was_called
    printed = capsys.readouterr()
    assert printed.out.startswith("job 4711")
    assert printed.err.startswith("dualeval: note: ")
    assert printed.err.endswith("The job may see more.\n")


@pytest.mark.parametrize(
    "words",
    [
        "--no-check -- --model resnet999 --data nowhere",
        "--array 1-9%2 -- --model resnet18 --data . --weights ckpt_%a.pt --seed %a --sample 5",
        "-- --model nets:net --data . --weights ckpt_1.pt --metric top5 --metric torchmetrics:Accuracy",
        "-- --model resnet18 --data . --weights ckpt_*.pt",
        "-- --task text-classification --model bert --data rows.csv --metric spearman --metric binary_f1",
        "-- --task language-modeling --model bert --data rows.csv --metric acc_norm",
    ],
)
def test_options_that_the_job_takes_are_queued_without_a_note(
    sbatch: Sbatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    call(*words.split())
    assert sbatch.was_called
    assert capsys.readouterr().err == ""


def test_check_does_what_a_dry_run_does(sbatch: Sbatch, launch: Launch) -> None:
    def submitted(*words: str) -> Finished:
        command = [sys.executable, "-m", "dualeval", "submit", "--check", "--dry-run", "--", *words]
        return launch(command, variables={"PATH": f"{sbatch.folder}:/usr/bin:/bin"})

    done = submitted("--limit", "5")
    assert (done.returncode, done.stdout) == (0, sbatch_text(SlurmJob()))
    assert '"limit": 5' in done.stderr
    done = submitted("--model", "nets:net", "--weights", "ckpt_1.pt", "--data", ".")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert "data folder . holds no sample" in done.stderr


def test_without_sbatch_it_says_where_to_type(sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sbatch.folder))
    (sbatch.folder / "sbatch").unlink()
    with pytest.raises(LaunchError, match=r"no sbatch on the PATH.*login node.*--nproc N.*torchrun"):
        call()


def test_a_job_that_would_not_find_dualeval_is_refused(
    sbatch: Sbatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    assert shutil.which("dualeval") is None
    with pytest.raises(LaunchError, match=f"none in {tmp_path}/bin.*pip install"):
        call()
    assert not sbatch.was_called


def test_an_answer_without_a_number_is_an_error(sbatch: Sbatch) -> None:
    sbatch.answers("echo no number")
    with pytest.raises(DualevalError, match=r"printed no job number: .*squeue"):
        call()


def test_an_error_of_sbatch_is_passed_on(sbatch: Sbatch, launch: Launch) -> None:
    sbatch.answers("echo 'sbatch: error: invalid partition specified: nix' >&2; exit 1")
    command = [sys.executable, "-m", "dualeval", "submit", "--partition", "nix"]
    done = launch(command, variables={"PATH": f"{sbatch.folder}:/usr/bin:/bin"})
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    for words in ("dualeval: error: sbatch refused", "invalid partition specified: nix", "exit code 1"):
        assert words in done.stderr
    assert sbatch.was_called


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shares 3 --array 0,2", "--array 0,2: expected numbers of shares, 1 to 3"),
        ("--shares 3 --array 2-4%1", "expected numbers of shares"),
        ("--shares 3 -- --out runs/%a", "--out runs/%a: all shares use one folder"),
        ("-- --share 1/3", "put --shares N before the --"),
    ],
)
def test_impossible_shares_are_refused(sbatch: Sbatch, words: str, said: str) -> None:
    with pytest.raises(DualevalError) as caught:
        call(*words.split())
    assert said in str(caught.value)
    assert not sbatch.was_called
