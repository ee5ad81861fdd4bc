"""What ``conformance`` and ``bench`` find of a node and of the nodes on which it may start ranks."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dualeval.errors import DualevalError, LaunchError
from dualeval.launch.cores import usable_cores
from dualeval.launch.launchers.srun import expand_hosts, expand_tasks, is_step_of_tasks, under_srun
from dualeval.launch.site import Libraries, Node, Site
from dualeval.launch.ways import WAYS
from dualeval.tools.starts import ask

# Those of all ways to start ranks, and that by which some reach other nodes.
_PROGRAMS = (*sorted({way.program for way in WAYS.values() if way.program}), "ssh")
_ANSWER_S = 30.0
# In a word: a site's modules may say something around it.
_FACTS = "dualeval-facts "

# Runs a command with a limit; returns its exit code (None: it took too long), standard output and error.
Run = Callable[[Sequence[str], float], tuple[int | None, str, str]]


@click.command("node-facts", hidden=True)
def show_facts() -> None:
    """Look at this node, for ``find_site``; prints a line that ``_read_facts`` finds again."""
    click.echo(_FACTS + json.dumps(_node_facts(os.environ)))


def _read_facts(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition(_FACTS)[2]) for line in text.splitlines() if _FACTS in line]


def _node_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    import torch

    from dualeval.backends import horovod, mpi
    from dualeval.engine.device.accelerator import nvidia_driver
    from dualeval.engine.device.machines import machine_facts

    machine = machine_facts(torch.device("cpu"), ())
    facts: dict[str, Any] = {
        "host": environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "own_name": socket.gethostname(),
        "cpu": machine["model"],
        "cpu_capability": machine["cpu_capability"],
        "cores": usable_cores(),
        "gpus": [],
        "driver": nvidia_driver(),
        "horovod_built": [],
        "no_horovod": None,
        "no_mpi": None,
        "versions": {
            "dualeval": machine["versions"]["dualeval"],
            "python": machine["versions"]["python"],
            "torch": torch.__version__,
            "CUDA of torch": torch.version.cuda,
            "cuDNN": None,
            "NCCL of torch": None,
            "Horovod": None,
            "mpi4py": None,
            "system": _system(),
            "kernel": platform.release(),
            "C library": " ".join(platform.libc_ver()),
        },
    }
    versions = facts["versions"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append({"model": gpu.name, "memory_gib": gpu.total_memory / 2**30})
        versions["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        if torch.distributed.is_nccl_available():
            nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            versions["NCCL of torch"] = ".".join(map(str, nccl))
    for name, describe, absent in (
        ("Horovod", horovod.describe, "no_horovod"),
        ("mpi4py", mpi.describe, "no_mpi"),
    ):
        try:
            versions[name] = describe()
        except DualevalError as error:
            # Its first sentence.
            facts[absent] = re.split(r"(?<=[.,]) ", str(error))[0].rstrip(".,")
    if versions["Horovod"] is not None:
        facts["horovod_built"] = [name.lower() for name, has in horovod.built_with().items() if has]
    return facts


def _system() -> str | None:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def find_site(environ: Mapping[str, str], check: Callable[[], None]) -> tuple[Site, list[dict[str, Any]]]:
    """Find the nodes and the launchers that ranks can be started with; ``check`` may raise while it waits."""

    def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
        return ask(command, environ, limit_s, check)

    paths = {name: shutil.which(name, path=environ["PATH"]) for name in _PROGRAMS}
    programs = {name: path for name, path in paths.items() if path is not None}
    job = environ.get("SLURM_JOB_ID") if "srun" in programs else None
    nodes = _nodes_of_job(environ) if job else (Node(host=socket.gethostname(), cores=1),)
    bare = Site(
        nodes=nodes,
        programs=programs,
        job=job,
        in_step=is_step_of_tasks(environ.get("SLURM_STEP_ID", "")),
        is_root=os.geteuid() == 0,
    )
    command = [*(under_srun(bare, [1] * len(nodes)) if job else []), *dualeval_words(), "node-facts"]
    code, out, err = run(command, 2 * _ANSWER_S)
    by_host = {facts["host"]: facts for facts in _read_facts(out)}
    if code != 0 or len(by_host) < len(nodes):
        ended = "took too long" if code is None else f"exit code {code}"
        raise DualevalError(
            f"{len(by_host)} of {len(nodes)} nodes could be inspected ({ended}): {err.strip() or out.strip()}"
        )
    facts = [by_host[node.host] for node in nodes] if job else list(by_host.values())
    first = facts[0]
    site = replace(
        bare,
        nodes=tuple(
            Node(host=node.host, cores=node.cores if job else of_node["cores"], gpus=len(of_node["gpus"]))
            for node, of_node in zip(nodes, facts, strict=True)
        ),
        libraries=Libraries(
            horovod=frozenset(first["horovod_built"]),
            no_horovod=first["no_horovod"],
            mpi=first["versions"]["mpi4py"] or "",
            no_mpi=first["no_mpi"],
        ),
        at_a_node=not job or socket.gethostname() in {of_node["own_name"] for of_node in facts},
        slurm=_first_line([programs["srun"], "--version"], run) if job else "",
        srun_mpi=_srun_mpi(programs["srun"], run) if job else (),
        mpirun=_first_line([programs["mpirun"], "--version"], run) if "mpirun" in programs else "",
        no_ssh=_no_ssh(programs, facts, run) if len(nodes) > 1 else None,
    )
    return site, facts


def _nodes_of_job(environ: Mapping[str, str]) -> tuple[Node, ...]:
    components = environ.get("SLURM_HET_SIZE", environ.get("SLURM_PACK_SIZE", "1"))
    if components != "1":
        raise LaunchError(
            f"this is a heterogeneous Slurm job of {components} components, and 'dualeval conformance' "
            "starts ranks in a job of one. Ask for one without ':', as 'salloc -N2 dualeval conformance'."
        )
    try:
        hosts = expand_hosts(environ["SLURM_JOB_NODELIST"])
        cores = expand_tasks(environ.get("SLURM_JOB_CPUS_PER_NODE", f"1(x{len(hosts)})"))
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"SLURM_JOB_ID={environ['SLURM_JOB_ID']} is set, but not which nodes the job has ({error}). Type "
            "this in the shell that salloc opens, or in a batch script; or 'unset SLURM_JOB_ID'."
        ) from error
    return tuple(Node(host=host, cores=count) for host, count in zip(hosts, cores, strict=True))


def _first_line(command: Sequence[str], run: Run) -> str:
    _, out, err = run(command, _ANSWER_S)
    return next(iter((out or err).strip().splitlines()), "").strip()


def _srun_mpi(srun: str, run: Run) -> tuple[str, ...]:
    _, out, err = run([srun, "--mpi=list"], _ANSWER_S)
    known = re.findall(r"(?<![\w/])(none|pmi2|pmix\w*|cray_shasta)(?![\w/])", out + err)
    return tuple(dict.fromkeys(known))


def _no_ssh(programs: Mapping[str, str], facts: Sequence[Mapping[str, Any]], run: Run) -> str | None:
    """Why the nodes are not reached through ssh without a password, as horovodrun does it."""
    if "ssh" not in programs:
        return "there is no ssh on the PATH"
    for node in facts:
        if node["own_name"] == socket.gethostname():
            continue
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "StrictHostKeyChecking=no"]
        options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        code, _, err = run([programs["ssh"], *options, node["host"], "true"], _ANSWER_S)
        if code != 0:
            lines = err.strip().splitlines()
            return f"ssh to {node['host']} does not work without a password ({lines[-1] if lines else code})"
    return None


def dualeval_words() -> list[str]:
    """The words that are the command ``dualeval``, on every node that sees this environment."""
    script = Path(sys.executable).parent / "dualeval"
    return [str(script)] if script.exists() else [sys.executable, "-m", "dualeval"]


def versions_of(facts: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Each version, or all of them where the nodes differ."""
    merged: dict[str, str | None] = {}
    for name in facts[0]["versions"]:
        values = dict.fromkeys(node["versions"][name] for node in facts)
        merged[name] = " / ".join(map(str, values)) if len(values) > 1 else next(iter(values))
    return merged
