# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Documents to train on, from text that is already on the machine."""

import json
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY_MAX_BYTES = 12_000_000
"""The library without its test suites is 10.7 MB in Python 3.12 and 3.13; tests fill the rest."""

_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_LEFT_OUT = (
    # Written when Python is built or configured, so they carry paths of one machine.
    *("_sysconfigdata*.py", "python-config.py", "sitecustomize.py", "usercustomize.py"),
    # Generated prose in one file of 0.8 MB: whichever part gets it, the other has nothing like it.
    "pydoc_data/topics.py",
)


class CorpusError(ValueError):
    """A corpus that cannot be built as asked; the message is one line for the user."""


@dataclass(frozen=True)
class Document:
    """One text and the name that decides its part: equal names always fall into the same part."""

    name: str
    text: str


def standard_library_documents(root: Path | None = None) -> Iterator[Document]:
    """The source files of the running Python's standard library, by path, test suites last.

    Installed packages, generated files and files that do not decode as Python source are left out.
    """
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))

    def order(path: Path) -> tuple[bool, str]:
        relative = path.relative_to(root)
        return not _TEST_FOLDERS.isdisjoint(relative.parts), relative.as_posix()

    paths = [path for path in root.rglob("*.py") if _INSTALLED_FOLDERS.isdisjoint(path.relative_to(root).parts)]
    for path in sorted(paths, key=order):
        if any(path.match(pattern) for pattern in _LEFT_OUT):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):  # the library tests its own decoder with such files
            continue
        yield Document(path.relative_to(root).as_posix(), text)


def input_documents(inputs: Sequence[Path], text_field: str = "text") -> Iterator[Document]:
    """Documents of jsonl files (one a line), of text files (one each), and of folders of either.

    In a folder, hidden files and files that are not UTF-8 are passed over.

    Raises:
        CorpusError: a path is absent, a named file is not UTF-8, or a jsonl line has no string in `text_field`.
    """
    for index, path in enumerate(inputs):
        if path.is_dir():
            for file in sorted(path.rglob("*"), key=lambda file: file.relative_to(path).as_posix()):
                relative = file.relative_to(path)
                if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                    if file.suffix == ".jsonl" or _is_text(file):
                        yield from _file_documents(file, f"{index}/{relative.as_posix()}", text_field)
        elif path.is_file():
            yield from _file_documents(path, f"{index}/{path.name}", text_field)
        else:
            raise CorpusError(f"no file or folder {path}; --input takes .jsonl files, text files and folders of them")


def at_most(max_bytes: int | None, documents: Iterable[Document]) -> Iterator[Document]:
    """Documents up to the first one that would exceed `max_bytes`."""
    total = 0
    for document in documents:
        total += len(document.text.encode())
        if max_bytes is not None and total > max_bytes:
            return
        yield document


def _file_documents(path: Path, name: str, text_field: str) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix != ".jsonl":
                yield Document(name, file.read())
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Document(f"{name}:{number}", _jsonl_text(f"{path}:{number}", line, text_field))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error


def _jsonl_text(where: str, line: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: a JSON {type(record).__name__}, not an object with a field `{text_field}`")
    if text_field not in record:
        raise CorpusError(f"{where}: no field `{text_field}` among {', '.join(record)}; name it with --text-field")
    text = record[text_field]
    if not isinstance(text, str):
        raise CorpusError(f"{where}: field `{text_field}` is of type {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where}: field `{text_field}` holds half a surrogate pair, which is no text") from error
    return text


def _is_text(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            while block := file.read(1 << 20):
                if "\0" in block:
                    return False
    except UnicodeDecodeError:
        return False
    return True
