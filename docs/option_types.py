"""Write keywords.py of engine and tasks from the dataclasses of the options. ``make tables`` calls this."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualeval.engine.values.options import RunOptions, SessionOptions
from dualeval.options.fields import IN_PYTHON
from dualeval.tasks.options import TASKS

PACKAGE = Path(__file__).resolve().parent.parent / "dualeval"
# What Python takes besides, and what stands in the signatures themselves.
_WIDER = {
    "out": "str | os.PathLike[str] | NewFolder | None",
    "device": "str | torch.device | None",
    "ignore_index": 'int | Sequence[int] | Literal["none"] | None',
}
# What commands of dualeval alone give.
_INTERNAL = ("evaluate_missing", "start_over")
_OWN = (
    *("model", "data", "tasks", "masks", "mask_values", "class_names"),
    *("annotations", "category_names", "category_map"),
)
_HEAD = '''"""The keywords of {what}, for editors and type checkers.

Written by docs/option_types.py (``make tables``) from the dataclasses of the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
{imports}'''
_OF_ENGINE = """    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Literal

    import torch

    from dualeval.engine.values.options import NewFolder
"""
_OF_TASKS = """    from collections.abc import Sequence
    from pathlib import Path
    from typing import Literal
"""


def modules() -> dict[Path, str]:
    """The text of each module."""
    of_engine = [_typed(RunOptions, "Run", "an evaluation"), _typed(SessionOptions, "Session", "a session")]
    kinds = {kind.__name__.removesuffix("Options"): kind for kind in TASKS.values()}
    classes = [_typed(kind, name, f"the class {name}") for name, kind in kinds.items()]
    return {
        PACKAGE / "engine/values/keywords.py": _text("sessions and evaluations", _OF_ENGINE, of_engine),
        PACKAGE / "tasks/keywords.py": _text("the tasks' classes", _OF_TASKS, classes),
    }


def _text(what: str, imports: str, classes: Sequence[str]) -> str:
    return _HEAD.format(what=what, imports=imports) + "".join(classes)


def _typed(kind: Any, name: str, of: str) -> str:
    lines = [f'class {name}Keywords(TypedDict, total=False):\n    """Of {of}."""\n']
    for field in dataclasses.fields(kind):
        own = _OWN if kind not in (RunOptions, SessionOptions) else ()
        if (
            (field.name in IN_PYTHON and own)
            or field.name in own
            or field.name in ("preprocessing", *_INTERNAL)
        ):
            continue
        lines.append(f"    {field.name}: {_type_of(field)}")
    return "\n\n" + "\n".join(lines) + "\n"


def _type_of(field: dataclasses.Field[Any]) -> str:
    if field.name in _WIDER:
        return _WIDER[field.name]
    text = re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", str(field.type)).replace("'", '"')
    if choices := field.metadata.get("choices"):
        words = ", ".join(f'"{each}"' for each in choices)
        return text.replace("str", f"Literal[{words}]", 1)
    return re.sub(r"\bPath\b", "str | Path", text) if "str" not in text else text


if __name__ == "__main__":
    for module, text in modules().items():
        module.write_text(text)
