# Sets PYTHON to an interpreter that can run uma, or says how to get one and exits. Sourced.

_usable() {
  command -v "$1" >/dev/null 2>&1 || return 1
  "$1" - <<'PY' >/dev/null 2>&1
import platform, sys
native = platform.system() != "Darwin" or platform.machine() == "arm64"  # Rosetta cannot run MLX
raise SystemExit(0 if sys.version_info >= (3, 11) and native else 1)
PY
}

PYTHON=""
for candidate in ${UMA_PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python \
    /opt/homebrew/bin/python3 /usr/local/bin/python3; do
  if _usable "$candidate"; then PYTHON="$candidate"; break; fi
done

if [ -z "$PYTHON" ]; then
  echo "uma needs Python 3.11 or newer (on a Mac a native arm64 one, not one under Rosetta)." >&2
  case "$(uname -s)" in
    Darwin) echo "Get it with:  brew install python@3.13" >&2 ;;
    *) echo "Get it with:  sudo apt-get install python3 python3-venv   (or your system's package manager)" >&2 ;;
  esac
  echo "Or name one:  UMA_PYTHON=/path/to/python3 $0" >&2
  exit 1
fi

# The extra that brings MLX: on a Mac it is a plain dependency.
case "$(uname -s)" in Linux) EXTRA="run" ;; *) EXTRA="" ;; esac

# make_environment FOLDER EXTRAS: a virtual environment with this project installed, made once and
# made again when pyproject.toml, the interpreter or the extras change.
make_environment() {
  local folder="$1" extras="$2" stamp
  stamp="$("$PYTHON" -c 'import sys; print(sys.version)' | tr -d '\n') $extras $(cksum < pyproject.toml) $PWD"
  if [ "$(cat "$folder/.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "Setting up $folder ..." >&2
    rm -rf "$folder"
    "$PYTHON" -m venv "$folder" || {
      echo "No virtual environment could be made. On Debian: sudo apt-get install python3-venv" >&2
      exit 1
    }
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
    printf '%s' "$stamp" > "$folder/.stamp"
  fi
}
