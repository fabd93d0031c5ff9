"""An engine's threads on a core each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")

PIN = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor

from cluster.environment import use_threads

use_threads(int(sys.argv[1]))
import torch

from cluster.pinning import pin_team

torch.set_num_threads(int(sys.argv[1]))
torch.zeros(1 << 20).add_(1)  # another thread's team, which stays as it is
with ThreadPoolExecutor(1, initializer=lambda: found.extend(pin_team())) as thread:
    found = []
    own = thread.submit(threading.get_native_id).result()
    total = thread.submit(lambda: float(torch.ones(1 << 20).sum())).result()
    cores = [sorted(os.sched_getaffinity(task)) for task in found]
print(json.dumps([own, found, cores, sorted(os.sched_getaffinity(0)), total]))
"""


def pinned(num_threads: int, cores: set[int]) -> tuple[int, list[int], list[list[int]], list[int]]:
    """What comes of it in a process that may use these cores."""
    ran = subprocess.run(
        [sys.executable, "-c", PIN, str(num_threads)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    own, found, bound, mine, total = json.loads(ran.stdout)
    assert total == 1 << 20
    assert mine == sorted(cores), "the rest of the process may go where it could"
    return own, found, bound, mine


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_core_for_each_thread() -> None:
    cores = sorted(os.sched_getaffinity(0))
    own, found, bound, _ = pinned(len(cores), set(cores))
    assert found[0] == own
    assert len(set(found)) == len(cores)
    assert bound == [[core] for core in cores]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("num_threads", "num_cores"), [(1, 2), (2, 1), (3, 2), (1, 1)])
def test_not_where_threads_are_not_as_many_as_cores(num_threads: int, num_cores: int) -> None:
    cores = set(sorted(os.sched_getaffinity(0))[:num_cores])
    _, found, _, _ = pinned(num_threads, cores)
    assert found == []
