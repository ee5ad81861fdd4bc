"""The built-in tasks with their options, a file a task; light to import, for the command line."""

from __future__ import annotations

from dualeval.tasks.options.image_classification import ImageClassificationOptions
from dualeval.tasks.options.language_modeling import LanguageModelingOptions
from dualeval.tasks.options.question_answering import QuestionAnsweringOptions
from dualeval.tasks.options.segmentation import SegmentationOptions
from dualeval.tasks.options.text_classification import TextClassificationOptions

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
SCORED: dict[str, type] = {name: kind.scored for name, kind in TASKS.items() if hasattr(kind, "scored")}
