"""Take what names a person or a host out of a text that is to be shared: too much rather than too little."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

# Users who are no person, and hosts that are on every machine.
_NOBODY = {"root", "user", ""}
_EVERYWHERE = {"localhost", ""}
ANOTHER_HOST, HOST_LIST, ADDRESS = "another-host", "HOSTS", "ADDRESS"

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Programs put names together with - and _, and some print a line's end as the two characters \\n.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
_END = r"(?![A-Za-z0-9])"

# A number in a name, or Slurm's list of them, which may have been cut off: gpu[01-02,07].
_NUMBER = r"(?:\d*\[[\d,-]+\]?\d*|\d+)"
_DOMAIN = r"(?:\.[A-Za-z0-9-]*[A-Za-z][A-Za-z0-9-]*)*"
# Not v4.1.4, where a host is named v1.
_NO_VERSION = r"(?!\.\d+\.\d)"
_OPTION = re.compile(r"(?:^|\s)--?[A-Za-z-]*$")

_HARDWARE = re.compile(rf"{_START}[0-9a-fA-F]{{2}}(?::[0-9a-fA-F]{{2}}){{5,}}{_END}")
# After one colon, too, as in peer:fd00::1, but not after two, as in std::add.
_IPV6 = re.compile(
    rf"(?:(?!(?<=:)){_START}|(?<=[\w\])]:)(?!:))[0-9a-fA-F]{{0,4}}(?::[0-9a-fA-F]{{0,4}}){{2,8}}"
    rf"(?:(?:\.\d{{1,3}}){{3}})?{_END}"
)
_IPV4 = re.compile(r"(?<![\d.])(?<!\bv)\d{1,3}(?:\.\d{1,3}){3}(?!\d)")

_ANY_HOME = (r"(?:/[\w.+-]+)*/(?:homes?\d*|[Uu]sers)/[^/\s:\"']+", r"(?<![\w.-])/root")
_QUOTED = r"([\"'`])(?:{})(?![\w-])(/(?:(?!\1)[^\n])*)?\1"
# A name in it may have blanks: on to the line's last / that does not begin a path or follow an option.
_BARE = r"(?:{})(?![\w-])((?:/[^\s:\"',;)]*)?(?:(?! +-)[ ,;)][^\n:\"'/]*(?<![\s/])/[^\s:\"',;)]*)*)"


@dataclass(frozen=True, kw_only=True)
class Names:
    """What is replaced in a text, by what."""

    # Absolute paths and what stands for each, as {"/home/ada/env": "ENV"}.
    folders: Mapping[str, str]
    # Folders of persons; of a path below one its last part alone is kept.
    homes: Sequence[str] = ()
    # Names of hosts and what stands for each.
    hosts: Mapping[str, str]
    users: Sequence[str] = ()

    def clean(self, text: str) -> str:
        """Replace them, hosts whose names differ from these in numbers alone, and addresses but 127.0.0.1.

        Names count where no letter or digit touches them, hosts' in upper and lower case.
        """
        text = _COLOUR.sub("", text)
        for folder in sorted(self.folders, key=len, reverse=True):
            text = re.sub(re.escape(folder) + r"(?![\w-])", self.folders[folder], text)
        homes = "|".join(self._homes())
        text = re.sub(_QUOTED.format(homes), lambda match: f"{match[1]}{_short(match[2])}{match[1]}", text)
        text = re.sub(_BARE.format(homes), lambda match: _short(match[1]), text)
        text = _without_hosts(text, self.hosts)
        text = _HARDWARE.sub(ADDRESS, text)
        text = _IPV6.sub(_without_ipv6, text)
        text = _IPV4.sub(_without_ipv4, text)
        for user in self.users:
            if user not in _NOBODY:
                text = re.sub(f"{_START}{re.escape(user)}{_END}", "USER", text)
        return text

    def _homes(self) -> Iterator[str]:
        """Patterns of homes: a path in a message may be another person's."""
        for home in sorted(self.homes, key=len, reverse=True):
            parent = home.rpartition("/")[0]
            if parent:
                yield re.escape(home)
                yield rf"{re.escape(parent)}/[^/\s:\"']+"
        yield from _ANY_HOME


def _short(below: str | None) -> str:
    last = (below or "").rstrip("/").rpartition("/")[2]
    return f"~/.../{last}" if last else "~"


def _without_hosts(text: str, hosts: Mapping[str, str]) -> str:
    """Replace names, short and long, in one go: what stands for a host may be another one's name."""
    known = {
        name.lower(): label
        for name, label in hosts.items()
        # An address is not a name, and neither is its first number.
        if re.match(r"[^:.]*[A-Za-z][^:]*$", name) and name.partition(".")[0].lower() not in _EVERYWHERE
    }
    short = sorted({name.partition(".")[0] for name in known}, key=len, reverse=True)
    if not short:
        return text
    patterns = [f"(?:{'|'.join(_shape(name) for name in short)}){_END}{_NO_VERSION}{_DOMAIN}"]
    for domain in {name.partition(".")[2] for name in known}:
        if "." in domain:
            patterns.append(rf"(?:[A-Za-z0-9-]+\.)*{re.escape(domain)}{_END}")

    def label(match: re.Match[str]) -> str:
        name = match[0].lower()
        first = name.partition(".")[0]
        if "[" in name:
            return HOST_LIST
        if first.isalpha() and _OPTION.search(text, 0, match.start()):
            return match[0]
        return known.get(name) or known.get(first) or ANOTHER_HOST

    return re.sub(f"{_START}(?:{'|'.join(patterns)})", label, text, flags=re.IGNORECASE)


def _shape(name: str) -> str:
    """The pattern of a host's name and of those that differ in numbers alone."""
    pieces = re.split(r"\d+", name)
    if len(pieces) == 1:
        return f"{re.escape(name)}{_NUMBER}?"
    return _NUMBER.join(map(re.escape, pieces))


def _without_ipv6(match: re.Match[str]) -> str:
    text = match[0]
    # A colon before or after it, or a port, is none of its own.
    for start in (0, 1):
        for end in (len(text), len(text) - 1, text.rindex(":")):
            try:
                address = ip_address(text[start:end])
            except ValueError:
                continue
            mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
            is_local = (mapped or address).is_loopback or address.is_unspecified
            return text if is_local else f"{text[:start]}{ADDRESS}{text[end:]}"
    return text


def _without_ipv4(match: re.Match[str]) -> str:
    numbers = [int(number) for number in match[0].split(".")]
    is_local = numbers[0] == 127 or not any(numbers)
    return match[0] if is_local or max(numbers) > 255 else ADDRESS
