"""A whole model in a file: a TorchScript archive, or a program of torch.export (.pt2)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.contents import what_it_is
from dualeval.errors import UsageError
from dualeval.models.checkpoints.torch_files import SCRIPT, check_records, program_in
from dualeval.models.model_errors import first_line
from dualeval.models.sources.processors import preprocessing_beside
from dualeval.models.sources.source import Loading, ModelSource, WeightsSource, refuse_arguments
from dualeval.models.weights import PROGRAM_SUFFIXES

# What works otherwise in training, and the place of the argument that says so.
_MODES = {"batch_norm": 5, "instance_norm": 5, "dropout": 2, "native_dropout": 2, "alpha_dropout": 2}
_MODES |= {"_native_batch_norm_legit": 5, "native_batch_norm": 5, "feature_dropout": 2}


def is_path_of_program(name: str) -> bool:
    """Whether a value of ``--model`` is the path of a file with a model in it."""
    path = Path(name)
    return path.suffix in PROGRAM_SUFFIXES or (path.is_file() and path.suffix != ".py")


class ProgramModel(ModelSource):
    """A model that is a file with its code and its weights. Opening such a file can run code.

    A program of torch.export is exported for some batch sizes, often for one.
    """

    needs_weights = False
    needs_trust = True

    def check(self) -> None:
        refuse_arguments(self.name, self.arguments, "because its model was built when the file was written")
        self._path = Path(self.name)
        self._kind = _format_of(self._path)
        if not self.trust:
            raise UsageError(
                f"--model {self.name} is {self._kind}: such a file is a program, and opening it can run any "
                "code. If you trust who wrote it, add --trust-checkpoint."
            )
        # Of a program of torch.export, as far as it says: the least and the largest batch.
        self._batches: tuple[int, int | None] | None = None

    @property
    def identity(self) -> str:
        return self._kind

    def find_weights(self, weights: str | None) -> WeightsSource:
        if weights is not None:
            raise UsageError(
                f"--weights {weights}: the weights of --model {self.name} are in that file, {self._kind}. "
                "Leave --weights out."
            )
        return WeightsSource(text="", path=self._path)

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        try:
            with warnings.catch_warnings():
                # Both formats are deprecated by one of torch's versions or another, and are in use.
                warnings.simplefilter("ignore")
                check_records(self._path)
                if self._kind == SCRIPT:
                    script: Any = torch.jit.load(self._path, map_location="cpu")  # type: ignore[no-untyped-call]
                    # A frozen one has no mode left to set.
                    return script.eval() if hasattr(script, "training") else script  # type: ignore[no-any-return]
                program = torch.export.load(self._path)
                model = program.module()
        except (RuntimeError, ValueError, KeyError, OSError, EOFError, AssertionError) as error:
            reason = first_line(error)
            raise UsageError(f"--model {self.name} cannot be read as {self._kind}: {reason}") from error
        self._batches = _batches_of(program)
        if trained := sorted(set(_trained_in(program))):
            raise UsageError(
                f"--model {self.name} was exported in training mode (in it, {', '.join(trained)} work as in "
                "training). Export it again after model.eval()."
            )
        return _Program(model)

    def load(self, weights: WeightsSource, num_classes: int | None, loading: Loading) -> nn.Module:
        return self.create(num_classes)

    def build(
        self, weights: WeightsSource, num_classes: int | None, loading: Loading | None = None
    ) -> nn.Module:
        return self.create(num_classes)

    def carried_preprocessing(self, weights: WeightsSource, num_classes: int | None) -> tuple[Any, str]:
        return preprocessing_beside(self._path, self.name)

    def why_whole(self, weights: WeightsSource) -> str | None:
        return "a program holds its weights"

    def notes(self) -> list[str]:
        return [f"model: {self.name} is {self._kind}, which can run any code; --trust-checkpoint allows it"]

    @property
    def trial_images(self) -> int:
        """A size that the program takes."""
        least, largest = self._batches or (1, None)
        wanted = max(2, least)
        return wanted if largest is None else min(wanted, largest)

    def check_batches(self, batch_size: int, samples: int) -> None:
        if self._batches is None:
            return
        least, largest = self._batches
        sizes = [min(batch_size, samples), samples % batch_size or batch_size]
        wrong = [size for size in sizes if size < least or (largest is not None and size > largest)]
        if wrong:
            size = max(least, min(batch_size, largest or batch_size))
            rest = samples % size
            limit = f" and --limit {samples - rest}" if size <= samples and 0 < rest < least else ""
            accepted = least if least == largest else f"{least} to {largest or 'any number of'}"
            raise UsageError(
                f"--model {self.name} was exported for batches of {accepted} images, and this run has one of "
                f"{wrong[0]}. Give --batch-size {size}{limit}; or export it with a dynamic batch dimension "
                "(torch.export.Dim)."
            )


class _Program(nn.Module):
    """A program of torch.export as a module, which does what it did when it was exported."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        # Which sizes it takes, by symbols that differ from process to process: it decides no number.
        setattr(graph, "dualeval_identity_ignores", ("range_constraints",))  # noqa: B010 - a Module's are tensors
        self.graph = graph
        # Its modules say "training" whatever was exported, and refuse eval().
        for module in self.modules():
            module.training = False

    def forward(self, images: Tensor) -> Any:
        """What the program returns for images (batch, channels, height, width)."""
        return self.graph(images)

    def train(self, mode: bool = True) -> _Program:
        """Nothing: a graph has no modes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Program:
        with warnings.catch_warnings():
            # torch's own description of inputs and outputs is copied in a way that torch deprecates.
            warnings.simplefilter("ignore", FutureWarning)
            return _Program(copy.deepcopy(self.graph, memo))


def _format_of(path: Path) -> str:
    """Which of the two a file is."""
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(
            f"--model {path} {fault}. Expected a TorchScript archive or a torch.export program (.pt2)."
        )
    if (kind := program_in(path)) is not None:
        return kind
    what = what_it_is(path) or (
        "is neither a TorchScript archive (torch.jit.save) nor a torch.export program (torch.export.save). "
        "If it holds tensors, name the model, and give it with --weights"
    )
    raise UsageError(f"--model {path} {what}.")


def _batches_of(program: Any) -> tuple[int, int | None] | None:
    """The least and the largest batch that a program takes; None where its first input says nothing."""
    inputs = set(program.graph_signature.user_inputs)
    first = next(
        (node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs), None
    )
    value = None if first is None else first.meta.get("val")
    shape: tuple[Any, ...] = tuple(getattr(value, "shape", ()))
    if not shape:
        return None
    size = shape[0]
    if isinstance(size, int):
        return size, size
    limits = program.range_constraints.get(size.node.expr)
    if limits is None:
        return 1, None
    # An unbounded dimension has an infinity, or a number that stands for one.
    return max(1, int(limits.lower)), int(limits.upper) if limits.upper < 2**60 else None


def _trained_in(program: Any) -> Iterator[str]:
    """The operators of a program that work as in training."""
    for node in program.graph.nodes:
        name = str(getattr(node.target, "_schema", node.target)).partition("(")[0]
        kind = name.partition("::")[2].partition(".")[0]
        place = _MODES.get(kind)
        if place is None or len(node.args) <= place or node.args[place] is not True:
            continue
        if "dropout" not in kind or node.args[1] != 0:
            yield kind
