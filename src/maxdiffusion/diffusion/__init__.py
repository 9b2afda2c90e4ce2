"""The mathematics of diffusion: processes, predictions, grids, solvers, guidance, losses."""
