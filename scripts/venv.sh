# Sourced by quickstart, test and nightly: makes .venv in the repository root and installs diloco into it.
#
#   install_diloco ''        what a run needs
#   install_diloco '[test]'  and what the tests need, with every library that diloco works with
#   install_diloco '[test,conformance]'  and what all of scripts/works_with needs
#
# PYTHON names the interpreter for a new .venv (default: the first suitable one found). TORCH_INDEX_URL names an index for
# torch alone, such as one with CPU builds. Nothing is done when .venv holds exactly what pyproject.toml and
# constraints.txt ask for. VENV names another folder for the environment.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}

say() { printf 'diloco: %s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 2
}

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" ${PYTHON:-python3.13 python3.12 python3.11 python}; do
    if is_suitable "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 | tail -n 1 || true); install Python 3.11 or later," \
    "or name one: PYTHON=/path/to/python3"
}

make_venv() {
  if [[ -e $VENV ]]; then
    is_suitable "$VENV/bin/python" || fail "$VENV has no working Python 3.11 or later; remove it and run this again"
    return
  fi
  local python
  python=$(find_python)
  say "making ${VENV##*/} with $("$python" --version)"
  # Debian has pip and venv apart from each other; then the pip that is there installs into .venv.
  if ! "$python" -m venv "$VENV" >/dev/null 2>&1 && ! "$python" -m venv --without-pip --clear "$VENV"; then
    rm -rf "$VENV"
    fail "$python cannot make a virtual environment; install its venv module (Debian: apt install python3-venv)"
  fi
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! "$python" -m pip --version >/dev/null 2>&1; then
      rm -rf "$VENV"
      fail "$python has neither ensurepip nor pip; install them (Debian: apt install python3-venv python3-pip)"
    fi
    command -v "$python" >"$VENV/python-with-pip"
  fi
}

run_pip() {
  if [[ -e $VENV/python-with-pip ]]; then
    "$(<"$VENV/python-with-pip")" -m pip --python "$VENV/bin/python" "$@"
  else
    "$VENV/bin/python" -m pip "$@"
  fi
}

# What is installed depends on these; the place too, because the installation refers to it.
wanted() {
  printf '%s\n' "$ROOT" | cat - "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" |
    "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

install_diloco() {
  local extras=$1 stamp stamps
  make_venv
  stamp=$(wanted)
  stamps=("$VENV/installed$extras")
  [[ -n $extras ]] || stamps+=("$VENV/installed[test]")
  [[ $extras != '[test]' ]] || stamps+=("$VENV/installed[test,conformance]")
  if grep --quiet --no-messages "$stamp" "${stamps[@]}"; then
    return
  fi
  say "installing diloco$extras and its libraries into ${VENV##*/} (some minutes, once)"
  rm -f "$VENV"/installed*
  if [[ -n ${TORCH_INDEX_URL:-} ]]; then
    run_pip install --quiet --no-input --no-deps --index-url "$TORCH_INDEX_URL" \
      "$(grep '^torch==' "$ROOT/scripts/constraints.txt")" || fail "pip found no torch at TORCH_INDEX_URL"
  fi
  if ! run_pip install --quiet --disable-pip-version-check --no-input --log "$VENV/install.log" \
    --constraint "$ROOT/scripts/constraints.txt" --editable "$ROOT$extras"; then
    fail "pip could not install diloco$extras; its lines above say why, $VENV/install.log says more;" \
      "when the network failed, run this again"
  fi
  printf '%s\n' "$stamp" >"$VENV/installed$extras"
}

# The rest of scripts/test and scripts/nightly. Their first comment is their --help, which needs no environment.
play_stages() {
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit
  fi
  cd "$ROOT"
  install_diloco "${EXTRAS:-[test]}"
  export PATH=$VENV/bin:$PATH INSTALL_S=$SECONDS
  exec "$VENV/bin/python" scripts/stages "$(basename "$0")" "$@"
}
