#!/usr/bin/env bash
# Sets sparkpin up on this machine and runs its main job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
unset SPARKPIN_PROJECT # this checkout is meant

usage() {
  cat <<'TEXT'
usage: ./install.sh [--stack S] [--recipe R] [--stage G] [--no-smoke] [--serve] [--yes]
                    [--from oci://HOST/NAME [--ca FILE]] [--dry-run] [--help]

Looks at this machine, says what it will do, installs what is missing (as root on Debian or Ubuntu),
makes .venv from requirements.lock, and runs `invoke up`: fetch, build, checkpoint, smoke.
Run it again at any time: it does only what is missing.

  --stack S    stack of pins/stacks/ (default: the one for this machine)
  --recipe R   recipe of recipes/ (default: the stack's)
  --stage G    last stage to build (default: the recipe's)
  --no-smoke   build, but start no server
  --serve      serve the last stage as soon as its smoke test has passed
  --yes        fetch a large model without a question
  --from URL   take what a registry has of the images, signed by whom you trust (docs/registry.md)
  --ca FILE    the certificate authority of that registry
  --dry-run    say what would be done, and change nothing
  --help       this text

exit codes: 0 done, 2 wrong option, 3 this machine lacks something (the commands to run are printed),
10 a smoke test failed; src/sparkpin/core/errors.py has the others
TEXT
}

dry_run=''
arguments=()
while (($#)); do
  case $1 in
    --stack | --recipe | --stage | --from | --ca)
      (($# > 1)) || { echo "error: $1 requires a value; see ./install.sh --help" >&2; exit 2; }
      arguments+=("$1" "$2")
      shift
      ;;
    --stack=* | --recipe=* | --stage=* | --from=* | --ca=* | --no-smoke | --serve | --yes) arguments+=("$1") ;;
    --dry-run) dry_run=1 ;;
    --help | -h) usage; exit 0 ;;
    *) echo "error: unknown option $1; see ./install.sh --help" >&2; exit 2 ;;
  esac
  shift
done

# The look at the machine is written in Python; without any Python there is one thing to say.
find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
}

# With the indexes of the user's pip, which uv alone would not ask.
uv_pip_install() {
  PYTHONPATH=src .venv/bin/python -m sparkpin.fetch.pip_settings .venv/bin/uv pip install --quiet --no-cache \
    --python .venv/bin/python "$@"
}

python=$(find_python)
if [[ -z $python ]]; then
  commands='apt-get update && apt-get install -y --no-install-recommends python3 python3-venv'
  if [[ -n $dry_run ]]; then
    echo "would run: $commands (the rest of the plan needs Python 3.11 or newer)"
    exit 0
  elif ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    printf 'error: Python 3.11 or newer is missing; nothing was changed. As root, run:\n  %s\n' "$commands" >&2
    exit 3
  fi
  echo "Python 3.11 or newer is missing; running: $commands"
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3 python3-venv
  python=$(find_python)
  [[ -n $python ]] || { echo 'error: this distribution has no Python 3.11 or newer' >&2; exit 3; }
fi

stamp=.venv/.requirements.sha256
# The folder too: a .venv holds its own path, and in a moved or copied checkout it would run the old one's code.
wanted=$(pwd && sha256sum requirements.lock pyproject.toml)

make_venv() {
  echo 'making .venv from requirements.lock (each package is checked against its hash) ...'
  # A .venv that was cut off half-way has no stamp and is made again. A link would have its target emptied.
  [[ ! -L .venv ]] || { echo 'error: .venv is a link; remove it, then run ./install.sh again' >&2; exit 3; }
  "$python" -m venv --clear .venv
  # uv alone by pip, the others by uv: in 2 seconds instead of 20.
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
    -r <(awk '/^uv==/ { found = 1 } found { print } found && !/\\$/ { exit }' requirements.lock)
  uv_pip_install --require-hashes --only-binary :all: -r requirements.lock
  uv_pip_install --no-deps --no-build-isolation --editable .
  .venv/bin/python -m compileall -q tasks.py src # invoke keeps nothing of what it compiles before tasks.py is read
  echo "$wanted" >"$stamp"
}

look() { PYTHONPATH=src "$python" -m sparkpin.host.preflight "$@" ${arguments[@]+"${arguments[@]}"}; }

unmake_venv() {
  kill -- -"$making" 2>/dev/null || true
  wait "$making" 2>/dev/null || true
  rm -rf .venv || true # half of one, without a stamp, is made again
}

# The first time it is made while apt installs, where the options are right.
making=''
if [[ -z $dry_run && ! -e .venv && ! -L .venv ]] && "$python" -c 'import ensurepip' 2>/dev/null &&
  look --dry-run >/dev/null 2>&1; then
  set -m # a process group of its own, to be ended with all that it has started
  make_venv </dev/null &
  set +m
  making=$!
  trap 'unmake_venv; exit 130' INT TERM HUP
fi
code=0
look ${dry_run:+--dry-run} || code=$?
if [[ -n $making ]]; then
  if ((code)); then
    unmake_venv # the error says that nothing was changed
  else
    wait "$making"
  fi
  trap - INT TERM HUP
fi
((code == 0)) || exit "$code"

if [[ $(cat "$stamp" 2>/dev/null) != "$wanted" ]]; then
  if [[ -n $dry_run ]]; then
    echo "would make .venv from requirements.lock, then run: invoke up${arguments[*]:+ ${arguments[*]}}"
    exit 0
  fi
  make_venv
fi

exec .venv/bin/invoke up ${dry_run:+--dry-run} ${arguments[@]+"${arguments[@]}"}
