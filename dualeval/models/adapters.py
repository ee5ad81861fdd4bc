"""Adapters of peft: a folder with the changes to another model, merged into its weights in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualeval.errors import UsageError
from dualeval.messages import counted, listed
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.model_errors import first_line
from dualeval.models.transformers_folder import ADAPTER, CONFIG, check_library, config_of

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# As peft names the first adapter of a model, in the names of its tensors.
_NAME = "default"
# Before the names of the model.
_PREFIX = "base_model.model."


class Adapter:
    """An adapter, and the folder of the model that it changes."""

    def __init__(self, folder: Path, base: Path | None, *, trust: bool) -> None:
        """Find its files; without ``base``, also the model that its configuration names."""
        self.folder, self._trust = folder, trust
        check_library(f"the adapter {folder}", "peft", "peft")
        weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
        if weights is None:
            fault = f"holds no {_WEIGHTS[0]}" if folder.is_dir() else "does not exist"
            raise UsageError(
                f"the adapter {folder} {fault}. Expected a folder as peft's save_pretrained writes it."
            )
        self._weights = weights
        values = config_of(folder, ADAPTER)
        self.base = base or _base_of(folder, values)
        self._of_base = [] if base is None else _other_base(folder, base, values)
        # A training that has changed the tokenizer saves it beside the adapter.
        has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER)
        self.tokenizer = folder if has_tokenizer else self.base
        self.notes = self._of_base

    def tensors(self) -> dict[str, Any]:
        """Its tensors by name, in their files until they are read."""
        return dict(read_state_dict(self._weights, trust=self._trust).tensors)

    def whole(self) -> dict[str, torch.Size]:
        """The shapes of tensors that a model gets anew, as a classifier's, by the model's names."""
        return {name.removeprefix(_PREFIX): each.shape for name, each in self.tensors().items()}

    def fingerprint(self) -> list[str]:
        """sha256, in hex, of its files."""
        files = (self.folder / ADAPTER, self._weights)
        return [sha256(file.read_bytes()).hexdigest() for file in files]

    def merged_into(self, model: nn.Module) -> nn.Module:
        """The model with the adapter in its weights, as peft's ``merge_and_unload`` gives it."""
        import peft

        late = self.tensors().items()
        tensors = {name: each.read() if isinstance(each, LateTensor) else each for name, each in late}
        threads = torch.get_num_threads()
        # The last bits of the product may depend on their number.
        torch.set_num_threads(1)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                config = peft.PeftConfig.from_pretrained(str(self.folder))
                # That it ignores what a later version has written.
                later = [f"adapter: {' '.join(str(each.message).split())}" for each in said]
                self.notes = [*self._of_base, *later]
                return self._merge(peft, model, config, tensors)
        except (UsageError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of peft: a missing module, another shape, a kind that does not merge
            raise UsageError(
                f"the adapter {self.folder} cannot be merged into the model {self.base}: "
                f"{first_line(error)}. Give the model that it was trained on."
            ) from error
        finally:
            torch.set_num_threads(threads)

    def _merge(self, peft: Any, model: nn.Module, config: Any, tensors: dict[str, Any]) -> nn.Module:
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise UsageError(
                f"the adapter {self.folder} is of the kind {config.peft_type.value}, which adds to a model's "
                "inputs and cannot be merged into its weights. Evaluate peft's model in a task of your own "
                "(docs/your-own.md)."
            )
        config.inference_mode = True
        adapted = peft.get_peft_model(model, config)
        loaded = peft.set_peft_model_state_dict(adapted, tensors, _NAME)
        missing = [name for name in loaded.missing_keys if _NAME in name.split(".")]
        # peft passes over both, with a warning at most.
        if wrong := [*missing, *loaded.unexpected_keys]:
            raise UsageError(
                f"the adapter {self.folder} belongs to another model than {self.base}: "
                f"{counted(len(missing), 'tensor')} missing in the file, {len(loaded.unexpected_keys)} not "
                f"in the model: {listed(wrong, 3)}. Give the model that it was trained on."
            )
        merged: nn.Module = adapted.merge_and_unload()
        return merged


def _base_of(folder: Path, values: Mapping[str, Any]) -> Path:
    """The model that an adapter's configuration names."""
    name = values.get("base_model_name_or_path")
    if name and (found := _found(name, values)):
        return found
    named = f"its base {name!r}, which is not on this disk" if name else "no base (base_model_name_or_path)"
    raise UsageError(
        f"the folder {folder} is an adapter of peft, and its {ADAPTER} names {named}. Type: --model BASE "
        f"--adapter {folder}, where BASE is a local folder with the model that it was trained on."
    )


def _found(name: str, values: Mapping[str, Any]) -> Path | None:
    """Where a named model is on this disk: a folder, or one in the local cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    if (Path(name) / CONFIG).is_file():
        return Path(name)
    try:
        cached = try_to_load_from_cache(name, CONFIG, revision=values.get("revision"))
    except ValueError:  # a path, and no name of the hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _other_base(folder: Path, base: Path, values: Mapping[str, Any]) -> list[str]:
    """That an adapter names another model, whose shapes may be the same; not where a folder was moved."""
    name = values.get("base_model_name_or_path")
    if not name or Path(name).name in (base.name, base.resolve().name):
        return []
    if f"models--{name.replace('/', '--')}" in base.absolute().parts:  # in another cache of the hub
        return []
    found = _found(name, values)
    if found is not None and found.resolve() == base.resolve():
        return []
    return [f"the adapter in {folder} names {name} as its base, and --model is {base}"]
