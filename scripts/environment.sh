# Makes .venv and installs the project into it; sourced by quickstart.sh and test.sh.
#
# Sets REPOSITORY (the project's root) and VENV_PYTHON. Nothing is installed again unless
# requirements.txt, pyproject.toml or the interpreter changed; a broken .venv is made anew.
# Override: PYTHON (the interpreter that makes .venv, default python3).

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_PYTHON="${REPOSITORY}/.venv/bin/python"

_environment_fail() {
    echo "environment: $*" >&2
    exit 2
}

_environment_create() {
    local python="${PYTHON:-python3}"
    command -v "${python}" >/dev/null || _environment_fail "${python} not found; install Python >= 3.10"
    "${python}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        _environment_fail "${python} is $("${python}" --version 2>&1); Python >= 3.10 is needed"
    echo "environment: creating .venv with $("${python}" --version 2>&1)" >&2
    # --clear: what an interrupted creation or a removed interpreter left behind cannot be repaired.
    "${python}" -m venv --clear "${REPOSITORY}/.venv" ||
        _environment_fail "${python} -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
}

_environment_checksum() {
    # The project's place is part of it: an editable install points to where it was made.
    "${VENV_PYTHON}" - "${REPOSITORY}" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{root} {sys.version}".encode())
for name in ("requirements.txt", "pyproject.toml"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

_environment_install() {
    local stamp="${REPOSITORY}/.venv/megafp8-stamp" checksum
    checksum="$(_environment_checksum)"
    if [[ -f "${stamp}" && "$(cat "${stamp}")" == "${checksum}" ]]; then
        return
    fi
    echo "environment: installing requirements.txt (the first time takes some minutes)" >&2
    rm -f "${stamp}"
    (
        # Joined by &&: bash ignores set -e in a list that is followed by ||.
        cd "${REPOSITORY}" &&
            "${VENV_PYTHON}" -m pip install --quiet --disable-pip-version-check \
                -r requirements.txt &&
            # The build backend is pinned above, so no second one is fetched to build this.
            "${VENV_PYTHON}" -m pip install --quiet --disable-pip-version-check \
                --no-deps --no-build-isolation -e .
    ) >&2 || _environment_fail "pip install failed; its message is above"
    echo "${checksum}" >"${stamp}"
}

# Called by test.sh alone: what tests compare with, see requirements-oracles.txt.
environment_install_oracles() {
    local stamp="${REPOSITORY}/.venv/megafp8-oracles" wanted
    wanted="$(cat "${REPOSITORY}/requirements-oracles.txt" "${REPOSITORY}/requirements-megatron.txt")"
    if [[ -f "${stamp}" && "$(cat "${stamp}")" == "${wanted}" ]]; then
        return
    fi
    echo "environment: installing requirements-oracles.txt and requirements-megatron.txt" >&2
    rm -f "${stamp}"
    if "${VENV_PYTHON}" -m pip install --quiet --disable-pip-version-check \
        -r "${REPOSITORY}/requirements-oracles.txt" -c "${REPOSITORY}/requirements.txt" >&2 &&
        "${VENV_PYTHON}" -m pip install --quiet --disable-pip-version-check --no-deps \
            -r "${REPOSITORY}/requirements-megatron.txt" >&2; then
        echo "${wanted}" >"${stamp}"
    else
        echo "environment: that failed; the tests that compare with them will be skipped, or fail where CI is set" >&2
    fi
}

# Called by test.sh alone: TransformerEngine's Python for tests, see requirements-te.txt.
environment_install_te() {
    local folder="${REPOSITORY}/.venv/te" list="${REPOSITORY}/requirements-te.txt"
    if cmp --silent "${list}" "${folder}/megafp8-stamp"; then
        return
    fi
    echo "environment: installing requirements-te.txt" >&2
    rm -rf "${folder}"
    if "${VENV_PYTHON}" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "${folder}" -r "${list}" >&2; then
        cp "${list}" "${folder}/megafp8-stamp"
    else
        rm -rf "${folder}"
        echo "environment: that failed; the TransformerEngine tests will be skipped, or fail where CI is set" >&2
    fi
}

if ! "${VENV_PYTHON}" -m pip --version >/dev/null 2>&1; then
    _environment_create
fi
_environment_install
