"""Multi-head attention whose projections keep heads whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from maxdiffusion.kernels.attention.select import Call, attention, recording
from maxdiffusion.nn.linear import Dense, read_by_all
from maxdiffusion.runtime import Runtime


class Attention(nn.Module, kw_only=True):
    """Queries from `x`; keys and values from `context`, or from `x` without one.

    Attributes:
        num_heads: number of heads; the heads together are as wide as `x`.
        runtime: how the model runs.
        use_bias: whether the projections to queries, keys and values have a bias (the one back always has).
    """

    num_heads: int
    runtime: Runtime
    use_bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        context: Float[Array, "batch keys cross_embed"] | None = None,
        mask: Bool[Array, "batch keys"] | None = None,
    ) -> Float[Array, "batch length embed"]:
        runtime, layout, width = self.runtime, self.runtime.layout, x.shape[-1]
        heads = (self.num_heads, width // self.num_heads)

        def projection(name: str, reads: str) -> Dense:
            names = (reads, "heads", "kv")
            return Dense(features=heads, names=names, use_bias=self.use_bias, runtime=runtime, name=name)

        reads = "embed" if context is None else "cross_embed"
        to_q, to_k, to_v = projection("to_q", "embed"), projection("to_k", reads), projection("to_v", reads)
        if context is None:
            q, k, v = read_by_all([to_q, to_k, to_v], x)
        else:
            q, k, v = to_q(x), to_k(context), to_v(context)
        q, k, v = checkpoint_name((q, k, v), "qkv")
        y = attention(q, k, v, mask=mask, spec=runtime.attention, layout=layout, precision=runtime.precision)
        y = Dense(features=(width,), names=("heads", "kv", "embed"), num_inputs=2, runtime=runtime, name="to_out_0")(y)
        y = layout.constrain(y, "activation_batch", "activation_length", "activation_embed")
        return checkpoint_name(y, "attention_output")


def attention_calls(run: Callable[..., Any], *shapes: Any) -> tuple[tuple[str, Call], ...]:
    """The attentions that a function of modules calls, in order; it is traced, and nothing is computed.

    Args:
        run: calls modules.
        shapes: its arguments, as `jax.ShapeDtypeStruct`s.

    Returns:
        For each, the path of the module that calls it, joined by `/`, and what it is.
    """
    paths: list[str] = []
    calls: list[tuple[str, Call]] = []

    def follow(method: Callable[..., Any], args: Any, keywords: Any, context: nn.module.InterceptorContext) -> Any:
        if context.module.scope is None:  # still being constructed: it has no path yet
            return method(*args, **keywords)
        paths.append("/".join(context.module.path))
        try:
            return method(*args, **keywords)
        finally:
            paths.pop()

    def record(call: Call) -> None:
        calls.append((paths[-1] if paths else "", call))

    with nn.intercept_methods(follow), recording(record):
        jax.eval_shape(run, *shapes)
    return tuple(calls)
