# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The `levanter-marin` command. Each subcommand is a module with `main(argv) -> exit code`, imported when named."""

import importlib
import sys
from typing import NamedTuple

import levanter_marin
from levanter_marin.cli.errors import UserError, did_you_mean

_PROGRAM = "levanter-marin"
_TRACEBACK_FLAG = "--traceback"
_USER_ERROR = 2


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "train": Command("levanter_marin.cli.train", "train a model with Levanter's train_lm"),
    "stages": Command("levanter_marin.cli.stages", "train at growing sequence lengths, from one config"),
    "generate": Command("levanter_marin.cli.generate", "print text from a trained model"),
    "describe": Command("levanter_marin.cli.describe", "print layers, parameter counts and FLOPs of a config"),
    "plan": Command("levanter_marin.cli.plan", "print memory, all-to-all bytes and FLOPs of a step on any mesh"),
    "groups": Command("levanter_marin.cli.groups", "print how the hyperball optimizer trains each parameter"),
    "export": Command("levanter_marin.cli.export", "write a checkpoint as a Hugging Face folder"),
    "import": Command("levanter_marin.cli.import_", "make a checkpoint from a Hugging Face folder"),
    "corpus": Command("levanter_marin.cli.corpus", "make a training corpus and its tokenizer, without network"),
}


def usage() -> str:
    lines = [f"usage: {_PROGRAM} COMMAND ...", "", "commands:"]
    lines += [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    lines += [
        "",
        f"`{_PROGRAM} COMMAND --help` explains a command.",
        f"{_TRACEBACK_FLAG} after a command shows where an error was raised.",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments after the program's name; None takes those of the process.

    Returns:
        0 on success, 2 on a mistake of the user, which is told in one line on stderr. Any other exception passes.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else _USER_ERROR
    if argv[0] == "--version":
        print(f"{_PROGRAM} {levanter_marin.__version__}")
        return 0

    name, *arguments = argv
    if name not in COMMANDS:
        return _fail(f"no command `{name}`; known: {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}")

    with_traceback = _TRACEBACK_FLAG in arguments
    arguments = [argument for argument in arguments if argument != _TRACEBACK_FLAG]
    try:
        return importlib.import_module(COMMANDS[name].module).main(arguments)
    except UserError as error:
        if with_traceback:
            raise
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"{_PROGRAM}: {message}", file=sys.stderr)
    return _USER_ERROR
