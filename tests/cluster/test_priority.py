"""Giving way: the rank of a process and of all its threads."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from cluster.priority import give_way

RANKS = """
import json, os, sys, threading
from cluster.priority import give_way

done = threading.Event()
old = threading.Thread(target=done.wait)
old.start()
seen = []
for _ in range(2):
    give_way()
    new = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
    new.start()
    new.join()
    seen.append(os.getpriority(os.PRIO_PROCESS, old.native_id))
    seen.append(os.getpriority(os.PRIO_PROCESS, 0))
done.set()
print(json.dumps(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks of threads are Linux's")
def test_all_threads_give_way_old_and_new() -> None:
    """Fifteen ranks, and never past the last one."""
    ran = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, check=True)
    mine = psutil.Process().nice()
    once, twice = min(mine + 15, 19), 19
    assert json.loads(ran.stdout) == [once] * 3 + [twice] * 3


def test_a_process_that_has_ended_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    give_way(process)
    assert process.nice() == min(psutil.Process().nice() + 15, 19)
    child.communicate()
    give_way(process)
