"""Reading what ``torch.save`` has written: where its tensors lie. Code runs only where it is trusted."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dualeval.errors import UsageError
from dualeval.models.checkpoints.admitted import admitting
from dualeval.models.checkpoints.file_parts import StampedFile
from dualeval.models.checkpoints.finding import choose
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.checkpoints.places import NotInPlace, check_records, part_of, program_in, records_of
from dualeval.own_code import importable

_REFUSED = re.compile(r"unsupported global(?:: global)? (\S+)", re.IGNORECASE)


class TorchFile:
    """A file of ``torch.save``."""

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        program = program_in(path)
        if program is not None:
            raise UsageError(
                f"{path} is {program}: a model with its code, and no weights. --model {path} takes it, with "
                "--trust-checkpoint and without --weights."
            )
        self._path = path
        self._trust = trust
        self._file = StampedFile.of(path)
        with self._file.opened() as descriptor, open(descriptor, "rb", closefd=False) as opened:
            self._begins_as_zip = opened.read(2) == b"PK"
            # Only the zip format of torch >= 1.6 has tensors in their own places.
            self._is_zip = self._begins_as_zip and zipfile.is_zipfile(opened)
            self._records = records_of(opened) if self._is_zip else {}
        # What the file holds; of the tensors only shape and dtype where the format allows it.
        self.tree = self._without_values() if self._records else None
        if self.tree is None:
            self._records, self.tree = {}, self._with_values()

    def late_state_dict(self, key: str, tensors: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """A state_dict of the tree, with tensors that are read when they are used."""
        if self._records:
            try:
                return _like(tensors, {name: self._late(value) for name, value in tensors.items()})
            except (NotInPlace, RecursionError):
                self._records, self.tree = {}, self._with_values()
                _, tensors = choose(self._path, self.tree, key or None)
        return _like(tensors, tensors)

    def _late(self, value: Any) -> Any:
        if not isinstance(value, Tensor):  # the extra state of a module, of whatever type
            return tree_map_only(Tensor, lambda tensor: self._late(tensor).read(), value)
        return LateTensor(part_of(value, self._file, self._records))

    def _without_values(self) -> object:
        """The tree with tensors that have no values; None where torch cannot make it."""
        try:
            return self._load("meta", weights_only=True)
        except Exception:  # noqa: BLE001 - it is read with values, and then it is said what is wrong
            return None

    def _with_values(self) -> object:
        try:
            if self._is_zip:
                check_records(self._path)
            return self._load("cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if self._trust:
                return self._with_code()
            detail = _refusal(str(error))
            raise UsageError(
                f"{self._path} cannot be read as plain tensors ({detail}). It is damaged, or holds pickled "
                "Python objects, which could run code. Save it again with torch.save(model.state_dict(), "
                "PATH) or as safetensors. If you trust whoever wrote it, --trust-checkpoint reads it as it "
                "is, and runs its code."
            ) from error
        except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
            raise self._damaged(error) from error

    def _with_code(self) -> object:
        importable(Path.cwd())
        try:
            return _modules_as_state_dicts(self._load("cpu", weights_only=False))
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"{self._path} holds objects of classes that cannot be imported here: {error}. Start in the "
                "folder of their module, or save it again with torch.save(model.state_dict(), PATH)."
            ) from error
        except Exception as error:  # of the file's own code any
            raise self._damaged(error) from error

    def _load(self, device: str, *, weights_only: bool) -> object:
        with warnings.catch_warnings(), admitting(), self._file.opened():
            warnings.simplefilter("ignore")  # what torch guesses of a file that it then refuses
            return torch.load(self._path, map_location=device, weights_only=weights_only)

    def _damaged(self, error: Exception) -> UsageError:
        if self._begins_as_zip and not self._is_zip:
            return UsageError(
                f"{self._path} is cut short: it begins as a file of torch.save, and its end is missing "
                f"({self._file.size:,} bytes are there). Fetch or save it again."
            )
        said = str(error) or type(error).__name__
        return UsageError(f"{self._path} is not a readable torch file: {said.splitlines()[0]}")


def _refusal(said: str) -> str:
    """What torch refuses, without its advice to switch the protection off."""
    name = _REFUSED.search(said)
    if name is not None:
        return f"Unsupported global: GLOBAL {name[1]}"
    _, _, detail = said.partition("WeightsUnpickler error: ")
    return (detail or said).splitlines()[0].split(". ")[0]


def _like(tensors: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Values by name, with the versions of modules by which some of them know and convert an older layout."""
    if values is tensors and isinstance(tensors, OrderedDict):
        return tensors
    made = OrderedDict(values)
    if hasattr(tensors, "_metadata"):
        made._metadata = tensors._metadata  # type: ignore[attr-defined]
    return made


def _modules_as_state_dicts(content: Any) -> Any:
    """The content with each module replaced by its state_dict."""
    if isinstance(content, nn.Module):
        return content.state_dict()
    if isinstance(content, Mapping):
        # The same object where nothing changes: its class, and the versions beside its tensors.
        made = {name: _modules_as_state_dicts(value) for name, value in content.items()}
        return content if all(made[name] is content[name] for name in made) else made
    if isinstance(content, (list, tuple)):
        items = [_modules_as_state_dicts(value) for value in content]
        return content if all(one is other for one, other in zip(items, content, strict=True)) else items
    return content
