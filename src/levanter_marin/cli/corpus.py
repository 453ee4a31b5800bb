# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin corpus`: build a training corpus and its tokenizer."""

import argparse
import sys
import time
from pathlib import Path

from levanter_marin import corpus
from levanter_marin.documents import CorpusError

DESCRIPTION = """Build a corpus folder: train.jsonl, validation.jsonl and a Hugging Face tokenizer folder.

Without --input the documents are the source files of the running Python's standard library (12 MB). Nothing is
downloaded. A second call with the same text and options does nothing."""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin corpus", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/corpus"), help="corpus folder (%(default)s)")
    parser.add_argument(
        "--input", type=Path, nargs="+", default=[], metavar="PATH", help=".jsonl files, text files, folders of them"
    )
    parser.add_argument("--text-field", default="text", metavar="NAME", help="jsonl field with the text (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=corpus.DEFAULT_VOCAB_SIZE, metavar="N", help="(%(default)s)")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="take no more text than this, whole documents only")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=corpus.DEFAULT_VALIDATION_FRACTION,
        metavar="F",
        help="share of the documents to hold out, chosen by a hash of their names (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace another corpus in the output folder")
    options = parser.parse_args(argv)

    start = time.monotonic()
    try:
        built, is_new = corpus.build_corpus(
            options.output,
            inputs=options.input,
            text_field=options.text_field,
            vocab_size=options.vocab_size,
            max_bytes=options.max_bytes,
            validation_fraction=options.validation_fraction,
            overwrite=options.overwrite,
        )
    except (CorpusError, OSError) as error:
        print(f"levanter-marin corpus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"levanter-marin corpus: interrupted, nothing written to {options.output}", file=sys.stderr)
        return 130

    for name, part in (("train", built.train), ("validation", built.validation)):
        print(f"{name:>10}: {part.documents:,} documents, {part.bytes:,} bytes, {part.tokens:,} tokens")
    state = f"built in {time.monotonic() - start:.1f} s" if is_new else "already there, nothing to do"
    print(f"{options.output}: {built.source}, vocabulary {built.vocab_size} ({state})")
    return 0
