"""The NumPy engine: the kernels where there is one, the reference elsewhere."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from . import _build, _route, reference
from ._numpy_memory import ALIGNED, empty_cache, empty_like, least
from .reference import Inputs
from .scheme import ArgumentError, DtypeError, Scheme, Sizes, as_scheme

__all__ = [
    "Inputs",
    "add_normalize",
    "empty_cache",
    "is_tracing",
    "normalize",
    "short_add_layer_norm",
    "short_add_rms_norm",
    "short_channel_norm",
    "short_layer_norm",
    "short_normalize",
    "short_rms_norm",
    "statistics",
]

Array = Any  # numpy.ndarray of a type that may be ml_dtypes.bfloat16

_native = _build.native


# --------------------------------------------------------------------------------------------
# The short way of plain arrays, in csrc/torch_door.cpp and csrc/torch_ops.cpp: what it is not sure
# of, it leaves to the long way by returning None. Before torch is seen, and with one that is too
# old for a short way of its own, the doors call these functions, which torch's compilers look into.
# All arguments are named: to pass on a tuple of them costs a third of a small norm.


def short_layer_norm(
    x: Any, shape: Any, weight: Any, bias: Any, eps: Any, activation: Any, out: Any
) -> Any:
    if _native and type(x) is np.ndarray:
        return _native.short_layer_norm(x, shape, weight, bias, eps, activation, out)
    return None


def short_rms_norm(
    x: Any, shape: Any, weight: Any, eps: Any, offset: Any, rounding: Any, activation: Any, out: Any
) -> Any:
    if _native and type(x) is np.ndarray:
        return _native.short_rms_norm(x, shape, weight, eps, offset, rounding, activation, out)
    return None


def short_channel_norm(
    x: Any,
    weight: Any,
    bias: Any,
    kind: Any,
    groups: Any,
    eps: Any,
    mean: Any,
    var: Any,
    batch: Any,
    momentum: Any,
    activation: Any,
    out: Any,
) -> Any:
    if _native and type(x) is np.ndarray:
        return _native.short_channel_norm(
            x, weight, bias, kind, groups, eps, mean, var, batch, momentum, activation, out
        )
    return None


def short_normalize(
    x: Any, scheme: Any, weight: Any, bias: Any, mean: Any, var: Any, activation: Any, out: Any
) -> Any:
    if _native and type(x) is np.ndarray:
        return _native.short_normalize(x, scheme, weight, bias, mean, var, activation, out)
    return None


def short_add_layer_norm(
    x: Any,
    residual: Any,
    shape: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    p: Any,
    training: Any,
    prenorm: Any,
    activation: Any,
) -> Any:
    if _native and type(x) is np.ndarray:
        return _native.short_add_layer_norm(
            x, residual, shape, weight, bias, eps, p, training, prenorm, activation
        )
    return None


def short_add_rms_norm(
    x: Any,
    residual: Any,
    shape: Any,
    weight: Any,
    eps: Any,
    offset: Any,
    rounding: Any,
    p: Any,
    training: Any,
    prenorm: Any,
    activation: Any,
) -> Any:
    if _native and type(x) is np.ndarray:
        return _native.short_add_rms_norm(
            x, residual, shape, weight, eps, offset, rounding, p, training, prenorm, activation
        )
    return None


def _dtype_code(dtype: Any) -> int:
    """As csrc/norm.h counts the types; -1 for one that has no kernel as it is."""
    known = dtype.isnative and dtype.name in _route.DTYPES
    return _route.DTYPES.index(dtype.name) if known else -1


def _functions() -> Any:
    """NumPy's table of C functions, which stands elsewhere before version 2."""
    try:
        module = import_module("numpy._core._multiarray_umath")
    except ModuleNotFoundError:
        module = import_module("numpy.core._multiarray_umath")
    return module._ARRAY_API


if _native:
    _native.connect_arrays(_functions(), {"aligned": ALIGNED, "large": least, "dtype": _dtype_code})


def is_tracing() -> bool:
    """Whether shapes are traced values; never, for arrays."""
    return False


def normalize(
    inputs: Inputs,
    scheme: Scheme | str,
    out: Array | None = None,
    activation: str | None = None,
) -> Array:
    """Normalize an array; batch statistics move given running statistics."""
    scheme = as_scheme(scheme)
    inputs, sizes = _checked(inputs, scheme)
    moving = inputs.running_mean is not None and scheme.statistics == "batch"
    used = inputs._replace(running_mean=None, running_var=None) if moving else inputs
    if out is not None:
        _check_out(inputs, out, moving)
        kept = [t.copy() if t is not None and np.may_share_memory(out, t) else t for t in used[4:]]
        used = used._replace(running_mean=kept[0], running_var=kept[1])
    native = _is_native(used, sizes)
    if native:
        measured = _Measured(used, sizes) if moving else None
        y = _native_forward(used, sizes, out, measured, activation)
        if measured is not None:
            _move(inputs, sizes, measured.moments())
        return y
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
            activation=activation,
        )
    if moving:
        _move(inputs, sizes, moments)
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
    if _is_native(inputs, sizes):
        measured = _Measured(inputs, sizes)
        _run(inputs, sizes, None, measured)
        mean, _, rstd = measured.stats
        return (
            (mean + measured.stats[1]).reshape(shape),
            _narrow(measured.var, kind).reshape(shape),
            rstd.reshape(shape),
        )
    with np.errstate(all="ignore"):
        moments = reference.moments(inputs.x, scheme, mask=inputs.mask)
        return moments.mean.astype(kind), moments.var.astype(kind), moments.rstd.astype(kind)


def _move(inputs: Inputs, sizes: Sizes, moments: reference.Moments) -> None:
    """Move the running statistics, after everything else has succeeded."""
    momentum = sizes.layout.scheme.momentum
    assert momentum is not None
    running: tuple[Array, Array] = inputs[4:]
    with np.errstate(all="ignore"):
        moved = reference.updated_running(sizes, moments, *running, momentum)
        for old, new in zip(running, moved, strict=True):
            old[...] = new


def _narrow(values: Array, kind: Any) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(kind)


class _Measured:
    """Where the kernels leave the statistics of every group."""

    def __init__(self, inputs: Inputs, sizes: Sizes) -> None:
        kind = _compute_type(inputs.x)
        self.sizes = sizes
        self.stats = np.empty((3, sizes.num_groups), kind)  # hi, lo, rstd; the mean is hi + lo
        self.var = np.empty(sizes.num_groups)  # may not fit the compute type
        self.count = np.full(sizes.num_groups, float(sizes.group_size))

    def moments(self) -> reference.Moments:
        shape = self.sizes.statistics_shape
        hi, lo, rstd = self.stats.astype(np.float64)
        with np.errstate(all="ignore"):
            return reference.Moments(
                (hi + lo).reshape(shape),
                self.var.reshape(shape),
                rstd.reshape(shape),
                self.count.reshape(shape),
            )


def _is_native(inputs: Inputs, sizes: Sizes) -> bool:
    return _route.route(sizes, inputs.x.dtype.name, _is_affine(inputs)).engine == "native"


def _is_affine(inputs: Inputs) -> bool:
    return inputs.weight is not None or inputs.bias is not None


def _native_forward(
    inputs: Inputs,
    sizes: Sizes,
    out: Array | None,
    measured: _Measured | None,
    activation: str | None,
) -> Array:
    y = out
    if y is None or any(t is not None and np.may_share_memory(y, t) for t in inputs):
        # In the order of x; and nothing is overwritten before it is read.
        y = empty_like(inputs.x)
    _run(inputs, sizes, y, measured, activation)
    if out is None or out is y:
        return y
    out[...] = y
    return out


def _run(
    inputs: Inputs,
    sizes: Sizes,
    y: Array | None,
    measured: _Measured | None,
    activation: str | None = None,
) -> None:
    """One call of the kernel, which writes ``y`` and the statistics."""
    x, target = inputs.x, y
    weight, bias = _parameter(inputs.weight, x), _parameter(inputs.bias, x)
    running = [_parameter(t, x) for t in inputs[4:]]
    mask = inputs.mask
    if mask is not None:
        mask = np.broadcast_to(mask.view(np.uint8), x.shape)
    if not _is_regular(x):
        x = np.array(x, x.dtype.newbyteorder("="))
    if target is not None and not _is_regular(target):
        target = np.empty_like(target, x.dtype)

    def refused() -> str | None:
        return _native.forward(
            _route.axes(sizes, _is_affine(inputs)),
            _given(x),
            _given(target),
            _given(mask),
            _address(weight),
            _address(bias),
            *[_address(t) for t in running],
            _address(measured and measured.stats),
            _address(measured and measured.var),
            _address(measured.count if measured is not None and mask is not None else None),
            _constants(x, weight, bias, running, sizes),
            _route.activation_code(activation),
            _given(None),
        )

    if refused() is not None:
        x = np.array(x)  # without gaps, as what is made for it is
    if refused() is not None:
        # The axes are interleaved: everything in one order.
        x = np.ascontiguousarray(x)
        if target is not None and not target.flags.c_contiguous:
            target = np.empty_like(x)
        mask = None if mask is None else np.array(mask, order="C")
        again = refused()
        assert again is None, again
    if y is not None and target is not y:
        y[...] = target


def _is_regular(array: Array) -> bool:
    """Whether the elements are numbers of this machine, aligned and whole elements apart."""
    whole = not any(step % array.itemsize for step in array.strides)
    return array.dtype.isnative and array.flags.aligned and whole


def _given(array: Array | None) -> tuple[int, tuple[int, ...]]:
    if array is None:
        return 0, ()
    return _address(array), tuple(step // array.itemsize for step in array.strides)


def _constants(
    x: Array, weight: Array | None, bias: Array | None, running: list[Array | None], sizes: Sizes
) -> tuple[Any, ...]:
    scheme = sizes.layout.scheme
    return (
        _code(x),
        *[_code(x if t is None else t) for t in (weight, bias, *running)],
        scheme.center,
        scheme.rounding == "before_affine",
        reference.resolve_eps(scheme, x.dtype),
        scheme.correction,
        scheme.weight_offset,
    )


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
# The norm of a sum


def add_normalize(
    x: Array,
    residual: Array,
    weight: Array | None,
    bias: Array | None,
    scheme: str,
    prenorm: bool,
    activation: str | None,
) -> tuple[Array, Array | None]:
    """y = norm(h) and h = residual + x (None where neither ``prenorm`` nor the engine asks for it).

    The two arrays have one shape, which ends in the axes that share a mean.
    """
    meaning = as_scheme(scheme)
    inputs, sizes = _checked(Inputs(x, weight, bias), meaning)
    plain = inputs.x.dtype.isnative and not isinstance(residual, np.ma.MaskedArray)
    fused = plain and residual.dtype == x.dtype
    if not fused or not _is_native(inputs, sizes):
        h = residual + x
        return normalize(inputs._replace(x=h), meaning, activation=activation), h
    axes = len(sizes.layout.reduced)
    x, x_stride = _rows(inputs.x, axes)
    residual, residual_stride = _rows(np.asarray(residual), axes)
    weight, bias = _parameter(inputs.weight, x), _parameter(inputs.bias, x)
    y = empty_like(x, "C")
    h = empty_like(x, "C") if prenorm else None
    rows, n = sizes.num_groups, sizes.group_size
    _native.add_forward(
        _address(x),
        _address(residual),
        _address(weight),
        _address(bias),
        _address(y),
        _address(h),
        0,
        0.0,
        0,
        rows,
        n,
        x_stride,
        residual_stride,
        n,
        n,
        _code(x),
        _code(x if weight is None else weight),
        _code(x if bias is None else bias),
        meaning.center,
        meaning.rounding == "before_affine",
        reference.resolve_eps(meaning, x.dtype),
        meaning.weight_offset,
        _route.activation_code(activation),
    )
    return y, h


def _rows(x: Array, axes: int) -> tuple[Array, int]:
    """The array, or a contiguous copy where its rows are not, and the distance of its rows."""
    size = x.itemsize
    if x.flags.aligned and not any(step % size for step in x.strides):
        found = _route.row_stride(x.shape, [step // size for step in x.strides], axes)
        if found is not None:
            return x, found
    x = np.array(x, order="C")
    found = _route.row_stride(x.shape, [step // size for step in x.strides], axes)
    assert found is not None
    return x, found


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
    sizes = scheme.sizes(x.shape)
    for name, given in zip(Inputs._fields[1:4], inputs[1:4], strict=True):
        if getattr(given, "requires_grad", False):
            raise DtypeError(
                f"A {name} with a gradient belongs to a tensor. A NumPy array came as the input. "
                "Give it as a tensor, torch.as_tensor(x)."
            )
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


def _check_out(inputs: Inputs, out: Array, moving: bool) -> None:
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
        if moving and np.may_share_memory(out, running):
            raise ArgumentError(
                f"out and {name} share memory. Both are written. Give them memory of their own."
            )


def _check_writable(name: str, array: Array) -> None:
    overlaps = _route.overlaps_itself(array.shape, array.strides, array.itemsize)
    if overlaps or not array.flags.writeable:
        raise ArgumentError(
            f"{name} is written to, so it is writable and each of its elements has its own memory. "
            f"One of strides {array.strides} came, or one that is read-only. Give {name}.copy()."
        )
