"""A page's content without the folders of this machine: a page is sent to others."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualeval.comparison.worst import PREDICTION, TARGET
from dualeval.report.page.content import PageContent, SampleShown
from dualeval.report.page.things import Shown

# In a sentence or a command, what an absolute path begins with, also where its beginning was cut off; in a
# URL nothing is one, nor behind a word.
_FOLDERS = re.compile(r"""(?<![^\s'"`=(\[<,;:])/(?:[^\s/'"]+/)+|…[^\s/'"]*/(?:[^\s/'"]+/)*""")
# Between the values of a group by several columns.
_BETWEEN = " * "


def short_of(texts: Iterable[str]) -> dict[str, str]:
    """Texts without the folders that absolute paths begin with, but for those that tell them apart."""
    short = {text: text for text in texts}
    parts = {text: text[1:].split("/") for text in short if text.startswith("/")}
    kept = dict.fromkeys(parts, 1)
    alike = [*parts]
    while alike:
        for text in alike:
            short[text] = f"…/{'/'.join(parts[text][-kept[text] :])}"
        counts = Counter(short.values())
        alike = [text for text in parts if counts[short[text]] > 1 and kept[text] < len(parts[text])]
        for text in alike:
            kept[text] += 1
    return short


def without_folders(content: PageContent) -> PageContent:
    """The same without the folders that absolute paths begin with; texts of the data stay as they are.

    An id, a kept value or a group is such a path as a whole, and stays another one than those beside it.
    """
    known = {name: short_of(texts) for name, texts in _texts(content).items()}

    def pairs(items: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(name, _short(text)) for name, text in items]

    def of_things(things: Sequence[Shown]) -> tuple[Shown, ...]:
        return tuple(
            replace(each, text=_short(each.text)) if each.kind == "error" else each for each in things
        )

    def of_column(column: Mapping[str, Any]) -> Mapping[str, Any]:
        texts = [known[column["name"]][text] for text in column["texts"]] if _is_kept(column) else None
        return column if texts is None else {**column, "texts": texts}

    def labelled(by: str, label: str) -> str:
        return _BETWEEN.join(known[by][part] for part in _parts(by, label))

    def of_sample(sample: SampleShown) -> SampleShown:
        return replace(
            sample,
            id=known["id"][sample.id],
            columns={name: known[name][text] for name, text in sample.columns.items()},
            facets={by: tuple(labelled(by, each) for each in of) for by, of in sample.facets.items()},
            shown=of_things(sample.shown),
            others=tuple(replace(each, shown=of_things(each.shown)) for each in sample.others),
        )

    return replace(
        content,
        title=_short(content.title),
        about=pairs(content.about),
        warnings=[*map(_short, content.warnings)],
        against=[
            replace(
                each,
                notes=[*map(_short, each.notes)],
                slices={
                    by: {labelled(by, label): value for label, value in groups.items()}
                    for by, groups in each.slices.items()
                },
            )
            for each in content.against
        ],
        slices={
            by: [{**group, "label": labelled(by, group["label"])} for group in groups]
            for by, groups in content.slices.items()
        },
        samples=[*map(of_sample, content.samples)],
        provenance=pairs(content.provenance),
        rows={**content.rows, "columns": [*map(of_column, content.rows["columns"])]},
    )


def _short(text: str) -> str:
    return _FOLDERS.sub("…/", text)


def _is_kept(column: Mapping[str, Any]) -> bool:
    """Whether a column of the table has texts of the data: names of classes are none."""
    name = column["name"]
    return "texts" in column and name not in (TARGET, PREDICTION) and not name.startswith(f"{PREDICTION} in ")


def _parts(by: str, label: str) -> list[str]:
    return label.split(_BETWEEN) if "*" in by else [label]


def _texts(content: PageContent) -> Mapping[str, Iterable[str]]:
    """By column, all of its texts on the page: each is told apart from all others."""
    texts: dict[str, set[str]] = defaultdict(set)

    def add(items: Iterator[tuple[str, str]]) -> None:
        for by, label in items:
            texts[by].update(_parts(by, label))

    for column in content.rows["columns"]:
        if _is_kept(column):
            texts[column["name"]].update(column["texts"])
    add((by, group["label"]) for by, groups in content.slices.items() for group in groups)
    for other in content.against:
        add((by, label) for by, groups in other.slices.items() for label in groups)
    for sample in content.samples:
        texts["id"].add(sample.id)
        for name, text in sample.columns.items():
            texts[name].add(text)
        add((by, label) for by, labels in sample.facets.items() for label in labels)
    return texts
