#!/bin/sh
# Everything that needs one GPU, in under 8 minutes: build, kernel checks, benchmarks, training of a 1B model.
# Writes report.json and report.md (see tools/gpu_check.py --help; --device cpu --tiny tries it without a GPU).
cd "$(dirname "$0")/.." || exit 1
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" tools/gpu_check.py "$@"
