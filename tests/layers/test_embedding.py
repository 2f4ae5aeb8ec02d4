"""Word and position embedding: values, an exact fp32 gradient, and padding that stays zero."""

import pytest
import torch
import torch.nn.functional as F

from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.embedding import Embedding
from megafp8.parallel.fsdp import shard_module
from tests.model.small import GPT2, LLAMA, VOCAB, layer_context, small_config, start_run

KEY = MicroBatchKey(7, 0, False, True)
TABLE = "embedding.word_embeddings.weight"


def embed(sequence_parallel: bool):
    """Output and table gradient on this tensor-parallel rank."""
    size = torch.distributed.get_world_size()
    config = small_config(
        GPT2, tensor_model_parallel_size=size, sequence_parallel=sequence_parallel and size > 1
    )
    context = layer_context(config)
    embedding = Embedding(context, True, 0.0)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(15, -1, -1).expand(2, 16)
    y = embedding(tokens, positions, KEY)
    upstream = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    rank = context.mesh.tp.rank
    y.backward(upstream.chunk(size)[rank] if config.parallel.sequence_parallel else upstream)
    words, places = embedding.word_embeddings.weight, embedding.position_embeddings.weight
    return [t.detach() for t in (y, words.grad.to_local(), places.grad.to_local())] + [
        words.data.to_local(),
        places.data.to_local(),
    ]


@pytest.mark.parametrize("size, sequence_parallel", [(1, False), (4, False), (4, True)])
def test_embedding_matches_look_up(ranks, size, sequence_parallel):
    answers = ranks.run(embed, world_size=size, sequence_parallel=sequence_parallel)
    table = torch.cat([answer[3] for answer in answers]).requires_grad_(True)
    places = answers[0][4].clone().requires_grad_(True)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    wanted = F.embedding(tokens.t(), table) + places.flip(0)[:, None]
    wanted.backward(torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1)))
    outputs = [answer[0] for answer in answers]
    if sequence_parallel:
        assert torch.equal(torch.cat(outputs), wanted)
        position_gradient = sum(answer[2] for answer in answers)  # partial sums over the ranks
    else:
        assert all(torch.equal(output, wanted) for output in outputs)
        position_gradient = answers[0][2]
    assert torch.allclose(torch.cat([answer[1] for answer in answers]), table.grad, atol=1e-6)
    assert torch.allclose(position_gradient, places.grad, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_gradient_of_a_frequent_token_is_fp32():
    """3001 needs 12 bits, bf16 has 8: any sum or cast in bf16 on the way would show."""
    config = small_config(bf16=True)
    context = layer_context(config)
    embedding = Embedding(context, False, 0.0)
    specs = context.factory.specs
    shard_module(embedding, "embedding.", specs, context.mesh, "other", torch.bfloat16)
    tokens = torch.full((1, 3008), 5)
    tokens[0, 3001:] = 7
    y = embedding(tokens, torch.zeros_like(tokens), KEY)
    assert y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    gradient = embedding.word_embeddings.weight.grad.to_local()
    assert gradient.dtype == torch.float32
    assert (gradient[5] == 3001).all() and (gradient[7] == 7).all()
    assert not gradient[torch.arange(128)[:, None].ne(torch.tensor([5, 7])).all(1)].any()


def padding_after_training(tied: bool):
    """Padding rows of this rank's tables after steps with decay, and how far others moved."""
    changes = {
        "untie_embeddings_and_output_weights": not tied,
        "tensor_model_parallel_size": torch.distributed.get_world_size(),
        "weight_decay": 0.1,
        "bf16": True,
    }
    run = start_run(small_config(LLAMA, num_query_groups=4, **changes))
    before = run.shards()
    run.train(range(3))
    after = run.shards()
    tables = {name for name in (TABLE, "output_layer.weight") if name in after}
    first = run.mesh.tp_rank * (128 // run.mesh.tp.size)
    valid = min(max(VOCAB - first, 0), 128 // run.mesh.tp.size)
    return {
        name: (
            after[name][valid:].abs().sum().item(),
            len(after[name]) - valid,
            (after[name] - before[name])[:valid].abs().amax(-1).min().item(),
        )
        for name in tables
    }


@pytest.mark.parametrize("tied, size", [(True, 1), (False, 1), (False, 4)])
def test_padding_rows_stay_zero(ranks, tied, size):
    answers = ranks.run(padding_after_training, world_size=size, tied=tied)
    for table in [TABLE] if tied else [TABLE, "output_layer.weight"]:
        assert sum(answer[table][1] for answer in answers) == 28, "rows beyond the vocabulary"
        assert all(answer[table][0] == 0.0 for answer in answers)
    moved = [answer[TABLE if tied else "output_layer.weight"][2] for answer in answers]
    assert min(moved) > 0.0, "the rows of the vocabulary train"
