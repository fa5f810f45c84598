"""The progress bar of the command line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ..progress import watched

__all__ = ["shown_on_a_terminal"]


@contextlib.contextmanager
def shown_on_a_terminal() -> Iterator[None]:
    """Inside, steps move a bar on standard error, which is gone afterwards.

    Nothing is written where standard error is no terminal.
    """
    # Here, and not above: results as JSON need no rich.
    from .console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:

        def show(description: str, done: int, total: int | None) -> None:
            phases = bar.tasks
            if not phases or phases[-1].description != description:
                for phase in phases:
                    bar.remove_task(phase.id)
                bar.add_task(description, total=total)
            bar.update(bar.tasks[-1].id, completed=done, total=total)

        with watched(show):
            yield
