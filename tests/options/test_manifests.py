"""Manifests for Kubernetes and AzureML parse, have what their pages promise, and a command that is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from dualeval.cli.run import run
from tests.conftest import ROOT

KUBERNETES = ROOT / "examples/kubernetes"
AZURE = ROOT / "examples/azureml"


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return content


def options(words: list[str]) -> dict[str, Any]:
    """What ``dualeval run`` makes of the words after it; fails on one that it does not have."""
    assert "run" in words
    given = words[words.index("run") + 1 :]
    return run.make_context("dualeval run", given).params


def pods(content: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """By replica, the only container of its pod, with the pod's volumes."""
    found = {}
    for name, replica in content["spec"][f"{kind}ReplicaSpecs"].items():
        assert replica["restartPolicy"] == "OnFailure"
        spec = replica["template"]["spec"]
        [container] = spec["containers"]
        found[name] = {**container, "volumes": {one["name"]: one for one in spec.get("volumes", ())}}
    return found


def check_volumes(pod: dict[str, Any]) -> None:
    """Memory for /dev/shm, and --out on a claim that outlives the pod."""
    places = {mount["mountPath"]: pod["volumes"][mount["name"]] for mount in pod["volumeMounts"]}
    assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in places["/work"]


def test_the_pytorch_job() -> None:
    content = read(KUBERNETES / "pytorchjob.yaml")
    assert (content["apiVersion"], content["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = pods(content, "pytorch")
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"] == replicas["Worker"]
    for pod in replicas.values():
        assert pod["name"] == "pytorch"
        assert pod["command"] == ["torchrun"]
        assert options(pod["args"])["out"] == Path("/work/runs/r18")
        # As many ranks as GPUs.
        assert str(pod["resources"]["limits"]["nvidia.com/gpu"]) == content["spec"]["nprocPerNode"]
        check_volumes(pod)


def test_the_mpi_job() -> None:
    content = read(KUBERNETES / "mpijob.yaml")
    assert (content["apiVersion"], content["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = pods(content, "mpi")
    launcher, worker = replicas["Launcher"], replicas["Worker"]
    words = launcher["args"]
    assert options(words)["backend"] == "mpi"
    count = content["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"]
    assert content["spec"]["slotsPerWorker"] == gpus
    assert int(words[words.index("-np") + 1]) == count * gpus
    check_volumes(worker)


@pytest.mark.parametrize("kind", ["pytorch", "mpi"])
def test_the_azureml_job(kind: str) -> None:
    content = read(AZURE / f"{kind}.yml")
    assert content["type"] == "command"
    assert content["distribution"] == {"type": kind, "process_count_per_instance": 8}
    words = content["command"].split()
    assert words[0] == "dualeval"
    assert options(words)["backend"] == ("mpi" if kind == "mpi" else None)
    for kind_of, name in re.findall(r"\$\{\{(inputs|outputs)\.(\w+)\}\}", content["command"]):
        assert name in content[kind_of]
    assert content["outputs"]["runs"]["mode"] == "rw_mount"
