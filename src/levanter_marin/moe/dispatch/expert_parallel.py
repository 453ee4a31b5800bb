# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Whether tokens can travel to experts on other devices, under the current mesh and axis mapping."""

from haliax import NamedArray

from levanter_marin import axes
from levanter_marin.moe.dispatch.plan import local_expert_count
from levanter_marin.moe.dispatch.sharded import mesh_axes, mesh_shape, token_mesh_axes

_AXIS = axes.EXPERT_MESH_AXIS


def why_not_expert_parallel() -> str | None:
    """What the mesh or the mapping lacks, with what to set; None when experts are spread over the axis `expert`."""
    if not mesh_shape():
        return "there is no mesh"
    if _AXIS not in mesh_shape():
        return (
            f"the mesh has no axis `{_AXIS}`; set trainer.mesh.axes.{_AXIS} to the number of devices that share a bank"
        )
    if mesh_axes(axes.EXPERTS, min_size=1) != (_AXIS,):
        return (
            f"`{axes.EXPERTS}` is mapped to {mesh_axes(axes.EXPERTS, min_size=1) or 'nothing'}; "
            f"set trainer.mesh.shared_mapping.{axes.EXPERTS} to {_AXIS}"
        )
    return None


def require_expert_parallel(x: NamedArray, num_experts: int) -> int:
    """The number of devices that the experts are spread over.

    Raises:
        ValueError: experts are not spread over the mesh axis `expert` or do not divide, or the tokens of `x` are not
            spread over it.
    """
    reason = why_not_expert_parallel()
    if reason is not None:
        raise ValueError(f"an all-to-all dispatch can't run here: {reason}; or set dispatch.implementation to auto")
    size = mesh_shape()[_AXIS]
    of_tokens = [name for names in token_mesh_axes(x, min_size=1) for name in names]
    if _AXIS not in of_tokens:
        raise ValueError(
            f"tokens are sharded over the mesh axes {of_tokens} and not over `{_AXIS}` of size {size}, so each would "
            f"be sent {size} times; add {_AXIS} to trainer.mesh.compute_mapping.{axes.BATCH}"
        )
    local_expert_count(num_experts, size)
    return size
