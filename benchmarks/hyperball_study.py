# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Training curves of hyperball and of Levanter's Adam, each at several learning rates, on the same batches.

All runs begin with the same weights and have the same schedule, so that only the optimizer differs. After the runs of
equal length come shorter ones of the best hyperball, with a schedule as much shorter: the length at which these end at
Adam's validation loss says how many steps hyperball saves.

Every run is one file, and a run whose file exists is not repeated: the study continues where it was stopped.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from haliax import Axis
from levanter.data.loader import stack_tree
from levanter.main.train_lm import TrainLmConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.schedule import BatchSchedule
from levanter.trainer_state import TrainerState

from common import Timing, compile_timed, machine, take_turns, write_json
from levanter_marin import axes
from levanter_marin.analysis.plots import Panel, draw_panels
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype

SCHEDULE: dict[str, Any] = {"lr_schedule": "linear", "warmup": 0.05, "min_lr_ratio": 0.05}
VALIDATION_SEQUENCES = 64
WINDOW = 20  # steps over which training losses are averaged


def optimizer_config(kind: str, learning_rate: float) -> OptimizerConfig:
    """Both with beta1 0.9 and beta2 0.95. Hyperball's Adam group keeps its share of the learning rate, 3/13."""
    if kind == "adam":
        return AdamConfig(learning_rate=learning_rate, weight_decay=0.0, max_grad_norm=1.0, **SCHEDULE)
    return HyperballConfig(
        learning_rate=learning_rate,
        adam_lr=learning_rate * 3 / 13,
        newton_schulz_dtype=NewtonSchulzDtype.fp32,
        **SCHEDULE,
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches of one size, by index; every run sees the same."""

    train: Sequence[LmExample]
    validation: Sequence[LmExample]


def load_data(config: TrainLmConfig, num_steps: int) -> Data:
    """The first batches of `levanter-marin train` with this config, and the first of the validation set."""
    batch_size = config.trainer.train_batch_size
    Pos = config.model.max_Pos.resize(config.train_seq_len)
    Batch = Axis(axes.BATCH, batch_size)
    data_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)[0]

    def batches(dataset, number: int) -> list[LmExample]:
        examples = dataset.as_sync_dataset().get_batch(range(number * batch_size))
        return [stack_tree(Batch.name, examples[i : i + batch_size]) for i in range(0, len(examples), batch_size)]

    train = config.data.train_set(Pos, BatchSchedule(batch_size), key=data_key)
    (validation,) = config.data.validation_sets(Pos).values()
    return Data(batches(train, num_steps), batches(validation, VALIDATION_SEQUENCES // batch_size))


class Study:
    """The gradient is compiled once for all runs, an update once for each."""

    def __init__(self, config: TrainLmConfig, data: Data):
        self.data = data
        Vocab = Axis(axes.VOCAB, len(config.data.the_tokenizer))
        model_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)[2]
        self.model = eqx.filter_jit(config.model.build)(Vocab, key=model_key)

        def loss_of(model, example, z_loss_weight):
            loss, _ = model.compute_next_token_loss(example, key=jax.random.PRNGKey(0), logsumexp_weight=z_loss_weight)
            return loss.scalar()

        @eqx.filter_jit
        def gradient(model, example):
            return eqx.filter_value_and_grad(lambda model: loss_of(model, example, config.z_loss_weight))(model)

        @eqx.filter_jit
        def validation_loss(model, example):
            return loss_of(model, example, None)

        self.gradient, self.validation_loss = gradient, validation_loss

    def run(self, optimizer: OptimizerConfig, num_steps: int) -> dict[str, Any]:
        """Train from the first weights; losses are those of each step's batch before its update."""
        key = jax.random.PRNGKey(0)
        state = TrainerState.init(optimizer.build(num_steps), self.model, key=key)
        update = eqx.filter_jit(lambda state, gradient: state.take_step(gradient, key=key)[0])
        losses, start = [], time.perf_counter()
        for example in self.data.train[:num_steps]:
            loss, gradient = self.gradient(state.model, example)
            state = update(state, gradient)
            losses.append(float(loss))
        seconds = time.perf_counter() - start
        validation = [float(self.validation_loss(state.model, example)) for example in self.data.validation]
        return {"losses": losses, "validation_loss": float(np.mean(validation)), "seconds": seconds}

    def timings(self, repeats: int) -> dict[str, Timing]:
        """Of a gradient, and of an update by each optimizer."""
        (weights, rest), example = eqx.partition(self.model, eqx.is_inexact_array), self.data.train[0]
        contenders = {"gradient": compile_timed(lambda w, x: self.gradient(eqx.combine(w, rest), x), weights, example)}
        _, gradient = contenders["gradient"].run()
        for kind in ("adam", "hyperball"):
            state = TrainerState.init(optimizer_config(kind, 0.01).build(100), self.model, key=jax.random.PRNGKey(0))
            arrays, static = eqx.partition(state, eqx.is_array)

            def update(arrays, gradient, static=static):
                state = eqx.combine(arrays, static).take_step(gradient, key=jax.random.PRNGKey(0))[0]
                return eqx.filter(state, eqx.is_array)

            contenders[kind] = compile_timed(update, arrays, gradient)
        return take_turns(contenders, repeats)


def best(results: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Of the runs of an optimizer the one with the lowest validation loss; NaN is the highest."""
    runs = [result for result in results if result["optimizer"] == kind]
    return min(runs, key=lambda run: np.nan_to_num(run["validation_loss"], nan=np.inf))


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Element i is the mean over steps i - WINDOW + 1 to i, of fewer at the beginning."""
    return np.asarray([np.mean(losses[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(losses))])


def steps_to_equal_loss(adam: dict[str, Any], hyperball: Sequence[dict[str, Any]]) -> float | None:
    """Steps that hyperball needs for Adam's validation loss, from runs of different lengths at one learning rate.

    Every run has a whole schedule, which parts of one run have not. The loss is taken as linear in the logarithm of
    the steps, between the runs and a little beyond them.
    """
    if len(hyperball) < 2:
        return None
    logs, losses = [np.log(run["steps"]) for run in hyperball], [run["validation_loss"] for run in hyperball]
    slope, offset = np.polyfit(logs, losses, 1)
    return float(np.exp((adam["validation_loss"] - offset) / slope))


def name_of(run: dict[str, Any], steps: bool = True) -> str:
    return f"{run['optimizer']}, rate {run['learning_rate']:g}" + (f", {run['steps']} steps" if steps else "")


def report(results: Sequence[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Prints and returns the best rates, all validation losses, and the ratio of steps."""
    full = [run for run in results if run["steps"] == num_steps]
    adam, hyperball = best(full, "adam"), best(full, "hyperball")
    same_rate = [run for run in results if name_of(run, steps=False) == name_of(hyperball, steps=False)]
    equal = steps_to_equal_loss(adam, same_rate)
    for run in sorted(results, key=lambda run: (run["optimizer"], run["steps"], run["learning_rate"])):
        print(f"{name_of(run):36} validation {run['validation_loss']:.4f}  training {smoothed(run['losses'])[-1]:.4f}")
    print(f"best: {name_of(adam)}; {name_of(hyperball)}")
    if equal is not None:
        print(f"hyperball needs {equal:.0f} steps for adam's loss, which takes {num_steps / equal:.2f} times as many")
    return {
        "best_adam": name_of(adam),
        "best_hyperball": name_of(hyperball),
        "steps_to_equal_loss": equal,
        "ratio": None if equal is None else num_steps / equal,
    }


def print_timings(timings: dict[str, Timing]) -> None:
    for name, timing in timings.items():
        print(
            f"{name:10} {timing.median_ms:8.1f} ms median  {timing.min_ms:8.1f} ms best  {timing.cpu_ms:8.1f} ms CPU"
        )
    for field in ("median_ms", "min_ms", "cpu_ms"):
        gradient, adam, hyperball = (getattr(timings[name], field) for name in ("gradient", "adam", "hyperball"))
        print(f"step of hyperball over that of adam, {field}: {(gradient + hyperball) / (gradient + adam):.3f}")


def draw(path: Path, title: str, results: Sequence[dict[str, Any]], num_steps: int) -> None:
    """The curves of both at their best learning rate, and of all runs of equal length."""
    full = [run for run in results if run["steps"] == num_steps]

    def curves(runs: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
        return {name_of(run): list(enumerate(smoothed(run["losses"]).tolist(), start=1)) for run in runs}

    panels = [
        Panel("training loss, best rates", curves([best(full, kind) for kind in ("hyperball", "adam")])),
        Panel("training loss, all rates", curves(full)),
    ]
    draw_panels(path, title, f"step; mean over {WINDOW} steps", panels)


def read_run(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A run's file, refused if it is of other settings."""
    result = json.loads(path.read_text())
    differing = [name for name, value in settings.items() if result[name] != value]
    if differing:
        name = differing[0]
        raise SystemExit(f"{path} is of {name} {result[name]}, not {settings[name]}; give another folder")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a training config, for model and data; its optimizer is not used")
    parser.add_argument("output", type=Path, help="folder of the runs' files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hyperball", type=float, nargs="+", default=[0.02, 0.04, 0.01, 0.08], metavar="LR")
    parser.add_argument("--adam", type=float, nargs="+", default=[3e-3, 6e-3, 1.5e-3, 1.2e-2], metavar="LR")
    parser.add_argument("--shorter", type=float, nargs="*", default=[0.8, 0.65], metavar="SHARE", help="of the steps")
    parser.add_argument("--picture", type=Path, help="where to draw the curves, as PNG")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--timing", type=int, metavar="N", help="only measure the time of a step, N times")
    options, overrides = parser.parse_known_args()

    config = load_train_config(options.config, overrides)
    options.output.mkdir(parents=True, exist_ok=True)
    study = functools.cache(lambda: Study(config, load_data(config, options.steps)))  # only if a run is missing
    if options.timing is not None:
        print_timings(study().timings(options.timing))
        return
    common = {
        "config": Path(options.config).stem,
        "overrides": overrides,
        "batch_size": config.trainer.train_batch_size,
        "seq_len": config.train_seq_len,
    }

    def result(kind: str, learning_rate: float, num_steps: int) -> dict[str, Any]:
        settings = common | {"optimizer": kind, "learning_rate": learning_rate, "steps": num_steps}
        path = options.output / f"{kind}_{learning_rate:g}_{num_steps}.json"
        if not path.exists():
            found = study().run(optimizer_config(kind, learning_rate), num_steps)
            write_json(path, settings | found | {"machine": machine()})
            print(f"{path.stem:24} validation {found['validation_loss']:.4f}  {found['seconds']:.0f} s", flush=True)
        return read_run(path, settings)

    results = []
    for hyperball, adam in itertools.zip_longest(options.hyperball, options.adam):
        results += [] if hyperball is None else [result("hyperball", hyperball, options.steps)]
        results += [] if adam is None else [result("adam", adam, options.steps)]
    rate = best(results, "hyperball")["learning_rate"]
    results += [result("hyperball", rate, round(share * options.steps)) for share in options.shorter]

    summary = report(results, options.steps)
    title = f"{common['config']}, {common['batch_size']} x {common['seq_len']} tokens a step"
    if options.picture is not None:
        draw(options.picture, title, results, options.steps)
    if options.json is not None:
        write_json(options.json, common | summary | {"runs": results})


if __name__ == "__main__":
    main()
