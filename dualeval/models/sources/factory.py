"""Models of the user's: by the name of what makes them, package.module:factory, or handed over in Python."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dualeval.errors import UsageError
from dualeval.messages import listed, nearest
from dualeval.models.checkpoints.checkpoint import StateDict
from dualeval.models.checkpoints.finding import is_plain
from dualeval.models.late_building import is_building
from dualeval.models.sources.processors import preprocessing_beside
from dualeval.models.sources.source import (
    Loading,
    ModelSource,
    WeightsSource,
    refuse_arguments,
    weights_of_file,
)
from dualeval.models.weights import is_published_name
from dualeval.user_code.importing import own_module

# What torch keeps in a module, but for buffers: some are in no state_dict.
_OF_TORCH = {*vars(nn.Module())} - {"_buffers"}
# Parameters of a model that is made again in a moment.
_MADE_AGAIN_BELOW = 10**8
# Arguments that decide no output of an evaluation: dropout's, those of the training; and the data's number.
_OF_TRAINING = re.compile(
    r"num_classes|seed|mode|train(ing)?|name|path|resume|checkpoint|model"
    r"|(.*_)?drop(out|path)?\d*(_block|_connect|_path)?(_rate|_prob|_p|_ratio)?|(lr_)?schedul\w*"
    r"|(.*_)?(lr|learning_rate|wd|weight_decay|momentum|betas|optim\w*|epochs?|warmup|max_steps|batch_size"
    r"|num_workers|devices?|gpus?|patience|label_smoothing|loss|criterion|pretrained|weights|ema|mixup|cutmix"
    r"|augment\w*|verbose|(data|log|save|output)_(dir|path))(_.*)?"
)


class FactoryModel(ModelSource):
    """What a callable of the user's returns.

    It is called with the arguments of ``--model-arg``, and with ``num_classes`` where it takes that.
    """

    def check(self) -> None:
        refuse_file_of_code(self.name)

    @property
    def identity(self) -> str:
        """Module and function, wherever the file of the module lies: its text is in the job's source."""
        return ":".join(_module_and_function(self.name))

    def find_weights(self, weights: str | None) -> WeightsSource:
        assert weights is not None, "a model without weights of its own"
        if is_published_name(weights):
            raise UsageError(
                f"--weights {weights}: {self.name} has no weights of its own. Give a state_dict file."
            )
        return weights_of_file(weights)

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        factory = _import_factory(self.name)
        signature = inspect.signature(factory)
        takes = signature.parameters
        accepts = "num_classes" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
        kwargs = dict(self.arguments)
        if num_classes is not None and accepts:
            kwargs["num_classes"] = num_classes
        try:
            signature.bind(**kwargs)
        except TypeError as error:
            raise UsageError(
                f"--model {self.name}: {factory.__name__}{signature} is called with "
                f"{', '.join(kwargs) or 'no arguments'}: {error}. Give --num-classes N where the data does "
                "not say it, other arguments with --model-arg NAME=VALUE, or a function that needs none, as "
                "def make(num_classes=10): return Net(...)."
            ) from error
        model = factory(**kwargs)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"--model {self.name} returned a {type(model).__name__}, expected a torch.nn.Module"
            )
        return model

    def compare(self, model: nn.Module, state: StateDict) -> str | None:
        takes = inspect.signature(_import_factory(self.name)).parameters
        other = {
            name: (value, takes[name].default)
            for name, value in state.arguments.items()
            if name in takes and is_plain(takes[name].default) and not _OF_TRAINING.fullmatch(name)
            if name not in self.arguments and value not in (None, "")  # as argparse has what nobody gave
            if not _alike(value, takes[name].default)
        }
        if other:
            pairs = [f"{name} is {file!r}, called with {call!r}" for name, (file, call) in other.items()]
            of_file = " ".join(_flag_for(name, file) for name, (file, _) in other.items())
            of_call = " ".join(_flag_for(name, call) for name, (_, call) in other.items())
            raise UsageError(
                f"--model {self.name}: {state.path} was saved with other arguments: {'; '.join(pairs)}. Type "
                f"{of_file} to take those of the file, or {of_call} to keep these."
            )
        hook = getattr(type(model), "on_load_checkpoint", None)
        if "pytorch-lightning_version" not in state.arguments or hook is None:
            return None
        if hook.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return None
        kind = type(model).__name__
        return (
            f"{kind}.on_load_checkpoint is not called: what it takes from {state.path} beside the state_dict "
            f"is missing. If that decides the outputs, evaluate in Python what {kind}.load_from_checkpoint "
            "returns: dualeval.evaluate(model=...)"
        )

    def load(self, weights: WeightsSource, num_classes: int | None, loading: Loading) -> nn.Module:
        model = super().load(weights, num_classes, loading)
        beside = {} if is_building() else _in_no_checkpoint(model)
        if not beside or sum(each.numel() for each in model.parameters()) >= _MADE_AGAIN_BELOW:
            return model
        again = []
        for _ in range(2):  # of one seed: what differs then, too, as memory of torch.empty, is no draw
            torch.manual_seed(1)
            again.append(_in_no_checkpoint(self.create(num_classes, entry=weights.entry)))
        one, other = again
        stays = {name for name in one if _same(one[name], other.get(name))}
        drawn = [name for name in beside if name in stays and not _same(one[name], beside[name])]
        if drawn:
            raise UsageError(
                f"--model {self.name}: {type(model).__name__} draws {listed(drawn)} anew each time it is "
                "made, and no checkpoint has that: the trained values are lost. Keep layers in an "
                "nn.ModuleList, tensors by register_buffer, save again; or give the trained object to "
                "dualeval.evaluate(model=...)"
            )
        return model

    def carried_preprocessing(self, weights: WeightsSource, num_classes: int | None) -> tuple[Any, str]:
        factory = _import_factory(self.name)
        if (preprocessing := getattr(factory, "preprocessing", None)) is not None:
            return preprocessing, f"{self.name}.preprocessing"
        with torch.random.fork_rng(devices=[]):
            model = self.create(num_classes)
        return _carried_by(model, self.name) or preprocessing_beside(weights.path, self.name)

    def sources(self) -> list[Any]:
        """The factory and its module."""
        return [_import_factory(self.name), sys.modules[_module_and_function(self.name)[0]]]


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments are equal, also where one is a list or a text of the other."""
    one, other = (tuple(value) if isinstance(value, list) else value for value in (one, other))
    return bool(one == other or str(one) == str(other))


def _flag_for(name: str, value: Any) -> str:
    """An argument as a shell takes it: a text as it is where that is no Python literal."""
    is_word = isinstance(value, str) and value.isidentifier() and value not in ("None", "True", "False")
    return "--model-arg " + shlex.quote(f"{name}={value if is_word else repr(value)}")


def _in_no_checkpoint(model: nn.Module) -> dict[str, list[Tensor]]:
    """Tensors that a model holds beside its state_dict, by attribute; no copies of what is in there."""
    state = [value for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)]
    known, unsaved = {*map(id, state)}, dict[str, list[Tensor]]()
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = [] if name in _OF_TORCH else tree_leaves(value)
            modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
            held = [*leaves, *(each for part in modules for each in [*part.parameters(), *part.buffers()])]
            dense = [each for each in held if isinstance(each, Tensor) and each.layout is torch.strided]
            missing = [each for each in dense if id(each) not in known]
            if missing := [each for each in missing if not any(_same([each], [value]) for value in state)]:
                unsaved[f"{place}.{name}".lstrip(".")] = missing
    return unsaved


def _same(one: Sequence[Tensor], other: Sequence[Tensor] | None) -> bool:
    if other is None or [*map(_storage_of, one)] != [*map(_storage_of, other)]:
        return False
    return all(map(torch.equal, one, other))


def _storage_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.layout


def _carried_by(model: nn.Module, shown: str) -> tuple[Any, str] | None:
    """The preprocessing that a model has as an attribute, and which one; None where it has none."""
    if (preprocessing := getattr(model, "preprocessing", None)) is not None:
        return preprocessing, "model.preprocessing"
    from dualeval.models.sources.timm_models import DATA_CONFIG, preprocessing_of

    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, name, None)
        if isinstance(config, Mapping) and config.keys() >= {*DATA_CONFIG}:
            return preprocessing_of(config, shown), f"model.{name}"
    return None


def refuse_file_of_code(name: str) -> None:
    """Check that a model's name is not a file of code alone, and not a missing one."""
    file, _, function = name.partition(":")
    path = Path(file if file.endswith(".py") else f"{file.replace('.', '/')}.py")
    if function if path.is_file() else not file.endswith(".py"):
        return
    if not path.is_file():
        hint = nearest(path.name, sorted(each.name for each in path.parent.glob("*.py")))
        raise UsageError(
            f"--model {name}: there is no file {path}.{hint} Expected FILE.py:FUNCTION, a function or class "
            "that returns the model."
        )
    names = re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", path.read_text("utf-8", "replace"), re.MULTILINE)
    inside = f" It has {listed(names)}." if names else ""
    raise UsageError(
        f"--model {name} is a file of code: expected {file}:FUNCTION, a function or class that returns the "
        f"model. Type: --model {file}:{next(iter(names), 'FUNCTION')}.{inside}"
    )


def _module_and_function(name: str) -> tuple[str, str]:
    """The name that a module has once it is imported, and what makes the model in it."""
    place, _, function = name.rpartition(":")
    return Path(place).stem if place.endswith(".py") else place, function


def _import_factory(name: str) -> Any:
    place, _, attribute = name.rpartition(":")
    module = own_module(place, f"--model {name}")
    factory = getattr(module, attribute, None)
    if not callable(factory):
        made = vars(module).items()
        names = [key for key, value in made if getattr(value, "__module__", "") == module.__name__]
        callables = [key for key in dir(module) if callable(getattr(module, key))]
        hint = nearest(attribute, callables, most=5) or (f" It has {listed(names)}." if names else "")
        raise UsageError(f"--model {name}: {place} has no callable {attribute!r}.{hint}")
    return factory


class ModuleModel(ModelSource):
    """A module, or a function without arguments that returns one; it has its weights."""

    needs_weights = False

    def __init__(self, model: nn.Module | Callable[[], nn.Module], arguments: Any, *, trust: bool) -> None:
        name = getattr(model, "__name__", type(model).__name__)
        super().__init__(name, arguments, trust=trust)
        refuse_arguments(name, arguments, "because it is a module already")
        if not callable(model):
            raise UsageError(f"model is a {name}: expected an nn.Module, or a function that returns one")
        self._model = model

    def find_weights(self, weights: str | None) -> WeightsSource:
        if weights is not None:
            load = "Leave weights out."
            if not isinstance(self._model, nn.Module):
                load = f"Load them in {self.name}, as model.load_state_dict(...), and leave weights out."
            raise UsageError(f"weights={weights!r}: the module {self.name} has its weights. {load}")
        return WeightsSource(text="as the module has them")

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        model = self._model if isinstance(self._model, nn.Module) else self._model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.name}() returned a {type(model).__name__}: expected an nn.Module")
        return model

    def build(
        self, weights: WeightsSource, num_classes: int | None, loading: Loading | None = None
    ) -> nn.Module:
        # Before it is tried: in training mode batch norms would learn from that.
        model = self.create(num_classes)
        model.eval()
        return model

    def why_whole(self, weights: WeightsSource) -> str | None:
        return "it is made in Python"

    def carried_preprocessing(self, weights: WeightsSource, num_classes: int | None) -> tuple[Any, str]:
        return _carried_by(self.create(num_classes), self.name) or (None, "")

    def sources(self) -> list[Any]:
        return [] if isinstance(self._model, nn.Module) else [self._model]
