# shellcheck shell=bash
# The Python environment of this checkout: found or made once, then re-used. Needs say.sh; the caller stands in the
# project's folder. PYTHON names the interpreter to make it with, VENV the folder to make it in (default .venv).

NEEDED_GIB=10

# Prints the interpreter to use: $PYTHON, or the first Python 3.11 or 3.12 in the PATH that can make environments.
find_python() {
   local candidate without_venv='' candidates=(python3.11 python3.12 python3 python)
   if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
   for candidate in "${candidates[@]}"; do
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || continue
      if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
         command -v "$candidate"
         return
      fi
      without_venv=$candidate
   done
   if [[ -n $without_venv ]]; then
      fail 1 "$without_venv cannot make virtual environments; install its venv package (on Debian and Ubuntu:" \
         "apt install $(basename "$without_venv")-venv) and run this again"
   fi
   fail 1 "needs Python 3.11 or 3.12 and found neither in the PATH (${PYTHON:+PYTHON=$PYTHON is not one; }python3 is" \
      "$(python3 --version 2>&1 || echo missing)); install one (apt install python3.12-venv, brew install" \
      "python@3.12, uv python install 3.12) or name it: PYTHON=/path/to/python3.12 bash $0"
}

# fail, unless the file system of folder $1 has NEEDED_GIB free.
need_disk() {
   local free_kib
   free_kib=$(df -Pk -- "$1" | awk 'NR == 2 { print $4 }')
   if ((free_kib < NEEDED_GIB * 1024 * 1024)); then
      fail 1 "$1 has $((free_kib / 1024 / 1024)) GiB free, but the first installation needs $NEEDED_GIB GiB;" \
         "make room, or put the environment elsewhere: VENV=/other/disk/venv bash $0"
   fi
}

# pip into the environment, quietly; on failure its last lines are shown.
pip_install() {
   if ! "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >>"$VENV/install.log" 2>&1; then
      tail -n 25 "$VENV/install.log" >&2
      fail 1 "the installation stopped; the lines above say why, all of them stand in $VENV/install.log." \
         "Run the same command again to go on where it stopped"
   fi
}

# The pinned packages and this checkout, into $VENV.
install_packages() {
   local lock=$1
   say "installing into $VENV, once; a few minutes (watch: tail -f $VENV/install.log)"
   # PyTorch brings what its build for this machine needs. The rest goes without dependencies: those that SGLang
   # declares are the CUDA ones.
   say "PyTorch"
   pip_install -c "$lock" "$(grep '^torch==' "$lock")"
   say "the engines and their needs ($(grep -c == "$lock") packages)"
   pip_install --no-deps -r "$lock"
   pip_install --no-deps --no-build-isolation -e .
}

# Makes the environment where it is missing or older than its lock, and puts it first in the PATH.
prepare_environment() {
   VENV=${VENV:-.venv}
   if [[ ! -x $VENV/bin/python ]] || ! "$VENV/bin/python" -c '' 2>/dev/null; then
      local python
      python=$(find_python)
      mkdir -p -- "$VENV"
      need_disk "$VENV"
      say "making $VENV with $python ($("$python" --version))"
      "$python" -m venv --clear "$VENV"
   fi
   VENV=$(cd -- "$VENV" && pwd)
   # Two scripts started together: the second one waits for the first one's installation.
   exec 9>"$VENV/install.lock"
   if command -v flock >/dev/null; then flock 9; fi

   local version lock stamp
   version=$("$VENV/bin/python" -c 'import sys; print(f"{sys.version_info[0]}{sys.version_info[1]}")')
   lock=requirements/cpu-py$version.lock
   [[ -f $lock ]] || fail 1 "$VENV has Python ${version/3/3.}, but 3.11 or 3.12 is needed; remove it or set VENV"
   stamp="$lock $(cat setup.py "$lock" | sha256sum | cut -d' ' -f1) $PWD"
   if [[ ! -f $VENV/installed || $(<"$VENV/installed") != "$stamp" ]]; then
      rm -f -- "$VENV/installed"
      install_packages "$lock"
      printf '%s\n' "$stamp" >"$VENV/installed"
      say "installed"
   fi
   exec 9>&-
   export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV
   unset PYTHONHOME PYTHONPATH
}
