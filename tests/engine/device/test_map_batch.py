"""Batches of any nest on their way to a device: one walk for every device."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from dualeval.engine.device import accelerator
from dualeval.engine.device.transfer import Uploads, map_batch
from tests.engine.samples.test_feed import Boxes, Scan
from tests.vehicles.played_device import Played

CPU = torch.device("cpu")


class Encoded(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that has more to it, and moves itself."""

    encodings = "lost"

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoded:
        found = Encoded({name: value.to(device) for name, value in self.items()})
        found.encodings = self.encodings
        return found


class Graph:
    """As PyTorch Geometric's Batch."""

    def __init__(self, nodes: Tensor) -> None:
        self._store = {"nodes": nodes}

    @property
    def nodes(self) -> Tensor:
        return self._store["nodes"]

    def to(self, *arguments: Any, **options: Any) -> Graph:
        return Graph(self.nodes.to(*arguments, **options))


class Image(Tensor):
    pass


ONES = torch.ones(2)
ENCODED = Encoded(a=ONES)
ENCODED.encodings = "of the tokenizer"
NESTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dict": ({"a": [ONES, "x"]}, lambda nest: nest["a"][0]),
    "namedtuple": (Boxes((1, ONES)), lambda nest: nest.corners[1]),
    "dataclass": ([Scan(ONES, 1.0)], lambda nest: nest[0].pixels),
    "user dict": (UserDict(a=ONES), lambda nest: nest.data["a"]),
    "mapping that moves itself": ({"b": ENCODED}, lambda nest: nest["b"]["a"]),
    "object that moves itself": ([Graph(ONES)], lambda nest: nest[0].nodes),
    "sequences": (pack_sequence([ONES]), lambda nest: nest.data),
    "tensor of a class of its own": ((ONES.as_subclass(Image),), lambda nest: nest[0]),
    "sparse": ([torch.eye(2).to_sparse()], lambda nest: nest[0].to_dense()[0] + torch.eye(2)[1]),
}


@pytest.mark.parametrize("device", [accelerator.Host(CPU), Played(["copying"])], ids=["cpu", "played"])
@pytest.mark.parametrize("name", NESTS)
def test_every_kind_of_nest_gets_there(name: str, device: accelerator.Accelerator) -> None:
    nest, tensor_of = NESTS[name]
    found = Uploads(device).start(nest)
    assert type(found) is type(nest)
    assert tensor_of(found).tolist() == [1, 1]
    own = isinstance(nest, dict) and "b" in nest
    assert not own or found["b"].encodings == "of the tokenizer"
    if name == "sequences":
        assert isinstance(found, PackedSequence) and found.batch_sizes.device == CPU


def test_a_batch_of_transformers_is_copied_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def to(*_: Any) -> Any:
        raise AssertionError("it would wait for the device")

    monkeypatch.setattr(to, "__module__", transformers.BatchEncoding.to.__module__)
    monkeypatch.setattr(transformers.BatchEncoding, "to", to)
    found = Uploads(Played(["copying"])).start(transformers.BatchEncoding({"input_ids": ONES}))
    assert type(found) is transformers.BatchEncoding and found["input_ids"].tolist() == [1, 1]


class Pair:
    """Two tensors in a class that torch's pytree knows, and gives one by one."""

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other


def test_a_class_of_ones_own_that_pytree_knows_is_a_nest() -> None:
    register: Any = pytree.register_pytree_node
    register(Pair, lambda pair: (iter((pair.one, pair.other)), None), lambda parts, _: Pair(*parts))
    found = map_batch(torch.neg, [Pair(ONES, 2 * ONES)])[0]
    assert (found.one.tolist(), found.other.tolist()) == ([-1, -1], [-2, -2])


@pytest.mark.parametrize("name", ["dict", "namedtuple", "dataclass", "user dict"])
def test_no_batch_waits_for_the_collector(name: str) -> None:
    """It would hold the memory of many, on the device and on the host."""
    nest, tensor_of = NESTS[name]
    gc.disable()
    try:
        there = map_batch(torch.clone, nest)
        back = map_batch(torch.clone, there)
        left = weakref.ref(tensor_of(there))
        del there
        assert left() is None and tensor_of(back).tolist() == [1, 1]
    finally:
        gc.enable()


class Opaque:
    def __init__(self, **inner: Any) -> None:
        self.__dict__.update(inner)


def test_what_holds_no_tensors_stays_as_it_is() -> None:
    loop = Opaque(x=1)
    loop.itself = loop  # type: ignore[attr-defined]
    others = [loop, {1, 2}, np.ones(2), slice(3), len, Opaque, namedtuple]
    for device in (accelerator.Host(CPU), Played()):
        found = Uploads(device).start(others)
        assert all(one is other for one, other in zip(found, others, strict=True))


def test_a_tensor_that_is_there_twice_is_copied_once() -> None:
    device = Played(["copying"])
    found = Uploads(device).start([ONES, {"a": ONES}])
    assert found[0] is found[1]["a"]
