# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A training corpus and its tokenizer, made from text that is already on the machine.

A corpus is a folder: `train.jsonl` and `validation.jsonl` (one `{"text": ...}` a line), `tokenizer/` (an ordinary
Hugging Face tokenizer folder, byte-level BPE) and `corpus.json` (what it was made from, and its counts).
The same documents and options give the same bytes.
"""

import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import batched
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from levanter_marin.documents import (
    STANDARD_LIBRARY_MAX_BYTES,
    CorpusError,
    Document,
    at_most,
    input_documents,
    standard_library_documents,
)

END_OF_TEXT = "<|endoftext|>"
BYTE_ALPHABET_SIZE = 256
MIN_VOCAB_SIZE = BYTE_ALPHABET_SIZE + 1

DEFAULT_VOCAB_SIZE = 4096
DEFAULT_VALIDATION_FRACTION = 0.05

TRAIN_FILE = "train.jsonl"
VALIDATION_FILE = "validation.jsonl"
TOKENIZER_FOLDER = "tokenizer"
DESCRIPTION_FILE = "corpus.json"

_FORMAT_VERSION = 1
_ENCODE_BATCH = 256


@dataclass(frozen=True)
class PartCounts:
    """Size of one part; tokens without the end-of-text marks that a trainer adds."""

    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """What `corpus.json` holds."""

    source: str
    documents_sha256: str
    vocab_size: int
    validation_fraction: float
    train: PartCounts
    validation: PartCounts
    format_version: int = _FORMAT_VERSION


def build_corpus(
    output: Path,
    *,
    inputs: Sequence[Path] = (),
    text_field: str = "text",
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_bytes: int | None = None,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    overwrite: bool = False,
) -> tuple[Corpus, bool]:
    """Write a corpus folder, or leave the one that is already what was asked for.

    The folder appears under its name only when it is complete. Documents are read twice and never held together;
    a document goes to the validation part when the hash of its name falls below `validation_fraction`, and each
    part gets at least one. A single document is cut in two at a line end.

    Args:
        output: the corpus folder.
        inputs: own text, see `documents.input_documents`; none takes the standard library of the running Python.
        text_field: the jsonl field that holds the text.
        vocab_size: entries of the tokenizer, `<|endoftext|>` included.
        max_bytes: UTF-8 bytes of text to take, whole documents only; None takes all of `inputs`, or
            `documents.STANDARD_LIBRARY_MAX_BYTES` of the standard library.
        validation_fraction: expected share of the documents in the validation part.
        overwrite: replace another corpus at `output`.

    Returns:
        The corpus, and whether it was built (False: it was there).

    Raises:
        CorpusError: the input, an option or what lies at `output` does not allow it.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise CorpusError(
            f"--vocab-size {vocab_size} is below {MIN_VOCAB_SIZE} ({BYTE_ALPHABET_SIZE} bytes and {END_OF_TEXT}); "
            f"set {MIN_VOCAB_SIZE} or more"
        )
    if not 0.0 < validation_fraction < 1.0:
        raise CorpusError(f"--validation-fraction {validation_fraction} must lie between 0 and 1; default: 0.05")
    for path in inputs:
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise CorpusError(f"--output {output} lies inside --input {path}; choose a folder outside it")

    if max_bytes is None and not inputs:
        max_bytes = STANDARD_LIBRARY_MAX_BYTES

    def documents() -> Iterator[Document]:
        found = input_documents(inputs, text_field) if inputs else standard_library_documents()
        return at_most(max_bytes, (document for document in found if document.text.strip()))

    survey = _survey(documents())
    if survey.documents == 0:
        where = ", ".join(str(path) for path in inputs) if inputs else sysconfig.get_path("stdlib")
        limit = "" if max_bytes is None else f" of at most {max_bytes} bytes (--max-bytes)"
        raise CorpusError(f"no text{limit} in {where}; give --input with a .jsonl file, a text file or a folder")

    present = read_corpus(output)
    if present is not None:
        asked = (survey.sha256, vocab_size, validation_fraction)
        if (present.documents_sha256, present.vocab_size, present.validation_fraction) == asked:
            return present, False
        if not overwrite:
            raise CorpusError(
                f"{output} holds another corpus ({present.source}, vocabulary {present.vocab_size}, validation "
                f"fraction {present.validation_fraction}); add --overwrite or choose another --output"
            )
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CorpusError(f"{output} exists and is not a corpus (no {DESCRIPTION_FILE}); choose another --output")

    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.parent / f".{output.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        parts = _split(documents(), survey, validation_fraction)
        corpus = _write(partial, parts, _source_name(inputs), survey.sha256, vocab_size, validation_fraction)
        if output.exists():
            replaced = output.parent / f".{output.name}.{os.getpid()}.replaced"
            output.rename(replaced)
            partial.rename(output)
            shutil.rmtree(replaced)
        else:
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return corpus, True


def read_corpus(folder: Path) -> Corpus | None:
    """The description of the corpus at `folder`; None if there is none, or one of another format."""
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("format_version") != _FORMAT_VERSION:
        return None
    return Corpus(**(fields | {part: PartCounts(**fields[part]) for part in ("train", "validation")}))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab_size` entries; every text decodes to itself.

    Raises:
        CorpusError: the texts hold fewer distinct pairs than that takes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise CorpusError(
            f"the train part is enough for {found} tokens, not for --vocab-size {vocab_size}; "
            f"set --vocab-size {found} or less, or give more text"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder that `transformers.AutoTokenizer.from_pretrained` and Levanter read without a network."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    _write_json(folder / "special_tokens_map.json", special_tokens)
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special_tokens,
    )


@dataclass(frozen=True)
class _Survey:
    """What the first reading of all documents finds; scores as in `_score`."""

    documents: int
    sha256: str
    lowest_score: float
    highest_score: float


def _survey(documents: Iterable[Document]) -> _Survey:
    digest = hashlib.sha256()
    scores = []
    for document in documents:
        digest.update(json.dumps([document.name, document.text]).encode())
        scores.append(_score(document.name))
    return _Survey(len(scores), digest.hexdigest(), min(scores, default=0.0), max(scores, default=0.0))


def _score(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:6]) / 2**48


def _split(documents: Iterable[Document], survey: _Survey, fraction: float) -> Iterator[tuple[str, str]]:
    """(file name of the part, text) of every document."""
    if survey.documents == 1:
        (document,) = documents
        target = max(1, min(len(document.text) - 1, round(len(document.text) * (1.0 - fraction))))
        cut = document.text.rfind("\n", 0, target) + 1 or target
        yield TRAIN_FILE, document.text[:cut]
        yield VALIDATION_FILE, document.text[cut:]
        return
    for document in documents:
        score = _score(document.name)
        below = score < fraction and score != survey.highest_score
        yield VALIDATION_FILE if below or score == survey.lowest_score else TRAIN_FILE, document.text


def _write(
    folder: Path, parts: Iterable[tuple[str, str]], source: str, sha256: str, vocab_size: int, fraction: float
) -> Corpus:
    with (
        (folder / TRAIN_FILE).open("w", encoding="utf-8", newline="\n") as train,
        (folder / VALIDATION_FILE).open("w", encoding="utf-8", newline="\n") as validation,
    ):
        files = {TRAIN_FILE: train, VALIDATION_FILE: validation}
        for name, text in parts:
            files[name].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    tokenizer = train_tokenizer(_texts(folder / TRAIN_FILE), vocab_size)
    save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    train_counts, validation_counts = (_count(tokenizer, folder / name) for name in (TRAIN_FILE, VALIDATION_FILE))
    corpus = Corpus(source, sha256, vocab_size, fraction, train_counts, validation_counts)
    _write_json(folder / DESCRIPTION_FILE, asdict(corpus))
    return corpus


def _texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield json.loads(line)["text"]


def _count(tokenizer: Tokenizer, path: Path) -> PartCounts:
    documents = size = tokens = 0
    for texts in batched(_texts(path), _ENCODE_BATCH):
        documents += len(texts)
        size += sum(len(text.encode()) for text in texts)
        tokens += sum(len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts)))
    return PartCounts(documents, size, tokens)


def _source_name(inputs: Sequence[Path]) -> str:
    if inputs:
        return ", ".join(path.name or str(path) for path in inputs)
    return f"standard library of {platform.python_implementation()} {platform.python_version()}"


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
