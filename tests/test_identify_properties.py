"""Random schemes: what identify says of their outputs has to be true."""

import math

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from axisnorm import identify, reference
from axisnorm.lens.explain import partition
from axisnorm.lens.identifying.hypotheses import CENTRED, UNCENTRED, affine_choices, sharings

TYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
FORMULAS = [formula for formula in CENTRED + UNCENTRED if formula.passes == 1]


def elements(scheme, shape):
    sizes = scheme.layout(len(shape)).sizes(shape)
    return partition(sizes, sizes.layout.kept)


def same_formula(scheme, other):
    return all(
        getattr(scheme, name) == getattr(other, name)
        for name in ("center", "scale", "correction", "eps_placement")
    )


@st.composite
def computations(draw, weighted):
    """An input, an output, the scheme, and its parameters."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=1, max_size=4)))
    assume(8 <= math.prod(shape) <= 1024)
    choices = [sharing for sharing in sharings(shape) if sharing.group_size > 1]
    assume(choices)
    sharing = draw(st.sampled_from(choices))
    plain = draw(st.booleans())
    formula = draw(st.sampled_from([CENTRED[0], UNCENTRED[0]] if plain else FORMULAS))
    assume(sharing.group_size > formula.correction)
    usual = st.sampled_from((1e-5, 1e-6, 1e-3, 1e-12, 0.0))
    eps = draw(usual | st.floats(-8, -2).map(lambda power: 10.0**power))
    dtype = draw(st.sampled_from(TYPES))
    wide = dtype in (np.float64, np.float32)
    scale = 10.0 ** draw(st.floats(-3, 1)) if wide else 1.0
    offset = draw(st.floats(-30 if wide else -2, 30 if wide else 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=sharing.expanded) * scale
    if draw(st.booleans()):
        kept = [n if i in sharing.kept else 1 for i, n in enumerate(sharing.expanded)]
        x = x * np.exp(random.normal(size=kept))
    x = (x + offset * scale).reshape(shape).astype(dtype)
    dimensions = ()
    if weighted:
        places = affine_choices(sharing)
        assume(places)
        dimensions = draw(st.sampled_from(places))
    scheme = sharing.scheme(
        dimensions,
        **formula.constants,
        eps=eps,
        weight_offset=draw(st.sampled_from((0.0, 1.0))) if weighted else 0.0,
        rounding=draw(st.sampled_from(("once", "before_affine"))) if weighted else "once",
    )
    parameters = {}
    if weighted:
        own = scheme.layout(len(shape)).sizes(shape).affine_shape
        parameters["weight"] = (random.uniform(0.5, 1.5, own) - scheme.weight_offset).astype(dtype)
        if draw(st.booleans()):
            parameters["bias"] = random.normal(size=own).astype(dtype)
    y, _ = reference.forward(x, scheme, **parameters)
    seen = y.astype(np.float64)
    assume(np.isfinite(seen).all() and np.ptp(seen) > 0 and np.ptp(x.astype(np.float64)) > 0)
    return x, y, scheme, parameters


def check(found, x, scheme):
    """The scheme, or its set of axes, is among what fits, and its eps in the interval."""
    shape = x.shape
    fits = [candidate for candidate in found.candidates if candidate.fits]
    mine = [c for c in fits if elements(c.scheme, shape) == elements(scheme, shape)]
    assert mine, (found.conclusion, [str(c.scheme) for c in fits])
    alike = [c for c in mine if same_formula(c.scheme, scheme)]
    for candidate in alike:
        low, high = candidate.eps_interval
        assert low <= scheme.eps <= high, (str(candidate.scheme), low, high)
    best_is_mine = elements(found.best.scheme, shape) == elements(scheme, shape)
    assert best_is_mine or alike


# An eps that no one would choose is refused where it alone gives the scale of one group.
def is_shown(x, scheme):
    groups = reference.moments(x.astype(np.float64), scheme).var
    return groups.size > 1 or scheme.eps <= 1e-3 * float(groups.min())


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(computations(weighted=False))
def test_without_weights(computation):
    x, y, scheme, _ = computation
    assume(is_shown(x, scheme))
    found = identify(x, y)
    if found.best is None:
        # Only where every element is scaled alike, so that no mean matters.
        assert not scheme.center or "map" not in found.conclusion
        x, y = x.astype(np.float64), y.astype(np.float64)
        ratio = float((x * y).sum() / (x * x).sum())
        assert np.abs(y - ratio * x).max() <= 0.02 * np.abs(y).max()
        return
    check(found, x, scheme)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(computations(weighted=True))
def test_with_given_weights(computation):
    x, y, scheme, parameters = computation
    assume(is_shown(x, scheme))
    found = identify(x, y, **parameters)
    assume(found.best is not None or scheme.center)
    check(found, x, scheme)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(computations(weighted=True))
def test_with_fitted_weights(computation):
    x, y, scheme, parameters = computation
    found = identify(x, y)
    assume(found.best is not None)
    best = found.best
    sizes = best.scheme.layout(x.ndim).sizes(x.shape)
    # Whatever was found gives this output, with no more numbers than the truth has.
    weight = None if best.weight is None else best.weight.reshape(sizes.affine_shape)
    bias = None if best.bias is None else best.bias.reshape(sizes.affine_shape)
    wide = x.astype(np.float64)
    if best.first is not None:
        wide, _ = reference.forward(wide, best.first)
    again, _ = reference.forward(wide, best.scheme.replace(weight_offset=0.0), weight, bias)
    off = np.abs(again - y.astype(np.float64))
    if not any("as after a" in note for note in found.notes):
        assert off.max() <= max(1.01 * best.residual, 2 * best.tolerance) + 1e-12
    # Two elements a group are plus and minus one number: weights and formulas are confounded.
    if scheme.layout(x.ndim).sizes(x.shape).group_size > 4 and x.size > 64:
        assert best.free_parameters <= sum(p.size for p in parameters.values()) + 1
