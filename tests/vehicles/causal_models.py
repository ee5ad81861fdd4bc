"""Small causal language models of fixed seeds, their tokenizers, and texts, choices and prompts for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.vehicles import questions
from tests.vehicles.made_tokenizers import ACCENTS, RIVER, byte_level

POSITIONS = 64
TEXTS = {
    "long.txt": " ".join(f"{number}: {RIVER}" for number in range(4)),
    "folder/accents.txt": f"\ufeff{ACCENTS}\r\n  {ACCENTS}\n",
    "exact.txt": RIVER[:POSITIONS],
    "one.txt": "x",
}


def save_causal(folder: Path, kind: str = "GPT2", *, begins: bool = False, **changes: Any) -> Path:
    """Save a model of two narrow layers, with random weights of a fixed seed, and a tokenizer of bytes.

    Args:
        folder: where.
        kind: "GPT2", "Llama", or another of the names below; T5 and Bart have an encoder.
        begins: whether the tokenizer puts the token of the beginning before each text.
        changes: of the configuration.
    """
    library = questions.transformers()
    from tokenizers import decoders, processors

    tokenizer, options = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = template if begins else None
    options = {**options, "bos_token": "<s>", "eos_token": "</s>"}
    library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
    kinds: dict[str, dict[str, Any]] = {
        "GPT2": {"n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": 2},
        "Llama": {
            "max_position_embeddings": POSITIONS,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        "Mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        "RecurrentGemma": {
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "lru_width": 16,
        },
        "Rwkv": {"hidden_size": 16, "num_hidden_layers": 2, "context_length": POSITIONS},
        "Bamba": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "attn_layer_indices": [1],
            "mamba_d_state": 4,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
        },
        "T5": {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32},
        "Bart": {
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "max_position_embeddings": POSITIONS,
            **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
        },
    }
    small = kinds[kind]
    tokens = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 2}
    config = getattr(library, f"{kind}Config")(**{**small, **tokens, "initializer_range": 0.5, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        form = "Seq2SeqLM" if config.is_encoder_decoder else "CausalLM"
        getattr(library, f"AutoModelFor{form}").from_config(config).save_pretrained(folder)
    return folder


def write_texts(folder: Path, texts: dict[str, str] | None = None) -> Path:
    """Write text files, and return their folder."""
    for name, text in (TEXTS if texts is None else texts).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def choice_rows(count: int = 14) -> list[dict[str, Any]]:
    """Rows with two to four choices; some contexts are longer than the model takes, one is empty."""
    choices = ["the sea", "a", "naïve mills, and meadows", "東京 the"]
    return [
        {
            "question": RIVER[: (number * 13) % 90] + " " * (number % 3) if number else "",
            "choices": (own := choices[: 2 + number % 3]),
            "answer": number % len(own) if number % 2 else own[number % len(own)],
        }
        for number in range(count)
    ]


def prompt_rows(count: int = 14) -> list[dict[str, Any]]:
    """Rows with prompts of a few lengths, and one or two answers."""
    return [
        {"prompt": f"{number % 10} {RIVER[: 9 * (number % 4)]}the", "answer": ["mill", f"x{number}"]}
        for number in range(count)
    ]
