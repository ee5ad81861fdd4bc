"""The task text-classification: one class, or one number, for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from dualeval.columns.late import keeps_late
from dualeval.columns.ragged import Column
from dualeval.data.cache import DataCache
from dualeval.data.labels import KnownClasses, Labels
from dualeval.data.stores.path import path_at
from dualeval.data.table import Choose, DataRows, PythonRows, TableOptions, column_of, read_rows
from dualeval.data.table_labels import LEFT_OUT, TableLabels, refuse_other_names
from dualeval.data.token_groups import EncodedTexts, TextEncoder
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.classification import (
    LARGEST_CONFUSION,
    ON_REQUEST,
    BinaryF1,
    classification_metric,
    observed_logits,
)
from dualeval.metrics.metric import by_names
from dualeval.metrics.texts import TextWork, regression_metric
from dualeval.models.text_models import Use, known_tokens, load_tokenizer, shorter, try_out
from dualeval.models.transformers_folder import refuse_problem_type
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks import place_of
from dualeval.tasks.keywords import TextClassificationKeywords
from dualeval.tasks.labels import FolderLabels, check_classes, names_of, names_of_classes, number_targets
from dualeval.tasks.options.text_classification import TextClassificationOptions
from dualeval.tasks.refusals import describe, refuse_probabilities
from dualeval.tasks.text_task import Model, TextTask

USE = Use(name="text classification", kind="AutoModelForSequenceClassification")

# The usual names of columns, GLUE's among them.
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("text_a", "text_b"),
)
_TEXTS = ("text", "sentence", "content")
_LABELS = ("label", "labels", "class", "target", "score")
_EXAMPLE = {"text": "a text", "label": 1}
_MOST_TOKENS = 512
# As pandas and str() write a missing text.
_MISSING, _WRITTEN = frozenset(("nan", "NaN", "<NA>", "None")), "text_written_as_a_missing_one"
_TOP = 5
# Words; short enough that a text of one is filled up to as many.
_PADDED_TO = 8


class TextClassification(TextTask):
    """A classifier, or a regression, of texts or pairs of texts.

    Args:
        model: a folder with a model and its tokenizer, as ``save_pretrained`` writes them; or a module, or a
            function without arguments that returns one.
        data: a table (.csv, .tsv, .jsonl, .parquet), or rows as of ``load_dataset("glue", "sst2")``.
        tokenizer: the folder of the tokenizer, where the model is no folder.
        metrics: names of metrics; none for the default ones.
        cache: what other tasks of the run have read of their data.
        options: the others of ``dualeval run``, by the same names (docs/text-classification.md):
            weights, weights_key, weights_prefix, adapter, trust_checkpoint, text, text_pair, label, quoting,
            class_map, class_order, max_length, keep.

    Raises:
        UsageError: options, model, tokenizer and data do not fit together.
        TypeError: there is no such option.
    """

    name = "text-classification"
    wants_workers = True
    on_request = ON_REQUEST

    @with_keywords(TextClassificationKeywords, TextClassificationOptions)
    def __init__(
        self,
        *,
        model: Model,
        data: str | Path | PythonRows,
        tokenizer: str | Path | None = None,
        metrics: Sequence[str] = (),
        cache: DataCache | None = None,
        **options: Unpack[TextClassificationKeywords],
    ) -> None:
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            TextClassificationOptions(metric=(), **options)  # type: ignore[arg-type]
        settings = of_python(TextClassificationOptions, options, metrics, model=Path(), data=Path())
        super().__init__(model, tokenizer, USE, settings)
        self._class_map = None if settings.class_map is None else Path(settings.class_map)
        self._class_order = settings.class_order
        self._labeler = FolderLabels(
            class_map=self._class_map, order=settings.class_order, num_classes=None, of_weights=None
        )
        asked = (settings.text, settings.text_pair, settings.label)
        of_table = TableOptions(settings.keep, settings.quoting)

        def read() -> DataRows:
            return read_rows(data, _choose(data, *asked), _EXAMPLE, of_table)

        key = ("texts", path_at(data), *asked, of_table) if isinstance(data, str | Path) else None
        self._rows: DataRows = read() if key is None else (cache or DataCache()).once(key, read)
        pairs = 2 if settings.text_pair or (settings.text is None and _pair_in(self._rows.columns)) else 1
        self._columns = self._rows.columns[:pairs]
        self._label = self._rows.columns[pairs]
        encoder, facts = load_tokenizer(self._model.folder, USE)
        self._vocabulary = encoder
        length = settings.max_length or min(_MOST_TOKENS, facts.most_tokens or _MOST_TOKENS)
        special = encoder.num_special_tokens_to_add(pairs == 2)
        if length <= special:
            raise UsageError(
                f"--max-length {length} leaves no room beside the {special} tokens that the tokenizer adds "
                "to a text. Give a larger one."
            )
        self._encoder = TextEncoder(encoder, facts, max_length=length)
        self._dataset = EncodedTexts(self._rows, self._columns, self._encoder)
        self._quoting, self._metric_names = settings.quoting, settings.metric
        # How many classes the model tells apart, 1 for a regression; both are known when it is built.
        self._num_classes: int | None = None
        self._labels: Labels | None = None
        self._targets = torch.zeros(0)

    @property
    def _is_regression(self) -> bool:
        assert self._num_classes is not None, "build_model comes first"
        return self._num_classes == 1

    @property
    def rows(self) -> tuple[str, ...]:
        """All that any metric reads, so that each can be computed later; and whether the text was cut."""
        if self._is_regression:
            return ("target", "prediction", "squared_error", "absolute_error", "truncated")
        of_logits = ("confidence", "loss", "top", "rank", "nan_logits", "inf_logits")
        return ("target", "prediction", *of_logits, "truncated")

    def dataset(self) -> EncodedTexts:
        return self._dataset

    def collate(self, samples: Any) -> dict[str, Any]:
        batch = self._encoder.collate(samples)
        if self._is_regression:  # its numbers are float64, and met on the host
            return batch
        return {**batch, "targets": self._targets[[sample["row"] for sample in samples]]}

    def _try(self, model: nn.Module, device: torch.device) -> None:
        known = known_tokens(self._model.folder, model, self._vocabulary)
        self._encoder.facts = replace(self._encoder.facts, known=known)
        config, pad = getattr(model, "config", None), self._encoder.facts.pad_id
        refuse_problem_type(config, f"the model in {self._model.folder}")
        try:
            outputs = self._try_out(model, "a")
        except UsageError as error:
            if getattr(config, "pad_token_id", pad) is not None:
                raise
            raise UsageError(
                f"{error}. Its config has no pad_token_id: set it to {pad}, as the tokenizer has it"
            ) from error
        self._check_padding(outputs[1], self._try_out(model, "a " * _PADDED_TO)[1])
        try:
            self._try_out(model, "a " * self._encoder.max_length)
        except UsageError as error:
            raise UsageError(f"{error}. {shorter(model)}") from error
        refuse_probabilities(f"the model {self._model.description()['model']}", outputs)
        self._num_classes = count = outputs.shape[1]
        if count == 1:
            if self._class_map is not None or self._class_order is not None:
                raise UsageError("--class-map and --class-order do not apply to a regression: leave them out")
            self._targets = number_targets(self._rows, self._label)
        else:
            self._labels, self._targets = self._classes_of_rows(names_of_classes(model, count), count)

    def _classes_of_rows(self, names: Sequence[str], count: int) -> tuple[Labels, Tensor]:
        """What the labels are, and the class of each row, int64 (rows,)."""
        rows, column = self._rows, self._label
        table_labels = TableLabels(rows.where, column, rows.class_names.get(column, ()))
        places = [table_labels.place(row, value) for row, value in enumerate(rows.column(column))]
        self._labeler.known = KnownClasses(of="the model", names=tuple(names)) if names else None
        labels, classes = table_labels.decide(self._labeler, of_model=True)
        targets = torch.tensor(classes)[places]
        refuse_other_names(rows.of, labels, self._labeler.known, targets.numpy(), rows.kept)
        if LEFT_OUT in classes:
            raise UsageError(f"--class-map {self._class_map} leaves labels out: leave out their rows instead")
        check_classes(
            labels,
            f"the model in {self._model.folder}",
            count,
            expected=labels.num_classes,
            largest=max(classes),
            class_map=self._class_map,
        )
        return labels, targets

    def _check_padding(self, alone: Tensor, filled: Tensor) -> None:
        """Refuse a model that reads what fills a text up: its logits would be those of its company."""
        if (difference := (alone - filled).abs().max()) > 1e-5 + 1e-2 * alone.abs().max():
            raise UsageError(
                f"the model in {self._model.folder} reads padding: the logits of a text differ by "
                f"{difference:.2g} when it is padded to the length of another. Its forward has to use "
                "attention_mask, and its pad_token_id has to be the tokenizer's."
            )

    def _try_out(self, model: nn.Module, text: str) -> Tensor:
        """The logits of a text and of a short one, which is filled up."""
        texts = [self._encoder.encode([each] * len(self._columns)) for each in (text, "a")]
        batch = self._encoder.collate(texts)
        tokens = len(texts[0]["ids"])
        logits = try_out(self._model.folder, lambda: self.forward(model, batch), tokens)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 2:
            raise UsageError(
                f"the model in {self._model.folder} returned {describe(logits)} for 2 texts, expected "
                "logits of shape (2, classes), or an output that has them as .logits."
            )
        return logits

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """The logits of all texts, (texts, classes), in their order; a group is one call of the model."""
        outputs = [model(**group) for group in batch["groups"]]
        logits = [getattr(output, "logits", output) for output in outputs]
        if not all(isinstance(each, Tensor) and each.ndim == 2 for each in logits):
            return outputs[0]
        return torch.cat(logits)[batch["places"]]

    @keeps_late
    def observe(self, outputs: Tensor, batch: dict[str, Any]) -> Mapping[str, Tensor]:
        """What the metrics of classification read; of a regression the number."""
        work = {name: batch[name] for name in TextWork.columns}
        if self._is_regression:
            return {"prediction": outputs[:, 0].float(), **work}
        return observed_logits(
            outputs, batch["targets"], _TOP, self.requested, observe=self.observe, others=work
        )

    @keeps_late
    def postprocess(self, columns: Mapping[str, Tensor], samples: range) -> Mapping[str, Column]:
        if not self._is_regression:
            return columns
        target = self._targets[samples.start : samples.stop]
        error = columns["prediction"].double() - target
        return {**columns, "target": target, "squared_error": error.square(), "absolute_error": error.abs()}

    def metrics(self) -> list[Metric | RowMetric]:
        assert self._num_classes is not None, "build_model comes first"
        return _metrics(self._metric_names or _default_metrics(self._num_classes), self._num_classes)

    def data_warnings(self) -> list[str]:
        one = (
            self._is_regression and len(self._targets) > 1 and bool((self._targets == self._targets[0]).all())
        )
        warning = (
            f"all labels are {self._targets[:1].sum().item():g}: where they are withheld, as in GLUE's test "
        )
        warning += "splits (-1), give a split that has them"
        return [*super().data_warnings(), *[warning][:one]]

    def labels_used(self) -> dict[str, Any]:
        if self._labels is None or self._num_classes is None:
            return {}
        return self._labels.to_json(self._num_classes)

    def texts(self, rows: Mapping[str, Any], first: int) -> Mapping[str, Sequence[str | None]]:
        """The names of each text's class and of the predicted one; nothing where no class has a name."""
        return {} if self._labels is None else names_of(self._labels, rows)

    def findings(self, count: int) -> dict[str, list[str]]:
        """Texts that are written as a missing one is."""
        missing = _MISSING.intersection
        rows = zip(self._rows.ids[:count], self._rows.values, strict=False)
        return {_WRITTEN: [name for name, row in rows if missing(row[: len(self._columns)])]}

    def show(self, row: Mapping[str, Any]) -> Any:
        values = self._rows.values[place_of(self._dataset, row)]
        texts = {name: str(text) for name, text in zip(self._columns, values, strict=False)}
        return texts if len(texts) > 1 else texts[self._columns[0]]

    def options(self) -> dict[str, Any]:
        return {
            **self._model.options(),
            "data": self._rows.source,
            "text": self._columns[0],
            "text_pair": self._columns[1] if len(self._columns) > 1 else None,
            "label": self._label,
            "quoting": self._quoting,
            "class_map": None if self._class_map is None else str(self._class_map.absolute()),
            "class_order": self._class_order,
            "max_length": self._encoder.max_length,
            "metric": [metric.name for metric in self.metrics()],
        }

    def description(self) -> dict[str, str]:
        labels = "numbers, as a regression" if self._labels is None else self._labels
        return {
            **self._model.description(),
            "data": self._rows.of,
            "texts": f"{' and '.join(self._columns)}, at most {self._encoder.max_length} tokens",
            "labels": f"{self._label}, {labels}",
        }

    def fingerprint(self) -> dict[str, Any]:
        """What tokens, logits and classes depend on, besides the weights."""
        return {
            "config": self._model.fingerprint(),
            "tokenizer": self._encoder.fingerprint(),
            "max_length": self._encoder.max_length,
            "texts": len(self._columns),
            "num_classes": self._num_classes,
            "classes_of_labels": None if self._labels is None else self._labels.fingerprint(),
        }


def _pair_in(columns: Sequence[str]) -> tuple[str, str] | None:
    """The usual names of a pair's columns, where both are there."""
    return next((pair for pair in _PAIRS if {*pair} <= {*columns}), None)


def _choose(data: Any, text: str | None, text_pair: str | None, label: str | None) -> Choose:
    """Find the columns of the texts and of the label."""
    of = data if isinstance(data, str | Path) else f"the {type(data).__name__}"

    def choose(columns: Sequence[str]) -> tuple[str, ...]:
        first, second = text, text_pair
        if text is None and text_pair is None and (pair := _pair_in(columns)):
            first, second = pair
        texts = [column_of(of, columns, first, _TEXTS, "--text", "the texts")]
        if second is not None:
            texts.append(column_of(of, columns, second, (), "--text-pair", "the second texts"))
        return (*texts, column_of(of, columns, label, _LABELS, "--label", "the labels"))

    return choose


def _default_metrics(num_classes: int) -> tuple[str, ...]:
    if num_classes == 1:
        return ("pearson", "spearman", "mse", "mae")
    of_two = ["binary_f1"] if num_classes == 2 else []
    counts = ["confusion"] if num_classes <= LARGEST_CONFUSION else []
    return ("accuracy", "f1", *of_two, "mcc", "loss", "ece", *counts, "nonfinite_logits")


def _metrics(names: Sequence[str], num_classes: int) -> list[Metric | RowMetric]:
    default = [_metric(name, num_classes) for name in _default_metrics(num_classes)]
    names = [name for name in names if name != TextWork.name]
    return [*by_names(names, default, lambda name: _metric(name, num_classes)), TextWork()]


def _metric(name: str, num_classes: int) -> Metric | RowMetric:
    if num_classes == 1:
        return regression_metric(name)
    if name != "binary_f1":
        return classification_metric(name, num_classes, ["binary_f1"] if num_classes == 2 else [])
    if num_classes != 2:
        raise UsageError(
            f"metric 'binary_f1' needs two classes, found {num_classes}: ask for 'f1', the mean of all"
        )
    return BinaryF1(num_classes)


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> Sequence[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    return [metric for metric in _metrics(names, options["num_classes"]) if metric.name in names]
