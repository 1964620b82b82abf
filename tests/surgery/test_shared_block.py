"""Which layers share one, and from which they start: exact, for every file."""

import json
import re

import numpy as np
import pytest

from recurjax.surgery.relaxed_recursive import source_layers
from recurjax.variants.relaxed_recursive_transformer.block import (
    depths_of,
    shared_layers,
)
from tests.golden.cases import golden_cases

CASES = golden_cases("relaxed_recursive_transformers/indices*.json")


@pytest.mark.parametrize("path", CASES)
def test_maps_and_sources_are_the_papers(path):
    cases = json.loads(path.read_text())
    assert cases
    for name, maps in cases.items():
        layers, loops = map(int, re.fullmatch(r"L(\d+)_B(\d+)", name).groups())
        for key, wanted in maps.items():
            if key.startswith("src_"):
                got = source_layers(key.removeprefix("src_"), layers, loops)
                assert [list(item) for item in got] == wanted, (name, key)
            else:
                assert shared_layers(layers, loops, key).tolist() == wanted, (name, key)


@pytest.mark.parametrize("sharing", ["cycle", "sequence", "cycle_rev"])
def test_each_depth_is_one_use_of_one_layer(sharing):
    order, depths = shared_layers(12, 3, sharing), depths_of(12, 3, sharing)
    assert sorted(depths.flat) == list(range(12))
    for layer in range(4):
        assert np.all(order[depths[:, layer]] == layer)
        assert np.all(np.diff(depths[:, layer]) > 0)
