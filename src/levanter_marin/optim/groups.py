# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Which parameter belongs to which group of the Hyperball optimizer.

Two tables decide, by the type of the module that holds a parameter and by its field. A role, the field under which
another module holds that module, comes before the type: the LM head and a router are linear layers like any other, and
differ in their role alone. Subclasses count as their bases. A parameter for which no rule, or rules of different
groups, hold is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import haliax.nn as hnn
from haliax.nn.normalization import LayerNormBase
from levanter.layers.attention import GatedAttention
from levanter.models.lm_model import LmHeadModel
from levanter.models.mixtral import MixtralSparseMoeBlock
from levanter.models.qwen3_moe import Qwen3MoeSparseMoeBlock

from levanter_marin.layers.attention import Attention
from levanter_marin.layers.short_conv import ShortConv
from levanter_marin.moe.routing import Router
from levanter_marin.optim.parameters import Holder, Parameter, map_parameters, parameters


class Group(StrEnum):
    """How a parameter is trained."""

    muonh = "muonh"  # orthogonalized momentum, constant norm
    adamh = "adamh"  # Adam's direction, constant norm
    adam = "adam"


@dataclass(frozen=True)
class Rule:
    """A group, for a field of a type."""

    module: type
    field: str
    group: Group
    is_gate_or_router: bool = False
    """Whether `gate_router_weight_decay` applies."""


# Of the weight of a linear layer that `module` holds as `field`.
ROLES = (
    Rule(Attention, "attn_gate", Group.adam, is_gate_or_router=True),
    Rule(GatedAttention, "gate_proj", Group.adam, is_gate_or_router=True),
    Rule(Qwen3MoeSparseMoeBlock, "gate", Group.adam, is_gate_or_router=True),
    Rule(MixtralSparseMoeBlock, "gate", Group.adam, is_gate_or_router=True),
    Rule(LmHeadModel, "lm_head", Group.adamh),
)

# Of an array that `module` itself holds as `field`.
TYPES = (
    Rule(hnn.Linear, "weight", Group.muonh),
    Rule(hnn.Linear, "bias", Group.adam),
    Rule(hnn.MoELinear, "weight", Group.muonh),
    Rule(hnn.MoELinear, "bias", Group.adam),
    Rule(hnn.Embedding, "weight", Group.adam),
    Rule(LayerNormBase, "weight", Group.adam),
    Rule(LayerNormBase, "bias", Group.adam),
    Rule(Router, "weight", Group.adam, is_gate_or_router=True),
    Rule(ShortConv, "weight", Group.adam),
)


def rule_of(parameter: Parameter, extra: Mapping[str, Group] = {}) -> Rule:
    """The rule that holds for a parameter.

    Args:
        parameter: one of `levanter_marin.optim.parameters.parameters`.
        extra: groups of further types and roles, by `TypeName.field`.

    Raises:
        ValueError: there is no rule, rules give different groups, or the group needs matrix axes that are not there.
    """
    holders = parameter.holders
    is_weight = parameter.matrix_axes is not None
    by_role = _matching(ROLES, holders[-2:-1], extra) if is_weight else []
    rules = by_role or _matching(TYPES, holders[-1:], extra)
    where = f"{holders[-1].module.__class__.__name__}.{holders[-1].field}" if holders else "no module"
    if not rules:
        raise ValueError(
            f"parameter {parameter.path} ({where}) is in no group of the hyperball optimizer; set "
            f"optimizer.groups: {{{where}: adam}}"
        )
    if len({rule.group for rule in rules}) > 1:
        found = ", ".join(f"{rule.group} as {rule.module.__name__}.{rule.field}" for rule in rules)
        raise ValueError(
            f"parameter {parameter.path} is in two groups of the hyperball optimizer: {found}; keep one of them in "
            "optimizer.groups"
        )
    if rules[0].group is not Group.adam and not is_weight:
        raise ValueError(
            f"parameter {parameter.path} ({where}) is in group {rules[0].group}, which needs the input and output "
            "axes of a haliax.nn.Linear or MoELinear; set its group to adam"
        )
    return rules[0]


def group_labels(params: Any, extra: Mapping[str, Group] = {}) -> Any:
    """The tree with the name of its group in place of each parameter, as `optax.partition` wants it.

    Raises:
        ValueError: as `rule_of`, or `extra` names what the model does not have.
    """
    _refuse_unused(extra, params)
    return map_parameters(lambda parameter: str(rule_of(parameter, extra).group), params)


def group_table(params: Any, extra: Mapping[str, Group] = {}) -> list[tuple[Parameter, Rule]]:
    """Every parameter of a model with its rule; raises as `group_labels`."""
    _refuse_unused(extra, params)
    return [(parameter, rule_of(parameter, extra)) for parameter in parameters(params)]


def _refuse_unused(extra: Mapping[str, Group], params: Any) -> None:
    names = {
        f"{base.__name__}.{holder.field}"
        for parameter in parameters(params)
        for holder in parameter.holders
        for base in type(holder.module).__mro__
    }
    unused = sorted(set(extra) - names)
    if unused:
        raise ValueError(
            f"optimizer.groups names {', '.join(unused)}, which the model does not have; write TypeName.field of a "
            "module that holds a parameter, or that holds such a module"
        )


def _matching(rules: tuple[Rule, ...], holders: tuple[Holder, ...], extra: Mapping[str, Group]) -> list[Rule]:
    """The rules for the one holder given, if it is given; those of `extra` among them."""
    found = []
    for holder in holders:
        found += [rule for rule in rules if isinstance(holder.module, rule.module) and holder.field == rule.field]
        found += [
            Rule(base, holder.field, extra[f"{base.__name__}.{holder.field}"])
            for base in type(holder.module).__mro__
            if f"{base.__name__}.{holder.field}" in extra
        ]
    return found
