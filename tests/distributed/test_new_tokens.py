"""Tokens that a checkpoint has not: told, and started at the mean of the others at any layout."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.convert.run import ConvertOptions, convert
from megafp8.config.shape import EMBEDDING, OUTPUT
from tests.support.layouts import PARITY, PRECISIONS, SP, degrees, start_training
from tests.support.ranks import RankError, Ranks

SMALL = (*PARITY, *PRECISIONS["fp32"], "--num-layers", "2", "--global-batch-size", "8")
TIED = ("--untie-embeddings-and-output-weights", "false")
MEAN = "--new-tokens-from-mean"
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


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """A checkpoint of TRAINED tokens with tables of their own (False) and tied ones (True)."""
    folder = tmp_path_factory.mktemp("trained")
    return {
        tied: ranks.run(
            train,
            world_size=1,
            flags=TIED if tied else (),
            tokens=TRAINED,
            save=str(folder / str(tied)),
        )[0]
        for tied in (False, True)
    }


@pytest.mark.parametrize(
    ("size", "flags", "tied"),
    [
        (1, degrees(), False),
        (4, degrees(2, 2, SP), False),
        (4, degrees(2, 1, SP), False),
        (4, degrees(1, 1, "--fsdp-size", "2"), False),
        (1, degrees(), True),
        (2, degrees(1, 2), True),
    ],
    ids=["one", "tp2pp2", "tp2fsdp2", "hsdp", "one-tied", "pp2-tied"],
)
def test_new_tokens_start_at_the_mean_at_any_layout(
    ranks: Ranks, saved: dict[bool, str], size: int, flags: tuple[str, ...], tied: bool
) -> None:
    more = TIED if tied else ()
    load = saved[tied]
    before = ranks.run(tables, world_size=1, flags=more, load=load, tokens=TRAINED)[0]
    alone = ranks.run(tables, world_size=1, flags=(*more, MEAN), load=load)[0]
    found = ranks.run(tables, world_size=size, flags=(*flags, *more, MEAN), load=load)
    names = set()
    for rank in found:
        for name in rank.keys() - {"loss"}:
            names.add(name)
            table, old = rank[name], before[name]
            assert table.shape[0] == ROWS
            assert torch.equal(table, alone[name])
            assert torch.equal(table[:TRAINED], old[:TRAINED])
            mean = old[:TRAINED].double().mean(0)
            assert mean.abs().max() > 1e-5, "else this proves nothing"
            difference = (table[TRAINED:NEW].double() - mean).abs().max()
            assert difference < 2.0**-32 + 2.0**-24 * mean.abs().max()
            assert not table[NEW:].any(), "what no token has stays padding"
        assert torch.allclose(rank["loss"], alone["loss"], rtol=1e-5)
    assert names >= ({EMBEDDING} if tied else {EMBEDDING, OUTPUT})


def test_without_the_flag_new_tokens_are_told_and_stay_zero(
    ranks: Ranks, saved: dict[bool, str]
) -> None:
    found, told = ranks.run(told_at_load, world_size=1, load=saved[False])[0]
    assert not found[EMBEDDING][TRAINED:].any() and not found[OUTPUT][TRAINED:].any()
    (line,) = told
    assert "has 501 tokens, this run 511: 10 new ones start at rows of zeros" in line
    assert MEAN in line
    assert ranks.run(told_at_load, world_size=1, load=saved[False], tokens=TRAINED)[0][1] == []


def told_at_load(load: str, tokens: int = NEW) -> tuple[dict[str, Tensor], list[str]]:
    lines: list[str] = []
    logger, handler = logging.getLogger("megafp8.train.new_tokens"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        return tables((), load, tokens), lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("tokens", "advice"),
    [
        (600, "--from megafp8 --to megafp8 --make-vocab-size-divisible-by 640 makes room"),
        (300, "rows, this run's 300 tokens 384; give --make-vocab-size-divisible-by 512"),
    ],
)
def test_another_number_of_rows_is_refused_with_what_to_give(
    ranks: Ranks, saved: dict[bool, str], tokens: int, advice: str
) -> None:
    with pytest.raises(RankError, match=advice):
        ranks.run(tables, world_size=1, flags=(), load=saved[False], tokens=tokens)


def test_rows_that_were_given_load(ranks: Ranks, saved: dict[bool, str], tmp_path: Path) -> None:
    fewer = ("--make-vocab-size-divisible-by", "512")
    ranks.run(tables, world_size=1, flags=fewer, load=saved[False], tokens=300)
    options = ConvertOptions(
        "megafp8",
        "megafp8",
        Path(saved[False]),
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
