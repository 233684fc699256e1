#!/bin/bash
# Everything about the CUDA kernels that needs a GPU, in one go: correctness, a training run, a memory check, speed.
# Takes under six minutes on one GPU. Needs lowcomm installed with the extra cuda12 or cuda13, and pytest.
#
#     bash recipes/gpu_check.sh [FOLDER]        results go to FOLDER (default: gpu-check)
#
# Exit status 0 if all tests passed. The last lines are a table; FOLDER/gpu_bench.json has the numbers with device and
# versions, FOLDER/*.log the rest.
set -u
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${1:-gpu-check}")
PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
export LOWCOMM_CACHE="$OUT/cache"
failed=0

step() { # step NAME SECONDS COMMAND...: run with a limit, keep the output, say how it ended
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  echo "$name: exit $status after $((SECONDS - began)) s"
  tail -3 "$OUT/$name.log"
  [ $status -eq 0 ] || failed=1
}

$PYTHON -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; print(torch.cuda.get_device_name(), torch.__version__)' || exit 2
step tests 150 $PYTHON -m pytest -q -p no:cacheprovider tests/test_gpu.py
step training 75 $PYTHON -m torch.distributed.run --nproc-per-node 1 recipes/train.py --steps 200
if command -v compute-sanitizer >/dev/null; then
  step sanitizer 60 compute-sanitizer --error-exitcode 9 $PYTHON -m pytest -q -p no:cacheprovider tests/test_gpu.py -k small
else
  echo "sanitizer: compute-sanitizer is not here"
fi
step bench 60 $PYTHON -m lowcomm bench --device cuda --sizes 2**28 --seconds 0.1 'Int4()' 'Sign()' 'TopK()'
step gpu_bench 150 $PYTHON -m lowcomm.recipes.gpu_bench --size 2**28 --json "$OUT/gpu_bench.json"
grep -v '^{' "$OUT/gpu_bench.log"
exit $failed
