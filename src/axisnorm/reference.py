"""The plain meaning of a scheme, forward and backward, for NumPy arrays and torch tensors.

Specification, fallback and test oracle in one. Everything is computed in float64 (longdouble stays
longdouble) and rounded once at the end. On torch tensors :func:`forward` is differentiable to any
order and passes through every torch transform, so it also serves as double backward.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .scheme import ArgumentError, Scheme, Sizes

__all__ = [
    "ACTIVATIONS",
    "Inputs",
    "Moments",
    "activated",
    "backward",
    "behind",
    "checked_activation",
    "derivative",
    "dropout",
    "forward",
    "moments",
    "philox",
    "residual_sum",
    "resolve_eps",
    "updated_running",
]

Array = Any
"""A numpy.ndarray or a torch.Tensor."""


ACTIVATIONS = ("relu", "silu", "gelu")
"""What may follow a norm, in the order of csrc/norm.h from 1 on."""


class Inputs(NamedTuple):
    """The arrays of one normalization."""

    x: Array
    weight: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    running_mean: Array | None = None
    running_var: Array | None = None


@dataclass(frozen=True)
class Moments:
    """The statistics of every group, each of shape ``Sizes.statistics_shape``."""

    mean: Array
    """What is subtracted: zero where the scheme does not centre."""
    var: Array
    """sum(d^2) / (n - correction), with d centred as ``Scheme.scale`` says; without divisor for
    l2."""
    rstd: Array
    """What the centred value is multiplied by: 1 / sqrt(var + eps) and its kin."""
    count: Array
    """How many valid elements the group has."""


def forward(
    x: Array,
    scheme: Scheme,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    activation: str | None = None,
) -> tuple[Array, Moments]:
    """Normalize ``x`` and return the output in its type, with the statistics in float64.

    >>> y, found = forward(np.array([[1.0, 2.0, 4.0, 1.0]]), Scheme.layer_norm())
    >>> y.round(4).tolist(), found.mean.tolist(), found.var.tolist()
    ([[-0.8165, 0.0, 1.633, -0.8165]], [2.0], [1.5])
    """
    work = _Work(x, scheme, mask, running_mean, running_var)
    xhat = work.rounded(work.xhat)
    y = work.affine(xhat, weight, bias)
    if activation is not None:
        y = activated(y, activation)
    if work.valid is not None:
        y = work.xp.where(work.valid, y, 0.0)
    return _cast(y.reshape(x.shape), x.dtype), work.moments()


def moments(x: Array, scheme: Scheme, *, mask: Array | None = None) -> Moments:
    """The statistics of every group in float64.

    >>> moments(np.array([[1.0, 2.0, 4.0, 1.0]]), Scheme.rms_norm()).var.tolist()
    [5.5]
    """
    return _Work(x, scheme, mask).moments()


def backward(
    grad: Array,
    x: Array,
    scheme: Scheme,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    activation: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    r"""The gradients (dx, dweight, dbias) for the gradient ``grad`` of the output.

    With g = grad (w + w_0), r(V) what the centred value is multiplied by, and d, e the value that
    is scaled and the deviation that the variance sums:

    .. math:: dx = r g - \overline{r g} + \frac{2 e}{n - \text{correction}} r'(V) \sum g d

    without the mean where the scheme does not centre. Behind an activation, ``grad`` is multiplied
    by its derivative first.
    """
    work = _Work(x, scheme, mask, running_mean, running_var)
    xp = work.xp
    g = work.behind(grad, weight, bias, activation)
    dweight = dbias = None
    if bias is not None:
        dbias = _cast(work.sum_to_affine(g).reshape(bias.shape), bias.dtype)
    if weight is not None:
        xhat = work.rounded(work.xhat)
        dweight = _cast(work.sum_to_affine(g * xhat).reshape(weight.shape), weight.dtype)
        g = work.masked(g * work.weight(weight))
    dx = work.factor * work.rate * g
    if not work.given:
        if scheme.center:
            dx = dx - work.mean_of(dx)
        slope = work.factor * work.slope * work.sum(g * work.value)
        dx = dx + 2.0 * work.deviation * slope / work.divisor
    dx = dx * work.unit
    if work.valid is not None:
        dx = xp.where(work.valid, dx, 0.0)
    return _cast(dx.reshape(x.shape), x.dtype), dweight, dbias


def behind(
    grad: Array,
    x: Array,
    scheme: Scheme,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mask: Array | None = None,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    activation: str | None = None,
) -> Array:
    """The gradient of what the activation is applied to, for the gradient of the output.

    >>> x = np.array([[1.0, 2.0, 4.0, 1.0]])
    >>> behind(np.ones((1, 4)), x, Scheme.layer_norm(), activation="relu").tolist()
    [[0.0, 0.0, 1.0, 0.0]]
    """
    work = _Work(x, scheme, mask, running_mean, running_var)
    return _cast(work.behind(grad, weight, bias, activation).reshape(x.shape), x.dtype)


def checked_activation(name: Any) -> str | None:
    """The name of an activation, or None.

    Raises:
        ArgumentError: it is neither.
    """
    if name is None or (isinstance(name, str) and name in ACTIVATIONS):
        return name
    raise ArgumentError(
        f"An activation is {', '.join(map(repr, ACTIVATIONS))} or None. {name!r} came. "
        "Apply others to the result."
    )


def activated(z: Array, name: str) -> Array:
    r"""An activation: relu max(z, 0), silu z / (1 + e^-z), gelu z (1 + erf(z / sqrt(2))) / 2.

    A NaN stays one, and -inf has the limit 0.

    >>> z = np.array([-1.0, 2.0])
    >>> [activated(z, name).round(4).tolist() for name in ACTIVATIONS]
    [[0.0, 2.0], [-0.2689, 1.7616], [-0.1587, 1.9545]]
    """
    xp = _namespace(z)
    z = xp.where(z == -float("inf"), 0.0, z)
    if xp is not np:
        return getattr(xp.nn.functional, name)(z)
    if name == "relu":
        return np.where(z < 0.0, 0.0, z)
    if name == "silu":
        return z / (1.0 + np.exp(-z))
    return z * 0.5 * (1.0 + _erf(z * math.sqrt(0.5)))


def derivative(z: Array, name: str) -> Array:
    """The derivative of :func:`activated`, of relu's 0 at 0.

    >>> z = np.array([0.0, 2.0])
    >>> [derivative(z, name).round(4).tolist() for name in ACTIVATIONS]
    [[0.0, 1.0], [0.5, 1.0908], [0.5, 1.0852]]
    """
    xp = _namespace(z)
    if name == "relu":
        return xp.where(z <= 0.0, 0.0, xp.ones_like(z))
    z = xp.clip(z, -1000.0, 1000.0)  # so that no infinity is multiplied by 0
    if name == "silu":
        share = 1.0 / (1.0 + xp.exp(-z))
        return share * (1.0 + z * (1.0 - share))
    erf = _erf if xp is np else xp.erf
    density = xp.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + erf(z * math.sqrt(0.5))) + z * density


def _erf(z: Array) -> Array:
    # NumPy has none.
    return np.vectorize(math.erf, otypes=[np.float64])(z)


def updated_running(
    sizes: Sizes, found: Moments, running_mean: Array, running_var: Array, momentum: float
) -> tuple[Array, Array]:
    """The running statistics after a batch: (1 - momentum) * old + momentum * new.

    New is the average over the groups of a channel, weighted by their valid elements, with the
    variance of divisor n - running_correction. A channel without a valid element keeps its old
    values, and one without a degree of freedom its old variance.
    """
    scheme, layout = sizes.layout.scheme, sizes.layout
    xp = _namespace(found.mean)
    averaged = tuple(i for i in layout.kept if i not in layout.running)

    def grouped(values: Array) -> Array:
        return values.reshape(sizes.statistics_expanded)

    count = grouped(found.count)
    free = count - scheme.running_correction
    enough = free > 0
    rescaled = grouped(found.var)
    if scheme.scale != "l2":  # which has no divisor
        rescaled = rescaled * ((count - scheme.correction) / xp.where(enough, free, 1.0))
    results = []
    for old, new, weight in (
        (running_mean, grouped(found.mean), count),
        (running_var, rescaled, xp.where(enough, count, 0.0)),
    ):
        total = _sum(weight, averaged)
        # By shares: the product of a value and a count may overflow.
        average = _sum(new * (weight / xp.where(total > 0, total, 1.0)), averaged)
        wide = _cast(old, average.dtype).reshape(average.shape)
        moved = xp.where(total > 0, (1 - momentum) * wide + momentum * average, wide)
        results.append(_cast(moved.reshape(sizes.running_shape), old.dtype))
    return results[0], results[1]


def resolve_eps(scheme: Scheme, dtype: Any) -> float:
    """The number that eps=None stands for: the machine epsilon of the compute type.

    >>> resolve_eps(Scheme.rms_norm(), np.dtype("float16"))
    1.1920928955078125e-07
    """
    if scheme.eps is not None:
        return scheme.eps
    name = _name(dtype)
    return float(np.finfo(name if name in ("float64", "longdouble", "float128") else "float32").eps)


def residual_sum(
    x: Array, residual: Array, scheme: Scheme, seed: Array | None = None, dropout_p: float = 0.0
) -> Array:
    """h = residual + dropout(x), rounded once to the type of x; nothing is dropped without a seed.

    >>> x, residual = np.array([[1.0, 2.0, 4.0, 1.0]]), np.ones((1, 4))
    >>> residual_sum(x, residual, Scheme.layer_norm()).tolist()
    [[2.0, 3.0, 5.0, 2.0]]
    """
    kind = _compute_type(x)
    added = _cast(x, kind) if seed is None else dropout(x, scheme, seed, dropout_p)
    return _cast(_cast(residual, kind) + added, x.dtype)


def dropout(x: Array, scheme: Scheme, seed: Array, dropout_p: float) -> Array:
    """x / (1 - p) where an element is kept and 0 elsewhere, in the compute type.

    The element in column c of row r (the r-th group of the scheme, whose axes are the trailing
    ones) is dropped where its 32 random bits are below p 2^32: word c // 16 % 4 of Philox with the
    counter (c // 64 * 16 + c % 16, r) and the seed as key.

    >>> x = np.ones((1, 8), np.float32)
    >>> dropout(x, Scheme.layer_norm(), np.int64(0), 0.5).tolist()
    [[0.0, 2.0, 0.0, 2.0, 2.0, 0.0, 2.0, 2.0]]
    """
    xp = _namespace(x)
    sizes = scheme.sizes(tuple(x.shape))
    place = {} if xp is np else {"device": x.device}
    row = xp.arange(sizes.num_groups, dtype=xp.int64, **place).reshape(-1, 1)
    column = xp.arange(sizes.group_size, dtype=xp.int64, **place)
    number = column // 64 * 16 + column % 16
    seed = xp.asarray(seed)
    words = philox((number, number >> 32, row, row >> 32), (seed, seed >> 32))
    bits = words[0]
    for k in (1, 2, 3):
        bits = xp.where(column // 16 % 4 == k, words[k], bits)
    kept = (bits >= min(int(dropout_p * 2**32 + 0.5), 2**32 - 1)).reshape(tuple(x.shape))
    return xp.where(kept, _cast(x, _compute_type(x)) * (1 / (1 - dropout_p)), 0.0)


def philox(counter: tuple[Array, ...], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Philox4x32-10: four random words of 32 bits for a counter of four and a key of two.

    Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Words are
    the lower halves of int64 arrays.

    >>> [hex(word.item()) for word in philox((np.array([0]),) * 4, (np.array([0]),) * 2)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    half = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & half for word in counter)
    k0, k1 = (word & half for word in key)
    for _ in range(10):
        # Products of 64 bits in signed integers: they wrap, and the shift's sign is masked away.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (second >> 32) & half ^ c1 ^ k0, second & half
        c2, c3 = (first >> 32) & half ^ c3 ^ k1, first & half
        k0, k1 = (k0 + 0x9E3779B9) & half, (k1 + 0xBB67AE85) & half
    return c0, c1, c2, c3


class _Work:
    """One normalization under way: the tensor seen with every part of its axes as a dimension."""

    def __init__(
        self,
        x: Array,
        scheme: Scheme,
        mask: Array | None = None,
        running_mean: Array | None = None,
        running_var: Array | None = None,
    ) -> None:
        self.xp = xp = _namespace(x)
        self.scheme = scheme
        self.dtype = x.dtype
        self.sizes = sizes = scheme.sizes(tuple(x.shape))
        self.reduced = sizes.layout.reduced
        self.expanded = sizes.expanded
        self.valid: Array | None = None
        x = self.wide(x).reshape(self.expanded)
        if mask is not None:
            self.valid = xp.broadcast_to(mask, sizes.shape).reshape(self.expanded)
            # Before any arithmetic: NaN * 0 is NaN.
            x = xp.where(self.valid, x, 0.0)
        self.given = running_mean is not None
        self.unit: Array | float = 1.0 if self.given else self.power_of_two(x)
        self.count = self.counted()
        x = x * self.unit
        if self.given:
            mean = self.wide(running_mean).reshape(sizes.running_expanded)
            self.mean = mean if scheme.center else mean * 0.0
            self.value = x - self.mean
            self.variance = self.wide(running_var).reshape(sizes.running_expanded)
        else:
            self.measure(x)
        # base = V^h scales with unit^2h; the result is base^a, see exponents().
        h, a = exponents(scheme)
        eps = resolve_eps(scheme, self.dtype) * self.unit**h * self.unit**h
        self.factor = self.unit ** (-2 * h * a - 1)
        base = self.power(self.variance, h)
        self.base, self.inner = base, base + eps
        if scheme.eps_placement == "max":
            self.inner = xp.where(base > eps, base, eps)
        self.rate = self.power(self.inner, a)
        self.xhat = self.value * self.rate * self.factor

    def measure(self, x: Array) -> None:
        """Mean, the value that is scaled, the deviation that the variance sums, and the variance.

        The mean is taken of x - k with an element k of the group: exactly zero for a constant
        group, and of the size of the deviation otherwise. Then its own rounding is taken out.
        """
        scheme, xp = self.scheme, self.xp
        centred = x
        mean = self.sum(x) * 0.0
        if scheme.center or scheme.scale == "std":
            k = self.some_element(x)
            shifted = self.masked(x - k)
            first = self.mean_of(shifted)
            centred = self.masked(shifted - first)
            second = self.mean_of(centred)
            centred = self.masked(centred - second)
            mean = k + first + second
        self.mean = mean if scheme.center else mean * 0.0
        self.value = centred if scheme.center else x
        self.deviation = centred
        self.divisor: Array | float = 1.0
        if scheme.scale != "l2":
            free = self.count - scheme.correction
            self.divisor = xp.where(free > 0, free, 1.0)
        self.variance = self.sum(self.deviation * self.deviation) / self.divisor

    @property
    def slope(self) -> Array:
        """r'(V), zero where the variance is."""
        h, a = exponents(self.scheme)
        slope = a * self.power(self.inner, a - 1)
        if h != 1:
            slope = slope * h * self.power(self.base, 1 - 1 / h)
        if self.scheme.eps_placement == "max":
            slope = self.xp.where(self.inner == self.base, slope, 0.0)
        # Overflow, for a constant group and the smallest eps; its deviation is zero.
        return self.xp.where(self.xp.isfinite(slope) | (self.variance != 0), slope, 0.0)

    def moments(self) -> Moments:
        shape = self.sizes.statistics_shape
        if self.given:
            full = self.sizes.statistics_expanded
            mean, variance, rate = (
                self.xp.broadcast_to(v, full).reshape(shape)
                for v in (self.mean, self.variance, self.rate)
            )
            return Moments(mean, variance, rate, self.count.reshape(shape))
        h, a = exponents(self.scheme)
        return Moments(
            (self.mean / self.unit).reshape(shape),
            (self.variance / self.unit / self.unit).reshape(shape),
            (self.rate * self.unit ** (-2 * h * a)).reshape(shape),
            self.count.reshape(shape),
        )

    def power_of_two(self, x: Array) -> Array | float:
        """A factor per group that keeps the squares of float64 input from over- and underflow.

        Narrower types cannot do either in float64. An even power of two, so that it and its root
        are exact; no larger than eps allows, and neither the input times it may overflow.
        """
        if _name(self.dtype) != "float64" or 0 in self.expanded:
            return 1.0
        xp = self.xp
        x = x.detach() if xp is not np else x
        quarter = x * 0.25  # so that the difference of two of them is finite
        centred = self.scheme.center or self.scheme.scale == "std"
        spread = self.masked(quarter - self.some_element(quarter)) if centred else quarter
        largest, size = self.largest(spread), self.largest(quarter)
        floor = abs(resolve_eps(self.scheme, self.dtype)) ** (1 / (2 * exponents(self.scheme)[0]))
        _, exponent = xp.frexp(xp.where(largest > floor * 0.25, largest, floor * 0.25))
        _, least = xp.frexp(size)
        exponent = xp.where(exponent + 2 > least - 900, exponent + 2, least - 900)
        far = (xp.abs(exponent) > 400) & xp.isfinite(size)
        exponent = xp.where(far, exponent // 2 * 2, 0)
        exponent = xp.where(exponent > 1000, 1000, xp.where(exponent < -1000, -1000, exponent))
        return xp.ldexp(self.ones(largest), -exponent)

    def largest(self, values: Array) -> Array:
        """The largest magnitude of each group."""
        size = self.xp.abs(values)
        return self.xp.amax(size, axis=self.reduced, keepdims=True) if self.reduced else size

    def ones(self, like: Array) -> Array:
        return like * 0.0 + 1.0 if self.xp is np else self.xp.ones_like(like)

    def some_element(self, x: Array) -> Array:
        """An element of each group, a constant for differentiation; zero for an empty group."""
        if self.xp is not np:
            x = x.detach()
        if 0 in self.expanded:
            return self.sum(x)
        if self.valid is None:
            index = tuple(
                slice(0, 1) if i in self.reduced else slice(None) for i in range(len(self.expanded))
            )
            return x[index]
        if not self.reduced:
            return x
        lowest = self.xp.where(self.valid, x, -float("inf"))
        highest = self.xp.amax(lowest, axis=self.reduced, keepdims=True)
        return self.xp.where(highest == -float("inf"), 0.0, highest)

    def counted(self) -> Array:
        """The number of valid elements of each group, broadcastable against the statistics."""
        if self.valid is not None:
            return self.sum(self.wide(self.valid))
        full = self.sizes.statistics_expanded
        if self.xp is np:
            return np.full(full, float(self.sizes.group_size))
        anchor = self.anchor
        return self.xp.full(full, float(self.sizes.group_size), dtype=self.xp.float64,
                            device=anchor)  # fmt: skip

    def wide(self, values: Array) -> Array:
        """In the type of the computation."""
        if self.xp is np:
            return values.astype(np.longdouble if values.dtype == np.longdouble else np.float64)
        self.anchor = values.device
        return values.to(self.xp.float64)

    def rounded(self, xhat: Array) -> Array:
        """Rounded to the input's type where the scheme says so, straight through for gradients."""
        if self.scheme.rounding == "once":
            return xhat
        narrow = self.wide(_cast(xhat, self.dtype))
        return narrow if self.xp is np else xhat + (narrow - xhat).detach()

    def weight(self, weight: Array) -> Array:
        factor = self.wide(weight).reshape(self.sizes.affine_expanded)
        return factor + self.scheme.weight_offset if self.scheme.weight_offset else factor

    def affine(self, xhat: Array, weight: Array | None, bias: Array | None) -> Array:
        if weight is not None:
            xhat = xhat * self.weight(weight)
        if bias is not None:
            xhat = xhat + self.wide(bias).reshape(self.sizes.affine_expanded)
        return xhat

    def behind(
        self, grad: Array, weight: Array | None, bias: Array | None, activation: str | None
    ) -> Array:
        g = self.wide(grad).reshape(self.expanded)
        if activation is not None:
            g = g * derivative(self.affine(self.rounded(self.xhat), weight, bias), activation)
        return self.masked(g)

    def masked(self, values: Array) -> Array:
        return values if self.valid is None else self.xp.where(self.valid, values, 0.0)

    def sum(self, values: Array) -> Array:
        return _sum(values, self.reduced)

    def mean_of(self, values: Array) -> Array:
        values = self.sum(values)
        return values / self.xp.where(self.count > 0, self.count, 1.0)

    def sum_to_affine(self, values: Array) -> Array:
        affine = self.sizes.layout.affine
        return _sum(values, tuple(i for i in range(len(self.expanded)) if i not in affine))

    def power(self, values: Array, exponent: float) -> Array:
        """values ** exponent, and zero with zero gradient where values is zero."""
        if exponent == 1:
            return values
        zero = values == 0
        safe = self.xp.where(zero, 1.0, values)
        root = self.xp.sqrt(safe) if abs(exponent) == 0.5 else safe ** abs(exponent)
        return self.xp.where(zero, 0.0, root if exponent > 0 else 1.0 / root)


def exponents(scheme: Scheme) -> tuple[float, float]:
    """(h, a) such that what multiplies the centred value is (V^h + eps)^a, or max(V^h, eps)^a."""
    inside = scheme.eps_placement == "variance"
    if scheme.scale == "var":
        return 1, -1
    if scheme.scale == "sqrt_std":
        return (0.5, -0.5) if inside else (0.25, -1)
    return (1, -0.5) if inside else (0.5, -1)


def _sum(values: Array, dimensions: tuple[int, ...]) -> Array:
    # Without dimensions torch would sum over all of them.
    return values.sum(axis=dimensions, keepdims=True) if dimensions else values


def _namespace(x: Array) -> Any:
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def _name(dtype: Any) -> str:
    """The type's name without its byte order."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _compute_type(x: Array) -> Any:
    """float32 for half types."""
    xp = _namespace(x)
    return xp.float32 if x.dtype.itemsize < 4 else x.dtype


def _cast(values: Array, dtype: Any) -> Array:
    return values.astype(dtype) if isinstance(values, np.ndarray) else values.to(dtype)
