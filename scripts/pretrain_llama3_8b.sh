#!/usr/bin/env bash
# Pretrains Llama 3 8B in FP8 on one node with 8 GPUs.
#
#   DATA_PATH="corpus_text_document" TOKENIZER_MODEL=tokenizer/ bash scripts/pretrain_llama3_8b.sh
#
# DATA_PATH is the prefix of a .bin/.idx pair made by tools/preprocess_data.py. More arguments go to
# pretrain_gpt.py and win over the preset, e.g. --train-iters 20000 --lr-warmup-iters 500.
#
# Overrides: GPUS_PER_NODE (8), RUN_DIR (runs/llama3_8b), CONFIG, PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/checks.sh

need_variable DATA_PATH "the prefix of a .bin/.idx pair, made by tools/preprocess_data.py"
need_variable TOKENIZER_MODEL "the tokenizer that the data was made with"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
need_positive GPUS_PER_NODE
RUN_DIR="${RUN_DIR:-runs/llama3_8b}"
CONFIG="${CONFIG:-scripts/configs/llama3_8b.yaml}"
PYTHON="${PYTHON:-.venv/bin/python}"
need_torch PYTHON

# Fragmentation of the default allocator costs several GiB at this size.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# One OpenMP thread per rank: the host side launches kernels and computes nothing.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# --load names the folder that the run itself saves into, so that the same command resumes; an empty
# or missing folder starts fresh.
exec "${PYTHON}" -m torch.distributed.run --standalone --nproc-per-node "${GPUS_PER_NODE}" \
    pretrain_gpt.py \
    --config "${CONFIG}" \
    --data-path "${DATA_PATH}" \
    --tokenizer-model "${TOKENIZER_MODEL}" \
    --run-dir "${RUN_DIR}" \
    --save "${RUN_DIR}/checkpoints" \
    --load "${RUN_DIR}/checkpoints" \
    "$@"
