# An image for NVIDIA GPUs:
#
#   docker build -t megatron-deberta .
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" megatron-deberta doctor
#
# torch of the base image is kept; the other packages are those of requirements.txt. Python's and
# CUDA's headers are needed: Triton and DeepSpeed compile kernels at first use.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/megatron_deberta
COPY requirements.txt ./
RUN pip install --requirement requirements.txt
COPY . .
RUN pip install --no-deps --no-build-isolation .
WORKDIR /work
ENTRYPOINT ["megatron-deberta"]
