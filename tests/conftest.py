"""Fixtures: every instruction set, the names that doctests use."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from axisnorm import _build

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    # Inductor's cache knows nothing of this package, and would run what an earlier state compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="axisnorm-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# The same examples in every run: a failure is one that a change has made.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

needs_short_way = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no table of DLPack functions, through which the short way reads tensors",
)

ISAS = tuple(_build.native.isa_names()) if _build.native else ()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has."""
    native = _build.native
    assert native is not None
    before = native.isa()
    assert native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of torch's threads, restored after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(np=np, torch=torch)
    torch.manual_seed(0)
