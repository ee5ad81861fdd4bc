"""Extractive question answering models of the transformers library, from a local folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.windows import TokenizerFacts
from dualeval.errors import UsageError
from dualeval.models.checkpoints import read_state_dict
from dualeval.models.late_building import NotLate, is_building
from dualeval.models.model_errors import first_line
from dualeval.models.transformers_folder import (
    CONFIG,
    LOCAL,
    config_of,
    load_by_name,
    load_pretrained,
    missing_library,
    other_file,
    quiet,
    refuse_foreign_kernels,
    transformers_for,
)
from dualeval.models.weights import LoadedWeights, load_state_dict, seed_of

_WHAT = "question answering"


def check_folder(folder: Path) -> None:
    """Check that transformers is there, and that a folder looks like one that it has written."""
    if importlib.util.find_spec("transformers") is None:
        raise missing_library(_WHAT)
    if not (folder / CONFIG).is_file():
        found = "does not exist" if not folder.exists() else f"holds no {CONFIG}"
        raise UsageError(
            f"--model {folder} {found}. Expected a local folder as save_pretrained writes it, with the model "
            "and its tokenizer; 'hf download NAME --local-dir DIR' fetches one."
        )


def config_fingerprint(folder: Path) -> str:
    """sha256, in hex, over the values in config.json."""
    return sha256(json.dumps(json.loads((folder / CONFIG).read_bytes()), sort_keys=True).encode()).hexdigest()


def config_of_module(model: nn.Module) -> str | None:
    """As ``config_fingerprint``, of a module that has such values."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is None:
        return None
    return sha256(json.dumps(to_dict(), sort_keys=True, default=str).encode()).hexdigest()


def load_tokenizer(folder: Path) -> tuple[Any, TokenizerFacts]:
    """Read a fast tokenizer."""
    transformers = transformers_for(_WHAT)
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
        except MemoryError:
            raise
        except Exception as error:  # what is missing or damaged decides what is raised
            said = other_file(folder) or first_line(error)
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
    """Make the model with its weights as float32, on the CPU, in evaluation mode."""
    transformers = transformers_for(_WHAT)
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            if weights is None and is_building():
                model = load_by_name(transformers.AutoModelForQuestionAnswering, folder)
            elif weights is None:
                model = load_pretrained(transformers.AutoModelForQuestionAnswering, folder, _WHAT)
            else:
                seed = seed_of(weights)
                torch.manual_seed(0 if seed is None else seed)
                config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
                refuse_foreign_kernels(config_of(folder), folder)
                model = transformers.AutoModelForQuestionAnswering.from_config(
                    config, trust_remote_code=False
                )
        except (UsageError, NotLate, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # what is missing or damaged decides what is raised
            said = other_file(folder) or first_line(error)
            raise UsageError(
                f"{folder} holds no model for question answering that can be read: {said}"
            ) from error
    assert isinstance(model, nn.Module)
    # A checkpoint in half precision is computed with as --precision says.
    model = model.eval() if weights is None and is_building() else model.float().eval()
    if weights is not None and seed_of(weights) is None:
        found = read_state_dict(Path(weights), weights_key, trust=trust)
        on_load(load_state_dict(model, found, prefix=weights_prefix, source=f"the weights {weights}"))
    return model


def check_vocabulary(folder: Path, model: nn.Module, tokens: int) -> None:
    """Check that a model knows all tokens of its tokenizer.

    Met in the midst of a run, one that it does not know would end a GPU's context.
    """
    transformer: Any = model
    embedding = transformer.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and tokens > embedding.num_embeddings:
        raise UsageError(
            f"the tokenizer in {folder} tells {tokens} tokens apart, its model only "
            f"{embedding.num_embeddings}. Give a model and a tokenizer that belong together."
        )


def try_out(folder: Path, model: nn.Module, windows: Mapping[str, Tensor]) -> None:
    """Run a model once."""
    shape = tuple(windows["input_ids"].shape)
    try:
        with torch.inference_mode():
            outputs = model(**windows)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise UsageError(
            f"the model in {folder} cannot take a window of {shape[1]} tokens: {first_line(error)}"
        ) from error
    for name in ("start_logits", "end_logits"):
        found = getattr(outputs, name, None)
        if found is None or tuple(found.shape) != shape:
            gave = "no" if found is None else tuple(found.shape)
            raise UsageError(
                f"the model in {folder} gave {gave} {name} for windows of shape {shape}, expected one a "
                "token."
            )
