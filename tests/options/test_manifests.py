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


def pods(kind: str) -> dict[str, dict[str, Any]]:
    """By replica, the only container of its pod: with memory for /dev/shm, and --out on a claim."""
    found = {}
    content = read(KUBERNETES / f"{kind}job.yaml")
    for name, replica in content["spec"][f"{kind}ReplicaSpecs"].items():
        assert replica["restartPolicy"] == "OnFailure"
        spec = replica["template"]["spec"]
        [found[name]] = spec["containers"]
        if name != "Launcher":
            volumes = {one["name"]: one for one in spec["volumes"]}
            places = {mount["mountPath"]: volumes[mount["name"]] for mount in found[name]["volumeMounts"]}
            assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
            assert "persistentVolumeClaim" in places["/work"]
    return {**found, "": content}


def test_the_pytorch_job() -> None:
    found = pods("pytorch")
    assert found["Master"] == found["Worker"]
    assert found["Master"]["command"] == ["torchrun"]
    assert options(found["Master"]["args"])["out"] == Path("/work/runs/r18")
    # As many ranks as GPUs.
    gpus = found["Master"]["resources"]["limits"]["nvidia.com/gpu"]
    assert str(gpus) == found[""]["spec"]["nprocPerNode"]


def test_the_mpi_job() -> None:
    found = pods("mpi")
    words = found["Launcher"]["args"]
    assert options(words)["backend"] == "mpi"
    count = found[""]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    gpus = found["Worker"]["resources"]["limits"]["nvidia.com/gpu"]
    assert found[""]["spec"]["slotsPerWorker"] == gpus
    assert int(words[words.index("-np") + 1]) == count * gpus


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
