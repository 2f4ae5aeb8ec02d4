#!/usr/bin/env bash
# Trains a small GPT in FP8 from raw text on this machine: no GPU needed, nothing to prepare.
#
#   bash scripts/quickstart.sh
#
# Text: the sources of Python's standard library. Ranks: 4 CPU processes (TP 2 x PP 2), or all GPUs.
# Length: what fits two minutes of training here, by a measurement; at most 300 iterations, at least
# 40, where these take longer 60 of fewer samples, and in the end of fewer layers.
# A second call prints the finished run and trains nothing; after Ctrl-C it goes on from the last
# checkpoint.
# Environment: RUN_DIR (default runs/quickstart), TRAIN_ITERS (exactly so many iterations, nothing is
# measured; more than a finished run has resume it), OMP_NUM_THREADS (of a rank, default 1).
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
[[ -z "${TRAIN_ITERS:-}" ]] || need_positive TRAIN_ITERS
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
CHECKPOINTS="${RUN_DIR}/checkpoints"
SAMPLE="${RUN_DIR}/sample.txt"
mkdir -p "${DATA}"

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

prepare_corpus
# One thread a rank: ranks are processes, and 4 of them with many threads fight for the cores.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "${VENV_PYTHON}" -m megafp8.launch.quickstart \
    "${RUN_DIR}" "${DATA}" ${TRAIN_ITERS:+"${TRAIN_ITERS}"}
if [[ ! "${SAMPLE}" -nt "${CHECKPOINTS}/latest" ]]; then
    echo "== sample"
    "${VENV_PYTHON}" tools/generate.py --load "${CHECKPOINTS}" \
        --prompt $'def read_file(path):\n    """' --max-new-tokens 60 >"${SAMPLE}.new"
    mv "${SAMPLE}.new" "${SAMPLE}"
fi
cat "${SAMPLE}"
echo
echo "== result"
"${VENV_PYTHON}" -m megafp8.report.quickstart "${RUN_DIR}" "${CORPUS}" "${AGAIN}"
