"""maxdiffusion: train and run diffusion models in JAX on any mesh of accelerators."""

__version__ = "0.1.0"
