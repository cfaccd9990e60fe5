# Sourced by the other scripts: makes .venv fit for use and puts it first on the PATH. Not a program by itself.
#
#     ensure_venv [EXTRAS]     EXTRAS: comma-separated extras of pyproject.toml, such as dev
#
# Installs only when it has to: what is installed is noted in .venv/.grpo-installed, with the place of the checkout and
# the checksum of pyproject.toml. A .venv whose Python or pip does not answer is made anew. Which Python: $PYTHON, else the
# first of the usual names that is 3.11 or newer. pip's own settings (PIP_INDEX_URL, ...) hold.

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed and was not found; install it, or name it: PYTHON=/path/to/python3 $0" >&2
    return 1
}

make_venv() {
    local python
    python="$(find_python)" || return 1
    echo "Making .venv with $("$python" --version)" >&2
    if ! "$python" -m venv --clear .venv; then
        echo "error: $python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
        return 1
    fi
}

ensure_venv() {
    local extras="${1:-}" installed=.venv/.grpo-installed wanted have=""
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        make_venv || return 1
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    wanted="$PWD $(cksum <pyproject.toml)"
    if [[ -f $installed && -x .venv/bin/grpo ]]; then
        have="$(<"$installed")"
    fi
    if [[ $have == "$wanted [$extras]" || ($extras == "" && $have == "$wanted ["*) ]]; then
        return
    fi
    rm -f "$installed"
    echo "Installing grpo-cli${extras:+ with $extras} into .venv; on Linux PyTorch brings gigabytes for GPUs" >&2
    .venv/bin/python -m pip install --disable-pip-version-check --editable ".${extras:+[$extras]}" || return 1
    # The extra gym builds pycosat, which has no wheels: a machine with a C compiler gets it too.
    if [[ ",$extras," == *,dev,* ]] \
        && ! .venv/bin/python -m pip install --disable-pip-version-check --quiet --editable ".[$extras,gym]"; then
        echo "note: the extra gym was not installed, for want of a C compiler perhaps; its tests are skipped" >&2
    fi
    echo "$wanted [$extras]" >"$installed"
}
