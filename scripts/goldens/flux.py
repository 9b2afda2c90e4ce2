"""Writes the goldens of FLUX.1's transformer: what PyTorch diffusers computes for tiny models.

Run in an environment with the extra `parity`:

    python scripts/goldens/flux.py

For each case `tests/models/goldens/flux_CASE.npz` holds the config, the names and shapes of the parameters, the
inputs, the output in float32, the output of the same weights in float64, and the versions. The weights are made again
from the names by `tests/models/torch_names.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import diffusers
import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from torch_names import inputs, weight  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "dev": {
        "config": {
            "in_channels": 6,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 2,
            "joint_attention_dim": 20,
            "pooled_projection_dim": 10,
            "guidance_embeds": True,
            "axes_dims_rope": [2, 4, 6],
        },
        "size": (3, 5),
        # Small, because the sinusoids of 1000 times these have float32 phases, here and in the original: at a guidance
        # of 3.5 the original differs by 1e-4 from its own sinusoids with float64 frequencies, and the output by 2e-5.
        "timestep": [0.25, 0.5],
        "guidance": [0.375, 0.125],
    },
    "schnell": {
        "config": {
            "patch_size": 2,
            "in_channels": 5,
            "out_channels": 3,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 3,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 12,
            "axes_dims_rope": [2, 2, 4],
        },
        "size": (4, 2),
        "timestep": [0.75, 0.03125],
        "text_positions": True,
        "mask": [[1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1]],
    },
}


def arrays(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The inputs of a case, by the keyword they have in a call."""
    config = case["config"]
    height, width = case["size"]
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    places = np.stack([np.zeros_like(rows), rows, columns], axis=-1).reshape(-1, 3).astype(np.float32)
    text_places = np.zeros((7, 3), np.float32)
    if case.get("text_positions"):
        text_places[:, 0] = np.arange(7)
    out = {
        "hidden_states": inputs("input.latents", (2, height * width, config["in_channels"])),
        "encoder_hidden_states": inputs("input.text", (2, 7, config["joint_attention_dim"])),
        "pooled_projections": inputs("input.pooled", (2, config["pooled_projection_dim"])),
        "timestep": np.asarray(case["timestep"], np.float32),
        "img_ids": places,
        "txt_ids": text_places,
    }
    if "guidance" in case:
        out["guidance"] = np.asarray(case["guidance"], np.float32)
    if "mask" in case:
        out["encoder_attention_mask"] = np.asarray(case["mask"], bool)
    return out


def run(model: torch.nn.Module, given: dict[str, np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """The model's output for these inputs in `dtype`; it has a mask only as an argument of its attention."""
    tensors = {name: torch.from_numpy(value) for name, value in given.items()}
    tensors = {name: value.to(dtype) if value.dtype == torch.float32 else value for name, value in tensors.items()}
    keywords = {}
    if "encoder_attention_mask" in tensors:
        mask = tensors.pop("encoder_attention_mask")
        image = torch.ones(mask.shape[0], tensors["hidden_states"].shape[1], dtype=torch.bool)
        keywords["joint_attention_kwargs"] = {"attention_mask": torch.cat([mask, image], dim=1)[:, None, None]}
    with torch.no_grad():
        return model.to(dtype)(**tensors, **keywords).sample.numpy()


def main() -> None:
    """Writes every case."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        model = diffusers.FluxTransformer2DModel(**case["config"]).eval()
        state = {key: tuple(value.shape) for key, value in model.state_dict().items()}

        def fill(dtype: torch.dtype, model: Any = model, state: Any = state) -> None:
            weights = {key: torch.from_numpy(weight(key, shape).astype(np.float32)) for key, shape in state.items()}
            model.load_state_dict({key: value.to(dtype) for key, value in weights.items()})

        given = arrays(case)
        fill(torch.float32)
        float32 = run(model, given, torch.float32)
        model.double()
        fill(torch.float64)
        # The original calls .float() on times, rotated queries and keys: in the float64 run they stay float64.
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            float64 = run(model, given, torch.float64)
        assert float64.dtype == np.float64
        versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "numpy": np.__version__}
        path = ROOT / "tests" / "models" / "goldens" / f"flux_{name}.npz"
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
