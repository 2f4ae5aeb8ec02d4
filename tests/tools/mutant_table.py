"""Mistakes that somebody could make, one a mutant, and the tests that have to notice.

`before` occurs exactly once in its file; `tests/test_mutant_table.py` holds the table to that.
`tests/tools/mutants.py` plants them. A mutant that no test can notice says why in `survives`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A planted mistake.

    Attributes:
        name: unique.
        file: below the repository's root.
        before, after: the text that is replaced.
        breaks: what a run would do wrong.
        tests: what has to fail, as pytest takes it; below `tests/`.
        survives: why no test fails; empty where one does.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: tuple[str, ...]
    survives: str = ""


QUANTIZE, GEMM = "megafp8/numerics/quantize.py", "megafp8/numerics/gemm.py"
REGISTRY, SCALES = "megafp8/numerics/registry.py", "megafp8/numerics/scales.py"
RECIPE, STATISTICS = "megafp8/numerics/recipe.py", "megafp8/numerics/statistics.py"
PAYLOAD, WINDOWS = "megafp8/numerics/payload.py", "megafp8/numerics/windows.py"
TEST_QUANTIZE = "numerics/test_numerics_quantize.py"
TEST_REGISTRY = "numerics/test_numerics_registry.py"
TEST_RECIPE, TEST_SCALES = "numerics/test_numerics_recipe.py", "numerics/test_numerics_scales.py"

NUMERICS = (
    Mutant(
        "cast without saturation",
        QUANTIZE,
        "return hp.mul_(scale).clamp_(-fmt.max, fmt.max)",
        "return hp.mul_(scale)",
        "an outlier becomes NaN or inf instead of the largest FP8 number",
        (TEST_QUANTIZE,),
    ),
    Mutant(
        "amax of positive values",
        QUANTIZE,
        "torch.maximum(high, -low).abs().float()",
        "high.abs().float()",
        "negative outliers saturate",
        (TEST_QUANTIZE,),
    ),
    Mutant(
        "decoded with the scale",
        QUANTIZE,
        "return values.mul_(self.scale_inv).to(dtype)",
        "return values.div_(self.scale_inv).to(dtype)",
        "values come back as if scale and scale_inv were one",
        (TEST_QUANTIZE,),
    ),
    Mutant(
        "gradients in the forward format",
        RECIPE,
        'return self.gradient_format if role.startswith("grad_") else self.forward_format',
        "return self.forward_format",
        "output gradients are E4M3 in a hybrid run",
        (TEST_RECIPE,),
    ),
    Mutant(
        "most_recent takes the oldest",
        RECIPE,
        "return history[-1]",
        "return history[0]",
        "scales lag by a whole window",
        (TEST_RECIPE,),
    ),
    Mutant(
        "quantile counts one entry too many",
        RECIPE,
        "position = (filled - 1).clamp(min=0) * q",
        "position = (filled - 1).clamp(min=1) * q",
        "a window of one entry is read beside it",
        (TEST_RECIPE,),
    ),
    Mutant(
        "trimmed_max trims all",
        RECIPE,
        "dropped = (filled - 1).clamp(min=0, max=k)",
        "dropped = filled.clamp(min=0, max=k)",
        "a short window has no maximum and keeps a stale scale",
        (TEST_RECIPE,),
    ),
    Mutant(
        "ema weights the wrong way round",
        RECIPE,
        "weight * (1.0 - b)",
        "weight * b",
        "the average follows the newest amax with the weight of the past",
        (TEST_RECIPE,),
    ),
    Mutant(
        "margin ignored by the rule",
        SCALES,
        "new = (largest / amax) / 2.0**margin",
        "new = largest / amax",
        "no head room where some was asked for",
        (f"{TEST_REGISTRY}::test_margin",),
    ),
    Mutant(
        "margin not handed on",
        WINDOWS,
        "fp8_max, recipe.margin, power_of_2, cap)",
        "fp8_max, 0, power_of_2, cap)",
        "--fp8-margin does nothing",
        (f"{TEST_REGISTRY}::test_margin",),
    ),
    Mutant(
        "an infinite amax makes a scale",
        SCALES,
        "usable = (amax > 0) & amax.isfinite()",
        "usable = amax > 0",
        "one inf drives the scale to the smallest number",
        (TEST_SCALES,),
    ),
    Mutant(
        "power of two rounded up",
        SCALES,
        "bits = scale.view(torch.int32) & ~_MANTISSA",
        "bits = (scale.view(torch.int32) + _MANTISSA) & ~_MANTISSA",
        "the largest value saturates",
        (TEST_SCALES,),
    ),
    Mutant(
        "e8m0 rounds up at equality",
        SCALES,
        "((bits & _MANTISSA) > (largest & _MANTISSA))",
        "((bits & _MANTISSA) >= (largest & _MANTISSA))",
        "blocks whose amax is the format's largest lose a bit",
        (TEST_SCALES,),
    ),
    Mutant(
        "window rolls the other way",
        REGISTRY,
        "rolled = torch.cat((self.amax_history[1:], amax[None]))",
        "rolled = torch.cat((amax[None], self.amax_history[:-1]))",
        "newest entries are where the oldest belong",
        (TEST_REGISTRY,),
    ),
    Mutant(
        "a non-finite amax enters the window",
        REGISTRY,
        "enters = (amax > 0) & ~bad if skip else amax > 0",
        "enters = amax > 0",
        "one bad micro-batch freezes the scale for a window",
        (TEST_REGISTRY,),
    ),
    Mutant(
        "scale_inv stays behind",
        REGISTRY,
        "torch.reciprocal(self.scale, out=self.scale_inv)\n        self.nonfinite",
        "self.nonfinite",
        "products are multiplied with the inverse of an earlier scale",
        (TEST_REGISTRY,),
    ),
    Mutant(
        "the last micro-batch's amax wins",
        REGISTRY,
        "larger(pending, amax, out=pending)",
        "pending.copy_(amax)",
        "larger values of earlier micro-batches are forgotten",
        (f"{TEST_REGISTRY}::test_one_entry_per_step_is_the_maximum_of_its_micro_batches",),
    ),
    Mutant(
        "a shorter window keeps its oldest entries",
        WINDOWS,
        "return entries[-recipe.amax_history_len :]",
        "return entries[: recipe.amax_history_len]",
        "a resume with a shorter window goes back in time",
        (TEST_REGISTRY,),
    ),
    Mutant(
        "scales of another rule are kept at a load",
        "megafp8/checkpoint/scale_state.py",
        "registry.rescale(",
        "(lambda *rule: 0)(",
        "a hybrid run that goes on in E4M3 saturates its gradients for a step",
        ("train/test_scale_choice.py",),
    ),
    Mutant(
        "a first weight is cast with scale 1",
        REGISTRY,
        "torch.where(filled, scale, new)",
        "torch.where(filled, scale, scale)",
        "the first FP8 step flushes small weights",
        ("train/test_scale_choice.py",),
    ),
    Mutant(
        "kept casts outlive a skipped step",
        REGISTRY,
        "        self.version += 1\n\n    @torch.no_grad()\n    def take_current",
        "\n    @torch.no_grad()\n    def take_current",
        "weights cast before a skipped step record no amax after it",
        (TEST_REGISTRY,),
    ),
    Mutant(
        "a decoded gradient is kept",
        GEMM,
        "    dy.decoded = None\n    return _decoded_mm(a.t(), b",
        "    return _decoded_mm(a.t(), b",
        "every output gradient stays in memory a second time",
        ("numerics/test_numerics_gemm.py",),
    ),
    Mutant(
        "products scaled by one operand",
        GEMM,
        "alpha = math.prod(float(factor) for factor in factors)",
        "alpha = float(factors[0])",
        "the weight's scale is left out of all products",
        ("numerics/test_numerics_gemm.py",),
    ),
    Mutant(
        "own part of an FP8 sum is cast",
        PAYLOAD,
        "own if source == rank else decode_row(row, own.numel(), fmt)",
        "decode_row(row, own.numel(), fmt)",
        "a rank loses precision of values that never travel",
        ("numerics/test_numerics_payload.py",),
    ),
    Mutant(
        "underflow counts zeros",
        STATISTICS,
        "(x != 0) & (values == 0),",
        "values == 0,",
        "sparse tensors look as if FP8 had erased them",
        ("numerics/test_numerics_statistics.py",),
    ),
)

COLLECTIVES, FSDP = "megafp8/parallel/collectives.py", "megafp8/parallel/fsdp.py"
PIPELINE, MESH = "megafp8/parallel/pipeline.py", "megafp8/parallel/mesh.py"
RNG = "megafp8/parallel/rng.py"

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
        "loss summed over one stage",
        MESH,
        'loss=cache.get(_groups(layout, {"pp", "replicate", "fsdp"})),',
        'loss=cache.get(_groups(layout, {"replicate", "fsdp"})),',
        "ranks of other stages see no loss and no tokens",
        ("parallel/test_mesh.py",),
    ),
    Mutant(
        "replicas read the same data",
        MESH,
        "dp_rank=place.replica * layout.fsdp + place.shard,",
        "dp_rank=place.shard,",
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

LOOP, STEP, STATE = "megafp8/train/loop.py", "megafp8/train/step.py", "megafp8/train/state.py"
GRADIENTS, OPTIMIZER = "megafp8/train/gradients.py", "megafp8/train/optimizer.py"
SCHEDULE, SCALER = "megafp8/train/schedule.py", "megafp8/train/loss_scaler.py"
FED = "distributed/test_loop.py::test_each_sample_and_dropout_stream_is_used_once"
VALID = "distributed/test_loop.py::test_validation_reads_the_validation_split_when_it_is_due"
RESUME = "distributed/test_resume.py::test_resumed_run_is_bitwise_the_same"

TRAIN = (
    Mutant(
        "dropout of iteration 0 for ever",
        LOOP,
        "to_tensors(batches, self.mesh, self.config.training.seed, state.iteration)",
        "to_tensors(batches, self.mesh, self.config.training.seed, 0)",
        "every iteration drops the same units",
        (FED,),
    ),
    Mutant(
        "ramp ignored by the data",
        LOOP,
        "        size = self.batches.batch_size(state.consumed_samples)\n",
        "        size = self.batches.global_batch_size\n",
        "--rampup-batch-size does nothing",
        (FED,),
    ),
    Mutant(
        "position moves by the full batch",
        LOOP,
        "state.consumed_samples += batch_size",
        "state.consumed_samples += self.batches.global_batch_size",
        "a ramp skips samples",
        (FED,),
    ),
    Mutant(
        "learning rate of the next position",
        LOOP,
        "learning_rate = self.schedule.learning_rate(state.consumed_samples)",
        "learning_rate = self.schedule.learning_rate(state.consumed_samples + batch_size)",
        "the schedule is one iteration ahead of Megatron's",
        (FED,),
    ),
    Mutant(
        "validation on the training set",
        LOOP,
        "                self.datasets.valid,\n",
        "                self.datasets.train,\n",
        "over-fitting stays unseen",
        (VALID,),
    ),
    Mutant(
        "skipped iterations are not counted",
        LOOP,
        "        state.skipped_iterations += result.skipped\n",
        "",
        "checkpoints say that nothing was skipped",
        ("train/test_step.py::test_counters_data_position_and_the_stop",),
    ),
    Mutant(
        "loss scale not saved",
        STATE,
        '            "loss_scaler": step.loss_scaler.state_dict(),\n',
        "",
        "an FP16 run resumes at the initial loss scale",
        (f"{RESUME}[fp16]",),
    ),
    Mutant(
        "weight scales not refreshed after a load",
        STATE,
        "    step.refresh_weight_scales()\n",
        "",
        "weights gathered in FP8 are cast with the scales of their initial values",
        (f"{RESUME}[fsdp2-tensorwise-gathered]",),
    ),
    Mutant(
        "second moments not saved",
        STATE,
        "            if key.startswith(prefix):\n",
        '            if key.startswith(prefix) and not key.endswith(".exp_avg_sq"):\n',
        "a resumed run starts Adam's second moment at zero",
        (f"{RESUME}[fp16]",),
    ),
    Mutant(
        "tensor-parallel ranks share a weight's scale",
        STEP,
        "return rows[self.mesh.tp_rank]",
        "return rows.amax(0)",
        "--no-fp8-reduce-amax shares scales over tp all the same",
        (
            "distributed/test_rank_scales_runs.py::"
            "test_ranks_keep_and_get_back_their_own_scales[tp2]",
        ),
    ),
    Mutant(
        "loss scale stays in the gradient",
        STEP,
        "divisor = tokens * scale if tokens else 1.0",
        "divisor = tokens if tokens else 1.0",
        "FP16 updates depend on the loss scale",
        ("train/test_step.py::test_a_constant_loss_scale_cancels",),
    ),
    Mutant(
        "clipped by the norm of the sum",
        STEP,
        "clipped = min(1.0, clip / (grad_norm + 1e-6))",
        "clipped = min(1.0, clip / (raw_norm + 1e-6))",
        "--clip-grad depends on the tokens of a batch",
        ("train/test_gradients.py::test_clipping_multiplies_all_gradients_alike",),
    ),
    Mutant(
        "a skipped step moves scales",
        STEP,
        "self._update_scales(skipped, before)",
        "self._update_scales(False, before)",
        "the amaxes of a bad step enter the windows",
        ("train/test_step.py", "train/test_recipe_state.py"),
    ),
    Mutant(
        "weights leave no amax",
        STEP,
        "registry.pending_amax[self._fp8_weight_indices] = self._weight_amaxes(registry)",
        "self._weight_amaxes(registry)",
        "scales of weights stay at 1",
        ("train/test_fp8_state.py::test_one_entry_per_tensor_and_step",),
    ),
    Mutant(
        "replicated gradients stay partial",
        GRADIENTS,
        '        self.mesh.tp.all_reduce(flat, "tp_all_reduce")\n',
        "",
        "norms drift apart over tensor-parallel ranks",
        ("train/test_gradients.py::test_replicated_parameters_get_the_sum_over_tensor_parallel",),
    ),
    Mutant(
        "replicated parameters count on every rank",
        GRADIENTS,
        "(spec.tp_dim is not None or mesh.tp_rank == 0)",
        "True",
        "the gradient norm grows with tp",
        ("train/test_gradients.py::test_every_parameter_counts_once",),
    ),
    Mutant(
        "tied embeddings drift apart",
        GRADIENTS,
        '            self.mesh.tied.all_reduce(self._grad(mine), "tied_embedding")\n',
        "            pass\n",
        "first and last stage train two embeddings",
        ("distributed/test_initial_state.py::test_tied_embeddings_stay_bit_equal",),
    ),
    Mutant(
        "biases decay",
        OPTIMIZER,
        'return dimensions >= 2 and not name.endswith(".bias")',
        "return dimensions >= 2",
        "the fused SwiGLU bias is decayed",
        ("train/test_gradients.py::test_decay_is_for_matrices", "train/test_optimizer.py"),
    ),
    Mutant(
        "betas change places",
        OPTIMIZER,
        "betas=(config.adam_beta1, config.adam_beta2),",
        "betas=(config.adam_beta2, config.adam_beta1),",
        "momentum of 0.95 and a noisy second moment",
        ("train/test_optimizer.py",),
    ),
    Mutant(
        "the learning rate stays at its maximum",
        OPTIMIZER,
        '        group["lr"] = learning_rate\n',
        "        pass\n",
        "no schedule has an effect",
        ("train/test_optimizer.py",),
    ),
    Mutant(
        "warm-up counts as decay",
        SCHEDULE,
        "done = consumed_samples - self.warmup_samples",
        "done = consumed_samples",
        "the rate falls faster than Megatron's and ends below its minimum",
        ("train/test_schedule.py",),
    ),
    Mutant(
        "loss scale grows one iteration late",
        SCALER,
        "if self._quiet == self.window:",
        "if self._quiet > self.window:",
        "not Megatron's sequence",
        ("train/test_loss_scaler.py",),
    ),
    Mutant(
        "growth counter starts anew",
        SCALER,
        '        self._quiet = int(state["growth_tracker"])\n',
        "",
        "a resumed FP16 run grows its scale later",
        ("train/test_loss_scaler.py",),
    ),
    Mutant(
        "the loaded iteration's metrics are dropped",
        "megafp8/train/metrics.py",
        'entry["iteration"] <= last_iteration',
        'entry["iteration"] < last_iteration',
        "a hole in metrics.jsonl at each resume",
        ("train/test_metrics.py",),
    ),
    Mutant(
        "each epoch in the same order",
        "megafp8/data/gpt_dataset.py",
        "order = Permutation(self._samples, self._seed, epoch, self._stream)",
        "order = Permutation(self._samples, self._seed, 0, self._stream)",
        "data are never shuffled again",
        ("data/test_gpt_dataset.py",),
    ),
)

FIND, LOCK, SAVE = (f"megafp8/checkpoint/{name}.py" for name in ("find", "lock", "save"))
SAVER, LOAD, RANKS = (f"megafp8/checkpoint/{name}.py" for name in ("saver", "load", "rank_scales"))
TEST_LOCK, TEST_SAVER = "checkpoint/test_folder_lock.py", "checkpoint/test_saver.py"
TEST_SAVE = "checkpoint/test_save_faults.py"

CHECKPOINT = (
    Mutant(
        "another job's lock is removed",
        LOCK,
        'if owner is not None and owner.get("token") == self._token:\n',
        "if owner is not None:\n",
        "a job whose lock was taken away frees the folder of its successor",
        (f"{TEST_LOCK}::test_a_lock_that_was_taken_away_is_noticed",),
    ),
    Mutant(
        "every owner is dead",
        LOCK,
        "alive = self._owner_lives(owner)",
        "alive = False",
        "two jobs write one folder",
        (f"{TEST_LOCK}::test_the_second_is_refused_until_the_first_lets_go",),
    ),
    Mutant(
        "a reused process id owns the lock",
        LOCK,
        'return started is not None and started == owner.get("started")',
        "return started is not None",
        "a folder stays locked by a program that has nothing to do with it",
        (f"{TEST_LOCK}::test_a_process_id_that_was_given_away_again_is_not_the_owner",),
    ),
    Mutant(
        "lock released before the run",
        "megafp8/train/folders.py",
        "        lock.append(taken)\n",
        "        taken.release()\n",
        "two jobs write one folder",
        ("train/test_folders.py::test_a_folder_is_held_for_the_whole_run",),
    ),
    Mutant(
        "the record follows the rename",
        SAVE,
        "    write_atomically(temporary / RECORD_NAME, record.to_json())\n"
        "    _replace(temporary, final)\n",
        "    _replace(temporary, final)\n"
        "    write_atomically(final / RECORD_NAME, record.to_json())\n",
        "a kill between the two leaves a checkpoint without its record",
        (f"{TEST_SAVE}::test_killed_at_any_step",),
    ),
    Mutant(
        "one checkpoint too many is kept",
        SAVE,
        "older[keep_last - 1 :]",
        "older[keep_last:]",
        "the disk fills",
        (f"{TEST_SAVE}::test_keep_last",),
    ),
    Mutant(
        "checkpoints of later iterations are deleted",
        SAVE,
        "iteration is not None and iteration < current and is_complete(path)",
        "iteration is not None and iteration != current and is_complete(path)",
        "a run that was set back deletes what it may go back to",
        (f"{TEST_SAVE}::test_keep_last",),
    ),
    Mutant(
        "deleted while it is loaded",
        SAVE,
        "            if not free:\n",
        "            if False:\n",
        "--keep-last takes a checkpoint away from a job that starts from it",
        (f"{TEST_SAVER}::test_keep_last_spares_what_is_being_loaded",),
    ),
    Mutant(
        "live tensors are written beside training",
        "megafp8/checkpoint/staging.py",
        "        data = _copy(data, buffers)\n",
        "        pass\n",
        "--async-save stores a mixture of two iterations",
        (f"{TEST_SAVER}::test_what_is_saved_is_the_state_at_the_call",),
    ),
    Mutant(
        "two saves in flight",
        SAVER,
        "        self.wait()\n        self._iteration = iteration",
        "        self._iteration = iteration",
        "the second save writes over the first one's copies",
        (f"{TEST_SAVER}::test_the_next_save_waits_for_the_one_in_flight",),
    ),
    Mutant(
        "shards are not compared with their checksums",
        LOAD,
        "shares = _share_files(reader.files, [one.files for one in inspections]) if verify else {}",
        "shares: dict = {}",
        "flipped bits train on",
        (
            "checkpoint/test_load_errors.py::"
            "test_damage_is_named_with_the_checkpoint_to_use_instead",
        ),
    ),
    Mutant(
        "a tensor of another dtype is loaded",
        LOAD,
        "if saved.properties.dtype != tensor.dtype:",
        "if False:",
        "weights are cast in silence",
        ("checkpoint/test_load_errors.py::test_weights_must_match",),
    ),
    Mutant(
        "latest is not asked",
        FIND,
        "    if wanted in complete:\n",
        "    if False:\n",
        "--load takes the newest where `latest` was set back",
        ("checkpoint/test_find_checkpoint.py::test_latest_decides",),
    ),
    Mutant(
        "a record's own checksum is not compared",
        "megafp8/checkpoint/record.py",
        "stored, found = content.pop(CHECKSUM), content_crc32(content)",
        "stored = found = content.pop(CHECKSUM)",
        "a damaged megafp8.json is believed",
        ("checkpoint/test_record.py",),
    ),
    Mutant(
        "the checksum of a file's last part",
        "megafp8/checkpoint/files.py",
        "checksum = crc32(chunk[:count], checksum)",
        "checksum = crc32(chunk[:count])",
        "damage in all but the last MiB of a file is not found",
        ("checkpoint/test_find_checkpoint.py::test_a_checksum_is_of_the_whole_file",),
    ),
    Mutant(
        "tensors begin where their storage does",
        "megafp8/checkpoint/tensor_file.py",
        "return self.start + self.first * self.dtype.itemsize",
        "return self.start",
        "a part of a larger storage is read from its beginning",
        ("checkpoint/test_tensor_file.py::test_a_part_of_a_storage_begins_where_it_does",),
    ),
    Mutant(
        "scales of ranks merge by maximum",
        RANKS,
        'merge = torch.amin if name.endswith(".scale") else torch.amax',
        "merge = torch.amax",
        "fewer ranks saturate what more ranks could hold",
        ("checkpoint/test_rank_scales.py",),
    ),
    Mutant(
        "a share of ranks is rounded down",
        RANKS,
        "-(-(index + 1) * others // parts)",
        "(index + 1) * others // parts",
        "a change from 2 to 3 ranks loses scales",
        ("checkpoint/test_rank_scales.py",),
    ),
)

MUTANTS = (*NUMERICS, *PARALLEL, *TRAIN, *CHECKPOINT)
