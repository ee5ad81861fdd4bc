"""What the ranks compare before they start: their jobs, their data and their machines.

The data are compared by the samples' ids, which must be unique, and by their contents. All ranks share the
hashing of the ids. The ranks of each node share that of the contents, for each node may have its own copy;
then the nodes compare their hashes.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.machines import check_kinds_of_ranks, machine_facts
from dualeval.engine.folder.layout import JobFacts
from dualeval.engine.folder.opening import launch_of
from dualeval.engine.identity.job import job_identity
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.model.preparation import identity_of as identity_of_preparation
from dualeval.engine.model.snapshot import Generators
from dualeval.engine.samples.feed import hashes_of
from dualeval.engine.samples.subset import (
    blocks_of,
    hashes_of_ids,
    identity_of,
    ids_of,
    joined,
    name_of,
    repeated,
)
from dualeval.engine.values.differences import differences, listing, structure_hint
from dualeval.engine.values.options import or_remove
from dualeval.errors import UsageError
from dualeval.process.status_line import doing
from dualeval.result import sha256_of_json
from dualeval.tasks import Dataset
from dualeval.world import World

_WORDS = 2  # int64 a block: 128 bits of the hash of its contents
_NAMED_AT_MOST = 4
_KNOWN_BY = ("model", "weights", "data", "num_classes", "class_map")
_WHOLE = (
    "Pass the whole data set on every rank, without a DistributedSampler, a Subset or a share of its own: "
    "dualeval divides the samples among the ranks"
)
_AT_ONCE = 1 << 23  # hashes of ids that rank 0 compares: 64 MB


@doing("identifying the job and its data")
def agree(
    evaluation: Evaluation,
    identity: ModelIdentity | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> JobFacts:
    """Compare jobs, data and machines over all ranks. A collective.

    ``identity`` is that of the model as it was built; by default, that of the evaluation's model.
    ``attributes`` are the task's before its first batch.
    """
    run, task, dataset, plan = evaluation.run, evaluation.task, evaluation.dataset, evaluation.plan
    backend, options = run.backend, run.options
    world = backend.world
    identity = identity or ModelIdentity.of(evaluation.model)
    measures = evaluation.metrics, evaluation.row_metrics
    step = partial(run.control.progress.step, Stage.SETUP)
    job = {
        **job_identity(task, dataset, identity, *measures, plan.num_samples, _of_one(attributes, world)),
        **identity_of(dataset),
        "columns": list(evaluation.columns),
        **(
            {}
            if evaluation.data is None
            else {"data_columns": evaluation.data.digests(plan.num_samples, step)}
        ),
        "batch_size": plan.batch_size,
        **identity_of_preparation(options),
        "on_error": options.on_error,
        # Clustered samples have wider intervals.
        **({} if evaluation.cluster is None else {"cluster": evaluation.cluster}),
    }
    job["constants"] = {name: _of_one(values, world) for name, values in job["constants"].items()}
    machine = {
        **machine_facts(backend.device, task.libraries, run.precision),
        # Beside the other versions, not in the job: a run may be continued with another torch on
        # request.
        "libraries": job.pop("libraries"),
    }
    ids, hashes = hashes_of_ids(dataset, plan.num_samples, world, step)
    run.control.meet()
    everyone = backend.all_gather_json(
        {
            "job": job,
            "numbers": _numbers_of(world),
            "machine": machine,
            "host": socket.gethostname(),
            "launch": launch_of(world),
            "ids": ids,
            "probe": _probe(evaluation),
        }
    )
    hosts = [rank["host"] for rank in everyone]
    check_same_job([rank["job"] for rank in everyone], hosts, [rank["numbers"] for rank in everyone])
    _check_ids(dataset, plan.num_samples, hashes, backend)
    # Rank 0's job, because values that hold a rank's number differ between the ranks.
    job = everyone[0]["job"]
    # Last: the cheaper checks have shown that every rank has the same samples.
    job["contents"] = _contents_fingerprint(dataset, plan.num_samples, backend, run.control)
    machines = [rank["machine"] for rank in everyone]
    check_kinds_of_ranks(machines, hosts, mix=options.mix_machines)
    _check_samples(evaluation, machines, hosts, [rank["probe"] for rank in everyone])
    return JobFacts(
        job=job,
        fingerprint=sha256_of_json(job),
        samples_digest=joined(plan.num_samples, [rank["ids"] for rank in everyone]),
        machines=machines,
        hosts=hosts,
        launches=sorted({rank["launch"] for rank in everyone} - {None}),
        files=sorted(task.exports),
        task_class=f"{type(task).__module__}.{type(task).__qualname__}",
        metrics=[getattr(metric, "spelled", metric.name) for metric in evaluation.measures],
        options=_named_options(run.job, task.options()),
        start_over=options.start_over if run.share is None else or_remove(options.out),
    )


def _named_options(asked: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """The options that people know a job by, for messages: all that were asked for, and some in any case."""
    known = {name: value for name, value in used.items() if name in {*asked, *_KNOWN_BY}}
    return dict(json.loads(json.dumps(known, default=str)))


def _probe(evaluation: Evaluation) -> dict[int, str | None]:
    """Hashes of the first and the last sample, if the user's code reads them."""
    dataset, run = evaluation.dataset, evaluation.run
    wrapped = getattr(dataset, "wrapped", dataset)
    is_ours = type(wrapped).__module__.partition(".")[0] == "dualeval"
    if run.backend.world.size == 1 or is_ours or getattr(dataset, "in_memory", False):
        return {}
    generators = Generators()
    hashes = hashes_of(dataset, evaluation.task, places := [0, evaluation.plan.num_samples - 1], run.workers)
    generators.put_back()
    return dict(zip(places, hashes, strict=True))


def _check_samples(
    evaluation: Evaluation, machines: list[Any], hosts: list[str], probes: list[dict[str, str | None]]
) -> None:
    """Check that ranks on one kind of machine read the same samples; random samples are not compared."""
    for rank, probe in enumerate(probes):
        first = machines.index(machines[rank])
        for place, digest in probe.items():
            if None not in (digest, probes[first][place]) and digest != probes[first][place]:
                raise UsageError(
                    f"sample {name_of(evaluation.dataset, int(place))} is a different one on rank {rank} on "
                    f"{hosts[rank]} than on rank {first} on {hosts[first]}. {_WHOLE}. If its __getitem__ "
                    "reads the rank (RANK, torch.distributed.get_rank()) or the host, take that out; if it "
                    "reads files, compare them on both hosts"
                )


def _numbers_of(world: World) -> dict[str, int]:
    """The numbers of this process, by the usual names of values that hold them."""
    ranks = dict.fromkeys(("rank", "global_rank"), world.rank)
    nodes = dict.fromkeys(("node_rank", "group_rank"), world.node_rank or 0)
    return {**ranks, **nodes, "local_rank": world.local_rank}


def _of_one(values: Any, world: World) -> Any:
    """Named values as a single process has them: a world_size that is this run's becomes 1."""
    sizes = {"world_size": world.size, "local_world_size": world.local_size}
    if not isinstance(values, Mapping):
        return values
    return {
        name: type(value)(1) if _is_number_called(name, value, sizes) else value
        for name, value in values.items()
    }


def _is_number_called(name: str, value: Any, numbers: Mapping[str, int]) -> bool:
    """Whether a value has the name of one of these numbers and equals it, as a number or a text."""
    called = name.rpartition(".")[2].strip("_").lower()
    return called in numbers and str(value) == str(numbers[called])


def check_same_job(
    jobs: list[dict[str, Any]], hosts: list[str], numbers: Sequence[Mapping[str, int]]
) -> None:
    """Check that every rank was given the same job, found the same data and built the same model.

    A value called rank, or the like, may hold each rank's own number.
    """
    for rank, job in enumerate(jobs):
        differing = [
            (name, first, here)
            for name, first, here in differences(jobs[0], job)
            if not (str(first) == "0" and _is_number_called(name, here, numbers[rank]))
        ]
        if differing:
            shown = listing(differing, "on rank 0", "here")
            whole = f" ({_WHOLE}.)" if {"samples", "data"} & {name for name, _, _ in differing} else ""
            raise UsageError(
                f"rank {rank} on {hosts[rank]} does not have the same job as rank 0 on {hosts[0]} ({shown}). "
                "Start every rank with the same options, data and weights."
                f"{whole}{_weights_hint(differing)}{structure_hint(differing)}"
            )


def _weights_hint(differing: Sequence[tuple[str, Any, Any]]) -> str:
    """A sentence if ranks have loaded different weights; else empty."""
    if not any(name.partition(".")[0] == "weights" for name, _, _ in differing):
        return ""
    return (
        " (weights is a digest of the tensors that a rank has in its model: the file of --weights is not the "
        "same for all ranks. Compare it on both hosts with sha256sum, or give a path on a file system that "
        "all ranks share. A model of your own code may also draw its weights: seed it alike on every rank.)"
    )


def _check_ids(dataset: Dataset, samples: int, hashes: npt.NDArray[np.uint64], backend: Backend) -> None:
    """Refuse, on rank 0, an id that several samples have, by the hashes of all ranks. A collective."""
    ordered, rounds = np.sort(hashes), -(-samples // _AT_ONCE)
    ends = np.searchsorted(ordered, np.array([(one << 64) // rounds for one in range(1, rounds)], np.uint64))
    twice: dict[str, int] = {}
    for rank_hashes in np.split(ordered.view(np.int64), ends):
        of_ranks = backend.gather(torch.from_numpy(rank_hashes))
        if of_ranks is not None and not twice:
            ids = (str(name) for block in blocks_of(samples) for name in ids_of(dataset, block))
            twice = repeated(torch.cat(of_ranks).numpy().view(np.uint64), ids)
    for name, count in twice.items():
        raise UsageError(
            f"{count:,} samples have the id {name!r}: each sample needs an id of its own. Let ids= (or the "
            "data set's id()) return another text for each, or leave ids= out: then the index is the id"
        )


def _contents_fingerprint(
    dataset: Dataset, samples: int, backend: Backend, control: ControlPlane
) -> str | None:
    """sha256, in hex, over the contents of the first samples; None if the data set does not give them.

    A collective, with the same result on every rank. Each node reads all blocks of samples, for it may have
    its own copy of the data; its local rank b mod local size reads block b.
    """
    read = getattr(dataset, "content_fingerprint", None)
    if read is None:
        return None
    blocks = blocks_of(samples)
    world = backend.world
    limits = torch.iinfo(torch.int64)
    least = torch.full((len(blocks), _WORDS), limits.max)
    most = torch.full((len(blocks), _WORDS), limits.min)
    for number in range(world.local_rank, len(blocks), world.local_size):
        control.progress.step(Stage.SETUP)
        least[number] = most[number] = torch.frombuffer(_hash_of(read, blocks[number]), dtype=torch.int64)
    control.meet()
    hashes = least.clone()
    # Two short reductions at any number of ranks: a list of each rank's hashes would take megabytes.
    least, most = backend.all_reduce(least, op="min"), backend.all_reduce(most, op="max")
    differing = (least != most).any(dim=1).nonzero().flatten().tolist()
    if differing:
        _refuse(dataset, blocks, differing, hashes, backend)
    return hashlib.sha256(least.numpy().tobytes()).hexdigest()


def contents_now(dataset: Dataset, samples: int) -> str | None:
    """``_contents_fingerprint`` of the data as they are now, read by this process alone."""
    read = getattr(dataset, "content_fingerprint", None)
    if read is None:
        return None
    return hashlib.sha256(b"".join(_hash_of(read, block) for block in blocks_of(samples))).hexdigest()


def _hash_of(read: Callable[[range], str], block: range) -> bytearray:
    return bytearray(hashlib.sha256(str(read(block)).encode()).digest()[: 8 * _WORDS])


def _refuse(
    dataset: Dataset, blocks: list[range], differing: list[int], hashes: torch.Tensor, backend: Backend
) -> None:
    """Raise an error that names the hosts with other contents. A collective."""
    words = hashes[differing[0]].tolist()
    everyone = backend.all_gather_json([socket.gethostname(), words])
    unread = torch.iinfo(torch.int64).max  # by that rank: another rank of its node has read it
    readers = {
        f"{host} (rank {rank})": there for rank, (host, there) in enumerate(everyone) if there[0] != unread
    }
    first, *_ = readers
    others = [reader for reader, there in readers.items() if there != readers[first]]
    block = blocks[differing[0]]
    raise UsageError(
        f"the data set has different contents on {', '.join(others[:_NAMED_AT_MOST])} than on {first}: "
        f"samples {block.start} to {block.stop - 1} ({dataset.id(block.start)} to "
        f"{dataset.id(block.stop - 1)}) differ, and {len(differing) - 1} more of {len(blocks)} such blocks. "
        "Give every node the same data."
    )
