"""Batches onto the device: reading, failed samples, worker processes, uploads."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualeval.engine.control.progress import Stage
from dualeval.engine.device.accelerator import Accelerator, accelerator_of
from dualeval.engine.device.transfer import Begun, Uploads, map_batch
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.samples.samples import Samples
from dualeval.engine.samples.subset import index_of, name_of
from dualeval.engine.values.nests import tensors_in, zeros_like
from dualeval.engine.values.options import RunOptions
from dualeval.errors import DualevalError, StoreError, UsageError, with_type
from dualeval.process.start import end_with_parent
from dualeval.tasks import Dataset, Task
from dualeval.user_code.origin import keep_own_code, own_code

_SHARED_MEMORY = Path("/dev/shm")
# The files that this process has open, by their numbers.
_DESCRIPTORS = Path("/proc/self/fd")
# For each reading process; all of them together need three times as much in addition.
_LOCKS_BYTES = 16 * 1024
# Bytes of a batch from which on writing them into pinned memory takes longer than another thread's start.
_LARGE_BATCH = 1 << 20
_MORE_ROOM = (
    "A container gets more with 'docker run --ipc=host' or --shm-size, in Kubernetes with an emptyDir of "
    "memory at /dev/shm."
)
_NO_ROOM = (
    "/dev/shm has no room for the batches of reading processes: they are sent through pipes, which takes "
    f"longer. {_MORE_ROOM}"
)


@dataclass(frozen=True, kw_only=True)
class FailedSample:
    """A sample that could not be read, twice."""

    # Its position in the data set.
    index: int
    # Type and message of the last error.
    error: str
    # The lines of the user's code that the error came through, if it ends the run.
    own_code: str = field(default="", compare=False, repr=False)


# A batch: the task's data, and the unreadable samples, which are replaced by placeholders or zeros. The data
# is None if no sample could be read, or if one could not and is not replaced.
Read: TypeAlias = tuple[Any, tuple[FailedSample, ...]]


class Reader(torch.utils.data.Dataset[Read]):
    """Reads and collates whole batches; ``reader[range]`` is what a loader's worker calls."""

    def __init__(self, dataset: Dataset, task: Task, *, fill: bool = True, cores: Sequence[int] = ()) -> None:
        # The cores on which processes of its own run; empty for all.
        self.cores = cores
        self._dataset = dataset
        self._task = task
        self._fill = fill
        # Whether the data set is known to return ready batches, and whether a replacement has been tried.
        self._ready_batches = False
        self._fill_tried = not fill
        # Set if rows of tensors form a batch without a collate.
        self._stacked = dataset.stacker(task) if isinstance(dataset, Samples) else None

    def notes(self) -> list[str]:
        """Notes since the last call on reading in this process, from a data set with ``reading_notes``."""
        notes: Callable[[], list[str]] | None = getattr(self._dataset, "reading_notes", None)
        return [] if notes is None else notes()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: range) -> Read:
        """Read one batch: its data, None if no sample could be read, and the samples that failed."""
        try:
            if self._stacked is not None:
                return self._stacked(indices), ()
            samples = self._dataset.__getitems__(indices)
        except Exception as error:
            if isinstance(error, StoreError) or _found_no_room(error):
                raise
            samples, failed = self._read_one_by_one(indices, error)
        else:
            failed = ()
            self._ready_batches = not isinstance(samples, list)
            if not self._ready_batches and samples and not self._fill_tried:
                # Tried at the first batch, so that an error does not wait for a bad sample.
                self._fill_tried = True
                self._in_place_of(indices[0], "--on-error skip: a sample may be unreadable", samples[0])
        if isinstance(samples, list) and len(samples) != len(indices):
            raise DualevalError(
                f"the data set gave {len(samples)} samples for the {len(indices)} indices {indices.start} to "
                f"{indices.stop - 1}. __getitems__ must return one sample per index, and raise for a bad one."
            )
        return (None if samples is None else self._task.collate(samples)), failed

    def _read_one_by_one(self, indices: range, first: Exception) -> Read:
        """The second attempt, each sample alone."""
        samples: dict[int, Any] = {}
        failed: list[FailedSample] = []
        for index in indices:
            try:
                samples[index] = self._read_one(index)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - reported with the sample's id; the run decides
                # Samples that are left out may be many: no lines are kept for them.
                lines = "" if self._fill else own_code(error)
                failed.append(FailedSample(index=index, error=with_type(error), own_code=lines))
        if self._ready_batches:
            return self._read_ready_batch_again(indices, first, failed), ()
        if not samples or (failed and not self._fill):
            return None, tuple(failed)
        example = next(iter(samples.values()))
        for each in failed:
            why = f"sample {name_of(self._dataset, each.index)} cannot be read: {each.error}"
            samples[each.index] = self._in_place_of(each.index, why, example)
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
        """Read a batch whose samples cannot be separated: all of it, or none."""
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            data = self._dataset
            alone = [f" Alone, sample {name_of(data, each.index)} gives {each.error}." for each in failed]
            refusal = UsageError(
                f"the batch of samples {data.id(indices[0])} to {data.id(indices[-1])} "
                f"(indices {index_of(data, indices[0])} to {index_of(data, indices[-1])}) cannot be read: "
                f"{with_type(first)}.{''.join(alone[:1])} {type(data).__name__} returns ready batches, so no "
                "single sample can be left out (--on-error skip): repair or remove the bad one, or let "
                "__getitems__ return a list of samples and the task's collate make the batch."
            )
            keep_own_code(refusal, own_code(first))
            raise refusal from error

    def _in_place_of(self, index: int, why: str, example: Any) -> Any:
        """The data set's placeholder for a failed sample; without one, zeros shaped like another sample."""
        placeholder = getattr(self._dataset, "placeholder", None)
        if placeholder is not None:
            return placeholder(index)
        try:
            return zeros_like(example)
        except TypeError as error:
            raise UsageError(
                f"{why}. No placeholder can be made for its batch: the samples of "
                f"{type(self._dataset).__name__} hold a {error}, which has no zero (expected tensors, numpy "
                "arrays, numbers, text, None, and dicts, lists, tuples and dataclasses of them). Give the "
                "data set a method placeholder(index) that returns a sample of the same shape, or mend or "
                "remove the sample, and run with --on-error stop."
            ) from error


class _Hashing(Reader):
    """Returns each sample's hash instead of its data; None if unreadable, or different on a second read."""

    def __getitem__(self, indices: range) -> Read:
        try:
            # Absolute paths, dates and devices may differ by host: only their kind is hashed.
            first, again = (Hasher().digest(self._dataset.__getitems__(indices)).hex() for _ in range(2))
        except Exception:  # noqa: BLE001 - what is wrong with a sample is said when it is evaluated
            return None, ()
        return first if first == again else None, ()


def hashes_of(dataset: Dataset, task: Task, samples: Iterable[int], workers: int) -> list[str | None]:
    """Hashes of single samples, read in a worker process if the loop uses any."""
    alone, reader = (range(each, each + 1) for each in samples), _Hashing(dataset, task)
    feed = Feed(reader, alone, workers=min(workers, 1), device=torch.device("cpu"))
    try:
        return [digest for digest, _ in feed]
    finally:
        feed.close()


class _Sending(torch.utils.data.Dataset[bytes]):
    """A reader's batches, and its errors for users, as messages to another process."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        # Whether the shared memory had room for each batch so far.
        self._has_room = True

    def __getitem__(self, indices: range) -> bytes:
        if self._has_room:
            try:
                # Tensors go into shared memory here: the thread of torch's queue would lose a batch that
                # finds no room, and the rank would wait for it forever.
                return bytes(ForkingPickler.dumps(self._read(indices, [])))
            except RuntimeError as error:
                if not _found_no_room(error):
                    raise
            self._has_room = False
            # While this is set, torch's default_collate makes its batches in shared memory.
            torch.utils.data._utils.worker._worker_info = None
        return pickle.dumps(self._read(indices, [_NO_ROOM]))

    def _read(self, indices: range, notes: list[str]) -> tuple[Any, ...] | DualevalError:
        try:
            data, failed = self._reader[indices]
            return own_storages(data), failed, [*notes, *self._reader.notes()]
        except DualevalError as error:
            # A collate may have replaced torch's error about missing room by its own.
            if error.__cause__ is not None and _found_no_room(error.__cause__):
                raise error.__cause__ from None
            return _with_own_code(error)
        except Exception as error:
            if _found_no_room(error) or not own_code(error):
                raise
            # An error of the user's code, as a collate: torch would raise it with this process's traceback.
            return _with_own_code(DualevalError(f"a reading process: {with_type(error)}"), error)


def own_storages(batch: Any) -> Any:
    """Copy those of a batch's plain tensors that are small parts of larger storages.

    Consecutive samples of a tensor with the whole data set are a view, and a view is sent to another process
    with all of its storage. Shapes and strides stay, so that a model computes the same bits.
    """

    def small(tensor: Tensor) -> Tensor:
        # A copy of the numbers would lose a gradient, or a view's conjugation or negation.
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return tensor
        # The elements from a tensor's first one to its last.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        if 2 * reach * tensor.element_size() > tensor.untyped_storage().nbytes():
            return tensor
        return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride())

    return map_batch(small, batch)


def _with_own_code(refusal: DualevalError, error: BaseException | None = None) -> DualevalError:
    """An error that can be sent to another process, with the user's lines that it came through."""
    keep_own_code(refusal, own_code(error or refusal))
    return refusal


class Feed:
    """The batches of one rank, in the given order: the data on the device, and the unreadable samples."""

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
        # Seconds this thread spent on writing batches into pinned memory and starting their copies, or waited
        # for the thread that does.
        self.transfer_s = 0.0
        # Notes on reading, from all processes that read for this rank.
        self.notes: list[str] = []
        self._handing_out: Generator[Read] | None = None

    def __iter__(self) -> Iterator[Read]:
        accelerator = accelerator_of(self._device)
        read = self._read()
        self._handing_out = read if accelerator.is_host else self._uploaded(read, accelerator)
        return self._handing_out

    def close(self) -> None:
        """End the reading processes, even if the traceback of an error holds this feed."""
        if self._handing_out is not None:
            self._handing_out.close()

    def _read(self) -> Generator[Read]:
        """The batches as they are read, all in the main thread, to which a data set may be bound."""
        # If each sample has its own open file, as with lazily loaded pictures, no two processes share one.
        several = self._workers > 1
        kept = {} if not several or len(files := _read_by_position()) >= len(self._reader) else files
        loaded, readers = self._load()
        try:
            while True:
                start = perf_counter()
                item = next(loaded, None)
                self.wait_s += perf_counter() - start
                if item is None:
                    break
                if kept:
                    _refuse_moved(kept)
                if isinstance(item, DualevalError):
                    raise item
                data, failed, *notes = item
                for sentences in notes:  # of a reading process
                    self.notes += sentences
                yield data, failed
        except Exception as error:
            lost = lost_worker(error)
            if lost is None:
                raise
            # The cause's traceback would only show torch's code.
            raise lost from None
        finally:
            if not self._workers:
                self.notes += self._reader.notes()
            # The readers end with the loader's iterator, unless something else holds it.
            del loaded
            _end(readers)

    def _uploaded(self, read: Generator[Read], accelerator: Accelerator) -> Generator[Read]:
        """The batches on the device. No variable refers to them: that would hold the device's memory."""
        uploads = Uploads(accelerator)
        begun: deque[tuple[Future[Begun], tuple[FailedSample, ...]]] = deque()
        pool: ThreadPoolExecutor | None = None

        def begin(data: Any) -> Begun:
            with accelerator.as_current():
                return uploads.begin(data)

        def ready(future: Future[Begun], failed: tuple[FailedSample, ...]) -> Read:
            return self._timed(lambda: uploads.hand_over(future.result())), failed

        problems: list[Exception] = []
        with closing(read), ExitStack() as stack:
            while True:
                try:
                    data, failed = next(read)
                except StopIteration:
                    break
                except Exception as error:  # noqa: BLE001 - raised behind the batch that is being written
                    problems.append(error)
                    break
                if pool is None and _bytes_in(data) >= _LARGE_BATCH:
                    pool = stack.enter_context(ThreadPoolExecutor(1, "dualeval-upload"))
                if pool is None:
                    # Yielded before the wait for the next batch, so that the device computes this one while
                    # the next is read and copied.
                    yield self._timed(partial(uploads.start, data)), failed
                    continue
                # Written into pinned memory while this thread launches the batch before.
                begun.append((pool.submit(begin, data), failed))
                if len(begun) > 1:
                    yield ready(*begun.popleft())
            while begun:
                yield ready(*begun.popleft())
            if problems:
                raise problems.pop()  # a variable would hold it, and be held by its traceback

    def _timed(self, work: Callable[[], Any]) -> Any:
        self._step(Stage.TRANSFER)
        start = perf_counter()
        try:
            return work()
        finally:
            self.transfer_s += perf_counter() - start

    def _load(self) -> tuple[Iterator[Any], Sequence[BaseProcess]]:
        """The batches as they are read, and the processes that read them."""
        if self._workers == 0:
            return map(self._reader.__getitem__, self._batches), ()
        _check_room_for_locks(self._workers)
        before = set(multiprocessing.active_children())
        with _collector_off() as collects:
            # Batches are the loader's samples: the plan has already made them.
            loader = torch.utils.data.DataLoader(
                _Sending(self._reader),
                batch_size=None,
                sampler=self._batches,
                collate_fn=lambda batch: batch,
                num_workers=self._workers,
                # Not Python's default, forkserver since 3.14, which would have to pickle the data set.
                multiprocessing_context="fork",
                prefetch_factor=self._ahead,
                worker_init_fn=lambda worker: _begin_reading(collects, self._reader.cores),
                # Not the process's own: a caller's script may draw from that.
                generator=torch.Generator(),
            )
            loaded = map(pickle.loads, loader)
        return loaded, [each for each in multiprocessing.active_children() if each not in before]


def _bytes_in(data: Any) -> int:
    """The bytes of a batch's tensors."""
    return sum(tensor.numel() * tensor.itemsize for _, tensor in tensors_in(data))


def _read_by_position() -> dict[int, tuple[str, int]]:
    """Path and position of each file that this process has open read-only; empty without /proc."""
    positions = {}
    for link in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        number = int(link.name)
        with suppress(OSError):  # that of the listing is closed by now
            is_file = number > 2 and stat.S_ISREG(os.fstat(number).st_mode)
            if is_file and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[number] = str(link.readlink()), os.lseek(number, 0, os.SEEK_CUR)
    return positions


def _refuse_moved(kept: dict[int, tuple[str, int]]) -> None:
    """Check that reading processes moved no position in this process's files: they share the positions."""
    for number, (path, position) in _read_by_position().items():
        if number in kept and kept[number][0] == path and kept[number][1] != position:
            raise UsageError(
                f"the data set keeps {path} open, and its reading processes share one position in it: a seek "
                "of one moves the others. Type --workers 0 (in Python: workers=0), or open the file in "
                "__getitem__, once per process"
            )


@contextmanager
def _collector_off() -> Iterator[bool]:
    """Turn off garbage collection, and yield whether it was on: forked processes turn it on again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield was_on
    finally:
        if was_on:
            gc.enable()


def _begin_reading(collects: bool, cores: Sequence[int]) -> None:
    """Set up a reading process, before it reads."""
    # Also when the parent is killed: a reader that hangs in a read would outlive it.
    end_with_parent(signal.SIGKILL)
    # They may have been taken from this process meanwhile: reading elsewhere is as right.
    with suppress(OSError):
        if cores:
            os.sched_setaffinity(0, cores)
    # Objects from before the fork are not collected here: a forked process dies when it frees GPU memory.
    gc.freeze()
    if collects:
        gc.enable()


def _check_room_for_locks(workers: int) -> None:
    """Check that shared memory has room for the queues of reading processes: each lock takes a page."""
    if not _SHARED_MEMORY.is_dir():
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    # Without a limit, the total is 0.
    if usage.total and usage.free < (workers + 3) * _LOCKS_BYTES:
        raise UsageError(
            f"{_SHARED_MEMORY} on {socket.gethostname()} is full: there is no room for the locks of "
            f"reading processes. {_MORE_ROOM} Or type --workers 0."
        )


def why_not_forked() -> str | None:
    """Why this process cannot fork reading processes; None if it can."""
    if sys.platform != "linux":
        return f"reading processes are forked, which is not safe on {sys.platform}"
    method = multiprocessing.get_start_method(allow_none=True)
    if method in (None, "fork", multiprocessing.get_all_start_methods()[0]):  # the first is Python's default
        return None
    return (
        f"reading processes are forked, and this program has them started by {method} "
        f"(multiprocessing.set_start_method({method!r}))"
    )


def checked_workers(options: RunOptions) -> int:
    """How many processes read for a rank; refused if this process cannot fork them."""
    if options.workers and (why := why_not_forked()) is not None:
        raise UsageError(
            f"--workers {options.workers}: {why}. Type --workers 0 (in Python: workers=0), and samples are "
            "read in the process that computes."
        )
    return options.workers or 0


def _end(readers: Sequence[BaseProcess]) -> None:
    """Kill remaining reading processes: an error's traceback holds their loader, or one was killed.

    Python would send them SIGTERM at its exit and wait for them, but a run blocks SIGTERM in them.
    """
    left = [process for process in readers if process.is_alive()]
    if not left:
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    # torch's handler would raise an error about the killed processes.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main_thread else None
    for process in left:
        process.kill()
        process.join()
    if in_main_thread:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def _found_no_room(error: BaseException) -> bool:
    """Whether a batch found no room in shared memory."""
    from dualeval.torch_errors import TorchError

    return TorchError.NOT_SHARED.of(error) is not None


def lost_worker(error: BaseException) -> DualevalError | None:
    """The error to show if ``error`` is torch's about a reading process that has exited; else None.

    Torch raises it from its SIGCHLD handler, wherever the main thread happens to be.
    """
    from dualeval.torch_errors import TorchError

    match = TorchError.LOST_WORKER.of(error)
    if match is None:
        return None
    return DualevalError(
        f"a reading process (pid {match[1]}) ended early ({match[2]}); its batch is lost. "
        "One that is killed mostly means that the host has run out of memory ('dmesg' shows it): try fewer "
        "--workers or a smaller --batch-size. One that crashes has read a file that breaks its decoder: "
        "--workers 0 shows which. Finished work is saved, and the same command resumes."
    )
