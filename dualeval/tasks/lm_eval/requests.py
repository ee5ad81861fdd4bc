"""Requests of the harness as tokens, and what a causal model answers: as its own model class does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualeval.columns.of_data import NO_COLUMNS, FurtherColumns, KeptColumns, WithColumns
from dualeval.data.token_groups import collate_prompts, collate_sequences
from dualeval.errors import UsageError
from dualeval.models.answering import Answering
from dualeval.models.text_models import CausalTokens, predicted
from dualeval.tasks.lm_eval.figures import GENERATE, ROLLING
from dualeval.tasks.lm_eval.library import Document, as_text
from dualeval.tasks.options.base import AnswerOptions
from dualeval.tasks.options.lm_eval import LmEvalOptions

_MOST_NEW = 256
# What a task may say of how text is generated, beside what changes nothing without sampling.
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class Generation:
    """How the texts of a task's requests are generated, and cut at the first of its stops."""

    def __init__(
        self, document: Document, settings: Mapping[str, Any], asked: AnswerOptions, tokens: CausalTokens
    ) -> None:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given = normalize_gen_kwargs(dict(settings), _MOST_NEW)
        cuts = given["do_sample"] and (given.get("top_k") or 0) > 0
        if other := sorted(given.keys() - (_KNOWN - {"top_k"} if cuts else _KNOWN)):
            raise UsageError(
                f"task {document.task} generates with {other[0]} {given[other[0]]!r}, which is not done "
                "here: leave it out in a YAML of your own that includes the task's."
            )
        if given["do_sample"] and not asked.temperature:
            top_p = "" if given.get("top_p", 1) == 1 else f" --top-p {given['top_p']}"
            raise UsageError(
                f"task {document.task} draws its texts at random, and here they are drawn only where that is "
                f"typed: give --temperature {given.get('temperature') or 0.7}{top_p}, for all tasks. Or have "
                "another program answer: dualeval requests, then dualeval score."
            )
        end = "".join(tokens.fast.decode(tokens.ends, skip_special_tokens=False))
        self.stops = [each for each in handle_stop_sequences([*given["until"]], eos=end) if each]
        self.answering = Answering(
            tokens=tokens,
            most=given["max_gen_toks"],
            stops=self.stops,
            think_end=asked.think_end,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.answers_seed,
        )

    def text(self, ids: Sequence[int]) -> str | None:
        """The text of generated tokens as the harness cuts it; None for thoughts without an end."""
        from lm_eval.models.utils import postprocess_generated_text

        text, is_thought = self.answering.thought(ids)
        return str(postprocess_generated_text(text, self.stops, None)) if is_thought else None


class Requests(WithColumns):
    """Documents with their requests, as a data set: a sample is a document."""

    def __init__(self, documents: Sequence[Document], keep: Sequence[str]) -> None:
        self.documents = documents
        self.kept = _kept(documents, keep)

    def __len__(self) -> int:
        return len(self.documents)

    def id(self, index: int) -> str:
        return self.documents[index].name

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [{"document": index} for index in indices]

    def placeholder(self, index: int) -> Any:
        return {"document": None}

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over the first documents with their prompts."""
        digest = hashlib.sha256()
        for document in self.documents[:count]:
            for request in document.requests:
                content = (document.name, request.request_type, request.args, request.repeats, request.doc)
                digest.update(as_text(content).encode())
        return digest.hexdigest()


def _kept(documents: Sequence[Document], keep: Sequence[str]) -> KeptColumns:
    """The fields of documents that are short texts or numbers, for groups."""
    rows = [each.requests[0].doc for each in documents]
    rows = [row if isinstance(row, dict) else {} for row in rows]
    plain = (bool, int, float, str, type(None))
    fields = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, plain))
    if not fields:
        return NO_COLUMNS
    columns = FurtherColumns([*fields], (), keep)
    columns.take({name: [row.get(name) for row in rows] for name in columns.names})
    return columns.kept()


class EncodedRequests(Requests):
    """Requests as tokens of one model."""

    def __init__(
        self, documents: Sequence[Document], asked: LmEvalOptions, tokens: CausalTokens, max_length: int
    ) -> None:
        super().__init__(documents, asked.keep)
        self.tokens, self.max_length = tokens, max_length
        # A text that begins so gets no further token of the beginning.
        self._prefix = tokens.fast.decode([tokens.prefix], skip_special_tokens=False)
        self.generations: list[Generation] = []
        self._places: dict[str, int] = {}
        for document in documents:
            for request in document.requests:
                if request.request_type == GENERATE and (key := as_text(request.args[1])) not in self._places:
                    self._places[key] = len(self.generations)
                    self.generations.append(Generation(document, request.args[1], asked, tokens))
        for each in self.generations:
            if (most := each.answering.most) >= max_length:
                raise UsageError(
                    f"a task asks for {most} new tokens (max_gen_toks), and the model sees {max_length} "
                    "at once (--max-length): no prompt has room. Set max_gen_toks in a YAML of your own that "
                    "includes the task's."
                )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self._encoded(self.documents[index]) for index in indices]

    def placeholder(self, index: int) -> Any:
        return {"requests": [], "cut": False}

    def generation_of(self, request: Any) -> Generation:
        """How the text of a request is generated."""
        return self.generations[self._places[as_text(request.args[1])]]

    def _encoded(self, document: Document) -> dict[str, Any]:
        encoded: list[dict[str, Any]] = []
        cut = False
        for request in document.requests:
            if request.request_type == GENERATE:
                place = self._places[as_text(request.args[1])]
                tokens, answering = self._encode(request.args[0]), self.generations[place].answering
                kept = tokens[-(self.max_length - answering.most) :]
                # Greedy answers to one prompt are all equal.
                count = request.repeats if answering.temperature else 1
                numbers = answering.numbers(f"{document.name} {len(encoded)}", count)
                prompt = torch.tensor(kept, dtype=torch.int32)
                encoded.append({"prompt": prompt, "kind": place, "numbers": numbers})
                cut = cut or len(kept) < len(tokens)
                continue
            pairs = self._windows(*request.args) if request.request_type == ROLLING else None
            sequences = []
            if pairs is None:
                pairs = [self._pair(*request.args)]
            if not pairs or not pairs[0][1]:
                raise UsageError(_nothing_of(document, len(encoded), request.args[-1]))
            for before, after in pairs:
                if len(after) > self.max_length:
                    raise UsageError(
                        f"{document.name}: request {len(encoded)} is {len(after)} tokens after its context, "
                        f"expected {self.max_length} at most (--max-length)"
                    )
                whole = torch.tensor([*before, *after], dtype=torch.int32)
                cut = cut or len(whole) > self.max_length + 1
                sequences.append((whole[-self.max_length - 1 :], len(after)))
            encoded.append({"sequences": sequences})
        return {"requests": encoded, "cut": cut}

    def _encode(self, text: str, *, plain: bool = False) -> list[int]:
        special = not (plain or text.startswith(self._prefix))
        ids: list[int] = self.tokens.fast.encode(text, add_special_tokens=special).ids
        return ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As ``loglikelihood`` and ``_encode_pair`` in lm_eval/api/model.py."""
        if not context:
            after = self._encode(continuation, plain=True)
            return (
                ([self.tokens.prefix], after) if after[:1] != [self.tokens.prefix] else (after[:1], after[1:])
            )
        stem = context.rstrip()
        before = self._encode(stem)
        return before, self._encode(context + continuation)[len(before) :]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """As ``loglikelihood_rolling`` in lm_eval/models/huggingface.py."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = get_rolling_token_windows(
            token_list=self._encode(text),
            prefix_token=self.tokens.prefix,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [make_disjoint_window(each) for each in windows]

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """A batch: sequences and prompts in groups, and which of them are whose."""
        requests = [each["requests"] for each in samples]
        windows = [[len(r["sequences"]) for r in of_one if "sequences" in r] for of_one in requests]
        scored = [[s for r in of_one if "sequences" in r for s in r["sequences"]] for of_one in requests]
        asked = [[r for r in of_one if "prompt" in r] for of_one in requests]
        prompts = [
            (r["kind"], r["prompt"], each) for of_one in asked for r in of_one for each in r["numbers"]
        ]
        generated: list[dict[str, Any]] = []
        order: list[tuple[int, int, int]] = [(0, 0, 0)] * len(prompts)
        for kind in sorted({kind for kind, *_ in prompts}):
            places = [place for place, each in enumerate(prompts) if each[0] == kind]
            _, texts, numbers = zip(*(prompts[place] for place in places), strict=True)
            joined = collate_prompts(texts, numbers, self.generations[kind].answering.most)
            rows = [
                (number, row) for number, group in enumerate(joined["groups"]) for row in range(len(group))
            ]
            for place, at in zip(places, joined["places"].tolist(), strict=True):
                order[place] = (len(generated), *rows[at])
            generated.append({"kind": kind, "groups": joined["groups"], "numbers": joined["numbers"]})
        return {
            **collate_sequences(scored),
            "generated": generated,
            "order": order,
            "sequences": torch.tensor([len(each) for each in scored], dtype=torch.int64),
            # Of each request how many sequences it has, and of each document how many such requests.
            "windows": torch.tensor([count for each in windows for count in each], dtype=torch.int64),
            "scored": torch.tensor([len(each) for each in windows], dtype=torch.int64),
            # Of each document how many texts are generated, and of how many tokens.
            "texts": torch.tensor(
                [sum(len(r["numbers"]) for r in each) for each in asked], dtype=torch.int64
            ),
            "new_tokens": torch.tensor(
                [
                    sum(len(r["numbers"]) * self.generations[r["kind"]].answering.most for r in each)
                    for each in asked
                ],
                dtype=torch.int64,
            ),
            "cut": torch.tensor([each["cut"] for each in samples]),
        }


def _nothing_of(document: Document, number: int, text: str) -> str:
    """Why a request has no token to score."""
    if not text.strip():
        return f"{document.name}: request {number}: the text to score (a choice, a target) is empty"
    return (
        f"{document.name}: request {number}: {text!r:.60} has no token of its own, because a token at the "
        "join spans its context, too: nothing is left to score"
    )


def scores_of(model: nn.Module, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Of each row the log-likelihood of its predicted tokens, float64, and whether each was the likeliest."""
    lls, likeliest = [], []
    for logits, targets in predicted(model, group):
        lls.append(-cross_entropy(logits, targets, reduction="none").double().sum())
        likeliest.append((logits.argmax(1) == targets).all())
    return torch.stack(lls), torch.stack(likeliest)
