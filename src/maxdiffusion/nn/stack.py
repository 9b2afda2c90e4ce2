"""Stacks of equal blocks: unrolled, scanned or pipelined, rematerialised or not, always the same numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import Scope
from jax.extend.core.primitives import sharding_constraint_p

from maxdiffusion.parallel import pipeline
from maxdiffusion.parallel.memory import host_memory
from maxdiffusion.runtime import Runtime

Block = TypeVar("Block", bound=nn.Module)
Carry = TypeVar("Carry")

BLOCK_INPUT = "block_input"
"""Name (`jax.ad_checkpoint.checkpoint_name`) that every rematerialised block gives to what it was handed: all that is
kept of it, on the device or on the host."""


_MAKING_WEIGHTS = (
    jax.lax.dynamic_slice_p,
    jax.lax.squeeze_p,
    jax.lax.convert_element_type_p,
    sharding_constraint_p,
)
"""Primitives that gather the weights of a layer, or choose them from a stack."""


def _keeps_products(primitive: Any, *args: Any, **params: Any) -> Any:
    """Policy `minimal`: keep convolutions and products with weights; recompute scores, norms and activations."""
    if primitive is jax.lax.conv_general_dilated_p:
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)


def _keeps_all_but_weights(primitive: Any, *args: Any, **params: Any) -> bool:
    """Policy `none` where weights are gathered, or chosen at each tick of a circular pipeline: the backward pass does
    so again, since the gathered weights of all layers would be the whole model on each device."""
    return primitive not in _MAKING_WEIGHTS


def _policy(runtime: Runtime) -> Callable[..., Any] | None:
    """What `jax.checkpoint` may keep of a block; None: only its inputs.

    `offload` moves inputs and named activations rather than products (`offload_dot_with_no_batch_dims`): a product of
    width w costs 2 w FLOPs an element to do again, which any accelerator has done before the element has crossed the
    bus twice, while an input stands for a whole block and is what remains of memory where all else is done again.
    """
    spec = runtime.remat
    if spec.policy == "none":
        return _keeps_all_but_weights
    host = host_memory(runtime.layout) if spec.policy == "offload" else None
    if host is not None:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=(BLOCK_INPUT, *spec.save),
            offload_src="device",
            offload_dst=host,
        )
    named = jax.checkpoint_policies.save_only_these_names(*spec.save) if spec.save else None
    if spec.policy != "minimal":
        return named
    return jax.checkpoint_policies.save_from_both_policies(_keeps_products, named) if named else _keeps_products


def remat(block: type[Block], runtime: Runtime, *, scanned: bool = False) -> type[Block]:
    """`block` with what `runtime.remat` says about its backward pass; parameters and numbers stay the same.

    Args:
        block: class of a layer; its call takes arrays, trees of arrays and None only.
        runtime: how the model runs.
        scanned: the block is the body of a scan, which needs no barrier against common subexpressions.
    """
    if runtime.remat.policy == "none" and not runtime.layout.gathers:
        return block
    return nn.remat(block, policy=_policy(runtime), prevent_cse=not scanned)


def apply_stack(
    block: type[nn.Module],
    x: Carry,
    *inputs: Any,
    num_layers: int,
    name: str,
    runtime: Runtime,
    attributes: Mapping[str, Any],
) -> Carry:
    """Folds `x` through `num_layers` equal blocks, inside a compact method.

    Unrolled, the parameters lie in `{name}_0`, `{name}_1`, ...; scanned, in `{name}`, each with a leading dimension
    `layers`. `stack_params` and `unstack_params` map one to the other. Where the rules put `layers` on a mesh axis, the
    scanned form is pipelined along it (`parallel.pipeline`), with the same parameters.

    Args:
        block: class whose call takes `(x, *inputs)` and returns the next `x`, sample by sample.
        x: what the blocks hand on: an array, or a tree of arrays such as a pair of token streams; batch first.
        inputs: arrays, trees of arrays or None that every block reads; their first dimension is the batch, or 1 for
            what all samples share.
        num_layers: number of blocks.
        name: of the stack.
        runtime: says whether to scan and what to rematerialise.
        attributes: of every block.
    """
    if not runtime.scan_layers:
        rematerialised = remat(block, runtime)
        for index in range(num_layers):
            x = rematerialised(**attributes, name=f"{name}_{index}")(x, *inputs)
        return x

    pipelined = pipeline.applies(runtime.layout, num_layers=num_layers, name=name)
    layer = (block if pipelined else remat(block, runtime, scanned=True))(**attributes, name=name)
    if pipelined and not layer.is_initializing():
        return _pipelined(layer, x, inputs, num_layers=num_layers, runtime=runtime)

    def body(layer: Any, carry: Carry, _: None) -> tuple[Carry, None]:
        return layer(carry, *inputs), None

    scan = nn.scan(
        body,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    x, _ = scan(layer, x, None)
    return x


def _pipelined(block: Any, x: Carry, inputs: tuple[Any, ...], *, num_layers: int, runtime: Runtime) -> Carry:
    """`x` after a pipeline of blocks; `block` is bound where the stacked parameters lie."""
    layout, scope = runtime.layout, block.scope
    stacked = nn.unbox(block.variables["params"])

    def layer(params: Any, x: Any, inputs: Any) -> Any:
        # The scope of one layer at the path of the stack, so that modules know where they stand.
        of_layer = Scope({"params": params}, name=scope.name, path=scope.path)
        return block.clone(parent=of_layer)(x, *inputs)

    batch = jax.tree.leaves(x)[0].shape[0]
    plan = pipeline.plan(layout, runtime.pipeline, num_layers=num_layers, batch=batch, name=block.name)
    if runtime.remat.policy == "none" and plan.repeats == 1 and not layout.gathers:
        return pipeline.pipeline(layer, stacked, x, inputs, plan=plan, layout=layout)
    rematerialised = functools.partial(jax.checkpoint, policy=_policy(runtime), prevent_cse=False)
    return pipeline.pipeline(layer, stacked, x, inputs, plan=plan, layout=layout, remat=rematerialised)


def stack_params(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The parameters of a scanned model from those of an unrolled one.

    Args:
        params: a tree that holds `{name}_0`, `{name}_1`, ... at any depth.
        name: of the stack.
    """
    out: dict[str, Any] = {}
    prefix = f"{name}_"
    layers = sorted((key for key in params if key.startswith(prefix)), key=lambda key: int(key.removeprefix(prefix)))
    if layers:
        out[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[key] for key in layers))
    for key, value in params.items():
        if key not in layers:
            out[key] = stack_params(value, name) if isinstance(value, Mapping) else value
    return out


def unstack_params(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The parameters of an unrolled model from those of a scanned one; inverse of `stack_params`."""
    out: dict[str, Any] = {}
    for key, value in params.items():
        if key == name:
            for index in range(jax.tree.leaves(value)[0].shape[0]):
                out[f"{name}_{index}"] = jax.tree.map(lambda leaf, i=index: leaf[i], value)
        else:
            out[key] = unstack_params(value, name) if isinstance(value, Mapping) else value
    return out
