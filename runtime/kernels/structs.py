"""The structures of the C sources for ctypes, field by field; what they hold is written there."""

import ctypes


class LinearStruct(ctypes.Structure):
    """`linear_t` of linear.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("num_in", ctypes.c_int64),
        ("num_out", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class LayerStruct(ctypes.Structure):
    """`layer_t` of decoder.h."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("feed_forward_norm", ctypes.c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
    )


class DecoderStruct(ctypes.Structure):
    """`decoder_t` of decoder.h."""

    _fields_ = (
        ("dim", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("ffn_dim", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("first_adapter_layer", ctypes.c_int64),
        ("num_queries", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("kept_type", ctypes.c_int32),
        ("rotary_cos", ctypes.c_void_p),
        ("rotary_sin", ctypes.c_void_p),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", ctypes.c_void_p),
        ("head", LinearStruct),
    )


class BlockStruct(ctypes.Structure):
    """`block_t` of encoder.h."""

    _fields_ = (
        ("norm1_weight", ctypes.c_void_p),
        ("norm1_bias", ctypes.c_void_p),
        ("norm2_weight", ctypes.c_void_p),
        ("norm2_bias", ctypes.c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
    )


class StackStruct(ctypes.Structure):
    """`stack_t` of encoder.h."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("hidden_dim", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("blocks", ctypes.POINTER(BlockStruct)),
    )


class KeptStruct(ctypes.Structure):
    """`kept_t` of decoder.h."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class BatchStruct(ctypes.Structure):
    """`batch_t` of decoder.h."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_runs", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("run_rows", ctypes.POINTER(ctypes.c_int64)),
        ("run_starts", ctypes.POINTER(ctypes.c_int64)),
        ("places", ctypes.POINTER(ctypes.c_int64)),
        ("positions", ctypes.POINTER(ctypes.c_int64)),
        ("shared_ends", ctypes.POINTER(ctypes.c_int64)),
        ("starts", ctypes.POINTER(ctypes.c_int64)),
        ("cache", KeptStruct),
        ("prefix", KeptStruct),
        ("num_logits", ctypes.c_int64),
        ("logit_tokens", ctypes.POINTER(ctypes.c_int64)),
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
    )
