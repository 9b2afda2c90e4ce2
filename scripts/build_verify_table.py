"""Writes a table of `docs/parallelism.md` between its markers: `python scripts/build_verify_table.py --model sd15`.

Each row has the largest figures of what `maxdiffusion verify --model MODEL --mesh MESH --virtual-devices 8 --json`
prints. `--mesh` writes the rows of some meshes alone, and leaves the others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxdiffusion.cli.main import main as maxdiffusion

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
COMMAND = "verify --model {} --mesh {} --virtual-devices 8 --json"

COLUMNS = (
    ("float32", ("forward", "first_loss", "gradients", "worst_gradient", "loss")),
    ("bfloat16", ("forward", "gradients", "loss")),
    ("int8", ("middle_sample", "loss")),
    ("fp8", ("middle_sample", "loss")),
    ("fp8_full", ("middle_sample", "loss")),
    ("int4", ("forward", "gradients", "loss")),
)
"""What the cells of a dtype or a mode of quantisation are held to by fixed limits."""


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--model", required=True)
    words.add_argument("--mesh", action="append", default=[], help="may be given several times; none for all")
    chosen = words.parse_args()
    import jax

    from maxdiffusion.tools.verify import MESHES

    for mesh in chosen.mesh or MESHES:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            maxdiffusion(COMMAND.format(chosen.model, mesh).split())
        write(chosen.model, mesh, json.loads(said.getvalue())["cells"])
        jax.clear_caches()


def write(model: str, mesh: str, cells: Sequence[dict[str, Any]]) -> None:
    """One row, in the place of that mesh's earlier one or at the end."""
    row = (
        "| "
        + " | ".join([mesh, f"{sum(cell['ok'] for cell in cells)} of {len(cells)}", *map(str, figures(cells))])
        + " |"
    )
    sys.stdout.write(f"{row}\n")
    text = PAGE.read_text()
    found = re.search(rf"<!-- verify {model}: begin -->\n(.*?)<!-- verify {model}: end -->", text, flags=re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE} has no markers for {model}")
    rows = {line.split(" | ")[0]: line for line in found[1].splitlines()[2:]}
    heads = ["mesh", "hold", *(name for name, _ in COLUMNS)]
    table = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *(rows | {f"| {mesh}": row}).values()]
    PAGE.write_text(text[: found.start(1)] + "\n".join(table) + "\n" + text[found.end(1) :])


def figures(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The largest errors of each dtype or mode, in the order of `COLUMNS`."""
    kinds = [cell["dtype"] if cell["quantization"] == "none" else cell["quantization"] for cell in cells]
    return [
        ", ".join(
            f"{max(cell['errors'][name] for cell, one in zip(cells, kinds, strict=True) if one == kind):.1e}"
            for name in names
        )
        for kind, names in COLUMNS
    ]


if __name__ == "__main__":
    main()
