"""Result: what a run measured, and where it came from; result.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin, get_type_hints

from dualeval.atomic_files import write_text
from dualeval.errors import DualevalError, UsageError

if TYPE_CHECKING:
    import pyarrow

    from dualeval.metrics import Value

SCHEMA_VERSION = 3
_READABLE = (2, SCHEMA_VERSION)  # version 2 had no samples_digest
# By 1 intervals of fractions were Wilson's alone, and `rough` was decided by the number of samples.
# By 1 and 2 those of losses went below 0, and ``rough`` was said in other words.
INTERVAL_FORMULAS = 3
STATUS = "status.json"
RESULT = "result.json"
JOB = "job.json"
PREDICTIONS = "predictions.parquet"
# A page to look at, where one was asked for.
REPORT = "report.html"
# One with the card of a sample that was asked for.
SAMPLE_REPORT = "sample.html"
# The table of several models, in whose folder each has one of its own.
MODELS = "models.json"

# Which part of a data set was evaluated: ``kind`` of ``Result.part``.
ALL_SAMPLES, FIRST_SAMPLES, DRAWN_SAMPLES = "all", "first", "drawn"


class TimedStage(str, Enum):
    """A part of a rank's evaluation, whose seconds ``timing["ranks"]`` has; with words for people."""

    words: str

    LOOK = "look", "a one-time check of the first samples"
    DATA = "data", "waiting for samples to be read"
    TRANSFER = "transfer", "copying to the device"
    COMPUTE = "compute", "the forward pass"
    METRICS = "metrics", "counting metrics"
    JOURNAL = "journal", "writing the journal"
    MEET = "meet", "waiting for other ranks"
    REDUCE = "reduce", "adding up the ranks' counts"

    def __new__(cls, name: str, words: str) -> TimedStage:
        stage = str.__new__(cls, name)
        stage._value_, stage.words = name, words
        return stage

    __str__ = str.__str__


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one run. Field by field in docs/result-files.md.

    Attributes:
        metrics: the metrics by name; plain JSON values, null where a value is not finite.
        intervals: 95 % intervals [low, high] of the metrics that have one.
        rough: for each interval that may cover less than 95 %, why.
        interval_formulas: the version of the formulas of intervals and of ``rough``; 1 in earlier results.
        naive_intervals: where samples come in clusters, the intervals of independent ones; ``intervals`` are
            those that allow for the clusters.
        clusters: the ``column`` whose equal entries make a cluster, and their ``count``; nothing without.
        nonfinite: for each metric that met NaN or infinities, how many of which.
        samples: total, evaluated and failed samples.
        failed: id and error of every failed sample, in data-set order; the errors on rank 0 only.
        chunks: total, evaluated_now and resumed chunks.
        job: the options as they were used.
        fingerprint: sha256 of all that decides the metrics.
        data: fingerprints of the data set and of its contents.
        weights: fingerprint of the model's parameters and buffers, and their number.
        versions: of Python and of the libraries that compute.
        world: size, nodes, launcher, backend.
        device: type, model and bits of rank 0's device.
        homogeneous: whether one kind of machine has computed all: device model, CPU capability, bits,
            versions.
        deterministic: whether the first samples gave the same columns when they were read and computed twice;
            None where nothing was computed twice.
        machines: each kind of machine that has computed a part, as ``device`` and ``versions`` name it, with
            the number of its ``chunks``.
        timing: seconds; total, setup, evaluate, and of each rank those by ``TimedStage``; ``limited_by`` says
            what limited a longer run, and what to do.
        samples_per_s: evaluated samples over evaluate seconds.
        units: by metric, "fraction" for values of 0 to 1, "percent" for values of 0 to 100, or another text;
            nothing for plain numbers.
        directions: by metric, whether "higher" or "lower" is better; nothing where neither is.
        scores: by metric, how the value follows from a number of each sample, as ``dualeval.metrics.Score``
            has it; nothing where it does not.
        work: what the metrics took, as counts, where a task counts something.
        description: what was evaluated, in words for people, by label.
        part: which part of the data set was evaluated: ``kind`` ("all", "first" or "drawn"), ``samples``,
            ``of`` and what more is known; empty in results of earlier versions.
        whole_set_intervals: of drawn samples, 95 % intervals of the values that the whole data set would
            give; ``intervals`` are about samples beyond it.
        warnings: what a reader of the numbers should know.
        reference: how the predictions differ from those of another run; empty where none was named.
        labels: how folders became classes: the rule, the index by folder, the classes' names by index.
        folder: where rank 0 wrote the files; None where nothing was written.
        finished_at: when the run came to its end, UTC, ISO 8601.
        earlier: an earlier run has made this result, and this one has only printed it.
        replay: what evaluating two finished batches anew has shown: "same bits", "within tolerance",
            "skipped", or "nothing to compare"; None where nothing was finished before.
        metric_digests: by metric, a hash of what it makes of the first batch that a later run evaluates anew;
            on rank 0 only.
        files: by name, ``bytes`` and ``sha256`` of the files beside result.json; complete on rank 0 only.
        samples_digest: sha256, in hex, over the number of samples and their ids in data-set order; None in
            results of earlier versions, and where each id would cost the reading of a sample.
        slices: by what ``by`` names, its groups in order, with the metrics of each (docs/slices.md); no part
            of the digest.
    """

    metrics: dict[str, Value]
    intervals: dict[str, tuple[float, float]]
    nonfinite: dict[str, dict[str, int]]
    samples: dict[str, int]
    failed: list[dict[str, str]]
    chunks: dict[str, int]
    job: dict[str, Any]
    fingerprint: str
    data: dict[str, Any]
    weights: dict[str, Any]
    versions: dict[str, str]
    world: dict[str, Any]
    device: dict[str, Any]
    homogeneous: bool
    timing: dict[str, Any]
    samples_per_s: float
    warnings: list[str]
    folder: str | None
    rough: dict[str, str] = field(default_factory=dict)
    interval_formulas: int = 1
    naive_intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    clusters: dict[str, Any] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    directions: dict[str, str] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)
    machines: list[dict[str, Any]] = field(default_factory=list)
    finished_at: str | None = None
    earlier: bool = False
    deterministic: bool | None = None
    replay: str | None = None
    metric_digests: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    description: dict[str, str] = field(default_factory=dict)
    part: dict[str, Any] = field(default_factory=dict)
    whole_set_intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    samples_digest: str | None = None
    slices: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def metrics_digest(self) -> str:
        """sha256, in hex, over the metrics, their non-finite counts and the ids of failed samples.

        Equal digests mean: the same numbers to the last bit. ``samples_digest`` says of which samples.
        """
        content = {
            "metrics": self.metrics,
            "nonfinite": self.nonfinite,
            "failed": [entry["id"] for entry in self.failed],
        }
        return sha256_of_json(content)

    @property
    def digests(self) -> dict[str, str | None]:
        """``metrics_digest`` and ``samples_digest`` by name."""
        return {"metrics_digest": self.metrics_digest, "samples_digest": self.samples_digest}

    def __str__(self) -> str:
        """The table that a run prints at its end."""
        from dualeval.report.table import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from dualeval.report.table import as_html

        return as_html(self)

    def predictions(self) -> pyarrow.Table:
        """The rows of ``predictions.parquet``, one a sample in data-set order: id, index and columns.

        Raises:
            UsageError: the run wrote no files.
            DualevalError: they are not there, or no longer those of this run.
        """
        import pyarrow.parquet

        if self.folder is None:
            raise UsageError(
                "this run has written no rows. Give evaluate out=FOLDER, and it keeps them there"
            )
        path = Path(self.folder, PREDICTIONS)
        if not path.is_file():
            raise DualevalError(f"there is no {path} on this machine: rank 0 has written it where it ran")
        # Rank 0 has the checksum: the others read it where it has written the result.
        written = self if self.files else read_result(path.with_name(RESULT))
        known = written.files.get(PREDICTIONS)
        if written.digests != self.digests or (known is not None and checksum_of(path) != known):
            raise DualevalError(f"{path} is not the file of this result: it was rewritten or is damaged")
        return pyarrow.parquet.read_table(path)

    def to_json(self) -> str:
        """The text of result.json."""
        content = {"schema_version": SCHEMA_VERSION, **self.digests, **asdict(self)}
        return json_text(content, allow_nan=False)


def class_names(result: Result) -> list[str | None]:
    """The names of the classes by index, as far as they are known."""
    return [*(result.labels.get("classes") or ())]


def described_part(part: Mapping[str, Any]) -> str:
    """A part of a data set in words: "first 5,000 of 50,000 (100 of 1,000 classes)"."""
    count, total = f"{part['samples']:,}", f"{part['of']:,}"
    if part["kind"] == ALL_SAMPLES:
        return f"all {total}"
    classes = [f"{part['classes']:,} of {part['of_classes']:,} classes"] if "classes" in part else []
    seed = [f"seed {part['seed']}"] if part["kind"] == DRAWN_SAMPLES else []
    more = f" ({'; '.join([*seed, *classes])})" if seed or classes else ""
    first = f"{count} of {total} drawn at random" if seed else f"first {count} of {total}"
    return f"{first}{more}"


def sha256_of_json(value: Any) -> str:
    """sha256, in hex, of canonical JSON: sorted keys, shortest round-trip floats, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_result(path: Path) -> Result:
    """Read a result.json and check it against its own digest."""
    try:
        return result_from(json.loads(path.read_text("utf-8")))
    except (ValueError, DualevalError) as error:
        raise DualevalError(f"{path} is damaged: {error}") from error


def result_from(content: Any) -> Result:
    """Make a result of the content of a result.json."""
    result, digest = stated_result(content)
    if result.metrics_digest != digest:
        raise DualevalError("its metrics do not fit its metrics_digest")
    return result


def stated_result(content: Any) -> tuple[Result, str]:
    """Make a result of the content of a result.json, as it is, and return the digest that it states too."""
    try:
        values = dict(content)
        version, digest = values.pop("schema_version"), values.pop("metrics_digest")
        if version not in _READABLE:
            raise DualevalError(
                f"its schema version is {version}, expected one of {_READABLE}: a later dualeval may read it"
            )
        result = Result(**values)
        for name, kind in get_type_hints(Result, localns={"Value": Any}).items():
            if not _fits(getattr(result, name), kind):
                wanted = Result.__annotations__[name]
                raise DualevalError(f"its field {name} is {values[name]!r:.80}, expected {wanted}")
        if absent := {"total", "evaluated", "failed"} - result.samples.keys():
            raise DualevalError(f"its field samples has no {min(absent)}")
        # A value of another kind than JSON's own shows here.
        _ = result.metrics_digest
    except (ValueError, TypeError, KeyError) as error:
        raise DualevalError(f"{type(error).__name__}: {error}") from error
    return result, str(digest)


def read_fields(path: Path, kinds: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """Read a JSON file of named values, of these kinds; raises UsageError where it is damaged.

    A value may be missing where its kind admits None. FileNotFoundError where there is no file.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}. {remedy}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}. {remedy}") from error
    problem = _problem(content, kinds)
    if problem is not None:
        raise UsageError(f"{path} is damaged: {problem}. {remedy}")
    return cast("dict[str, Any]", content)


# Of job.json, as far as it is read; earlier versions and other doors have not all of it.
_OF_JOB: Mapping[str, Any] = {
    "job": {"metric_options": dict[str, Any] | None, "columns": list[str] | None, "batch_size": int | None},
    "fingerprint": str | None,
    "machine": dict[str, Any] | None,
    "files": list[str] | None,
    "task_class": str | None,
    "metrics": list[str] | None,
    "options": dict[str, Any] | None,
    "shares": int | None,
    "command": dict[str, list[str] | str] | None,
}


def read_job(folder: Path, remedy: str | None = None) -> dict[str, Any]:
    """Read a folder's job.json, as ``read_fields`` does."""
    again = f"Evaluate again: 'dualeval run ... --out {folder} --fresh'."
    return read_fields(folder / JOB, _OF_JOB, again if remedy is None else remedy)


def _problem(content: Any, kinds: Mapping[str, Any]) -> str | None:
    if type(content) is not dict:
        return f"it holds {content!r:.40}, expected values by name"
    for name, kind in kinds.items():
        value = content.get(name)
        if isinstance(kind, Mapping):
            if (inner := _problem(value, kind)) is not None:
                return f"in its field {name}: {inner}" if name in content else f"it has no field {name}"
        elif not _fits(value, kind):
            wanted = str(kind).replace("typing.", "").replace("<class 'int'>", "int")
            return f"its field {name} is {value!r:.40}, expected {wanted}"
    return None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value, as JSON has it, is of a type in annotations, as those of ``Result``."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is UnionType:
        return any(_fits(value, each) for each in inner)
    if outer is tuple:
        return type(value) is list and len(value) == len(inner) and all(map(_fits, value, inner))
    parts = value.values() if type(value) is dict else value if type(value) is list else ()
    wanted = (int, float) if outer is float else (outer,)
    return outer is Any or (type(value) in wanted and all(_fits(part, inner[-1]) for part in parts))


def checksum_of(path: Path, step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Size and sha256 of a file; ``step`` is called with every piece that is read."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
            step()
    return {"bytes": size, "sha256": digest.hexdigest()}


def json_text(content: Any, *, allow_nan: bool = True) -> str:
    """JSON for files and the screen: indented, letters as they are, a line feed at its end."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=allow_nan) + "\n"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run; status.json, the truth for scripts whatever a launcher makes of exit codes."""

    # "running", "done", "failed" or "stopped".
    state: str
    # What the ranks end with; None while running.
    exit_code: int | None = None
    # The first error's message, where there was one.
    reason: str | None = None
    # The name of the signal that stopped the run.
    signal: str | None = None
    # Number of chunks that a stopped run has finished and saved since it was started; None where it was
    # killed before all ranks had reported.
    chunks_saved: int | None = None
    # Of the launchers that may start a stopped run's ranks again.
    launch_id: str | None = None
    # Names this run apart from any other in the same folder.
    run: str | None = None
    # Which process has written this: host, number, and when it began.
    process: str | None = None

    def write(self, folder: Path) -> None:
        """Write it into the output folder; where no new file can be made, over the one that is there."""
        text = json_text(asdict(self))
        try:
            write_text(folder / STATUS, text)
        except OSError as refused:
            # No space, no inodes, a folder that takes no files: its block is there already. Not whole for a
            # moment, but "running" would be wrong for ever.
            try:
                with (folder / STATUS).open("r+", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
                    file.truncate()
            except OSError:
                raise refused from None


def read_status(folder: Path) -> Status | None:
    """Read the state of a folder's run; None where there is no readable one."""
    try:
        return Status(**read_fields(folder / STATUS, get_type_hints(Status), ""))
    except (OSError, UsageError, TypeError):
        return None
