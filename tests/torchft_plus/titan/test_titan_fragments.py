"""Which parameters are synchronised together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan.fragments import plain_name, split


def llama(layers: int) -> list[str]:
    names = ["tok_embeddings.weight"]
    names += [f"layers.{n}.{part}" for n in range(layers) for part in ("attention.wq.weight", "norm.weight")]
    return [*names, "norm.weight", "output.weight"]


@given(st.integers(1, 40), st.integers(1, 12))
def test_fragments_share_out_the_model_in_order(layers: int, fragments: int) -> None:
    names = llama(layers)
    if fragments > layers + 2:
        with pytest.raises(ConfigError, match=f"num_fragments is {fragments}"):
            split(names, fragments)
        return
    found = split(names, fragments)
    assert len(found) == fragments
    assert [name for own in found for name in own] == names
    sizes = [
        len({".".join(name.split(".")[:2]) for name in own if name.startswith("layers.")}) for own in found
    ]
    sizes[0] += 1
    sizes[-1] += 1
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_named_modules_make_the_fragments() -> None:
    names = llama(3)
    modules = [["layers.1", "output"], ["tok_embeddings", "norm", "layers"]]
    first, second = split(names, 1, modules)
    assert first == ("layers.1.attention.wq.weight", "layers.1.norm.weight", "output.weight")
    assert sorted(first + second) == sorted(names)


@pytest.mark.parametrize(
    ("modules", "part"),
    [
        ([["layers", "tok_embeddings"], ["norm"]], "leaves out 'output.weight'"),
        (
            [["layers", "layer.0"], ["tok_embeddings", "norm", "output"]],
            "names 'layer.0', which holds no parameter",
        ),
        ([["layers"], ["tok_embeddings", "norm", "output", "layers"]], "names 'layers' twice"),
        ([["layers", "tok_embeddings", "norm", "output"], []], "empty fragment"),
    ],
)
def test_mistakes_are_named(modules: list[list[str]], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        split(llama(2), 1, modules)


def test_wrappers_do_not_show_in_names() -> None:
    assert plain_name("layers.0._orig_mod._checkpoint_wrapped_module.norm.weight") == "layers.0.norm.weight"
