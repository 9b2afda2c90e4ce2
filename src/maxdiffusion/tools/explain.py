"""Where every parameter of a model would live on a mesh, and why; no weights are made and no devices are needed."""

from __future__ import annotations

from jax.sharding import Mesh

from maxdiffusion.common_types import LogicalAxisRules
from maxdiffusion.models.registry import lookup
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.parallel.report import Report
from maxdiffusion.specs import MeshSpec


def explain(
    model: str,
    *,
    mesh: MeshSpec | Mesh,
    rules: LogicalAxisRules | str | None = None,
    strict: bool = False,
) -> Report:
    """The report of a registry model's parameters on a mesh.

    Args:
        model: registry name, such as `sdxl`.
        mesh: sizes of the mesh axes (an axis of -1 counts as 1), or a mesh.
        rules: rules that come before the defaults, the name of a preset, or None.
        strict: refuse a layout that is not as the rules wish.

    Returns:
        A row for each parameter, and the totals.

    Raises:
        UsageError: the model, a mesh axis or a rule is unknown; under `strict`, a wish is not met.
    """
    target = abstract_mesh(mesh) if isinstance(mesh, MeshSpec) else mesh
    layout = Layout.of(target, rules, strict=strict)
    return layout.report(*lookup(model).build().abstract_params())
