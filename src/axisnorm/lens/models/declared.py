"""What a module or a function says that it computes: its class and arguments read as a Scheme."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...scheme import ArgumentError, Scheme, as_scheme

__all__ = ["activation_of", "declared_scheme", "function_scheme"]


def declared_scheme(module: Any, ndim: int | None = None) -> Scheme | None:
    """The scheme of a norm module of torch.nn or axisnorm.nn or their subclasses, else None.

    ``ndim`` is the number of the input's axes: torch's InstanceNorm takes inputs without the
    batch axis too.

    >>> import torch
    >>> declared_scheme(torch.nn.GroupNorm(2, 6))
    Scheme('n (g=2 [c]) [...]; affine=g c')
    >>> declared_scheme(torch.nn.Linear(2, 6)) is None
    True
    """
    torch = sys.modules["torch"]
    nn = torch.nn
    instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    unbatched = instance and ndim is not None and ndim == module._get_no_batch_dim()
    if isinstance(module, nn.LayerNorm):
        found = Scheme.layer_norm(ndim=len(module.normalized_shape), eps=module.eps)
    elif isinstance(module, nn.RMSNorm):
        found = Scheme.rms_norm(ndim=len(module.normalized_shape), eps=module.eps)
    elif isinstance(module, nn.GroupNorm):
        found = Scheme.group_norm(module.num_groups, eps=module.eps)
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        make = Scheme.instance_norm if instance else Scheme.batch_norm
        # InstanceNorm uses its running statistics only if it was told to keep some, BatchNorm
        # whenever it has them.
        stored = module.track_running_stats if instance else module.running_mean is not None
        running = stored and not module.training
        found = make(
            eps=module.eps,
            momentum=module.momentum,
            statistics="running" if running else "batch",
        )
        found = found.replace(axes="c [...]") if unbatched else found
    else:
        # The modules of axisnorm.nn that torch.nn has none of.
        own = getattr(type(module), "scheme", None)
        if not isinstance(own, property) or not isinstance(module.scheme, Scheme):
            return None
        found = module.scheme
    parameters = [getattr(module, name, None) for name in ("weight", "bias")]
    # Where running statistics are used, affine says along which axes they vary.
    if parameters == [None, None] and found.statistics == "batch":
        return found.replace(affine="")
    return found


def activation_of(module: Any) -> str | None:
    """What a module of axisnorm.nn applies to its norm, which its scheme does not speak of."""
    own = sys.modules.get("axisnorm.nn")
    return module.activation if own is not None and isinstance(module, own._Traced) else None


def function_scheme(function: Any, given: Mapping[str, Any], ndim: int | None = None) -> Scheme:
    """The scheme that a norm function of torch or axisnorm computes with these arguments.

    ``ndim`` is the number of the input's axes, for functions that are told an axis.

    Raises:
        ArgumentError: it is no such function, or misses the argument that decides the scheme.
    """
    name = getattr(function, "__name__", type(function).__name__)
    home = (getattr(function, "__module__", None) or "").split(".")[0]
    constants = {
        key: given[key] for key in ("eps", "weight_offset", "rounding", "momentum") if key in given
    }
    if home not in ("torch", "axisnorm"):
        name = f"{home}.{name}"
    if name == "normalize" and home == "axisnorm":
        if "scheme" not in given:
            raise ArgumentError(
                "normalize computes what its scheme says. None came. "
                "Give functools.partial(normalize, scheme='... [d]'), or the scheme itself."
            )
        return as_scheme(given["scheme"])
    if name == "normalize":
        return _lengths(given, ndim)
    if name in ("layer_norm", "rms_norm"):
        make = Scheme.layer_norm if name == "layer_norm" else Scheme.rms_norm
        shape = given.get("normalized_shape")
        sizes = shape if shape is None or isinstance(shape, int) else tuple(shape)
        return make(sizes, **constants)
    if name == "group_norm":
        if "num_groups" not in given:
            raise ArgumentError(
                "group_norm computes what its num_groups says. None came. "
                "Give functools.partial(group_norm, num_groups=4), or Scheme.group_norm(4)."
            )
        return Scheme.group_norm(given["num_groups"], **constants)
    if name == "instance_norm":
        running = not given.get("use_input_stats", True)
        return Scheme.instance_norm(statistics="running" if running else "batch", **constants)
    if name == "batch_norm":
        running = not given.get("training", False)
        return Scheme.batch_norm(statistics="running" if running else "batch", **constants)
    if name == "layer_norm_2d":
        return Scheme.layer_norm_2d(**constants)
    raise ArgumentError(
        "Norm functions are those of torch.nn.functional and axisnorm. "
        f"'{name}' is none of them. Give a Scheme or its text, as in '... [d]'."
    )


def _lengths(given: Mapping[str, Any], ndim: int | None) -> Scheme:
    """What torch.nn.functional.normalize computes: x over its length along ``dim``."""
    power, dims = given.get("p", 2.0), given.get("dim", 1)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if power != 2 or ndim is None or not all(-ndim <= dim < ndim for dim in dims):
        raise ArgumentError(
            "functional.normalize is a norm of this family for p=2 and axes of the input. "
            f"p={power} and dim={given.get('dim', 1)} came for {ndim} axes. Give p=2 and such axes."
        )
    shared = {dim % ndim for dim in dims}
    names = [f"[a{i}]" if i in shared else f"a{i}" for i in range(ndim)]
    return Scheme(
        " ".join(names),
        center=False,
        scale="l2",
        eps=given.get("eps", 1e-12),
        eps_placement="max",
    )
