"""The options of language-modeling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dualeval.errors import UsageError
from dualeval.options.choices import IGNORED, check_choice, check_kind
from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, TOKENS, AnswerOptions, TextOptions, same, start_of_texts


@dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions(AnswerOptions, TextOptions):
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
            "exact_match": "fraction of answers that are right (prompts)",
            "any_match": "fraction of rows with a right one among several answers (prompts)",
            "at_token_limit": "answers that were cut at --max-new-tokens (prompts)",
            "empty_answers": "answers without text (prompts)",
            "not_extracted": "answers without a match of --extract (prompts)",
            "unfinished_thinking": "answers without --think-end (prompts)",
            "cut_contexts": "rows whose context was too long and lost its beginning (choices, prompts)",
        }

    data: Path = option(
        help="Text file, folder of text files, table (.jsonl, .parquet, .csv), or tar shards.",
        group=DATA,
        metavar="PATH",
        takes_urls=True,
    )
    text: str | None = option(
        None, "Column of the documents.", group=DATA, metavar="COLUMN", shown="by the columns"
    )
    quoting: str | None = same("quoting")
    max_length: int | None = option(
        None,
        "Maximum tokens that the model sees at once.",
        group=TOKENS,
        least=2,
        shown="the model's, at most 2048",
    )
    stride: int | None = option(
        None, "Tokens that each window predicts (texts).", group=TOKENS, least=1, shown="max-length"
    )
    keep_losses: bool = option(False, "Keep the loss of each token in the rows (texts).", group=TOKENS)
    target_delimiter: str = option(" ", "Text between context and choice.", group=TOKENS, shown="a space")
    max_new_tokens: int = option(32, "Maximum tokens of an answer (prompts).", group=TOKENS, least=1)
    stop_at_newline: bool = option(False, "End an answer at the end of its line (prompts).", group=TOKENS)
    stop: tuple[str, ...] = option(
        (), "Text that ends an answer (prompts).", group=TOKENS, metavar="TEXT", is_repeated=True
    )
    extract: str | None = option(
        None, "Regular expression whose last match is the answer (prompts).", group=TOKENS, metavar="REGEX"
    )
    answers_per_prompt: int = option(1, "Answers drawn to each prompt.", group=TOKENS, least=1, metavar="K")
    ignore: tuple[str, ...] = option(IGNORED, "What to ignore in answers, or none (prompts).", group=TOKENS)
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.ignore if self.ignore != ("none",) else ():
            check_choice("--ignore", each, (*IGNORED, "none"))
        self.check_answers()
        check_kind("--stop", "", "" not in self.stop, "a text")
        try:
            re.compile(self.extract or "")
        except re.error as error:
            raise UsageError(f"--extract {self.extract!r} is no regular expression: {error}") from error
