"""The built-in tasks with their options; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dualeval.data.set_names import data_beside
from dualeval.errors import UsageError
from dualeval.models.weights_name import (
    check_weights_file,
    function_beside,
    is_path_of_weights,
    is_published_name,
    model_beside,
)
from dualeval.options.choices import (
    CLASS_ORDERS,
    DATA_FINGERPRINTS,
    IGNORED,
    QUOTINGS,
    SPLITS,
    check_choice,
    check_mean,
    check_std,
)
from dualeval.options.fields import check_fields, option

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.models.sources.source import ModelSource
    from dualeval.tasks import Task
    from dualeval.tasks.given_answers import GivenAnswers

_MODEL, _DATA, _IMAGES = "Model", "Data", "Images"
_TEXTS, _QUESTIONS, _TOKENS = "Texts", "Questions", "Tokens"
_ANSWERS = "A file of answers"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What all tasks with a model have."""

    # Set by each task, with its own help.
    model: Any = None
    weights: str | None = option(
        None, "Checkpoint, DEFAULT, IMAGENET1K_V1, random:SEED.", group=_MODEL, is_path=is_path_of_weights
    )
    weights_key: str | None = option(
        None, "Key of the state_dict in a checkpoint, such as model_ema.", group=_MODEL
    )
    weights_prefix: str | None = option(
        None, "Use only tensors with this name prefix, and remove the prefix.", group=_MODEL
    )
    trust_checkpoint: bool = option(
        False, "Open files that can run code: pickles, TorchScript, .pt2.", group=_MODEL
    )
    metric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def make(self, cache: DataCache | None = None, **of_python: Any) -> Task:
        """The task; models of one run share what is read with the cache."""
        from dualeval import tasks

        given = {**self._given(), **of_python}
        kind = getattr(tasks, type(self).__name__.removesuffix("Options"))
        task: Task = kind(metrics=given.pop("metric"), cache=cache, **given)
        return task

    def _given(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, kw_only=True)
class PictureOptions(ModelOptions):
    """What the tasks on pictures have."""

    download: bool = option(
        False, "Download the weights of --weights DEFAULT, IMAGENET1K_V1, ...", group=_MODEL
    )
    model_arg: tuple[str, ...] = option(
        (),
        "Argument of a factory, timm or torchvision model.",
        group=_MODEL,
        metavar="NAME=VALUE",
        is_repeated=True,
    )
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.download and not (self.weights and is_published_name(self.weights)):
            found = "is not given" if self.weights is None else f"is {self.weights}"
            raise UsageError(
                f"--download fetches weights that torchvision publishes, and --weights {found}. Give "
                "--weights DEFAULT or a name such as IMAGENET1K_V1, or leave --download out."
            )

    def check_paths(self) -> None:
        """Check that files are there, before torch is imported."""
        if self.weights and is_path_of_weights(self.weights) and Path(self.weights).suffix:
            check_weights_file(self.weights)

    def source(self) -> ModelSource:
        """Where the model comes from, by its name."""
        from dualeval.models.classifiers import arguments_of, source_of

        return source_of(self.model or "", arguments_of(self.model_arg), trust=self.trust_checkpoint)

    def fetch(self) -> None:
        """Fetch the weights, where that is wanted; one process a node does."""
        # Without data the task is refused: nothing is fetched for that.
        if self.download and self.model and self.weights and getattr(self, "data", None):
            self.source().download(self.weights)

    def _given(self) -> dict[str, Any]:
        from dualeval.models.classifiers import arguments_of

        given = super()._given()
        del given["download"]
        given["model_arguments"] = arguments_of(given.pop("model_arg"))
        return given


@dataclass(frozen=True, kw_only=True)
class ImageClassificationOptions(PictureOptions):
    """One class an image: class folders, a manifest, or a data set by name."""

    # What ``dualeval init`` writes for this task.
    start: ClassVar[Mapping[str, str]] = {
        "imports": "import torch; import torchvision",
        "model": "model = torchvision.models.resnet18(num_classes=10); "
        'model.load_state_dict(torch.load("checkpoint.pt", weights_only=True)); return model',
        "data": "val",
        "more": ', preprocessing="imagenet"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name; it imports torch."""
        from dualeval.metrics.classification import LINES

        return LINES

    model: str | None = option(
        None,
        "torchvision name, timm:NAME, hf:DIR, pkg.mod:fn, file.",
        group=_MODEL,
        metavar="NAME",
        resolve=model_beside,
    )
    data: str | Path | None = option(
        None,
        "Folder of class folders, manifest (.csv), or CIFAR10:DIR.",
        group=_DATA,
        resolve=data_beside,
        metavar="PATH",
    )
    split: str | None = option(
        None, "Part of a data set by name.", group=_DATA, choices=SPLITS, shown="test or val"
    )
    image_root: Path | None = option(
        None, "Folder that a manifest's paths are relative to.", group=_DATA, shown="the manifest's"
    )
    path_column: str | None = option(
        None, "A manifest's column of paths.", group=_DATA, shown="path, image, file, ..."
    )
    label_column: str | None = option(
        None, "A manifest's column of labels.", group=_DATA, shown="label, class, target, y"
    )
    quoting: str | None = option(
        None,
        "Quotation marks around a table's cells.",
        group=_DATA,
        choices=QUOTINGS,
        shown="standard; .tsv: asked for",
    )
    num_classes: int | None = option(
        None, "Number of classes, if data and weights do not define it.", group=_DATA, least=1
    )
    class_map: Path | None = option(None, "Class index of each folder or label: a JSON file.", group=_DATA)
    class_order: str | None = option(
        None,
        "Order of folders or labels: number puts 2 before 10.",
        group=_DATA,
        choices=CLASS_ORDERS,
        shown="known names first",
        metavar="name|number",
    )
    data_fingerprint: str = option(
        DATA_FINGERPRINTS[0],
        "Compare image files by size and ends, or by content.",
        group=_DATA,
        choices=DATA_FINGERPRINTS,
    )
    preprocessing: str | None = option(
        None,
        "none, imagenet or FILE.py:function.",
        group=_IMAGES,
        shown="the model's",
        resolve=function_beside,
    )
    resize: int | None = option(
        None, "Resize the shorter side to this many pixels.", group=_IMAGES, least=1, shown="the model's"
    )
    crop: int | None = option(
        None, "Crop a square of this side from the centre.", group=_IMAGES, least=1, shown="the model's"
    )
    interpolation: str | None = option(
        None, "nearest, bilinear, bicubic or lanczos.", group=_IMAGES, shown="the model's"
    )
    channels: Literal[1, 3] | None = option(
        None, "Channels of the images: 3 for RGB, 1 for grey.", group=_IMAGES, shown="3"
    )
    mean: tuple[float, ...] | None = option(
        None, "Mean of each channel.", group=_IMAGES, shown="the model's", also=check_mean
    )
    std: tuple[float, ...] | None = option(
        None, "Standard deviation of each channel.", group=_IMAGES, shown="the model's", also=check_std
    )

    def check_paths(self) -> None:
        """And that the data's folder is; what may be a name is left to the task."""
        if self.model is not None and ":" in self.model:
            return  # its library or module is named first
        super().check_paths()
        if self.data and ":" not in str(self.data) and not Path(self.data).suffix:
            from dualeval.data.class_folders import check_folder

            check_folder(Path(self.data))


def _same(name: str) -> Any:
    """A field of another task that is that of image classification."""
    found = next(each for each in fields(ImageClassificationOptions) if each.name == name)
    return field(default=found.default, metadata=found.metadata)


@dataclass(frozen=True, kw_only=True)
class SegmentationOptions(PictureOptions):
    """A class for each pixel: pictures and masks."""

    start: ClassVar[Mapping[str, str]] = {
        "imports": "import torch; from torchvision.models.segmentation import fcn_resnet50",
        "model": "net = fcn_resnet50(num_classes=5, weights=None, weights_backbone=None); "
        'net.load_state_dict(torch.load("net.pt", weights_only=True)); return net',
        "data": "val/img",
        "more": ', masks="val/masks", preprocessing="imagenet"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "iou": "intersection over union of each class, and the mean (mIoU)",
            "pixel_accuracy": "fraction of labelled pixels whose class is predicted",
            "mean_accuracy": "the same fraction for each class, and the mean",
            "dice": "Dice coefficient (F1) of each class, and the mean",
            "picture_iou": "mean IoU of each picture alone, averaged over pictures",
            "nonfinite_logits": "how many pictures have a NaN or an infinity among their logits",
            "pixel_check": "warnings of absent classes, ignored pixels and turned pictures; always included",
        }

    model: str = option(
        help="torchvision name, hf:DIR, pkg.mod:fn, file.", group=_MODEL, resolve=model_beside
    )
    data: Path = option(help="Folder of pictures, or a manifest (.csv).", group=_DATA)
    masks: Path | None = option(
        None, "Folder of their masks, of the same names.", group=_DATA, shown="the manifest's", metavar="DIR"
    )
    path_column: str | None = _same("path_column")
    mask_column: str | None = option(
        None, "A manifest's column of masks.", group=_DATA, shown="mask, label, ..."
    )
    quoting: str | None = _same("quoting")
    num_classes: int | None = option(
        None, "Number of classes, if the model does not tell.", group=_DATA, least=2
    )
    ignore_index: tuple[int, ...] | Literal["none"] | None = option(
        None,
        "Labels of pixels that do not count, or none.",
        group=_DATA,
        shown="255",
        fits=lambda value: value in (None, "none") or isinstance(value, tuple),
        expected="whole numbers with commas between, or none",
    )
    mask_values: str | None = option(
        None,
        "Class of each label: 0=0,255=1,7=none, or a JSON file.",
        group=_DATA,
        is_path=lambda text: "=" not in text,
        shown="the label",
    )
    reduce_labels: Literal["yes", "no"] | None = option(
        None, "Label 0 does not count, 1 is class 0.", group=_DATA, shown="the model's, else no"
    )
    class_names: str | None = option(
        None, "Names of the classes: a file, or a,b,c.", group=_DATA, is_path=lambda text: "," not in text
    )
    data_fingerprint: str = _same("data_fingerprint")
    preprocessing: str | None = _same("preprocessing")
    resize: int | None = _same("resize")
    interpolation: str | None = _same("interpolation")
    channels: Literal[1, 3] | None = _same("channels")
    mean: tuple[float, ...] | None = _same("mean")
    std: tuple[float, ...] | None = _same("std")

    def source(self) -> ModelSource:
        from dualeval.models.classifiers import arguments_of
        from dualeval.models.segmenters import segmenter_of

        return segmenter_of(self.model, arguments_of(self.model_arg), trust=self.trust_checkpoint)


# -- texts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextOptions(ModelOptions):
    """A model of texts with its weights; what is evaluated is a subclass's."""

    model: Path = option(
        help="Folder with a model and tokenizer of the transformers library.", group=_MODEL, metavar="DIR"
    )
    weights: str | None = option(
        None,
        "Checkpoint, or random:SEED.",
        group=_MODEL,
        is_path=is_path_of_weights,
        shown="in the model's folder",
    )
    trust_checkpoint: bool = option(
        False, "Read checkpoints that run code, such as pickled models.", group=_MODEL
    )


def _start(library_class: str, data: str) -> Mapping[str, str]:
    return {
        "imports": f"from transformers import {library_class}",
        "model": f'return {library_class}.from_pretrained("models/mine")',
        "data": data,
        "more": ', tokenizer="models/mine"',
    }


@dataclass(frozen=True, kw_only=True)
class TextClassificationOptions(TextOptions):
    """One class or one number a text or pair of texts, from a table."""

    start: ClassVar[Mapping[str, str]] = _start("AutoModelForSequenceClassification", "dev.csv")

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name; it imports torch."""
        from dualeval.metrics.classification import LINES

        return {
            **LINES,
            "binary_f1": "F1 of class 1, if there are two classes",
            "pearson": "Pearson's correlation of prediction and label (regression)",
            "spearman": "Spearman's rank correlation of prediction and label (regression)",
            "mse": "mean squared error (regression)",
            "rmse": "its square root (regression)",
            "mae": "mean absolute error (regression)",
            "r2": "coefficient of determination (regression)",
            "text_work": "computed tokens, and texts that were cut; always included",
        }

    data: Path = option(
        help="Table of texts and labels: .csv, .tsv, .jsonl or .parquet.", group=_DATA, metavar="FILE"
    )
    text: str | None = option(
        None, "Column of the texts.", group=_DATA, metavar="COLUMN", shown="text, sentence, ..."
    )
    text_pair: str | None = option(
        None, "Column of the second text of a pair.", group=_DATA, metavar="COLUMN", shown="sentence2, ..."
    )
    label: str | None = option(
        None, "Column of the labels.", group=_DATA, metavar="COLUMN", shown="label, ..."
    )
    quoting: str | None = _same("quoting")
    class_map: Path | None = _same("class_map")  # noqa: RUF009 (a field)
    class_order: str | None = _same("class_order")
    max_length: int | None = option(
        None,
        "Maximum tokens of a text or pair; longer ones are cut.",
        group=_TEXTS,
        least=1,
        shown="the tokenizer's, at most 512",
    )
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringOptions(TextOptions):
    """Answers in texts, in the format of SQuAD v1.1 and v2.0."""

    start: ClassVar[Mapping[str, str]] = _start("AutoModelForQuestionAnswering", "dev-v2.0.json")

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "exact_match": "percentage of questions whose answer is right",
            "f1": "mean F1 of the words of the answers, in percent",
            "answer_counts": "how many questions have an answer, and how many none (SQuAD v2.0)",
            "nonfinite_logits": "how many questions have a NaN or an infinity among their logits",
            "window_work": "computed windows and tokens; always included",
            "best_thresholds": "the null thresholds that give the best exact match and F1 (SQuAD v2.0)",
        }

    data: Path = option(help="Questions in the JSON format of SQuAD.", group=_DATA, metavar="FILE")
    max_length: int = option(
        384, "Maximum tokens of a window (question and text).", group=_QUESTIONS, least=1
    )
    stride: int = option(128, "Tokens by which windows overlap.", group=_QUESTIONS, least=0)
    n_best: int = option(20, "Best start and end positions of a window to pair.", group=_QUESTIONS, least=1)
    max_answer_length: int = option(30, "Maximum tokens of an answer.", group=_QUESTIONS, least=1)
    null_threshold: float | None = option(
        None, "Answer '' if the no-answer score leads by more than this.", group=_QUESTIONS, shown="0"
    )
    batch_size: int = 64


@dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions(TextOptions):
    """Perplexity of texts, multiple choice or greedy answers."""

    start: ClassVar[Mapping[str, str]] = _start("AutoModelForCausalLM", "texts")

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "perplexity": "exp of the mean loss of a token (texts)",
            "word_perplexity": "exp of the loss over the number of words (texts)",
            "byte_perplexity": "exp of the loss over the number of bytes (texts)",
            "bits_per_byte": "the loss in bits over the number of bytes (texts)",
            "acc": "fraction of rows whose likeliest choice is the answer (choices)",
            "acc_norm": "the same, with log-likelihoods divided by the characters of the choice",
            "acc_bytes": "the same, divided by its bytes",
            "exact_match": "fraction of rows whose greedy answer is right (prompts)",
            "cut_contexts": "rows whose context was too long and lost its beginning (choices, prompts)",
        }

    data: Path = option(
        help="Text file, folder of text files, or table (.jsonl, .parquet, .csv).",
        group=_DATA,
        metavar="PATH",
    )
    text: str | None = option(
        None, "Column of the documents.", group=_DATA, metavar="COLUMN", shown="by the columns"
    )
    quoting: str | None = _same("quoting")
    max_length: int | None = option(
        None,
        "Maximum tokens that the model sees at once.",
        group=_TOKENS,
        least=2,
        shown="the model's, at most 2048",
    )
    stride: int | None = option(
        None, "Tokens that each window predicts (texts).", group=_TOKENS, least=1, shown="max-length"
    )
    target_delimiter: str = option(" ", "Text between context and choice.", group=_TOKENS, shown="a space")
    max_new_tokens: int = option(32, "Maximum tokens of an answer (prompts).", group=_TOKENS, least=1)
    stop_at_newline: bool = option(False, "End an answer at the end of its line (prompts).", group=_TOKENS)
    ignore: tuple[str, ...] = option(IGNORED, "What to ignore in answers, or none (prompts).", group=_TOKENS)
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.ignore if self.ignore != ("none",) else ():
            check_choice("--ignore", each, (*IGNORED, "none"))


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


# -- the table -----------------------------------------------------------------------------------------

# By name. The module of a task has its name, with underscores, and the class that of its options without
# "Options"; the class is a name of ``dualeval.tasks``, too.
TASKS: dict[str, type] = {
    "image-classification": ImageClassificationOptions,
    "segmentation": SegmentationOptions,
    "text-classification": TextClassificationOptions,
    "question-answering": QuestionAnsweringOptions,
    "language-modeling": LanguageModelingOptions,
}
# Those whose answers can be had as a file, for ``dualeval score``.
SCORED: dict[str, type] = {"question-answering": GivenAnswersOptions}
