# Shell functions shared by the scripts beside this folder.  Source it; it changes to the repository root.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

say() { echo "[tp_engine] $*" >&2; }

# Sets PYTHON to an interpreter that has the dependencies of the project and of the named extras: the active environment
# if it has them, else .venv, which is made and filled if needed.  Compiles the CPU kernels unless there are GPUs.
set_up() { # extra ...
    local active
    active="$(active_python)"
    if [[ -n "$active" ]] && "$active" scripts/lib/usable.py "$@" >/dev/null 2>&1; then
        PYTHON="$active"
    else
        [[ -z "${VIRTUAL_ENV:-}" ]] || say "the active environment $VIRTUAL_ENV lacks packages; using .venv instead"
        mkdir -p .venv
        exec 9>.venv/.lock
        ! command -v flock >/dev/null || flock 9
        install_into .venv "$@"
        exec 9>&-
        PYTHON="$ROOT/.venv/bin/python"
    fi
    (($(num_gpus) > 0)) || "$PYTHON" -m tp_engine.cpu.compiling
}

# The interpreter that "python" means in this shell, if any.
active_python() {
    if [[ -n "${VIRTUAL_ENV:-}" && -x "$VIRTUAL_ENV/bin/python" ]]; then
        echo "$VIRTUAL_ENV/bin/python"
    else
        command -v python || command -v python3 || true
    fi
}

# Makes a virtual environment with the pinned versions; does nothing if it already has them.
install_into() { # folder extra ...
    local folder="$1" extras stamp pins
    shift
    extras="$(IFS=,; echo "$*")"
    stamp="$folder/.installed-${extras//,/-}"
    pins="$(cat pyproject.toml constraints.txt | cksum)"
    if [[ -x "$folder/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$pins" ]]; then
        return
    fi
    say "setting up $folder (once; a few minutes)"
    "$folder/bin/python" -m pip --version >/dev/null 2>&1 || "$(base_python)" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".${extras:+[$extras]}" </dev/null
    echo "$pins" >"$stamp"
}

# Makes a separate virtual environment for packages that conflict with the server's, or are not needed there; sets
# OWN_PYTHON.
set_up_own() { # folder package ...
    local folder="$ROOT/$1"
    shift
    OWN_PYTHON="$folder/bin/python"
    if [[ "$(cat "$folder/.installed" 2>/dev/null)" != "$*" ]]; then
        say "setting up $folder (once; a few minutes)"
        "$(base_python)" -m venv "$folder"
        "$OWN_PYTHON" -m pip install --quiet --disable-pip-version-check "$@"
        echo "$*" >"$folder/.installed"
    fi
}

# Installs programs of npm into a folder, below which node_modules/.bin then has them.
set_up_npm() { # folder package ...
    local folder="$ROOT/$1"
    shift
    if [[ "$(cat "$folder/.installed" 2>/dev/null)" != "$*" ]]; then
        say "setting up $folder (once; a few minutes)"
        mkdir -p "$folder"
        npm install --silent --no-audit --no-fund --prefix "$folder" "$@" </dev/null
        echo "$*" >"$folder/.installed"
    fi
}

# Lets Python keep compiled source, whatever the shell's settings: tests start hundreds of short processes, and each
# would compile for half a second.
compile_once() { unset PYTHONDONTWRITEBYTECODE; }

# A Python of at least 3.11, to make virtual environments.
base_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13 python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "Python 3.11 or newer with its venv module (Debian: python3-venv) is needed; install it and run this again"
    return 1
}

# Takes a leading "--nproc-per-node N": sets NUM_RANKS (the default without it) and ARGUMENTS (the others).
take_num_ranks() { # argument ...
    case "${1:-}" in
        --nproc-per-node=*)
            NUM_RANKS="${1#*=}"
            shift
            ;;
        --nproc-per-node)
            NUM_RANKS="${2:?--nproc-per-node needs a number}"
            shift 2
            ;;
        *) NUM_RANKS="$(default_num_ranks)" ;;
    esac
    if [[ ! "$NUM_RANKS" =~ ^[1-9][0-9]*$ ]]; then
        say "the number of ranks is '$NUM_RANKS'; it must be a whole number of at least 1"
        exit 2
    fi
    ARGUMENTS=("$@")
}

# How many GPUs this process may use; 0 without any.
num_gpus() {
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

# The default number of ranks: TP_SIZE, else one per GPU (rounded down to a power of two, as heads are), else 2.
default_num_ranks() {
    local gpus ranks=1
    if [[ -n "${TP_SIZE:-}" ]]; then
        echo "$TP_SIZE"
        return
    fi
    gpus="$(num_gpus)"
    if ((gpus == 0)); then
        echo 2
        return
    fi
    while ((ranks * 2 <= gpus)); do ranks=$((ranks * 2)); done
    echo "$ranks"
}

# Replaces this shell by torchrun with a rendezvous of its own, so that two jobs on one host stay apart.
exec_torchrun() { # num_ranks argument ...
    local num_ranks="$1" threads
    shift
    threads=$(($(getconf _NPROCESSORS_ONLN) / num_ranks))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
    exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$num_ranks" "$@"
}
