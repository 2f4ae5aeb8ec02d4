"""Megatron's other flags, known by name so that a launch script from there is never misread.

Accepted are those that cannot change a number here: each gets one log line that says why. All
others are refused with the reason and, where there is one, the flag to use.
"""

from megafp8.config.messages import shown
from megafp8.errors import ConfigurationError


def _by_flag(flags_of: dict[str, str]) -> dict[str, str]:
    """Flag to reason, from reason to flags."""
    return {flag: reason for reason, flags in flags_of.items() for flag in flags.split()}


# Flags without effect, and what holds here in their place.
ACCEPTED: dict[str, str] = _by_flag(
    {
        "there is one model implementation": "--use-mcore-models",
        "the attention core picks its kernel; see --attention-backend": "--use-flash-attn",
        "softmax always accumulates in fp32": "--attention-softmax-in-fp32",
        "gradients are always accumulated in fp32": "--accumulate-allreduce-grads-in-fp32",
        "the loss is always a mean over unmasked tokens": "--calculate-per-token-loss",
        "there is no such fusion": (
            "--no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
            "--no-bias-dropout-fusion --no-masked-softmax-fusion --no-rope-fusion"
        ),
        "there is no such kernel": "--no-persist-layer-norm",
        "corpora are read as the data loader finds best": "--no-mmap-bin-files",
        "no mask is made, attention is causal": "--no-create-attention-mask-in-dataloader",
        "initial values are always drawn on the CPU": "--use-cpu-initialization",
        "a matter of speed": (
            "--no-async-tensor-model-parallel-allreduce --no-overlap-p2p-communication "
            "--overlap-p2p-communication-warmup-flush --manual-gc --manual-gc-interval "
            "--nccl-communicator-config-path --tensorboard-queue-size "
            "--use-persistent-ckpt-worker --ckpt-assume-constant-structure"
        ),
        "FSDP2 groups parameters by block": "--ddp-bucket-size --ddp-num-buckets",
        "gradients are summed and scaled once": "--ddp-average-in-collective",
        "blocks are recomputed one by one": "--recompute-method",
        "there is no context parallelism yet": "--cp-comm-type",
        "a matter of memory": "--empty-unused-memory-level",
        "metrics.jsonl holds the times of each iteration": (
            "--timing-log-level --timing-log-option --no-barrier-with-level-1-timing "
            "--log-timers-to-tensorboard"
        ),
        "metrics.jsonl holds the peak of memory": "--log-memory-to-tensorboard",
        "metrics.jsonl holds the validation loss": "--log-validation-ppl-to-tensorboard",
        "the run folder holds the layout": "--log-world-size-to-tensorboard",
        "metrics.jsonl holds the progress": "--log-progress",
        "no straggler detection": "--log-straggler",
        "every iteration is written": "--tensorboard-log-interval",
        "files of Weights & Biases are in the run folder": "--wandb-save-dir",
        "checkpoints are always written by all ranks": "--ckpt-fully-parallel-save",
        "checkpoints are always read by all ranks": "--ckpt-fully-parallel-load",
    }
)

# Flags of which one value means what is done here anyway.
ACCEPTED_VALUES: dict[str, tuple[str, str]] = {
    "--dataloader-type": ("single", "samples are read in one order"),
}

REFUSED: dict[str, str] = _by_flag(
    {
        "it is ignored since Transformer Engine 1.8: scales are updated every step": (
            "--fp8-interval"
        ),
        "there is no FP4": "--fp4-format",
        "use --precision-policy FILE.yaml": "--te-precision-config-file",
        "gradients are reduced in fp32": "--grad-reduce-in-bf16",
        "there are no experts (MoE)": "--num-experts",
        "there is no latent attention": "--multi-latent-attention",
        "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model VOCAB.json; its merges are "
        "read beside it (vocab.json and merges.txt, gpt2-vocab.json and gpt2-merges.txt)": (
            "--vocab-file --merge-file"
        ),
        "use --num-layers-per-virtual-pipeline-stage": "--num-virtual-stages-per-pipeline-rank",
        "stages hold equal numbers of layers": (
            "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
            "--pipeline-model-parallel-layout --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split"
        ),
        "the order of ranks is fixed: tp fastest, pp slowest": "--use-tp-pp-dp-mapping",
        "use --recompute-granularity selective": "--recompute-activations",
        "use --lr-warmup-iters or --lr-warmup-fraction": "--lr-warmup-samples",
        "use --lr-decay-iters": "--lr-decay-samples",
        "the warm-up starts at 0": "--lr-warmup-init",
        "all parameters share one learning rate": "--decoupled-lr --decoupled-min-lr",
        "weight decay is constant": (
            "--start-weight-decay --end-weight-decay --weight-decay-incr-style"
        ),
        "the optimizer's momentum is fixed": "--sgd-momentum",
        "the schedule always follows the flags": (
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler"
        ),
        "optimizer state is fp32": "--use-precision-aware-optimizer",
        "optimizer state stays on the device": "--optimizer-cpu-offload",
        "sharding goes through FSDP2; see --fsdp-size": "--use-megatron-fsdp",
        "use --fsdp-size and --reshard-after-forward": "--data-parallel-sharding-strategy",
        "use --fsdp-size": "--num-distributed-optimizer-instances",
        "norm weights are stored as they are used": "--apply-layernorm-1p",
        "blocks are pre-norm": "--apply-residual-connection-post-layernorm",
        "activations are gelu, gelu-tanh and --swiglu": "--squared-relu --quick-geglu",
        "use --activation gelu-tanh": "--openai-gelu",
        "weights are drawn from a normal distribution": "--init-method-xavier-uniform",
        "softmax accumulates in fp32 and needs no scaling": "--apply-query-key-layer-scaling",
        "the loss is computed in fp32": "--fp16-lm-cross-entropy",
        "the residual stream has the compute type": "--fp32-residual-connection",
        "rope turns halves, not pairs": "--rotary-interleaved",
        "use --use-rope-scaling": "--rotary-seq-len-interpolation-factor",
        "use --position-embedding-type rope": "--use-rotary-position-embeddings",
        "use --position-embedding-type none": "--no-position-embedding",
        "there is no multi-token prediction": "--mtp-num-layers",
        "there is no evaluation without training; --eval-interval evaluates during it": (
            "--skip-train"
        ),
        "the first evaluation comes after --eval-interval iterations": "--perform-initial-eval",
        "there is no retrieval": "--retro-add-retriever",
        "use --data-path PREFIX with the corpus that the file lists; in place of several, "
        "tools/preprocess_data.py writes one corpus of all files of --input": "--data-args-path",
        "use --train-data-path, --valid-data-path, --test-data-path": "--per-split-data-args-path",
        "use --load DIR/iter_N": "--ckpt-step",
        "use tools/convert_checkpoint.py": "--ckpt-convert-format",
        "a checkpoint must match the model": "--dist-ckpt-strictness",
        "use --save-interval and --keep-last": "--non-persistent-save-interval",
        "random state is a function of seed and position": "--no-save-rng",
        "initial values are always drawn": "--no-initialization",
        "there are no CUDA graphs": "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl",
        "torchrun gives LOCAL_RANK in the environment": "--local-rank",
    }
)

REFUSED_PREFIXES: dict[str, str] = {
    "--moe-": "there are no experts (MoE)",
    "--retro-": "there is no retrieval",
    "--mamba-": "there are no state-space layers",
    "--inference-": "use tools/generate.py",
}


def accepted_reason(flag: str) -> str:
    """Return why an accepted flag has no effect; `flag` may be followed by its values."""
    name = flag.split()[0]
    return ACCEPTED.get(name) or ACCEPTED_VALUES[name][1]


def judge(flag: str, values: list[str], where: str) -> bool:
    """Decide about a flag that is not ours.

    Args:
        flag: Its name in the command line's spelling.
        values: What was given with it.
        where: Its place, for the error message.

    Returns:
        True if it is accepted without effect, False if nobody knows it.

    Raises:
        ConfigurationError: It is known and refused, with the reason.
    """
    if flag in ACCEPTED:
        return True
    if flag in ACCEPTED_VALUES:
        allowed, reason = ACCEPTED_VALUES[flag]
        if values == [allowed]:
            return True
        found = shown(" ".join(values))
        raise ConfigurationError(f"{where}: found {found}, allowed {allowed}: {reason}")
    reason = REFUSED.get(flag)
    if reason is None:
        matches = (text for prefix, text in REFUSED_PREFIXES.items() if flag.startswith(prefix))
        reason = next(matches, None)
    if reason is not None:
        raise ConfigurationError(f"{where}: Megatron's {flag} is not offered: {reason}")
    return False
