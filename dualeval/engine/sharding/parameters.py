"""The parameters of a divided model: which they are, what a rank reads of them, and their digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dualeval.backends.base import Backend
from dualeval.engine.device.divided import is_sharded
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.identity.plain import rows_digest, tensor_digest
from dualeval.engine.model.compute import is_compiled
from dualeval.engine.model.late import LateRows, whole
from dualeval.engine.model.layouts import fixed_part
from dualeval.engine.model.snapshot import Snapshot, named_by
from dualeval.engine.sharding.fsdp import has_forward
from dualeval.errors import UsageError
from dualeval.result import sha256_of_json
from dualeval.tasks import Task

# Bytes of a parameter that are read to check that all ranks read the same.
_PROBED_BYTES = 4096
_IMAGE_DIMENSIONS = 4


@dataclass(kw_only=True)
class Parameter:
    """One parameter of the model."""

    # Its first name.
    name: str
    # All its names.
    names: tuple[str, ...]
    # Shape of the whole parameter.
    shape: tuple[int, ...]
    dtype: torch.dtype
    # Whether each rank has some of the rows; otherwise each rank has all.
    is_divided: bool
    # The parameter as the model was built with it; None once its rows are read.
    source: nn.Parameter | None
    # This rank's rows, contiguous, on the CPU, in the parameter's dtype; all rows if it is not divided.
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def take_rows(self) -> Tensor:
        """Return this rank's rows, and keep them no longer."""
        rows, self.rows = self.rows, None
        assert rows is not None, "they are read once, and taken once"
        return rows

    def rows_of(self, rank: int, size: int) -> tuple[int, int]:
        """The range of a rank's rows, as ``torch.chunk`` divides; it may be empty."""
        if not self.is_divided:
            return 0, self.shape[0] if self.shape else 1
        step = -(-self.shape[0] // size)
        first = min(rank * step, self.shape[0])
        return first, min(first + step, self.shape[0])


def parameters_of(model: nn.Module) -> list[Parameter]:
    """The parameters of a model, ordered by their first names.

    Parameters with floating values and at least one dimension are divided, but not a non-contiguous one
    (other than an image convolution's weight): it would come back with other strides, and so other bits.
    """
    _check_model(model)
    names: dict[int, list[str]] = {}
    first: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _check_values(name, parameter)
        names.setdefault(id(parameter), []).append(name)
        first.setdefault(id(parameter), parameter)
    parameters = [
        Parameter(
            name=names[number][0],
            names=tuple(names[number]),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            is_divided=_is_divisible(parameter),
            source=parameter,
        )
        for number, parameter in first.items()
    ]
    if not any(parameter.is_divided for parameter in parameters):
        raise UsageError("shard: the model has no parameters to divide. Leave shard out.")
    return sorted(parameters, key=lambda parameter: parameter.name)


def check_owned(task: Task, model: nn.Module, snapshot: Snapshot | None) -> None:
    """Check that a model to be divided was made for this run: it cannot be restored afterwards."""
    if is_sharded(model):
        raise UsageError(
            "shard: the model is sharded already, where it is built (fully_shard), and is evaluated as it "
            "is. Leave shard out."
        )
    if snapshot is None:
        return
    named = [value for held in vars(task).values() for value in named_by(held)]
    if snapshot.knows(model) or any(value is model for value in named):
        raise UsageError(
            f"shard divides the parameters of a model, and this {type(model).__name__} is the script's own: "
            "it would stay divided afterwards. Give a function that makes a model of its own, as "
            "model=lambda: make_model(). Or shard it yourself (torch.distributed.fsdp.fully_shard), and "
            "leave shard out."
        )


def _check_model(model: nn.Module) -> None:
    if (part := fixed_part(model)) is not None:
        raise UsageError(f"shard: {part}, and its weights are a part of that program. Leave shard out.")
    if is_compiled(model):
        raise UsageError(
            "shard: the model is compiled (torch.compile), and its weights were whole then. Give the model "
            "as it is before that, or leave shard out."
        )
    if not has_forward(model):
        raise UsageError(
            f"shard: the model is a {type(model).__name__}, which has no forward, and weights are gathered "
            "in the call of a module. Give a model that is called, or leave shard out."
        )
    if isinstance(model, nn.TransformerEncoderLayer):
        raise UsageError(
            "shard: the model is an nn.TransformerEncoderLayer, which computes differently when it is "
            "divided. Put it into a module of your own, or leave shard out."
        )


def _check_values(name: str, parameter: nn.Parameter) -> None:
    is_late = isinstance(parameter, LateRows)
    if is_lazy(parameter) or (parameter.is_meta and not is_late):
        tensor_digest(name, parameter, Hasher().digest)  # which says what to do
    is_plain = is_late or type(parameter) in (nn.Parameter, Tensor)
    if not is_plain or parameter.layout is not torch.strided or parameter.is_quantized:
        kind = f"{type(parameter).__name__}, {parameter.layout}, {parameter.dtype}"
        raise UsageError(
            f"shard: the parameter {name} is a {kind}: only plain, dense tensors can be divided. Leave shard "
            "out."
        )


def _is_divisible(parameter: nn.Parameter) -> bool:
    keeps_strides = parameter.is_contiguous() or parameter.ndim == _IMAGE_DIMENSIONS
    return parameter.is_floating_point() and parameter.ndim > 0 and parameter.numel() > 0 and keeps_strides


# -- reading -----------------------------------------------------------------------------------------------


class Reading:
    """Reads this rank's rows of all parameters, and then computes their digests with the other ranks."""

    def __init__(self, parameters: Sequence[Parameter], backend: Backend, hasher: Hasher) -> None:
        self._parameters = parameters
        self._backend = backend
        self._rank, self._size = backend.world.rank, backend.world.size
        self._hasher = hasher
        self._digests: dict[str, bytes] = {}
        self._late: list[Parameter] = []
        self._probe: list[str] = []

    def read(self, parameter: Parameter) -> None:
        """Read this rank's rows of a parameter; no collective."""
        source, parameter.source = parameter.source, None
        assert source is not None, "each parameter is read once"
        first, last = parameter.rows_of(self._rank, self._size)
        if isinstance(source, LateRows):
            self._probe += _ends_of(source, parameter)
            if parameter.is_divided:
                rows = torch.empty(_shape_of(parameter, last - first), dtype=parameter.dtype)
                if rows.numel():
                    source.read_rows(first, last, rows)
                self._late.append(parameter)
            else:
                rows = whole(source)
                self._digests[parameter.name] = tensor_digest(parameter.name, rows, self._hasher.digest)
        else:
            # Every rank has all of it; a difference is found when the ranks compare their jobs.
            self._digests[parameter.name] = tensor_digest(parameter.name, source, self._hasher.digest)
            values = source.detach()
            rows = _copy_of(values[first:last]) if parameter.is_divided else values.cpu()
        parameter.rows = rows

    def digests(self) -> dict[str, bytes]:
        """The digest of each parameter by its name, the same on every rank; a collective.

        A parameter that no rank has whole is gathered on one rank for a moment; the ranks take turns.
        """
        probes = self._backend.all_gather_json(sha256_of_json(self._probe))
        if len(set(probes)) > 1:
            ranks = ", ".join(str(rank) for rank, probe in enumerate(probes) if probe != probes[0])
            raise UsageError(
                f"rank {ranks} reads other weights than rank 0. Give all ranks the same files, on every node."
            )
        gathered: dict[str, str] = {}
        for number, parameter in enumerate(self._late):
            receiver = number % self._size
            assert parameter.rows is not None
            pieces = self._backend.gather(parameter.rows.reshape(-1).view(torch.uint8), receiver)
            if pieces is not None:
                gathered[parameter.name] = rows_digest(parameter.dtype, parameter.shape, pieces).hex()
        for digests in self._backend.all_gather_json(gathered):
            self._digests |= {name: bytes.fromhex(digest) for name, digest in digests.items()}
        return self._digests


def _ends_of(source: LateRows, parameter: Parameter) -> list[str]:
    """Digests of the first and the last rows of a late parameter."""
    count = parameter.shape[0] if parameter.shape else 1
    most = max(1, min(count, _PROBED_BYTES * count // max(1, parameter.nbytes)))
    digests = [repr((parameter.name, str(parameter.dtype), parameter.shape))]
    for first in (0, count - most) if parameter.nbytes else ():
        rows = torch.empty(_shape_of(parameter, most), dtype=parameter.dtype)
        source.read_rows(first, first + most, rows)
        digests.append(rows_digest(parameter.dtype, tuple(rows.shape), [rows]).hex())
    return digests


def _shape_of(parameter: Parameter, rows: int) -> tuple[int, ...]:
    return (rows, *parameter.shape[1:]) if parameter.shape else ()


def _copy_of(rows: Tensor) -> Tensor:
    """A copy of rows, in contiguous memory of the CPU."""
    return torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)


def put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the parameter of this name."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    sets: Any = type(module).__setattr__
    if sets is nn.Module.__setattr__:
        module._parameters[attribute] = parameter
    else:
        # Recurrent layers also keep a list of their weights.
        setattr(module, attribute, parameter)
