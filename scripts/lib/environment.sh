# shellcheck shell=bash
# The Python environment of this checkout: created once, then reused. Needs say.sh; the working folder must be the
# project's. PYTHON is the interpreter to create it with, VENV its folder (default .venv).

NEEDED_GIB=10

# Prints the interpreter to use: $PYTHON, or the first Python 3.11 or 3.12 in the PATH that can create environments.
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
      fail 1 "$without_venv cannot create virtual environments; install its venv package (on Debian and Ubuntu:" \
         "apt install $(basename "$without_venv")-venv) and run this again"
   fi
   local fix="install one (apt install python3.12-venv, brew install python@3.12, uv python install 3.12)"
   if [[ -n ${PYTHON:-} ]]; then
      fail 1 "PYTHON=$PYTHON is $("$PYTHON" --version 2>/dev/null || echo no program), but Python 3.11 or 3.12 is" \
         "needed; $fix, set PYTHON to another one, or unset it to search the PATH"
   fi
   fail 1 "needs Python 3.11 or 3.12, and the PATH has neither (python3 is" \
      "$(python3 --version 2>/dev/null || echo missing)); $fix, or set it: PYTHON=/path/to/python3.12 bash $0"
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

# Installs into the environment, quietly: with uv if it is in the PATH and succeeds, else with pip, whose last lines are
# shown if it fails. uv does not read the configuration of pip, such as another package index; UV_INDEX_URL sets that.
pip_install() {
   if command -v uv >/dev/null &&
      uv pip install --python "$VENV/bin/python" "$@" >>"$VENV/install.log" 2>&1; then
      return
   fi
   # Without --no-compile pip compiles all files one by one; `compile_packages` does it on all cores.
   if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" >>"$VENV/install.log" 2>&1; then
      tail -n 25 "$VENV/install.log" >&2
      fail 1 "the installation failed; see the lines above and the full log $VENV/install.log." \
         "Run the same command again to continue where it stopped"
   fi
}

# Compiles the packages and this checkout on all cores; otherwise every process of the first run, or of every run where
# PYTHONDONTWRITEBYTECODE is set, would compile what it imports. Files for other versions of Python do not compile.
compile_packages() {
   "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" slimrl tools >>"$VENV/install.log" 2>&1 || true
}

# Installs the pinned packages and this checkout into $VENV.
install_packages() {
   local lock=$1
   say "installing into $VENV, once; a few minutes (watch: tail -f $VENV/install.log)"
   # PyTorch with the dependencies of its build for this machine. The rest without dependencies: SGLang declares those
   # for CUDA.
   say "PyTorch"
   pip_install -c "$lock" "$(grep '^torch==' "$lock")"
   say "the engines and their dependencies ($(grep -c == "$lock") packages)"
   pip_install --no-deps -r "$lock"
   pip_install --no-deps --no-build-isolation -e .
   say "compiling"
   compile_packages
}

# True if $VENV is a working environment; a moved one is not, because its scripts contain the old path.
venv_works() { "$VENV/bin/python" -c '' 2>/dev/null && grep -qsF -- "$VENV" "$VENV/bin/activate"; }

# Prints the lock for the Python of $VENV.
lock_of_venv() {
   local version
   version=$("$VENV/bin/python" -c 'import sys; print(f"{sys.version_info[0]}{sys.version_info[1]}")')
   printf 'requirements/cpu-py%s.lock' "$version"
}

# Prints an interpreter that can parse flags: the environment's, or another suitable one if there is none yet.
python_at_hand() {
   local venv=${VENV:-.venv}
   if "$venv/bin/python" -c '' 2>/dev/null; then printf '%s\n' "$venv/bin/python"; else find_python; fi
}

# Installs this checkout into an environment that another checkout created, and prints that; false if its packages are
# not those of lock $1, or if it was not created by another checkout.
take_over() {
   local lock=$1 made_by='' owner=''
   if [[ -f $VENV/installed ]]; then
      made_by=$(<"$VENV/installed")
      read -r _ _ owner <<<"$made_by"
   fi
   [[ -n $owner && $owner != "$(pwd -P)" ]] || return 1
   say "$VENV was created by the checkout $owner and is switched to the slimrl of this one, $(pwd -P);" \
      "for a separate environment: VENV=/other/folder bash $0"
   [[ $made_by == "$(stamp "$lock" "$owner")" ]] || return 1
   rm -f -- "$VENV/installed"
   pip_install --no-deps --no-build-isolation -e .
}

# Prints the contents of $VENV/installed after a complete installation: the lock $1, a checksum of the requirements,
# and the checkout's folder $2.
stamp() { printf '%s %s %s' "$1" "$(cat setup.py "$1" | sha256sum | cut -d' ' -f1)" "$2"; }

venv_is_ready() {
   venv_works && [[ -f $VENV/installed && $(<"$VENV/installed") == "$(stamp "$(lock_of_venv)" "$(pwd -P)" 2>/dev/null)" ]]
}

# Creates $VENV, or recreates it if it does not work; never touches a folder with other contents.
make_venv() {
   local python
   if [[ ! -f $VENV/pyvenv.cfg && -n $(find "$VENV" -mindepth 1 ! -name install.lock -print -quit) ]]; then
      fail 1 "$VENV is not a Python environment and not empty; use a new folder: VENV=/other/disk/venv bash $0"
   fi
   python=$(find_python)
   need_disk "$VENV"
   say "creating $VENV with $python ($("$python" --version))"
   find "$VENV" -mindepth 1 -maxdepth 1 ! -name install.lock -exec rm -rf -- {} +
   "$python" -m venv "$VENV"
}

# Creates the environment if it is missing or older than its lock, and puts it first in the PATH.
prepare_environment() {
   local lock folder=${VENV:-.venv}
   if ! mkdir -p -- "$folder" 2>/dev/null; then
      fail 1 "cannot create the folder $folder; put the environment elsewhere: VENV=/other/disk/venv bash $0"
   fi
   VENV=$(cd -- "$folder" && pwd -P)
   if [[ $VENV == *[[:space:]]* ]]; then
      fail 1 "Ray cannot run from $VENV, because its path contains a space; put the environment elsewhere:" \
         "VENV=/other/disk/venv bash $0"
   fi
   if ! venv_is_ready; then
      [[ -w $VENV ]] || fail 1 "cannot write to $VENV; put the environment elsewhere: VENV=/other/disk/venv bash $0"
      # If two scripts start together, the second one waits for the first one's installation.
      exec 9>"$VENV/install.lock"
      if command -v flock >/dev/null; then flock 9; fi
      venv_works || make_venv
      lock=$(lock_of_venv)
      [[ -f $lock ]] ||
         fail 1 "$VENV has $("$VENV/bin/python" --version), but 3.11 or 3.12 is needed; remove it or set VENV"
      if ! venv_is_ready; then
         if ! take_over "$lock"; then
            rm -f -- "$VENV/installed"
            install_packages "$lock"
            say "installed"
         fi
         stamp "$lock" "$(pwd -P)" >"$VENV/installed"
      fi
      exec 9>&-
   fi
   export PATH=$VENV/bin:$PATH VIRTUAL_ENV=$VENV
   unset PYTHONHOME PYTHONPATH
}
