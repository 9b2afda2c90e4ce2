"""Writes the table of `docs/parallelism.md` between its two markers: `python scripts/build_traffic_table.py`.

The table is what `maxdiffusion traffic --model flux-dev --virtual-devices 8 --markdown` prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from maxdiffusion.cli.main import main as maxdiffusion

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
COMMAND = "traffic --model flux-dev --virtual-devices 8 --markdown"


def main() -> None:
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        status = maxdiffusion(COMMAND.split())
    if status:
        raise SystemExit(status)
    text, number = re.subn(
        r"(<!-- traffic: begin -->\n).*?(<!-- traffic: end -->)",
        lambda found: found[1] + table.getvalue() + found[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    if number != 1:
        raise SystemExit(f"{PAGE} has {number} pairs of markers, not one")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
