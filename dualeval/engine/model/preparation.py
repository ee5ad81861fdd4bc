"""The model that computes, made from the model as it was built: in evaluation mode, folded, cast, compiled.

The job's identity describes the model as it was built, and names the steps that are applied to it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from dualeval.engine.device.divided import NOT_GATHERED, is_sharded
from dualeval.engine.model.layouts import converter, fixed_part, is_changeable, layout_of, set_door
from dualeval.engine.values.options import RunOptions
from dualeval.errors import UsageError, text_of, with_type
from dualeval.messages import counted, listed
from dualeval.options.choices import CHANNELS_LAST, COMPILE, FOLD
from dualeval.options.evaluation import precision_of

# Shapes of batches that may each be compiled; torch's own limit is 8.
_MOST_SHAPES = 64
_LISTED_AT_MOST = 3


def prepare(
    model: nn.Module,
    options: RunOptions,
    *,
    owned: bool = False,
    note: Callable[[str], object] = lambda sentence: None,
) -> nn.Module:
    """Prepare a model for its evaluation, in the order: fold, cast, layout, compile.

    Batch norms are folded first, with float32 weights. The model stays the same object, with its methods:
    only its modules' entries are replaced, and its ``forward`` and compiled call are set as attributes,
    without hooks. A call ``model(...)`` casts its inputs and sets their layout; it returns float32.
    """
    check_model(model, options)
    layout = layout_of(model, options.layout)
    if options.optimize == FOLD:
        from dualeval.engine.model.folding import fold

        if not fold(model):
            note(
                "--optimize fold: nothing was folded, because no batch norm directly follows a convolution "
                "of torch (a subclass of nn.Conv2d does not count)"
            )
    precision = precision_of(options)
    if is_changeable(model):
        convert_layout = converter(layout)

        def convert(module: nn.Module, tensor: Tensor) -> Tensor:
            return convert_layout(tensor.to(precision.dtype_in(module, tensor.dtype)))

        held = ((module, one) for module in model.modules() for one in (module._parameters, module._buffers))
        convert_each(held, lambda module, tensor: _converted(module, tensor, convert, owned=owned))
        if precision.dtype is not None or any(tensor.ndim == 4 for tensor in model.parameters()):
            set_door(model, precision.dtype, layout)
    elif is_sharded(model) and layout == CHANNELS_LAST:
        # Parameters stay contiguous, as FSDP needs them: a convolution follows the layout of its inputs.
        set_door(model, None, layout)
    if options.optimize == COMPILE:
        note(
            f"--optimize {COMPILE}: each shape of a batch is compiled at its first use, which can take "
            "minutes"
        )
        _compile(model)
    return model


def check_initialized(model: nn.Module) -> None:
    """Refuse lazy layers without weights: each rank would draw other weights, at its own first batch."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"the model has lazy layers whose weights are not made yet ({listed(lazy, _LISTED_AT_MOST)}). "
            "Call the model once where you make it, as model(inputs) with some samples, or load its "
            "weights. On several ranks call torch.manual_seed(0) before: each has to make the same weights."
        )


def check_model(model: nn.Module, options: RunOptions) -> None:
    """Check that a model can be prepared as the options say."""
    if options.optimize is not None and (part := fixed_part(model)) is not None:
        raise UsageError(
            f"--optimize {options.optimize}: {part}, and its operations were fixed when it was made. Leave "
            "it out."
        )
    if options.optimize is not None and is_sharded(model):
        raise UsageError(
            f"--optimize {options.optimize}: the model is sharded, and its layers' parameters exist only "
            "while a layer computes. Leave it out."
        )
    precision = precision_of(options)
    if precision.cast is None:
        return
    flag = precision.flag
    if (part := fixed_part(model)) is not None:
        raise UsageError(
            f"{flag}: {part}, and its dtypes were fixed when it was made. Leave it out, or make that program "
            "again from a model of this dtype."
        )
    if not is_changeable(model):
        raise UsageError(
            f"{flag}: the model has tensors of a special class (such as those of a sharded model), which "
            f"cannot be cast. Give a model whose tensors are whole, or {precision.flag_of_autocast}."
        )
    if not any(tensor.is_floating_point() for tensor in model.parameters()):
        raise UsageError(f"{flag}: the model has no floating parameters to cast. Leave it out.")
    if options.keep_batchnorm_fp32 and not any(isinstance(part, _BatchNorm) for part in model.modules()):
        raise UsageError("--keep-batchnorm-fp32: the model has no batch norm. Leave it out.")


def identity_of(options: RunOptions) -> dict[str, Any]:
    """The preparation's part of a job's identity: options that change bits, so that older runs resume."""
    identity: dict[str, Any] = {"precision": options.precision}
    if options.keep_batchnorm_fp32:
        identity["keep_batchnorm_fp32"] = True
    if options.layout == CHANNELS_LAST:
        identity["layout"] = options.layout
    if options.optimize is not None:
        identity["optimize"] = options.optimize
    return identity


def why_preparation_failed(error: BaseException, options: RunOptions) -> str | None:
    """Why an option made a forward fail; None if no option is the cause."""
    from dualeval.torch_errors import TorchError

    precision = precision_of(options)
    text = (text_of(error).splitlines() or [""])[0].rstrip(".")
    if options.shard is not None and TorchError.NOT_GATHERED.search(text):
        return f"--shard {options.shard}: {NOT_GATHERED}"
    if options.shard is not None and TorchError.NOT_THROUGH_ROOT.search(text):
        return (
            f"--shard {options.shard}: a part of the model is called directly, but its weights are gathered "
            "only in a call of the whole model. Let the task's forward call model(...), or leave --shard out"
        )
    if options.optimize == COMPILE and type(error).__module__.startswith(
        ("torch._dynamo", "torch._inductor")
    ):
        if "limit" in type(error).__name__.lower() or TorchError.RECOMPILED.search(text):
            return (
                f"--optimize compile: batches come in more than {_MOST_SHAPES} shapes, and each is compiled. "
                "Leave it out, or pad the samples"
            )
        return (
            f"--optimize compile: torch.compile failed: {with_type(error)}. It needs a C++ compiler (g++ or "
            "clang; on Debian: apt install g++), on a GPU Triton. Install that, or leave it out"
        )
    if precision.cast is not None and TorchError.MIXED_DTYPES.search(text):
        return (
            f"{precision.flag}: {text}. The model's weights and the inputs of model(...) are "
            "cast. A tensor that its forward makes in float32 is not, nor are the inputs of a part or "
            f"method called directly (model.encode(x)). Use {precision.flag_of_autocast}, or call "
            "model(...)"
        )
    if precision.cast is not None and TorchError.NO_KERNEL.search(text):
        return (
            f"{precision.flag}: {text}: this device has no such operation. Use {precision.flag_of_autocast}"
        )
    if options.layout == CHANNELS_LAST and TorchError.NOT_CONTIGUOUS.search(text):
        return (
            "--layout channels-last: the forward joins dimensions with Tensor.view, which works only on "
            "contiguous tensors. Write x.flatten(1) or x.reshape(...), or give --layout contiguous"
        )
    return None


@contextmanager
def compiler_settings(optimize: str | None) -> Iterator[None]:
    """While a compiled model computes, every shape is compiled, and none falls back to eager execution."""
    if optimize != COMPILE:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES, fail_on_recompile_limit_hit=True):
        yield


# -- tensors -----------------------------------------------------------------------------------------------


def convert_each(
    held: Iterable[tuple[nn.Module, dict[str, Any]]], convert: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """Replace the tensors that modules hold by converted ones, one after the other."""
    # A tied tensor is converted once. The old tensor is kept, too, so that no other can get its id.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module, tensors in held:
        for name, tensor in list(tensors.items()):
            if tensor is None:
                continue
            if id(tensor) not in made:
                made[id(tensor)] = tensor, convert(module, tensor)
            tensors[name] = made[id(tensor)][1]


def _converted(
    module: nn.Module, tensor: Tensor, convert: Callable[[nn.Module, Tensor], Tensor], *, owned: bool
) -> Tensor:
    with torch.no_grad():
        new = convert(module, tensor.detach())
    if (new.dtype, new.stride(), new.data_ptr()) == (tensor.dtype, tensor.stride(), tensor.data_ptr()):
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return new
    if owned and not tensor.is_inference():
        tensor.data = new
        tensor.grad = None
        return tensor
    return nn.Parameter(new, requires_grad=False)


# -- the compiler ------------------------------------------------------------------------------------------


def _compile(model: nn.Module) -> None:
    """Compile a model's call: each shape by itself, kernels not chosen by timing, one thread."""
    # With dynamic shapes, the second shape is compiled for all: bits would depend on the batches' order.
    model.compile(
        dynamic=False,
        options={
            "deterministic": True,
            "cpp.threads": 1,
            # No process pool: it would outlive the run.
            "compile_threads": 1,
        },
    )


# -- evaluation mode ---------------------------------------------------------------------------------------


def set_evaluation_mode(model: nn.Module) -> list[str]:
    """Set a model to evaluation mode if any of its modules is in training mode."""
    before = _in_training(model)
    if not before:
        return []
    try:
        model.eval()
    except NotImplementedError:
        # A graph of torch.export has no modes: it keeps the one that it was exported in.
        return [
            "the model cannot be set to evaluation mode (torch.export keeps the mode of the export): export "
            "it after model.eval()"
        ]
    after = _in_training(model)
    done = [name for name in before if name not in after]
    notes = []
    if done:
        notes.append(f"the model was in training mode, and was set to evaluation mode ({_named(done)})")
    if after:
        notes.append(
            f"the model stays in training mode after model.eval() in {_named(after)}: its own train() "
            "method does that. Its dropout and batch norm work as in training"
        )
    return notes


def training_note(model: nn.Module) -> list[str]:
    """A note if a module of the model is in training mode, for a model that is used as it is."""
    names = _in_training(model)
    if not names:
        return []
    return [
        f"the model is in training mode ({_named(names)}), so dropout and batch norms work as in training: "
        "call model.eval() before the loop"
    ]


def _in_training(model: nn.Module) -> list[str]:
    # A frozen TorchScript module has no such attribute.
    return [name for name, module in model.named_modules() if getattr(module, "training", False)]


def _named(names: list[str]) -> str:
    shown = listed((name or "the model itself" for name in names), _LISTED_AT_MOST)
    return f"{counted(len(names), 'module')}: {shown}"
