#!/bin/sh
# Runs `make demo test` in environments other than .venv. The last lines say what came of each.
#
#   tools/environments.sh pythons    with every Python that pyproject.toml names, and the locked packages
#   tools/environments.sh newest     with the newest of these Pythons, and the newest release of every package
#
# Fails if a Python failed. A failure with the newest packages is only a warning, because the locked ones still work.
set -eu

cd "$(dirname "$0")/.."
. tools/pythons.sh
said=
failed=0

say() { printf '%s\n' "environments: $*"; }
note() { said="$said$*
"; }

# Makes the targets with the Python $2 in .venvs/$1. What they print goes to a file, which is shown only if they fail.
run_in() {
    mkdir -p .venvs
    log=.venvs/$1.log
    say "make demo test with $2 in .venvs/$1, printed to $log"
    "${MAKE:-make}" --no-print-directory VENV=".venvs/$1" PYTHON="$2" demo test >"$log" 2>&1 && return
    tail -n 30 "$log"
    return 1
}

run_pythons() {
    for version in $pythons; do
        if ! python=$(python_of "$version"); then
            note "Python $version: not run, there is no python$version here"
        elif run_in "$version" "$python"; then
            note "Python $version: passed"
        else
            note "Python $version: FAILED, see .venvs/$version.log"
            failed=1
        fi
    done
}

run_newest() {
    newest=
    for version in $pythons; do
        if found=$(python_of "$version"); then newest=$version python=$found; fi
    done
    if [ -z "$newest" ]; then
        note "newest packages: not run, there is no Python of a tested version here"
        return
    fi
    rm -rf .venvs/newest
    # The test of the lock asks whether everything installed is pinned. Nothing here is.
    unpinned=tests/project/test_lock.py::test_everything_that_set_up_installs_is_pinned
    if (export NEWEST=yes PYTEST_ADDOPTS="--deselect $unpinned"; run_in newest "$python"); then
        note "newest packages, Python $newest: passed"
    else
        note "newest packages, Python $newest: WARNING, they fail here, and soon where people install them." \
            "See .venvs/newest.log"
    fi
    if newer=$(.venvs/newest/bin/python -m tools.lock --newer 2>/dev/null); then
        note "other than locked: ${newer:-nothing}"
    fi
}

for name in "$@"; do
    case $name in
        pythons) run_pythons ;;
        newest) run_newest ;;
        *) say "$name: expected pythons or newest" >&2; exit 2 ;;
    esac
done
printf '%s' "$said" | while read -r line; do say "$line"; done
exit "$failed"
