"""What is refuted before anything is fitted: never what was computed, and most of what was not."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from axisnorm import identify, reference
from axisnorm.lens.identifying.evidence import pair_of
from axisnorm.lens.identifying.fitting import _family, _Fitter, _Lead
from axisnorm.lens.identifying.hypotheses import (
    CENTRED,
    UNCENTRED,
    affine_choices,
    distinct_sharings,
    sharings,
    whole,
)
from axisnorm.lens.identifying.refuting import Lines, none_between

TYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
FORMULAS = [formula for formula in CENTRED + UNCENTRED if formula.passes == 1]


def fitter_of(pair):
    return _Fitter(pair, lambda sharing: (), None, None, pair.x.size)


@st.composite
def computations(draw):
    """Input and output, the sharing, the weight's dimensions, the formula and its eps."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 12)), min_size=2, max_size=4)))
    size = int(np.prod(shape))
    assume(16 <= size <= 2048)
    choices = [sharing for sharing in sharings(shape) if sharing.group_size > 1]
    assume(choices)
    sharing = draw(st.sampled_from(choices))
    places = affine_choices(sharing)
    assume(places)
    dimensions = draw(st.sampled_from(places))
    formula = draw(st.sampled_from(FORMULAS))
    assume(sharing.group_size > formula.correction)
    eps = draw(st.just(0.0) | st.floats(-12, 3).map(lambda power: 10.0**power))
    dtype = draw(st.sampled_from(TYPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    wide = dtype in (np.float64, np.float32)
    x = random.normal(size=sharing.expanded)
    kept = [n if i in sharing.kept else 1 for i, n in enumerate(sharing.expanded)]
    x = x * np.exp(
        draw(st.sampled_from((0.0, 1.0, 3.0 if wide else 1.0))) * random.normal(size=kept)
    )
    x = (x + draw(st.floats(-100 if wide else -3, 100 if wide else 3))).reshape(shape).astype(dtype)
    scheme = sharing.scheme(
        dimensions, **formula.constants, eps=eps,
        rounding=draw(st.sampled_from(("once", "before_affine"))),
    )  # fmt: skip
    own = scheme.layout(len(shape)).sizes(shape).affine_shape
    weight = (random.normal(size=own) * draw(st.sampled_from((1.0, 1e-3, 30.0)))).astype(dtype)
    bias = (random.normal(size=own) * draw(st.sampled_from((0.0, 1.0, 1e2)))).astype(dtype)
    with np.errstate(over="ignore"):
        y = reference.forward(x, scheme, weight, bias)[0]
    assume(np.isfinite(y.astype(np.float64)).all() and np.ptp(y.astype(np.float64)) > 0)
    assume(np.ptp(x.astype(np.float64)) > 0)
    return x, y, sharing, dimensions, formula, eps


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(computations())
def test_what_was_computed_is_never_refuted(computation):
    x, y, sharing, dimensions, formula, _ = computation
    pair = pair_of(x, y)
    statistics = pair.statistics(sharing)
    lines = Lines.of(pair)
    for own in (None, statistics):
        assert not lines.refute(sharing, (*sharing.kept, *dimensions), pair.noise.summed, own)
    (refuted,) = fitter_of(pair).refuted([(statistics, dimensions)])
    assert not refuted[int(formula.scale != "var"), int(not formula.center), 1]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(computations(), st.integers(0, 2**32 - 1))
def test_nor_is_it_under_a_mask(computation, seed):
    x, y, sharing, dimensions, formula, _ = computation
    mask = np.random.default_rng(seed).random(x.shape) < 0.7
    pair = pair_of(x, np.where(mask, y, np.zeros_like(y))).with_mask(mask, statistics=False)
    statistics = pair.statistics(sharing)
    fixed = *sharing.kept, *dimensions
    assert not Lines.of(pair).refute(sharing, fixed, pair.noise.summed, statistics)
    (refuted,) = fitter_of(pair).refuted([(statistics, dimensions)])
    assert not refuted[int(formula.scale != "var"), int(not formula.center), 1]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(computations(), st.floats(-0.99, 0.99), st.floats(-4, 0))
def test_an_eps_that_passes_lies_between_those_tried(computation, place, power):
    x, y, sharing, dimensions, formula, eps = computation
    assume(eps and formula == formula.without_constant_factor())
    pair = pair_of(x, y)
    fitter = fitter_of(pair)
    statistics = pair.statistics(sharing)
    rows = np.prod([sharing.expanded[i] for i in dimensions])
    assume(pair.x.size // rows >= 4)
    lead = _Lead(
        sharing, dimensions, formula.center, True, _family(formula), 0.0, 1, False, statistics
    )  # fmt: skip
    for trial in fitter.trials(lead):
        if trial.formula == formula and trial.passes(eps):
            reach = 0.9 * 10.0**power
            around = math.log(eps) + reach * (np.linspace(-1, 1, 9) + place)
            square, allowed = trial.squares(np.exp(around).tolist())
            assert not none_between(square / allowed)


def test_no_eps_is_left_between_those_of_what_is_no_norm():
    # The sum of a parabola and what never fits; of two weights with other values of eps.
    points = np.linspace(-1, 1, 9)[:, None]
    assert none_between(5.0 + 8.0 * np.square(points - 0.3))
    assert none_between(1e3 * np.square(points - np.array([[-0.9, 0.9]])))
    assert not none_between(1e3 * np.square(points - np.array([[0.31, 0.32]])))
    assert not none_between(np.full((9, 1), np.nan))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(64, 96), (8, 6, 10, 12)])
def test_nearly_everything_is_refuted_of_what_is_no_norm(shape, dtype):
    random = np.random.default_rng(0)
    x = random.normal(size=shape).astype(dtype)
    wide = x.astype(np.float64)
    for y in (random.normal(size=shape), np.tanh(wide), np.exp(wide)):
        pair = pair_of(x, y.astype(dtype))
        fitter, left, tried = fitter_of(pair), 0, 0
        for sharing in distinct_sharings(shape):
            if sharing.split is None:
                left += sum(1 for _ in fitter.leads(sharing))
                tried += 4 * len(fitter.choices(sharing))
        assert left <= 0.03 * tried, (left, tried)


def test_an_eps_beside_any_variances_is_not_refuted():
    # Where variances differ much no single factor is near that of every eps.
    x = np.random.default_rng(1).normal(size=(60, 40)) * 10.0 ** np.linspace(-4, 4, 60)[:, None]
    (sharing,) = [s for s in distinct_sharings(x.shape) if s.split is None and s.reduced == (1,)]
    for eps in 10.0 ** np.arange(-8, 8):
        scheme = sharing.scheme((1,), eps=float(eps))
        y = reference.forward(x, scheme, np.linspace(0.5, 2, 40), np.linspace(-1, 1, 40))[0]
        pair = pair_of(x, y)
        (refuted,) = fitter_of(pair).refuted([(pair.statistics(sharing), (1,))])
        assert not refuted[:, 0, 1].any()


def test_a_map_of_few_elements_for_each_number_is_seen_in_half_types():
    # Errors of large outputs move the numbers by more than rounding leaves small ones.
    random = np.random.default_rng(5)
    x = random.normal(size=(64, 256)).astype(np.float16)
    weight, bias = random.uniform(0.5, 1.5, 256), random.normal(size=256)
    found = identify(x, (x.astype(np.float64) * weight + bias).astype(np.float16))
    assert found.best is None and "a per-channel affine map" in found.reason


def test_a_weight_for_each_element_of_few_samples_needs_no_careless_arithmetic():
    random = np.random.default_rng(6)
    x = random.normal(size=(4, 8, 8, 8)).astype(ml_dtypes.bfloat16)
    scheme = next(s for s in sharings(x.shape) if s.reduced == (1, 2, 3)).scheme((1, 2, 3))
    weight = random.uniform(0.5, 1.5, (8, 8, 8)).astype(ml_dtypes.bfloat16)
    bias = random.normal(size=(8, 8, 8)).astype(ml_dtypes.bfloat16)
    found = identify(x, reference.forward(x, scheme, weight, bias)[0])
    assert found.best.axes == found.best.affine_axes == (1, 2, 3)
    assert not any("computation in" in note for note in found.notes)


def test_one_element_off_every_line_is_among_those_that_are_looked_at():
    """A sample by chance alone missed it, and weights were fitted to no purpose."""
    x = np.random.default_rng(0).normal(size=(512, 256))
    changed = x.copy()
    changed[317, 5] += 1.0
    for y, refuted in ((x, False), (changed, True)):
        pair = pair_of(x, y)
        rows = whole(pair.shape, [1])
        assert Lines.of(pair).refute(rows, (0,), pair.noise.worst) == refuted
