"""Training: state, step, loop, checkpoints, metrics. The package is also the verb: `maxdiffusion.train(recipe)`."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    """A package that can be called: importing any part of it would hide a function of the same name."""

    def __call__(self, recipe: Any) -> Any:
        """Runs a recipe; see `maxdiffusion.train.run.train`."""
        return import_module("maxdiffusion.train.run").train(recipe)


sys.modules[__name__].__class__ = _Verb
