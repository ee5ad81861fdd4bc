"""A model divided over the ranks has the numbers and the identity of the whole one."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualeval
from dualeval.backends import check_mesh
from dualeval.backends.base import Backend
from dualeval.cli import dualeval as command
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.sharding.fsdp import check_torch
from dualeval.engine.sharding.model import units_of
from dualeval.engine.sharding.parameters import parameters_of
from dualeval.errors import UsageError
from dualeval.result import Result
from tests.conftest import ROOT, Launch
from tests.vehicles.launchers import start
from tests.vehicles.made_models import seeded
from tests.vehicles.sharded_models import models_for

DATA = [(row,) for row in torch.arange(40.0).reshape(10, 4) / 40]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).eval()


def evaluated(model: Any = made, **options: Any) -> Result:
    def observe(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"sum": outputs.double().sum(1)}

    return dualeval.evaluate(
        model=model, data=DATA, metrics=["sum"], observe=observe, batch_size=4, **{"device": "cpu", **options}
    )


# -- one process -------------------------------------------------------------------------------------------


def test_one_process_divides_nothing_and_has_the_same_numbers(tmp_path: Path) -> None:
    whole = evaluated(out=tmp_path)
    # The identity is that of the whole model: it is found finished, and two batches of it are computed again.
    again = evaluated(out=tmp_path, shard="fsdp")
    assert again.earlier and again.replay == "same bits"
    divided = evaluated(shard="fsdp")
    assert (divided.metrics_digest, divided.weights) == (whole.metrics_digest, whole.weights)
    assert divided.job["schedule"] == "lockstep"
    assert not torch.distributed.is_initialized(), "the group of one ends with the evaluation"


def test_a_sharded_model_in_bf16_has_the_digest_of_the_whole_one() -> None:
    sharded = evaluated(shard="fsdp", precision="bf16")
    assert sharded.metrics_digest == evaluated(precision="bf16").metrics_digest


def test_a_model_of_the_script_is_refused() -> None:
    model = made()
    before = [parameter.clone() for parameter in model.parameters()]
    for given in (model, lambda: model):
        with pytest.raises(UsageError, match="this Sequential is the script's own"):
            evaluated(given, shard="fsdp")
    assert type(model) is nn.Sequential
    assert all(map(torch.equal, before, model.parameters()))


def test_a_run_that_owns_its_model_divides_it() -> None:
    def task() -> dualeval.ModelTask:
        return dualeval.ModelTask(
            model=made(), data=DATA, metrics=["sum"], observe=lambda outputs, batch: {"sum": outputs.sum(1)}
        )

    with dualeval.Session(device="cpu") as session:
        whole = session.evaluate(task(), puts_back=False)
        divided = session.evaluate(task(), puts_back=False, shard="fsdp")
    assert (divided.description["model"], divided.fingerprint) == ("Sequential", whole.fingerprint)
    assert divided.metrics_digest == whole.metrics_digest


class Reader(nn.Module):
    """Reads the weights of a part without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.other(x), self.part.weight)


def test_a_forward_that_reads_the_weights_of_a_part_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"without calling it.*Call the part \(self.part\(x\)\)"):
        evaluated(Reader, shard="fsdp")


def of_all_parameters(model: Reader, x: Tensor) -> Any:
    return model.other(x) * float(sum(float(each.sum()) for each in model.parameters()))


def of_some_rows(model: Reader, x: Tensor) -> Any:
    return model.other(x) * model.part.weight[0].detach().mean().item()


@pytest.mark.parametrize("function", [of_all_parameters, of_some_rows])
def test_a_forward_that_reads_values_of_a_part_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Reader, Tensor], Any]
) -> None:
    # A rank would read those of its own rows, and nobody would hear of it.
    monkeypatch.setattr(Reader, "forward", function)
    with pytest.raises(UsageError, match=r"without calling it.*Call the part \(self.part\(x\)\)"):
        evaluated(Reader, shard="fsdp")


def of_shapes(model: Reader, x: Tensor) -> Any:
    weight = model.part.weight
    assert weight.data.is_floating_point() and weight.device.type == "cpu" and weight.ndim == weight.dim()
    zeros = torch.zeros(x.shape[-1], dtype=weight.dtype, device=weight.device) + 0.5
    return model.part(model.other(x.to(weight.dtype)) + zeros) / len(weight) / weight.shape[0]


def test_a_forward_may_ask_for_what_does_not_depend_on_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "forward", of_shapes)
    make = partial(seeded, Reader)
    assert evaluated(make, shard="fsdp").metrics_digest == evaluated(make).metrics_digest


class Rows(nn.Module):
    """Gives rows of its own parameters, as a table of positions may."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(7, 4))
        self.part = nn.Linear(4, 3)

    def forward(self) -> Any:
        return {"rows": [self.table[:1]]}


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def forward(self, x: Tensor) -> Any:
        return x + self.rows()["rows"][0]


def test_a_part_that_returns_its_own_parameters_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"a Rows returns its own parameters.*weight\.clone\(\)"):
        evaluated(Added, shard="fsdp")
    monkeypatch.setattr(Rows, "forward", lambda rows: {"rows": [rows.table[:1].clone()]})
    make = partial(seeded, Added)
    assert evaluated(make, shard="fsdp").metrics_digest == evaluated(make).metrics_digest


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": "ddp"}, "shard 'ddp': expected one of fsdp"),
        ({"offload": True}, "the model is not sharded: give shard fsdp too"),
        ({"offload": 1, "shard": "fsdp"}, "offload 1: expected True or False"),
        ({"shard": "fsdp", "optimize": "fold"}, "nothing can be folded"),
        ({"shard": "fsdp", "optimize": "compile"}, "optimize compile: with shard fsdp"),
        ({"shard": "fsdp", "schedule": "dynamic"}, "none can take more batches than another"),
        ({"shard": "fsdp", "offload": True}, "this run computes there"),
    ],
)
def test_options_that_do_not_go_with_shard_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        evaluated(**options)


@pytest.mark.parametrize("words", [["bench", "--dry-run"], ["doctor", "--invariance"]])
def test_commands_that_look_at_whole_models_refuse_shard(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('shard = "fsdp"\n')
    with pytest.raises(UsageError, match="shard belongs to 'dualeval run'"):
        command.main([*words, "--config", str(tmp_path / "job.toml")], standalone_mode=False)
    for flags in (["--shard", "fsdp"], ["--offload"]):
        with pytest.raises(UsageError, match=f"{flags[0]} belongs to 'dualeval run'"):
            command.main([*words, *flags], standalone_mode=False)


def test_backends_without_torchs_groups_say_how_to_start() -> None:
    for name in ("single", "torch"):
        check_mesh(name)
    with pytest.raises(UsageError, match=r"these ranks talk over horovod\. Start it with 'torchrun"):
        check_mesh("horovod")
    with pytest.raises(UsageError, match="these ranks talk over mpi"):
        Backend.mesh(type("", (), {"name": "mpi"})())


def test_a_note_says_that_each_rank_has_built_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluated(shard="fsdp")
    assert "each rank has built all of it" in capsys.readouterr().err
    assert (result.job["shard"], result.job["schedule"]) == ("fsdp", "lockstep")


def test_an_older_torch_is_refused() -> None:
    check_torch("2.13.0+cpu")
    with pytest.raises(UsageError, match=r"shard needs torch 2\.13 or newer, and this is torch 2\.9\.1"):
        check_torch("2.9.1+cu128")


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    return model


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.LazyLinear(2)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lazy, "has no values yet: it belongs to a lazy module"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (sparse, r"weight is a Parameter, torch\.sparse_coo, .*only plain, dense tensors"),
        (lambda: nn.TransformerEncoderLayer(4, 2), "the model is an nn.TransformerEncoderLayer"),
        (scripted, "the model is a TorchScript program"),
        (nn.ReLU, "no parameters to divide"),
        (lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}), "ModuleDict, which has no forward"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parameters_of(make())


def test_parameters_go_by_their_first_names_also_where_ranks_get_no_row() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    model[1].weight = model[0].weight
    found = parameters_of(model)
    assert [parameter.name for parameter in found] == ["0.bias", "0.weight", "1.bias"]
    assert found[1].names == ("0.weight", "1.weight")
    assert [found[0].rows_of(rank, 4) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_an_identity_keeps_no_parameter_alive() -> None:
    model = nn.Linear(2, 2)
    identity = ModelIdentity.of(model, weights={})
    weight = model.weight
    assert identity.hasher._name_of(id(weight)) == b"tensor weight"
    model.weight, number = nn.Parameter(torch.zeros(2, 2)), id(weight)
    del weight
    assert identity.hasher._name_of(number) is None, "another tensor may get its address"


# -- several ranks -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"layout": "contiguous"}),
        *((2, {"precision": precision}) for precision in ("amp-bf16", "bf16", "fp16")),
        (2, {"precision": "bf16", "keep_batchnorm_fp32": True}),
    ],
)
def test_all_kinds_of_models_have_the_numbers_of_the_whole_one(
    launch: Launch, ranks: int, options: dict[str, Any]
) -> None:
    with_norms = ["resnet18", "mobilenet_v3_small"]
    all_kinds = models_for(options.get("precision", "fp32"))
    names = with_norms if "keep_batchnorm_fp32" in options else all_kinds
    worker = str(ROOT / "tests/vehicles/sharded_models.py")
    words = [*start("torchrun", ranks), sys.executable, worker, json.dumps(options), *names]
    found = json.loads(launch(words, timeout=600).ok().stdout.splitlines()[-1])
    assert found and all(found.values()), found


FIRST_FORWARD = """
import torch
import dualeval
from tests.engine.sharding.test_sharding import DATA, Reader

def task():
    observe = lambda outputs, batch: {"sum": outputs.sum(1)}
    return dualeval.ModelTask(model=Reader, data=DATA, metrics=["sum"], observe=observe)

with dualeval.Session(device="cpu") as session:
    for number in range(2):
        print(f"attempt {number}\\n", end="", flush=True)
        session.attempt(lambda: session.evaluate(task(), shard="fsdp", puts_back=False, last=True))
"""


def test_what_fails_in_the_first_forward_ends_a_run_of_several_models(launch: Launch) -> None:
    """The others may be in the midst of a gather; what is said, once, is what the forward did."""
    done = launch([*start("torchrun", 2), sys.executable, "-c", FIRST_FORWARD], cwd=ROOT)
    assert done.stdout.count("attempt 0") == 2 and "attempt 1" not in done.stdout
    said = (
        "dualeval: error: this batch cannot be computed: --shard fsdp: the forward computes with the weights"
    )
    assert done.stderr.count(said) == 1, done.stderr
    assert "exitcode  : 2 " in done.stderr and "exitcode  : 1 " not in done.stderr


# -- which parts of a model are gathered together: the rule, on models whose parts are known ------------


def names_of(model: nn.Module) -> list[str]:
    """The names of a model's units in their order; the model's own is empty."""
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in units_of(model, sizes)]


class Parts(nn.Module):
    """Parts by their names, and a forward."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def square(size: int) -> nn.Linear:
    return nn.Linear(size, size, bias=False)


def test_a_large_part_is_divided_and_a_small_one_is_not() -> None:
    blocks = {f"block{number}": Parts(first=square(8), second=square(8)) for number in range(32)}
    assert names_of(Parts(**blocks)) == [*blocks, ""], "1/32 each is a unit as it is"
    del blocks["block31"]
    assert names_of(Parts(**blocks)) == [
        *(f"block{number}.{part}" for number in range(31) for part in ("first", "second")),
        "",
    ]


def test_what_takes_little_stays_with_the_part_above() -> None:
    # 3 of 3 * 1024 + 3 elements is less than 1/1024, 4 of as many is more.
    assert names_of(Parts(large=square(64), small=nn.Linear(1, 3, bias=False))) == ["large", ""]
    assert names_of(Parts(large=square(64), other=nn.Linear(1, 5, bias=False))) == ["large", "other", ""]


def test_a_large_part_is_a_unit_for_what_is_directly_in_it() -> None:
    inner = Parts(child=square(16))
    inner.weight = nn.Parameter(torch.zeros(64))
    assert names_of(Parts(inner=inner, other=square(16))) == ["inner.child", "inner", "other", ""]


def test_containers_are_no_units() -> None:
    model = Parts(
        listed=nn.ModuleList([square(8), square(8)]),
        named=nn.ModuleDict({"one": square(8)}),
        row=nn.Sequential(square(2), square(8)),
        large=square(64),
        weights=nn.ParameterList([nn.Parameter(torch.zeros(64))]),
    )
    assert names_of(model) == ["listed.0", "listed.1", "named.one", "row.1", "large", ""]


def test_parts_that_share_a_parameter_are_no_units() -> None:
    model = Parts(first=square(8), second=square(8), third=square(8))
    model.get_submodule("third").weight = model.get_submodule("first").weight
    assert names_of(model) == ["second", ""]
    inside = Parts(block=model, other=square(16))
    assert names_of(inside) == ["block.second", "block", "other", ""], "nobody outside of it has them"


def test_a_part_under_two_names_is_one_unit() -> None:
    shared = square(8)
    model = Parts(first=Parts(own=square(1), shared=shared), second=Parts(own=square(1), shared=shared))
    assert names_of(model) == ["first.own", "first.shared", "second.own", ""]


def test_parts_that_read_their_childrens_parameters_are_not_divided() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    nested = nn.TransformerEncoder(layer, 2)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert names_of(Parts(attention=nn.MultiheadAttention(8, 2))) == ["attention", ""]
    assert names_of(Parts(nested=nested)) == ["nested", ""]
    # A layer by itself would have hooks, and compute in another way.
    assert names_of(Parts(plain=plain)) == ["plain", ""]
