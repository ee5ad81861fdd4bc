"""The options of ``dualeval score`` for a file of answers; light to import, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dualeval.options.fields import option

if TYPE_CHECKING:
    from dualeval.tasks.given_answers import GivenAnswers

_ANSWERS = "A file of answers"


@dataclass(frozen=True, kw_only=True)
class GivenAnswersOptions:
    """Answers in a file, scored as the official scripts of SQuAD do."""

    data: Path = option(help="Questions: JSON file of SQuAD.", group=_ANSWERS, metavar="FILE")
    predictions: Path = option(
        help="Answers: JSON object, question id to text.", group=_ANSWERS, metavar="FILE"
    )
    null_odds: Path | None = option(
        None,
        "JSON object, question id to no-answer score; adds the best thresholds.",
        group=_ANSWERS,
        metavar="FILE",
    )
    metric: tuple[str, ...] = ()

    def make(self) -> GivenAnswers:
        """The task."""
        from dualeval.tasks.given_answers import GivenAnswers

        return GivenAnswers(
            data=self.data, predictions=self.predictions, null_odds=self.null_odds, metrics=self.metric
        )
