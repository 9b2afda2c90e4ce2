"""`Layout(mesh, rules)` says where every array lives; models and trainers get their PartitionSpecs here."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.common_types import LogicalAxisRules
from maxdiffusion.errors import IndivisibleError, LayoutWarning, MeshError, RuleError, UsageError
from maxdiffusion.log import say_once
from maxdiffusion.parallel import explicit
from maxdiffusion.parallel import rules as rule_table
from maxdiffusion.parallel.mesh import auto, describe
from maxdiffusion.parallel.report import Report, Row, path_name
from maxdiffusion.parallel.rules import Note, Resolution

log = logging.getLogger(__name__)
_rules_in_force = jax.make_user_context(None)
T = TypeVar("T")

NO_RULE = "no rule shards it here"
"""Why a parameter is whole on every device although nothing stood in the way."""


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules that map logical axes to its axes. Make one with `Layout.of`.

    Frozen and hashable: a linen attribute and part of jit's cache key, so other rules never meet an old executable.

    Attributes:
        mesh: devices (Auto axes), or an abstract mesh to plan with; None: one device, nothing is constrained.
        rules: rules in order, defaults filled in.
        strict: what is not sharded as the rules wish is an error, not a report.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: LogicalAxisRules = rule_table.DEFAULT_RULES
    strict: bool = False

    @classmethod
    def of(
        cls, mesh: Mesh | AbstractMesh | None, rules: LogicalAxisRules | str | None = None, *, strict: bool = False
    ) -> Layout:
        """The layout of a mesh of any axis names, Auto or Explicit.

        Args:
            mesh: the mesh, or None for one device.
            rules: rules that come first (the defaults fill in the logical axes they leave out), the name of a preset,
                or None for the defaults.
            strict: make every report an error, and log the rules whose mesh axes this mesh lacks.

        Raises:
            RuleError: a rule names an unknown logical axis or mesh axis, or there is no such preset.
            MeshError: it is no mesh, or an axis of it is Manual.

        Warns:
            LayoutWarning: a mesh axis is named by no rule, so devices along it would repeat the same work.
        """
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise MeshError(
                f"mesh={mesh!r} is no mesh of devices: give a jax.sharding.Mesh, such as build_mesh(MeshSpec(data=8)) "
                "of maxdiffusion.parallel.mesh makes"
            )
        names = None if mesh is None else mesh.axis_names
        complete = rule_table.complete(rules, names)
        if mesh is not None:
            if AxisType.Manual in mesh.axis_types:
                raise MeshError(f"mesh {describe(mesh)} has Manual axes: give the mesh from outside the shard_map")
            mesh = auto(mesh)
            _check_used(mesh, complete, strict)
            if strict and mesh.size > 1 and not isinstance(rules, str):
                _say_skipped(mesh, complete)
        return cls(mesh=mesh, rules=complete, strict=strict)

    def say_of_no_use(self, wishes: Mapping[str, Any], lacks: str) -> None:
        """Says once in the log that wishes do nothing on this mesh of several devices.

        Args:
            wishes: keywords and what they were given; None where nothing was.
            lacks: behind "no axis": what none does, and the cure.

        Raises:
            UsageError: under `strict`.
        """
        given = [f"{name}={value}" for name, value in wishes.items() if value is not None]
        if not given or self.num_devices == 1:
            return
        are, them = ("is", "it") if len(given) == 1 else ("are", "them")
        where = self.written(self.sizes)
        text = f"{', '.join(given)} {are} of no use on the mesh {where}, where no axis {lacks}, or leave {them} out"
        if self.strict:
            raise UsageError(f"{text} (strict)")
        say_once(log, text)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis; empty without a mesh."""
        return {} if self.mesh is None else dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """Devices of the mesh; 1 without one."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: of the mesh's devices, for the choice of kernels; else of this process."""
        platform = self._device.platform
        return "gpu" if platform in ("cuda", "rocm") else platform

    @property
    def device_kind(self) -> str:
        """What jax calls these devices: `cpu`, `TPU v5 lite`, `NVIDIA H100 80GB HBM3`."""
        return self._device.device_kind

    @property
    def _device(self) -> Any:
        if isinstance(self.mesh, Mesh):
            return self.mesh.devices.flat[0]
        if self.mesh is not None and self.mesh.abstract_device is not None:
            return self.mesh.abstract_device
        return jax.devices()[0]

    def resolve(self, *names: str | None, shape: Sequence[int] | None = None) -> Resolution:
        """Mesh axes of each dimension, and why a wish was not met; axes that are manual here do not count.

        Raises:
            RuleError: a name is unknown or stands twice; under `strict`, a wish was not met.
        """
        return _resolve(self, names, None if shape is None else tuple(shape), _manual_axes())

    def spec(self, *names: str | None, shape: Sequence[int] | None = None) -> P:
        """The PartitionSpec of an array with these logical axes.

        Args:
            names: logical axis of each dimension; None is never sharded.
            shape: size of each dimension; given, mesh axes that do not divide a dimension are left out.

        Raises:
            RuleError: a name is unknown or stands twice; under `strict`, a wish was not met.
        """
        return partition(self.resolve(*names, shape=shape).axes)

    def constrain(self, x: T, *names: str | None) -> T:
        """`x`, laid out by the rules; works under `jit` with no context manager, and inside `shard_map`.

        Mesh axes that are manual here are left out. An array on an Explicit mesh of the same devices becomes an array
        on this layout's Auto mesh. Without a mesh this is the identity.

        Args:
            x: array with as many dimensions as there are names.
            names: logical axis of each dimension.

        Raises:
            RuleError: a name is unknown, or there are too few or too many.
            IndivisibleError: under `strict`, a dimension does not divide.
            MeshError: `x` lives on a mesh of another number of devices.

        Warns:
            LayoutWarning: a dimension does not divide by its mesh axes and stays whole along the last of them, or all;
                once for its size and these axes.
        """
        _check_rank(x.shape, names)  # type: ignore[attr-defined]
        resolution = self.resolve(*names, shape=x.shape)  # type: ignore[attr-defined]
        if self.mesh is None:
            return x
        for note in resolution.notes:
            cut = resolution.axes[names.index(note.logical)]
            end = f"it is cut by {self.written(cut)} only" if cut else "it stays whole there"
            # From this line and without the array's names: python shows a text once a line, whatever array it is of.
            warnings.warn(f"{note.text}; {end}", LayoutWarning, stacklevel=1)
        return self._place(x, resolution.axes)

    def use(self, param: T, *names: str | None) -> T:
        """A parameter gathered for use: whole along mesh axes that only store it.

        These are the axes that shard the batch (fully sharded data parallelism) and those of storage rules. The
        gradient goes back to the layout of the storage.

        Args:
            param: array with as many dimensions as there are names.
            names: logical axis of each dimension.

        Raises:
            RuleError: a name is unknown, or there are too few or too many.
        """
        _check_rank(param.shape, names)  # type: ignore[attr-defined]
        if self.mesh is None:
            return param
        param = self.enter(param)
        wanted, stored = _use_axes(self, names, param.shape)  # type: ignore[attr-defined]
        if wanted == stored:
            return self._place(param, stored)
        return _gathered(self, wanted, stored, param)

    def table(self, param: T, *names: str | None) -> T:
        """A parameter in use (`use`) of which rows are looked up or added, not multiplied.

        Its gradient is summed as a whole before it goes back to the storage: left to the partitioner, what is summed is
        first cut as the storage is, for which it gathers all of it where mesh axes of the batch do not cut the storage.

        Args:
            param: what `use` gave.
            names: logical axis of each dimension.
        """
        if self.mesh is None:
            return param
        return _table(self, _use_axes(self, names, param.shape)[0], param)  # type: ignore[attr-defined]

    def stored(self, *names: str | None, shape: Sequence[int]) -> Resolution:
        """Mesh axes of each dimension of a parameter in storage: the rules, then the storage rules."""
        return _stored(self, names, tuple(shape))

    def shardings(self, shapes: Any, names: Any) -> Any:
        """A NamedSharding for each parameter of a tree.

        Args:
            shapes: tree of arrays or `jax.ShapeDtypeStruct`.
            names: the same tree with a tuple of logical axes at each leaf.

        Returns:
            The tree of shardings; without a mesh, None at each leaf.

        Raises:
            RuleError: a name is unknown or stands twice (the message names the parameter); under `strict`, a wish
                was not met.
        """
        self._say_unmet(shapes, names)

        def one(path: Any, leaf: Any, axes: tuple[str | None, ...]) -> NamedSharding | None:
            resolution = self._of_parameter(path, leaf, axes)
            return None if self.mesh is None else NamedSharding(self.mesh, partition(resolution.axes))

        return jax.tree_util.tree_map_with_path(one, shapes, names)

    def report(self, shapes: Any, names: Any) -> Report:
        """What lives where: a row for each parameter of a tree; nothing is allocated.

        Args:
            shapes: tree of arrays or `jax.ShapeDtypeStruct`.
            names: the same tree with a tuple of logical axes at each leaf.
        """
        rows: list[Row] = []

        def one(path: Any, leaf: Any, axes: tuple[str | None, ...]) -> None:
            resolution = self._of_parameter(path, leaf, axes)
            factor = self.size(axis for dim in resolution.axes for axis in dim)
            total = math.prod(leaf.shape) * leaf.dtype.itemsize
            rows.append(
                Row(
                    parameter=path_name(path),
                    shape=tuple(leaf.shape),
                    dtype=str(leaf.dtype),
                    names=tuple(axes),
                    spec=resolution.axes,
                    bytes=total,
                    bytes_per_device=total // factor,
                    why=self._why(resolution, factor),
                )
            )

        jax.tree_util.tree_map_with_path(one, shapes, names)
        return Report(rows=tuple(rows))

    def local(
        self,
        fn: Callable[..., Any],
        in_names: Sequence[Sequence[str | None]],
        out_names: Sequence[str | None],
        *,
        out_shape: Sequence[int] | None = None,
    ):
        """`fn` on each device's part of its arguments: `shard_map` by logical names.

        A logical axis is sharded only along the mesh axes that divide it in every argument; along the others the
        devices repeat the work. A mesh axis that is manual already is left out.

        Args:
            fn: arrays in, one array out.
            in_names: logical axes of each argument.
            out_names: logical axes of the result.
            out_shape: its global shape; given, mesh axes must divide the result as well.
        """

        def run(*args: Any) -> Any:
            if self.mesh is None:
                return fn(*args)
            known = [(arg.shape, names) for arg, names in zip(args, in_names, strict=True)]
            agreed = self._agreed(known if out_shape is None else [*known, (tuple(out_shape), out_names)])
            # Every axis, used or not: kernels written by hand cannot be left to the partitioner along any of them.
            if not set(self.sizes) - _manual_axes() or self.num_devices == 1:
                return fn(*args)

            def spec(names: Sequence[str | None]) -> P:
                return partition(tuple(agreed.get(name, ()) if name else () for name in names))

            return self.mapped(fn, tuple(spec(names) for names in in_names), spec(out_names))(*args)

        return run

    def mapped(self, fn: Callable[..., Any], in_specs: tuple[P, ...], out_specs: Any) -> Callable[..., Any]:
        """`fn` on each device's part: `shard_map` over every mesh axis that is not manual already.

        Args:
            fn: arrays in, arrays out.
            in_specs: mesh axes of each argument.
            out_specs: of the results.
        """
        manual = _manual_axes()
        return jax.shard_map(
            fn,
            mesh=jax.sharding.get_abstract_mesh() if manual else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.sizes) - manual,
            check_vma=False,
        )

    def cut_in_use(self, names: Sequence[str | None], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that cut each dimension of a parameter where it is used, `use` having gathered the others.

        Axes that are manual here do not count: a parameter is whole along them, or the caller has cut it.
        """
        manual = _manual_axes()
        wanted = _use_axes(self, tuple(names), tuple(shape))[0]
        return tuple(tuple(axis for axis in dim if axis not in manual) for dim in wanted)

    def size(self, axes: Iterable[str]) -> int:
        """Devices along these mesh axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def written(self, axes: Iterable[str]) -> str:
        """These mesh axes with their sizes, for people: `data=4,context=2`."""
        return ",".join(f"{axis}={self.sizes[axis]}" for axis in axes)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Makes `nn.with_logical_constraint` in a user's own flax modules act on this mesh by these rules.

        That call does nothing outside `jax.set_mesh` plus `nn.logical_axis_rules`; this enters both, and tells `jit`
        so that a function traced under other rules is traced again.

        Raises:
            MeshError: there is no mesh, or only an abstract one.
        """
        if not isinstance(self.mesh, Mesh):
            raise MeshError("layout.context() needs devices: make the layout with a jax.sharding.Mesh")
        import flax.linen as nn

        usable = [
            (logical, axes[0] if len(axes) == 1 else axes or None)
            for logical, wanted in self.rules
            for axes in [tuple(axis for axis in rule_table.axes_of(wanted) if axis in self.sizes)]
            if axes or wanted is None
        ]
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(usable), _rules_in_force(tuple(usable)):
            yield

    def enter(self, x: T) -> T:
        """`x` on this layout's Auto mesh: an array of an Explicit mesh changes its type, not its place.

        Where the Explicit mesh has other axis names, the array is gathered.
        """
        given = jax.typeof(x).sharding
        if not isinstance(self.mesh, Mesh) or not explicit.is_explicit(given.mesh):
            return x
        self._check_devices(x)
        known = set(given.mesh.axis_names) <= set(self.mesh.axis_names)
        return explicit.enter(x, NamedSharding(self.mesh, P(*given.spec) if known else P()))

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Runs a model's body on the Auto mesh where the caller has set an Explicit one with `jax.set_mesh`."""
        return explicit.scope(self.mesh)

    def leave(self, y: T, like: Any) -> T:
        """`y` in the kind of type that `like` has: an Explicit array where the caller works with Explicit meshes."""
        return y if self.mesh is None else explicit.leave(self.mesh, y, like)

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of what every device has whole; None without devices."""
        return self.sharding()

    def sharding(self, *names: str | None, shape: Sequence[int] | None = None) -> NamedSharding | None:
        """The sharding of an array whose leading dimensions carry these logical axes; None without devices."""
        return NamedSharding(self.mesh, self.spec(*names, shape=shape)) if isinstance(self.mesh, Mesh) else None

    def along(self, axes: Sequence[tuple[str, ...]]) -> NamedSharding | None:
        """The sharding of an array whose leading dimensions these mesh axes cut; None without devices."""
        return NamedSharding(self.mesh, partition(axes)) if isinstance(self.mesh, Mesh) else None

    @property
    def gathers(self) -> bool:
        """Whether the matrices of a block are stored along mesh axes that do not cut their use: gathered each time."""
        used, stored = _use_axes(self, ("embed", "mlp"), (self.num_devices,) * 2)
        return {axis for dim in stored for axis in dim} > {axis for dim in used for axis in dim}

    @property
    def storing(self) -> frozenset[str]:
        """Mesh axes that a rule gives to parameters."""
        stored = (wanted for name, wanted in self.rules if not name.startswith("activation_"))
        return frozenset(axis for wanted in stored for axis in rule_table.axes_of(wanted))

    @property
    def batch_divisor(self) -> int:
        """What a batch must be a multiple of, so that the devices share it evenly."""
        return self.divisor("activation_batch")

    def divisor(self, name: str) -> int:
        """What a dimension of this logical axis must be a multiple of, so that the devices share it evenly.

        The same inside `shard_map` as outside: what is padded or put in order by it may be made on one side and read
        on the other.
        """
        (axes,) = rule_table.resolve((name,), self.rules, self.sizes).axes
        return self.size(axes)

    def rows(self, number: int) -> NamedSharding | None:
        """The sharding of arrays with this number of samples in front; None without devices.

        Of the mesh axes that share a batch, the first ones as far as they divide the number: guidance doubles the
        samples, and along the other axes the halves of a sample part.
        """
        return self.along(rule_table.resolve(("activation_batch",), self.rules, self.sizes, shape=(number,)).axes)

    def _agreed(self, arrays: Sequence[tuple[tuple[int, ...], Sequence[str | None]]]) -> dict[str, tuple[str, ...]]:
        """Mesh axes of each name: the leading ones that every array (shape, names) which carries it has for it."""
        agreed: dict[str, tuple[str, ...]] = {}
        for shape, names in arrays:
            _check_rank(shape, names)
            for name, dim in zip(names, self.resolve(*names, shape=shape).axes, strict=True):
                if name is not None:
                    agreed[name] = _common(agreed.get(name, dim), dim)
        return agreed

    def _place(self, x: Any, axes: tuple[tuple[str, ...], ...]) -> Any:
        if not isinstance(self.mesh, Mesh):
            raise MeshError("an abstract mesh can be planned with, not run on: give the model a jax.sharding.Mesh")
        self._check_devices(x)
        manual = _manual_axes()
        if manual:
            free = tuple(tuple(axis for axis in dim if axis not in manual) for dim in axes)
            if manual >= set(self.mesh.axis_names):
                return x
            return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), partition(free)))
        return explicit.enter(x, NamedSharding(self.mesh, partition(axes)))

    def _check_devices(self, x: Any) -> None:
        assert isinstance(self.mesh, Mesh)
        theirs = jax.typeof(x).sharding.mesh
        if not theirs.empty and theirs.size not in (1, self.mesh.size):
            raise MeshError(
                f"the array lives on mesh {describe(theirs)}, the model on mesh {describe(self.mesh)}: "
                "jax.device_put the array onto the model's mesh, or give the model the array's mesh"
            )

    def _of_parameter(self, path: Any, leaf: Any, names: tuple[str | None, ...]) -> Resolution:
        label = path_name(path)
        if len(names) != len(leaf.shape):
            raise RuleError(f"parameter {label} has shape {tuple(leaf.shape)} but logical axes {names}")
        try:
            return self.stored(*names, shape=leaf.shape)
        except RuleError as error:
            raise type(error)(f"parameter {label}: {error}") from None

    def _why(self, resolution: Resolution, factor: int) -> str:
        reasons = [note.text for note in resolution.notes]
        idle = [f"{a}={s}" for a, s in self.sizes.items() if s > 1 and not any(a in dim for dim in resolution.axes)]
        if factor == 1 and self.num_devices > 1 and not reasons:
            reasons.append(NO_RULE)
        elif reasons and not idle:
            reasons.append("storage is sharded all the same, gathered on use")
        return "; ".join(reasons)

    def _say_unmet(self, shapes: Any, names: Any) -> None:
        if self.num_devices == 1:
            return
        rows = self.report(shapes, names).rows
        unmet = [row for row in rows if row.why and row.why != NO_RULE]
        whole = [row for row in unmet if row.bytes_per_device == row.bytes and row.bytes]
        if unmet:
            example = whole[0] if whole else unmet[0]
            say_once(
                log,
                f"layout: {len(unmet)} of {len(rows)} parameters are not sharded as the rules wish, {len(whole)} of "
                f"them on no axis; for example {example.parameter}: {example.why} (layout.report lists all)",
            )


def partition(axes: Sequence[tuple[str, ...]]) -> P:
    """The partition of an array by the mesh axes of each dimension."""
    return P(*(dim[0] if len(dim) == 1 else dim or None for dim in axes))


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """The leading part that both share."""
    number = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:number]


def _check_rank(shape: Sequence[int], names: Sequence[str | None]) -> None:
    if len(shape) != len(names):
        raise RuleError(
            f"an array of shape {tuple(shape)} has {len(shape)} dimensions, but {len(names)} names: {tuple(names)}"
        )


def _check_used(mesh: Mesh | AbstractMesh, rules: LogicalAxisRules, strict: bool) -> None:
    named = {axis for _, wanted in rules for axis in rule_table.axes_of(wanted)}
    for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
        if size > 1 and axis not in named:
            text = (
                f"mesh axis '{axis}' ({size}) is named by no rule, so devices along it repeat the same work: "
                f'write a rule such as ("activation_batch", "{axis}"), or a mesh without it'
            )
            if strict:
                raise RuleError(text)
            warnings.warn(text, LayoutWarning, stacklevel=3)


def _say_skipped(mesh: Mesh | AbstractMesh, rules: LogicalAxisRules) -> None:
    for name, wanted in rule_table.without_axes(rules, mesh.axis_names):
        say_once(
            log, f"layout: the rule ('{name}', {wanted!r}) does nothing: the mesh {describe(mesh)} has no such axis"
        )


def _refuse(layout: Layout, names: Sequence[str | None], notes: Sequence[Note]) -> None:
    if layout.strict and notes:
        error = IndivisibleError if any(note.kind == "indivisible" for note in notes) else RuleError
        whole = " and ".join(dict.fromkeys(f"('{note.logical}', None)" for note in notes))
        raise error(
            f"{tuple(names)}: {'; '.join(note.text for note in notes)} (strict: the rule {whole} before the others "
            "leaves it whole, or leave strict out)"
        )


@functools.lru_cache(maxsize=65536)
def _resolve(
    layout: Layout, names: tuple[str | None, ...], shape: tuple[int, ...] | None, manual: frozenset[str]
) -> Resolution:
    sizes = {axis: size for axis, size in layout.sizes.items() if axis not in manual}
    resolution = rule_table.resolve(names, layout.rules, sizes, shape=shape)
    _refuse(layout, names, resolution.notes)
    return resolution


@functools.lru_cache(maxsize=65536)
def _stored(layout: Layout, names: tuple[str | None, ...], shape: tuple[int, ...]) -> Resolution:
    resolution = rule_table.resolve(names, layout.rules, layout.sizes, shape=shape, storage=rule_table.STORAGE_RULES)
    _refuse(layout, names, resolution.notes)
    return resolution


@functools.lru_cache(maxsize=65536)
def _use_axes(
    layout: Layout, names: tuple[str | None, ...], shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    batch = rule_table.resolve(("activation_batch",), layout.rules, layout.sizes).axes[0]
    by_rules = rule_table.resolve(names, layout.rules, layout.sizes, shape=shape).axes
    wanted = tuple(tuple(axis for axis in dim if axis not in batch) for dim in by_rules)
    return wanted, _stored(layout, names, shape).axes


def _manual_axes() -> frozenset[str]:
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(layout: Layout, wanted: Any, stored: Any, x: Any) -> Any:
    return layout._place(x, wanted)


def _gathered_fwd(layout: Layout, wanted: Any, stored: Any, x: Any) -> tuple[Any, None]:
    return layout._place(x, wanted), None


def _gathered_bwd(layout: Layout, wanted: Any, stored: Any, _: None, cotangent: Any) -> tuple[Any]:
    return (layout._place(cotangent, stored),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _table(layout: Layout, wanted: Any, x: Any) -> Any:
    return x


def _table_fwd(layout: Layout, wanted: Any, x: Any) -> tuple[Any, None]:
    return x, None


def _table_bwd(layout: Layout, wanted: Any, _: None, cotangent: Any) -> tuple[Any]:
    return (layout._place(cotangent, wanted),)


_table.defvjp(_table_fwd, _table_bwd)
