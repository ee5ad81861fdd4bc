"""Batches onto the device: reading, failed samples, worker processes, their way to it."""

from __future__ import annotations

import multiprocessing
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any, TypeVar

import torch

from dualeval.engine.accelerator import accelerator_of
from dualeval.engine.nests import zeros_like
from dualeval.engine.options import RunOptions
from dualeval.engine.parts import index_of, name_of
from dualeval.engine.progress import Stage
from dualeval.engine.samples import Samples
from dualeval.engine.storages import own_storages
from dualeval.engine.transfer import Uploads
from dualeval.errors import DualevalError, UsageError, text_of, with_type
from dualeval.own_code import keep_own_code, own_code
from dualeval.process_start import end_with_parent
from dualeval.tasks import Dataset, Task

# What torch says when a loader's worker has ended.
_LOST_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is )?(killed by signal: [^.]+|exited unexpectedly[^.]*)"
)


_Tree = TypeVar("_Tree")


@dataclass(frozen=True, kw_only=True)
class FailedSample:
    """A sample that could not be read, twice."""

    # Its place in the data set.
    index: int
    # Type and message of the last error.
    error: str
    # The lines of the user's own code that it came through, where it ends the run.
    own_code: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch as the evaluator gets it."""

    # The task's batch on the device; None where no sample of it could be read, or where one could not and its
    # place is not filled.
    data: Any
    # Its unreadable samples, whose places in `data` hold placeholders or zeros.
    failed: tuple[FailedSample, ...]


class Reader(torch.utils.data.Dataset[tuple[Any, tuple[FailedSample, ...]]]):
    """Reads and collates whole batches; ``reader[range]`` is what a loader's worker calls."""

    def __init__(self, dataset: Dataset, task: Task, *, fill: bool = True) -> None:
        self._dataset = dataset
        self._task = task
        self._fill = fill
        # Whether the data set is known to return ready batches, and the samples to have zeros.
        self._ready_batches = False
        self._fill_tried = False
        # The data set, where rows of tensors are a batch as they are.
        self._rows = dataset if isinstance(dataset, Samples) and task._collates_as_torch() else None

    def notes(self) -> list[str]:
        """What a data set that has ``reading_notes`` says of reading in this process, since the last call."""
        notes: Callable[[], list[str]] | None = getattr(self._dataset, "reading_notes", None)
        return [] if notes is None else notes()

    def __getitem__(self, indices: range) -> tuple[Any, tuple[FailedSample, ...]]:
        """Read one batch: its data, None if no sample could be read, and the samples that failed."""
        try:
            if self._rows is not None and (stacked := self._rows.stacked(indices)) is not None:
                return stacked, ()
            samples = self._dataset.__getitems__(indices)
        except Exception as error:  # noqa: BLE001 - any error of a data set is the sample's; next: whose
            samples, failed = self._read_one_by_one(indices, error)
        else:
            failed = ()
            self._ready_batches = not isinstance(samples, list)
            if isinstance(samples, list) and samples:
                self._try_to_fill(samples[0])
        if isinstance(samples, list) and len(samples) != len(indices):
            raise DualevalError(
                f"the data set gave {len(samples)} samples for the {len(indices)} indices {indices.start} to "
                f"{indices.stop - 1}. __getitems__ must return one sample an index, and raise for a bad one."
            )
        return (None if samples is None else self._task.collate(samples)), failed

    def _read_one_by_one(self, indices: range, first: Exception) -> tuple[Any, tuple[FailedSample, ...]]:
        """The second attempt, each sample alone."""
        samples: dict[int, Any] = {}
        failed: list[FailedSample] = []
        for index in indices:
            try:
                samples[index] = self._read_one(index)
            except Exception as error:  # noqa: BLE001 - reported with the sample's id; the run decides
                # Of samples that are left out there may be many.
                lines = "" if self._fill else own_code(error)
                failed.append(FailedSample(index=index, error=with_type(error), own_code=lines))
        if self._ready_batches or (not self._fill and _is_of_batch(first, samples, failed)):
            return self._read_ready_batch_again(indices, first, failed), ()
        if not samples or (failed and not self._fill):
            return None, tuple(failed)
        example = next(iter(samples.values()))
        samples.update({sample.index: self._in_place_of(sample, example) for sample in failed})
        return [samples[index] for index in indices], tuple(failed)

    def _read_one(self, index: int) -> Any:
        samples = self._dataset.__getitems__([index])
        if not isinstance(samples, list):
            self._ready_batches = True
            return samples
        [sample] = samples
        return sample

    def _read_ready_batch_again(
        self, indices: range, first: Exception, failed: Sequence[FailedSample]
    ) -> Any:
        """A batch whose samples cannot be taken apart: all of it, or none."""
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            alone = "".join(
                f" Alone, sample {name_of(self._dataset, sample.index)} gives {sample.error}."
                for sample in failed[:1]
            )
            refusal = UsageError(
                f"the batch of samples {self._dataset.id(indices[0])} to {self._dataset.id(indices[-1])} "
                f"(indices {index_of(self._dataset, indices[0])} to "
                f"{index_of(self._dataset, indices[-1])}) cannot be read: {with_type(first)}.{alone} "
                f"{type(self._dataset).__name__} returns ready batches, so no single sample can be left out "
                "(--on-error skip): repair or remove the bad one, or let __getitems__ return a list of "
                "samples and the task's collate make the batch."
            )
            keep_own_code(refusal, own_code(first))
            raise refusal from error

    def _try_to_fill(self, example: Any) -> None:
        """Find out at the first batch that nothing can take the place of a failed sample."""
        if self._fill_tried or not self._fill:
            return
        self._fill_tried = True
        if getattr(self._dataset, "placeholder", None) is None:
            self._zeros("--on-error skip: a sample may be unreadable", example)

    def _in_place_of(self, failed: FailedSample, example: Any) -> Any:
        """What the data set gives for a failed sample; zeros like another one where it gives nothing."""
        placeholder = getattr(self._dataset, "placeholder", None)
        if placeholder is not None:
            return placeholder(failed.index)
        return self._zeros(
            f"sample {name_of(self._dataset, failed.index)} cannot be read: {failed.error}",
            example,
        )

    def _zeros(self, why: str, example: Any) -> Any:
        try:
            return zeros_like(example)
        except TypeError as error:
            raise UsageError(
                f"{why}. Nothing can take its place in its batch: the samples of "
                f"{type(self._dataset).__name__} hold a {error}, which has no zero (expected tensors, numpy "
                "arrays, numbers, text, None, and dicts, lists, tuples and dataclasses of them). Give the "
                "data set a method placeholder(index) that returns a sample of the same shape, or mend or "
                "remove the sample, and run with --on-error stop."
            ) from error


def _is_of_batch(first: Exception, samples: Mapping[int, Any], failed: Sequence[FailedSample]) -> bool:
    """Whether it is the batch that cannot be read: all samples fail alone, and none as the batch has."""
    return not samples and not any(each.error.startswith(f"{type(first).__name__}:") for each in failed)


class _Returning(torch.utils.data.Dataset[Any]):
    """A reader whose errors for people are returned: a loader would wrap them into its worker's traceback."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, indices: range) -> Any:
        try:
            data, failed = self._reader[indices]
            return own_storages(data), failed, self._reader.notes()
        except DualevalError as error:
            return _with_own_code(error)
        except Exception as error:
            if not own_code(error):
                raise
            # Of the user's own, as a collate: torch would raise another one, with this process's traceback.
            return _with_own_code(DualevalError(f"a reading process: {with_type(error)}"), error)


def _with_own_code(said: DualevalError, error: BaseException | None = None) -> DualevalError:
    """An error that can be sent to another process with the lines that it came through."""
    keep_own_code(said, own_code(error or said))
    return said


class Feed:
    """The batches of one rank, in the order given, on the device."""

    def __init__(
        self,
        reader: Reader,
        batches: Iterable[range],
        *,
        workers: int,
        device: torch.device,
        ahead: int = 2,
        step: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        self._reader = reader
        self._batches = batches
        self._workers = workers
        self._device = device
        self._ahead = ahead
        self._step = step
        # Seconds spent waiting for data so far.
        self.wait_s = 0.0
        # Seconds the host spent on writing batches into pinned memory and starting their copies.
        self.transfer_s = 0.0
        # What the data set says of its reading, in all processes that read for this rank.
        self.notes: list[str] = []
        self._handing_out: Generator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._handing_out = self._hand_out()
        return self._handing_out

    def close(self) -> None:
        """End the reading processes, even where the traceback of an error holds this feed."""
        if self._handing_out is not None:
            self._handing_out.close()

    def _hand_out(self) -> Generator[Batch]:
        accelerator = accelerator_of(self._device)
        uploads = Uploads(accelerator)
        for data, failed, notes in self._timed(self._load()):
            self.notes += notes
            if not accelerator.is_host:
                self._step("transfer")
            # Handed out before the next one is waited for: the device computes it as soon as it is there, and
            # the next one is read and copied meanwhile. No name is kept: it would hold the device's memory.
            there = accelerator.is_host and _is_of_tensors(data)
            yield Batch(data=data if there else self._uploaded(uploads, data), failed=failed)

    def _uploaded(self, uploads: Uploads, data: Any) -> Any:
        start = perf_counter()
        try:
            return uploads.start(data)
        finally:
            self.transfer_s += perf_counter() - start

    def _load(self) -> Iterable[tuple[Any, tuple[FailedSample, ...], list[str]]]:
        if self._workers == 0:
            return ((*self._reader[indices], self._reader.notes()) for indices in self._batches)
        # Batches are the loader's samples: the plan has already made them.
        return torch.utils.data.DataLoader(
            _Returning(self._reader),
            batch_size=None,
            sampler=self._batches,
            collate_fn=_unchanged,
            num_workers=self._workers,
            # Not by Python's own choice, which is forkserver from 3.14 on: what is read is not pickled.
            multiprocessing_context="fork",
            prefetch_factor=self._ahead,
            worker_init_fn=_end_with_parent,
            # Not the process's own: a caller's script may draw from that.
            generator=torch.Generator(),
        )

    def _timed(self, loaded: Iterable[_Tree]) -> Iterator[_Tree]:
        before = set(multiprocessing.active_children())
        iterator = iter(loaded)
        readers = [process for process in multiprocessing.active_children() if process not in before]
        try:
            while True:
                start = perf_counter()
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                finally:
                    self.wait_s += perf_counter() - start
                if isinstance(item, DualevalError):
                    raise item
                yield item
        except Exception as error:
            lost = lost_worker(error)
            if lost is None:
                raise
            # The traceback would be torch's.
            raise lost from None
        finally:
            # They end with the loader's iterator, if nothing else holds that.
            del iterator
            _end(readers)


def why_not_forked() -> str | None:
    """Why this process cannot fork others that read for it; None where it can."""
    if sys.platform != "linux":
        return f"reading processes are forked, which is not safe on {sys.platform}"
    method = multiprocessing.get_start_method(allow_none=True)
    if method in (None, "fork", multiprocessing.get_all_start_methods()[0]):  # the first is Python's own
        return None
    return (
        f"reading processes are forked, and this program has them started by {method} "
        f"(multiprocessing.set_start_method({method!r}))"
    )


def checked_workers(options: RunOptions) -> int:
    """How many processes are to read for a rank; refused where none can."""
    if options.workers and (why := why_not_forked()) is not None:
        raise UsageError(
            f"--workers {options.workers}: {why}. Type --workers 0 (in Python: workers=0), and samples are "
            "read in the process that computes."
        )
    return options.workers or 0


def _is_of_tensors(data: Any) -> bool:
    """Whether a batch is plain tensors in a plain container: on the host nothing of it is to be moved."""
    if type(data) is dict:
        data = data.values()
    elif type(data) is not list and type(data) is not tuple:
        return type(data) is torch.Tensor
    return {*map(type, data)} <= {torch.Tensor}


def _end(readers: Sequence[BaseProcess]) -> None:
    """End reading processes that are still there: an error's traceback holds their loader, or one was killed.

    As Python ends they would be sent SIGTERM and waited for; and a run has that blocked in them.
    """
    left = [process for process in readers if process.is_alive()]
    if not left:
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    # torch's handler would raise that they were killed.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main_thread else None
    for process in left:
        process.kill()
        process.join()
    if in_main_thread:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def lost_worker(error: BaseException) -> DualevalError | None:
    """Give the message for the end of a reading process, where that is what an error is about.

    torch raises it out of its handler of SIGCHLD: wherever the main thread happens to be.
    """
    found = _LOST_WORKER.match(text_of(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    return DualevalError(
        f"a reading process (pid {found[1]}) ended early ({found[2]}); its batch is lost. "
        "One that is killed mostly means that the host has run out of memory ('dmesg' shows it): try fewer "
        "--workers or a smaller --batch-size. One that crashes has read a file that breaks its decoder: "
        "--workers 0 shows which. Finished work is saved, and the same command resumes."
    )


def _end_with_parent(worker: int) -> None:
    """Have this reading process killed when the process that it reads for ends, however that ends.

    One that hangs in a read would outlive it.
    """
    end_with_parent(signal.SIGKILL)


def _unchanged(batch: _Tree) -> _Tree:
    return batch
