"""The main job, on the real model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_demo_answers_the_question(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "demo" / "bert.py"
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "13 of 13 take one mean a token, over its 384 features" in said
    assert "13 replaced, 0 left" in said
    found = re.search(r"Sentence embeddings: largest difference ([\d.e-]+)", said)
    assert found and float(found.group(1)) < 1e-5
    page = (tmp_path / "demo-out" / "bert.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.replace("<wbr>", "").count("encoder.layer.") >= 12
