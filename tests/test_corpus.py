# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from levanter.tokenizers import load_tokenizer
from transformers import AutoTokenizer

from levanter_marin import corpus
from levanter_marin.cli.corpus import main
from levanter_marin.documents import standard_library_documents

VOCAB_SIZE = 400
UNICODE_TEXT = "  def f(x):\n\treturn 'don\\'t'  # naïve — 世界 🙂 e\u0301 \u2028\u00a0\r\n\n\x00 end "
COMMAND = "import sys; from levanter_marin.cli.corpus import main; sys.exit(main(sys.argv[1:]))"


def folder_contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n") if line]


def words(seed: int) -> str:
    return "\n".join(f"line {i} of document {seed}: {(i * i + seed) % 97} {i * seed}" for i in range(20))


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def library_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / "corpus"
    built, _ = corpus.build_corpus(folder, max_bytes=2_000_000)
    return folder, built


def error_line(capsys, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_standard_library_documents_are_source_without_installed_packages_tests_last():
    names = [document.name for document in standard_library_documents()]
    assert "ast.py" in names and "json/decoder.py" in names
    assert not any("site-packages" in name or "_sysconfigdata" in name or "topics" in name for name in names)
    is_test = [not {"test", "tests", "idle_test"}.isdisjoint(name.split("/")) for name in names]
    assert is_test == sorted(is_test)


def test_build_corpus_in_two_processes_writes_equal_bytes(library_corpus, tmp_path):
    folder, _ = library_corpus
    again = tmp_path / "again"
    arguments = ["--output", str(again), "--max-bytes", "2000000"]
    subprocess.run([sys.executable, "-c", COMMAND, *arguments], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert folder_contents(again) == folder_contents(folder)


def test_build_corpus_splits_every_document_into_exactly_one_part(library_corpus):
    folder, built = library_corpus
    train, validation = texts_of(folder / "train.jsonl"), texts_of(folder / "validation.jsonl")
    expected = {document.text for document in standard_library_documents() if document.text.strip()}
    assert set(train) | set(validation) <= expected
    assert not set(train) & set(validation)
    assert (len(train), len(validation)) == (built.train.documents, built.validation.documents)
    assert sum(len(text.encode()) for text in train + validation) == built.train.bytes + built.validation.bytes
    assert 1_800_000 < built.train.bytes + built.validation.bytes <= 2_000_000


def test_tokenizer_round_trips_unicode_and_library_text_exactly(library_corpus, monkeypatch):
    folder, built = library_corpus
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert len(tokenizer) == built.vocab_size == 4096
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == corpus.END_OF_TEXT
    assert sorted(tokenizer.get_vocab().values()) == list(range(4096))
    for text in [UNICODE_TEXT, *texts_of(folder / "validation.jsonl")]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    counted = sum(len(tokenizer.encode(text)) for text in texts_of(folder / "validation.jsonl"))
    assert counted == built.validation.tokens


def test_tokenizer_in_levanter_marks_ends_with_the_special_token(library_corpus):
    folder, _ = library_corpus
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    (encoded,) = tokenizer.encode_batch([f"x = 1{corpus.END_OF_TEXT}"], add_special_tokens=False)
    assert encoded[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.vocab_size == 4096


def test_corpus_second_call_leaves_the_folder_untouched(tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", [words(seed) for seed in range(12)])
    arguments = ["--output", str(tmp_path / "corpus"), "--input", str(data), "--vocab-size", str(VOCAB_SIZE)]
    assert main(arguments) == 0
    first = {file: file.stat().st_mtime_ns for file in (tmp_path / "corpus").rglob("*")}
    assert main(arguments) == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "corpus").rglob("*")} == first
    assert "already there" in capsys.readouterr().out


def test_corpus_over_a_different_one_is_refused_until_overwrite(tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", [words(seed) for seed in range(12)])
    output = tmp_path / "corpus"
    arguments = ["--output", output, "--input", data, "--vocab-size", VOCAB_SIZE]
    assert main([str(argument) for argument in arguments]) == 0
    before = folder_contents(output)
    write_jsonl(data, [words(seed) for seed in range(50, 62)])
    assert "--overwrite" in error_line(capsys, *arguments)
    assert folder_contents(output) == before
    assert main([str(argument) for argument in [*arguments, "--overwrite"]]) == 0
    assert set(texts_of(output / "train.jsonl")) <= {words(seed) for seed in range(50, 62)}
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", "corpus"}


def test_corpus_over_a_folder_that_is_no_corpus_is_refused_even_with_overwrite(tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", [words(1), words(2)])
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.txt").write_text("do not lose me")
    message = error_line(capsys, "--output", tmp_path / "thesis", "--input", data, "--vocab-size", 300, "--overwrite")
    assert "is not a corpus" in message
    assert folder_contents(tmp_path / "thesis") == {"draft.txt": b"do not lose me"}


def test_jsonl_input_with_another_field_keeps_each_line_as_a_document(tmp_path):
    texts = [words(seed) for seed in range(12)]
    data = write_jsonl(tmp_path / "data.jsonl", texts, field="body")
    corpus.build_corpus(tmp_path / "corpus", inputs=[data], text_field="body", vocab_size=VOCAB_SIZE)
    train, validation = (texts_of(tmp_path / "corpus" / name) for name in ("train.jsonl", "validation.jsonl"))
    assert sorted(train + validation) == sorted(texts)
    assert train and validation


def test_folder_input_keeps_text_files_and_passes_over_binaries(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text(words(1), encoding="utf-8")
    (folder / "inner" / "b.md").write_text(words(2), encoding="utf-8")
    write_jsonl(folder / "c.jsonl", [words(3), words(4)])
    (folder / "empty.txt").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    (folder / ".hidden" / "d.txt").write_text("secret")
    corpus.build_corpus(tmp_path / "corpus", inputs=[folder], vocab_size=300)
    parts = texts_of(tmp_path / "corpus" / "train.jsonl") + texts_of(tmp_path / "corpus" / "validation.jsonl")
    assert sorted(parts) == sorted(words(seed) for seed in (1, 2, 3, 4))


def test_single_text_file_is_cut_in_two_at_a_line_end(tmp_path):
    text = "\n".join(words(seed) for seed in range(40))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    corpus.build_corpus(
        tmp_path / "corpus", inputs=[tmp_path / "book.txt"], vocab_size=VOCAB_SIZE, validation_fraction=0.25
    )
    (train,), (validation,) = (texts_of(tmp_path / "corpus" / name) for name in ("train.jsonl", "validation.jsonl"))
    assert train + validation == text
    assert train.endswith("\n")
    assert abs(len(validation) / len(text) - 0.25) < 0.01


@pytest.mark.parametrize("count", [2, 3])
def test_few_documents_leave_no_part_empty(tmp_path, count):
    data = write_jsonl(tmp_path / "data.jsonl", [words(seed) for seed in range(count)])
    for fraction in (0.001, 0.999):
        output = tmp_path / f"corpus-{fraction}"
        built, _ = corpus.build_corpus(output, inputs=[data], vocab_size=300, validation_fraction=fraction)
        assert min(built.train.documents, built.validation.documents) >= 1
        assert built.train.documents + built.validation.documents == count


def test_failed_build_leaves_nothing_behind(tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", [words(1), words(2)])
    message = error_line(capsys, "--output", tmp_path / "corpus", "--input", data, "--vocab-size", 100_000)
    assert "--vocab-size 100000" in message
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_killed_build_leaves_no_corpus_folder_and_the_next_one_succeeds(tmp_path):
    output = tmp_path / "corpus"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--output", str(output)], env={"PYTHONPATH": ":".join(sys.path)}
    )
    deadline = time.monotonic() + 30
    while not any(tmp_path.glob(".corpus.*.partial/train.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
    process.kill()
    process.wait()
    assert not output.exists()
    _, is_new = corpus.build_corpus(output, max_bytes=2_000_000)
    assert is_new and corpus.read_corpus(output) is not None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "fine"}\n{"body": "x", "id": 3}\n', "data.jsonl:2: no field `text` among body, id"),
        ('{"text": "fine"}\n\n{"text": 5}\n', "data.jsonl:3: field `text` is of type int, not a string"),
        ('{"text": "fine"}\n["text"]\n', "data.jsonl:2: a JSON list"),
        ('{"text": "fine"}\n{"text": \n', "data.jsonl:2: not JSON"),
        ('{"text": "\\ud800"}\n', "data.jsonl:1: field `text` holds half a surrogate pair"),
        ("\n \n", "no text in"),
    ],
)
def test_bad_jsonl_gives_one_line_with_its_place(tmp_path, capsys, content, expected):
    data = tmp_path / "data.jsonl"
    data.write_text(content, encoding="utf-8")
    assert expected in error_line(capsys, "--output", tmp_path / "corpus", "--input", data)
    assert not (tmp_path / "corpus").exists()


def test_bad_options_give_one_line_that_says_what_to_set(tmp_path, capsys):
    output = tmp_path / "corpus"
    (tmp_path / "latin1.txt").write_bytes("caf\u00e9 cr\u00e8me".encode("latin-1"))
    assert "no file or folder" in error_line(capsys, "--output", output, "--input", tmp_path / "absent.jsonl")
    assert "not UTF-8" in error_line(capsys, "--output", output, "--input", tmp_path / "latin1.txt")
    assert "set 257 or more" in error_line(capsys, "--output", output, "--vocab-size", 256)
    assert "between 0 and 1" in error_line(capsys, "--output", output, "--validation-fraction", 1)
    assert "--max-bytes" in error_line(capsys, "--output", output, "--max-bytes", 10)
    assert "lies inside --input" in error_line(capsys, "--output", output, "--input", tmp_path)
    assert not output.exists()
