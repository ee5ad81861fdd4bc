"""The options of the task language-modeling; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dualeval.models.weights_name import is_path_of_weights
from dualeval.options.choices import IGNORED, check_choice
from dualeval.options.fields import check_fields, option

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.tasks import Task

_MODEL = "Model"
_DATA = "Data"
_TOKENS = "Tokens"


@dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions:
    """Perplexity of texts, multiple choice or greedy answers.

    Attributes:
        known_metrics: the metrics that can be asked for by name, with a line each.
        start: what ``dualeval init`` writes for this task.
    """

    start: ClassVar[Mapping[str, str]] = {
        "imports": "from transformers import AutoModelForCausalLM",
        "model": 'return AutoModelForCausalLM.from_pretrained("models/mine")',
        "data": "texts",
        "more": ', tokenizer="models/mine", max_length=1024',
    }

    known_metrics: ClassVar[Mapping[str, str]] = {
        "perplexity": "exp of the mean loss of a token (texts)",
        "word_perplexity": "exp of the loss over the number of words (texts)",
        "byte_perplexity": "exp of the loss over the number of bytes (texts)",
        "bits_per_byte": "the loss in bits over the number of bytes (texts)",
        "acc": "fraction of rows whose likeliest choice is the answer (choices)",
        "acc_norm": "the same, of log-likelihoods divided by the characters of the choice",
        "acc_bytes": "the same, divided by its bytes",
        "exact_match": "fraction of rows whose greedy answer is right (prompts)",
        "cut_contexts": "rows whose context was too long and lost its beginning (choices, prompts)",
    }

    model: Path = option(
        help="Folder with a causal model and tokenizer of the transformers library.",
        group=_MODEL,
        metavar="DIR",
    )
    data: Path = option(
        help="Text file, folder of such, or table (.jsonl, .parquet, .csv).",
        group=_DATA,
        metavar="PATH",
    )
    text: str | None = option(
        None, "Column of the documents.", group=_DATA, metavar="COLUMN", shown="by the columns"
    )
    weights: str | None = option(
        None,
        "Checkpoint, or random:SEED.",
        group=_MODEL,
        is_path=is_path_of_weights,
        shown="in the model's folder",
    )
    weights_key: str | None = option(
        None, "Key of the state_dict in a checkpoint, such as model_ema.", group=_MODEL
    )
    weights_prefix: str | None = option(
        None, "Use only tensors whose names start with this; remove it.", group=_MODEL
    )
    trust_checkpoint: bool = option(
        False, "Read checkpoints that run code, such as pickled models.", group=_MODEL
    )
    max_length: int | None = option(
        None,
        "Most tokens that the model sees at once.",
        group=_TOKENS,
        least=2,
        shown="the model's, at most 2048",
    )
    stride: int | None = option(
        None, "Tokens that each window predicts (texts).", group=_TOKENS, least=1, shown="max-length"
    )
    target_delimiter: str = option(" ", "Text between context and choice.", group=_TOKENS, shown="a space")
    max_new_tokens: int = option(32, "Most tokens of an answer (prompts).", group=_TOKENS, least=1)
    stop_at_newline: bool = option(False, "End an answer with its line (prompts).", group=_TOKENS)
    ignore: tuple[str, ...] = option(
        IGNORED, "What does not count in an answer, or none (prompts).", group=_TOKENS
    )
    metric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for each in self.ignore if self.ignore != ("none",) else ():
            check_choice("--ignore", each, (*IGNORED, "none"))

    def make(self, cache: DataCache | None = None) -> Task:
        """The task.

        Args:
            cache: what other tasks of the run have read of their data.
        """
        from dualeval import tasks

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        task: Task = tasks.LanguageModeling(metrics=given.pop("metric"), cache=cache, **given)
        return task
