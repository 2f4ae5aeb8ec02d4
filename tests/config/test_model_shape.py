"""Names, shapes and counts of parameters and linears against known models and hand counts."""

import math
from pathlib import Path

import pytest

from megafp8.config import ModelShape, RunConfig, load_config
from megafp8.errors import ConfigurationError

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "configs"


def preset(name: str, *flags: str) -> RunConfig:
    return load_config(["--config", str(CONFIGS / f"{name}.yaml"), *flags])


def small(text: str = "") -> RunConfig:
    return load_config(
        (
            "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
            "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 "
            f"--lr 1e-3 {text}"
        ).split()
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # The counts of the published checkpoints; GPT-2's with the vocabulary padded to 50304.
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("gpt2_345m", 354_823_168 + (50304 - 50257) * 1024),
    ],
)
def test_counts_of_known_models(name: str, count: int) -> None:
    config = preset(name)
    assert config.known_vocab_size is not None
    assert ModelShape.from_config(config, config.known_vocab_size).num_parameters == count


def test_names_and_shapes_with_all_biases() -> None:
    config = small(
        "--swiglu --group-query-attention --num-query-groups 2 --qk-layernorm "
        "--untie-embeddings-and-output-weights"
    )
    specs = {spec.name: spec for spec in ModelShape.from_config(config, 100).parameters()}
    block = {
        name.removeprefix("decoder.layers.1."): (spec.shape, spec.tp_dim, spec.kind)
        for name, spec in specs.items()
        if spec.layer == 1
    }
    assert block == {
        "input_layernorm.weight": ((32,), None, "norm"),
        "input_layernorm.bias": ((32,), None, "norm_bias"),
        # 2 groups of 2 query heads, 1 key and 1 value head, each of 8 channels.
        "self_attention.linear_qkv.weight": ((64, 32), 0, "linear"),
        "self_attention.linear_qkv.bias": ((64,), 0, "bias"),
        "self_attention.q_layernorm.weight": ((8,), None, "norm"),
        "self_attention.q_layernorm.bias": ((8,), None, "norm_bias"),
        "self_attention.k_layernorm.weight": ((8,), None, "norm"),
        "self_attention.k_layernorm.bias": ((8,), None, "norm_bias"),
        "self_attention.linear_proj.weight": ((32, 32), 1, "linear"),
        "self_attention.linear_proj.bias": ((32,), None, "bias"),
        "pre_mlp_layernorm.weight": ((32,), None, "norm"),
        "pre_mlp_layernorm.bias": ((32,), None, "norm_bias"),
        "mlp.linear_fc1.weight": ((2, 64, 32), 1, "linear"),
        "mlp.linear_fc1.bias": ((2, 64), 1, "bias"),
        "mlp.linear_fc2.weight": ((32, 64), 1, "linear"),
        "mlp.linear_fc2.bias": ((32,), None, "bias"),
    }
    rest = {name: spec.shape for name, spec in specs.items() if spec.layer is None}
    assert rest == {
        "embedding.word_embeddings.weight": (128, 32),
        "embedding.position_embeddings.weight": (16, 32),
        "decoder.final_layernorm.weight": (32,),
        "decoder.final_layernorm.bias": (32,),
        "output_layer.weight": (128, 32),
    }


def test_biases_are_separable() -> None:
    config = small("--disable-bias-linear --add-qkv-bias --normalization RMSNorm")
    names = [spec.name for spec in ModelShape.from_config(config, 100).parameters()]
    assert [name for name in names if name.endswith(".bias")] == [
        f"decoder.layers.{layer}.self_attention.linear_qkv.bias" for layer in range(2)
    ]
    assert "output_layer.weight" not in names


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
def test_shards_of_all_ranks_add_up(tp: int, pp: int) -> None:
    config = preset(
        "parity",
        *f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}".split(),
    )
    shape, layout = ModelShape.from_config(config, 512), config.layout(tp * pp)
    total = 0
    for stage in range(layout.num_stages):
        for spec in shape.stage_parameters(layout, stage):
            copies = tp if spec.tp_dim is not None else 1
            total += math.prod(spec.local_shape(tp)) * copies
    assert total == shape.num_parameters


def test_a_tied_embedding_is_copied_to_the_last_stage_alone() -> None:
    config = small("--pipeline-model-parallel-size 2 --global-batch-size 2")
    shape, layout = ModelShape.from_config(config, 100), config.layout(2)
    first, last = (
        {spec.name for spec in shape.stage_parameters(layout, stage)} for stage in range(2)
    )
    assert "embedding.word_embeddings.weight" in first and "output_layer.weight" not in first
    assert "output_layer.weight" in last and "embedding.word_embeddings.weight" not in last
    one = small()
    names = [s.name for s in shape.stage_parameters(one.layout(1), 0)]
    assert "output_layer.weight" not in names and len(names) == len(shape.parameters())


EVERY_KIND = (
    "--swiglu --qk-layernorm --add-qkv-bias --add-mlp-bias --add-attention-output-bias "
    "--global-batch-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


def test_each_part_of_a_parameter_counts_on_one_rank_of_its_stage() -> None:
    config = small(f"{EVERY_KIND} --fsdp-size 2")
    shape, layout = ModelShape.from_config(config, 100), config.layout(16)
    assert layout.replicate == 2
    places = [layout.coordinates(rank) for rank in layout.groups(["replicate", "fsdp", "tp"])[1]]
    for spec in shape.parameters():
        parts = [tuple(p[axis] for axis in spec.splits) for p in places if spec.counts_at(p)]
        assert len(parts) == len(set(parts)) == layout.count(spec.splits), spec.name
    (copy,) = shape.copies()
    assert copy.copy_of == "embedding.word_embeddings.weight"
    assert not any(copy.counts_at(place) for place in places)
    untied = small(f"{EVERY_KIND} --untie-embeddings-and-output-weights")
    assert ModelShape.from_config(untied, 100).copies() == ()


def test_gradients_are_partial_where_ranks_hold_the_same_and_see_another_part() -> None:
    specs = ModelShape.from_config(small(EVERY_KIND), 100).parameters()
    for spec in specs:
        split = spec.tp_dim is not None
        heads = "q_layernorm" in spec.name or "k_layernorm" in spec.name
        assert spec.per_head == heads and not (split and heads)
        assert spec.partial_over_tp(sequence_parallel=False) == heads
        assert spec.partial_over_tp(sequence_parallel=True) != split


def test_fsdp_splits_the_first_dimension_but_of_the_fused_weight() -> None:
    specs = ModelShape.from_config(small(EVERY_KIND), 100).parameters()
    for spec in specs:
        fused = spec.name.endswith("linear_fc1.weight")
        assert spec.fsdp_dim == (2 if fused else 0), spec.name
        assert (len(spec.shape) == 3) == fused
    plain = ModelShape.from_config(small(), 100).parameters()
    assert {spec.fsdp_dim for spec in plain} == {0}


def test_fsdp_shards_round_up() -> None:
    spec = ModelShape.from_config(small("--swiglu"), 100)
    by_name = {item.name: item for item in spec.parameters()}
    fc1 = by_name["decoder.layers.0.mlp.linear_fc1.weight"]
    assert fc1.fsdp_dim == 2 and fc1.shard_numel(tp=2, fsdp=4) == 2 * 32 * 8
    norm = by_name["decoder.final_layernorm.weight"]
    assert norm.shard_numel(tp=2, fsdp=5) == 7


def test_linears_of_a_rank() -> None:
    flags = "--tensor-model-parallel-size 4 --sequence-parallel"
    config = preset("parity", *flags.split())
    linears = ModelShape.from_config(config, 512).linears(config.layout(4), 2)
    assert len(linears) == 16
    sizes = {
        item.name.removeprefix("decoder.layers.0."): (item.in_features, item.out_features)
        for item in linears[:4]
    }
    assert sizes == {
        "self_attention.linear_qkv": (128, 64),
        "self_attention.linear_proj": (32, 128),
        "mlp.linear_fc1": (128, 128),
        "mlp.linear_fc2": (64, 128),
    }
    assert {(item.tokens, item.local_tokens) for item in linears} == {(128, 32)}
    assert linears[0].hf_names[0] == "model.layers.0.self_attn.q_proj"
    assert [item.mode for item in linears[:4]] == ["column", "row", "column", "row"]


def test_a_vocabulary_that_does_not_split_is_refused() -> None:
    config = small("--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 1")
    with pytest.raises(ConfigurationError, match="101 padded to 101 .*parallel_size 4"):
        ModelShape.from_config(config, 101)
    assert ModelShape.from_config(config, 100).padded_vocab_size == 100


def test_the_padded_vocabulary_is_the_same_at_every_size() -> None:
    sizes = {
        ModelShape.from_config(small(f"--tensor-model-parallel-size {tp}"), 1000).padded_vocab_size
        for tp in (1, 2, 4)
    }
    assert sizes == {1024}


def test_vocabulary_known_from_flags() -> None:
    assert small().known_vocab_size is None
    assert small("--vocab-size 99").known_vocab_size == 99
    assert small("--vocab-size 99 --tokenizer-type NullTokenizer").known_vocab_size == 100
    assert small("--tokenizer-type ByteTokenizer").known_vocab_size == 257
