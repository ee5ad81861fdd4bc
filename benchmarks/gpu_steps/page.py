"""The page of ``make gpu``, of the parts of its steps; without names of hosts and people, or paths."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import ROOT, table, write_results

from dualeval.launch.launchers.srun import expand_hosts
from dualeval.report.anonymous import Names
from gpu_steps.trial import FAILED, NOT_HERE, PASSED, Step


def body(parts: Sequence[Mapping[str, Any]], steps: Sequence[Step]) -> str:
    """The page behind its first lines."""
    rows = [row for part in parts for row in part["rows"]]
    count = Counter(row["outcome"] for row in rows)
    found = ", ".join(f"{count[outcome]} {outcome}" for outcome in (PASSED, FAILED, NOT_HERE))
    cells = [
        [row["step"], row["what"], row["outcome"], row["found"].replace("|", "/").replace("\n", " ")]
        for row in rows
    ]
    sections = [f"## Step {part['step']}\n\n{text}" for part in parts for text in part["sections"]]
    texts = [
        _about(parts[0]["card"]),
        _when(parts),
        *_differing(parts),
        f"{found}.",
        *_not_whole(parts, steps),
        "Equal digests mean equal bits. Peaks are `max_memory_allocated`. The forward alone computes data "
        "that is on the device already; the bare loop copies it from pinned memory and counts where argmax "
        "is the target. Both have dualeval's numeric settings (no TF32, deterministic kernels) and its "
        "layout. Shares are medians over the rounds, the middle half in brackets, without dualeval's look at "
        "the first samples, which comes once a run.",
        table(["step", "what", "outcome", "found"], cells),
        *sections,
    ]
    return "\n\n".join(texts)


def _about(card: Mapping[str, Any]) -> str:
    if not card:
        return "**On CPUs: this page says that the steps work, and nothing about GPUs.**"
    return ", ".join(f"{name} {value}" for name, value in card.items()) + "."


def _when(parts: Sequence[Mapping[str, Any]]) -> str:
    """When the steps were begun, and how busy the machine was; on a busy one speeds say little."""
    times = sorted(str(part["utc"])[:16].replace("T", " ") for part in parts)
    loads = sorted(part["machine"]["load_average"][0] for part in parts)
    cores = parts[0]["machine"]["cores"]
    busy = " **The machine was busy: speeds and efficiencies say little.**" if loads[-1] > cores else ""
    return (
        f"Steps begun from {times[0]} to {times[-1]} UTC, at load averages of {loads[0]:g} to {loads[-1]:g} "
        f"on {cores} cores.{busy}"
    )


def _differing(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which steps were measured on which machine, with which source, where these are several."""
    alike: dict[str, list[str]] = {}
    for part in parts:
        card = f"{part['card']['name']}, " if part["card"] else ""
        alike.setdefault(f"{card}source {part['source']}", []).append(part["step"])
    if len(alike) == 1:
        return []
    told = "; ".join(f"{of}: {', '.join(names)}" for of, names in alike.items())
    return [f"**Not all steps are of one machine and source.** {told}."]


def _not_whole(parts: Sequence[Mapping[str, Any]], steps: Sequence[Step]) -> list[str]:
    """What failed, was cut off or was not run, with the reason."""
    lines = []
    for part in parts:
        failed = [row for row in part["rows"] if row["outcome"] == FAILED]
        lines += [f"- {part['step']} failed: {row['what']}: {row['found']}" for row in failed]
        if not part["finished"] and not failed:
            lines.append(f"- {part['step']} was cut off after {len(part['rows'])} rows.")
    done = {part["step"] for part in parts}
    if absent := [step.name for step in steps if step.name not in done]:
        lines.append(f"- Not run: {', '.join(absent)}.")
    return ["\n".join(lines)] if lines else []


def write_page(
    parts: Sequence[Mapping[str, Any]], steps: Sequence[Step], folder: Path, results: Path
) -> None:
    """Write the page, its figures, and the pictures of the parts beside them."""
    names, card = names_here(), parts[0]["card"]
    cleaned = _cleaned(parts, names)
    title = f"make gpu: {card['name']}" if card else "make gpu, tried on CPUs"
    name = "gpu" if card else "gpu-on-cpu"
    pictures = sorted(folder.glob("*.png"))
    # As the page is named.
    of_page = f"{name}-{datetime.now(timezone.utc):%Y-%m-%d}"
    text = names.clean(body(cleaned, steps))
    for picture in pictures:
        text = text.replace(f"({picture.name})", f"({of_page}-{picture.name})")
    results.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        shutil.copy(picture, results / f"{of_page}-{picture.name}")
    figures = {"card": card, "parts": cleaned}
    write_results(name, title, text, figures, dict(parts[0]["machine"]), results, names.clean)


def _cleaned(value: Any, names: Names) -> Any:
    """A value of JSON with its texts cleaned; keys stay, which a host may be called like."""
    if isinstance(value, Mapping):
        return {key: _cleaned(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each, names) for each in value]
    return names.clean(value) if isinstance(value, str) else value


def names_here() -> Names:
    """What is replaced on the page: folders, and the names of the hosts and the person."""
    hosts = {socket.gethostname(): "node1", socket.getfqdn(): "node1"}
    with suppress(KeyError, ValueError):
        for number, host in enumerate(expand_hosts(os.environ["SLURM_JOB_NODELIST"]), 1):
            hosts[host] = f"node{number}"
    home = Path.home()
    user = ""
    with suppress(KeyError, OSError):  # a container may have no name for its user
        user = getpass.getuser()
    return Names(
        folders={str(ROOT): "DUALEVAL", sys.prefix: "ENV", tempfile.gettempdir(): "TMP"},
        homes=tuple({str(home), str(home.resolve())}),
        hosts=hosts,
        users=(user,),
    )
