"""A loaded recipe is shown whole, with origins, and written so that it is read back the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxdiffusion.config import show
from maxdiffusion.config.load import load_recipe, recipe_names

WORDS = [
    "mesh=data=2,tensor=2,dcn.data=2",
    "model_config.channels=[64,128]",
    'model_config.nested={a: "1e3"}',
    "flash_block_sizes.block_q=128",
    "flash_block_sizes.block_k=64",
    'sample.prompts=["a red apple, flat style", "1e4", "null", "yes", "ü: #"]',
    "logical_axis_rules=[[embed, tensor], [mlp, null]]",
    "data_sharding=[[data, fsdp], null]",
    "train.learning_rate=1e-7",
]


def test_rows_hold_every_value_and_its_origin() -> None:
    rows = {row.key: row for row in show.rows(load_recipe("pictures-demo", ["train.steps=100"]))}
    assert rows["train.steps"] == ("train.steps", "100", "command line")
    assert rows["train.beta1"] == ("train.beta1", "null", "default")
    assert rows["data.concepts"].origin.startswith("pictures-demo.yaml:")
    assert rows["diffusion.process"].origin.startswith("pictures.yaml:")
    assert rows["mesh.tensor"].value == "2"
    assert rows["run"] == ("run", "runs/pictures-demo", "default")


def test_json_holds_the_same_rows() -> None:
    loaded = load_recipe("pictures-demo", WORDS)
    found = json.loads(json.dumps(show.as_json(loaded)))
    assert found["recipe"] == "pictures-demo"
    assert [row["key"] for row in found["rows"]] == [row.key for row in show.rows(loaded)]
    assert {row["key"]: row["value"] for row in found["rows"]}["mesh.dcn.data"] == 2


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_yaml_is_read_back_as_the_same_recipe(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for words in ([], WORDS):
        recipe = load_recipe(name, words).recipe
        path.write_text(show.as_yaml(recipe), encoding="utf-8")
        assert load_recipe(path).recipe == recipe
