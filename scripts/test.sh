#!/usr/bin/env bash
# Lints and runs the tests on a bare machine (Python >= 3.10, pip, no GPU needed).
#
#   bash scripts/test.sh                 the default selection
#   bash scripts/test.sh -m slow         the long ones
#   bash scripts/test.sh tests/train -x  any arguments of pytest
#
# It ends with the reasons of skipped tests. Environment: TEST_WORKERS (default 2), processes that
# share the tests; 0 for one, as --pdb wants it. CI: if set, a missing reference is a failure.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "${REPOSITORY}"
environment_install_oracles
environment_install_te

"${VENV_PYTHON}" -m ruff check .
# A worker takes over half of what another one has left: tests of a file stay together otherwise.
exec "${VENV_PYTHON}" -m pytest --numprocesses "${TEST_WORKERS:-2}" --dist worksteal "$@"
