# shellcheck shell=bash
# One Ray cluster of this script's own: a head as its child, jobs submitted to it, and nothing left of it afterwards.
#
#    source scripts/lib/ray.sh
#    ray_begin --num-gpus 8 [more flags of `ray start`]
#    ray_job python3 train.py "${MODEL_ARGS[@]}" ...      # non-zero where the job failed
#
# ray_begin sets the traps that end the cluster on any exit, error, TERM, HUP or Ctrl-C. Where RAY_ADDRESS is set, the
# cluster there is used and nothing is started or ended. Needs say.sh and a python3 with Ray in the PATH.

RAY_HEAD_PID=
RAY_JOB_ID=
RAY_SUBMIT_PID=

ray_begin() {
   # Submitting to our own head must not take the way through a proxy meant for the internet.
   export no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost"
   export NO_PROXY=$no_proxy
   export RAY_USAGE_STATS_ENABLED=0
   if [[ -n ${RAY_ADDRESS:-} ]]; then
      say "using the Ray cluster at $RAY_ADDRESS (RAY_ADDRESS is set)"
      return
   fi
   # Ray's token, of this cluster alone; left to itself Ray would write one into the home folder.
   export RAY_AUTH_MODE=token
   RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
   export RAY_AUTH_TOKEN
   # What a stopped job gets to end its servers and write its summary before it is killed.
   export RAY_JOB_STOP_WAIT_TIME_S=30
   trap 'ray_end' EXIT
   trap 'ray_interrupted INT 130' INT
   trap 'ray_interrupted TERM 143' TERM
   trap 'ray_interrupted HUP 129' HUP

   local folder here
   here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
   # Under /tmp whatever TMPDIR says: the path of a socket inside may not be longer than 107 characters.
   folder=$(mktemp -d "/tmp/slimrl-ray-$$-XXXX")
   python3 "$here/ray_head.py" --folder "$folder" "$@" &
   RAY_HEAD_PID=$!
   until [[ -f $folder/address ]]; do
      if ! kill -0 "$RAY_HEAD_PID" 2>/dev/null; then
         wait "$RAY_HEAD_PID" || fail 1 "Ray did not start; its message stands above"
      fi
      sleep 0.2
   done
   RAY_ADDRESS=$(<"$folder/address")
   export RAY_ADDRESS
}

# Runs a command as a Ray job and shows its output; returns non-zero where the job failed.
ray_job() {
   local code=0
   RAY_JOB_ID="slimrl-$$-$SECONDS"
   # In the background, because bash runs a trap only between two foreground commands. Unbuffered, so that a file or a
   # pipe sees each line when a terminal would.
   PYTHONUNBUFFERED=1 ray job submit --log-color=false --address "$RAY_ADDRESS" --submission-id "$RAY_JOB_ID" -- "$@" &
   RAY_SUBMIT_PID=$!
   wait "$RAY_SUBMIT_PID" || code=$?
   RAY_JOB_ID=
   return "$code"
}

ray_interrupted() {
   trap '' INT TERM HUP
   printf '\nslimrl: %s: ending what was started\n' "$1" >&2
   if [[ -n $RAY_JOB_ID ]]; then
      timeout 60 ray job stop --address "$RAY_ADDRESS" "$RAY_JOB_ID" >/dev/null 2>&1 || true
   fi
   exit "$2"
}

ray_end() {
   local code=$?
   trap '' INT TERM HUP
   if [[ -n $RAY_SUBMIT_PID ]]; then
      kill "$RAY_SUBMIT_PID" 2>/dev/null || true
   fi
   if [[ -n $RAY_HEAD_PID ]]; then
      kill "$RAY_HEAD_PID" 2>/dev/null || true
      wait "$RAY_HEAD_PID" 2>/dev/null || true
   fi
   exit "$code"
}
