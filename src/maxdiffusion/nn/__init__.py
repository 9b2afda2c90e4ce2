"""Linen layers that know their logical axes."""
