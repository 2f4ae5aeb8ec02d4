# What a launch script checks before it starts anything; sourced by them. A failure is one line and
# exit code 2. Needs nothing but bash.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# need_variable NAME WHAT: the variable is set and not empty.
need_variable() {
    [[ -n "${!1:-}" ]] || fail "$1 is not set; set it to $2"
}

# need_positive NAME: the variable holds a positive integer.
need_positive() {
    local value="${!1:-}"
    [[ "${value}" =~ ^[1-9][0-9]*$ ]] || fail "$1: found '${value}', allowed a positive integer"
}

# need_torch NAME: the variable holds a Python that starts and finds torch.
need_torch() {
    local python="${!1:-}"
    local do="run bash scripts/quickstart.sh once, which makes .venv, or set $1 to an interpreter with torch"
    command -v -- "${python}" >/dev/null || fail "$1: found no '${python}'; ${do}"
    local look='import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
    # In a group: bash itself tells of a program that a signal ended.
    { "${python}" -c "${look}"; } >/dev/null 2>&1 ||
        fail "$1: ${python} has no torch, or does not start; ${do}"
}
