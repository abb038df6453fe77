"""Reads questions about pictures from files, and writes answers to a file, like the reference's evaluation on MME."""

import argparse
import os
from pathlib import Path

import cv2
import torch
from llama.llama_adapter import LLaMA_adapter
from PIL import Image
from tqdm import tqdm

TEMPLATE = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request using a single word or phrase.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def load(options):
    checkpoint = torch.load(options.pretrained_path, map_location="cpu", weights_only=True)
    model = LLaMA_adapter(
        os.path.join(options.llama_path, "7B"),
        os.path.join(options.llama_path, "tokenizer.model"),
        max_seq_len=512,
        max_batch_size=1,
        clip_model="ViT-L/14",
        v_embed_dim=768,
        v_depth=8,
        v_num_heads=16,
        v_mlp_ratio=4.0,
        query_len=10,
        query_layer=31,
        w_bias=True,
        w_lora=options.lora > 0,
        lora_rank=options.lora,
        w_new_gate=options.lora > 0,
        phase="finetune",
    )
    print(model.load_state_dict(checkpoint["model"], strict=False))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.half()
    model.eval()
    return model


def ask(model, path, question):
    pixels = model.clip_transform(Image.fromarray(cv2.imread(path))).unsqueeze(0).half().to(model.device)
    prompt = TEMPLATE.format_map({"instruction": question})
    return model.generate(pixels, [prompt], max_gen_len=30, temperature=0, top_p=0.75)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama_path")
    parser.add_argument("--pretrained_path")
    parser.add_argument("--lora", default=16, type=int)
    parser.add_argument("--questions")
    parser.add_argument("--output_path")
    options = parser.parse_args()

    model = load(options)
    answers = []
    with torch.no_grad():
        for line in tqdm(Path(options.questions).read_text().splitlines()):
            path, question, truth = line.split("\t")
            answers.append(f"{path}\t{question}\t{truth}\t{ask(model, path, question)}")
    Path(options.output_path).write_text("\n".join(answers))
