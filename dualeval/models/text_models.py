"""Models of texts: with their tokenizers in a local folder of the transformers library, or from Python."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualeval.data.token_groups import TokenizerFacts
from dualeval.errors import UsageError
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.generation import is_of_library, logits_of
from dualeval.models.late_building import late_or_whole
from dualeval.models.loading import load_state_dict
from dualeval.models.model_errors import first_line
from dualeval.models.sources.factory import ModuleModel
from dualeval.models.transformers_folder import (
    ADAPTER,
    CONFIG,
    LOCAL,
    add_generation_config,
    check_library,
    config_of,
    is_adapter,
    load_pretrained,
    reading,
    refuse_adapter,
    refuse_foreign_kernels,
    transformers_for,
)
from dualeval.models.weights import (
    LoadedWeights,
    OtherClasses,
    full_name,
    notes_of,
    options_of,
    place_in_file,
    refuse_choice_without_file,
    seed_of,
    weights_at,
)

if TYPE_CHECKING:
    from dualeval.models.adapters import Adapter

_MOST_TOKENS = 10**9


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a model of texts is used for."""

    # In words, such as "question answering".
    name: str
    # The class of transformers that makes such models: "AutoModelForQuestionAnswering".
    kind: str


def check_folder(folder: Path, use: Use) -> None:
    """Check that transformers is there, and that a folder looks like one that it has written."""
    check_library(use.name)
    refuse_adapter(folder)
    if not (folder / CONFIG).is_file():
        plain = str(folder).removeprefix("hf:")
        if (Path(plain) / CONFIG).is_file():
            raise UsageError(f"--model {folder}: for {use.name} leave out hf: and type --model {plain}.")
        fault = "does not exist" if not folder.exists() else f"holds no {CONFIG}"
        raise UsageError(
            f"--model {folder} {fault}. Expected a local folder as save_pretrained writes it, with the model "
            "and its tokenizer; 'hf download NAME --local-dir DIR' fetches one."
        )


def read_tokenizer(folder: Path, use: Use) -> Any:
    """A fast tokenizer of the library."""
    transformers = transformers_for(use.name)
    advice = "Save it beside the model, with tokenizer.save_pretrained(DIR)."
    with reading(folder, f"{folder} holds no tokenizer", f". {advice}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    names = sorted(tokenizer.vocab_files_names.values())
    if names and not any((folder / name).is_file() for name in names):
        # The library then makes one that knows five tokens, and says nothing.
        raise UsageError(f"{folder} holds no tokenizer: it has none of {', '.join(names)}. {advice}")
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer in {folder}, {type(tokenizer).__name__}, is not fast: it cannot tell which "
            "characters a token stands for. Give a folder with a tokenizer.json, as "
            "AutoTokenizer.from_pretrained(NAME, use_fast=True).save_pretrained(DIR) writes it."
        )
    return tokenizer


def load_tokenizer(folder: Path, use: Use) -> tuple[Any, TokenizerFacts]:
    """Read a fast tokenizer that can fill up."""
    tokenizer = read_tokenizer(folder, use)
    if tokenizer.pad_token_id is None:
        raise UsageError(f"the tokenizer in {folder} has no padding token. Set pad_token in its files.")
    facts = TokenizerFacts(
        pad_id=tokenizer.pad_token_id,
        pad_type_id=tokenizer.pad_token_type_id,
        null_id=tokenizer.cls_token_id,
        type_ids="token_type_ids" in tokenizer.model_input_names,
        left=tokenizer.padding_side == "left",
        # The library writes 10**30 for "not known".
        most_tokens=tokenizer.model_max_length if tokenizer.model_max_length < _MOST_TOKENS else None,
        cuts_left=tokenizer.truncation_side == "left",
    )
    return tokenizer.backend_tokenizer, facts


def known_tokens(folder: Path, model: nn.Module, tokenizer: Any) -> int:
    """How many tokens of its tokenizer a model knows: all, or all but added ones."""
    base, count = (1 + max(tokenizer.get_vocab(added).values(), default=-1) for added in (False, True))
    # A module of one's own need not say where they are.
    of_model = getattr(model, "get_input_embeddings", None)
    embedding = None if of_model is None else of_model()
    known = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else count
    if base > known:
        raise UsageError(
            f"the tokenizer in {folder} tells {base} tokens apart, its model only {known}. Give a model and "
            "a tokenizer that belong together."
        )
    return min(known, count)


class TextModel:
    """A model of texts and its tokenizer, as a task has them."""

    def __init__(
        self,
        model: str | Path | nn.Module | Callable[[], nn.Module],
        use: Use,
        *,
        tokenizer: str | Path | None = None,
        weights: str | None = None,
        weights_key: str | None = None,
        weights_prefix: str | None = None,
        trust: bool = False,
        adapter: str | Path | None = None,
    ) -> None:
        has_adapter = adapter is not None or (isinstance(model, str | Path) and is_adapter(Path(model)))
        refuse_choice_without_file(weights, weights_key, weights_prefix, trust and not has_adapter)
        self.use = use
        # What was taken from a file that ``weights`` names.
        self.loaded: LoadedWeights | None = None
        self._weights = weights
        self._key, self._prefix = weights_key, weights_prefix
        self.trust = trust
        self._late_notes: list[str] = []
        self._config: str | None = None
        # None where the model is in the folder.
        self._module: ModuleModel | None = None
        self._adapter: Adapter | None = None
        self.has_adapter = has_adapter
        if isinstance(model, str | Path):
            # The folders of the model, and of its tokenizer.
            self.base = self.folder = Path(model)
            if has_adapter:
                from dualeval.models.adapters import Adapter

                beside = None if adapter is None else self.base
                self._adapter = Adapter(Path(adapter or model), beside, trust=trust)
                self.base, self.folder = self._adapter.base, self._adapter.tokenizer
            check_folder(self.base, use)
            if tokenizer is not None:
                raise UsageError(
                    f"tokenizer={str(tokenizer)!r}: the folder {self.folder} has the model's own. "
                    "Leave it out."
                )
            return
        self._module = ModuleModel(model, {}, trust=trust)
        if adapter is not None:
            raise UsageError(
                f"adapter={str(adapter)!r} goes with a folder, and the model {self._module.name} is none. "
                "Give what PeftModel.from_pretrained(MODEL, DIR).merge_and_unload() returns."
            )
        self._module.find_weights(weights)
        if tokenizer is None:
            raise UsageError(
                f"the model {self._module.name} was given without a tokenizer. Give tokenizer=DIR, the "
                "folder that tokenizer.save_pretrained(DIR) has written."
            )
        self.base = self.folder = Path(tokenizer)

    def build(self) -> nn.Module:
        """Make the model on the CPU, in evaluation mode."""
        if self._module is not None:
            model = self._module.build(self._module.find_weights(None), None)
            if (to_dict := getattr(getattr(model, "config", None), "to_dict", None)) is not None:
                self._config = _hash(to_dict())
            return model
        model = self._of_folder()
        if self._adapter is not None:
            with torch.random.fork_rng(devices=[]):
                model = self._adapter.merged_into(model).eval()
        return model

    def _of_folder(self) -> nn.Module:
        """With its weights as float32."""
        folder, weights, use = self.base, self._weights, self.use
        kind = getattr(transformers_for(use.name), use.kind)
        refusal = f"{folder} holds no model for {use.name}"
        with reading(folder, refusal), torch.random.fork_rng(devices=[]):
            if weights is None:
                of_adapter = {} if self._adapter is None else self._adapter.whole()
                made, self.loaded = load_pretrained(kind, folder, use.name, of_adapter)
                return made.eval()
            seed = seed_of(weights)
            torch.manual_seed(0 if seed is None else seed)
            config = transformers_for(use.name).AutoConfig.from_pretrained(folder, **LOCAL)
            refuse_foreign_kernels(config_of(folder), folder)
            model: nn.Module = kind.from_config(config, trust_remote_code=False)
            add_generation_config(model, folder)
        model = model.float()
        if seed is None:
            state = read_state_dict(weights_at(weights), self._key, trust=self.trust)
            source = f"the weights {weights}"
            try:
                self.loaded = load_state_dict(model, state, prefix=self._prefix, source=source)
            except OtherClasses as error:
                raise UsageError(
                    f"{error.text} (num_labels or id2label in {folder}/config.json). Give weights and "
                    "a model of the same classes."
                ) from error
        return model.eval()

    def build_late(self) -> nn.Module:
        """As ``build``: the values of the parameters stay in their files where they can."""
        self._late_notes = []
        drawn = self._weights is not None and seed_of(self._weights) is not None
        why_whole = "its weights are drawn at random" if drawn else None
        if self._module is not None:
            why_whole = self._module.why_whole(self._module.find_weights(None))
        if self._adapter is not None:
            why_whole = "an adapter is merged into its weights"
        return late_or_whole(self.build, self._late_notes.append, why_whole)

    def notes(self) -> list[str]:
        """Where in a checkpoint the weights were found, and what was removed from their names."""
        of_adapter = [] if self._adapter is None else self._adapter.notes
        return [*notes_of(self.loaded), *self._late_notes, *of_adapter]

    def sources(self) -> list[Any]:
        """The function that made the model, where it has one."""
        return [] if self._module is None else self._module.sources()

    def options(self) -> dict[str, Any]:
        """The options as they are used."""
        return {
            "model": self._named(self.base.absolute()),
            "adapter": None if self._adapter is None else str(self._adapter.folder.absolute()),
            "weights": self._weights_name(),
            **options_of(self.loaded),
            "trust_checkpoint": self.trust,
        }

    def description(self) -> dict[str, str]:
        """Model and weights, in words."""
        adapter = "" if self._adapter is None else f", with the adapter {self._adapter.folder}"
        untrained = ", untrained" if self._weights and seed_of(self._weights) is not None else ""
        within = "in the folder of the model" if self._module is None else self._weights_name()
        return {
            "model": self._named(self.base) + adapter,
            "weights": f"{self._weights or within}{place_in_file(self.loaded)}{untrained}",
        }

    def fingerprint(self) -> str | None:
        """The values of its configuration: weights say nothing of how many heads they are divided among."""
        if self._module is not None:
            return self._config
        of_adapter = {} if self._adapter is None else {ADAPTER: self._adapter.fingerprint()}
        return _hash({**config_of(self.base), **of_adapter})

    def _named(self, folder: Path) -> str:
        return str(folder) if self._module is None else f"{self._module.name}, tokenizer {folder}"

    def _weights_name(self) -> str:
        if self._module is not None:
            return self._module.find_weights(None).text
        weights = self._weights or str(self.base)
        return weights if seed_of(weights) is not None else full_name(weights, Path(weights))


def _hash(config: Mapping[str, Any]) -> str:
    return sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def shorter(model: nn.Module) -> str:
    """What to type for a model that takes fewer tokens."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    detail = "" if positions is None else f", whose config says max_position_embeddings {positions}"
    return f"It takes shorter ones: give --max-length of the model's size{detail}."


def try_out(folder: Path, run: Callable[[], Any], tokens: int) -> Any:
    """What a model gives for texts of so many tokens."""
    try:
        with torch.inference_mode():
            return run()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise UsageError(
            f"the model in {folder} cannot take {tokens} tokens at once: {first_line(error)}"
        ) from error


# Of a generation_config: what changes greedy search in ``generate``, with the value that does not.
_CHANGES_OF_SEARCH: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}


def losses_of(model: nn.Module, group: Mapping[str, Any]) -> Tensor:
    """The negative log-likelihood of the predicted tokens of each row, float64 (rows,).

    In float32 for each token, and added up in float64.
    """
    return sums_of(token_losses_of(model, group))


def token_losses_of(model: nn.Module, group: Mapping[str, Any]) -> list[Tensor]:
    """The negative log-likelihood of each predicted token of each row, float32."""
    pairs = predicted(model, group)
    return [cross_entropy(logits, targets, reduction="none") for logits, targets in pairs]


def sums_of(losses: Sequence[Tensor]) -> Tensor:
    """The sum of each row's losses, float64."""
    return torch.stack([each.double().sum() for each in losses])


def predicted(model: nn.Module, group: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each row the logits, float32 (tokens, vocabulary), and targets of the tokens that are predicted."""
    logits = logits_of(model(group["inputs"], **({"use_cache": False} if is_of_library(model) else {})))
    # A row at a time: the logits are large, and this takes as much again.
    for row, targets, (first, stop) in zip(logits, group["targets"], group["predicted"], strict=True):
        yield row[first:stop].float(), targets[first:stop]


def end_tokens(model: nn.Module, of_tokenizer: Sequence[int | None]) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those that the model's own configuration names."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return sorted(
        {each for each in (*of_tokenizer, *(ends if isinstance(ends, list) else [ends])) if each is not None}
    )


def changes_of_search(model: nn.Module) -> list[str]:
    """What a model's own configuration changes in greedy search, as it is written there."""
    config = getattr(model, "generation_config", None)
    values = {name: getattr(config, name, None) for name in _CHANGES_OF_SEARCH}
    return [f"{n} {v!s:.40}" for n, v in values.items() if v not in (None, [], _CHANGES_OF_SEARCH[n])]


def search_warnings(changes: Sequence[str], answers: str, other: str) -> list[str]:
    """What to say where these are not done: ``answers`` are plain ones, and ``other`` may give others."""
    begin = f"the model's generation_config asks for {', '.join(changes)}, which is not done here:"
    return [f"{begin} {answers} ones, and may differ from those of {other}"] if changes else []


class CausalTokens:
    """A tokenizer as a causal language model uses it."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix is None:
            raise UsageError(
                f"the tokenizer in {folder} has no token for the beginning of a text, nor one for its end: "
                "nothing can precede its first token. Give a causal language model, or set bos_token or "
                "eos_token in its tokenizer_config.json."
            )
        # What stands before a document.
        self.prefix = int(prefix)
        self.ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        # Some put the token of the beginning before every text.
        self._begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.fast = tokenizer.backend_tokenizer
        self.fast.no_padding()
        self.fast.no_truncation()
        self.count = 1 + max(self.fast.get_vocab().values())

    def fingerprint(self) -> str:
        """sha256, in hex, over the tokenizer and what stands before a text."""
        text = f"{self.fast.to_str()}\n{self.prefix} {self._begins}"
        return sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is not empty, as the tokenizer begins one."""
        ids: list[int] = self.fast.encode(text, add_special_tokens=False).ids
        # A chat template may have written it already.
        return [self.prefix, *ids] if self._begins and ids[:1] != [self.prefix] else ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context, and those of what follows it.

        As lm-evaluation-harness has them (``_encode_pair`` in its ``lm_eval/api/model.py``): white space at
        the end of the context belongs to what follows; both are encoded together, and what has more tokens
        than the context alone follows. An empty context is the prefix.
        """
        if not context:
            return [self.prefix], self.fast.encode(continuation, add_special_tokens=False).ids
        stem = context.rstrip()
        before = self.encode(stem)
        return before, self.encode(context + continuation)[len(before) :]

    def pieces(self, text: str) -> list[str]:
        """A text, cut behind each of its tokens; of several that make a character, the first has it."""
        offsets = self.fast.encode(text, add_special_tokens=False).offsets
        # Some tokenizers say a place behind the next token's.
        ends = [*itertools.accumulate((end for _, end in offsets[:-1]), max), len(text)]
        return [text[start:end] for start, end in itertools.pairwise([0, *ends][: len(offsets) + 1])]

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without those that end or begin one."""
        return str(self.fast.decode(ids, skip_special_tokens=True))
