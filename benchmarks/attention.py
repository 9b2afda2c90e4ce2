"""Time and memory of the blockwise kernel beside the dot-product kernel and PyTorch, in one run on this machine.

    python benchmarks/attention.py --shape 2,4096,8,40 --repeats 5 [--json]

The kernels take turns, and each figure is the best of its turns, so that a busy machine disturbs all alike. Memory is
the temporary memory of the compiled program (`temp_size_in_bytes`); arguments and results are not in it. `products` are
the two products of each forward tile with no softmax between them, where the tiles divide the lengths.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.kernels.attention.flash_cpu import auto_block_sizes, flash_attention
from maxdiffusion.kernels.attention.reference import dot_product_attention

NO_TORCH = "PyTorch is not importable here (pip install torch): its times are left out"


def jax_calls(kernel: Callable, arrays: list[jax.Array]) -> tuple[dict[str, Callable], dict[str, int]]:
    """Compiled calls and the bytes of temporary memory, forward and with gradients."""
    q, k, v, cotangent = arrays

    def with_gradients(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(kernel, q, k, v)[1](cotangent)

    calls, memory = {}, {}
    for name, fn, args in (("forward", kernel, (q, k, v)), ("gradients", with_gradients, (q, k, v, cotangent))):
        compiled = jax.jit(fn).lower(*args).compile()
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = partial(lambda compiled, args: jax.block_until_ready(compiled(*args)), compiled, args)
    return calls, memory


def products_alone(q: jax.Array, k: jax.Array, v: jax.Array, *, block_sizes: BlockSizes) -> jax.Array:
    """(q k^T) v in the same tiles and no softmax: what the compiler's matrix products cost without anything else."""
    batch, length, heads, dim = q.shape
    tiles = (-1, block_sizes.block_q, dim), (-1, block_sizes.block_k, dim)
    by_head = (x.swapaxes(1, 2).reshape(batch * heads, -1, dim) for x in (q, k, v))

    def of_head(head: tuple[jax.Array, ...]) -> jax.Array:
        queries, keys, values = (x.reshape(tiles[number > 0]) for number, x in enumerate(head))

        def of_tile(query: jax.Array) -> jax.Array:
            def add(total: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                return total + (tile[0] @ query.T).T @ tile[1], None

            return jax.lax.scan(add, jnp.zeros_like(query), (keys, values))[0]

        return jax.lax.map(of_tile, queries)

    return jax.lax.map(of_head, tuple(by_head)).reshape(batch, heads, length, dim).swapaxes(1, 2)


def torch_calls(arrays: list[jax.Array]) -> dict[str, Callable]:
    """The same with PyTorch's scaled_dot_product_attention, heads before length as it wants them."""
    import torch

    dtype = getattr(torch, str(arrays[0].dtype))
    q, k, v, cotangent = (torch.from_numpy(np.array(x, np.float32).swapaxes(1, 2).copy()).to(dtype) for x in arrays)

    def forward() -> None:
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def gradients() -> None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        torch.autograd.grad(out, leaves, cotangent)

    return {"forward": forward, "gradients": gradients}


def best_seconds(calls: dict[str, dict[str, Callable]], repeats: int) -> dict[str, dict[str, float]]:
    """Best wall time of each call; kernels take turns, and the first turn only warms up."""
    best = {kernel: dict.fromkeys(steps, float("inf")) for kernel, steps in calls.items()}
    for turn in range(repeats + 1):
        for kernel, steps in calls.items():
            for step, call in steps.items():
                start = time.perf_counter()
                call()
                if turn:
                    best[kernel][step] = min(best[kernel][step], time.perf_counter() - start)
    return best


def measure(
    shape: tuple[int, int, int, int], keys: int, dtype: str, blocks: BlockSizes, repeats: int
) -> dict[str, Any]:
    """All figures of one run."""
    rng = np.random.default_rng(0)
    B, L, H, D = shape
    arrays = [jnp.asarray(rng.normal(size=(B, length, H, D)), dtype) for length in (L, keys, keys, L)]
    calls, memory = {}, {}
    whole = not L % blocks.block_q and not keys % blocks.block_k
    for name, kernel in (
        ("flash_cpu", partial(flash_attention, block_sizes=blocks)),
        ("dot_product", dot_product_attention),
        *([("products", partial(products_alone, block_sizes=blocks))] if whole else ()),
    ):
        calls[name], memory[name] = jax_calls(kernel, arrays)
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        calls["torch"] = torch_calls(arrays)
    seconds = best_seconds(calls, repeats)
    flash = seconds["flash_cpu"]
    return {
        "shape": shape,
        "keys": keys,
        "dtype": dtype,
        "tiles": [blocks.block_q, blocks.block_k],
        "jax": jax.__version__,
        "torch": sys.modules["torch"].__version__ if has_torch else None,
        "seconds": seconds,
        "temp_bytes": memory,
        "time_over_dot_product": {step: flash[step] / seconds["dot_product"][step] for step in flash},
        "memory_over_dot_product": {
            step: memory["flash_cpu"][step] / max(memory["dot_product"][step], 1) for step in flash
        },
        "time_over_products": {"forward": flash["forward"] / seconds["products"]["forward"]} if whole else None,
        "time_over_torch": {step: flash[step] / seconds["torch"][step] for step in flash} if has_torch else None,
        "note": None if has_torch else NO_TORCH,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    B, L, H, D = figures["shape"]
    lines = [
        f"attention: batch {B}, {L} queries x {figures['keys']} keys, {H} heads of {D}, {figures['dtype']}, "
        f"tiles {figures['tiles'][0]} x {figures['tiles'][1]}, jax {figures['jax']}, torch {figures['torch']}",
        f"{'kernel':<14}{'forward s':>11}{'gradients s':>13}{'forward MB':>12}{'gradients MB':>14}",
    ]
    for kernel, seconds in figures["seconds"].items():
        memory = figures["temp_bytes"].get(kernel)
        row = f"{kernel:<14}{seconds['forward']:>11.3f}{seconds['gradients']:>13.3f}"
        lines.append(row + (f"{memory['forward'] / 1e6:>12.0f}{memory['gradients'] / 1e6:>14.0f}" if memory else ""))
    for name in ("time_over_dot_product", "memory_over_dot_product", "time_over_products", "time_over_torch"):
        if ratio := figures[name]:
            text = ", ".join(f"{step} {value:.3f}" for step, value in ratio.items())
            lines.append(f"flash_cpu, {name.replace('_', ' ')}: {text}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="2,4096,8,40", help="batch,length,heads,dim")
    parser.add_argument("--keys", type=int, help="number of keys (default: as many as queries)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tiles", help="block_q,block_k (default: chosen)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    try:
        B, L, H, D = (int(size) for size in args.shape.split(","))
        keys = args.keys or L
        tiles = [int(size) for size in args.tiles.split(",")] if args.tiles else None
        blocks = BlockSizes(block_q=tiles[0], block_k=tiles[1]) if tiles else auto_block_sizes(L, keys)
    except (ValueError, IndexError) as error:
        parser.error(f"{error}: write --shape 2,4096,8,40 and --tiles 256,1024")
    figures = measure((B, L, H, D), keys, args.dtype, blocks, max(args.repeats, 1))
    sys.stdout.write((json.dumps(figures) if args.json else table(figures)) + "\n")
    if figures["note"]:
        sys.stderr.write(figures["note"] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
