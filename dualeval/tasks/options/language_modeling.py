"""The options of language-modeling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dualeval.options.choices import IGNORED, check_choice
from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, TextOptions, same, start_of_texts

_TOKENS = "Tokens"


@dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions(TextOptions):
    """Perplexity of texts, multiple choice or greedy answers."""

    start: ClassVar[Mapping[str, str]] = start_of_texts("AutoModelForCausalLM", "texts")

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "perplexity": "exp of the mean loss of a token (texts)",
            "word_perplexity": "exp of the loss over the number of words (texts)",
            "byte_perplexity": "exp of the loss over the number of bytes (texts)",
            "bits_per_byte": "the loss in bits over the number of bytes (texts)",
            "acc": "fraction of rows whose likeliest choice is the answer (choices)",
            "acc_norm": "the same, with log-likelihoods divided by the characters of the choice",
            "acc_bytes": "the same, divided by its bytes",
            "exact_match": "fraction of rows whose greedy answer is right (prompts)",
            "cut_contexts": "rows whose context was too long and lost its beginning (choices, prompts)",
        }

    data: Path = option(
        help="Text file, folder of text files, or table (.jsonl, .parquet, .csv).", group=DATA, metavar="PATH"
    )
    text: str | None = option(
        None, "Column of the documents.", group=DATA, metavar="COLUMN", shown="by the columns"
    )
    quoting: str | None = same("quoting")
    max_length: int | None = option(
        None,
        "Maximum tokens that the model sees at once.",
        group=_TOKENS,
        least=2,
        shown="the model's, at most 2048",
    )
    stride: int | None = option(
        None, "Tokens that each window predicts (texts).", group=_TOKENS, least=1, shown="max-length"
    )
    target_delimiter: str = option(" ", "Text between context and choice.", group=_TOKENS, shown="a space")
    max_new_tokens: int = option(32, "Maximum tokens of an answer (prompts).", group=_TOKENS, least=1)
    stop_at_newline: bool = option(False, "End an answer at the end of its line (prompts).", group=_TOKENS)
    ignore: tuple[str, ...] = option(IGNORED, "What to ignore in answers, or none (prompts).", group=_TOKENS)
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.ignore if self.ignore != ("none",) else ():
            check_choice("--ignore", each, (*IGNORED, "none"))
