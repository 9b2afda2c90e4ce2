"""Every old key leads to a key that exists, or says honestly that there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.old_keys import OLD_KEYS, SAME, as_markdown
from maxdiffusion.config.schema import MAPPINGS, key_annotations
from maxdiffusion.errors import UsageError
from maxdiffusion.specs import MESH_AXES

DOCS = Path(__file__).parents[2] / "docs" / "old-keys.md"
VALID = {key for key, _ in key_annotations()} | {f"mesh.{axis}" for axis in MESH_AXES}


@pytest.mark.parametrize("key", OLD_KEYS)
def test_a_new_key_exists_and_an_old_one_does_not(key: str) -> None:
    assert key not in VALID
    old = OLD_KEYS[key]
    if old.new is not None:
        head = old.new.partition(".")[0]
        assert old.new in VALID or (head in MAPPINGS and head in VALID)
    else:
        assert old.note, "a key without a new one says why"


def test_keys_that_kept_their_names_exist() -> None:
    assert set(SAME) <= VALID


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("ici_fsdp_parallelism=4", "write mesh.fsdp=4"),
        ("dcn_data_parallelism=2", "write mesh.dcn.data=2"),
        ("dcn_data_parallelism=-1", "write mesh.dcn.data=NUMBER_OF_SLICES"),
        ("per_device_batch_size=2", "write train.batch_size=2 times the number of devices"),
        ("max_train_steps=20", "write train.steps=20"),
        ("activations_dtype=bfloat16", "write dtype=bfloat16"),
        ("attention=flash", "write attention_kernel=flash"),
        ("attention=ring", "write attention_kernel=flash context_attention=ring"),
        ("pretrained_model_name_or_path=stabilityai/stable-diffusion-xl-base-1.0", "write model=sdxl"),
        ("base_output_directory=gs://b", "write run=gs://b"),
        ("checkpoint_every=-1", "write train.checkpoint_every=0"),
        ("enable_profiler=true", "write profile.steps=10:13"),
        ("enable_mllog=true", "is not here yet"),
        ("lora_config={scale: []}", "LoRA is not here yet"),
        ("flash_block_sizes.block_kv=128", "write flash_block_sizes.block_k=128"),
        ("diffusion_scheduler_config={prediction_type: v_prediction}", "write diffusion.prediction=v_prediction"),
    ],
)
def test_an_old_key_on_the_command_line_is_told_what_to_write(word: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        load_recipe("pictures", [word])
    line = next(line for line in str(error.value).splitlines() if line.startswith(word.partition("=")[0]))
    assert "is a key of MaxDiffusion's earlier configurations: " in line
    assert told in line


def test_an_old_file_is_told_every_key(tmp_path: Path) -> None:
    path = tmp_path / "base.yml"
    path.write_text("run_name: 'a'\nresolution: 512\nguidance_scale: 7.5\n")
    with pytest.raises(UsageError) as error:
        load_recipe(path)
    assert "run_name" in str(error.value) and "write run=a" in str(error.value)
    assert "write data.size=512" in str(error.value)
    # A key that only moved into a section is told as any misspelt one.
    assert "did you mean 'sample.guidance_scale'?" in str(error.value)


def test_the_page_has_the_table() -> None:
    assert as_markdown() in DOCS.read_text(encoding="utf-8"), "write it anew: see the page's first lines"
