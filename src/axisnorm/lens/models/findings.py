"""What is suspicious about a norm in a model: rules, each with a stable code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...scheme import Scheme, Sizes
from ..identify import Identification, affine_axes, in_words
from .declared import activation_of

if TYPE_CHECKING:
    from .measures import Measured

__all__ = ["CODES", "Finding", "findings_of", "mixed_eps"]

CODES = {
    "declared-mismatch": "the output is not what the class computes",
    "class-name-lies": "the class is called after another norm than it computes",
    "batch-statistics-in-eval": "in eval mode the statistics are still the batch's",
    "layout-mismatch": "the channels stand in another axis than the norm takes them from",
    "degenerate-statistics": "one element has a mean of its own: the output is the bias",
    "batch-of-one": "the statistics of the batch are those of one sample",
    "padding-in-statistics": "padding is part of the statistics",
    "constant-groups": "elements that share a mean are all equal in some groups",
    "normalized-twice": "the input is another norm's output, with nothing between",
    "implausible-eps": "eps is not a small positive number",
    "eps-too-small": "eps is 0 in the type of the computation or of the data",
    "eps-dominates": "eps is much larger than most variances of this input",
    "sample-deviation": "the variance is divided by n - 1",
    "eps-outside-root": "eps is added to the deviation, not to the variance",
    "wrong-root": "the divisor is no standard deviation",
    "half-precision-overflow": "squares or values of this input exceed float16",
    "running-statistics-untouched": "running statistics are those of a new module",
    "running-statistics-mismatch": "running statistics do not fit this input",
    "non-finite-parameters": "a weight or a bias is NaN or infinite",
    "dead-channels": "weights are 0: the output is the bias whatever the input",
    "weight-around-zero": "the weight looks stored as weight - 1, but 1 is not added",
    "weight-around-one": "the weight looks stored as it is, but 1 is added",
    "framework-momentum": "momentum is another framework's, whose meaning is the reverse",
    "framework-eps": "eps is another framework's default, momentum torch's",
    "eps-undetermined": "neither the class nor this input says its eps",
    "mixed-eps": "norms of one kind have several eps",
    "bypassed": "a fused operator computed the norm instead of the module",
    "not-run": "the norm did not run on this input",
    "not-verified": "what the norm computes could not be shown on this input",
    "generated-data": "a norm inside a graph's body was held against random data",
    "deprecated-operator": "the operator has another meaning than its successor",
    "instance-norm-as-group-norm": "InstanceNormalization between Reshapes computes a GroupNorm",
    "scalar-scale": "the result is multiplied by one number",
    "loses-digits": "at this input the output is off from the norm's own formula",
    "unit-weight": "the weight is 1 throughout and the bias 0",
    "custom-operators": "the graph holds operators that are not run",
    "model-not-run": "the model could not be run as a whole",
}
"""Every finding's code with what it means."""

LARGEST_EPS = 0.01
"""Above it eps changes the output of unit variance by more than half a per cent."""
HALF_OF_LEAST_FLOAT16 = 2.0**-25
"""Positive numbers up to this are rounded to 0 in float16."""
FLOAT16_LARGEST = 65504.0
FLOAT16_SQUARE = math.sqrt(FLOAT16_LARGEST)
MANY = 8
"""Of fewer weights a mean says nothing."""


@dataclass(frozen=True)
class Finding:
    """Something suspicious, or worth knowing."""

    code: str
    severity: str
    """``"error"``: wrong. ``"warning"``: probably not meant. ``"note"``: worth knowing."""
    message: str
    remedy: str
    path: str = ""
    """The norm's path, empty for the model as a whole."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "code": self.code,
            "severity": self.severity,
            "path": self.path,
            "message": self.message,
            "remedy": self.remedy,
        }


def findings_of(
    path: str,
    module: Any,
    declared: Scheme | None,
    identification: Identification | None,
    shape: Sequence[int] | None,
    problem: str | None,
    *,
    eps_undetermined: bool = False,
    measured: Measured | None = None,
    generated: bool = False,
    kind: str = "",
    dtype: str = "",
    training: bool | None = None,
) -> Iterator[Finding]:
    """The findings about one norm.

    Args:
        module: the norm module, None for a function.
        shape: of its input, None if it did not run.
        problem: why nothing could be verified, None if it could.
        eps_undetermined: nothing says the eps of what fits.
        measured: what data and parameters showed, None where it was not looked.
        generated: whether the model's inputs were made up.
        kind: what the norm is called where there is no module.
        dtype: of the input.
        training: whether what computes it was in train mode, None where that is not known.
    """
    best = identification.best if identification else None
    scheme = best.scheme if best and not eps_undetermined else declared
    name = type(module).__name__ if module is not None else kind or "this call"
    if module is not None:
        training = module.training
    if problem is not None:
        activated = activation_of(module) is not None
        remedy = "Audit with an input on which it runs plainly."
        yield Finding(
            "not-verified",
            "note" if activated else "warning",
            f"Not verified: {problem}.",
            "Audit a module of the same parameters without activation." if activated else remedy,
            path,
        )
    elif identification is not None and identification.tells_nothing:
        yield Finding(
            "not-verified",
            "warning",
            "Not verified: this input tells nothing apart, means over other axes give the same "
            "output.",
            "Audit with an input that varies along all its axes.",
            path,
        )
        best = None
    elif identification is not None and declared is not None and shape is not None:
        yield from _mismatch(path, module, declared, identification, shape)
    elif identification is not None and best is None:
        yield Finding(
            "not-verified",
            "warning",
            f"{name} {'is called a norm' if 'norm' in name.lower() else 'looks like a norm'}, "
            "but fits none that was tried.",
            "Read what its forward computes.",
            path,
        )
    unclear = declared is None and identification is not None and identification.center_unclear
    if unclear and best is not None:
        yield Finding(
            "not-verified",
            "note",
            f"LayerNorm and RMSNorm both give the output of {name}: the means of this input are 0.",
            "Audit with an input whose means are not 0.",
            path,
        )
    if eps_undetermined:
        yield Finding(
            "eps-undetermined",
            "note",
            f"The eps of {name} is not determined: on this input it makes no difference that "
            "rounding would not.",
            "Read its forward, or audit with an input of a smaller scale.",
            path,
        )
    lies = []
    if identification is not None and best is not None and module is not None and shape:
        lies = [*_name(path, module, best.scheme, identification, shape)]
    yield from lies
    if best is not None and declared is None and not any(f.severity != "note" for f in lies):
        yield from _formula(path, name, best.scheme, shape)
    if scheme is None:
        return
    yield from _eps(path, module, scheme)
    yield from _momentum(path, module, declared if kind else None)
    if shape is not None:
        yield from _statistics(path, module, scheme, shape, training)
    if measured is not None:
        yield from _eps_at_run_time(path, name, scheme, measured, dtype)
        yield from _values(path, name, scheme, measured, dtype)
        yield from _running(path, measured, generated)
        yield from _parameters(path, name, scheme, measured)


def _mismatch(
    path: str, module: Any, declared: Scheme, identification: Identification, shape: Sequence[int]
) -> Iterator[Finding]:
    mine = next((c for c in identification.candidates if c.scheme == declared), None)
    if mine is None or mine.fits:
        return
    name = type(module).__name__ if module is not None else "the call"
    best = identification.best
    instead = f" It fits '{best.scheme}': {best.name}." if best else " It fits no norm tried."
    yield Finding(
        "declared-mismatch",
        "error",
        f"The output is not what {name} says ('{declared}'): the largest difference is "
        f"{mine.residual:.2g}.{instead}",
        "Look for an overridden forward, or a hook that changes the output.",
        path,
    )


def _name(
    path: str, module: Any, scheme: Scheme, identification: Identification, shape: Sequence[int]
) -> Iterator[Finding]:
    kind = type(module)
    if kind.__module__.startswith(("torch.nn.", "axisnorm.")):
        return
    name = kind.__name__.lower().replace("_", "")
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    reduced, last = sizes.layout.reduced_axes, len(shape) - 1
    trailing = tuple(range(last + 1 - len(reduced), last + 1)) == reduced
    per_token = trailing and set(reduced) <= {*(affine_axes(sizes) or reduced)}
    said = "LayerNorm" if "layernorm" in name else "RMSNorm" if "rmsnorm" in name else ""
    for word in ("BatchNorm", "InstanceNorm", "GroupNorm"):
        said = word if word.lower() in name else said
    what = in_words(scheme, shape)
    usual = scheme.scale == "auto" and scheme.correction == 0
    usual = usual and scheme.eps_placement == "variance"
    problems = []
    if said == "LayerNorm" and not scheme.center and usual and per_token:
        yield Finding(
            "class-name-lies",
            "note",
            f"{kind.__name__} is an RMSNorm: it subtracts no mean ('{scheme}').",
            "Port it as RMSNorm.",
            path,
        )
        return
    if said in ("LayerNorm", "RMSNorm"):
        if scheme.center != (said == "LayerNorm"):
            problems.append("subtracts a mean" if scheme.center else "subtracts no mean")
        if not per_token and reduced != (1,):
            problems.append(f"takes {what}")
    elif (said == "BatchNorm" and 0 not in reduced) or (
        said in ("InstanceNorm", "GroupNorm") and 0 in reduced
    ):
        problems.append(f"takes {what}")
    if said and scheme.correction:
        problems.append(f"divides the variance by n - {scheme.correction:g}")
    inside = scheme.replace(eps_placement="variance")
    others = [other.replace(eps=scheme.eps) for other in identification.indistinguishable]
    if said and scheme != inside and inside not in others:
        problems.append("adds eps outside the root")
    if said and scheme.scale != "auto":
        problems.append(f"divides by {scheme.scale}")
    if problems:
        yield Finding(
            "class-name-lies",
            "warning",
            f"This {kind.__name__} is not torch's {said}: it {' and '.join(problems)} "
            f"('{scheme}').",
            f"When porting its weights, use this scheme, not torch.nn.{said}.",
            path,
        )


def _formula(
    path: str, name: str, scheme: Scheme, shape: Sequence[int] | None
) -> Iterator[Finding]:
    """What is unusual about a formula, where a name has not been blamed for it."""
    if scheme.scale in ("var", "sqrt_std"):
        divisor = "the variance" if scheme.scale == "var" else "the root of the deviation"
        yield Finding(
            "wrong-root", "error", f"{name} divides by {divisor}, not by the deviation.",
            "Divide by sqrt(variance + eps).", path,
        )  # fmt: skip
    if scheme.correction and shape is not None:
        n = scheme.layout(len(shape)).sizes(tuple(shape)).group_size
        factor = math.sqrt((n - scheme.correction) / n) if n > scheme.correction else 0.0
        yield Finding(
            "sample-deviation",
            "warning",
            f"{name} divides the variance by n - {scheme.correction:g}: with n = {n} its output "
            f"is {factor:.4g} of that of the usual formula.",
            "Use var(correction=0), as torch's norms do, or keep it for the weights' sake.",
            path,
        )
    if scheme.eps_placement == "std" and scheme.eps:
        yield Finding(
            "eps-outside-root",
            "note",
            f"{name} adds eps={scheme.eps:g} to the deviation, not to the variance.",
            f"In torch's formula this is about eps={scheme.eps**2:.3g} for constant groups.",
            path,
        )


def _eps(path: str, module: Any, scheme: Scheme) -> Iterator[Finding]:
    eps = scheme.eps
    if eps is None or 0 < eps <= LARGEST_EPS:
        return
    if eps == 0:
        what = "a vector of zeros" if scheme.scale == "l2" else "a constant group"
        yield Finding("implausible-eps", "note", f"eps is 0: {what} divides by zero.",
                      "Give 1e-5.", path)  # fmt: skip
        return
    remedy = "Give 1e-5."
    channels = getattr(module, "num_features", None)
    if channels and eps == int(eps) and eps > 1 and channels % int(eps) == 0:
        remedy = (
            f"The second argument of {type(module).__name__} is eps. "
            f"If {int(eps)} groups were meant, use GroupNorm({int(eps)}, {channels})."
        )
    message = f"eps={eps:g} is added to variances"
    message += ": it decides the scale of the output." if eps > 0 else " and is negative."
    yield Finding("implausible-eps", "error", message, remedy, path)


def _eps_at_run_time(
    path: str, name: str, scheme: Scheme, measured: Measured, dtype: str
) -> Iterator[Finding]:
    eps = scheme.eps
    if eps is None or eps <= 0:
        return
    if eps < HALF_OF_LEAST_FLOAT16 and (measured.squares_in or dtype) == "float16":
        said = f"eps={eps:g} is 0 in float16. "
        remedy = "Compute in float32, or give an eps of at least 1e-7."
        if measured.squares_in:
            severity = "error"
            said += f"{name} computes in it, and divides a constant group by zero."
        else:
            severity = "note"
            said += (
                f"{name} adds it in float32, but whatever computes this norm in float16 itself "
                "divides a constant group by zero."
            )
        yield Finding("eps-too-small", severity, said, remedy, path)
    inside = scheme.eps_placement == "variance" and eps <= LARGEST_EPS
    # sqrt(V / (V + eps)) is less than a half below a third of eps.
    if measured.variance is not None and inside and 0 < measured.variance < eps / 3:
        yield Finding(
            "eps-dominates",
            "note",
            f"The median variance of its groups is {measured.variance:.2g}, less than "
            f"eps={eps:g}: most of them come out at less than half the normalized size.",
            "Check the scale of the input, or give a smaller eps.",
            path,
        )


FRAMEWORKS = {0.99: "Keras's and Flax's default", 0.997: "TensorFlow's in its model zoo",
              0.9997: "TensorFlow slim's", 0.999: "Caffe's default",
              0.9: "Paddle's and MXNet's default"}  # fmt: skip
"""Whose momentum it is: there the weight of the old value."""


def _momentum(path: str, module: Any, declared: Scheme | None) -> Iterator[Finding]:
    if hasattr(module, "running_mean"):
        momentum, eps = getattr(module, "momentum", None), getattr(module, "eps", None)
    elif module is None and declared is not None and declared.axes.startswith("[n]"):
        momentum, eps = declared.momentum, declared.eps
    else:
        return
    if eps == 1e-3 and momentum == 0.1:
        yield Finding(
            "framework-eps",
            "note",
            "eps=0.001 is the default of Keras and TensorFlow, momentum=0.1 torch's.",
            "If it was ported from Keras, momentum=0.01 belongs to it; if not, eps=1e-5.",
            path,
        )
    if momentum is None or not 0.9 <= momentum < 1:
        return
    whose = FRAMEWORKS.get(round(momentum, 6))
    smell = f", {whose}" if whose else ""
    if momentum == 0.99 and eps == 1e-3:
        smell = " with eps=0.001, Keras's defaults"
    yield Finding(
        "framework-momentum",
        "warning",
        f"momentum={momentum:g}{smell}: in torch it is the weight of the new batch, so the "
        "running statistics follow nearly the last batch alone.",
        f"Give momentum={1 - momentum:.6g} for an average that keeps {momentum:g} of the old.",
        path,
    )


def _statistics(
    path: str, module: Any, scheme: Scheme, shape: Sequence[int], training: bool | None
) -> Iterator[Finding]:
    sizes = scheme.layout(len(shape)).sizes(tuple(shape))
    shares_batch = 0 in sizes.layout.reduced_axes and len(shape) > 1
    if scheme.statistics == "batch":
        keeps = module is None or hasattr(module, "running_mean")
        if training is False and shares_batch and keeps:
            yield Finding(
                "batch-statistics-in-eval",
                "warning",
                "In eval mode it still takes the statistics of the batch: what a sample gives "
                "depends on the samples beside it.",
                "Keep running statistics (track_running_stats=True), or use a norm without "
                "them, such as GroupNorm.",
                path,
            )
        if shares_batch and shape[0] == 1 and hasattr(module, "running_mean"):
            yield Finding(
                "batch-of-one",
                "warning",
                f"The batch {tuple(shape)} has one sample: its statistics are an InstanceNorm's, "
                "and the running ones follow single samples.",
                "Give more samples, or use a norm without batch statistics, such as GroupNorm.",
                path,
            )
        yield from _few_elements(path, scheme, sizes)
    channels = getattr(module, "num_features", None)
    if channels is None:
        return
    name = type(module).__name__
    if len(shape) >= 3 and shape[1] != channels == shape[-1]:
        yield Finding(
            "layout-mismatch",
            "warning",
            f"{name}({channels}) takes axis 1 for its channels, but axis "
            f"{len(shape) - 1} of {tuple(shape)} has {channels}: {in_words(scheme, shape)}.",
            "Transpose the input to (N, C, ...) and back.",
            path,
        )
    elif name == "InstanceNorm1d" and len(shape) == 2 and shape[0] != channels == shape[1]:
        yield Finding(
            "layout-mismatch",
            "warning",
            f"{name}({channels}) takes {tuple(shape)} for the channels and positions of one "
            f"sample: {in_words(scheme, shape)}, not a norm of {channels} channels.",
            "Give (N, C, L). For rows of features use LayerNorm.",
            path,
        )


def _few_elements(path: str, scheme: Scheme, sizes: Sizes) -> Iterator[Finding]:
    """Groups of one or two elements: what comes out hardly depends on what goes in."""
    if not sizes.num_groups:
        return
    if sizes.group_size == 1:
        result = "bias" if scheme.center else "sign"
        what = f"mean of its own: the output is the {result} whatever the input"
        if not scheme.center:
            what = "root mean square of its own: the output is the sign of the input"
        yield Finding(
            "degenerate-statistics",
            "warning",
            f"Each element of {tuple(sizes.shape)} has a {what}.",
            "Check the axes of the input.",
            path,
        )
    elif sizes.group_size == 2 and scheme.center:
        yield Finding(
            "degenerate-statistics",
            "note",
            f"Two elements of {tuple(sizes.shape)} share a mean: but for eps the output is 1 and "
            "-1 whatever the input.",
            "Check the axes of the input.",
            path,
        )


def _values(
    path: str, name: str, scheme: Scheme, measured: Measured, dtype: str
) -> Iterator[Finding]:
    if measured.padded > 0:
        yield Finding(
            "padding-in-statistics",
            "warning",
            f"{measured.padded:.0%} of its input is padding, which counts in its statistics: what "
            "a sample gives depends on how far it was padded.",
            "Pass a mask (axisnorm's norms take one), or normalize each position by itself.",
            path,
        )
    if 0 < measured.constant_groups < measured.groups:
        yield Finding(
            "constant-groups",
            "note",
            f"In {measured.constant_groups} of {measured.groups} groups all elements are equal: "
            "their output says nothing of the input, and gradients are scaled by 1 / sqrt(eps).",
            "Check whether they are padding or dead channels.",
            path,
        )
    if measured.follows is not None:
        yield Finding(
            "normalized-twice",
            "note",
            f"Its input is the output of '{measured.follows}', with nothing between.",
            "One of the two may be left out, or was meant to stand elsewhere.",
            path,
        )
    largest, squares = measured.largest, measured.squares_in
    if squares == "float16" and largest > FLOAT16_SQUARE:
        yield Finding(
            "half-precision-overflow",
            "error",
            f"{name} squares in float16 values up to {largest:.3g}: squares above 65504 are "
            "infinite, and the output is 0 or NaN.",
            "Compute in float32.",
            path,
        )
    elif largest > FLOAT16_LARGEST and dtype in ("float32", "bfloat16", "float64"):
        yield Finding(
            "half-precision-overflow",
            "note",
            f"Its input reaches {largest:.3g}: in float16, whose largest number is 65504, the "
            "model cannot run.",
            "Stay with bfloat16 or float32.",
            path,
        )
    elif squares is not None and squares == dtype == "float32" and largest > FLOAT16_SQUARE:
        yield Finding(
            "half-precision-overflow",
            "note",
            f"{name} squares in the type of its input, which reaches {largest:.3g}: were the model "
            "cast to float16, squares above 65504 would be infinite.",
            "Cast to float32 inside of it first.",
            path,
        )


def _running(path: str, measured: Measured, generated: bool) -> Iterator[Finding]:
    found = measured.running
    if found is None:
        return
    if found.untouched:
        yield Finding(
            "running-statistics-untouched",
            "warning",
            "All running means are 0 and all running variances 1, those of a new module: in eval "
            "mode it only scales and shifts.",
            "Load the statistics with the weights, or train it.",
            path,
        )
        return
    (shift, worst), (ratio, furthest) = found.shift, found.ratio
    # The mean of n elements is itself uncertain by 1 / sqrt(n) deviations.
    allowed = 1.0 + 3.0 / math.sqrt(max(found.elements, 1))
    if found.elements < 8 or (shift <= allowed and 1 / 4 <= ratio <= 4):
        return
    inputs = " The inputs were made up: real ones may fit." if generated else ""
    yield Finding(
        "running-statistics-mismatch",
        "note" if generated else "warning",
        f"The running statistics do not fit this input: means are off by {shift:.2g} deviations "
        f"in the median channel and {worst:.2g} in the worst, variances are {ratio:.2g} and "
        f"{furthest:.2g} times the running ones.{inputs}",
        "Check the scale and the preparation of the inputs, and that the statistics were loaded.",
        path,
    )


def _parameters(path: str, name: str, scheme: Scheme, measured: Measured) -> Iterator[Finding]:
    for said, values in (("weight", measured.weight), ("bias", measured.bias)):
        if values is not None and values.not_finite:
            yield Finding(
                "non-finite-parameters",
                "error",
                f"{values.not_finite} of {values.size} elements of its {said} are NaN or infinite.",
                "Load the checkpoint again, or one from before training diverged.",
                path,
            )
    weight = measured.weight
    if weight is None or weight.not_finite:
        return
    if not scheme.weight_offset and weight.zeros:
        how_many = f"{weight.zeros} of {weight.size}"
        which = "All" if weight.zeros == weight.size else how_many
        remedy = "Channels that are dead can be pruned."
        if weight.zeros == weight.size:
            remedy = ("Right for a residual branch that starts at zero; if 1 + weight was meant "
                      "(Gemma), add the 1.")  # fmt: skip
        yield Finding(
            "dead-channels",
            "warning",
            f"{which} weights of {name} are 0: there the output is the bias whatever the input.",
            remedy,
            path,
        )
        if weight.zeros == weight.size:
            return
    if weight.size < MANY:
        return
    negative = weight.negative / weight.size
    plain = not scheme.weight_offset and scheme.statistics == "batch"
    if plain and abs(weight.mean) < 0.25 and negative >= 0.1:
        yield Finding(
            "weight-around-zero",
            "warning",
            f"The weight of {name} has mean {weight.mean:.2g}, deviation {weight.deviation:.2g} "
            f"and {negative:.0%} negative elements, and is multiplied as it is: a checkpoint that "
            "stores weight - 1, as Gemma's, looks like this.",
            "If it is one, add 1 to the weight.",
            path,
        )
    if scheme.weight_offset == 1 and abs(weight.mean - 1) <= 0.1 and weight.deviation <= 0.2:
        yield Finding(
            "weight-around-one",
            "warning",
            f"The weight of {name} has mean {weight.mean:.3g} and deviation "
            f"{weight.deviation:.2g}, and 1 is added to it: a checkpoint that stores the weight as "
            "it is, as Llama's, looks like this.",
            "If it is one, subtract 1 from the weight.",
            path,
        )


def mixed_eps(norms: Sequence[tuple[str, float]]) -> Iterator[Finding]:
    """The finding that norms of one kind, given as (kind, eps), have several eps."""
    by_kind: dict[str, dict[float, int]] = {}
    for kind, eps in norms:
        counts = by_kind.setdefault(kind, {})
        counts[eps] = counts.get(eps, 0) + 1
    for kind, counts in by_kind.items():
        if len(counts) > 1:
            said = ", ".join(f"{eps:g} ({count} x)" for eps, count in sorted(counts.items()))
            yield Finding(
                "mixed-eps",
                "note",
                f"{kind} stands in this model with several eps: {said}.",
                "Check it against the model this one was ported from.",
            )
