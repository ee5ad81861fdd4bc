"""``dualeval conformance``: the digests of the embedded job under every launcher and backend here."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from dualeval.cli import options
from dualeval.cli.grouped import PATH
from dualeval.errors import EXIT_DONE, EXIT_FAILED, DualevalError, UsageError
from dualeval.launch.launchers import WAYS
from dualeval.launch.site import Site
from dualeval.launch.starts import child_environ, choose_ways
from dualeval.report.anonymous import Names
from dualeval.result import RESULT, json_text, read_status, write_text
from dualeval.tools import node_facts
from dualeval.tools.conformance import page as judging
from dualeval.tools.conformance.trials import Trial, command_of, plan_trials
from dualeval.tools.supervise import Ended, Interrupted, Interrupts, ask, run_supervised
from dualeval.tools.sweep import check_new_folder, check_no_rank, counts_of, make_folders, words_of
from dualeval.wording import counted

_DEVICES = ("cpu", "cuda")
_JSON, _PAGE = "conformance.json", "conformance.md"
_LAST_LINES = 8
_TAIL_BYTES = 65536
# How horovodrun and mpirun --tag-output name the rank: before a line, and mpirun within one of many.
_TAG = re.compile(r"\[[\d,]+\]<std(?:out|err)>:")
# What dualeval doctor has printed, of several ranks or cut off: it has variables, which are not for sharing.
_REPORTS = re.compile(r"^\{.*^\}|^\{.*", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What was asked for on the command line."""

    launchers: list[str] | None
    ranks: list[int] | None
    device: str | None
    limit: int
    timeout_s: float
    self_tests: bool
    with_host_names: bool
    as_json: bool


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
@click.option("--self-tests/--no-self-tests", default=True, help="Also test every operation of each backend.")
@click.option("--with-host-names", is_flag=True, help="Keep names and addresses of hosts in the report.")
@options.ONLY_JSON
@click.option("--dry-run", is_flag=True, help="Inspect the nodes and print the commands; run nothing.")
@click.option("--facts", is_flag=True, hidden=True)
@click.pass_context
def conformance(
    context: click.Context, /, out: Path | None, dry_run: bool, facts: bool, **flags: Any
) -> None:
    """Run the embedded job under every available launcher and backend, and compare the digests.

    \b
    dualeval conformance
    salloc -N2 --gpus-per-node 4 dualeval conformance
    dualeval conformance --launchers torchrun,mpirun --ranks 1,2,8

    Type it once, not under a launcher: it starts the launchers itself. You can share OUT/conformance.md and
    OUT/conformance.json: they have no host names, users or paths.
    """
    if facts:
        click.echo(node_facts.facts_line(os.environ))
        return
    asked = _Asked(**flags)
    launchers = choose_ways(asked.launchers or list(WAYS))
    check_no_rank(
        None,
        "'dualeval conformance' starts all launchers itself: type it by itself, in the shell that salloc "
        "opens, or in a batch script without srun before it.",
    )
    started = datetime.now(timezone.utc)
    folder = (out or Path("runs", f"conformance-{started:%Y%m%dT%H%M%S}")).absolute()
    check_new_folder(folder)
    environ = child_environ(os.environ, str(Path(sys.executable).parent))
    with Interrupts() as interrupts:
        try:
            runner = _look(asked, folder, environ, started, interrupts)
        except Interrupted as error:
            raise DualevalError(f"interrupted by {error}") from error
        trials = _trials(asked, runner.site, launchers)
        if dry_run:
            for number, trial in enumerate(trials):
                reason = runner.names.clean(trial.reason or "")
                click.echo(
                    f"# not here: {_label(trial)}: {reason}" if reason else runner.shown(trial, number)
                )
            return
        report = runner.run(trials)
    if asked.as_json:
        click.echo(json_text(report), nl=False)
    else:
        click.echo(f"\n{judging.summary(report)}\n{folder / _PAGE}\n{folder / _JSON}")
    context.exit(EXIT_DONE if judging.agrees(report) else EXIT_FAILED)


def _trials(asked: _Asked, site: Site, launchers: Sequence[str]) -> list[Trial]:
    has_gpus = all(node.gpus for node in site.nodes)
    if asked.device == "cuda" and not has_gpus:
        raise UsageError("--device cuda: torch sees no GPU on at least one node. Leave out --device.")
    devices = [asked.device] if asked.device else ["cuda", "cpu"] if has_gpus else ["cpu"]
    trials = plan_trials(site, devices, launchers, asked.ranks)
    return [trial for trial in trials if asked.self_tests or not trial.is_self_test]


def _label(trial: Trial) -> str:
    what = ", self-test" if trial.is_self_test else ""
    return f"{trial.launcher}, {trial.backend}, {counted(trial.ranks, 'rank')}, {trial.device}{what}"


def _look(
    asked: _Asked, folder: Path, environ: Mapping[str, str], started: datetime, interrupts: Interrupts
) -> _TrialRunner:
    """Look at the nodes."""
    words = node_facts.dualeval_words()

    def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
        return ask(command, environ, limit_s, interrupts.check)

    site, facts = node_facts.find_site(environ, words, run)
    scheduler = node_facts.slurm_version(site, run)
    hosts = _host_names(facts)
    names = Names(
        folders={
            str(folder): "OUT",
            str(folder.resolve()): "OUT",
            sys.prefix: "ENV",
            str(Path(__file__).resolve().parent.parent.parent): "DUALEVAL",
        },
        homes=tuple({str(Path.home()), str(Path.home().resolve())}),
        hosts=None if asked.with_host_names else hosts,
        users=(_user(),),
    )
    nodes = [
        {
            "name": names.clean(own["host"]),
            **{name: own[name] for name in ("cpu", "cpu_capability", "cores", "gpus", "driver", "network")},
        }
        for own in facts
    ]
    versions = {
        **node_facts.versions_of(facts),
        "mpirun": site.mpirun or None,
        "Slurm": scheduler,
    }
    return _TrialRunner(
        asked=asked,
        folder=folder,
        environ=environ,
        interrupts=interrupts,
        words=words,
        site=site,
        names=names,
        header={
            "schema_version": judging.SCHEMA_VERSION,
            "when": f"{started:%Y-%m-%d %H:%M} UTC",
            "options": {
                name: getattr(asked, name) for name in ("launchers", "ranks", "device", "limit", "timeout_s")
            },
            "site": {"scheduler": scheduler, "nodes": nodes},
            "versions": {name: value and names.clean(value) for name, value in versions.items()},
        },
    )


def _host_names(facts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By each name of a host, long or short, what stands for it."""
    hosts: dict[str, str] = {}
    for number, own in enumerate(facts, 1):
        for name in (own["host"], own["own_name"]):
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
class _TrialRunner:
    """Where trials are run, and what is known of it."""

    asked: _Asked
    folder: Path
    environ: Mapping[str, str]
    interrupts: Interrupts
    words: Sequence[str]
    site: Site
    names: Names
    header: Mapping[str, Any]

    def command(self, trial: Trial, number: int, site: Site, words: Sequence[str], folder: str) -> list[str]:
        if trial.is_self_test:
            own = {"--out": folder, "--limit-s": f"{max(1.0, min(60.0, self.asked.timeout_s / 2)):g}"}
        else:
            own = {"--limit": str(self.asked.limit), "--out": f"{folder}/runs/{number:03}"}
        return command_of(trial, site, number, words, own)

    def shown(self, trial: Trial, number: int) -> str:
        """The command of a trial, as a person would type it."""
        site = replace(self.site, programs={name: name for name in self.site.programs})
        return self.names.clean(shlex.join(self.command(trial, number, site, ["dualeval"], "OUT")))

    def run(self, trials: Sequence[Trial]) -> dict[str, Any]:
        """Run them one after the other; writes the report, also where that is interrupted, and returns it."""

        report: dict[str, Any] = {
            **self.header, "references": [], "runs": [], "self_tests": [], "interrupted": True
        }  # fmt: skip
        make_folders(self.folder, "logs", "runs")
        try:
            for number, trial in enumerate(trials):
                row = self._try(trial, number, report["references"])
                kind = "references" if trial.is_reference else "self_tests" if trial.is_self_test else "runs"
                report[kind].append(row)
                self._say(number, len(trials), trial, row)
            report["interrupted"] = False
        except Interrupted as error:
            click.echo(f"dualeval: interrupted by {error}; what was run until then is reported", err=True)
        write_text(self.folder / _JSON, json_text(report))
        write_text(self.folder / _PAGE, judging.page(report))
        return report

    def _say(self, number: int, total: int, trial: Trial, row: Mapping[str, Any]) -> None:
        if row["outcome"] == judging.NOT_HERE:
            # The page says why.
            return
        seconds = "" if row["seconds"] is None else f"  {row['seconds']:.1f} s"
        reason = "" if row["outcome"] in (judging.OK, judging.CLOSE) else f"  {row['reason']}"
        text = f"{number + 1:>3}/{total}  {row['outcome']:<10}  {_label(trial)}{seconds}{reason}"
        click.echo(text, err=self.asked.as_json)

    def _try(self, trial: Trial, number: int, references: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Start one trial; returns its row of the report."""
        row: dict[str, Any] = {
            **{name: getattr(trial, name) for name in ("launcher", "backend", "ranks", "nodes", "device")},
            "outcome": judging.NOT_HERE,
            "reason": trial.reason and self.names.clean(trial.reason),
            "last_lines": [],
            "seconds": None,
            "command": None,
        }
        of_a_self_test: dict[str, Any] = {"operations": {}, "speed": None, "problems": []}
        row |= of_a_self_test if trial.is_self_test else {"found": None}
        if trial.reason is not None:
            return row
        same = [one for one in references if one["device"] == trial.device and one["outcome"] == judging.OK]
        if not same and not trial.is_reference:
            return {**row, "outcome": judging.NOT_RUN, "reason": "one process has failed on this device"}
        row["command"] = self.shown(trial, number)
        out, err = (self.folder / "logs" / f"{number:03}.{name}" for name in ("out", "err"))
        try:
            ended = run_supervised(
                self.command(trial, number, self.site, self.words, str(self.folder)),
                stdout=out,
                stderr=err,
                environ=self.environ,
                timeout_s=self.asked.timeout_s,
                check=self.interrupts.check,
            )
        except OSError as error:
            return {**row, "outcome": judging.FAILED, "reason": self.names.clean(str(error))}
        row["seconds"] = round(ended.seconds, 2)
        if trial.is_self_test:
            row |= self._self_test(ended, out)
        else:
            row |= self._result(ended, trial, number, same[0]["found"] if same else None)
        row["reason"] = row["reason"] and self.names.clean(row["reason"])
        if row["outcome"] in judging.BAD:
            row["last_lines"] = [self.names.clean(line) for line in _last_lines(err, out, trial.is_self_test)]
        return row

    def _result(
        self, ended: Ended, trial: Trial, number: int, reference: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """What came out of a run, compared with the reference."""
        folder = self.folder / "runs" / f"{number:03}"
        reason: str | None
        if ended.code is None:
            return self._timed_out()
        if ended.code != 0:
            said = read_status(folder)
            reason = said.reason if said is not None and said.reason else _exit_of(ended.code)
            return {"outcome": judging.FAILED, "reason": reason}
        try:
            found = judging.facts_of(json.loads((folder / RESULT).read_text("utf-8")))
        except FileNotFoundError:
            reason = f"it ended well, but there is no {folder / RESULT}: do all nodes see this folder?"
            return {"outcome": judging.FAILED, "reason": reason}
        wanted = {"ranks": trial.ranks, "nodes": trial.nodes, "backend": trial.backend}
        outcome, reason = judging.judge(found, wanted, self.asked.limit, reference)
        return {"outcome": outcome, "reason": reason, "found": found}

    def _self_test(self, ended: Ended, out: Path) -> dict[str, Any]:
        """What ``dualeval doctor`` has printed; its exit code says less: it is 1 for any problem."""
        text = _TAG.sub("", out.read_text("utf-8", "replace"))
        try:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            if ended.code is None:
                return self._timed_out()
            return {"outcome": judging.FAILED, "reason": f"it printed no report ({_exit_of(ended.code)})"}
        outcome, reason = judging.judge_self_test(found)
        ranks = found["ranks"].values()
        return {
            "outcome": outcome,
            "reason": reason,
            "operations": {
                name: all(facts["operations"].get(name, "") is None for facts in ranks)
                for name in next(iter(ranks))["operations"]
            },
            "speed": found["speed"],
            "problems": [self.names.clean(problem) for problem in found["problems"]],
        }

    def _timed_out(self) -> dict[str, Any]:
        return {"outcome": judging.TIMED_OUT, "reason": f"it did not end within {self.asked.timeout_s:g} s"}


def _exit_of(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def _last_lines(err: Path, out: Path, is_self_test: bool) -> list[str]:
    """What was said at the end, and before it dualeval's own errors, which launchers bury."""
    lines = _lines_of(err) or _lines_of(out, has_reports=is_self_test)
    errors = [line for line in lines if "dualeval: error:" in line]
    last = lines[-_LAST_LINES:]
    return [*(line for line in dict.fromkeys(errors) if line not in last), *last]


def _lines_of(path: Path, *, has_reports: bool = False) -> list[str]:
    if not path.exists():
        return []
    data = path.read_bytes()
    text = _TAG.sub("", (data if has_reports else data[-_TAIL_BYTES:]).decode("utf-8", "replace"))
    lines = [line.rstrip() for line in (_REPORTS.sub("", text) if has_reports else text).splitlines()]
    return [line for line in lines if line]
