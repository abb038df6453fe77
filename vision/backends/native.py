"""Runs the blocks of the picture encoder with the C kernels: one call for the tower, one for the query blocks."""

from torch import Tensor, nn

from llama_adapter.runtime.devices.cpu_blocks import BlockParts, NativeBlocks
from llama_adapter.runtime.devices.cpu_linear import NativeLinear
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.kernels.threads import torch_stands_aside
from llama_adapter.vision.block import Block
from llama_adapter.vision.inference import HostEncoder


def install_block_kernels(encoder: HostEncoder, *, library: Library) -> int:
    """Replace the blocks of an encoder whose linear layers are `NativeLinear`; returns their number."""
    num_installed = 0
    for owner, activation in ((encoder.clip, encoder.clip.config.activation), (encoder.query, "exact_gelu")):
        blocks = [block for block in owner.blocks if isinstance(block, Block)]
        known = [part for block in blocks if (part := _parts(block)) is not None]
        if not known or len(known) < len(owner.blocks):
            continue
        num_heads = blocks[0].attention.num_heads
        stack = NativeBlocks(known, num_heads=num_heads, activation=activation, library=library)
        owner.blocks = nn.ModuleList([stack])
        num_installed += len(blocks)
    return num_installed


class NativeEncoder(nn.Module):
    """An encoder whose blocks are computed by the kernels while torch's threads are idle."""

    def __init__(self, encoder: HostEncoder, *, library: Library) -> None:
        super().__init__()
        install_block_kernels(encoder, library=library)
        self.encoder = encoder

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """See `HostEncoder.forward`."""
        with torch_stands_aside():
            visual_query_BQD: Tensor = self.encoder(pixels_BHWC)
            return visual_query_BQD


def _parts(block: Block) -> BlockParts | None:
    """The parts of a block that the kernels need; None if one of its linear layers is not a `NativeLinear`."""
    linears = block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down
    qkv, out, up, down = (linear if isinstance(linear, NativeLinear) else None for linear in linears)
    if qkv is None or out is None or up is None or down is None:
        return None
    return BlockParts(norm1=block.norm1, qkv=qkv, out=out, norm2=block.norm2, up=up, down=down)
