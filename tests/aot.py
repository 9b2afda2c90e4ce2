"""Compilers for accelerators that this machine lacks (`make aot` installs them), run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Topologies of four chips."""

TOPOLOGIES = {**TPUS, "7x": "tpu7x:2x2x1"}
"""Those and TPU 7x, whose matrix units multiply float8; attention is not compiled for it."""

_ROOT = Path(__file__).parents[1]
_COMPILERS = Path(sys.prefix) / "aot"
"""Where `make aot` puts them: beside the environment, so that jax does not look for their hardware elsewhere."""


def compile_ahead(module: str, target: str, names: list[str], folder: Path, *, timeout: int = 280) -> dict[str, str]:
    """Runs `python -m module TARGET FOLDER NAMES` where jax finds the compilers; skips the test where there are none.

    Returns:
        The text of each file that it left in the folder, by the file's name.
    """
    plugin = "libtpu" if target in TOPOLOGIES else "jax_plugins/xla_cuda13"
    if not any((Path(path) / plugin).is_dir() for path in (_COMPILERS, *sys.path)):
        pytest.skip(f"no compiler for {target} here ({plugin}): make aot")
    # The flags of the tests are those of this jax's compiler; another one ends at a name that it does not know.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    env["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # two tests may compile at once: there is no TPU to share
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT / "src"), str(_COMPILERS), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", module, target, str(folder), *names]
    ran = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {file.name: file.read_text() for file in folder.iterdir()}
