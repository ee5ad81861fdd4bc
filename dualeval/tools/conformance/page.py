"""What ``dualeval conformance`` makes of its runs: each one's outcome, and the page; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dualeval.messages import counted
from dualeval.tools.starts import FAILED, NOT_HERE, NOT_RUN

SCHEMA_VERSION = 1

OK = "ok"
DIFFERS = "digest differs"
CLOSE = "agrees to tolerance"
FAR = "differs beyond tolerance"
TIMED_OUT = "timed out"
GOOD = (OK, CLOSE)
BAD = (DIFFERS, FAR, FAILED, TIMED_OUT, NOT_RUN)

# Between models of CPU or GPU last bits differ, and with them a near tie: 2 of 2,000 samples.
TOLERANCE = 1e-3
_COMPARED = ("loss", "top1", "top5")
# Of a machine, what decides the bits of a forward.
_MACHINE = ("device", "model", "cpu_capability", "bits", "versions")


def facts_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Take of a result.json what is compared and shown."""
    return {
        "metrics_digest": result["metrics_digest"],
        "samples_digest": result["samples_digest"],
        "metrics": {name: result["metrics"][name] for name in _COMPARED},
        "samples": result["samples"],
        "resumed": result["chunks"]["resumed"],
        "world": result["world"],
        "homogeneous": result["homogeneous"],
        "machines": [{name: machine[name] for name in _MACHINE} for machine in result["machines"]],
    }


def judge(
    facts: Mapping[str, Any], wanted: Mapping[str, Any], samples: int, reference: Mapping[str, Any] | None
) -> tuple[str, str | None]:
    """Compare what a run has found with what was started, and with one process."""
    world = facts["world"]
    for name, key in {"size": "ranks", "nodes": "nodes", "backend": "backend"}.items():
        if world[name] != wanted[key]:
            return FAILED, f"{name} {wanted[key]} was started, and the result says {world[name]}"
    if facts["samples"] != {"total": samples, "evaluated": samples, "failed": 0} or facts["resumed"]:
        counts = facts["samples"]
        return FAILED, f"{samples:,} samples should have been evaluated, and the result says {counts}"
    if reference is None:
        return OK, None
    if facts["samples_digest"] != reference["samples_digest"]:
        return DIFFERS, f"samples_digest {facts['samples_digest']}, not {reference['samples_digest']}"
    expected = reference["machines"][0]
    if not facts["homogeneous"] or any(machine != expected for machine in facts["machines"]):
        return _compare_loosely(facts["metrics"], reference["metrics"])
    if facts["metrics_digest"] == reference["metrics_digest"]:
        return OK, None
    return DIFFERS, f"on the same model of machine: {_differences(facts['metrics'], reference['metrics'])}"


def _compare_loosely(metrics: Mapping[str, float], wanted: Mapping[str, float]) -> tuple[str, str]:
    largest = max(abs(metrics[name] - wanted[name]) for name in _COMPARED)
    outcome = CLOSE if largest <= TOLERANCE else FAR
    return outcome, (
        f"computed on another model of machine than the reference, or on several: metrics differ by at most "
        f"{largest:.1e}, {TOLERANCE:g} is allowed"
    )


def _differences(metrics: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    texts = [f"{name} {metrics[name]!r}, not {wanted[name]!r}" for name in _COMPARED]
    differing = [text for text, name in zip(texts, _COMPARED, strict=True) if metrics[name] != wanted[name]]
    return "; ".join(differing) or "another metric than loss, top1 and top5"


def judge_self_test(report: Mapping[str, Any]) -> tuple[str, str | None]:
    """Say whether every operation was right on every rank, by what ``dualeval doctor --json`` printed."""
    ranks = report["ranks"].values()
    if len(ranks) < report["size"] or not all(facts["operations"] for facts in ranks):
        return FAILED, "; ".join(report["problems"]) or "the operations were not tried on all ranks"
    wrong = {
        f"{name} is wrong on rank {facts['rank']}: {problem}"
        for facts in ranks
        for name, problem in facts["operations"].items()
        if problem
    }
    return (FAILED, "; ".join(sorted(wrong))) if wrong else (OK, None)


def agrees(report: Mapping[str, Any]) -> bool:
    """Whether all that could run has run and agrees, and nothing that was asked for by name is missing."""
    every = [*report["references"], *report["runs"], *report["self_tests"]]
    asked = report["options"]["launchers"] or ()
    absent = set(asked) - {"none"} - {row["launcher"] for row in report["runs"] if row["outcome"] in GOOD}
    ran = any(row["outcome"] in GOOD for row in report["references"])
    bad = absent or report["interrupted"] or any(row["outcome"] in BAD for row in every)
    return ran and _has_compared(report) and not bad


def _has_compared(report: Mapping[str, Any]) -> bool:
    return any(row["outcome"] in (OK, DIFFERS, CLOSE, FAR) for row in report["runs"])


def summary(report: Mapping[str, Any]) -> str:
    """One sentence on what has come out."""
    runs = [row for row in report["runs"] if row["outcome"] != NOT_HERE]
    same = sum(row["outcome"] == OK for row in runs)
    text = f"{_part(same, len(runs), 'run')} {'has' if same == 1 else 'have'} the bits of one process"
    for outcome in (CLOSE, *BAD):
        if number := sum(row["outcome"] == outcome for row in [*report["references"], *runs]):
            text += f"; {number} {outcome}"
    tests = [row for row in report["self_tests"] if row["outcome"] != NOT_HERE]
    right = sum(row["outcome"] == OK for row in tests)
    text += f". {_part(right, len(tests), 'self-test')} of backends {'is' if right == 1 else 'are'} right."
    if absent := len(report["runs"]) - len(runs):
        text += f" {absent} could not be started here."
    if not _has_compared(report):
        text = f"Nothing was compared. {text}"
    return f"Interrupted. {text}" if report["interrupted"] else text


def _part(number: int, total: int, what: str) -> str:
    """As "1 of 1 run" and "0 of 1 runs": the verb is that of the first number."""
    return f"{number:,} of {total:,} {what}{'' if number == total == 1 else 's'}"


def page(report: Mapping[str, Any]) -> str:
    """Write the report as a Markdown page."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    options, site = report["options"], report["site"]
    yield "# dualeval conformance\n"
    yield f"**{'Agrees' if agrees(report) else 'Does not agree'}.** {summary(report)}\n"
    where = f"in a job of {site['scheduler']}" if site["scheduler"] else "outside of a Slurm job"
    yield (
        f"{report['when']}, dualeval {report['versions'].get('dualeval')}, "
        f"{counted(len(site['nodes']), 'node')} {where}. Each run evaluates the first "
        f"{options['limit']:,} of the 10,000 images of Fashion-MNIST's test set from the start, with the "
        "small network that ships with dualeval.\n"
    )
    if options["launchers"]:
        yield f"Only these launchers were asked for: {', '.join(options['launchers'])}.\n"
    yield from _references(report["references"])
    yield from _matrix(report["runs"])
    yield from _self_tests(report["self_tests"])
    yield from _failures([*report["references"], *report["runs"], *report["self_tests"]])
    yield from _absent(report["runs"])
    yield from _site(report)


def _references(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _table(
        "One process",
        ["device", "outcome", "metrics_digest", "top1", "machine", "bits", "seconds"],
        [[row["device"], row["outcome"], *_result_of(row["found"]), _seconds(row)] for row in rows],
    )


def _result_of(facts: Mapping[str, Any] | None) -> list[str]:
    if facts is None:
        return ["-"] * 4
    machine = facts["machines"][0]
    digest, top1 = f"`{facts['metrics_digest']}`", str(facts["metrics"]["top1"])
    return [digest, top1, machine["model"], f"`{machine['bits']}`"]


def _matrix(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table launcher x backend x device over the numbers of ranks."""
    sizes = sorted({row["ranks"] for row in rows})
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        key = (row["launcher"], row["backend"], row["device"])
        text = row["outcome"] if row["outcome"] in GOOD else f"**{row['outcome']}**"
        if row["outcome"] == NOT_HERE:
            text = NOT_HERE
        elif row["seconds"] is not None:
            text += f", {_seconds(row)} s"
        cells.setdefault(key, {})[row["ranks"]] = text
    yield from _table(
        "Runs",
        ["launcher", "backend", "device", *(counted(size, "rank") for size in sizes)],
        [[*key, *(by_size.get(size, "-") for size in sizes)] for key, by_size in cells.items()],
    )
    yield (
        "`ok`: both digests equal those of one process on the same device: the same samples and the same "
        "bits. `nproc` is `dualeval run --nproc N`."
    )
    if any(row["outcome"] in (CLOSE, FAR) for row in rows):
        yield (
            "`agrees to tolerance`: the ranks computed on another model of machine than the one process, "
            "where last bits may differ."
        )
    yield ""


def _self_tests(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _table(
        "Self-tests",
        ["launcher", "backend", "device", "ranks", "operations", "all_reduce"],
        [
            [
                row["launcher"],
                row["backend"],
                row["device"],
                str(row["ranks"]),
                f"{len(row['operations'])} right" if row["outcome"] == OK else f"**{row['outcome']}**",
                _speed(row["speed"]),
            ]
            for row in rows
        ],
    )


def _speed(speed: Mapping[str, Any] | None) -> str:
    """The times of all_reduce, by device."""
    return "; ".join(
        f"{device}: {one['latency_us']:,.0f} us for 8 bytes, {one['bandwidth_gb_s']:.2f} GB/s at 64 MiB"
        for device, one in (speed or {}).items()
    )


def _failures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    bad = [row for row in rows if row["outcome"] in (*BAD, CLOSE)]
    if not bad:
        return
    yield "## What was found\n"
    for row in bad:
        what = "self-test" if "operations" in row else "run"
        yield (
            f"### {row['outcome']}: {row['launcher']}, {row['backend']}, "
            f"{counted(row['ranks'], 'rank')}, {row['device']} ({what})\n"
        )
        yield from (f"{text}\n" for text in (row["reason"], row["command"] and f"`{row['command']}`") if text)
        if row["last_lines"]:
            yield from ("```", *(line.replace("```", "'''") for line in row["last_lines"]), "```")
            yield ""


def _absent(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["outcome"] == NOT_HERE:
            key = (row["launcher"], str(row["reason"]))
            reasons.setdefault(key, []).append(f"{row['backend']} {row['device']} {row['ranks']}")
    if not reasons:
        return
    yield "## Not here\n"
    for (launcher, reason), where in reasons.items():
        backends = ", ".join(dict.fromkeys(text.split()[0] for text in where))
        sizes = ", ".join(dict.fromkeys(text.split()[2] for text in where))
        yield f"- {launcher} ({backends}; {sizes} ranks): {reason}."
    yield ""


def _site(report: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(
        "Machines",
        ["node", "CPU", "cores", "GPUs", "driver"],
        [
            [
                node["name"],
                f"{node['cpu']} ({node['cpu_capability']})",
                str(node["cores"]),
                _gpus(node["gpus"]),
                str(node["driver"] or "-"),
            ]
            for node in report["site"]["nodes"]
        ],
    )
    yield from _table(
        "Versions", ["", ""], [[name, str(value)] for name, value in report["versions"].items() if value]
    )


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> str:
    models: dict[str, int] = {}
    for gpu in gpus:
        name = f"{gpu['model']}, {gpu['memory_gib']:.0f} GiB"
        models[name] = models.get(name, 0) + 1
    return "; ".join(f"{number} x {name}" for name, number in models.items()) or "none"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"## {title}\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _seconds(row: Mapping[str, Any]) -> str:
    return "-" if row["seconds"] is None else f"{row['seconds']:.1f}"
