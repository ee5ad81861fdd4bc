"""Which parts of a model are gathered together: the rule, on models whose parts are known."""

from __future__ import annotations

import torch
from torch import nn

from dualeval.engine.sharding.model import units_of


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
