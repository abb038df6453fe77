"""One picture and one question, in the form of the reference's demo. Argument: the picture."""

import sys

import cv2
import llama
import torch
from PIL import Image

device = "cuda" if torch.cuda.is_available() else "cpu"
llama_dir = "/path/to/LLaMA/"

model, preprocess = llama.load("BIAS-7B", llama_dir, llama_type="7B", device=device)
model.eval()

question = llama.format_prompt("Describe the image.")
picture = Image.fromarray(cv2.imread(sys.argv[1]))
pixels = preprocess(picture).unsqueeze(0).to(device)

print(model.generate(pixels, [question], max_gen_len=16, temperature=0)[0])
