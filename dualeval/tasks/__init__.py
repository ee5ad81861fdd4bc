"""What the engine asks of a task: the data set, the model, and what to observe of each batch.

The engine owns device, precision, inference mode and order; a task owns everything that has a meaning.

It imports columns, models, data and metrics. Begin with ``Task``, below, then ``image_classification.py``.
Callers: the engine, which knows ``Task`` and ``Dataset`` alone; cli and ``door.py``. Keep: names and defaults
of a task are public; columns and their order are rows on the disk; this room's text is in identities.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from dualeval.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dualeval.metrics import Metric, RowMetric
    from dualeval.tasks.detection import Detection as Detection
    from dualeval.tasks.image_classification import ImageClassification as ImageClassification
    from dualeval.tasks.language_modeling import LanguageModeling as LanguageModeling
    from dualeval.tasks.lm_eval import LmEval as LmEval
    from dualeval.tasks.question_answering import QuestionAnswering as QuestionAnswering
    from dualeval.tasks.segmentation import Segmentation as Segmentation
    from dualeval.tasks.text_classification import TextClassification as TextClassification


def __getattr__(name: str) -> Any:
    if name in (classes := class_names()):
        return getattr(importlib.import_module(classes[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *class_names()])


def class_names() -> dict[str, str]:
    """The names of the built-in tasks' classes, with their modules."""
    table = importlib.import_module(f"{__name__}.options")
    return {table.class_name(name): f"{__name__}.{name.replace('-', '_')}" for name in table.TASKS}


class Dataset(Protocol):
    """Samples in a fixed order, read a batch at a time (PyTorch's ``__getitems__`` protocol).

    One whose contents are too much for every rank to read may have a second method beside ``fingerprint``:
    ``content_fingerprint(samples: range) -> str``, a hash of what is in these consecutive samples. It is
    called after ``fingerprint``; the ranks of a node share the samples, and the nodes compare.

    A data set may have one method more, ``placeholder(index)``. It returns a sample of the shape that the one
    at ``index`` would have, which holds nothing. With ``--on-error skip`` it takes the place of a sample that
    cannot be read, so that the rest of its batch is computed as it would be with that sample. A data set
    whose samples differ in shape needs it for that. Without it the place holds zeros like another sample of
    the batch; samples that hold what has no zero, as a picture of PIL's, are refused at the first batch.

    A data set may have ``columns(indices)``: by name the user's own columns of these samples, in lists,
    arrays or tensors of texts, numbers or bools. They are kept in the rows of a run behind the task's
    columns, and identify the job. Numbers are best given as arrays: in lists a batch of whole numbers is
    of int64.

    A data set may have ``reading_notes()``: sentences for people on how this process has read, since the last
    call. Rank 0 prints those of all ranks and reading processes at the end, each once; no result has them.

    For ``--sample`` it may have ``select(indices)``, which returns a data set of these samples alone, in this
    order and with their ids, and ``targets``, each sample's class as integers, which are then counted.
    """

    def __len__(self) -> int:
        """Number of samples."""

    def id(self, index: int) -> str:
        """The name of a sample that stays the same between runs and machines."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Read the samples at ``indices``.

        Returns either a list with one entry a sample, or, where the samples are in memory already, one
        ready batch that ``Task.collate`` passes on. Only list entries can fail one by one: a ready batch that
        cannot be read, twice, ends the run, with ``--on-error skip`` too.
        """

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over id, size in bytes and label of the first ``count`` samples, in order.

        Called on every rank. Where there is no ``content_fingerprint``, it should cover contents, too.
        """


class Task(ABC):
    """What is evaluated. Five things are to be said; the rest has a default.

    Each batch goes through ``__getitems__`` of the data set and ``collate`` (in reading processes), then
    ``forward`` and ``observe`` (on the device), then ``postprocess`` (on the host). What comes out of that is
    counted by the metrics. Kept are the columns named in ``rows``, and those that the metrics read.

    Attributes:
        name: the task's name in results and messages; without one its class's.
        rows: the columns of ``postprocess`` that are written to predictions.parquet, in this order; behind
            them come those that the metrics read, wherever they are not among these. None: all columns.
        cluster: the column whose equal entries mark samples that are not independent, such as questions on
            one text; where a run names none itself. None: all are independent.
        wants_workers: whether reading a sample costs enough to be worth worker processes; None: it does
            where the samples do not lie in memory.
        on_request: columns that ``observe`` gives only where they are in ``requested``, the columns that the
            metrics read.
        thread_safe: whether ``forward`` and ``observe`` may run on several batches at once, in threads with a
            copy of the model's modules each; that is how a CPU's cores are used. They must then keep nothing
            from one call to the next. None: the first samples show it (docs/promises.md).
        libraries: installed packages, besides torch and numpy, whose version can change a result.
        exports: files beside predictions.parquet, each one JSON object of a column's values by sample id,
            without those that could not be read: file name to column, of ``rows`` or ``texts``. Or file name
            to a function that writes the file to a path, called on rank 0 behind the metrics.
        given_options: the options that ``dualeval run`` has made it of, by name, without paths; they are part
            of the run's identity, whatever ``fingerprint`` says.
    """

    on_request: Collection[str] = ()
    requested: Collection[str] = ()
    given_options: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def rows(self) -> tuple[str, ...] | None:
        return None

    @property
    def cluster(self) -> str | None:
        return None

    @property
    def wants_workers(self) -> bool | None:
        return None

    @property
    def thread_safe(self) -> bool | None:
        return None

    @property
    def libraries(self) -> tuple[str, ...]:
        return ()

    @property
    def exports(self) -> Mapping[str, str | Callable[[Path], object]]:
        return {}

    @abstractmethod
    def dataset(self) -> Any:
        """The data set: a ``Dataset``, or anything that ``dualeval.wrap`` takes. Called once."""

    def collate(self, samples: Any) -> Any:
        """Make one batch of what ``__getitems__`` gave; torch's ``default_collate`` where nobody says more.

        Tensors in it are brought to the device: in dicts, lists, tuples and dataclasses, in what is
        registered with ``torch.utils._pytree``, and in objects with a method ``to(device)``. Tensors in other
        objects stay where they are. A mapping, list or tuple of a class of its own may become a plain one on
        its way.

        Runs in worker processes where there are any. Where Python starts these anew (on Linux from 3.14 on)
        they have neither the model nor what of the task cannot be pickled.
        """
        from torch.utils.data import default_collate

        from dualeval.columns.ragged import refuse_masked

        refuse_masked("the samples have", samples)
        return default_collate(samples)

    def _collates_as_torch(self) -> bool:
        """Whether ``collate`` does for samples of tensors what torch's ``default_collate`` does."""
        return getattr(self.collate, "__func__", None) is Task.collate

    @abstractmethod
    def build_model(self, device: torch.device) -> nn.Module:
        """The model with its weights; the engine brings it to ``device`` and into evaluation mode.

        Raises:
            UsageError: the weights, the model and the data do not fit together.
        """

    def build_late(self, device: torch.device) -> nn.Module:
        """The model of a run that divides it over the ranks (``--shard``), in place of ``build_model``.

        Without a method of its own it is what ``build_model`` gives: each rank builds all of it once.

        Args:
            device: where the ranks compute; what the task itself keeps for its forward belongs there.

        Returns:
            A model of this run's own, on the CPU. A parameter of it may be late: shape and dtype are known,
            and a method ``read_rows(first, last, into)`` reads some of its rows into a tensor of the CPU, in
            that tensor's dtype. Buffers have their values. ``dualeval.late_model`` makes such a model.

        Raises:
            UsageError: as for ``build_model``.
        """
        return self.build_model(device)

    def check_batches(self, batch_size: int, samples: int) -> None:
        """Refuse batches that the model does not take; called before the loop, after ``build_model``.

        Args:
            batch_size: samples a batch; the last batch has what is left over.
            samples: how many are evaluated.

        Raises:
            UsageError: the model takes other sizes; says which.
        """
        return

    def notes(self) -> Sequence[str]:
        """What a reader should know of how the model was made, in sentences; called after ``build_model``."""
        return ()

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch that is on the device. No host synchronisation."""

    @abstractmethod
    def observe(self, outputs: Any, batch: Any) -> Mapping[str, Any]:
        """Per-sample columns on the device. No host synchronisation.

        Returns:
            By name a tensor, first dimension the samples. Where samples have more or fewer values, as boxes
            or tokens, a ``dualeval.Ragged(values, lengths)`` or a list of tensors, one a sample; for text a
            list of str.
        """

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        """Per-sample columns on the host, of those that ``observe`` gave: what takes more than tensors.

        Called by one thread. The rows of samples that could not be read mean nothing, and must not fail.

        Args:
            columns: of one batch, or with ``--sample`` of consecutive samples of one, on the CPU; lists have
                become ``dualeval.Ragged`` and ``dualeval.Text``, which are sequences of the samples' tensors
                and strings.
            samples: their indices in the data set.

        Returns:
            Columns of the same kinds as those of ``observe``.
        """
        return columns

    def see(self, columns: Mapping[str, Any], asked: Sequence[str]) -> Sequence[str]:
        """Take note of the columns of the first samples; called before ``metrics`` where ``rows`` is None.

        Args:
            columns: of a few samples, on the CPU.
            asked: the metrics that the run asks for by name; none for all of the task's.

        Returns:
            The columns that are kept, as ``rows``.
        """
        return tuple(columns)

    @abstractmethod
    def metrics(self) -> Sequence[Metric | RowMetric]:
        """The metrics, which read the columns by name. Called after ``build_model``."""

    def texts(self, rows: Mapping[str, Any], first: int) -> Mapping[str, Sequence[str | None]]:
        """Columns of text for predictions.parquet, behind ``rows``; made only when it is written.

        Args:
            rows: some samples' ``rows``, consecutive: arrays, or sequences of arrays or of str; what stands
                where a sample could not be read means nothing.
            first: the first one's index in the data set.
        """
        return {}

    def show(self, row: Mapping[str, Any]) -> Any:
        """What there is to see of a sample, for the page of a run.

        Called on rank 0 after the result is saved, and also on a task whose model was never built. An error
        costs the page this sample's picture, and nothing else.

        Args:
            row: the sample's row in predictions.parquet as Python values: id, index (its place in the data
                set), columns and texts.

        Returns:
            A ``PIL.Image.Image``, a text, a table (a mapping of texts to texts), or a sequence of these. A
            mapping behind a picture may have layers that lie over it, each by its name: a picture that is
            transparent in places, or a list of boxes (left, top, right, bottom, colour, text) in pixels of
            the picture.
        """
        return ()

    #: What colours and marks in what ``show`` returns mean, in a sentence.
    legend = ""

    def colours(self, class_names: Sequence[str]) -> Mapping[str, str]:
        """The colours of layers, and of what they show, by name, for the page of a run.

        Args:
            class_names: of the run's classes, by index; where they have none, their numbers.
        """
        return {}

    def facets(self, row: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        """By what a sample is looked for on the page of a run, such as ``{"missed": ["dog"]}``.

        Args:
            row: as of ``show``.
        """
        return {}

    def findings(self, count: int) -> Mapping[str, Sequence[str]]:
        """What is odd about some of the first ``count`` samples, which are evaluated all the same.

        Returns:
            By kind, as ``no_label``, the ids of these samples; the result lists them, and warns.
        """
        return {}

    def data_warnings(self) -> Sequence[str]:
        """What a reader of the numbers should know of the data, in sentences.

        Called on rank 0, after ``build_model``. They are printed at the start, and are among the result's
        warnings.
        """
        return ()

    def labels_used(self) -> Mapping[str, Any]:
        """Which class each label stands for, for ``labels`` in the result. Called after ``build_model``.

        Returns:
            Plain values; nothing where nobody knows.
        """
        return {}

    def sources(self) -> Sequence[Any]:
        """What else has source that decides the numbers, such as the function that makes the model.

        The classes of task, data set, model and metrics need not be named. Called after ``build_model``.

        Returns:
            Functions, classes and modules.
        """
        return ()

    def options(self) -> Mapping[str, Any]:
        """The options as they are used, for ``job`` in the result. Called after ``build_model``.

        Returns:
            Plain values by option: also those that nobody gave, and None for what is not done.
        """
        return {}

    def description(self) -> Mapping[str, str]:
        """What is evaluated, in words for people; printed with the metrics. Called after ``build_model``.

        Returns:
            By label, as ``model``, ``weights``, ``data``, ``preprocessing``; the engine adds fingerprints to
            weights and data.
        """
        return {}

    def fingerprint(self) -> Mapping[str, Any]:
        """What the task adds to the run's fingerprint: plain values, preprocessing among them.

        Of a class that does not say it, the plain values in the task's attributes are in the fingerprint.
        """
        return {}


def place_of(dataset: Any, row: Mapping[str, Any]) -> int:
    """The place in its data set of the sample that a stored row is of.

    Raises:
        UsageError: another sample is there now.
    """
    index = int(row["index"])
    there = dataset.id(index) if index < len(dataset) else "none"
    if there != row["id"]:
        raise UsageError(f"the data have changed: sample {index} is {there}, and was {row['id']}")
    return index
