# Sourced by scripts that look for a Python; the working directory is the repository's root.

# The versions of Python that are tested, the oldest first.
pythons=$(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml | tr '\n' ' ')
pythons=${pythons% }

# Prints the version of a Python, such as 3.12, if it can make virtual environments. It is run to find out, since a name
# on the PATH may be a shim that leads nowhere.
version_of() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Prints a command for the Python of version $1: that on the PATH, or else one that pyenv has.
python_of() {
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if [ "$(version_of "$candidate")" = "$1" ]; then
            printf '%s' "$candidate"
            return
        fi
    done
    return 1
}
