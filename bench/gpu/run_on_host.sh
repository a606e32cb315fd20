#!/usr/bin/env bash
# Sets a bare, offline GPU host up and runs the benchmark there; from the repository's root: run_on_host.sh [ARGUMENT ...]
#
# PACK (.gpu) is a carried folder; of what is in it all is used and nothing is needed twice on a host that stays up:
#   triton.tar.xz, wheels, unpack.sh     the server's parts for Python 3.12; wheels or, smaller, wheels.tar.xz (bench.gpu.shrink)
#   tokenizer/tokenizer.json[.xz]        a real tokenizer
#   chunk00, chunk01, ...                vLLM's packages as xz of tar in pieces; they are kept, a few a call
#   vllm_bench.py                        its benchmark; comes with the last of the pieces, which are unpacked then
# ARGUMENTs are those of bench.h200; without any the host is only set up. Results go to OUT (build/bench/results).
set -euo pipefail
pack=${PACK:-.gpu} work=${WORK:-/tmp/deepstack-host} out=${OUT:-build/bench/results}
export TRITON_HOME=$work/triton VLLM_HOST_PACKAGES=$work/host_packages PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$work/chunks" "$out"
step() { echo "[$SECONDS s] $*" >&2; }
install=(python3 -m pip install -q --no-deps --no-index --no-build-isolation --root-user-action=ignore)

for file in "$pack"/chunk0* "$pack"/vllm_bench.py; do [ ! -e "$file" ] || cp "$file" "$work/chunks/"; done
if [ -e "$pack/tokenizer" ]; then cp -r "$pack/tokenizer" "$work/"; fi

if [ -e "$pack/triton.tar.xz" ] && [ ! -x "$TRITON_HOME/bin/tritonserver" ]; then
  step "unpacking the server"
  # The stub needs numpy 1, which the host's scipy and scikit-learn cannot use; vLLM gets the host's own numpy back.
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$VLLM_HOST_PACKAGES"
  for name in numpy numpy.libs numpy-*.dist-info scipy scipy.libs scipy-*.dist-info; do
    for path in "$site"/$name; do [ ! -e "$path" ] || cp -r "$path" "$VLLM_HOST_PACKAGES/"; done
  done
  python3 -m pip uninstall -q -y --root-user-action=ignore scikit-learn scipy
  mkdir -p "$work/pack"
  cp "$pack"/triton.tar.xz "$pack"/unpack.sh "$work/pack/"
  if [ -e "$pack/wheels.tar.xz" ]; then tar xJf "$pack/wheels.tar.xz" -C "$work/pack"; else cp "$pack"/*.whl "$work/pack/"; fi
  # shellcheck source=/dev/null
  . "$work/pack/unpack.sh" "$work/pack"
fi
if [ -e "$work/chunks/vllm_bench.py" ] && [ ! -e "$work/vllm/vllm" ]; then
  step "unpacking vLLM"
  mkdir -p "$work/vllm"
  cat "$work"/chunks/chunk0* | xz -T0 -d | tar x -C "$work/vllm"
  cp "$work/chunks/vllm_bench.py" "$work/vllm/"
fi
step "installing the project"
flock "$work/install.lock" "${install[@]}" ./client .  # two runs at once would build in the same folder
if [ $# -eq 0 ]; then step "set up"; exit; fi

options=(--output "$out" --checkpoints "${CHECKPOINTS:-/dev/shm/deepstack-bench}")
if [ -x "$TRITON_HOME/bin/tritonserver" ]; then options+=(--triton "$TRITON_HOME"); fi
if [ -e "$work/tokenizer" ]; then options+=(--tokenizer "$work/tokenizer"); fi
if [ -e "$work/vllm/vllm_bench.py" ]; then options+=(--vllm "$work/vllm"); fi
step "bench.h200 $*"
python3 -m bench.h200 "${options[@]}" "$@"
step "done"
