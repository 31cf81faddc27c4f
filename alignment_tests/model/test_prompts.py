"""Prompts and the tokenizer: what a line means, what is refused, and that text survives the way to ids and back."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from alignment_tests.model.checkpoints import refused
from minitransformer.prompts import read_prompts
from minitransformer.tokenizer import load_tokenizer

END = "<|im_end|>"


def byte_tokenizer(directory: Path, **limits) -> Path:
    """A tokenizer.json of single bytes and one special token, 257 ids, that truncates and pads if told so."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    if limits:
        backend.enable_truncation(max_length=limits["length"])
        backend.enable_padding(length=limits["length"])
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(st.text())
def test_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace(END, "\0").encode())


def test_special_tokens_are_read_and_kept_or_dropped(tokenizer):
    ids = tokenizer.encode(f"a{END}b")
    assert len(ids) == 3 and ids[1] == 256 and tokenizer.vocab_size == 257
    assert tokenizer.decode(ids) == f"a{END}b" and tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def check_nothing_is_cut_or_padded(directory: Path) -> None:
    short = load_tokenizer(byte_tokenizer(directory, length=8))
    assert [len(short.encode("x" * n)) for n in (3, 8, 20)] == [3, 8, 20]


def test_nothing_is_cut_or_padded(tmp_path):
    check_nothing_is_cut_or_padded(tmp_path)


def test_tokenizer_of_another_model_is_refused(tmp_path):
    byte_tokenizer(tmp_path)
    load_tokenizer(tmp_path, 257)
    refused(lambda: load_tokenizer(tmp_path, 256), "tokenizer.json", "256", "another model")
    assert load_tokenizer(tmp_path / "none") is None


def test_a_saved_model_keeps_the_tokenizer_files(tmp_path, tokenizer):
    (byte_tokenizer(tmp_path) / "tokenizer_config.json").write_text("{}")
    (tmp_path / "unrelated.txt").write_text("x")
    assert load_tokenizer(tmp_path).files.keys() == {"tokenizer.json", "tokenizer_config.json"}


def test_lines_are_text_or_json(tmp_path, tokenizer):
    lines = [
        "plain text", "", "   ", r"two\nlines\tand \\n and \boxed", '{"prompt": "a\\nb"}', '{"ids": [3, 1, 2]}',
        "crlf\r", "a\u2028b", '  {"not": "json, as it starts with spaces"}', f"end{END}",
    ]  # fmt: skip
    path = tmp_path / "prompts.txt"
    path.write_bytes("\n".join(lines).encode())
    got = read_prompts(path, tokenizer, 257)
    want = [
        "plain text", "two\nlines\tand \\n and \\boxed", "a\nb", None, "crlf", "a\u2028b", lines[8], f"end{END}",
    ]  # fmt: skip
    assert got == [[3, 1, 2] if text is None else tokenizer.encode(text) for text in want]


@given(st.text(min_size=1))
def test_any_text_can_be_given_as_json(tmp_path_factory, tokenizer, text):
    path = tmp_path_factory.mktemp("json") / "p"
    path.write_text(json.dumps({"prompt": text}) + "\n")
    assert read_prompts(path, tokenizer) == [tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("no prompt",)),
        ("\n  \n", ("no prompt",)),
        ("a\n{broken", (":2:", "not valid JSON")),
        ('{"text": "a"}', (":1:", "expected")),
        ('{"prompt": "a", "ids": [1]}', (":1:", "expected")),
        ('{"prompt": 3}', (":1:", "expected")),
        ('{"prompt": ""}', (":1:", "empty")),
        ('a\n\n{"ids": []}', (":3:", "empty")),
        ('{"ids": [1, 257]}', (":1:", "257", "vocabulary")),
        ('{"ids": [-1]}', (":1:", "-1", "vocabulary")),
        ('{"ids": [1.0]}', (":1:", "1.0", "vocabulary")),
        ('{"ids": [true]}', (":1:", "True", "vocabulary")),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, content, words):
    path = tmp_path / "prompts.txt"
    path.write_text(content)
    refused(lambda: read_prompts(path, tokenizer, 257), str(path), *words)


def test_unreadable_files_and_missing_tokenizers(tmp_path, tokenizer):
    refused(lambda: read_prompts(tmp_path / "none", tokenizer), "none", "cannot be read")
    refused(lambda: read_prompts(tmp_path, tokenizer), "cannot be read")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    refused(lambda: read_prompts(tmp_path / "latin", tokenizer), "latin", "UTF-8")
    (tmp_path / "text").write_text("hello")
    refused(lambda: read_prompts(tmp_path / "text", None), "text:1", "no tokenizer.json")
    (tmp_path / "ids").write_text('{"ids": [1]}')
    assert read_prompts(tmp_path / "ids", None) == [[1]]
