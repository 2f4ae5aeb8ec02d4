"""Megatron's other flags, known by name so that a launch script from there is never misread.

Accepted are those that cannot change a number here: each gets one log line that says why. All
others are refused with the reason and, where there is one, the flag to use.
"""

from megafp8.config.messages import shown
from megafp8.errors import ConfigurationError

# Flags without effect, and what holds here in their place.
ACCEPTED: dict[str, str] = {
    "--use-mcore-models": "there is one model implementation",
    "--use-flash-attn": "the attention core picks its kernel; see --attention-backend",
    "--attention-softmax-in-fp32": "softmax always accumulates in fp32",
    "--accumulate-allreduce-grads-in-fp32": "gradients are always accumulated in fp32",
    "--calculate-per-token-loss": "the loss is always a mean over unmasked tokens",
    "--no-gradient-accumulation-fusion": "there is no such fusion",
    "--no-bias-gelu-fusion": "there is no such fusion",
    "--no-bias-swiglu-fusion": "there is no such fusion",
    "--no-bias-dropout-fusion": "there is no such fusion",
    "--no-masked-softmax-fusion": "there is no such fusion",
    "--no-rope-fusion": "there is no such fusion",
    "--no-persist-layer-norm": "there is no such kernel",
    "--no-mmap-bin-files": "corpora are read as the data loader finds best",
    "--no-create-attention-mask-in-dataloader": "no mask is made, attention is causal",
    "--use-cpu-initialization": "initial values are always drawn on the CPU",
    "--no-async-tensor-model-parallel-allreduce": "a matter of speed",
    "--no-overlap-p2p-communication": "a matter of speed",
    "--overlap-p2p-communication-warmup-flush": "a matter of speed",
    "--ddp-bucket-size": "FSDP2 groups parameters by block",
    "--ddp-num-buckets": "FSDP2 groups parameters by block",
    "--ddp-average-in-collective": "gradients are summed and scaled once",
    "--recompute-method": "blocks are recomputed one by one",
    "--cp-comm-type": "there is no context parallelism yet",
    "--manual-gc": "a matter of speed",
    "--manual-gc-interval": "a matter of speed",
    "--empty-unused-memory-level": "a matter of memory",
    "--nccl-communicator-config-path": "a matter of speed",
    "--timing-log-level": "metrics.jsonl holds the times of each iteration",
    "--timing-log-option": "metrics.jsonl holds the times of each iteration",
    "--no-barrier-with-level-1-timing": "metrics.jsonl holds the times of each iteration",
    "--log-timers-to-tensorboard": "metrics.jsonl holds the times of each iteration",
    "--log-memory-to-tensorboard": "metrics.jsonl holds the peak of memory",
    "--log-validation-ppl-to-tensorboard": "metrics.jsonl holds the validation loss",
    "--log-world-size-to-tensorboard": "the run folder holds the layout",
    "--log-progress": "metrics.jsonl holds the progress",
    "--log-straggler": "no straggler detection",
    "--tensorboard-log-interval": "every iteration is written",
    "--tensorboard-queue-size": "a matter of speed",
    "--wandb-save-dir": "files of Weights & Biases are in the run folder",
    "--use-persistent-ckpt-worker": "a matter of speed",
    "--ckpt-fully-parallel-save": "checkpoints are always written by all ranks",
    "--ckpt-fully-parallel-load": "checkpoints are always read by all ranks",
    "--ckpt-assume-constant-structure": "a matter of speed",
}

# Flags of which one value means what is done here anyway.
ACCEPTED_VALUES: dict[str, tuple[str, str]] = {
    "--dataloader-type": ("single", "samples are read in one order"),
}

REFUSED: dict[str, str] = {
    "--fp8-interval": "it is ignored since Transformer Engine 1.8: scales are updated every step",
    "--fp4-format": "there is no FP4",
    "--te-precision-config-file": "use --precision-policy FILE.yaml",
    "--grad-reduce-in-bf16": "gradients are reduced in fp32",
    "--num-experts": "there are no experts (MoE)",
    "--multi-latent-attention": "there is no latent attention",
    "--vocab-file": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model VOCAB.json; its "
    "merges are read beside it (vocab.json and merges.txt, gpt2-vocab.json and gpt2-merges.txt)",
    "--merge-file": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model VOCAB.json; its "
    "merges are read beside it (vocab.json and merges.txt, gpt2-vocab.json and gpt2-merges.txt)",
    "--num-virtual-stages-per-pipeline-rank": "use --num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers": "stages hold equal numbers of layers",
    "--decoder-last-pipeline-num-layers": "stages hold equal numbers of layers",
    "--pipeline-model-parallel-layout": "stages hold equal numbers of layers",
    "--account-for-embedding-in-pipeline-split": "stages hold equal numbers of layers",
    "--account-for-loss-in-pipeline-split": "stages hold equal numbers of layers",
    "--use-tp-pp-dp-mapping": "the order of ranks is fixed: tp fastest, pp slowest",
    "--recompute-activations": "use --recompute-granularity selective",
    "--lr-warmup-samples": "use --lr-warmup-iters or --lr-warmup-fraction",
    "--lr-decay-samples": "use --lr-decay-iters",
    "--lr-warmup-init": "the warm-up starts at 0",
    "--decoupled-lr": "all parameters share one learning rate",
    "--decoupled-min-lr": "all parameters share one learning rate",
    "--start-weight-decay": "weight decay is constant",
    "--end-weight-decay": "weight decay is constant",
    "--weight-decay-incr-style": "weight decay is constant",
    "--sgd-momentum": "the optimizer's momentum is fixed",
    "--override-opt_param-scheduler": "the schedule always follows the flags",
    "--use-checkpoint-opt_param-scheduler": "the schedule always follows the flags",
    "--use-precision-aware-optimizer": "optimizer state is fp32",
    "--optimizer-cpu-offload": "optimizer state stays on the device",
    "--use-megatron-fsdp": "sharding goes through FSDP2; see --fsdp-size",
    "--data-parallel-sharding-strategy": "use --fsdp-size and --reshard-after-forward",
    "--num-distributed-optimizer-instances": "use --fsdp-size",
    "--apply-layernorm-1p": "norm weights are stored as they are used",
    "--apply-residual-connection-post-layernorm": "blocks are pre-norm",
    "--squared-relu": "activations are gelu, gelu-tanh and --swiglu",
    "--quick-geglu": "activations are gelu, gelu-tanh and --swiglu",
    "--openai-gelu": "use --activation gelu-tanh",
    "--init-method-xavier-uniform": "weights are drawn from a normal distribution",
    "--apply-query-key-layer-scaling": "softmax accumulates in fp32 and needs no scaling",
    "--fp16-lm-cross-entropy": "the loss is computed in fp32",
    "--fp32-residual-connection": "the residual stream has the compute type",
    "--rotary-interleaved": "rope turns halves, not pairs",
    "--rotary-seq-len-interpolation-factor": "use --use-rope-scaling",
    "--use-rotary-position-embeddings": "use --position-embedding-type rope",
    "--no-position-embedding": "use --position-embedding-type none",
    "--mtp-num-layers": "there is no multi-token prediction",
    "--skip-train": "there is no evaluation without training; --eval-interval evaluates during it",
    "--perform-initial-eval": "the first evaluation comes after --eval-interval iterations",
    "--retro-add-retriever": "there is no retrieval",
    "--data-args-path": "use --data-path PREFIX with the corpus that the file lists; in place of "
    "several, tools/preprocess_data.py writes one corpus of all files of --input",
    "--per-split-data-args-path": "use --train-data-path, --valid-data-path, --test-data-path",
    "--ckpt-step": "use --load DIR/iter_N",
    "--ckpt-convert-format": "use tools/convert_checkpoint.py",
    "--dist-ckpt-strictness": "a checkpoint must match the model",
    "--non-persistent-save-interval": "use --save-interval and --keep-last",
    "--no-save-rng": "random state is a function of seed and position",
    "--no-initialization": "initial values are always drawn",
    "--enable-cuda-graph": "there are no CUDA graphs",
    "--external-cuda-graph": "there are no CUDA graphs",
    "--cuda-graph-impl": "there are no CUDA graphs",
    "--local-rank": "torchrun gives LOCAL_RANK in the environment",
}

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
