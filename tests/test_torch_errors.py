"""The table of torch's errors against those that the installed torch raises."""

from __future__ import annotations

import io
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from dualeval.errors import text_of
from dualeval.torch_errors import TorchError


def lose_a_worker(end: Callable[[], object]) -> None:
    data: Any = [0]
    next(iter(DataLoader(data, num_workers=1, collate_fn=lambda _: end(), multiprocessing_context="fork")))


def share_without_a_file() -> None:
    free, tensor = os.dup(0), torch.zeros(1)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def serve_twice() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    TCPStore("localhost", store.port, is_master=True, wait_for_workers=False)


def load(content: bytes) -> None:
    torch.load(io.BytesIO(content), weights_only=True)


def load_a_module() -> None:
    file = io.BytesIO()
    torch.save(nn.Linear(1, 1), file)
    load(file.getvalue())


def put_on_meta() -> None:
    nn.Parameter(torch.zeros(1)).data = torch.zeros(1, device="meta")


def register_for_no_operator() -> None:
    """As torchvision does it for its own, which another torch has not loaded."""
    try:
        torch.library.register_fake("absent::nms")(lambda: None)
    except RuntimeError as error:
        raise RuntimeError(text_of(error).replace("absent", "torchvision")) from error


def compile_two_shapes() -> None:
    model = torch.compile(lambda x: x + 1, dynamic=False, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        model(torch.zeros(2))
        model(torch.zeros(3))


@contextmanager
def mesh_of_two() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cpu", torch.arange(2))
    finally:
        torch.distributed.destroy_process_group()


def multiply_with_a_part() -> None:
    with mesh_of_two() as mesh:
        torch.zeros(2, 2) @ distribute_tensor(torch.zeros(2, 2), mesh)


def call_a_part() -> None:
    with mesh_of_two() as mesh:
        model = nn.Sequential(nn.Linear(2, 2))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        model[0](torch.zeros(1, 2))
        model(torch.zeros(1, 2))


CASES: dict[TorchError, list[Callable[[], object]]] = {
    TorchError.NO_MEMORY: [lambda: torch.empty(2**60)],
    TorchError.LOST_WORKER: [
        lambda: lose_a_worker(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        lambda: lose_a_worker(lambda: os._exit(1)),
    ],
    TorchError.NOT_SHARED: [share_without_a_file],
    TorchError.PORT_IN_USE: [serve_twice],
    TorchError.WRONG_SHAPE: [
        lambda: nn.Linear(3, 1)(torch.zeros(1, 2)),
        lambda: nn.Conv2d(1, 1, 1)(torch.zeros(1, 3, 2, 2)),
        lambda: nn.Conv2d(1, 1, 3)(torch.zeros(1, 1, 2, 2)),
        lambda: nn.BatchNorm2d(3).eval()(torch.zeros(1, 1, 2, 2)),
        lambda: nn.LayerNorm(3)(torch.zeros(1, 2)),
        lambda: torch.zeros(2) + torch.zeros(3),
    ],
    TorchError.WRONG_WIDTH: [lambda: nn.Linear(784, 10)(torch.zeros(1, 2352))],
    TorchError.OTHER_DTYPE: [
        lambda: nn.Linear(2, 2)(torch.zeros(2, 2).double()),
        lambda: nn.Linear(2, 2, bias=False)(torch.zeros(2, 2).double()),
        lambda: nn.Conv2d(1, 1, 1)(torch.zeros(1, 1, 2, 2).double()),
        lambda: nn.Conv2d(1, 1, 1, bias=False)(torch.zeros(1, 1, 2, 2).double()),
    ],
    TorchError.MIXED_DTYPES: [
        lambda: nn.LayerNorm(2).half()(torch.zeros(2, 2)),
        lambda: torch.bmm(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2).half()),
        lambda: torch.lerp(torch.zeros(2), torch.zeros(2).half(), 0.5),
        lambda: nn.LSTM(2, 2)(torch.zeros(1, 1, 2).double()),
    ],
    TorchError.ANY_TYPE: [lambda: nn.Conv2d(1, 1, 1).half()(torch.zeros(1, 1, 2, 2))],
    TorchError.NO_KERNEL: [lambda: torch.cdist(torch.zeros(2, 2).half(), torch.zeros(2, 2).half())],
    TorchError.NOT_CONTIGUOUS: [lambda: torch.zeros(2, 3).t().view(6)],
    TorchError.NOT_GATHERED: [multiply_with_a_part],
    TorchError.NOT_THROUGH_ROOT: [call_a_part],
    TorchError.RECOMPILED: [compile_two_shapes],
    TorchError.NO_VALUES: [
        lambda: torch.zeros(1, device="meta").cpu(),
        lambda: torch.zeros(1, device="meta").item(),
        put_on_meta,
    ],
    TorchError.REFUSED_CLASS: [load_a_module],
    TorchError.REFUSED_PICKLE: [lambda: load(b"\x80\x02]\x93."), load_a_module],
    TorchError.OTHER_TORCHVISION: [register_for_no_operator],
}


@pytest.mark.parametrize(
    ("meaning", "fail"),
    [
        pytest.param(meaning, fail, id=f"{meaning.name}-{number}")
        for meaning, fails in CASES.items()
        for number, fail in enumerate(fails)
    ],
)
def test_torch_words_it_so(meaning: TorchError, fail: Callable[[], object]) -> None:
    with pytest.raises(Exception) as raised:
        fail()
    assert meaning.search(text_of(raised.value)), text_of(raised.value)


def test_every_error_of_the_table_is_raised() -> None:
    """But the one that takes a GPU, and leaves the process without it."""
    assert {*CASES} == {*TorchError} - {TorchError.ON_DEVICE}
