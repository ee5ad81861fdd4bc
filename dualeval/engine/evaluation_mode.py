"""Evaluation mode: what a model does in training only, as dropout, has no place in an evaluation."""

from __future__ import annotations

from torch import nn

from dualeval.wording import counted, listed

_LISTED_AT_MOST = 3


def set_evaluation_mode(model: nn.Module) -> list[str]:
    """Set a model to evaluation where a module of it is in training mode."""
    before = _in_training(model)
    if not before:
        return []
    try:
        model.eval()
    except NotImplementedError:
        # A graph of torch.export's: it has no modes, and does what it did when it was exported.
        return [
            "the model cannot be set to evaluation mode (torch.export keeps the mode that it was exported "
            "in): export it after model.eval()"
        ]
    after = _in_training(model)
    done = [name for name in before if name not in after]
    notes = []
    if done:
        notes.append(f"the model was in training mode, and was set to evaluation mode ({_listed(done)})")
    if after:
        notes.append(
            f"the model stays in training mode after model.eval() in {_listed(after)}: a train() of the "
            "model's own does that. Dropout and batch norm in there work as in training"
        )
    return notes


def training_note(model: nn.Module) -> list[str]:
    """What is said of a model that is used as it is, where a module of it is in training mode."""
    found = _in_training(model)
    if not found:
        return []
    return [
        f"the model is in training mode ({_listed(found)}), and so dropout and batch norms work as in "
        "training: call model.eval() before the loop"
    ]


def _in_training(model: nn.Module) -> list[str]:
    # A frozen one of TorchScript has no such attribute.
    return [name for name, module in model.named_modules() if getattr(module, "training", False)]


def _listed(names: list[str]) -> str:
    shown = listed((name or "the model itself" for name in names), _LISTED_AT_MOST)
    return f"{counted(len(names), 'module')}: {shown}"
