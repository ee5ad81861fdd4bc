"""ModelTask: a model, data and metrics of the caller's own, without a class of one's own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.columns.late import LateColumns, keeps_late
from dualeval.errors import UsageError, text_of
from dualeval.messages import did_you_mean
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.by_name import as_metrics, named, of_no_task, with_warning
from dualeval.metrics.classification import (
    ON_REQUEST,
    as_labels,
    classification_metric,
    classification_metrics,
    observed_logits,
)
from dualeval.metrics.means import Mean
from dualeval.metrics.metric import DEFAULT, by_names
from dualeval.metrics.texts import regression_metric
from dualeval.tasks import Task, refusals

_TOP = 5
_CALLED = {"collate": ("samples",), "forward": ("model", "batch"), "observe": ("outputs", "batch")}


class ModelTask(Task):
    """A model, data and metrics; what is not said is found out from what samples and outputs look like.

    A sample is an input, a pair (input, target), or a dict or named tuple that holds its target under
    ``target``, ``targets``, ``label``, ``labels`` or ``y``. The model gets the input; of a dict what its
    ``forward`` has arguments for, or the only tensor there is; a warning names the tensors that it does not
    get. Its outputs are a tensor, or hold one as ``logits``, ``out`` or ``prediction``.

    ==================================  ===================================================================
    outputs, target (n samples)         columns
    ==================================  ===================================================================
    floats (n, C), integers (n,)        those of ``observe_logits``: loss, confidence, prediction, target,
                                        ...; and logits and probabilities, where a metric reads them
    floats (n,) or (n, 1), numbers      prediction, target, error, absolute_error, squared_error
    (n,) or (n, 1)
    floats (n, C, ...), integers (n,    prediction (the class of each place) and target, (n, places)
    ...); or floats (n, ..., C)
    anything else                       prediction, and target where there is one
    ==================================  ===================================================================

    Args:
        model: a module, or a function without arguments that returns one (a class, for instance).
        data: what ``dualeval.wrap`` takes, or gives.
        metrics: metrics, or names of some: of classification, as ``top1`` and ``loss``; of a column, for its
            mean; or of TorchMetrics, as ``torchmetrics:MulticlassAUROC(num_classes=10)``. None:
            those of a classifier, mean absolute and root mean squared error, or the mean of every column with
            one number a sample.
        collate: makes a batch of a list of samples; torch's ``default_collate`` without it.
        forward: (model, batch) -> outputs.
        observe: (outputs, batch) -> columns by name, one row a sample.
        rows: the columns that are kept, besides those that metrics read; None for all.
        thread_safe: as of ``Task``.
        name: the task's name in results.

    Raises:
        UsageError: an argument is not as it has to be.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        data: Any,
        metrics: Sequence[Metric | RowMetric | str | Callable[..., Any]] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        observe: Callable[[Any, Any], Mapping[str, Any]] | None = None,
        rows: Sequence[str] | None = None,
        thread_safe: bool | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(model):
            raise UsageError(
                f"model is {refusals.a_kind(model)}: expected an nn.Module, or a function that returns one"
                + (
                    f". For a classifier of torchvision write torchvision.models.{model}(weights=...)"
                    if isinstance(model, str)
                    else ". Load such weights into your model: model.load_state_dict(...)"
                    if isinstance(model, Mapping)
                    else ""
                )
            )
        if metrics is not None and (isinstance(metrics, str) or not isinstance(metrics, Sequence)):
            example = repr(metrics) if isinstance(metrics, str) else "..."
            raise UsageError(
                f"metrics is a {type(metrics).__name__}: expected a list of metrics or names. "
                f"Write metrics=[{example}]"
            )
        if isinstance(rows, str):
            raise UsageError(f"rows is the text {rows!r}: expected a list of columns, as [{rows!r}]")
        for argument, function in (("collate", collate), ("forward", forward), ("observe", observe)):
            if function is not None and not callable(function):
                raise UsageError(f"{argument} is a {type(function).__name__}: expected a function, or None")
            refusals.check_call(argument, function, _CALLED[argument])
        if not isinstance(model, nn.Module):
            refusals.check_call("model", model, ())
        self._model = model
        self._data = data
        self._metrics = None if metrics is None else as_metrics(metrics, with_names=True)
        self._collate = collate
        self._forward = forward
        self._observe = observe
        self._rows = None if rows is None else tuple(rows)
        self._thread_safe = thread_safe
        # Now: a model that is divided over ranks is of another class afterwards.
        self._name = _name_of(model) if name is None else name
        # Those of the first samples: ``see`` takes note of them.
        self._columns: dict[str, Any] = {}
        self._classes: int | None = None
        self._asked: tuple[str, ...] = ()
        # Why the first outputs and targets are no logits and labels, for messages.
        self._why_no_logits: str | None = None
        self._left_out: list[str] = []  # tensors of samples that the model does not get
        self._first_look = threading.Lock()
        self._signature, self._bound = inspect.Signature(), -1

    @property
    def name(self) -> str:
        return self._name

    @property
    def thread_safe(self) -> bool | None:
        return self._thread_safe

    def dataset(self) -> Any:
        return self._data

    def collate(self, samples: Any) -> Any:
        if self._collate is not None:
            return self._collate(samples)
        try:
            return super().collate(
                [_with_tensors(each) if isinstance(each, Mapping) else each for each in samples]
            )
        except (TypeError, RuntimeError, ValueError) as error:  # ValueError: a byte order
            raise UsageError(
                f"torch's default_collate makes no batch of these samples: {text_of(error).rstrip('.')}. "
                "Give collate=, a function of a list of samples, or samples of tensors, numbers, arrays of "
                "this machine's byte order (array.astype(array.dtype.newbyteorder('='))), in pairs or dicts."
            ) from error

    def _collates_as_torch(self) -> bool:
        return self._collate is None and getattr(self.collate, "__func__", None) is ModelTask.collate

    def build_model(self, device: torch.device) -> nn.Module:
        model = self._model if isinstance(self._model, nn.Module) else self._model()
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{self.name}() returned {refusals.a_kind(model)}: expected an nn.Module. model= takes a "
                "module, or a function without arguments that returns one."
            )
        self._signature, self._bound = inspect.signature(model.forward), -1
        # Of this evaluation: the task may have had another one before.
        self._classes, self.requested = None, ()
        self._columns, self._asked, self._why_no_logits, self._left_out = {}, (), None, []
        return model

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if self._forward is not None:
            return self._forward(model, batch)
        inputs, _ = _input_and_target(batch)
        if isinstance(inputs, Mapping):
            return self._called_with(model, inputs)
        values = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        self._check_count(model, values)
        return model(*values)

    def _check_count(self, model: nn.Module, values: tuple[Any, ...]) -> None:
        """Check that the model's forward takes so many values, once."""
        if len(values) == self._bound:
            return
        try:
            self._signature.bind(*values)
            self._bound = len(values)
        except TypeError as error:
            count = "one value" if len(values) == 1 else f"{len(values)} values"
            of_numbers = len(values) > 1 and all(
                isinstance(each, Tensor) and each.ndim == 1 for each in values
            )
            hint = " If these are one list of numbers, make it a torch.tensor." if of_numbers else ""
            raise UsageError(
                f"the input of a sample is {count}, and {type(model).__name__}.forward takes "
                f"{self._signature}.{hint} {refusals.FORWARD}."
            ) from error

    def _called_with(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Call the model with those entries of a dict that it has arguments for."""
        takes = self._signature.parameters
        whole = any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in takes.values())
        tensors = [name for name, value in inputs.items() if isinstance(value, Tensor)]
        named = {name: inputs[name] for name in inputs if name in takes or (whole and name in tensors)}
        if named and all(name in named or not _is_required(kind) for name, kind in takes.items()):
            # An observe of the task's own gets the whole batch.
            observes = self._observe is None and type(self).observe is ModelTask.observe
            left_out = [name for name in tensors if name not in named and observes]
            # Another object would be taken for something that a batch decides.
            self._left_out = self._left_out if left_out == self._left_out else left_out
            return model(**named)
        if len(tensors) == 1:
            return model(inputs[tensors[0]])
        raise UsageError(
            f"the samples have {', '.join(inputs)}, and {type(model).__name__}.forward takes "
            f"({', '.join(map(str, takes.values()))}): which is which cannot be seen. {refusals.FORWARD}."
        )

    @keeps_late
    def observe(self, outputs: Any, batch: Any) -> Mapping[str, Any]:
        if self._observe is not None:
            return self._observe(outputs, batch)
        outputs = _tensor_of(outputs, batch)
        _, target = _input_and_target(batch)
        if isinstance(target, Tensor) and target.dtype in (torch.uint16, torch.uint32, torch.uint64):
            target = target.to(torch.int64)  # torch does not compute with these
        if not isinstance(target, Tensor):
            self._why_no_logits = refusals.why_no_target(target)
            return {"prediction": _at_least_single(outputs.flatten(1) if outputs.ndim > 1 else outputs)}
        if outputs.ndim and target.ndim and len(outputs) != len(target):
            raise UsageError(
                f"the model returned {len(outputs)} rows (shape {tuple(outputs.shape)}) for a batch of "
                f"{len(target)} samples, expected one row for each sample, in their order"
            )
        if self._why_no_logits is None:
            self._why_no_logits = refusals.why_no_classes(outputs, target)
        if _are_of_classes(outputs, target):
            if self._classes is None:
                self._count_classes(outputs)
            # A label that no class has is refused on the host: nobody waits for the device here.
            return observed_logits(
                outputs, target, _TOP, self.requested, observe=self.observe, any_label=True
            )
        if (at := _dimension_of_classes(outputs, target)) is not None:
            classes = outputs.argmax(at).to(torch.int32)
            return {"prediction": classes.flatten(1), "target": as_labels(target).flatten(1)}
        if outputs.is_floating_point() and outputs.numel() == target.numel() == len(target):
            prediction, target = _at_least_single(outputs.reshape(-1)), _at_least_single(target.reshape(-1))
            # Whole numbers of more than 2 bytes may be beyond 2**24, where float32 rounds them.
            exact = torch.float64 if target.itemsize > 2 else prediction.dtype
            error = prediction - (target.to(exact) if _is_whole(target) else target)
            return {
                "prediction": prediction,
                "target": target,
                "error": error,
                "absolute_error": error.abs(),
                "squared_error": error.double().square(),  # of 1e-23 or 1e20 a float32 has none
            }
        flat = {"prediction": outputs, "target": target}
        return {
            name: _at_least_single(column.flatten(1) if column.ndim > 1 else column)
            for name, column in flat.items()
        }

    def _count_classes(self, outputs: Tensor) -> None:
        """Note how many classes the first logits tell apart; looking at them waits for the device, once."""
        with self._first_look:
            if self._classes is None:
                refusals.refuse_probabilities(
                    "the model", outputs, f" {refusals.OBSERVE}, to evaluate the probabilities themselves."
                )
                self._classes = outputs.shape[1]

    @keeps_late
    def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        if self._classes is None or self._observe is not None:
            return columns
        targets = (columns.given if isinstance(columns, LateColumns) else columns)["target"]
        labels = targets.numpy()  # on the host, where a kernel of torch takes longer to be called
        if len(labels) and not 0 <= labels.min() <= labels.max() < self._classes:
            wrong = int(((targets < 0) | (targets >= self._classes)).nonzero()[0])
            raise UsageError(
                f"sample {samples[wrong]} has the label {int(as_labels(targets)[wrong])}, but the model has "
                f"{self._classes} classes (labels 0 to {self._classes - 1}). Give the labels of its "
                "training, without gaps, or a model with more classes."
            )
        return columns

    def see(self, columns: Mapping[str, Any], asked: Sequence[str]) -> Sequence[str]:
        self._columns = dict(columns)
        self._asked = tuple(asked)
        self.on_request = () if self._classes is None or self._observe is not None else ON_REQUEST
        return self._rows or tuple(self._columns)

    def metrics(self) -> list[Metric | RowMetric]:
        if self._metrics is None:
            metrics = self._default()
        else:
            metrics = by_names(self._metrics, self._known(), self._named)
        known = {metric.name for metric in metrics}
        return with_warning([*metrics, *self._asked_for(known)], {*self._columns, *self.on_request})

    def data_warnings(self) -> list[str]:
        left, takes = ", ".join(map(repr, self._left_out)), ", ".join(self._signature.parameters)
        text = f"the model does not get {left} of the samples: its forward takes {takes}. {refusals.FORWARD}"
        return [text] if left else []

    def _asked_for(self, known: Collection[str]) -> list[Metric | RowMetric]:
        """The metrics that the run asks for by name, and the task would not have made."""
        others = [name for name in self._asked if name not in {DEFAULT, *known, *self._columns}]
        if not self._known() or (self._classes is not None and "rank" not in self._columns):
            return []
        others = [name for name in others if not of_no_task([name])]
        return [each for each in by_names(others, self._known(), self._named) if each.name not in known]

    def _known(self) -> list[Metric | RowMetric]:
        """The default metrics of logits, and of numbers; none of other columns."""
        if "rank" in self._columns and self._classes is not None:
            return classification_metrics((), self._classes)
        return [*map(regression_metric, ("mae", "rmse"))] if "squared_error" in self._columns else []

    def _default(self) -> list[Metric | RowMetric]:
        if known := self._known():
            if self._classes is None and self._columns["target"].dtype == torch.bool:
                raise UsageError(refusals.ONE_LOGIT)
            return known
        prediction = self._columns.get("prediction")
        is_class = isinstance(prediction, Tensor) and prediction.dtype != torch.bool and _is_whole(prediction)
        is_class = is_class and _is_number(prediction)
        if is_class and self._observe is None and "target" in self._columns and not self._asked:
            raise UsageError(
                "the model returns one whole number for each sample, such as a class number, whose mean "
                "says nothing: return the logits, (samples, classes), or give metrics=[...] "
                "(docs/metrics.md)"
            )
        # The mean of the targets says nothing of the model.
        names = [name for name, column in self._columns.items() if _is_number(column) and name != "target"]
        if not names:
            why = "" if self._why_no_logits is None else f" {self._why_no_logits}"
            raise UsageError(
                f"the columns are {', '.join(self._columns)}, none with one number per sample: give "
                f"metrics=[...] (docs/metrics.md).{why}"
            )
        return [Mean(name) for name in names]

    def _named(self, name: str) -> Metric | RowMetric:
        if of_no_task([name]):
            return named(name, (), {*self._columns, *self.on_request})
        column = self._columns.get(name)
        if self._classes is not None and (column is None or "rank" in self._columns):
            return classification_metric(name, self._classes)
        if column is None and self._known():
            return regression_metric(name, self._columns)
        if column is None and self._observe is not None:
            raise UsageError(
                f"there is no metric {name!r} here: default metrics read columns that observe replaces by "
                f"{', '.join(self._columns)}. Name one of these, or leave observe out and write a function "
                "of prediction and target: metrics=['default', worst], with def worst(prediction, target): "
                f"... (docs/metrics.md).{did_you_mean(name, self._columns)}"
            )
        if column is None or not _is_number(column):
            why = "" if self._why_no_logits is None else f" {self._why_no_logits}"
            raise UsageError(
                f"there is no metric {name!r} here: a name means a column with one number per sample "
                f"(columns: {', '.join(self._columns)}), or, where the outputs are logits, a metric of "
                f"classification.{why} Give a metric (docs/metrics.md)."
            )
        return Mean(name)

    def fingerprint(self) -> Mapping[str, Any]:
        # Model, data, metrics and functions are looked at by themselves; the name is not what it depends on.
        return {}

    def options(self) -> Mapping[str, Any]:
        return {} if self._classes is None else {"num_classes": self._classes}

    def sources(self) -> Sequence[Any]:
        functions = (self._collate, self._forward, self._observe, self._model)
        return [each for each in functions if each is not None and not isinstance(each, nn.Module)]

    def description(self) -> Mapping[str, str]:
        return {"model": self.name, "data": getattr(self._data, "kind", type(self._data).__name__)}


def _name_of(model: Any) -> str:
    """The name of a model's class, before ``fully_shard`` where that was called, or of what makes it."""
    if not isinstance(model, nn.Module):
        return str(getattr(model, "__name__", type(model).__name__))
    names = [kind.__name__ for kind in type(model).__mro__]
    return names[names.index("FSDPModule") + 1] if "FSDPModule" in names else names[0]


def _with_tensors(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample whose lists of numbers are tensors: ``default_collate`` would make lists of columns."""
    return {name: torch.tensor(value) if _is_list(value) else value for name, value in sample.items()}


def _is_list(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, (bool, int, float)):
            return True
    return False


def _input_and_target(batch: Any) -> tuple[Any, Any]:
    """Input and target of a batch; None where there is no target."""
    if isinstance(batch, tuple) and len(batch) > 1 and {*refusals.TARGETS} & {*getattr(batch, "_fields", ())}:
        named, target = _input_and_target(batch._asdict())  # type: ignore[attr-defined]
        return (*named.values(),)[0] if len(named) == 1 else named, target
    if isinstance(batch, Mapping):
        targets = [name for name in batch if name in refusals.TARGETS]
        if len(targets) > 1:
            raise UsageError(
                f"the samples have {' and '.join(map(repr, targets))}, both names of a target: remove one, "
                "or give forward= and observe="
            )
        inputs = {name: value for name, value in batch.items() if name not in targets}
        return inputs, batch[targets[0]] if targets else None
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if len(batch) == 1:
        return batch[0], None
    if len(batch) != 2:
        raise UsageError(
            f"the samples are {len(batch)} values, expected an input, or a pair (input, target). "
            f"{refusals.FORWARD}; {refusals.OBSERVE[0].lower()}{refusals.OBSERVE[1:]}."
        )
    return batch[0], batch[1]


def _is_required(parameter: inspect.Parameter) -> bool:
    of_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in of_all


def _tensor_of(outputs: Any, batch: Any) -> Tensor:
    """The tensor that a model has returned, or what holds it."""
    if isinstance(outputs, Tensor):
        return outputs
    for name in refusals.OUTPUTS:
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(outputs, (tuple, list)) and len(outputs) == 1 and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise refusals.no_tensor(outputs, batch)


def _is_whole(target: Tensor) -> bool:
    return not (target.is_floating_point() or target.is_complex())


def _at_least_single(column: Tensor) -> Tensor:
    """Half precision as float32: nothing is lost, a square has room, and Parquet has no bfloat16."""
    return column.float() if column.dtype in (torch.float16, torch.bfloat16) else column


def _are_of_classes(outputs: Tensor, target: Tensor) -> bool:
    # One output a sample tells no classes apart.
    is_of_samples = outputs.ndim == 2 and outputs.shape[1] > 1 and target.ndim == 1
    return outputs.is_floating_point() and is_of_samples and _is_whole(target)


def _dimension_of_classes(outputs: Tensor, target: Tensor) -> int | None:
    """Which dimension of the outputs is that of classes, where each place of a sample has a label."""
    if outputs.ndim != target.ndim + 1 or not _is_whole(target) or target.ndim < 2:
        return None
    fitting = {
        dimension
        for dimension in (1, outputs.ndim - 1)
        if outputs.shape[:dimension] + outputs.shape[dimension + 1 :] == target.shape
    }
    if len(fitting) > 1:
        raise UsageError(
            f"the outputs have the shape {tuple(outputs.shape)} and the targets {tuple(target.shape)}: "
            f"whether the classes are dimension 1 or {outputs.ndim - 1} of the outputs cannot be seen. "
            f"{refusals.OBSERVE}, as "
            "lambda outputs, batch: {'prediction': outputs.argmax(1), 'target': batch[1]}"
        )
    return fitting.pop() if fitting else None


def _is_number(column: Any) -> bool:
    return isinstance(column, Tensor) and column.ndim == 1
