"""ONNX graphs written by hand, for the tests of audits and of fusing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save_model

FLOAT = TensorProto.FLOAT
Array = np.ndarray[Any, Any]


def parameter(*shape: int, seed: int = 1) -> Array:
    """Numbers between 0.5 and 1.5."""
    return (0.5 + np.random.default_rng(seed).random(shape)).astype(np.float32)


class Builder:
    """Nodes in a row, each a call: ``b.Sub("x", "m")`` gives the name of its result."""

    def __init__(self, opset: int = 17, dtype: int = FLOAT) -> None:
        self.opset = opset
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}

    def constant(self, value: Any, name: str = "") -> str:
        """An initializer; floating ones in the type of the graph."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = array.astype(helper.tensor_dtype_to_np_dtype(self.dtype))
        name = name or f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def node(self, kind: str, *inputs: str, outputs: int = 1, **said: Any) -> str:
        """Any operator."""
        names = [f"{kind.lower()}{len(self.nodes)}_{i}" for i in range(outputs)]
        domain = said.pop("domain", "")
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **said))
        return names[0]

    def __getattr__(self, kind: str) -> Any:
        if not kind[0].isupper():
            raise AttributeError(kind)
        return lambda *inputs, **said: self.node(kind, *inputs, **said)

    def reduce(self, kind: str, x: str, axes: Sequence[int], keepdims: int = 1) -> str:
        """A reduction, its axes where the opset wants them."""
        since = 13 if kind == "ReduceSum" else 18
        if self.opset >= since:
            return self.node(kind, x, self.constant(np.asarray(axes, np.int64)), keepdims=keepdims)
        return self.node(kind, x, axes=list(axes), keepdims=keepdims)

    def save(
        self,
        path: Path,
        out: str | Iterable[str],
        x: Sequence[int | str] = (2, 3, 8),
        inputs: Mapping[str, tuple[int, Sequence[int | str]]] | None = None,
        relu: bool = True,
    ) -> Path:
        """Write the model; a Relu stands behind every output, so that nothing ends by chance."""
        outs = [out] if isinstance(out, str) else list(out)
        nodes, names = list(self.nodes), []
        for place, name in enumerate(outs):
            if relu:
                nodes.append(helper.make_node("Relu", [name], [f"y{place}"]))
            names.append(f"y{place}" if relu else name)
        given = inputs or {"x": (self.dtype, x)}
        graph = helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(k, t, s) for k, (t, s) in given.items()],
            [helper.make_tensor_value_info(name, self.dtype, None) for name in names],
            [numpy_helper.from_array(v, k) for k, v in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
        return path


def layer_norm(
    b: Builder,
    x: str = "x",
    *,
    axes: Sequence[int] = (-1,),
    keepdims: int = 1,
    mean: str = "ReduceMean",
    size: int = 8,
    square: str = "pow",
    root: str = "div",
    eps: str = "inside",
    value: float = 1e-5,
    center: bool = True,
    sample: bool = False,
    weight: Array | None = None,
    bias: Array | None = None,
    offset: float = 0.0,
) -> str:
    """LayerNorm or RMSNorm written out, in the spelling that is asked for."""

    def averaged(name: str) -> str:
        if mean == "ReduceMean":
            found = b.reduce("ReduceMean", name, axes, keepdims)
        elif mean == "sum and divide":
            found = b.Div(b.reduce("ReduceSum", name, axes, keepdims), b.constant(float(size)))
        else:
            found = b.Mul(b.reduce("ReduceSum", name, axes, keepdims), b.constant(1.0 / size))
        return restored(found)

    def restored(name: str) -> str:
        if keepdims:
            return name
        if b.opset >= 13:
            return str(b.Unsqueeze(name, b.constant(np.asarray(axes, np.int64))))
        return str(b.Unsqueeze(name, axes=list(axes)))

    d = b.Sub(x, averaged(x)) if center else x
    if square == "pow":
        v = averaged(b.Pow(d, b.constant(2.0)))
    elif square == "mul":
        v = averaged(b.Mul(d, d))
    elif square == "sum of squares":
        v = b.Div(restored(b.reduce("ReduceSumSquare", d, axes, keepdims)), b.constant(float(size)))
    elif square == "length":
        v = b.Pow(restored(b.reduce("ReduceL2", d, axes, keepdims)), b.constant(2.0))
        v = b.Mul(v, b.constant(1.0 / size))
    else:  # the mean square minus the squared mean
        m = averaged(x)
        v = b.Sub(averaged(b.Mul(x, x)), b.Mul(m, m))
    if sample:
        v = b.Mul(v, b.constant(size / (size - 1.0)))
    e = b.constant(value)
    if eps == "inside":
        v = b.Add(v, e)
    if root == "pow":
        y = b.Mul(d, b.Pow(v, b.constant(-0.5)))
    else:
        s = b.Sqrt(v)
        s = b.Add(s, e) if eps == "outside" else b.Max(s, e) if eps == "max" else s
        y = b.Div(d, s) if root == "div" else b.Mul(d, b.Reciprocal(s))
    if weight is not None:
        w = b.constant(weight)
        y = b.Mul(y, b.Add(w, b.constant(offset)) if offset else w)
    return b.Add(y, b.constant(bias)) if bias is not None else str(y)
