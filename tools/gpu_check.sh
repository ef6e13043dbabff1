#!/usr/bin/env bash
# Run the GPU checks of all packages: tools/gpu_check.sh OUT --budget 420
# Needs a Python with a torch that sees the GPUs (PYTHON, by default python3) and nothing installed:
# the packages are taken from this clone. tools/gpu_check.sh --help says the rest.
set -euo pipefail
exec "${PYTHON:-python3}" "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/gpu_check.py" "$@"
