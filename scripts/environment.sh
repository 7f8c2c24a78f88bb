# Sourced by demo and test: virtual environments in the checkout, made once for each state of pyproject.toml.

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
TORCH=torch==2.13.0

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [[ -n $candidate ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed: install it, or name it by PYTHON=..." >&2
    return 1
}

# make_environment FOLDER TORCHTITAN_VERSION EXTRA...
# An environment that is good already, with these extras or more, is left as it is.
make_environment() {
    local folder=$1 torchtitan=$2 python stamp extra kept=()
    shift 2
    stamp=$(sha256sum pyproject.toml | cut -c1-16)-$torchtitan-$TORCH
    if [[ -x $folder/bin/python && -f $folder/.made && $(head -n 1 "$folder/.made") == "$stamp" ]]; then
        local missing=()
        for extra in "$@"; do
            grep -qx "$extra" "$folder/.made" || missing+=("$extra")
        done
        [[ ${#missing[@]} -eq 0 ]] && return
        mapfile -t kept < <(tail -n +2 "$folder/.made")
    else
        python=$(find_python)
        rm -rf "$folder"
        "$python" -m venv "$folder"
        echo "installing torch into $folder"
        "$folder/bin/pip" install -qq "$TORCH" # first: nothing that follows may choose another
    fi
    echo "installing torchft-plus[$(IFS=,; echo "$*")] and torchtitan $torchtitan into $folder"
    "$folder/bin/pip" install -qq -e ".[$(IFS=,; echo "$*")]" "torchtitan==$torchtitan" "$TORCH"
    printf '%s\n' "$stamp" "${kept[@]}" "$@" >"$folder/.made"
}
