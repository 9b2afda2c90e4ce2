"""Writes the tables of `docs/parallelism.md` between their markers: `python scripts/build_traffic_table.py`.

Each is what `maxdiffusion traffic --model MODEL --virtual-devices 8 --markdown` prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from maxdiffusion.cli.main import main as maxdiffusion

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
COMMAND = "traffic --model {} --virtual-devices 8 --markdown"
MODELS = ("flux-dev", "sd15")


def main() -> None:
    for model in MODELS:
        write(model)


def write(model: str) -> None:
    """One model's table."""
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        status = maxdiffusion(COMMAND.format(model).split())
    if status:
        raise SystemExit(status)
    text, number = re.subn(
        rf"(<!-- traffic {model}: begin -->\n).*?(<!-- traffic {model}: end -->)",
        lambda found: found[1] + table.getvalue() + found[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    if number != 1:
        raise SystemExit(f"{PAGE} has {number} pairs of markers for {model}, not one")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
