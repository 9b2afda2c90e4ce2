"""What each rematerialisation policy keeps and computes again: the gradients of tiny twins with stacked blocks.

    python benchmarks/rematerialisation.py [--json]

A row a policy: temporary memory by XLA's own account and FLOPs, loops counted by their trips, each also as a ratio to
`none`. One device; with XLA's default flags on a CPU these are the figures of `docs/parallelism.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from maxdiffusion.models.registry import lookup
from maxdiffusion.tools.flops import flops

NUM_LAYERS = 3
TWINS: dict[str, dict[str, Any]] = {
    "flux-dev": {"num_layers": NUM_LAYERS, "num_single_layers": NUM_LAYERS},
    "sd15": {"transformer_layers_per_block": NUM_LAYERS},
}
POLICIES = (("none", ""), ("minimal", ""), ("full", "attention,hidden"), ("full", ""))


def cost(name: str, policy: str, save: str) -> tuple[int, int]:
    """Bytes of temporary memory and FLOPs of the gradients of a mean square, for a batch of 2."""
    keywords = {**TWINS[name], "remat_policy": policy, "remat_save": save}
    model = lookup(name).build("tiny", precision="highest", scan_layers=True, **keywords)

    def loss(params: Any, inputs: Any) -> jax.Array:
        return jnp.mean(jnp.square(jax.tree.leaves(model.apply({"params": params}, **inputs))[0]))

    inputs = model.call_shapes(2, height=16, width=16, text=8)
    compiled = jax.jit(jax.grad(loss)).lower(model.abstract_params()[0], inputs).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes, flops(compiled.as_text() or "").total


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    rows = []
    for name in TWINS:
        most, least = 0, 0
        for policy, save in POLICIES:
            temporary, work = cost(name, policy, save)
            most, least = most or temporary, least or work
            row = {"model": name, "policy": policy, "save": save, "bytes": temporary, "flops": work}
            rows.append({**row, "bytes_ratio": temporary / most, "flops_ratio": work / least})
    if as_json:
        sys.stdout.write(json.dumps({"rows": rows}) + "\n")
        return
    for row in rows:
        setting = f"{row['model']:9} {row['policy']:8} {row['save']:17}"
        memory = f"{row['bytes'] / 1e6:6.2f} MB {row['bytes_ratio']:5.2f}"
        sys.stdout.write(f"{setting} {memory} {row['flops'] / 1e6:7.1f} MFLOP {row['flops_ratio']:5.2f}\n")


if __name__ == "__main__":
    main()
