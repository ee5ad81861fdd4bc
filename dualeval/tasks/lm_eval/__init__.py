"""The task lm-eval: tasks of lm-evaluation-harness, with its prompts and figures, answered by one engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import Unpack

from dualeval.columns.ragged import Column, Ragged
from dualeval.data.cache import DataCache
from dualeval.data.token_groups import refuse_unknown
from dualeval.errors import UsageError
from dualeval.metrics import Count
from dualeval.models import text_models
from dualeval.models.model_errors import first_line
from dualeval.models.transformers_folder import LOCAL, quiet, transformers_for
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks.keywords import LmEvalKeywords
from dualeval.tasks.lm_eval.base import HarnessTask
from dualeval.tasks.lm_eval.figures import GENERATE, ROLLING, Answers
from dualeval.tasks.lm_eval.library import Document, Loaded, check_installed
from dualeval.tasks.lm_eval.requests import EncodedRequests, scores_of
from dualeval.tasks.options.lm_eval import LmEvalOptions
from dualeval.tasks.text_task import CausalTask, Model

USE = text_models.Use(name="tasks of the harness", kind="AutoModelForCausalLM")
# Tokens of the longest text that a model is tried with before the loop.
_MOST_TRIED = 2048


class LmEval(HarnessTask, CausalTask):
    """Tasks of lm-evaluation-harness (lm_eval), answered by a causal language model.

    Args:
        model: a folder with a model and its tokenizer, as ``save_pretrained`` writes them; or a module, or a
            function without arguments that returns one.
        tasks: names of tasks, groups and tags.
        tokenizer: the folder of the tokenizer, where the model is no folder.
        metrics: names of metrics; none for all.
        cache: what other tasks of the run have found.
        options: the others of ``dualeval run``, by the same names (docs/lm-eval.md): weights, weights_key,
            weights_prefix, trust_checkpoint, adapter, include_path, trust_tasks, limit, num_fewshot,
            apply_chat_template, fewshot_as_multiturn, system, max_length, think_end, temperature, top_p,
            answers_seed, bootstrap_iters, keep.

    Raises:
        UsageError: options, model, tokenizer and tasks do not fit together, or a task would run code.
        TypeError: there is no such option.
    """

    _counts = (Count("cut", name="cut_contexts"),)
    _counted = ("at_token_limit", "nan_logits")
    # What is said where the chat template takes no system message.
    _left_out_system = ""
    # The tokens that end a text; known when the model is built.
    _stops: Sequence[int] = ()

    @with_keywords(LmEvalKeywords, LmEvalOptions)
    def __init__(
        self,
        *,
        model: Model,
        tasks: Sequence[str],
        tokenizer: str | Path | None = None,
        metrics: Sequence[str] = (),
        cache: DataCache | None = None,
        **options: Unpack[LmEvalKeywords],
    ) -> None:
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            LmEvalOptions(metric=(), **options)  # type: ignore[arg-type]
        check_installed()
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        self._settings = settings = of_python(LmEvalOptions, options, metrics, model=Path(), tasks=names)
        CausalTask.__init__(self, model, tokenizer, USE, settings)
        library = text_models.read_tokenizer(self._model.folder, USE)
        self._tokens = text_models.CausalTokens(library, self._model.folder)
        self._max_length = self._length(model, library, settings.max_length)
        template = None
        if settings.apply_chat_template:
            template = template_of(library, self._model.folder, self._note_left_out)
        loaded = Loaded(settings, template, cache)
        self._encoded = EncodedRequests(loaded.documents, settings, self._tokens, self._max_length)
        text = library.chat_template if template is not None else None
        self._set_up(settings, loaded, self._encoded, str(self._model.folder), text)

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("lm_eval", *super().libraries)

    def _length(self, model: Model, tokenizer: Any, asked: int | None) -> int:
        """How many tokens the model sees at once: as the harness finds it, or as asked."""
        from lm_eval.models.utils import resolve_max_length

        config = getattr(model, "config", None)
        if config is None:
            with quiet():
                try:
                    folder = self._model.base
                    config = transformers_for(USE.name).AutoConfig.from_pretrained(folder, **LOCAL)
                except (OSError, ValueError):  # a folder of a tokenizer alone; of a model it is said later
                    pass
        if getattr(config, "is_encoder_decoder", False):
            raise UsageError(
                f"the model in {self._model.base} has an encoder: expected a causal language model, such as "
                "one of GPT's or Llama's kind. Answers of others can come through 'dualeval score'."
            )
        known: int = resolve_max_length(config, tokenizer)
        if asked is not None and config is not None and asked > known:
            raise UsageError(
                f"--max-length {asked} is more than the {known} positions of the model in "
                f"{self._model.folder}. Give a smaller one."
            )
        return asked or known

    def _try(self, model: nn.Module, device: torch.device) -> None:
        length = min(self._max_length, _MOST_TRIED)
        width = self._tried_width(model, length)
        self._stops = text_models.end_tokens(model, self._tokens.ends)
        if generations := self._encoded.generations:
            way = self._way_of(model, length)
            for each in generations:
                each.answering.continue_as(way, self._stops, width, device)
        self._other_search = text_models.changes_of_search(model) if generations else []

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = self._encoded.collate(samples)
        ids = [each[name] for each in batch["groups"] for name in ("inputs", "targets")]
        ids += [prompts for each in batch["generated"] for prompts in each["groups"]]
        refuse_unknown(ids, self._known)
        return batch

    def forward(self, model: nn.Module, batch: Any) -> Any:
        scored = [scores_of(model, group) for group in batch["groups"]]
        generations = self._encoded.generations
        return scored, [
            generations[each["kind"]].answering.answer(model, each) for each in batch["generated"]
        ]

    def observe(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Of each document its sequences' log-likelihoods, and the tokens of its texts, on the device."""
        scored, generated = outputs
        places, device = batch["places"], batch["cut"].device
        lls = torch.cat([torch.zeros(0, dtype=torch.float64, device=device), *(each for each, _ in scored)])
        likeliest = torch.cat(
            [torch.zeros(0, dtype=torch.bool, device=device), *(each for _, each in scored)]
        )
        texts = [[of_row[row] for of_row in generated[kind][group]] for kind, group, row in batch["order"]]
        none = torch.zeros(0, dtype=torch.int64, device=device)
        has_nan = [none.bool(), *(nan[None] for _, nan in texts)]
        return {
            "lls": Ragged(lls[places], batch["sequences"]),
            "likeliest": Ragged(likeliest[places], batch["sequences"]),
            "tokens": Ragged(torch.cat([none, *(tokens for tokens, _ in texts)]), batch["new_tokens"]),
            "nan": Ragged(torch.cat(has_nan), batch["texts"]),
            "windows": Ragged(batch["windows"], batch["scored"]),
            "cut": batch["cut"],
        }

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        parts = [columns[name].tolist() for name in ("lls", "likeliest", "tokens", "windows", "nan")]
        answers: dict[int, Answers] = {}
        full = dict.fromkeys(samples, 0)
        for index, *of_one in zip(samples, *parts, strict=True):
            if of_one[0] or of_one[2]:  # of one that could not be read there is nothing
                answers[index], full[index] = self._answers(self._dataset.documents[index], *of_one)
        counts = {"at_token_limit": [*full.values()], "nan_logits": [sum(each) for each in parts[-1]]}
        return {**self._columns(samples, answers, counts), "cut": columns["cut"]}

    def _answers(
        self,
        document: Document,
        lls: list[float],
        likeliest: list[bool],
        tokens: list[int],
        windows: list[int],
        has_nan: list[bool],
    ) -> tuple[Answers, int]:
        """A document's answers, of what observe has, and how many of them nothing has ended.

        A rolling request has several sequences, one whose texts are drawn several texts.
        """
        answers: list[list[Any]] = []
        place = at = full = 0
        counts, of_texts = iter(windows), iter(has_nan)
        for request in document.requests:
            if request.request_type == GENERATE:
                generation, texts = self._encoded.generation_of(request), []
                most = generation.answering.most
                for nan in itertools.islice(of_texts, request.repeats if self._settings.temperature else 1):
                    ids = tokens[at : at + most]
                    at += most
                    full += generation.answering.is_full(ids)
                    texts.append("" if nan else generation.text(ids))
                answers.append(texts * (request.repeats // len(texts)))
            else:
                count = next(counts)
                total = sum(lls[place : place + count])
                answer = total if request.request_type == ROLLING else (total, likeliest[place])
                answers.append([answer] * request.repeats)
                place += count
        return answers, full

    def _note_left_out(self, warning: str) -> None:
        self._left_out_system = warning

    def data_warnings(self) -> list[str]:
        kind = "drawn" if self._settings.temperature else "greedy"
        of_search = text_models.search_warnings(self._other_search, f"texts are plain {kind}", "the harness")
        without = [self._left_out_system] if self._left_out_system else []
        return [*super().data_warnings(), *of_search, *without]

    def options(self) -> dict[str, Any]:
        return {**self._model.options(), **super().options(), "max_length": self._max_length}

    def description(self) -> dict[str, str]:
        asked = self._settings
        how = f"drawn with temperature {asked.temperature}, top p {asked.top_p}, seed {asked.answers_seed}"
        texts = {"texts": how} if asked.temperature else {}
        return {**self._model.description(), **super().description(), **texts}

    def fingerprint(self) -> dict[str, Any]:
        return {
            **super().fingerprint(),
            "config": self._model.fingerprint(),
            "tokenizer": self._tokens.fingerprint(),
            "stops": self._stops,
            "max_length": self._max_length,
        }


def template_of(
    tokenizer: Any, folder: Path, warn: Callable[[str], object] = lambda warning: None
) -> Callable[..., str]:
    """How the tokenizer writes a chat, as the harness has it write."""
    if tokenizer.chat_template is None:
        raise UsageError(
            f"--apply-chat-template: the tokenizer in {folder} has no chat template. Leave it out, or give "
            "the folder of a model for chats."
        )

    def written(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        more = {"add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            more["continue_final_message"] = True
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))
        except Exception as error:
            plain = [each for each in messages if each["role"] != "system"]
            if type(error).__name__ != "TemplateError" or len(plain) == len(messages):
                raise UsageError(
                    f"--apply-chat-template: the template of {folder} fails: {first_line(error)}"
                ) from error
            # As the harness does: a template that takes no system message gets none.
            warn(
                f"the chat template in {folder} takes no system message: --system, or a task's description, "
                "is in none of its prompts. Write it into doc_to_text, or give another template."
            )
            return str(tokenizer.apply_chat_template(plain, tokenize=False, **more))

    return written
