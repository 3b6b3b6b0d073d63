"""What CUDA and its libraries hold on a card beside tensors."""

from uma.units import MIB

# torch 2.13.0, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 2 x 4 MiB and
# 8 x 16 KiB; 32 MiB on Hopper, which is not counted.
CUBLAS_WORKSPACE = 2 * 4 * MIB + 8 * (16 << 10)

# What a process holds on one NVIDIA card outside torch, as vLLM's start-up logs print it: 0.35 GiB
# on an RTX 3090 (vllm-project/vllm issue 10517), 0.16 on an H100 (pull request 12126).
CUDA_CONTEXT = 358 * MIB
