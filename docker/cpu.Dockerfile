# The HTTP API on a CPU; any other command of llama-adapter on request. From the root of the checkout:
#   docker build --file docker/cpu.Dockerfile --tag llama-adapter --build-arg TORCH_INDEX=ADDRESS .
#   docker run --publish 127.0.0.1:8000:8000 llama-adapter
#   docker run --volume "$PWD/pictures:/pictures:ro" llama-adapter caption /pictures
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH=2.13.0
# The address of torch's CPU builds, which pytorch.org shows for Linux, Pip and CPU. On x86_64 the common index has the
# CUDA build, which is larger by gigabytes.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==${TORCH}"

WORKDIR /opt/llama-adapter
COPY pyproject.toml README.md LICENSE demo_bsz.py ./
COPY llama_adapter llama_adapter
COPY app app
COPY assets assets
COPY llm llm
COPY runtime runtime
COPY vision vision
COPY scripts/build_wheel.py scripts/wheel_hook.py scripts/
# The wheel has the CPU kernels for all processors of this machine's kind, so the compiler does not stay.
RUN pip install --no-cache-dir hatchling ziglang \
    && python -m scripts.build_wheel --out /tmp/wheel \
    && pip install --no-cache-dir "$(echo /tmp/wheel/*.whl)[onnx,serve]" "torch==${TORCH}" \
    && pip uninstall --yes hatchling ziglang \
    && rm -r /tmp/wheel /root/.cache

RUN useradd --create-home --uid 10001 user
USER user
WORKDIR /home/user
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["llama-adapter"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
