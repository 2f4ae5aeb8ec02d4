#!/usr/bin/env bash
# Trains a small GPT in FP8 from raw text on this machine: no GPU needed, nothing to prepare.
#
#   bash scripts/quickstart.sh
#
# Text: the sources of Python's standard library. Ranks: 4 CPU processes (TP 2 x PP 2), or all GPUs.
# A second call prints the finished run and trains nothing; a larger TRAIN_ITERS resumes it.
# Environment: RUN_DIR (default runs/quickstart), TRAIN_ITERS (default 300).
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
TRAIN_ITERS="${TRAIN_ITERS:-300}"
need_positive TRAIN_ITERS
AGAIN="bash scripts/quickstart.sh"
if [[ -n "${RUN_DIR:-}" ]]; then
    AGAIN="RUN_DIR=${RUN_DIR} ${AGAIN}"
    reason="$(mkdir -p "${RUN_DIR}" 2>&1)" || fail "RUN_DIR: ${reason}"
    RUN_DIR="$(cd "${RUN_DIR}" && pwd)"
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "${REPOSITORY}"
RUN_DIR="${RUN_DIR:-${REPOSITORY}/runs/quickstart}"
DATA="${RUN_DIR}/data"
CORPUS="${DATA}/stdlib_text_document"
mkdir -p "${DATA}"

completed_iterations() {
    local latest="${RUN_DIR}/checkpoints/latest"
    [[ -f "${latest}" ]] || { echo 0; return; }
    local name
    name="$(tr -d '[:space:]' <"${latest}")"
    # What is damaged there is the run's to say, which then takes the newest complete checkpoint.
    [[ "${name}" =~ ^iter_([0-9]{7,18})$ ]] || { echo 0; return; }
    echo $((10#${BASH_REMATCH[1]}))
}

prepare_corpus() {
    local stdlib
    stdlib="$("${VENV_PYTHON}" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
    # Its own tests are left out: half of the text, much of it tables, some of it not UTF-8.
    local input=(--input "${stdlib}" --glob '*.py'
        --exclude site-packages dist-packages test tests idle_test __pycache__)
    if [[ ! -f "${DATA}/tokenizer/tokenizer.model" ]]; then
        echo "== tokenizer: SentencePiece from ${stdlib}"
        "${VENV_PYTHON}" tools/train_tokenizer.py "${input[@]}" --output "${DATA}/tokenizer" \
            --vocab-size 2048 --type sentencepiece
    fi
    if [[ ! -f "${CORPUS}.idx" ]]; then
        echo "== corpus: one document a file"
        "${VENV_PYTHON}" tools/preprocess_data.py "${input[@]}" --output-prefix "${DATA}/stdlib" \
            --tokenizer-type SentencePieceTokenizer --tokenizer-model "${DATA}/tokenizer" \
            --append-eod --workers 2
    fi
}

choose_ranks() {
    # Prints the number of ranks and the flags that fit the preset to them.
    "${VENV_PYTHON}" - <<'PYTHON'
import torch

gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
ranks, flags = gpus or 4, []
if ranks % 4:
    flags += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    flags += ["--no-sequence-parallel"]
data_parallel = ranks if ranks % 4 else ranks // 4
unit = 4 * data_parallel  # micro batch 4
batches = max(1, round(16 / unit)) if ranks % 4 else max(2, round(16 / unit))
flags += ["--global-batch-size", str(unit * batches)]
if gpus and torch.cuda.get_device_capability() < (8, 9):
    flags += ["--fp8-emulate"]
print(ranks, *flags)
PYTHON
}

train() {
    local plan
    read -r -a plan <<<"$(choose_ranks)"
    local ranks="${plan[0]}" warmup=20
    if ((TRAIN_ITERS < 40)); then
        warmup=$((TRAIN_ITERS / 2))
    fi
    echo "== training: ${TRAIN_ITERS} iterations on ${ranks} ranks, run folder ${RUN_DIR}"
    # One thread a rank: ranks are processes, and 4 of them with many threads fight for the cores.
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "${VENV_PYTHON}" -m torch.distributed.run \
        --standalone --nproc-per-node "${ranks}" pretrain_gpt.py \
        --config scripts/configs/tiny.yaml "${plan[@]:1}" \
        --data-path "${CORPUS}" --tokenizer-model "${DATA}/tokenizer" \
        --train-iters "${TRAIN_ITERS}" --lr-warmup-iters "${warmup}" --run-dir "${RUN_DIR}" \
        --save "${RUN_DIR}/checkpoints" --load "${RUN_DIR}/checkpoints" --save-interval 100
    echo "== sample"
    "${VENV_PYTHON}" tools/generate.py --load "${RUN_DIR}/checkpoints" \
        --prompt $'def read_file(path):\n    """' --max-new-tokens 60 >"${RUN_DIR}/sample.txt"
}

if (($(completed_iterations) < TRAIN_ITERS)); then
    prepare_corpus
    train
else
    echo "== ${RUN_DIR} has $(completed_iterations) iterations: nothing to train"
fi
[[ -f "${RUN_DIR}/sample.txt" ]] && cat "${RUN_DIR}/sample.txt"
echo
echo "== result"
"${VENV_PYTHON}" -m megafp8.report.quickstart "${RUN_DIR}" "${CORPUS}"
echo "next: TRAIN_ITERS=$(($(completed_iterations) * 2)) ${AGAIN}"
