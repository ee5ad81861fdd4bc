"""Tensors that lie in files: their shape and dtype are known, their values are read when they are used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map_only

from dualeval.errors import UsageError
from dualeval.models.checkpoints.file_parts import InMemory, Source

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "_version", "is_leaf"),
    *("is_quantized", "is_sparse", "is_meta", "is_cuda", "is_nested", "requires_grad", "retains_grad"),
    *("grad", "grad_fn", "_backward_hooks", "_base"),
)
# What is known without the values.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.requires_grad.__set__, Tensor.requires_grad_),  # type: ignore[attr-defined]
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.storage_offset, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_inference, Tensor.__len__),
}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET = Tensor.data.__set__  # type: ignore[attr-defined]


class LateTensor(Tensor):
    """A tensor whose values stay in their file.

    It has shape and dtype. ``parameter.copy_(late)`` reads the values into the parameter's own memory; any
    other operation reads them for itself, and does not keep them. It is never written. A model may have one
    as a parameter.
    """

    # As above.
    source: Source
    # Why they could not be copied; a module's `load_state_dict` tells only its text.
    failure: UsageError | None

    @staticmethod
    def __new__(
        cls, source: Source, dtype: torch.dtype | None = None, strides: tuple[int, ...] | None = None
    ) -> LateTensor:
        made: LateTensor = Tensor._make_wrapper_subclass(
            cls, source.shape, strides, dtype=dtype or source.dtype, device=torch.device("cpu")
        )
        made.source = source
        made.failure = None
        return made

    __hash__ = object.__hash__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> LateTensor:
        """Itself: it holds no values, and is never written."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give torch the values, where it computes with them.

        Not only where it dispatches: at the first dispatch to a class of Python, torch imports its
        distributed tensors, which takes longer than to load most models.
        """
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (Tensor.detach, _DATA):
            return cls(args[0].source, args[0].dtype, args[0].stride())
        if func == _DATA_SET:
            raise NotWritten
        if func is torch._has_compatible_shallow_copy_type:
            return False  # Module.to and its like put new parameters in the place of late ones
        if func is Tensor.copy_ and not kwargs and not isinstance(args[0], LateTensor):
            args[1]._copy_to(args[0])
            if not args[0].is_inference():
                increment_version(args[0])  # the bytes were read into its memory without torch
            return args[0]
        return _with_values(func, args, kwargs or {})

    # As above, where torch calls its own functions from C++.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _with_values(func, args, kwargs or {})

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        values = torch.empty(self.source.shape, dtype=self.dtype)
        self._copy_to(values)
        return values

    def read_rows(self, first: int, last: int, into: Tensor) -> None:
        """Read some rows, which are indices of the first dimension; a tensor of no dimensions is one row.

        Only the parts of the files that hold them are read.
        """
        if first == last:
            return
        source = self.source.rows(first, last) if self.ndim else self.source
        self._copy_from(source, into.view(source.shape))

    def _copy_to(self, target: Tensor) -> None:
        if tuple(target.shape) != self.source.shape:
            target.copy_(self.read())  # broadcast
            return
        self._copy_from(self.source, target)

    def _copy_from(self, source: Source, target: Tensor) -> None:
        try:
            if self.dtype in (source.dtype, target.dtype):
                source.copy_to(target)
                return
            # Not in one step: the tensor's own dtype may round.
            values = torch.empty(source.shape, dtype=self.dtype)
            source.copy_to(values)
            target.copy_(values)
        except UsageError as error:
            self.failure = error
            raise


class NotWritten(NotImplementedError):
    """Something writes to a tensor whose values stay in their file."""

    def __init__(self) -> None:
        super().__init__(
            "this tensor's values are in a file (a model that is built late), where they are not changed. "
            "Read it first, for instance with model.to('cpu'), and change that."
        )


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    late = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, LateTensor)}
    read = {name: each.read() for name, each in late.items()}
    before = {name: _version(each) for name, each in read.items()}
    args, kwargs = tree_map_only(LateTensor, lambda each: read[id(each)], (args, kwargs))
    result = func(*args, **kwargs)
    if any(_version(each) != before[name] for name, each in read.items()):
        raise NotWritten
    return tree_map_only(Tensor, lambda made: _never_written(made, read.values()), result)


def _never_written(made: Tensor, read: Iterable[Tensor]) -> Tensor:
    """A result; if it is a view of values that were read, what is written to it would be lost."""
    is_view = any(made._base is each and made is not each for each in read)
    return LateTensor(InMemory(values=made), made.dtype, made.stride()) if is_view else made


def _version(values: Tensor) -> int:
    """How often something was written to a tensor; what inference mode makes does not count."""
    return 0 if values.is_inference() else values._version
