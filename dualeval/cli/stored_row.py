"""A stored row as a person reads it: boxes in one form, tokens with their losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dualeval.result import JOB, read_job

if TYPE_CHECKING:
    from dualeval.comparison.worst import JudgedRows

_OF_DETECTION = "dualeval.tasks.detection.Detection"
_CORNERS = "left, top, right, bottom"
_TOKENS = 200  # of a longer window the first


def in_words(row: Mapping[str, Any], rows: JudgedRows) -> dict[str, Any]:
    """The columns of a run's row; those that no person reads in another form, which their names say."""
    told = dict(row)
    has_job = (rows.folder / JOB).is_file()
    if "true_boxes" in row and has_job and read_job(rows.folder).get("task_class") == _OF_DETECTION:
        told = {_name_of_boxes(name): _corners(name, value) for name, value in row.items()}
    if row.get("token_losses") is not None and "token_ids" in row:
        told["loss of each token"] = _losses(row, rows)
        del told["token_losses"], told["token_ids"]
    return told


def _name_of_boxes(name: str) -> str:
    return f"{name} ({_CORNERS})" if name in ("boxes", "true_boxes") else name


def _corners(name: str, value: Any) -> Any:
    """Boxes as corners, to hundredths of a pixel: the annotations have them as COCO's files do."""
    if value is None or name not in ("boxes", "true_boxes"):
        return value
    if name == "true_boxes":
        value = [[left, top, left + width, top + height] for left, top, width, height in value]
    return [[round(each, 2) for each in box] for box in value]


def _losses(row: Mapping[str, Any], rows: JudgedRows) -> str:
    """Each token with its loss in nats; where the run's data or tokenizer cannot be read, its id."""
    from dualeval.report.page.things import things_of
    from dualeval.tasks.stored import task_of_run

    task, problem = task_of_run(rows.folder / JOB)
    tokens = next((each.tokens for each in things_of(task, row) if each.tokens), None)
    if tokens is None:
        why = problem or f"the data or the tokenizer of {rows.folder} have changed since."
        click.echo(f"dualeval: note: tokens are shown by their ids: {why}", err=True)
        tokens = tuple(zip(map(str, row["token_ids"]), row["token_losses"], strict=True))
    texts = [f"{text.strip() or repr(text)} ({loss:.2f})" for text, loss in tokens[:_TOKENS]]
    more = [f"... ({len(tokens):,} tokens)"] if len(tokens) > _TOKENS else []
    return " ".join([*texts, *more])
