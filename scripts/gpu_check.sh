#!/usr/bin/env bash
# One command for a machine with one GPU: the tests that need it, then values and speed of FP8.
#
#   bash scripts/gpu_check.sh [--tiny] [--steps 50] [--out gpu_check]
#   MEGAFP8_PYTHON=python bash scripts/gpu_check.sh      an interpreter that has torch, no .venv
#
# torch and pytest are enough. Triton adds the fused kernels; pydantic, PyYAML and isal add the GPU
# tests of training, and TransformerEngine (with them) the comparison of the two backends.
# Writes OUT.md and OUT.json; exit code 1 if a test or a check fails.
set -euo pipefail

if [[ -n "${MEGAFP8_PYTHON:-}" ]]; then
    REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    source "${REPOSITORY}/scripts/checks.sh"
    need_torch MEGAFP8_PYTHON
    VENV_PYTHON="${MEGAFP8_PYTHON}"
    export PYTHONPATH="${REPOSITORY}${PYTHONPATH:+:${PYTHONPATH}}"
else
    source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
fi
cd "${REPOSITORY}"
for argument in "$@"; do
    if [[ "${argument}" == -h || "${argument}" == --help ]]; then
        exec "${VENV_PYTHON}" -m megafp8.launch.gpu_check --help
    fi
done

tests=tests
if ! "${VENV_PYTHON}" -c 'import pydantic, yaml, isal' 2> /dev/null; then
    echo "pydantic, PyYAML or isal is missing: only the GPU tests of numerics run"
    tests=tests/numerics
fi
status=0
# pytest ends with 5 where no test is marked.
"${VENV_PYTHON}" -m pytest -q -m gpu "${tests}" || { status=$?; [[ "${status}" == 5 ]] && status=0; }
"${VENV_PYTHON}" -m megafp8.launch.gpu_check "$@" || status=1
exit "${status}"
