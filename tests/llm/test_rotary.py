"""Frequencies of scaled rotary embeddings equal those of transformers, and decoder configurations survive JSON."""

import json
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.rotary import Rotary

HEAD_DIM = 64
_FACTORS = {"short": [1.0 + i / 10 for i in range(24)], "long": [2.0 + i / 3 for i in range(24)]}
# transformers' rope_parameters, and our fields. Others are in models of test_sources_of_families.py.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dynamic": ({"factor": 2.0}, {"factor": 2.0, "original_context": 2048}),
    "yarn with scales": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "truncate": False,
        },
        {"factor": 4.0, "original_context": 4096, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
    ),
    "longrope": (
        {
            "short_factor": _FACTORS["short"],
            "long_factor": _FACTORS["long"],
            "original_max_position_embeddings": 4096,
            "factor": 32.0,
            "partial_rotary_factor": 0.75,
        },
        {
            "short_factors": _FACTORS["short"],
            "long_factors": _FACTORS["long"],
            "original_context": 4096,
            "share": 0.75,
            "factor": 32.0,
        },
    ),
}


@pytest.mark.parametrize("context", [1024, 6000])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_those_of_transformers(name: str, context: int) -> None:
    theirs, ours = CASES[name]
    kind: Any = name.split()[0]
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=2048 if kind == "dynamic" else 131072,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **theirs},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=context)
    angles, factors = Rotary(theta=5e5, scaling=kind, **ours).frequencies(HEAD_DIM, context=context)
    np.testing.assert_allclose(angles[: len(wanted)], wanted.numpy(), rtol=3e-7)
    np.testing.assert_allclose(factors[: len(wanted)], factor, rtol=3e-7)
    assert not angles[len(wanted) :].any()
    assert (factors[len(wanted) :] == 1).all()


SIZES = {"vocab_size": 10, "dim": 64, "num_layers": 2, "ffn_dim": 128, "norm_eps": 1e-5}


def test_a_configuration_is_read_as_it_was_written_whole_and_divided() -> None:
    config = DecoderConfig(
        **SIZES,  # type: ignore[arg-type]
        num_heads=9,
        num_kv_heads=3,
        head_dim=32,
        qk_norm="head",
        norms="both",
        score_cap=50.0,
        rotaries=(Rotary(scaling="llama3", factor=8.0, original_context=8192), Rotary(theta=5.0)),
        layer_rotaries=(1, -1),
        layer_windows=(4, 0),
    )
    for each in (config, *(config.share(rank, count) for count in (2, 3, 6) for rank in range(count))):
        assert DecoderConfig.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    with pytest.raises(ValueError, match="3 heads of keys and values"):
        config.share(0, 4)


def test_the_first_llama_has_no_new_entries() -> None:
    config = DecoderConfig(**SIZES, num_heads=8)  # type: ignore[arg-type]
    # Digests and bundles of whole decoders do not change.
    old = {*SIZES, "num_heads", "rope_theta", "context", "num_adapter_layers", "num_queries", "separate_adapter_kv"}
    assert set(config.to_dict()) == old
    assert set(config.share(1, 2).to_dict()) == old | {"rank", "num_ranks", "all_heads", "ffn_block"}
