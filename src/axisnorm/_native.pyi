# csrc/bind.cpp, csrc/torch_door.cpp and csrc/torch_ops.cpp. Every address and shape is checked
# before the call.

from collections.abc import Callable
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
    activation: int,
    grad: Given,
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
def transpose(
    source: tuple[int, tuple[int, ...]], target: int, sizes: tuple[int, ...], element_size: int
) -> bool: ...
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
def add_forward(
    x: int,
    residual: int,
    weight: int,
    bias: int,
    y: int,
    h: int,
    stats: int,
    dropout_p: float,
    seed: int,
    rows: int,
    n: int,
    x_stride: int,
    residual_stride: int,
    y_stride: int,
    h_stride: int,
    dtype: int,
    weight_dtype: int,
    bias_dtype: int,
    center: bool,
    rounded: bool,
    eps: float,
    weight_offset: float,
    activation: int,
) -> None: ...
def add_backward(
    grad: int,
    grad_h: int,
    h: int,
    weight: int,
    stats: int,
    dh: int,
    dx: int,
    dweight: int,
    dbias: int,
    dropout_p: float,
    seed: int,
    rows: int,
    n: int,
    grad_stride: int,
    grad_h_stride: int,
    h_stride: int,
    dh_stride: int,
    dx_stride: int,
    dtype: int,
    weight_dtype: int,
    bias_dtype: int,
    center: bool,
    rounded: bool,
    eps: float,
    weight_offset: float,
) -> None: ...

# NumPy arrays and torch tensors; None where anything is unusual
def connect_arrays(functions: Any, given: dict[str, Any], /) -> bool: ...
def connect_schemes(given: dict[str, Any], /) -> None: ...
def connect(table: Any, watch: dict[str, Any], /) -> bool: ...
def connect_nodes(given: dict[str, Any], /) -> None: ...
def short_layer_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    activation: Any,
    out: Any = None,
    /,
) -> Any: ...
def short_rms_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any,
    eps: Any,
    weight_offset: Any,
    rounding: Any,
    activation: Any,
    out: Any = None,
    /,
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
    activation: Any,
    out: Any = None,
    /,
) -> Any: ...
def short_normalize(
    x: Any,
    scheme: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    activation: Any,
    out: Any = None,
    /,
) -> Any: ...
def node_forward(ctx: Any, x: Any, weight: Any, bias: Any, found: Any, /) -> Any: ...
def node_backward(ctx: Any, grad: Any, /) -> tuple[Any, ...]: ...
def quicken(node: type, /) -> None: ...
def connect_add(given: dict[str, Any], /) -> None: ...
def short_add_layer_norm(
    x: Any,
    residual: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    dropout_p: Any,
    training: Any,
    prenorm: Any,
    activation: Any,
    /,
) -> Any: ...
def short_add_rms_norm(
    x: Any,
    residual: Any,
    normalized_shape: Any,
    weight: Any,
    eps: Any,
    weight_offset: Any,
    rounding: Any,
    dropout_p: Any,
    training: Any,
    prenorm: Any,
    activation: Any,
    /,
) -> Any: ...
def add_node_forward(
    ctx: Any, x: Any, residual: Any, weight: Any, bias: Any, found: Any, /
) -> tuple[Any, Any]: ...
def add_node_backward(ctx: Any, grad: Any, grad_h: Any, /) -> tuple[Any, ...]: ...
def quicken_add(node: type, /) -> None: ...

# reused memory, for tensors or for arrays, see csrc/memory.h
def pool_most(tensors: bool, /) -> int: ...
def set_pool_most(tensors: bool, most: int, /) -> None: ...
def pool_kept(tensors: bool, /) -> int: ...
def clear_pool(tensors: bool, /) -> None: ...
def array_like(x: Any, bytes: int, by_rows: bool, /) -> Any: ...
def connect_storages(given: dict[str, Any], /) -> bool: ...
def keep_storage(storage: Any, dtype: Any, /) -> None: ...
def reuse(bytes: int, layout: tuple[Any, Any, Any], /) -> Any: ...  # None where there is none

# the operators, see _torch.py
def connect_ops(given: dict[str, Any], /) -> None: ...
def op_forward(
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    scheme: str,
    running_mean: Any = None,
    running_var: Any = None,
    activation: str | None = None,
    /,
) -> tuple[Any, Any]: ...
def connect_add_ops(given: dict[str, Any], /) -> None: ...
def op_add_forward_into(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    seed: Any,
    dropout_p: float,
    scheme: str,
    activation: str | None,
    y: Any,
    h: Any,
    stats: Any,
    /,
) -> None: ...
def op_add_backward_into(
    grad: Any,
    grad_h: Any,
    h: Any,
    weight: Any,
    bias: Any,
    seed: Any,
    stats: Any,
    dropout_p: float,
    scheme: str,
    dx: Any,
    dresidual: Any,
    dweight: Any,
    dbias: Any,
    /,
) -> None: ...
def bound(
    name: str,
    args: tuple[Any, ...],
    layouts: tuple[Any, ...],
    assert_layout: Callable[[Any, Any, Any], Any],
    /,
) -> Callable[..., None]: ...
def op_scale_into(weight: Any, var: Any, eps: float, scale: Any, /) -> None: ...
def op_forward_into(
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    scheme: str,
    running_mean: Any,
    running_var: Any,
    activation: str | None,
    y: Any,
    stats: Any,
    /,
) -> None: ...
def op_train(
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    scheme: str,
    running_mean: Any,
    running_var: Any,
    activation: str | None = None,
    /,
) -> tuple[Any, Any, Any, Any]: ...
def op_train_into(
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    scheme: str,
    running_mean: Any,
    running_var: Any,
    activation: str | None,
    y: Any,
    stats: Any,
    running_mean_out: Any,
    running_var_out: Any,
    /,
) -> None: ...
def op_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    running_mean: Any,
    running_var: Any,
    stats: Any,
    scheme: str,
    /,
) -> tuple[Any, Any, Any]: ...
def op_behind(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    running_mean: Any,
    running_var: Any,
    stats: Any,
    scheme: str,
    activation: str,
    /,
) -> Any: ...
def op_behind_into(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    running_mean: Any,
    running_var: Any,
    stats: Any,
    scheme: str,
    activation: str,
    behind: Any,
    /,
) -> None: ...
def op_backward_into(
    grad: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mask: Any,
    running_mean: Any,
    running_var: Any,
    stats: Any,
    scheme: str,
    dx: Any,
    dweight: Any,
    dbias: Any,
    /,
) -> None: ...

# the instruction set and the threads
def isa() -> str: ...
def set_isa(name: str) -> bool: ...
def isa_names() -> list[str]: ...
def isa_error() -> str | None: ...
def stream_from(bytes: int, /) -> int: ...
def read_singly_from(bytes: int, /) -> int: ...
def max_threads() -> int: ...
def openmp_source() -> str: ...
def set_torch_openmp(path: str, /) -> None: ...
