"""What the ranks tell each other before they start: the same job, the same data, what machine each one is."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dualeval.engine.differences import differences, listing, structure_hint
from dualeval.engine.evaluation import Evaluation
from dualeval.engine.folder.process import launch_of
from dualeval.engine.identity import ModelIdentity, both_readings, contents_fingerprint, job_identity
from dualeval.engine.machines import check_kinds_of_ranks, machine_facts
from dualeval.engine.parts import identity_of
from dualeval.engine.preparation import identity_of as identity_of_preparation
from dualeval.engine.samples_digest import check_ids, hashes_of_ids, joined
from dualeval.errors import UsageError
from dualeval.result import sha256_of_json


def agree(
    evaluation: Evaluation,
    identity: ModelIdentity | None = None,
    attributes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> dict[str, Any]:
    """Compare jobs and machines over all ranks; returns what the result says about both. A collective.

    ``identity`` is the model's as it was built, None where it computes as it was; ``attributes`` are the
    task's before its first batch, of this rank and with the number of a process alone.
    """
    run, task, dataset, plan = evaluation.run, evaluation.task, evaluation.dataset, evaluation.plan
    backend, options = run.backend, run.options
    world = backend.world
    identity = identity or ModelIdentity.of(evaluation.model, world=world)
    first, alone = both_readings(
        world,
        lambda: job_identity(
            task,
            dataset,
            identity,
            evaluation.metrics,
            evaluation.row_metrics,
            plan.num_samples,
            attributes[0],
        ),
    )
    step = partial(run.control.progress.step, "setup")
    alone = {**alone, **identity.alone, "task_attributes": attributes[1] or None}
    job = {
        **first,
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
            "alone": {name: value for name, _, value in differences(first, alone)},
            "machine": machine,
            "host": socket.gethostname(),
            "launch": launch_of(world),
            "ids": ids,
        }
    )
    hosts = [rank["host"] for rank in everyone]
    check_same_job([rank["job"] for rank in everyone], hosts, [rank["alone"] for rank in everyone])
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


def check_same_job(jobs: list[dict[str, Any]], hosts: list[str], alone: list[dict[str, Any]]) -> None:
    """Check that every rank was given the same job, found the same data and built the same model.

    A field that holds a rank's number may also be as rank 0 has it in ``alone``: by name, its value with the
    number of a process alone.
    """
    for rank, job in enumerate(jobs):
        found = differences(jobs[0], job)
        differing = [each for each in found if each[0] not in alone[rank] or alone[rank][each[0]] != each[1]]
        if differing:
            shown = listing(differing, "on rank 0", "here")
            raise UsageError(
                f"rank {rank} on {hosts[rank]} does not have the same job as rank 0 on {hosts[0]} ({shown}). "
                "Start every rank with the same options, data and weights."
                f"{_weights_hint(differing, hosts[0], hosts[rank])}{structure_hint(differing)}"
                f"{_layout_hint(differing)}"
            )


def _layout_hint(found: Sequence[tuple[str, Any, Any]]) -> str:
    """A sentence where a trial of the layout has come to another end on one rank; else empty."""
    if not any(name == "layout" for name, _, _ in found):
        return ""
    return (
        " (The model's forward fails channels-last on one of the two ranks, on the same first samples: with "
        "--layout contiguous no rank tries it.)"
    )


def _weights_hint(found: Sequence[tuple[str, Any, Any]], first: str, here: str) -> str:
    """A sentence on ranks that have loaded other weights; else empty."""
    if not any(name.partition(".")[0] == "weights" for name, _, _ in found):
        return ""
    where = f"on {here}" if first == here else f"on {first} and on {here}"
    return (
        " (weights is a digest of the tensors that a rank has in its model: the file of --weights is not "
        f"the same for all ranks. Compare it {where} with sha256sum, and copy it again, or give a path on a "
        "file system that all ranks share. A model of your own code may also draw its weights: seed it alike "
        "on every rank.)"
    )
