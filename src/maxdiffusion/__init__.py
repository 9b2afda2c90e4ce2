"""maxdiffusion: train and run diffusion models in JAX on any mesh of accelerators."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxdiffusion.pipelines.generate import generate
    from maxdiffusion.tools.explain import explain
    from maxdiffusion.train.run import train

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "generate", "train"]

_VERBS = {"explain": "maxdiffusion.tools.explain", "generate": "maxdiffusion.pipelines.generate"}


def __getattr__(name: str) -> Any:
    """The public verbs, imported when first asked for, so that `import maxdiffusion` imports no jax."""
    if name == "train":
        return importlib.import_module("maxdiffusion.train")  # the package is callable: it bears the verb's name
    if name not in _VERBS:
        raise AttributeError(f"module 'maxdiffusion' has no attribute '{name}'")
    return getattr(importlib.import_module(_VERBS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
