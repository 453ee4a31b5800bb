# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Hyperball optimizer as a Levanter config, registered as `hyperball`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import levanter.tracker
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

        Its state has the hyperparameters `learning_rate`, `adam_lr` and `gate_router_weight_decay`, which Levanter
        logs; norms of gradients, parameters and updates of each group are logged as `optim/GROUP/...`.

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
        return optax.inject_hyperparams(self._optimizer, hyperparam_dtype=jnp.float32)(
            learning_rate=self.lr_scheduler(num_steps, override_lr=values.learning_rate),
            adam_lr=self.lr_scheduler(num_steps, override_lr=values.adam_lr),
            gate_router_weight_decay=annealed_decay,
        )

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
        transformations = {
            Group.muonh: self._with_norms(Group.muonh, muonh),
            Group.adamh: self._with_norms(Group.adamh, adamh),
            Group.adam: self._with_norms(Group.adam, adam),
        }
        return optax.partition(transformations, self._labels)

    def _with_norms(self, group: Group, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
        components = [_log_norms(f"optim/{group}/grad_norm")]
        if self.max_grad_norm is not None:
            components.append(optax.clip_by_global_norm(self.max_grad_norm))
        components += [transformation, _cast_to_parameters()]
        components.append(_log_norms(f"optim/{group}/update_norm", f"optim/{group}/param_norm"))
        return optax.chain(*components)

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


def _log_norms(updates_name: str, params_name: str | None = None) -> optax.GradientTransformation:
    """Logs the norm over all updates, and over all parameters, where there are any; passes the updates on."""

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        if jax.tree.leaves(updates):
            levanter.tracker.jit_log({updates_name: _norm(updates)})
            if params_name is not None:
                levanter.tracker.jit_log({params_name: _norm(params)})
        return updates

    return optax.stateless(update)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
