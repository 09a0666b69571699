#!/usr/bin/env bash
# Runs a recipe on this node, again after each loss, until it ends by itself. Job files of tools/launch.py call it.
#
#    bash scripts/resume.sh [--max-restarts N] [--rejoin-timeout-s S] -- bash scripts/run-qwen3-4B.sh ...
#
# On the node with RANK 0, or on the only one: runs the command again if a process, server or node was lost (exit code
# 75, or the command was killed by signal 6, 7, 9 or 11), at most N times (default 10). It continues from its last
# checkpoint if --load and --save of the command name the same folder. Any other exit code is this script's.
# On the other nodes: joins the head's cluster again each time the head was lost, ended with code 75, was killed or was
# ended by a signal other than an interrupt. A node that has been part of the cluster ends with code 0 when the head has ended with another code, if no head
# appears within S seconds (default 180), or when it receives a signal: the head's node reports the outcome. A node that
# finds no head at first tries again once, and ends with code 69.
set -euo pipefail
LIB=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/lib" && pwd)
# shellcheck source-path=SCRIPTDIR source=lib/say.sh
source "$LIB/say.sh"

LIMIT=10
REJOIN_S=180
# A new head on the same port would hide the loss of the old one from the other nodes, which look for 10 s.
PAUSE_S=15
RESUMABLE=' 75 134 135 137 139 '
NO_HEAD=69 # of scripts/lib/ray_node.py
while (($#)); do
   case $1 in
      --max-restarts) (($# > 1)) || fail 2 "$1 needs a value; see --help" && LIMIT=$2 && shift 2 ;;
      --rejoin-timeout-s) (($# > 1)) || fail 2 "$1 needs a value; see --help" && REJOIN_S=$2 && shift 2 ;;
      --) shift && break ;;
      -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0" && exit ;;
      *) fail 2 "unknown option $1; see --help (the command goes after --)" ;;
   esac
done
[[ $LIMIT =~ ^(0|[1-9][0-9]*)$ ]] || fail 2 "--max-restarts $LIMIT is not a number of restarts: give 0 or more"
[[ $REJOIN_S =~ ^[1-9][0-9]*$ ]] || fail 2 "--rejoin-timeout-s $REJOIN_S is not a number of seconds: give 1 or more"
(($#)) || fail 2 "no command: give it after --, such as bash scripts/run-qwen3-4B.sh"

COMMAND_PID=''
SIGNAL=''
JOINED=no
WAITED=no
RESTARTS=0
# TERM for each signal: a command in the background ignores INT.
pass_on() {
   SIGNAL=$1
   if [[ -n $COMMAND_PID ]]; then kill -TERM "$COMMAND_PID" 2>/dev/null || true; fi
}
trap 'pass_on TERM' TERM
trap 'pass_on HUP' HUP
trap 'pass_on INT' INT

# Runs the command in the background, because bash runs a trap only between two foreground commands; sets CODE.
run() {
   "$@" &
   COMMAND_PID=$!
   while :; do
      CODE=0
      wait "$COMMAND_PID" || CODE=$?
      # A signal to this script ends `wait`, not the command.
      kill -0 "$COMMAND_PID" 2>/dev/null || break
   done
   COMMAND_PID=
}

end_of_worker() {
   say "node ${RANK} ends: $1; the node with RANK 0 reports the outcome"
   exit 0
}

while :; do
   run "$@"
   if ((${RANK:-0} > 0)); then
      if [[ -n $SIGNAL ]]; then
         end_of_worker "received SIG$SIGNAL"
      fi
      if ((CODE == 0)); then end_of_worker "the run has ended"; fi
      if ((CODE == 75)); then
         JOINED=yes
         export RAY_JOIN_TIMEOUT_S=$REJOIN_S
         say "exit code 75: node ${RANK} joins again in case the head starts another try"
         continue
      fi
      if ((CODE == NO_HEAD)); then
         if [[ $JOINED == yes ]]; then end_of_worker "no head has appeared"; fi
         if [[ $WAITED == yes ]]; then exit "$CODE"; fi # two waits of RAY_JOIN_TIMEOUT_S hold its GPUs long enough
         WAITED=yes
         CODE=75
      fi
   fi
   if ((CODE == 0)) || [[ -n $SIGNAL || $RESUMABLE != *" $CODE "* ]]; then exit "$CODE"; fi
   if ((RESTARTS == LIMIT)); then
      say "exit code $CODE after $LIMIT restarts (--max-restarts): giving up"
      exit "$CODE"
   fi
   RESTARTS=$((RESTARTS + 1))
   say "exit code $CODE: restart $RESTARTS of at most $LIMIT"
   if ((${WORLD_SIZE:-1} > 1 && ${RANK:-0} == 0)); then
      run sleep "$PAUSE_S"
      if [[ -n $SIGNAL ]]; then exit "$CODE"; fi
   fi
done
