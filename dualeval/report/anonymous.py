"""Take what names a person or a host out of a text that is to be shared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

# Users who are no person, and hosts that are on every machine.
_NOBODY = {"root", "user", ""}
_EVERYWHERE = {"localhost", ""}
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w.])"
)
_ANY_HOME = (r"/home/[^/\s:\"']+", "/root")
_BELOW = r"(?![\w-])(/[^\s:\"',)]*)?"
_TOKEN = r"(?<![\w-]){}(?![\w-])"


@dataclass(frozen=True, kw_only=True)
class Names:
    """What is replaced in a text, by what.

    Attributes:
        folders: absolute paths and what stands for each, as {"/home/ada/env": "ENV"}.
        homes: folders of persons; of a path below one its last part alone is kept.
        hosts: names of hosts and what stands for each; None leaves hosts and addresses as they are.
        users: names of users.
    """

    folders: Mapping[str, str]
    homes: Sequence[str] = ()
    hosts: Mapping[str, str] | None
    users: Sequence[str] = ()

    def clean(self, text: str) -> str:
        """Replace them: the longest first, words as a whole, and all addresses but a host's own."""
        for folder in sorted(self.folders, key=len, reverse=True):
            text = re.sub(re.escape(folder) + r"(?![\w-])", self.folders[folder], text)
        # Whoever's home it is: a path in a message may be another's.
        homes = [re.escape(home) for home in self.homes if home.count("/") > 1]
        for home in (*homes, *_ANY_HOME):
            text = re.sub(home + _BELOW, _without_home, text)
        if self.hosts is not None:
            for host in sorted(self.hosts, key=len, reverse=True):
                if host not in _EVERYWHERE:
                    text = re.sub(_TOKEN.format(re.escape(host)), self.hosts[host], text)
            text = _ADDRESS.sub(_without_address, text)
        for user in self.users:
            if user not in _NOBODY:
                text = re.sub(_TOKEN.format(re.escape(user)), "USER", text)
        return text


def _without_home(found: re.Match[str]) -> str:
    last = (found[1] or "").rstrip("/").rpartition("/")[2]
    return f"~/.../{last}" if last else "~"


def _without_address(found: re.Match[str]) -> str:
    try:
        address = ip_address(found[0])
    except ValueError:
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "ADDRESS"
