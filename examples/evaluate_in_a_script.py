"""Evaluate in your own script; the ranks are detected, and the script is the owner of the run.

    python examples/evaluate_in_a_script.py OUT [NAME=VALUE ...]
    torchrun --nproc-per-node 2 examples/evaluate_in_a_script.py runs/mine
    horovodrun -np 2 python examples/evaluate_in_a_script.py runs/r18 model=resnet18 weights=ckpt.pt data=val

If it is killed or stopped, type the same command again to resume. NAME=VALUE are arguments of
ImageClassification (without any, the embedded job); timeout=SECONDS is the session's heartbeat_timeout.
"""

import sys
from typing import Any

import dualeval
from dualeval.tasks import ImageClassification

out, *words = sys.argv[1:]
options: dict[str, Any] = dict(word.split("=", 1) for word in words)

with dualeval.Session(heartbeat_timeout=float(options.pop("timeout", 60))) as session:
    result = session.evaluate(ImageClassification(**options), batch_size=50, out=out)
    if session.world.is_main:
        print(f"top-1 {result.metrics['top1']:.2%}, {result.chunks}, {result.metrics_digest}", flush=True)
