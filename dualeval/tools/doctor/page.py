"""What ``dualeval doctor`` prints: a pure function of what the ranks found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from dualeval.messages import counted

# Of what a rank found, what has to be the same on all of them.
_SAME = {
    "launcher": "the launcher",
    "size": "the number of ranks",
    "backend": "the backend",
    "dualeval": "dualeval",
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "horovod": "Horovod",
    "mpi": "mpi4py",
}
_VERSIONS = ("dualeval", "python", "torch", "cuda", "nccl", "horovod", "mpi")
# Differences in these keep ranks from meeting in one group.
BLOCKING = ("launcher", "size", "backend")


def differences(ranks: Mapping[int, Mapping[str, Any]], names: Sequence[str] = tuple(_SAME)) -> list[str]:
    """Say in which of the named findings the ranks differ, and on which ranks they are what."""
    sentences = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, facts in sorted(ranks.items()):
            by_value.setdefault(str(facts[name]), []).append(rank)
        if len(by_value) > 1:
            groups = "; ".join(f"{value} on {_ranks(where)}" for value, where in by_value.items())
            sentences.append(f"the ranks differ in {_SAME[name]}: {groups}")
    return sentences


def problems(report: Mapping[str, Any]) -> Iterator[str]:
    """Everything in a report that has to be put right, or looked at, before a run."""
    ranks: Mapping[int, Mapping[str, Any]] = report["ranks"]
    absent = sorted(set(range(report["size"])) - set(ranks))
    if absent:
        yield f"{_ranks(absent)} did not report within {report['waited_s']:.3g} s"
    yield from differences(ranks)
    if any(facts["device_type"] == "cuda" for facts in ranks.values()):
        for rank, facts in sorted(ranks.items()):
            if facts["device_type"] == "cpu":
                yield f"rank {rank} on {facts['host']} computes on the CPU, others on GPUs: {facts['no_gpu']}"
    for name in ("errors", "notes"):
        for text, where in _by_text(ranks, name):
            yield text if report["size"] == 1 else f"{text} ({_ranks(where)})"
    for rank, facts in sorted(ranks.items()):
        for name, wrong in facts["operations"].items():
            if wrong:
                yield f"{name} is wrong on rank {rank}: {wrong}"
        if rank != 0 and facts["shares_output"] is False:
            yield (
                f"rank {rank} on {facts['host']} does not see rank 0's files in {report['output']}: the run "
                f"works, but its rows must be sent to rank 0, and only rank 0's part can be resumed"
            )
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for facts in ranks.values():
        hosts.setdefault(facts["host"], []).append(facts)
    for host, of_host in hosts.items():
        yield from islice(_too_many_threads(host, of_host), 1)


def _too_many_threads(host: str, of_host: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The limits of a host's cores, and then of each quota there, that the threads of its ranks exceed."""
    cores = {core for facts in of_host for core in facts["cores"]}
    quotas = {name: cpus for facts in of_host for name, cpus in facts["cpu_quotas"].items()}
    limits = [(of_host, len(cores), f"on {counted(len(cores), 'core')}")]
    for name, cpus in quotas.items():
        limited = [facts for facts in of_host if name in facts["cpu_quotas"]]
        limits.append((limited, cpus, f"with a quota of {cpus:g} CPUs"))
    for ranks, most, where in limits:
        threads = sum(facts["threads"] or 0 for facts in ranks)
        if threads > max(most, len(ranks)):
            yield (
                f"{counted(len(ranks), 'rank')} on {host} would take {threads} threads {where}: set "
                f"OMP_NUM_THREADS lower, or leave it unset"
            )


def _by_text(ranks: Mapping[int, Mapping[str, Any]], name: str) -> Iterator[tuple[str, list[int]]]:
    """What ranks say, each text once, with the ranks that say it."""
    where: dict[str, list[int]] = {}
    for rank, facts in sorted(ranks.items()):
        for text in facts[name]:
            where.setdefault(text, []).append(rank)
    yield from where.items()


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:20]))}{' and more' if len(ranks) > 20 else ''}"


def diagnosis(report: Mapping[str, Any]) -> str:
    """The report as text, for people."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    ranks: Mapping[int, Mapping[str, Any]] = report["ranks"]
    speaker = ranks[min(ranks)]
    nodes = len({facts["host"] for facts in ranks.values()})
    yield f"{counted(report['size'], 'rank')} on {counted(nodes, 'node')}, started by {speaker['launcher']}\n"
    yield f"Variables (rank {min(ranks)})"
    # Launchers share names: each is shown once, first of all as the one that takes it has it.
    shown = {each["name"] for each in speaker["variables"].get(speaker["launcher"], ())}
    for launcher, variables in speaker["variables"].items():
        is_taken = launcher == speaker["launcher"]
        for variable in [each for each in variables if is_taken or each["name"] not in shown]:
            shown.add(variable["name"])
            status = "taken" if is_taken else "not taken"
            meaning = f"  ({variable['meaning']})" if variable["meaning"] else ""
            yield f"  {launcher:<11} {status:<10} {variable['name']}={variable['value']}{meaning}"
    if not any(speaker["variables"].values()):
        yield "  no launcher's are set"
    for text in speaker["outer"]:
        yield f"  {text}"
    yield ""
    rows = [
        {
            "rank": rank,
            "host": facts["host"],
            "pid": facts["pid"],
            "local": f"{facts['local_rank']} of {facts['local_size']}",
            "node": facts["node_rank"],
            "backend": facts["backend"],
            "GPUs seen": len(facts["gpus"]),
            "device": facts["device"],
            "threads of cores": f"{_or_dash(facts['threads'])} of {_cores(facts)}",
            "reaches rank 0 at": facts["reached"],
            "over": facts["interface"],
        }
        for rank, facts in sorted(ranks.items())
    ]
    yield from _table(rows)
    yield ""
    for name in _VERSIONS:
        yield f"{_SAME[name]:<16}{speaker[name]}"
    yield f"{'control plane':<16}{', '.join(report['addresses']) or '-'}, at a port that the kernel picks"
    yield f"{'output folder':<16}{report['output']}, {_shared(ranks)}"
    yield f"{'operations':<16}{_operations(ranks)}"
    for device, speed in report["speed"].items():
        yield (
            f"{'all_reduce':<16}{speed['latency_us']:,.0f} us for 8 bytes, "
            f"{speed['bandwidth_gb_s']:.2f} GB/s at 64 MiB ({device} tensors)"
        )
    yield ""
    problems = report["problems"]
    yield "No problem was found." if not problems else f"{counted(len(problems), 'problem')}:"
    for problem in problems:
        yield f"  - {problem}"


def _cores(facts: Mapping[str, Any]) -> str:
    """The number of cores that a rank may run on, and of how many it may have the time where that is less."""
    number, quota = len(facts["cores"]), min(facts["cpu_quotas"].values(), default=None)
    return str(number) if quota is None or quota >= number else f"{number}, quota {quota:g}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    cells = [list(rows[0]), *([_or_dash(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _shared(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    seen = [facts["shares_output"] for facts in ranks.values()]
    if None in seen:
        return "not tried on all ranks"
    return "seen by all ranks" if all(seen) else "not seen by all ranks"


def _operations(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    tried = next(iter(ranks.values()))["operations"]
    if not tried or not all(facts["operations"] for facts in ranks.values()):
        return "not tried on all ranks"
    wrong = [name for name in tried if any(facts["operations"].get(name) for facts in ranks.values())]
    return f"{', '.join(wrong)} wrong" if wrong else f"{', '.join(tried)}: right on all ranks"
