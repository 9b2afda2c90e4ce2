"""Convolutions of feature maps that are cut into bands of rows: a device gets the border rows it lacks from others.

XLA's partitioner can cut a convolution by itself, but (measured on eight CPU devices) gave wrong values and gradients
where another mesh axis lay beside the cut one. Here nothing is left to it: each device convolves its own rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.kernels import quantised
from maxdiffusion.kernels.stored import Stored
from maxdiffusion.log import say_once
from maxdiffusion.parallel.collectives import permute
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.specs import QuantSpec

log = logging.getLogger(__name__)

PICTURE = ("activation_batch", "activation_height", "activation_width", "activation_channels")
"""Logical axes of a feature map, channels last."""

_READ = ("activation_batch", "activation_height", None, None)
_WHOLE = ("activation_batch", None, None, "activation_channels")
_KERNEL = (None, None, None, "activation_channels")
_MADE = ("activation_batch", "activation_height", None, "activation_channels")


_NOT_ON_GPUS = (
    "quantised convolutions: XLA has none of int8 or float8 for GPUs, so their quantised values are multiplied as {}, "
    "which holds them exactly: no faster than unquantised ones (quantization_exclude leaves layers out)"
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """How a kernel moves along one dimension.

    Attributes:
        size: of the kernel.
        stride: its step.
        before: zeros before the first element.
        after: zeros behind the last one.
    """

    size: int
    stride: int = 1
    before: int = 0
    after: int = 0

    def steps(self, length: int) -> int:
        """Elements of the result."""
        return (length + self.before + self.after - self.size) // self.stride + 1


@dataclass(frozen=True, kw_only=True)
class Bands:
    """Where the rows of a convolution lie, and which ones travel.

    Attributes:
        axes: mesh axes that cut the rows of feature map and result, outermost first; empty where they are whole.
        parts: bands, one a device along these axes.
        rows: of a band of the feature map.
        above: rows that a device reads from the bands above its own.
        below: the same from below.
        reason: why; empty where no rule cuts rows on this mesh.
    """

    axes: tuple[str, ...] = ()
    parts: int = 1
    rows: int
    above: int = 0
    below: int = 0
    reason: str = ""


def plan_bands(shape: Sequence[int], features: int, *, rows: Window, columns: Window, layout: Layout) -> Bands:
    """The bands of a convolution of a feature map of this global shape (batch, height, width, channels).

    Rows are cut where the rules say so, the height of the result divides by the mesh axes, and bands of the result lie
    where the bands that they come from lie: `height = stride x height of the result`. All else is computed whole.

    Args:
        shape: of the feature map.
        features: channels of the result.
        rows: the kernel along the height.
        columns: the same along the width.
        layout: mesh and rules.
    """
    batch, height, width, _ = shape
    made = rows.steps(height)
    resolution = layout.resolve(*PICTURE, shape=(batch, made, columns.steps(width), features))
    axes = resolution.axes[1]
    if not axes:
        notes = [note.text for note in resolution.notes if note.logical == "activation_height"]
        return Bands(rows=height, reason=f"whole: {'; '.join(notes)}" if notes else "")
    cut = f"{height} rows over {layout.written(axes)}"
    if height != rows.stride * made:
        why = f"{made} rows of the result, one of {rows.stride}, do not begin where bands do"
        return Bands(rows=height, reason=f"{cut}: whole, as {why}")
    parts = layout.size(axes)
    above, below = rows.before, max(0, rows.size - rows.stride - rows.before)
    moved = f"border rows {above} from above, {below} from below" if above or below else "no border rows move"
    return Bands(axes=axes, parts=parts, rows=height // parts, above=above, below=below, reason=f"{cut}: {moved}")


def convolution(
    x: Float[Array, "batch height width channels"],
    kernel: Float[Array, "rows columns channels features"] | Stored,
    *,
    rows: Window,
    columns: Window,
    layout: Layout,
    filled: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    quant: QuantSpec | None = None,
) -> Float[Array, "batch h w features"]:
    """The convolution of a feature map, its rows cut over the mesh as `plan_bands` says.

    Args:
        x: the feature map, any floating dtype.
        kernel: of the dtype of `x`, or stored quantised; its logical axes are those of use (`Layout.use`).
        rows: the kernel along the height.
        columns: the same along the width.
        layout: mesh and rules.
        filled: rows from here on are padding and count as zeros; None where there are none.
        precision: of the products.
        quant: how its operands are quantised; None where they are not.

    Returns:
        array of the dtype of `x`.
    """
    bands = plan_bands(x.shape, kernel.shape[-1], rows=rows, columns=columns, layout=layout)

    wide = jnp.bfloat16 if x.dtype.itemsize == 2 else jnp.float32

    def convolve(x: Array, kernel: Array, padding: tuple[int, int], dtype: Any) -> Array:
        if x.dtype.itemsize == 1 and layout.platform == "gpu":
            say_once(log, _NOT_ON_GPUS.format(jnp.dtype(wide)), logging.INFO)
            x, kernel, dtype = x.astype(wide), kernel.astype(wide), None
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(rows.stride, columns.stride),
            padding=(padding, (columns.before, columns.after)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=precision,
            preferred_element_type=dtype,
        )

    def run(x: Array, kernel: Array, dtype: Any = None) -> Array:
        if not bands.reason:
            return convolve(zeroed(x, filled), kernel, (rows.before, rows.after), dtype)
        if not bands.axes:
            # Said on both sides, so that the partitioner does not carry in a cut from the neighbours.
            whole = layout.constrain(zeroed(x, filled), *_WHOLE)
            return layout.constrain(convolve(whole, kernel, (rows.before, rows.after), dtype), *_WHOLE)

        def band(x: Array, kernel: Array) -> Array:
            if filled is not None:
                x = zeroed(x, filled - bands.rows * jax.lax.axis_index(bands.axes))
            bordered = with_borders(x, bands.axes, bands.parts, bands.above, bands.below)
            return convolve(bordered, kernel, (0, 0), dtype)

        made = (x.shape[0], rows.steps(x.shape[1]), columns.steps(x.shape[2]), kernel.shape[-1])
        return layout.local(band, (_READ, _KERNEL), _MADE, out_shape=made)(x, kernel)

    if quant is None:
        assert not isinstance(kernel, Stored)
        return run(x, kernel)
    # Padding is zeroed first, or it would have a say in the scales.
    return quantised.convolution(zeroed(x, filled), kernel, run, quant)


def zeroed(x: Float[Array, "batch rows *rest"], filled: int | Array | None) -> Float[Array, "batch rows *rest"]:
    """`x` with zeros in its rows from `filled` on; None leaves it as it is."""
    if filled is None:
        return x
    number = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1], *(1,) * (x.ndim - 2)), 1)
    return jnp.where(number < filled, x, jnp.zeros((), x.dtype))


def with_borders(
    x: Float[Array, "batch rows *rest"], axes: tuple[str, ...], parts: int, above: int, below: int
) -> Float[Array, "batch more *rest"]:
    """A band of rows with the rows around it; runs inside `shard_map` over `axes`.

    One permute for each neighbour that rows come from: more than one a side only where a band has fewer rows than are
    asked for. Beyond the first and the last band are zeros.

    Args:
        x: this device's band; all have as many rows.
        axes: mesh axes that cut the rows, outermost first.
        parts: number of bands.
        above: rows from the bands above.
        below: rows from the bands below.
    """
    rows = x.shape[1]

    def from_band(distance: int, wanted: int) -> Array:
        """The nearest rows of the band so far above (or, negative, below)."""
        sent = x[:, rows - wanted :] if distance > 0 else x[:, :wanted]
        hops = [(band, band + distance) for band in range(parts) if 0 <= band + distance < parts]
        return permute(sent, axes, hops) if hops else jnp.zeros_like(sent)

    def side(sign: int, wanted: int) -> list[Array]:
        """From near to far."""
        shares = [min(rows, wanted - start) for start in range(0, wanted, rows)]
        return [from_band(sign * (number + 1), share) for number, share in enumerate(shares)]

    return jnp.concatenate([*reversed(side(1, above)), x, *side(-1, below)], axis=1)


def padded_rows(height: int, levels: int, layout: Layout) -> int:
    """Rows that the feature maps of a UNet are padded to, so that those of every level can be cut; said once.

    Rows that divide by the mesh axes at every level are left alone, and so are those of which padding would make more
    work than computing a level whole where it does not divide. Every level counts alike: it has as many times fewer
    positions as products of channels more.

    Args:
        height: rows at the finest level; each next level has half as many, rounded up.
        levels: number of levels.
        layout: mesh and rules.
    """
    axes = layout.resolve(*PICTURE).axes[1]
    parts = layout.size(axes)
    heights = [-(-height // 2**level) for level in range(levels)]
    if all(rows % parts == 0 for rows in heights):
        return height
    unit = parts * 2 ** (levels - 1)
    padded = -(-height // unit) * unit
    # Work of a device as a share of a level's own, with padding and without.
    cut = sum(padded / 2**level / parts / rows for level, rows in enumerate(heights)) / levels
    whole = sum(1 if rows % parts else 1 / parts for rows in heights) / levels
    known = f"feature maps of {', '.join(map(str, heights))} rows over {layout.written(axes)}"
    if cut >= whole:
        told = f"{known}: levels that do not divide stay whole, as {padded} rows would be more work"
        say_once(log, told, logging.INFO)
        return height
    told = f"{known}: padded to {padded}, each device has {cut:.0%} of the work, not {whole:.0%}"
    say_once(log, told, logging.INFO)
    return padded
