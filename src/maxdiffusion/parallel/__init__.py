"""Meshes, logical axis rules and the layout that says where every array lives."""
