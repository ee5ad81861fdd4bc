"""Evaluates a small language model on the three kinds of data in turn: ``language_worker.py HOME OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import dualeval

KINDS = ("texts", "choices.jsonl", "prompts.jsonl")
# The texts have six batches of windows, the others five of rows.
BATCH = 3


def main(home: Path, out: Path) -> None:
    for kind in KINDS:
        task = dualeval.tasks.LanguageModeling(model=home / "model", data=home / kind)
        dualeval.evaluate(task, batch_size=BATCH, out=out / kind)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
