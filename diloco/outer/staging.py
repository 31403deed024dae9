"""Copies between an accelerator and main memory, while the accelerator computes and this process
encodes.

    training stream   work of the training loop; here, clones of parameters, and writes to them, in
                      between
    side stream       reads, which do not wait for what the training loop has queued after them

A copy runs beside other work only from or to pinned (page-locked) memory. So values go through
*staging buffers*, each of one chunk, of which two take turns: while one is copied, the other is
    filled or read.

Whoever puts a copy into a stream goes on before it is done. These waits make it safe:

1. The side stream waits for an event of the training stream before it reads, so that it finds the
   parameters as the last inner step left them.
2. This process waits for the event of a read before it uses the buffer.
3. This process waits for the event of a write before it fills that buffer again.

Training needs no wait: its next step is queued behind the writes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diloco.outer.fragments import CHUNK

__all__ = ["AtOnce", "Staging", "Stream", "staging_of", "train_on_current_stream"]

_STREAMS = ("cuda", "xpu")  # devices that have streams
IN_TURN = 2  # buffers: one is copied while the other is filled or read


class Stream:
    """Work for an accelerator, done in order, some time after it was put here; `stream` is asked at
    each use."""

    def __init__(self, device: torch.device, stream: Callable[[], torch.Stream]) -> None:
        self._device, self._stream = device, stream
        # what was current before is kept in the stream's object, for one thread only
        self._entering = threading.Lock()

    def copy_(self, to: Tensor, source: Tensor) -> None:
        """Put a copy here, between any devices and dtypes; neither tensor may change until it is
        done."""
        with self._entering, self._stream():
            to.copy_(source, non_blocking=True)

    def record(self) -> torch.Event:
        """The place after all that is here now; to `synchronize` with it waits until the stream has
        got there."""
        # sleeps while it waits, as the training loop needs the core
        event = torch.Event(self._device, blocking=True)
        event.record(self._stream())
        return event

    def wait(self, event: torch.Event) -> None:
        """What is put here from now on comes after that place of another stream."""
        self._stream().wait_event(event)


class AtOnce(Stream):
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
        training, side: see above.
        empty: makes a vector of that many elements on the device, of a dtype.
        pinned: makes a staging buffer, (CHUNK,) fp32.

    What the device fails with is raised by the next call of any method.
    """

    def __init__(
        self,
        training: Stream,
        side: Stream,
        empty: Callable[[int, torch.dtype], Tensor],
        pinned: Callable[[], Tensor],
    ) -> None:
        self.training, self.side = training, side
        self.empty = empty
        self._pinned = pinned
        # each with the copy that still reads it, if any
        self._free: deque[tuple[Tensor, torch.Event | None]] = deque()
        self._lock = threading.Lock()

    def read(
        self,
        ranges: Sequence[tuple[int, int]],
        gather: Callable[[Tensor, int], object],
        after: torch.Event,
    ) -> Iterator[Tensor]:
        """Yield a buffer for each range [start, stop) of at most CHUNK elements, in which its
        values are.

        `gather(out, start)` puts copies of them into the side stream, behind `after`. The values of
        a range are there until the next one is asked for.
        """
        self.side.wait(after)
        reads = (self._begin(start, stop, gather) for start, stop in ranges)
        read = next(reads, None)
        while read is not None:
            following = next(reads, None)
            out, buffer, done = read
            done.synchronize()
            yield out
            self._give(buffer)
            read = following

    def _begin(
        self, start: int, stop: int, gather: Callable[[Tensor, int], object]
    ) -> tuple[Tensor, Tensor, torch.Event]:
        buffer = self._take()
        out = buffer[: stop - start]
        gather(out, start)
        return out, buffer, self.side.record()

    @contextmanager
    def staged(self, values: Tensor) -> Iterator[Tensor]:
        """A copy of (n,) fp32 values, n <= CHUNK, of which the training stream makes copies in this
        context.

        `values` may change as soon as the context is left.
        """
        buffer = self._take()
        yield buffer[: values.numel()].copy_(values)
        self._give(buffer, self.training.record())

    def sent(self, values: Tensor) -> Tensor:
        """A copy of (n,) fp32 values on the device, n <= CHUNK, for work that is put into the
        training stream."""
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
    """The training stream of this device is the one that is current in this thread, which waits for
    its copies now.

    Other threads have other current streams: of theirs a training loop knows nothing.
    """
    if device.type in _STREAMS:
        stream = torch.accelerator.current_stream(device)
        _training[stream.device] = stream


@cache
def staging_of(device: torch.device) -> Staging | None:
    """The staging of a device; None where tensors lie in main memory, or have no values."""
    if device.type == "mps":
        at_once = AtOnce()
        return Staging(at_once, at_once, _empty_on(device), lambda: _buffer(pinned=False))
    if device.type not in _STREAMS:
        return None
    side = torch.Stream(device)
    return Staging(
        Stream(device, lambda: _training.get(device) or torch.accelerator.current_stream(device)),
        Stream(device, lambda: side),
        _empty_on(device),
        lambda: _buffer(pinned=True),
    )


def _empty_on(device: torch.device) -> Callable[[int, torch.dtype], Tensor]:
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


def _buffer(pinned: bool) -> Tensor:
    # memory allocated in inference mode can never be written outside of it
    with torch.inference_mode(False):
        return torch.empty(CHUNK, dtype=torch.float32, device="cpu", pin_memory=pinned)
