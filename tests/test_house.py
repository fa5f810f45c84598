"""The house itself: which room may know which, what is in the binary, what gets imported."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ISAS

import axisnorm
from axisnorm import _build, _native, _torch

PACKAGE = Path(axisnorm.__file__).parent

# Each room may import those before it; the engines never one another.
ORDER = ("scheme", "presets", "reference", "_build", "_route", "_memory", "_numpy_memory",
         "_numpy", "_torch_memory", "_onnx", "_torch", "_torch_fusing", "_torch_inductor", "_torch_ops",
         "_torch_residual", "_torch_graph", "functional", "nn", "onnx", "lens", "__main__")  # fmt: skip


def run(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def imported(path: Path) -> set[str]:
    """The rooms that a module imports, wherever in its text."""
    inside = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level < inside:
                continue  # within the lens
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names}
    return found - {"_native"}


def test_imports_go_one_way() -> None:
    sources = [*PACKAGE.rglob("*.py")]
    assert len(sources) > 10
    for path in sources:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        allowed = set(ORDER[: ORDER.index(room)])
        if room in ("_numpy", "_torch"):
            allowed -= {"_numpy", "_torch"}
        if room == "scheme":
            allowed |= {"presets"}  # their names are schemes, looked up on first use
        assert imported(path) <= allowed, f"{path} imports {imported(path) - allowed}"


@pytest.mark.parametrize("room", ["identifying", "models", "onnx"])
def test_what_is_found_does_not_know_how_it_is_drawn(room: str) -> None:
    sources = [*(PACKAGE / "lens" / room).glob("*.py")]
    assert len(sources) > 5
    for path in sources:
        assert "rendering" not in path.read_text(), path


def test_numpy_use_never_imports_torch() -> None:
    code = """
import sys, numpy, axisnorm
x = numpy.ones((2, 4), numpy.float32)
axisnorm.layer_norm(x, 4); axisnorm.normalize(x, "[n] c"); axisnorm.statistics(x, "n [c]")
print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "matplotlib", "onnx", "transformers")))
"""
    assert run(code) == "[]"


MAPS = """
with open("/proc/self/maps") as maps:
    print(len({line.split()[-1] for line in maps if __import__("re").search(r"lib(g|i)?omp[-.\\w]*\\.so", line)}))
"""
USE_NUMPY = "axisnorm.layer_norm(numpy.ones((512, 512), numpy.float32), 512)\n"
USE_TORCH = "(torch.ones(512, 512) + 1).sum()\naxisnorm.layer_norm(torch.ones(512, 512), 512)\n"


@pytest.mark.parametrize(
    "code",
    [
        "import torch, axisnorm, numpy\n" + USE_NUMPY + USE_TORCH,
        "import axisnorm, torch, numpy\n" + USE_TORCH + USE_NUMPY,
        "import axisnorm, numpy\n" + USE_NUMPY + "import torch\n" + USE_TORCH,
    ],
    ids=["torch first", "axisnorm first", "axisnorm used first"],
)
def test_one_openmp_runtime(code: str) -> None:
    assert run(code + MAPS) == "1"


def test_threads_follow_torch_when_it_comes_later() -> None:
    code = (
        "import axisnorm, numpy\n" + USE_NUMPY + "import torch\ntorch.set_num_threads(1)\n"
        "from axisnorm import _native\nprint(_native.max_threads())"
    )
    assert run(code) == "1"


def test_forked_child_computes() -> None:
    code = """
import os, numpy, axisnorm
x = numpy.arange(512 * 512, dtype=numpy.float32).reshape(512, 512)
y = axisnorm.layer_norm(x, 512)
child = os.fork()
if not child:
    os._exit(0 if numpy.array_equal(axisnorm.layer_norm(x, 512), y) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run(code) == "0"


def test_nothing_leaks_between_instruction_sets() -> None:
    """Each object exports its table alone: the linker would merge an inline function of one
    instruction set with that of another."""
    objects = list((Path(__file__).parents[1] / "build").glob("*/CMakeFiles/kernels_*/csrc/*.o"))
    assert len(objects) >= len(ISAS), "build with `make setup` first"
    for path in objects:
        name = path.parts[-3].removeprefix("kernels_").removesuffix(".dir")
        symbols = subprocess.run(
            ["nm", "-C", "--extern-only", "--defined-only", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert [line.split()[-1] for line in symbols.splitlines()] == [f"table_{name}"]


def test_instruction_sets() -> None:
    assert _native.isa() == ISAS[0]
    assert ISAS[-1] == "generic"
    assert not _native.set_isa("v5")
    assert _native.isa() == ISAS[0]
    code = "from axisnorm import _native; print(_native.isa())"
    for name in ISAS:
        assert run(code, AXISNORM_ISA=name) == name


def test_unknown_instruction_set_is_an_error() -> None:
    code = "try:\n import axisnorm\nexcept ValueError as error:\n print(error)"
    assert "AXISNORM_ISA" in run(code, AXISNORM_ISA="v5")


def test_without_the_native_module_everything_works() -> None:
    code = """
import sys
sys.modules["axisnorm._native"] = None
import numpy, torch, axisnorm
assert axisnorm._build.native is None
x = torch.randn(3, 8, requires_grad=True)
y = axisnorm.layer_norm(x, (8,))
y.sum().backward()
assert (y - torch.nn.functional.layer_norm(x, (8,))).abs().max() < 1e-6
assert abs(axisnorm.layer_norm(numpy.array([[1.0, 2, 4, 1]]), 4)[0, 0] + 0.8165) < 1e-4
print(axisnorm._route.choose(axisnorm.Scheme.layer_norm(), (3, 8)).reason)
"""
    assert run(code) == "this installation has no native module"


def test_arrays_go_the_short_way_whatever_torch_is_there() -> None:
    """An older torch has no short way for its tensors, and its compilers look into no C function."""
    code = """
import numpy, axisnorm
from axisnorm import _numpy
def long_way(*_):
    raise AssertionError
x = numpy.ones((3, 8), numpy.float32)
wanted = axisnorm.layer_norm(x, 8)
_numpy.normalize = long_way
assert numpy.array_equal(axisnorm.layer_norm(x, 8), wanted)
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
t = torch.randn(3, 8)
y = axisnorm.layer_norm(t, (8,))
from axisnorm import _torch
assert not _torch.is_connected
assert numpy.array_equal(axisnorm.layer_norm(x, 8), wanted)
compiled = torch.compile(lambda t: axisnorm.layer_norm(t, (8,)), fullgraph=True, backend="eager")
print(torch.equal(compiled(t), y), torch.equal(axisnorm.layer_norm(t, (8,), out=t), y))
"""
    assert run(code) == "True True"


@pytest.mark.skipif(
    not _torch.is_connected, reason="the compiler of this torch does not follow imports"
)
def test_a_torch_that_comes_later_compiles_the_first_call() -> None:
    code = """
import numpy, axisnorm
axisnorm.layer_norm(numpy.ones((3, 8)), 8)
import torch
x = torch.randn(3, 8)
compiled = torch.compile(lambda x: axisnorm.layer_norm(x, (8,)), fullgraph=True, backend="eager")
y = compiled(x)
print(torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6))
"""
    assert run(code) == "True"


def test_public_names_exist() -> None:
    for name in axisnorm.__all__:
        assert getattr(axisnorm, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        axisnorm.layernorm  # type: ignore[attr-defined]  # noqa: B018
    assert set(axisnorm.__all__) <= set(dir(axisnorm))


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("axisnorm") == axisnorm.__version__


def test_native_is_in_use() -> None:
    assert _build.native is not None
    assert importlib.util.find_spec("axisnorm._native") is not None
    assert torch.ops.axisnorm.norm_fwd is not None
