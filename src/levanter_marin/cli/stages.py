# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin stages`: one run whose sequence length grows, from one config."""

import argparse
import importlib
from pathlib import Path

from levanter_marin.cli.errors import UserError

_DESCRIPTION = """Train the `context_stages:` of CONFIG one after another, each with Levanter's `train_lm`.

The same command continues a run that was stopped, from its newest checkpoint. Without trainer.id the run is named
after the file. Fields of the config may follow as for `levanter-marin train`: --trainer.id ID"""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin stages",
        usage="levanter-marin stages CONFIG [--dry-run | --check | --render DIR] [--json] [--FIELD VALUE ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a training config with `context_stages:`")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the stages; reads the config alone")
    what.add_argument("--check", action="store_true", help="also build the token caches and check corpus and devices")
    what.add_argument("--render", type=Path, metavar="DIR", help="write the Levanter config of each stage to DIR")
    parser.add_argument("--json", action="store_true", help="print the stages, or the closing table, as JSON")
    options, overrides = parser.parse_known_args(argv)
    if options.config.startswith("-"):
        raise UserError(f"the config file comes first: levanter-marin stages CONFIG {' '.join(argv)}")
    # Imported only now: Levanter takes seconds to import, too long for a help text.
    staged_run = importlib.import_module("levanter_marin.cli.staged_run")
    run = staged_run.load(options.config, overrides)
    if options.dry_run:
        return staged_run.show(run, options.json)
    if options.check:
        return staged_run.check(run)
    if options.render is not None:
        return staged_run.render(run, options.render)
    return staged_run.train(run, argv, options.json)
