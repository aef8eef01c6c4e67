#!/bin/sh
# Makes a virtual environment of the project: torch first, then fastgen itself with what its development needs, each in
# the version that tools/constraints.txt names. Quick when nothing changed since the last time. The Makefile calls it;
# it can be run from anywhere.
#
#   PYTHON=python3.12 tools/setup.sh    use this Python instead of the first one that fits
#   VENV=.venvs/3.12 tools/setup.sh     make the environment there instead of in .venv
#   NEWEST=yes tools/setup.sh           take the newest release of every package instead of the locked one
set -eu

cpu_index=https://download.pytorch.org/whl/cpu

cd "$(dirname "$0")/.."
root=$(pwd -P)
venv=${VENV:-.venv}
log=$venv/setup.log
. tools/pythons.sh

say() { printf '%s\n' "setup: $*"; }
fail() { say "$*" >&2; exit 1; }

logged() { "$@" >"$log" 2>&1; }
show_failure() {
    grep -v 'is ignored: it is' "$log" | tail -n 25 >&2
    fail "this command failed, all it said is in $log: $*"
}
quietly() { logged "$@" || show_failure "$*"; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Python compiles a module when it is first imported. Compiling all of them here would take as long as installing them.
install() { pip install --no-compile "$@"; }

# --- Python: one that is tested, or any newer one that is asked for

oldest=${pythons%% *}

suitable() {
    version=$(version_of "$1") || return 1
    [ "${version#3.}" -ge "${oldest#3.}" ]
}

tested() {
    version=$(version_of "$1") || return 1
    case " $pythons " in *" $version "*) ;; *) return 1 ;; esac
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version $oldest or newer with the venv module"
        tested "$PYTHON" || say "$("$PYTHON" --version) is newer than what is tested: $pythons" >&2
        printf '%s' "$PYTHON"
        return
    fi
    if tested python3; then
        printf python3
        return
    fi
    newest_first=
    for version in $pythons; do newest_first="$version $newest_first"; done
    for version in $newest_first; do
        if python_of "$version"; then return; fi
    done
    if tested python; then
        printf python
        return
    fi
    found=
    for candidate in python3 python; do
        if version=$("$candidate" --version 2>/dev/null); then found="$found, $candidate is $version"; fi
    done
    fail "found no Python of a tested version ($pythons) with the venv module (Debian, Ubuntu: apt install" \
        "python3-venv)${found:+; here$found}. Install one, or name it: make PYTHON=/path/to/python3.12 ..."
}

build_of() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null; }

# Succeeds if the environment exists, was not made elsewhere (it cannot be moved), and has the requested Python.
usable() {
    suitable "$venv/bin/python" || return 1
    [ ! -e "$venv/place" ] || [ "$(cat "$venv/place")" = "$root" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(build_of "$PYTHON")" = "$(build_of "$venv/bin/python")" ]
}

# --- torch

gpu_or_cpu() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi
}

# Tries one build of torch. Only that the indexes do not have it lets the caller try another.
try_torch() {
    logged install "$@" && return
    grep -q 'No matching distribution found for torch' "$log" && return 1
    show_failure "pip install $*"
}

# The ordinary build names a version of Triton itself, which need not be the locked one.
leave_triton_to_torch() {
    grep -v -e '^torch==' -e '^triton==' tools/constraints.txt >"$locked"
}

install_torch() {
    # "==" alone would prefer +cpu to the ordinary build. macOS has no CUDA, and so no separate CPU build.
    if [ "$device" = gpu ] || [ "$(uname -s)" = Darwin ]; then
        say "installing torch $torch_version"
        [ "$device" = cpu ] || leave_triton_to_torch
        quietly install "torch==$torch_version,!=$torch_version+cpu"
        return
    fi
    say "installing torch $torch_version, the CPU build, since there is no NVIDIA GPU here"
    try_torch "torch==$torch_version+cpu" && return
    say "the configured indexes do not have it; trying PyTorch's own CPU index"
    try_torch --timeout 30 --retries 2 --extra-index-url "$cpu_index" "torch==$torch_version+cpu" && return
    say "that cannot be had either; installing the ordinary build, which brings several GB of CUDA libraries"
    leave_triton_to_torch
    quietly install "torch==$torch_version"
}

# --- the work

device=$(gpu_or_cpu)
key="$(cat pyproject.toml tools/setup.sh tools/pythons.sh tools/constraints.txt | cksum) $device${NEWEST:+ newest}"
if usable; then
    [ "$(cat "$venv/setup-done" 2>/dev/null)" != "$key" ] || exit 0
    rm -f "$venv/setup-done"
else
    python=$(find_python)
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    mkdir -p "$venv"
    quietly "$python" -m venv "$venv"
    printf '%s' "$root" >"$venv/place"
fi

locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
if [ -n "${NEWEST:-}" ]; then
    logged pip index versions torch || show_failure "pip index versions torch"
    torch_version=$(sed -n 's/^torch (\([0-9.]*\).*/\1/p' "$log")
else
    torch_version=$(sed -n 's/^torch==//p' tools/constraints.txt)
    # Torch's own line would hide from pip's message that the indexes do not have the build that is asked for.
    grep -v '^torch==' tools/constraints.txt >"$locked"
    # Named by the environment and not by an option, so that pip keeps to the file where it builds fastgen, too. The
    # older pip reads the first for that, the newer the second. Both split at spaces, and a temporary name has none.
    export PIP_CONSTRAINT="$locked" PIP_BUILD_CONSTRAINT="$locked"
fi
install_torch
say "installing fastgen and what its development needs${NEWEST:+, everything at its newest}"
quietly install --editable '.[dev]'

printf '%s' "$key" >"$venv/setup-done"
say "done"
