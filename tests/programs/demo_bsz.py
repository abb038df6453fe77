"""Batches of pictures with an OM encoder, in the form of the Ascend guide's demo."""

import time

import cv2
import llama
import numpy as np
import torch
import torch_npu
from ais_bench.infer.interface import InferSession
from torch_npu.contrib import transfer_to_npu  # noqa: F401

DEVICE_ID = 0
DEVICE = "cpu"
IMG_SIZE = 224
BATCH_SIZE = 2
INFER_LOOP = 2
LLAMA_DIR = "/path/to/LLaMA/"
CLIP_DIR = "/path/to/clip/"
BIAS_DIR = "/path/to/BIAS-7B"
PIC_FILE_PATH = "/path/to/picture"

torch.npu.set_device(torch.device(f"npu:{DEVICE_ID}"))
torch.npu.set_option({"NPU_FUZZY_COMPILE_BLACKLIST": "ReduceProd"})

session = InferSession(DEVICE_ID, CLIP_DIR)
model = llama.load(BIAS_DIR, LLAMA_DIR, DEVICE)
model.eval().npu()

layout = 2 if torch_npu._C._npu_get_soc_version() in [104, 220, 221, 222, 223] else 29
for _, module in model.named_modules():
    if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
        module.weight.data = module.weight.data.npu_format_cast(layout)
model.init_acl_weight()


def read(first):
    pictures = [cv2.imread(f"{PIC_FILE_PATH}pic_{number}.png") for number in range(first, first + BATCH_SIZE)]
    sized = [cv2.resize(picture, (IMG_SIZE, IMG_SIZE), interpolation=cv2.INTER_CUBIC) for picture in pictures]
    return np.stack(sized).astype(np.float16)


prompts = [llama.format_prompt("Is there a fight in the picture?")] * BATCH_SIZE
with torch.no_grad():
    print("[warm-up]:", model.generate(session, read(1), prompts))

total = 0
for loop in range(INFER_LOOP):
    started = time.time()
    with torch.no_grad():
        texts = model.generate(session, read(loop * BATCH_SIZE + 1), prompts, max_gen_len=12, temperature=0)
    total += (time.time() - started) * 1000
    print("[result]:", texts)
    print("[stages]:", model.clip_time, model.pre_time, model.forward_time, model.post_time, model.decode_time)
print("[avg_time]:", total / INFER_LOOP)
