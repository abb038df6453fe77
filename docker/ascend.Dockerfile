# An Ascend NPU, with the picture encoder in torch or as an OM in ais_bench. Not tried with a card so far. CANN_IMAGE has
# CANN's toolkit, the ops package of the chip, Python 3.11 to 3.14, git and gcc, such as a tag of ascendai/cann for the
# chip; docs/ascend.md says which CANN goes with which TORCH_NPU. From the root of the checkout:
#   docker build --file docker/ascend.Dockerfile --tag llama-adapter-ascend --build-arg CANN_IMAGE=IMAGE .
#   docker run --publish 127.0.0.1:8000:8000 --device /dev/davinci0 --device /dev/davinci_manager \
#     --device /dev/devmm_svm --device /dev/hisi_hdc --volume /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
#     --volume /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro \
#     --group-add "$(getent group HwHiAiUser | cut -d: -f3)" llama-adapter-ascend
# Another command stands behind the image's name: `llama-adapter doctor --environment --device npu:0 --vision om`, or
# `python3 /opt/llama-adapter/demo_bsz.py` with its variables as `--env`.
ARG CANN_IMAGE
FROM ${CANN_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# For CANN 9.1.
ARG TORCH=2.12.0
ARG TORCH_NPU=2.12.0
# The address of torch's CPU builds, which pytorch.org shows for Linux, Pip and CPU. On x86_64 the common index has the
# CUDA build, which torch_npu refuses. On aarch64 it is not needed.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==${TORCH}"

# aclruntime is compiled against the CANN of the image.
COPY docker/with-cann.sh /usr/local/bin/with-cann
ARG AIS_BENCH=https://gitee.com/ascend/tools.git
ARG AIS_BENCH_FOLDER=/tmp/tools/ais-bench_workload/tool/ais_bench
RUN git clone --depth 1 "$AIS_BENCH" /tmp/tools \
    && with-cann pip install --no-cache-dir "$AIS_BENCH_FOLDER/backend" "$AIS_BENCH_FOLDER" \
    && rm -r /tmp/tools

WORKDIR /opt/llama-adapter
COPY pyproject.toml README.md LICENSE demo_bsz.py ./
COPY scripts/pth2onnx.py scripts/
COPY llama_adapter llama_adapter
COPY app app
COPY assets assets
COPY llm llm
COPY runtime runtime
COPY vision vision
RUN pip install --no-cache-dir --editable ".[npu,onnx,serve]" "torch==${TORCH}" "torch-npu==${TORCH_NPU}"

RUN useradd --create-home --uid 10001 user
USER user
WORKDIR /home/user
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=600s \
    CMD ["python3", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["with-cann"]
CMD ["llama-adapter", "serve", "--host", "0.0.0.0", "--port", "8000", "--device", "npu:0"]
