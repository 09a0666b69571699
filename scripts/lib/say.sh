# shellcheck shell=bash
# How the scripts speak: one line per phase, with the seconds since the script began; errors on stderr.

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# fail EXIT_CODE MESSAGE...: one sentence that says what to do, and out.
fail() {
   local code=$1
   shift
   printf 'slimrl: %s\n' "$*" >&2
   exit "$code"
}
