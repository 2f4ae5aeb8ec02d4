"""Pretrains a GPT model: `torchrun --nproc-per-node N pretrain_gpt.py --config FILE.yaml ...`."""

import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C while modules load shall not show a traceback through them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from megafp8.launch.main import run_program

    run_program(sys.argv[1:])
