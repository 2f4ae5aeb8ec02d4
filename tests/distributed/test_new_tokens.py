"""Tokens that a checkpoint has not: told, and started at the mean of the others at any layout."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.convert.run import ConvertOptions, convert
from tests.support.layouts import PARITY, PRECISIONS, SP, degrees, start_training
from tests.support.limits import slow
from tests.support.ranks import RankError, Ranks

SMALL = (*PARITY, *PRECISIONS["fp32"], "--num-layers", "2", "--global-batch-size", "8")
TIED = ("--untie-embeddings-and-output-weights", "false")
MEAN = "--new-tokens-from-mean"
untied = pytest.mark.parametrize("reference", [()], ids=["untied"], indirect=True)
tied = pytest.mark.parametrize("reference", [TIED], ids=["tied"], indirect=True)
TRAINED, NEW, ROWS = 501, 511, 512  # NullTokenizer adds one to --vocab-size


def train(flags: tuple[str, ...], tokens: int, save: str) -> str:
    training = start_training((*SMALL, "--vocab-size", str(tokens - 1), *flags))
    training.iterate(2)
    return training.save(save)


def tables(flags: tuple[str, ...], load: str, tokens: int = NEW) -> dict[str, Tensor]:
    """This rank's whole tables after loading, and the loss of the next iteration."""
    command = (*SMALL, "--vocab-size", str(tokens - 1), "--load", load, *flags)
    training = start_training(command, load)
    full = training.full_parameters()
    found = {name: full[name].clone() for name in (EMBEDDING, OUTPUT) if name in full}
    return {**found, "loss": torch.tensor(training.one_step().loss)}


@dataclass
class Reference:
    """A checkpoint of TRAINED tokens, and what one rank makes of it.

    Attributes:
        load: its folder.
        before: `tables` of the same tokens.
        grown: `tables` with new tokens.
    """

    load: str
    before: dict[str, Tensor]
    grown: dict[str, Tensor]


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    flags, save = request.param, str(tmp_path_factory.mktemp("trained"))
    load = ranks.run(train, world_size=1, flags=flags, tokens=TRAINED, save=save)[0]
    before = ranks.run(tables, world_size=1, flags=flags, load=load, tokens=TRAINED)[0]
    grown = ranks.run(tables, world_size=1, flags=(*flags, MEAN), load=load)[0]
    return Reference(load, before, grown)


@untied
def test_new_tokens_start_at_the_mean_of_the_others(reference: Reference) -> None:
    for name in (EMBEDDING, OUTPUT):
        table, trained = reference.grown[name], reference.before[name][:TRAINED]
        assert table.shape[0] == ROWS and torch.equal(table[:TRAINED], trained)
        mean = trained.double().mean(0)
        assert mean.abs().max() > 1e-5, "else this proves nothing"
        difference = (table[TRAINED:NEW].double() - mean).abs().max()
        assert difference < 2.0**-32 + 2.0**-24 * mean.abs().max()
        assert not table[NEW:].any(), "what no token has stays padding"


def compare(ranks: Ranks, reference: Reference, size: int, *flags: str) -> None:
    found = ranks.run(tables, world_size=size, flags=(*flags, MEAN), load=reference.load)
    assert {name for rank in found for name in rank} == {EMBEDDING, OUTPUT, "loss"}
    for rank in found:
        for name in rank.keys() - {"loss"}:
            assert torch.equal(rank[name], reference.grown[name])
        assert torch.allclose(rank["loss"], reference.grown["loss"], rtol=1e-5)


@untied
@pytest.mark.parametrize(
    "flags",
    [
        degrees(2, 2, SP),
        slow(degrees(2, 1, SP)),
        degrees(1, 1, "--fsdp-size", "2"),
    ],
    ids=["tp2pp2", "tp2fsdp2", "hsdp"],
)
def test_they_are_equal_at_any_layout(
    ranks: Ranks, reference: Reference, flags: tuple[str, ...]
) -> None:
    compare(ranks, reference, 4, *flags)


@tied
def test_both_copies_of_a_tied_embedding_start_equal(ranks: Ranks, reference: Reference) -> None:
    compare(ranks, reference, 2, *degrees(1, 2), *TIED)


@untied
def test_without_the_flag_new_tokens_are_told_and_stay_zero(
    ranks: Ranks, reference: Reference
) -> None:
    found, told = ranks.run(told_at_load, world_size=1, load=reference.load)[0]
    assert not found[EMBEDDING][TRAINED:].any() and not found[OUTPUT][TRAINED:].any()
    (line,) = told
    assert "has 501 tokens, this run 511: 10 new ones start at rows of zeros" in line
    assert MEAN in line
    assert ranks.run(told_at_load, world_size=1, load=reference.load, tokens=TRAINED)[0][1] == []


def told_at_load(load: str, tokens: int = NEW) -> tuple[dict[str, Tensor], list[str]]:
    lines: list[str] = []
    logger, handler = logging.getLogger("megafp8.train.new_tokens"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        return tables((), load, tokens), lines
    finally:
        logger.removeHandler(handler)


@untied
@pytest.mark.parametrize(
    ("tokens", "advice"),
    [
        (600, "--from megafp8 --to megafp8 --make-vocab-size-divisible-by 640 makes room"),
        (300, "rows, this run's 300 tokens 384; give --make-vocab-size-divisible-by 512"),
    ],
)
def test_another_number_of_rows_is_refused_with_what_to_give(
    ranks: Ranks, reference: Reference, tokens: int, advice: str
) -> None:
    with pytest.raises(RankError, match=advice):
        ranks.run(tables, world_size=1, flags=(), load=reference.load, tokens=tokens)


@untied
def test_rows_that_were_given_load(ranks: Ranks, reference: Reference, tmp_path: Path) -> None:
    fewer = ("--make-vocab-size-divisible-by", "512")
    ranks.run(tables, world_size=1, flags=fewer, load=reference.load, tokens=300)
    options = ConvertOptions(
        "megafp8",
        "megafp8",
        Path(reference.load),
        tmp_path / "wide",
        make_vocab_size_divisible_by=640,
    )
    convert(options)
    more = ("--make-vocab-size-divisible-by", "640", "--finetune", MEAN)
    checkpoint = str(tmp_path / "wide/iter_0000000")
    found = ranks.run(tables, world_size=1, flags=more, load=checkpoint, tokens=600)[0]
    assert found[EMBEDDING].shape[0] == 640
    assert torch.equal(found[EMBEDDING][TRAINED], found[EMBEDDING][599])
    assert found[EMBEDDING][599].any() and not found[EMBEDDING][600:].any()
