"""The keywords of the tasks' classes, for editors and type checkers.

Written by docs/option_types.py (``make tables``) from the dataclasses of the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Literal


class ImageClassificationKeywords(TypedDict, total=False):
    """Of the class ImageClassification."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    keep: Sequence[str]
    split: Literal["test", "train", "val"] | None
    image_root: str | Path | None
    path_column: str | None
    label_column: str | None
    label_key: str | None
    quoting: Literal["none", "standard"] | None
    num_classes: int | None
    class_map: str | Path | None
    class_order: Literal["name", "number"] | None
    data_fingerprint: Literal["ends", "content"]
    resize: int | None
    crop: int | None
    interpolation: str | None
    channels: Literal[1, 3] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None


class SegmentationKeywords(TypedDict, total=False):
    """Of the class Segmentation."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    keep: Sequence[str]
    path_column: str | None
    mask_column: str | None
    quoting: Literal["none", "standard"] | None
    num_classes: int | None
    ignore_index: int | Sequence[int] | Literal["none"] | None
    reduce_labels: Literal["yes", "no"] | None
    keep_masks: bool
    data_fingerprint: Literal["ends", "content"]
    resize: int | None
    interpolation: str | None
    channels: Literal[1, 3] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None


class DetectionKeywords(TypedDict, total=False):
    """Of the class Detection."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    keep: Sequence[str]
    num_classes: int | None
    orientation: Literal["stored", "shown"] | None
    order: Literal["id", "shape"]
    boxes_in: Literal["picture", "input", "stretched"] | None
    iou_type: Sequence[str]
    sigmas: Sequence[float] | None
    score_threshold: float | None
    max_detections: int | None
    bootstrap: int
    data_fingerprint: Literal["ends", "content"]


class TextClassificationKeywords(TypedDict, total=False):
    """Of the class TextClassification."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    adapter: str | Path | None
    text: str | None
    text_pair: str | None
    label: str | None
    quoting: Literal["none", "standard"] | None
    class_map: str | Path | None
    class_order: Literal["name", "number"] | None
    max_length: int | None
    keep: Sequence[str]


class QuestionAnsweringKeywords(TypedDict, total=False):
    """Of the class QuestionAnswering."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    adapter: str | Path | None
    max_length: int
    stride: int
    n_best: int
    max_answer_length: int
    null_threshold: float | None
    batch_size: int


class LanguageModelingKeywords(TypedDict, total=False):
    """Of the class LanguageModeling."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    adapter: str | Path | None
    think_end: str | None
    temperature: float
    top_p: float
    answers_seed: int
    text: str | None
    quoting: Literal["none", "standard"] | None
    max_length: int | None
    stride: int | None
    keep_losses: bool
    target_delimiter: str
    max_new_tokens: int
    stop_at_newline: bool
    stop: Sequence[str]
    extract: str | None
    answers_per_prompt: int
    ignore: Sequence[str]
    keep: Sequence[str]


class LmEvalKeywords(TypedDict, total=False):
    """Of the class LmEval."""

    weights: str | None
    weights_key: str | None
    weights_prefix: str | None
    trust_checkpoint: bool
    adapter: str | Path | None
    think_end: str | None
    temperature: float
    top_p: float
    answers_seed: int
    include_path: str | Path | None
    trust_tasks: bool
    limit: int | None
    num_fewshot: int | None
    apply_chat_template: bool
    fewshot_as_multiturn: bool
    system: str | None
    bootstrap_iters: int
    max_length: int | None
    keep: Sequence[str]
