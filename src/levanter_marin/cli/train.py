# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin train`: Levanter's `train_lm` with an honest exit code and one line for every mistake."""

import importlib

from levanter_marin.cli.errors import UserError

_USAGE = """usage: levanter-marin train CONFIG [--FIELD VALUE ...]

Runs `python -m levanter.main.train_lm --config_path CONFIG`. Fields are dotted and values are YAML:
  levanter-marin train config/marin_moe_nano.yaml --trainer.num_train_steps 200 --model.num_layers 4

A run with the id of an earlier one continues from its last checkpoint: --trainer.id ID
Weights & Biases without an account: --trainer.tracker '{type: wandb, mode: offline}'"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    config_path, *overrides = argv
    if config_path.startswith("-"):
        raise UserError(f"the config file comes first: levanter-marin train CONFIG {' '.join(argv)}")
    # Imported only now: Levanter takes seconds to import, too long for a help text.
    return importlib.import_module("levanter_marin.cli.training").run(config_path, overrides)
