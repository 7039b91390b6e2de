#!/usr/bin/env bash
# All that is run by hand on an NVIDIA GPU: the benchmark with its bars, the tests marked `gpu`, and the memory checker.
#
#     bash benchmarks/gpu_all.sh FOLDER [bench] [tests] [sanitizers]
#
# FOLDER gets gpu.json and a text file of each; without names everything runs. Kernels are compiled and tests
# run in several processes at a time (JOBS), for compiling takes most of the time: 16 processors are well used.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
wanted=${*:-bench tests sanitizers}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 PYTEST_SOURCE_TREE=1 MPLBACKEND=Agg
failed=0

if [[ $wanted == *bench* ]]; then
    "$python" benchmarks/bench_gpu_decode.py --rounds 3 --compile-jobs 16 --bars ${COMMIT:+--commit "$COMMIT"} \
        --json "$out/gpu.json" >"$out/bench.txt" 2>&1
    code=$?
    sed -n '/^balanced, /,$p' "$out/bench.txt"
    [[ $code == 0 ]] || failed=$code
fi
if [[ $wanted == *tests* ]]; then
    export OMP_NUM_THREADS=1
    "$python" examples/06_graph_capture.py >"$out/graph_capture.txt" 2>&1 &
    example=$!
    # A process that dies ends the run, with a word on its test: pytest-xdist does not get over it. pytest-benchmark, where it is
    # installed, warns of other processes.
    "$python" -m pytest -v -rfs -m gpu -p no:cacheprovider -p no:benchmark -n "${JOBS:-12}" --dist loadgroup --max-worker-restart 0 \
        tests/test_{gpu,gpu_cases,triton_decode,triton_prefill,triton_cache,golden_devices,operators,compile}.py \
        >"$out/tests.txt" 2>&1 || failed=1
    wait $example || failed=1
    tail -1 "$out/tests.txt"
    tail -1 "$out/graph_capture.txt"
fi
if [[ $wanted == *sanitizers* ]]; then
    "$python" benchmarks/sanitize_gpu.py >"$out/paths.txt" 2>&1 || failed=1  # compiles, which takes very long under the checker
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" benchmarks/sanitize_gpu.py \
        >"$out/memcheck.txt" 2>&1 || failed=1
    tail -1 "$out/memcheck.txt"
fi
exit $failed
