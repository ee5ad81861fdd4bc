"""The launchers, one file each; a further one is a file beside these and a line in ``RANK_VARIABLES``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from dualeval.launch.launchers.base import Launcher, Way
from dualeval.process_start import RANK_VARIABLES

__all__ = ["BACKENDS", "LAUNCHERS", "WAYS", "Launcher", "Way"]

_ALL: list[Launcher] = [import_module(f"{__name__}.{file}").LAUNCHER for file in RANK_VARIABLES]
LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in _ALL}
# One process first: it is what the others are compared with.
_ONE_FIRST = (_ALL[-1], *_ALL)
# How ranks can be started, and the backends that they can use.
WAYS: Mapping[str, Way] = {way.name: way for launcher in _ONE_FIRST for way in launcher.ways}
BACKENDS = tuple(dict.fromkeys(name for launcher in _ONE_FIRST for name in launcher.backends))
