"""Pretrains a GPT model: `torchrun --nproc-per-node N pretrain_gpt.py --config FILE.yaml ...`."""

import sys

from megafp8.launch.main import run_program

if __name__ == "__main__":
    run_program(sys.argv[1:])
