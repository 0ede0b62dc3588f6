#!/usr/bin/env bash
# usage: ./install.sh [OPTIONS OF invoke up]
#
# Makes .venv from requirements.lock, then runs `invoke up`, which installs what else is missing (as root on Debian or
# Ubuntu), builds, and tests. Run it again at any time: it does only what is missing. With SmolLM2 a first run took 457 s
# on two cores, most of it for the download and the smoke test.
#
#   ./install.sh --dry-run               # what would be done; changes nothing
#   ./install.sh --no-smoke              # build, but start no server
#   ./install.sh --recipe R --serve      # serve it, once it has passed
#
# exit codes: 0 done, 2 wrong option, 3 this machine lacks something (the commands to run are printed),
# 10 a smoke test failed; docs/exit-codes.md has the others
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
unset SPARKPIN_PROJECT # this checkout is meant

find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
}

options=' --stage --recipe --model --stack --no-smoke --serve --yes --from --ca --dry-run --help --quiet --verbose -h -q -v '
stamp=.venv/.requirements.sha256
# The folder too: a .venv holds its own path, and in a moved or copied checkout it would run the old one's code.
wanted=$(pwd && sha256sum requirements.lock pyproject.toml)

if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
  for word; do # `invoke up` would refuse it, too, and only after the installation
    if [[ $word == -* && $options != *" ${word%%=*} "* ]]; then
      echo "error: got ${word%%=*}, expected an option of invoke up; nothing was changed" >&2
      echo "  next: one of$options" >&2
      exit 2
    fi
  done
  case " $* " in
    *" --help "* | *" -h "*)
      sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *" --dry-run "*)
      echo "would make .venv from requirements.lock, then run: invoke up $*"
      exit 0
      ;;
  esac
  # A link would have its target emptied.
  [[ ! -L .venv ]] || { echo 'error: .venv is a link; remove it, then run ./install.sh again' >&2; exit 3; }
  python=$(find_python)
  if [[ -z $python ]]; then
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
      echo 'error: Python 3.11 or newer with venv is missing; nothing was changed. As root, run:' >&2
      echo '  apt-get update && apt-get install -y --no-install-recommends python3 python3-venv' >&2
      exit 3
    fi
    echo 'installing python3 and python3-venv'
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3 python3-venv
    python=$(find_python)
    [[ -n $python ]] || { echo 'error: this distribution has no Python 3.11 or newer' >&2; exit 3; }
  fi
  echo 'this takes minutes the first time: with SmolLM2 on two cores 8, most of them for the download and the smoke test'
  echo 'making .venv from requirements.lock (each package is checked against its hash) ...'
  # A .venv that was cut off half-way has no stamp and is made again.
  "$python" -m venv --clear .venv
  # uv alone by pip, the others by uv with the indexes of the user's pip: in 2 seconds instead of 20.
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
    -r <(awk '/^uv==/ { found = 1 } found { print } found && !/\\$/ { exit }' requirements.lock)
  # With bytecode each command starts in half the time, also where its user may not write it.
  uv=(env PYTHONPATH=src .venv/bin/python -m sparkpin.fetch.pip_settings .venv/bin/uv pip install --quiet --no-cache
    --compile-bytecode)
  "${uv[@]}" --python .venv/bin/python --require-hashes --only-binary :all: -r requirements.lock
  "${uv[@]}" --python .venv/bin/python --no-deps --no-build-isolation --editable .
  .venv/bin/python -m compileall -q tasks.py src
  echo "$wanted" >"$stamp"
fi

exec .venv/bin/invoke up "$@"
