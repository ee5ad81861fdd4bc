"""Classifiers of the timm library: timm:NAME."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dualeval.data.labels import KnownClasses
from dualeval.data.preprocessing import INTERPOLATIONS, Preprocessing
from dualeval.errors import DualevalError, UsageError
from dualeval.messages import nearest
from dualeval.models import published
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.sources.source import Loading, ModelSource, WeightsSource, weights_of_file
from dualeval.models.weights import OtherClasses, is_published_name
from dualeval.vision_library import torchvision

PREFIX = "timm:"
_IMAGENET_CLASSES = 1000
_DEFAULT = "DEFAULT"
# Of a repository of the hub.
_FILE = "model.safetensors"
# What is said elsewhere than in --model-arg.
_SET_BY = {
    "pretrained": "--weights",
    "checkpoint_path": "--weights",
    **dict.fromkeys(("pretrained_cfg", "pretrained_cfg_overlay"), "--weights, --resize, --mean and so on"),
    "cache_dir": "the environment variable HF_HUB_CACHE",
}


class TimmModel(ModelSource):
    """A model of timm by its name, with or without the tag of its weights: resnet50, resnet50.a1_in1k.

    Preprocessing is that of the model's pretrained configuration in timm, whatever the weights.
    """

    publishes_weights = True

    def check(self) -> None:
        for name in [argument for argument in self.arguments if argument in _SET_BY]:
            raise UsageError(f"--model-arg {name}: this is set by {_SET_BY[name]}. Leave it out.")
        self._name = self.name.removeprefix(PREFIX)
        timm = _timm()
        architecture, _, tag = self._name.partition(".")
        if not timm.is_model(architecture):
            hint = nearest(self.name, [PREFIX + other for other in timm.list_models()], most=5)
            raise UsageError(
                f"--model {self.name}: timm {timm.__version__} has no model {architecture!r}.{hint} Python "
                "lists them: timm.list_models('*resnet*')."
            )
        try:
            config = timm.get_pretrained_cfg(self._name)
        except RuntimeError as error:  # what it raises for a tag that it does not know
            raise UsageError(
                f"--model {self.name}: timm {timm.__version__} has no weights {tag!r} for {architecture}, "
                f"but {', '.join(timm.list_pretrained(f'{architecture}.*')) or 'none at all'}."
            ) from error
        self._config: dict[str, Any] = {} if config is None else config.to_dict()

    def find_weights(self, weights: str | None) -> WeightsSource:
        assert weights is not None, "a model without weights of its own"
        if not is_published_name(weights):
            return weights_of_file(weights, f"timm's weights for {self.name}: {_DEFAULT}.")
        self._check_published(weights)
        path = self._cached()
        if path is None:
            raise UsageError(
                f"--weights {weights}: the weights of {self.name} ({self._config['hf_hub_id']}) are not in "
                "the local cache. Add --download to fetch them."
            )
        return WeightsSource(text=weights, path=path, entry=f"timm's weights of {self._full_name}")

    @property
    def _full_name(self) -> str:
        tag = self._config.get("tag")
        return f"{self._config.get('architecture', self._name)}{'.' + tag if tag else ''}"

    def _check_published(self, weights: str) -> None:
        """Refuse names of other libraries, and weights that are in no plain state_dict."""
        if weights != _DEFAULT:
            raise UsageError(
                f"--weights {weights}: {self.name} has no weights of this name. Give --weights {_DEFAULT}; "
                "others have a tag after the model's name, as timm:resnet50.a1_in1k."
            )
        if not self._config.get("hf_hub_id") or not self._config.get("num_classes"):
            raise UsageError(
                f"--weights {_DEFAULT}: timm publishes no weights with a classifier for {self.name} on the "
                f"hub (url: {self._config.get('url') or 'none'}). Choose another tag, or give a state_dict "
                "file."
            )

    def _cached(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self._config["hf_hub_id"], _FILE)
        return Path(cached) if isinstance(cached, str) else None

    def download(self, weights: str) -> None:
        self._check_published(weights)
        if self._cached() is not None:
            return
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(self._config["hf_hub_id"], _FILE)
        except (OSError, RuntimeError, ValueError) as error:  # no network, or no such file
            message = f"the weights of {self.name} cannot be fetched ({_FILE}): {error}"
            raise DualevalError(message) from error

    def create(self, num_classes: int | None, *, entry: Any = None, **options: Any) -> nn.Module:
        classes = {} if num_classes is None else {"num_classes": num_classes}
        with self.blaming_arguments(TypeError, ValueError, AssertionError, RuntimeError):
            model = _timm().create_model(self._name, **classes, **self.arguments, **options)
        assert isinstance(model, nn.Module)
        return model

    def load(self, weights: WeightsSource, num_classes: int | None, loading: Loading) -> nn.Module:
        if weights.entry is None:
            return super().load(weights, num_classes, loading)
        assert weights.path is not None, "published weights are in a file"
        classes = int(self._config["num_classes"]) - int(self._config.get("label_offset") or 0)
        # Where they differ timm would leave the last layer as it was drawn.
        if num_classes is not None and num_classes != classes:
            raise OtherClasses(f"{weights.entry} are", classes, num_classes)
        if "in_chans" in self.arguments:
            raise UsageError("--model-arg in_chans: with --weights DEFAULT leave it out.")
        tensors = read_state_dict(weights.path, trust=self.trust).tensors
        # timm renames what its older files name otherwise, and refuses what then is missing.
        model: Any = self.create(
            None, pretrained=True, pretrained_cfg_overlay={"state_dict": dict(tensors), "source": ""}
        )
        config = {name: value for name, value in model.pretrained_cfg.items() if name != "state_dict"}
        model.pretrained_cfg = model.default_cfg = config
        return model  # type: ignore[no-any-return]

    def preprocessing(self, weights: WeightsSource | None = None) -> Preprocessing | None:
        """That of timm.data.create_transform for the model's pretrained configuration."""
        import timm.data

        if not self._config:
            return None
        return preprocessing_of(timm.data.resolve_data_config(pretrained_cfg=self._config), self.name)

    def preprocessing_origin(self, weights: WeightsSource | None = None) -> str:
        return f"timm's for {self._full_name}"

    def known_classes(self, weights: WeightsSource) -> KnownClasses | None:
        """ImageNet's, for published weights of its 1,000 classes."""
        if weights.entry is None or self._config.get("num_classes") != _IMAGENET_CLASSES:
            return None
        return published.imagenet_classes()


def _timm() -> Any:
    if importlib.util.find_spec("timm") is None:
        raise UsageError(
            "--model timm:NAME needs the timm library, which is not installed. Type: pip install "
            "'dualeval[timm]'"
        )
    # It imports torchvision, which does not always load by itself.
    torchvision()
    import timm

    return timm


# Without crop_mode timm takes the center.
DATA_CONFIG = ("input_size", "crop_pct", "interpolation", "mean", "std")


def preprocessing_of(config: Mapping[str, Any], name: str) -> Preprocessing:
    """Preprocessing as timm's data configuration says it."""
    channels, height, width = config["input_size"]
    interpolation = config["interpolation"]
    if interpolation not in INTERPOLATIONS or channels not in (1, 3):
        raise UsageError(
            f"--model {name}: timm prepares its images with {channels} channels and interpolation "
            f"{interpolation!r}; expected 1 or 3 channels and {', '.join(INTERPOLATIONS)}."
        )
    scaled = tuple(math.floor(side / config["crop_pct"]) for side in (height, width))
    mode = {"squash": "squash", "border": "inside"}.get(str(config.get("crop_mode")), "shorter")
    if mode == "shorter" and scaled[0] != scaled[1]:
        mode = "cover"
    mean = tuple(map(float, config["mean"]))
    return Preprocessing(
        resize=scaled[0],
        resize_width=None if scaled[0] == scaled[1] else scaled[1],
        crop=height,
        crop_width=None if height == width else width,
        interpolation=interpolation,
        channels=channels,
        mean=mean,
        std=tuple(map(float, config["std"])),
        resize_mode=mode,
        padding=tuple(round(255 * value) for value in mean) if mode == "inside" else None,
    )
