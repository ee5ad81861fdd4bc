"""Reading what a training has saved, in every form, without running code; and finding the state_dict."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dualeval.data.contents import what_weights_are
from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.models.checkpoints.finding import METADATA, arguments_in, choose, class_names_in, is_state_dict
from dualeval.models.checkpoints.late import FilePart, LateTensor, StampedFile, contiguous_strides


@dataclass(frozen=True, kw_only=True)
class StateDict:
    """A state_dict in a checkpoint."""

    path: Path
    # The keys that lead to it, with dots between; "" where the checkpoint is nothing else.
    key: str
    # By name, read when they are used; with the `_metadata` that torch keeps beside them where there are any.
    # An entry `_extra_state` may be anything, and hold objects that were passed over.
    tensors: OrderedDict[str, Any]
    # Plain values beside them, as those that the model was made with.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_state_dict(path: Path, key: str | None = None, *, trust: bool = False) -> StateDict:
    """Find a state_dict in a checkpoint. Of other tensors, such as an optimizer's, no value is read."""
    saved = path
    if path.is_dir():
        saved = saved_in(path)
        if saved.name == METADATA:
            from dualeval.models.checkpoints.distributed import DistributedFolder

            distributed = DistributedFolder(path)
            place, tensors = choose(path, distributed.tree, key)
            return StateDict(path=path, key=place, tensors=distributed.late_state_dict(tensors))
    _check_file(saved)
    if _is_index(saved) or saved.suffix == ".safetensors":
        content = _read_shards(saved, trust=trust) if _is_index(saved) else _read_safetensors(saved)
        found, tensors = choose(path, content, key)
        return StateDict(path=path, key=found, tensors=OrderedDict(tensors))
    from dualeval.models.checkpoints.torch_files import TorchFile

    file = TorchFile(saved, trust=trust)
    place, tensors = choose(path, file.tree, key)
    beside = arguments_in(file.tree)
    return StateDict(path=path, key=place, tensors=file.late_state_dict(place, tensors), arguments=beside)


def read_class_names(path: Path) -> tuple[str, tuple[str, ...]]:
    """As ``class_names_in``, of a file of ``torch.save``; no code of its is run for that."""
    if not path.is_file() or _is_index(path) or path.suffix == ".safetensors":
        return "", ()
    from dualeval.models.checkpoints.torch_files import TorchFile

    try:
        _check_file(path)
        return class_names_in(TorchFile(path).tree)
    except UsageError:  # whoever loads the weights says why, or is trusted to run code
        return "", ()


def _check_file(path: Path) -> None:
    """Check that a file is there and can be one of weights, by its first bytes."""
    if not path.is_file():
        raise UsageError(f"weights file {path} does not exist. Give a state_dict file with --weights PATH.")
    _refuse_part_of_folder(path)
    if _is_index(path):
        return
    try:
        other = what_weights_are(path)
    except OSError as error:
        raise UsageError(f"weights file {path} cannot be read: {error.strerror or error}") from error
    if other is not None:
        raise UsageError(f"weights file {path} {other}.")


# -- which form of checkpoint a folder holds -----------------------------------------------------------

_INDEX = (".safetensors.index.json", ".bin.index.json")
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}$")
_MODEL_STATES = "mp_rank_*_model_states.pt"
_PARTITIONED = "*zero_pp_rank_*_model_states.pt"
_PIPELINE = "layer_*-model_*-model_states.pt"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# What a training keeps beside weights.
_OF_TRAINING = re.compile(r"optim|scheduler|scaler|rng|random_states|training_args|sampler")


def _is_index(path: Path) -> bool:
    """Whether a file is the index of a checkpoint in several files, by its name."""
    return path.name.endswith(_INDEX)


def _refuse_part_of_folder(path: Path) -> None:
    """Check that a file is no part of a checkpoint that is a folder."""
    if path.name == METADATA or (path.suffix == ".distcp" and (path.parent / METADATA).is_file()):
        raise UsageError(
            f"{path} is a part of a checkpoint of torch.distributed.checkpoint. Give the whole: --weights "
            f"{path.parent}"
        )
    if _is_index(path):
        return
    indices = [other for other in sorted(path.parent.glob("*.index.json")) if _is_index(other)]
    if _is_part(path) and indices:
        raise UsageError(
            f"{path} is one of several files with weights. Give the whole: --weights {path.parent}"
        )


def saved_in(folder: Path) -> Path:
    """The file to begin with in a folder: the index of several, ``METADATA``, or the only file of weights."""
    paths = [folder / METADATA] if (folder / METADATA).is_file() else []
    if (states := _model_states(folder)) is not None:
        paths.append(states)
    indices = [path for path in sorted(folder.glob("*.index.json")) if _is_index(path)]
    paths += indices
    named = {name for index in indices for name in _named_in(index)}
    paths += [path for path in _single_files(folder) if path.name not in named]
    if not paths:
        # Of a training script, under a name of its own.
        files = [path for path in sorted(folder.iterdir()) if path.suffix in _OF_TORCH and path.is_file()]
        paths = [path for path in files if not _OF_TRAINING.search(path.name) and not _is_part(path)]
    if not paths:
        raise _no_checkpoint(folder)
    if len(paths) > 1:
        files = [path for path in paths if path.name != METADATA]
        raise UsageError(
            f"{folder} holds {len(paths)} checkpoints: {listed(map(str, paths))}. They can give different "
            f"results. Say which is meant, such as --weights {files[0]}"
        )
    return paths[0]


def unread_beside(saved: Path) -> tuple[str, ...]:
    """The files beside one that was read which look like weights, and are not those that it names."""
    read = {saved.name, *(_named_in(saved) if _is_index(saved) else ())}
    files = [path for path in sorted(saved.parent.iterdir()) if path.suffix in _OF_WEIGHTS]
    return tuple(path.name for path in files if path.name not in read and not _OF_TRAINING.search(path.name))


def _named_in(index: Path) -> list[str]:
    """The files that an index names; none where it is damaged, which is said when it is read."""
    try:
        places = json.loads(index.read_bytes())["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [name for name in places if isinstance(name, str)]


def _single_files(folder: Path) -> list[Path]:
    """Files of weights that are no part of several, by the names that libraries give them."""
    names = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("pytorch_model*.bin"))]
    return [path for path in names if not _is_part(path)]


def _is_part(path: Path) -> bool:
    return _ONE_OF_SEVERAL.search(path.stem) is not None


def _no_checkpoint(folder: Path) -> UsageError:
    names = listed((path.name for path in sorted(folder.iterdir())), 5) or "nothing"
    return UsageError(
        f"the folder {folder} holds no checkpoint (found: {names}). Expected one of "
        f"torch.distributed.checkpoint ({METADATA}, which is written last, and *.distcp), of DeepSpeed "
        "(latest), a *.safetensors file, one file of torch.save, or an index with its files "
        "(*.safetensors.index.json, *.bin.index.json). Copy the whole folder, hidden files too; for one "
        f"file give its path: --weights {folder}/FILE"
    )


# -- DeepSpeed -------------------------------------------------------------------------------------------


def _model_states(folder: Path) -> Path | None:
    """The file of a DeepSpeed checkpoint that holds the model; None for another folder."""
    latest = folder / "latest"
    inner = folder
    if latest.is_file():
        inner = folder / latest.read_text("utf-8", "backslashreplace").strip()
        if not inner.is_dir():
            raise UsageError(
                f"{latest} names the folder {inner.name}, which is not there. Copy the whole checkpoint, or "
                "give the folder of a step: --weights FOLDER/global_stepN"
            )
    gather = (
        "Gather them (DeepSpeed writes the script into the checkpoint): python "
        f"{inner.parent}/zero_to_fp32.py {inner.parent} OUT --tag {inner.name}; then give --weights OUT"
    )
    if any(inner.glob(_PARTITIONED)):
        raise UsageError(
            f"{inner} is a checkpoint of DeepSpeed's ZeRO-3, where each rank has saved parts of the "
            f"parameters. {gather}"
        )
    states = sorted(inner.glob(_MODEL_STATES))
    if len(states) > 1 or any(inner.glob(_PIPELINE)):
        raise UsageError(
            f"{inner} was saved by a pipeline or by model-parallel ranks, in parts. Merge them with the "
            "tools of the library that has trained it, and save one state_dict."
        )
    if states:
        return states[0]
    if latest.is_file():
        raise UsageError(f"{inner} has no mp_rank_00_model_states.pt. Copy the whole checkpoint.")
    return None


# -- several files with an index -----------------------------------------------------------------------


def _read_shards(index: Path, *, trust: bool) -> OrderedDict[str, Any]:
    """The tensors that an index names, by name; their values are not read."""
    places = _weight_map(index)
    tensors: dict[str, Any] = {}
    for name in dict.fromkeys(places.values()):
        path = index.parent / name
        if not path.is_file():
            raise UsageError(
                f"{index} names the file {name}, which is not beside it. Fetch or copy all files."
            )
        of_file = _tensors_of(path, trust)
        wanted = {tensor for tensor, file in places.items() if file == name}
        if others := sorted(wanted ^ of_file.keys()):
            raise UsageError(
                f"{path} does not belong to {index.name}: only one of them has {listed(others)}. Copy "
                "all files of one checkpoint."
            )
        tensors |= of_file
    return OrderedDict((name, tensors[name]) for name in places)


def _tensors_of(path: Path, trust: bool) -> OrderedDict[str, Any]:
    if path.suffix == ".safetensors":
        return OrderedDict(_read_safetensors(path))
    from dualeval.models.checkpoints.torch_files import TorchFile

    file = TorchFile(path, trust=trust)
    if not is_state_dict(file.tree):
        raise UsageError(f"{path} is one of several files with weights, and holds more than tensors by name.")
    return file.late_state_dict("", file.tree)


def _weight_map(index: Path) -> dict[str, str]:
    """File names by the names of tensors."""
    try:
        content = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{index} is not readable JSON: {error}. Fetch or copy it again.") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise UsageError(f"{index} has no weight_map, which says which tensor is in which file.")
    return {tensor: str(name) for tensor, name in places.items()}


# -- safetensors ---------------------------------------------------------------------------------------

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def _read_safetensors(path: Path) -> OrderedDict[str, LateTensor]:
    """The tensors of a file, by name; their values are not read."""
    from safetensors import SafetensorError, safe_open

    file = StampedFile.of(path)
    try:
        # The library checks the header: that it is whole, and that the tensors fill the file without gaps.
        safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error
    with file.opened() as descriptor:
        length = torch.empty(1, dtype=torch.int64)
        file.read_into(descriptor, 0, length)
        header = torch.empty(int(length), dtype=torch.uint8)
        file.read_into(descriptor, 8, header)
    entries = json.loads(header.numpy().tobytes())
    entries.pop("__metadata__", None)
    first = 8 + len(header)
    # In the order in which they lie in the file, and are read.
    ordered = sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"])
    return OrderedDict((name, _late(file, first, name, entry)) for name, entry in ordered)


def _late(file: StampedFile, first: int, name: str, entry: dict[str, Any]) -> LateTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UsageError(
            f"{file.path} holds {name} as {entry['dtype']}, which is not read. Save it as floats."
        )
    shape, begin = tuple(entry["shape"]), first + entry["data_offsets"][0]
    strides = contiguous_strides(shape)
    return LateTensor(FilePart(file=file, offset=begin, shape=shape, strides=strides, dtype=dtype))
