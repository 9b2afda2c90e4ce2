"""Writes the table of `docs/parallelism.md` between its two markers: `python scripts/build_traffic_table.py`.

The table is what `maxdiffusion traffic --model flux-dev --virtual-devices 8 --markdown` prints.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
COMMAND = "maxdiffusion traffic --model flux-dev --virtual-devices 8 --markdown"


def main() -> None:
    table = subprocess.run(COMMAND.split(), check=True, capture_output=True, text=True).stdout
    text, number = re.subn(
        r"(<!-- traffic: begin -->\n).*?(<!-- traffic: end -->)",
        lambda found: found[1] + table + found[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    if number != 1:
        raise SystemExit(f"{PAGE} has {number} pairs of markers, not one")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
