"""Which normalization turns an input into an output, found from the arrays alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..scheme import ArgumentError, DtypeError
from .explain import holds_no_numbers, not_finite
from .files import SUFFIXES, arrays_of, keys_of, read
from .identifying.evidence import Floats, double, pair_of
from .identifying.fit import Given, places
from .identifying.identification import Candidate, Decision, Identification
from .identifying.rivals import fitted_eps, rivals, tell_apart, tolerance
from .identifying.study import Study
from .naming import affine_axes, in_words, kind_of_mean, meanings, on_axes
from .subject import with_article

if TYPE_CHECKING:
    import argparse

__all__ = [
    "Candidate",
    "Decision",
    "Identification",
    "affine_axes",
    "fitted_eps",
    "identify",
    "in_words",
    "kind_of_mean",
    "meanings",
    "on_axes",
    "rivals",
    "tell_apart",
    "tolerance",
]


def identify(
    x: Any,
    y: Any,
    *,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
) -> Identification:
    r"""Find which normalization turns ``x`` into ``y``.

    Every normalization is, within the elements that share a mean, one factor times the input
    minus an offset:

    .. math:: y = (x - m)\, r(V)\, (w + w_0) + b

    For every set of axes and every division of one axis into groups the offset m is tested and
    the factor r of each group is measured; the formula and its eps are read off the factors of
    groups of different variance. Weight and bias are fitted where they are not given and the
    output is not explained without them. What may have come after the norm is looked through: an
    activation, dropout, a mask, a rounding to few decimals or to a grid. Of what fits, the
    hypothesis with the fewest fitted numbers wins, then an eps and a norm in use; the rest is
    listed.

    Args:
        x: the input: an array of NumPy (bfloat16 of ml_dtypes too) or torch, of any shape.
        y: the output, of the same shape.
        weight: that was used, if it is known, of one size for each axis along which it varies.
            As it is stored: whether 1 is added is found out.
        bias: as weight.
        running_mean: the running statistics, if there were some: whether they were used is found
            out. Of one size for each axis along which they vary.
        running_var: as running_mean.

    Returns:
        The candidates, from the best to those that do not fit, what this data cannot decide, and
        the smallest input that would.

    Raises:
        ArgumentError: the shapes differ, a value is NaN or infinite, or the arrays say nothing:
            fewer than two elements, or one value everywhere.
        DtypeError: a type is not floating.

    >>> x = np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> found = identify(x, np.array([[1.5, -0.5, -0.5, -0.5]]))
    >>> found.best.scheme, found.best.mistake.code, found.best.correction
    (Scheme('... [d]; correction=1; eps=0'), 'sample-deviation', Scheme('... [d]; eps=0'))
    """
    arrays = {
        "x": x, "y": y, "weight": weight, "bias": bias,
        "running_mean": running_mean, "running_var": running_var,
    }  # fmt: skip
    arrays = {name: _native(array) for name, array in arrays.items()}
    _check(arrays)
    x, y, *parameters = arrays.values()
    given = Given(*(None if array is None else double(array) for array in parameters))
    _check_parameters(given, tuple(x.shape))
    # Squares of numbers near the ends of double's range overflow: such hypotheses do not fit.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        pair = pair_of(x, y)
        if given.running_mean is not None and given.running_var is not None:
            given = replace(
                given,
                running_mean=given.running_mean * pair.unit,
                running_var=given.running_var * pair.unit * pair.unit,
            )
        study = Study(pair, given, tuple(str(a.dtype).split(".")[-1] for a in (x, y)))
        return study.result()


# --------------------------------------------------------------------------------------------
# Bad input


def _native(array: Any) -> Any:
    """The array in this machine's order of bytes: files of NumPy may have the other one."""
    if isinstance(array, np.ndarray) and array.dtype.kind == "f" and not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def _remedy(name: str, dtype: Any) -> str:
    """What to do about an array of a type that no norm takes."""
    if getattr(dtype, "names", None):
        return f"Give one of its fields, as in {name}['{dtype.names[0]}']"
    if "complex" in str(dtype):
        return f"Give its real part, {name}.real"
    if holds_no_numbers(dtype):
        return "Give numbers"
    if "qint" in str(dtype):
        return f"Give its numbers, {name}.dequantize()"
    convert = "double()" if str(dtype).startswith("torch.") else "astype('float64')"
    return f"Convert it, as in {name}.{convert}"


def _check(arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        if array is None and name not in ("x", "y"):
            continue
        if not (hasattr(array, "dtype") and hasattr(array, "shape")):
            raise ArgumentError(
                f"identify takes arrays of NumPy or torch. {name} is "
                f"{with_article(array, begins=False)}. Convert it with numpy.asarray."
            )
        dtype = str(array.dtype).removeprefix("torch.")
        if dtype not in ("float16", "bfloat16", "float32", "float64"):
            raise DtypeError(
                "Normalizations take and give floating numbers: float16, bfloat16, float32 or "
                f"float64. {name} is {dtype}. {_remedy(name, array.dtype)}."
            )
        if getattr(array, "is_sparse", False) or getattr(array, "is_meta", False):
            raise ArgumentError(
                f"identify takes dense arrays with values. {name} has none. Make it dense."
            )
    x, y = arrays["x"], arrays["y"]
    shapes = tuple(x.shape), tuple(y.shape)
    if shapes[0] != shapes[1]:
        raise ArgumentError(
            f"Input and output have one shape. They have {shapes[0]} and {shapes[1]}. "
            + _how_to_align(*shapes)
        )
    if math.prod(shapes[0]) < 2 or not shapes[0]:
        raise ArgumentError(
            "A normalization shows on several elements. The arrays have shape "
            f"{shapes[0]}. Give an input with at least two."
        )
    for name, array in arrays.items():
        if array is not None:
            _check_values(name, double(array))
    for name in ("x", "y"):
        values = double(arrays[name])
        if float(values.min()) == float(values.max()):
            what = "the input says nothing of what was done" if name == "x" else (
                "the output shows no statistics"
            )  # fmt: skip
            raise ArgumentError(
                f"Where one value stands everywhere, {what}. {name} is "
                f"{float(values.flat[0]):g} throughout. Give an input whose values differ."
            )


def _how_to_align(x: tuple[int, ...], y: tuple[int, ...]) -> str:
    if sorted(x) == sorted(y) and len(x) <= 6:
        order = next(
            order
            for order in itertools.permutations(range(len(x)))
            if tuple(y[i] for i in order) == x
        )
        return f"Transpose one to the other: y.transpose({', '.join(map(str, order))})."
    if math.prod(x) == math.prod(y):
        return f"If only the shape was changed, reshape it back: y.reshape{x}."
    return "Give the input and the output of one call."


def _check_values(name: str, values: Floats) -> None:
    where = not_finite(values, name)
    if where:
        raise ArgumentError(
            f"All numbers have to be finite. {where}. "
            "Cut such elements out, with whole groups, or use another input."
        )


def _check_parameters(given: Given, shape: tuple[int, ...]) -> None:
    for names, (one, other) in (
        ("weight and bias", (given.weight, given.bias)),
        ("running_mean and running_var", (given.running_mean, given.running_var)),
    ):
        if one is not None and other is not None and one.shape != other.shape:
            raise ArgumentError(
                f"{names} have one shape. They have {one.shape} and {other.shape}. "
                "Give both for the same axes."
            )
    if (given.running_mean is None) != (given.running_var is None):
        raise ArgumentError(
            "running_mean and running_var come together. One of them came. Give both."
        )
    if given.running_var is not None and float(given.running_var.min()) < 0:
        raise ArgumentError(
            f"A variance is not negative. running_var has {float(given.running_var.min()):g}. "
            "Check that mean and variance were not exchanged."
        )
    for name, values in (("weight", given.weight), ("bias", given.bias),
                         ("running_mean", given.running_mean)):  # fmt: skip
        if values is not None and next(places(values, shape), None) is None:
            raise ArgumentError(
                f"The {name} varies along axes of the input. Its shape is {values.shape}, the "
                f"input's {shape}: no axes have these sizes. Give it as it was used."
            )


# --------------------------------------------------------------------------------------------
# The command line

PARAMETERS = ("weight", "bias", "running_mean", "running_var")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``axisnorm identify``."""
    kinds = ", ".join(SUFFIXES)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE[:KEY]",
        help=f"the input and the output ({kinds}), or one file with the keys x and y",
    )
    for name in PARAMETERS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="FILE[:KEY]",
            help=f"the {name.replace('_', ' ')} that was used, if it is known",
        )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="load pickled objects, which can run any code"
    )


def execute(options: argparse.Namespace) -> tuple[Identification, int]:
    """Run ``axisnorm identify``: the result and the exit status."""
    pickles = options.allow_pickle
    if len(options.files) > 2:
        raise ArgumentError(
            "identify takes an input and an output, or one file with both. "
            f"{len(options.files)} files came. Give the parameters by --weight and its kin."
        )
    found: dict[str, Any] = {}
    if len(options.files) == 1:
        held = arrays_of(options.files[0], allow_pickle=pickles)
        for names in (("x", "y"), ("input", "output")):
            if all(name in held for name in names):
                found = {"x": held[names[0]], "y": held[names[1]]}
                break
        else:
            raise ArgumentError(
                "One file alone has the keys x and y. "
                f"'{options.files[0]}' has {keys_of(held)}. "
                "Give two files, or two keys as in file.npz:a file.npz:b."
            )
        found.update({name: held[name] for name in PARAMETERS if name in held})
    else:
        found = {
            name: read(place, allow_pickle=pickles)
            for name, place in zip(("x", "y"), options.files, strict=True)
        }
    for name in PARAMETERS:
        if getattr(options, name) is not None:
            found[name] = read(getattr(options, name), allow_pickle=pickles)
    return identify(found.pop("x"), found.pop("y"), **found), 0
