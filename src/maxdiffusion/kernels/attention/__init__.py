"""Attention kernels and the choice between them."""
