"""A look at a rank's first samples: does the user's code give the same numbers twice, and in threads?

No list of causes is complete, so the columns decide: some samples are read and computed twice, and two
batches are computed both at the same time and each alone. If the columns differ, the cause is searched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.columns.late import LateColumns
from dualeval.columns.ragged import Column, Ragged, all_copied
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.divided import is_sharded
from dualeval.engine.device.transfer import map_batch
from dualeval.engine.identity.hasher import same_bits
from dualeval.engine.job.evaluation import Evaluation, read_alone
from dualeval.engine.model.compute import THREADS, Compute, is_compiled, usable_threads
from dualeval.engine.model.kept import OF_TASK, Kept, plain_values
from dualeval.engine.model.snapshot import Generators, Snapshot
from dualeval.engine.samples.subset import postprocessed
from dualeval.errors import DualevalError, with_type
from dualeval.messages import listed
from dualeval.options.choices import COMPILE
from dualeval.process.status_line import doing
from dualeval.tasks import Task

# Forwards of a look: the first batch three times, the second twice, both at the same time, and the samples of
# the first in other batches.
_FORWARDS = 9
# A look may take this part of a run, or so many seconds in any run.
_PART, _ALWAYS_S = 0.05, 3.0
# Samples in each of these batches.
_FEWEST, _MOST = 2, 8
# Most bytes of buffers that are put back: quantized weights are buffers, too.
_LARGEST = 1 << 26
# Samples that are read twice more if the first were read within so many seconds.
_MORE, _READ_WITHIN_S = 16, 0.2
# How much rounding may change a column, relative to its largest value, or to 0.1 if that is larger; in fp32,
# and in half precision and TF32.
_ROUNDING, _ROUNDING_OF_HALF, _LEAST = 0.01, 0.05, 0.1
_HALF = {torch.float16, torch.bfloat16}
# Samples that are each computed alone after the loop.
ALONE = 4
# Names in a sentence.
_NAMED = 3
# Seconds that one of two batches, computed at the same time, waits for the other.
_MEETS_WITHIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The findings of a look."""

    # Batches that may be computed at the same time.
    threads: int
    # A warning if samples gave other columns the second time; None if there was no second time.
    unlike: list[str] | None = None
    # Notes for the user.
    notes: Sequence[str] = ()
    # Warnings about the numbers.
    warnings: Sequence[str] = ()
    # The data set's notes on reading, once a process.
    of_reading: Sequence[str] = ()


@doing("checking the first samples")
def look(evaluation: Evaluation, remaining: Sequence[int], computes: Callable[..., Compute]) -> Looked:
    """Compute this rank's first samples several times, and leave model and random numbers as they were."""
    world, plan = evaluation.run.backend.world, evaluation.plan
    chunks = remaining[world.rank :: world.size]
    first = [(batch, chunk) for chunk in chunks[:2] for batch in plan.chunk_batches(chunk)][:2]
    if not first:
        return Looked(threads=1)
    count = plan.samples_in(chunks)
    few = min(_MOST, max(_FEWEST, int(count * _PART / _FORWARDS)))
    # Compiling for a shape takes seconds: a compiled model gets whole batches, as in the loop.
    whole = evaluation.run.options.optimize == COMPILE or is_compiled(evaluation.model)
    batches = [plan.batch_samples(batch) for batch, _ in first]
    start, half = batches[0][:few], few // 2
    shifted = batches[0][half : half + few]
    computed: list[bool] = []
    try:
        with as_before(evaluation.model, evaluation.task) as reset:
            tried = partial(
                _look, evaluation, first[0][1], count, computes, reset, computed, batches[0][:_MORE]
            )
            if not whole:
                with suppress(Exception):  # some models want whole batches
                    beside = [shifted] if len(shifted) == few else []
                    return tried([samples[:few] for samples in batches], [*beside, start[: len(start) // 2]])
            return tried(batches, [] if whole else [batches[0][: len(batches[0]) // 2]])
    except Exception as error:
        # An error in the first computation ends the run; an error in the second is only reported.
        if isinstance(error, DualevalError) or not computed:
            raise
        note = (
            f"the first samples could not be computed twice ({with_type(error)}), so it is not known whether "
            "they give the same numbers; batches are computed one at a time"
        )
        return Looked(threads=1, notes=[note])


@contextmanager
def as_before(model: nn.Module, task: Task | None) -> Iterator[Callable[[], None]]:
    """Put back what a model, a task and its functions keep, and the random states.

    Yields a function that puts back all but the random states. Of a sharded model, only the buffers are put
    back: FSDP keeps in attributes what its first forward has made.
    """
    snapshot, generators, sharded = Snapshot(_LARGEST), Generators(), is_sharded(model)
    snapshot.remember_buffers(model.modules()) if sharded else snapshot.remember(model)
    kept = None if task is None or sharded else Kept(task, OF_TASK, model)

    def reset() -> None:
        snapshot.put_back()
        if kept is not None:
            kept.put_back()

    try:
        yield reset
    finally:
        reset()
        generators.put_back()


_SWITCHED = (
    "the loop's forwards have changed the model for good ({}): samples before and after that are computed "
    "by two different models, so the result depends on their order and on the number of processes. Have "
    "forward leave the attribute alone, or set it before the evaluation, in the model or its config"
)


class Lasting:
    """Permanent changes that the forwards of a loop make in a model, since this object was made."""

    def __init__(self, model: nn.Module) -> None:
        self._before = plain_values(model)
        # The state to put back.
        self.state = _state_of(model)

    def warnings(self, *models: nn.Module, decides: Callable[[nn.Module], bool] | None = None) -> list[str]:
        """A warning that names what has changed in one of the models; new attributes do not count.

        A text says how a model computes. A number or bool may only count calls, or the entries of a table:
        ``decides`` says whether a batch has another result in the model as it is now.
        """
        seen, shown = set[str](), dict[Any, str]()
        for model in models:
            now, before = plain_values(model), self._before
            changed = [name for name in before if name in now and repr(before[name]) != repr(now[name])]
            texts = [name for name in changed if _has_text((before[name], now[name]))]
            if not seen.issuperset(changed) and (texts or (decides and decides(model))):
                for name in dict.fromkeys([*texts, *changed]):
                    # Of layers that have changed alike, only the first is shown.
                    alike = name.rpartition(".")[2], repr(now[name])
                    shown.setdefault(alike, f"{name}: {before[name]!r} before, {now[name]!r} now")
            seen.update(changed)
        return [_SWITCHED.format(listed(shown.values(), _NAMED))] if shown else []


def _has_text(value: Any) -> bool:
    return any(map(_has_text, value)) if isinstance(value, tuple) else isinstance(value, (str, Enum))


class Widest:
    """The batch of a rank with the longest samples, the last one if several have the same size.

    In it, choices that depend on the whole batch differ from those for a single sample: a rotary embedding
    depends on the longest text, a quantization on the largest value.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.samples = range(0)
        # Set when they are counted.
        self.columns: Mapping[str, Column] | None = None
        self._size = 0.0, 0

    def see(self, samples: range, data: Any) -> None:
        """Measure the numbers per sample of its largest tensor; one function, for every batch needs it."""
        self.batches += 1
        longest, rest = 0, [data]
        while rest:
            each = rest.pop()
            if isinstance(each, Tensor):
                longest = max(longest, each.numel())
            elif isinstance(each, Mapping):
                rest += each.values()
            elif isinstance(each, (list, tuple)):
                rest += each
        # Per sample, for the last batch may have few samples.
        if (size := (longest / len(samples), len(samples))) >= self._size:
            self.samples, self.columns, self._size = samples, None, size

    def warnings(self, evaluation: Evaluation, computes: Callable[..., Compute]) -> tuple[list[str], bool]:
        """Compute some of its samples each alone; a warning if their numbers differ from the loop's.

        Also whether the whole batch, computed again, differs: then its size is not the cause.
        """
        samples, of_loop, least = self.samples, self.columns, 2 if _is_rough(evaluation) else 1
        places = sorted({(len(samples) - 1) * part // (ALONE - 1) for part in range(ALONE)})
        if of_loop is None or len(samples) < 2 or is_compiled(evaluation.model):
            return [], False
        evaluation.run.control.progress.step(Stage.FORWARD)
        with as_before(evaluation.model, evaluation.task) as reset, computes(1) as compute:

            def unlike(several: Sequence[range]) -> list[str]:
                sentences: list[str] = []
                for part, (data, failed) in zip(several, read_alone(evaluation, *several), strict=True):
                    reset()
                    if data is not None and not failed:
                        first, columns = part.start - samples.start, compute.start(data)()
                        sentences += _of_batch(of_loop, columns, first, _allowed_of(evaluation))
                return sentences

            # In half precision one sample may be borderline: one token changes, and with it all that follow.
            warnings = unlike([samples[place : place + 1] for place in places])
            return (warnings[:1], bool(unlike([samples]))) if len(warnings) >= least else ([], False)


def is_short(seconds: float, forwards: int, of: float) -> bool:
    """Whether more forwards take at most three seconds together, or a twentieth of a run's forwards."""
    return seconds <= _ALWAYS_S or forwards <= of * _PART


def _look(
    evaluation: Evaluation,
    chunk: int,
    count: int,
    computes: Callable[..., Compute],
    reset: Callable[[], None],
    computed: list[bool],
    more: range,
    pieces: Sequence[range],
    beside: Sequence[range],
) -> Looked:
    task, model, step = evaluation.task, evaluation.model, evaluation.run.control.progress.step
    of_reading: list[str] = []
    # Samples of the first batch in other batches.
    beside = [samples for samples in beside if samples]
    start = perf_counter()
    parts = [*pieces, *beside, pieces[0]]

    def reading(place: int) -> None:
        step(Stage.LOAD, evaluation.plan.chunk_of(parts[place].start))

    several = read_alone(evaluation, *parts, step=reading, notes=of_reading)
    reads_fast = perf_counter() - start < _READ_WITHIN_S
    *read, again = [data for data, _ in several]
    read, others = read[: len(pieces)], read[len(pieces) :]
    most = -(-count // evaluation.plan.batch_size)
    threads = usable_threads(task, model, evaluation.run.device, evaluation.run.threads, most)
    trusted = task.thread_safe is True
    looked = Looked(threads=threads if trusted else 1, of_reading=of_reading)
    if again is None or any(data is None for data in read):
        return looked
    step(Stage.FORWARD, chunk)
    with computes(1) as compute:

        def alone(samples: range, data: Any) -> Mapping[str, Column]:
            columns = compute.start(_copied(data))()
            return postprocessed(task, evaluation.dataset, columns, samples)

        results = [alone(pieces[0], read[0])]
        computed.append(True)
        before, kept, generators = _state_of(model), Kept(task, OF_TASK, model), Generators()
        start = perf_counter()
        # Timed from the second on: the first may compile or build tables, which the loop has to do anyway.
        results += [alone(pieces[1], data) for data in read[1:]]
        seconds = (perf_counter() - start) * (_FORWARDS - 2)
        if not is_short(seconds, _FORWARDS - 2, count / len(pieces[0])):
            return replace(looked, notes=[_TOO_LONG.format(seconds)])
        changed, of_task = before.changes(), kept.changes()

        def why() -> str:
            if changed or kept.changes():
                return f"from one batch to the next {_changes([*changed, *kept.changes()])}"
            return _RANDOM

        unlike = differences(results[0], alone(pieces[0], again), read[0], again, why)
        draws = generators.are_others()
        if not unlike and not evaluation.run.workers:
            # Read another batch first, as the loop does: observe may use what reading leaves in the process.
            read_alone(evaluation, pieces[-1])
            unlike = differences(results[0], alone(pieces[0], again), again, again, lambda: _BY_READING)
        if not unlike and read[1:]:
            reset()
            unlike = differences(results[1], alone(pieces[1], read[1]), read[1], read[1], lambda: _MADE)
        if not unlike and reads_fast:
            [(one, _), (other, _)] = read_alone(evaluation, more, more)
            unlike = differences({}, {}, one, other, why)
        warnings, allowed = list[str](), _allowed_of(evaluation)
        for samples, data in zip(beside, others, strict=True) if not unlike else ():
            with suppress(Exception):  # some models want batches of one size
                at = samples.start - pieces[0].start
                warnings = warnings or _of_batch(results[0], alone(samples, data), at, allowed)
        if draws and not unlike:
            return replace(looked, warnings=[*warnings, _DRAWS])
        looked = replace(looked, unlike=unlike, warnings=warnings)
    if looked.unlike or trusted or threads == 1:
        return looked
    if of_task:
        notes = [_KEPT.format(_changes(of_task))]
    else:
        notes = _in_threads(evaluation, computes, pieces, read, results, changed)
    return replace(looked, threads=1 if notes else threads, notes=notes)


_KEPT = (
    "from one batch to the next, {}: the batches are computed one at a time. In Python let the outputs of "
    "forward hold what observe reads; or give thread_safe=True if no number depends on it"
)
_DRAWS = (
    "forward or observe draws random numbers. The first samples gave the same values twice, but others may "
    "not: another run, or another number of processes, may give a different result. Turn this off: call "
    "dropout with training=self.training"
)
_BY_BATCH = (
    "the numbers depend on the batch size: the same samples give different values in another batch ({}). "
    "This happens if the model uses a batch's own statistics (BatchNorm with track_running_stats=False), "
    "its largest value (dynamic quantization) or longest text (rotary embeddings longrope and dynamic), "
    "reads what collate pads, or if observe combines outputs (n, 1) and a target (n,). With batch size 1 "
    "each sample is computed alone"
)
_RANDOM = (
    "forward or observe gives different values for the same input, as dropout does without "
    "training=self.training"
)
_MADE = "the model keeps something from its first batch, and each process starts with a different batch"
_OTHER_DATA = "the data set gives different values each time it is read. Leave random augmentation out"
LATER = (
    "the same samples of a later batch give different numbers when they are read and computed again: the "
    "data set, forward or observe draws random numbers, or keeps something from one batch to the next. "
    "Another run, or another number of processes, gives a different result"
)
_BY_READING = (
    "forward or observe reads what is kept when a batch is read, and batches are read ahead of the one that "
    "is computed. Have collate put it into the batch"
)
_TOO_LONG = (
    "whether the model gives the same numbers twice was not tested: that takes about {:.0f} s, more than a "
    "twentieth of this run. So its batches are computed one at a time; thread_safe=True computes several at "
    "once"
)


def differences(
    one: Mapping[str, Column], other: Mapping[str, Column], data: Any, again: Any, why: Callable[[], str]
) -> list[str]:
    """A warning if the same samples, read and computed twice, give other bits; ``why`` explains it."""
    names = differing(one, other)
    # If no column differs, only tensors are compared: other values may not matter, as the time of reading.
    of_data = (lambda batch: [batch]) if names else _tensors_in
    first, second = ([], []) if data is again else (of_data(data), of_data(again))
    is_other = len(first) != len(second) or not all(map(same_bits, first, second))
    if not names and not is_other:
        return []
    cause = _OTHER_DATA if is_other else why()
    again_other = f"the same samples give different numbers when they are computed again ({_unique(names)}): "
    return [
        f"{again_other if names else ''}{cause}. Another run, or another number of processes, gives a "
        "different result"
    ]


def _is_rough(evaluation: Evaluation) -> bool:
    kinds, precision = {each.dtype for each in evaluation.model.parameters()}, evaluation.run.precision
    return precision.tf32 or precision.is_half or bool(kinds & _HALF)


def _allowed_of(evaluation: Evaluation) -> float:
    return _ROUNDING_OF_HALF if _is_rough(evaluation) else _ROUNDING


def _tensors_in(batch: Any) -> list[Tensor]:
    if type(batch) is dict and {*map(type, batch.values())} == {Tensor}:
        return [*batch.values()]  # most are, and there is no nest to walk
    leaves: list[Any] = []
    map_batch(leaves.append, batch, leaves.append)
    return [each for each in leaves if isinstance(each, Tensor)]


def _of_batch(
    one: Mapping[str, Column], other: Mapping[str, Column], first: int, allowed: float
) -> list[str]:
    """A warning if samples differ, beyond rounding, in a batch that begins at ``first``."""
    one, other = _in_order(one, other, first)
    tensors = {name: column for name, column in one.items() if isinstance(column, Tensor)}
    # Rounding may change a few whole numbers, such as classes; if there are floats, only these decide.
    floats = {name: column for name, column in tensors.items() if column.is_floating_point()}
    for name, column in (floats or tensors).items():
        there = other[name]
        if not isinstance(there, Tensor) or there.shape[1:] != column.shape[1:]:
            continue
        here = column[first:][: len(there)].double()
        apart = (here - there[: len(here)].double()).abs().nan_to_num(0, 0, 0)
        size = (column.double() if floats and allowed > _ROUNDING else here).abs().nan_to_num(0, 0, 0)
        difference, of = (apart.max(), size.max()) if floats else (apart.sum(), size.sum())
        if difference > allowed * max(float(of), _LEAST):
            return [_BY_BATCH.format(name)]
    return []


def _in_order(
    one: Mapping[str, Column], other: Mapping[str, Column], first: int
) -> tuple[dict[str, Column], dict[str, Column]]:
    """The columns; of ragged ones the values of samples that have as many in both, each dimension sorted.

    Rounding may exchange two detections of nearly equal scores, or leave one out.
    """
    found, there = dict(one), dict(other)
    for name, column in one.items():
        beside = other[name]
        if not isinstance(column, Ragged) or not isinstance(beside, Ragged):
            continue
        rows = range(min(len(column) - first, len(beside)))
        pairs = [(column[first + row], beside[row]) for row in rows]
        alike = [pair for pair in pairs if pair[0].shape == pair[1].shape and len(pair[0])]
        if alike:
            # Of the samples before `first` nothing is compared.
            before = torch.zeros(first, *alike[0][0].shape[1:], dtype=alike[0][0].dtype)
            found[name] = torch.cat([before, *(mine.sort(0).values for mine, _ in alike)])
            there[name] = torch.cat([other_values.sort(0).values for _, other_values in alike])
    return found, there


def differing(one: Mapping[str, Column], other: Mapping[str, Column]) -> list[str]:
    """The columns that have other bits."""
    if (isinstance(one, LateColumns) and isinstance(other, LateColumns) and one.kind == other.kind) and all(
        map(same_bits, one.given.values(), other.given.values())
    ):
        return []  # what they are made of is the same
    return [name for name, column in one.items() if not same_bits(column, other.get(name))]


def _in_threads(
    evaluation: Evaluation,
    computes: Callable[..., Compute],
    pieces: Sequence[range],
    read: Sequence[Any],
    alone: Sequence[Mapping[str, Column]],
    changed: Sequence[str],
) -> list[str]:
    """Why batches cannot be computed at the same time; empty if they give what each gave alone."""
    try:
        with _meeting(len(read)) as around_forward, computes(len(read), around_forward) as pool:
            pending = [pool.start(_copied(data)) for data in read]
            together = [
                postprocessed(evaluation.task, evaluation.dataset, columns(), samples)
                for columns, samples in zip(pending, pieces, strict=True)
            ]
    except Exception as error:  # noqa: BLE001 - said: each of them could be computed alone
        problem = f"cannot be computed at the same time ({with_type(error)})"
    else:
        unlike = [name for one, other in zip(alone, together, strict=True) for name in differing(one, other)]
        if not unlike:
            return []
        problem = f"give different numbers when two are computed at the same time ({_unique(unlike)})"
    cause = f": {_changes(changed)} from one to the next" if changed else ""
    return [
        f"batches {problem}{cause}. So they are computed one at a time; in Python let the outputs of forward "
        "hold what observe reads"
    ]


@contextmanager
def _meeting(batches: int) -> Iterator[Callable[[], ExitStack]]:
    """Have batches in threads wait for each other around each module and before observe.

    If a batch keeps a value outside of itself, another batch overwrites the value before it is read.
    """
    together = threading.Barrier(batches)

    def meet(*_: Any) -> None:
        if threading.current_thread().name.startswith(THREADS):
            with suppress(threading.BrokenBarrierError):  # the other has finished, or waits elsewhere
                together.wait(_MEETS_WITHIN_S)

    def around_forward() -> ExitStack:
        stack = ExitStack()
        stack.callback(meet)
        return stack

    with ExitStack() as stack:
        stack.callback(nn.modules.module.register_module_forward_pre_hook(meet).remove)
        stack.callback(nn.modules.module.register_module_forward_hook(meet).remove)
        yield around_forward


def _copied(data: Any) -> Any:
    """A batch for one forward, which may write into its input."""
    if type(data) is dict and {*map(type, data.values())} == {Tensor}:
        return all_copied(data)
    return map_batch(Tensor.clone, data, lambda value: value.clone() if isinstance(value, Tensor) else value)


def _state_of(model: nn.Module) -> Snapshot:
    """A model's state, to find later what a forward has changed in it; of a sharded model nothing."""
    state = Snapshot(largest=0)
    if not is_sharded(model):
        state.remember(model)
    return state


def _changes(places: Sequence[str]) -> str:
    return f"{_unique(places)} {'change' if len({*places}) > 1 else 'changes'}"


def _unique(names: Sequence[str]) -> str:
    return listed(dict.fromkeys(names), _NAMED)
