"""Small adapters of peft, with random values of a fixed seed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tests.vehicles import questions


def peft() -> Any:
    """The library, after transformers, which it imports."""
    questions.transformers()
    import peft

    return peft


def causal(folder: Path) -> Any:
    return questions.transformers().AutoModelForCausalLM.from_pretrained(folder)


def save_adapter(folder: Path, model: Any, kind: str = "Lora", **options: Any) -> Path:
    """Save an adapter of a model, all of whose tensors are drawn."""
    config = getattr(peft(), f"{kind}Config")(**{"task_type": "CAUSAL_LM", **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers, in peft's code
            adapted = peft().get_peft_model(model, config)
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.2)
            adapted.save_pretrained(folder)
    return folder
