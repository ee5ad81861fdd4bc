"""Perplexity of a causal language model on a text file, in strided windows; 20 lines are for dualeval.

    python examples/perplexity.py MODEL TEXT
    torchrun --nproc-per-node 2 examples/perplexity.py MODEL TEXT
    horovodrun -np 2 python examples/perplexity.py MODEL TEXT
    dualeval run --task examples/perplexity.py:perplexity -T model=MODEL -T text=TEXT --nproc 2 --out runs/b

MODEL is a folder that transformers has written, with its tokenizer. Each token of the text is predicted once,
from the tokens before it in its window. In every window but the first, the first ``length - stride`` tokens
are only context: an earlier window predicted them. If it is killed or stopped, type the same command again to
resume. Needs transformers.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dualeval
from dualeval.metrics import Ratio

# -- model and data --------------------------------------------------------------------------------------


def read(model: str, text: str) -> tuple[Any, torch.Tensor]:
    """The language model in a folder, and the tokens of a text file."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(Path(text).read_text("utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    return AutoModelForCausalLM.from_pretrained(model), tokens


# -- for dualeval ----------------------------------------------------------------------------------------


def collate(windows: Any) -> dict[str, torch.Tensor]:
    tokens, seen = zip(*windows, strict=True)
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=-100)
    is_seen = torch.arange(padded.shape[1]) < torch.tensor(seen)[:, None]
    return {"input_ids": padded.clamp(min=0), "labels": padded.masked_fill(is_seen, -100)}


def observe(outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
    labels = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT.float(), labels, reduction="none")
    return {"loss": losses.double().sum(1), "tokens": (labels != -100).sum(1)}


def perplexity(model: str, text: str, length: int = 256, stride: int = 128) -> dualeval.Task:
    causal, tokens = read(model, text)
    starts = range(0, max(len(tokens) - length + stride, 1), stride)
    windows = [(tokens[start : start + length], length - stride if start else 1) for start in starts]
    ratio = Ratio("loss", "tokens", transform="exp", name="perplexity", higher_is_better=False)
    return dualeval.ModelTask(model=causal, data=windows, metrics=[ratio], collate=collate, observe=observe)


if __name__ == "__main__":
    print(dualeval.evaluate(perplexity(sys.argv[1], sys.argv[2]), out="runs/perplexity").metrics)
