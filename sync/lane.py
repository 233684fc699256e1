"""One first-in-first-out lane of exchanges for each process group.

All ranks start exchanges in the same order; a lane runs them in that order, in one helper thread, so their messages
never cross. Objects that share a process group share its lane.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from typing import Any, Protocol

__all__ = ["Lane", "lane_of"]

_EXIT_SECONDS = 5.0


class Task(Protocol):
    """What a lane runs. `run` must not raise; `publish` wakes the waiters, after the lane is free again."""

    def run(self) -> None: ...

    def publish(self) -> None: ...


class Lane:
    """Runs tasks in order: at once in the caller when nothing is queued, or in a helper thread.

    Attributes:
        groups: the group to exchange on, by type of device: the user's own until the first overlapped exchange, then a
            private one for good. Program order decides, not timing, so that all ranks choose alike.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None
        self.groups: dict[str, Any] = {}
        self._pid = os.getpid()

    def run(self, task: Task) -> bool:
        """Run `task` in this thread if nothing is queued. Returns whether it ran."""
        self._check_process()
        with self._lock:
            if self._pending:
                return False
            self._pending = 1
        try:
            task.run()
        finally:
            self.done()
        task.publish()
        return True

    def submit(self, task: Task) -> None:
        """Queue `task` for the helper thread."""
        self._check_process()
        with self._lock:
            self._pending += 1
            if self._thread is None:
                self._start_thread()
        self._tasks.put(task)

    def done(self) -> None:
        """A task has ended: the lane may be free again."""
        with self._lock:
            self._pending -= 1

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this object was made before a fork and its connections belong to the parent process; make a new one, "
                "or start processes with 'spawn'"
            )

    def _start_thread(self) -> None:
        # The thread sees the queue and a weak reference only: a lane nobody holds any more ends its thread.
        self._thread = threading.Thread(
            target=_work_off, args=(self._tasks, weakref.ref(self)), name="lowcomm-sync", daemon=True
        )
        self._thread.start()
        stop = weakref.finalize(self, self._tasks.put, None)
        stop.atexit = False
        _threads.add(self._thread)
        _queues[self._thread] = self._tasks


def _work_off(tasks: queue.SimpleQueue[Task | None], lane: weakref.ref[Lane]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        if (owner := lane()) is not None:
            owner.done()
            del owner
        task.publish()
        del task


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_queues: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Task | None]] = weakref.WeakKeyDictionary()
_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()


def lane_of(group: Any) -> Lane:
    """The lane of a process group; lives as long as the group."""
    lane = _lanes.get(group)
    if lane is None:
        lane = _lanes[group] = Lane()
    return lane


def _stop_threads() -> None:
    # A thread inside a backend call at interpreter shutdown may crash the process: let it finish, but not for ever.
    threads = [thread for thread in _threads if thread.is_alive()]
    for thread in threads:
        _queues[thread].put(None)
    for thread in threads:
        thread.join(_EXIT_SECONDS)


atexit.register(_stop_threads)
