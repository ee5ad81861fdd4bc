"""Seconds and memory of average precision at the end of a run: COCOeval, and 1,000 resamples.

5,000 images with 100 detections each and 80 categories, as COCO's validation set has them; 7.3 annotations
an image, of which most have several detections.

    python benchmarks/detection_seconds.py [--images N]
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from common import ONE_THREAD, end_on_sigterm, machine, run_process, table, write_results

from dualeval.columns.ragged import RaggedRows, offsets_of
from dualeval.metrics import AveragePrecision

CATEGORIES = {number: f"class {number}" for number in range(1, 81)}
EACH, MEAN = 100, 7.3
PARTS = {
    "evaluated": "COCOeval, from the columns",
    "bootstrap": "then 1,000 resamples of all figures",
    "faster": "faster-coco-eval, of the same annotations",
}


def columns(images: int, seed: int = 0) -> dict[str, Any]:
    """Detections around annotations, and anywhere; categories as unequal as COCO's."""
    draw = np.random.default_rng(seed)
    often = 1 / np.arange(1, len(CATEGORIES) + 1)
    often /= often.sum()
    counts = 1 + draw.poisson(MEAN - 1, images)
    sizes = np.exp(draw.uniform(np.log(12), np.log(300), (counts.sum(), 2)))
    corners = draw.uniform(0, 340, (counts.sum(), 2))
    truth = np.column_stack([corners, corners + sizes])
    labels = draw.choice([*CATEGORIES], counts.sum(), p=often)
    first = offsets_of(counts)[:-1]
    of = np.repeat(first, EACH) + (draw.random(images * EACH) * np.repeat(counts, EACH)).astype(int)
    near = draw.random(images * EACH) < 0.4
    boxes = truth[of] + draw.normal(0, 0.08, (len(of), 4)) * np.tile(sizes[of], 2)
    far = draw.uniform(0, 400, (len(of), 2))
    boxes = np.where(near[:, None], boxes, np.column_stack([far, far + draw.uniform(10, 200, far.shape)]))
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    ends, of_truth = offsets_of(np.full(images, EACH)), offsets_of(counts)
    scores = np.where(near, draw.beta(2, 2, len(of)), draw.beta(1, 6, len(of)))
    return {
        "boxes": RaggedRows(boxes.astype(np.float32), ends),
        "scores": RaggedRows(scores.astype(np.float32), ends),
        "labels": RaggedRows(np.where(near, labels[of], draw.choice([*CATEGORIES], len(of), p=often)), ends),
        "true_boxes": RaggedRows(truth, of_truth),
        "true_labels": RaggedRows(labels, of_truth),
    }


def measure(part: str, images: int) -> dict[str, Any]:
    """Processor seconds of a part in this process, which is alone on its core or not, and its memory."""
    metric, made, found = AveragePrecision(CATEGORIES), columns(images), dict[str, Any]()
    start = process_time()

    def note(name: str, value: float | None) -> None:
        peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
        found[name] = {"seconds": process_time() - start, "peak_mib": int(peak) / 1024, "ap": value}

    note("before", None)
    if part == "faster":
        note(part, _faster(metric, made))
        return found
    evaluation = metric.evaluated(made)
    note("evaluated", metric.figures["ap"].of(evaluation))
    start = process_time()
    note("bootstrap", metric._resampled(evaluation)["ap"].value)
    return found


def _faster(metric: AveragePrecision, made: dict[str, Any]) -> Any:
    from faster_coco_eval import COCO, COCOeval_faster

    with redirect_stdout(None):
        both = []
        for each in (metric._truth(made), metric._detections(made)):
            coco = COCO()
            categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
            rows = [{"id": place, "height": 0, "width": 0} for place in range(len(each.lengths))]
            coco.dataset = {"images": rows, "categories": categories, "annotations": each.annotations()}
            coco.createIndex()
            both.append(coco)
        evaluation = COCOeval_faster(*both, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def main() -> None:
    """Measure each part in a process of its own, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument(
        "--part", choices=("evaluated", "faster"), help="measure it in this process, and print JSON"
    )
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(measure(arguments.part, arguments.images)))
        return
    end_on_sigterm()
    host, figures = machine(), dict[str, Any]()
    for part in ("evaluated", *(["faster"] if find_spec("faster_coco_eval") else [])):
        command = [sys.executable, __file__, "--part", part, "--images", str(arguments.images)]
        figures |= json.loads(run_process(command, timeout_s=3600, environ=ONE_THREAD).output)
        print(figures, file=sys.stderr, flush=True)
    rows = [
        [of, f"{found['seconds']:.1f}", f"{found['peak_mib']:,.0f}", repr(found["ap"])]
        for part, of in PARTS.items()
        if (found := figures.get(part)) is not None
    ]
    body = f"{arguments.images:,} images, {EACH} detections each, {len(CATEGORIES)} categories; before it "
    body += f"{figures['before']['peak_mib']:,.0f} MiB. Processor seconds of one thread.\n\n"
    body += table(["", "seconds", "peak memory of the process (MiB)", "ap"], rows)
    write_results("detection", "Average precision at the end of a run", body, figures, host)


if __name__ == "__main__":
    main()
