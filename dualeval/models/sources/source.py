"""Where image classifiers come from: one file a kind of source, and what all of them can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dualeval.data.labels import KnownClasses
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.models.weights import LoadedWeights, check_weights_file, is_published_name, seed_of, weights_at
from dualeval.process.status_line import doing

if TYPE_CHECKING:
    from dualeval.models.checkpoints.checkpoint import StateDict

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """Where a classifier's weights come from."""

    # The value of `--weights`; "" where it was left out.
    text: str
    # Of "random:SEED"; None for weights in a file.
    seed: int | None = None
    # The file or folder; None for random ones.
    path: Path | None = None
    # What a library publishes under a name, where the weights are that, whatever the file's name.
    entry: Any = None


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a state_dict is taken from a file."""

    # Where it lies in the file, as for `checkpoints.read_state_dict`.
    key: str | None = None
    # Of the names that are taken, as for `weights.load_state_dict`.
    prefix: str | None = None
    # Whether the values stay in the file, for a model that is built late.
    is_late: bool = False
    # Called with what was taken from a file that was given by its path.
    on_load: Callable[[LoadedWeights], None] = lambda loaded: None


class ModelSource(ABC):
    """A classifier by a value of ``--model``: how it is made, and what is known of it."""

    # Whether --weights has to be given.
    needs_weights = True
    # Whether a library publishes weights for models of this kind, under names such as DEFAULT.
    publishes_weights = False
    # Whether it comes out of a file that can run code.
    needs_trust = False

    def __init__(
        self, name: str, arguments: Mapping[str, Any] = NO_ARGUMENTS, *, trust: bool = False
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.trust = trust
        self.check()

    def check(self) -> None:
        """Check name and arguments; called when it is made."""
        return

    # -- what every source says --------------------------------------------------------------------

    @abstractmethod
    def find_weights(self, weights: str | None) -> WeightsSource:
        """Find out what a value of ``--weights`` stands for, and that it is there."""

    @abstractmethod
    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        """Make the model, with whatever weights its constructor gives it."""

    # -- what most have in common ------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """The model as a job's identity names it: without paths."""
        return self.name

    @property
    def trial_images(self) -> int:
        """How many images the model is tried on before the run."""
        return 2

    @property
    def shown(self) -> str:
        """The model as it is described to people, arguments among it."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name} ({arguments})" if arguments else self.name

    def rename(self, tensors: dict[str, Any], model: nn.Module) -> None:
        """Give tensors of a file that has older names the present ones, in place; here none has."""
        return

    def compare(self, model: nn.Module, state: StateDict) -> str | None:
        """Refuse a file that says that its model was made otherwise; else a warning of what is beside."""
        return None

    @contextmanager
    def blaming_arguments(self, *kinds: type[Exception]) -> Iterator[None]:
        """Say that ``--model-arg`` is why a model cannot be made, where there are arguments."""
        try:
            yield
        except kinds as error:
            if not self.arguments:
                raise
            raise UsageError(
                f"--model {self.name} cannot be made with --model-arg {' '.join(self.arguments)}: {error}"
            ) from error

    def load(self, weights: WeightsSource, num_classes: int | None, loading: Loading) -> nn.Module:
        """Make the model with weights that are in a file."""
        # Not for weights that are drawn at random, or shipped.
        from dualeval.models.checkpoints.checkpoint import read_state_dict
        from dualeval.models.loading import load_state_dict

        assert weights.path is not None, "weights are in a file or drawn"
        state = read_state_dict(weights.path, loading.key, trust=self.trust)
        model = self.create(num_classes, entry=weights.entry)
        warning = self.compare(model, state)
        self.rename(state.tensors, model)
        loaded = load_state_dict(model, state, prefix=loading.prefix, source=f"the weights {weights.text}")
        if warning is not None:
            loaded = replace(loaded, warning=". ".join(filter(None, [loaded.warning, warning])))
        if not is_published_name(weights.text):
            loading.on_load(loaded)
        return model

    def build(
        self, weights: WeightsSource, num_classes: int | None, loading: Loading | None = None
    ) -> nn.Module:
        """Make the model with its weights, on the CPU, in evaluation mode."""
        # A constructor draws values, also where they are overwritten.
        with torch.random.fork_rng(devices=[]):
            if weights.path is None:
                assert weights.seed is not None, "weights are in a file or drawn"
                torch.manual_seed(weights.seed)
                model = self.create(num_classes)
            else:
                with doing(f"reading {weights.path}"):
                    model = self.load(weights, num_classes, loading or Loading())
        model.eval()  # a train() of the user's may return nothing
        return model

    def build_late(
        self,
        weights: WeightsSource,
        num_classes: int | None,
        loading: Loading | None = None,
        *,
        note: Callable[[str], object],
    ) -> nn.Module:
        """As ``build``, without memory for the parameters: their values stay in the file."""
        from dualeval.models.late_building import late_or_whole

        late = replace(loading or Loading(), is_late=True)
        return late_or_whole(lambda: self.build(weights, num_classes, late), note, self.why_whole(weights))

    def why_whole(self, weights: WeightsSource) -> str | None:
        """Why a model is always built whole, in words that follow "because"; None where it is not."""
        return "its weights are drawn at random" if weights.path is None else None

    def preprocessing(self, weights: WeightsSource | None = None) -> Preprocessing | None:
        """What is done to the images of a model by this name; None where nobody has published it."""
        return None

    def preprocessing_origin(self, weights: WeightsSource | None = None) -> str:
        """Where ``preprocessing`` takes its values from, in words for people."""
        return "the default"

    def carried_preprocessing(self, weights: WeightsSource, num_classes: int | None) -> tuple[Any, str]:
        """The preprocessing that the user's model or its files name, unchecked, and where it stands."""
        return None, ""

    def known_classes(self, weights: WeightsSource) -> KnownClasses | None:
        """The names of the classes that model and weights tell apart; None where nobody knows."""
        return None

    def sources(self) -> list[Any]:
        """Functions and modules of the user's whose code belongs to the identity of a job."""
        return []

    def notes(self) -> list[str]:
        """What a reader should know of this model, in sentences."""
        return []

    def download(self, weights: str) -> None:
        """Fetch weights by their name into a cache of this machine; nothing where none can be fetched."""
        return

    def check_batches(self, batch_size: int, samples: int) -> None:
        """Check that the model takes batches of these sizes; called after the model was built."""
        return


def weights_of_file(weights: str, hint: str = "") -> WeightsSource:
    """Weights drawn at random or in a file, as most sources take them."""
    seed = seed_of(weights)
    if seed is not None:
        return WeightsSource(text=weights, seed=seed)
    check_weights_file(weights, hint)
    return WeightsSource(text=weights, path=weights_at(weights))


def refuse_arguments(name: str, arguments: Mapping[str, Any], why: str) -> None:
    """Refuse ``--model-arg`` where nothing takes it."""
    if arguments:
        raise UsageError(
            f"--model-arg {' '.join(arguments)}: {name} takes no arguments, {why}. Leave --model-arg out."
        )
