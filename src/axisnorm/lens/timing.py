"""How long calls take against one another: one process, interleaved rounds, medians.

Each round times a block of every call, one after another, so that what slows the machine down for
a while slows all of them; a ratio is taken within a round. A round during which other processes
used the processor does not count.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._build import native

__all__ = ["BLOCK", "Call", "Race", "Spread", "block", "machine", "race", "undisturbed"]

BLOCK = 0.02
"""Seconds that the calls of a block take together, or one call where that is longer."""

Call = Callable[[], Any]
Clock = Callable[[], float]


class Spread(NamedTuple):
    """What repeated measurements gave."""

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """
        >>> Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(median, low, high)


@dataclass(frozen=True)
class Race:
    """The times of all calls in the rounds that count."""

    rounds: tuple[Mapping[str, float], ...]
    """Of each round the seconds of one call, by the call's name."""
    noisy: int
    """In how many rounds other processes used the processor. They do not count, unless fewer than
    three others are left."""

    def seconds(self, name: str) -> Spread:
        """The time of one call."""
        return Spread.of([times[name] for times in self.rounds])

    def ratio(self, slower: str, faster: str) -> Spread:
        """How many times as long the one takes as the other, within a round."""
        return Spread.of([times[slower] / times[faster] for times in self.rounds])


def race(calls: Mapping[str, Call], rounds: int, *, clock: Clock = time.perf_counter) -> Race:
    """Time every call in interleaved rounds.

    >>> found = race({"one": lambda: sum(range(9)), "two": lambda: sum(range(99))}, rounds=3)
    >>> sorted(found.rounds[0]), found.seconds("one").median > 0
    (['one', 'two'], True)
    """
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = _count(block(call, 3, clock))

    def one_round() -> dict[str, float]:
        times = {}
        for name, call in calls.items():
            times[name] = block(call, counts[name], clock)
            # A machine that is busy now may be many times as slow as it was a moment ago.
            counts[name] = _count(times[name])
        return times

    return undisturbed(one_round, rounds)


def _count(seconds: float) -> int:
    """How many calls of so many seconds fill a block."""
    return max(1, int(BLOCK / max(seconds, 1e-7)))


def block(call: Call, count: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of one of ``count`` calls in a row."""
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def undisturbed(one_round: Callable[[], Mapping[str, float]], rounds: int) -> Race:
    """Repeat a round until so many were left alone by other processes, at most four times that.

    Args:
        one_round: returns the seconds of every call by its name.
        rounds: how many count.
    """
    kept: list[Mapping[str, float]] = []
    noisy: list[Mapping[str, float]] = []
    while len(kept) < rounds and len(noisy) < 3 * rounds:
        before, start = _others_cpu(), time.perf_counter()
        times = one_round()
        # 20 ms are two ticks of the kernel's count, whatever was really used.
        disturbed = _others_cpu() - before > 0.02 + 0.04 * (time.perf_counter() - start)
        (noisy if disturbed else kept).append(times)
    enough = len(kept) >= min(3, rounds)
    return Race(tuple(kept if enough else kept + noisy), len(noisy))


def _others_cpu() -> float:
    """Seconds of processor time that everything but this process has used; 0 where unknown."""
    counts = Path("/proc/stat")
    if not counts.exists():
        return 0.0
    fields = counts.read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = (int(f) for f in fields)
    busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy - own.user - own.system


def machine() -> dict[str, Any]:
    """What times depend on: processor, threads, instruction set, versions. torch only if loaded.

    >>> sorted(machine())[:4]
    ['axisnorm', 'cores', 'cpu', 'date']
    """
    import axisnorm

    torch = sys.modules.get("torch")
    threads = native.max_threads() if native is not None else 1
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": threads if torch is None else torch.get_num_threads(),
        "instruction_set": None if native is None else native.isa(),
        "axisnorm": axisnorm.__version__,
        "torch": None if torch is None else str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    text = facts.read_text() if facts.exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    model = re.search(r"model\s*: (\d+)", text)
    if name and model:
        return f"{name[1]} (model {model[1]})"
    return platform.processor() or platform.machine()
