"""The benchmark of attention runs, and the memory it finds is what the documentation promises."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without the flags of the tests, which make slow programs.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(_SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=800, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_figures_at_4096_tokens() -> None:
    """Flash attention takes at most a quarter of the memory of dot-product attention, forward and with gradients."""
    ran = _run("--json", "--repeats", "1", "--shape", "2,4096,8,40")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    said = {"shape": [2, 4096, 8, 40], "keys": 4096, "dtype": "float32", "tiles": [256, 1024]}
    assert said == {name: found[name] for name in said}
    kernels = {"flash_cpu", "dot_product", "products"}
    has_torch = importlib.util.find_spec("torch") is not None
    assert found["seconds"].keys() == kernels | ({"torch"} if has_torch else set())
    assert found["temp_bytes"].keys() == kernels
    for figures in (*found["seconds"].values(), *found["temp_bytes"].values()):
        assert figures.keys() == {"forward", "gradients"} and all(value > 0 for value in figures.values())
    assert max(found["memory_over_dot_product"].values()) <= 0.25
    assert (found["time_over_torch"] is None) == (not has_torch) == bool(found["note"])
    for name in ("time_over_dot_product", "time_over_products"):
        assert all(value > 0 for value in found[name].values())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--shape", "2,4096,8"], "write --shape 2,4096,8,40"),
        (["--tiles", "0,64"], "BlockSizes.block_q=0: write a whole number of tokens"),
    ],
    ids=["shape", "zero"],
)
def test_wrong_arguments_are_one_line(arguments: list[str], line: str) -> None:
    ran = _run(*arguments)
    assert ran.returncode == 2 and line in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr
