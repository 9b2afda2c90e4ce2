"""Keys of the configurations that MaxDiffusion had before: what each is called here, or that it is not here yet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MODELS = {
    "stable-diffusion-v1-5": "sd15",
    "stable-diffusion-2": "sd21",
    "stable-diffusion-xl": "sdxl",
    "flux.1-dev": "flux-dev",
    "flux.1-schnell": "flux-schnell",
}
"""Beginnings of published names, after the owner's, and the network of that name here."""


@dataclass(frozen=True, kw_only=True)
class OldKey:
    """What became of a key.

    Attributes:
        new: key here; None where there is none.
        note: what else must be known; for a key without a new one, why there is none and what to do.
        write: the words to write for a value, where they are more than `new=value`.
    """

    new: str | None
    note: str = ""
    write: Callable[[Any], str] | None = None


def _is(new: str, note: str = "", write: Callable[[Any], str] | None = None) -> OldKey:
    return OldKey(new=new, note=note, write=write)


def _none(note: str) -> OldKey:
    return OldKey(new=None, note=note)


def _text(value: Any) -> str:
    """A value as it is written in a recipe."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any, *, least: int = 0) -> int | None:
    """The value if it is a whole number of `least` or more."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _slices(axis: str) -> OldKey:
    def write(value: Any) -> str:
        return f"mesh.dcn.{axis}={_whole(value, least=1) or 'NUMBER_OF_SLICES'}"

    return _is(f"mesh.dcn.{axis}", "across slices; -1 is not taken here, write the number of slices", write)


def _model(value: Any) -> str:
    name = str(value).lower().rpartition("/")[2]
    return f"model={next((model for start, model in _MODELS.items() if name.startswith(start)), 'NAME')}"


def _attention(value: Any) -> str:
    if value == "ring":
        return "attention_kernel=flash context_attention=ring"
    return f"attention_kernel={'dot_product' if value == 'dot_product' else 'flash'}"


def _strategy(value: Any) -> str:
    name = value.get("strategy") or "none" if isinstance(value, Mapping) else "NAME"
    return "uniform" if name == "none" else str(name)


def _prediction(value: Any) -> str:
    name = value.get("prediction_type") or "velocity" if isinstance(value, Mapping) else "NAME"
    return f"diffusion.prediction={name}"


def _prompts(value: Any) -> str:
    return f"sample.prompts=[{json.dumps(value if isinstance(value, str) else 'TEXT', ensure_ascii=False)}]"


def _shift(value: Any) -> str:
    return f"diffusion.shift={1.0 if value is False else 'NUMBER'}"


def _steps(name: str) -> Callable[[Any], str]:
    return lambda value: f"{name}={0 if value == -1 else 'STEPS'}"


def _evaluated(value: Any) -> str:
    return f"train.eval_every={0 if value in (0, -1) else _whole(value) or 'STEPS'}"


def _traced(*, begin: Any = None, number: Any = None) -> str:
    first, steps = _whole(begin), _whole(number, least=1) or 3
    first = 10 if first is None else first
    return f"profile.steps={first}:{first + steps}"


NOT_YET = "is not here yet"

_BY_NAME = f"a data set by its name {NOT_YET}: data.source=arrow, parquet or folder reads what lies in data.path"

_CACHED = f"a cache of latents and encoded texts {NOT_YET}"

_TEXT_ENCODER = f"reading a published text encoder {NOT_YET}"

_SHIFTED = "one number for every size of picture: e^base_shift at 256 tokens, e^max_shift at 4096"

_TRACED = "steps done when the trace begins, and when it ends"

OLD_KEYS: Mapping[str, OldKey] = {
    # The mesh
    "ici_data_parallelism": _is("mesh.data"),
    "ici_fsdp_parallelism": _is("mesh.fsdp"),
    "ici_context_parallelism": _is("mesh.context"),
    "ici_tensor_parallelism": _is("mesh.tensor"),
    "dcn_data_parallelism": _slices("data"),
    "dcn_fsdp_parallelism": _slices("fsdp"),
    "dcn_context_parallelism": _slices("context"),
    "dcn_tensor_parallelism": _slices("tensor"),
    "allow_split_physical_axes": _none("jax lays the mesh out on the network by itself: leave it out"),
    "hardware": _none("jax takes the accelerator that it finds; the variable JAX_PLATFORMS=tpu names one"),
    "skip_jax_distributed_system": _none("several hosts are found by themselves; `--num-hosts 1` trains alone"),
    "compile_topology_num_slices": _none(f"compiling a training for hardware that is elsewhere {NOT_YET}"),
    # The run
    "base_output_directory": _is("run", "the whole folder of the run: base_output_directory and run_name in one"),
    "run_name": _is("run", "the whole folder of the run: base_output_directory and run_name in one"),
    "output_dir": _is("run"),
    "checkpoint_dir": _is("run", "checkpoints lie in the folder of the run"),
    "metrics_file": _none("metrics.jsonl in the folder of the run is always written"),
    "write_metrics": _none("metrics.jsonl in the folder of the run is always written"),
    "gcs_metrics": _none("metrics.jsonl in the folder of the run is always written"),
    "log_period": _is("train.log_every"),
    "tensorboard_dir": _is(
        "track.tensorboard", "the files lie in the folder of the run", lambda value: "track.tensorboard=true"
    ),
    "timing_metrics_file": _none("the time of each part is told as it ends, and metrics.jsonl has seconds"),
    "write_timing_metrics": _none("the time of each part is told as it ends, and metrics.jsonl has seconds"),
    "save_config_to_gcs": _none("recipe.yaml in the folder of the run is always written"),
    "jax_cache_dir": _none("set the variable JAX_COMPILATION_CACHE_DIR"),
    "enable_profiler": _is("profile.steps", _TRACED, lambda value: _traced()),
    "skip_first_n_steps_for_profiler": _is("profile.steps", _TRACED, lambda value: _traced(begin=value)),
    "profiler_steps": _is("profile.steps", _TRACED, lambda value: _traced(number=value)),
    "profiler": _is("profile.steps", _TRACED, lambda value: _traced()),
    "enable_jax_named_scopes": _none("names of layers are always in the compiled program: leave it out"),
    "enable_mllog": _none(f"the log of MLPerf {NOT_YET}"),
    # The model
    "pretrained_model_name_or_path": _is(
        "model", f"names the network; reading published weights {NOT_YET}, they start from the seed", _model
    ),
    "unet_checkpoint": _none(f"reading published weights {NOT_YET}"),
    "revision": _none(f"reading published weights {NOT_YET}"),
    "from_pt": _none(f"reading published weights {NOT_YET}"),
    "train_new_unet": _none("weights always start from the seed: leave it out"),
    "train_new_flux": _none("weights always start from the seed: leave it out"),
    "flux_name": _is("model"),
    "clip_model_name_or_path": _none(_TEXT_ENCODER),
    "t5xxl_model_name_or_path": _none(_TEXT_ENCODER),
    "max_sequence_length": _none("texts are as long as the longest caption needs: leave it out"),
    "offload_encoders": _none(_TEXT_ENCODER),
    "lightning_repo": _none(f"SDXL-Lightning {NOT_YET}"),
    "lightning_ckpt": _none(f"SDXL-Lightning {NOT_YET}"),
    "lightning_from_pt": _none(f"SDXL-Lightning {NOT_YET}"),
    "activations_dtype": _is("dtype"),
    "norm_num_groups": _is("model_config.norm_num_groups"),
    "split_head_dim": _none("heads are always split: leave it out"),
    "jit_initializers": _none("weights are always made on the devices that keep them: leave it out"),
    "attention": _is("attention_kernel", "dot_product or flash; `ring` is context_attention=ring", _attention),
    "attention_sharding_uniform": _none("the rules decide for both attentions: see logical_axis_rules"),
    "mask_padding_tokens": _none("padding is always masked: leave it out"),
    "flash_block_sizes.block_kv": _is("flash_block_sizes.block_k"),
    "flash_block_sizes.block_kv_compute": _none("the kernel chooses it: leave it out"),
    "flash_block_sizes.block_kv_dkv": _is("flash_block_sizes.block_k_dkv"),
    "flash_block_sizes.block_kv_dkv_compute": _none("the kernel chooses it: leave it out"),
    "flash_block_sizes.block_kv_dq": _is("flash_block_sizes.block_k_dq"),
    "flash_block_sizes.use_fused_bwd_kernel": _none("the kernel chooses it: leave it out"),
    "names_which_can_be_saved": _is(
        "remat_save", "the names differ: qkv, attention, attention_output, hidden, feed_forward"
    ),
    "names_which_can_be_offloaded": _none("remat_policy=offload moves all that is named to the memory of the host"),
    "quantization_local_shard_count": _none("scales belong to whole rows and columns on every mesh: leave it out"),
    "quantization_calibration_method": _is(
        "weight_quantization_calibration_method",
        "of activations it is act_quantization_calibration_method, of gradients bwd_quantization_calibration_method",
    ),
    "train_text_encoder": _none(f"training a published text encoder {NOT_YET}"),
    "text_encoder_learning_rate": _none(f"training a published text encoder {NOT_YET}"),
    "lora_config": _none(f"LoRA {NOT_YET}"),
    "controlnet_model_name_or_path": _none(f"ControlNet {NOT_YET}"),
    "controlnet_from_pt": _none(f"ControlNet {NOT_YET}"),
    "controlnet_conditioning_scale": _none(f"ControlNet {NOT_YET}"),
    "controlnet_image": _none(f"ControlNet {NOT_YET}"),
    # The data
    "dataset_name": _none(_BY_NAME),
    "dataset_config_name": _none(_BY_NAME),
    "dataset_type": _is("data.source", "pictures (built in), folder, webdataset, arrow, parquet or array_record"),
    "train_split": _none("data.path is trained on whole; data.split is for the built-in pictures"),
    "train_data_dir": _is(
        "data.path",
        "with data.source=folder",
        lambda value: f"data.source=folder data.path={value if value and isinstance(value, str) else 'FOLDER'}",
    ),
    "dataset_save_location": _none(_CACHED),
    "cache_latents_text_encoder_outputs": _none(_CACHED),
    "hf_data_dir": _none(_BY_NAME),
    "hf_train_files": _is("data.path", "with data.source=parquet or arrow"),
    "grain_train_files": _is("data.path", "with data.source=array_record"),
    "image_column": _is("data.image_field"),
    "caption_column": _is("data.caption_field"),
    "resolution": _is("data.size"),
    "hf_access_token": _none(_BY_NAME),
    "tfrecords_dir": _none("TFRecord files are not read: data.source=array_record, webdataset, arrow or parquet are"),
    "load_tfrecord_cached": _none(_CACHED),
    "center_crop": _none("pictures are always cropped in the middle: leave it out"),
    "random_flip": _none(f"mirroring pictures at random {NOT_YET}"),
    "tokenize_captions_num_proc": _none("captions need no processes of their own: leave it out"),
    "transform_images_num_proc": _is("data.num_threads", "threads, not processes"),
    "enable_data_shuffling": _none("every epoch has an order of its own: leave it out"),
    "reuse_example_batch": _none(f"training on one batch again and again {NOT_YET}"),
    "max_train_samples": _none("put fewer pictures into the folder"),
    # The training
    "learning_rate": _is("train.learning_rate"),
    "max_train_steps": _is("train.steps"),
    "num_train_epochs": _is("train.steps", "epochs times samples, over train.batch_size", _steps("train.steps")),
    "per_device_batch_size": _is(
        "train.batch_size",
        "over all devices here: times their number",
        lambda value: f"train.batch_size={_whole(value, least=1) or 'PICTURES'} times the number of devices",
    ),
    "global_batch_size": _is("train.batch_size"),
    "checkpoint_every": _is(
        "train.checkpoint_every",
        "in steps here, in samples there: over train.batch_size; -1 is 0",
        _steps("train.checkpoint_every"),
    ),
    "eval_every": _is("train.eval_every", "-1 is 0", _evaluated),
    "enable_single_replica_ckpt_restoring": _none("every host reads its own part: leave it out"),
    "save_optimizer": _none("the optimizer is always saved: leave it out"),
    "save_final_checkpoint": _none("the last step always saves: leave it out"),
    "warmup_steps_fraction": _is(
        "train.warmup_steps", "in steps here: times train.steps", _steps("train.warmup_steps")
    ),
    "learning_rate_schedule_steps": _none("train.schedule ends with train.steps (see train.decay_steps)"),
    "scale_lr": _none("write the learning rate that is meant: train.learning_rate"),
    "adam_b1": _is("train.beta1"),
    "adam_b2": _is("train.beta2"),
    "adam_eps": _none("1e-8, as the optimizer has it: leave it out"),
    "adam_weight_decay": _is("train.weight_decay"),
    "max_grad_norm": _is("train.grad_clip"),
    # Diffusion and pictures
    "diffusion_scheduler_config": _is(
        "diffusion.prediction",
        "prediction_type; rescale_zero_terminal_snr is diffusion.zero_terminal_snr",
        _prediction,
    ),
    "timestep_bias": _is(
        "diffusion.timesteps",
        "its strategy; multiplier, portion, begin and end are diffusion.timestep_bias_*, begin and end as shares of 1",
        lambda value: f"diffusion.timesteps={_strategy(value)}",
    ),
    "snr_gamma": _none(f"weighting the loss by min-SNR {NOT_YET}"),
    "flow_shift": _is("diffusion.shift"),
    "time_shift": _is("diffusion.shift", _SHIFTED, _shift),
    "base_shift": _is("diffusion.shift", _SHIFTED, _shift),
    "max_shift": _is("diffusion.shift", _SHIFTED, _shift),
    "prompt": _is("sample.prompts", "a list", _prompts),
    "guidance_scale": _is("sample.guidance_scale"),
    "prompt_2": _none(f"a text of its own for a second text encoder {NOT_YET}"),
    "fps": _none(f"video {NOT_YET}"),
    "do_classifier_free_guidance": _is(
        "sample.guidance_scale", "1 is none", lambda value: f"sample.guidance_scale={'SCALE' if value else 1}"
    ),
    "num_inference_steps": _is("sample.steps"),
    "negative_prompt": _none(f"guidance away from a text of one's own {NOT_YET}"),
    "guidance_rescale": _none(f"guidance with the variance restored {NOT_YET}"),
}
"""Every key that is known to have been there and is not here under its name."""

SAME: tuple[str, ...] = (
    "mesh_axes",
    "logical_axis_rules",
    "data_sharding",
    "weights_dtype",
    "precision",
    "flash_block_sizes",
    "flash_min_seq_length",
    "scan_layers",
    "remat_policy",
    "quantization",
    "use_qwix_quantization",
    "weight_quantization_calibration_method",
    "act_quantization_calibration_method",
    "bwd_quantization_calibration_method",
    "qwix_module_path",
    "seed",
)
"""Keys that are here under their old name; values of choices are written in small letters."""


def advice(key: str, value: Any) -> str | None:
    """What to write instead of an old key; None for a key that is none.

    Args:
        key: as written.
        value: as written; it goes into the words that are proposed.
    """
    old = OLD_KEYS.get(key) or OLD_KEYS.get(key.partition(".")[0])
    if old is None or (old.new is not None and old.new.rpartition(".")[2] == key and not old.note):
        return None  # it only moved into a section, and the nearest name says so
    if old.new is None:
        return f"is a key of MaxDiffusion's earlier configurations: {old.note}"
    words = old.write(value) if old.write else f"{old.new}={_text(value)}"
    note = f" ({old.note})" if old.note else ""
    return f"is a key of MaxDiffusion's earlier configurations: write {words}{note}"


def rows() -> Iterator[tuple[str, str, str]]:
    """The table for people: old key, key here, what else to know."""
    for key in SAME:
        yield key, key, "the same"
    for key, old in OLD_KEYS.items():
        yield key, old.new or "", old.note


def as_markdown() -> str:
    """The table as Markdown, one line a key."""
    lines = ["| before | here | to know |", "|---|---|---|"]
    for key, new, note in rows():
        lines.append(f"| `{key}` | {f'`{new}`' if new else '-'} | {re.sub(r'[|]', '/', note)} |")
    return "\n".join(lines) + "\n"
