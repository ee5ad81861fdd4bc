"""Fixtures for all tests: nothing leaks out of a test, and processes are started so that they always end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, settings

from tests.vehicles import forks, groups, requirements

ROOT = Path(__file__).resolve().parent.parent
# Seconds that a process or thread gets to end on its own once nothing holds it any more.
GRACE = 5.0
# Names every process that a test started, however far it has wandered from its parent and its group.
LAUNCH_MARK = "DUALEVAL_TEST_LAUNCH"
# Set by pytest itself, and on import by scikit-learn.
VOLATILE_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
}
# A started command finds no launcher, unless its test gives it one, and torch's own number of threads.
LAUNCH_VARIABLES = {
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"),
}
# Open MPI 4 and 5 start more ranks than there are cores, and do so as root, only when told to.
MPI_VARIABLES = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    **{f"{name}_ALLOW_RUN_AS_ROOT{suffix}": "1" for name in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")},
}
# First on the PATH, as in an activated environment: horovodrun and mpirun look there for what they start.
BIN = Path(sys.executable).parent

# Threads of OpenMP otherwise wait for each other without giving up their cores, and the tests of two workers
# then take five times as long as one after the other. Read when torch is imported, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch asks for the name of each peer of a store. A name server that drops a question is awaited for 5 s, and
# here for one.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# Images of Python often set this: each process then compiles anew all that it imports, half of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# How long an example takes says something of what else this machine does, and nothing of the code.
settings.register_profile("dualeval", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dualeval")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left behind; ``returncode`` is -N where signal N ended it."""

    returncode: int
    stdout: str
    stderr: str

    def ok(self) -> Finished:
        """Itself, of a command that has ended well."""
        assert self.returncode == 0, self.stderr
        return self


# Tests of how processes start, of what is loaded then, and of memory: each of their starts is a real one.
REAL_STARTS = ("test_launchers", "test_readme")
# Tests whose processes load these too, which takes a process seconds.
LOADS_MORE = (
    *("test_cli", "test_dry_run", "test_image", "test_language_modeling"),
    *("test_model_sources", "test_question_answering", "test_several", "test_task_"),
    "test_torchmetrics",
    "test_training",
)
MORE = ("torchvision", "torchmetrics", "transformers.models.auto.modeling_auto")


class Launch:
    """Runs commands in sessions of their own, and ends all that they started, whatever happens."""

    def __init__(self) -> None:
        self.servers = {False: forks.ForkServer(), True: forks.ForkServer(MORE)}

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 120.0,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a command to its end; fails the test on a time-out, and where it leaves processes behind.

        ``python FILE.py``, ``dualeval ...`` and the same behind ``torchrun`` are forks of a server that has
        loaded torch, but in the tests of REAL_STARTS and with variables that libraries read when they load.
        """
        asked = forks.ranks_of(command, variables or {})
        current = os.environ.get("PYTEST_CURRENT_TEST", "").removeprefix("tests/")
        is_real = current.startswith("cluster/")
        file = current.partition("::")[0].rpartition("/")[2]
        if asked is not None and not (is_real or file.startswith(REAL_STARTS)):
            server = self.servers[file.startswith(LOADS_MORE)]
            return self._forked(server, *asked, variables or {}, cwd, timeout)
        with self.started(command, variables=variables, cwd=cwd) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as error:
                output = f"{_text(error.stdout)}\n{_text(error.stderr)}"
                pytest.fail(f"{' '.join(map(str, command))} did not end in {timeout} s:\n{output}")
        return Finished(returncode=process.returncode, stdout=stdout, stderr=stderr)

    def _forked(
        self,
        server: forks.ForkServer,
        size: int,
        words: Sequence[str],
        variables: Mapping[str, str],
        cwd: Path | None,
        timeout: float,
    ) -> Finished:
        environ, mark = _environ(variables)
        code, stdout, stderr = forks.run(server, size, words, environ, cwd, timeout)
        if code is None:
            _end(_marked(mark))
            pytest.fail(f"{' '.join(words)} did not end in {timeout} s:\n{stdout}\n{stderr}")
        _check_nothing_left(mark, words)
        return Finished(returncode=code, stdout=stdout, stderr=stderr)

    @contextmanager
    def started(
        self,
        command: Sequence[str | Path],
        *,
        variables: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace: float = GRACE,
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a command and give the test its process, with pipes for standard output and error.

        What it has started itself may end ``grace`` seconds later.
        """
        environ, mark = _environ(variables or {})
        process = subprocess.Popen(
            list(map(str, command)),
            env=environ,
            cwd=cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            except BaseException:
                _end(_marked(mark))
                raise
            if process.poll() is None:
                _end(_marked(mark))
                pytest.fail(f"{' '.join(map(str, command))} was still running when its test was through")
            _check_nothing_left(mark, command, grace)


def _environ(variables: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The environment of a started command, and the mark that names all processes that have it from there."""
    mark = uuid.uuid4().hex
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    path = f"{BIN}{os.pathsep}{environ.get('PATH', os.defpath)}"
    environ |= {"PYTHONPATH": str(ROOT), "PATH": path, LAUNCH_MARK: mark}
    return environ | {**MPI_VARIABLES, **variables}, mark


def _check_nothing_left(mark: str, command: Sequence[str | Path], grace: float = GRACE) -> None:
    _, left = psutil.wait_procs(_marked(mark), timeout=grace)
    if left:
        found = [" ".join(other.cmdline()) for other in left if other.is_running()]
        _end(left)
        pytest.fail(f"{' '.join(map(str, command))} left processes behind: {found}")


def pytest_configure() -> None:
    """Take SIGINT where it is ignored, as behind ``nohup make test &``: what is started inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    groups.mark(items)
    yield
    groups.tell(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    requirements.check(item)


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """Run commands that cannot outlive their test: ``launch([sys.executable, "worker.py"])``."""
    launch = Launch()
    yield launch
    for server in launch.servers.values():
        server.stop()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a run may write: a folder that is not there yet."""
    return tmp_path / "out"


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count reads and forwards: without those of the look at the first samples."""
    from dualeval.engine.checks.repeatability import Looked

    monkeypatch.setattr("dualeval.engine.loop.forward.look", lambda *_: Looked(threads=1))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves environment variables, child processes or non-daemon threads behind."""
    variables = _variables()
    children = set(_children())
    threads = set(threading.enumerate())
    yield
    if joining := sys.modules.get("dualeval.engine.joining"):
        joining._noted_by_callers.clear()  # each test is a script of its own
    problems = []
    changed = {name for name, _ in variables.items() ^ _variables().items()}
    if changed:
        problems.append(f"environment variables changed: {sorted(changed)}")
        for name in changed:
            os.environ.pop(name, None)
            if name in variables:
                os.environ[name] = variables[name]
    _, left = psutil.wait_procs([child for child in _children() if child not in children], timeout=GRACE)
    if left:
        problems.append(f"child processes left: {left}")
        _end(left)
    new_threads = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in new_threads:
        thread.join(GRACE)
    alive = [thread.name for thread in new_threads if thread.is_alive()]
    if alive:
        problems.append(f"threads left: {alive}")
    if problems:
        pytest.fail("; ".join(problems))


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in VOLATILE_VARIABLES}


def _children() -> list[psutil.Process]:
    """List this process's children, but for multiprocessing's own, which last as long as their parent."""
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "tests.vehicles.fork_server")
    found = []
    # A look at all processes would take each test some milliseconds.
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            pids = file.read_text().split()
        except OSError:
            continue  # a thread that has ended
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                child = psutil.Process(int(pid))
                if not any(name in argument for name in helpers for argument in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
    return found


def _marked(mark: str) -> list[psutil.Process]:
    """List the living processes that carry the mark, orphans and other sessions included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=GRACE)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


@contextmanager
def working_module(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder that has a module of this name, which nothing remembers afterwards."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop(name, None)
