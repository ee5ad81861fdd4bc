"""A model's identity: what changes a number changes it, and nothing else does."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.identity import plain
from dualeval.engine.identity.model import ModelHasher, model_fingerprint
from dualeval.engine.job.agreement import _numbers_of, _of_one, check_same_job
from dualeval.errors import UsageError
from dualeval.models.text_models import TextModel
from dualeval.tasks.question_answering import USE
from dualeval.world import World
from tests.conftest import Launch
from tests.vehicles import questions
from tests.vehicles.environments import world_at
from tests.vehicles.made_models import (
    BY_NAME,
    FAMILIES,
    Holder,
    WithBuffers,
    conv,
    identity,
    quantised,
    scripted,
    seeded,
    structure,
    tied,
    traced,
)


def weights(model: nn.Module) -> str:
    found: str = model_fingerprint(model)["fingerprint"]
    return found


# The structure


@pytest.mark.parametrize("family", FAMILIES)
def test_what_changes_a_number_changes_the_structure(family: str) -> None:
    found = [json.dumps(structure(seeded(make)), sort_keys=True) for make in FAMILIES[family]]
    same = [pair for pair in itertools.combinations(range(len(found)), 2) if found[pair[0]] == found[pair[1]]]
    assert not same, f"{family}: models {same} have the same structure"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_model_made_twice_or_copied_has_one_identity(name: str) -> None:
    wanted = identity(BY_NAME[name])
    assert identity(BY_NAME[name]) == wanted
    assert identity(lambda: copy.deepcopy(BY_NAME[name]())) == wanted


def test_another_process_finds_the_same_identity(launch: Launch) -> None:
    """Sets of strings have another order in each process, and objects other addresses."""
    done = launch(
        [sys.executable, "-m", "tests.vehicles.made_models"], variables={"PYTHONHASHSEED": "1"}
    ).ok()
    assert json.loads(done.stdout) == {name: identity(make) for name, make in BY_NAME.items()}


def test_a_structure_names_the_attribute_that_differs() -> None:
    one, other = (structure(nn.Sequential(nn.Linear(1, 1), nn.Conv1d(1, 1, 1, stride=by))) for by in (1, 2))
    assert {"model", "Sequential.__class__", "Linear.in_features"} < one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == ["Conv1d.stride"]
    swapped = structure(nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(1, 1)))
    assert swapped["Linear.in_features"] != one["Linear.in_features"], "where it is counts"
    many = structure(nn.Sequential(*(type(f"Kind{number}", (nn.ReLU,), {})() for number in range(100))))
    assert len(many) == 193
    assert "others" in many


def test_a_hook_for_all_modules_counts() -> None:
    model = nn.Sequential(nn.ReLU())
    before = structure(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        assert structure(model) != before
    finally:
        handle.remove()
    assert structure(model) == before


def test_where_a_thing_lies_or_runs_and_when_it_was_made_does_not_count(tmp_path: Path) -> None:
    def found(value: Any) -> dict[str, str]:
        return structure(Holder(value))

    assert found(tmp_path / "a") == found(tmp_path / "b")
    assert found(f"{tmp_path}/a") == found(f"{tmp_path}/b")
    assert found(torch.device("cpu")) == found(torch.device("cuda:1")) == found("cuda:1")
    assert found(torch.Generator().manual_seed(1)) == found(torch.Generator().manual_seed(2))
    day = datetime.datetime(2024, 1, 1)
    assert found(day) == found(day + datetime.timedelta(1))
    assert found(uuid.uuid4()) == found(uuid.uuid4())
    for one, other in (("a/b", "a/c"), ("https://a/b", "https://a/c"), ("x /2", "x /3"), ("--a=1", "--a=2")):
        assert found(one) != found(other)


def test_objects_in_a_loop_are_read_and_too_deep_ones_refused() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    holder = Holder(deep)
    holder.parent = [holder]  # type: ignore[assignment]
    assert structure(holder) == structure(holder)
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(UsageError, match="nested too deeply"):
        structure(Holder(deep))


def test_code_without_a_file_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: the class, what it derives from, and what its functions look up."""
    program = """
import torch, json
from torch import nn
from tests.vehicles.made_models import structure
SCALE = {scale}
def helper(x): return x * {helper}
class Base(nn.Module):
    limit = {limit}
    def forward(self, x): return helper(x) * {factor}
class Net(Base):
    def other(self): return [lambda: SCALE]
print(json.dumps(structure(Net())))
"""
    base = {"scale": 1, "helper": 1, "limit": 1, "factor": 1}
    cases = [base, base, *({**base, name: 2} for name in base)]
    found = [_exec(program.format(**case)) for case in cases]
    assert found[0] == found[1]
    assert len(set(found)) == len(cases) - 1
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    assert _exec(program.format(**base)) == found[0], "as __main__ of a notebook, a module without a file"


def _exec(program: str) -> str:
    space: dict[str, Any] = {"__name__": "nowhere", "print": lambda text: space.update(found=text)}
    exec(program, space)
    found: str = space["found"]
    return found


# The tensors


def test_every_buffer_counts() -> None:
    found = [weights(WithBuffers(*values)) for values in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))]
    assert len(set(found)) == 3
    assert model_fingerprint(WithBuffers())["elements"] == 2


@pytest.mark.parametrize("extra", [None, 1, "text", {"a": [1, 2.0]}, torch.ones(2), (torch.ones(2), None)])
def test_an_extra_state_counts(extra: Any) -> None:
    found = weights(WithBuffers(extra=extra))
    assert found == weights(WithBuffers(extra=copy.deepcopy(extra)))
    assert found != weights(WithBuffers(extra="another"))


@pytest.mark.parametrize("make", [quantised, lambda: quantised(torch.float16), scripted, traced])
def test_quantised_models_and_programs_have_their_tensors(make: Callable[[], nn.Module]) -> None:
    found = weights(seeded(make))
    assert found == weights(seeded(make)) and found != weights(make())


def with_tensor(tensor: Tensor) -> str:
    model = nn.Module()
    model.register_buffer("buffer", tensor)
    return weights(model)


class Pair(Tensor):
    """A tensor that is made of two others and a number, as those of quantising libraries are."""

    low: Tensor
    high: Tensor
    scale: float

    @staticmethod
    def __new__(cls, low: Tensor, high: Tensor, scale: float) -> Pair:
        made: Pair = Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)
        made.low, made.high, made.scale = low, high, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["low", "high"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scale: Any, *_: Any) -> Pair:
        return Pair(inner["low"], inner["high"], scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is torch.ops.aten.detach.default, "it is taken apart, and nothing else"
        return Pair(args[0].low, args[0].high, args[0].scale)


def tensors_of_all_kinds() -> dict[str, Tensor]:
    base = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    sparse = base.to_sparse()
    return {
        "float32": base,
        "other values": base + 1,
        "other shape": base.reshape(3, 2),
        "negative zero": base * -0.0,
        "zero": base * 0.0,
        **{
            str(dtype): base.to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)
        },
        "float8": base.to(torch.float8_e4m3fn),
        "uint16": base.to(torch.uint16),
        "complex": torch.complex(base, base),
        "conjugate": torch.complex(base, base).conj(),
        "scalar": torch.tensor(1.0),
        "one": torch.tensor([1.0]),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 3),
        "sparse": sparse,
        "sparse, other values": sparse * 2,
        "rows": base.to_sparse_csr(),
        "columns": base.to_sparse_csc(),
        "per tensor": torch.quantize_per_tensor(base, 0.1, 2, torch.qint8),
        "per tensor, other scale": torch.quantize_per_tensor(base * 2, 0.2, 2, torch.qint8),
        "per channel": torch.quantize_per_channel(
            base, torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
        ),
        "nested": torch.nested.nested_tensor([base, base[:1]]),
        "made of two": Pair(base, base, 1.0),
        "made of two others": Pair(base, base * 2, 1.0),
        "made of two with another scale": Pair(base, base, 2.0),
    }


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:torch.quantize")
def test_different_tensors_of_all_kinds_have_different_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: with_tensor(tensor) for name, tensor in tensors_of_all_kinds().items()}
    same = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert not same
    monkeypatch.setattr(plain, "_PIECE_BYTES", 4)
    assert found == {name: with_tensor(tensor) for name, tensor in tensors_of_all_kinds().items()}


def test_strides_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_PIECE_BYTES", 4)
    base = torch.arange(24.0).reshape(2, 3, 4)
    wanted = with_tensor(base)
    assert with_tensor(base.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == wanted
    assert with_tensor(torch.cat([base, base])[:2]) == wanted
    assert with_tensor(base.to_sparse().to_dense()) == wanted
    assert with_tensor(torch.ones(1).expand(5, 4)) == with_tensor(torch.ones(5, 4))


def test_tied_tensors_count_once_and_have_the_weights_of_untied_ones() -> None:
    assert model_fingerprint(tied())["elements"] == 18
    model = seeded(tied)
    apart = copy.deepcopy(model)
    assert isinstance(apart, nn.Sequential)
    middle: Any = apart[2]
    middle.weight = nn.Parameter(middle.weight.detach().clone())
    assert weights(apart) == weights(model)


def test_tensors_without_values_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(conv())
    with pytest.raises(UsageError, match=r"tensor 0\.bias is on the meta device and has no values"):
        weights(model)
    with pytest.raises(UsageError, match=r"tensor bias has no values yet: it belongs to a lazy module"):
        weights(nn.LazyLinear(2))


# Objects that know each other


class Place:
    """Knows its neighbours."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.near: list[Any] = []


def each_with_each(size: int) -> list[Place]:
    places = [Place(str(number)) for number in range(size)]
    for place in places:
        place.near = [other for other in places if other is not place]
    return places


def threes(levels: int) -> Any:
    made: Any = (1.0,)
    for _ in range(levels):
        made = (made, made, made)
    return made


GRAPHS: dict[str, Callable[[], Any]] = {
    "each with each": lambda: each_with_each(40),
    "shared tuples": lambda: threes(35),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_each_object_of_a_graph_is_looked_at_a_few_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    make = ModelHasher._made_of
    limit = 200_000  # all paths are more than can be walked in a lifetime

    def counted(self: ModelHasher, value: Any) -> bytes:
        made.append(None)
        assert len(made) < limit
        return make(self, value)

    monkeypatch.setattr(ModelHasher, "_made_of", counted)
    found = structure(Holder(GRAPHS[name]()))
    made.clear()
    assert structure(Holder(GRAPHS[name]())) == found
    other = GRAPHS[name]()
    if isinstance(other, list):
        other[-1].name = "another"
        made.clear()
        assert structure(Holder(other)) != found


# What is another at each start


def test_a_key_that_is_the_id_of_a_parameter_counts_as_its_name() -> None:
    def made(names: str = "ab") -> nn.Module:
        model = nn.Linear(2, 2)
        model.groups = {id(item): name for item, name in zip(model.parameters(), names, strict=True)}  # type: ignore[assignment]
        return model

    first, second = made(), made()
    assert structure(first) == structure(second)
    assert structure(made("ba")) != structure(first)


class Ignoring(nn.Module):
    dualeval_identity_ignores: Any = ("started",)

    def __init__(self, started: float, scale: float = 1.0) -> None:
        super().__init__()
        self.started = started
        self.scale = scale


def test_an_attribute_is_left_out_by_name() -> None:
    assert structure(Ignoring(1.0)) == structure(Ignoring(2.0))
    assert structure(Ignoring(1.0)) != structure(Ignoring(1.0, 2.0))
    found = []
    for scale in (1.0, 2.0):
        model = Ignoring(1.0, scale)
        model.dualeval_identity_ignores = ["scale"]
        found.append(structure(model))
    assert found[0] == found[1]
    wrong = Ignoring(1.0)
    wrong.dualeval_identity_ignores = 3
    with pytest.raises(UsageError, match=r"dualeval_identity_ignores of .*Ignoring is of type int; expected"):
        structure(wrong)


# A model of the transformers library


def test_a_moved_folder_holds_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = questions.save_tiny_bert(tmp_path / "first")
    second = shutil.copytree(first, tmp_path / "elsewhere/second")
    monkeypatch.chdir(tmp_path)
    wanted = identity(lambda: TextModel(first, USE).build())
    assert identity(lambda: TextModel(second, USE).build()) == wanted
    assert identity(lambda: TextModel(Path("first"), USE).build()) == wanted, "a relative path"
    for change in ({"hidden_act": "relu"}, {"num_attention_heads": 4}, {"layer_norm_eps": 1e-3}):
        other = questions.save_tiny_bert(tmp_path / "other", **change)
        assert structure(TextModel(other, USE).build()) != wanted[0], change


# What says which process this is


def ranks(size: int) -> list[World]:
    return [world_at("torchrun", rank, size, rank % 2, 2, rank // 2) for rank in range(size)]


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("rank", lambda world: world.rank),
        ("RANK", lambda world: str(world.rank)),
        ("forward._local_rank", lambda world: world.local_rank),
        ("group_rank", lambda world: world.node_rank),
    ],
)
def test_each_ranks_own_number_is_the_same_job(name: str, of: Callable[[World], Any]) -> None:
    """Recall at rank 3 is that on any rank, and no recall at rank 2; so is the rank of a LoRA."""
    worlds = ranks(4)
    hosts, numbers = ["host"] * 4, [*map(_numbers_of, worlds)]
    check_same_job([{"constants": {name: of(world)}} for world in worlds], hosts, numbers)
    check_same_job([{"constants": {name: 3}}] * 4, hosts, numbers)
    for wrong in ([0, 0, 0, 2], [3, 3, 3, 2]):
        with pytest.raises(UsageError, match=rf"rank 3 on .*{name}: {wrong[0]} on rank 0, 2 here"):
            check_same_job([{"constants": {name: value}} for value in wrong], hosts, numbers)
    with pytest.raises(UsageError, match="does not have the same job"):
        check_same_job([{"constants": {"ranking": of(world)}} for world in worlds], hosts, numbers)


def test_the_size_of_the_run_counts_as_one() -> None:
    for world in (World.alone(), *ranks(4)):
        said = {
            "WORLD_SIZE": str(world.size),
            "f._local_world_size": world.local_size,
            "size": 4,
            "none": None,
        }
        assert _of_one(said, world) == {"WORLD_SIZE": "1", "f._local_world_size": 1, "size": 4, "none": None}
        assert _of_one({"world_size": 5}, world) == {"world_size": 5}


def test_a_salted_hash_of_transformers_does_not_count() -> None:
    one, other = Holder(1), Holder(1)
    one._original_object_hash, other._original_object_hash = 1, 2  # type: ignore[assignment]
    assert structure(one) == structure(other)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/think", "/no_think", False),
        ("mode=/think", "mode=/no_think", False),
        ("{folder}/a", "{folder}/b", True),
        ("--cache={folder}/a", "--cache={folder}/b", False),
        ("{folder}/a b", "{folder}/c d", True),
        ("{folder}/a or yes", "{folder}/a or no", False),
    ],
)
def test_a_text_is_a_path_where_its_first_folder_is_there(
    tmp_path: Path, one: str, other: str, same: bool
) -> None:
    for name in ("a b", "c d"):
        (tmp_path / name).mkdir()
    first, second = (structure(Holder(text.format(folder=tmp_path))) for text in (one, other))
    assert (first == second) == same


def test_what_torch_keeps_beside_a_function_does_not_count() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: Any = checkpoint_wrapper(nn.Linear(2, 2))
    before = ModelHasher().digest(model.checkpoint_fn)
    model(torch.rand(1, 2)).sum().backward()  # as in a training
    assert ModelHasher().digest(model.checkpoint_fn) == before

    def doubled(value: int) -> int:
        return 2 * value

    # Each has an address of its own, as two ranks have.
    disable: Any = torch.compiler.disable
    one, other = (disable(doubled) for _ in range(2))
    assert ModelHasher().digest(one) == ModelHasher().digest(other)
