"""The structures of the C sources, declared for ctypes. The C sources document the fields."""

import ctypes
from typing import Any

_I32, _I64, _FLOAT, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_NUMBERS = ctypes.POINTER(ctypes.c_int64)
ACTIVATIONS = {"quick_gelu": 1, "exact_gelu": 2, "gelu_tanh": 3, "silu": 4}  # enum in linear.h
SumFunction = ctypes.CFUNCTYPE(_I64, _ADDRESS, _I64)  # `sum` of `decoder_t`


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """The fields in order. Each group is a type and the names of the fields of this type."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class LinearStruct(ctypes.Structure):
    """`linear_t` of linear.h."""

    _fields_ = _fields(
        (_I32, "kind"), (_I64, "num_in num_out"), (_ADDRESS, "weight scale bias"), (_FLOAT, "input_scale")
    )


class LayerStruct(ctypes.Structure):
    """`layer_t` of decoder.h."""

    _fields_ = _fields(
        (_ADDRESS, "attention_norm feed_forward_norm attention_out_norm feed_forward_out_norm q_norm k_norm"),
        (_ADDRESS, "rotary_cos rotary_sin"),
        (_I64, "window"),
        (LinearStruct, "qkv out gate up down"),
    )


class DecoderStruct(ctypes.Structure):
    """`decoder_t` of decoder.h."""

    _fields_ = _fields(
        (_I64, "dim num_layers num_heads num_kv_heads head_dim vocab_size first_adapter_layer num_queries"),
        (_FLOAT, "norm_eps score_cap logit_cap"),
        (_I32, "activation norms_all_heads kept_type embedding_type"),
        (_ADDRESS, "embedding"),
        (ctypes.POINTER(LayerStruct), "layers"),
        (_ADDRESS, "norm"),
        (LinearStruct, "head"),
        (_ADDRESS, "sum"),
        (_I64, "adds_residual"),
    )


class BlockStruct(ctypes.Structure):
    """`block_t` of encoder.h."""

    _fields_ = _fields((_ADDRESS, "norm1_weight norm1_bias norm2_weight norm2_bias"), (LinearStruct, "qkv out up down"))


class StackStruct(ctypes.Structure):
    """`stack_t` of encoder.h."""

    _fields_ = _fields(
        (_I64, "width num_heads hidden_dim num_blocks"),
        (_I32, "activation"),
        (_FLOAT, "norm_eps"),
        (ctypes.POINTER(BlockStruct), "blocks"),
    )


class KeptStruct(ctypes.Structure):
    """`kept_t` of decoder.h."""

    _fields_ = _fields(
        (_ADDRESS, "k v"), (_I64, "layer_stride row_stride head_stride"), (_ADDRESS, "table"), (_I64, "blocks block")
    )


class BatchStruct(ctypes.Structure):
    """`batch_t` of decoder.h."""

    _fields_ = _fields(
        (_I64, "num_tokens num_runs equal_runs"),
        (_NUMBERS, "ids"),
        (_ADDRESS, "x"),
        (_NUMBERS, "run_rows run_starts places positions shared_ends starts"),
        (KeptStruct, "cache prefix"),
        (_I64, "num_logits"),
        (_NUMBERS, "logit_tokens"),
        (_ADDRESS, "logits best"),
    )
