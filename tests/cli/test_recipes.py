"""`recipes` lists the built-in recipes with their descriptions."""

from __future__ import annotations

import json

import pytest

from maxdiffusion.cli.main import main


def test_each_recipe_is_listed_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert {"pictures", "pictures-demo"} <= {entry["name"] for entry in found}
    assert all(entry["description"] for entry in found)
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(entry["name"] in out and entry["description"] in out for entry in found)
