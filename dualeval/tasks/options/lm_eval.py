"""The options of lm-eval: tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dualeval.errors import UsageError
from dualeval.options.fields import check_fields, option
from dualeval.tasks.options.base import DATA, AnswerOptions, TextOptions

if TYPE_CHECKING:
    from dualeval.tasks import Task

_PROMPTS = "Prompts"
# It imports this module.
_GIVEN = "dualeval.tasks.lm_eval.given"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Tasks of the harness, and how their prompts are made."""

    # Its limit is of each task, as in the harness.
    limits_itself: ClassVar[bool] = True
    # The figures follow from the answers and the documents.
    metrics_need_data: ClassVar[bool] = True

    tasks: tuple[str, ...] = option(help="Tasks, groups and tags.", group=DATA, metavar="A,B")
    include_path: Path | None = option(None, "Folder with YAML files of tasks.", group=DATA, metavar="DIR")
    trust_tasks: bool = option(False, "Run the functions that these files name.", group=DATA)
    limit: int | None = option(None, "Evaluate the first N documents of each task.", group=DATA, least=1)
    num_fewshot: int | None = option(
        None, "Examples in a prompt.", group=_PROMPTS, least=0, shown="the task's"
    )
    apply_chat_template: bool = option(False, "Write prompts as the model's chat.", group=_PROMPTS)
    fewshot_as_multiturn: bool = option(True, "Examples as turns of the chat.", group=_PROMPTS)
    system: str | None = option(None, "Text that begins each prompt.", group=_PROMPTS, metavar="TEXT")
    bootstrap_iters: int = option(
        100_000, "Draws for standard errors without a formula; 0: none.", group=_PROMPTS, least=0
    )
    metric: tuple[str, ...] = ()

    def check_prompts(self) -> None:
        if not (self.fewshot_as_multiturn or self.apply_chat_template):
            raise UsageError("--no-fewshot-as-multiturn is of a chat: give --apply-chat-template too.")


@dataclass(frozen=True, kw_only=True)
class RequestOptions(PromptOptions):
    """Requests for another program to answer."""

    tokenizer: Path | None = option(
        None, "With --apply-chat-template: folder of the tokenizer.", group=_PROMPTS, metavar="DIR"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_prompts()

    def write(self, path: Path) -> int:
        """Write the requests to a file; returns how many."""
        count: int = import_module(_GIVEN).write_requests(self, path)
        return count


@dataclass(frozen=True, kw_only=True)
class ScoredOptions(RequestOptions):
    """Answers of another program to these requests."""

    think_end: str | None = option(
        None, "Tag after which an answer begins, such as </think>.", group=_PROMPTS, metavar="TAG"
    )
    answers: Path = option(help="Answers: JSON lines with task, document, index, answer.", metavar="FILE")

    def make(self) -> Task:
        """The task."""
        task: Task = import_module(_GIVEN).GivenAnswers(self)
        return task


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(PromptOptions, AnswerOptions, TextOptions):
    """Tasks of lm-evaluation-harness, with its prompts and figures."""

    # The requests, and answers to them in a file.
    requested: ClassVar[type] = RequestOptions
    scored: ClassVar[type] = ScoredOptions

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "harness": "the figures of tasks and groups, as the harness computes them",
            "cut_contexts": "documents with a prompt that was too long and lost its beginning",
            "at_token_limit": "generated texts that were cut at the task's max_gen_toks",
            "nan_logits": "generated texts that met a NaN",
            "empty_answers": "generated texts without anything",
            "unfinished_thinking": "generated texts without --think-end",
        }

    max_length: int | None = option(
        None, "Maximum tokens that the model sees at once.", group=_PROMPTS, least=2, shown="the model's"
    )
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts()
        self.check_answers()
