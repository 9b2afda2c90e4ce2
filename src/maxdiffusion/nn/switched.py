"""Layers of a quantised model that multiply quantised operands or plain ones, as numbers of the program say."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import Scope
from jaxtyping import Array, Bool

from maxdiffusion.nn.conv import Conv
from maxdiffusion.nn.linear import Dense
from maxdiffusion.specs import QuantSpec


@contextlib.contextmanager
def switched(on: Mapping[str, Bool[Array, ""]]) -> Iterator[None]:
    """While a model is applied in here, a layer is quantised if its flag is true: one program tries each alone.

    Args:
        on: a flag for the path (joined by `/`) of every layer whose product is quantised; the layers of a scanned stack
            share one.
    """

    inside = False

    def follow(method: Callable[..., Any], args: Any, keywords: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if inside or not (isinstance(layer, Dense | Conv) and context.method_name == "__call__" and layer.quant):
            return method(*args, **keywords)
        weights, scope = layer.variables["params"], layer.scope
        assert scope is not None
        plain = dataclasses.replace(layer.runtime, quant=QuantSpec())

        def run(runtime: Any) -> Callable[[Any], Any]:
            def call(given: Any) -> Any:
                nonlocal inside
                weights, args = given
                # A scope of its own at the same path: this is another trace, that of a branch.
                there = Scope({"params": weights}, name=scope.name, path=scope.path)
                inside = True
                try:
                    return layer.clone(parent=there, runtime=runtime)(*args)
                finally:
                    inside = False

            return call

        return jax.lax.cond(on["/".join(layer.path)], run(layer.runtime), run(plain), (weights, args))

    with nn.intercept_methods(follow):
        yield
