# shellcheck shell=bash
# A Ray cluster for this script alone: starts a head as a child process, submits jobs to it, and cleans up everything.
#
#    source scripts/lib/ray.sh
#    ray_begin --num-gpus 8 [more flags of `ray start`]
#    ray_job python3 train.py "${MODEL_ARGS[@]}" ...      # ends with the exit code of the command
#
# ray_begin is ray_launch, which starts the head, and ray_await, which waits until it accepts jobs. A script can prepare
# its files in between, with ray_meanwhile before each command:
#
#    ray_launch --num-gpus 8
#    ray_meanwhile python3 tools/convert_hf_to_torch_dist.py ...
#    ray_await
#
# ray_launch sets traps that end the cluster on any exit, error, TERM, HUP or Ctrl-C. If RAY_ADDRESS is set, that cluster
# is used and kept running; only the submitted job is stopped. Needs say.sh and a python3 with Ray in the PATH.
#
# Several nodes: run the same script on each of them, with WORLD_SIZE (number of nodes), RANK (0 on the head) and
# MASTER_ADDR (the head's address for the other nodes), as Kubernetes jobs set them. The head continues once all nodes
# have joined; on the other nodes ray_begin joins the head, waits for its end and ends the script: with code 75 if the
# head was lost, ended with code 75, was killed or was ended by a signal other than an interrupt, so that the same
# command may continue, else with 0. If the nodes do not join within RAY_JOIN_TIMEOUT_S (600), each prints an error and
# fails, the head with exit code 75, another node that finds no head with 69. A head is lost if it has not answered on
# the network for RAY_HEAD_TIMEOUT_S (20), as a node is for the run after --node-timeout-seconds. RAY_PORT (6379) is the
# head's port. Every node needs the same RAY_AUTH_TOKEN, or a RAY_AUTH_TOKEN_PATH to a file with it; it authenticates
# access to the cluster.

RAY_NODE_PID=
RAY_JOB_ID=
RAY_SUBMIT_PID=
RAY_FOLDER=
RAY_LIB=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

ray_begin() {
   ray_launch "$@"
   ray_await
}

ray_launch() {
   # Connections to the head must not go through a proxy for the internet.
   export no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost${MASTER_ADDR:+,$MASTER_ADDR}"
   export RAY_USAGE_STATS_ENABLED=0
   trap 'ray_end' EXIT
   trap 'ray_interrupted INT 130' INT
   trap 'ray_interrupted TERM 143' TERM
   trap 'ray_interrupted HUP 129' HUP
   if [[ -n ${RAY_ADDRESS:-} ]]; then
      export NO_PROXY=$no_proxy
      say "using the Ray cluster at $RAY_ADDRESS (RAY_ADDRESS is set)"
      return
   fi
   local nodes=${WORLD_SIZE:-1} rank=${RANK:-0} port=${RAY_PORT:-6379} limit=${RAY_JOIN_TIMEOUT_S:-600} role=()
   local silence=${RAY_HEAD_TIMEOUT_S:-20}
   ray_check_nodes "$nodes" "$rank" "$port" "$limit" "$silence"
   ray_choose_token "$nodes"
   # Seconds for a stopped job to end its servers and write its summary before it is killed.
   export RAY_JOB_STOP_WAIT_TIME_S=30
   if ((rank > 0)); then
      role=(--join "$MASTER_ADDR:$port" --rank "$rank" --timeout-s "$limit" --head-timeout-s "$silence")
   elif ((nodes > 1)); then
      role=(--nodes "$nodes" --master "$MASTER_ADDR" --port "$port" --timeout-s "$limit")
   fi

   # Under /tmp, regardless of TMPDIR: the path of a socket inside is limited to 107 characters.
   RAY_FOLDER=$(mktemp -d "/tmp/slimrl-ray-$$-XXXX")
   python3 "$RAY_LIB/ray_node.py" --folder "$RAY_FOLDER" "${role[@]}" "$@" &
   RAY_NODE_PID=$!
   if ((rank > 0)); then
      wait "$RAY_NODE_PID" || fail $? "node $rank of $nodes has ended; see its message above"
      exit 0
   fi
}

# Waits until the head accepts jobs; with RAY_ADDRESS there is nothing to wait for.
ray_await() {
   [[ -n $RAY_NODE_PID ]] || return 0
   until [[ -f $RAY_FOLDER/address ]]; do
      if ! kill -0 "$RAY_NODE_PID" 2>/dev/null; then
         wait "$RAY_NODE_PID" || fail $? "Ray did not start; see its message above"
      fi
      sleep 0.2
   done
   RAY_ADDRESS=$(<"$RAY_FOLDER/address")
   export RAY_ADDRESS
   local host=${RAY_ADDRESS#http://}
   export no_proxy="$no_proxy,${host%:*}"
   export NO_PROXY=$no_proxy
}

# Runs a command while the head starts; returns its exit code. In the background, because bash runs a trap only between
# two foreground commands: a signal must end the command and the head at once.
ray_meanwhile() {
   local code=0
   "$@" &
   RAY_SUBMIT_PID=$!
   wait "$RAY_SUBMIT_PID" || code=$?
   RAY_SUBMIT_PID=
   return "$code"
}

# fail, unless the variables that describe the nodes are valid and consistent.
ray_check_nodes() {
   local nodes=$1 rank=$2
   [[ $nodes =~ ^[1-9][0-9]*$ ]] || fail 2 "WORLD_SIZE=$nodes is not a number of nodes; unset it for one node"
   if ! [[ $rank =~ ^(0|[1-9][0-9]*)$ ]] || ((rank >= nodes)); then
      fail 2 "RANK=$rank is not in 0 to $((nodes - 1)), as WORLD_SIZE=$nodes requires; unset both for one node"
   fi
   [[ $3 =~ ^[1-9][0-9]*$ ]] || fail 2 "RAY_PORT=$3 is not a port; give one above 1023, the same on every node"
   [[ $4 =~ ^[1-9][0-9]*$ ]] || fail 2 "RAY_JOIN_TIMEOUT_S=$4 is not a number of seconds; give one such as 600"
   [[ $5 =~ ^[1-9][0-9]*$ ]] || fail 2 "RAY_HEAD_TIMEOUT_S=$5 is not a number of seconds; give one such as 20"
   if ((nodes > 1)) && [[ -z ${MASTER_ADDR:-} ]]; then
      fail 2 "WORLD_SIZE=$nodes needs MASTER_ADDR, the address of the node with RANK 0; set it on every node"
   fi
}

# A cluster of one node gets a new token; by default Ray would write one into the home folder. Several nodes need a
# common token: without it anyone who reaches their ports can run commands as this user.
ray_choose_token() {
   local file=${RAY_AUTH_TOKEN_PATH:-}
   if (($1 == 1)); then
      RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
   elif [[ -z ${RAY_AUTH_TOKEN:-} && -n $file ]]; then
      [[ -r $file ]] || fail 2 "RAY_AUTH_TOKEN_PATH=$file cannot be read; it must be readable on every node"
      RAY_AUTH_TOKEN=$(<"$file")
   fi
   if [[ -z ${RAY_AUTH_TOKEN:-} ]]; then
      fail 2 "several nodes need a token, or anyone who reaches their ports can run commands as you. Create one in a" \
         "shared folder: (umask 077; head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1 > TOKEN_FILE)" \
         "and set RAY_AUTH_TOKEN_PATH=TOKEN_FILE on every node (or RAY_AUTH_TOKEN to the same text)"
   fi
   export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
}

# Runs a command as a Ray job and shows its output; returns its exit code. On a cluster that this script started,
# secrets among its flags appear in no command line and no log: the job reads them from a file on this machine.
ray_job() {
   local code=0 words=("$@")
   if [[ -n $RAY_FOLDER ]]; then
      mapfile -d '' -t words < <(printf '%s\0' "$@" | python3 "$RAY_LIB/job_words.py" "$RAY_FOLDER")
      ((${#words[@]})) || fail 1 "the job's command could not be prepared; see above"
   fi
   RAY_JOB_ID="slimrl-$$-$SECONDS"
   # In the background, because bash runs a trap only between two foreground commands. Unbuffered, so that files and
   # pipes receive each line immediately, as a terminal does.
   PYTHONUNBUFFERED=1 python3 "$RAY_LIB/ray_job.py" --address "$RAY_ADDRESS" --submission-id "$RAY_JOB_ID" -- \
      "${words[@]}" &
   RAY_SUBMIT_PID=$!
   wait "$RAY_SUBMIT_PID" || code=$?
   RAY_JOB_ID=
   return "$code"
}

ray_interrupted() {
   trap '' INT TERM HUP
   printf '\nslimrl: %s: shutting down\n' "$1" >&2
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
   if [[ -n $RAY_NODE_PID ]]; then
      # For the other nodes. The folder is gone if Ray has ended by itself.
      if [[ -d $RAY_FOLDER ]]; then echo "$code" >"$RAY_FOLDER/outcome" || true; fi
      kill "$RAY_NODE_PID" 2>/dev/null || true
      wait "$RAY_NODE_PID" 2>/dev/null || true
   fi
   exit "$code"
}
