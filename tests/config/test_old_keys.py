"""Every old key leads to a key that exists, or says honestly that there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.old_keys import OLD_KEYS, SAME, advice, as_markdown
from maxdiffusion.config.schema import MAPPINGS, key_annotations
from maxdiffusion.errors import UsageError
from maxdiffusion.specs import MESH_AXES

DOCS = Path(__file__).parents[2] / "docs" / "old-keys.md"
CHANGED = """
    activations_dtype adam_b1 adam_b2 adam_eps adam_weight_decay allow_split_physical_axes attention
    base_output_directory base_shift cache_latents_text_encoder_outputs caption_column center_crop checkpoint_every
    clip_model_name_or_path compile_topology_num_slices controlnet_conditioning_scale controlnet_from_pt
    controlnet_image controlnet_model_name_or_path dataset_config_name dataset_name dataset_save_location
    dataset_type dcn_data_parallelism dcn_fsdp_parallelism dcn_tensor_parallelism diffusion_scheduler_config
    do_classifier_free_guidance enable_data_shuffling enable_mllog enable_profiler
    enable_single_replica_ckpt_restoring flow_shift flux_name fps from_pt gcs_metrics global_batch_size
    guidance_rescale guidance_scale hardware hf_access_token hf_data_dir hf_train_files ici_data_parallelism
    ici_fsdp_parallelism ici_tensor_parallelism image_column jax_cache_dir jit_initializers learning_rate
    learning_rate_schedule_steps lightning_ckpt lightning_from_pt lightning_repo load_tfrecord_cached log_period
    lora_config max_grad_norm max_sequence_length max_shift max_train_samples max_train_steps metrics_file
    negative_prompt norm_num_groups num_inference_steps num_train_epochs offload_encoders output_dir
    per_device_batch_size pretrained_model_name_or_path profiler profiler_steps prompt prompt_2
    quantization_local_shard_count random_flip resolution reuse_example_batch revision run_name save_config_to_gcs
    save_final_checkpoint scale_lr skip_first_n_steps_for_profiler skip_jax_distributed_system snr_gamma
    split_head_dim t5xxl_model_name_or_path text_encoder_learning_rate tfrecords_dir time_shift timestep_bias
    timing_metrics_file tokenize_captions_num_proc train_data_dir train_new_flux train_new_unet train_split
    train_text_encoder transform_images_num_proc unet_checkpoint warmup_steps_fraction write_metrics
    write_timing_metrics
"""
"""Keys of the earlier configurations of Stable Diffusion XL, FLUX.1 and Wan that are not here under their names."""

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


def test_every_key_of_the_earlier_configurations_is_known() -> None:
    assert set(CHANGED.split()) - set(OLD_KEYS) == set()


@pytest.mark.parametrize("value", [None, "text", ["a", 1], -1, 0, True, False, 2.5, {}])
def test_whatever_was_written_is_answered_in_words(value: Any) -> None:
    for key, old in OLD_KEYS.items():
        told = [advice(key, value) or "", old.write(value) if old.write else ""]
        assert not any("None" in text or "True" in text or "False" in text for text in told), (key, told)
        assert old.write is None or old.new is None or f"{old.new}=" in told[1], (key, told)


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
        ("eval_every=null", "write train.eval_every=STEPS"),
        ("eval_every=-1", "write train.eval_every=0"),
        ("eval_every=500", "write train.eval_every=500"),
        ("skip_first_n_steps_for_profiler=5", "write profile.steps=5:8"),
        ("timestep_bias={strategy: null}", "write diffusion.timesteps=uniform"),
        ("profiler_steps=-1", "write profile.steps=10:13"),
        ("prompt=null", 'write sample.prompts=["TEXT"]'),
        ("transform_images_num_proc=4", "write data.num_threads=4"),
        ("time_shift=false", "write diffusion.shift=1.0"),
        ("random_flip=true", "mirroring pictures at random is not here yet"),
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
