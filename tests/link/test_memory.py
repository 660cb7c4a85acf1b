"""Freed memory: it is kept for a while and then returned to the system. Each test has its own process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.starts_processes

FREED = """
import time
import psutil
from hetero_pp.rpc.memory import giving_freed_memory_back, keep_freed_memory

def megabytes():
    return psutil.Process().memory_info().rss / 1e6

keep_freed_memory()
before = megabytes()
blocks = [bytes(4000) for _ in range(40_000)]
most = megabytes()
del blocks[:-1]  # the last one keeps the allocator from giving back what lies below
kept = left = megabytes()
with giving_freed_memory_back(0.05):
    until = time.monotonic() + 20
    while left > before + 30 and time.monotonic() < until:
        time.sleep(0.05)
        left = megabytes()
print(most - before, kept - before, left - before)
"""


OF_THREADS = """
import threading
import psutil
from hetero_pp.rpc.memory import give_freed_memory_back, keep_freed_memory

def megabytes():
    return psutil.Process().memory_info().rss / 1e6

def use():
    blocks = [bytes(4000) for _ in range(12_000)]
    used.wait()
    del blocks
    freed.wait()
    measured.wait()

keep_freed_memory()
before = megabytes()
used, freed, measured = (threading.Barrier(5) for _ in range(3))
threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads:
    thread.start()
used.wait()
freed.wait()
most = megabytes()
give_freed_memory_back()
print(most - before, megabytes() - before)
measured.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide for themselves")
def test_memory_that_other_threads_have_freed_is_given_back() -> None:
    answer = subprocess.run([sys.executable, "-c", OF_THREADS], check=True, capture_output=True, text=True).stdout
    most, left = map(float, answer.split())
    assert most > 150
    assert left < 30


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide for themselves")
def test_freed_memory_is_kept_and_then_given_back() -> None:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", FREED], check=True, capture_output=True, text=True, env=environment
    ).stdout
    most, kept, left = map(float, answer.split())
    assert most > 150
    assert kept > 150
    assert left < 30
