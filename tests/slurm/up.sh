#!/bin/sh
# Bring the small cluster up and leave it running, to try things by hand; down.sh ends it.
# Usage: tests/slurm/up.sh [FOLDER]
exec python "$(dirname "$0")/byhand.py" up "${1:-/tmp/lmperf-slurm}"
