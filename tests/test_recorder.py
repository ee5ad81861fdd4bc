"""The recorder: what waits for the fold keeps no more memory than it has values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.engine import recorder
from dualeval.engine.in_memory import MemoryWriter
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Recorder
from dualeval.metrics import Mean


def sliced() -> Tensor:
    return torch.arange(1000.0)[10:14]


def of_a_column() -> Tensor:
    return torch.arange(400.0).view(4, 100)[:, 3]


def expanded() -> Tensor:
    return torch.ones(1).expand(4)


def shared() -> Tensor:
    tensor: Tensor = torch.arange(4.0).share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def whole() -> Tensor:
    return torch.arange(4.0)


@pytest.mark.parametrize("make", [sliced, of_a_column, expanded, shared, whole])
def test_columns_keep_no_memory_of_others(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tensor]
) -> None:
    waiting: list[dict[str, Tensor]] = []
    finished = vars(recorder)["_Finished"]

    def noted(**values: Any) -> Any:
        waiting.append(values["columns"])
        return finished(**values)

    monkeypatch.setattr(recorder, "_Finished", noted)
    taking = Recorder(EvalPlan(num_samples=12, batch_size=4), [Mean("m")], ["kept"], MemoryWriter(keeps=True))
    for batch in range(3):
        # Column "other" is read by nobody.
        taking.add(batch, batch, {"m": make(), "kept": make().int(), "other": torch.zeros(4, 5000)}, [])
    assert [sorted(columns) for columns in waiting] == 3 * [["kept", "m"]]
    for columns in waiting:
        for column in columns.values():
            assert not column.is_shared()  # type: ignore[no-untyped-call]
            assert column.untyped_storage().nbytes() <= column.numel() * column.element_size()
            assert column.tolist() == make().tolist()


def test_a_column_that_needs_no_copy_is_none() -> None:
    column = whole()
    assert vars(recorder)["_alone"](column) is column


def test_row_metrics_columns_alone_are_kept_in_memory() -> None:
    writer = MemoryWriter(keeps=False)
    taking = Recorder(EvalPlan(num_samples=8, batch_size=4), [Mean("m")], [], writer)
    for batch in range(2):
        taking.add(batch, batch, {"m": whole()}, [])
    taking.flush()
    assert writer.written == []
    assert taking.ledger.parts()[0][0].compute(taking.ledger.parts()[0][1]).values == {"m": 1.5}
