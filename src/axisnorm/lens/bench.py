"""How fast a normalization is on this machine at one shape, against what people run today."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .._memory import total
from .._route import DTYPES, Route
from ..presets import PRESETS
from ..scheme import ArgumentError, DtypeError
from .contenders import Contender, contenders, numpy_inputs, torch_inputs
from .explain import Explanation, explained
from .half_types import HALF_TYPES
from .meaning import Meaning
from .result import Result
from .subject import Subject, is_shape, read_shape, read_subject, shape_said, sized
from .timing import Race, Spread, machine, race

if TYPE_CHECKING:
    import argparse

__all__ = ["Benchmark", "Measurement", "Timed", "bench"]

NAMES = {
    "layer_norm": "torch.layer_norm",
    "rms_norm": "torch.rms_norm",
    "group_norm": "torch.group_norm",
    "instance_norm": "torch.instance_norm",
    "batch_norm": "torch.batch_norm",
    "layer_norm_2d": "convnext.layer_norm_2d",
}
"""The preset that a function's name stands for."""

DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Binary digits of a number's fraction."""

MOST_ROUNDS = 10_000

FORWARD, BACKWARD = "forward", "forward and backward"

HELD = {FORWARD: 8, BACKWARD: 16}
"""At most so many tensors of the shape, in the type of the computation, are held at once."""


@dataclass(frozen=True)
class Timed:
    """One call and its time."""

    name: str
    """``"axisnorm"``; ``"named"``: the function of axisnorm that computes the same as the scheme;
    ``"torch"`` or ``"numpy"``: what people run today; ``"copy"``: of the tensor, with backward of
    its gradient too."""
    code: str
    """The call as it is written, with F for torch.nn.functional, or the formula."""
    seconds: Spread
    copies: float
    """How many times as long it takes as the copy."""
    ratio: Spread | None
    """How many times as fast it is as today's. None for today's own and the copy."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "code": self.code,
            "seconds": self.seconds._asdict(),
            "copies": self.copies,
            "ratio": None if self.ratio is None else self.ratio._asdict(),
        }


def _faster(name: str, timed: Timed, today: str) -> str:
    assert timed.ratio is not None
    median, low, high = timed.ratio
    one, other = name, today
    if median < 1:
        median, low, high = 1 / median, 1 / high, 1 / low
        one, other = today, name.rstrip(",")
    said = [_times(value) for value in (median, low, high)]
    return (
        f"{one} is {said[0]} times as fast as {other} ({said[1]} to {said[2]} in the middle "
        "half of the rounds)."
    )


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


@dataclass(frozen=True)
class Measurement:
    """The times in one type, of forward or of forward and backward."""

    dtype: str
    direction: str
    """``"forward"`` or ``"forward and backward"``."""
    written_out: bool
    """Whether today's is a formula in operations: torch has no function for it at this shape."""
    calls: tuple[Timed, ...]
    """axisnorm's first, then today's, the copy last."""
    differences: dict[str, float]
    """Between axisnorm's results and today's, before anything was timed: of ``"y"``, or of the
    gradients ``"dx"``, ``"dweight"`` and ``"dbias"``, the largest in units in the last place of
    the largest element."""
    rounds: int
    """How many rounds of interleaved blocks count."""
    noisy_rounds: int
    """During so many more other processes used the processor."""

    @property
    def today(self) -> Timed:
        """What people run today."""
        return self.calls[-2]

    @property
    def ratio(self) -> float:
        """How many times as fast axisnorm is as today's."""
        first = self.calls[0].ratio
        assert first is not None
        return first.median

    @property
    def agree(self) -> bool:
        """Whether the results are the same in at least half of the digits of their type."""
        return all(ulps <= 2 ** (DIGITS[self.dtype] / 2) for ulps in self.differences.values())

    @property
    def conclusions(self) -> tuple[str, ...]:
        """What the numbers say, in sentences."""
        return tuple(self._said())

    def _said(self) -> Iterator[str]:
        first, *others = self.calls
        today = {"torch": "torch", "numpy": "NumPy"}[self.today.name]
        yield _faster("axisnorm", first, today)
        what = "the tensor and of its gradient" if self.direction == BACKWARD else "the tensor"
        yield f"axisnorm takes {_times(first.copies)} times as long as a copy of {what}."
        for timed in others:
            if timed.name == "named":
                function = timed.code.partition("(")[0]
                yield _faster(f"{function}, which computes the same,", timed, today)
        if self.written_out:
            yield (
                f"{today} has no function for this at this shape: what is compared is made of its "
                "operations."
            )
        of = "its largest element" if len(self.differences) == 1 else "their largest elements"
        word = "within " if self.agree else ""
        apart = [f"{name} {word}{_times(ulps)} ulp" for name, ulps in self.differences.items()]
        if self.agree:
            yield f"The results agree: {', '.join(apart)} of {of}."
        else:
            yield (
                f"The results do not agree: {', '.join(apart)} of {of} apart. These are the times "
                "of different computations."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "dtype": self.dtype,
            "direction": self.direction,
            "written_out": self.written_out,
            "calls": [one.to_dict() for one in self.calls],
            "differences": [{"of": name, "ulps": ulps} for name, ulps in self.differences.items()],
            "agree": self.agree,
            "conclusions": list(self.conclusions),
            "rounds": self.rounds,
            "noisy_rounds": self.noisy_rounds,
        }


@dataclass(frozen=True)
class Benchmark(Result):
    """How fast one normalization is at one shape."""

    kind: ClassVar[str] = "benchmark"

    subject: str
    """What was asked about, in its own words."""
    scheme: str
    shape: tuple[int, ...]
    channels_last: bool
    route: Route
    """Whether axisnorm has a kernel for it, ``"native"``, or computes it by its ``"reference"``."""
    measurements: tuple[Measurement, ...]
    machine: dict[str, Any]
    """Processor, cores, threads, instruction set, versions and date."""

    def to_dict(self) -> dict[str, Any]:
        """The data of :meth:`to_json`."""
        return {
            "subject": self.subject,
            "scheme": self.scheme,
            "shape": list(self.shape),
            "channels_last": self.channels_last,
            "engine": self.route.engine,
            "measurements": [one.to_dict() for one in self.measurements],
            "machine": self.machine,
        }

    def __repr__(self) -> str:
        said = ", ".join(
            f"{one.dtype} {one.direction} {one.ratio:.2f}" for one in self.measurements
        )
        return f"Benchmark({self.subject} on {self.shape}, times as fast as today's: {said})"


def bench(
    subject: Any,
    shape: Any,
    *,
    dtype: Any = "float32",
    channels_last: bool = False,
    threads: int | None = None,
    backward: bool = False,
    rounds: int = 9,
) -> Benchmark:
    """Time a normalization at a shape against what people run today.

    That is torch's own function where it has one for the same computation at this shape, else the
    formula in torch operations; without torch, NumPy's. All calls run in one process in
    interleaved rounds of blocks of 20 ms, on standard normal values, after their results were
    compared. The copy of the tensor reads and writes as much as a forward has to.

    Args:
        subject: a :class:`~axisnorm.Scheme`, its text, a preset's name, a function's name such as
            ``"layer_norm"``, or a norm module or function, as :func:`~axisnorm.explain` takes.
        shape: of the input.
        dtype: ``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``, or torch's own; a list
            of several.
        channels_last: the input's memory has the channels, axis 1, innermost (4 or 5 axes).
        threads: of torch and axisnorm, which share them; as they are where None.
        backward: time forward and backward too.
        rounds: how many; a time is the median over them.

    Raises:
        ArgumentError: the subject is no normalization or does not fit the shape, the tensors do
            not fit into memory, or there is no such layout or number.
        DtypeError: there is no such type.
        ModuleNotFoundError: gradients without torch.

    >>> found = bench("... [d]; affine=d", (8, 64), rounds=1)
    >>> [timed.name for timed in found.measurements[0].calls]
    ['axisnorm', 'named', 'torch', 'copy']
    >>> found.measurements[0].today.code
    'F.layer_norm(x, (64,), weight, bias, eps=1e-05)'
    """
    sizes = read_shape(shape)
    if not is_shape(shape):
        raise ArgumentError(
            "A benchmark makes its own tensors. One came. Give its shape, as in tuple(x.shape)."
        )
    if isinstance(subject, str):
        subject = NAMES.get(subject.strip(), subject)
    return benched(
        read_subject(subject, sizes, "bench"),
        sizes,
        dtype,
        channels_last,
        threads,
        backward,
        rounds,
    )


def benched(
    read: Subject,
    sizes: tuple[int, ...],
    dtype: Any,
    channels_last: bool,
    threads: int | None,
    backward: bool,
    rounds: int,
) -> Benchmark:
    """:func:`bench` for what was read already."""
    several = dtype if isinstance(dtype, (list, tuple)) else (dtype,)
    dtypes = tuple(dict.fromkeys(str(one).removeprefix("torch.") for one in several))
    directions = (FORWARD, BACKWARD) if backward else (FORWARD,)
    has_torch = _has_torch()
    _check_types(dtypes, has_torch)
    _check_numbers(rounds, threads)
    _check_shape(sizes, channels_last, dtypes, directions[-1])
    explanation, meaning = explained(read, sizes), Meaning.of(read, sizes)
    if not has_torch:
        _check_without_torch(backward, threads)
    with _threads(threads):
        measurements = tuple(
            _measured(explanation, meaning, one, direction, channels_last, rounds, has_torch)
            for one in dtypes
            for direction in directions
        )
        return Benchmark(
            read.name, str(read.scheme), sizes, channels_last, explanation.route, measurements,
            machine(),
        )  # fmt: skip


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:  # an importer that refuses torch
        return False


def _measured(
    explanation: Explanation,
    meaning: Meaning,
    dtype: str,
    direction: str,
    channels_last: bool,
    rounds: int,
    has_torch: bool,
) -> Measurement:
    backward = direction == BACKWARD
    if has_torch:
        given = torch_inputs(
            meaning, explanation, dtype, channels_last=channels_last, backward=backward
        )
    else:
        given = numpy_inputs(meaning, explanation, dtype, channels_last=channels_last)
    with _grad_mode(backward) if has_torch else contextlib.nullcontext():
        calls = contenders(meaning, explanation, dtype, given)
        *_, today, _ = calls
        names = [f"d{name}" for name in given.leaves] if backward else ["y"]
        differences = dict(zip(names, _differences(calls[0], today, dtype), strict=True))
        found = race({one.name: one.call for one in calls}, rounds)
    timed = tuple(_timed(one, today.name, found) for one in calls)
    return Measurement(
        dtype, direction, today.written_out, timed, differences, len(found.rounds), found.noisy
    )


def _timed(one: Contender, today: str, found: Race) -> Timed:
    compared = one.name in ("axisnorm", "named")
    return Timed(
        one.name,
        one.code,
        found.seconds(one.name),
        found.ratio(one.name, "copy").median,
        found.ratio(today, one.name) if compared else None,
    )


def _differences(own: Contender, today: Contender, dtype: str) -> Iterator[float]:
    """Of each result, in units in the last place of its largest element."""
    results = [one.call() for one in (own, today)]
    pairs = [one if isinstance(one, tuple) else (one,) for one in results]
    for actual, expected in zip(*pairs, strict=True):
        wide = _in_numpy(expected, dtype)
        largest, apart = (
            float(np.abs(values).max()) for values in (wide, _in_numpy(actual, dtype) - wide)
        )
        _, exponent = math.frexp(largest)
        yield apart / 2.0 ** (exponent - 1 - DIGITS[dtype])


def _in_numpy(array: Any, dtype: str) -> NDArray[Any]:
    """Half types in float32, in which their differences are exact."""
    if not isinstance(array, np.ndarray):
        array = array.detach()
        return array.float().numpy() if dtype in HALF_TYPES else array.numpy()
    return array.astype(np.float32) if dtype in HALF_TYPES else array


@contextlib.contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    import torch

    with torch.set_grad_enabled(enabled):
        yield


@contextlib.contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Inside, torch and axisnorm use so many threads."""
    if wanted is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------
# What is refused


def _check_types(dtypes: Sequence[str], has_torch: bool) -> None:
    if not dtypes:
        raise DtypeError("A benchmark runs in at least one type. None came. Give float32.")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise DtypeError(
                f"A benchmark runs in {', '.join(DTYPES[:-1])} or {DTYPES[-1]}. {dtype!r} came. "
                "Choose one of them."
            )
        if dtype == "bfloat16" and not has_torch:
            raise DtypeError(
                "NumPy has no bfloat16. It came, and torch is not installed. "
                "Run: pip install 'axisnorm[torch]'"
            )


def _check_numbers(rounds: int, threads: int | None) -> None:
    cores = os.cpu_count() or 1
    for name, value, most in (("rounds", rounds, MOST_ROUNDS), ("threads", threads, cores)):
        if value is not None and (not _is_whole(value) or not 1 <= value <= most):
            raise ArgumentError(
                f"{name} is a whole number from 1 to {most}. {value!r} came. Give one of them."
            )


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _check_shape(
    shape: tuple[int, ...], channels_last: bool, dtypes: Sequence[str], direction: str
) -> None:
    elements = math.prod(shape)
    if not elements:
        raise ArgumentError(
            f"A benchmark needs elements. Shape {shape} has none. Give a larger shape."
        )
    if channels_last and len(shape) not in (4, 5):
        raise ArgumentError(
            f"Channels last is a layout of 4 or 5 axes. Shape {shape} has {len(shape)}. "
            "Leave it out, or give the shape of images."
        )
    bytes_each = 8 if "float64" in dtypes else 4
    needed, there = HELD[direction] * bytes_each * elements, total()
    if needed > there:
        raise ArgumentError(
            f"A benchmark holds up to {HELD[direction]} tensors of the shape. {shape} would take "
            f"{needed / 2**30:,.0f} GiB of the {there / 2**30:,.0f} GiB here. "
            "Give a smaller shape."
        )


def _check_without_torch(backward: bool, threads: int | None) -> None:
    if backward:
        raise ModuleNotFoundError(
            "Gradients are torch's. It is not installed. Run: pip install 'axisnorm[torch]'",
            name="torch",
        )
    if threads is not None:
        raise ArgumentError(
            "The number of threads is torch's. It is not installed. "
            "Set OMP_NUM_THREADS in the environment instead."
        )


# --------------------------------------------------------------------------------------------
# The command line


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm bench``."""
    parser.add_argument(
        "scheme", help="'... [d]', 'GroupNorm(2, 4)', a preset's name or a function's: layer_norm"
    )
    parser.add_argument("shape", help="the input's shape, as in 8,128,768")
    parser.add_argument(
        "--sizes", metavar="NAME=SIZE,...", help="sizes of named axes or their parts, as in g=32"
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE,...",
        default="float32",
        help=f"of {', '.join(DTYPES)}; float32 if left out",
    )
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="the input's memory has the channels, axis 1, innermost",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of torch and axisnorm")
    parser.add_argument(
        "--backward", action="store_true", help="time forward and backward together too"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=9, help="a time is the median over them; 9"
    )


def execute(options: argparse.Namespace) -> tuple[Benchmark, int]:
    """Run ``axisnorm bench``: the result and the exit status."""
    named = NAMES.get(options.scheme.strip(), options.scheme)
    (subject,) = sized((named,), options.sizes)
    shape = read_shape(shape_said(options.shape))
    read = read_subject(subject, shape, "bench")
    if named in PRESETS:
        # With its sizes filled in it is timed as what it is called after all the same.
        read = replace(read, name=named)
    dtypes = [word.strip() for word in options.dtype.split(",")]
    found = benched(
        read, shape, dtypes, options.channels_last, options.threads, options.backward,
        options.rounds,
    )  # fmt: skip
    return found, 0
