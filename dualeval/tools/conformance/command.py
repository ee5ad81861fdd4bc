"""``dualeval conformance``: the digests of the embedded job under every launcher and backend here."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dualeval.atomic_files import write_text
from dualeval.cli.options import PATH
from dualeval.errors import EXIT_DONE, EXIT_FAILED, DualevalError, UsageError
from dualeval.launch.site import Site
from dualeval.launch.ways import WAYS, child_environ, choose_ways
from dualeval.messages import counted
from dualeval.report.anonymous import Names
from dualeval.result import RESULT, json_text, read_status
from dualeval.tools import node_facts
from dualeval.tools.conformance import page as judging
from dualeval.tools.starts import (
    FAILED,
    NOT_HERE,
    NOT_RUN,
    Ended,
    Interrupted,
    Interrupts,
    Start,
    Starts,
    check_no_rank,
    counts_of,
    new_folder,
    plan_starts,
    words_of,
)

_DEVICES = ("cpu", "cuda")
_JSON, _PAGE = "conformance.json", "conformance.md"
_LAST_LINES = 8
_TAIL_BYTES = 65536
# How horovodrun and mpirun --tag-output name the rank: before a line, and mpirun within one of many.
_TAG = re.compile(r"\[[\d,]+\]<std(?:out|err)>:")


@click.command()
@click.option("--out", type=PATH, help="A new or empty folder.  [default: runs/conformance-TIME]")
@click.option(
    "--launchers",
    callback=words_of,
    help=f"Only these; a missing one is a failure: {', '.join(list(WAYS)[1:])}.  [default: all]",
)
@click.option(
    "--ranks",
    callback=counts_of,
    help="Numbers of ranks, with commas.  [default: 1, 2, one per node, one per GPU or core (4 at most)]",
)
@click.option(
    "--device", type=click.Choice(_DEVICES), help="Only this device.  [default: both, if there are GPUs]"
)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=2000, show_default=True, help="Samples per run."
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Time limit of each run, in seconds.",
)
@click.option("--dry-run", is_flag=True, help="Inspect the nodes and print the commands; run nothing.")
@click.pass_context
def conformance(context: click.Context, /, out: Path | None, dry_run: bool, **flags: Any) -> None:
    """Run the embedded job under every available launcher and backend, and compare the digests.

    \b
    dualeval conformance
    salloc -N2 --gpus-per-node 4 dualeval conformance
    dualeval conformance --launchers torchrun,mpirun --ranks 1,2,8

    Type it once, not under a launcher: it starts the launchers itself. You can share OUT/conformance.md and
    OUT/conformance.json: they have no host names, users or paths.
    """
    launchers = choose_ways(flags["launchers"] or list(WAYS))
    check_no_rank(
        None,
        "'dualeval conformance' starts all launchers itself: type it by itself, in the shell that salloc "
        "opens, or in a batch script without srun before it.",
    )
    folder, when = new_folder(out, "conformance")
    with Interrupts() as interrupts:
        try:
            runs = _look(flags, folder, when, interrupts)
        except Interrupted as error:
            raise DualevalError(f"interrupted by {error}") from error
        has_gpus = all(node.gpus for node in runs.site.nodes)
        if flags["device"] == "cuda" and not has_gpus:
            raise UsageError("--device cuda: torch sees no GPU on at least one node. Leave out --device.")
        devices = [flags["device"]] if flags["device"] else ["cuda", "cpu"] if has_gpus else ["cpu"]
        starts = plan_starts(runs.site, devices, launchers, flags["ranks"])
        if dry_run:
            for number, start in enumerate(starts):
                reason = runs.names.clean(start.reason or "")
                click.echo(f"# not here: {_label(start)}: {reason}" if reason else runs.typed(start, number))
            return
        report = runs.run(starts)
    click.echo(f"\n{judging.summary(report)}\n{folder / _PAGE}\n{folder / _JSON}")
    context.exit(EXIT_DONE if judging.agrees(report) else EXIT_FAILED)


def _label(start: Start) -> str:
    what = ", self-test" if start.is_self_test else ""
    return f"{start.launcher}, {start.backend}, {counted(start.ranks, 'rank')}, {start.device}{what}"


def _look(flags: Mapping[str, Any], folder: Path, when: str, interrupts: Interrupts) -> _Runs:
    """Look at the nodes."""
    environ = child_environ(os.environ, str(Path(sys.executable).parent))
    site, facts = node_facts.find_site(environ, interrupts.check)
    names = Names(
        folders={
            str(folder): "OUT",
            str(folder.resolve()): "OUT",
            sys.prefix: "ENV",
            str(Path(__file__).resolve().parents[3]): "DUALEVAL",
        },
        homes=tuple({str(Path.home()), str(Path.home().resolve())}),
        hosts=_host_names(facts),
        users=(_user(),),
    )
    shown = ("cpu", "cpu_capability", "cores", "gpus", "driver")
    scheduler = site.slurm or None
    versions = {**node_facts.versions_of(facts), "mpirun": site.mpirun or None, "Slurm": scheduler}
    return _Runs(
        folder=folder,
        environ=environ,
        interrupts=interrupts,
        timeout_s=flags["timeout_s"],
        limit=flags["limit"],
        site=site,
        names=names,
        header={
            "schema_version": judging.SCHEMA_VERSION,
            "when": when,
            "options": {name: flags[name] for name in ("launchers", "ranks", "device", "limit", "timeout_s")},
            "site": {
                "scheduler": scheduler,
                "nodes": [
                    {"name": names.clean(one["host"]), **{name: one[name] for name in shown}} for one in facts
                ],
            },
            "versions": {name: value and names.clean(value) for name, value in versions.items()},
        },
    )


def _host_names(facts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By each name of a host, long or short, what stands for it."""
    hosts: dict[str, str] = {}
    for number, node in enumerate(facts, 1):
        for name in (node["host"], node["own_name"]):
            hosts |= {name: f"node{number}", name.partition(".")[0]: f"node{number}"}
    for name in (socket.gethostname(), socket.getfqdn()):
        for form in (name, name.partition(".")[0]):
            hosts.setdefault(form, "submit-host")
    return hosts


def _user() -> str:
    # A container may have no name for its user.
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


@dataclass(frozen=True, kw_only=True)
class _Runs(Starts):
    """The runs and self-tests, compared with one process, and the report of them."""

    # Samples per run.
    limit: int
    site: Site
    names: Names
    # What the report begins with.
    header: Mapping[str, Any]

    def _command(self, start: Start, number: int, site: Site, words: Sequence[str], folder: str) -> list[str]:
        if start.is_self_test:
            options = ["--out", folder, "--limit-s", f"{max(1.0, min(60.0, self.timeout_s / 2)):g}"]
        else:
            options = ["--limit", str(self.limit), "--out", f"{folder}/runs/{number:03}"]
        return start.command(site, number, words, *options)

    def typed(self, start: Start, number: int) -> str:
        """The command of a start, as a person would type it."""
        site = replace(self.site, programs={name: name for name in self.site.programs})
        return self.names.clean(shlex.join(self._command(start, number, site, ["dualeval"], "OUT")))

    def run(self, starts: Sequence[Start]) -> dict[str, Any]:
        """Run them one after the other; writes the report, also where that is interrupted, and returns it."""
        report: dict[str, Any] = {**self.header, "references": [], "runs": [], "self_tests": []}
        report["interrupted"] = self.in_order(self._each(starts, report), "run", "runs")
        write_text(self.folder / _JSON, json_text(report))
        write_text(self.folder / _PAGE, judging.page(report))
        return report

    def _each(self, starts: Sequence[Start], report: dict[str, Any]) -> Iterator[None]:
        for number, start in enumerate(starts):
            row = self._try(start, number, report["references"])
            kind = "references" if start.is_reference else "self_tests" if start.is_self_test else "runs"
            report[kind].append(row)
            # The page says why one is not here.
            if row["outcome"] != NOT_HERE:
                seconds = "" if row["seconds"] is None else f"  {row['seconds']:.1f} s"
                reason = "" if row["outcome"] in judging.GOOD else f"  {row['reason']}"
                place = f"{number + 1:>3}/{len(starts)}"
                click.echo(f"{place}  {row['outcome']:<10}  {_label(start)}{seconds}{reason}")
            yield

    def _try(self, start: Start, number: int, references: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make one start; returns its row of the report."""
        row: dict[str, Any] = {
            **{name: getattr(start, name) for name in ("launcher", "backend", "ranks", "nodes", "device")},
            "outcome": NOT_HERE,
            "reason": start.reason and self.names.clean(start.reason),
            "last_lines": [],
            "seconds": None,
            "command": None,
            **({"operations": {}, "speed": None} if start.is_self_test else {"found": None}),
        }
        if start.reason is not None:
            return row
        same = [one for one in references if one["device"] == start.device and one["outcome"] == judging.OK]
        if not same and not start.is_reference:
            return {**row, "outcome": NOT_RUN, "reason": "one process failed on this device"}
        row["command"] = self.typed(start, number)
        name, words = f"{number:03}", node_facts.dualeval_words()
        try:
            ended = self.start(self._command(start, number, self.site, words, str(self.folder)), name)
        except OSError as error:
            return {**row, "outcome": FAILED, "reason": self.names.clean(str(error))}
        row["seconds"] = round(ended.seconds, 2)
        out, err = self.log(name, "out"), self.log(name, "err")
        if start.is_self_test:
            row |= self._self_test(ended, out)
        else:
            row |= self._result(ended, start, self.folder / "runs" / name, same[0]["found"] if same else None)
        row["reason"] = row["reason"] and self.names.clean(row["reason"])
        if row["outcome"] in judging.BAD:
            # A self-test prints its report, which has variables: they are not for sharing.
            lines = _lines_of(err) or ([] if start.is_self_test else _lines_of(out))
            row["last_lines"] = [self.names.clean(line) for line in _last_of(lines)]
        return row

    def _result(
        self, ended: Ended, start: Start, folder: Path, reference: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """What came out of a run, compared with the reference."""
        if ended.code is None:
            return {"outcome": judging.TIMED_OUT, "reason": ended.how}
        if ended.code != 0:
            status = read_status(folder)
            return {"outcome": FAILED, "reason": (status and status.reason) or ended.how}
        try:
            facts = judging.facts_of(json.loads((folder / RESULT).read_text("utf-8")))
        except FileNotFoundError:
            missing = f"it succeeded, but there is no {folder / RESULT}: do all nodes see this folder?"
            return {"outcome": FAILED, "reason": missing}
        wanted = {"ranks": start.ranks, "nodes": start.nodes, "backend": start.backend}
        outcome, reason = judging.judge(facts, wanted, self.limit, reference)
        return {"outcome": outcome, "reason": reason, "found": facts}

    def _self_test(self, ended: Ended, out: Path) -> dict[str, Any]:
        """What ``dualeval doctor`` has printed; its exit code says less: it is 1 for any problem."""
        text = _TAG.sub("", out.read_text("utf-8", "replace"))
        try:
            report = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            if ended.code is None:
                return {"outcome": judging.TIMED_OUT, "reason": ended.how}
            return {"outcome": FAILED, "reason": f"it printed no report ({ended.how})"}
        outcome, reason = judging.judge_self_test(report)
        ranks = report["ranks"].values()
        return {
            "outcome": outcome,
            "reason": reason,
            "operations": {
                name: all(facts["operations"].get(name, "") is None for facts in ranks)
                for name in next(iter(ranks))["operations"]
            },
            "speed": report["speed"],
        }


def _last_of(lines: Sequence[str]) -> list[str]:
    """What was said at the end, and before it dualeval's own errors, which launchers bury."""
    errors = [line for line in lines if "dualeval: error:" in line]
    last = lines[-_LAST_LINES:]
    return [*(line for line in dict.fromkeys(errors) if line not in last), *last]


def _lines_of(path: Path) -> list[str]:
    text = _TAG.sub("", path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace"))
    return [line.rstrip() for line in text.splitlines() if line.rstrip()]
