"""The NumPy engine: the kernels where there is one, the reference elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _build, _route, reference
from .reference import Inputs
from .scheme import ArgumentError, DtypeError, Scheme, Sizes, as_scheme

__all__ = ["Inputs", "is_tracing", "normalize", "statistics"]

Array = Any  # numpy.ndarray of a type that may be ml_dtypes.bfloat16

_native = _build.native


def is_tracing() -> bool:
    """Whether shapes are traced values; never, for arrays."""
    return False


def normalize(inputs: Inputs, scheme: Scheme | str, out: Array | None = None) -> Array:
    """Normalize an array; batch statistics move given running statistics."""
    scheme = as_scheme(scheme)
    inputs, sizes = _checked(inputs, scheme)
    if out is not None:
        _check_out(inputs, out)
    moving = inputs.running_mean is not None and scheme.statistics == "batch"
    used = inputs._replace(running_mean=None, running_var=None) if moving else inputs
    if not moving and _engine(used, sizes) == "native":
        return _native_forward(used, sizes, out)
    # An overflow that IEEE arithmetic defines (an infinite input, say) is no event to report.
    with np.errstate(all="ignore"):
        y, moments = reference.forward(
            used.x,
            scheme,
            used.weight,
            used.bias,
            mask=used.mask,
            running_mean=used.running_mean,
            running_var=used.running_var,
        )
        if moving:
            assert scheme.momentum is not None
            running: tuple[Array, Array] = inputs[4:]
            moved = reference.updated_running(sizes, moments, *running, scheme.momentum)
            for old, new in zip(running, moved, strict=True):
                old[...] = new
    if out is None:
        return y
    out[...] = y
    return out


def statistics(x: Array, scheme: Scheme | str, mask: Array | None) -> tuple[Array, Array, Array]:
    """Mean, variance and rstd of every group, in the compute type."""
    scheme = as_scheme(scheme)
    inputs, sizes = _checked(Inputs(x, mask=mask), scheme)
    kind = _compute_type(inputs.x)
    shape = sizes.statistics_shape
    if _engine(inputs, sizes) == "native":
        stats = np.empty((3, sizes.num_groups), kind)
        var = np.empty(sizes.num_groups, kind)
        _native_forward(inputs, sizes, None, stats, var)
        return (stats[0] + stats[1]).reshape(shape), var.reshape(shape), stats[2].reshape(shape)
    with np.errstate(all="ignore"):
        moments = reference.moments(inputs.x, scheme, mask=inputs.mask)
        return moments.mean.astype(kind), moments.var.astype(kind), moments.rstd.astype(kind)


def _engine(inputs: Inputs, sizes: Sizes) -> str:
    affine = inputs.weight is not None or inputs.bias is not None
    if not inputs.x.dtype.isnative:
        return "reference"
    return _route.route(
        sizes,
        inputs.x.dtype.name,
        affine,
        inputs.mask is not None,
        inputs.running_mean is not None,
    ).engine


def _native_forward(
    inputs: Inputs,
    sizes: Sizes,
    out: Array | None,
    stats: Array | None = None,
    var: Array | None = None,
) -> Array:
    """One call of the kernel; with ``var`` for the statistics alone."""
    x = inputs.x
    given = _loops(x, sizes)
    if given is None:
        x = np.array(x, order="C")  # also where x is contiguous, but not aligned
        given = _loops(x, sizes)
    weight, bias = _parameter(inputs.weight, x), _parameter(inputs.bias, x)
    y = out
    if y is None and var is None:
        y = np.empty_like(x, order="C")
    target, taken = y, given
    if y is not None:
        loops = _loops(y, sizes)
        others = [t for t in (weight, bias) if t is not None]
        if not (loops and _same_place(y, x)):
            others.append(x)
        if loops is None or (out is not None and any(np.may_share_memory(y, t) for t in others)):
            target = np.empty_like(x, order="C")
            loops = _loops(target, sizes)
        taken = loops
    assert given is not None
    assert taken is not None
    scheme = sizes.layout.scheme
    code = _code(x)
    _native.forward(
        _address(x),
        _address(weight),
        _address(bias),
        _address(target),
        _address(stats),
        _address(var),
        given.rows,
        given.n,
        given.stride,
        taken.stride,
        code,
        code if weight is None else _code(weight),
        code if bias is None else _code(bias),
        scheme.center,
        scheme.rounding == "before_affine",
        reference.resolve_eps(scheme, x.dtype),
        sizes.group_size - scheme.correction,
        scheme.weight_offset,
    )
    if y is not None and target is not y:
        y[...] = target
    return y


def _loops(x: Array, sizes: Sizes) -> _route.Loops | None:
    size = x.itemsize
    if any(step % size for step in x.strides) or not x.flags.aligned:
        return None
    return _route.loops(sizes, [step // size for step in x.strides])


def _same_place(a: Array, b: Array) -> bool:
    return a.strides == b.strides and _address(a) == _address(b)


def _address(array: Array | None) -> int:
    if array is None:
        return 0
    # bfloat16 has no buffer protocol; its bits do.
    return _native.address(array.view(np.uint16) if array.dtype.name == "bfloat16" else array)


def _code(array: Array) -> int:
    return _route.DTYPES.index(array.dtype.name)


def _parameter(parameter: Array | None, x: Array) -> Array | None:
    """Weight or bias as the kernel takes it: contiguous, of one of its types."""
    if parameter is None:
        return None
    if parameter.dtype.name not in _route.DTYPES or not parameter.dtype.isnative:
        parameter = parameter.astype(_compute_type(x))
    aligned = parameter.flags.aligned and parameter.flags.c_contiguous
    return parameter if aligned else np.array(parameter, order="C")


def _compute_type(x: Array) -> Any:
    return np.float64 if x.dtype.name == "float64" else np.float32


# --------------------------------------------------------------------------------------------
# Checks, before anything is computed


def _checked(inputs: Inputs, scheme: Scheme) -> tuple[Inputs, Sizes]:
    """The inputs as arrays, refused where they do not fit."""
    x = inputs.x
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            "A masked array hides its mask from the statistics. One came. "
            "Give x.filled(0) and mask=~numpy.ma.getmaskarray(x)."
        )
    if x.dtype.name not in _route.DTYPES:
        raise DtypeError(
            f"The input is a real floating-point array: {', '.join(_route.DTYPES)}. "
            f"{x.dtype} came. Convert it, for example x.astype(numpy.float32)."
        )
    sizes = scheme.layout(x.ndim).sizes(x.shape)
    weight, bias, mask = (None if a is None else np.asarray(a) for a in inputs[1:4])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.dtype.kind not in "fiub" and parameter.dtype.name not in _route.DTYPES:
            raise DtypeError(f"The {name} is real. {parameter.dtype} came. Give a real array.")
        sizes.check_parameter(name, parameter.shape)
    if mask is not None:
        if mask.dtype != np.bool_:
            raise DtypeError(
                f"A mask is boolean, True where an element counts. {mask.dtype} came. "
                "Compare, for example mask != 0."
            )
        sizes.check_mask(mask.shape)
    for name, running in zip(Inputs._fields[4:], inputs[4:], strict=True):
        if running is not None and (
            not isinstance(running, np.ndarray) or running.dtype.name not in _route.DTYPES
        ):
            came = running.dtype if isinstance(running, np.ndarray) else type(running).__name__
            raise DtypeError(
                f"{name} is a floating-point array, so that it can be updated in place. "
                f"{came} came. Convert it with numpy.asarray."
            )
        if running is not None and scheme.statistics == "batch":
            _check_writable(name, running)
    sizes.check_running(*(None if a is None else a.shape for a in inputs[4:]))
    return Inputs(np.asarray(x), weight, bias, mask, *inputs[4:]), sizes


def _check_out(inputs: Inputs, out: Array) -> None:
    x = inputs.x
    if not isinstance(out, np.ndarray) or (out.shape, out.dtype) != (x.shape, x.dtype):
        came = (
            f"shape {out.shape}, {out.dtype}"
            if isinstance(out, np.ndarray)
            else f"a {type(out).__name__}"
        )
        raise ArgumentError(
            f"out is an array like the input: shape {x.shape}, {x.dtype}. {came} came. "
            "Make it with numpy.empty_like(x)."
        )
    _check_writable("out", out)
    for name, running in zip(Inputs._fields[4:], inputs[4:], strict=True):
        if running is not None and np.may_share_memory(out, running):
            raise ArgumentError(
                f"out and {name} share memory. Both are used. Give them memory of their own."
            )


def _check_writable(name: str, array: Array) -> None:
    if not array.flags.writeable or _route.overlaps_itself(array.shape, array.strides):
        raise ArgumentError(
            f"{name} is written to, so it is writable and each of its elements has its own memory. "
            f"One of strides {array.strides} came, or one that is read-only. Give {name}.copy()."
        )
