"""What the ranks tell each other before they start: the same job, the same data, what machine each one is."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from dualeval.engine.differences import differences, listing, structure_hint
from dualeval.engine.evaluation import Evaluation
from dualeval.engine.folder.process import launch_of
from dualeval.engine.identity import ModelIdentity, job_identity
from dualeval.engine.machines import check_kinds_of_ranks, machine_facts
from dualeval.engine.parts import identity_of
from dualeval.engine.preparation import identity_of as identity_of_preparation
from dualeval.engine.samples_digest import check_ids, contents_fingerprint, hashes_of_ids, joined
from dualeval.errors import UsageError
from dualeval.result import sha256_of_json
from dualeval.world import World


def agree(
    evaluation: Evaluation,
    identity: ModelIdentity | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Compare jobs and machines over all ranks; returns what the result says about both. A collective.

    ``identity`` is the model's as it was built, None where it computes as it was; ``attributes`` are the
    task's before its first batch.
    """
    run, task, dataset, plan = evaluation.run, evaluation.task, evaluation.dataset, evaluation.plan
    backend, options = run.backend, run.options
    world = backend.world
    identity = identity or ModelIdentity.of(evaluation.model)
    measures = evaluation.metrics, evaluation.row_metrics
    step = partial(run.control.progress.step, "setup")
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
        # The intervals of samples that go together are wider.
        **({} if evaluation.cluster is None else {"cluster": evaluation.cluster}),
    }
    job["constants"] = {name: _of_one(values, world) for name, values in job["constants"].items()}
    machine = {
        **machine_facts(backend.device, task.libraries, options.precision),
        # Beside the versions: what was computed with another torch may be gone on with, where it is
        # asked for.
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
        }
    )
    hosts = [rank["host"] for rank in everyone]
    check_same_job([rank["job"] for rank in everyone], hosts, [rank["numbers"] for rank in everyone])
    check_ids(dataset, plan.num_samples, hashes, backend)
    # What holds a rank's number is another value on each.
    job = everyone[0]["job"]
    # After what costs less to compare, and so of the same samples on every rank.
    job["contents"] = contents_fingerprint(dataset, plan.num_samples, backend, run.control)
    machines = [rank["machine"] for rank in everyone]
    check_kinds_of_ranks(machines, hosts, mix=options.mix_machines)
    return {
        "job": job,
        "machine": machines[0],
        "machines": machines,
        "hosts": hosts,
        "launches": sorted({rank["launch"] for rank in everyone} - {None}),
        "files": sorted(task.exports),
        "task_class": f"{type(task).__module__}.{type(task).__qualname__}",
        "metrics": [getattr(metric, "spelled", metric.name) for metric in evaluation.measures],
        "fingerprint": sha256_of_json(job),
        "samples_digest": joined(plan.num_samples, [rank["ids"] for rank in everyone]),
    }


def _numbers_of(world: World) -> dict[str, int]:
    """The numbers of this process, by what a value may be called that holds one."""
    ranks = dict.fromkeys(("rank", "global_rank"), world.rank)
    nodes = dict.fromkeys(("node_rank", "group_rank"), world.node_rank or 0)
    return {**ranks, **nodes, "local_rank": world.local_rank}


def _of_one(values: Any, world: World) -> Any:
    """Named values as on one process: what is called world_size, and is this run's, counts as one."""
    sizes = {"world_size": world.size, "local_world_size": world.local_size}
    if not isinstance(values, Mapping):
        return values
    return {
        name: type(value)(1) if _is_number_called(name, value, sizes) else value
        for name, value in values.items()
    }


def _is_number_called(name: str, value: Any, numbers: Mapping[str, int]) -> bool:
    """Whether a value has the name of one of these numbers, and holds it, or its text."""
    called = name.rpartition(".")[2].strip("_").lower()
    return called in numbers and str(value) == str(numbers[called])


def check_same_job(
    jobs: list[dict[str, Any]], hosts: list[str], numbers: Sequence[Mapping[str, int]]
) -> None:
    """Check that every rank was given the same job, found the same data and built the same model.

    What is called rank, or the like, may hold each rank's own number.
    """
    for rank, job in enumerate(jobs):
        differing = [
            (name, first, here)
            for name, first, here in differences(jobs[0], job)
            if not (str(first) == "0" and _is_number_called(name, here, numbers[rank]))
        ]
        if differing:
            shown = listing(differing, "on rank 0", "here")
            raise UsageError(
                f"rank {rank} on {hosts[rank]} does not have the same job as rank 0 on {hosts[0]} ({shown}). "
                "Start every rank with the same options, data and weights."
                f"{_weights_hint(differing)}{structure_hint(differing)}"
            )


def _weights_hint(found: Sequence[tuple[str, Any, Any]]) -> str:
    """A sentence on ranks that have loaded other weights; else empty."""
    if not any(name.partition(".")[0] == "weights" for name, _, _ in found):
        return ""
    return (
        " (weights is a digest of the tensors that a rank has in its model: the file of --weights is not the "
        "same for all ranks. Compare it on both hosts with sha256sum, or give a path on a file system that "
        "all ranks share. A model of your own code may also draw its weights: seed it alike on every rank.)"
    )
