"""The demo's tokenizer and text: the same everywhere, and readable."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from torchft_plus.titan.assets import documents, main, sentences


def test_text_depends_on_the_seed_only() -> None:
    assert documents(3, 50) == documents(3, 50)
    assert documents(3, 50) != documents(4, 50)
    assert documents(3, 50)[:20] == documents(3, 20)
    assert all(text.endswith(".") for text in islice(sentences(Random(1)), 100))


@pytest.mark.titan
def test_files_are_what_torchtitan_reads(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    assert main(["--out", str(tmp_path / "a"), "--count", "200"]) == 0
    assert main(["--out", str(tmp_path / "b"), "--count", "200"]) == 0
    files = ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "text/data.json"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / files[0]))
    assert tokenizer.get_vocab_size() <= 512
    text = json.loads((tmp_path / "a" / files[2]).read_text().splitlines()[0])["text"]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
