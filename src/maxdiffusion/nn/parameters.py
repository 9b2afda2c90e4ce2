"""Every parameter is declared with a logical name for each of its dimensions, and gathered where it is used."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array

from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.quantised import FORWARD
from maxdiffusion.kernels.stored import Stored, rounded
from maxdiffusion.nn.random_bits import weights_key
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.multihost import everywhere
from maxdiffusion.parallel.report import path_name
from maxdiffusion.runtime import Runtime


class Initializer(Protocol):
    """Makes the initial values of a parameter, each element on its own (a stack of layers is drawn at once).

    Hashable: parameters of equal shape and initializer share one compiled function.
    """

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of this shape and dtype."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Uniform:
    """Uniform values in [-bound, bound), drawn in float32 and cast once.

    Uniform rather than normal: only products and sums make them, so that every mesh gives the same bits.
    """

    bound: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, jnp.float32, -self.bound, self.bound).astype(dtype)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del key
        return jnp.full(shape, self.value, dtype)


def uniform(fan_in: int, gain: float = 1.0) -> Uniform:
    """Uniform values of variance `gain**2 / fan_in` (LeCun et al. 1998)."""
    return Uniform(gain * math.sqrt(3.0 / fan_in))


zeros = Constant(0.0)
ones = Constant(1.0)


@struct.dataclass
class Parameter(nn.LogicallyPartitioned):
    """The box around a declared parameter: its logical names, how its initial values are made, and what it is.

    Of a kernel, `inputs` dimensions are those that a product sums over and `features` those behind them; others have
    neither. A stack of layers has one more in front.
    """

    init: Any = struct.field(default=zeros, pytree_node=False)
    inputs: int = struct.field(default=0, pytree_node=False)
    features: int = struct.field(default=0, pytree_node=False)


def parameter(
    module: nn.Module,
    name: str,
    init: Initializer,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    runtime: Runtime,
    *,
    dtype: Any = None,
    inputs: int = 0,
) -> Any:
    """The parameter `name` of `module`, ready for use in a product.

    It is made and stored in `runtime.weights_dtype`, cast, and then gathered over the axes that serve storage only
    (the cast comes first, so that a bfloat16 model moves half the bytes). A kernel that is stored quantised is gathered
    as it is stored; it stays so where the layer's product reads it so, and is an array else.

    Args:
        module: the layer, inside its compact method.
        name: the parameter's name in the layer.
        init: makes the initial values.
        shape: of the parameter.
        names: one logical axis a dimension; None for kernel height and width, and for pairs.
        runtime: how the model runs.
        dtype: of the result; None for `runtime.dtype`.
        inputs: of a kernel, the number of dimensions that a product sums over; 0 for what is no kernel.

    Returns:
        An array, or a kernel that is stored in the dtype of the layer's quantised product.
    """
    assert len(names) == len(shape), (name, names, shape)
    dtype = dtype or runtime.dtype
    found = module.get_variable("params", name) if inputs and module.has_variable("params", name) else None
    if isinstance(found, Stored):
        return _read(found, module, name, shape, names, runtime, dtype)

    def boxed(key: Array) -> Parameter:
        value = init(key, shape, runtime.weights_dtype)
        return Parameter(value, names, init=init, inputs=inputs, features=len(shape) - inputs if inputs else 0)

    value: Any = module.param(name, boxed)
    value = runtime.layout.use(value.astype(dtype), *names)
    if inputs and runtime.quant.rounds(_path(module)):
        return rounded(value, inputs, runtime.quant.weights, "int4")
    return value


def _read(
    kernel: Stored,
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    runtime: Runtime,
    dtype: Any,
) -> Array | Stored:
    """A kernel that is stored quantised, gathered."""
    path = _path(module)
    if kernel.shape != shape:
        raise UsageError(f"{path}/{name} is stored with shape {kernel.shape}, and the model's is {shape}")
    # What values and scales do not divide by is nothing that the user could change.
    layout = dataclasses.replace(runtime.layout, strict=False)

    def use(part: Array) -> Array:
        """Gathered; a dimension along which all share one scale has no name."""
        return layout.use(
            part,
            *(None if size == 1 < whole else name for size, whole, name in zip(part.shape, shape, names, strict=True)),
        )

    gathered = kernel.parts(use)
    quant = runtime.quant.of(path)
    if quant is not None and gathered.dtype == FORWARD[str(quant.mode)]:
        return gathered
    return gathered.whole(dtype)


def _path(module: nn.Module) -> str:
    return "/".join(module.path)


def lead_axes(value: Array, ndim: int) -> Array:
    """`value` with leading axes of size 1, so that it meets an array of `ndim` dimensions without rank promotion."""
    return value.reshape((1,) * (ndim - value.ndim) + value.shape)


def initial_values(boxed: Any, rng: Array, layout: Layout) -> Any:
    """Initial values of declared parameters, each made where the layout stores it.

    The values depend on `rng` and on each parameter's path, shape and initializer, not on the mesh.

    Args:
        boxed: tree of `Parameter` boxes around shapes.
        rng: a key of `jax.random.key` or `jax.random.PRNGKey`.
        layout: where the parameters are stored.

    Returns:
        The tree of arrays; each device holds its own share and never more.
    """
    shapes, names = nn.unbox(boxed), parameter_names(boxed)
    shardings = iter(jax.tree.leaves(layout.shardings(shapes, names), is_leaf=lambda leaf: leaf is None))
    key = weights_key(everywhere(rng, layout.replicated))

    def make(path: Any, box: Parameter) -> Array:
        digest = hashlib.sha256(path_name(path).encode()).digest()
        shape, dtype = tuple(box.value.shape), box.value.dtype
        words = [int.from_bytes(digest[start : start + 4], "little") for start in (0, 4)]
        return drawing(box.init, shape, dtype, next(shardings))(key, jnp.asarray(words, jnp.uint32))

    return jax.tree_util.tree_map_with_path(make, boxed, is_leaf=_is_box)


@functools.lru_cache(maxsize=4096)
def drawing(init: Initializer, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> Any:
    """The jitted function `(key, two words of the path) -> array` of one parameter, for `initial_values`."""

    def draw(key: Array, words: Array) -> Array:
        return init(jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1]), shape, dtype)

    return jax.jit(draw, out_shardings=sharding)


def parameter_names(boxed: Any) -> Any:
    """The tuple of logical names of each boxed parameter."""
    return jax.tree.map(lambda box: box.names, boxed, is_leaf=_is_box)


def _is_box(leaf: object) -> bool:
    return isinstance(leaf, Parameter)
