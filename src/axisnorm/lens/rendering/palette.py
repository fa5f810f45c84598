"""The colours of groups. Letters always say the same, so that nothing rests on colour alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product

__all__ = ["FILLS", "letters"]

# Black letters read on each at 7:1 or more, and neighbours are far apart.
FILLS = (
    "#8ecae6", "#ffb703", "#95d5b2", "#f4978e", "#cdb4db", "#ffe066",
    "#a0c4ff", "#e9a36b", "#b7e4c7", "#ffadd6", "#b8c0ff", "#d4d97a",
)  # fmt: skip


def letters(*, capital: bool = True) -> Iterator[str]:
    """A, B, ..., Z, AA, AB, ...

    >>> names = letters()
    >>> [next(names) for _ in range(28)][-3:]
    ['Z', 'AA', 'AB']
    """
    alphabet = [chr(ord("A" if capital else "a") + i) for i in range(26)]
    for length in count(1):
        for word in product(alphabet, repeat=length):
            yield "".join(word)
