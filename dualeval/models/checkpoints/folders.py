"""Which form of checkpoint a folder holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dualeval.errors import UsageError
from dualeval.wording import listed

METADATA = ".metadata"
_INDEX = (".safetensors.index.json", ".bin.index.json")
_ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}$")
_MODEL_STATES = "mp_rank_*_model_states.pt"
_PARTITIONED = "*zero_pp_rank_*_model_states.pt"
_PIPELINE = "layer_*-model_*-model_states.pt"


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
        files = [path for path in found if path.name != METADATA]
        raise UsageError(
            f"{folder} holds {len(found)} checkpoints: {listed(map(str, found))}. They can give different "
            f"results. Say which is meant, such as --weights {files[0]}"
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
    found = listed((path.name for path in sorted(folder.iterdir())), 5) or "nothing"
    return UsageError(
        f"the folder {folder} holds no checkpoint (found: {found}). Expected one of "
        f"torch.distributed.checkpoint ({METADATA}, which is written last, and *.distcp), of DeepSpeed "
        "(latest), a *.safetensors file, pytorch_model.bin, or an index with its files "
        "(*.safetensors.index.json, *.bin.index.json). Copy the whole folder, hidden files too; of one file "
        f"give the path: --weights {folder}/FILE"
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
