"""The threads of an engine on a core each, where they are as many as the cores.

OpenMP's threads meet at the end of every loop. Whoever else needs a core for a moment takes it from
one of them, and the kernel may then move that one to where another runs: the two share a core for
milliseconds beside an idle one, and all wait. Bound, each waits for its own core only (4 and 16
plain rows beside router, drafter and client on two cores: steps 11 and 7% shorter).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Final

logger = logging.getLogger(__name__)

_PARALLEL_SIZE: Final = 1 << 20
"""Elements of an operation that torch spreads over all threads."""


def pin_team() -> tuple[int, ...]:
    """Bind the calling thread and its OpenMP team, which must not exist yet, to a core each.

    Nothing is done on systems other than Linux, and where there are not as many threads as usable
    cores: then others may have been meant to use the rest, and which, nobody knows.

    Returns:
        Ids of the threads that were bound, this one first.
    """
    if sys.platform != "linux":
        return ()
    import torch

    cores = sorted(os.sched_getaffinity(0))
    if torch.get_num_threads() != len(cores) or len(cores) < 2:
        return ()
    before = _tasks()
    torch.zeros(_PARALLEL_SIZE).add_(1.0)
    team = [threading.get_native_id(), *sorted(_tasks() - before)]
    if len(team) != len(cores):
        logger.info("threads are not bound: %d new ones for %d cores", len(team) - 1, len(cores))
        return ()
    with suppress(OSError):  # not allowed here
        for task, core in zip(team, cores, strict=True):
            os.sched_setaffinity(task, {core})
    return tuple(team)


def _tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
