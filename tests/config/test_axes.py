"""Places, groups, order and texts of ranks follow from the table of axes, whatever its rows are."""

import math

import pytest

from megafp8.config.axes import AXES, DEGREES, GIVEN, RANK_ORDER, axes_of, scale_axes
from megafp8.config.layout import Layout

# A size of its own for each axis, so that no two are mistaken for each other.
SIZES = dict(zip([axis.name for axis in AXES], (2, 3, 4, 5, 1, 7), strict=False))
GRID = Layout(layers_per_stage=1, sizes=SIZES)
GROUPS = sorted(set().union(*(axis.groups for axis in AXES)))


def test_the_table_names_each_axis_and_place_once() -> None:
    for values in (
        [axis.name for axis in AXES],
        [axis.field for axis in AXES],
        [axis.order for axis in AXES],
    ):
        assert len(set(values)) == len(AXES)
    assert [axis.name for axis in AXES if axis not in GIVEN] == ["fsdp", "replicate"]
    assert axes_of("dp") == ("replicate", "fsdp"), "data parallel counts shards fastest"


def test_ranks_are_numbered_in_the_tables_order() -> None:
    strides, stride = {}, 1
    for axis in sorted(AXES, key=lambda axis: axis.order):
        strides[axis.name] = stride
        stride *= SIZES[axis.name]
    assert GRID.world_size == stride == math.prod(SIZES.values())
    places = [GRID.coordinates(rank) for rank in range(GRID.world_size)]
    for rank, place in enumerate(places):
        assert place.keys() == SIZES.keys()
        assert all(0 <= place[axis] < size for axis, size in SIZES.items())
        assert rank == sum(place[axis] * strides[axis] for axis in SIZES)
        assert GRID.index(place, RANK_ORDER) == rank


@pytest.mark.parametrize("group", GROUPS)
def test_ranks_of_a_group_differ_in_the_axes_that_name_it(group: str) -> None:
    own = {axis.name for axis in AXES if group in axis.groups}
    lists = GRID.groups(axes_of(group))
    assert sorted(rank for ranks in lists for rank in ranks) == list(range(GRID.world_size))
    for ranks in lists:
        places = [GRID.coordinates(rank) for rank in ranks]
        assert ranks == sorted(ranks) and len(ranks) == math.prod(SIZES[axis] for axis in own)
        for axis in SIZES:
            found = {place[axis] for place in places}
            assert found == (set(range(SIZES[axis])) if axis in own else {places[0][axis]}), axis
        assert [GRID.index(place, own) for place in places] == list(range(len(ranks)))


def test_scales_of_a_stages_ranks_have_a_place_each() -> None:
    rows, columns = GRID.scale_ranks
    assert set(scale_axes(0) + scale_axes(1)) <= set(axes_of("stage"))
    for ranks in GRID.groups(axes_of("stage")):
        places = {GRID.scale_place(GRID.coordinates(rank)) for rank in ranks}
        assert places == {(row, column) for row in range(rows) for column in range(columns)}


def test_an_axis_of_one_rank_is_named_only_where_it_always_has_a_group() -> None:
    for axis in AXES:
        one = Layout(layers_per_stage=1, sizes={**SIZES, axis.name: 1})
        two = Layout(layers_per_stage=1, sizes={**SIZES, axis.name: 2})
        assert (axis.name in one.grid) == axis.alone and axis.name in two.grid
        assert (axis.name in one.degrees) == axis.alone and axis.name in two.degrees
    assert list(GRID.degrees) == [name for name in DEGREES if name in (*GRID.grid, "vp")]
