# shellcheck shell=bash
# Checks that scripts make before they create or start anything: the flags of a run, and an unused run name.
# Needs say.sh; the working folder must be the project's.

# flags_have FLAG WORD...: whether FLAG is among the words.
flags_have() {
   local flag=$1 word
   shift
   for word; do
      if [[ $word == "$flag" ]]; then return 0; fi
   done
   return 1
}

# flags_check PYTHON ENTRY FOLDER FLAG...: if ENTRY would reject the flags, prints every problem and exits with code 2.
# Paths in FOLDER (if not empty) are not checked: they are created later, or are on another machine (/: any path).
flags_check() {
   local python=$1 entry=$2 later=$3 code=0
   shift 3
   if flags_have --help "$@" || flags_have -h "$@"; then
      "$python" "$entry" --help || code=$?
      exit "$code"
   fi
   # On standard input, not as arguments: flags may contain secrets, and every user of this machine can read arguments.
   "$python" -m slimrl.cluster.command_line --entry "$entry" ${later:+--made-later "$later"} < <(printf '%s\0' "$@") ||
      exit
}

# flags_plan ENTRY FLAG...: prints the plan of `--dry-run` and exits with its code; queries no Ray cluster.
flags_plan() {
   local code=0
   env -u RAY_ADDRESS python3 "$@" || code=$?
   exit "$code"
}

# free_name FOLDER NAME: prints NAME, or the first NAME_attempt_N that is not in FOLDER, to keep earlier runs.
free_name() {
   local name=$2 number=1
   while [[ -e $1/$name ]]; do
      number=$((number + 1))
      name=$2_attempt_$number
   done
   printf '%s\n' "$name"
}
