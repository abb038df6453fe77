"""The picture tower as our ONNX file in other runtimes: onnxruntime and OpenVINO, in float32 and 8 bits."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.export import export_onnx
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess
from scripts.common import sample_files
from scripts.peers.measuring import Encode
from scripts.peers.packages import require

ONNXRUNTIME_PACKAGES = ("onnxruntime", "onnx")
OPENVINO_PACKAGES = ("openvino", "nncf")


def open_onnxruntime(path: str | os.PathLike[str], *, num_threads: int) -> Encode:
    """onnxruntime with its fastest settings: all graph optimisations, and threads that spin while they wait.

    Our own onnxruntime backend is slower, because its threads sleep while they wait and its sums have a fixed order.
    """
    runtime = require("onnxruntime", package="onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda pixels_BHWC: session.run(None, {name: pixels_BHWC.astype(np.float32)})[0]


def open_openvino(path: str | os.PathLike[str], *, num_threads: int, batch_sizes: Collection[int]) -> Encode:
    """OpenVINO, compiled for each batch size because it is fastest with fixed shapes."""
    core = require("openvino", package="openvino").Core()
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = {}
    for batch in batch_sizes:
        model = core.read_model(str(path))
        _, *rest = model.inputs[0].get_partial_shape()
        model.reshape([batch, *(side.get_length() for side in rest)])
        compiled[batch] = core.compile_model(model, "CPU", settings)
    return lambda pixels_BHWC: compiled[len(pixels_BHWC)](pixels_BHWC.astype(np.float32))[0]


def export_tower(config: VisionConfig, state: Mapping[str, Tensor], path: Path) -> None:
    """Export in float32 with our exporter; raises MissingPackage without its packages."""
    for package in ("onnx", "onnx_ir"):
        require(package, package=package)
    export_onnx(config, state, path, name="random tower", dtype="float32")


def quantise_onnx(source: Path, target: Path) -> None:
    """onnxruntime's dynamic quantisation: int8 weights per channel, activations quantised at run time."""
    quantization = require("onnxruntime.quantization", package="onnxruntime")
    partial = target.with_suffix(".partial")
    quantization.quantize_dynamic(str(source), str(partial), weight_type=quantization.QuantType.QInt8, per_channel=True)
    partial.replace(target)


def quantise_openvino(source: Path, target: Path, *, num_pictures: int = 4) -> None:
    """NNCF's post-training quantisation for transformers, calibrated on sample pictures; `target` ends in .xml."""
    openvino = require("openvino", package="openvino")
    nncf = require("nncf", package="nncf")
    model = openvino.Core().read_model(str(source))
    size = int(model.inputs[0].get_partial_shape()[1].get_length())
    files, rule = sample_files()[:num_pictures], PixelRule(image_size=size)
    pictures = [preprocess(load_picture(file).image, rule=rule)[None].astype(np.float32) for file in files]
    quantised = nncf.quantize(
        model,
        nncf.Dataset(pictures),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(pictures),
    )
    partial = target.with_name(f"partial-{target.name}")
    openvino.save_model(quantised, str(partial), compress_to_fp16=False)
    partial.with_suffix(".bin").replace(target.with_suffix(".bin"))
    partial.replace(target)
