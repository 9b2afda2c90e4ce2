"""Writes the UNet goldens: what PyTorch diffusers computes for tiny models whose weights follow from their names.

Run in an environment with the extra `parity`:

    python scripts/goldens/unet.py

For each case `tests/models/goldens/unet_CASE.npz` holds the config, the names and shapes of the parameters, the
inputs, the output in float32, the output of the same weights in float64, and the versions. The weights are made again
from the names by `tests/models/torch_names.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from torch_names import inputs, weight  # noqa: E402

COMMON: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 24,
}
ATTENTION_FIRST: dict[str, Any] = {
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}
ATTENTION_LAST: dict[str, Any] = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
}

CASES: dict[str, dict[str, Any]] = {
    "sd1": {
        "config": {**COMMON, **ATTENTION_FIRST, "attention_head_dim": 8},
        "size": (8, 8),
        "timesteps": [1, 981],
    },
    "sd2": {
        "config": {
            **COMMON,
            **ATTENTION_FIRST,
            "attention_head_dim": [2, 4],
            "use_linear_projection": True,
            "upcast_attention": True,
            "layers_per_block": 2,
        },
        "size": (7, 5),
        "timesteps": [499.5, 20.25],
    },
    "sdxl": {
        "config": {
            **COMMON,
            **ATTENTION_LAST,
            "attention_head_dim": [2, 4],
            "use_linear_projection": True,
            "transformer_layers_per_block": [1, 2],
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 68,
        },
        "size": (6, 9),
        "timesteps": [7, 640],
        "text_time": True,
    },
    "classes": {
        "config": {
            **COMMON,
            **ATTENTION_LAST,
            "attention_head_dim": 4,
            "num_class_embeds": 10,
            "resnet_time_scale_shift": "scale_shift",
            "only_cross_attention": [False, True],
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "center_input_sample": True,
            "act_fn": "gelu",
            "conv_in_kernel": 5,
            "conv_out_kernel": 1,
            "layers_per_block": [1, 2],
            "in_channels": 3,
            "out_channels": 6,
        },
        "size": (5, 6),
        "timesteps": [3, 250],
        "labels": [7, 2],
        "mask": [[1, 1, 0, 1, 0], [1, 0, 0, 0, 1]],
    },
}


def arrays(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The inputs of a case, by the keyword they have in a call."""
    config = case["config"]
    out = {
        "sample": inputs("input.sample", (2, config.get("in_channels", 4), *case["size"])),
        "timesteps": np.asarray(case["timesteps"]),
        "encoder_hidden_states": inputs("input.text", (2, 5, config["cross_attention_dim"])),
    }
    if case.get("text_time"):
        out["text_embeds"] = inputs("input.pooled", (2, 20))
        out["time_ids"] = np.asarray([[64, 48, 0, 3, 32, 16], [1024, 768, 5, 0, 512, 640]], np.float32)
    if "labels" in case:
        out["class_labels"] = np.asarray(case["labels"])
    if "mask" in case:
        out["encoder_attention_mask"] = np.asarray(case["mask"], bool)
    return out


def run(model: torch.nn.Module, given: dict[str, np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """The model's output for these inputs in `dtype`."""
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in given.items()}
    tensors = {name: value.to(dtype) if value.dtype == torch.float32 else value for name, value in tensors.items()}
    added = {name: tensors.pop(name) for name in ("text_embeds", "time_ids") if name in tensors}
    positional = [tensors.pop(name) for name in ("sample", "timesteps", "encoder_hidden_states")]
    with torch.no_grad():
        return model.to(dtype)(*positional, **tensors, added_cond_kwargs=added or None).sample.numpy()


def main() -> None:
    """Writes every case."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        model = diffusers.UNet2DConditionModel(**case["config"]).eval()
        state = {key: tuple(value.shape) for key, value in model.state_dict().items()}

        def fill(dtype: torch.dtype, model: Any = model, state: Any = state) -> None:
            weights = {key: torch.from_numpy(weight(key, shape).astype(np.float32)) for key, shape in state.items()}
            model.load_state_dict({key: value.to(dtype) for key, value in weights.items()})

        given = arrays(case)
        fill(torch.float32)
        float32 = run(model, given, torch.float32)
        model.double()
        fill(torch.float64)
        float64 = run(model, given, torch.float64)
        versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "numpy": np.__version__}
        path = ROOT / "tests" / "models" / "goldens" / f"unet_{name}.npz"
        np.savez_compressed(
            path,
            config=json.dumps(case["config"]),
            parameters=json.dumps(state),
            versions=json.dumps(versions),
            float32=float32,
            float64=float64,
            **{f"input_{key}": value for key, value in given.items()},
        )
        distance = np.abs(float32 - float64).max() / np.abs(float64).max()
        sys.stdout.write(f"{path.name}: {float32.shape}, {len(state)} parameters, float32 to float64 {distance:.1e}\n")


if __name__ == "__main__":
    main()
