"""Batch scripts: their text, and how bash finds the environment. Slurm itself runs them in tests/cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualeval.errors import UsageError
from dualeval.result import Status
from dualeval.tools.submit.command import SHIPPED, SlurmJob, directives, log_path, sbatch_environ, sbatch_text
from tests.conftest import ROOT, Finished, Launch
from tests.vehicles.environments import read_variables

COUNTS = ("nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task")
WORDS = ("mem", "time", "partition", "account", "qos", "array", "job_name", "log")
# How Slurm calls what is not called as its option.
NAMES = {"log": "output"}
# What stands where a test's own PATH needs bash and hostname.
SYSTEM = "/usr/bin:/bin"

counts = st.none() | st.integers(1, 10_000)
# Of what may stand in a word: all kinds that a cluster's names, times and file patterns are made of.
words = st.text(st.sampled_from("aZ09-_.:,;=/+@~[]()%$*é"), min_size=1, max_size=12)


def directive_lines(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("backend", SHIPPED)
def test_shipped_files_are_the_text_for_the_defaults(backend: str) -> None:
    file = ROOT / "slurm" / SHIPPED[backend]
    assert file.read_text("utf-8") == sbatch_text(SlurmJob(backend=backend))


def test_setup_and_container_stand_where_they_act() -> None:
    job = SlurmJob(setup=("module load a", "b"), container_image="i j", container_mounts="/d:/d")
    text = sbatch_text(job)
    assert "--requeue\n\nset -e\nmodule load a\nb\nset -euo pipefail\n\n# From Slurm 22.05" in text
    assert (
        "\ncode=0\nstep+=(--container-image='i j' --container-mounts=\"$PWD:$PWD\",/d:/d "
        '--container-workdir="$PWD")\n"${step[@]}" dualeval run --launcher srun'
    ) in text
    assert ".venv" not in text and "type -P dualeval" not in text


@pytest.mark.parametrize(
    ("asked", "tasks"), [({}, 1), ({"gpus_per_node": 8}, 8), ({"gpus_per_node": 8, "ntasks_per_node": 2}, 2)]
)
def test_one_task_a_gpu_where_tasks_are_not_given(asked: dict[str, int], tasks: int) -> None:
    assert f"--ntasks-per-node={tasks}" in directives(SlurmJob(**asked))  # type: ignore[arg-type]


@given(
    st.fixed_dictionaries(
        {"nodes": st.integers(1, 10_000), "job_name": words, "log": words},
        optional={
            **dict.fromkeys(COUNTS[1:], counts),
            **dict.fromkeys(("mem", "time", "partition", "account", "qos", "array"), st.none() | words),
            "backend": st.sampled_from(sorted(SHIPPED)),
        },
    )
)
def test_each_value_that_is_given_stands_in_one_directive(asked: dict[str, Any]) -> None:
    text = sbatch_text(SlurmJob(**asked))
    lines = directive_lines(text)
    for name in (*COUNTS, *WORDS):
        option = NAMES.get(name, name.replace("_", "-"))
        found = [line for line in lines if line.startswith(f"--{option}=")]
        value = asked.get(name)
        if name == "log" and asked.get("array") is not None:
            value = re.sub("%[%j]", lambda found: {"%j": "%A_%a"}.get(found[0], found[0]), asked["log"])
        if value is not None:
            assert found == [f"--{option}={value}"]
        else:
            assert len(found) == (name == "ntasks_per_node")
    # sbatch stops reading directives at the first command.
    assert text.rindex("#SBATCH ") < text.index("set -euo pipefail")
    assert f' --backend {asked.get("backend", "torch")} "${{words[@]}}" || code=$?\n' in text


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("count", [0, -1])
def test_a_count_is_at_least_one(name: str, count: int) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {count}: .* at least 1"):
        SlurmJob(**{name: count})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize(
    "word",
    ["", "a b", "a\nb", "a\tb", "a\r", "a\0b", "a\u2028b", "a\u00a0b", "a\x1bb", 'a"b', "a'b", "a\\b", "a#b"],
)
def test_a_word_that_sbatch_would_read_otherwise_is_refused(name: str, word: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} .*one word"):
        SlurmJob(**{name: word})  # type: ignore[arg-type]


def test_backend_of_a_script_is_torch_or_horovod() -> None:
    with pytest.raises(UsageError, match=r"--backend 'mpi'.*torch, horovod"):
        SlurmJob(backend="mpi")


@pytest.mark.parametrize(
    ("log", "path"),
    [
        ("dualeval-%j.log", "/work/dualeval-42.log"),
        ("logs/%x/%j", "/work/logs/eval/42"),
        ("/logs/%u-%%j", "/logs/%u-%j"),
    ],
)
def test_the_path_of_the_log_has_the_numbers_of_its_job(log: str, path: str) -> None:
    assert log_path(SlurmJob(job_name="eval", log=log), Path("/work"), "42") == Path(path)


def test_log_of_an_array_has_the_numbers_of_array_and_task() -> None:
    job = SlurmJob(array="0-9%2")
    assert {"--array=0-9%2", "--output=dualeval-%A_%a.log"} < set(directives(job))
    assert log_path(job, Path("/work"), "42") == Path("/work/dualeval-42_%a.log")
    assert "--output=%%j" in directives(SlurmJob(array="1", log="%%j"))


def test_environ_for_sbatch_has_the_folder_first_and_nothing_of_the_job_around_it() -> None:
    kept = read_variables("PATH=/bin SLURM_CONF=/etc/slurm.conf SBATCH_ACCOUNT=b RANK=0 HOME=/root")
    wanted = {**kept, "PATH": "/venv/bin:/bin"}
    of_the_job = {"SLURM_JOB_ID": "7", "SLURM_DISTRIBUTION": "cyclic", "SLURM_CPU_BIND": "none"}
    assert sbatch_environ({**kept, **of_the_job}, Path("/venv/bin")) == wanted
    outside = {"SLURM_CLUSTERS": "a"}
    assert sbatch_environ({**kept, **outside}, Path("/venv/bin")) == {**wanted, **outside}


class Script:
    """Runs a shipped script with a srun that says what it was given, in folders of the test's own.

    It is run in ``folder``, as job 7.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch = launch
        self.folder = folder
        self.tools = folder / "tools"
        self.submitted = folder / "submit folder"
        for made in (self.tools, self.submitted):
            made.mkdir()
        self.put(
            self.tools / "srun",
            'printf "<%s>" "$@"; echo; type -P dualeval; echo "cores ${SRUN_CPUS_PER_TASK:-none}"; exit 3',
        )

    @staticmethod
    def put(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n", "utf-8")
        path.chmod(0o755)
        return path

    def __call__(self, *arguments: str, backend: str = "torch", **variables: str) -> Finished:
        path = variables.pop("path", f"{self.tools}:{SYSTEM}")
        return self.launch(
            ["bash", ROOT / "slurm" / SHIPPED[backend], *arguments],
            variables={
                "SLURM_SUBMIT_DIR": str(self.submitted),
                "SLURM_CPUS_PER_TASK": "",
                "SLURM_JOB_ID": "7",
                "PATH": path,
                **variables,
            },
            cwd=self.folder,
        )


@pytest.fixture
def script(launch: Launch, tmp_path: Path) -> Script:
    return Script(launch, tmp_path)


@pytest.fixture
def found(script: Script) -> Script:
    """A script that finds the command."""
    script.put(script.submitted / ".venv/bin/dualeval", "")
    return script


@pytest.mark.parametrize("backend", SHIPPED)
def test_script_takes_the_environment_of_the_submit_folder(found: Script, backend: str) -> None:
    done = found("--limit", "10", "--out", "a b", "", backend=backend)
    assert done.stdout.splitlines() == [
        "<--export=ALL><--kill-on-bad-exit=1><dualeval><run><--launcher><srun>"
        f"<--backend><{backend}><--limit><10><--out><a b><>",
        str(found.submitted / ".venv/bin/dualeval"),
        "cores none",
    ]
    # srun's exit code is the job's.
    assert (done.returncode, done.stderr) == (3, "")


def test_script_takes_the_environment_on_the_path_first(found: Script) -> None:
    active = found.put(found.folder / "active/dualeval", "")
    done = found(path=f"{active.parent}:{found.tools}:{SYSTEM}")
    assert done.stdout.splitlines()[1] == str(active)


def test_script_without_an_environment_says_what_to_type(script: Script) -> None:
    done = script()
    assert (done.returncode, done.stdout) == (2, "")
    for words in (
        "no dualeval on the PATH",
        f"none in {script.submitted}/.venv/bin.",
        "before you type sbatch",
    ):
        assert words in done.stderr
    # A file that is not to be executed is no command.
    (script.submitted / ".venv/bin").mkdir(parents=True)
    (script.submitted / ".venv/bin/dualeval").touch(0o644)
    assert script().returncode == 2


def test_script_hands_cores_a_task_on_to_srun(found: Script) -> None:
    assert found(SLURM_CPUS_PER_TASK="3").stdout.splitlines()[2] == "cores 3"


def words_of(done: Finished) -> list[str]:
    """What the script has handed to 'dualeval run', after the words of its own."""
    words = done.stdout.splitlines()[0].removeprefix("<").removesuffix(">").split("><")
    return words[words.index("torch") + 1 :]


OWN_OUT = ["--out", "runs/job-7"]


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        ([], OWN_OUT),
        (["--limit", "5"], OWN_OUT),
        (["--out=a"], []),
        (["--out", "a"], []),
        (["--out="], OWN_OUT),
        (["--outer", "a"], OWN_OUT),
        (["--out", "a b", "--limit", "5"], []),
    ],
)
def test_script_gives_an_output_folder_where_there_is_none(
    found: Script, typed: list[str], added: list[str]
) -> None:
    assert words_of(found(*typed)) == [*typed, *added]


TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}


def test_script_names_the_task_of_an_array(found: Script) -> None:
    """The last task has the number of the array itself, which stands for all of its tasks."""
    assert words_of(found(**TASK)) == ["--out", "runs/job-7_2"]
    typed = ["--weights", "step-%a.pt", "--out=%a/%a", "--fresh"]
    assert words_of(found(*typed, **TASK)) == ["--weights", "step-2.pt", "--out=2/2", "--fresh"]
    assert words_of(found(*typed)) == typed


def test_script_asks_for_the_one_task_that_was_warned(found: Script) -> None:
    done = run_to_end(found, ENDS["warned"], found.folder / "out", "exit 0", **TASK)
    assert done.stdout == "scontrol requeue 7_2\nsleep 60\n"
    assert "asked to queue job 7_2 again" in done.stderr


GPUS = {"SLURM_GPUS_ON_NODE": "2"}
CUDA = [*OWN_OUT, "--device", "cuda"]


@pytest.mark.parametrize(
    ("variables", "typed", "handed"),
    [
        ({}, [], OWN_OUT),
        (GPUS, [], CUDA),
        ({"SLURM_JOB_GPUS": "0,3"}, [], CUDA),
        ({"SLURM_JOB_GPUS": "0"}, [], CUDA),
        ({"SLURM_GPUS_PER_NODE": "a100:8"}, [], CUDA),
        ({"SLURM_GPUS": "16"}, [], CUDA),
        ({"SLURM_GPUS_ON_NODE": "0"}, [], OWN_OUT),
        (GPUS, ["--device", "cpu"], ["--device", "cpu", *OWN_OUT]),
        (GPUS, ["--device=cuda:0"], ["--device=cuda:0", *OWN_OUT]),
        (GPUS, ["--config", "cpu.toml"], ["--config", "cpu.toml", *OWN_OUT]),
        (GPUS, ["--config=cpu.toml"], ["--config=cpu.toml", *OWN_OUT]),
        (GPUS, ["--config", "other.toml"], ["--config", "other.toml", *CUDA]),
        (GPUS, ["--config", "none.toml"], ["--config", "none.toml", *CUDA]),
    ],
)
def test_script_insists_on_the_gpus_of_its_job(
    found: Script, variables: dict[str, str], typed: list[str], handed: list[str]
) -> None:
    """Where a node's GPU does not work, the CPU would be taken without a word."""
    (found.folder / "cpu.toml").write_text('model = "resnet18"\n  device="cpu"\n')
    (found.folder / "other.toml").write_text('model = "device"\n# device = "cpu"\nbatch_size = 8\n')
    assert words_of(found(*typed, **variables)) == handed


def test_script_starts_all_components_of_a_heterogeneous_job(found: Script) -> None:
    assert "<--het-group=0-2><dualeval><run>" in found(SLURM_HET_SIZE="3").stdout
    assert "het-group" not in found().stdout


def test_script_outside_of_a_job_says_what_to_type(found: Script) -> None:
    done = found(SLURM_JOB_ID="")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "there is no job; type 'sbatch' before this file, or --out FOLDER after it" in done.stderr


def test_script_starts_over_only_once(found: Script) -> None:
    typed = ["--fresh", "--out", "--fresh", "--limit", "5"]
    assert words_of(found(*typed)) == typed
    assert words_of(found(*typed, SLURM_RESTART_COUNT="0")) == typed
    assert words_of(found(*typed, SLURM_RESTART_COUNT="2")) == typed[1:]


@dataclass(frozen=True, kw_only=True)
class End:
    """How ranks end, and what the script is then to do."""

    code: int  # srun's exit code
    before: Status | None = None  # what stands in status.json when the job begins
    status: Status | None = None  # what the ranks write there; None where they do not come so far
    comes_back: bool = False  # whether the job is queued again
    says: str = ""  # words in the log
    exit_code: int | None = None  # the script's; None is srun's


def stopped(by: str, chunks: int | None) -> Status:
    reason = f'stopped by {by}\n  "signal": "SIGUSR2",'
    return Status(state="stopped", exit_code=75, reason=reason, signal=by, chunks_saved=chunks)


WARNED = stopped("SIGUSR2", 3)
EARLY = "a signal came before anything was finished"
ENDS = {
    "done": End(code=0, status=Status(state="done", exit_code=0)),
    "another command": End(code=0),
    "wrong words": End(code=2),
    "failed": End(code=1, status=Status(state="failed", exit_code=1, reason="broke")),
    "failed after a warning": End(code=1, before=WARNED, status=Status(state="failed", exit_code=1)),
    "killed": End(code=137, before=WARNED, status=Status(state="running")),
    "warned": End(code=75, status=WARNED, comes_back=True, says="asked to queue job 7 again", exit_code=75),
    "warned, and a rank killed": End(code=137, status=WARNED, comes_back=True, exit_code=75),
    "warned with ten chunks": End(code=75, status=stopped("SIGUSR2", 10), comes_back=True),
    "warned with nothing": End(code=75, status=stopped("SIGUSR2", 0), says=EARLY),
    "warned, nothing known": End(code=75, status=stopped("SIGUSR2", None), says=EARLY),
    "warned before the folder": End(code=75, before=WARNED, says=EARLY),
    "warned before Python": End(code=140, before=WARNED, says=EARLY),
    "cancelled": End(code=75, status=stopped("SIGTERM", 3)),
}


def run_to_end(script: Script, end: End, out: Path, requeue: str, **variables: str) -> Finished:
    """Run a script whose ranks end so, in the output folder of an earlier run."""
    out.mkdir(parents=True)
    if end.before is not None:
        end.before.write(out)
    written = script.folder / "written"
    written.mkdir()
    if end.status is not None:
        end.status.write(written)
    script.put(script.tools / "srun", f'cp "{written}"/* "{out}/new" && mv "{out}/new" "{out}/status.json"')
    if end.status is None:
        script.put(script.tools / "srun", "true")
    with (script.tools / "srun").open("a") as file:
        file.write(f"exit {end.code}\n")
    script.put(script.tools / "scontrol", f'echo "scontrol $*"; {requeue}')
    script.put(script.tools / "sleep", 'echo "sleep $*"')
    return script("--out", str(out.relative_to(script.folder)), **variables)


@pytest.mark.parametrize("name", ENDS)
def test_script_asks_for_a_warned_job_only(found: Script, name: str) -> None:
    end = ENDS[name]
    done = run_to_end(found, end, found.folder / "runs/the job", requeue="exit 0")
    assert done.stdout == ("scontrol requeue 7\nsleep 60\n" if end.comes_back else "")
    assert done.returncode == (end.code if end.exit_code is None else end.exit_code)
    assert end.says in done.stderr
    assert (done.stderr == "") == (not end.says and not end.comes_back)


def test_script_says_how_to_go_on_where_slurm_refuses(found: Script) -> None:
    done = run_to_end(found, ENDS["warned"], found.folder / "out", requeue="exit 1")
    assert (done.returncode, done.stdout) == (75, "scontrol requeue 7\n")
    assert "type the same line with --out out." in done.stderr


def test_text_with_every_option_is_bash(launch: Launch, tmp_path: Path) -> None:
    word = "a$(b)`c`;&|<>*%j"
    asked: dict[str, Any] = {**dict.fromkeys(COUNTS, 3), **dict.fromkeys(WORDS, word)}
    asked |= {"setup": ("module load a",), "container_image": "nvcr.io#a/b:1", "container_mounts": "/d:/d"}
    file = tmp_path / "job.sbatch"
    file.write_text(sbatch_text(SlurmJob(**asked)), "utf-8")
    done = launch(["bash", "-n", file])
    assert (done.returncode, done.stderr) == (0, "")
