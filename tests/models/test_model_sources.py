"""Models of timm and transformers, TorchScript and torch.export programs, and modules from Python."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualeval
from dualeval.engine.identity.model import ModelHasher, model_fingerprint, structure_fingerprint
from dualeval.errors import DualevalError, UsageError
from dualeval.models import classifiers
from dualeval.models.sources.source import Loading, ModelSource, WeightsSource, weights_of_file
from dualeval.models.weights import OtherClasses, model_beside
from dualeval.options.job import Job
from dualeval.tasks import ImageClassification
from dualeval.tasks.options.image_classification import ImageClassificationOptions
from dualeval.vision_library import torchvision
from tests.data.test_image_folder import save
from tests.models.test_late_building import check_same, is_late

CLASSES = 3
SIZE = 16


class Net(nn.Module):
    """Batch norm and dropout, so that a mode matters; a linear layer to quantise."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.convolution(images)).relu().mean((2, 3))
        logits: Tensor = self.linear(self.dropout(features))
        return logits


def net(changed: float = 0.0) -> Net:
    """The same one each time, in evaluation mode; with one weight changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Net().eval()
    with torch.no_grad():
        made.linear.weight[0, 0] += changed
    return made


IMAGES = torch.linspace(-1, 1, 4 * 3 * SIZE * SIZE).view(4, 3, SIZE, SIZE)


# TorchScript and quantisation are deprecated, and in use.
deprecated = pytest.mark.filterwarnings("ignore")


def scripted(model: nn.Module) -> Any:
    return torch.jit.script(model)


def in_training_mode(model: nn.Module) -> Any:
    return torch.jit.script(model.train())


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, IMAGES)  # type: ignore[no-untyped-call]


def frozen(model: nn.Module) -> Any:
    return torch.jit.freeze(torch.jit.script(model))


def quantised(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
        model, {nn.Linear}, dtype=torch.qint8
    )
    return made


def exported(model: nn.Module, dimension: Any = None) -> Any:
    shapes = None if dimension is None else ({0: dimension},)
    return torch.export.export(model, (IMAGES,), dynamic_shapes=shapes)


def identity(model: nn.Module) -> tuple[Any, ...]:
    weights = model_fingerprint(model)["fingerprint"]
    return weights, structure_fingerprint(model, ModelHasher(model))


def fails(name: str, weights: str | None = None, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        classifiers.build(name, weights, options.pop("num_classes", None), **options)
    return str(caught.value)


# -- TorchScript ---------------------------------------------------------------------------------------


@deprecated
@pytest.mark.parametrize("make", [scripted, in_training_mode, traced, frozen])
def test_a_torchscript_archive_has_the_numbers_of_its_model(
    make: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    path = tmp_path / "net.pt"
    make(net()).save(str(path))
    model = classifiers.build(str(path), None, None, trust=True)
    # Freezing folds the batch norm.
    torch.testing.assert_close(model(IMAGES), net()(IMAGES), atol=1e-6 if make is frozen else 0, rtol=0)
    assert not getattr(model, "training", False)
    make(net(changed=0.1)).save(str(path))
    assert identity(classifiers.build(str(path), None, None, trust=True)) != identity(model)


@deprecated
def test_a_program_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    scripted(net()).save(str(path))
    weights = max((value for value in net().state_dict().values()), key=torch.numel).numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weights) + 9] ^= 1
    path.write_bytes(content)
    said = fails(str(path), trust=True)
    assert re.search(r"cannot be read as a TorchScript archive: its record \S+ does not fit", said)


@deprecated
def test_a_program_is_opened_where_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    scripted(net()).save(str(path))
    message = fails(str(path))
    for words in ("a TorchScript archive", "can run any code", "--trust-checkpoint"):
        assert words in message
    assert "Leave --weights out" in fails(str(path), "random:0", trust=True)
    assert "--model-arg depth" in fails(str(path), None, trust=True, arguments={"depth": 1})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"some text", "is neither a TorchScript archive (torch.jit.save) nor a torch.export program"),
        ({"weight": torch.zeros(1)}, "If it holds tensors, name the model, and give it with --weights"),
    ],
)
def test_a_file_that_is_no_program_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert words in fails(str(path), None, trust=True)


# -- torch.export --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by name: of any batch, of 2 to 6 images, of exactly 4, and exported in training mode."""
    folder = tmp_path_factory.mktemp("programs")
    made = {
        "any": exported(net(), torch.export.Dim("batch")),
        "some": exported(net(changed=0.1), torch.export.Dim("batch", min=2, max=6)),
        "four": exported(net()),
        "training": exported(net().train()),
    }
    for name, program in made.items():
        torch.export.save(program, folder / f"{name}.pt2")
    return {name: str(folder / f"{name}.pt2") for name in made}


def program(path: str) -> tuple[ModelSource, nn.Module]:
    source = classifiers.source_of(path, trust=True)
    return source, source.build(source.find_weights(None), None)


def test_a_program_of_torch_export_has_the_numbers_of_its_model(programs: dict[str, str]) -> None:
    _, model = program(programs["any"])
    assert torch.equal(model(IMAGES), net()(IMAGES))
    assert not any(module.training for module in model.eval().modules())
    assert identity(program(programs["any"])[1]) == identity(model)
    assert identity(program(programs["some"])[1])[0] != identity(model)[0]


def test_a_program_exported_in_training_mode_is_refused(programs: dict[str, str]) -> None:
    message = fails(programs["training"], None, trust=True)
    assert "was exported in training mode (in it, batch_norm, dropout work" in message
    assert "after model.eval()" in message


@pytest.mark.parametrize(
    ("name", "batch", "samples", "words"),
    [
        ("any", 7, 10, None),
        ("any", 7, 3, None),
        ("some", 4, 14, None),
        ("some", 7, 14, "batches of 2 to 6 images, and this run has one of 7. Give --batch-size 6;"),
        ("some", 7, 13, "has one of 7. Give --batch-size 6 and --limit 12;"),
        ("some", 4, 13, "has one of 1. Give --batch-size 4 and --limit 12;"),
        ("some", 8, 3, None),
        ("four", 4, 12, None),
        ("four", 3, 12, "for batches of 4 images, and this run has one of 3. Give --batch-size 4;"),
        ("four", 4, 14, "has one of 2. Give --batch-size 4 and --limit 12;"),
        ("four", 8, 3, "has one of 3. Give --batch-size 4; or export it with a dynamic batch dimension"),
    ],
)
def test_batches_that_a_program_does_not_take_are_refused(
    programs: dict[str, str], name: str, batch: int, samples: int, words: str | None
) -> None:
    source, _ = program(programs[name])
    if words is None:
        source.check_batches(batch, samples)
        return
    with pytest.raises(UsageError) as caught:
        source.check_batches(batch, samples)
    assert words in str(caught.value)


# -- timm ----------------------------------------------------------------------------------------------

TIMM = "timm:test_resnet.r160_in1k"


def test_a_model_of_timm_has_its_classes_and_preprocessing() -> None:
    first, again, other = (classifiers.build(TIMM, f"random:{seed}", CLASSES) for seed in (1, 1, 2))
    assert identity(first) == identity(again) != identity(other)
    assert not first.training
    with torch.inference_mode():
        assert first(torch.zeros(2, 3, 64, 64)).shape == (2, CLASSES)
    source = classifiers.source_of(TIMM)
    assert str(source.preprocessing()) == "168 bilinear, crop 160, mean 0.5, std 0.5"
    assert source.preprocessing_origin() == "timm's for test_resnet.r160_in1k"
    arguments = {"drop_rate": 0.25}
    assert "drop_rate" in fails("timm:test_vit", "random:0", arguments={"drop_rate": {}})
    assert getattr(classifiers.create(TIMM, 2, arguments), "drop_rate", None) == 0.25


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("timm:resnet81", "random:0", ["has no model 'resnet81'", "Nearest: timm:resnet18"]),
        ("timm:resnet18.nowhere", "DEFAULT", ["has no weights 'nowhere' for resnet18", "a1_in1k"]),
        ("timm:resnet18", "IMAGENET1K_V1", ["has no weights of this name", "timm:resnet50.a1_in1k"]),
        ("timm:resnet18", "nowhere.pt", ["nowhere.pt does not exist"]),
        ("timm:vit_base_patch16_224.mae", "DEFAULT", ["no weights with a classifier"]),
        ("timm:gcvit_tiny.in1k", "DEFAULT", ["for timm:gcvit_tiny.in1k on the hub (url: https://"]),
    ],
)
def test_what_timm_has_not_is_refused(name: str, weights: str, words: list[str]) -> None:
    message = fails(name, weights)
    for word in words:
        assert word in message


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, in place of the user's own."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_published_weights_of_timm_are_read_from_the_cache(hub: Path) -> None:
    from safetensors.torch import save_file

    message = fails(TIMM, "DEFAULT")
    assert "timm/test_resnet.r160_in1k) are not in the local cache. Add --download" in message
    wanted = classifiers.build(TIMM, "random:5", None)
    repository = hub / "models--timm--test_resnet.r160_in1k"
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    save_file(dict(wanted.state_dict()), repository / "snapshots/abc/model.safetensors")
    model: Any = classifiers.build(TIMM, "DEFAULT", None)
    assert identity(model)[0] == identity(wanted)[0]
    assert "state_dict" not in model.pretrained_cfg
    source = classifiers.source_of(TIMM)
    late = source.build_late(source.find_weights("DEFAULT"), None, note=pytest.fail)
    assert is_late(late)
    check_same(late, model)
    known = source.known_classes(source.find_weights("DEFAULT"))
    assert known is not None
    assert known.wnids[:1] == ("n01440764",)
    # timm would leave the last layer as it was drawn.
    with pytest.raises(OtherClasses) as caught:
        classifiers.build(TIMM, "DEFAULT", CLASSES)
    assert caught.value.count == 1000


# -- transformers --------------------------------------------------------------------------------------


def write_vit(folder: Path, *, names: list[str], **changes: Any) -> None:
    """A tiny classifier with random weights in several files, and its processor."""
    import transformers

    values: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": SIZE,
        "patch_size": 8,
        "id2label": dict(enumerate(names)),
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**values))
    model.save_pretrained(folder, max_shard_size="6KB")
    size = {"height": SIZE, "width": SIZE}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "vit"
    write_vit(folder, names=["cat", "dog", "ant"])
    return folder


def test_a_classifier_of_transformers_is_read_from_its_folder(vit: Path, tmp_path: Path) -> None:
    assert len(list(vit.glob("model-*.safetensors"))) > 1
    source = classifiers.source_of(f"hf:{vit}")
    model: Any = source.build(source.find_weights(None), CLASSES)
    again = classifiers.build(f"hf:{vit}", None, None)
    assert identity(model) == identity(again)
    late = source.build_late(source.find_weights(None), CLASSES, note=pytest.fail)
    assert is_late(late)
    check_same(late, model)
    assert model(IMAGES).logits.shape == (4, CLASSES)
    shutil.copytree(vit, tmp_path / "elsewhere")
    moved = classifiers.source_of(f"hf:{tmp_path / 'elsewhere'}")
    assert moved.identity == source.identity == "hf:vit"
    assert identity(moved.build(moved.find_weights(None), None)) == identity(model)
    with pytest.raises(OtherClasses) as caught:
        source.build(source.find_weights(None), 7, Loading())
    assert caught.value.count == CLASSES
    drawn = classifiers.build(f"hf:{vit}", "random:3", None)
    assert identity(drawn)[0] != identity(model)[0]
    torch.save(model.state_dict(), tmp_path / "w.pt")
    assert identity(classifiers.build(f"hf:{vit}", str(tmp_path / "w.pt"), None))[0] == identity(model)[0]
    known = source.known_classes(source.find_weights(None))
    assert known is not None
    assert (known.names, known.wnids) == (("cat", "dog", "ant"), ())


def test_classes_of_imagenet_are_known_by_the_names_of_their_list(tmp_path: Path) -> None:
    from dualeval.models import published

    names = [f"{name}, and more" for name in published.imagenet_classes().names]
    write_vit(tmp_path, names=names)
    source = classifiers.source_of(f"hf:{tmp_path}")
    known = source.known_classes(source.find_weights(None))
    assert known is not None
    assert known.find("n01440764", exactly=True) == [0]
    write_vit(tmp_path, names=[f"LABEL_{index}" for index in range(4)])
    source = classifiers.source_of(f"hf:{tmp_path}")
    assert source.known_classes(WeightsSource(text="")) is None


def test_folders_that_hold_no_classifier_are_refused(vit: Path, tmp_path: Path) -> None:
    import transformers

    assert "nowhere does not exist" in fails("hf:nowhere")
    assert "holds no config.json" in fails(f"hf:{tmp_path}")
    shutil.copytree(vit, tmp_path / "a")
    (tmp_path / "a/preprocessor_config.json").unlink()
    assert "holds no preprocessor_config.json" in fails(f"hf:{tmp_path / 'a'}")
    shutil.copytree(vit, tmp_path / "b")
    transformers.BertConfig(architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path / "b")
    # What the model is comes first: a language model has no image processor.
    (tmp_path / "b/preprocessor_config.json").unlink()
    message = fails(f"hf:{tmp_path / 'b'}")
    assert "expected an image classifier" in message
    assert f"type: --task text-classification --model {tmp_path / 'b'} --data" in message
    assert "Leave --weights out" in fails(f"hf:{vit}", "DEFAULT")
    assert "takes no arguments" in fails(f"hf:{vit}", arguments={"depth": 1})


@pytest.mark.parametrize(("name", "library"), [("timm:resnet18", "timm"), ("hf:vit", "transformers")])
def test_a_library_that_is_not_installed_is_named(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked == library else find(asked))
    extra = {"transformers": "hf"}.get(library, library)
    assert f"pip install 'dualeval[{extra}]'" in fails(name, "random:0")


# -- whole jobs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three class folders, eleven pictures: the last batch is smaller."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(11):
        save(folder / ("ant", "cat", "dog")[number % 3] / f"{number}.png", size=(24, 20 + number))
    return folder


def test_folders_are_known_by_the_names_of_a_model_beside_a_job_file(
    pictures: Path, vit: Path, tmp_path: Path
) -> None:
    """The same job as in Python, wherever the folder of the model lies."""
    shutil.copytree(vit, tmp_path / "vit")
    (tmp_path / "job.toml").write_text(f'model = "hf:vit"\ndata = "{pictures}"\n')
    typed = Job.read(tmp_path / "job.toml", {}).make_task()
    one, two = (
        dualeval.evaluate(task, batch_size=4, workers=0)
        for task in (ImageClassification(model=f"hf:{vit}", data=pictures), typed)
    )
    assert two.labels["folders"] == {"ant": 2, "cat": 0, "dog": 1}
    assert two.labels["classes"] == ["cat", "dog", "ant"]
    assert (two.samples["evaluated"], two.job["resize_mode"]) == (11, "squash")
    assert (one.metrics_digest, one.fingerprint) == (two.metrics_digest, two.fingerprint)


def test_a_program_whose_last_batch_does_not_fit_is_refused(programs: dict[str, str], pictures: Path) -> None:
    given: dict[str, Any] = {"model": programs["four"], "trust_checkpoint": True}
    task = ImageClassification(**given, data=pictures, preprocessing="imagenet", resize=SIZE, crop=SIZE)
    with pytest.raises(UsageError, match="Give --batch-size 4 and --limit 8"):
        dualeval.evaluate(task, batch_size=4, workers=0)


def test_arguments_are_part_of_the_identity(pictures: Path) -> None:
    def fingerprint(*words: str) -> dict[str, Any]:
        options = ImageClassificationOptions(
            model="squeezenet1_1", weights="random:0", data=pictures, model_arg=words
        )
        return dict(options.make().fingerprint())

    assert fingerprint("dropout=0.5")["model_arguments"] == ["dropout=0.5"]
    assert fingerprint("dropout=0.25") != fingerprint("dropout=0.5") != fingerprint()


def test_paths_of_models_count_from_the_job_file(tmp_path: Path) -> None:
    assert model_beside("hf:vit", tmp_path) == f"hf:{tmp_path / 'vit'}"
    assert model_beside("net.pt2", tmp_path) == str(tmp_path / "net.pt2")
    names = ["resnet18", "timm:a.b", "a.b:c"]
    assert [model_beside(name, tmp_path) for name in names] == names


# -- a module and a folder, from Python ----------------------------------------------------------------


def test_a_module_and_a_folder_have_the_digest_of_the_named_model(pictures: Path, tmp_path: Path) -> None:
    size_of: dict[str, Any] = {"preprocessing": "imagenet", "resize": SIZE, "crop": SIZE}
    job = ImageClassification(
        model="torchvision.models:resnet18", weights="random:0", data=pictures, **size_of
    )
    by_name = dualeval.evaluate(job, batch_size=4, workers=0)
    torch.manual_seed(0)
    net = torchvision().models.resnet18(num_classes=3).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    given: dict[str, Any] = {"model": net, "data": str(pictures), "batch_size": 4, "workers": 0}
    result = dualeval.evaluate(**given, **size_of, out=tmp_path / "own")
    assert (result.metrics_digest, result.samples_digest) == (by_name.metrics_digest, by_name.samples_digest)
    # The caller's module is as it was: no trial has moved a batch norm's mean.
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert result.description["weights"].startswith("as the module has them")

    with pytest.raises(UsageError, match=r"nothing says how its pictures are prepared.*--preprocessing none"):
        dualeval.evaluate(**given)
    named = dualeval.evaluate(**given, **size_of, metrics=["top1", "loss"])
    assert [*named.metrics] == ["top1", "loss"]

    assert result.predictions()["id"].to_pylist()[0] == "ant/0.png"
    assert str(result).startswith("model           ResNet\n")
    assert all(line in result._repr_html_() for line in ("metrics_digest", result.metrics_digest))
    with pytest.raises(UsageError, match=r"has written no rows\. Give evaluate out=FOLDER"):
        named.predictions()
    (tmp_path / "own/predictions.parquet").write_bytes(b"another run's")
    with pytest.raises(DualevalError, match="is not the file of this result"):
        result.predictions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "a.pt"}, "the module Linear has its weights. Leave weights out"),
        ({"model_arg": ("depth=2",)}, "Linear takes no arguments, because it is a module already"),
        ({"model": 3}, "model is a int: expected an nn.Module"),
        ({"metrics": "top1"}, r"expected a list of names, as \['top1', 'loss'\]"),
        ({"preprocessing": 3}, "found 3, expected none, imagenet or FILE.py:FUNCTION"),
        ({"download": True}, "download"),
    ],
)
def test_options_that_a_module_cannot_have_are_refused(
    options: dict[str, Any], message: str, pictures: Path
) -> None:
    with pytest.raises((UsageError, TypeError), match=message):
        dualeval.evaluate(**{"model": nn.Linear(3, 3), "data": pictures, "preprocessing": "none", **options})


def test_weights_whose_name_is_too_long_are_refused() -> None:
    with pytest.raises(UsageError, match=r"weights file a{256} does not exist\. Give a checkpoint"):
        weights_of_file("a" * 256)
