"""Perplexity of a causal language model on a text file, in strided windows; 20 lines are for dualeval.

    python examples/perplexity.py MODEL TEXT
    torchrun --nproc-per-node 2 examples/perplexity.py MODEL TEXT
    horovodrun -np 2 python examples/perplexity.py MODEL TEXT
    dualeval run --task examples/perplexity.py:perplexity -T model=MODEL -T text=TEXT --nproc 2 --out runs/text

MODEL is a folder that transformers has written, with its tokenizer. Each token of the text is predicted once,
from the tokens before it in its window: all but the first window begin with ``length - stride`` tokens that an
earlier one has predicted. Killed or stopped, it goes on when the same is typed again. Needs transformers.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import dualeval
from dualeval.metrics import Count, Ratio
from dualeval.vision_library import torchvision

# -- model and data --------------------------------------------------------------------------------------

# transformers imports torchvision, which does not load by itself beside a CPU build of torch.
torchvision()
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

# -- for dualeval ----------------------------------------------------------------------------------------


def collate(windows: Any) -> dict[str, Tensor]:
    tokens, labels = zip(*windows, strict=True)
    return {"input_ids": pad_sequence(tokens, True), "labels": pad_sequence(labels, True, padding_value=-100)}


def observe(outputs: Any, batch: Any) -> dict[str, Tensor]:
    labels = batch["labels"][:, 1:]
    losses = cross_entropy(outputs.logits[:, :-1].mT.float(), labels, reduction="none")
    return {"loss": losses.double().sum(1), "tokens": (labels != -100).sum(1)}


def perplexity(model: str, text: str, length: int = 256, stride: int = 128) -> dualeval.Task:
    tokenizer, causal = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokens = tokenizer(Path(text).read_text("utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    windows = []
    for start in range(0, max(len(tokens) - length + stride, 1), stride):
        window = tokens[start : start + length]
        known = torch.arange(len(window)) < (length - stride if start else 1)
        windows.append((window, window.masked_fill(known, -100)))
    metrics = [Ratio("loss", "tokens", transform="exp", name="perplexity"), Count("tokens")]
    return dualeval.ModelTask(model=causal, data=windows, metrics=metrics, collate=collate, observe=observe)


if __name__ == "__main__":
    print(dualeval.evaluate(perplexity(*sys.argv[1:]), out="runs/perplexity").metrics)
