"""The task text-classification in one process: against the libraries, what labels are, and refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import Tensor, nn

from dualeval.columns.late import LateColumns
from dualeval.data.set_names import TABLES
from dualeval.engine.scoring.rescoring import rescore
from dualeval.errors import UsageError
from dualeval.result import JOB
from dualeval.tasks.stored import metrics_of_run
from dualeval.tasks.text_classification import TextClassification
from tests.engine.test_evaluator import evaluate
from tests.tasks.conftest import check_doors
from tests.vehicles import questions, texts
from tests.vehicles.texts import NAMES

BATCH = 16
MAX_LENGTH = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts.save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts.save_classifier(tmp_path_factory.mktemp("two"), ("no", "yes"))


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts.save_classifier(tmp_path_factory.mktemp("regression"), num_labels=1)


def run(model: Any, data: Any, out: Path | None = None, **options: Any) -> Any:
    task = TextClassification(model=model, data=data, **{"max_length": MAX_LENGTH, **options})
    return evaluate(task, out, batch_size=BATCH)


def logits_by_hand(folder: Path, rows: list[dict[str, Any]], *columns: str) -> Tensor:
    """Of the library's own model and tokenizer, a text at a time."""
    library = questions.transformers()
    model = library.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    cut: dict[str, Any] = {"truncation": True, "max_length": MAX_LENGTH, "return_tensors": "pt"}
    inputs = [tokenizer(*(row[name] for name in columns), **cut) for row in rows]
    with torch.inference_mode():
        return torch.cat([model(**each).logits for each in inputs])


# -- the numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [False, True])
def test_metrics_and_rows_are_those_of_the_libraries(model: Path, tmp_path: Path, pairs: bool) -> None:
    rows = texts.rows(70, pairs=pairs)
    columns = ("sentence1", "sentence2") if pairs else ("sentence",)
    wanted = logits_by_hand(model, rows, *columns)
    result = run(model, texts.write(tmp_path / "rows.csv", rows), tmp_path / "out")
    target = torch.tensor([NAMES.index(row["label"]) for row in rows])
    found = result.predictions().to_pydict()
    assert found["target"] == target.tolist()
    assert found["prediction"] == wanted.argmax(1).tolist()
    assert found["target_name"] == [row["label"] for row in rows]
    losses = nn.functional.cross_entropy(wanted, target, reduction="none")
    torch.testing.assert_close(torch.tensor(found["loss"]), losses, rtol=1e-4, atol=1e-5)
    metrics, predicted = result.metrics, wanted.argmax(1)
    assert metrics["accuracy"] == (predicted == target).double().mean().item()
    assert metrics["f1"] == pytest.approx(f1_score(target, predicted, average="macro"), abs=1e-12)
    assert metrics["mcc"] == pytest.approx(matthews_corrcoef(target, predicted), abs=1e-12)
    assert metrics["loss"] == pytest.approx(losses.double().mean().item(), abs=1e-5)
    assert "binary_f1" not in metrics
    cut = result.work["truncated"]
    assert 0 < cut == sum(found["truncated"])
    assert f"{cut} texts are longer than --max-length and cut there" in result.warnings
    assert result.work["tokens"] <= result.work["padded_tokens"] <= MAX_LENGTH * len(rows)


def test_two_classes_have_a_binary_f1(two: Path) -> None:
    rows = [{**row, "label": row["label"] == "positive"} for row in texts.rows(40)]
    found = run(two, rows).metrics
    target = [int(row["label"]) for row in rows]
    predicted = logits_by_hand(two, rows, "sentence").argmax(1)
    assert found["binary_f1"] == pytest.approx(f1_score(target, predicted), abs=1e-12)
    assert found["binary_f1"] != found["f1"]


def test_a_regression_has_the_correlations_and_errors_of_scipy(regression: Path, tmp_path: Path) -> None:
    rows = [{**row, "label": number / 7} for number, row in enumerate(texts.rows(50, pairs=True))]
    result = run(regression, rows, tmp_path / "out")
    wanted = logits_by_hand(regression, rows, "sentence1", "sentence2")[:, 0].double().numpy()
    target = np.array([row["label"] for row in rows])
    found = result.metrics
    assert {*found} == {"pearson", "spearman", "mse", "mae"}
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(wanted, target).statistic, abs=1e-5)
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(wanted, target).statistic, abs=1e-2)
    assert found["mse"] == pytest.approx(((wanted - target) ** 2).mean(), rel=1e-4)
    assert found["mae"] == pytest.approx(np.abs(wanted - target).mean(), rel=1e-4)
    assert result.predictions().to_pydict()["target"] == target.tolist()
    with pytest.raises(UsageError, match="there is no metric 'accuracy' here"):
        run(regression, rows, metrics=["accuracy"])
    again = metrics_of_run(tmp_path / "out" / JOB)
    assert rescore(tmp_path / "out", metrics=again).metrics_digest == result.metrics_digest


def test_labels_that_are_withheld_are_warned_of(regression: Path) -> None:
    for last, is_said in ((-1.0, True), (2.5, False)):
        rows = [{**row, "label": -1.0} for row in texts.rows(3)]
        found = run(regression, [*rows, {**rows[0], "label": last}], metrics=["mse"]).warnings
        assert any("all labels are -1: where they are withheld" in one for one in found) == is_said


@pytest.mark.parametrize("padding", [None, 7])
def test_padding_changes_no_bits(model: Path, padding: int | None) -> None:
    """Whatever token fills up: it is masked; and the rows of a group do not depend on the texts' order."""
    rows = texts.rows(BATCH)
    wanted = TextClassification(model=model, data=rows)
    other = TextClassification(model=model, data=rows if padding else rows[::-1])
    if padding:
        facts = other._encoder.facts
        object.__setattr__(facts, "pad_id", padding)
    found = []
    for task in (wanted, other):
        network = task.build_model(torch.device("cpu"))
        batch = task.collate(task.dataset().__getitems__(range(BATCH)))
        with torch.inference_mode():
            found.append(task.forward(network, batch))
    assert len(batch["groups"]) < BATCH
    assert (batch["padded_tokens"] > batch["tokens"]).any()
    if padding:
        assert torch.equal(*found)
    else:
        torch.testing.assert_close(found[0], found[1].flip(0))


# -- both doors ----------------------------------------------------------------------------------------


def test_the_class_and_the_command_line_make_the_same_job(model: Path, tmp_path: Path) -> None:
    data = texts.write(tmp_path / "rows.jsonl", texts.rows(40))
    options: dict[str, Any] = {"model": model, "data": data, "max_length": 24}
    made = questions.transformers().AutoModelForSequenceClassification.from_pretrained(model)
    check_doors("text-classification", "TextClassification", options, [made, lambda: made], tokenizer=model)


def test_the_result_says_what_was_evaluated(model: Path, tmp_path: Path) -> None:
    data = texts.write(tmp_path / "rows.parquet", texts.rows(20, pairs=True))
    result = run(model, data, tmp_path / "out")
    assert result.description["texts"] == f"sentence1 and sentence2, at most {MAX_LENGTH} tokens"
    assert result.description["labels"] == (
        "label, 3 names: negative, neutral, positive (names of the classes of the model)"
    )
    said = {name: result.job[name] for name in ("text", "text_pair", "label", "max_length")}
    assert said == {"text": "sentence1", "text_pair": "sentence2", "label": "label", "max_length": MAX_LENGTH}
    assert result.labels["classes"] == list(NAMES)
    assert result.job["metric"][-1] == "text_work"


def test_options_that_change_a_number_are_other_jobs(model: Path) -> None:
    """What changes a number changes the identity."""
    rows = texts.rows(20, pairs=True)
    changes: list[dict[str, Any]] = [
        {},
        {"max_length": 31},
        {"text": "sentence1"},
        {"text": "sentence2", "text_pair": "sentence1"},
        {"weights": "random:1"},
    ]
    found = [run(model, rows, **change) for change in changes]
    assert len({each.fingerprint for each in found}) == len(changes)
    assert len({each.metrics_digest for each in found}) == len(changes)


def test_texts_are_cut_at_the_tokenizers_length_but_at_most_512(model: Path, tmp_path: Path) -> None:
    for said, wanted in ((None, 512), (256, 256), (4096, 512)):
        tokenizer = questions.transformers().AutoTokenizer.from_pretrained(model)
        if said:
            tokenizer.model_max_length = said
        tokenizer.save_pretrained(tmp_path)
        task = TextClassification(model=texts.classifier, tokenizer=tmp_path, data=texts.rows(2))
        assert task.description()["texts"] == f"sentence, at most {wanted} tokens"


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_as_the_library_does(model: Path, tmp_path: Path, side: str) -> None:
    library = questions.transformers().AutoTokenizer
    tokenizer = library.from_pretrained(model, truncation_side=side)
    tokenizer.save_pretrained(tmp_path)
    rows = texts.rows(30, pairs=True)
    task = TextClassification(model=texts.classifier, tokenizer=tmp_path, data=rows, max_length=20)
    for row, found in zip(rows, task.dataset().__getitems__(range(30)), strict=True):
        wanted = library.from_pretrained(tmp_path)(
            row["sentence1"], row["sentence2"], truncation=True, max_length=20
        )
        assert found["ids"].tolist() == wanted["input_ids"]
        assert found["types"].tolist() == wanted["token_type_ids"]
        whole = tokenizer(row["sentence1"], row["sentence2"])["input_ids"]
        assert found["truncated"] == (len(whole) > 20)


# -- labels --------------------------------------------------------------------------------------------


class Dataset(list[dict[str, Any]]):
    """As a data set of Hugging Face, whose labels have names."""

    def __init__(self, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
        super().__init__(rows)
        self.features = {"sentence": object(), "label": SimpleNamespace(names=list(names))}


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"sentence": f"text {place}", "label": label} for place, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("names", "data"),
    [
        (NAMES, labelled("positive", "negative", "positive")),
        (NAMES, labelled("Positive ", "NEGATIVE", "positive")),
        (NAMES, labelled(2, 0, 2)),
        (NAMES, labelled("2", "0", "2")),
        (("x", "X", "y"), labelled(2, 0, 2)),
        (("x", "X", "y"), labelled("y", "x", "y")),
        (("LABEL_0", "LABEL_1", "LABEL_2"), labelled(2, 0, 2)),
        (("1", "2", "3"), labelled(3, 1, 3)),
        (NAMES, Dataset(labelled(2, 0, 2), ("Negative", "Neutral", "Positive"))),
        (("LABEL_0", "LABEL_1", "LABEL_2"), Dataset(labelled(2, 0, 2), NAMES)),
        (("1", "2", "0"), Dataset(labelled(2, 0, 2), ("1", "2", "0"))),
    ],
)
def test_labels_are_names_or_numbers(model: Path, names: tuple[str, ...], data: Any) -> None:
    task = TextClassification(model=texts.classifier(names), tokenizer=model, data=data)
    task.build_model(torch.device("cpu"))
    batch = task.collate(task.dataset().__getitems__(range(3)))
    assert batch["targets"].tolist() == [2, 0, 2]
    assert task.labels_used().get("classes", [None] * 3) == [
        None if name.startswith("LABEL") else name for name in names
    ] or names[0].startswith("LABEL")


def test_logits_wait_unless_the_users_own_observe_reads_the_columns(model: Path) -> None:
    """On a GPU they leave without a kernel beside the forward's."""

    class Own(TextClassification):
        def observe(self, outputs: Tensor, batch: dict[str, Any]) -> Mapping[str, Tensor]:
            return {**super().observe(outputs, batch)}

    found = []
    for kind in (TextClassification, Own):
        task = kind(model=texts.classifier(NAMES), tokenizer=model, data=labelled(2, 0, 2))
        built = task.build_model(torch.device("cpu"))
        batch = task.collate(task.dataset().__getitems__(range(3)))
        with torch.inference_mode():
            found.append(task.observe(task.forward(built, batch), batch))
    late, there = found
    assert isinstance(late, LateColumns) and task.postprocess(late, range(3)) is late
    assert type(there) is dict and [*there] == [*late]
    assert all(torch.equal(column, late[name]) for name, column in there.items())


@pytest.mark.parametrize(
    ("names", "data", "said"),
    [
        (
            NAMES,
            labelled("positive", "mixed"),
            "row 1: 1 of 2 labels are not classes of the model, while the",
        ),
        (NAMES, labelled("1", "positive"), "row 0: 1 of 2 labels are not classes of the model, while the ot"),
        (NAMES, labelled(1, None), "row 1: the label (column 'label') is empty"),
        (NAMES, labelled(1, 1.5), "row 1: the label (column 'label') is 1.5, expected"),
        (NAMES, labelled(1, 3), "row 1: the label (column 'label') is 3, but the model in "),
        (NAMES, labelled(0, -1), "row 1: the label (column 'label') is -1, expected a whole number from 0"),
        (NAMES, labelled(1, [2]), "row 1: the label (column 'label') is [2] (list), expected a whole"),
        (("LABEL_0", "LABEL_1"), labelled("001", "002"), "is '001', which is not a class of the model. The"),
        (
            ("LABEL_0", "LABEL_1"),
            labelled("no", "yes"),
            "The model's classes: without names (its id2label has placeholders). The data's: no, yes. Give",
        ),
        (
            NAMES,
            Dataset(labelled(0, 1), ("positive", "neutral", "negative")),
            "in another order. The model's classes: negative, neutral, positive. The data's: positive, "
            "neutral, negative. Give the labels as the model's names",
        ),
        (NAMES, Dataset(labelled(0, 1), ("no", "yes")), "The data's: no, yes."),
    ],
)
def test_labels_of_no_class_are_refused(model: Path, names: tuple[str, ...], data: Any, said: str) -> None:
    task = TextClassification(model=texts.classifier(names), tokenizer=model, data=data)
    with pytest.raises(UsageError, match=re.escape(said)):
        task.build_model(torch.device("cpu"))


UNNAMED = ("LABEL_0", "LABEL_1", "LABEL_2")
# Names of the model's classes, labels, and the classes that they are.
FORMS: dict[str, tuple[tuple[str, ...], list[Any], list[int]]] = {
    "bools of a model with these names": (("True", "False"), [True, False, False], [0, 1, 1]),
    "bools of another": (UNNAMED[:2], [True, False, False], [1, 0, 0]),
    "numbers": (("a", "b", "c"), [2, 0, 1], [2, 0, 1]),
    "whole floats": (("a", "b", "c"), [2.0, 0.0, 1.0], [2, 0, 1]),
    "names": (("x", "X", "y"), ["y", "x", "y"], [2, 0, 2]),
    "names of numbers": (("1", "2", "3"), [3, 1, 1], [2, 0, 0]),
    "--class-order name": (UNNAMED, ["003", "001", "002"], [2, 0, 1]),
    "--class-order number": (UNNAMED, [3, 1, 2], [2, 0, 1]),
}


@pytest.fixture(params=FORMS)
def forms(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], list[Any], list[int]]:
    """Options of a task, its data in every form, and the classes of its rows."""
    kind = str(request.param)
    names, labels, classes = FORMS[kind]
    rows = labelled(*labels)
    of_library = datasets.Dataset.from_list(rows)
    data = [rows, of_library, *(texts.write(tmp_path / f"t{suffix}", rows) for suffix in TABLES)]
    if kind == "numbers":
        data.append(of_library.cast_column("label", datasets.ClassLabel(names=[*names])))
    order = kind.removeprefix("--class-order ")
    return {"model": texts.classifier(names), "class_order": None if order == kind else order}, data, classes


def test_indices_beside_other_names_are_refused(model: Path, tmp_path: Path) -> None:
    """As pandas' codes of categories: a column that names each index otherwise than the model."""
    rows = texts.rows(12)
    codes = {name: code for code, name in enumerate(reversed(NAMES))}
    coded = [{**row, "label": codes[row["label"]], "kind": row["label"]} for row in rows]
    with pytest.raises(UsageError, match=r"number the classes differently.*--label kind"):
        run(model, coded)
    wanted = run(model, rows).metrics
    assert run(model, coded, label="kind").metrics == wanted
    right = [{**row, "label": NAMES.index(row["label"]), "kind": row["label"]} for row in rows]
    assert run(model, right).metrics == wanted
    # Names that do not go with the labels name something else, as an earlier model's predictions do.
    others = [{**row, "kind": NAMES[place % 3]} for place, row in enumerate(right)]
    assert run(model, others).metrics == wanted


def test_the_same_labels_are_the_same_classes_in_every_form(model: Path, forms: Any) -> None:
    options, data, classes = forms
    for each in data:
        task = TextClassification(tokenizer=model, data=each, **options)
        task.build_model(torch.device("cpu"))
        batch = task.collate(task.dataset().__getitems__(range(len(classes))))
        assert batch["targets"].tolist() == classes


@pytest.mark.long
def test_the_same_labels_have_the_same_digest_in_every_form(model: Path, forms: Any) -> None:
    options, data, classes = forms
    found = [run(data=each, tokenizer=model, metrics=["loss"], **options) for each in data]
    unnamed = texts.classifier(UNNAMED[: options["model"].config.num_labels])
    plain = run(unnamed, labelled(*classes), tokenizer=model, metrics=["loss"])
    assert {each.metrics_digest for each in found} == {plain.metrics_digest}


def test_a_class_map_or_order_decides_which_class_a_label_is(
    model: Path, tmp_path: Path, regression: Path
) -> None:
    rows = labelled("no", "yes", "no")
    (tmp_path / "map.json").write_text('{"no": 2, "yes": 0}')
    options: dict[str, Any] = {"class_map": tmp_path / "map.json", "metrics": ["loss"]}
    found = run(model, rows, **options)
    assert found.metrics_digest == run(model, labelled(2, 0, 2), metrics=["loss"]).metrics_digest
    assert found.description["labels"] == "label, 2 names: yes, no (class map)"
    assert found.job["class_map"] == str(tmp_path / "map.json")
    assert found.fingerprint != run(model, labelled(2, 0, 2), metrics=["loss"]).fingerprint
    (tmp_path / "map.json").write_text('{"no": 2, "yes": null}')
    refusals: dict[str, dict[str, Any]] = {
        "leaves labels out": options,
        "has 3 classes, but 2 were expected (from the data)": {"class_order": "name"},
        "do not apply to a regression": {"class_order": "name", "model": regression},
        "both say which class": {**options, "class_order": "name"},
    }
    for said, asked in refusals.items():
        with pytest.raises(UsageError, match=re.escape(said)):
            run(**{"model": model, "data": rows, **asked})


# -- refusals ------------------------------------------------------------------------------------------


def test_an_empty_text_stops_the_run_or_is_left_out(model: Path, tmp_path: Path) -> None:
    rows = texts.rows(20)
    rows[5]["sentence"] = "  "
    data = texts.write(tmp_path / "rows.csv", rows)
    with pytest.raises(
        UsageError, match=r"rows\.csv, line 7: the column 'sentence' is empty, expected a text"
    ):
        run(model, data)
    task = TextClassification(model=model, data=data, max_length=MAX_LENGTH)
    found = evaluate(task, None, batch_size=BATCH, on_error="skip")
    assert [each["id"] for each in found.failed] == ["5"]
    assert found.samples == {"total": 20, "evaluated": 19, "failed": 1}


class Ignores(nn.Module):
    """Reads what fills up as if it were text."""

    def __init__(self, kind: str = "padding") -> None:
        super().__init__()
        self.kind = kind
        self.network = nn.Sequential(nn.Embedding(31000, 8), nn.Linear(8, 3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Any:
        found = self.network(input_ids)
        logits: Tensor = found.mean(1)
        return {"padding": logits, "probabilities": None, "tokens": found}[self.kind]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": "words"}, "--text words: the list has the columns sentence, label"),
        ({"text_pair": "more"}, "--text-pair more: the list has the columns sentence, label"),
        ({"label": "score"}, "--label score: the list has the columns sentence, label"),
        ({"max_length": 2}, "--max-length 2 leaves no room beside the 2 tokens that the tokenizer adds"),
        ({"max_length": 600}, "--max-length of the model's size, whose config says max_position_embeddings"),
        ({"metrics": ["binary_f1"]}, "metric 'binary_f1' needs two classes, found 3: ask for 'f1'"),
        ({"metrics": ["acuracy"]}, "there is no metric 'acuracy'"),
        ({"data": [{"x": "y"}]}, "expected one for the texts, named text or sentence or content, in"),
        ({"model": "hf:{model}"}, "for text classification leave out hf: and type --model"),
        ({"model": texts.classifier}, "was given without a tokenizer"),
    ],
)
def test_wrong_options_models_and_data_are_refused(model: Path, options: dict[str, Any], said: str) -> None:
    if isinstance(given := options.get("model"), str):
        options = {"model": given.format(model=model)}
    with pytest.raises(UsageError, match=re.escape(said)):
        run(**{"model": model, "data": texts.rows(4), **options})


def gpt2(**changes: Any) -> Any:
    library = questions.transformers()
    small = {"vocab_size": 30522, "n_positions": MAX_LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return library.GPT2ForSequenceClassification(library.GPT2Config(**small, num_labels=3, **changes)).eval()


def test_a_model_whose_config_follows_the_advice_is_evaluated(model: Path) -> None:
    """As the messages advise it."""
    named = [{**row, "label": NAMES.index(row["label"])} for row in texts.rows(4)]
    assert run(lambda: gpt2(pad_token_id=0), named, tokenizer=model).samples["evaluated"] == 4
    stated = texts.classifier(problem_type="single_label_classification")
    assert run(stated, texts.rows(4), tokenizer=model).samples["evaluated"] == 4


def test_a_text_written_as_a_missing_one_is_warned_of(model: Path, tmp_path: Path) -> None:
    rows = texts.rows(4)
    rows[2]["sentence"] = "nan"
    result = run(model, rows)
    assert "text written as a missing one: 1 samples (2), listed in result.json" in result.warnings
    tokenizer = questions.transformers().AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["xyzzy"])
    tokenizer.save_pretrained(tmp_path)
    network = texts.classifier()
    assert run(network, rows, tokenizer=tmp_path).metrics == result.metrics
    rows[0]["sentence"] = "a xyzzy"
    with pytest.raises(UsageError, match="a text has the token 30522 of its tokenizer"):
        run(network, rows, tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (lambda: Ignores(), "reads padding: the logits of a text differ by"),
        (lambda: Ignores("tokens"), "for 2 texts, expected logits of shape (2, classes)"),
        (lambda: Ignores("probabilities"), "returned None for 2 texts"),
        (
            lambda: texts.classifier(problem_type="multi_label_classification"),
            "expected one class per sample",
        ),
        (lambda: texts.classifier(problem_type="regression"), "problem_type 'regression' and 3 outputs"),
        (gpt2, "Its config has no pad_token_id: set it to 0, as the tokenizer has it"),
        (lambda: texts.classifier(vocab_size=100), "tells 30522 tokens apart, its model only 100"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: Path, network: Any, said: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(UsageError, match=re.escape(said)):
        run(network, texts.rows(4), tokenizer=model)
