# shellcheck shell=bash
# Output of the scripts: one line per phase, with the seconds since the script started; errors on stderr.

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# fail EXIT_CODE MESSAGE...: prints an error message with its fix, and exits.
fail() {
   local code=$1
   shift
   printf 'slimrl: %s\n' "$*" >&2
   exit "$code"
}
