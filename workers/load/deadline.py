"""A timer with an absolute due time in nanoseconds (Linux timerfd), served by the event loop.

An event loop's own timers have a grain of 1 ms. This one fires within some 0.1 ms behind its due time, never
before it, and without spinning.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    """``struct itimerspec``: interval and value, each seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Deadline:
    """Calls ``callback`` when ``time.perf_counter_ns()`` has reached the time that was set last."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._spec = _Spec()
        self._pointer = ctypes.byref(self._spec)
        # perf_counter is CLOCK_MONOTONIC on Linux, so both count from the same origin.
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        loop.add_reader(self._fd, self._fire)

    def set(self, due_ns: int) -> None:
        """Replace the due time; one in the past fires at once."""
        self._spec.value_s, self._spec.value_ns = divmod(max(due_ns, 1), 1_000_000_000)
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, self._pointer, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Never fire again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set again between the wake-up and now
        self._callback()
