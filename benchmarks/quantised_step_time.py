"""What compilers for accelerators make of quantised FLUX.1 blocks, and the step time that follows from published peaks.

    make aot && python benchmarks/quantised_step_time.py [--targets v5e,v6e,7x,h100] [--gradients] [--json]

Compiles one double and two single blocks at full width, the share of the whole that 19 and 38 have, for one chip: one
picture of 1024 x 1024 pixels (4,096 tokens beside 512 of text) in bfloat16. Products are counted in the compiled text
by the dtype of their operands, and attention, which is a kernel's, by its formula; bytes are the operands and results
of all instructions in it, as if each went through the chip's memory. A step lies between two ratios to bfloat16:
products and memory one after the other, and wholly at the same time. The compilers' own count of bytes stands beside,
where they have one (TPUs). Their estimate of time is not used: it takes int8 for as slow as bfloat16, and a kernel for
-1 second.

jax 0.10 cannot print this program for TPU 7x: that row needs a newer one (Python 3.12 or later, `make aot PYTHON=...`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from maxdiffusion.errors import nearest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TOKENS, TEXT, WIDTH = 4096, 512, 3072
LAYERS = {"num_layers": 1, "num_single_layers": 2}


class Chip(NamedTuple):
    """Published peaks of a chip: 10^12 operations a second by operands, and 10^9 bytes a second of its memory."""

    bf16: float
    small: float
    memory: float
    modes: tuple[str, ...]


CHIPS = {
    # Google Cloud's pages of each TPU version; NVIDIA's data sheet of the H100 SXM, dense.
    "v5e": Chip(197, 394, 819, ("int8",)),
    "v6e": Chip(918, 1836, 1640, ("int8",)),
    "7x": Chip(2307, 4614, 7380, ("fp8", "fp8_full")),
    "h100": Chip(989, 1979, 3350, ("int8", "fp8", "fp8_full")),
}
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2}
"""Bytes of a number; others have four."""

MOVES_NOTHING = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    # What is fetched ahead is read by its user.
    *(f"{name}-{end}" for name in ("async", "copy", "slice") for end in ("start", "update", "done")),
)
SMALL = ("s8", "f8e4m3fn", "f8e5m2")


def compiled(target: str, mode: str | None, stored: bool, gradients: bool) -> dict[str, float]:
    """What the program of one device holds: operations by the width of their operands, and bytes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from tests.kernels.attention.aot import devices

    from maxdiffusion.models.registry import lookup
    from maxdiffusion.tools.flops import products

    mesh = Mesh(np.array(devices(target)[:1]), ("data",))
    model = lookup("flux-dev").build(
        mesh=mesh, dtype="bfloat16", quantization=mode, attention_kernel="flash", flash_min_seq_length=0, **LAYERS
    )
    shapes, _ = model.abstract_params()
    if stored:
        shapes = jax.eval_shape(model.quantize_weights, shapes)
    elif not gradients:
        # Sampling keeps its weights in bfloat16; training in float32.
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    side = 2 * int(TOKENS**0.5)

    def placed(tree: Any) -> Any:
        whole = model.layout.replicated
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)

    def call(params: Any, inputs: Any) -> jax.Array:
        out = jax.tree.leaves(model.apply({"params": params}, **inputs))[0]
        return jnp.mean(jnp.square(out)) if gradients else out

    inputs = placed(model.call_shapes(1, height=side, width=side, text=TEXT))
    program = jax.jit(jax.grad(call) if gradients else call).lower(placed(shapes), inputs).compile()
    cost: Any = program.cost_analysis() or {}
    text, kinds = program.as_text() or "", Counter[str]()
    for dtypes, operations in products(text).items():
        kinds["small" if set(dtypes) <= set(SMALL) else "plain"] += operations
    attentions = sum(LAYERS.values()) * 4 * (TOKENS + TEXT) ** 2 * WIDTH * (3.5 if gradients else 1)
    return {
        "small": kinds["small"],
        "plain": kinds["plain"] + attentions,
        "bytes": moved(text),
        "compilers_bytes": cost.get("bytes accessed", 0.0),
    }


def moved(text: str) -> int:
    """Bytes that the instructions of a program without loops read and write; a fusion keeps what is inside it."""
    from maxdiffusion.tools.hlo import arrays_of, instructions

    walked = list(instructions(text))
    shapes = [
        [one.shape, *one.operands()]
        for one in walked
        if one.computation == walked[0].computation and one.operation not in MOVES_NOTHING
    ]
    return sum(
        WIDTHS.get(dtype, 4) * math.prod(size) for some in shapes for one in some for dtype, size in arrays_of(one)
    )


def bounds(found: dict[str, float], chip: Chip) -> tuple[float, float]:
    """Milliseconds with products and memory one after the other, and with both at the same time."""
    products = found["small"] / chip.small / 1e9 + found["plain"] / chip.bf16 / 1e9
    memory = found["bytes"] / chip.memory / 1e6
    return products + memory, max(products, memory)


def rows(target: str, gradients: bool) -> list[dict[str, Any]]:
    """One row a mode, and one for its weights stored."""
    chip = CHIPS[target]
    plain = compiled(target, None, False, gradients)
    made = []
    for mode in (None, *chip.modes):
        if mode == "fp8_full" and not gradients:
            continue
        for stored in (False,) if mode is None or gradients else (False, True):
            found = plain if mode is None else compiled(target, mode, stored, gradients)
            ratios = [mine / theirs for mine, theirs in zip(bounds(found, chip), bounds(plain, chip), strict=True)]
            made.append(
                {
                    "target": target,
                    "mode": mode or "bfloat16",
                    "weights": "stored" if stored else "plain",
                    "share_small": found["small"] / (found["small"] + found["plain"]),
                    "bytes_ratio": found["bytes"] / plain["bytes"],
                    "apart": ratios[0],
                    "together": ratios[1],
                    "compilers_bytes_ratio": found["compilers_bytes"] / plain["compilers_bytes"]
                    if plain["compilers_bytes"]
                    else None,
                    **found,
                }
            )
    return made


def main() -> None:
    """Prints the table: a process a target, where jax finds that compiler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(CHIPS), help="joined by commas")
    parser.add_argument("--gradients", action="store_true", help="of training, with float32 weights, not of sampling")
    parser.add_argument("--json", action="store_true", help="print one JSON object a target")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for target in asked.targets.split(","):
        if target not in CHIPS:
            parser.error(f"--targets {target}: {nearest(target, CHIPS)}")
    if asked.here:
        sys.stdout.write(json.dumps({"rows": rows(asked.targets, asked.gradients)}) + "\n")
        return
    # As the tests do it: the compilers lie beside the environment, and no hardware is looked for.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(Path(sys.prefix) / "aot"), env.get("PYTHONPATH", "")])
    for target in asked.targets.split(","):
        words = ["--targets", target, "--here", *(["--gradients"] if asked.gradients else [])]
        ran = subprocess.run([sys.executable, __file__, *words], env=env, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(ran.stderr[-2000:])
        if asked.json:
            sys.stdout.write(ran.stdout)
            continue
        for row in json.loads(ran.stdout.splitlines()[-1])["rows"]:
            theirs = "-" if row["compilers_bytes_ratio"] is None else f"{row['compilers_bytes_ratio']:.2f}"
            sys.stdout.write(
                f"{target:5} {row['mode']:9} weights {row['weights']:6}  small products {row['share_small']:4.0%}  "
                f"bytes {row['bytes_ratio']:.2f} (compiler {theirs})  "
                f"apart {row['apart']:.2f}  together {row['together']:.2f}\n"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
