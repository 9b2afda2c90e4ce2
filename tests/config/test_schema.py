"""Sections refuse what cannot work, and a recipe turns into the specs that run it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from pydantic import ValidationError

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.schema import (
    DataSection,
    DiffusionSection,
    ModelName,
    Recipe,
    RulePreset,
    SampleSection,
    TrainSection,
    flatten,
    key_annotations,
    mesh_sizes,
)
from maxdiffusion.errors import MeshError, UsageError
from maxdiffusion.nn.model import EXECUTION
from maxdiffusion.specs import AttentionSpec, MeshSpec, PipelineSpec, RematSpec


def test_defaults_are_the_defaults_of_the_specs() -> None:
    recipe = Recipe()
    assert recipe.mesh_spec == MeshSpec()
    assert recipe.attention_spec == AttentionSpec()
    assert recipe.pipeline_spec == PipelineSpec()
    assert recipe.remat_spec == RematSpec()
    assert recipe.rules is None


def test_every_name_of_the_parallelism_page_is_a_key() -> None:
    page = (
        "mesh mesh_axes logical_axis_rules data_sharding attention_kernel flash_min_seq_length flash_block_sizes "
        "context_attention ulysses_degree "
        "dtype weights_dtype scan_layers remat_policy use_qwix_quantization quantization"
    )
    assert set(page.split()) <= {key for key, _ in key_annotations()}


def test_every_execution_keyword_of_a_model_is_a_key() -> None:
    assert {*EXECUTION, "mesh_axes", "data_sharding"} <= {key for key, _ in key_annotations()}


def test_a_recipe_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().train.steps = 3  # type: ignore[misc]
    with pytest.raises((TypeError, ValidationError)):
        TrainSection(3)  # type: ignore[misc]


def test_settings_reach_the_specs() -> None:
    recipe = Recipe(
        mesh={"data": 2, "tensor": 2, "dcn": {"data": 2}},
        attention_kernel="flash",
        flash_min_seq_length=0,
        flash_block_sizes={"block_q": 128, "block_k": 256},  # type: ignore[arg-type]
        context_attention="hybrid",
        ulysses_degree=2,
        remat_policy="minimal",
        remat_save="hidden,attention",  # type: ignore[arg-type]
        pipeline_schedule="circular",
        pipeline_microbatches=6,
        pipeline_repeats=3,
        logical_axis_rules=[("embed", "tensor"), ("mlp", None), ("activation_batch", ["data", "fsdp"])],  # type: ignore[arg-type]
    )
    assert recipe.mesh_spec == MeshSpec(data=2, tensor=2, dcn={"data": 2})
    blocks = BlockSizes(block_q=128, block_k=256)
    assert recipe.attention_spec == AttentionSpec(
        kernel="flash", flash_min_seq_length=0, block_sizes=blocks, context="hybrid", ulysses=2
    )
    assert recipe.remat_spec == RematSpec(policy="minimal", save=("attention", "hidden"))
    assert recipe.pipeline_spec == PipelineSpec(schedule="circular", microbatches=6, repeats=3)
    assert recipe.rules == (("embed", "tensor"), ("mlp", None), ("activation_batch", ("data", "fsdp")))


def test_patches_reach_the_spec_and_an_error_names_its_key() -> None:
    recipe = Recipe(pipeline_patches=8, pipeline_warmup_steps=2)
    assert recipe.pipeline_spec == PipelineSpec(patches=8, warmup_steps=2)
    with pytest.raises(ValidationError, match=r"pipeline_warmup_steps: pipeline_warmup_steps=2 is of no use"):
        Recipe(pipeline_warmup_steps=2)


def test_a_mesh_may_have_any_axis_names() -> None:
    recipe = Recipe(mesh_axes=("data", "model"), mesh="data=4,model=2", data_sharding=("data", None, None, None))  # type: ignore[arg-type]
    assert recipe.mesh_spec == MeshSpec(axes=("data", "model"), data=4, model=2)


def test_a_mesh_as_text_is_its_mapping() -> None:
    assert mesh_sizes("data=4, tensor=2") == {"data": 4, "tensor": 2}
    assert mesh_sizes("model=-1,dcn.data=2") == {"model": -1, "dcn": {"data": 2}}
    with pytest.raises(MeshError, match="twice"):
        mesh_sizes("data=4,data=2")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (TrainSection, {"steps": 0}),
        (TrainSection, {"steps": True}),
        (TrainSection, {"steps": 10.0}),
        (TrainSection, {"steps": "10"}),
        (TrainSection, {"learning_rate": 0.0}),
        (TrainSection, {"learning_rate": float("inf")}),
        (TrainSection, {"learning_rate": "1e-4"}),
        (TrainSection, {"ema_decay": 1.0}),
        (TrainSection, {"beta1": -0.1}),
        (TrainSection, {"caption_dropout": 1.5}),
        (TrainSection, {"grad_clip": 0}),
        (TrainSection, {"schedule": "linear"}),
        (TrainSection, {"lerning_rate": 1.0}),
        (SampleSection, {"prompts": "one text"}),
        (SampleSection, {"prompts": [1]}),
        (SampleSection, {"solver": "heun"}),
        (DataSection, {"size": 0}),
        (DataSection, {"path": "x"}),
        (DataSection, {"source": "folder"}),
        (DiffusionSection, {"zero_terminal_snr": True}),
        (DiffusionSection, {"process": "vp", "prediction": "epsilon", "zero_terminal_snr": True}),
        (DiffusionSection, {"zero_terminal_snr": 1}),
        (DiffusionSection, {"logit_std": 0.5}),
        (DiffusionSection, {"timesteps": "range", "timestep_bias_portion": 0.5}),
        (DiffusionSection, {"timesteps": "earlier", "timestep_bias_multiplier": 0.0}),
        (TrainSection, {"accumulation_steps": 0}),
        (TrainSection, {"optimizer": "adafactor", "beta2": 0.9}),
        (TrainSection, {"rounding": "nearest"}),
        (Recipe, {"strict": "yes"}),
        (Recipe, {"mesh": {"data": 0}}),
        (Recipe, {"mesh": {"dtaa": 2}}),
        (Recipe, {"mesh": {"data": -1, "tensor": -1}}),
        (Recipe, {"mesh": {"data": 2.0}}),
        (Recipe, {"mesh": {"data": True}}),
        (Recipe, {"mesh": {"dcn": 2}}),
        (Recipe, {"mesh": {"data": {"data": 2}}}),
        (Recipe, {"mesh_axes": ["data", "data"]}),
        (Recipe, {"mesh_axes": []}),
        (Recipe, {"data_sharding": ["model"]}),
        (Recipe, {"logical_axis_rules": "fsdpp"}),
        (Recipe, {"logical_axis_rules": [["embed"]]}),
        (Recipe, {"flash_block_sizes": {"block_q": 128}}),
        (Recipe, {"flash_block_sizes": {"block_q": 128, "block_k": 128, "block_z": 1}}),
        (Recipe, {"flash_block_sizes": {"block_q": 128, "block_k": 0}}),
        (Recipe, {"context_attention": "rings"}),
        (Recipe, {"ulysses_degree": 2}),
        (TrainSection, {"decay_steps": 10}),
        (TrainSection, {"schedule": "cosine", "steps": 10, "decay_steps": 11}),
        (Recipe, {"quantization": "int9"}),
        (Recipe, {"quantization": "int8", "qwix_module_path": "("}),
        (Recipe, {"qwix_module_path": ".*attn.*"}),
        (Recipe, {"use_qwix_quantization": True}),
        (Recipe, {"run": ""}),
        (Recipe, {"seed": -1}),
    ],
)
def test_what_cannot_work_is_refused(section: type, values: dict) -> None:
    with pytest.raises(ValidationError) as error:
        section(**values)
    assert error.value.error_count() >= 1


def test_whole_numbers_serve_as_numbers() -> None:
    assert TrainSection(learning_rate=1).learning_rate == 1.0
    assert TrainSection(grad_clip=None).grad_clip is None


def test_zero_terminal_snr_goes_with_a_prediction_that_can() -> None:
    section = DiffusionSection(process="vp", prediction="v_prediction", zero_terminal_snr=True)
    assert section.zero_terminal_snr


def test_flatten_opens_mappings_and_keeps_the_order_of_the_schema() -> None:
    flat = flatten(Recipe(mesh={"tensor": 2, "dcn": {"data": 2}}, model_config={"channels": [1]}))
    assert flat["mesh.tensor"] == 2
    assert flat["mesh.dcn.data"] == 2
    assert flat["model_config.channels"] == [1]
    assert flat["flash_block_sizes"] is None
    assert next(iter(flat)) == "model"
    assert list(flat).index("train.steps") < list(flat).index("sample.solver")


def test_names_agree_with_the_code_that_takes_them() -> None:
    from typing import get_args, get_type_hints

    from maxdiffusion.diffusion.prediction import PREDICTIONS
    from maxdiffusion.diffusion.solvers import SOLVERS
    from maxdiffusion.diffusion.timesteps import TIME_SAMPLERS
    from maxdiffusion.models.registry import MODELS
    from maxdiffusion.parallel.rules import PRESETS

    assert set(get_args(ModelName)) == set(MODELS)
    assert set(get_args(RulePreset)) == set(PRESETS)
    assert set(get_args(get_type_hints(SampleSection)["solver"])) == set(SOLVERS)
    assert set(get_args(get_type_hints(DiffusionSection)["timesteps"])) == set(TIME_SAMPLERS)
    assert set(get_args(get_type_hints(DiffusionSection)["prediction"])) == set(PREDICTIONS)


def test_recipes_need_no_jax() -> None:
    program = (
        "import sys; from maxdiffusion.config import load, show; show.rows(load.load_recipe('pictures'));"
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'optax')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("word", ["seed=4294967296", "sample.seed=4294967296", "seed=-1"])
def test_seeds_that_jax_would_wrap_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="a whole number from 0 to 4294967295"):
        load_recipe("pictures", [word])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"buckets": ("64x64", "wide")}, "buckets: 'wide' is no size: write height x width in pixels, as in 48x80"),
        ({"buckets": ("0x64",)}, "'0x64' is no size"),
        ({"buckets": ()}, "buckets: the list is empty"),
        ({"buckets": "aspect", "size": 40}, "bucket_step: 16 does not divide data.size=40: take data.size=32"),
        ({"path": ("a", "b")}, "path: source=folder takes one folder"),
    ],
)
def test_a_data_section_refuses_sizes_and_paths_that_cannot_be(values: dict, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        DataSection(**{"source": "folder", "path": "x", **values})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"split": "held_out"}, "split: source=folder has no use for it: write data.split=train, or leave it out"),
        (
            {"concepts": "demo-160"},
            "concepts: source=folder has no use for it: write data.concepts=null, or leave it out",
        ),
        ({"styles": ("flat",)}, "styles: source=folder has no use for it: write data.styles=null"),
        ({"bucket_step": 8}, "bucket_step: buckets=null has no use for it: leave it out, or take data.buckets=aspect"),
        ({"max_buckets": 4, "buckets": ("8x8",)}, "max_buckets: a list of buckets has no use for it: leave it out"),
    ],
)
def test_a_data_section_refuses_what_would_do_nothing(values: dict, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        DataSection(**{"source": "folder", "path": "x", **values})
    # What a run's recipe holds of its own accord stays valid.
    DataSection(source="folder", path="x", split="train", concepts=None, bucket_step=16, max_buckets=8)


def test_sizes_are_written_as_height_x_width() -> None:
    section = DataSection(source="webdataset", path=("a", "b"), buckets=("64x64", "48 x 80"))
    assert section.bucket_sizes == ((64, 64), (48, 80))
