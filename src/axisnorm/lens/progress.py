"""How far long work is: the work says it, whoever wants to know watches.

Code that works calls :func:`step`, once for each norm or phase, and knows nothing of a terminal::

    for done, norm in enumerate(norms):
        step("verifying", done, len(norms))
        ...

The command line watches with a bar (``lens/rendering/bar.py``); without a watcher a step costs one
look at a variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["Watcher", "step", "watched"]

Watcher = Callable[[str, int, int | None], None]
"""Is given the phase, how many steps of it are done, and of how many; None where nobody knows."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def step(description: str, done: int = 0, total: int | None = None) -> None:
    """Say what is done now, and how much of it is behind.

    Args:
        description: the phase, as in ``"verifying"``; another one than before begins anew.
        done: steps of the phase that are behind.
        total: all steps of the phase, None where it is not known.

    >>> with watched(lambda *said: print(said)):
    ...     step("verifying", 3, 12)
    ('verifying', 3, 12)
    """
    watcher = _watcher.get()
    if watcher is not None:
        watcher(description, done, total)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside, ``watcher`` is given every step."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
