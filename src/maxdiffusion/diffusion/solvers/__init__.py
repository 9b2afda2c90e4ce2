"""Solvers that fold a denoiser over a time grid, one a file."""
