"""Image classifiers of the transformers library, from a local folder: hf:DIR."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from dualeval.data.labels import KnownClasses
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.models import published
from dualeval.models.sources.processors import PROCESSOR, preprocessing_of_folder
from dualeval.models.sources.source import (
    Loading,
    ModelSource,
    WeightsSource,
    refuse_arguments,
    weights_of_file,
)
from dualeval.models.transformers_folder import (
    CONFIG,
    LOCAL,
    config_of,
    load_pretrained,
    reading,
    refuse_adapter,
    refuse_foreign_kernels,
    refuse_problem_type,
    task_of,
    transformers_for,
)
from dualeval.models.weights import OtherClasses, is_published_name

PREFIX = "hf:"
_WHAT = "--model hf:DIR"
_UNNAMED = "LABEL_"
# So many of 1,000 first names are those that torchvision has, in lists of ImageNet's classes in use.
_LEAST_EQUAL = 900


class TransformersModel(ModelSource):
    """A folder as ``save_pretrained`` writes it, with the model and its image processor."""

    needs_weights = False
    # What the library calls such models, and what people do.
    kind, forms = "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"
    noun, trained_for = "image classifier", "image classification"

    def check(self) -> None:
        refuse_arguments(self.name, self.arguments, f"because its {CONFIG} says what it is made of")
        self._folder = Path(self.name.removeprefix(PREFIX))
        transformers_for(_WHAT)
        refuse_adapter(self._folder)
        self._require(CONFIG)
        self._config = config_of(self._folder)
        refuse_foreign_kernels(self._config, self._folder)
        self._read_config()
        self._require(PROCESSOR)

    def _read_config(self) -> Any:
        """The library's configuration, of a model that has a form for images and classes."""
        transformers = transformers_for(_WHAT)
        with self._reading("configuration"):
            config = transformers.AutoConfig.from_pretrained(self._folder, **LOCAL)
        known = getattr(transformers, self.forms)
        made = ", ".join(self._config.get("architectures") or ()) or config.model_type
        if type(config) not in known:
            raise UsageError(
                f"--model {self.name} is {made}, expected an {self.noun}.{task_of(self._folder)}"
            )
        return config

    def _require(self, file: str) -> None:
        if (self._folder / file).is_file():
            return
        fault = "does not exist" if not self._folder.exists() else f"holds no {file}"
        raise UsageError(
            f"--model {self.name}: {self._folder} {fault}. Expected a local folder with the model and its "
            "image processor, as save_pretrained of both writes it; 'hf download NAME --local-dir DIR' "
            "fetches one."
        )

    def _reading(self, what: str) -> AbstractContextManager[None]:
        return reading(self._folder, f"--model {self.name} holds no {what}")

    @property
    def identity(self) -> str:
        return f"{PREFIX}{self._config.get('model_type')}"

    def find_weights(self, weights: str | None) -> WeightsSource:
        if weights is None:
            return WeightsSource(text="", path=self._folder)
        if is_published_name(weights):
            raise UsageError(
                f"--weights {weights}: the weights of --model {self.name} are in that folder. Leave "
                "--weights out."
            )
        return weights_of_file(weights)

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        self._check_classes(num_classes)
        kind = getattr(transformers_for(_WHAT), self.kind)
        config = self._read_config()
        with self._reading(self.noun):
            model: nn.Module = kind.from_config(config, trust_remote_code=False).float()
        return model

    def load(self, weights: WeightsSource, num_classes: int | None, loading: Loading) -> nn.Module:
        if weights.path != self._folder:
            return super().load(weights, num_classes, loading)
        self._check_classes(num_classes)
        kind = getattr(transformers_for(_WHAT), self.kind)
        with self._reading(self.noun):
            model, loaded = load_pretrained(kind, self._folder, self.trained_for)
        loading.on_load(loaded)
        return model

    def _check_classes(self, num_classes: int | None) -> None:
        config = self._read_config()
        refuse_problem_type(config, f"--model {self.name}")
        classes = int(config.num_labels)
        if num_classes is not None and num_classes != classes:
            raise OtherClasses(f"by its {CONFIG}, the model {self.name} is", classes, num_classes)

    def preprocessing(self, weights: WeightsSource | None = None) -> Preprocessing:
        """That of the folder's image processor."""
        with self._reading("image processor"):
            return preprocessing_of_folder(self._folder, self.name)

    def preprocessing_origin(self, weights: WeightsSource | None = None) -> str:
        return f"the folder's {PROCESSOR}"

    def known_classes(self, weights: WeightsSource) -> KnownClasses | None:
        """The names in ``id2label``; None where nobody has named them."""
        entries = self._config.get("id2label") or {}
        names = tuple(str(entries.get(str(index), entries.get(index))) for index in range(len(entries)))
        if not names or all(name.startswith(_UNNAMED) for name in names):
            return None
        imagenet = published.imagenet_classes()
        # Its lists have several names for a class: "tench, Tinca tinca".
        first = [name.partition(",")[0].lower() for name in names]
        equal = sum(one == other.lower() for one, other in zip(first, imagenet.names, strict=False))
        is_imagenet = len(names) == len(imagenet.names) and equal >= _LEAST_EQUAL
        return KnownClasses(of=self.name, names=names, wnids=imagenet.wnids if is_imagenet else ())
