"""Take the names of a run's hosts, folders and user out of a text that is to be shared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Users who are no person, and hosts that are on every machine.
_NOBODY = {"root", "user", ""}
_EVERYWHERE = {"localhost", ""}
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ADDRESS = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")


@dataclass(frozen=True, kw_only=True)
class Names:
    """What is replaced in a text, by what."""

    # Absolute paths and what stands for each, as {"/home/ada/env": "ENV"}.
    folders: Mapping[str, str]
    # Folders of persons.
    homes: Sequence[str] = ()
    # Names of hosts and what stands for each; None leaves hosts and addresses as they are.
    hosts: Mapping[str, str] | None
    users: Sequence[str] = ()

    def clean(self, text: str) -> str:
        """Replace names, in any case where no letter or digit touches them, and IPv4 addresses."""
        # An address is no name, and its first number less so.
        hosts = {name: label for name, label in (self.hosts or {}).items() if not name[:1].isdigit()}
        users = {name: "USER" for name in self.users if name not in _NOBODY}
        known = {**users, **hosts, **dict.fromkeys(self.homes, "~"), **self.folders}
        known = {name.lower(): label for name, label in known.items() if name not in _EVERYWHERE}
        text = _COLOUR.sub("", text)
        if self.hosts is not None:
            text = _ADDRESS.sub("ADDRESS", text)
        if not known:
            return text
        # The longest first, and all in one go: what stands for a host may be another one's name.
        names = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        pattern = rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])"
        return re.sub(pattern, lambda found: known[found[0].lower()], text, flags=re.IGNORECASE)
