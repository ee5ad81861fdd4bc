"""The contract that every backend keeps, as checks that all ranks of one group run in the same order.

A check first makes its collectives and then judges: ``Bench.expect`` notes a problem and goes on, so that a
rank that finds one does not leave the others waiting. Whatever a rank gets can be worked out by every rank:
``sample`` makes any rank's input.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dualeval.backends import base
from dualeval.backends.base import BYTE_TYPES, OPS, WIRE_TYPES, Op
from dualeval.errors import BackendError
from dualeval.launch.launchers import BACKENDS
from dualeval.world.devices import connect
from tests.backends.bench import SHAPES, Bench, count_collectives, largest_piece, random_tensor, reduced

TEXT = 'Zürich 東京 🎉 \udc80 \x00 " \\ \n'


@dataclass(frozen=True, kw_only=True)
class Check:
    """One entry of the contract, and the groups that it is for."""

    run: Callable[[Bench], None]
    smallest_world: int = 1
    backends: tuple[str, ...] | None = None

    def applies(self, backend: str, size: int) -> bool:
        return size >= self.smallest_world and (self.backends is None or backend in self.backends)


def check_all_reduce(op: Op, dtype: torch.dtype) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        for layout in SHAPES:
            inputs = bench.inputs(layout, dtype)
            reduce = partial(bench.backend.all_reduce, op=op)
            result = bench.collective(layout, reduce, inputs[bench.rank], "_all_reduce")
            scale = None
            if dtype.is_floating_point and op == "sum":
                scale = torch.stack([tensor.double().abs() for tensor in inputs]).sum(0)
            bench.expect_tensor(layout, result, reduced(inputs, op), scale)

    return run


def check_broadcast(dtype: torch.dtype) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        for layout in SHAPES:
            for src in range(bench.size):
                inputs, label = bench.inputs(layout, dtype), f"{layout} from {src}"
                send = partial(bench.backend.broadcast, src=src)
                result = bench.collective(label, send, inputs[bench.rank], "_broadcast")
                bench.expect_tensor(label, result, inputs[src])

    return run


def check_gather(dtype: torch.dtype, *, to_all: bool) -> Callable[[Bench], None]:
    """Equal shapes in every layout, and ragged ones: no rows on rank 0, on all but one rank, on all ranks."""

    def run(bench: Bench) -> None:
        cases: list[tuple[str, list[int] | None]] = [(layout, None) for layout in SHAPES]
        for layout in ("1-d", "2-d", "transposed", "strided", "no columns"):
            cases += [
                (layout, [2 * rank for rank in range(bench.size)]),
                (layout, [7 if rank == bench.size - 1 else 0 for rank in range(bench.size)]),
                (layout, [0] * bench.size),
            ]
        for number, (layout, rows) in enumerate(cases):
            inputs = bench.inputs(layout, dtype, rows)
            argument = inputs[bench.rank]
            before = argument.clone()
            dst = number % bench.size
            with count_collectives(bench.backend) as counts:
                pieces = bench.backend.all_gather(argument) if to_all else bench.backend.gather(argument, dst)
            label = f"{layout} {rows or ''}"
            content = any(tensor.numel() for tensor in inputs)
            expected = ["_gather_headers", "_gather"] if content else ["_gather_headers"]
            bench.expect(counts == expected, f"{label}: {counts} for one gather")
            bench.expect_tensor(f"{label}, argument", argument, before)
            if not to_all and dst != bench.rank:
                bench.expect(pieces is None, f"{label}: a rank that is not dst got {pieces}")
                continue
            assert pieces is not None
            bench.expect(len(pieces) == bench.size, f"{label}: {len(pieces)} pieces")
            for rank, (piece, sent) in enumerate(zip(pieces, inputs, strict=True)):
                bench.expect_tensor(f"{label} of {rank}", piece, sent.reshape(1) if sent.dim() == 0 else sent)
                bench.expect_new(label, piece, argument, *pieces[:rank])

    return run


def check_mean_of_shards(bench: Bench) -> None:
    """The mean of uneven shards is the mean of all samples, also where a shard is empty and its mean NaN."""
    lengths = [3 * rank if bench.size > 1 else 5 for rank in range(bench.size)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        shards = [random_tensor(rank, (length,), dtype).double() for rank, length in enumerate(lengths)]
        everything = torch.cat(shards)
        own = shards[bench.rank].mean().to(dtype).to(bench.backend.device)
        before = own.clone()
        count = len(shards[bench.rank])
        for weight in (count, float(count), torch.tensor(count)):
            with count_collectives(bench.backend) as counts:
                mean = bench.backend.reduce_mean(own, weight)
            expected = everything.mean().to(dtype).to(bench.backend.device)
            bench.expect_tensor(f"{dtype} weight {weight!r}", mean, expected, everything.abs().max())
            bench.expect(counts == ["_all_reduce"], f"{dtype}: {counts}")
        bench.expect(torch.equal(own.nan_to_num(), before.nan_to_num()), "the argument changed")


def check_mean_unweighted(bench: Bench) -> None:
    for layout in SHAPES:
        for dtype in WIRE_TYPES:
            inputs = bench.inputs(layout, dtype)
            before = inputs[bench.rank].clone()
            mean = bench.backend.reduce_mean(inputs[bench.rank])
            stack = torch.stack([tensor.double() for tensor in inputs])
            expected = stack.mean(0).to(dtype if dtype.is_floating_point else torch.float64)
            bench.expect_tensor(f"{layout} {dtype}", mean, expected, stack.abs().sum(0))
            bench.expect_tensor(f"{layout} {dtype}, argument", inputs[bench.rank], before)
            bench.expect_new(layout, mean, inputs[bench.rank])


def check_mean_elementwise(bench: Bench) -> None:
    """A weight may be one number an element, or broadcast; an element without any weight is NaN."""
    for shape in ((3, 4), (3, 1), (4,), (1, 1)):
        values = bench.inputs("2-d", torch.float64)
        weights = [
            random_tensor(rank, shape, torch.uint8).to(bench.backend.device) for rank in range(bench.size)
        ]
        for weight in weights:
            weight.reshape(-1)[0] = 0
        mean = bench.backend.reduce_mean(values[bench.rank], weights[bench.rank])
        top = sum(value * weight for value, weight in zip(values, weights, strict=True))
        bottom = torch.stack(weights).double().sum(0)
        expected = top / bottom
        lost = (bottom == 0).expand(3, 4)
        bench.expect(torch.equal(mean.isnan(), lost), f"weights {shape}: NaN at {mean.isnan()}, not {lost}")
        scale = torch.stack(values).abs().sum(0)
        bench.expect_tensor(f"weights {shape}", mean.nan_to_num(), expected.nan_to_num(), scale)
        bench.expect(bool((weights[bench.rank].reshape(-1)[0] == 0).all()), "the weight changed")


def check_mean_of_nothing(bench: Bench) -> None:
    mean = bench.backend.reduce_mean(torch.tensor([1.0, 2.0], device=bench.backend.device), 0)
    bench.expect(bool(mean.isnan().all()), f"the mean of nothing is {mean}")


def check_special_tensors(bench: Bench) -> None:
    """Inference mode, tensors with a gradient, and lazily conjugated ones are tensors like any other."""
    backend, device, last = bench.backend, bench.backend.device, bench.size - 1

    def results(tensor: Tensor) -> list[Tensor]:
        greatest, of_last = backend.all_reduce(tensor, "max"), backend.broadcast(tensor, last)
        return [greatest, of_last, backend.all_gather(tensor)[-1]]

    with torch.inference_mode():
        inner = torch.full((3,), bench.rank, device=device)
        inside = results(inner)
        backend.reduce_mean(inner * bench.size)
    for number, result in enumerate([*inside, *results(inner)]):
        bench.expect_tensor(f"inference mode, result {number}", result, torch.full((3,), last, device=device))
    learned = torch.ones(2, device=device, requires_grad=True)
    for result in results(learned):
        bench.expect(not result.requires_grad, "a result asks for a gradient")
    conjugated = torch.tensor([1 + 2j, 3 - 1j], device=device).conj()
    for result in (backend.broadcast(conjugated), *backend.all_gather(conjugated)):
        same = torch.equal(result, torch.tensor([1 - 2j, 3 + 1j], device=device))
        bench.expect(same, f"conjugate: {result}")


def check_nonfinite(bench: Bench) -> None:
    """NaN, infinities and the sign of zero pass a broadcast and a gather to the bit."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype)
        special = special.to(bench.backend.device)
        for result in (bench.backend.broadcast(special), *bench.backend.all_gather(special)):
            same = torch.equal(result.view(torch.uint8), special.view(torch.uint8))
            bench.expect(same, f"{dtype}: {result}")


def check_json(bench: Bench) -> None:
    backend = bench.backend
    values: list[Any] = [
        {"rank": rank, "text": TEXT * rank, "list": [None, True, 0.1, -0.0, 2**70, "", {}]}
        for rank in range(bench.size)
    ]
    own = values[bench.rank]
    bench.expect(backend.all_gather_json(own) == values, "all_gather_json")
    for rank in range(bench.size):
        bench.expect(backend.broadcast_json(own, rank) == values[rank], f"broadcast_json from {rank}")
        nothing = backend.broadcast_json(object() if rank != bench.rank else None, rank)
        bench.expect(
            nothing is None, f"broadcast_json of None from {rank}, where only the source's value counts"
        )
        gathered = backend.gather_json(own, rank)
        bench.expect(
            gathered == (values if rank == bench.rank else None), f"gather_json to {rank}: {gathered}"
        )


def check_default_device(bench: Bench) -> None:
    """What travels by itself is on the host, whatever default device the caller's script has set."""
    with torch.device("meta"):
        check_json(bench)
        bench.backend.barrier()


def check_json_refused(bench: Bench) -> None:
    """A value without a JSON form on one rank is the same error on all of them."""
    last = bench.size - 1
    own: Any = {1} if bench.rank == last else {"fine": TEXT}
    loop: list[Any] = []
    loop.append(loop)
    words = (f"rank {last}:", "set is not JSON")
    refused: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
        (lambda: bench.backend.gather_json(own), words),
        (lambda: bench.backend.all_gather_json(own), words),
        (lambda: bench.backend.broadcast_json(own, last), words),
        (lambda: bench.backend.all_gather_json(loop), ("Circular",)),
    ]
    for number, (call, parts) in enumerate(refused):
        bench.expect_error(f"call {number}", call, *parts, early=False)


def check_wrong_calls(bench: Bench) -> None:
    """What is wrong with the call itself is refused before any communication, and the group goes on."""
    backend = bench.backend
    number = torch.ones(2, device=backend.device)
    imaginary = number.to(torch.complex64)
    wide = number.to(torch.uint32)
    wrong: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
        "op": (lambda: backend.all_reduce(number, "mean"), ("'mean'", "sum, min, max")),  # type: ignore[arg-type]
        "reduce complex": (lambda: backend.all_reduce(imaginary), ("complex64", "bfloat16")),
        "mean complex": (lambda: backend.reduce_mean(imaginary), ("complex64", "bfloat16")),
        "mean complex weight": (lambda: backend.reduce_mean(number, imaginary), ("complex64",)),
        "mean weight shape": (lambda: backend.reduce_mean(number, torch.ones(3)), ("(3,)", "(2,)")),
        "mean weight dims": (lambda: backend.reduce_mean(number, torch.ones(1, 2)), ("(1, 2)", "(2,)")),
        "reduce uint32": (lambda: backend.all_reduce(wide), ("uint32", "int64")),
        "broadcast uint32": (lambda: backend.broadcast(wide), ("uint32", "complex128")),
        "gather uint32": (lambda: backend.gather(wide), ("uint32", "complex128")),
        "all_gather uint32": (lambda: backend.all_gather(wide), ("uint32", "complex128")),
    }
    for rank in (bench.size, -1):
        for name in ("broadcast", "gather", "broadcast_json", "gather_json"):
            of_rank = partial(getattr(backend, name), 1 if name.endswith("json") else number, rank)
            end = "src" if name.startswith("broadcast") else "dst"
            wrong[f"{name} {rank}"] = (of_rank, (f"{name}: {end}={rank} is not a rank",))
    for label, (call, parts) in wrong.items():
        bench.expect_error(label, call, *parts)
    bench.expect_tensor("a sum afterwards", backend.all_reduce(number), number * bench.size)


def check_disagreement(bench: Bench) -> None:
    """Ranks that do not send the same kind of thing all get the error that says who sends what."""
    backend = bench.backend
    odd = bench.rank == bench.size - 1
    plain, usual = torch.ones(2, 3, device=backend.device), "float32 of shape (*, 3)"
    for tensor, part in (
        (torch.ones(2, 4), "float32 of shape (*, 4)"),
        (torch.ones(2, 3, dtype=torch.int32), "int32 of shape (*, 3)"),
        (torch.ones(3), "float32 of shape (*)"),
        (torch.ones(2, 3, 1), "float32 of shape (*, 3, 1)"),
        (torch.ones(0, 4), "float32 of shape (*, 4)"),
    ):
        own = tensor.to(backend.device) if odd else plain
        parts = (usual, part, f"rank {bench.size - 1}:")
        for gather in (backend.gather, backend.all_gather):
            bench.expect_error(f"{gather.__name__} {part}", partial(gather, own), *parts, early=False)
    mixed = partial(backend.gather_json, []) if odd else partial(backend.gather, plain)
    bench.expect_error("two calls", mixed, usual, "gather_json", early=False)
    apart = partial(backend.gather_json, [], int(odd))
    bench.expect_error("two destinations", apart, "to rank 0", "to rank 1", early=False)


def check_barrier(bench: Bench) -> None:
    """Nobody leaves a barrier before the last rank has reached it, whichever rank is the last."""
    for late in range(bench.size):
        arrived = bench.folder / f"arrived-{late}"
        if bench.rank == late:
            for rank in range(bench.size):
                if rank != late:
                    _await_file(bench.folder / f"waiting-{late}-{rank}")
            # Not waited for: time in which a barrier that does not wait would let the others through.
            time.sleep(0.05)
            arrived.touch()
        else:
            (bench.folder / f"waiting-{late}-{bench.rank}").touch()
        with count_collectives(bench.backend) as counts:
            bench.backend.barrier()
        bench.expect(arrived.exists(), f"left the barrier before rank {late} had come")
        bench.expect(counts == ["_all_reduce"], f"{counts} for one barrier")


def check_context(bench: Bench) -> None:
    """Leaving a ``with`` block closes: failed after an error, and not failed otherwise."""
    calls = []
    with mock.patch.object(bench.backend, "close", lambda failed=False: calls.append(failed)):
        with bench.backend as entered:
            bench.expect(entered is bench.backend, "entering gives another object")
        try:
            with bench.backend:
                raise KeyError
        except KeyError:
            calls.append("passed on")
    bench.expect(calls == [False, True, "passed on"], f"close was called with {calls}")


def check_attributes(bench: Bench) -> None:
    bench.expect(bench.backend.name in BACKENDS, f"the name is {bench.backend.name}")
    bench.expect(0 <= bench.rank < bench.size, f"rank {bench.rank} of {bench.size}")
    ranks = bench.backend.all_gather_json(bench.rank)
    bench.expect(ranks == list(range(bench.size)), f"the ranks are {ranks}")


def check_large_pieces(bench: Bench) -> None:
    """What is larger than a collective takes travels in several, and arrives as in one."""
    limit = 96
    lengths = [5 * rank if bench.size > 1 else 40 for rank in range(bench.size)]
    whole = [random_tensor(rank, (37,), torch.int64) for rank in range(bench.size)]
    ragged = [random_tensor(rank, (length, 3), torch.int16) for rank, length in enumerate(lengths)]
    device = bench.backend.device
    with mock.patch.object(base, "MOST_BYTES", limit), largest_piece(bench.backend) as largest:
        total = bench.backend.all_reduce(whole[bench.rank].to(device))
        mean = bench.backend.reduce_mean(whole[bench.rank].to(device) % 1000)
        last = bench.backend.broadcast(whole[bench.rank].to(device), bench.size - 1)
        pieces = bench.backend.gather(ragged[bench.rank].to(device), 0)
        everywhere = bench.backend.all_gather(ragged[bench.rank].to(device))
        texts = bench.backend.all_gather_json(f"{bench.rank}" * 100)
    bench.expect(0 < largest[0] <= limit, f"a collective of {largest[0]} bytes, the limit is {limit}")
    bench.expect_tensor("all_reduce", total, reduced(whole, "sum").to(device))
    means = torch.stack([tensor % 1000 for tensor in whole]).double().mean(0)
    bench.expect_tensor("reduce_mean", mean, means.to(device), means.to(device))
    bench.expect_tensor("broadcast", last, whole[-1].to(device))
    bench.expect((pieces is None) == (bench.rank != 0), "gather gives pieces to rank 0 alone")
    for name, found in (("gather", pieces or ragged), ("all_gather", everywhere)):
        for rank, (piece, sent) in enumerate(zip(found, ragged, strict=True)):
            bench.expect_tensor(f"{name} of {rank}", piece.to(device), sent.to(device))
    bench.expect(texts == [f"{rank}" * 100 for rank in range(bench.size)], f"texts {texts}")


def check_close(bench: Bench) -> None:
    """A second close does nothing; the group that the backend joined is gone."""
    bench.backend.close()
    with count_collectives(bench.backend) as counts:
        bench.backend.close()
        bench.backend.close(failed=True)
    bench.expect(not counts, f"a closed backend communicates: {counts}")
    bench.expect(not dist.is_initialized(), "the process group is still there")


def check_callers_group(bench: Bench) -> None:
    """A group that the caller has initialised stays the caller's to end, whatever tensors it takes."""
    # The last takes no host tensors at all.
    for library in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "cuda:gloo"):
        _join_as_caller(bench, f"callers-group {library}".replace(":", " "), library)
        with connect("torch", bench.backend.world, "cpu") as backend:
            bench.expect(not backend.owns_group, "the group is the caller's")
            total = backend.all_reduce(torch.tensor(bench.rank + 1))
            bench.expect(int(total) == bench.size * (bench.size + 1) // 2, f"{library}: the sum is {total}")
            told = backend.all_gather_json([bench.rank])
            bench.expect(told == [[rank] for rank in range(bench.size)], f"{library}: gathered {told}")
        initialised = dist.is_initialized()
        bench.expect(initialised, f"{library}: close has destroyed the caller's group")
        if initialised:
            dist.destroy_process_group()


def check_lost_rank(bench: Bench) -> None:
    """A rank that ends without a word is a BackendError for the others."""
    _join_as_caller(bench, "lost-rank")
    backend = connect("torch", bench.backend.world, "cpu")
    if bench.rank == bench.size - 1:
        # For the others this is a killed rank: its connections close. It goes on to its own report.
        dist.destroy_process_group()
        return
    message = ""
    try:
        for _ in range(2):
            backend.all_reduce(torch.ones(4))
    except BackendError as error:
        message = str(error)
    bench.expect(f"rank {bench.rank} of {bench.size}" in message, f"the error is {message!r}")
    dist.destroy_process_group()


def _join_as_caller(bench: Bench, name: str, library: str = "gloo") -> None:
    """Initialise torch.distributed as a program does that calls dualeval in the midst of its own work."""
    store = dist.FileStore(str(bench.folder / name), bench.size)  # type: ignore[attr-defined]
    dist.init_process_group(library, store=store, rank=bench.rank, world_size=bench.size)


def _await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was never written")
        time.sleep(0.001)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The order counts: the last three take the group down.
CHECKS: dict[str, Check] = {
    "attributes": Check(run=check_attributes),
    **{
        f"all_reduce-{op}-{_name(dtype)}": Check(run=check_all_reduce(op, dtype))
        for op in OPS
        for dtype in WIRE_TYPES
    },
    **{f"broadcast-{_name(dtype)}": Check(run=check_broadcast(dtype)) for dtype in BYTE_TYPES},
    **{f"gather-{_name(dtype)}": Check(run=check_gather(dtype, to_all=False)) for dtype in BYTE_TYPES},
    **{f"all_gather-{_name(dtype)}": Check(run=check_gather(dtype, to_all=True)) for dtype in BYTE_TYPES},
    "mean-of-shards": Check(run=check_mean_of_shards),
    "mean-unweighted": Check(run=check_mean_unweighted),
    "mean-elementwise": Check(run=check_mean_elementwise),
    "mean-of-nothing": Check(run=check_mean_of_nothing),
    "special-tensors": Check(run=check_special_tensors),
    "nonfinite": Check(run=check_nonfinite),
    "json": Check(run=check_json),
    "json-default-device": Check(run=check_default_device),
    "json-refused": Check(run=check_json_refused),
    "wrong-calls": Check(run=check_wrong_calls),
    "disagreement": Check(run=check_disagreement, smallest_world=2),
    "barrier": Check(run=check_barrier),
    "large-pieces": Check(run=check_large_pieces),
    "context": Check(run=check_context),
    "close": Check(run=check_close),
    "callers-group": Check(run=check_callers_group, backends=("torch",)),
    "lost-rank": Check(run=check_lost_rank, backends=("torch",), smallest_world=2),
}
