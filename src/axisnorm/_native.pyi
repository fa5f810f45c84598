# csrc/bind.cpp and csrc/torch_door.cpp. Every address and shape is checked before the call.

from typing import Any, TypeAlias

def address(array: Any) -> int: ...

Given: TypeAlias = tuple[int, tuple[int, ...]]
"""A tensor's address, 0 where there is none, and its strides in elements."""

# why there is no plan for tensors of these strides, or None
def forward(
    axes: bytes,
    x: Given,
    y: Given,
    mask: Given,
    weight: int,
    bias: int,
    running_mean: int,
    running_var: int,
    stats: int,
    var: int,
    count: int,
    constants: tuple[Any, ...],
) -> str | None: ...
def backward(
    axes: bytes,
    grad: Given,
    x: Given,
    dx: Given,
    mask: Given,
    weight: int,
    bias: int,
    running_mean: int,
    running_var: int,
    stats: int,
    dweight: int,
    dbias: int,
    constants: tuple[Any, ...],
) -> str | None: ...
def loops(axes: bytes, strides: list[int], masked: bool, running: bool) -> str: ...
def move(
    mean: int,
    var: int,
    mean_dtype: int,
    var_dtype: int,
    channels: int,
    averaged: int,
    inner: int,
    stats: int,
    group_var: int,
    count: int,
    group_size: float,
    correction: float,
    running_correction: float,
    momentum: float,
    dtype: int,
) -> None: ...

# torch tensors; None where anything is unusual
def connect(table: Any, watch: dict[str, Any], /) -> bool: ...
def short_layer_norm(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any, /) -> Any: ...
def short_rms_norm(
    x: Any, normalized_shape: Any, weight: Any, eps: Any, weight_offset: Any, rounding: Any, /
) -> Any: ...
def short_channel_norm(
    x: Any,
    weight: Any,
    bias: Any,
    kind: int,
    groups: Any,
    eps: Any,
    running_mean: Any,
    running_var: Any,
    batch: Any,
    momentum: Any,
    /,
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
