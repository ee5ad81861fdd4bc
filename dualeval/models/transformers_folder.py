"""Folders as the transformers library writes them: config, weights and what else belongs to a model."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dualeval.data.contents import what_it_is
from dualeval.errors import UsageError
from dualeval.messages import counted, listed
from dualeval.models.checkpoints.checkpoint import read_state_dict, unread_beside
from dualeval.models.late_building import NotLate, is_building
from dualeval.models.loading import load_into
from dualeval.models.model_errors import first_line
from dualeval.models.prefixes import numbered
from dualeval.models.weights import LoadedWeights
from dualeval.vision_library import torchvision

CONFIG = "config.json"
# In the order in which the library looks for them.
_SAVED = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ADAPTER = "adapter_config.json"
# The task of a model, by a part of its class's name, and what to type for it.
_TASKS = {
    "ForSequenceClassification": "text-classification --model {} --data FILE.csv",
    "ForQuestionAnswering": "question-answering --model {} --data FILE.json",
    "ForCausalLM": "language-modeling --model {} --data FILE.txt",
    "LMHeadModel": "language-modeling --model {} --data FILE.txt",
    "ForImageClassification": "image-classification --model hf:{} --data DIR",
    "ForSemanticSegmentation": "segmentation --model hf:{} --data DIR --masks DIR",
}
# dualeval never looks at the hub, and never runs the code of a repository.
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def transformers_for(what: str) -> Any:
    """The transformers library."""
    check_library(what)
    # It imports torchvision, which does not always load by itself.
    torchvision()
    import transformers

    return transformers


def refuse_problem_type(config: Any, model: str) -> None:
    """Refuse a model of several numbers or labels a sample, by its configuration: it has no one class."""
    kind, count = (getattr(config, name, None) for name in ("problem_type", "num_labels"))
    if kind == "multi_label_classification" or (kind == "regression" and count != 1):
        raise UsageError(
            f"the config of {model} has problem_type {kind!r} and {count} outputs: expected one class per "
            "sample. For other outputs write a task, such as examples/multilabel.py. If it was trained "
            'for one class per sample, write "problem_type": "single_label_classification" into its config.'
        )


def check_library(what: str, library: str = "transformers", extra: str = "hf") -> None:
    """Check that a library, which ``what`` needs, is installed."""
    if importlib.util.find_spec(library) is None:
        raise UsageError(
            f"{what} needs the {library} library, which is not installed. Type: pip install "
            f"'dualeval[{extra}]'"
        )


def task_of(folder: Path) -> str:
    """What to type for the model in a folder, by the class in its configuration; "" for no task's."""
    made = " ".join(config_of(folder).get("architectures") or ())
    typed = next((flags for part, flags in _TASKS.items() if part in made), None)
    return "" if typed is None else f" For this model type: --task {typed.format(folder)}."


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of peft, and no model of its own."""
    return (folder / ADAPTER).exists() and not any((folder / name).exists() for name in _SAVED)


def refuse_adapter(folder: Path) -> None:
    """Check that a model's folder holds no adapter, which the library reads only where peft is installed."""
    if (folder / ADAPTER).exists():
        raise UsageError(
            f"the folder {folder} holds an adapter of peft ({ADAPTER}), which is not read. Merge it: "
            f"peft.PeftModel.from_pretrained(MODEL, {str(folder)!r}).merge_and_unload().save_pretrained("
            "'OUT'), where MODEL is the model without it; save the tokenizer into OUT, and give OUT. To "
            "evaluate the folder's own model, move the files adapter_* out of it."
        )


def load_pretrained(
    kind: Any, folder: Path, trained_for: str, of_adapter: Mapping[str, torch.Size] = MappingProxyType({})
) -> tuple[nn.Module, LoadedWeights]:
    """A model in float32 with the weights of its folder, all of which must be there.

    But for those that an adapter gives it later: there it has as many classes as these are for.
    """
    refuse_foreign_kernels(config_of(folder), folder)
    saved = next((folder / name for name in _SAVED if (folder / name).is_file()), None)
    if is_building():
        model, left_out = _load_by_name(kind, folder, saved)
        return model, _loaded(model, folder, saved, left_out)
    # Tensors of another shape are refused below, by their names.
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True, **LOCAL}
    model, report = kind.from_pretrained(folder, **how)
    state = model.state_dict()
    classes = {shape[0] for name, shape in of_adapter.items() if name in state and state[name].shape != shape}
    if len(classes) == 1:
        model, report = kind.from_pretrained(folder, num_labels=classes.pop(), **how)
    missing = sorted({*report["missing_keys"]} - {*of_adapter})
    mismatched = sorted(
        f"{name} {tuple(shape)}, the model has {tuple(expected)}"
        for name, shape, expected in report.get("mismatched_keys", ())
        if name not in of_adapter
    )
    if missing or mismatched:
        raise UsageError(
            f"the weights in {folder} lack {counted(len(missing), 'tensor')} of the model, and have "
            f"{len(mismatched)} of another shape: {listed(missing + mismatched, 5)}. Give a checkpoint that "
            f"was trained for {trained_for}; --weights random:SEED runs an untrained one.{task_of(folder)}"
        )
    # A checkpoint in half precision is computed with as --precision says.
    made: nn.Module = model.float()
    return made, _loaded(made, folder, saved, sorted(report["unexpected_keys"]))


def _loaded(model: nn.Module, folder: Path, saved: Path | None, left_out: Sequence[str]) -> LoadedWeights:
    """What was taken from a folder; refused where what was not is of layers as the model has them."""
    ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["(?!)"])
    left_out = [name for name in left_out if not re.search(ignored, name)]
    layers = {numbered(name) for name in model.state_dict()}
    if more := [name for name in left_out if numbered(name) in layers]:
        raise UsageError(
            f"the weights in {folder} are of a larger model than its {CONFIG} says: {len(more)} tensors are "
            f"not in it: {listed(more, 3)}. Copy {CONFIG} and weights of one model."
        )
    unread = () if saved is None else unread_beside(saved)
    return LoadedWeights(file=str(folder), key="", prefix="", left_out=tuple(left_out), unread=unread)


def add_generation_config(model: Any, folder: Path) -> None:
    """Give a model what from_pretrained gives it: which tokens end an answer may be said there alone."""
    if (folder / "generation_config.json").is_file() and model.can_generate():
        kind = type(model.generation_config)
        model.generation_config = kind.from_pretrained(folder, local_files_only=True)


def _load_by_name(kind: Any, folder: Path, saved: Path | None) -> tuple[nn.Module, list[str]]:
    """What ``load_pretrained`` gives, but each tensor is read from its file when it is used."""
    values = config_of(folder)
    if values.get("quantization_config") is not None:
        raise NotLate("it is quantized")
    if saved is None:
        raise NotLate(f"its folder holds none of {', '.join(_SAVED)} alone")
    try:
        state = read_state_dict(saved)
    except UsageError as error:
        raise NotLate(f"its files are not read by their names ({error})") from error
    dtype = _one_dtype(state.tensors, values)
    config = transformers_for("the model").AutoConfig.from_pretrained(folder, **LOCAL)
    model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    model.config.name_or_path = str(folder)
    model = model.float()
    tensors, left_out = _named_as_in(model, state.tensors)
    add_generation_config(model, folder)
    try:
        load_into(model, tensors, f"the weights in {folder}")
    except UsageError as error:
        raise NotLate(f"the names in its files are not those of the model ({error})") from error
    assert isinstance(model, nn.Module)
    return model, left_out


def _named_as_in(model: Any, tensors: Mapping[str, Any]) -> tuple[OrderedDict[str, Any], list[str]]:
    """The tensors of a file that a model takes, by the names that the library gives them; names of others."""
    state = model.state_dict()
    if importlib.util.find_spec("transformers.conversion_mapping") is None:  # before transformers 5
        left_out = [name for name in tensors if name not in state]
        return OrderedDict((name, value) for name, value in tensors.items() if name in state), left_out
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model, None, None)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    renamed: OrderedDict[str, Any] = OrderedDict()
    left_out = []
    for name in sorted(tensors, key=dot_natural_key):
        new, converted = rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, converted = rename_source_key(name, [], [], prefix, state)
        if new in state and converted is not None:
            raise NotLate(f"the transformers library computes {new} from the tensors of its files")
        if new in state:
            renamed[new] = tensors[name]
        else:
            left_out.append(new)
    # What from_pretrained leaves in the model beside its tensors.
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    model.set_use_kernels(False, None)
    return renamed, left_out


def _one_dtype(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which the library would make the model: that of the configuration, and of all tensors."""
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    named = config.get("dtype") or config.get("torch_dtype")
    if named is not None:
        kinds.add(getattr(torch, str(named), None))
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.float16, torch.bfloat16}:
        raise NotLate(f"its tensors have several dtypes ({', '.join(sorted(map(str, kinds)))})")
    dtype: torch.dtype = kinds.pop()
    return dtype


def config_of(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The values in config.json."""
    try:
        values = json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as error:
        reason = other_file(folder) or f"{name}: {error}"
        raise UsageError(f"{folder} holds no {name} that can be read: {reason}") from error
    return values if isinstance(values, dict) else {}


def refuse_foreign_kernels(config: Any, folder: Path) -> None:
    """Check that a configuration asks for no code of the hub, which the library would fetch and run."""
    for name, value in config.items() if isinstance(config, dict) else ():
        asked = value.values() if isinstance(value, dict) else (value,)
        if "_implementation" in str(name) and any("/" in text for text in asked if isinstance(text, str)):
            raise UsageError(
                f"{folder / CONFIG} names code of a repository ({name}: {value!r:.80}), which would be "
                f"fetched and run. dualeval does neither. Remove {name} from the file."
            )
        for part in value if isinstance(value, list) else (value,):
            refuse_foreign_kernels(part, folder)


def other_file(folder: Path) -> str | None:
    """The first file that is not what its name says: one of a clone without Git LFS, or a failed download."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model") and path.is_file():
            try:
                fault = what_it_is(path)
            except OSError as error:
                fault = f"cannot be read: {error.strerror or error}"
            if fault is not None:
                return f"{path.name} {fault}"
    return None


@contextmanager
def reading(folder: Path, begin: str, advice: str = "") -> Iterator[None]:
    """Quietly let the library read a folder: what is missing or damaged decides what it raises."""
    with quiet():
        try:
            yield
        except (UsageError, NotLate, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_building():
                raise  # whatever it is: it comes again, or not, where the model is built whole
            reason = other_file(folder) or first_line(error)
            raise UsageError(f"{begin} that can be read: {reason}{advice}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice of the library while it reads; what matters of it is an error here."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
