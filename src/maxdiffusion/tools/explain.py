"""Where every parameter of a model would live, what attentions run and convolutions exchange, what is quantised, and
why; no devices."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from maxdiffusion.common_types import BlockSizes, LogicalAxisRules
from maxdiffusion.errors import MeshError
from maxdiffusion.kernels.attention.choose import choose
from maxdiffusion.kernels.halo import plan_bands
from maxdiffusion.log import say_once
from maxdiffusion.models.registry import lookup
from maxdiffusion.nn.attention import attention_calls
from maxdiffusion.nn.conv import conv_calls
from maxdiffusion.nn.quantisation import QuantRow
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.parallel.pipeline import stage_axes
from maxdiffusion.parallel.report import Report
from maxdiffusion.specs import MeshSpec

log = logging.getLogger(__name__)


def explain(
    model: str,
    *,
    mesh: MeshSpec | Mesh,
    logical_axis_rules: LogicalAxisRules | str | None = None,
    strict: bool = False,
    scan_layers: bool | None = None,
) -> Report:
    """The report of a registry model's parameters on a mesh.

    Args:
        model: registry name, such as `sdxl`.
        mesh: sizes of the mesh axes (the data axis counts as 1 where it has none), or a mesh.
        logical_axis_rules: rules that come before the defaults, the name of a preset, or None.
        strict: refuse a layout that is not as the rules wish.
        scan_layers: as the model's keyword; None stacks the blocks where the mesh has stages, and says so.

    Returns:
        A row for each parameter, and the totals.

    Raises:
        UsageError: the model, a mesh axis or a rule is unknown; under `strict`, a wish is not met.

    Warns:
        LayoutWarning: the mesh has stages, and `scan_layers` is False.
    """
    layout = _layout(mesh, logical_axis_rules, strict=strict)
    stages = stage_axes(layout)
    if scan_layers is None and stages:
        say_once(
            log,
            f"explain: blocks are stacked, as the stages of mesh {layout.written(stages)} need: scan_layers=True "
            "(--scan-layers) pins it, and a model or recipe has to say it too",
        )
    built = lookup(model).build(
        mesh=layout.mesh,
        logical_axis_rules=logical_axis_rules,
        strict=strict,
        scan_layers=_stacked(layout, scan_layers),
    )
    return built.layout.report(*built.abstract_params())


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """What one attention of a model, or of a block of which there is a stack, would run.

    Attributes:
        module: path of the module that calls it, joined by `/`.
        blocks: equal blocks that call it: all of a stack; 1 where none are stacked.
        queries: global shape of the queries (batch, length, heads, dim), one batch row for each part of a batch.
        keys: global shape of the keys.
        kernel: name of the kernel.
        block_sizes: tiles of a blockwise kernel.
        context: what devices that share the sequence exchange.
        ring: devices that keys go round.
        ulysses: devices that swap tokens for heads.
        reason: why.
    """

    module: str
    blocks: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    kernel: str
    block_sizes: BlockSizes | None
    context: str
    ring: int
    ulysses: int
    reason: str


def explain_attention(
    model: str,
    *,
    mesh: MeshSpec | Mesh,
    platform: str | None = None,
    scan_layers: bool | None = None,
    **keywords: Any,
) -> tuple[AttentionRow, ...]:
    """What each attention of a registry model would run on a mesh, for inputs of the model's usual size.

    Args:
        model: registry name, such as `sdxl`.
        mesh: sizes of the mesh axes (the data axis counts as 1 where it has none), or a mesh.
        platform: `cpu`, `gpu` or `tpu` that a mesh of sizes would be on; None is that of this process.
        scan_layers: as the model's keyword; None stacks the blocks where the mesh has stages.
        keywords: those that the model would be built with (`attention_kernel`, `logical_axis_rules`, `dtype`, ...).

    Returns:
        A row for each attention, one for all blocks of a stack.

    Raises:
        UsageError: the model, a mesh axis, a rule or a keyword is unknown, or an exchange that was asked for cannot be.
    """
    known = _layout(mesh, keywords.get("logical_axis_rules"), strict=False, platform=platform)
    asked = lookup(model).build(mesh=known.mesh, scan_layers=_stacked(known, scan_layers), **keywords)
    network, layout, spec = asked.alone(), asked.layout, asked.runtime.attention
    shapes, names = network.abstract_params()

    def call(params: Any, inputs: Any) -> Any:
        return network.apply({"params": params}, **inputs)

    calls = attention_calls(call, shapes, network.usual_inputs(layout))
    rows = []
    # A scan is traced more than once.
    for module, found in dict.fromkeys(calls) if network.scan_layers else calls:
        queries, keys = ((layout.batch_divisor, *shape[1:]) for shape in (found.q_shape, found.k_shape))
        masks = {"full_mask": found.full_mask, "key_mask": found.key_mask}
        choice = choose(queries, keys, spec=spec, layout=layout, dtype=found.dtype, **masks)
        rows.append(
            AttentionRow(
                module=module,
                blocks=_blocks(module, shapes, names),
                queries=queries,
                keys=keys,
                kernel=choice.kernel,
                block_sizes=choice.block_sizes,
                context=choice.context.strategy,
                ring=choice.context.ring,
                ulysses=choice.context.ulysses,
                reason=choice.reason,
            )
        )
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class ConvolutionRow:
    """How one convolution of a model would lie on a mesh.

    Attributes:
        module: its path, joined by `/`.
        feature_map: global shape (batch, height, width, channels), one batch row for each part of a batch.
        features: channels of the result.
        size: height and width of the kernel.
        stride: its step.
        axes: mesh axes that cut the rows; empty where every device has them all.
        rows: that a device has.
        above: rows that a device gets from the devices above.
        below: the same from below.
        reason: why.
    """

    module: str
    feature_map: tuple[int, ...]
    features: int
    size: int
    stride: int
    axes: tuple[str, ...]
    rows: int
    above: int
    below: int
    reason: str


def explain_convolutions(
    model: str, *, mesh: MeshSpec | Mesh, logical_axis_rules: LogicalAxisRules | str | None = None
) -> tuple[ConvolutionRow, ...]:
    """How each convolution of a registry model would lie on a mesh, for inputs of the model's usual size.

    Args:
        model: registry name, such as `sdxl`.
        mesh: sizes of the mesh axes (the data axis counts as 1 where it has none), or a mesh.
        logical_axis_rules: rules that come before the defaults, the name of a preset, or None.

    Returns:
        A row for each; none where no rule cuts the rows of feature maps on this mesh.

    Raises:
        UsageError: the model, a mesh axis or a rule is unknown.
    """
    layout, network = _layout(mesh, logical_axis_rules, strict=False), lookup(model).build()
    if not layout.resolve("activation_height").axes[0]:
        return ()

    def call(params: Any, inputs: Any) -> Any:
        return network.apply({"params": params}, **inputs)

    rows = []
    for module, shape, layer in conv_calls(call, network.abstract_params()[0], network.usual_inputs(layout)):
        shape = (layout.batch_divisor, *shape[1:])
        bands = plan_bands(shape, layer.features, rows=layer.window, columns=layer.window, layout=layout)
        rows.append(
            ConvolutionRow(
                module=module,
                feature_map=shape,
                features=layer.features,
                size=layer.size,
                stride=layer.stride,
                axes=bands.axes,
                rows=bands.rows,
                above=bands.above,
                below=bands.below,
                reason=bands.reason,
            )
        )
    return tuple(rows)


def explain_quantisation(
    model: str, mode: str, *, mesh: MeshSpec | Mesh, scan_layers: bool | None = None
) -> tuple[QuantRow, ...]:
    """What a mode quantises of a registry model, how, what it leaves out, and why.

    Args:
        model: registry name, such as `sdxl`.
        mode: of `QuantMode`.
        mesh: sizes of the mesh axes (the data axis counts as 1 where it has none), or a mesh.
        scan_layers: as the model's keyword; None stacks the blocks where the mesh has stages.

    Returns:
        A row for each layer that multiplies, one for all layers of a stack.

    Raises:
        UsageError: the model, a mesh axis or the mode is unknown.
    """
    layout = _layout(mesh, None, strict=False)
    return lookup(model).build(quantization=mode, scan_layers=_stacked(layout, scan_layers)).ledger()


def _stacked(layout: Layout, scan_layers: bool | None) -> bool:
    """Whether equal blocks are stacked: where nothing is said, on a mesh that has stages."""
    return bool(stage_axes(layout)) if scan_layers is None else scan_layers


def _blocks(module: str, shapes: Any, names: Any) -> int:
    """Blocks of the stack that a module belongs to; 1 for none."""
    for part in module.split("/"):
        if part not in shapes:
            break
        shapes, names = shapes[part], names[part]
    name = jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, tuple))[0]
    return jax.tree.leaves(shapes)[0].shape[0] if name[:1] == ("layers",) else 1


def check_counted(axis: str, size: int) -> None:
    """Refuses a mesh axis that takes the devices that are left: here are none to count.

    Raises:
        MeshError: the size is -1.
    """
    if size == -1:
        raise MeshError(
            f"mesh axis {axis}=-1 takes the devices that are left, and explain has none: write their number, "
            f"for example {axis}=8"
        )


def _layout(
    mesh: MeshSpec | Mesh,
    logical_axis_rules: LogicalAxisRules | str | None,
    *,
    strict: bool,
    platform: str | None = None,
) -> Layout:
    if isinstance(mesh, MeshSpec):
        for axis, size in zip(mesh.axes, mesh.ici, strict=True):
            if axis != mesh.rest:  # it is -1 where nothing was said
                check_counted(axis, size)
    known = abstract_mesh(mesh, platform=platform) if isinstance(mesh, MeshSpec) else mesh
    return Layout.of(known, logical_axis_rules, strict=strict)
