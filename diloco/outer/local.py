"""Access of a replica to the local parameters of a peer, by ranges of fragments.

`Local` has whole tensors of this process; `attach.ranks` has rows of them. On the CPU parameters
are read and written where they are. On an accelerator, copies run while it computes and this
process encodes:

    training stream   work of the training loop; this module adds clones of parameters, and writes
                      to them
    side stream       reads, which do not wait for what the training loop has queued after them

A copy runs beside other work only from or to pinned (page-locked) memory. So values go through
*staging buffers* of one chunk, two in turn: one is copied while the other is filled or read.

A copy is queued in a stream, and the caller continues before it is done. These waits make it safe:

1. The side stream waits for an event of the training stream before it reads, so that it finds the
   parameters as the last inner step left them.
2. This process waits for the event of a read before it uses the buffer.
3. This process waits for the event of a write before it fills that buffer again.

Training needs no wait: its next step is queued behind the writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco.outer.fragments import CHUNK, Fragment, Slice, gather_, gathered, read_, scatter_
from diloco.outer.payloads import buffer

_STREAMS = ("cuda", "xpu")  # devices that have streams
IN_TURN = 2  # staging buffers, used in turn


class CopyStream:
    """Queue of copies of an accelerator, done in order and asynchronously; `stream` is called at
    each use."""

    def __init__(self, device: torch.device, stream: Callable[[], torch.Stream]) -> None:
        self._device, self._stream = device, stream
        # entering a torch stream saves the previous one in the object, which is not thread-safe
        self._entering = threading.Lock()

    def copy_(self, to: Tensor, source: Tensor) -> None:
        """Queue a copy between any devices and dtypes; neither tensor may change before its end."""
        with self._entering, self._stream():
            to.copy_(source, non_blocking=True)

    def record(self) -> torch.Event:
        """Record an event after all queued work; its `synchronize` waits for that work."""
        # blocking: sleep while waiting, as the training loop needs the CPU core
        event = torch.Event(self._device, blocking=True)
        event.record(self._stream())
        return event

    def wait(self, event: torch.Event) -> None:
        """Let work queued from now on wait for an event of another stream."""
        self._stream().wait_event(event)


class AtOnce(CopyStream):
    """The only stream of a device (MPS): a copy is done when it returns."""

    def __init__(self) -> None:
        pass

    def copy_(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)

    def record(self) -> Any:
        return self

    def wait(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Staging:
    """The streams and the staging buffers of one device. May be used from several threads.

    Args:
        empty: makes a vector of that many elements on the device, of a dtype.
        pinned: makes a staging buffer, (CHUNK,) fp32.

    An error of the device is raised by the next call of any method.
    """

    def __init__(
        self,
        training: CopyStream,
        side: CopyStream,
        empty: Callable[[int, torch.dtype], Tensor],
        pinned: Callable[[], Tensor],
    ) -> None:
        self.training, self.side = training, side
        self.empty, self._pinned = empty, pinned
        # each with the event of the copy that still reads it, if any
        self._free: deque[tuple[Tensor, torch.Event | None]] = deque()
        self._lock = threading.Lock()

    def read(
        self,
        ranges: Sequence[tuple[int, int]],
        gather: Callable[[Tensor, int], object],
        after: torch.Event,
    ) -> Iterator[Tensor]:
        """Yield a buffer with the values of each range [start, stop) of at most CHUNK elements; it
        is valid until the next one is requested.

        `gather(out, start)` queues their copies in the side stream, after the event `after`.
        """

        def begin(start: int, stop: int) -> tuple[Tensor, Tensor, torch.Event]:
            buffer = self._take()
            out = buffer[: stop - start]
            gather(out, start)
            return out, buffer, self.side.record()

        self.side.wait(after)
        reads = (begin(start, stop) for start, stop in ranges)
        read = next(reads, None)
        while read is not None:
            following = next(reads, None)
            out, buffer, done = read
            done.synchronize()
            yield out
            self._give(buffer)
            read = following

    @contextmanager
    def staged(self, values: Tensor) -> Iterator[Tensor]:
        """A copy of (n,) fp32 values, n <= CHUNK, of which the training stream makes copies in this
        context; the values may change as soon as it is left."""
        buffer = self._take()
        yield buffer[: values.numel()].copy_(values)
        self._give(buffer, self.training.record())

    def sent(self, values: Tensor) -> Tensor:
        """A copy of (n,) fp32 values on the device, n <= CHUNK, for work of the training stream."""
        with self.staged(values) as staged:
            out = self.empty(values.numel(), torch.float32)
            self.training.copy_(out, staged)
        return out

    def _take(self) -> Tensor:
        with self._lock:
            ready = self._free and (self._free[0][1] is None or len(self._free) >= IN_TURN)
            buffer, done = self._free.popleft() if ready else (self._pinned(), None)
        if done is not None:
            done.synchronize()
        return buffer

    def _give(self, buffer: Tensor, done: torch.Event | None = None) -> None:
        with self._lock:
            self._free.append((buffer, done))


_training: dict[torch.device, torch.Stream] = {}


def train_on_current_stream(device: torch.device) -> None:
    """Make the current stream of this thread the training stream of the device: each thread has a
    current stream of its own."""
    if device.type in _STREAMS:
        stream = torch.accelerator.current_stream(device)
        _training[stream.device] = stream


@cache
def staging_of(device: torch.device) -> Staging | None:
    """Return the staging of a device; None for main memory and the meta device."""
    if device.type != "mps" and device.type not in _STREAMS:
        return None

    def empty(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def pinned() -> Tensor:
        # memory allocated in inference mode cannot be written outside of it
        with torch.inference_mode(False):
            pin = device.type != "mps"
            return torch.empty(CHUNK, dtype=torch.float32, device="cpu", pin_memory=pin)

    if device.type == "mps":
        at_once = AtOnce()
        return Staging(at_once, at_once, empty, pinned)
    side, current = torch.Stream(device), torch.accelerator.current_stream
    training = CopyStream(device, lambda: _training.get(device) or current(device))
    return Staging(training, CopyStream(device, lambda: side), empty, pinned)


class Local:
    """Parameters (`tensors`) by name, of any dtype, device and layout; they may get another one
    between two calls."""

    is_whole = True  # True if reading needs no other process

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        staging_of: Callable[[torch.device], Staging | None] = staging_of,
        ready: torch.Event | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self._staging_of = staging_of
        # event after which the values are there; None: wait for the training stream
        self._ready = ready

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def of_process(self, name: str) -> Tensor:
        """Return this process's part of a parameter."""
        return self.tensors[name]

    def gather_(self, out: Tensor, fragment: Fragment, start: int) -> None:
        gather_(out, fragment, start, self.tensors)

    def gathered(self, buffer: Tensor, fragment: Fragment, start: int) -> Tensor:
        return gathered(buffer, fragment, start, self.tensors)

    def read(self, fragment: Fragment, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield [start, stop) of the fragment for each range in turn, as (stop - start,) fp32 on
        the CPU.

        Read each before the next one is requested, and before the parameters change: it may be a
        view of a parameter, or this thread's buffer "chunk". Ranges ascend; none is longer than
        CHUNK.
        """
        staging = self._staging(fragment, ranges[0][0], ranges[-1][1]) if self.is_whole else None
        if staging is None:
            for start, stop in ranges:
                yield self.gathered(buffer("chunk", torch.float32, stop - start), fragment, start)
            return
        tensors = {piece.name: self.of_process(piece.name) for piece in fragment.slices}

        def gather(out: Tensor, start: int) -> None:
            gather_(out, fragment, start, tensors, staging.side.copy_)

        yield from staging.read(ranges, gather, self._ready or staging.training.record())

    def can_copy(self, fragment: Fragment) -> bool:
        """True if `copied` makes a copy: the fragment is on an accelerator, and in this process."""
        return self.is_whole and self._staging(fragment, 0, fragment.numel) is not None

    @torch.no_grad()
    def copied(self, fragment: Fragment) -> Source:
        """A copy of the fragment in memory of the device that has it, in its dtypes; `can_copy`
        must hold.

        The device makes it before anything else that is put into the training stream. So parameters
        may change at once.
        """
        staging = self._staging(fragment, 0, fragment.numel)
        assert staging is not None, "parameters on the CPU are read where they are"
        copies: dict[str, Tensor] = {}
        for index, piece in enumerate(fragment.slices):
            own = self.of_process(piece.name)
            copies[str(index)] = out = staging.empty(piece.numel, own.dtype)
            read_(out, own, piece.start, staging.training.copy_)
        pieces = tuple(Slice(name, 0, copy.numel()) for name, copy in copies.items())
        local = Local(copies, self._staging_of, staging.training.record())
        return Source(local, Fragment(fragment.index, pieces, fragment.numel))

    def scatter_(self, fragment: Fragment, start: int, values: Tensor) -> None:
        """As `fragments.scatter_`; later work of the training stream sees the values."""
        staging = self._staging(fragment, start, start + values.numel())
        if staging is None:
            return scatter_(self.tensors, fragment, start, values)
        with staging.staged(values) as staged:
            scatter_(self.tensors, fragment, start, staged, staging.training.copy_)

    def _staging(self, fragment: Fragment, start: int, stop: int) -> Staging | None:
        """Return the staging of the device that holds this range; None for the CPU, or several."""
        names = {piece.name for _, piece in fragment.locate(start, stop)}
        first, *others = {self.tensors[name].device for name in names}
        return None if others else self._staging_of(first)


class Source(NamedTuple):
    """Source of the values of a fragment: parameters, or a copy of them, and the fragment's
    place in these."""

    local: Local
    fragment: Fragment
