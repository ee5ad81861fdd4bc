"""Extractive question answering models of the transformers library, from a local folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.contents import what_it_is
from dualeval.data.windows import TokenizerFacts
from dualeval.errors import UsageError
from dualeval.models.checkpoints import read_state_dict
from dualeval.models.weights import LoadedWeights, load_state_dict, seed_of
from dualeval.vision_library import torchvision

_CONFIG = "config.json"


def check_folder(folder: Path) -> None:
    """Check that transformers is there, and that a folder looks like one that it has written.

    Raises:
        UsageError: it is not so.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "question answering needs the transformers library, which is not installed. Type: "
            "pip install transformers"
        )
    if not (folder / _CONFIG).is_file():
        found = "does not exist" if not folder.exists() else f"holds no {_CONFIG}"
        raise UsageError(
            f"--model {folder} {found}. Expected a local folder as save_pretrained writes it, with the model "
            "and its tokenizer; 'hf download NAME --local-dir DIR' fetches one."
        )


def config_fingerprint(folder: Path) -> str:
    """sha256, in hex, over the values in config.json."""
    return sha256(
        json.dumps(json.loads((folder / _CONFIG).read_bytes()), sort_keys=True).encode()
    ).hexdigest()


def load_tokenizer(folder: Path) -> tuple[Any, TokenizerFacts]:
    """Read a fast tokenizer.

    Returns:
        The tokenizer of the tokenizers library inside, and what it has decided for its model.

    Raises:
        UsageError: there is none, it is not fast, or it has no token to fill up with.
    """
    transformers = _transformers()
    with _quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except MemoryError:
            raise
        except Exception as error:  # what is missing or damaged decides what is raised
            said = _other_file(folder) or _first_line(error)
            raise UsageError(f"{folder} holds no tokenizer that can be read: {said}") from error
    names = sorted(tokenizer.vocab_files_names.values())
    if names and not any((folder / name).is_file() for name in names):
        # The library then makes one that knows five tokens, and says nothing.
        raise UsageError(
            f"{folder} holds no tokenizer: there is none of {', '.join(names)}. Save it beside the model, "
            "with tokenizer.save_pretrained(DIR)."
        )
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer in {folder}, {type(tokenizer).__name__}, is not fast: it cannot tell which "
            "characters a token stands for. Give a folder with a tokenizer.json, as "
            "AutoTokenizer.from_pretrained(NAME, use_fast=True).save_pretrained(DIR) writes it."
        )
    if tokenizer.pad_token_id is None:
        raise UsageError(f"the tokenizer in {folder} has no padding token. Set pad_token in its files.")
    facts = TokenizerFacts(
        pad_id=tokenizer.pad_token_id,
        pad_type_id=tokenizer.pad_token_type_id,
        null_id=tokenizer.cls_token_id,
        type_ids="token_type_ids" in tokenizer.model_input_names,
        left=tokenizer.padding_side == "left",
    )
    return tokenizer.backend_tokenizer, facts


def build(
    folder: Path,
    weights: str | None,
    *,
    weights_key: str | None = None,
    weights_prefix: str | None = None,
    trust: bool = False,
    on_load: Callable[[LoadedWeights], None] = lambda loaded: None,
) -> nn.Module:
    """Make the model with its weights as float32, on the CPU, in evaluation mode.

    Args:
        folder: with config.json, and the weights unless they come from elsewhere.
        weights: None for those in the folder; else a checkpoint or "random:SEED".
        weights_key: where the state_dict lies in a file, as for ``checkpoints.read_state_dict``.
        weights_prefix: of the names that are taken from a file, as for ``weights.load_state_dict``.
        trust: read also weights that run code, as for ``checkpoints.read_state_dict``.
        on_load: called with what was taken from a file.

    Raises:
        UsageError: there is no such model, or its weights are missing, or do not fit.
    """
    transformers = _transformers()
    with _quiet(), torch.random.fork_rng(devices=[]):
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            if weights is None:
                model, report = transformers.AutoModelForQuestionAnswering.from_pretrained(
                    folder, output_loading_info=True, **options
                )
                _refuse_gaps(folder, report)
            else:
                seed = seed_of(weights)
                torch.manual_seed(0 if seed is None else seed)
                config = transformers.AutoConfig.from_pretrained(folder, **options)
                model = transformers.AutoModelForQuestionAnswering.from_config(
                    config, trust_remote_code=False
                )
        except (UsageError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # what is missing or damaged decides what is raised
            said = _other_file(folder) or _first_line(error)
            raise UsageError(
                f"{folder} holds no model for question answering that can be read: {said}"
            ) from error
    assert isinstance(model, nn.Module)
    # A checkpoint in half precision is computed with as --precision says.
    model = model.float().eval()
    if weights is not None and seed_of(weights) is None:
        found = read_state_dict(Path(weights), weights_key, trust=trust)
        on_load(load_state_dict(model, found, prefix=weights_prefix, source=f"the weights {weights}"))
    return model


def _refuse_gaps(folder: Path, report: dict[str, Any]) -> None:
    """The library draws at random what it does not find."""
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(entry) for entry in report.get("mismatched_keys", ()))
    if missing or mismatched:
        shown = ", ".join((missing + mismatched)[:5]) + (", ..." if len(missing + mismatched) > 5 else "")
        raise UsageError(
            f"the weights in {folder} lack {len(missing)} tensors of the model, and {len(mismatched)} have "
            f"another shape: {shown}. Give a checkpoint that was trained for question answering; --weights "
            "random:SEED runs an untrained one."
        )


def check_vocabulary(folder: Path, model: nn.Module, tokens: int) -> None:
    """Check that a model knows all tokens of its tokenizer.

    Met in the midst of a run, one that it does not know would end a GPU's context.

    Args:
        folder: for messages.
        model: of the transformers library.
        tokens: how many the tokenizer tells apart.

    Raises:
        UsageError: it does not.
    """
    transformer: Any = model
    embedding = transformer.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and tokens > embedding.num_embeddings:
        raise UsageError(
            f"the tokenizer in {folder} tells {tokens} tokens apart, its model only "
            f"{embedding.num_embeddings}. Give a model and a tokenizer that belong together."
        )


def try_out(folder: Path, model: nn.Module, windows: Mapping[str, Tensor]) -> None:
    """Run a model once.

    Args:
        folder: for messages.
        model: on the CPU.
        windows: what it takes.

    Raises:
        UsageError: it cannot take them, or gives no start and end logits.
    """
    shape = tuple(windows["input_ids"].shape)
    try:
        with torch.inference_mode():
            outputs = model(**windows)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise UsageError(
            f"the model in {folder} cannot take a window of {shape[1]} tokens: {_first_line(error)}"
        ) from error
    for name in ("start_logits", "end_logits"):
        found = getattr(outputs, name, None)
        if found is None or tuple(found.shape) != shape:
            gave = "no" if found is None else tuple(found.shape)
            raise UsageError(
                f"the model in {folder} gave {gave} {name} for windows of shape {shape}, expected one a "
                "token."
            )


def _other_file(folder: Path) -> str | None:
    """The first file that is not what its name says: one of a clone without Git LFS, or a failed download."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model") and path.is_file():
            try:
                found = what_it_is(path)
            except OSError as error:
                found = f"cannot be read: {error.strerror or error}"
            if found is not None:
                return f"{path.name} {found}"
    return None


def _first_line(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return said.strip().splitlines()[0].rstrip(".")


def _transformers() -> Any:
    # It imports torchvision, which does not always load by itself.
    torchvision()
    import transformers

    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
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
