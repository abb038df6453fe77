"""onnxruntime's execution providers: the provider for each device, and its options."""

import configparser
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llama_adapter.runtime.device_names import split_device
from llama_adapter.runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxProvider:
    """The execution provider that runs an ONNX graph in onnxruntime. It can be pickled and printed."""

    name: str = "CPUExecutionProvider"
    options: Mapping[str, str] = field(default_factory=dict)  # options of the provider
    session_entries: Mapping[str, str] = field(default_factory=dict)  # onnxruntime's session configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of provider, according to its documentation."""

    name: str
    packages: str  # arguments of pip; these wheels exclude each other, because all install a module `onnxruntime`
    options: frozenset[str]


CPU: Final = OnnxProvider()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Providers by kind of device. The option names are those that the parsers in the wheels accept. The CPU's provider has
# no options, and ignores any.
KINDS: Final[Mapping[str, Kind]] = {
    "cpu": Kind(name=CPU.name, packages="onnxruntime", options=frozenset()),
    "cuda": Kind(
        name="CUDAExecutionProvider",
        packages="onnxruntime-gpu",
        options=_words("""
            device_id gpu_mem_limit arena_extend_strategy cudnn_conv_algo_search cudnn_conv_use_max_workspace
            cudnn_conv1d_pad_to_nc1d do_copy_in_default_stream has_user_compute_stream user_compute_stream
            use_ep_level_unified_stream enable_cuda_graph enable_skip_layer_norm_strict_mode fuse_conv_bias
            gpu_external_alloc gpu_external_free gpu_external_empty_cache prefer_nhwc sdpa_kernel tunable_op_enable
            tunable_op_tuning_enable tunable_op_max_tuning_duration_ms use_tf32
        """),
    ),
    "npu": Kind(
        name="CANNExecutionProvider",
        packages="onnxruntime-cann 'numpy<2'",
        # The options in the last line are not in version 1.24.4.
        options=_words("""
            device_id npu_mem_limit arena_extend_strategy enable_cann_graph enable_cann_subgraph dump_graphs
            dump_om_model precision_mode op_select_impl_mode optypelist_for_implmode
            precision_mode_v2 input_format dynamic_batch_size dynamic_image_size dynamic_dims
        """),
    ),
}
BY_NAME: Final = {kind.name: kind for kind in KINDS.values()}
SESSION: Final = "session"  # the section with session configuration entries
# Session configuration entries of onnxruntime 1.31, which ignores all others.
SESSION_ENTRIES: Final = _words("""
    ep.context_embed_mode ep.context_enable ep.context_file_path ep.context_model_external_initializers_file_name
    ep.context_node_name_prefix ep.cuda.fpa_intb_gemm ep.cuda.fpa_intb_profile_m
    ep.cuda.gqa_workspace_max_total_sequence_length ep.enable_weightless ep.share_ep_contexts
    ep.stop_share_ep_contexts memory.enable_memory_arena_shrinkage mlas.disable_kleidiai
    mlas.enable_gemm_fastmath_arm64_bfloat16 mlas.qnbit.force_fp32 mlas.use_lut_gemm
    optimization.constant_folding_max_output_size_in_bytes optimization.disable_specified_optimizers
    optimization.enable_cast_chain_elimination optimization.enable_gelu_approximation
    optimization.minimal_build_optimizations session.allow_released_opsets_only
    session.collect_node_memory_stats_to_file session.compile_only session.debug_layout_transformation
    session.disable_aot_function_inlining session.disable_cpu_ep_fallback session.disable_double_qdq_remover
    session.disable_model_compile session.disable_prepacking session.disable_qdq_constant_folding
    session.disable_quant_qdq session.dynamic_block_base session.enable_cpu_mem_arena
    session.enable_dq_matmulnbits_fusion session.enable_mem_pattern session.enable_quant_qdq_cleanup
    session.enable_saved_runtime_optimizations session.fail_on_suboptimal_compiled_model session.force_spinning_stop
    session.function_expansion_byte_limit session.function_expansion_node_limit session.gqa_value_layout
    session.graph_optimization_level session.graph_optimizations_loop_level session.inter_op.allow_spinning
    session.inter_op.spin_backoff_max session.inter_op.spin_duration_us session.intra_op.allow_spinning
    session.intra_op.spin_backoff_max session.intra_op.spin_duration_us session.intra_op_thread_affinities
    session.layer_assignment_settings session.load_model_format session.max_shape_override
    session.model_external_initializers_file_folder_path session.name_based_layer_assignment
    session.node_partition_config_file session.optimized_model_external_initializers_file_name
    session.optimized_model_external_initializers_min_size_in_bytes session.optimized_model_filepath
    session.prepack.enable_parallel session.qdq_matmulnbits_accuracy_level session.qdq_matmulnbits_block_size
    session.qdqisint8allowed session.record_ep_graph_assignment_info session.resource_cuda_partitioning_settings
    session.save_external_prepacked_constant_initializers session.save_model_format session.set_denormal_as_zero
    session.strict_shape_type_inference session.strict_workspace_verification
    session.use_device_allocator_for_initializers session.use_env_allocators
    session.use_external_initializer_file_buffers_directly session.use_ort_model_bytes_directly
    session.use_ort_model_bytes_for_initializers session.x64quantprecision
""")


def provider_of_device(device: str, *, options: Iterable[str] = (), config: str | None = None) -> OnnxProvider:
    """The provider for a device, with its options.

    Parameters:
        device: `cpu`, `cuda`, `cuda:1`, `npu:0`, ...
        options: texts such as `npu_mem_limit=8589934592`, which take precedence over the file. A name with a dot is a
            session configuration entry: `session.disable_cpu_ep_fallback=1`.
        config: path of an INI file. The section with the provider's name has its options, `[session]` has session
            configuration entries. Sections of other providers and programs are ignored.

    Raises ValueError for a malformed device or option, and UsageError for a file that cannot be used and for names that
    the provider does not know.
    """
    name, device_id = split_device(device)
    kind = KINDS[name]
    given = {} if config is None else _read_config(config, provider=kind.name)
    own, entries = given.get(kind.name, {}), given.get(SESSION, {})
    for name, value in map(split_option, options):
        (entries if "." in name else own)[name] = value
    _check(own, known=kind.options, what=f"option of {kind.name}")
    _check(entries, known=SESSION_ENTRIES, what="session configuration entry of onnxruntime")
    if device_id is not None and own.setdefault("device_id", str(device_id)) != str(device_id):
        raise UsageError(
            f"The device is `{device}`, and the option device_id is {own['device_id']}", hint="leave device_id out"
        )
    return OnnxProvider(name=kind.name, options=own, session_entries=entries)


def split_option(text: str) -> tuple[str, str]:
    """`key=value` -> key, value. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise ValueError(f"provider_option wants key=value, got {text!r}")
    return name.strip(), value.strip()


def _read_config(path: str, *, provider: str) -> dict[str, dict[str, str]]:
    """The sections of an INI file. Raises UsageError if it has no section for the provider or the session."""
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), inline_comment_prefixes=("#", ";"), default_section=""
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"The provider configuration `{path}` cannot be read: {reason}") from None
    ours = (*BY_NAME, SESSION)
    for section in parser.sections():
        if section not in ours and (similar := _nearest(section, ours)) is not None:
            raise UsageError(f"`{path}` has a section [{section}]", hint=f"[{similar}] may be meant")
    if not {provider, SESSION} & {*parser.sections()}:
        sections = ", ".join(f"[{name}]" for name in parser.sections()) or "none"
        raise UsageError(
            f"`{path}` has neither a section [{provider}] nor [{SESSION}]; its sections: {sections}",
            hint="name the device whose provider it configures",
        )
    return {section: dict(parser[section]) for section in (provider, SESSION) if section in parser}


def _check(given: Mapping[str, str], *, known: frozenset[str], what: str) -> None:
    """Raise UsageError for an unknown name."""
    for name in given:
        if name not in known:
            similar = _nearest(name, known)
            hint = f"`{similar}` may be meant" if similar else f"known: {', '.join(sorted(known)) or 'none'}"
            raise UsageError(f"`{name}` is no {what}", hint=hint)


def _nearest(name: str, known: Sequence[str] | frozenset[str]) -> str | None:
    found = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.7)
    return found[0] if found else None
