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
   local fix="install one (apt install python3.12-venv, brew install python@3.12, uv python install 3.12)"
   if [[ -n ${PYTHON:-} ]]; then
      fail 1 "PYTHON=$PYTHON is $("$PYTHON" --version 2>/dev/null || echo no program), but Python 3.11 or 3.12 is" \
         "needed; $fix, name another one, or unset PYTHON to have one looked for"
   fi
   fail 1 "needs Python 3.11 or 3.12, and the PATH has neither (python3 is" \
      "$(python3 --version 2>/dev/null || echo missing)); $fix, or name it: PYTHON=/path/to/python3.12 bash $0"
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
         "Run the same command again to continue where it stopped"
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

# True where $VENV is an environment that works in this place; a moved one does not, its scripts name the old place.
venv_works() { "$VENV/bin/python" -c '' 2>/dev/null && grep -qsF -- "$VENV" "$VENV/bin/activate"; }

# Prints the lock for the Python of $VENV.
lock_of_venv() {
   local version
   version=$("$VENV/bin/python" -c 'import sys; print(f"{sys.version_info[0]}{sys.version_info[1]}")')
   printf 'requirements/cpu-py%s.lock' "$version"
}

# Prints an interpreter that can read flags: that of the environment, or where there is none yet another suitable one.
python_at_hand() {
   local venv=${VENV:-.venv}
   if "$venv/bin/python" -c '' 2>/dev/null; then printf '%s\n' "$venv/bin/python"; else find_python; fi
}

# Takes this checkout into an environment that a script of another one made, and says so; false where its packages are
# not those of lock $1, or where it is nobody else's.
take_over() {
   local lock=$1 made_by='' owner=''
   if [[ -f $VENV/installed ]]; then
      made_by=$(<"$VENV/installed")
      read -r _ _ owner <<<"$made_by"
   fi
   [[ -n $owner && $owner != "$(pwd -P)" ]] || return 1
   say "$VENV was made by the checkout $owner and from now on has the slimrl of this one, $(pwd -P);" \
      "for an environment of its own: VENV=/other/folder bash $0"
   [[ $made_by == "$(stamp "$lock" "$owner")" ]] || return 1
   rm -f -- "$VENV/installed"
   pip_install --no-deps --no-build-isolation -e .
}

# Prints what $VENV/installed holds once all is installed: the lock $1, the packages asked for, and folder $2 of
# the checkout.
stamp() { printf '%s %s %s' "$1" "$(cat setup.py "$1" | sha256sum | cut -d' ' -f1)" "$2"; }

venv_is_ready() {
   venv_works && [[ -f $VENV/installed && $(<"$VENV/installed") == "$(stamp "$(lock_of_venv)" "$(pwd -P)" 2>/dev/null)" ]]
}

# Makes $VENV, or makes it again where it does not work; touches no folder that holds anything else.
make_venv() {
   local python
   if [[ ! -f $VENV/pyvenv.cfg && -n $(find "$VENV" -mindepth 1 ! -name install.lock -print -quit) ]]; then
      fail 1 "$VENV is no Python environment and not empty; name a new folder: VENV=/other/disk/venv bash $0"
   fi
   python=$(find_python)
   need_disk "$VENV"
   say "making $VENV with $python ($("$python" --version))"
   find "$VENV" -mindepth 1 -maxdepth 1 ! -name install.lock -exec rm -rf -- {} +
   "$python" -m venv "$VENV"
}

# Makes the environment where it is missing or older than its lock, and puts it first in the PATH.
prepare_environment() {
   local lock folder=${VENV:-.venv}
   if ! mkdir -p -- "$folder" 2>/dev/null; then
      fail 1 "cannot make the folder $folder; put the environment elsewhere: VENV=/other/disk/venv bash $0"
   fi
   VENV=$(cd -- "$folder" && pwd -P)
   if [[ $VENV == *[[:space:]]* ]]; then
      fail 1 "Ray cannot run from $VENV, because there is a space in its name; put the environment elsewhere:" \
         "VENV=/other/disk/venv bash $0"
   fi
   if ! venv_is_ready; then
      [[ -w $VENV ]] || fail 1 "cannot write to $VENV; put the environment elsewhere: VENV=/other/disk/venv bash $0"
      # Two scripts started together: the second one waits for the first one's installation.
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
