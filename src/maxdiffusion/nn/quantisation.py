"""The ledger of a quantised model: which layers multiply quantised operands, which do not, and why; how kernels of
all of them are stored quantised, and in how many bytes."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Array

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.kernels.stored import Stored, is_stored, kept_as, stored
from maxdiffusion.log import say_once
from maxdiffusion.parallel.moments import part_sharding
from maxdiffusion.specs import QUANT_KEYWORDS, QuantSpec, StoredAs

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuantRow:
    """One layer that multiplies.

    Attributes:
        module: its path, joined by `/`; that of a stack for all its layers.
        shape: of its kernel.
        mode: of its products (`int4`: of its kernel alone); None where nothing is quantised.
        stored: what its kernel becomes where weights are stored quantised; empty without `quantization`.
        reason: why nothing is quantised; empty where it is.
    """

    module: str
    shape: tuple[int, ...]
    mode: str | None
    stored: str
    reason: str


def ledger(boxed: Any, quant: QuantSpec) -> tuple[QuantRow, ...]:
    """A row for each layer that multiplies.

    Args:
        boxed: tree of `Parameter`s.
        quant: how the model is quantised.
    """
    rows = []
    for path, box in _kernels(boxed):
        module, shape = path.rpartition("/")[0], tuple(box.value.shape)
        reason, stored_as = "no quantization", ""
        if quant.mode is not None:
            reason, stored_as = quant.why_not(module), kept_as(quant.stored_as(module)[0], shape, box.features)
        mode = None if reason else quant.mode
        rows.append(QuantRow(module=module, shape=shape, mode=mode, stored=stored_as, reason=reason))
    return tuple(rows)


def _kernels(boxed: Any) -> list[tuple[str, Any]]:
    """The boxed kernels of a model with their paths, in the order of these."""
    flat: dict[Any, Any] = flatten_dict(boxed, sep="/")  # type: ignore[assignment]
    return [(path, box) for path, box in sorted(flat.items()) if box.inputs]


_FLOAT8 = re.compile(r"TPU ?v?7|NVIDIA (H|GH|B|GB|L|RTX PRO|.* Ada |GeForce RTX [45]0)")
"""How the names of devices begin whose matrix units multiply float8 e4m3.

TPUs do from 7x on (Google Cloud's pages of each version), NVIDIA's from compute capability 8.9 on: Ada, Hopper and
Blackwell (CUDA's table of precisions). Others are taken not to."""


def checked(rows: Sequence[QuantRow], quant: QuantSpec, *, device_kind: str, own: Sequence[str] = ()) -> None:
    """Refuses expressions that match no layer, and says once what is quantised, and what the devices only emulate.

    Args:
        rows: of `ledger`.
        quant: how the model is quantised.
        device_kind: what jax calls the devices.
        own: expressions that the model excludes by itself; it need not have all these layers.

    Raises:
        UsageError: an expression matches nothing, or all layers are excluded.
    """
    if quant.mode is None:
        return
    modules = [row.module for row in rows]
    for key, patterns in (("modules", [quant.modules]), ("exclude", [p for p in quant.exclude if p not in own])):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, module) for module in modules):
                raise UsageError(
                    f"{QUANT_KEYWORDS[key]}: no layer's path is matched by {pattern!r} as a whole: "
                    f"{nearest(pattern, modules)}"
                )
    done = [row for row in rows if row.mode]
    if not done:
        raise UsageError(f"quantization={quant.mode!r}: {QUANT_KEYWORDS['exclude']} leaves no layer to quantise")
    share = _size(done) / _size(rows)
    say_once(
        log,
        f"quantization={quant.mode}: {len(done)} of {len(rows)} kernels, {share:.1%} of their weights; "
        f"left out by {QUANT_KEYWORDS['modules']} and {QUANT_KEYWORDS['exclude']}: {len(rows) - len(done)}",
        logging.INFO,
    )
    if (quant.mode or "").startswith("fp8") and not _FLOAT8.match(device_kind):
        say_once(
            log,
            f"quantization={quant.mode}: float8 products are emulated on {device_kind!r}, which is not known to have "
            "any: the same values, multiplied as wider numbers, in no less time",
            logging.INFO,
        )


def _size(rows: Sequence[QuantRow]) -> int:
    return sum(math.prod(row.shape) for row in rows)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How one kernel is stored quantised.

    Attributes:
        how: dtype of its values.
        calibration: of its scales.
        inputs: number of dimensions that a product sums over.
        features: number of dimensions behind them.
    """

    how: StoredAs
    calibration: str
    inputs: int
    features: int

    def of(self, kernel: Array) -> Stored:
        """A kernel, or a stack of them, as it is stored."""
        return stored(kernel, self.how, inputs=self.inputs, features=self.features, calibration=self.calibration)

    def form(self, like: jax.ShapeDtypeStruct) -> Stored:
        """What a kernel of this shape is stored as: `jax.ShapeDtypeStruct`s whose shardings are cut as its own."""
        return _form(self, tuple(like.shape)).parts(
            lambda part: jax.ShapeDtypeStruct(
                part.shape, part.dtype, sharding=part_sharding(part.shape, like.shape, like.sharding)
            )
        )


@functools.lru_cache(maxsize=4096)
def _form(storage: Storage, shape: tuple[int, ...]) -> Stored:
    return jax.eval_shape(storage.of, jax.ShapeDtypeStruct(shape, jnp.float32))


def storages(boxed: Any, quant: QuantSpec) -> dict[str, Storage]:
    """How each kernel of a model is stored quantised, by its path joined by `/`.

    Args:
        boxed: tree of `Parameter`s.
        quant: how the model is quantised.
    """
    found = {}
    for path, box in _kernels(boxed):
        how, calibration = quant.stored_as(path.rpartition("/")[0])
        found[path] = Storage(how=how, calibration=calibration, inputs=box.inputs, features=box.features)
    return found


@functools.lru_cache(maxsize=4096)
def storing(storage: Storage, shape: tuple[int, ...], sharding: Sharding | None, index: int | None = None) -> Any:
    """The jitted function of a kernel to what is stored.

    Args:
        storage: how.
        shape: of the kernel.
        sharding: of the kernel where it is stored; None leaves it to the compiler.
        index: given, the function takes a stack of kernels, and stores this one.
    """

    def store(kernel: Array) -> Stored:
        return storage.of(kernel if index is None else kernel[index])

    if not isinstance(sharding, NamedSharding):
        return jax.jit(store)
    form = storage.form(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
    return jax.jit(store, out_shardings=form.parts(lambda part: part.sharding))


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """What weights take, on all devices together where each array is counted once.

    Attributes:
        kernels: that are stored quantised.
        bytes: of their values and scales.
        ratio: of these bytes to those in bfloat16.
        model_bytes: of all weights.
        model_ratio: of these bytes to those of all weights in bfloat16.
    """

    kernels: int
    bytes: int
    ratio: float
    model_bytes: int
    model_ratio: float


def stored_bytes(params: Any) -> StoredBytes:
    """The bytes of a tree of weights with kernels stored quantised.

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`s, and of `Stored` ones.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_stored)
    kernels = [leaf for leaf in leaves if is_stored(leaf)]
    others = [leaf for leaf in leaves if not is_stored(leaf)]
    small = sum(leaf.nbytes for leaf in kernels)
    total = small + sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in others)
    return StoredBytes(
        kernels=len(kernels),
        bytes=small,
        ratio=small / max(1, 2 * sum(math.prod(leaf.shape) for leaf in kernels)),
        model_bytes=total,
        model_ratio=total / max(1, 2 * sum(math.prod(leaf.shape) for leaf in leaves)),
    )


def say_bytes(found: StoredBytes, mode: str | None) -> None:
    """Says once what stored weights take."""
    say_once(
        log,
        f"quantization={mode}: {found.kernels} kernels are stored in {found.bytes / 1e6:,.1f} MB, {found.ratio:.3f} of "
        f"their bytes in bfloat16; all weights in {found.model_bytes / 1e6:,.1f} MB, {found.model_ratio:.3f}",
        logging.INFO,
    )
