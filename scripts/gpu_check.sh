#!/usr/bin/env bash
# One command for a machine with one GPU: the tests that need it, then values and speed of FP8.
#
#   bash scripts/gpu_check.sh [--tiny] [--steps 50] [--out gpu_check]
#   MEGAFP8_PYTHON=python bash scripts/gpu_check.sh      an interpreter that is there, no .venv
#
# That interpreter needs torch, NumPy, pydantic, PyYAML, isal and pytest; docs/performance.md says how
# to put them beside one that is not to be changed, or that no network reaches. Triton adds the fused
# kernels, and TransformerEngine the comparison of the two backends.
# Writes OUT.md and OUT.json; exit code 1 if a test or a check fails.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
if [[ -n "${MEGAFP8_PYTHON:-}" ]]; then
    REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    need_torch MEGAFP8_PYTHON
    VENV_PYTHON="${MEGAFP8_PYTHON}"
else
    source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
fi
export PYTHONPATH="${REPOSITORY}${PYTHONPATH:+:${PYTHONPATH}}"

# missing PACKAGE=MODULE...: the packages whose modules the interpreter does not find.
missing() {
    "${VENV_PYTHON}" - "$@" <<'PYTHON'
import importlib.util, sys
pairs = [word.split("=") for word in sys.argv[1:]]
print(*(name for name, module in pairs if importlib.util.find_spec(module) is None), sep=", ")
PYTHON
}
lacks="$(missing NumPy=numpy pydantic=pydantic PyYAML=yaml isal=isal pytest=pytest)"
[[ -z "${lacks}" ]] ||
    fail "${VENV_PYTHON} has no ${lacks}; install them, or put them beside it as docs/performance.md says (GPU)"
cd "${REPOSITORY}"
for argument in "$@"; do
    if [[ "${argument}" == -h || "${argument}" == --help ]]; then
        exec "${VENV_PYTHON}" -m bench.gpu.check --help
    fi
done

status=0
# pytest ends with 5 where no test is marked.
"${VENV_PYTHON}" -m pytest -q -m gpu tests || { status=$?; [[ "${status}" == 5 ]] && status=0; }
"${VENV_PYTHON}" -m bench.gpu.check "$@" || status=1
exit "${status}"
