"""Which form of checkpoint a folder holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dualeval.errors import UsageError

METADATA = ".metadata"
_INDEX = (".safetensors.index.json", ".bin.index.json")
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}$")
_MODEL_STATES = "mp_rank_*_model_states.pt"
_PARTITIONED = "*zero_pp_rank_*_model_states.pt"
_PIPELINE = "layer_*-model_*-model_states.pt"
_LISTED_AT_MOST = 5


def is_index(path: Path) -> bool:
    """Whether a file is the index of a checkpoint in several files, by its name."""
    return path.name.endswith(_INDEX)


def refuse_part_of_folder(path: Path) -> None:
    """Check that a file is no part of a checkpoint that is a folder."""
    if path.name == METADATA or (path.suffix == ".distcp" and (path.parent / METADATA).is_file()):
        raise UsageError(
            f"{path} is a part of a checkpoint of torch.distributed.checkpoint. Give the whole: --weights "
            f"{path.parent}"
        )
    if is_index(path):
        return
    indices = [other for other in sorted(path.parent.glob("*.index.json")) if is_index(other)]
    if _ONE_OF_SEVERAL.search(path.stem) and indices:
        raise UsageError(
            f"{path} is one of several files with weights. Give the whole: --weights {path.parent}"
        )


def saved_in(folder: Path) -> Path:
    """The file to begin with in a folder: the index of several, ``METADATA``, or the only file of weights."""
    found = [folder / METADATA] if (folder / METADATA).is_file() else []
    if (states := _model_states(folder)) is not None:
        found.append(states)
    indices = [path for path in sorted(folder.glob("*.index.json")) if is_index(path)]
    found += indices
    parts = {name for index in indices for name in _named_in(index)}
    found += [path for path in _single_files(folder) if path.name not in parts]
    if not found:
        raise _no_checkpoint(folder)
    if len(found) > 1:
        shown = list(map(str, found))
        files = [path for path in found if path.name != METADATA]
        raise UsageError(
            f"{folder} holds {len(found)} checkpoints: "
            f"{', '.join(shown[:_LISTED_AT_MOST])}{', ...' if len(shown) > _LISTED_AT_MOST else ''}. They "
            f"can give different results. Say which is meant, such as --weights {files[0]}"
        )
    return found[0]


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
    return [path for path in names if not _ONE_OF_SEVERAL.search(path.stem)]


def _no_checkpoint(folder: Path) -> UsageError:
    distributed = next(folder.glob("*.distcp"), None)
    if distributed is not None:
        return UsageError(
            f"{folder} has files of torch.distributed.checkpoint ({distributed.name}) without {METADATA}, "
            "which is written last: the save has not ended, or the copy left out hidden files. Copy the "
            "whole folder."
        )
    parts = [path for path in sorted(folder.iterdir()) if _ONE_OF_SEVERAL.search(path.stem)]
    if parts:
        return UsageError(
            f"{folder} has one of several files with weights ({parts[0].name}), and no index "
            "(model.safetensors.index.json), which says which tensor is where. Copy the whole folder."
        )
    files = [
        path for path in sorted(folder.iterdir()) if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".tar")
    ]
    hint = f" Give the file: --weights {files[0]}" if files else ""
    return UsageError(
        f"the folder {folder} holds no checkpoint. Expected one of torch.distributed.checkpoint ({METADATA} "
        "and *.distcp), of DeepSpeed (latest), a *.safetensors file, pytorch_model.bin, or an index of "
        f"several (*.safetensors.index.json, *.bin.index.json).{hint}"
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
