"""Whether a forward takes another way for other sizes or values than it was probed with.

No number of probes shows what happens above a threshold that none of them reaches. A run on a
fake tensor does: it has symbols for sizes and no values, so that every comparison of a size is
recorded and every look at a value is refused.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

from .probing import NotProved, fresh_copy

__all__ = ["check_branches"]


def check_branches(
    module: torch.nn.Module, shape: tuple[int, ...], free: frozenset[int], dtype: torch.dtype
) -> None:
    """Refuse a forward that compares sizes with numbers, or looks at values.

    Args:
        shape: one that the module takes.
        free: the axes that have any size.

    Raises:
        NotProved: it does one of them.
    """
    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    kinds = [
        DimDynamic.DYNAMIC if axis in free else DimDynamic.STATIC for axis in range(len(shape))
    ]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[var-annotated]
    x = mode.from_tensor(torch.zeros(shape, dtype=dtype), symbolic_context=context)
    copied = fresh_copy(module)
    try:
        with mode, torch.no_grad():
            type(module).forward(copied, x)
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        raise NotProved("what its forward does depends on its input's values") from error
    except Exception:
        # What has no fake form, as code outside torch, is judged by the probes alone.
        return
    if sizes.guards:
        raise NotProved("what its forward does depends on its input's sizes")
