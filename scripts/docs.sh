#!/usr/bin/env bash
# Builds the documentation in docs/ as a site; any warning, such as a broken link, fails it with exit code 1.
#
#    bash scripts/docs.sh [--serve [PORT]] [--output FOLDER]
#
# The site is static: open site/index.html. Needs no GPU, no Ray and no engine; installs only mkdocs.
#   --serve [PORT]   serve it at http://127.0.0.1:PORT (default 8000) and rebuild it when a page changes
#   --output FOLDER  write to FOLDER (default site)
# Links to files outside docs/ lead to REPOSITORY_URL (https://host/owner/name); without it they are plain text.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/lib/say.sh
source scripts/lib/environment.sh

OUTPUT=site
PORT=
while (($#)); do
   case $1 in
      --serve)
         PORT=8000 && shift
         if [[ ${1:-} =~ ^[0-9]+$ ]]; then PORT=$1 && shift; fi
         ;;
      --output) (($# > 1)) || fail 2 "--output needs a value; see --help" && OUTPUT=$2 && shift 2 ;;
      -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0" && exit ;;
      *) fail 2 "unknown option $1; see --help" ;;
   esac
done

# The environment of the tests has mkdocs. Without it, a small environment is enough.
PYTHON_FOR_DOCS=$(python_at_hand)
if ! "$PYTHON_FOR_DOCS" -c 'import material, mkdocs' 2>/dev/null; then
   VENV=$PWD/.venv-docs
   if ! venv_works; then "$PYTHON_FOR_DOCS" -m venv "$VENV"; fi
   say "installing mkdocs into $VENV, at the versions of $(lock_of_venv)"
   pip_install -c "$(lock_of_venv)" mkdocs-material
   PYTHON_FOR_DOCS=$VENV/bin/python
fi

export NO_MKDOCS_2_WARNING=1 # an announcement, not about the pages
if [[ -n $PORT ]]; then
   exec "$PYTHON_FOR_DOCS" -m mkdocs serve --strict --dev-addr "127.0.0.1:$PORT"
fi
"$PYTHON_FOR_DOCS" -m mkdocs build --strict --site-dir "$(realpath -m -- "$OUTPUT")"
say "done: $OUTPUT/index.html"
