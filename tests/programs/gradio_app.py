"""A page with one picture and one question, in the form of the reference's own page."""

import cv2
import gradio as gr
import llama
import torch
from PIL import Image

device = "cuda" if torch.cuda.is_available() else "cpu"
llama_dir = "/path/to/LLaMA/"

# In an earlier version of the reference, the third parameter is the device.
model, preprocess = llama.load("BIAS-7B", llama_dir, device)
model.half()
model.eval()


def answer(path, question, max_gen_len=256, temperature=0.1, top_p=0.75):
    picture = Image.fromarray(cv2.imread(path))
    pixels = preprocess(picture).unsqueeze(0).half().to(device)
    prompt = llama.format_prompt(question)
    texts = model.generate(pixels, [prompt], max_gen_len=max_gen_len, temperature=temperature, top_p=top_p)
    return texts[0]


with gr.Blocks() as page:
    inputs = [
        gr.Image(label="Picture", type="filepath"),
        gr.Textbox(label="Question"),
        gr.Slider(minimum=1, maximum=512, value=256, label="Length"),
        gr.Slider(minimum=0, maximum=1, value=0.1, label="Temperature"),
        gr.Slider(minimum=0, maximum=1, value=0.75, label="Top p"),
    ]
    output = gr.Textbox(label="Answer")
    gr.Button("Run").click(answer, inputs=inputs, outputs=output, api_name="answer")

page.queue().launch()
