# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Hyperball optimizer as a Levanter config, registered as `hyperball`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
from levanter.optim.config import LrSchedule, OptimizerConfig

from levanter_marin.optim.groups import Group, group_labels, rule_of
from levanter_marin.optim.hyperball import NormScope, scale_by_adamh, scale_by_muonh
from levanter_marin.optim.newton_schulz import Coefficients, NewtonSchulzDtype
from levanter_marin.optim.parameters import map_parameters, parameters
from levanter_marin.optim.scaling import (
    MUONH_PER_ADAM_LR,
    ScaledHyperparameters,
    ScaleFrom,
    scaled_hyperparameters,
)

_DEFAULTS = ScaledHyperparameters(learning_rate=0.02, adam_lr=0.02 / MUONH_PER_ADAM_LR, beta2=0.95, epsilon=1e-15)

_SEPARATOR = "/"  # between a group and the kind of a norm; the name of no hyperparameter has it


@OptimizerConfig.register_subclass("hyperball")
@dataclass(frozen=True)
class HyperballConfig(OptimizerConfig):
    """MuonH for the matrices of linear layers and expert banks, AdamH for the LM head, Adam for the rest.

    `levanter_marin.optim.groups` says which parameter is which. The warm-up, decay and cycles of Levanter's other
    optimizers apply to both learning rates; their defaults here are those of the published run.
    """

    learning_rate: float | None = None  # pyrefly: ignore[bad-override]
    """Of MuonH and AdamH: the share of its norm by which a matrix moves in a step. None is the rule's, or 0.02."""
    adam_lr: float | None = None
    """Of Adam. None is the rule's, or 3/13 of 0.02."""
    beta1: float = 0.9
    beta2: float | None = None
    """Of Adam and AdamH. None is the rule's, or 0.95."""
    epsilon: float | None = None
    """Of Adam and AdamH. None is the rule's, or 1e-15."""
    scale_from: ScaleFrom | None = None
    """The size of the run, from which the published rule gives what is None above."""

    momentum: float = 0.95
    nesterov: bool = True
    coefficients: Coefficients = Coefficients.quintic
    num_steps: int = 5
    """Newton-Schulz steps."""
    newton_schulz_dtype: NewtonSchulzDtype = NewtonSchulzDtype.bf16
    norm_scope: NormScope = NormScope.all_experts
    """What keeps one norm in an expert bank: all experts of a layer together, as published, or each expert."""

    max_grad_norm: float | None = None
    """Clip the gradient of each group to this norm; None, as published, does not clip."""
    gate_router_weight_decay: float = 0.0
    """Decoupled decay of head gates and router weights, annealed linearly to zero over the run; published: 0.02 from
    step 58,014 on. Changing it keeps the structure of the state, so that a run without it can be resumed with it."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Groups of modules that have no rule, by `TypeName.field`."""
    total_steps: int | None = None
    """Steps over which the schedule extends; None is those of the trainer. Pins it where a run is cut into stages."""

    weight_decay: float = 0.0
    lr_schedule: LrSchedule | str = "linear"
    min_lr_ratio: float = 0.05
    warmup: int | float = 0.01

    def __post_init__(self):
        if self.weight_decay != 0 or self.weight_decay_modules is not None or self.default_weight_decay_mask:
            raise ValueError(
                f"optimizer.weight_decay={self.weight_decay} has no place in hyperball, whose matrices keep their "
                "norm; set it to 0. optimizer.gate_router_weight_decay decays gates and routers"
            )
        for name in ("learning_rate", "adam_lr", "epsilon", "num_steps", "max_grad_norm", "total_steps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"optimizer.{name}={value} must be positive")
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"optimizer.{name}={value} must lie in [0, 1)")
        if self.gate_router_weight_decay < 0:
            raise ValueError(
                f"optimizer.gate_router_weight_decay={self.gate_router_weight_decay} must be 0 or more; 0 is off"
            )
        if self.scale_from is not None:
            scaled_hyperparameters(self.scale_from)  # refuses impossible sizes

    def resolved(self) -> ScaledHyperparameters:
        """What is used: a field's own value, else that of the scaling rule, else a default."""
        base = _DEFAULTS if self.scale_from is None else scaled_hyperparameters(self.scale_from)
        given = {name: getattr(self, name) for name in (f.name for f in dataclasses.fields(base))}
        return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})

    def build(self, num_train_steps: int) -> optax.GradientTransformationExtraArgs:
        """The optimizer, whose updates are to be added to the parameters.

        Levanter logs the `hyperparams` of its state as `optim/...`: `learning_rate`, `adam_lr`,
        `gate_router_weight_decay`, and for each group the norms `GROUP/grad_norm` (before clipping),
        `GROUP/update_norm` and `GROUP/param_norm` (before the update). They are no host callback in the step.

        Args:
            num_train_steps: of the trainer; the schedule takes as many unless `total_steps` is set.

        Raises:
            ValueError: the trainer goes on beyond `total_steps`; when initialised, a parameter is in no group or in
                two, or the embedding's width is not that of `scale_from`.
        """
        num_steps = num_train_steps if self.total_steps is None else self.total_steps
        if num_train_steps > num_steps:
            raise ValueError(
                f"optimizer.total_steps={num_steps} is below the {num_train_steps} steps of the trainer; "
                f"set it to {num_train_steps} or more"
            )
        values = self.resolved()

        def annealed_decay(count: jax.Array) -> jax.Array:
            return self.gate_router_weight_decay * jnp.maximum(1 - count / num_steps, 0)

        # fp32, whatever the parameters are: a learning rate in bf16 would be off by up to 0.4 percent
        optimizer = optax.inject_hyperparams(self._optimizer, hyperparam_dtype=jnp.float32)(
            learning_rate=self.lr_scheduler(num_steps, override_lr=values.learning_rate),
            adam_lr=self.lr_scheduler(num_steps, override_lr=values.adam_lr),
            gate_router_weight_decay=annealed_decay,
        )
        return _with_norms(optimizer, self.groups)

    def _optimizer(self, learning_rate, adam_lr, gate_router_weight_decay) -> optax.GradientTransformation:
        values = self.resolved()
        muonh = scale_by_muonh(
            learning_rate,
            self.momentum,
            self.nesterov,
            self.coefficients,
            self.num_steps,
            self.newton_schulz_dtype,
            self.norm_scope,
        )
        adamh = scale_by_adamh(learning_rate, self.beta1, values.beta2, values.epsilon, self.norm_scope)
        adam = optax.chain(
            optax.scale_by_adam(self.beta1, values.beta2, values.epsilon),
            self._decay_gates_and_routers(gate_router_weight_decay),
            optax.scale(-adam_lr),
        )
        transformations = {Group.muonh: muonh, Group.adamh: adamh, Group.adam: adam}
        return optax.partition({group: self._clipped(t) for group, t in transformations.items()}, self._labels)

    def _clipped(self, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
        clip = optax.identity() if self.max_grad_norm is None else optax.clip_by_global_norm(self.max_grad_norm)
        return optax.chain(clip, transformation, _cast_to_parameters())

    def _decay_gates_and_routers(self, decay: jax.Array) -> optax.GradientTransformation:
        """A part of the chain also where it does nothing, for the sake of the state's structure."""

        def add(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
            if self.gate_router_weight_decay == 0:
                return updates
            return map_parameters(
                lambda u, p: u.value + decay * p if rule_of(u, self.groups).is_gate_or_router else u.value,
                updates,
                params,
            )

        return optax.stateless(add)

    def _labels(self, params: Any) -> Any:
        if self.scale_from is not None:
            self._check_width(params, self.scale_from.hidden_dim)
        return group_labels(params, self.groups)

    @staticmethod
    def _check_width(params: Any, hidden_dim: int) -> None:
        for parameter in parameters(params):
            module = parameter.holders[-1].module if parameter.holders else None
            if isinstance(module, hnn.Embedding) and hax.axis_size(module.Embed) != hidden_dim:
                width = hax.axis_size(module.Embed)
                raise ValueError(
                    f"optimizer.scale_from.hidden_dim={hidden_dim}, but {parameter.path} is {width} wide; "
                    f"set optimizer.scale_from.hidden_dim to {width}"
                )


def _cast_to_parameters() -> optax.GradientTransformation:
    """Scaling by an fp32 learning rate makes fp32 of a bf16 update, and adding that fp32 of the parameter."""
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params))


def _with_norms(
    optimizer: optax.GradientTransformationExtraArgs, groups: Mapping[str, Group]
) -> optax.GradientTransformationExtraArgs:
    """Adds norms of every group to the `hyperparams` of an optimizer made by `optax.inject_hyperparams`."""

    def init(params: optax.Params) -> Any:
        state = optimizer.init(params)
        zeros = {name: jnp.zeros_like(norm) for name, norm in _norms("grad_norm", params, groups).items()}
        zeros |= {name.replace("grad", kind): zero for name, zero in zeros.items() for kind in ("update", "param")}
        return state._replace(hyperparams=state.hyperparams | zeros)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args):
        norms = _norms("grad_norm", updates, groups) | _norms("param_norm", params, groups)
        injected = {name: value for name, value in state.hyperparams.items() if _SEPARATOR not in name}
        updates, state = optimizer.update(updates, state._replace(hyperparams=injected), params, **extra_args)
        norms |= _norms("update_norm", updates, groups)
        return updates, state._replace(hyperparams=state.hyperparams | norms)

    return optax.GradientTransformationExtraArgs(init, update)


def _norms(kind: str, tree: Any, groups: Mapping[str, Group]) -> dict[str, jax.Array]:
    """The fp32 norm over all parameters of a group, for each group that has any."""
    squares: dict[Group, jax.Array] = {}
    for parameter in parameters(tree):
        group = rule_of(parameter, groups).group
        (array,) = jax.tree.leaves(parameter.value)
        squares[group] = squares.get(group, jnp.float32(0)) + jnp.sum(jnp.square(array.astype(jnp.float32)))
    return {f"{group}{_SEPARATOR}{kind}": jnp.sqrt(square) for group, square in squares.items()}
