"""The bytes of every strategy are those of its textbook formula, and no array is gathered for want of a better way."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.models.registry import lookup
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import build_mesh, written
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.budget import SUMS, Exchange, Parameter, data_parallel, fully_sharded
from maxdiffusion.tools.measure import (
    SMALL,
    STRATEGIES,
    TOLERANCE,
    Measured,
    as_markdown,
    as_rows,
    as_text,
    compare,
    lower_step,
    measure,
    measure_all,
    twin,
)
from maxdiffusion.tools.traffic import Collective, Traffic, traffic
from maxdiffusion.tools.verify import MESHES

pytestmark = pytest.mark.whole

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"

GIVEN_UP = "Involuntary full rematerialization"
"""What XLA's partitioner writes to file descriptor 2 before it gathers an array that it cannot move otherwise."""


@contextlib.contextmanager
def standard_error() -> Iterator[Callable[[], str]]:
    """What the process, C++ included, writes to standard error within."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: (file.seek(0), file.read())[1]
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Without the persistent cache: a program that comes from there has no words of the partitioner."""
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        reset_cache()


_QUICK = (
    ("flux-dev", "FSDP"),
    ("flux-dev", "tensor"),
    ("flux-dev", "ring"),
    ("flux-dev", "circular pipeline"),
    ("flux-dev", "pipeline and tensor"),
    ("sd15", "tensor"),
    ("sd15", "FSDP and context"),
)
"""The others differ from these by little, and compile as long."""

_NO_FORMULA = (("sd15", "pipeline and tensor"), ("sd15", "pipeline and context"))
"""Most of a UNet lies outside of its pipelined stack, and the compiler shares it among the stages as it likes."""

programs = pytest.mark.parametrize(
    ("model", "name"),
    [
        (model, name) if (model, name) in _QUICK else pytest.param(model, name, marks=pytest.mark.slow)
        for model in ("flux-dev", "sd15")
        for name in STRATEGIES
    ],
)


@functools.cache
def step(model: str, name: str) -> tuple[Measured, str]:
    """What a strategy moves, and what the partitioner wrote while it compiled the step."""
    one = STRATEGIES[name]
    with compiled_anew(), standard_error() as said:
        result = measure(model, mesh=MeshSpec.parse(one.mesh), keywords=one.keywords, strategy=name)
        return result, said()


@programs
def test_bytes_are_the_formula_s(model: str, name: str) -> None:
    """Bytes to 10 %, those of loops times their trips; measured: no byte off, but where a UNet's gathers are shared.

    As many arrays as the formula has: to 10 % as well, since the compiler gathers the same map once for two readers.
    """
    result, _ = step(model, name)
    assert result.rows and result.ok, as_markdown([result])
    assert bool(result.no_formula) == ((model, name) in _NO_FORMULA), result.no_formula
    for row in () if result.no_formula else result.rows:
        assert not row.counted or abs(row.count - row.formula_count) <= TOLERANCE * row.formula_count, row


@programs
def test_the_partitioner_never_gives_up(model: str, name: str) -> None:
    _, said = step(model, name)
    assert GIVEN_UP not in said


@pytest.mark.parametrize(
    "mesh",
    ["data=2,fsdp=4", "fsdp=4,context=2"]
    + [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES if mesh not in ("data=8", "fsdp=8")],
)
@pytest.mark.filterwarnings("ignore:.* stages of mesh axis 'stage' repeat the same work")
def test_the_partitioner_never_gives_up_on_tables_that_are_looked_up(mesh: str) -> None:
    """Words and positions of the demonstration's text: their gradients are summed before they are cut as stored."""
    keywords = {"scan_layers": "stage" in mesh}
    with compiled_anew(), standard_error() as said:
        lower_step(lookup("pictures").build("tiny", mesh=build_mesh(MeshSpec.parse(mesh)), **keywords)).compile()
        assert GIVEN_UP not in said()


def test_every_promised_mesh_is_among_the_strategies() -> None:
    """So the partitioner's warning is looked for on each of them, for a UNet and a transformer."""
    assert {one.mesh for one in STRATEGIES.values()} >= set(MESHES)


@programs
def test_the_page_shows_these_rows(model: str, name: str) -> None:
    """Run `python scripts/build_traffic_table.py` where this fails for a good reason."""
    head, rule, *rows = as_markdown([step(model, name)[0]]).splitlines()
    found = _table(model)
    assert found[:2] == [head, rule]
    assert [line for line in found if line.startswith(f"| {name} |")] == rows


def _table(model: str) -> list[str]:
    """The lines of a model's table on the page."""
    text = PAGE.read_text().split(f"<!-- traffic {model}: begin -->\n")[1]
    return text.split(f"<!-- traffic {model}: end -->")[0].splitlines()


@pytest.mark.parametrize("model", ["flux-dev", "sd15"])
def test_the_page_shows_every_strategy(model: str) -> None:
    shown = [tuple(line.strip("| ").split(" | ")[:2]) for line in _table(model)[2:]]
    meshes = {name: written(build_mesh(MeshSpec.parse(one.mesh))) for name, one in STRATEGIES.items()}
    assert list(dict.fromkeys(shown)) == list(meshes.items())


@pytest.mark.parametrize("model", ["flux-dev", pytest.param("sd15", marks=pytest.mark.slow)])
def test_across_slices_only_gradients_of_replicas_are_summed(model: str, devices: np.ndarray) -> None:
    """Two slices of four devices: parameters are gathered and gradients scattered within them (`fsdp`), and what is
    left of a gradient on a device, a quarter where it is stored in parts, is summed across them (`data`)."""
    mesh = build_mesh(MeshSpec.parse(STRATEGIES["HSDP"].mesh))
    assert mesh.devices.reshape(2, 4).tolist() == devices.reshape(2, 4).tolist() and mesh.axis_names[:1] != ("fsdp",)
    twin_ = twin(model, mesh, STRATEGIES["HSDP"].keywords)
    found = traffic(lower_step(twin_).compile().as_text() or "", mesh)
    across = [one for one in found.collectives if "fsdp" not in one.axes or "data" in one.axes]
    assert {(one.kind, one.axes) for one in across} <= {("all-reduce", ("data",)), ("all-reduce", ("data", "fsdp"))}
    stored = twin_.layout.report(*twin_.abstract_params()).bytes_per_device
    moved = sum(one.bytes * one.count for one in across)
    # The loss, a number, is summed across slices too
    assert stored <= moved <= stored * (1 + TOLERANCE)


def test_gradients_of_gathered_keys_go_back_into_parts_of_the_sequence() -> None:
    mesh = build_mesh(MeshSpec.parse("fsdp=2,context=4"))
    model = lookup("flux-dev").build("tiny", mesh=mesh, context_attention="gather", scan_layers=True)
    with compiled_anew(), standard_error() as said:
        lower_step(model).compile()
        assert GIVEN_UP not in said()


def test_the_partitioner_says_when_it_gives_up(devices: np.ndarray) -> None:
    """The control of the test above: cubes to slices in another order of the axes, for which there is no collective."""
    mesh = Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"))

    def moved(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(("c", "b", "a"))))

    x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=NamedSharding(mesh, P("a", "b", "c")))
    with compiled_anew(), standard_error() as said:
        jax.jit(moved).lower(x).compile()
        assert GIVEN_UP in said()


def test_what_no_formula_names_is_shown_and_fails() -> None:
    """Two kinds in the program, two in the textbook, of which one is replaced and one is missing."""
    found = Traffic(
        collectives=(
            Collective(kind="all-reduce", axes=("fsdp",), tensors=(8192, 64), count=2),
            Collective(kind="all-gather", axes=("data",), tensors=(8192,), count=1),
        )
    )
    wanted = [
        Exchange(what="gradients", kinds=SUMS, axes=("fsdp",), bytes=8192, count=2),
        Exchange(what="norms", kinds=SUMS, axes=("fsdp",), bytes=SMALL, count=9),
        Exchange(what="tokens", kinds=("all-to-all",), axes=("fsdp",), bytes=5000, count=3),
    ]
    rows = {(row.kind, row.axes): row for row in compare(found, wanted)}
    assert set(rows) == {("all-reduce", "fsdp"), ("all-gather", "data"), ("all-to-all", "fsdp")}
    summed, spurious, missing = (rows[key] for key in sorted(rows, key=lambda key: -rows[key].bytes))
    assert (summed.ok, summed.instead_of, summed.count, summed.ratio) == (True, "reduce-scatter", 2, 1.0)
    assert (spurious.ok, spurious.what, spurious.formula) == (False, "", 0)
    assert (missing.ok, missing.bytes, missing.formula, missing.formula_count) == (False, 0, 15_000, 3)


def test_one_sum_along_both_axes_is_that_of_gradients_and_of_their_replicas() -> None:
    """Of three gradients of 32,768 bytes, two are summed at once, beside one that no axis stores."""
    found = Traffic(
        collectives=(
            Collective(kind="all-reduce", axes=("data", "fsdp"), tensors=(32_768, 9000), count=1),
            Collective(kind="all-reduce", axes=("data", "fsdp"), tensors=(32_768,), count=1),
            Collective(kind="all-reduce", axes=("fsdp",), tensors=(32_768,), count=1),
            Collective(kind="all-reduce", axes=("data",), tensors=(16_384,), count=1),
        )
    )
    layout = Layout.of(build_mesh(MeshSpec.parse("data=2,fsdp=4")))
    stored = Parameter(bytes=32_768, layers=3, again=True, gathered=("fsdp",), of_tokens=True)
    whole = Parameter(bytes=9000, layers=1, again=False, gathered=(), of_tokens=True)
    sums = [one for one in fully_sharded([stored], ("data", "fsdp"), layout) if one.what != "parameters"]
    assert [(one.axes, one.bytes, one.part_of) for one in sums] == [(("fsdp",), 32_768, 0), (("data",), 8192, 32_768)]
    wanted = [*data_parallel([whole], ("data", "fsdp")), *sums]
    rows = {row.axes: row for row in compare(found, wanted)}
    at_once = rows["data+fsdp"]
    assert (at_once.count, at_once.formula_count, at_once.ratio) == (3, 3, 1.0)
    assert at_once.what == "gradients, gradients and replicas"
    assert (rows["fsdp"].formula_count, rows["fsdp"].ratio, rows["fsdp"].instead_of) == (1, 1.0, "reduce-scatter")
    # The control: one array of another size than a part's
    assert (rows["data"].formula_count, rows["data"].formula, rows["data"].ok) == (1, 8192, False)


def test_without_a_formula_nothing_is_compared() -> None:
    row = compare(Traffic(collectives=(Collective(kind="all-reduce", axes=("a",), tensors=(8192,), count=1),)), ())
    result = Measured(strategy="", mesh="a=2", rows=row, no_formula="two strategies at once")
    assert result.ok and not replace(result, no_formula="").ok
    (shown,) = as_rows(result)
    assert (shown["what"], shown["bytes"], shown["formula_bytes"], shown["ratio"]) == ("no formula", 8192, None, None)
    assert as_text(None) == "-"


def test_what_has_no_formula_is_shown_and_cannot_be_wrong() -> None:
    """One kind of a program, beside others that have formulas: a row with a name and no figure to hold it to."""
    found = Traffic(collectives=(Collective(kind="all-to-all", axes=("a",), tensors=(8192,), count=1),))
    named = Exchange(what="skips", kinds=("all-to-all",), axes=("a",), bytes=0, count=0, counted=False)
    (row,) = compare(found, [named])
    assert row.ok and (row.what, row.bytes) == ("skips", 8192)
    (shown,) = as_rows(Measured(strategy="", mesh="a=2", rows=(row,)))
    assert (shown["what"], shown["formula_bytes"], shown["ratio"], shown["ok"]) == ("skips", None, None, True)
    assert not compare(found, [])[0].ok


def test_parts_of_a_gradient_may_be_summed_where_they_are_made_and_then_moved() -> None:
    """Two of three gradients of 32,768 bytes: a half of each is summed, and moved to where it is stored."""
    found = Traffic(
        collectives=(
            Collective(kind="all-reduce", axes=("fsdp",), tensors=(32_768,), count=1),
            Collective(kind="all-reduce", axes=("fsdp",), tensors=(16_384,), count=2),
            Collective(kind="collective-permute", axes=("fsdp", "context"), tensors=(16_384,), count=2),
        )
    )
    wanted = Exchange(what="gradients", kinds=SUMS, axes=("fsdp",), bytes=32_768, count=3, devices=2)
    rows = {row.kind: row for row in compare(found, [wanted])}
    assert set(rows) == {"all-reduce", "collective-permute"} and all(row.ratio == 1.0 for row in rows.values())
    assert sum(row.formula for row in rows.values()) == 3 * 32_768
    assert rows["collective-permute"].what == "gradients, to where they are stored"
    # The control: the moves alone, without the sums of the parts
    (_, *moved), rows = found.collectives, compare(Traffic(collectives=found.collectives[::2]), [wanted])
    assert moved and not all(row.ok for row in rows)


def test_a_strategy_that_cannot_be_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion 2.1's twin has attentions of 2 heads, which 4 devices cannot share."""
    wanted = {name: STRATEGIES[name] for name in ("tensor", "Ulysses")}
    monkeypatch.setattr("maxdiffusion.tools.measure.STRATEGIES", wanted)
    monkeypatch.setattr("maxdiffusion.tools.measure.lower_step", lambda model: jax.jit(jnp.sin).lower(1.0))
    said: list[str] = []
    tensor, swap = measure_all("sd21", on_result=lambda result: said.append(result.strategy))
    assert said == ["tensor", "Ulysses"] and tensor.ok and swap.ok
    assert "2 heads do not divide by tensor=4, for which there is no formula" in tensor.no_formula
    assert "a Ulysses degree of 4 does not divide the heads of a device (2)" in swap.no_formula
