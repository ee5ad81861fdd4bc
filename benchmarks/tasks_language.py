"""The case of ``benchmarks/tasks.py`` for language-modeling: perplexity of texts, beside a loop by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dualeval import Task
from dualeval.tasks.language_modeling import LanguageModeling
from dualeval.vision_library import torchvision

_WORDS, _DOCUMENTS, _WORDS_EACH, _LENGTH, _BATCH = 2000, 96, 1500, 128, 8


def _save_tokenizer(folder: Path) -> Any:
    """A tokenizer of whole words."""
    torchvision()  # transformers imports it, and beside CPU torch only this way does that work
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(_WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return fast


def language_modeling(folder: Path) -> dict[str, Any]:
    """The fields of a ``Pair``: a small GPT-2 with random weights, disjoint windows of drawn words."""
    tokenizer = _save_tokenizer(folder / "tokenizer")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": _LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS + 2, **small)).eval()
    draw = random.Random(0)
    (folder / "texts").mkdir()
    texts = []
    for number in range(_DOCUMENTS):
        texts.append(" ".join(f"w{draw.randrange(_WORDS)}" for _ in range(_WORDS_EACH)))
        (folder / f"texts/{number:02}.txt").write_text(texts[-1], "utf-8")
    # As dualeval's: the last window of a document is full, and predicts what is left.
    windows = []
    for text in texts:
        tokens = [0, *tokenizer(text)["input_ids"]]
        for first in range(0, len(tokens) - 1, _LENGTH):
            stop = min(first + _LENGTH, len(tokens) - 1)
            windows.append((tokens[stop - _LENGTH : stop + 1], stop - first))

    def by_hand() -> float:
        total = count = 0.0
        with torch.inference_mode():
            for at in range(0, len(windows), _BATCH):
                batch = windows[at : at + _BATCH]
                blocks = torch.tensor([tokens for tokens, _ in batch])
                labels = blocks[:, 1:].clone()
                for row, (_, predicted) in enumerate(batch):
                    labels[row, : _LENGTH - predicted] = -100
                logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
                total += float(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
                count += int((labels != -100).sum())
        return math.exp(total / count)

    def task() -> Task:
        places: dict[str, Any] = {"data": folder / "texts", "tokenizer": folder / "tokenizer"}
        return LanguageModeling(model=model, max_length=_LENGTH, **places)

    made: dict[str, str | int | Callable[..., Any]] = {"task": task, "by_hand": by_hand}
    return {**made, "metric": "perplexity", "samples": len(windows), "batch_size": _BATCH}
