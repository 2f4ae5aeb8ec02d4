"""Pretrains a GPT model: `torchrun --nproc-per-node N pretrain_gpt.py --config FILE.yaml ...`."""

import sys

from megafp8.launch.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
