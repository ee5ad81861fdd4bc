"""Train any classifier of torchvision, and evaluate it after each epoch with dualeval, as a guest.

    python examples/train_with_eval.py --model resnet18 --data DATA --out runs/r18
    torchrun --nproc-per-node 2 examples/train_with_eval.py --model resnet18 --data DATA --out runs/r18
    horovodrun -np 2 python examples/train_with_eval.py --model resnet18 --data DATA --out runs/r18

DATA is a folder with train/CLASS/ and val/CLASS/ as ImageNet has them, one with cifar-10-batches-py or
cifar-100-python, or one with the four idx files of Fashion-MNIST. The same command with --resume goes on
after the last whole epoch. To evaluate a checkpoint again:

    dualeval run --task examples/train_with_eval.py:saved -T run=runs/r18 -T weights=best.pt

docs/training.md describes options, files and precisions.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from image_sets import Seeded, mixed, open_set, pixels_of, transform_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset
from training_ranks import Ranks, device_of, join_ranks

import dualeval
from dualeval.models.classifiers import create
from dualeval.report.loggers.loggers import check_installed, targets_of

# -- precision -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a training computes.

    Attributes:
        evaluation: the ``--precision`` of ``dualeval run`` that computes the same from a checkpoint.
        autocast: type of the operations that autocast chooses; None: no autocast.
        weights: type of the weights that the model computes with.
        has_masters: whether these are copies of fp32 weights, which the optimizer changes.
        is_scaled: whether the loss is scaled, so that small gradients do not become 0 in fp16.
    """

    evaluation: Literal["fp32", "amp-fp16", "amp-bf16"]
    autocast: torch.dtype | None = None
    weights: torch.dtype = torch.float32
    has_masters: bool = False
    is_scaled: bool = False


PRECISIONS = {
    "fp32": Precision(evaluation="fp32"),
    "amp-fp16": Precision(evaluation="amp-fp16", autocast=torch.float16, is_scaled=True),
    "amp-bf16": Precision(evaluation="amp-bf16", autocast=torch.bfloat16),
    "fp16": Precision(evaluation="amp-fp16", weights=torch.float16, has_masters=True, is_scaled=True),
    "bf16": Precision(evaluation="amp-bf16", weights=torch.bfloat16),
}


class WithMasters(nn.Module):
    """Computes with half-precision copies of a model's fp32 weights, which get the gradients in fp32.

    Batch norms compute with the fp32 weights.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.kept = {id(weight) for norm in norms for weight in norm.parameters()}

    def forward(self, images: Tensor) -> Any:
        own = self.model.named_parameters()
        copies = {name: weight.to(self.dtype) for name, weight in own if id(weight) not in self.kept}
        return torch.func.functional_call(self.model, copies, (images,))


# -- what is trained, and what is evaluated --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What every rank makes by itself; ``checkpoint`` is rank 0's alone."""

    model: nn.Module
    training: Seeded
    validation: Any
    checkpoint: Any


def prepare(options: argparse.Namespace, ranks: Ranks) -> Prepared:
    if options.no_eval and (options.patience or options.limit_eval or options.logger):
        raise dualeval.UsageError(
            "--patience, --limit-eval and --logger have no meaning with --no-eval: leave them out"
        )
    # A wrong one is said now, not after the first epoch.
    check_installed(targets_of(options.logger or (), 0, "--logger"), "--logger")
    if options.erasing > 1:
        raise dualeval.UsageError(f"--erasing {options.erasing}: expected a probability, from 0 to 1")
    training, validation = (open_set(options.data, training=each) for each in (True, False))
    options.num_classes = len(training.classes)
    if list(validation.classes) != list(training.classes)[: len(validation.classes)]:
        raise dualeval.UsageError(f"--data {options.data}: training and validation have different classes")
    model, channels = model_for(options, training)
    for data in (training, validation):
        data.transform = transform_of(options, data, channels, training=data is training)
    if options.limit_train:
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(options.seed))
        training = Subset(training, order[: options.limit_train].tolist())
    if len(training) // ranks.size < options.batch_size:
        raise dualeval.UsageError(
            f"--batch-size {options.batch_size} is more than a rank's share of the {len(training)} training "
            f"images, {len(training) // ranks.size}: give a smaller one"
        )
    checkpoint = None
    if ranks.rank == 0:
        make_folder(options.out)
        checkpoint = read_checkpoint(options, ranks)
    seeded = Seeded(training, options.seed)
    return Prepared(model=model, training=seeded, validation=validation, checkpoint=checkpoint)


def model_for(options: argparse.Namespace, data: Any) -> tuple[nn.Module, int]:
    """The model as the seed makes it, tried on two black images; and how many channels these have."""
    torch.manual_seed(options.seed)
    model, pixels = create(options.model, options.num_classes), pixels_of(options, data)
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
    channels = first.in_channels if first is not None and pixels.channels == 1 else pixels.channels
    shape = (channels, pixels.crop, pixels.crop)
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(2, *shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise dualeval.UsageError(
            f"{options.model} cannot take images of shape {shape}: {error}. Give another --size or --model"
        ) from error
    return model, channels


def task_of(model: nn.Module, data: Any) -> dualeval.Task:
    """What dualeval evaluates: the weights of a checkpoint, as fp32."""
    is_fp32 = all(weight.dtype == torch.float32 for weight in model.parameters())
    return dualeval.ModelTask(model=(model if is_fp32 else copy.deepcopy(model).float()).eval(), data=data)


def saved(run: str, weights: str = "best.pt") -> dualeval.Task:
    """A checkpoint of a run, for ``dualeval run --task``."""
    path = Path(run) / "run.json"
    if not path.is_file():
        raise dualeval.UsageError(f"{path} does not exist: give the folder of a training run")
    options = argparse.Namespace(**json.loads(path.read_text("utf-8"))["options"])
    data = open_set(Path(options.data), training=False)
    model, channels = model_for(options, data)
    data.transform = transform_of(options, data, channels, training=False)
    model.load_state_dict(torch.load(Path(run) / weights, "cpu", weights_only=True)["model"])
    return task_of(model, data)


# -- one epoch -------------------------------------------------------------------------------------------


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy; GoogLeNet and Inception train on what they predict halfway, too."""
    logits, *halfway = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = cross_entropy(logits.float(), targets)
    for each in halfway:
        loss = loss + 0.3 * cross_entropy(each.float(), targets)
    return loss


def train_epoch(
    loader: DataLoader[Any], model: nn.Module, optimizer: Any, scaler: Any, ranks: Ranks, precision: Precision
) -> tuple[float | None, int]:
    """Train on each image once; returns the mean loss (None: not finite), and how many images it is of."""
    model.train()
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for images, targets in loader:
        images = images.to(device, precision.weights, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, precision.autocast, enabled=precision.autocast is not None):
            loss = loss_of(model(images), targets)
        scaler.scale(loss).backward()
        ranks.step(optimizer, scaler)
        scaler.update()
        total[0] += loss.detach() * len(targets)
        total[1] += len(targets)
    loss_sum, count = ranks.sum(total).tolist()
    return (loss_sum / count if math.isfinite(loss_sum) else None), int(count)


# -- the run's folder ------------------------------------------------------------------------------------

# A run goes on with --resume where these are the same: they decide the bits of the training.
FIXED = ["model", "data", "batch_size", "world_size", "epochs", "lr", "momentum", "weight_decay"]
FIXED += ["precision", "seed", "size", "resize", "crop", "flip", "rand_augment", "erasing", "limit_train"]
# And this decides which epoch is the best.
FIXED += ["limit_eval"]


def make_folder(path: Path) -> None:
    """Make OUT, before anything is trained for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise dualeval.UsageError(f"--out {path}: no folder can be made there ({error})") from error


def read_checkpoint(options: argparse.Namespace, ranks: Ranks) -> Any:
    """OUT/last.pt, where the run goes on; None where it starts."""
    path, now = options.out / "last.pt", as_json(options, ranks)
    if not path.is_file():
        return None
    if not options.resume:
        raise dualeval.UsageError(f"{path} is there already: type --resume to go on, or give another --out")
    try:
        checkpoint = torch.load(path, "cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise dualeval.UsageError(
            f"{path} cannot be read ({type(error).__name__}): give another --out, or delete it to start again"
        ) from error
    if not isinstance(checkpoint, dict) or "options" not in checkpoint:
        raise dualeval.UsageError(f"{path} was not written by this example: give another --out")
    for name in FIXED:
        if (before := checkpoint["options"][name]) != now[name]:
            raise dualeval.UsageError(
                f"{path} was trained with {name.replace('_', ' ')} {before}, and now it is {now[name]}: give "
                "the same, or another --out"
            )
    return checkpoint


def as_json(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {**plain, "world_size": ranks.size}


def write(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file that is there as a whole or not at all, whenever this process is killed."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    save(unfinished)
    unfinished.replace(path)


def write_start(
    options: argparse.Namespace, ranks: Ranks, world: dualeval.World, device: torch.device, log: list[Any]
) -> None:
    """Write run.json, which says what the run is, and print the table so far."""
    print("\n".join([HEADING, *(printed(entry, options.epochs) for entry in log)]), flush=True)
    if log:
        write_log(options.out, log)  # the run may have been killed before it wrote the last line
        return
    names = ("model", "batch_size", "precision", "lr", "epochs", "seed")
    content = {
        **{name: getattr(options, name) for name in names},
        "data": str(options.data),
        "global_batch_size": options.batch_size * ranks.size,
        "world_size": ranks.size,
        "backend": ranks.name,
        "launcher": world.launcher,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {
            "python": platform.python_version(),
            **{each.__name__: each.__version__ for each in (torch, torchvision, dualeval)},
        },
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "options": as_json(options, ranks),
    }
    write(
        options.out / "run.json", lambda path: path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    )


def write_epoch(
    options: argparse.Namespace, ranks: Ranks, log: list[Any], states: dict[str, Any], *, is_best: bool
) -> None:
    """Write the checkpoints and log.jsonl, and print the epoch."""
    checkpoint = {**states, "epoch": len(log), "log": log, "options": as_json(options, ranks)}
    # last.pt at the end: a run that is killed before it trains this epoch again.
    kept = [f"epoch-{len(log)}.pt"] if options.keep_epochs else []
    for name in (*kept, *(["best.pt"] if is_best else []), "last.pt"):
        write(options.out / name, functools.partial(torch.save, checkpoint))
    write_log(options.out, log)
    print(printed(log[-1], options.epochs), flush=True)


def write_log(folder: Path, log: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(each) + "\n" for each in log)
    write(folder / "log.jsonl", lambda path: path.write_text(lines, "utf-8"))


def printed(entry: dict[str, Any], epochs: int) -> str:
    """An epoch as a line of the table."""
    metrics = entry["metrics"]
    acc = [f"{metrics[name]:8.2%}" if name in metrics else f"{'-':>8}" for name in ("top1", "top5")]
    losses = [entry["train_loss"], metrics.get("loss")]
    loss = [f"{'-' if value is None else format(value, '.4f'):>10}" for value in losses]
    times = f"{entry['train_s']:8.1f} {entry['eval_s']:7.1f} {entry['images_per_s']:9.0f}"
    return f"{entry['epoch']:4}/{epochs:<4} {loss[0]} {loss[1]} {acc[0]} {acc[1]} {times} {entry['lr']:10.2g}"


HEADING = "epoch     train loss  eval loss    Acc@1    Acc@5  train s  eval s  images/s         lr"


# -- the run ---------------------------------------------------------------------------------------------


def prepared_on_all(options: argparse.Namespace, ranks: Ranks) -> Prepared:
    """What ``prepare`` gives; what is wrong on one rank ends all of them, so that none waits for it."""
    prepared, problem = None, None
    try:
        prepared = prepare(options, ranks)
    except dualeval.UsageError as error:
        problem = str(error)
    problems = [each for each in ranks.gather(problem) if each is not None]
    if prepared is None or problems:
        ranks.leave()
        raise dualeval.UsageError(problems[0])
    return replace(prepared, checkpoint=ranks.share(prepared.checkpoint))


def run(options: argparse.Namespace, world: dualeval.World) -> None:
    """Join the ranks, train, and leave them when nothing holds the model any more."""
    started, device = time.perf_counter(), device_of(world, options.device)
    ranks = join_ranks(world, options.backend, device)
    train(options, world, ranks, prepared_on_all(options, ranks), device, started)
    ranks.leave()


def train(
    options: argparse.Namespace,
    world: dualeval.World,
    ranks: Ranks,
    prepared: Prepared,
    device: torch.device,
    started: float,
) -> None:
    """Train, and evaluate after each epoch; rank 0 writes the folder ``options.out``."""
    net, found, precision = prepared.model, prepared.checkpoint, PRECISIONS[options.precision]
    if found:
        net.load_state_dict(found["model"])
    net.to(device, torch.float32 if precision.has_masters else precision.weights)
    model, optimizer = ranks.join(
        WithMasters(net, precision.weights) if precision.has_masters else net,
        torch.optim.SGD(net.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay),
        found and found["optimizer"],
    )
    scaler = torch.amp.GradScaler(device.type, enabled=precision.is_scaled)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    stopping = dualeval.EarlyStopping("top1", options.patience or options.epochs)
    stateful = {"model": net, "optimizer": optimizer, "lr_scheduler": schedule, "scaler": scaler}
    stateful["stopping"] = stopping
    for name in ("lr_scheduler", "scaler", "stopping") if found else ():
        stateful[name].load_state_dict(found[name])
    log: list[dict[str, Any]] = found["log"] if found else []
    elapsed_before = log[-1]["elapsed_s"] if log else 0.0
    if ranks.rank == 0:
        write_start(options, ranks, world, device, log)

    loader = loader_of(options, ranks, prepared.training, pin_memory=device.type == "cuda")
    for epoch in range(len(log) + 1, options.epochs + 1):
        if stopping.should_stop:
            break
        # Of each epoch its own, for order, augmentation and dropout: a resume needs no states of generators.
        loader.sampler.set_epoch(epoch)
        prepared.training.epoch = epoch
        torch.manual_seed(mixed(options.seed, epoch, ranks.rank))
        lr, begun = optimizer.param_groups[0]["lr"], time.perf_counter()
        loss, images = train_epoch(loader, model, optimizer, scaler, ranks, precision)
        schedule.step()
        ranks.broadcast(dict(net.named_buffers()))  # a batch norm's statistics are each rank's own
        trained = time.perf_counter()
        values: dict[str, Any] = {"metrics": {}, "intervals": {}, "metrics_digest": None}
        if not options.no_eval:
            values = evaluate(options, net, prepared.validation, stopping, epoch)
        now = time.perf_counter()
        entry = {"epoch": epoch, "train_loss": loss, "lr": lr, "train_s": trained - begun}
        entry |= {"eval_s": now - trained, "elapsed_s": elapsed_before + now - started}
        log.append({**entry, "images_per_s": images / (trained - begun), **values})
        if ranks.rank == 0:
            states = {name: part.state_dict() for name, part in stateful.items()}
            is_best = stopping.is_best and not options.no_eval  # a resumed state may be of a best epoch
            write_epoch(options, ranks, log, states, is_best=is_best)


def evaluate(
    options: argparse.Namespace, net: nn.Module, data: Any, stopping: Any, epoch: int
) -> dict[str, Any]:
    """Evaluate as a guest of the ranks, all of which call this."""
    result = dualeval.evaluate(
        task_of(net, data),
        batch_size=options.eval_batch_size,
        precision=PRECISIONS[options.precision].evaluation,
        limit=options.limit_eval,
        workers=options.workers,
        device=options.device,
        loggers=options.logger or (),
        step=epoch,
    )
    stopping.update(result)
    numbers = {name: value for name, value in result.metrics.items() if isinstance(value, float)}
    intervals = {name: result.intervals[name] for name in numbers if name in result.intervals}
    return {"metrics": numbers, "intervals": intervals, "metrics_digest": result.metrics_digest}


def loader_of(options: argparse.Namespace, ranks: Ranks, data: Any, **more: Any) -> Any:
    """The batches of this rank."""
    sampler: Any = DistributedSampler(data, ranks.size, ranks.rank, seed=options.seed)
    more |= {"num_workers": options.workers, "drop_last": True}
    return DataLoader(data, options.batch_size, sampler=sampler, **more)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--model",
        default="resnet18",
        help="torchvision classifier, fashion-cnn, or package.module:factory [%(default)s]",
    )
    add("--data", type=Path, required=True, help="folder with the images for training and validation")
    add("--out", type=Path, required=True, help="folder for run.json, log.jsonl, last.pt and best.pt")
    add("--resume", action="store_true", help="go on from OUT/last.pt; start where there is none")
    add("--epochs", type=whole, default=90, help="[%(default)s]")
    add("--batch-size", type=whole, default=64, help="training images in a batch of each rank [%(default)s]")
    add("--lr", type=number, default=0.1, help="at the start; it falls to 0 along a cosine [%(default)s]")
    add("--momentum", type=number, default=0.9, help="[%(default)s]")
    add("--weight-decay", type=number, default=1e-4, help="[%(default)s]")
    add("--precision", choices=PRECISIONS, default="fp32", help="[%(default)s]")
    add("--workers", type=count, default=2, help="reading processes of each rank [%(default)s]")
    add("--seed", type=seed, default=0, help="of weights, order and augmentation [%(default)s]")
    add("--size", type=whole, help="side of the images (default: by model, or as they are)")
    add("--resize", type=whole, help="shorter side before the crop of --size, for folders of images")
    add("--crop", action="store_true", help="augmentation: random crops")
    add("--flip", action="store_true", help="augmentation: mirror every second image")
    add("--rand-augment", action="store_true", help="augmentation: RandAugment")
    add(
        "--erasing",
        type=number,
        default=0.0,
        metavar="P",
        help="augmentation: random erasing, with probability P",
    )
    add("--patience", type=whole, help="stop after so many epochs in a row without a better Acc@1")
    add("--no-eval", action="store_true", help="train only; there is no best.pt then")
    add("--keep-epochs", action="store_true", help="also write OUT/epoch-N.pt, for 'dualeval watch'")
    add("--eval-batch-size", type=whole, default=64, help="of each rank, for the evaluation [%(default)s]")
    add("--logger", action="append", metavar="KIND:WHERE", help="log each evaluation (docs/loggers.md)")
    add("--limit-train", type=whole, metavar="N", help="train on N images, drawn by the seed")
    add("--limit-eval", type=whole, metavar="N", help="evaluate the first N images")
    add("--backend", choices=("torch", "horovod"), help="(default: the launcher's)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, not {text!r}")
    return int(text)


def count(text: str) -> int:
    return whole(text, 0)


def seed(text: str) -> int:
    if count(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**63, not {text!r}")
    return int(text)


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return value


def main(arguments: list[str] | None = None) -> int:
    options, rank = parse(arguments), 0
    try:
        world = dualeval.detect(os.environ)
        rank = world.rank
        run(options, world)
    except dualeval.DualevalError as error:
        if rank == 0:
            print(f"train_with_eval: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
