#!/usr/bin/env bash
# Lints and runs the tests on a bare machine (Python >= 3.10, pip, no GPU needed).
#
#   bash scripts/test.sh                 the default selection
#   bash scripts/test.sh -m slow         the long ones
#   bash scripts/test.sh tests/train -x  any arguments of pytest
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "${REPOSITORY}"
environment_install_oracles
environment_install_te

"${VENV_PYTHON}" -m ruff check .
exec "${VENV_PYTHON}" -m pytest "$@"
