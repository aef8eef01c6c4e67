#!/bin/sh
# Makes the project's own virtual environment, .venv: torch first, then fastgen itself with what its development needs.
# Quick when nothing changed since the last time. The Makefile calls it; it can be run from anywhere.
#
#   PYTHON=python3.12 tools/setup.sh    use this Python instead of the first suitable one
set -eu

torch_version=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu

cd "$(dirname "$0")/.."
root=$(pwd -P)
log=.venv/setup.log

say() { printf '%s\n' "setup: $*"; }
fail() { say "$*" >&2; exit 1; }

logged() { "$@" >"$log" 2>&1; }
show_failure() {
    grep -v 'is ignored: it is' "$log" | tail -n 25 >&2
    fail "this command failed, all it said is in $log: $*"
}
quietly() { logged "$@" || show_failure "$*"; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# --- Python: 3.11 or newer, able to make virtual environments. A candidate is run to find out, since a name on the
# --- PATH may be a shim that leads nowhere.

suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer with the venv module"
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if suitable "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "found no Python of version 3.11 or newer with the venv module (Debian, Ubuntu: apt install python3-venv)." \
        "Install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

build_of() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null; }

# Succeeds if .venv exists, was not made elsewhere (an environment cannot be moved), and has the requested Python.
usable() {
    suitable .venv/bin/python || return 1
    [ ! -e .venv/place ] || [ "$(cat .venv/place)" = "$root" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(build_of "$PYTHON")" = "$(build_of .venv/bin/python)" ]
}

# --- torch

gpu_or_cpu() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi
}

# Tries one build of torch. Only that the indexes do not have it lets the caller try another.
try_torch() {
    logged pip install "$@" && return
    grep -q 'No matching distribution found for torch' "$log" && return 1
    show_failure "pip install $*"
}

install_torch() {
    # "==" alone would prefer +cpu to the ordinary build. macOS has no CUDA, and so no separate CPU build.
    if [ "$device" = gpu ] || [ "$(uname -s)" = Darwin ]; then
        say "installing torch $torch_version"
        quietly pip install "torch==$torch_version,!=$torch_version+cpu"
        return
    fi
    say "installing torch $torch_version, the CPU build, since there is no NVIDIA GPU here"
    try_torch "torch==$torch_version+cpu" && return
    say "the configured indexes do not have it; trying PyTorch's own CPU index"
    try_torch --timeout 30 --retries 2 --extra-index-url "$cpu_index" "torch==$torch_version+cpu" && return
    say "that cannot be had either; installing the ordinary build, which brings several GB of CUDA libraries"
    quietly pip install "torch==$torch_version"
}

# --- the work

device=$(gpu_or_cpu)
key="$(cat pyproject.toml tools/setup.sh | cksum) $device"
if usable; then
    [ "$(cat .venv/setup-done 2>/dev/null)" != "$key" ] || exit 0
    rm -f .venv/setup-done
else
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    mkdir .venv
    quietly "$python" -m venv .venv
    printf '%s' "$root" >.venv/place
fi

install_torch
say "installing fastgen and what its development needs"
.venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >.venv/torch.txt
quietly pip install --constraint .venv/torch.txt --editable '.[dev]'

printf '%s' "$key" >.venv/setup-done
say "done"
