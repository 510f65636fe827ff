#!/bin/sh
# End the cluster that up.sh brought up in the same folder.
# Usage: tests/slurm/down.sh [FOLDER]
exec python "$(dirname "$0")/byhand.py" down "${1:-/tmp/lmperf-slurm}"
