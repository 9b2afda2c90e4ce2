"""`import maxdiffusion` is cheap, its verbs come when asked for, and misspelt names fail as usual."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import maxdiffusion


def test_import_brings_no_jax() -> None:
    program = "import sys, maxdiffusion; dir(maxdiffusion); sys.exit('jax' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        maxdiffusion.trian  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from maxdiffusion import generat  # type: ignore[attr-defined]  # noqa: F401


def test_the_verbs_are_listed() -> None:
    assert {"explain", "generate", "train", "__version__"} <= set(dir(maxdiffusion))
    assert re.fullmatch(r"\d+\.\d+\.\d+", maxdiffusion.__version__)
