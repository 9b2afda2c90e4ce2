"""Record whole trajectories of PyTorch diffusers' schedulers, for tests/diffusion/test_goldens.py.

Run with torch and diffusers installed: `python scripts/goldens/schedulers.py`. Writes
tests/diffusion/goldens/schedulers.npz: for each case the timesteps, the trajectory and what is needed to repeat it,
everything in the coordinates of the library (x = alpha x_0 + sigma eps). The "model" is a closed formula, see `model`.
"""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

SD = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
STEPS = 10
OUT = Path(__file__).parents[2] / "tests" / "diffusion" / "goldens" / "schedulers.npz"

# name -> scheduler class, its settings, prediction type, whether the model looks at the timestep (not where a scheduler
# rounds the timesteps of its sigmas, and so tells the model another time than the one it steps at)
CASES = {
    "euler_trailing": (EulerDiscreteScheduler, {**SD, "timestep_spacing": "trailing"}, "epsilon", True),
    "euler_leading": (
        EulerDiscreteScheduler,
        {**SD, "timestep_spacing": "leading", "steps_offset": 1},
        "v_prediction",
        True,
    ),
    "euler_linspace": (EulerDiscreteScheduler, {**SD, "timestep_spacing": "linspace"}, "epsilon", True),
    "euler_karras": (EulerDiscreteScheduler, {**SD, "use_karras_sigmas": True}, "epsilon", True),
    "euler_exponential": (EulerDiscreteScheduler, {**SD, "use_exponential_sigmas": True}, "epsilon", True),
    "euler_cosine": (
        EulerDiscreteScheduler,
        {"beta_schedule": "squaredcos_cap_v2", "timestep_spacing": "leading"},
        "v_prediction",
        True,
    ),
    "ancestral": (EulerAncestralDiscreteScheduler, {**SD, "timestep_spacing": "trailing"}, "epsilon", True),
    "ddim": (
        DDIMScheduler,
        {**SD, "timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": False, "clip_sample": False},
        "epsilon",
        True,
    ),
    "ddim_eta": (DDIMScheduler, {**SD, "timestep_spacing": "trailing", "clip_sample": False}, "sample", True),
    "ddim_zero_snr": (
        DDIMScheduler,
        {**SD, "timestep_spacing": "trailing", "clip_sample": False, "rescale_betas_zero_snr": True},
        "v_prediction",
        True,
    ),
    "dpm_trailing": (DPMSolverMultistepScheduler, {**SD, "timestep_spacing": "trailing"}, "epsilon", True),
    "dpm_karras": (DPMSolverMultistepScheduler, {**SD, "use_karras_sigmas": True}, "v_prediction", False),
    "dpm_flow": (
        DPMSolverMultistepScheduler,
        {"use_flow_sigmas": True, "flow_shift": 3.0, "num_train_timesteps": 1000},
        "flow_prediction",
        False,
    ),
    "flow_euler": (FlowMatchEulerDiscreteScheduler, {"shift": 3.0}, None, True),
}


def model(x: torch.Tensor, timestep: torch.Tensor, timed: bool) -> torch.Tensor:
    """tanh(0.8 x + 0.3) + 0.2 x, plus 0.5 sin(timestep / 300) where the model looks at the time."""
    out = torch.tanh(0.8 * x + 0.3) + 0.2 * x
    return out + 0.5 * torch.sin(timestep.to(torch.float32) / 300) if timed else out


def trajectory(name: str, x: torch.Tensor, noise: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(timesteps, sigmas, x after each step) of one case, on the scale of x even if the scheduler steps x / alpha."""
    kind, settings, prediction, timed = CASES[name]
    scheduler = kind(**settings, **({"prediction_type": prediction} if prediction else {}))
    if kind is FlowMatchEulerDiscreteScheduler:
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS))
    else:
        scheduler.set_timesteps(STEPS)
    scaled = kind in (EulerDiscreteScheduler, EulerAncestralDiscreteScheduler)
    if scaled:
        x = x * torch.sqrt(scheduler.sigmas[0] ** 2 + 1)
    path = []
    for i, timestep in enumerate(scheduler.timesteps):
        extra = {"eta": 0.5, "variance_noise": noise[i]} if name == "ddim_eta" else {}
        if kind is EulerAncestralDiscreteScheduler:
            module = __import__(kind.__module__, fromlist=["randn_tensor"])
            module.randn_tensor = lambda *args, i=i, **kwargs: noise[i]
        out = model(scheduler.scale_model_input(x, timestep) if scaled else x, timestep, timed)
        x = scheduler.step(out, timestep, x, **extra).prev_sample
        path.append(x / torch.sqrt(scheduler.sigmas[i + 1] ** 2 + 1) if scaled else x)
    sigmas = scheduler.sigmas if kind is not DDIMScheduler else torch.zeros(0)
    return scheduler.timesteps.numpy(), sigmas.numpy(), torch.stack(path).numpy()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((4, 3), generator=generator)
    noise = torch.randn((STEPS, 4, 3), generator=generator)
    arrays = {"x": x.numpy(), "noise": noise.numpy()}
    for name in CASES:
        timesteps, sigmas, path = trajectory(name, x, noise)
        arrays |= {f"{name}.timesteps": timesteps, f"{name}.sigmas": sigmas, f"{name}.path": path}
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "numpy": np.__version__}
    np.savez_compressed(OUT, versions=json.dumps(versions), **arrays)


if __name__ == "__main__":
    main()
