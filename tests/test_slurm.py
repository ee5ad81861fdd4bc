"""Batch scripts: their text, and how bash finds the environment. Slurm itself runs them in tests/cluster."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualeval.errors import UsageError
from dualeval.launch.slurm import SHIPPED, SlurmJob, directives, log_path, sbatch_environ, sbatch_text
from tests.conftest import ROOT, Finished, Launch

COUNTS = ("nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task")
WORDS = ("mem", "time", "partition", "account", "qos", "job_name", "log")
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


def test_no_other_script_is_shipped() -> None:
    assert {file.name for file in (ROOT / "slurm").iterdir()} == set(SHIPPED.values())


def test_defaults_ask_for_one_task_and_nothing_of_the_cluster() -> None:
    assert directive_lines(sbatch_text(SlurmJob())) == [
        "--job-name=dualeval",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--output=dualeval-%j.log",
        "--open-mode=append",
    ]


@pytest.mark.parametrize(
    ("asked", "tasks"),
    [({}, 1), ({"gpus_per_node": 8}, 8), ({"gpus_per_node": 8, "ntasks_per_node": 2}, 2)],
)
def test_one_task_a_gpu_where_tasks_are_not_given(asked: dict[str, int], tasks: int) -> None:
    assert f"--ntasks-per-node={tasks}" in directives(SlurmJob(**asked))  # type: ignore[arg-type]


def test_counts_and_words_are_all_fields() -> None:
    assert {*COUNTS, *WORDS, "backend"} == {field.name for field in fields(SlurmJob)}


@given(
    st.fixed_dictionaries(
        {"nodes": st.integers(1, 10_000), "job_name": words, "log": words},
        optional={
            **dict.fromkeys(COUNTS[1:], counts),
            **dict.fromkeys(("mem", "time", "partition", "account", "qos"), st.none() | words),
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
        if value is not None:
            assert found == [f"--{option}={value}"]
        else:
            assert len(found) == (name == "ntasks_per_node")
    # sbatch stops reading directives at the first command.
    assert text.rindex("#SBATCH ") < text.index("set -euo pipefail")
    assert text.endswith(f' --backend {asked.get("backend", "torch")} "$@"\n')


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
    with pytest.raises(UsageError, match=r"--backend 'mpi'.*torch, horovod.*--mpi=pmix"):
        SlurmJob(backend="mpi")


@pytest.mark.parametrize(
    ("log", "path"),
    [
        ("dualeval-%j.log", "/work/dualeval-42.log"),
        ("logs/%x/%j", "/work/logs/eval/42"),
        ("/logs/%u-%%j", "/logs/%u-%j"),
    ],
)
def test_log_path(log: str, path: str) -> None:
    assert log_path(SlurmJob(job_name="eval", log=log), Path("/work"), "42") == Path(path)


def test_environ_for_sbatch_has_the_folder_first() -> None:
    environ = {"PATH": "/bin", "SLURM_CLUSTERS": "a", "SBATCH_ACCOUNT": "b", "HOME": "/root"}
    assert sbatch_environ(environ, Path("/venv/bin")) == {**environ, "PATH": "/venv/bin:/bin"}


def test_environ_for_sbatch_drops_the_variables_of_the_job_around_it() -> None:
    of_the_job = {"SLURM_JOB_ID": "7", "SLURM_DISTRIBUTION": "cyclic", "SLURM_CPU_BIND": "none"}
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "b", "RANK": "0"}
    assert sbatch_environ({**kept, **of_the_job}, Path("/v")) == {**kept, "PATH": "/v:/bin"}


class Script:
    """Runs a shipped script with a srun that says what it was given, in folders of the test's own."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch = launch
        self.folder = folder
        self.tools = folder / "tools"
        self.submitted = folder / "submit folder"
        for made in (self.tools, self.submitted):
            made.mkdir()
        self.put(
            self.tools / "srun",
            'printf "<%s>" "$@"; echo; type -P dualeval; echo "cores ${SRUN_CPUS_PER_TASK:-none}"; exit 75',
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
                "PATH": path,
                **variables,
            },
            cwd=self.folder,
        )


@pytest.fixture
def script(launch: Launch, tmp_path: Path) -> Script:
    return Script(launch, tmp_path)


@pytest.mark.parametrize("backend", SHIPPED)
def test_script_takes_the_environment_of_the_submit_folder(script: Script, backend: str) -> None:
    own = script.put(script.submitted / ".venv/bin/dualeval", "")
    done = script("--limit", "10", "--out", "a b", "", backend=backend)
    assert done.stdout.splitlines() == [
        "<--export=ALL><--kill-on-bad-exit=1><dualeval><run><--launcher><srun>"
        f"<--backend><{backend}><--limit><10><--out><a b><>",
        str(own),
        "cores none",
    ]
    # srun's exit code is the job's.
    assert (done.returncode, done.stderr) == (75, "")


def test_script_takes_the_environment_on_the_path_first(script: Script) -> None:
    script.put(script.submitted / ".venv/bin/dualeval", "")
    active = script.put(script.folder / "active/dualeval", "")
    done = script(path=f"{active.parent}:{script.tools}:{SYSTEM}")
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


def test_script_becomes_srun(script: Script) -> None:
    script.put(script.submitted / ".venv/bin/dualeval", "")
    script.put(script.tools / "srun", "echo $$")
    done = script.launch(
        ["bash", "-c", 'echo $$; exec bash "$0"', ROOT / "slurm" / SHIPPED["torch"]],
        variables={"SLURM_SUBMIT_DIR": str(script.submitted), "PATH": f"{script.tools}:{SYSTEM}"},
    )
    shell, srun = done.stdout.split()
    assert shell == srun


def test_script_hands_cores_a_task_on_to_srun(script: Script) -> None:
    script.put(script.submitted / ".venv/bin/dualeval", "")
    assert script(SLURM_CPUS_PER_TASK="3").stdout.splitlines()[2] == "cores 3"


def test_text_with_every_option_is_bash(launch: Launch, tmp_path: Path) -> None:
    word = "a$(b)`c`;&|<>*%j"
    asked: dict[str, Any] = {**dict.fromkeys(COUNTS, 3), **dict.fromkeys(WORDS, word)}
    file = tmp_path / "job.sbatch"
    file.write_text(sbatch_text(SlurmJob(**asked)), "utf-8")
    done = launch(["bash", "-n", file])
    assert (done.returncode, done.stderr) == (0, "")
