"""What built-in tasks show of a sample, made again without their models; and when nothing is shown."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from torch import nn

from dualeval.cli import dualeval as command
from dualeval.errors import UsageError
from dualeval.options.job import Job, command_of
from dualeval.result import JOB, RESULT, read_result
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.language_modeling import LanguageModeling
from dualeval.tasks.question_answering import QuestionAnswering
from dualeval.tasks.segmentation import Segmentation
from dualeval.tasks.stored import task_of_run
from dualeval.tasks.text_classification import TextClassification
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles import causal_models, masked_pictures, questions, texts
from tests.vehicles.tiny import TinyTask


class Brightness(nn.Module):
    """Logits of three classes."""

    def forward(self, images: Any) -> Any:
        return images.flatten(1)[:, :3] * 1.0


def row_of(out: Path, place: int) -> dict[str, Any]:
    return {name: values[place] for name, values in rows(out).items()}


def shown(out: Path, place: int) -> Any:
    """As the command makes it: the task from the files of the run."""
    task, why = task_of_run(out / JOB)
    assert task is not None, why
    return task.show(row_of(out, place))


def evaluated(task: Any, out: Path, **options: Any) -> Path:
    evaluate(task, out, batch_size=4, **options)
    return out


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six pictures of another size than the model's, two a class."""
    for number in range(6):
        folder = tmp_path / "val" / "abc"[number // 2]
        folder.mkdir(parents=True, exist_ok=True)
        colour = (40 * number, 200, 10)
        Image.new("RGB", (30 + number, 20), colour).save(folder / f"{number}.png")
    return tmp_path / "val"


def images(pictures: Path, **options: Any) -> ImageClassification:
    given = {"model": Brightness(), "resize": 16, "crop": 16, "mean": (0.5,), "std": (0.5,), **options}
    return ImageClassification(data=pictures, **given)


def test_a_picture_is_shown_before_preprocessing(pictures: Path, tmp_path: Path) -> None:
    out = evaluated(images(pictures), tmp_path / "run")
    found = shown(out, 3)
    assert found.size == (33, 20) and found.getpixel((0, 0)) == (120, 200, 10)
    # Also of a part, whose rows have the indices of the whole.
    drawn = evaluated(images(pictures), tmp_path / "drawn", sample=2, seed=1)
    place = row_of(drawn, 1)["index"]
    assert shown(drawn, 1).size == (30 + place, 20)


def test_a_grey_picture_in_memory_is_shown(tmp_path: Path) -> None:
    task = ImageClassification()
    found = task.show({"id": "t10k-00003", "index": 3})
    assert (found.mode, found.size) == ("L", (28, 28))
    batch: Any = task.dataset().__getitems__([3])
    assert (np.asarray(found) == batch["images"][0, 0].numpy()).all()


def test_changed_or_missing_data_are_named(pictures: Path, tmp_path: Path) -> None:
    out = evaluated(images(pictures), tmp_path / "run")
    (pictures / "a" / "0.png").rename(pictures / "a" / "00.png")
    task, _ = task_of_run(out / JOB)
    assert task is not None
    with pytest.raises(UsageError, match=r"the data have changed: sample 0 is a/00\.png, and was a/0\.png"):
        task.show(row_of(out, 0))
    shutil.rmtree(pictures)
    task, why = task_of_run(out / JOB)
    assert task is None and f"the data of {out} cannot be opened again" in why
    # No option of another command.
    assert "does not exist. Without them" in why and "--data" not in why
    done = CliRunner().invoke(command, ["report", str(out)], catch_exceptions=False)
    assert f"dualeval: note: {why}\n" in done.stderr and done.exit_code == 0


def test_files_that_changed_are_not_shown(pictures: Path, tmp_path: Path) -> None:
    out = evaluated(images(pictures), tmp_path / "run")
    page = tmp_path / "page.html"

    def written() -> str:
        CliRunner().invoke(command, ["report", str(out), "--out", str(page)], catch_exceptions=False)
        return page.read_text()

    assert "data:image/" in written()
    Image.new("RGB", (80, 30)).save(pictures / "a" / "0.png")
    found = written()
    assert f"files of the data of …/{out.name} have changed since: none of them is shown." in found
    assert "data:image/" not in found


def test_code_that_the_files_of_a_run_name_is_not_run(pictures: Path, tmp_path: Path) -> None:
    """A stranger's run names a file of code as its model: a stand-in takes its place."""
    out = evaluated(images(pictures), tmp_path / "run")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    content = json.loads((out / RESULT).read_text())
    content["job"] |= {"model": f"{tmp_path / 'evil.py'}:make", "preprocessing": f"{tmp_path / 'evil.py'}:f"}
    (out / RESULT).write_text(json.dumps(content))
    assert shown(out, 0).size == (30, 20)
    assert not (tmp_path / "ran").exists()


def test_a_mask_lies_over_its_picture(tmp_path: Path) -> None:
    names = masked_pictures.write_pictures(tmp_path)
    task = Segmentation(
        model=masked_pictures.Exact(), data=tmp_path / "img", masks=tmp_path / "masks", preprocessing="none"
    )
    out = evaluated(task, tmp_path / "run")
    plain, layers = shown(out, 1)
    before = np.asarray(Image.open(tmp_path / "img" / f"{names[1]}.png").convert("RGB"))
    labels = np.asarray(Image.open(tmp_path / "masks" / f"{names[1]}.png"))
    assert (np.asarray(plain) == before).all() and [*layers] == ["target"]
    colours, covered = (lambda pixels: (pixels[..., :3], pixels[..., 3] > 0))(np.asarray(layers["target"]))
    assert (covered == (labels != masked_pictures.IGNORED)).all()
    # A class has one colour, which the page names.
    named = [*task.colours([str(number) for number in range(masked_pictures.CLASSES)]).values()]
    for number in np.unique(labels[covered]):
        assert {bytes(colour).hex() for colour in colours[labels == number]} == {named[number][1:]}


def test_texts_and_pairs_are_shown_unless_they_have_changed(tmp_path: Path) -> None:
    model = texts.save_classifier(tmp_path / "model")
    table = texts.rows(9, pairs=True)
    data = texts.write(tmp_path / "pairs.jsonl", table)
    out = evaluated(TextClassification(model=model, data=data, max_length=32), tmp_path / "run")
    assert shown(out, 4) == {name: table[4][name] for name in ("sentence1", "sentence2")}
    # A further column, which the run keeps.
    single = [{**row, "writer": f"w{number % 2}"} for number, row in enumerate(texts.rows(9))]
    own = texts.write(tmp_path / "one.jsonl", single)
    out = evaluated(TextClassification(model=model, data=own, max_length=32), tmp_path / "one")
    assert shown(out, 2) == single[2]["sentence"] and row_of(out, 2)["writer"] == "w0"
    # The rows have numbers as ids, so the contents decide whether they are those of the run.
    texts.write(own, [*single[:2], {**single[2], "sentence": "another"}, *single[3:]])
    task, why = task_of_run(out / JOB)
    assert task is None and "have changed since" in why


def test_answers_are_shown_beside_question_and_text(tmp_path: Path) -> None:
    model = questions.save_tiny_bert(tmp_path / "model")
    data = questions.write_questions(tmp_path / "v2.json", unanswerable=True)
    task = QuestionAnswering(model=model, data=data, batch_size=4)
    out = evaluated(task, tmp_path / "run")
    for place in range(len(task.dataset())):
        question, row = task._questions[place], row_of(out, place)
        found = shown(out, place) if place < 2 else task.show(row)
        assert (found["question"], found["text"]) == (question.question, question.context)
        assert found["answer"] == (row["answer"] or "(none)")
        assert all(answer in found["expected"] for answer in question.answers)


def test_windows_choices_and_prompts_are_shown(tmp_path: Path) -> None:
    model = causal_models.save_causal(tmp_path / "gpt2")
    documents = causal_models.write_texts(tmp_path / "texts", {"a.txt": "One and two. Three and four."})
    out = evaluated(LanguageModeling(model=model, data=documents, max_length=8), tmp_path / "windows")
    whole = "".join(shown(out, place) for place in range(len(rows(out)["id"])))
    assert whole == "One and two. Three and four."
    losing = LanguageModeling(model=model, data=documents, max_length=8, keep_losses=True)
    kept = evaluated(losing, tmp_path / "losses")
    [tokens] = shown(kept, 1)
    assert "".join(text for text, _ in tokens) == shown(out, 1)
    assert [loss for _, loss in tokens] == row_of(kept, 1)["token_losses"]
    # Of a run with another tokenizer no loss is shown beside these tokens.
    assert losing.show({**row_of(kept, 1), "token_ids": [0] * 8}).keys() == {"losses"}
    # On a terminal, too; without the data by the tokens' ids.
    typed = ["show", str(kept), row_of(kept, 1)["id"]]
    said = " ".join(f"{text.strip() or repr(text)} ({loss:.2f})" for text, loss in tokens)
    assert f"loss of each token  {said}\n" in CliRunner().invoke(command, typed).output
    (documents / "a.txt").write_text("Other texts than these. And more of them.")
    done = CliRunner().invoke(command, typed)
    pairs = zip(row_of(kept, 1)["token_ids"], row_of(kept, 1)["token_losses"], strict=True)
    said = " ".join(f"{number} ({loss:.2f})" for number, loss in pairs)
    assert f"loss of each token  {said}\n" in done.output
    assert f"tokens are shown by their ids: the data of {kept} have changed" in done.stderr
    data = causal_models.write_lines(tmp_path / "choices.jsonl", causal_models.choice_rows())
    out = evaluated(LanguageModeling(model=model, data=data), tmp_path / "choices")
    row, found = row_of(out, 1), shown(out, 1)
    [chosen] = [name for name in found if "chosen" in name]
    [right] = [name for name in found if "right" in name]
    assert chosen.startswith(f"choice {row['prediction']}, ") and right.startswith(
        f"choice {row['answer']}, "
    )
    assert f"({row['loglikelihoods'][row['prediction']]:.2f})" in found[chosen]
    data = causal_models.write_lines(tmp_path / "prompts.jsonl", causal_models.prompt_rows())
    out = evaluated(LanguageModeling(model=model, data=data, max_new_tokens=4), tmp_path / "prompts")
    assert shown(out, 2)["answer"] == row_of(out, 2)["generated"]
    assert shown(out, 2)["prompt"] == causal_models.prompt_rows()[2]["prompt"]


def test_a_task_of_one_s_own_is_not_made_again(tmp_path: Path) -> None:
    out = evaluated(TinyTask(20), tmp_path / "run")
    task, why = task_of_run(out / JOB)
    assert task is None and "TinyTask is a task of your own" in why


def test_the_command_of_a_run_makes_the_same_job(launch: Launch, pictures: Path, tmp_path: Path) -> None:
    job = Job.of(
        model="fashion-cnn",
        weights="random:1",
        data=pictures,
        channels=1,
        resize=28,
        crop=28,
        mean=(0.5,),
        std=(0.25,),
        metric=("top1", "loss"),
        batch_size=2,
        on_error="skip",
    )
    task = job.make_task()
    result = evaluate(task, tmp_path / "run", batch_size=2, on_error="skip", job=job.to_json())
    words = shlex.split(command_of(result.job) or "")
    assert words[:2] == ["dualeval", "run"]
    launch([sys.executable, "-m", *words, "--out", tmp_path / "again"]).ok()
    same = read_result(tmp_path / "again" / RESULT)
    assert (same.fingerprint, same.metrics_digest) == (result.fingerprint, result.metrics_digest)
    assert command_of({**result.job, "weights": "as the module has them"}) is None
    assert command_of({**result.job, "task": "mine.py:Task"}) is None
