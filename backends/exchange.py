"""JSON over the tensors of a Backend: plain values between ranks, and no pickle, which would run code."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dualeval.errors import BackendError
from dualeval.world import World


class JsonExchange(ABC):
    """The calls of a Backend that take plain values, written once on two of its calls that take tensors."""

    world: World

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor: ...

    @abstractmethod
    def _gather_bytes(
        self, call: str, payload: Tensor, *, rows: int, kind: str, dst: int | None, refusal: str | None = None
    ) -> list[tuple[Tensor, int]] | None: ...

    def broadcast_json(self, value: Any, src: int = 0) -> Any:
        """Give every rank one rank's plain value, as JSON in UTF-8 (a tuple arrives as a list).

        Args:
            value: None, bool, int, float, str, or lists and dicts with str keys of them; only that of ``src``
                counts.
            src: the rank whose value is taken.

        Raises:
            BackendError: ``src`` is no rank, its value is no JSON (on every rank), or the collective broke.
        """
        self._require_rank("broadcast_json", "src", src)
        text, refusal = _encode(value) if self.world.rank == src else (b"", None)
        # The refusal is sent in the place of the value, so that no rank waits for one that will not come.
        payload = text if refusal is None else refusal.encode("utf-8", "backslashreplace")
        header = torch.tensor([len(payload), refusal is not None], device="cpu")
        length, refused = self.broadcast(header, src).tolist()
        sent = payload if self.world.rank == src else bytes(length)
        received = bytes_of(self.broadcast(tensor_of(sent), src))
        if refused:
            raise BackendError(f"This cannot be broadcast: rank {src}: {received.decode()}.")
        return _decode(received)

    def gather_json(self, value: Any, dst: int = 0) -> list[Any] | None:
        """Bring every rank's plain value to one rank; values as for ``broadcast_json``.

        Returns:
            on ``dst`` the values in rank order; None on the other ranks.

        Raises:
            BackendError: ``dst`` is no rank, some rank's value is no JSON (on every rank, with the rank's
                number), or the collective broke.
        """
        self._require_rank("gather_json", "dst", dst)
        return self._gather_values("gather_json", value, dst)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Bring every rank's plain value to every rank; else as ``gather_json``."""
        values = self._gather_values("all_gather_json", value, None)
        assert values is not None
        return values

    @torch.inference_mode(False)
    def _gather_values(self, call: str, value: Any, dst: int | None) -> list[Any] | None:
        text, refusal = _encode(value)
        payload = tensor_of(text)
        pieces = self._gather_bytes(call, payload, rows=len(text), kind="JSON", refusal=refusal, dst=dst)
        return None if pieces is None else [_decode(bytes_of(piece)) for piece, _ in pieces]

    def _require_rank(self, call: str, argument: str, rank: int) -> None:
        if not 0 <= rank < self.world.size:
            raise BackendError(
                f"{call}: {argument}={rank} is not a rank: the ranks are 0 to {self.world.size - 1}."
            )


def tensor_of(text: bytes) -> Tensor:
    """Copy a byte string into a uint8 tensor of shape (bytes,)."""
    # frombuffer takes no empty buffer, and warns about a read-only one.
    return torch.frombuffer(bytearray(text + b"."), dtype=torch.uint8)[:-1]


def bytes_of(payload: Tensor) -> bytes:
    """Copy a uint8 tensor of shape (bytes,) into a byte string."""
    return payload.cpu().numpy().tobytes()


def _encode(value: Any) -> tuple[bytes, str | None]:
    """Encode a value as JSON; returns the bytes, and the reason where it has no JSON form."""
    try:
        # surrogatepass: a file name that is not UTF-8 comes from the system as lone surrogates.
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", f"a value that has no JSON form ({error})"


def _decode(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))
