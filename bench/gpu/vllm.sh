#!/usr/bin/env bash
# Runs vLLM's benchmark with the packages of its own folder: vllm.sh FOLDER SCRIPT CHECKPOINT IMAGE_SIDE OUTPUT_TOKENS CLIENTS
set -euo pipefail
folder=$1; shift
# VLLM_HOST_PACKAGES: packages that the host had before others took their place (numpy 2 before numpy 1)
export PYTHONPATH="$folder${VLLM_HOST_PACKAGES:+:$VLLM_HOST_PACKAGES}" VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_WORKER_MULTIPROC_METHOD=spawn
exec python3 "$@"
