"""The task question-answering with answers from a file, in one process and as ``dualeval score``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dualeval.cli import dualeval
from dualeval.engine.scoring.rescoring import rescore
from dualeval.errors import UsageError
from dualeval.result import JOB
from dualeval.tasks.given_answers import GivenAnswers
from dualeval.tasks.stored import metrics_of_run
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import message_of
from tests.tasks.test_question_answering import run
from tests.vehicles import questions
from tests.vehicles.environments import read_variables
from tests.vehicles.questions import asked
from tests.vehicles.squad_files import file_of, question


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_missing_predictions_are_wrong_and_listed(tmp_path: Path) -> None:
    file = questions.squad_file()
    gold = {qa["id"]: qa["answers"][0]["text"] for _, qa in asked(file)}
    first, second, *_ = gold
    given = {name: text for name, text in gold.items() if name not in (first, second)}
    path = write(tmp_path / "given.json", {**given, "stray": "text"})
    result = evaluate(GivenAnswers(data=file, predictions=path), tmp_path / "out")
    assert list(result.description) == ["task", "data", "predictions", "job"]
    assert result.description["predictions"] == str(path)
    official = questions.official_script().evaluate(json.loads(file.read_text("utf-8"))["data"], given)
    assert result.metrics == official == {"exact_match": 60.0, "f1": 60.0}
    assert result.data["findings"] == {
        "no_prediction_so_wrong": [first, second],
        "prediction_without_a_question": ["stray"],
    }
    assert any("no prediction so wrong: 2 samples" in warning for warning in result.warnings)
    assert rows(tmp_path / "out")["answer"][:2] == [None, None]
    assert rows(tmp_path / "out")["answer"][2:] == list(given.values())


@pytest.mark.parametrize(
    ("answer", "gold", "said"),
    [
        ("unanswerable", "One", ["3 questions without an answer have the prediction 'unanswerable', which"]),
        ("two", "One", []),
        ("", "\u5929\u6c14", ["1 of 1 gold answers are in a script without white space between words"]),
    ],
)
def test_answers_that_mean_nothing_and_texts_without_words_are_warned_of(
    tmp_path: Path, answer: str, gold: str, said: list[str]
) -> None:
    asked = [question(name, *([(gold, 0)] if name == "a" else [])) for name in "abcd"]
    file = write(tmp_path / "data.json", file_of(*asked, context=f"{gold} and two.", version="v2.0"))
    path = write(tmp_path / "given.json", {"a": gold, **dict.fromkeys("bcd", answer)})
    warnings = evaluate(GivenAnswers(data=file, predictions=path), None).warnings
    own = [one for one in warnings if "gold answers" in one or "have the prediction" in one]
    assert [one.startswith(start) for one, start in zip(own, said, strict=True)] == [True] * len(said)


def test_a_missing_prediction_is_wrong_also_where_there_is_no_answer(
    data: dict[str, Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "given.json", {"long": "1719", "nothing-0": ""})
    result = evaluate(GivenAnswers(data=data["v2.0"], predictions=path), tmp_path / "out")
    answerable = [bool(qa["answers"]) for _, qa in asked(data["v2.0"])]
    assert result.metrics["HasAns_exact"] == 100 / sum(answerable)
    assert result.metrics["NoAns_exact"] == 100 / answerable.count(False)
    assert "best_exact" not in result.metrics


def test_files_that_do_not_belong_together_are_refused(data: dict[str, Path], tmp_path: Path) -> None:
    file = questions.squad_file()
    given = write(tmp_path / "given.json", {qa["id"]: "" for _, qa in asked(data["v2.0"])})
    other = write(tmp_path / "other.json", {"x": "y"})
    empty = write(tmp_path / "empty.json", {})
    with pytest.raises(
        UsageError, match=r"none of the 1 ids in .*other\.json .* 5 questions in .*squad\.json"
    ):
        GivenAnswers(data=file, predictions=other)
    with pytest.raises(UsageError, match=r"none of the 0 ids"):
        GivenAnswers(data=file, predictions=empty)
    with pytest.raises(UsageError, match=r"empty\.json has no value for \d+ questions with a prediction"):
        GivenAnswers(data=data["v2.0"], predictions=given, null_odds=empty)
    answers = write(tmp_path / "answers.json", {qa["id"]: "" for _, qa in asked(file)})
    with pytest.raises(UsageError, match=r"--null-odds .*every question of .* has an answer"):
        GivenAnswers(data=file, predictions=answers, null_odds=empty)


def test_other_answers_are_another_job(tmp_path: Path) -> None:
    file = questions.squad_file()
    ids = [qa["id"] for _, qa in asked(file)]
    for text in ("one", "two"):
        path = write(tmp_path / f"{text}.json", dict.fromkeys(ids, text))
        task = GivenAnswers(data=file, predictions=path)
        if text == "two":
            with pytest.raises(
                UsageError, match=r"another job \(the option predictions \(job\.task_options\.predictions"
            ):
                evaluate(task, tmp_path / "out")
        evaluate(task, tmp_path / "out", fresh=True)


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_scoring_the_file_gives_the_same_scores(
    tiny: Path, data: dict[str, Path], tmp_path: Path, version: str
) -> None:
    # Every question is answered, so that the file tells as much as the model did.
    threshold = {"null_threshold": 1e30} if version == "v2.0" else {}
    out = tmp_path / "run"
    answered = run(tiny, data[version], out, **threshold)
    odds = out / "null_odds.json" if version == "v2.0" else None
    task = GivenAnswers(data=data[version], predictions=out / "predictions.json", null_odds=odds)
    scored = evaluate(task, tmp_path / "scored")
    # An empty text has no span, and its odds are beyond any threshold.
    wanted = {name: value for name, value in answered.metrics.items() if name != "nonfinite_logits"}
    assert scored.metrics == wanted
    # A file of answers has no logits to count. With the same metrics the digests are equal.
    assert scored.metrics_digest != answered.metrics_digest
    common = [metric for metric in metrics_of_run(out / JOB, ()) if metric.name != "nonfinite_logits"]
    assert scored.metrics_digest == rescore(out, metrics=common).metrics_digest
    assert scored.intervals == answered.intervals
    assert rows(tmp_path / "scored")["answer"] == rows(out)["answer"]
    assert scored.warnings == answered.warnings


def test_fresh_removes_the_exports_of_a_task(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tiny, data["v2.0"], out)
    (out / "mine.json").write_text("{}")
    ids = [qa["id"] for _, qa in asked(data["v1.1"])]
    given = write(tmp_path / "given.json", dict.fromkeys(ids, "x"))
    evaluate(GivenAnswers(data=data["v1.1"], predictions=given), out, fresh=True)
    assert sorted(path.name for path in out.iterdir()) == [
        *("job.json", "mine.json", "predictions.parquet", "result.json", "status.json")
    ]


# -- dualeval score --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predictions", "number.json"], ["'a' is the number 3", "expected a text"]),
        ([], ["Missing option '--predictions'"]),
        (["--predictions", "stray.json"], ["none of the 1 ids"]),
        (["--predictions", "stray.json", "--task", "image-classification"], ["--task", "question-answering"]),
        # It would remove what it reads.
        (["--predictions", "empty.json", "--out", ".", "--fresh"], ["empty.json lies in the output folder"]),
    ],
)
def test_a_wrong_file_for_score_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: list[str]
) -> None:
    files = [
        write(tmp_path / f"{name}.json", content)
        for name, content in {"number": {"a": 3}, "stray": {"a": "b"}, "empty": {}}.items()
    ]
    monkeypatch.chdir(tmp_path)
    given = ["score", "--data", str(questions.squad_file()), "--out", "out", *words]
    message = message_of(CliRunner().invoke(dualeval, given))
    for part in said:
        assert part in message
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_score_under_torchrun_is_refused() -> None:
    variables = read_variables("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=0")
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    words = ["score", "--data", str(questions.squad_file()), "--predictions", "stray.json"]
    message = message_of(CliRunner().invoke(dualeval, words, env=variables))
    assert "'dualeval score' is one process, but torchrun has started 2" in message
