#!/usr/bin/env bash
# All that is run by hand on an NVIDIA GPU: the benchmark with its bars, the tests marked `gpu`, and the memory checker.
#
#     bash benchmarks/gpu_all.sh FOLDER [bench] [tests] [sanitizers]
#
# FOLDER gets gpu.json and a text file of each; without names everything runs, about ten minutes. Kernels are compiled and tests
# run in several processes at a time, for compiling takes most of the time: 16 processors are well used.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
wanted=${*:-bench tests sanitizers}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 PYTEST_SOURCE_TREE=1 MPLBACKEND=Agg
failed=0

tests() {  # tests NAME pytest-arguments...
    local name=$1
    shift
    "$python" -m pytest -q -rf -m gpu -p no:cacheprovider "$@" >"$out/tests_$name.txt" 2>&1
    local code=$?
    echo "$name: $(tail -1 "$out/tests_$name.txt")"
    return $code
}

if [[ $wanted == *bench* ]]; then
    "$python" benchmarks/bench_gpu_decode.py --rounds 3 --compile-jobs 16 --bars ${COMMIT:+--commit "$COMMIT"} \
        --json "$out/gpu.json" >"$out/bench.txt" 2>&1
    code=$?
    sed -n '/^balanced, /,$p' "$out/bench.txt"
    [[ $code == 0 ]] || failed=$code
fi
if [[ $wanted == *tests* ]]; then
    jobs=()
    tests cases_balanced tests/test_gpu_cases.py -k BALANCED & jobs+=($!)
    tests cases_portable tests/test_gpu_cases.py -k PORTABLE & jobs+=($!)
    tests cases tests/test_gpu_cases.py -k "not BALANCED and not PORTABLE" & jobs+=($!)
    tests decode tests/test_triton_decode.py & jobs+=($!)
    tests prefill tests/test_triton_prefill.py & jobs+=($!)
    tests state tests/test_gpu.py tests/test_triton_cache.py & jobs+=($!)
    tests golden tests/test_golden_devices.py tests/test_operators.py & jobs+=($!)
    tests compile tests/test_compile.py & jobs+=($!)
    "$python" examples/06_graph_capture.py >"$out/graph_capture.txt" 2>&1 & jobs+=($!)
    for job in "${jobs[@]}"; do
        wait "$job"
        code=$?
        [[ $code == 0 || $code == 5 ]] || failed=1  # 5: no test of such a name
    done
    tail -1 "$out/graph_capture.txt"
fi
if [[ $wanted == *sanitizers* ]]; then
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" benchmarks/sanitize_gpu.py \
        >"$out/memcheck.txt" 2>&1 || failed=1
    tail -1 "$out/memcheck.txt"
fi
exit $failed
