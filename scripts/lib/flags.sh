# shellcheck shell=bash
# What scripts look at before they make or start anything: the flags of a run, and a name that no earlier run has.
# Needs say.sh; the caller stands in the project's folder.

# flags_have FLAG WORD...: whether FLAG is among the words.
flags_have() {
   local flag=$1 word
   shift
   for word; do
      if [[ $word == "$flag" ]]; then return 0; fi
   done
   return 1
}

# flags_check PYTHON ENTRY FOLDER FLAG...: ends the script with code 2, and every problem said once, where ENTRY would
# refuse the flags; what they name in FOLDER, where that is not empty, is made later, or is on another machine (/: any path).
flags_check() {
   local python=$1 entry=$2 later=$3 code=0
   shift 3
   if flags_have --help "$@" || flags_have -h "$@"; then
      "$python" "$entry" --help || code=$?
      exit "$code"
   fi
   # Not as words of its own, which everybody on this machine could read: secrets may be among them.
   "$python" -m slimrl.cluster.check_flags --entry "$entry" ${later:+--made-later "$later"} < <(printf '%s\0' "$@") ||
      exit
}

# flags_plan ENTRY FLAG...: prints the plan of `--dry-run` and ends the script with its code; no Ray is asked for it.
flags_plan() {
   local code=0
   env -u RAY_ADDRESS python3 "$@" || code=$?
   exit "$code"
}

# free_name FOLDER NAME: prints NAME, or the first NAME_attempt_N that is not in FOLDER: what an earlier run left stays.
free_name() {
   local name=$2 number=1
   while [[ -e $1/$name ]]; do
      number=$((number + 1))
      name=$2_attempt_$number
   done
   printf '%s\n' "$name"
}
