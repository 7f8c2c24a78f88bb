"""A small tokenizer and a small text set, made by a seed: a demo needs no download.

``python -m torchft_plus.titan.assets --out DIR`` writes ``DIR/tokenizer`` (for ``model.hf_assets_path``) and
``DIR/text`` (for ``training.dataset_path`` with ``training.dataset = "c4_test"``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words("Ada Ben Cleo Dara Emil Fay Gus Hana Ivo Juno Kai Lena Milo Nora Otto Pia")
_PLACES = _words("harbour mill orchard library station bridge market garden workshop lighthouse")
_THINGS = _words("lantern ladder kettle map violin bicycle letter clock basket engine")
_ACTS = _words("finds repairs borrows paints loses returns sells hides carries measures")
_REASONS = (
    "because the door was open",
    "while the others waited",
    "although nobody had asked",
    "until the bell rang",
    "and wrote it down",
)


def sentences(random_source: random.Random) -> Iterator[str]:
    """Endless simple sentences, drawn from ``random_source``; a model can learn their grammar."""
    pick = random_source.choice
    while True:
        who, other = random_source.sample(_NAMES, 2)
        form = random_source.randrange(3)
        if form == 0:
            yield f"{who} {pick(_ACTS)} the {pick(_THINGS)} at the {pick(_PLACES)}."
        elif form == 1:
            yield f"At the {pick(_PLACES)}, {who} {pick(_ACTS)} {other}'s {pick(_THINGS)} {pick(_REASONS)}."
        else:
            yield f"{who} and {other} meet near the {pick(_PLACES)} {pick(_REASONS)}."


def documents(seed: int, count: int) -> list[str]:
    """``count`` texts of 3 to 12 sentences, the same for the same ``seed`` on every machine."""
    random_source = random.Random(seed)
    stream = sentences(random_source)
    return [" ".join(next(stream) for _ in range(random_source.randint(3, 12))) for _ in range(count)]


def write_tokenizer(folder: Path, texts: Sequence[str], vocabulary: int) -> int:
    """Train a byte-level BPE tokenizer of at most ``vocabulary`` tokens; write it as torchtitan reads it.

    Returns:
        The number of tokens it has.
    """
    # The trainer's threads may break ties in another order each time; one thread gives one tokenizer.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "add_eos_token": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()


def write_text(folder: Path, texts: Sequence[str]) -> None:
    """Write one JSON object a line, as the C4 data set does: ``{"text": ...}``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "data.json").write_text(lines, encoding="utf-8")


def make(out: Path, *, seed: int = 1, count: int = 4000, vocabulary: int = 512) -> None:
    """Write tokenizer and text set under ``out``.

    Args:
        out: folder; gets ``tokenizer/`` and ``text/``.
        seed: of the text.
        count: number of texts, about 75 words each.
        vocabulary: greatest number of tokens; torchtitan's debug model has room for 2048.
    """
    texts = documents(seed, count)
    write_tokenizer(out / "tokenizer", texts[: min(count, 1000)], vocabulary)
    write_text(out / "text", texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m torchft_plus.titan.assets", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder; gets tokenizer/ and text/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=4000, help="number of texts")
    options = parser.parse_args(arguments)
    make(options.out, seed=options.seed, count=options.count)
    print(f"wrote {options.out / 'tokenizer'} and {options.out / 'text'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
