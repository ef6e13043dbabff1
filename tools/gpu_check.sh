#!/usr/bin/env bash
# Run the GPU checks of all packages: every packages/*/benchmarks/gpu.py, one after the other.
#
#     tools/gpu_check.sh [directory] [arguments for each script]
#     tools/gpu_check.sh results
#     tools/gpu_check.sh results --device cpu      the same code on CPUs, to see that it runs
#
# Needs a Python with a torch that sees the GPUs (PYTHON, by default python3) and nothing installed:
# the packages are taken from this clone. Prints the tables, writes each with its JSON into the
# directory (by default a new one under the temporary files), and ends with 1 if a check failed.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

directory=
if (($# > 0)) && [[ $1 != -* ]]; then
    directory=$1
    shift
fi
if [[ -z $directory ]]; then
    directory=$(mktemp -d "${TMPDIR:-/tmp}/gpu_check.XXXXXX")
fi
mkdir -p -- "$directory"
directory=$(cd -- "$directory" && pwd)

for source in "$root"/packages/*/src; do
    PYTHONPATH="$source${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH

{
    "$python" - <<'PYTHON'
import platform

import torch

print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
for index in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(index)
    print(f"GPU {index}: {found.name}, {found.total_memory / 2**30:.0f} GiB")
if not torch.cuda.is_available():
    print("torch sees no GPU")
elif torch.distributed.is_nccl_available():
    print("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
PYTHON
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || echo "nvidia-smi failed"
    fi
    if command -v git >/dev/null; then
        echo "commit $(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)"
    fi
} 2>&1 | tee -- "$directory/machine.txt"

ran=0
failed=()
for script in "$root"/packages/*/benchmarks/gpu.py; do
    [[ -f $script ]] || continue
    package=$(basename -- "$(dirname -- "$(dirname -- "$script")")")
    echo "== $package"
    ran=$((ran + 1))
    # Unseen by `set -e`, so that the others run too; pipefail gives the script's own status.
    if ! "$python" -W ignore "$script" --json "$directory/$package.json" "$@" 2>&1 |
        tee -- "$directory/$package.txt"; then
        failed+=("$package")
    fi
done

echo "tables and JSON are in $directory"
if ((ran == 0)); then
    echo "no packages/*/benchmarks/gpu.py found"
    exit 1
fi
if ((${#failed[@]} > 0)); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all passed"
