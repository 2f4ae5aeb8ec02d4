"""Mistakes in collectives, FSDP, pipelines and random streams."""

from tests.tools.mutant_table.mutant import Mutant

COLLECTIVES, FSDP = "megafp8/parallel/collectives.py", "megafp8/parallel/fsdp.py"
PIPELINE, RNG = "megafp8/parallel/pipeline.py", "megafp8/parallel/rng.py"
AXES = "megafp8/config/axes.py"

PARALLEL = (
    Mutant(
        "no all-reduce of an input's gradient",
        COLLECTIVES,
        "        ctx.group.all_reduce(grad, ctx.kind)\n",
        "",
        "gradients below a tensor-parallel region are those of one rank",
        ("parallel/test_collectives.py",),
    ),
    Mutant(
        "a sequence's gradient is cut, not summed",
        COLLECTIVES,
        "return ctx.group.reduce_scatter(grad, ctx.kinds[1])[0], None, None",
        "return grad.chunk(ctx.group.size)[ctx.group.rank], None, None",
        "sequence parallelism drops the other ranks' gradients",
        ("parallel/test_collectives.py",),
    ),
    Mutant(
        "every reduction is a sum",
        COLLECTIVES,
        "return dist.all_reduce(tensor, op=op, group",
        "return dist.all_reduce(tensor, group",
        "amaxes of ranks are added where the largest is meant",
        ("distributed/test_rank_scales_runs.py::test_shared_scales_are_those_of_one_rank",),
    ),
    Mutant(
        "first rank's part stands for the own",
        COLLECTIVES,
        "total = sum_rows(received, rows[self.rank], self.rank, fmt)",
        "total = sum_rows(received, rows[0], self.rank, fmt)",
        "FP8 reductions add another rank's part twice",
        ("parallel/test_fp8_reductions.py",),
    ),
    Mutant(
        "error feedback with the wrong sign",
        FSDP,
        "lost = row - decode_row(payload[place], row.numel(), E4M3)",
        "lost = decode_row(payload[place], row.numel(), E4M3) - row",
        "what a cast lost is lost twice",
        ("parallel/test_fp8_reductions.py",),
    ),
    Mutant(
        "gradients averaged over ranks",
        FSDP,
        "    module.set_gradient_divide_factor(1.0)\n",
        "",
        "the gradient shrinks with the number of ranks",
        (
            "distributed/test_initial_state.py::"
            "test_weights_loss_and_gradients_equal_one_rank[fsdp2]",
        ),
    ),
    Mutant(
        "gradients reduced in the compute dtype",
        FSDP,
        "reduce_dtype=torch.float32, cast_forward_inputs=False",
        "reduce_dtype=compute_dtype, cast_forward_inputs=False",
        "sums over ranks are rounded to BF16",
        ("distributed/test_run_traffic.py::test_a_dry_run_knows_the_bytes[wires]",),
    ),
    Mutant(
        "synchronised with the first micro-batch",
        PIPELINE,
        "begin_micro_batch(module, index == len(micro_batches) - 1, keep)",
        "begin_micro_batch(module, index == 0, keep)",
        "later micro-batches are not reduced",
        ("distributed/test_parity.py::test_kept_parameters_give_one_ranks_losses",),
    ),
    Mutant(
        "deferred work of two backwards in one queue",
        PIPELINE,
        "work, self.queue = self.queue, deque()",
        "work = self.queue",
        "a zero-bubble schedule runs weight gradients in another slot",
        ("parallel/test_pipeline.py::test_deferred_work_belongs_to_one_backward",),
    ),
    Mutant(
        "reported loss keeps the loss scale",
        PIPELINE,
        "return total / loss_scale",
        "return total",
        "FP16 runs over stages report a loss of thousands",
        ("train/test_step.py::test_fp16_boundaries_are_fp16",),
    ),
    Mutant(
        "further losses are reported alone",
        PIPELINE,
        "        return gradients[0], None, *ctx.gradients\n",
        "        return gradients[0], None, *(None for _ in ctx.gradients)\n",
        "a stage's own losses train nothing",
        ("distributed/test_extra_losses.py",),
    ),
    Mutant(
        "loss summed over one stage",
        AXES,
        '4, {"loss", "tied"}, alone=True',
        '4, {"tied"}, alone=True',
        "ranks of other stages see no loss and no tokens",
        ("parallel/test_mesh.py",),
    ),
    Mutant(
        "replicas read the same data",
        AXES,
        '3, {"dp", "stage", "loss"}',
        '3, {"stage", "loss"}',
        "HSDP trains on half of the batch, twice",
        ("parallel/test_mesh.py",),
    ),
    Mutant(
        "dropout keeps what it should drop",
        RNG,
        "generator=generator, device=device) >= p",
        "generator=generator, device=device) < p",
        "at 0.1, nine tenths are dropped",
        ("layers/test_dropout.py",),
    ),
    Mutant(
        "stream names run together",
        RNG,
        '"/".join(str(part) for part in parts)',
        '"".join(str(part) for part in parts)',
        "iteration 1, micro-batch 23 draws as iteration 12, micro-batch 3",
        ("parallel/test_rng.py",),
    ),
    Mutant(
        "all-reduces counted half",
        "megafp8/parallel/traffic.py",
        "sent = 2 * tensor.numel()",
        "sent = tensor.numel()",
        "reported traffic is too small",
        ("parallel/test_traffic.py",),
    ),
    Mutant(
        "weights gathered with scale_inv",
        "megafp8/parallel/fp8_weights.py",
        "codes = quantize(shard, registry.scale_of(index), registry.format_of(index))",
        "codes = quantize(shard, registry.scale_inv_of(index), registry.format_of(index))",
        "--fp8-param-gather gathers noise",
        ("distributed/test_fp8_wires.py::test_gathered_codes_are_those_of_the_whole_master[one]",),
    ),
)
