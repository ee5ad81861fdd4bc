"""A page's content as strangers would have it: names that are markup, terminal escapes, formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from PIL import Image

from dualeval.report.page.content import Against, Headline, OtherShown, PageContent, SampleShown
from dualeval.report.page.things import Shown

MARKUP = "</script><img onerror=alert(1) src=x>"
# As a terminal would obey it, with a turned line, a formula of matplotlib's, half a pair and no character.
ESCAPES = "\x1b[31mred\x1b[0m \u202egnp.exe $\\frac$ \udc80 \ufffe"
ESCAPED = "\\x1b[31mred\\x1b[0m \\u202egnp.exe $\\frac$ \\udc80 \\ufffe"
NAMES = [MARKUP, ESCAPES, "cat", "dog", "{{ 7 * 7 }}"]


def content(count: int = 40, picture: tuple[int, int] = (28, 28), **changed: Any) -> PageContent:
    """A page's content with something of everything; fields may be changed."""
    whole = PageContent(
        name="net",
        title=f"net: {MARKUP}",
        about=[("data", f"val {ESCAPES}")],
        headlines=[
            Headline(name="loss", value=0.4, low=0.3, high=0.5, unit=None, direction="lower", rough=None),
            Headline(
                name="top1",
                value=0.8,
                low=0.7,
                high=0.9,
                unit="fraction",
                direction="higher",
                rough="few",
                differences={MARKUP: ("+1.20 pp", "+0.40 to +2.00 pp")},
            ),
            Headline(name="none", value=None, low=None, high=None, unit=None, direction=None, rough=None),
        ],
        against=[
            Against(
                name=MARKUP,
                verdict="net is better in loss; undecided: top1 (20 flips)",
                rows=[
                    {
                        "name": "loss",
                        "a": 0.5,
                        "b": 0.4,
                        "difference": -0.1,
                        "texts": ("-0.1", "-0.2 to -0.05"),
                    }
                    | {"p": 1e-9, "verdict": "B is better", "unit": None}
                ],
                slices={"scanner": {"cat": {"top1": (-12.345, "-1,234.5 pp", "-2,000 to +3 pp")}}},
                lost=8,
                gained=12,
                notes=[],
            )
        ],
        warnings=[f"warned of {MARKUP}"],
        samples=[sample(number, picture) for number in range(count)],
        samples_total=10_000,
        reasons={
            "mistake": "most confident mistakes",
            "loss": "highest loss",
            "lost:0": f"right in {MARKUP}, wrong in net",
            "gained:0": f"wrong in {MARKUP}, right in net",
        },
        legend=f"Red is {MARKUP}.",
        colours={"mask": "#ff0000", MARKUP: "lime", "cat": "blue"},
        rows={
            "of": 20_000,
            "gaps": [0, *[3] * 499],
            "columns": [
                {"name": "id", "texts": [f"val/{NAMES[at % 5]}/{at}" for at in range(500)]},
                {"name": "target", "values": [at % 5 for at in range(500)], "texts": NAMES, "choice": True},
                {"name": "right", "values": [at % 2 for at in range(500)], "texts": ["right", "wrong"]}
                | {"choice": True},
                {"name": "loss", "values": [None if at == 7 else (at * 37) % 500 for at in range(500)]},
                {
                    "name": f"right in {MARKUP}",
                    "values": [at % 3 % 2 for at in range(500)],
                    "texts": ["right", "wrong"],
                    "choice": True,
                },
                {"name": "wrong pixels of cat", "values": [at * 7 % 500 for at in range(500)], "plain": True},
                {"name": "prediction", "values": [(at + at % 2) % 5 for at in range(500)], "texts": NAMES}
                | {"choice": True},
            ],
        },
        worst_by="loss",
        cut=None,
        class_columns=["class", "support", "recall", f"recall vs {MARKUP}"],
        class_rows=[
            (name, 100 - at, None if at == 3 else 0.5 + at / 10, None if at == 3 else at / 10 - 0.1)
            for at, name in enumerate(NAMES)
        ],
        confusion_names=NAMES,
        confusion=[(at, at, 90) for at in range(5)] + [(0, 1, 8), (2, 3, 12), (3, -1, 2)],
        calibration=[
            {
                "low": at / 15,
                "high": (at + 1) / 15,
                "count": 9 * at,
                "accuracy": at / 16,
                "confidence": at / 15,
            }
            for at in range(15)
        ],
        curves={"precision_by_recall": {"0.50": [1.0, 0.9, 0.4, 0.0], MARKUP: [0.5, 0.4, 0.1, 0.0]}},
        slices={"scanner": [group(name, at) for at, name in enumerate(NAMES)]},
        seconds=[{"rank": 0, "evaluate": 3.0, "data": 1.0, "compute": 2.0}, {"rank": 1, "evaluate": 1.0}],
        limited_by="The largest part went into the forward pass.",
        provenance=[("command", f"dualeval run --data '{MARKUP}'")],
    )
    return replace(whole, **changed)


def sample(number: int, picture: tuple[int, int]) -> SampleShown:
    right = number % 4 == 3
    target = NAMES[number % 5]
    things = [
        Shown(kind="picture", picture=Image.radial_gradient("L").resize(picture)),
        Shown(kind="text", text=f"a text {MARKUP}"),
        Shown(kind="table", table={MARKUP: ESCAPES}),
        Shown(kind="error", text=f"OSError: {MARKUP}"),
    ]
    if number % 8 == 4:
        boxes = ((0.1, 0.1, 0.9, 0.8, "#00ff00", MARKUP), (0.5, 0.5, 2.0, 0.9, "#ff0000", ESCAPES))
        layers: dict[str, Any] = {"mask": Image.new("RGBA", picture, (255, 0, 0, 99)), MARKUP: boxes}
        things[0] = replace(things[0], layers=layers)
    if number % 8 == 5:
        tokens = tuple(
            (text, at / 4) for at, text in enumerate(("One", " two", f" {MARKUP}", f" {ESCAPES}") * 12)
        )
        things[1] = Shown(kind="tokens", text="".join(text for text, _ in tokens), tokens=tokens)
        things[2] = replace(things[1], beside=(3.0,) * len(tokens))
    return SampleShown(
        id=f"val/{target}/{number}",
        row=3 * number,
        index=number,
        target=target,
        prediction=target if right else NAMES[(number + 1) % 5],
        correct=right,
        confidence=0.9,
        loss=2.0,
        reasons=(("mistake", "loss", "lost:0", "gained:0")[number % 4],),
        columns={"age": str(number)},
        facets={"scanner": ("AB"[number % 2],), MARKUP: (ESCAPES, "x")},
        shown=(things[number % 4],),
        others=(
            OtherShown(
                run=MARKUP,
                prediction=ESCAPES,
                correct=not right,
                confidence=0.25,
                loss=None,
                shown=(things[(number + 1) % 4],),
            ),
        ),
    )


def group(name: str, at: int) -> dict[str, Any]:
    return {
        "group": {"scanner": name},
        "label": name,
        "samples": 100 * at,
        "metrics": {"top1": 0.7 + at / 50, "loss": None},
        "intervals": {"top1": [0.6, 0.9]},
        "small": None if at else "only 7 samples: too few for a statement",
    }
