"""Times axisnorm against other libraries' norms, forward in float32, and writes one JSON.

The peers are onnxruntime, jax.jit, numba and torch.compile, those of them that are installed.
numba, which computes on NumPy arrays, is compared with axisnorm on arrays, the others on tensors.
As in run.py all run in one process in interleaved rounds of blocks of about 20 ms; a ratio is the
median over the rounds of the peer's time / axisnorm's within a round: above 1 axisnorm is faster.
Results are compared with axisnorm's before anything is timed.

    python bench/peers.py                     # all, to bench/results/<cpu>-peers.json
    python bench/peers.py --only rms_norm --peers numba,jax --rounds 5 --out /tmp/x.json
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import axisnorm
from axisnorm.lens.timing import BLOCK, Call, Race, block, machine, undisturbed

RESULTS = Path(__file__).parent / "results"
SHAPES = ((1, 768), (8, 768), (128, 768), (4096, 768), (8192, 1024), (16384, 4096))
EPS = 1e-5
TOLERANCE = 1e-4
# Worker threads spin on after a call, and double the time of whoever comes next with threads of its
# own. On two cores libgomp's have used 9 ms of processor time until they sleep, onnxruntime's 35,
# which takes longer where others use the cores too.
PAUSE = 0.03  # seconds, at least
# A worker that was woken may begin on its caller's core, and is moved after a few milliseconds: on
# a virtual machine of two cores a call of 10 us took 400 until then.
WARM = 0.01  # seconds

Calls = dict[str, Call]
"""Variants of one peer; the fastest is raced."""

INPUTS = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
}


def inputs(op: str, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Standard normal values, by name, in the order of the operation's arguments."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": shape, "residual": shape}
    return {
        name: torch.randn(sizes.get(name, shape[1:]), generator=generator) for name in INPUTS[op]
    }


OWN = {False: "axisnorm", True: "axisnorm on arrays"}
"""The names of axisnorm's calls, by whether they take NumPy arrays."""


def own(op: str, given: dict[str, Tensor], on_arrays: bool) -> Call:
    function: Any = getattr(axisnorm, op)
    x, *others = (t.numpy() for t in given.values()) if on_arrays else given.values()
    shape = x.shape[-1:]
    if op == "add_layer_norm":
        # The peers return the sum too.
        residual, *others = others
        return partial(function, x, residual, shape, *others, EPS, prenorm=True)
    return partial(function, x, shape, *others, EPS)


def compiled(op: str, given: dict[str, Tensor]) -> Calls:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = residual + x
        return F.layer_norm(h, x.shape[-1:], weight, bias, EPS), h

    # Inductor's pool of compiling processes would be other processes' load in the first rounds.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Otherwise each shape adds an entry to the guards that every later call goes through.
    torch.compiler.reset()
    functions: dict[str, Any] = {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "add_layer_norm": add_layer_norm,
    }
    return {"default": partial(torch.compile(functions[op], dynamic=False), *given.values())}


def jax_jit(op: str, given: dict[str, Tensor]) -> Calls:
    # XLA's name for the number of threads of its pool, which is read when the client starts.
    os.environ.setdefault("NPROC", str(torch.get_num_threads()))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax: Any = importlib.import_module("jax")

    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + EPS) * weight + bias

    def rms_norm(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * weight

    def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        h = residual + x
        return layer_norm(h, weight, bias), h

    functions = {"layer_norm": layer_norm, "rms_norm": rms_norm, "add_layer_norm": add_layer_norm}
    function = jax.jit(functions[op])
    arrays = [jax.device_put(t.numpy()) for t in given.values()]

    def call() -> Any:
        return function(*arrays).block_until_ready()

    def call_pair() -> Any:
        # jax.block_until_ready walks a tree of Python objects; the methods cost next to nothing.
        y, h = function(*arrays)
        return y.block_until_ready(), h.block_until_ready()

    return {"default": call_pair if op == "add_layer_norm" else call}


@cache
def _numba_functions() -> dict[tuple[str, str], Callable[..., Any]]:
    """By operation and variant; one for all shapes, as compiling takes seconds."""
    numba: Any = importlib.import_module("numba")
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    prange, one, zero = numba.prange, np.float32(1), np.float32(0)

    def layer_norm(x: Any, weight: Any, bias: Any, eps: Any) -> Any:
        rows, n = x.shape
        y = np.empty_like(x)
        scale = np.float32(1 / n)
        for i in prange(rows):
            total = zero
            for j in range(n):
                total += x[i, j]
            mean = total * scale
            squares = zero
            for j in range(n):
                centred = x[i, j] - mean
                squares += centred * centred
            rstd = one / np.sqrt(squares * scale + eps)
            for j in range(n):
                y[i, j] = (x[i, j] - mean) * rstd * weight[j] + bias[j]
        return y

    def rms_norm(x: Any, weight: Any, eps: Any) -> Any:
        rows, n = x.shape
        y = np.empty_like(x)
        scale = np.float32(1 / n)
        for i in prange(rows):
            squares = zero
            for j in range(n):
                squares += x[i, j] * x[i, j]
            rstd = one / np.sqrt(squares * scale + eps)
            for j in range(n):
                y[i, j] = x[i, j] * rstd * weight[j]
        return y

    def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> Any:
        rows, n = x.shape
        y = np.empty_like(x)
        h = np.empty_like(x)
        scale = np.float32(1 / n)
        for i in prange(rows):
            total = zero
            for j in range(n):
                added = residual[i, j] + x[i, j]
                h[i, j] = added
                total += added
            mean = total * scale
            squares = zero
            for j in range(n):
                centred = h[i, j] - mean
                squares += centred * centred
            rstd = one / np.sqrt(squares * scale + eps)
            for j in range(n):
                y[i, j] = (h[i, j] - mean) * rstd * weight[j] + bias[j]
        return y, h

    # Starting the threads costs more than eight rows, so numba may do without (prange is range
    # then), as the others do.
    return {
        (function.__name__, variant): numba.njit(fastmath=True, parallel=variant == "parallel")(
            function
        )
        for function in (layer_norm, rms_norm, add_layer_norm)
        for variant in ("parallel", "serial")
    }


def numba_jit(op: str, given: dict[str, Tensor]) -> Calls:
    arrays = [t.numpy() for t in given.values()]
    return {
        variant: partial(function, *arrays, np.float32(EPS))
        for (name, variant), function in _numba_functions().items()
        if name == op
    }


ONNX_NODES = {
    "layer_norm": (("LayerNormalization", "", 17),),
    # The second is the first's name before opset 23. An onnxruntime without a kernel for the first
    # either refuses it or computes it by parts. Both names are registered in ONNX's own domain.
    "rms_norm": (("RMSNormalization", "", 23), ("SimplifiedLayerNormalization", "", 17)),
    "add_layer_norm": (("SkipLayerNormalization", "com.microsoft", 17),),
}


def _onnx_model(node_type: str, domain: str, opset: int, given: dict[str, Tensor]) -> bytes:
    """One node; weight and bias are constants, as in an exported model."""
    helper: Any = importlib.import_module("onnx.helper")
    numpy_helper: Any = importlib.import_module("onnx.numpy_helper")
    kind = importlib.import_module("onnx").TensorProto.FLOAT
    shape = list(given["x"].shape)
    # Between y and h stand the mean and the deviation, which nobody asks for.
    outputs = ["y", "", "", "h"] if "residual" in given else ["y"]
    node = helper.make_node(node_type, list(given), outputs, domain=domain, epsilon=EPS)
    graph = helper.make_graph(
        [node],
        node_type,
        [helper.make_tensor_value_info(k, kind, shape) for k in ("x", "residual") if k in given],
        [helper.make_tensor_value_info(k, kind, shape) for k in outputs if k],
        [numpy_helper.from_array(given[k].numpy(), k) for k in ("weight", "bias") if k in given],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    # The newest onnx writes a format that an older onnxruntime does not read.
    oldest = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=oldest)
    return bytes(model.SerializeToString())


def onnxruntime(op: str, given: dict[str, Tensor]) -> Calls:
    runtime: Any = importlib.import_module("onnxruntime")
    errors = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # a refused model is caught below

    def variant(model: bytes) -> Call:
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for wanted in session.get_inputs():
            value = runtime.OrtValue.ortvalue_from_numpy(given[wanted.name].numpy())
            binding.bind_ortvalue_input(wanted.name, value)
        outputs = []
        for wanted in session.get_outputs():
            y = np.empty(given["x"].shape, np.float32)
            binding.bind_output(wanted.name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
            outputs.append(y)

        result = outputs if len(outputs) > 1 else outputs[0]

        def call() -> Any:
            session.run_with_iobinding(binding)
            return result

        return call

    calls: Calls = {}
    refusals = []
    for node_type, domain, opset in ONNX_NODES[op]:
        try:
            calls[node_type] = variant(_onnx_model(node_type, domain, opset, given))
        except (errors.Fail, errors.InvalidGraph, errors.NotImplemented) as refused:
            refusals.append(refused)
    if not calls:
        raise refusals[0]
    return calls


@dataclass(frozen=True)
class Peer:
    """Another library: what has to be installed, and the calls of an operation."""

    name: str
    distributions: tuple[str, ...]
    calls: Callable[[str, dict[str, Tensor]], Calls]
    threads: str
    """Whose they are. axisnorm, torch, and numba after torch, share one libgomp."""
    on_arrays: bool = False
    """Whether NumPy arrays are what it computes on."""

    def installed(self) -> bool:
        return all(importlib.util.find_spec(name) for name in self.distributions)

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in self.distributions}


# Those with the same threads stand together, axisnorm's first, for as few pauses as possible.
PEERS = (
    Peer("numba", ("numba",), numba_jit, "libgomp", on_arrays=True),
    Peer("torch.compile", ("torch",), compiled, "libgomp"),
    Peer("onnxruntime", ("onnxruntime", "onnx"), onnxruntime, "onnxruntime"),
    Peer("jax", ("jax", "jaxlib"), jax_jit, "XLA"),
)


def difference(actual: Any, expected: Any) -> float:
    """The largest of all outputs; NaN where one has a NaN."""
    if isinstance(expected, Tensor):
        actual, expected = (actual,), (expected,)
    return max(
        float(np.abs(np.asarray(a) - np.asarray(e)).max())
        for a, e in zip(actual, expected, strict=True)
    )


def settle() -> None:
    """Waits for the threads of this process to fall asleep, but not for ones that never do."""
    for _ in range(30):
        before = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - before < 0.001:
            return


@dataclass(frozen=True)
class Contestant:
    call: Call
    threads: str

    def timed(self, count: int) -> float:
        """Seconds of a call in a block. The calls before it wake threads that have slept."""
        started = time.perf_counter()
        while time.perf_counter() - started < WARM:
            self.call()
        return block(self.call, count)

    def count(self) -> int:
        """The number of calls in a block."""
        return max(1, int(BLOCK / max(self.timed(3), 1e-7)))


def settled_counts(contestants: dict[str, Contestant]) -> dict[str, int]:
    counts = {}
    for name, contestant in contestants.items():
        settle()
        counts[name] = contestant.count()
    return counts


def fastest(variants: dict[str, Contestant]) -> str:
    """The name of the variant with the smallest of three blocks.

    Also between variants the threads have to settle: each onnxruntime session has its own.
    """
    if len(variants) == 1:
        return next(iter(variants))
    counts = settled_counts(variants)
    best = dict.fromkeys(variants, float("inf"))
    for name in [*variants] * 3:
        settle()
        best[name] = min(best[name], variants[name].timed(counts[name]))
    return min(best, key=best.__getitem__)


def one_round(contestants: dict[str, Contestant], counts: dict[str, int]) -> dict[str, float]:
    """Seconds of a call of each. The last of the round before had the threads of the last here."""
    *_, last = contestants.values()
    threads = last.threads
    times = {}
    for name, contestant in contestants.items():
        if contestant.threads != threads:
            settle()
            threads = contestant.threads
        times[name] = contestant.timed(counts[name])
    return times


def race(contestants: dict[str, Contestant], rounds: int) -> Race:
    counts = settled_counts(contestants)
    return undisturbed(lambda: one_round(contestants, counts), rounds)


def compete(op: str, shape: tuple[int, int], peers: list[Peer], rounds: int) -> dict[str, Any]:
    """One cell: its row in the JSON."""
    given = inputs(op, shape)
    contestants = {
        name: Contestant(own(op, given, on_arrays), "libgomp") for on_arrays, name in OWN.items()
    }
    chosen = {}
    expected = contestants[OWN[False]].call()
    for peer in peers:
        calls = peer.calls(op, given)
        variants = {name: Contestant(call, peer.threads) for name, call in calls.items()}
        for name, variant in variants.items():
            worst = difference(variant.call(), expected)
            if not worst < TOLERANCE:
                raise SystemExit(f"{peer.name} ({name}), {op} on {shape}: differs by {worst:.1e}")
        chosen[peer.name] = fastest(variants)
        contestants[peer.name] = variants[chosen[peer.name]]
    # Its memory is what axisnorm's next outputs reuse.
    del expected
    found = race(contestants, rounds)
    medians = {name: found.seconds(name).median * 1e6 for name in contestants}
    return {
        "op": op,
        "dtype": "float32",
        "shape": list(shape),
        "axisnorm_us": round(medians[OWN[False]], 2),
        "axisnorm_on_arrays_us": round(medians[OWN[True]], 2),
        "peers": {
            peer.name: {
                "us": round(medians[peer.name], 2),
                "ratio": round(found.ratio(peer.name, OWN[peer.on_arrays]).median, 3),
                "variant": chosen[peer.name],
            }
            for peer in peers
        },
        "noisy_rounds": found.noisy,
    }


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def chosen_peers(text: str, parser: argparse.ArgumentParser) -> list[Peer]:
    known = [peer.name for peer in PEERS]
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no peer {', '.join(unknown)}: there are {', '.join(known)}")
    return [peer for peer in PEERS if peer.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = chosen_peers(options.peers, parser)
    ops = [op for op in INPUTS if options.only in op]
    if not ops:
        parser.error(f"no operation {options.only}: there are {', '.join(INPUTS)}")
    peers = [peer for peer in wanted if peer.installed()]
    missing = [peer.name for peer in wanted if peer not in peers]
    if not peers:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    # The table is wider than the 80 columns that rich takes a file for.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name in missing:
        console.print(f"{name}: not installed")
    info = machine()
    info["peers"] = {peer.name: peer.versions() for peer in peers}
    if options.out is None:
        words = re.sub(r"\W+", "-", info["cpu"].lower()).strip("-")
        options.out = RESULTS / f"{words}-peers.json"
    options.out.parent.mkdir(exist_ok=True, parents=True)
    table = Table(
        "operation",
        "shape",
        "axisnorm\nus",
        "on arrays\nus",
        caption="ratio: the peer's time / axisnorm's",
    )
    for peer in peers:
        table.add_column(f"{peer.name}\nus (ratio)", justify="right")
    results = []
    with torch.no_grad():
        for op in ops:
            for shape in SHAPES:
                row = compete(op, shape, peers, options.rounds)
                results.append(row)
                # After each cell: a run that is stopped keeps what it has.
                stored = {"machine": info, "results": results}
                options.out.write_text(json.dumps(stored, indent=1) + "\n")
                table.add_row(
                    op, "x".join(map(str, shape)), microseconds(row["axisnorm_us"]),
                    microseconds(row["axisnorm_on_arrays_us"]),
                    *(f"{microseconds(r['us'])} ({r['ratio']:.2f})" for r in row["peers"].values()),
                )  # fmt: skip
    console.print(table)
    console.print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
