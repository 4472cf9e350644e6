# Sourced by ./scripts/test and ./scripts/demo: goes to the project's root and makes .venv what the project needs.
# AUTOPAR_TORCH=2.11.0 does so for that version of torch in place of the pinned one, in .venv-torch-2.11.0.
# Leaves `python` set to the environment's interpreter. An active virtual environment is neither used nor needed.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [ -n "${VIRTUAL_ENV:-}" ]; then
    PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$VIRTUAL_ENV/bin" | paste -sd: -)
fi
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
unset PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, each of which would compile the same files

venv=.venv${AUTOPAR_TORCH:+-torch-$AUTOPAR_TORCH}
python=$venv/bin/python
new_enough='import sys; sys.exit(sys.version_info < (3, 10))'

# Prints the first Python on PATH that is new enough.
find_python() {
    local name
    for name in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$name" >/dev/null 2>&1 && "$name" -c "$new_enough" >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
    {
        echo "error: autopar needs Python 3.10 or newer, and none was found on PATH."
        if command -v python3 >/dev/null 2>&1; then echo "       python3 here is $(python3 --version 2>&1)."; fi
        echo "       Install one, or name it: PYTHON=/path/to/python3.12 $0"
    } >&2
    return 1
}

# What $venv was made from: it is made again, or brought up to date, when one of these changes.
fingerprint() {
    { pwd; cat requirements-dev.txt pyproject.toml setup.py; "$python" --version; } 2>&1 | cksum
}

set_up() {
    local base torch
    if ! { [ -x $python ] && $python -c "$new_enough" >/dev/null 2>&1; }; then
        base=$(find_python) || exit 1
        echo "Setting up $venv with $("$base" --version) (a few minutes the first time) ..."
        rm -rf "$venv"
        if ! "$base" -m venv "$venv"; then
            echo "error: '$base -m venv' failed: install the venv module of this Python (Debian: apt install python3-venv)" >&2
            exit 1
        fi
    fi
    if [ "$(fingerprint)" != "$(cat "$venv/.autopar-setup" 2>/dev/null)" ]; then
        torch=${AUTOPAR_TORCH:+torch==$AUTOPAR_TORCH}
        torch=${torch:-$(grep '^torch==' requirements-dev.txt)}
        echo "Installing $torch and what else requirements-dev.txt names ..."
        # torch first: the largest, and what the others are resolved against
        $python -m pip install --quiet --disable-pip-version-check "$torch" &&
            $python -m pip install --quiet --disable-pip-version-check "$torch" -r <(grep -v '^torch==' requirements-dev.txt) &&
            $python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . || {
            echo "error: installing into $venv failed (see above); run the same command again once that is mended" >&2
            exit 1
        }
        fingerprint >"$venv/.autopar-setup"
    fi
}

set_up
python=$PWD/$python
