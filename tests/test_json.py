"""The JSON of every result, against the schema that comes with the package."""

import copy
import importlib.util
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn

import axisnorm
from axisnorm.lens.presets import Presets
from axisnorm.lens.result import Result, json_schema

DOCS = Path(__file__).parents[1] / "docs"


def strict():
    """The schema with every name that is not in it refused, so that none is left undocumented."""
    schema = copy.deepcopy(json_schema())

    def close(part):
        if isinstance(part, dict):
            if "properties" in part:
                part["additionalProperties"] = False
            for value in part.values():
                close(value)
        elif isinstance(part, list):
            for value in part:
                close(value)

    close(schema["$defs"])
    return jsonschema.Draft202012Validator(schema)


VALIDATOR = strict()
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def audited():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(3, eps=32.0), nn.GroupNorm(3, 3)
    )
    model.append(nn.Sequential(nn.Identity(), nn.RMSNorm(4)))
    model.unused = nn.LayerNorm(7)
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
    return model, torch.from_numpy(X)


def swapped():
    model, x = audited()
    return axisnorm.swap(model, x)


def compared():
    """Pairs that differ and that are the same, norms that only one model has."""
    model, x = audited()
    other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=1e-3), nn.BatchNorm1d(3)).half()
    return axisnorm.audit(model, x).diff(axisnorm.audit(other, x.half()))


RESULTS = {
    "explanation": lambda: axisnorm.explain("... [d]; affine=d", (2, 3, 4)),
    "explanation of a module": lambda: axisnorm.explain(nn.LayerNorm(4), torch.from_numpy(X)),
    "explanation in half": lambda: axisnorm.explain("llama.rms_norm", X.astype(np.float16)),
    "explanation of one number": lambda: axisnorm.explain("[...]", np.array(3.0)),
    "explanation of nothing": lambda: axisnorm.explain("... [d]", (0, 4)),
    "explanation of a large tensor": lambda: axisnorm.explain("... [d]", np.ones((80, 80))),
    "explanation of a constant": lambda: axisnorm.explain("... [d]; eps=0", np.ones((2, 3))),
    "comparison": lambda: axisnorm.compare("... [d]", "b [s d]", (2, 3, 4)),
    "comparison of weights": lambda: axisnorm.compare(
        "bert.layer_norm", "torch.instance_norm", (2, 3, 4)
    ),
    "comparison of modes": lambda: axisnorm.compare(
        nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), (2, 3, 4)
    ),
    "comparison of equals": lambda: axisnorm.compare("b [d]", "n [c]", (2, 3)),
    "identification": lambda: axisnorm.identify(X, axisnorm.layer_norm(X, 4)),
    "identification of a mistake": lambda: axisnorm.identify(
        X, axisnorm.normalize(X, "... [d]; correction=1; eps_placement=std")
    ),
    "identification of nothing": lambda: axisnorm.identify(X, X**3),
    "audit": lambda: axisnorm.audit(*audited()),
    "differences": compared,
    "differences of nothing": lambda: axisnorm.audit(*audited()).diff(
        axisnorm.audit(nn.Identity(), torch.ones(2))
    ),
    "swap": swapped,
    "swap with times": lambda: replace(swapped(), seconds=(0.5, 0.25)),
    "benchmark": lambda: axisnorm.bench(
        "... [d]; affine=d", (2, 3), dtype=("float32", "float16"), backward=True, rounds=1
    ),
    "presets": lambda: Presets(tuple(axisnorm.PRESETS)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_keep_to_the_schema(name):
    result = RESULTS[name]()
    kind = name.split()[0]
    data = json.loads(result.to_json(), parse_constant=pytest.fail)
    assert data["schema"] == f"axisnorm.{kind}/1" == f"axisnorm.{result.kind}/1"
    VALIDATOR.validate(data)
    jsonschema.validate(data, json_schema())


def test_the_schema_refuses():
    """It says something: a name less, a name more or a wrong type is not valid."""
    jsonschema.Draft202012Validator.check_schema(json_schema())
    data = json.loads(RESULTS["comparison"]().to_json())
    for change in (
        {"schema": "axisnorm.comparison/2"},
        {"same": "no"},
        {"statistics": "similar"},
        {"example": {"x": 3}},
        {"surprise": 1},
    ):
        assert not VALIDATOR.is_valid({**data, **change}), change
    for name in data:
        assert not VALIDATOR.is_valid({k: v for k, v in data.items() if k != name}), name


def test_nan_and_infinity_are_null():
    @dataclass(frozen=True)
    class Odd(Result):
        kind: ClassVar[str] = "odd"

        def to_dict(self):
            return {"a": math.inf, "b": [1.5, (math.nan,)], "c": {"d": -math.inf}, "e": "ü"}

    text = Odd().to_json()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "schema": "axisnorm.odd/1", "a": None, "b": [1.5, [None]], "c": {"d": None}, "e": "ü",
    }  # fmt: skip
    assert "ü" in text


def test_the_page_in_the_docs_is_current():
    spec = importlib.util.spec_from_file_location("json_tables", DOCS / "json_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert (DOCS / "json.md").read_text() == tables.text(), "run python docs/json_tables.py"
    for name in json_schema()["$defs"]["comparison"]["properties"]:
        assert f"| `{name}` |" in tables.text()
