"""Inputs and outputs of a decoder's graphs that return their keys and values: names, types and shapes.

Letters: R rows, S tokens of the step per row, P cached positions per row, T wanted tokens, N heads, H head size,
Q adapter queries, D model width, V vocabulary. -1 stands for R, S, P and T, which are open.
"""

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.graphs.card import Port


def step_inputs(config: DecoderConfig, *, dtype: str, has_cache: bool, has_sampling: bool) -> tuple[Port, ...]:
    """Of a prefill without `has_cache`, else of an increment.

    `mask` is (R, S, P + S), True where a token may attend; `wanted` are places row * S + token. Prefixes are (R, N, Q,
    H), of the adapter layers; caches (R, N, P, H), of all layers.
    """
    heads, size = config.num_heads, config.head_dim
    ports = [
        Port(name="ids", dtype="int32", shape=(-1, -1)),
        Port(name="positions", dtype="int32", shape=(-1, -1)),
        Port(name="mask", dtype="bool", shape=(-1, -1, -1)),
        Port(name="wanted", dtype="int32", shape=(-1,)),
    ]
    if has_sampling:
        types = {"temperature": "float32", "top_p": "float32", "top_k": "int32", "uniform": "float32"}
        ports += [Port(name=name, dtype=kind, shape=(-1,)) for name, kind in types.items()]
    ports += [
        Port(name=name, dtype=dtype, shape=(-1, heads, config.num_queries, size))
        for name in pair_names("prefix", config.num_adapter_layers)
    ]
    if has_cache:
        ports += [
            Port(name=name, dtype=dtype, shape=(-1, heads, -1, size)) for name in pair_names("cache", config.num_layers)
        ]
    return tuple(ports)


def step_outputs(config: DecoderConfig) -> tuple[str, ...]:
    """`tokens` int32 (T,), -1 where logits are not finite; `logits` float32 (T, V); new keys and values (R, N, S, H)."""
    return ("tokens", "logits", *pair_names("new", config.num_layers))


def pair_names(kind: str, num_layers: int) -> tuple[str, ...]:
    """`<kind>_k_00`, `<kind>_v_00`, `<kind>_k_01`, ..."""
    return tuple(f"{kind}_{half}_{layer:02d}" for layer in range(num_layers) for half in "kv")
