"""Multi-head attention whose projections keep heads whole."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Bool, Float

from maxdiffusion.kernels.attention.select import attention
from maxdiffusion.nn.linear import Dense
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

        def project(states: Array, name: str, reads: str) -> Array:
            names = (reads, "heads", "kv")
            return Dense(features=heads, names=names, use_bias=self.use_bias, runtime=runtime, name=name)(states)

        source, reads = (x, "embed") if context is None else (context, "cross_embed")
        q, k, v = project(x, "to_q", "embed"), project(source, "to_k", reads), project(source, "to_v", reads)
        y = attention(q, k, v, mask=mask, spec=runtime.attention, layout=layout, precision=runtime.precision)
        y = Dense(features=(width,), names=("heads", "kv", "embed"), num_inputs=2, runtime=runtime, name="to_out_0")(y)
        return layout.constrain(y, "activation_batch", "activation_length", "activation_embed")
