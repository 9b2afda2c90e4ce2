"""The bytes of every strategy are those of its textbook formula, and no array is gathered for want of a better way."""

from __future__ import annotations

import contextlib
import functools
import os
import re
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
from maxdiffusion.parallel.mesh import build_mesh
from maxdiffusion.specs import MeshSpec
from maxdiffusion.tools.budget import SUMS, Exchange, Parameter, data_parallel, fully_sharded
from maxdiffusion.tools.measure import (
    SMALL,
    STRATEGIES,
    Measured,
    as_markdown,
    as_rows,
    as_text,
    compare,
    lower_step,
    measure,
)
from maxdiffusion.tools.traffic import Collective, Traffic

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


_QUICK = ("FSDP", "tensor", "ring", "pipeline")
"""The others differ from these by little, and compile as long."""

names = pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)


@functools.cache
def step(name: str) -> tuple[Measured, str]:
    """What a strategy moves, and what the partitioner wrote while it compiled the step."""
    one = STRATEGIES[name]
    with compiled_anew(), standard_error() as said:
        result = measure("flux-dev", mesh=MeshSpec.parse(one.mesh), keywords=one.keywords, strategy=name)
        return result, said()


@names
def test_bytes_are_the_formula_s(name: str) -> None:
    """Bytes to 10 %, and as many arrays, those of loops times their trips; measured: no byte off."""
    result, _ = step(name)
    assert result.rows and result.ok, as_markdown([result])
    assert [row.count for row in result.rows] == [row.formula_count for row in result.rows], as_markdown([result])


@names
def test_the_partitioner_never_gives_up(name: str) -> None:
    _, said = step(name)
    assert GIVEN_UP not in said


@names
def test_the_page_shows_these_rows(name: str) -> None:
    """Run `python scripts/build_traffic_table.py` where this fails for a good reason."""
    head, rule, *rows = as_markdown([step(name)[0]]).splitlines()
    found = PAGE.read_text().split("<!-- traffic: begin -->\n")[1].split("<!-- traffic: end -->")[0].splitlines()
    assert found[:2] == [head, rule]
    assert [line for line in found if line.startswith(f"| {name} |")] == rows


def test_the_page_shows_every_strategy() -> None:
    shown = re.findall(r"^\| ([^|]+) \| ([a-z]+=[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert list(dict.fromkeys(shown)) == [(name, one.mesh) for name, one in STRATEGIES.items()]


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
