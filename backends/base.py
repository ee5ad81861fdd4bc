"""Backend: the collectives that an evaluation needs, the same on every library.

A backend implements three primitives on buffers that are already copied, contiguous and of a type that every
library has; the rest is written once, here and in exchange.py. Five rules make the rest possible:

* The transport follows the tensor: a host tensor travels from host memory, a device's tensor from the device
  where the library can do that, and else through host memory.
* Reductions travel as int32, int64, float32 or float64, and come back in the caller's type.
* Broadcast and gather move content and never compute, so they travel as bytes (uint8) in any type.
* No primitive gets more than ``MOST_BYTES`` at a time: MPI and Horovod count in 32 bits.
* The buffers are made outside of inference mode, also for a caller inside: a library's own thread that writes
  into them is in no such mode, and may not write into one of its tensors.

Every method is a collective: all ranks call it, in the same order, with tensors of the same shape and type on
devices of the same type (gather: of the same shape behind the first dimension). What is wrong with the call
itself (the operation, the type, a rank out of range) is a ``BackendError`` before any communication.
Reductions do not compare shapes over the ranks: that would cost a second collective for each. No method has
a time-out: noticing a rank that died or stalls is the control plane's task.
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import monotonic, sleep
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualeval.backends.exchange import JsonExchange, bytes_of, tensor_of
from dualeval.errors import BackendError, UsageError
from dualeval.world import World

Op = Literal["sum", "min", "max"]
OPS: tuple[Op, ...] = ("sum", "min", "max")

# The type in which a tensor is reduced. Horovod, for one, has no bool, bfloat16 or small integers there.
WIRE_TYPES = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
BYTE_TYPES = (*WIRE_TYPES, torch.complex64, torch.complex128)

# A rank that waits looks this long without a pause, for the others that come at the same time; then it sleeps
# a part of what it has waited already, so that a wait becomes longer by no more than that part.
_LOOK_S = 50e-6
_PAUSE_PART = 0.03
_LONGEST_PAUSE_S = 0.01

# Most bytes of a collective: of what is reduced or broadcast, and of what all ranks together gather. MPI, and
# Horovod in its gather, have int32 for counts and displacements.
MOST_BYTES = 2**31 - 1

_HOST = torch.device("cpu")

# In place of a signature in gather's header: this rank has nothing to send and says why.
_REFUSED = 0


def sleep_until(done: Callable[[], bool]) -> None:
    """Wait, asleep, until a library says that an operation of all ranks is done.

    For libraries whose own wait looks without a pause: a rank that is a minute late would cost each of the
    others a core for that minute.
    """
    start = monotonic()
    while not done():
        waited = monotonic() - start
        if waited > _LOOK_S:
            sleep(min(waited * _PAUSE_PART, _LONGEST_PAUSE_S))


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables that the user has not set, for a library that reads its settings there."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def no_mesh(name: str) -> UsageError:
    """What is said where a model is to be divided over the ranks of a backend that is not torch's."""
    return UsageError(
        f"shard: a model is divided over the ranks by torch.distributed, and these ranks talk over {name}. "
        "Start it with 'torchrun --nproc-per-node N -m dualeval run' or 'dualeval run --nproc N'; under "
        "mpirun, srun and Flux add --backend torch. Or leave shard out."
    )


class Backend(JsonExchange):
    """Collectives between the ranks of a world.

    Results are new tensors: they never alias the argument, which is left as it was, and have its dtype and
    device. Tensors may have any strides, no dimension, or no element.

    Attributes:
        name: name under which ``connect`` finds the backend.
        world: this process's place among the ranks.
        device: where this rank's model and batches belong; the CPU until ``use_device`` says otherwise.
        owns_group: whether the backend opened the group. Where the caller had, it stays the caller's.
        around_collective: entered around each primitive, by the thread that calls it: who watches the ranks
            knows by it that this one waits for the others.
    """

    name: ClassVar[str]
    # What to type to run it.
    start: ClassVar[str]

    def __init__(self, world: World) -> None:
        self.world = world
        self.device = _HOST
        self.owns_group = True
        self.around_collective: Callable[[], AbstractContextManager[object]] = nullcontext
        # Types of devices from whose memory the library sends.
        self._sends_from: frozenset[str] = frozenset()
        self._shares_device = False
        self._closed = False
        # The library's name in an error, and what it raises where a collective breaks.
        self._library_name = self.name
        self._library_errors: tuple[type[Exception], ...] = (RuntimeError,)

    def use_device(self, device: torch.device, *, shared: bool) -> None:
        """Say where this rank's model and batches belong.

        Args:
            device: this rank's.
            shared: some ranks have one device together. NCCL refuses that, so all tensors then travel
                through host memory. The same on every rank.
        """
        self.device = device
        self._shares_device = shared
        if shared:
            self._sends_from = frozenset()

    def carrier(self, device: torch.device) -> torch.device:
        """Where the buffers of a collective live, for tensors on ``device``: there, or on the host."""
        return device if device.type in self._sends_from else _HOST

    def mesh(self) -> AbstractContextManager[DeviceMesh]:
        """The ranks as torch's sharded tensors want them: a mesh of one dimension over all ranks, in order.

        Its collectives are those of ``device``: NCCL's between GPUs, gloo's between host memories. What uses
        it has to be gone when the context ends. Entering and leaving it is a collective.

        Raises:
            UsageError: this backend has none, or its ranks cannot have one on their devices.
        """
        raise no_mesh(self.name)

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Leave the group; a second call does nothing.

        Args:
            failed: this rank is going down with an error, so it does not wait for the others.

        Raises:
            BackendError: another rank broke off while this one waited for it (only if not ``failed``).
        """
        if not self._closed:
            self._closed = True
            self._close(failed)

    @torch.inference_mode(False)
    def barrier(self) -> None:
        """Wait until every rank is here: a reduction of one host number."""
        self._reduce_in_blocks(torch.zeros(1, dtype=torch.int32, device=_HOST), "sum")

    @torch.inference_mode(False)
    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce a tensor element by element over all ranks; every rank gets the result.

        Integers are added modulo two to the power of their width, as torch does. For bool, "sum" and "max"
        mean any, "min" means all. float16 and bfloat16 are added in float32. Integer results are equal to
        the bit on every backend; the order of a floating sum, and so its last bits, is the library's. What
        "min" and "max" make of NaN is the library's, too.

        Args:
            tensor: bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32 or float64; the same
                shape and dtype on every rank.
            op: "sum", "min" or "max".

        Returns:
            a new tensor of the same shape, dtype and device.

        Raises:
            BackendError: the op or the dtype is not one of these, or the collective broke.
        """
        _require_tensor("all_reduce", tensor)
        if op not in OPS:
            raise BackendError(f"all_reduce has no op {op!r}; it has {', '.join(OPS)}.")
        wire_type = WIRE_TYPES.get(tensor.dtype)
        if wire_type is None:
            raise _unsupported("all_reduce", tensor.dtype, WIRE_TYPES)
        owned = _copy_to(self.carrier(tensor.device), tensor, wire_type)
        self._reduce_in_blocks(owned.view(-1), op)
        return owned.to(device=tensor.device, dtype=tensor.dtype)

    @torch.inference_mode(False)
    def reduce_mean(self, tensor: Tensor, weight: Tensor | float | None = None) -> Tensor:
        """Average a tensor over all ranks, each rank's value counted ``weight`` times.

        mean = sum over ranks of (weight * tensor) / sum over ranks of weight, element by element. Both sums
        are taken in float64, in one collective, and divided once, at the end. A mean of rank means is wrong
        on shards of different lengths: give each rank's mean with the number of its samples as the weight. A
        value of weight 0 is left out altogether, also where it is NaN (the mean of an empty shard). Where
        all weights are 0 the mean is NaN, the mean of nothing.

        Args:
            tensor: any dtype that ``all_reduce`` takes; the same shape on every rank.
            weight: a number, or a tensor that broadcasts to the shape of ``tensor``; None counts each rank
                once. A tensor must have the same shape on every rank.

        Returns:
            a new tensor of the same shape and device; of the same dtype where that is floating, else float64.

        Raises:
            BackendError: a dtype that ``all_reduce`` does not take, a weight that does not broadcast to the
                tensor's shape, or the collective broke.
        """
        _require_tensor("reduce_mean", tensor)
        for dtype in (tensor.dtype, weight.dtype if isinstance(weight, Tensor) else torch.float64):
            if dtype not in WIRE_TYPES:
                raise _unsupported("reduce_mean", dtype, WIRE_TYPES)
        carrier = self.carrier(tensor.device)
        values = tensor.detach().to(device=carrier, dtype=torch.float64)
        weights = torch.as_tensor(1.0 if weight is None else weight).detach()
        weights = weights.to(device=carrier, dtype=torch.float64)
        try:
            weights.expand(values.shape)
        except RuntimeError as error:
            raise BackendError(
                f"reduce_mean: a weight of shape {tuple(weights.shape)} does not broadcast to the tensor's "
                f"shape {tuple(values.shape)}."
            ) from error
        # where, not the product alone: 0 * NaN is NaN.
        weighted = torch.where(weights == 0, 0.0, values * weights)
        sums = torch.cat([weighted.reshape(-1), weights.reshape(-1)])
        self._reduce_in_blocks(sums, "sum")
        mean = sums[: values.numel()].reshape(values.shape) / sums[values.numel() :].reshape(weights.shape)
        dtype = tensor.dtype if tensor.dtype.is_floating_point else torch.float64
        return mean.to(device=tensor.device, dtype=dtype)

    @torch.inference_mode(False)
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Give every rank the content of one rank's tensor.

        Args:
            tensor: bool, a signed or unsigned 8-bit, or a signed 16-, 32- or 64-bit integer, float16,
                bfloat16, float32, float64, complex64 or complex128; the same shape and dtype on every rank.
            src: the rank whose content is taken.

        Returns:
            a new tensor of the same shape, dtype and device.

        Raises:
            BackendError: ``src`` is no rank, the dtype is not one of these, or the collective broke.
        """
        self._require_rank("broadcast", "src", src)
        _require_bytes("broadcast", tensor)
        if self.world.rank == src:
            payload = _to_bytes(tensor, self.carrier(tensor.device))
        else:
            payload = torch.empty(
                tensor.numel() * tensor.itemsize, dtype=torch.uint8, device=self.carrier(tensor.device)
            )
        for block in _blocks(payload):
            with self.around_collective():
                self._broadcast(block, src)
        return payload.view(tensor.dtype).reshape(tensor.shape).to(device=tensor.device)

    def gather(self, tensor: Tensor, dst: int = 0) -> list[Tensor] | None:
        """Bring every rank's tensor to one rank.

        Args:
            tensor: any dtype that ``broadcast`` takes, the same on every rank; shape (rows, ...), where the
                number of rows may differ over the ranks and may be 0. No dimension counts as shape (1,).
            dst: the rank that gets them.

        Returns:
            on ``dst`` one new tensor a rank, in rank order, each of its rank's shape, on the device of
            ``tensor``; None on the other ranks. They may be parts of one buffer: clone one to keep it alone.

        Raises:
            BackendError: ``dst`` is no rank; the dtype is not one of these; the ranks disagree on the dtype
                or on the shape behind the first dimension (the same message on every rank); or the
                collective broke.
        """
        self._require_rank("gather", "dst", dst)
        return self._gather_tensors("gather", tensor, dst)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Bring every rank's tensor to every rank; else as ``gather``."""
        pieces = self._gather_tensors("all_gather", tensor, None)
        assert pieces is not None
        return pieces

    @torch.inference_mode(False)
    def _gather_tensors(self, call: str, tensor: Tensor, dst: int | None) -> list[Tensor] | None:
        _require_bytes(call, tensor)
        payload = _to_bytes(tensor, self.carrier(tensor.device), copy=False)
        rows, trailing = (tensor.shape[0], tensor.shape[1:]) if tensor.dim() else (1, torch.Size())
        kind = f"{_type_name(tensor.dtype)} of shape ({', '.join(map(str, ('*', *trailing)))})"
        if payload.device != _HOST:
            # A rank that sends from host memory would wait for ever for one that does not.
            kind += f" on {payload.device.type}"
        pieces = self._gather_bytes(call, payload, rows=rows, kind=kind, dst=dst)
        if pieces is None:
            return None
        return [
            piece.view(tensor.dtype).reshape(count, *trailing).to(device=tensor.device)
            for piece, count in pieces
        ]

    def _gather_bytes(
        self, call: str, payload: Tensor, *, rows: int, kind: str, dst: int | None, refusal: str | None = None
    ) -> list[tuple[Tensor, int]] | None:
        """Gather byte strings of different lengths, in two collectives of equal shape: a header, the content.

        The header (content bytes, rows, hash of the kind; int64) tells every rank the longest length, and
        whether all ranks send the same kind of thing. Where they do not, each tells the others what it has,
        and all raise the same error; without the header they would wait for ever or take one for the other.
        """
        description = f"{call}{'' if dst is None else f' to rank {dst}'} of {refusal or kind}"
        signature = _hash(description) if refusal is None else _REFUSED
        own_header = torch.tensor([payload.numel(), rows, signature], device=_HOST)
        with self.around_collective():
            gathered = self._gather_headers(own_header.view(torch.uint8))
        headers = [header.view(torch.int64).tolist() for header in gathered]
        if any(header[2] == _REFUSED or header[2] != headers[0][2] for header in headers):
            self._raise_disagreement(description)
        longest = max(length for length, _, _ in headers)
        padded = payload
        if payload.numel() < longest:
            padded = torch.zeros(longest, dtype=torch.uint8, device=payload.device)
            padded[: payload.numel()] = payload
        contents: list[Tensor] | None
        if longest:
            contents = self._gather_in_blocks(padded, dst)
        else:
            # No rank has content, and every rank knows it: the second collective is left out.
            contents = [padded for _ in headers] if dst in (None, self.world.rank) else None
        if contents is None:
            return None
        # A copy of a short piece lets go of the padding behind it.
        return [
            (content if length == longest else content[:length].clone(), rows_of_rank)
            for content, (length, rows_of_rank, _) in zip(contents, headers, strict=True)
        ]

    def _gather_in_blocks(self, payload: Tensor, dst: int | None) -> list[Tensor] | None:
        """Gather as ``_gather``, in several collectives where one would be too large."""
        most = max(1, MOST_BYTES // self.world.size)
        if payload.numel() <= most:
            with self.around_collective():
                return self._gather(payload, dst)
        receives = dst in (None, self.world.rank)
        contents = [torch.empty_like(payload) for _ in range(self.world.size)] if receives else None
        for start in range(0, payload.numel(), most):
            with self.around_collective():
                blocks = self._gather(payload[start : start + most], dst)
            for content, block in zip(contents or [], blocks or [], strict=True):
                content[start : start + most] = block
        return contents

    def _raise_disagreement(self, description: str) -> None:
        """Tell all ranks what each one brought to a gather that cannot be done, and raise on all of them."""
        text = tensor_of(description.encode("utf-8", "backslashreplace"))
        pieces = self._gather_bytes("disagreement", text, rows=0, kind="text", dst=None)
        assert pieces is not None
        ranks_by_text: dict[str, list[str]] = {}
        for rank, (piece, _) in enumerate(pieces):
            ranks_by_text.setdefault(bytes_of(piece).decode(), []).append(str(rank))
        reports = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items())
        raise BackendError(f"This cannot be gathered: {reports}. Only what is marked * may differ.")

    def _reduce_in_blocks(self, flat: Tensor, op: Op) -> None:
        for block in _blocks(flat):
            with self.around_collective():
                self._all_reduce(block, op)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Turn the library's errors into a BackendError that says who was doing what."""
        try:
            yield
        except self._library_errors as error:
            # torch's own frames of C++ stand behind it: pages of them, which a traceback would show as well.
            text, _, frames = str(error).partition("\nException raised from ")
            if frames:
                error.args = (text,)
            reason = text.strip().rstrip(".") or type(error).__name__
            raise BackendError(
                f"{self._library_name} broke on rank {self.world.rank} of {self.world.size} while {doing}: "
                f"{reason}. Where another rank failed first, its message has the cause."
            ) from error

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Reduce in place."""

    @abstractmethod
    def _broadcast(self, payload: Tensor, src: int) -> None:
        """Overwrite ``payload`` by that of ``src``."""

    @abstractmethod
    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor] | None:
        """Gather ``payload`` (as in ``_broadcast``) to ``dst``, or to all ranks where that is None."""

    def _gather_headers(self, header: Tensor) -> list[Tensor]:
        """Gather a few bytes to all ranks, before each ``_gather`` of what they announce."""
        headers = self._gather(header, None)
        assert headers is not None
        return headers

    @abstractmethod
    def _close(self, failed: bool) -> None:
        """Leave the group; called once."""


def _blocks(flat: Tensor) -> Iterator[Tensor]:
    """Cut a tensor of one dimension into what one collective takes; nothing of an empty one."""
    if flat.numel():
        yield from torch.split(flat, max(1, MOST_BYTES // flat.itemsize))


def _to_bytes(tensor: Tensor, device: torch.device, *, copy: bool = True) -> Tensor:
    """The content of a tensor as a uint8 tensor of shape (bytes,); a new one, or perhaps a view of it."""
    # What a conjugate or negative view only notes in a flag beside the bytes is carried out by a copy.
    noted = tensor.is_conj() or tensor.is_neg()
    # A single element is contiguous with any stride, and then cannot be viewed as bytes.
    fits = tensor.device == device and tensor.is_contiguous() and tensor.numel() > 1 and not noted
    whole = tensor.detach() if fits and not copy else _copy_to(device, tensor, tensor.dtype)
    return whole.reshape(-1).view(torch.uint8)


def _require_tensor(call: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise BackendError(f"{call} takes a tensor, not a {type(value).__name__}: write torch.tensor(VALUE).")


def _require_bytes(call: str, tensor: Tensor) -> None:
    _require_tensor(call, tensor)
    if tensor.dtype not in BYTE_TYPES:
        raise _unsupported(call, tensor.dtype, BYTE_TYPES)


def _copy_to(device: torch.device, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor into a new, contiguous one."""
    if tensor.is_cuda and device.type == "cpu":
        # Pinned: the way off the GPU is several times faster into memory that cannot be swapped out.
        return torch.empty(tensor.shape, dtype=dtype, device=_HOST, pin_memory=True).copy_(tensor.detach())
    return tensor.detach().to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


@lru_cache
def _hash(text: str) -> int:
    """Hash a text to a non-zero int64 that is the same in every process (``hash`` of a str is not)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True) or 1


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unsupported(call: str, dtype: torch.dtype, supported: Any) -> BackendError:
    takes = ", ".join(map(_type_name, supported))
    return BackendError(
        f"{call} takes no {_type_name(dtype)} tensor, only {takes}. Convert the tensor first."
    )
