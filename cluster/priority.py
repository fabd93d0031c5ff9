"""Which of our processes go first where they want the same cores.

An engine's threads compute in step with one another: whoever takes a core from one of them for a
moment holds up all at the end of their loop. On two cores, what a router, a drafter and Serve need
beside a verifier, a quarter of a core in bits of a millisecond or less, made its steps 25% longer
at a difference of ten ranks, and 4% at nineteen. So all but the engine of a verifier gives way.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

import psutil

_RANKS: Final = 15
_LAST: Final = 19


def give_way(process: psutil.Process | None = None) -> None:
    """Rank a process, by default this one, behind those that have not given way.

    On Linux every thread has a rank of its own, and new ones take that of the thread which starts
    them. What may not be changed stays as it is.
    """
    process = process or psutil.Process()
    with contextlib.suppress(psutil.Error):  # it has ended, or is not ours
        for task in process.threads():
            with contextlib.suppress(OSError):
                rank = os.getpriority(os.PRIO_PROCESS, task.id)
                os.setpriority(os.PRIO_PROCESS, task.id, min(rank + _RANKS, _LAST))
