#!/usr/bin/env bash
# Creates or reuses the environment, then runs the test suite in two worker processes; arguments go to pytest.
#
#    bash scripts/test.sh                 # all tests except those marked extended (docs/testing.md)
#    bash scripts/test.sh --all           # everything
#    bash scripts/test.sh -m 'not slow'   # without the tests that start engines or several processes
#    bash scripts/test.sh -n 0 tests/algorithms -k kl   # without workers, for a debugger
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/lib/say.sh
source scripts/lib/environment.sh

SELECTION=(-m 'not extended')
ARGUMENTS=()
for argument in "$@"; do
   if [[ $argument == --all ]]; then SELECTION=(); else ARGUMENTS+=("$argument"); fi
done

prepare_environment
# One thread per process: the tests start many processes on few cores, where more threads only contend.
export OMP_NUM_THREADS=1
# Test processes import the same files hundreds of times: keep the compiled files.
unset PYTHONDONTWRITEBYTECODE
# Two workers for two cores: whole runs in one, all other tests in both (tests/conftest.py). The last -n and -m win.
exec python -m pytest -n 2 "${SELECTION[@]}" "${ARGUMENTS[@]}"
