"""Memory layouts: which models are channels last, and what falls back."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.job.agreement import check_same_job
from dualeval.engine.model.layouts import layout_by_trial, layout_of
from dualeval.errors import UsageError
from dualeval.options.choices import CHANNELS_LAST, CONTIGUOUS
from dualeval.vision_library import torchvision
from tests.engine.model.test_preparation import Small, evaluate, images, made, outputs, prepared

CONVOLUTIONAL = (
    *("alexnet", "resnet18", "squeezenet1_0", "densenet121", "googlenet", "shufflenet_v2_x0_5"),
    *("mobilenet_v3_small", "efficientnet_b0"),
)
OF_TRANSFORMERS = ("vit_b_32", "convnext_tiny", "swin_t", "maxvit_t")


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, CHANNELS_LAST) for name in CONVOLUTIONAL), *((name, CONTIGUOUS) for name in OF_TRANSFORMERS)],
)
def test_auto_gives_torchvisions_convolutional_models_channels_last(name: str, layout: str) -> None:
    options = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model = torchvision().models.get_model(name, **options)
    assert layout_of(model, "auto") == layout


def test_a_model_without_convolutions_of_images_is_contiguous() -> None:
    for model in (nn.Linear(3, 4), nn.Sequential(nn.Conv1d(3, 4, 3)), nn.Conv3d(1, 1, 3), nn.LSTM(3, 4)):
        assert layout_of(model, "auto") == CONTIGUOUS
        with pytest.raises(UsageError, match="--layout channels-last: the model has no weight of four"):
            layout_of(model, "channels-last")


def test_programs_stay_as_they_were_made() -> None:
    model = made()
    with pytest.warns(DeprecationWarning, match="deprecated"):
        traced = torch.jit.trace(model, images())  # type: ignore[no-untyped-call]
    exported = torch.export.export(model, (images(),)).module()
    for program, words in ((traced, "TorchScript"), (nn.Sequential(exported), "torch.export")):
        assert layout_of(program, "auto") == CONTIGUOUS
        before = {name: tensor.stride() for name, tensor in program.named_parameters()}
        assert prepared(program) is program
        assert before == {name: tensor.stride() for name, tensor in program.named_parameters()}
        refused: list[dict[str, Any]] = [
            *({"layout": "channels-last"}, {"optimize": "fold"}, {"optimize": "compile"})
        ]
        for options in refused:
            with pytest.raises(UsageError, match=f"--{next(iter(options))} .*{words}"):
                prepared(program, **options)
        with pytest.raises(UsageError, match=f"--precision bf16: .*{words}"):
            prepared(program, precision="bf16")


def test_a_model_that_cannot_be_channels_last_is_contiguous(capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(made(by_view=True))
    assert result.job["layout"] == CONTIGUOUS
    assert "layout contiguous: channels-last, the model fails (" in capsys.readouterr().err
    assert result.metrics_digest == evaluate(made(by_view=True), layout="contiguous").metrics_digest
    assert evaluate(made()).job["layout"] == CHANNELS_LAST
    with pytest.raises(UsageError, match=r"--layout channels-last: .*Tensor\.view.*or give --layout contig"):
        evaluate(made(by_view=True), layout="channels-last")


class Asserting(Small):
    """Takes contiguous images alone, and says nothing of the kind; or as the variable says."""

    def forward(self, images: Tensor) -> Tensor:
        fails = os.environ.get("FORWARD_FAILS", "channels-last")
        if fails == "always" or (fails == "channels-last" and not images.is_contiguous()):
            raise ValueError("no")
        if fails == "never":
            torch.rand(1)
        return super().forward(images)


def tried() -> tuple[str, str | None, list[str]]:
    """What "auto" comes to, why, and in which layouts the first samples were computed."""
    model, layouts = made(Asserting), []

    def compute_in(layout: str) -> None:
        layouts.append(layout)
        outputs(prepared(copy.deepcopy(model), layout=layout), images())

    return *layout_by_trial(model, "auto", compute_in), layouts


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (
            "channels-last",
            (CONTIGUOUS, "layout contiguous: channels-last, the model fails (ValueError: no)", 2),
        ),
        ("always", (CONTIGUOUS, None, 2)),
        ("never", (CHANNELS_LAST, None, 1)),
    ],
)
def test_a_trial_falls_back_to_contiguous_where_channels_last_fails(
    monkeypatch: pytest.MonkeyPatch, fails: str, expected: tuple[str, str | None, int]
) -> None:
    """Numbers are not compared; what fails in both layouts is the run's own error."""
    monkeypatch.setenv("FORWARD_FAILS", fails)
    before = torch.get_rng_state()
    layout, said, tries = expected
    assert tried() == (layout, said, [CHANNELS_LAST, CONTIGUOUS][:tries])
    assert torch.equal(torch.get_rng_state(), before), "its random numbers are the trial's own"


def test_other_ranks_with_another_layout_are_refused_with_what_to_type() -> None:
    words = r"\(layout: channels-last on rank 0, None here\).*fails channels-last.*--layout contiguous"
    with pytest.raises(UsageError, match=words):
        check_same_job([{"layout": CHANNELS_LAST}, {}], ["one", "two"], [{}, {}])


def test_a_resumed_run_comes_to_the_same_layout_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(made(Asserting), out=tmp_path)
    assert first.job["layout"] == CONTIGUOUS
    for options in ({}, {"layout": "contiguous"}):
        again = evaluate(made(Asserting), out=tmp_path, **options)
        assert (again.earlier, again.fingerprint) == (True, first.fingerprint)
    monkeypatch.setenv("FORWARD_FAILS", "never")  # as where the machine has what it lacked before
    with pytest.raises(
        UsageError,
        match=r"layout: None there, channels-last now.*give both --layout "
        r"contiguous",
    ):
        evaluate(made(Asserting), out=tmp_path)


def test_a_layout_is_in_the_identity(tmp_path: Path) -> None:
    by_auto = evaluate(made(), out=tmp_path / "auto")
    named = evaluate(made(), out=tmp_path / "auto", layout="channels-last")
    assert named.earlier
    assert named.fingerprint == by_auto.fingerprint
    evaluate(made(), out=tmp_path / "contiguous", layout="contiguous")
    job = json.loads((tmp_path / "contiguous/job.json").read_text())["job"]
    assert not {"layout", "optimize", "keep_batchnorm_fp32"} & job.keys(), "as older versions wrote it"
    with pytest.raises(
        UsageError,
        match=r"layout: None there, channels-last now.*give both --layout "
        r"contiguous",
    ):
        evaluate(made(), out=tmp_path / "contiguous")


@pytest.mark.long
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_torchvisions_models_have_the_same_numbers_channels_last(name: str) -> None:
    options = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision().models.get_model(name, **options).eval()
    given = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    wanted = outputs(copy.deepcopy(model), given)
    assert torch.allclose(outputs(prepared(model), given), wanted, rtol=1e-3, atol=1e-3)
