"""Rematerialised models: the same gradients, less memory, more FLOPs; and what they save goes by its name."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from maxdiffusion.models.registry import lookup
from maxdiffusion.nn import stack
from maxdiffusion.nn.model import DiffusionModel
from maxdiffusion.nn.stack import BLOCK_INPUT
from maxdiffusion.parallel.memory import PINNED_HOST
from maxdiffusion.specs import RematName
from maxdiffusion.tools.flops import Flops, flops
from tests.aot import compile_ahead
from tests.models.aot import BATCH
from tests.models.aot import NUM_LAYERS as NUM_LAYERS_OF_AOT

pytestmark = pytest.mark.whole

NUM_LAYERS = 3
DEPTHS: dict[str, dict[str, Any]] = {
    "flux-dev": {"num_layers": NUM_LAYERS, "num_single_layers": NUM_LAYERS},
    # As wide as the twin of FLUX.1: half as wide, gradients average fewer roundings.
    "sd15": {"transformer_layers_per_block": NUM_LAYERS, "block_out_channels": (32, 64), "norm_num_groups": 8},
}
NAMES = get_args(RematName)
POLICIES = ("none", "minimal", "full", "offload")


def build(name: str, **keywords: Any) -> DiffusionModel:
    return lookup(name).build("tiny", precision="highest", **DEPTHS[name], **keywords)


def traced(model: DiffusionModel, *, backward: bool = True) -> jax.stages.Traced:
    """The mean square of a call, or its gradients, of parameters and random inputs."""
    shapes, _ = model.abstract_params()
    inputs = model.call_shapes(2, height=16, width=16, text=8)

    def loss(params: Any, inputs: Any) -> jax.Array:
        return jnp.mean(jnp.square(jax.tree.leaves(model.apply({"params": params}, **inputs))[0]))

    return jax.jit(jax.grad(loss) if backward else loss).trace(shapes, inputs)


def arguments(model: DiffusionModel) -> tuple[Any, Any]:
    """Weights and random inputs for `traced`."""
    random = np.random.default_rng(0)

    def values(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return random.standard_normal(leaf.shape).astype(leaf.dtype)

    inputs = jax.tree.map(values, model.call_shapes(2, height=16, width=16, text=8))
    return model.init_weights(jax.random.key(0)), inputs


class Ran(NamedTuple):
    """A compiled program: its gradients, the bytes of its temporary memory, its FLOPs."""

    gradients: Any
    temporary: int
    flops: Flops


@functools.cache
def ran(name: str, scanned: bool, policy: str, save: tuple[str, ...] = ()) -> Ran:
    model = build(name, scan_layers=scanned, remat_policy=policy, remat_save=save)
    compiled = traced(model).lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    gradients = jax.device_get(compiled(*arguments(model)))
    return Ran(gradients, memory.temp_size_in_bytes, flops(compiled.as_text() or ""))


def difference(a: Any, b: Any) -> float:
    """Norm of the difference of two trees, over that of the second."""

    def norm(tree: Any) -> float:
        return math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(tree)))

    return norm(jax.tree.map(lambda x, y: x.astype(np.float64) - y, a, b)) / norm(b)


@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DEPTHS)
@pytest.mark.parametrize(
    ("policy", "save"),
    [
        ("minimal", ()),
        ("full", ()),
        ("full", NAMES),
        pytest.param("offload", ("hidden",), marks=pytest.mark.slow),
        pytest.param("minimal", ("attention",), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_same(name: str, scanned: bool, policy: str, save: tuple[str, ...]) -> None:
    """The same products of the same numbers, fused by XLA into other loops: a few units of float32's 6e-8."""
    assert difference(ran(name, scanned, policy, save).gradients, ran(name, scanned, "none").gradients) <= 1e-6


@pytest.mark.parametrize("name", DEPTHS)
def test_scanned_stacks_hold_less_with_each_policy(name: str) -> None:
    none, minimal, full = (ran(name, True, policy).temporary for policy in POLICIES[:3])
    assert full < minimal < none
    named = ran(name, True, "full", NAMES).temporary
    assert full < named < none


@pytest.mark.parametrize("name", DEPTHS)
def test_what_is_recomputed_costs_at_most_a_forward_pass(name: str) -> None:
    """`minimal` does scores and their product with the values again; `full` all but what the backward pass does not
    need: the last product of each branch, whose result is only added. Named activations spare their products."""
    none, minimal, full = (ran(name, True, policy).flops.total for policy in POLICIES[:3])
    forward = flops(traced(build(name, scan_layers=True), backward=False).lower().compile().as_text() or "").total
    named = ran(name, True, "full", NAMES).flops.total
    assert none < minimal < full < none + forward
    assert full - none > forward / 2
    assert none < named < full


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of the jaxprs within included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def count(jaxpr: Any, primitive: str) -> int:
    return sum(equation.primitive.name == primitive for equation in equations(jaxpr))


@pytest.mark.parametrize("name", DEPTHS)
def test_the_names_are_those_of_the_table(name: str) -> None:
    named = [
        equation.params["name"]
        for equation in equations(traced(build(name), backward=False).jaxpr.jaxpr)
        if equation.primitive.name == "name"
    ]
    assert set(named) == {BLOCK_INPUT, *NAMES}


BLOCKS = {"flux-dev": 2 * NUM_LAYERS, "sd15": 4 * NUM_LAYERS + 8}
"""Double and single blocks; the blocks of four spatial transformers, and residual blocks."""


@pytest.mark.parametrize("name", DEPTHS)
def test_every_unrolled_block_is_rematerialised(name: str) -> None:
    """In the traced program, since XLA's CPU compiler holds the memory of unrolled blocks all the same."""
    for policy, number in (("none", 0), ("full", BLOCKS[name])):
        assert count(traced(build(name, remat_policy=policy)).jaxpr.jaxpr, "remat2") == number


@pytest.mark.parametrize("save", [(), ("attention",)])
def test_flash_kernels_run_once_where_their_result_is_saved(save: tuple[str, ...]) -> None:
    """Else its products stand in the program of the backward pass too; those of weights are all kept."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def products(policy: str, save: tuple[str, ...] = ()) -> int:
        keywords = {"attention_kernel": "flash", "flash_min_seq_length": 0, "mesh": mesh, "scan_layers": True}
        model = build("flux-dev", remat_policy=policy, remat_save=save, **keywords)
        return count(traced(model).jaxpr.jaxpr, "dot_general")

    again = products("minimal", save) - products("none")
    assert again == 0 if save else again > 0


@pytest.mark.parametrize("name", ["flux-dev", pytest.param("sd15", marks=pytest.mark.slow)])
def test_block_inputs_wait_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have a pinned memory by name: what is sent there comes back, and the gradients are the same."""
    monkeypatch.setattr(stack, "host_memory", lambda layout: PINNED_HOST)
    model = build(name, scan_layers=True, remat_policy="offload")
    program = traced(model)
    moves = [equation for equation in equations(program.jaxpr.jaxpr) if equation.primitive.name == "device_put"]
    leave = [move for move in moves if str(move.outvars[0].aval.memory_space).endswith("Host")]
    # The two streams of the double blocks and the one of the single blocks; four transformers, eight residual blocks.
    assert len(leave) == {"flux-dev": 3, "sd15": 12}[name] and len(moves) == 2 * len(leave)
    gradients = program.lower().compile()(*arguments(model))
    assert difference(jax.device_get(gradients), ran(name, True, "full").gradients) <= 1e-6


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", DEPTHS)
def test_tpus_hold_less_with_each_policy_of_unrolled_blocks(name: str, tmp_path: Path) -> None:
    """In the main memory of a chip; what its vector memory holds does not count."""
    programs = [f"{name}:unrolled:{policy}" for policy in POLICIES[:3]]
    files = compile_ahead("tests.models.aot", "v5e", programs, tmp_path, timeout=1800)
    none, minimal, full = (json.loads(files[f"{program}.memory"])["device"] for program in programs)
    assert full < minimal < none


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tpus_send_block_inputs_to_their_host(tmp_path: Path) -> None:
    """Exactly these: image and text of each block of two scanned stacks, 384 tokens of 128 float32 channels a sample.
    They are stacked in memory space 5, the host's, and nowhere else: slices go to and fro, never a whole stack."""
    program = "flux-dev:scanned:offload"
    files = compile_ahead("tests.models.aot", "v5e", [program], tmp_path, timeout=1800)
    depth = NUM_LAYERS_OF_AOT["scanned"]
    assert json.loads(files[f"{program}.memory"])["host"] == 2 * depth * BATCH * 384 * 128 * 4
    stacks = re.findall(rf"f32\[{depth},{BATCH},\d+,128\]\{{[^}}]*\}}", files[f"{program}.hlo"])
    assert stacks and all(stack.endswith("S(5)}") for stack in stacks)
