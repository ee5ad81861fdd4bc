"""Answers that another program has given to the harness's requests: scored, with nothing computed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualeval.atomic_files import write_text
from dualeval.columns.ragged import Column
from dualeval.errors import UsageError
from dualeval.messages import counted, listed
from dualeval.models import text_models
from dualeval.tasks.lm_eval import USE, template_of
from dualeval.tasks.lm_eval.base import HarnessTask
from dualeval.tasks.lm_eval.figures import GENERATE, ROLLING, Answers
from dualeval.tasks.lm_eval.library import Document, Loaded, as_text
from dualeval.tasks.lm_eval.requests import Requests
from dualeval.tasks.options.lm_eval import RequestOptions, ScoredOptions

_KEY = {"task": (str, "a text"), "document": (int, "a whole number"), "index": (int, "a whole number")}
# Of an answer whose hash is that of another request.
_OTHER = "is to another prompt (its hash differs)"
# A log-likelihood that rounding alone may have brought above 0.
_ROUNDING = 1e-3


def loaded_for(options: RequestOptions) -> tuple[Loaded, str | None]:
    """The tasks with their requests, and the template of a chat."""
    if options.apply_chat_template and options.tokenizer is None:
        raise UsageError("--apply-chat-template: give --tokenizer DIR, the folder whose template is applied.")
    template, text = None, None
    if options.tokenizer is not None:
        if not options.apply_chat_template:
            raise UsageError("--tokenizer is for the template of a chat: give --apply-chat-template too.")
        tokenizer = text_models.read_tokenizer(options.tokenizer, USE)
        template, text = template_of(tokenizer, options.tokenizer), str(tokenizer.chat_template)
    return Loaded(options, template), text


def write_requests(options: RequestOptions, path: Path) -> int:
    """Write all requests, a JSON object a line with its key; returns how many."""
    lines = []
    for document in loaded_for(options)[0].documents:
        for index, request in enumerate(document.requests):
            names = {GENERATE: ("prompt", "generation"), ROLLING: ("text",)}
            names_of = names.get(request.request_type, ("context", "continuation"))
            key = dict(zip(_KEY, (document.task, document.number, index), strict=True))
            content = {"type": request.request_type, **dict(zip(names_of, request.args, strict=True))}
            row = {**key, **content, "repeats": request.repeats, "hash": _hash(request)}
            lines.append(json.dumps(row, ensure_ascii=False))
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _hash(request: Any) -> str:
    """Of what is asked: an answer with another one answers something else."""
    content = as_text((request.request_type, request.args))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


class GivenAnswers(HarnessTask):
    """Documents of the harness, answered in a file."""

    libraries = ("lm_eval",)
    thread_safe = False

    def __init__(self, options: ScoredOptions) -> None:
        loaded, template = loaded_for(options)
        self._path = options.answers
        self._answers, self._hash, self._unchecked = _read(
            options.answers, loaded.documents, options.think_end
        )
        self._set_up(options, loaded, Requests(loaded.documents, ()), str(options.answers), template)

    def collate(self, samples: Any) -> dict[str, Any]:
        return {}

    def build_model(self, device: torch.device) -> nn.Module:
        return nn.Module().eval()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return batch

    def observe(self, outputs: Any, batch: Any) -> dict[str, Any]:
        return {}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        return self._columns(samples, {index: self._answers[index] for index in samples}, {})

    def data_warnings(self) -> list[str]:
        unchecked = (
            f"{counted(self._unchecked, 'answer')} without a hash: whether these prompts were answered "
            f"is not known. Copy hash from the lines of 'dualeval requests' into {self._path}"
        )
        return [*super().data_warnings(), *([unchecked] if self._unchecked else [])]

    def description(self) -> dict[str, str]:
        return {**super().description(), "answers": str(self._path)}

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "answers": self._hash}


def _read(path: Path, documents: Sequence[Document], think_end: str | None) -> tuple[list[Answers], str, int]:
    """The answers to each document's requests, which are all there once; a hash of the file; how many of the
    answers do not say which prompt they answer.
    """
    requests = {(d.task, d.number, i): r for d in documents for i, r in enumerate(d.requests)}
    found: dict[Any, Sequence[Any]] = {}
    faults: dict[str, list[str]] = {"is there twice": [], "belongs to no request": [], _OTHER: []}
    unchecked = 0
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--answers {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, answer = tuple(row[name] for name in _KEY), row["answer"]
            request = requests.get(key)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path}, line {number}: expected a JSON object with {', '.join(_KEY)} and answer, as "
                f'{{"task": "gsm8k", "document": 0, "index": 0, "answer": "42"}} '
                f"({type(error).__name__}: {error})"
            ) from error
        for (name, (kind, expected)), value in zip(_KEY.items(), key, strict=True):
            if type(value) is not kind:  # true is 1 in Python
                raise UsageError(
                    f"{path}, line {number}: {name} is {as_text(value):.60}, expected {expected}"
                )
        unchecked += row.get("hash") is None
        if request is None:
            faults["belongs to no request"].append(f"{key[0]}/{key[1]} {key[2]}")
        elif key in found:
            faults["is there twice"].append(f"{key[0]}/{key[1]} {key[2]}")
        elif row.get("hash") not in (None, _hash(request)):
            found[key] = ()
            faults[_OTHER].append(f"{key[0]}/{key[1]} {key[2]}")
        else:
            found[key] = _checked(answer, request, f"{path}, line {number}", think_end)
    faults["is missing"] = [
        f"{task}/{number} {i}" for task, number, i in requests if (task, number, i) not in found
    ]
    if said := [f"the answer to {listed(keys, 5)} {fault}" for fault, keys in faults.items() if keys]:
        raise UsageError(
            f"{path} is to have one answer to each of the {len(requests)} requests (task/document index): "
            f"{'; '.join(said)}. Give the same --tasks, --limit, --num-fewshot, --system and "
            "--apply-chat-template as 'dualeval requests' had."
        )
    answers: list[Answers] = [[found[d.task, d.number, i] for i in range(len(d.requests))] for d in documents]
    return answers, hashlib.sha256(content).hexdigest(), unchecked


def _checked(answer: Any, request: Any, where: str, think_end: str | None) -> Sequence[Any]:
    """An answer, once for each repetition; texts are cut at the task's stops, None has no end of thoughts."""
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

    if request.request_type == GENERATE:
        texts = answer if isinstance(answer, list) else [answer] * request.repeats
        if len(texts) == request.repeats and all(isinstance(each, str) for each in texts):
            stops = normalize_gen_kwargs(dict(request.args[1]))["until"]
            return [
                postprocess_generated_text(each, [*stops], think_end) if (think_end or "") in each else None
                for each in texts
            ]
        expected = "a text" if request.repeats == 1 else f"a text, or a list of {request.repeats}"
    else:
        pair = [answer, False] if request.request_type == ROLLING else answer
        of_two = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], bool)
        if of_two and type(pair[0]) in (int, float) and -math.inf < pair[0] <= _ROUNDING:
            value = float(pair[0])
            return [value if request.request_type == ROLLING else (value, pair[1])] * request.repeats
        alone = "a log-likelihood (0 or less; a loss has the other sign)"
        expected = alone if request.request_type == ROLLING else f"[{alone}, whether it is the greedy text]"
    raise UsageError(f"{where}: the answer is {as_text(answer):.60}, expected {expected}")
