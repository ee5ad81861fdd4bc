"""``dualeval doctor``: what every rank of a launch finds, and whether they can work together."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import click

from dualeval.cli import options
from dualeval.cli.options import PATH
from dualeval.errors import EXIT_DONE, EXIT_FAILED, DualevalError
from dualeval.launch import Detection, examine
from dualeval.launch.cores import Cores, own_cores, share_of_cores
from dualeval.launch.launchers import LAUNCHERS
from dualeval.tools.doctor.page import BLOCKING, diagnosis, differences, problems
from dualeval.world import World
from dualeval.world.network import interface_towards

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Of every task, present or not.
_LIBRARIES = ("torchvision", "pillow", "transformers", "tokenizers")
_PAUSE_S = 0.05
_HEAD_START_S = 2.0
_GO = "go"
_STOP = "stop"
# Flags that make it a diagnosis of another kind, whose flags are others: where it is, and the flag's help.
_DIAGNOSES: dict[str, tuple[str, str]] = {
    "--invariance": (
        "dualeval.tools.invariance.command:invariance",
        "Try other batch shapes on a job's model; its own flags: 'doctor --invariance --help'.",
    )
}


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What was asked for on the command line."""

    backend: str | None
    device: str | None
    allow_shared_gpu: bool
    out: Path
    limit_s: float
    as_json: bool


@dataclass(kw_only=True)
class _Findings:
    """What is known so far: rank 0's of all ranks, the others' of their own."""

    size: int
    # By rank, its facts.
    ranks: dict[int, dict[str, Any]]
    # That rank 0 offers to the others.
    addresses: list[str] = field(default_factory=list)
    # Of all_reduce.
    speed: dict[str, dict[str, float]] = field(default_factory=dict)
    # What this rank is doing.
    stage: str = "meeting the other ranks"
    # The file that rank 0 has made in the output folder.
    probe: str | None = None
    # Whether the report has been shown.
    shown: bool = False


class _Doctor(click.Command):
    """``doctor``, and what a flag of ``_DIAGNOSES`` makes of it."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make the context of the command that is asked for."""
        places = [place for flag, (place, _) in _DIAGNOSES.items() if flag in args]
        make: Any = resolve_name(places[0]).make_context if places else super().make_context
        context: click.Context = make(info_name, args, parent, **extra)
        return context


@click.command(cls=_Doctor)
@click.option("--backend", help="Backend to try.  [default: by launcher]")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: a GPU if any]")
@options.ALLOW_SHARED_GPU
@click.option("--launcher", help=f"Launcher of the ranks: {', '.join(LAUNCHERS)}.  [default: detected]")
@click.option("--out", type=PATH, default=Path("runs"), help="Output folder to check.  [default: runs]")
@click.option(
    "--limit-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Time limit for ranks that do not join or hang, in seconds.",
)
@options.ONLY_JSON
@options.with_flags(
    *(
        click.Option([flag], is_flag=True, expose_value=False, help=said)
        for flag, (_, said) in _DIAGNOSES.items()
    )
)
@click.pass_context
def doctor(context: click.Context, /, launcher: str | None, **flags: Any) -> None:
    """Print what each rank finds, and test the backend. Type it in place of 'dualeval run'.

    \b
    dualeval doctor
    torchrun --nproc-per-node 8 -m dualeval doctor
    srun -N2 --ntasks-per-node 4 dualeval doctor --backend horovod
    """
    asked = _Asked(**flags)
    detection = examine(os.environ, launcher)
    if detection.world is None:
        # Nobody knows which rank this is: it speaks for itself.
        assert detection.error is not None
        facts = _facts(detection, replace(World.alone(), launcher="an unknown launcher"), asked)
        _show(_report(_Findings(size=1, ranks={0: facts}), asked), asked)
        context.exit(detection.error.exit_code)
    context.exit(_examine_together(detection, detection.world, asked))


def _facts(detection: Detection, world: World, asked: _Asked) -> dict[str, Any]:
    """What this rank finds alone."""
    import torch

    from dualeval.backends import choose_backend, horovod, mpi
    from dualeval.engine.device.machines import machine_facts
    from dualeval.world.devices import check_name, look

    errors = [] if detection.error is None else [str(detection.error)]
    cores = own_cores()
    versions = machine_facts(torch.device("cpu"), _LIBRARIES)["versions"]
    sight = look(world)
    facts: dict[str, Any] = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "node_rank": world.node_rank,
        "launcher": world.launcher,
        "host": socket.gethostname(),
        "host_identity": cores.host,
        "pid": os.getpid(),
        "variables": {
            launcher: [asdict(variable) for variable in variables]
            for launcher, variables in detection.variables.items()
        },
        "notes": list(detection.notes),
        "outer": list(detection.outer),
        "backend": None,
        "gpus": [gpu.name for gpu in sight.gpus],
        "device": None,
        "device_type": None,
        "no_gpu": sight.reason,
        "cores": list(cores.numbers),
        "cpu_quotas": dict(cores.quotas),
        "threads": None,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "reached": None,
        "interface": None,
        "shares_output": None,
        "operations": {},
        "errors": errors,
        **{name: versions[name] for name in ("dualeval", "python", "torch")},
        "cuda": torch.version.cuda or "torch is built without",
        "nccl": _nccl(),
    }
    for name, describe in {"horovod": horovod.describe, "mpi": mpi.describe}.items():
        try:
            facts[name] = describe()
        except DualevalError as error:
            # A missing library matters only for the backend that was asked for: choosing that one says so.
            facts[name] = f"not usable: {error}"
    if detection.world is not None:
        try:
            facts["backend"] = choose_backend(asked.backend, world)
            check_name(asked.device)
        except DualevalError as error:
            errors.append(str(error))
    return facts


def _nccl() -> str:
    import torch

    if torch.version.cuda is None:
        return "torch is built without CUDA"
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return version if torch.cuda.is_available() else f"{version} (no GPU is seen)"


def _named(device: Any) -> str:
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _examine_together(detection: Detection, world: World, asked: _Asked) -> int:
    """Be one rank of the examination; returns the exit code."""
    findings = _Findings(size=world.size, ranks={world.rank: _facts(detection, world, asked)})
    facts = findings.ranks[world.rank]
    with _given_up(findings, world, asked):
        try:
            if world.size > 1:
                return _try_together(findings, facts, world, asked)
            findings.speed = _try_alone(facts, world, asked)
        # RuntimeError: a store of torch's whose other end has gone, among others.
        except (DualevalError, RuntimeError) as error:
            facts["errors"].append(f"{error} (while {findings.stage})")
    return _conclude(findings, asked, err=not world.is_main)


def _conclude(findings: _Findings, asked: _Asked, *, err: bool = False) -> int:
    """Show the report; returns the exit code."""
    report = _report(findings, asked)
    _show(report, asked, err=err)
    findings.shown = True
    return EXIT_FAILED if report["problems"] else EXIT_DONE


@contextmanager
def _given_up(findings: _Findings, world: World, asked: _Asked) -> Iterator[None]:
    """End this rank with what is known so far where the block takes too long.

    A library that waits for a rank which does not come cannot be interrupted.
    """

    def give_up() -> None:
        code = EXIT_FAILED
        if findings.probe is not None:
            Path(findings.probe).unlink(missing_ok=True)
        if not findings.shown:
            findings.ranks[world.rank]["errors"].append(
                f"rank {world.rank} gave up after {asked.limit_s:g} s, {findings.stage}"
            )
            code = _conclude(findings, asked, err=not world.is_main)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # Rank 0, which knows most, speaks first: a launcher ends all ranks when one has failed.
    timer = threading.Timer(asked.limit_s + (0 if world.is_main else _HEAD_START_S), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _try_alone(facts: dict[str, Any], world: World, asked: _Asked) -> dict[str, dict[str, float]]:
    with _probe(asked.out, facts) as probe:
        facts["shares_output"] = True if probe else None
        return {} if facts["errors"] else _try_backend(facts, world, asked)


def _try_together(findings: _Findings, facts: dict[str, Any], world: World, asked: _Asked) -> int:
    """Meet, report to rank 0 what was found, and try the backend where all ranks can and agree."""
    from dualeval.backends.rendezvous import placed_on_hosts
    from dualeval.world.store import JOINING, allow_connections, join_store, serve_store

    allow_connections(JOINING * world.size, f"rank {world.rank}")
    with ExitStack() as stack:
        store, _, _ = stack.enter_context(world.meeting.open(world, "the doctor"))
        world = placed_on_hosts(world, store)
        facts |= {name: getattr(world, name) for name in ("local_rank", "local_size", "node_rank")}
        # A second one, as the control plane has it; the first may be the launcher's.
        server = None
        if world.is_main:
            server, offer = serve_store(world)
            findings.probe = stack.enter_context(_probe(asked.out, facts))
            store.set("doctor/offer", json.dumps({**offer, "probe": findings.probe}))
        offer = json.loads(store.get("doctor/offer"))
        findings.addresses = offer["addresses"]
        limit = timedelta(seconds=asked.limit_s)
        control = server or join_store(offer, world.rank, "the control plane", limit)
        facts["reached"] = control.host
        facts["interface"] = interface_towards(control.host)
        facts["shares_output"] = Path(offer["probe"]).exists() if offer["probe"] else None
        third = asked.limit_s / 3
        control.set(f"doctor/alone/{world.rank}", json.dumps(facts))
        if world.is_main:
            findings.stage = "waiting for what the other ranks find"
            _collect(control, findings, "alone", third)
            control.set("doctor/verdict", _STOP if _must_stop(findings) else _GO)
        findings.stage = "waiting for rank 0's message"
        if control.get("doctor/verdict").decode() == _GO:
            findings.stage = f"trying the backend {facts['backend']}"
            try:
                findings.speed = _try_backend(facts, world, asked)
            except DualevalError as error:
                facts["errors"].append(str(error))
            control.set(f"doctor/together/{world.rank}", json.dumps(facts))
            if world.is_main:
                findings.stage = "waiting for the other ranks to try the backend"
                _collect(control, findings, "together", third)
        if world.is_main:
            code = _conclude(findings, asked)
            sys.stdout.flush()
            control.set("doctor/code", str(code))
        findings.stage = "waiting for rank 0's report"
        code = int(control.get("doctor/code"))
        findings.stage = "parting"
        _part(control, world, len(findings.ranks), third)
        return code


@contextmanager
def _probe(out: Path, facts: dict[str, Any]) -> Iterator[str | None]:
    """Keep a file in the output folder, or in the nearest one above it; yields its path, None without one."""
    folder = next(parent for parent in (out.absolute() / "x").parents if parent.is_dir())
    try:
        handle, path = tempfile.mkstemp(prefix=".dualeval-", suffix=".probe", dir=folder)
    except OSError as error:
        facts["errors"].append(f"{folder} cannot be written ({error.strerror}): give a folder with --out")
        yield None
        return
    os.close(handle)
    try:
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def _collect(store: TCPStore, findings: _Findings, stage: str, limit_s: float) -> None:
    """Take what the other ranks have found, until all have reported it or the time is up."""
    missing = set(range(1, findings.size))
    start = monotonic()
    while missing and monotonic() - start < limit_s:
        for rank in sorted(missing):
            if store.check([f"doctor/{stage}/{rank}"]):
                findings.ranks[rank] = json.loads(store.get(f"doctor/{stage}/{rank}"))
                missing.remove(rank)
        if missing:
            sleep(_PAUSE_S)
    for rank in missing & set(findings.ranks):
        findings.ranks[rank]["errors"].append(f"it hung or stopped: no more output for {limit_s:g} s")


def _must_stop(findings: _Findings) -> bool:
    """Whether ranks would wait for each other in vain if they tried the backend."""
    return (
        len(findings.ranks) < findings.size
        or any(facts["errors"] for facts in findings.ranks.values())
        or bool(differences(findings.ranks, BLOCKING))
    )


def _try_backend(facts: dict[str, Any], world: World, asked: _Asked) -> dict[str, dict[str, float]]:
    """Join the backend, choose devices and run every operation. A collective."""
    from dualeval.backends.selftest import check_operations, measure_all_reduce
    from dualeval.world.devices import connect

    with connect(
        asked.backend, world, asked.device, allow_shared_gpu=asked.allow_shared_gpu, mix_machines=True
    ) as backend:
        facts["device"], facts["device_type"] = _named(backend.device), backend.device.type
        facts["operations"] = check_operations(backend)
        return measure_all_reduce(backend)


def _part(store: TCPStore, world: World, present: int, limit_s: float) -> None:
    """Leave rank 0's store, and on rank 0 wait until the others have."""
    start = monotonic()
    left = store.add("doctor/left", 1)
    while world.is_main and left < present and monotonic() - start < limit_s:
        sleep(_PAUSE_S)
        left = store.add("doctor/left", 0)


def _report(findings: _Findings, asked: _Asked) -> dict[str, Any]:
    """What rank 0 shows of all ranks, or a rank of itself where they could not meet."""
    _share_cores(list(findings.ranks.values()))
    report = {
        "size": findings.size,
        "waited_s": asked.limit_s / 3,
        "output": str(asked.out.absolute()),
        "addresses": findings.addresses,
        "speed": findings.speed,
        "ranks": findings.ranks,
    }
    return {**report, "problems": list(problems(report))}


def _share_cores(ranks: list[dict[str, Any]]) -> None:
    """Set the number of threads that each rank would take, as ``dualeval run`` does."""
    everyone = [
        Cores(host=facts["host_identity"], numbers=facts["cores"], quotas=facts["cpu_quotas"])
        for facts in ranks
    ]
    for facts, cores in zip(ranks, everyone, strict=True):
        chosen = facts["omp_num_threads"] or ""
        facts["threads"] = int(chosen) if chosen.isdecimal() else share_of_cores(cores, everyone)


def _show(report: Mapping[str, Any], asked: _Asked, *, err: bool = False) -> None:
    click.echo(
        json.dumps(report, indent=2) if asked.as_json else diagnosis(report), nl=asked.as_json, err=err
    )
