"""An evaluation inside a script that trains: the training goes on bit for bit as without it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import dualeval
from dualeval.engine.device.divided import check_sharded
from dualeval.engine.guest import CallersModels, as_it_was
from dualeval.errors import UsageError
from dualeval.world import World
from tests.vehicles import sessions
from tests.vehicles.tiny import CLASSES, FEATURES, TinyTask


class Caching(nn.Linear):
    """Keeps a tensor of its first forward, as rotary embeddings keep theirs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self._kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self._kept is None:
            self._kept = torch.ones(self.out_features) + 0
        return super().forward(input) * self._kept


class TrainedTask(TinyTask):
    """Evaluates the model that is being trained; its reading draws random numbers from all generators."""

    # The copies of a thread each would keep what the model is to keep.
    thread_safe = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(200)
        self.model = model

    def build_model(self, device: torch.device) -> nn.Module:
        return self.model.eval()

    def collate(self, samples: Any) -> dict[str, Tensor]:
        random.random(), np.random.rand(), torch.rand(1)
        return super().collate(samples)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Caching(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


evaluate = functools.partial(sessions.evaluate, guest=True)


def test_the_bits_of_a_guest_are_those_of_an_owner() -> None:
    expected = evaluate(TinyTask(200), guest=False, batch_size=16)
    assert evaluate(TinyTask(200), batch_size=16).metrics_digest == expected.metrics_digest


def test_a_model_that_keeps_a_tensor_can_be_trained_afterwards() -> None:
    model = make_model()
    evaluate(TrainedTask(model))
    assert model.training
    model(torch.rand(4, FEATURES)).sum().backward()
    owned = make_model()
    evaluate(TrainedTask(owned), guest=False)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        owned.train()(torch.rand(4, FEATURES)).sum().backward()


def spoil(model: nn.Sequential) -> None:
    """Change all that an evaluation must put back."""
    first, norm = model[0], model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    first.register_forward_hook(lambda module, inputs, output: output)
    first.weight.requires_grad_(False)
    first.weight.grad = None
    norm.running_mean.add_(1)
    model.add_module("extra", nn.Identity())
    model.double()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.backends.cudnn.benchmark = True
    torch.set_deterministic_debug_mode(2)


def state_of(model: nn.Sequential) -> list[Any]:
    return [
        [(name, value.dtype, value.tolist()) for name, value in model.state_dict().items()],
        [(name, module.training) for name, module in model.named_modules()],
        [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        [list(module._forward_hooks) for module in model.modules()],
        (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        (torch.is_autocast_enabled("cpu"), torch.backends.cudnn.benchmark),
        torch.get_deterministic_debug_mode(),
    ]


class Spoiling(TrainedTask):
    """Changes all, and may raise then."""

    def __init__(self, model: nn.Sequential, raises: bool) -> None:
        super().__init__(model)
        self._sequential = model
        self._raises = raises

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = super().forward(model, batch)
        if len(logits) == 4:  # not in the look at the first samples
            spoil(self._sequential)
        if self._raises:
            raise ZeroDivisionError
        return logits.float()


@pytest.mark.parametrize("raises", [False, True])
def test_a_callers_model_and_its_hooks_are_as_they_were(raises: bool) -> None:
    model = make_model()
    assert isinstance(model, nn.Sequential)
    model[3].eval()  # one of several modes
    model(torch.rand(4, FEATURES)).sum().backward()
    before = state_of(model)
    hooks = [dict(vars(module)["_forward_hooks"]) for module in model.modules()]
    task = Spoiling(model, raises)
    task.thread_safe = False
    try:
        evaluate(task, limit=4, batch_size=4)
    except ZeroDivisionError:
        assert raises
    assert state_of(model) == before
    assert hooks == [dict(vars(module)["_forward_hooks"]) for module in model.modules()]


class Deep(TinyTask):
    """Has a model far inside."""

    def __init__(self, attribute: str, value: Any, model: nn.Module) -> None:
        super().__init__(20)
        setattr(self, attribute, value)
        # Through what is not looked at.
        self._build: Callable[[], nn.Module] = lambda: model.eval().double().requires_grad_(False).float()

    def build_model(self, device: torch.device) -> nn.Module:
        return self._build()


@pytest.mark.parametrize("path", ["box", "trainer"])
def test_a_model_that_is_inside_of_a_task_is_put_back(path: str) -> None:
    model = make_model()
    found = {
        "box": [[model]],
        "trainer": SimpleNamespace(trainer=SimpleNamespace(models={"student": model}, model=model)),
    }
    evaluate(Deep(path, found[path], model))
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())


class Stateful(nn.Linear):
    """Has state that is no buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.calls = 0
        self.mean = torch.zeros(())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + input.mean()
        self.kept = input
        self.seen = self.seen + 1
        return super().forward(input) * self.mean


def test_state_that_is_no_buffer_is_put_back() -> None:
    model = Stateful()
    before = dict(vars(model))
    evaluate(TrainedTask(model))
    assert list(vars(model)) == list(before)
    assert all(vars(model)[name] is value for name, value in before.items())
    assert (model.calls, model.seen.item()) == (0, 0)


def test_batch_norms_that_stay_in_training_are_put_back() -> None:
    class Norm(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Norm:
            return super().train(True)

    model = nn.Sequential(Norm(FEATURES), nn.Linear(FEATURES, CLASSES))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model.eval()(torch.rand(4, FEATURES)).sum()
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    assert not torch.equal(mean["0.running_mean"], before["0.running_mean"])
    evaluate(TrainedTask(model))
    assert all(torch.equal(mean[name], value) for name, value in model.state_dict().items())
    kept.backward()


class Rank0:
    """A backend of two ranks whose rank 0 has other buffers."""

    world = World(rank=1, size=2, local_rank=1, local_size=2, node_rank=0, launcher="torchrun")

    def all_gather_json(self, own: Any) -> list[Any]:
        return [[own[0], "other"], own]

    def broadcast(self, payload: Tensor, src: int) -> Tensor:
        return payload + 1


def test_rank_0s_buffers_are_not_written_into_the_models() -> None:
    norm = nn.BatchNorm1d(2).eval()
    other = nn.BatchNorm1d(2).eval()
    other.running_mean = norm.running_mean  # of two modules, and one tensor
    model = nn.Sequential(norm, other)
    originals = list(model.buffers())
    versions = [buffer._version for buffer in originals]
    guest = CallersModels()
    guest.remember(model)
    assert guest.share_buffers(model, cast(Any, Rank0()), cast(Any, SimpleNamespace(meet=lambda: None)))
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1]
    assert other.running_mean is norm.running_mean
    guest.put_back()
    assert all(now is before for now, before in zip(model.buffers(), originals, strict=True))
    assert [buffer._version for buffer in originals] == versions


def test_wrappers_of_training_are_taken_off() -> None:
    model = make_model()
    nested = nn.Sequential(nn.DataParallel(model))
    with as_it_was(TinyTask(1)) as guest:
        taken = guest.take(nn.DataParallel(nested))
        assert [type(module).__name__ for module in taken.modules()][:2] == ["Sequential", "Sequential"]
        assert not any(isinstance(module, nn.DataParallel) for module in taken.modules())
    assert isinstance(nested[0], nn.DataParallel)


def test_a_parameter_that_is_written_into_is_named() -> None:
    class Writing(TrainedTask):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            model[-1].bias.add_(1)  # type: ignore[index]
            return super().forward(model, batch)

    with pytest.raises(UsageError, match="has changed the parameter 'bias' of a Linear in place"):
        evaluate(Writing(make_model()))


def test_a_model_that_is_sharded_by_fsdp1_is_refused_on_several_ranks() -> None:
    class FullyShardedDataParallel(nn.Linear):
        """Named as torch's."""

    world = World(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, launcher="torchrun")
    check_sharded(FullyShardedDataParallel(1, 1), World.alone())
    with pytest.raises(UsageError, match=r"sharded by FullyShardedDataParallel \(FSDP1\).*fully_shard"):
        check_sharded(FullyShardedDataParallel(1, 1), world)


def test_a_note_is_said_once_to_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, data = nn.Linear(2, 3), [(torch.ones(2), 0)] * 8
        for _ in range(2):
            dualeval.evaluate(model=model.train(), data=data, metrics=["loss"])
    finally:
        torch.distributed.destroy_process_group()
    assert capsys.readouterr().err.count("was in training mode") == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_an_outer_autocast_does_not_reach_the_evaluation(threads: int) -> None:
    """It keeps casts of weights as they were: those of the training, and none of an evaluation."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    model: Any = make_model().eval()
    rows = torch.rand(8, FEATURES)
    task = TrainedTask(model)
    task.thread_safe = True
    run = functools.partial(evaluate, task, batch_size=16, precision="amp-bf16")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            old = model(rows)
            with torch.no_grad():
                for parameter in cast(nn.Sequential, model)[-1].parameters():
                    parameter.mul_(-3)
            inside = run()
            assert torch.equal(model(rows), old)
        assert inside.metrics_digest == run().metrics_digest
    finally:
        torch.set_num_threads(before)
