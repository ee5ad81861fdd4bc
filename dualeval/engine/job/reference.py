"""Reference: another finished run over the same samples, and how a run's predictions differ from that one's.

Both runs' rows are read a window at a time, so memory does not grow with the number of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from dualeval.columns.ragged import NumpyRows, kind_text
from dualeval.engine.folder.finished import finished_run
from dualeval.engine.folder.layout import JobFacts
from dualeval.engine.folder.stored_rows import StoredRows, Window
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.samples.subset import ids_of
from dualeval.engine.values.differences import differing_fingerprints, option_differences
from dualeval.engine.values.row_comparison import (
    PREDICTION_COLUMNS,
    Difference,
    as_one_kind,
    right,
    text_rows,
)
from dualeval.errors import DualevalError, UsageError
from dualeval.result import Result
from dualeval.tasks import Dataset

_LOSS = "loss"
# Most ids that are listed; 'dualeval compare --flips' writes all.
_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A finished run with which another one is compared."""

    # Its folder, absolute.
    folder: Path
    # The contents of its result.json.
    result: Result
    rows: StoredRows

    @classmethod
    def open(cls, folder: str | Path) -> Reference:
        """Open a run."""
        try:
            result, rows = finished_run(Path(folder))
        except UsageError as error:
            raise UsageError(f"--reference: {error}") from error
        return cls(folder=Path(folder).absolute(), result=result, rows=rows)

    def check(self, evaluation: Evaluation, facts: JobFacts, step: Callable[[], None]) -> None:
        """Check, before anything is evaluated, that it is a run over the same samples of the same data."""
        count, columns = evaluation.plan.num_samples, evaluation.columns
        if not set(columns) & set(self.rows.names):
            raise UsageError(
                f"--reference {self.folder}: no column is in both runs. There: {', '.join(self.rows.names)}; "
                f"here: {', '.join(columns)}."
            )
        stop = 0
        for window in self.rows.windows(self.rows.names[:1], with_ids=True):
            stop = window.start + len(window.ids)
            ids = ids_of(evaluation.dataset, range(window.start, min(stop, count)))
            for place, (here, there) in enumerate(zip(ids, window.ids, strict=False), window.start):
                if here != there:
                    self._refuse_samples(f"sample {place} is {there!r} there, {here!r} here")
            step()
        if stop != count:
            self._refuse_samples(f"{stop:,} samples there, {count:,} here")
        this_run = {
            "data": {"fingerprint": facts.job["data"], "contents": facts.job["contents"]},
            "job": {**evaluation.run.job, **evaluation.task.options()},
        }
        if unlike := differing_fingerprints(this_run, vars(self.result)):
            raise UsageError(
                f"--reference {self.folder} has the same ids, but over different data: the fingerprints "
                f"differ in {unlike}. Evaluate both over the same data, or compare the two runs afterwards: "
                f"'dualeval compare {self.folder} RUN --trust-ids'."
            )

    def _refuse_samples(self, problem: str) -> NoReturn:
        raise UsageError(
            f"--reference {self.folder} is a run over different samples, or in a different order: {problem}. "
            "Evaluate both over the same samples (--data, --limit, or --sample and --seed); 'dualeval "
            f"compare {self.folder} RUN' pairs samples by id afterwards, and says how many are in both."
        )

    def compare(
        self, windows: Iterable[Window], dataset: Dataset, result: Result, step: Callable[[], None]
    ) -> dict[str, Any]:
        """The comparison of another run's rows with this one's, for its result; says if these are gone."""
        names = ("metrics_digest", "fingerprint")
        reference = {"folder": str(self.folder), **{name: getattr(self.result, name) for name in names}}
        compared = _Compared()
        try:
            for here in windows:
                there = self.rows.batch(range(here.start, here.start + len(here.evaluated)))
                compared.add(here, there, dataset)
                step()
        except DualevalError as error:
            return {**reference, "problem": str(error)}
        return {**reference, "differs_in": option_differences(self.result, result), **compared.to_json()}


class _Compared:
    """The comparison of the windows so far."""

    def __init__(self) -> None:
        # Samples in both runs; failures "here", "there" or in "both"; samples that became right or wrong.
        self._counts = Counter[str]()
        self._columns: dict[str, Difference] = {}
        self._not_compared: dict[str, str] = {}
        self._prediction: str | None = None
        self._first_changed: list[str] = []

    def add(self, here: Window, there: Window, dataset: Dataset) -> None:
        """Compare the rows of the same samples."""
        both = here.evaluated & there.evaluated
        places = np.flatnonzero(both)
        self._counts.update(
            samples=len(places),
            here=int((there.evaluated & ~both).sum()),
            there=int((here.evaluated & ~both).sum()),
            both=int((~here.evaluated & ~there.evaluated).sum()),
        )
        if not len(places):
            return

        def name(place: int) -> str:
            return dataset.id(here.start + int(places[place]))

        pairs = self._pairs(_rows_of(here, both), _rows_of(there, both))
        changed = {}
        for column, pair in pairs.items():
            difference = self._columns.setdefault(column, Difference.of(pair[0]))
            changed[column] = difference.add(*pair, name)
        prediction = next((each for each in PREDICTION_COLUMNS if each in pairs), None)
        if prediction is None:
            return
        self._prediction = prediction
        self._first_changed += map(name, changed[prediction][: _LISTED - len(self._first_changed)])
        is_right = right({each: one for each, (one, _) in pairs.items()}, prediction)
        was_right = right({each: other for each, (_, other) in pairs.items()}, prediction)
        if is_right is not None and was_right is not None:
            became = {"became_right": is_right & ~was_right, "became_wrong": ~is_right & was_right}
            self._counts.update({name: int(chosen.sum()) for name, chosen in became.items()})

    def _pairs(
        self, here: Mapping[str, NumpyRows], there: Mapping[str, NumpyRows]
    ) -> dict[str, tuple[NumpyRows, NumpyRows]]:
        """The rows of each column that can be compared; notes why the others cannot."""
        pairs = {}
        for name in dict.fromkeys((*here, *there)):
            if name not in here or name not in there:
                self._not_compared[name] = f"only in {'this run' if name in here else 'the reference'}"
            elif (pair := as_one_kind(here[name], there[name])) is not None:
                pairs[name] = pair
            else:
                one, other = kind_text(here[name]), kind_text(there[name])
                self._not_compared[name] = f"{one} in this run, {other} in the reference"
        return pairs

    def to_json(self) -> dict[str, Any]:
        counts = self._counts
        columns = {name: column.to_json() for name, column in self._columns.items()}
        samples = counts["samples"]
        changed = None if self._prediction is None else self._columns[self._prediction].rows_differ
        return {
            "samples": samples,
            "failed": {name: counts[name] for name in ("here", "there", "both")},
            "same_bits": not any(column["rows_differ"] for column in columns.values()),
            "prediction": self._prediction,
            "agreement": None if changed is None else (samples - changed) / samples,
            "changed": changed,
            "became_right": counts.get("became_right"),
            "became_wrong": counts.get("became_wrong"),
            "first_changed": self._first_changed,
            "loss": columns.pop(_LOSS, None),
            "columns": columns,
            "not_compared": self._not_compared,
        }


def _rows_of(window: Window, both: npt.NDArray[np.bool_]) -> dict[str, NumpyRows]:
    """The columns and texts of the samples that a mask selects."""
    columns = {name: rows[both[window.evaluated]] for name, rows in window.columns.items()}
    return columns | {name: text_rows(compress(texts, both)) for name, texts in window.texts.items()}
