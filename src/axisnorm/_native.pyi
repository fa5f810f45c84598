# csrc/bind.cpp and csrc/torch_door.cpp. Every address and shape is checked before the call.

from typing import Any

def address(array: Any) -> int: ...
def forward(
    x: int,
    weight: int,
    bias: int,
    y: int,
    stats: int,
    var: int,
    rows: int,
    n: int,
    x_stride: int,
    y_stride: int,
    dtype: int,
    weight_dtype: int,
    bias_dtype: int,
    center: bool,
    rounded: bool,
    eps: float,
    divisor: float,
    weight_offset: float,
) -> None: ...
def backward(
    grad: int,
    x: int,
    weight: int,
    stats: int,
    dx: int,
    dweight: int,
    dbias: int,
    rows: int,
    n: int,
    grad_stride: int,
    x_stride: int,
    dx_stride: int,
    dtype: int,
    weight_dtype: int,
    bias_dtype: int,
    center: bool,
    rounded: bool,
    eps: float,
    divisor: float,
    weight_offset: float,
) -> None: ...

# torch tensors; None where anything is unusual
def connect(table: Any, watch: dict[str, Any], /) -> bool: ...
def short_layer_norm(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any, /) -> Any: ...
def short_rms_norm(
    x: Any, normalized_shape: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any, /
) -> Any: ...
def node_forward(ctx: Any, x: Any, weight: Any, bias: Any, found: Any, /) -> Any: ...
def short_backward(ctx: Any, grad: Any, /) -> tuple[Any, ...] | None: ...
def quicken(node: type, /) -> None: ...

# the instruction set and the threads
def isa() -> str: ...
def set_isa(name: str) -> bool: ...
def isa_names() -> list[str]: ...
def isa_error() -> str | None: ...
def max_threads() -> int: ...
def openmp_source() -> str: ...
