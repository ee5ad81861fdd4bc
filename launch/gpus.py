"""Which GPU is whose: a pure function of the GPUs that each rank sees.

A GPU is known by its UUID, a slice of one (MIG) by its own: numbers say little, because a launcher may show
each rank other GPUs, all of them starting at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dualeval.errors import UsageError

# By these Slurm tells a task that it was given GPUs: how many, or the numbers of the step's or the job's. A
# step without any ("srun --gres=none") has the job's all the same, and neither of the others.
_SLURM_COUNT = "SLURM_GPUS_ON_NODE"
_SLURM_STEPS, _SLURM_JOBS = "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"
# NVIDIA's container runtime reads it. Images set it to "all", on nodes without a GPU, too. A device plugin of
# Kubernetes sets it to the UUIDs of the GPUs that the container was given.
_CONTAINER = "NVIDIA_VISIBLE_DEVICES"
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a slice of one."""

    # Torch's number for it, on the rank that sees it.
    number: int
    # Its UUID.
    id: str
    # Its model.
    name: str
    # The UUID of the whole GPU, where it is a slice: NCCL takes two slices of one for one GPU.
    whole: str = ""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one rank sees."""

    rank: int
    host: str
    # What it can compute on.
    gpus: tuple[Gpu, ...] = ()
    # Why there is no GPU; empty if there is one.
    reason: str = ""
    # The variable by which its launcher says that there are some, with its value; empty where no launcher
    # does.
    promised: str = ""
    # The number of the GPU that is current in a caller's process that uses CUDA; else None.
    current: int | None = None

    @property
    def where(self) -> str:
        """The rank in messages."""
        return f"rank {self.rank} on {self.host}"


def promised_gpus(environ: Mapping[str, str]) -> str:
    """The variable by which a launcher says that this process was given GPUs, with its value; else empty."""
    if _SLURM_COUNT in environ:
        count = environ[_SLURM_COUNT]
        return "" if count in ("", "0") else f"{_SLURM_COUNT}={count}"
    in_step = False
    if "SLURM_STEP_ID" in environ:  # only then is Slurm's file needed
        from dualeval.launch.launchers.srun import is_step_of_tasks

        in_step = is_step_of_tasks(environ["SLURM_STEP_ID"])
    for name in (_SLURM_STEPS, *([] if in_step else [_SLURM_JOBS])):
        if environ.get(name):
            return f"{name}={environ[name]}"
    value = environ.get(_CONTAINER, "")
    return f"{_CONTAINER}={value}" if value.startswith(("GPU-", "MIG-")) else ""


def as_callers_chose(everyone: Sequence[Sight], *, allow_shared: bool) -> list[Sight]:
    """What each rank sees, and of a caller that computes on GPUs already, its current one alone.

    GPU 0 is current where nobody has chosen one: where ranks have it in common it is no choice.
    """
    current = [next((gpu for gpu in sight.gpus if gpu.number == sight.current), None) for sight in everyone]
    ids = [gpu.id for gpu in current if gpu is not None]
    return [
        replace(sight, gpus=(gpu,))
        if gpu is not None and (gpu.number > 0 or allow_shared or ids.count(gpu.id) == 1)
        else sight
        for sight, gpu in zip(everyone, current, strict=True)
    ]


def choose_gpus(
    everyone: Sequence[Sight], wanted: str | None = None, *, allow_shared: bool = False, mix: bool = False
) -> list[Gpu | None]:
    """Choose each rank's GPU."""
    if wanted == "cpu":
        return [None for _ in everyone]
    if wanted is not None and ":" in wanted:
        return [*_numbered(int(wanted.partition(":")[2]), everyone)]
    _refuse_missing(wanted, everyone, mix=mix)
    seeing = [sight for sight in everyone if sight.gpus]
    by_rank = _divide(seeing, most=1)
    if len(by_rank) < len(seeing) and not allow_shared:
        raise _too_few_gpus(seeing, by_rank)
    most = 1
    while len(by_rank) < len(seeing):
        most += 1
        by_rank = _divide(seeing, most=most)
    return [by_rank.get(sight.rank) for sight in everyone]


def _numbered(number: int, everyone: Sequence[Sight]) -> list[Gpu]:
    gpus = []
    for sight in everyone:
        gpu = next((gpu for gpu in sight.gpus if gpu.number == number), None)
        if gpu is None:
            numbers = ", ".join(str(gpu.number) for gpu in sight.gpus)
            shown = f"sees GPU {numbers}" if numbers else f"sees none: {sight.reason}"
            raise UsageError(
                f"--device cuda:{number}: {sight.where} {shown}. Type a number that every rank sees, or "
                "--device cuda for one GPU per rank, or --device cpu."
            )
        gpus.append(gpu)
    return gpus


def _refuse_missing(wanted: str | None, everyone: Sequence[Sight], *, mix: bool) -> None:
    """Raise where a rank sees no GPU and should."""
    blind = [sight for sight in everyone if not sight.gpus]
    if not blind:
        return
    first = next((sight for sight in blind if sight.promised), blind[0])
    who = _named(blind)
    if wanted is not None:
        raise UsageError(
            f"--device {wanted}: {who} cannot compute on a GPU: {first.reason}. Type --device cpu, or leave "
            f"--device out where some ranks may compute on CPUs (--mix-machines)."
        )
    if first.promised:
        raise UsageError(
            f"{who} cannot compute on a GPU ({first.reason}), although {first.promised} promises one on "
            f"{first.host}. Fix that node, leave it out, or type --device cpu to compute on CPUs."
        )
    if len(blind) < len(everyone) and not mix:
        raise UsageError(
            f"{who} cannot compute on a GPU ({first.reason}), and the other ranks can. Fix that node or "
            f"leave it out, type --device cpu to compute on CPUs everywhere, or --mix-machines to compute on "
            f"both."
        )


def _named(sights: Sequence[Sight]) -> str:
    """Ranks by their hosts, for messages."""
    ranks: dict[str, list[str]] = {}
    for sight in sights:
        ranks.setdefault(sight.host, []).append(str(sight.rank))
    texts = [
        f"rank{'s' if len(of_host) > 1 else ''} {', '.join(of_host[:_MOST_NAMED])}"
        f"{', ...' if len(of_host) > _MOST_NAMED else ''} on {host}"
        for host, of_host in ranks.items()
    ]
    more = len(texts) - _MOST_NAMED
    return "; ".join(texts[:_MOST_NAMED]) + (f"; and {more} more hosts" if more > 0 else "")


def _divide(sights: Sequence[Sight], most: int) -> dict[int, Gpu]:
    """Give as many ranks as possible one of the GPUs that they see, each GPU to so many at most.

    A maximum matching by augmenting paths (Berge 1957), in rank order. Ranks that see the same GPUs take them
    in that order, so that rank k of a plain node has GPU k.
    """
    seen_before: dict[tuple[str, ...], int] = {}
    preferences: dict[int, list[Gpu]] = {}
    for sight in sights:
        ids = tuple(gpu.id for gpu in sight.gpus)
        turn = seen_before.get(ids, 0) % len(ids)
        seen_before[ids] = turn + 1
        preferences[sight.rank] = [*sight.gpus[turn:], *sight.gpus[:turn]]
    holders: dict[str, list[int]] = {}
    by_rank: dict[int, Gpu] = {}

    def give(rank: int, tried: set[str]) -> bool:
        # A free one that comes later in its order goes before one that another rank has to give up.
        for gpu in preferences[rank]:
            if gpu.id not in tried and len(holders.setdefault(gpu.id, [])) < most:
                holders[gpu.id].append(rank)
                by_rank[rank] = gpu
                return True
        for gpu in preferences[rank]:
            if gpu.id in tried:
                continue
            tried.add(gpu.id)
            for other in tuple(holders[gpu.id]):
                if give(other, tried):
                    holders[gpu.id].remove(other)
                    holders[gpu.id].append(rank)
                    by_rank[rank] = gpu
                    return True
        return False

    for sight in sights:
        give(sight.rank, set())
    return by_rank


def _too_few_gpus(sights: Sequence[Sight], by_rank: Mapping[int, Gpu]) -> UsageError:
    """The error where a rank is left without a GPU of its own; names the two that would share one."""
    left = next(sight for sight in sights if sight.rank not in by_rank)
    gpu = left.gpus[0]
    other = next(sight for sight in sights if sight.rank in by_rank and by_rank[sight.rank].id == gpu.id)
    ids = {gpu.id for gpu in left.gpus}
    ranks = sum(bool(ids & {gpu.id for gpu in sight.gpus}) for sight in sights)
    count = "1 GPU" if len(ids) == 1 else f"{len(ids)} GPUs"
    return UsageError(
        f"{other.where} and {left.where} would compute on one GPU, {gpu.name} ({gpu.id}): {ranks} ranks see "
        f"{count}, and each rank takes one of its own. Start as many ranks per node as it has GPUs, let the "
        "launcher show each rank a different GPU, or type --device cpu, or --allow-shared-gpu to let ranks "
        "share."
    )
