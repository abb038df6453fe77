"""Flags that most commands share: the model, and how to compute it."""

import argparse
from typing import Any, get_args

from llama_adapter.app.command_line.parser import DEVICES, Parser, default
from llama_adapter.app.command_line.values import parse_batch_size, parse_encoder_device, parse_sample_fields
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.schemes import OPERATORS, PRECISIONS
from llama_adapter.vision.formats import Damaged, Orientation, Reading, Transparency

SPEC = CaptionerSpec()


BUNDLE = "bundle written by `convert` (default: the embedded model)"


def add_model(parser: Parser, *, bundle_help: str = BUNDLE, llama: bool = True) -> None:
    """Add the flags of a model. Without `llama`, flags of the language model are accepted but hidden from the help."""

    def shown(text: str) -> str:
        return text if llama else argparse.SUPPRESS

    group = parser.add_argument_group("model", section="model")
    group.add_argument("--model", metavar="BUNDLE", first=True, help=bundle_help)
    group.add_argument(
        "--llama-dir", metavar="DIR", first=True, help=shown("LLaMA as Meta ships it, or a Hugging Face folder")
    )
    group.add_argument("--llama-type", metavar="NAME", help=shown("sub-folder of --llama-dir, for example 7B"))
    group.add_argument("--adapter", metavar="FILE", first=True, help="adapter, for example BIAS-7B.pth")
    group.add_argument("--clip", metavar="FILE", first=True, help="CLIP, for example ViT-L-14.pt")
    group.add_argument(
        "--lora",
        metavar="FOLDER[=WEIGHT]",
        action="append",
        default=SPEC.lora,
        help=shown(
            "LoRA folder of Hugging Face PEFT, merged into LLaMA's weights; several are summed with their weights "
            "(default: 1)"
        ),
    )
    group.add_argument(
        "--visual-heads", metavar="N", type=int, help="heads of the visual blocks (default: 16 for width 768)"
    )
    group.add_argument(
        "--channel-order",
        choices=("rgb", "bgr"),
        default=SPEC.channel_order,
        help="channel order in training (default: the bundle's; bgr for released adapters, else rgb)",
    )
    group.add_argument(
        "--context",
        metavar="N",
        type=int,
        help=shown("tokens of prompt and answer together (default: the bundle's, else 512, or 2048 for chat)"),
    )


def add_batch_size(group: Any) -> None:
    group.add_argument(
        "--batch-size",
        metavar="N|auto",
        type=parse_batch_size,
        first=True,
        default=SPEC.batch_size,
        help=default(
            "pictures answered at once; auto: the largest that fits the device's memory, up to 16 on the CPU and 64 "
            "elsewhere"
        ),
    )


def add_computation(compute: Any, *, decoder: bool = True) -> None:
    """Add the flags that say how to compute a model. Without `decoder`, only those for an encoder."""
    compute.add_argument(
        "--device",
        metavar="D",
        default=SPEC.device,
        first=True,
        help=default(f"{DEVICES}: an NPU, else a GPU, else the CPU"),
    )
    compute.add_argument(
        "--dtype",
        metavar="T",
        default=SPEC.dtype,
        help=default("float32, bfloat16 or float16, as the device allows; auto: the dtype that it computes best"),
    )
    if decoder:
        add_precision(compute)
        compute.add_argument(
            "--past-key-values",
            metavar="PATH",
            help="keys and values in front of every prompt, from prefix tuning or P-Tuning v2: PaddleNLP's "
            "pre_caches.npy, or a folder with it or with a PEFT adapter",
        )
    add_encoder(compute, decoder=decoder)
    compute.add_argument("--encoder-process", action="store_true", help="run an exported encoder in its own process")
    if decoder:
        compute.add_argument(
            "--mode",
            metavar="M",
            default=SPEC.mode,
            help=default(
                "eager, graph, or a graph mode of the device by name; auto: the graph mode of a device that records "
                "quickly, else eager. A graph mode that the device lacks runs eager, with a note"
            ),
        )
        compute.add_argument(
            "--strict", action="store_true", help="refuse a graph mode that the device lacks, instead of running eager"
        )
    compute.add_argument(
        "--operators",
        choices=tuple(OPERATORS),
        default=SPEC.operators,
        help=default("; ".join(f"{name}: {what}" for name, what in OPERATORS.items())),
    )
    if decoder:
        compute.add_argument(
            "--tensor-parallel",
            metavar="N",
            type=int,
            default=SPEC.tensor_parallel,
            help=default("ranks that share the decoder, each a process with its own device (docs/tensor-parallel.md)"),
        )
        compute.add_argument(
            "--parallel-timeout",
            metavar="S",
            type=float,
            default=SPEC.parallel_timeout,
            help=default("seconds that a rank waits for the others in a step before all ranks end"),
        )
    add_picture_reading(compute)


def add_picture_reading(group: Any, *, hidden: bool = False) -> None:
    """Add the flags that say how the pixels of a picture are made."""
    for name, known, text in (
        ("exif", Orientation, "the orientation stored by cameras"),
        ("transparency", Transparency, "transparent pixels: white, or the colours stored for them, as in CLIP"),
        ("damaged", Damaged, "pictures with damaged pixels: refused, or answered from the part that can be decoded"),
        ("reading", Reading, "decoding; fast differs by about one level and is much faster for large JPEGs"),
    ):
        help = argparse.SUPPRESS if hidden else default(text)
        group.add_argument(f"--{name}", choices=get_args(known), default=getattr(SPEC, name), help=help)


def add_precision(group: Any) -> None:
    meanings = ", ".join(f"{name} {what}" for name, what in PRECISIONS.items())
    group.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        help=f"number format of the linear layers' weights: {meanings} (default: as stored)",
    )


def add_encoder(group: Any, *, decoder: bool = True) -> None:
    if decoder:
        group.add_argument(
            "--decoder",
            metavar="FOLDER",
            help="folder written by `export decoder`, run without torch instead of a model (docs/exported-decoder.md)",
        )
        group.add_argument(
            "--decoder-backend",
            choices=("ms", "mslite"),
            help="runtime of a MindIR --decoder: MindSpore or MindSpore Lite (default: ms)",
        )
        group.add_argument(
            "--ge-config", metavar="FILE.ini", help="config.ini of MindSpore Lite, for a MindIR --decoder on Ascend"
        )
    group.add_argument(
        "--vision",
        choices=("torch", "onnx", "om"),
        help="runtime of the picture encoder (default: torch, or that of the --encoder file or --decoder folder)",
    )
    group.add_argument("--encoder", metavar="FILE", help="exported encoder: an .onnx, an .om, or a folder of .om")
    group.add_argument(
        "--encoder-device",
        metavar="N|D",
        type=parse_encoder_device,
        help="number of an OM's device (default: that of --device npu:N, else 0); for an .onnx cpu, cuda:N or npu:N "
        "(default: cpu)",
    )
    group.add_argument(
        "--provider-option",
        metavar="KEY=VALUE",
        action="append",
        default=SPEC.provider_option,
        help="option of onnxruntime's execution provider, or a session configuration entry such as "
        "session.disable_cpu_ep_fallback=1; may be given several times",
    )
    group.add_argument(
        "--provider-config",
        metavar="FILE.ini",
        help="such options from a file, in sections such as [CANNExecutionProvider] and [session]",
    )


def add_cluster(group: Any, *, ray: str) -> None:
    """Add `--engine` and `--ray-address`; `ray` completes the help: what the engine ray does."""
    group.add_argument("--engine", choices=("local", "ray"), default="local", help=default(f"ray {ray}"))
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="address of a running cluster (default: RAY_ADDRESS, else a new cluster on this machine)",
    )


def add_sample_fields(group: Any) -> None:
    """Add the flag that chooses members of archives' samples."""
    group.add_argument(
        "--sample-fields",
        metavar="PICTURE,TEXT",
        type=parse_sample_fields,
        separator=",",
        help="in archives, the fields of the picture and its text: input,outputs are a.input.png and a.outputs.txt "
        "(default: those with the sample's name alone)",
    )
