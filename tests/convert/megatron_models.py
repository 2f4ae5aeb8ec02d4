"""Megatron-core's GPT on CPU ranks: saved and loaded by its own code; functions for ranks.

Three things that need CUDA are replaced while a model lives: the current device, the fork of CUDA
random states, and the forked writer processes of its checkpoints (which also want psutil).
"""

import contextlib
import queue
import re
import warnings
import zlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.convert.converted import LENGTH, tokens

# Settings as Megatron's command line has them. Padded vocabulary 128, tokens 100.
COMMON = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_size": 100,
    "padded_vocab_size": 128,
    "num_experts": None,
}
STYLES: dict[str, dict[str, Any]] = {
    "llama": COMMON
    | {
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_base": 5000,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
    "gpt": COMMON
    | {
        "group_query_attention": False,
        "num_query_groups": 1,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "swiglu": False,
        "bias_gelu_fusion": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
    },
}


@contextlib.contextmanager
def megatron(tp: int, pp: int) -> Iterator[None]:
    """Parallel state of Megatron-core over the default group, on CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies import filesystem_async as files
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        def write(transforms: Any, msc: bool, rank: int, buckets: Any, results: Any) -> None:
            done = {}
            for i, bucket in enumerate(buckets):
                out: queue.Queue = queue.Queue()
                count: Any = queue.Queue()
                count.put(i)
                files.FileSystemWriterAsync.write_preloaded_data(
                    transforms, i, bucket, out, count, True
                )
                done[i] = out.get()[1]
            results.put(done)

        patches = (
            mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
            mock.patch.object(torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
            mock.patch.object(torch.cuda, "synchronize", lambda *args: None),
            mock.patch.object(
                CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext()
            ),
            mock.patch.object(files, "_get_write_results_queue", queue.Queue),
            mock.patch.object(files, "_process_memory", lambda: 0),
            mock.patch.object(
                files.FileSystemWriterAsync, "write_preloaded_data_multiproc", staticmethod(write)
            ),
        )
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            parallel_state.initialize_model_parallel(tp, pp)
            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()


def build(style: str) -> Any:
    """This rank's part; values depend on the global name and the tensor-parallel rank alone."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    args = STYLES[style]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = TransformerConfig(
        num_layers=args["num_layers"],
        hidden_size=args["hidden_size"],
        ffn_hidden_size=args["ffn_hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else None,
        kv_channels=args["kv_channels"],
        normalization=args["normalization"],
        layernorm_epsilon=args["norm_epsilon"],
        gated_linear_unit=args["swiglu"],
        activation_func=F.silu if args["swiglu"] else F.gelu,
        add_bias_linear=args["add_bias_linear"],
        add_qkv_bias=args.get("add_qkv_bias", False),
        qk_layernorm=args.get("qk_layernorm", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        ),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_base=args.get("rotary_base", 10000),
    )
    return model.eval()


def fill(model: Any) -> None:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    first = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{first + int(m.group(1))}", name)
        shared = not getattr(parameter, "tensor_model_parallel", False)
        if name.startswith("output_layer.weight") and parameter.numel() and not shared:
            tied = model.share_embeddings_and_output_weights
            name = "embedding.word_embeddings.weight" if tied else name
        seed = zlib.crc32(f"{name} {0 if shared else rank}".encode())
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.15
        norm = "layernorm.weight" in name
        parameter.data.copy_(1.0 + noise if norm else noise)


@torch.no_grad()
def forward(model: Any) -> Tensor:
    """fp32 [b, s, 128]."""
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(tokens(), positions, mask)


def save_dist(folder: str, style: str, tp: int, layered: bool, with_args: bool) -> Tensor:
    """Save in the `torch_dist` form with Megatron-core's own code; return the logits."""
    with megatron(tp, 1):
        from megatron.core import dist_checkpointing

        model = build(style)
        fill(model)
        state = model.sharded_state_dict(metadata={"non_homogeneous_layers": layered})
        if with_args:
            state["args"] = Namespace(**STYLES[style])
        if dist.get_rank() == 0:
            Path(folder).mkdir()
        dist.barrier()
        dist_checkpointing.save(state, folder)
        return forward(model)


def load_dist(folder: str, style: str, tp: int) -> Tensor:
    """Load with Megatron-core's own code, every name demanded; return the logits."""
    with megatron(tp, 1):
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.validation import StrictHandling

        model = build(style)
        state = dist_checkpointing.load(
            model.sharded_state_dict(), folder, strict=StrictHandling.RAISE_ALL
        )
        names = {name for name, _ in model.named_parameters()}
        # Without Megatron's `_extra_state` keys, which hold no weight; every weight is demanded.
        assert names <= state.keys(), names - state.keys()
        found = model.load_state_dict({k: v for k, v in state.items() if k in names}, strict=False)
        assert not found.unexpected_keys and not names & set(found.missing_keys)
        return forward(model)


def save_legacy(folder: str, style: str, tp: int, pp: int) -> None:
    """Save one pickled file per rank, as Megatron did before `torch_dist`."""
    with megatron(tp, pp):
        from megatron.core import parallel_state

        model = build(style)
        fill(model)
        rank = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
        path = Path(folder) / name
        path.mkdir(parents=True)
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        state = {
            "args": Namespace(**STYLES[style], **sizes),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": model.state_dict(),
        }
        torch.save(state, path / "model_optim_rng.pt")
